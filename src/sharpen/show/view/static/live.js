// Changes. The server's page is the authority: when something changed, the page is asked for once more, and the parts
// marked `data-live` that differ are replaced. Focus, place and what was opened or chosen stay.

/** @typedef {(root: ParentNode) => void} Enliven */

/** What the server last wrote into each part, by its id. @type {Map<string, string>} */
const written = new Map();
/** The request that is under way: a later one replaces it. @type {AbortController | null} */
let asking = null;

const PAUSE_MS = 1000;

/**
 * Follows the links and forms that change a part of the page without leaving it.
 * @param {Enliven} enliven
 */
export function startSwaps(enliven) {
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest("a[data-swap]") : null;
    if (!(link instanceof HTMLAnchorElement) || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    void swap(link.href, enliven);
  });
  document.addEventListener("input", (event) => {
    const form = event.target instanceof Element ? event.target.closest("form[data-filter]") : null;
    if (form instanceof HTMLFormElement) void swap(addressOf(form), enliven);
  });
}

/** @param {HTMLFormElement} form */
function addressOf(form) {
  const address = new URL(form.action, location.href);
  for (const [name, value] of new FormData(form)) address.searchParams.set(name, String(value));
  return address.href;
}

/**
 * @param {string} address
 * @param {Enliven} enliven
 */
async function swap(address, enliven) {
  if (await refresh(address, enliven)) history.replaceState(null, "", address);
}

/**
 * Follows the changes of what the page shows.
 * @param {Enliven} enliven
 */
export function follow(enliven) {
  const address = document.body.dataset.events;
  if (!address) return;
  const source = new EventSource(address);
  const sign = document.getElementById("following");
  let waiting = false;
  let missed = false;
  const update = async () => {
    if (document.hidden) {
      missed = true;
      return;
    }
    if (waiting) return;
    waiting = true;
    await new Promise((done) => setTimeout(done, PAUSE_MS));
    waiting = false;
    missed = false;
    await refresh(location.href, enliven);
  };
  source.addEventListener("changed", () => {
    if (sign) sign.hidden = false;
    void update();
  });
  source.addEventListener("error", () => {
    if (sign) sign.hidden = true;
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && missed) void update();
  });
  addEventListener("pagehide", () => source.close());
}

/**
 * Asks again and again while a part of the page is still being made (`data-pending`).
 * @param {Enliven} enliven
 * @param {number} failures how often there was no answer, one after the other
 */
export function awaitPending(enliven, failures = 0) {
  if (failures > 5 || !document.querySelector("[data-pending]")) return;
  setTimeout(async () => {
    const came = document.hidden || (await refresh(location.href, enliven));
    awaitPending(enliven, came ? 0 : failures + 1);
  }, PAUSE_MS);
}

/**
 * Asks for a page and puts its parts in the place of ours. Returns whether it came.
 * @param {string} address
 * @param {Enliven} enliven
 */
async function refresh(address, enliven) {
  asking?.abort();
  asking = new AbortController();
  try {
    const response = await fetch(address, { signal: asking.signal, headers: { Accept: "text/html" } });
    if (!response.ok) return false;
    replaceParts(new DOMParser().parseFromString(await response.text(), "text/html"), enliven);
    return true;
  } catch {
    return false; // the server has gone, or a later request came first: what is shown stays
  }
}

/**
 * @param {Document} fresh
 * @param {Enliven} enliven
 */
function replaceParts(fresh, enliven) {
  const place = firstVisible();
  for (const part of document.querySelectorAll("[data-live][id]")) {
    const other = fresh.getElementById(part.id);
    if (!other || other.innerHTML === written.get(part.id)) continue;
    written.set(part.id, other.innerHTML);
    replaceOne(part, other);
    enliven(part);
  }
  if (place && scrollY > 0) scrollBy(0, place.part.getBoundingClientRect().top - place.top);
}

/**
 * @param {Element} part
 * @param {Element} other
 */
function replaceOne(part, other) {
  const focused = document.activeElement;
  const focusId = focused && part.contains(focused) ? focused.id : "";
  const opened = new Map([...part.querySelectorAll("details[id]")].map((fold) => [fold.id, fold.hasAttribute("open")]));
  const ticked = new Set([...part.querySelectorAll("input:checked[id]")].map((box) => box.id));
  part.replaceChildren(...other.childNodes);
  for (const fold of part.querySelectorAll("details[id]")) {
    const wasOpen = opened.get(fold.id);
    if (wasOpen !== undefined) fold.toggleAttribute("open", wasOpen);
  }
  for (const box of part.querySelectorAll("input[id]")) {
    if (box instanceof HTMLInputElement && ticked.has(box.id)) box.checked = true;
  }
  if (focusId) document.getElementById(focusId)?.focus({ preventScroll: true });
}

/** The part at the top of the window, which must not move. */
function firstVisible() {
  for (const part of document.querySelectorAll("[data-live][id]")) {
    const box = part.getBoundingClientRect();
    if (box.bottom > 0) return { part, top: box.top };
  }
  return null;
}

for (const part of document.querySelectorAll("[data-live][id]")) written.set(part.id, part.innerHTML);
