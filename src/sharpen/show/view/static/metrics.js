// Every number: the search over the metrics of a run, and the whole curve of one that is opened.

import { drawSeries } from "./charts.js";

/** @typedef {import("./charts.js").Series} Series */

/**
 * @param {ParentNode} root
 */
export function startMetrics(root) {
  const search = document.getElementById("metric-search");
  if (search instanceof HTMLInputElement) {
    search.hidden = false;
    search.oninput = () => filter(search.value);
    if (search.value) filter(search.value);
  }
  for (const link of root.querySelectorAll("a[data-metric-open]")) {
    if (!(link instanceof HTMLAnchorElement)) continue;
    link.setAttribute("role", "button");
    link.setAttribute("aria-expanded", "false");
    link.addEventListener("click", (event) => {
      event.preventDefault();
      void toggle(link);
    });
  }
}

/** @param {string} text */
function filter(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const group of document.querySelectorAll("#metrics details")) {
    let found = 0;
    for (const card of group.querySelectorAll("[data-metric]")) {
      const name = (card.getAttribute("data-metric") ?? "").toLowerCase().replaceAll("_", " ");
      const isFound = words.every((word) => name.includes(word.replaceAll("_", " ")));
      card.toggleAttribute("hidden", !isFound);
      found += Number(isFound);
    }
    group.toggleAttribute("hidden", !found);
    if (words.length && found) group.setAttribute("open", "");
  }
}

/** @param {HTMLAnchorElement} link */
async function toggle(link) {
  const card = link.closest("[data-metric]");
  if (!card) return;
  const place = card.querySelector(".live-chart");
  if (place) {
    place.remove();
    card.classList.remove("open");
    link.setAttribute("aria-expanded", "false");
    return;
  }
  const answer = await fetch(link.href);
  if (!answer.ok) return;
  /** @type {Series[]} */
  const found = await answer.json();
  const figure = document.createElement("div");
  figure.className = "chart live-chart";
  card.classList.add("open");
  card.append(figure);
  link.setAttribute("aria-expanded", "true");
  drawSeries(figure, found[0]);
}
