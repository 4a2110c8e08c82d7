"use strict";
// The charts of streams on the page of a server; page.js keeps the samples.

function makeChart(large) {
  const name = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(name, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 300 40", preserveAspectRatio: "none", role: "img", class: large ? "large" : "small" })) svg.setAttribute(key, value);
  for (const y of large ? [0, 40] : [40]) {
    const line = document.createElementNS(name, "line");
    for (const [key, value] of Object.entries({ x1: 0, x2: 300, y1: y, y2: y })) line.setAttribute(key, value);
    svg.append(line);
  }
  const path = document.createElementNS(name, "path");
  svg.append(path);
  return { svg, path, now: make("span"), from: make("span") };
}

function drawChart(chart, name, one, measure) {
  const values = one.history === null ? [] : one.history[measure];
  const finite = values.filter(Number.isFinite);
  const highest = finite.length ? Math.max(...finite) : 0;
  const top = SHARES.has(measure) ? 1 : round(highest);
  const time = one.history?.time ?? [];
  const now = performance.now() / 1000;
  const drawn = Math.min(WINDOW, Math.max(LEAST_WINDOW, now - (time[0] ?? now))); // the chart is full soon
  let [path, drawing] = ["", false];
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) { drawing = false; return; }
    const [x, y] = [300 * (1 - (now - time[i]) / drawn), 40 - 38 * Math.min(1, value / top)];
    path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (!drawing && !Number.isFinite(values[i + 1])) path += "h0"; // alone: a point
    drawing = true;
  });
  chart.path.setAttribute("d", path);
  const last = values.length ? values.at(-1) : NaN;
  const span = seconds(time.length ? now - time[0] : 0);
  const range = finite.length ? `lowest ${show(measure, Math.min(...finite))}, highest ${show(measure, highest)}` : "nothing yet";
  chart.svg.setAttribute("aria-label", `${MEASURES[measure]} of ${name} over ${span}: now ${show(measure, last)}, ${range}`);
  setText(chart.now, `${show(measure, last)} of ${show(measure, top)}`);
  setText(chart.from, `${seconds(drawn)} ago`);
}

// The next of 1, 2, 5, 10, ... times a power of ten.
function round(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= value);
}
