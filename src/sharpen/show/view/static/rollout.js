// A rollout's page: messages or tokens, the colours of tokens, the facts of one token, copies, notes, keys.

import { onKey } from "./keys.js";

/**
 * @typedef {{text: string, ids: number[], logprobs: number[], versions: number[], entropies: number[],
 *   ratios: number[], clipped: boolean, advantage: number | null, weight: number | null}} Token
 * @typedef {{call: number, context: [string, string], context_ids: [number, number], forked_at: number | null,
 *   reason: string, tokens: Token[], problem: string}} Tokens
 * @typedef {"advantage" | "logprob" | "entropy" | "ratio" | "weight" | "version"} Measure
 */

/** The most characters of what is new in a prompt that are shown before someone asks for all. */
const CONTEXT = 600;
const SHADES = 10;
/** What is said if no token has the number. */
const NOTHING = {
  advantage: "no token of this rollout carried loss",
  weight: "no token of this rollout carried loss",
  entropy: "no entropy of this rollout is recorded",
  ratio: "no ratio of this rollout is recorded",
  logprob: "",
  version: "",
};

/** What is said if all numbers are in the middle. @type {{[measure: string]: string}} */
const MIDDLE = {
  advantage: "all advantages are 0: the rewards of its group are equal",
  ratio: "all ratios are 1, to three digits: the weights had not moved",
};

/** @type {Map<HTMLElement, Tokens>} */
const loaded = new Map();
/** @type {Measure} */
let measure = "advantage";

const views = document.getElementById("view");
const scale = document.getElementById("scale");
const facts = document.getElementById("token");
const field = document.getElementById("measure-field");

/**
 * The number that a token is coloured by; of several in one piece of text the first. Of a ratio it is the logarithm.
 * @param {Token} token
 */
function valueOf(token) {
  if (measure === "advantage") return token.advantage;
  if (measure === "weight") return token.weight;
  if (measure === "ratio") return token.ratios.length > 0 ? Math.log(token.ratios[0]) : null;
  const numbers = { logprob: token.logprobs, entropy: token.entropies, version: token.versions }[measure];
  return numbers[0] ?? null;
}

/** Whether the numbers have a middle. */
function goesBothWays() {
  return measure === "advantage" || measure === "ratio";
}

/** The largest size of the numbers shown, and the smallest and largest of them. */
function range() {
  const values = [...loaded.values()].flatMap((tokens) => tokens.tokens.flatMap((token) => valueOf(token) ?? []));
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return { low, high, size: Math.max(Math.abs(low), Math.abs(high)) };
}

/**
 * The class of a token's colour. Advantages go both ways from 0, ratios from 1; the others from the lowest to the highest.
 * @param {number | null} value
 * @param {{low: number, high: number, size: number}} over
 */
function shadeOf(value, over) {
  if (value === null) return "";
  if (goesBothWays()) {
    const strength = over.size > 0 ? Math.ceil((4 * Math.abs(value)) / over.size) : 0;
    return strength === 0 ? "" : `${value > 0 ? "up" : "down"}-${strength}`;
  }
  const share = over.high > over.low ? (value - over.low) / (over.high - over.low) : 0.5;
  return `s${Math.round(SHADES * (measure === "logprob" ? 1 - share : share))}`;
}

/** Colours every token that is there, and says what the colours mean. */
function colour() {
  const over = range();
  for (const [place, tokens] of loaded) {
    place.querySelectorAll("b").forEach((element, number) => {
      element.className = shadeOf(valueOf(tokens.tokens[number]), over);
      element.classList.toggle("clipped", measure === "ratio" && tokens.tokens[number].clipped);
    });
  }
  if (!scale) return;
  scale.replaceChildren();
  if (!Number.isFinite(over.low)) {
    scale.append(loaded.size > 0 ? NOTHING[measure] : "");
    return;
  }
  if (goesBothWays() && over.size === 0) scale.append(element("span", MIDDLE[measure] ?? ""));
  else addScale(scale, over);
  if (document.querySelector(".strip .clipped")) scale.append(element("span", "clipped", "clipped"));
}

/**
 * Shows the colours from the lowest to the highest number.
 * @param {HTMLElement} place
 * @param {{low: number, high: number, size: number}} over
 */
function addScale(place, over) {
  const [low, high] = goesBothWays() ? [-over.size, over.size] : [over.low, over.high];
  const classes = goesBothWays()
    ? ["down-4", "down-3", "down-2", "down-1", "up-1", "up-2", "up-3", "up-4"]
    : [0, 2, 4, 6, 8, 10].map((number) => `s${measure === "logprob" ? SHADES - number : number}`);
  place.append(
    element("span", short(measure === "ratio" ? Math.exp(low) : low)),
    ...classes.map((name) => Object.assign(document.createElement("i"), { className: name })),
    element("span", short(measure === "ratio" ? Math.exp(high) : high)),
  );
}

/** @param {number} value */
function short(value) {
  return Number.isInteger(value) ? String(value) : value.toPrecision(3);
}

/**
 * @param {string} tag
 * @param {string} text
 * @param {string} [className]
 */
function element(tag, text, className = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}

/**
 * Writes the tokens of a call: its prompt in grey, a mark where it forked, then what was sampled.
 * @param {HTMLElement} place
 * @param {Tokens} tokens
 */
function write(place, tokens) {
  const strip = element("div", "", "strip");
  const [before, fresh] = tokens.context;
  strip.append(contextOf(before, 0));
  if (tokens.forked_at !== null) strip.append(element("span", `⑂ ${tokens.reason}`, "fork"), "\n");
  strip.append(contextOf(fresh, CONTEXT));
  tokens.tokens.forEach((token, number) => {
    const shown = element("b", token.text.replaceAll("\n", "⏎\n") || "∅");
    shown.tabIndex = number === 0 ? 0 : -1;
    strip.append(shown);
  });
  place.replaceChildren(strip);
  if (tokens.problem) place.prepend(element("p", tokens.problem, "notice"));
  loaded.set(place, tokens);
  colour();
}

/**
 * A prompt's text in grey: its end, and a button for the rest.
 * @param {string} text
 * @param {number} most
 */
function contextOf(text, most) {
  const cut = Math.max(0, text.length - most);
  const grey = element("span", text.slice(cut), "context");
  if (cut === 0) return grey;
  const more = element("button", `… ${cut} characters before`, "small");
  more.addEventListener("click", () => {
    grey.textContent = text;
  });
  grey.prepend(more, "\n");
  return grey;
}

/**
 * Shows messages or tokens. Tokens of a call are asked for when it comes into view.
 * @param {string} view
 */
function show(view) {
  const isTokens = view === "tokens";
  views?.querySelectorAll("button").forEach((button) => {
    button.setAttribute("aria-pressed", String(button.dataset.view === view));
  });
  if (field) field.hidden = !isTokens;
  if (scale) scale.hidden = !isTokens;
  for (const place of document.querySelectorAll(".as-messages")) if (place instanceof HTMLElement) place.hidden = isTokens;
  for (const place of document.querySelectorAll(".as-tokens")) {
    if (!(place instanceof HTMLElement)) continue;
    place.hidden = !isTokens;
    if (isTokens) watcher.observe(place);
  }
  if (facts) facts.hidden = true;
  const address = new URL(location.href);
  if (isTokens) address.searchParams.set("view", "tokens");
  else address.searchParams.delete("view");
  history.replaceState(null, "", address);
}

const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting || !(target instanceof HTMLElement)) continue;
    watcher.unobserve(target);
    if (!loaded.has(target)) void load(target);
  }
}, { rootMargin: "400px" });

/** @param {HTMLElement} place */
async function load(place) {
  place.textContent = "…";
  const answer = await fetch(place.dataset.tokens ?? "");
  if (answer.ok) write(place, await answer.json());
  else place.replaceChildren(element("p", `The tokens could not be read: ${await answer.text()}`, "notice"));
}

/**
 * Says all numbers of a token.
 * @param {EventTarget | null} target
 */
function tell(target) {
  if (!facts || !(target instanceof HTMLElement) || target.tagName !== "B") return;
  const place = target.closest(".as-tokens");
  if (!(place instanceof HTMLElement)) return;
  const token = loaded.get(place)?.tokens[[...place.querySelectorAll("b")].indexOf(target)];
  if (!token) return;
  const chances = token.logprobs.map((logprob) => `${logprob.toFixed(4)} (${(100 * Math.exp(logprob)).toPrecision(3)}%)`);
  const numbers = [
    `id ${token.ids.join(" ")}`,
    `log probability ${chances.join(" ")}`,
    token.entropies.length > 0 ? `entropy ${token.entropies.map(short).join(" ")}` : "",
    token.ratios.length > 0 ? `ratio ${token.ratios.map(short).join(" ")}` : "",
    token.clipped ? "clipped" : token.ratios.length > 0 ? "not clipped" : "",
    `version ${[...new Set(token.versions)].join(" ")}`,
    token.advantage === null ? "no loss" : `advantage ${short(token.advantage)}`,
    token.weight === null ? "" : `weight ${short(token.weight)}`,
  ];
  facts.replaceChildren(element("code", JSON.stringify(token.text)), ` ${numbers.filter(Boolean).join(" · ")}`);
  facts.hidden = false;
}

/**
 * Goes from token to token.
 * @param {KeyboardEvent} event
 */
function walk(event) {
  const here = event.target;
  if (!(here instanceof HTMLElement) || here.tagName !== "B" || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  const tokens = [...(here.closest(".as-tokens")?.querySelectorAll("b") ?? [])];
  const next = tokens[tokens.indexOf(here) + (event.key === "ArrowRight" ? 1 : -1)];
  if (!next) return;
  event.preventDefault();
  here.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function startViews() {
  if (!views) return;
  views.hidden = false;
  views.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("button") : null;
    if (button?.dataset.view) show(button.dataset.view);
  });
  const choice = document.getElementById("measure");
  choice?.addEventListener("change", () => {
    if (choice instanceof HTMLSelectElement) measure = /** @type {Measure} */ (choice.value);
    colour();
  });
  document.addEventListener("mouseover", (event) => tell(event.target));
  document.addEventListener("focusin", (event) => tell(event.target));
  document.addEventListener("keydown", walk);
  if (new URL(location.href).searchParams.get("view") === "tokens") show("tokens");
}

function startCopies() {
  for (const button of document.querySelectorAll("[data-copy]")) {
    if (!(button instanceof HTMLElement) || !navigator.clipboard) continue;
    button.hidden = false;
    const label = button.textContent;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy ?? "")?.textContent ?? "");
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = label), 1500);
    });
  }
}

function startNote() {
  const form = document.querySelector("form.note");
  const kept = document.getElementById("kept");
  if (!(form instanceof HTMLFormElement) || !kept) return;
  form.addEventListener("input", () => (kept.textContent = ""));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = new URLSearchParams([...new FormData(form)].map(([name, value]) => [name, String(value)]));
    const answer = await fetch(form.action, { method: "POST", body, headers: { accept: "application/json" } });
    kept.textContent = answer.ok ? "kept" : await answer.text();
  });
}

function follow(/** @type {string} */ rel) {
  const link = document.querySelector(`a[rel="${rel}"]`);
  if (link instanceof HTMLAnchorElement) location.href = link.href + location.search;
}

startViews();
startCopies();
startNote();
onKey("n", () => follow("next"));
onKey("p", () => follow("prev"));
onKey("t", () => show(new URL(location.href).searchParams.get("view") === "tokens" ? "messages" : "tokens"));
