// The chosen theme, before the first paint: a script of its own, since modules run later.
(function () {
  try {
    const chosen = localStorage.getItem("sharpen-theme");
    if (chosen === "light" || chosen === "dark") {
      document.documentElement.dataset.theme = chosen;
    }
  } catch {
    // no storage: the system's theme
  }
})();
