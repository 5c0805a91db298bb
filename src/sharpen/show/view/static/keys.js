// The keyboard: j and k through the rows or cards of a page, Enter opens one, / goes to the search, u goes up.

/** @type {Map<string, (event: KeyboardEvent) => void>} */
const actions = new Map([
  ["j", () => move(1)],
  ["k", () => move(-1)],
  ["/", () => visible(document.querySelectorAll("[data-search]"))[0]?.focus()],
  ["u", () => visible(document.querySelectorAll("[data-up]"))[0]?.click()],
  ["?", showKeys],
]);

/**
 * Adds a key of a page. Its line in the dialog of keys is the page's own (`more_keys` in base.html).
 * @param {string} key
 * @param {(event: KeyboardEvent) => void} action
 */
export function onKey(key, action) {
  actions.set(key, action);
}

/** Listens to the keyboard. */
export function startKeys() {
  const button = document.getElementById("keys-open");
  if (button) {
    button.hidden = false;
    button.addEventListener("click", showKeys);
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const target = event.target instanceof HTMLElement ? event.target : document.body;
    if (isTyping(target)) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const action = event.key === "Enter" && target.matches("[data-item]") ? () => open(target) : actions.get(event.key);
    if (!action) return;
    event.preventDefault();
    action(event);
  });
}

/** @param {HTMLElement} element */
function isTyping(element) {
  if (element.isContentEditable || element.matches("textarea, select")) return true;
  return element instanceof HTMLInputElement && !["checkbox", "radio", "button", "submit"].includes(element.type);
}

/**
 * The elements that can be seen: not in a closed section.
 * @param {NodeListOf<Element>} elements
 * @returns {HTMLElement[]}
 */
function visible(elements) {
  return [...elements].flatMap((element) => (element instanceof HTMLElement && element.offsetParent !== null ? [element] : []));
}

/** @param {number} by */
function move(by) {
  const items = visible(document.querySelectorAll("[data-item]"));
  if (!items.length) return;
  const here = items.findIndex((item) => item.contains(document.activeElement));
  const first = by > 0 ? 0 : items.length - 1;
  const next = items[here < 0 ? first : Math.min(items.length - 1, Math.max(0, here + by))];
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

/** @param {HTMLElement} item */
function open(item) {
  const link = item.matches("a") ? item : item.querySelector("[data-open]");
  if (link instanceof HTMLElement) link.click();
}

function showKeys() {
  const dialog = document.getElementById("keys");
  if (dialog instanceof HTMLDialogElement) dialog.showModal();
}
