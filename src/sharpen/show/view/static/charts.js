// Curves that answer the pointer, by uPlot, in the place of the still drawings. Data: the JSON in each figure.

import uPlot from "./vendor/uplot/uPlot.esm.js";

/**
 * A curve: for each place its step, time (seconds) and value; `low` and `high` may be empty.
 * @typedef {{name: string, steps: number[], times: (number | null)[], values: (number | null)[],
 *   low: (number | null)[], high: (number | null)[]}} Series
 * @typedef {{name: string, training: Series, evaluations: Series[]}} Course
 * @typedef {{parts: Series[], total: Series}} Stack
 * @typedef {{series: Series, color: string, isSparse: boolean, start: number}} Curve
 */

const HEIGHT = 240;
const MARKS = ["part-2", "part-4", "part-3", "part-1"];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const RUNS = ["part-0", "part-2", "part-4", "part-3"];

/** What a person chose for the figures of this page. */
const chosen = { byTime: false };
/** @type {WeakMap<Element, uPlot>} */
const drawn = new WeakMap();
const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const plot = drawn.get(entry.target);
    const width = Math.floor(entry.contentRect.width);
    if (plot && width > 0 && width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
});

/**
 * Draws all figures below an element.
 * @param {ParentNode} root
 */
export function drawCharts(root) {
  for (const figure of root.querySelectorAll("figure[data-chart]")) {
    const place = figure.querySelector(".live-chart");
    const json = figure.querySelector("script[type='application/json']")?.textContent;
    if (!(place instanceof HTMLElement) || !json) continue;
    const data = JSON.parse(json);
    if (figure.getAttribute("data-chart") === "course") drawCourse(figure, place, data);
    else drawStack(place, data);
    for (const still of figure.querySelectorAll(".still, .unit")) still.toggleAttribute("hidden", true);
  }
}

/**
 * Draws one series into an element.
 * @param {HTMLElement} place
 * @param {Series} series
 */
export function drawSeries(place, series) {
  drawCurves(place, [{ series, color: "part-0", isSparse: false, start: 0 }], false);
}

/**
 * @param {Element} figure
 * @param {HTMLElement} place
 * @param {Course[]} runs
 */
function drawCourse(figure, place, runs) {
  const isOne = runs.length === 1;
  const curves = runs.flatMap(({ name, training, evaluations }, number) => {
    const start = startOf([training, ...evaluations]);
    const color = isOne ? "part-0" : RUNS[number % RUNS.length];
    /** @type {(series: Series) => Series} */
    const named = (series) => (isOne ? series : { ...series, name: `${name}: ${series.name}` });
    const sparse = evaluations.map((series, index) => ({ series: named(series), color: isOne ? MARKS[index % 4] : color, isSparse: true, start }));
    return training.steps.length ? [{ series: named(training), color, isSparse: false, start }, ...sparse] : sparse;
  });
  const hasTimes = curves.every((curve) => curve.series.times.every((time) => time !== null));
  const byTime = chosen.byTime && hasTimes;
  drawCurves(place, curves, byTime);
  const tools = figure.querySelector(".chart-tools");
  if (!(tools instanceof HTMLElement) || !hasTimes) return;
  tools.hidden = false;
  tools.replaceChildren(
    ...[false, true].map((isTime) => {
      const button = document.createElement("button");
      button.type = "button";
      button.id = isTime ? "over-time" : "over-steps";
      button.textContent = isTime ? "over time" : "over steps";
      button.setAttribute("aria-pressed", String(isTime === byTime));
      button.addEventListener("click", () => {
        chosen.byTime = isTime;
        drawCourse(figure, place, runs);
        document.getElementById(button.id)?.focus();
      });
      return button;
    }),
  );
}

/** @param {Series[]} all */
function startOf(all) {
  return all.flatMap((series) => series.times).reduce((/** @type {number} */ least, time) => Math.min(least, time ?? least), Infinity);
}

/**
 * Draws curves with bands (dense ones) or intervals (sparse ones) over steps, or over minutes since each run began.
 * @param {HTMLElement} place
 * @param {Curve[]} curves
 * @param {boolean} byTime
 */
function drawCurves(place, curves, byTime) {
  const { places, columns } = aligned(curves, byTime);
  const colors = palette();
  /** @type {uPlot.Series[]} */
  const lines = [{}];
  /** @type {uPlot.Band[]} */
  const bands = [];
  for (const { series, color, isSparse } of curves) {
    const stroke = colors[color];
    const at = lines.length;
    lines.push({
      stroke,
      width: 1.5,
      spanGaps: true,
      paths: isSparse ? () => null : undefined, // points alone: no line where nothing was measured
      points: { show: isSparse || places.length < 2, size: 8, fill: stroke },
    });
    lines.push({ show: true, points: { show: false } }, { show: true, points: { show: false } });
    if (!isSparse && series.low.length) bands.push({ series: [at + 2, at + 1], fill: `${stroke}24` });
  }
  const readout = prepare(place);
  const plot = new uPlot(
    {
      ...frame(place, colors, !byTime),
      scales: { x: { time: false }, y: { range: () => valueRange(curves) } },
      series: lines,
      bands,
      hooks: {
        draw: [(self) => drawIntervals(self, curves, colors)],
        setCursor: [(self) => read(self, readout, curves, byTime)],
      },
    },
    /** @type {uPlot.AlignedData} */ ([places, ...columns]),
    place,
  );
  keep(place, plot, readout);
}

/**
 * Puts series that were measured at different steps or times over the same places.
 * @param {Curve[]} curves
 * @param {boolean} byTime
 */
function aligned(curves, byTime) {
  const placed = curves.map(({ series, start }) =>
    series.steps.map((step, index) => (byTime ? Math.round(((series.times[index] ?? start) - start) * 1000) / 60000 : step)),
  );
  const places = [...new Set(placed.flat())].sort((a, b) => a - b);
  const columns = curves.flatMap(({ series }, number) => {
    const index = new Map(placed[number].map((x, at) => [x, at]));
    return [series.values, series.low, series.high].map((values) => places.map((x) => values[index.get(x) ?? -1] ?? null));
  });
  return { places, columns };
}

/**
 * The range of the values and intervals. A band widens it, at each side by half of what the values span at most.
 * @param {Curve[]} curves
 * @returns {[number, number]}
 */
function valueRange(curves) {
  const known = curves
    .flatMap(({ series, isSparse }) => [...series.values, ...(isSparse ? [...series.low, ...series.high] : [])])
    .filter((value) => value !== null);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity);
  const high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  if (!known.length) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 2 || 0.5), high + (Math.abs(low) / 2 || 0.5)];
  const band = curves.flatMap(({ series, isSparse }) => (isSparse ? [] : [...series.low, ...series.high])).filter((value) => value !== null);
  const reach = (high - low) / 2;
  const from = Math.max(low - reach, band.reduce((least, value) => Math.min(least, value), low));
  const to = Math.min(high + reach, band.reduce((most, value) => Math.max(most, value), high));
  return [from - 0.06 * (to - from), to + 0.06 * (to - from)];
}

/**
 * @param {uPlot} plot
 * @param {Curve[]} curves
 * @param {Record<string, string>} colors
 */
function drawIntervals(plot, curves, colors) {
  const { ctx } = plot;
  ctx.save();
  ctx.lineWidth = 2 * devicePixelRatio;
  curves.forEach(({ isSparse, color }, number) => {
    if (!isSparse) return;
    ctx.strokeStyle = colors[color];
    const [lows, highs] = [plot.data[3 * number + 2], plot.data[3 * number + 3]];
    plot.data[0].forEach((place, index) => {
      const [low, high] = [lows[index], highs[index]];
      if (low == null || high == null) return;
      const x = plot.valToPos(place, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, plot.valToPos(low, "y", true));
      ctx.lineTo(x, plot.valToPos(high, "y", true));
      ctx.stroke();
    });
  });
  ctx.restore();
}

/**
 * @param {HTMLElement} place
 * @param {Stack} data
 */
function drawStack(place, data) {
  const colors = palette();
  const steps = data.parts[0].steps;
  const sums = steps.map(() => 0);
  const layers = data.parts.map((part) => steps.map((_, index) => (sums[index] += part.values[index] ?? 0)));
  const bars = uPlot.paths.bars?.({ size: [0.8, 40] });
  const readout = prepare(place);
  const plot = new uPlot(
    {
      ...frame(place, colors, true),
      scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }, y: { range: (_, _low, high) => [0, high * 1.04 || 1] } },
      // the highest first, so that the lower ones are drawn over it
      series: [
        {},
        ...layers.map((_, index) => ({ fill: colors[`part-${layers.length - 1 - index}`], width: 0, paths: bars, points: { show: false } })),
      ],
      hooks: {
        setCursor: [
          (self) => {
            const at = self.cursor.idx;
            if (at == null) return;
            const parts = data.parts.map((part) => `${part.name} ${format(part.values[at])}`);
            readout.textContent = `step ${steps[at]}: ${format(sums[at])} s (${parts.join(", ")})`;
          },
        ],
      },
    },
    /** @type {uPlot.AlignedData} */ ([steps, ...layers.toReversed()]),
    place,
  );
  keep(place, plot, readout);
}

/**
 * What all plots have in common.
 * @param {HTMLElement} place
 * @param {Record<string, string>} colors
 * @param {boolean} hasSteps whether whole steps are across
 */
function frame(place, colors, hasSteps) {
  const axis = {
    stroke: colors["ink-faint"],
    grid: { stroke: colors.line, width: 1 },
    ticks: { show: false },
    font: `12px ${getComputedStyle(document.body).fontFamily}`,
  };
  return {
    width: Math.max(200, Math.floor(place.clientWidth)),
    height: HEIGHT,
    padding: /** @type {[number, number, number, number]} */ ([10, 12, 0, 0]),
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
    scales: { x: { time: false } },
    axes: [{ ...axis, grid: { show: false }, size: 28, ...(hasSteps ? { incrs: WHOLE } : {}) }, { ...axis, size: 48 }],
  };
}

/**
 * Says the numbers under the pointer.
 * @param {uPlot} plot
 * @param {HTMLElement} readout
 * @param {Curve[]} curves
 * @param {boolean} byTime
 */
function read(plot, readout, curves, byTime) {
  const at = plot.cursor.idx;
  if (at == null) return;
  const texts = curves.flatMap(({ series }, number) => {
    const [value, low, high] = [1, 2, 3].map((offset) => plot.data[3 * number + offset][at]);
    if (value == null) return [];
    return [`${series.name} ${format(value)}${low == null ? "" : ` [${low === high ? "on every task" : `${format(low)}, ${format(high)}`}]`}`];
  });
  const x = format(plot.data[0][at]);
  readout.textContent = `${byTime ? `${x} min` : `step ${x}`}: ${texts.join(" · ")}`;
}

/** @param {number | null | undefined} value */
function format(value) {
  if (value == null) return "\u2013";
  if (Number.isInteger(value) && Math.abs(value) < 100000) return String(value);
  return Math.abs(value) >= 0.001 && Math.abs(value) < 100000 ? String(Number(value.toPrecision(4))) : value.toExponential(1);
}

/**
 * Empties the place of a plot; returns where its numbers are said.
 * @param {HTMLElement} place
 */
function prepare(place) {
  drawn.get(place)?.destroy();
  const readout = document.createElement("p");
  readout.className = "readout";
  readout.textContent = "\u00a0";
  place.replaceChildren();
  return readout;
}

/**
 * @param {HTMLElement} place
 * @param {uPlot} plot
 * @param {HTMLElement} readout
 */
function keep(place, plot, readout) {
  place.append(readout);
  drawn.set(place, plot);
  sizes.observe(place);
}

/** The colours of this page as they are now. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["part-0", "part-1", "part-2", "part-3", "part-4", "ink-faint", "line"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
