// The switch between light and dark. theme.js applies a stored choice before the first paint.

/**
 * Shows the switch; calls `changed` whenever the colours are others.
 * @param {() => void} changed
 */
export function startTheme(changed) {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", changed);
  if (!button) return;
  button.hidden = false;
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    try {
      localStorage.setItem("sharpen-theme", root.dataset.theme);
    } catch {
      // no storage: the choice lasts for this page
    }
    changed();
  });
}
