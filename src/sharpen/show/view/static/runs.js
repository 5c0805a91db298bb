// The table of runs: two chosen runs can be compared.

/** Lets the button say whether enough runs are chosen. */
export function startRuns() {
  const button = document.getElementById("compare");
  if (!(button instanceof HTMLButtonElement)) return;
  const update = () => {
    const chosen = document.querySelectorAll("input[name=run]:checked");
    button.disabled = chosen.length < 2;
    button.textContent = chosen.length < 2 ? `Choose ${chosen.length ? "one more" : "two"} to compare` : "Compare";
    for (const box of document.querySelectorAll("input[name=run]")) {
      box.closest("tr")?.classList.toggle("chosen", box instanceof HTMLInputElement && box.checked);
    }
  };
  for (const box of document.querySelectorAll("input[name=run]")) {
    if (box instanceof HTMLInputElement) box.onchange = update;
  }
  update();
}
