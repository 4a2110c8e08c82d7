"use strict";
// The page of a server: it asks for /v1/streams every second, follows /v1/events, and keeps the last minutes of each
// stream in memory. All texts of the server are set as text, never as markup.

const WINDOW = 300; // seconds that are kept and drawn, one sample a second
const LEAST_WINDOW = 10; // seconds that are drawn at first
const MANY = 12; // streams from which rows are small
const MOST_HISTORIES = 2000; // streams whose samples are kept
const PAGE = 50; // rows that are shown at first, and added by "Show more"
const EVENTS = 100; // events that are shown
const PICTURES = 3000; // milliseconds between two thumbnails of a stream
const RATE_OVER = 5; // samples that images/s is a mean over
const MEASURES = { rate: "Images/s", accuracy: "Accuracy", trusted: "Trusted", entropy: "Entropy", distance: "Distance" };
const SHARES = new Set(["accuracy", "trusted"]); // drawn from 0 to 1, written in percent
const STATES = {
  learning: ["adapting", "It learns from its images."],
  held: ["held by the guard", "Its last images teach nothing, so the guard let it learn nothing from them. Predictions go on."],
  frozen: ["frozen", "It only predicts, until it is unfrozen."],
  followed: ["not owned", "Another worker owns it, or only tokens that may not teach it ask. This one predicts with the last stored state."],
  unreachable: ["store unreachable", "The store cannot be asked who owns it. The source model predicts."],
  unfit: ["state does not fit", "Its stored state is of another model or method, or damaged. The source model predicts; the state stays in the store."],
  resting: ["resting", "No request came for some seconds. Its next request goes on, unless another worker has claimed it."],
  lease: ["lease ended", "The claim was not renewed in time. It only predicts, until the store answers."],
  lag: ["storing is late", "Too much is not stored yet. It only predicts, until the store has caught up."],
};
const OWNED = new Set(["learning", "frozen", "lag", "resting"]);
const ASK = {
  freeze: ["Freeze", "It only predicts from then on. What it has learned stays."],
  unfreeze: ["Unfreeze", "It learns from its images again."],
  promote: ["Promote", "What adapts answers from then on, not the source model."],
  demote: ["Demote", "The source model answers from then on. It goes on learning in shadow."],
  reset: ["Reset", "It returns to the source model. What it has learned is lost, unless a snapshot has it."],
  rollback: ["Roll back", "It returns to a snapshot. What it has learned since then is lost."],
};
const DONE = { freeze: "is frozen", unfreeze: "adapts again", promote: "answers by what it has learned", demote: "is in shadow", reset: "is the source model again",
  rollback: "is rolled back", snapshot: "has a new snapshot" };

const at = (id) => document.getElementById(id);
const streams = new Map(); // name -> {known, history, rate}
const rows = new Map(); // name -> elements of the row
const opened = new Set(); // names whose details are shown
let token = null; // in memory only
let shown = PAGE;
let sorting = { by: "name", down: false };
let goneSince = null;
let listening = null; // AbortController of the events
let saying = 0;
let answer = () => {}; // of the question that is shown
let several = false; // whether the server has more than one version of the model

// -- talking to the server --------------------------------------------------------------------------------------------

async function call(path, options = {}) {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { ...options, headers: { ...headers, ...options.headers }, cache: "no-store" });
  if (answer.ok) return answer;
  let words = `the server answered ${answer.status}`;
  try { words = (await answer.json()).error || words; } catch { /* no JSON */ }
  throw Object.assign(new Error(words), { status: answer.status });
}

async function poll() {
  let wait = 1000;
  try {
    const answer = await call("v1/streams", { signal: AbortSignal.timeout(10000) });
    take(await answer.json());
    setGone(null);
    if (streams.size > PAGE * 6) wait = 5000;
    if (listening === null) listen();
  } catch (error) {
    if (error.status === 401) askForToken(error.message);
    else setGone(error);
    wait = error.status === 401 ? 0 : 2000;
  }
  if (wait) setTimeout(poll, document.hidden ? Math.max(wait, 5000) : wait);
}

async function listen() {
  const control = listening = new AbortController();
  try {
    const answer = await call("v1/events", { signal: control.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    at("events").replaceChildren();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      addEvents(parts.filter((part) => part.startsWith("data: ")).map((part) => JSON.parse(part.slice(6))));
    }
  } catch { /* the next answer of /v1/streams begins again */ }
  setTimeout(() => { if (listening === control) listening = null; }, 1000);
}

function setGone(error) {
  const place = at("connection");
  document.body.classList.toggle("stale", error !== null);
  if (error === null) {
    goneSince = null;
    setText(place, "Live.");
    place.className = "quiet";
    at("login").hidden = true;
    at("content").hidden = at("happened").hidden = false;
    return;
  }
  if (goneSince === null) {
    goneSince = new Date().toLocaleTimeString();
    for (const one of streams.values()) addSample(one, null);
    draw();
  }
  const why = error.status ? `The server refuses since ${goneSince}: ${error.message}.`
    : `The server has not answered since ${goneSince}. It has stopped, or the network is interrupted.`;
  setText(place, `${why} ${streams.size ? "The numbers below are old. " : ""}This page tries again every 2 s.`);
  place.className = "gone";
}

function askForToken(words) {
  setText(at("login-words"), token === null
    ? "This server needs a token. The page keeps it in memory, until you close or reload the page."
    : `The token was refused: ${words}`);
  setText(at("connection"), "Waiting for a token.");
  setText(at("summary"), "");
  at("connection").className = "quiet";
  at("content").hidden = at("happened").hidden = true;
  at("login").hidden = false;
  at("token").focus();
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("token").value.trim();
  at("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(given)) {
    setText(at("login-words"), "A token has visible ASCII characters, and no spaces.");
    return;
  }
  token = given;
  if (listening) listening.abort();
  listening = null;
  poll();
});

// -- what is known ----------------------------------------------------------------------------------------------------

function take(answer) {
  const now = performance.now() / 1000;
  const names = new Set();
  several = (answer.versions ?? []).length > 1;
  for (const known of answer.streams) {
    names.add(known.name);
    let one = streams.get(known.name);
    if (one === undefined) streams.set(known.name, (one = { counts: [], history: null, rate: null }));
    one.known = known;
    one.counts.push([now, known.received ?? known.images ?? 0]);
    if (one.counts.length > RATE_OVER + 1) one.counts.shift();
    const [first, last] = [one.counts[0], one.counts.at(-1)];
    one.rate = last[0] > first[0] ? Math.max(0, (last[1] - first[1]) / (last[0] - first[0])) : null;
    if (one.history === null && streams.size <= MOST_HISTORIES) one.history = { time: [], ...Object.fromEntries(Object.keys(MEASURES).map((measure) => [measure, []])) };
    addSample(one, { ...known, rate: one.rate });
  }
  for (const name of [...streams.keys()]) if (!names.has(name)) { streams.delete(name); opened.delete(name); }
  // Only a calibrated stream has an estimated accuracy: without one there is no column of it.
  document.body.classList.toggle("estimated", [...streams.values()].some(({ known }) => typeof known.accuracy === "number"));
  summarise(answer);
  showTokens(answer.tokens ?? []);
  draw();
}

// Keep the numbers of a stream; without numbers it is a gap, in which the chart draws no line.
function addSample(one, known) {
  const [history, now] = [one.history, performance.now() / 1000];
  if (known === null) one.counts = [];
  if (history === null) return;
  history.time.push(now);
  for (const name of Object.keys(MEASURES)) history[name].push(known?.[name] ?? NaN);
  while (history.time[0] < now - WINDOW) for (const values of Object.values(history)) values.shift();
}

function summarise(answer) {
  const counts = new Map();
  let [alarms, shadowed] = [0, 0];
  for (const { known } of streams.values()) {
    counts.set(stateOf(known), (counts.get(stateOf(known)) ?? 0) + 1);
    if (alarmsOf(known).length) alarms += 1;
    if (known.shadow) shadowed += 1;
  }
  const parts = [...counts].filter(([state]) => state).map(([state, count]) => `${count} ${stateWords(state)[0]}`);
  if (shadowed) parts.push(`${shadowed} in shadow`);
  if (alarms) parts.push(`${alarms} with alarms`);
  const all = `${streams.size} stream${streams.size === 1 ? "" : "s"}`;
  const most = typeof answer.open_streams === "number" ? ` At most ${answer.open_streams.toLocaleString("en")} may be open.` : "";
  const less = answer.unlearned ? ` Because of load, ${answer.unlearned.toLocaleString("en")} images were predicted without learning.` : "";
  setText(at("summary"), `Model ${answer.model}, method ${answer.method}. ${all}${parts.length ? `: ${parts.join(", ")}` : ""}.${most}${less}`);
  document.title = `${alarms ? `(${alarms}!) ` : ""}${all} - tribe`;
}

// What a stream does now: one that owns its state, and whose last images the guard held back, does not adapt.
const stateOf = (known) => (known.state === "learning" && known.holding ? "held" : known.state);

const stateWords = (state) => STATES[state] ?? [state ?? "unknown", ""];

// The alarms of a stream, in words: a list of texts or of objects that have some.
function alarmsOf(known) {
  const found = Array.isArray(known.alarms) ? known.alarms : [];
  return found.map((each) => (typeof each === "object" && each !== null ? each.words ?? each.kind ?? each.name : each))
    .filter((words) => words !== undefined).map(String);
}

// -- the table --------------------------------------------------------------------------------------------------------

function chosen() {
  const [text, only] = [at("filter").value.trim().toLowerCase(), at("only").value];
  const value = (name, one) => (sorting.by === "name" ? name : sorting.by === "rate" ? one.rate : one.known[sorting.by]) ?? -1;
  return [...streams]
    .filter(([name, one]) => name.toLowerCase().includes(text)
      && { all: true, alarm: alarmsOf(one.known).length > 0, still: stateOf(one.known) !== "learning", shadow: one.known.shadow }[only])
    .map(([name, one]) => [name, one, value(name, one), alarmsOf(one.known).length > 0])
    .sort(([a, , x, first], [b, , y, second]) => (second - first) || (sorting.down ? -1 : 1) * (typeof x === "number" && x !== y ? x - y : a.localeCompare(b, "en", { numeric: true })));
}

function draw() {
  const found = chosen();
  const visible = found.slice(0, shown);
  document.body.classList.toggle("many", found.length > MANY);
  const [wanted, kept] = [[], new Set()];
  for (const [name, one] of visible) {
    kept.add(name);
    if (!rows.has(name)) rows.set(name, makeRow(name));
    const row = rows.get(name);
    fillRow(row, name, one);
    wanted.push(row.line);
    if (opened.has(name)) { fillDetail(row, name, one); wanted.push(row.detail); }
  }
  for (const [name, row] of [...rows]) if (!kept.has(name)) { showPicture(row, name, null); rows.delete(name); }
  arrange(at("rows"), wanted);
  const empty = at("empty");
  empty.hidden = found.length > 0;
  setText(empty, streams.size ? "No stream fits the choice above." : "No streams yet. The first request of a stream makes it.");
  at("more").hidden = found.length <= shown;
  setText(at("more"), `Show more (${found.length - visible.length} left)`);
}

// Children in the wanted order. Only what differs is moved, so that the focus stays.
function arrange(parent, wanted) {
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((child, i) => { if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null); });
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function makeRow(name) {
  const detail = make("tr", { class: "detail", role: "row" });
  const toggle = make("button", { type: "button", "aria-expanded": "false" }, name);
  const picture = make("img", { alt: "", class: "picture", hidden: "" });
  const state = make("span", { class: "state" });
  const shadow = make("span", { class: "shadow", title: "The source model answers. What adapts learns beside it, until it is promoted." });
  const alarms = make("span", { class: "alarms" });
  const numbers = Object.fromEntries(Object.keys(MEASURES).map((measure) =>
    [measure, make("td", { class: `number ${measure}`, role: "cell", "data-label": MEASURES[measure] })]));
  const chart = makeChart(false);
  const buttons = Object.fromEntries([["promote", "Promote"], ["freeze", "Freeze"], ["snapshot", "Snapshot"], ["rollback", "Roll back"], ["reset", "Reset"]]
    .map(([action, words]) => [action, make("button", { type: "button", "aria-label": `${words}: ${name}` }, words)]));
  const line = make("tr", { role: "row" },
    make("th", { class: "name", scope: "row", role: "rowheader" }, toggle, picture),
    make("td", { class: "where", role: "cell" }, state, " ", shadow, alarms),
    ...Object.values(numbers),
    make("td", { class: "chart", role: "cell" }, chart.svg),
    make("td", { class: "actions", role: "cell" }, ...Object.values(buttons).flatMap((button) => [button, " "])));
  toggle.addEventListener("click", () => {
    if (!opened.delete(name)) opened.add(name);
    toggle.setAttribute("aria-expanded", String(opened.has(name)));
    draw();
  });
  for (const [action, button] of Object.entries(buttons)) {
    button.addEventListener("click", () => act(button.dataset.action ?? action, name));
  }
  toggle.setAttribute("aria-expanded", String(opened.has(name)));
  return { line, detail, state, shadow, alarms, numbers, chart, buttons, picture, frame: null, asked: -Infinity, large: null };
}

function fillRow(row, name, one) {
  const { known } = one;
  const [words, meaning] = stateWords(stateOf(known));
  setText(row.state, several && known.version ? `${words}, version ${known.version}` : words);
  row.line.classList.toggle("open", opened.has(name));
  row.line.classList.toggle("alarmed", alarmsOf(known).length > 0);
  row.state.title = meaning;
  row.state.className = `state ${{ learning: "learning", frozen: "", followed: "", resting: "" }[stateOf(known)] ?? "trouble"}`;
  setText(row.shadow, known.shadow ? "in shadow" : "");
  setText(row.alarms, alarmsOf(known).join("; "));
  for (const measure of Object.keys(MEASURES)) if (measure !== "accuracy") setText(row.numbers[measure], show(measure, measure === "rate" ? one.rate : known[measure]));
  showAccuracy(row.numbers.accuracy, known);
  askForPicture(row, name, known.thumbnail ?? null);
  drawChart(row.chart, name, one, at("chart").value);
  const owned = known.state === undefined || OWNED.has(known.state);
  const { promote, freeze, snapshot, rollback, reset } = row.buttons;
  const offered = [[promote, known.shadow ? "promote" : "demote"], [freeze, known.state === "frozen" || known.frozen ? "unfreeze" : "freeze"]];
  for (const [button, action] of offered) {
    button.dataset.action = action;
    setText(button, ASK[action][0]);
    button.setAttribute("aria-label", `${ASK[action][0]}: ${name}`);
  }
  for (const button of [promote, freeze, snapshot, reset]) setDisabled(button, owned ? "" : meaning);
  setDisabled(rollback, !owned ? meaning : known.snapshots?.length === 0 ? "It has no snapshot yet. Take one first." : "");
}

// An estimate is its interval: the number alone would say more than is known.
function showAccuracy(cell, known) {
  if (!cell.children.length) cell.append(make("span"), " ", make("span", { class: "interval" }));
  const bounds = known.accuracy_familiar === false ? [null] : [known.accuracy_low, known.accuracy_high];
  setText(cell.children[0], known.accuracy_familiar === false ? "not known" : show("accuracy", known.accuracy));
  setText(cell.children[1], bounds.every(Number.isFinite) ? bounds.map((value) => Math.round(100 * value)).join("–") : "");
  cell.title = interval(known) ?? "";
}

// The last frame of a stream, if the server keeps it: fetched with the token, and only if there is another.
async function askForPicture(row, name, frame) {
  if (frame === row.frame || performance.now() - row.asked < PICTURES) return;
  [row.frame, row.asked] = [frame, performance.now()];
  if (frame === null) return showPicture(row, name, null);
  try {
    const answer = await call(`v1/streams/${encodeURIComponent(name)}/thumbnail`);
    showPicture(row, name, await answer.blob());
  } catch { row.frame = null; /* the next answer of /v1/streams asks again */ }
}

function showPicture(row, name, content) {
  if (row.picture.src) URL.revokeObjectURL(row.picture.src);
  if (content === null || rows.get(name) !== row) {
    row.picture.removeAttribute("src");
    return void (row.picture.hidden = true);
  }
  Object.assign(row.picture, { src: URL.createObjectURL(content), alt: `Last frame of ${name}`, hidden: false });
}

function setDisabled(button, why) {
  button.disabled = why !== "";
  button.title = why;
}

function fillDetail(row, name, one) {
  if (row.large === null) {
    row.large = Object.fromEntries(Object.keys(MEASURES).map((measure) => [measure, makeChart(true)]));
    row.facts = make("dl");
    const figures = Object.entries(row.large).map(([measure, chart]) => make("figure", { class: measure },
      make("figcaption", {}, MEASURES[measure], chart.now), chart.svg, make("div", { class: "axis" }, chart.from, "now")));
    row.detail.append(make("td", { colspan: "9", role: "cell" }, make("div", { class: "charts" }, ...figures), row.facts));
  }
  for (const [measure, chart] of Object.entries(row.large)) drawChart(chart, name, one, measure);
  const { known } = one;
  const facts = {
    Clock: known.clock, Generation: known.generation, "Images learned from": known.images, "Images skipped": known.skipped,
    "Estimated accuracy": interval(known), "Accuracy of the whole stream": percent(known.accuracy_overall),
    "Estimated accuracy of the source": interval(known, "source_accuracy"), "Answers that differ from the source's": percent(known.differ),
    "Answered by": known.shadow || ["unreachable", "unfit"].includes(known.state) ? "the source model" : "what adapts",
    "Agrees with the source": percent(known.source_agreement), Alarms: alarmsOf(known).join(", ") || null,
    "Held back by the guard": known.held === undefined ? null : `${known.held} images`, "Returned by the guard": known.returned,
    "Requests waiting": known.queued, "Not stored for": known.generation === null ? null : seconds(known.lag), "Last request": known.idle === undefined ? null : `${seconds(known.idle)} ago`,
    "Snapshots (clock)": known.snapshots?.length ? known.snapshots.join(", ") : "none", Meaning: stateWords(stateOf(known))[1],
  };
  const pairs = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "");
  row.facts.replaceChildren(...pairs.map(([term, value]) => make("div", {}, make("dt", {}, `${term}:`), " ", make("dd", {}, String(value)))));
}

const seconds = (value) => (value === null || value === undefined ? null : value < 10 ? `${value.toFixed(1)} s` : value < 120 ? `${value.toFixed(0)} s` : `${(value / 60).toFixed(0)} min`);

const percent = (value) => (typeof value === "number" ? `${Math.round(100 * value)} %` : null);

// An estimated accuracy of the last images with its interval, in words; null: there is none.
function interval(known, name = "accuracy") {
  if (typeof known[name] !== "number") return null;
  if (known.accuracy_familiar === false && name === "accuracy") return "not known: calibration saw no such images";
  return `${percent(known[name])}, with 90 % certainty from ${percent(known[`${name}_low`])} to ${percent(known[`${name}_high`])}`;
}

function show(measure, value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (SHARES.has(measure)) return percent(value);
  if (measure === "rate") return value < 10 ? value.toFixed(1) : value.toFixed(0);
  return value.toFixed(3);
}

// -- actions ----------------------------------------------------------------------------------------------------------

async function act(action, name) {
  let body = "";
  if (action in ASK) {
    const clocks = action === "rollback" ? [...(streams.get(name)?.known.snapshots ?? [])].reverse() : [];
    if (!(await confirmed(action, name, clocks))) return;
    if (clocks.length) body = JSON.stringify({ to: Number(at("ask-clock").value) });
  }
  try {
    const answer = await call(`v1/streams/${encodeURIComponent(name)}/${action}`, { method: "POST", body });
    const known = await answer.json();
    const one = streams.get(name);
    if (one !== undefined && known.name === name) { one.known = { ...one.known, ...known }; draw(); }
    say(`${name} ${DONE[action]}.`);
  } catch (error) {
    say(error.status ? `${name} was not changed: ${error.message}` : `The server does not answer. Whether ${name} was changed is not known.`);
  }
}

function confirmed(action, name, clocks) {
  const [verb, meaning] = ASK[action];
  const dialog = at("ask");
  for (const [part, text] of [["head", `${verb} ${name}?`], ["words", meaning], ["yes", verb]]) setText(at(`ask-${part}`), text);
  at("ask-choice").hidden = clocks.length === 0;
  at("ask-clock").replaceChildren(...clocks.map((clock) => make("option", { value: clock }, String(clock))));
  answer(false);  // to the question before: its event may come late, on a busy machine
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => { answer = resolve; });
}

function say(words) {
  setText(at("said"), words);
  clearTimeout(saying);
  saying = setTimeout(() => setText(at("said"), ""), 8000);
}

function addEvents(events) {
  if (events.length === 0) return;
  const list = at("events");
  for (const event of events.slice(-EVENTS)) {
    const when = event.time ? new Date(1000 * event.time).toLocaleTimeString() : "";
    const named = event.stream === null || event.stream === undefined ? [] : [make("b", {}, event.stream), " "];
    list.prepend(make("li", {}, make("time", {}, when), " ", ...named, String(event.words ?? event.kind ?? "")));
  }
  while (list.children.length > EVENTS) list.lastChild.remove();
  [list.hidden, at("no-events").hidden] = [false, true];
}

// -- choices ----------------------------------------------------------------------------------------------------------

function sortBy(by, down) {
  sorting = { by, down };
  at("sort").value = by;
  for (const head of document.querySelectorAll("th[data-sort]")) {
    if (head.dataset.sort === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  draw();
}

for (const head of document.querySelectorAll("th[data-sort]")) {
  head.querySelector("button").addEventListener("click", () => {
    const by = head.dataset.sort;
    sortBy(by, sorting.by === by ? !sorting.down : by !== "name");
  });
}
at("ask").addEventListener("close", () => { if (!at("ask").open) answer(at("ask").returnValue === "yes"); });
at("sort").addEventListener("change", () => sortBy(at("sort").value, at("sort").value !== "name"));
at("filter").addEventListener("input", () => { shown = PAGE; draw(); });
at("only").addEventListener("change", () => { shown = PAGE; draw(); });
at("chart").addEventListener("change", () => {
  setText(at("chart-head"), `${MEASURES[at("chart").value]} over time`);
  draw();
});
at("more").addEventListener("click", () => { shown += PAGE; draw(); });

poll();
