// What the pages do beside being read: curves that answer the pointer, keys, changes as they come. Every page reads
// without it.

import { drawCharts } from "./charts.js";
import { startKeys } from "./keys.js";
import { awaitPending, follow, startSwaps } from "./live.js";
import { startMetrics } from "./metrics.js";
import { startRuns } from "./runs.js";
import { startTheme } from "./switch.js";

/**
 * Makes what the server wrote below an element answer: called once for the page, and for each part replaced later.
 * @param {ParentNode} root
 */
function enliven(root) {
  drawCharts(root);
  startMetrics(root);
  startRuns();
}

startTheme(() => drawCharts(document));
startKeys();
enliven(document);
startSwaps(enliven);
follow(enliven);
awaitPending(enliven);
