"use strict";
// The page of a trial: it shows what `tribe try` found, and sends labels. All texts are set as text, never as markup.
// The verdict is computed in Python, after every label.

const at = (id) => document.getElementById(id);
const NEITHER = -1;
const MOST_MATCHES = 12; // classes that a search shows
let trial = null; // what does not change
let state = null; // the verdict, and the frame to label next
let busy = false; // a label is on its way
let shown = 0; // cards
let found = []; // classes that the search shows

function setText(place, words) {
  if (place.textContent !== words) place.textContent = words;
}

function make(kind, words = "", name = "") {
  const element = document.createElement(kind);
  if (words !== "") element.textContent = words;
  if (name) element.className = name;
  return element;
}

function draw(kind, attributes, name) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.setAttribute("class", name);
  return element;
}

async function ask(place, body) {
  const how = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(place, how);
  } catch {
    throw new Error("tribe try has stopped: start it again. All labels are in the file.");
  }
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

function complain(error) {
  setText(at("said"), error.message);
}

const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const points = (share) => `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(1)} points`;
const count = (number) => number.toLocaleString("en");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// -- the answer -------------------------------------------------------------------------------------------------------

function showAnswer() {
  const v = state.verdict;
  setText(at("answer"), v.headline);
  at("answer").className = v.answer;
  const labels = v.labels === 0 ? "Without a label" : `After ${plural(v.labels, "label")}`;
  const counts = v.labels ? ` The adapted model was right on ${v.better}, the source on ${v.worse}.` : "";
  const sure = `at all times, in ${percent(1 - v.error)} of trials`;
  setText(at("answer-words"), `${labels}, the gain is between ${points(v.low)} and ${points(v.high)} (${sure}).${counts}`);
  const most = Math.max(v.differing / v.frames, 1.5 * v.matters);
  const x = (share) => 500 + (500 * share) / most;
  const bars = [
    draw("rect", { x: 0, y: 15, width: 1000, height: 60 }, "track"),
    draw("rect", { x: x(-v.matters), y: 15, width: x(v.matters) - x(-v.matters), height: 60 }, "matters"),
    draw("rect", { x: x(v.low), y: 25, width: Math.max(4, x(v.high) - x(v.low)), height: 40 }, "range"),
    draw("line", { x1: 500, y1: 5, x2: 500, y2: 85 }, "zero"),
  ];
  if (v.estimate !== null && v.labels) bars.push(draw("line", { x1: x(v.estimate), y1: 25, x2: x(v.estimate), y2: 65 }, "estimate"));
  at("interval").replaceChildren(...bars);
  at("interval").setAttribute("aria-label", `The gain is between ${points(v.low)} and ${points(v.high)}.`);
  setText(at("axis-low"), points(-most));
  setText(at("axis-high"), points(most));
  at("interval").removeAttribute("hidden");
  at("interval-axis").hidden = false;
}

function fact(name, value, detail = "") {
  const box = make("div");
  const text = make("dd", value);
  if (detail) text.append(make("small", detail));
  box.append(make("dt", name), text);
  return box;
}

function showFacts() {
  const estimate = (name, one) => (one === null
    ? fact(name, "not known", "an estimate needs a calibration")
    : fact(name, percent(one.accuracy), `estimated, ${percent(one.low)} to ${percent(one.high)}`));
  const { estimates, cost, frames, differing, alarms } = trial;
  at("facts").replaceChildren(
    estimate("Accuracy of the source", estimates.source),
    estimate("Accuracy, adapted", estimates.adapted),
    fact("They differ on", percent(differing / frames), `${count(differing)} of ${plural(frames, "frame")}`),
    fact("Alarms", count(alarms.length), [...new Set(alarms.map((a) => a.kind))].join(", ")),
    fact("Cost", `${cost.ratio.toFixed(1)} ×`, `${(1000 * cost.adapted).toFixed(1)} ms a frame; source ${(1000 * cost.source).toFixed(1)}`),
  );
  at("facts").hidden = false;
  setText(at("what"), `Trial of ${trial.name}`);
  document.title = `${trial.name} - tribe try`;
  at("remarks").hidden = trial.remarks.length === 0;
  setText(at("remarks"), trial.remarks.join(". "));
  at("alarms").hidden = alarms.length === 0;
  setText(at("alarms").querySelector("summary"), plural(alarms.length, "alarm"));
  at("alarms").querySelector("ol").replaceChildren(...alarms.map((a) => make("li", `Frame ${count(a.image)}: ${a.words}`)));
}

// -- labels -----------------------------------------------------------------------------------------------------------

function picture(image, frame, folder, words) {
  image.alt = words;
  image.onload = () => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) <= 128);
  image.src = `${folder}/${frame}.png`;
}

function showWork() {
  const { next, verdict, counted } = state;
  const needed = verdict.answer === "undecided" ? (verdict.more === null ? Infinity : counted + verdict.more) : counted;
  at("labelling").hidden = trial.differing === 0;
  at("work").hidden = next === null;
  at("all-labelled").hidden = next !== null;
  at("undo").disabled = counted === 0;
  const rest = verdict.answer === "undecided" ? "" : " More labels make the range smaller.";
  setText(at("progress"), `${plural(counted, "label")}. ${verdict.headline}.${rest}`);
  at("bar").value = Number.isFinite(needed) && needed > 0 ? counted / needed : 0;
  setText(at("where"), `Every label is in ${trial.file} at once. Stop tribe try with Ctrl-C; the same command goes on.`);
  if (next === null) return;
  picture(at("large"), next.frame, "frames", `Frame ${next.frame}, to be labelled`);
  setText(at("large-name"), `Frame ${count(next.frame)}${next.name ? `, ${next.name}` : ""}`);
  at("candidates").replaceChildren(...next.candidates.map((k, i) => choice(k, String(i + 1), i < 2 ? "close" : "")));
  at("search-line").hidden = trial.classes.length <= next.candidates.length;
  if (state.after !== null) new Image().src = `frames/${state.after}.png`; // so that it is there at once
}

function choice(k, key, name = "") {
  const line = make("li");
  const button = make("button", "", name);
  button.type = "button";
  if (key) button.append(make("kbd", key), " ");
  button.append(trial.classes[k]);
  button.addEventListener("click", () => label(k));
  line.append(button);
  return line;
}

async function send(place, body) {
  if (busy) return;
  busy = true;
  try {
    state = await ask(place, body);
    setText(at("said"), "");
    at("search").value = "";
    showMatches();
    showAnswer();
    showWork();
    at("work").scrollIntoView({ block: "nearest" });
  } catch (error) {
    complain(error);
  } finally {
    busy = false;
  }
}

function label(k) {
  if (state.next !== null) send("label", { frame: state.next.frame, label: k });
}

function showMatches() {
  const words = at("search").value.trim().toLowerCase();
  const all = trial.classes.map((name, k) => [name.toLowerCase(), k]).filter(([name]) => words && name.includes(words));
  all.sort(([a, i], [b, j]) => b.startsWith(words) - a.startsWith(words) || a.length - b.length || i - j);
  found = all.slice(0, MOST_MATCHES).map(([, k]) => k);
  at("matches").replaceChildren(...found.map((k, i) => choice(k, i === 0 ? "↵" : "")));
}

function typed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || trial === null) return;
  const searching = event.target === at("search");
  if (searching) {
    if (event.key === "Enter" && found.length) label(found[0]);
    if (event.key === "Enter" || event.key === "Escape") {
      event.preventDefault();
      at("search").value = "";
      showMatches();
      at("search").blur();
    }
    return;
  }
  if (at("labelling").hidden) return;
  if (event.key === "/" && !at("search-line").hidden) {
    event.preventDefault();
    at("search").focus();
  } else if (event.key === "Backspace") {
    event.preventDefault();
    if (state.counted) send("undo", {});
  } else if (event.key === "0") {
    label(NEITHER);
  } else if (/^[1-9]$/.test(event.key) && state.next !== null && Number(event.key) <= state.next.candidates.length) {
    label(state.next.candidates[Number(event.key) - 1]);
  }
}

// -- frames that differ -----------------------------------------------------------------------------------------------

function prediction(who, k, confidence) {
  const line = make("p", `${who} `, "who");
  line.append(make("span", trial.classes[k], who.toLowerCase()), ` ${percent(confidence, 0)}`);
  return line;
}

function card(one) {
  const line = make("li");
  const image = make("img");
  image.loading = "lazy";
  picture(image, one.frame, "thumbs", `Frame ${one.frame}`);
  const words = make("div");
  words.append(
    make("p", `Frame ${count(one.frame)}${one.name ? `, ${one.name}` : ""}`, "quiet"),
    prediction("Source", one.source, one.source_confidence),
    prediction("Adapted", one.adapted, one.adapted_confidence),
  );
  line.append(image, words);
  return line;
}

async function showCards() {
  try {
    const { cards, left } = await ask(`telling/${shown}`);
    shown += cards.length;
    at("cards").append(...cards.map(card));
    at("show-more").hidden = left === 0;
    setText(at("show-more"), `Show more of ${count(left)}`);
    at("differences").hidden = shown === 0;
  } catch (error) {
    complain(error);
  }
}

async function begin() {
  try {
    trial = await ask("trial.json");
  } catch (error) {
    complain(error);
    return;
  }
  state = trial.state;
  showFacts();
  showAnswer();
  showWork();
  await showCards();
}

at("neither").addEventListener("click", () => label(NEITHER));
at("undo").addEventListener("click", () => send("undo", {}));
at("search").addEventListener("input", showMatches);
at("show-more").addEventListener("click", showCards);
document.addEventListener("keydown", typed);
begin();
