// Answers are marked by keys: each button has one, and r opens the rest of the task. A key that is held marks one answer.

import { onKey } from "./keys.js";

for (const button of document.querySelectorAll("button[data-key]")) {
  if (!(button instanceof HTMLButtonElement)) continue;
  onKey(button.dataset.key ?? "", (event) => {
    if (!event.repeat) button.click();
  });
}
onKey("r", () => {
  const rest = document.getElementById("rest");
  if (rest instanceof HTMLDetailsElement) rest.open = !rest.open;
});
