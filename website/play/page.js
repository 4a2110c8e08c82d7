// The page "Try it": digits run past a network as it was trained, and past the same network adapting.
//
// What you need to run your own model file in a page is in `start`: unpack ONNX Runtime, then AdaptingStream.open, then
// stream.run(images). The rest of this file draws.
"use strict";

(() => {
  const BATCH = 5; // digits that the network sees at a time
  const WINDOW = 100; // digits over which an error is shown
  const TURN = 200; // digits of one corruption, where they take turns
  const SHOWN = 2000; // digits on the chart, at most
  const CELLS = 20; // digits in the strip
  const LAYERS = [16, 16, 32, 32, 48, 48]; // channels of the network's six layers, in the order of its statistics
  const SPEEDS = ["training", "slow", "medium", "fast"];
  const { SIZE, PIXELS, randomness } = Corruptions;
  const root = document.getElementById("play"), find = (id) => document.getElementById(id);
  const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
  const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
  // `seen` holds {label, source, adapted} of each digit; `busy` while a batch is on its way.
  const play = { running: false, busy: false, seen: [], chosen: [], changes: [] };
  let stream, digits, order;

  // -- files ----------------------------------------------------------------------------------------------------------

  /** Unpack a file: base64 of gzip, in a script, because a page that was opened from a disk may not fetch anything. */
  async function unpack(name) {
    const packed = Uint8Array.from(atob(tribeFiles[name]), (letter) => letter.charCodeAt(0));
    const bytes = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
    delete tribeFiles[name];
    return new Uint8Array(await bytes);
  }

  async function start() {
    // On a server, ort.env.wasm.wasmPaths = "folder/" does; here the runtime gets its own two files from memory.
    const glue = new Blob([await unpack("glue")], { type: "text/javascript" });
    ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(glue) };
    ort.env.wasm.wasmBinary = await unpack("wasm");
    ort.env.wasm.numThreads = 1; // more need headers that only a server can send
    stream = await AdaptingStream.open(ort, await unpack("model"));
    const file = await unpack("digits"), count = file.length / (PIXELS + 1); // the labels, then the pixels
    digits = { labels: file.subarray(0, count), pixels: file.subarray(count) };
  }

  // -- the stream of digits -------------------------------------------------------------------------------------------

  /** Yield places of digits for ever: shuffled, or in bursts of 15 to 40 of one class. The same in every run. */
  function* places(bursts) {
    const draw = randomness(1);
    const shuffled = (list) => {
      for (let i = list.length - 1; i > 0; i--) {
        const other = draw.below(i + 1);
        [list[i], list[other]] = [list[other], list[i]];
      }
      return list;
    };
    const all = [...digits.labels.keys()];
    while (!bursts) yield* shuffled(all);
    const classes = Array.from({ length: 10 }, (_, k) => shuffled(all.filter((place) => digits.labels[place] === k)));
    for (;;) {
      const members = classes[draw.below(10)];
      for (let left = 15 + draw.below(26); left > 0; left--) {
        yield members[0];
        members.push(members.shift());
      }
    }
  }

  /** Return the names of the corruptions of the n-th digit of the stream. */
  function namesFor(n) {
    const { chosen } = play, mix = find("mix").value;
    if (chosen.length < 2 || mix === "together") return chosen;
    const since = n - (play.changes.at(-1)?.at ?? 0);
    const turn = mix === "turns" ? Math.floor(since / TURN) : randomness(7919 + n).below(chosen.length);
    return [chosen[turn % chosen.length]];
  }

  /** Return the next digits: their pixels, as the network takes them, and their labels. */
  function draw() {
    const images = new Uint8Array(BATCH * PIXELS), labels = [];
    for (let i = 0; i < BATCH; i++) {
      const place = order.next().value, n = play.seen.length + i;
      const clean = digits.pixels.subarray(place * PIXELS, (place + 1) * PIXELS);
      images.set(Corruptions.apply(clean, namesFor(n), Number(find("severity").value), n), i * PIXELS);
      labels.push(digits.labels[place]);
    }
    return { images, labels };
  }

  async function step() {
    const { images, labels } = draw();
    const { logits, source_logits } = await stream.run(images);
    const [adapted, source] = [logits, source_logits].map(AdaptingStream.classes);
    labels.forEach((label, i) => {
      play.seen.push({ label, source: source[i], adapted: adapted[i] });
      addToStrip(play.seen.at(-1), images.subarray(i * PIXELS, (i + 1) * PIXELS));
    });
    play.onbatch?.(images);
  }

  async function loop() {
    if (play.busy) return;
    play.busy = true;
    for (let due = performance.now(); play.running; ) {
      await step();
      render();
      const pace = Number(find("pace").value);
      due = Math.max(due + (pace ? (1000 * BATCH) / pace : 0), performance.now());
      await wait(due - performance.now()); // if only for a moment: the page stays alive
    }
    play.busy = false;
  }

  function run(on) {
    play.running = on;
    root.dataset.state = on ? "running" : "paused";
    find("run").textContent = on ? "Pause" : play.seen.length ? "Go on" : "Start";
    if (!on && play.seen.length) say(summary());
    if (on) loop().catch(fail);
  }

  function fail(error) {
    root.dataset.state = "failed";
    say(`This browser cannot run the network: ${error.message}`);
  }

  async function reset() {
    const on = play.running;
    run(false);
    while (play.busy) await wait(5); // the batch on its way belongs to the old stream
    stream.reset();
    order = places(find("order").value === "bursts");
    Object.assign(play, { seen: [], changes: [] });
    find("strip").replaceChildren();
    say("The network is back at its training.");
    run(on);
    render();
  }

  // -- drawing --------------------------------------------------------------------------------------------------------

  const errors = (who, from, to) => {
    const part = play.seen.slice(Math.max(0, from), to);
    return part.length ? part.filter((one) => one[who] !== one.label).length / part.length : null;
  };
  const say = (words) => { find("status").textContent = words; };
  const summary = () => {
    const [source, adapted] = ["source", "adapted"].map((who) => percent(errors(who, play.seen.length - WINDOW)));
    return `After ${play.seen.length} digits: wrong of the last ${WINDOW}, as trained ${source}, adapting ${adapted}.`;
  };

  function addToStrip({ label, source, adapted }, pixels) {
    const item = document.createElement("li"), canvas = document.createElement("canvas");
    canvas.width = canvas.height = SIZE;
    const picture = new ImageData(SIZE, SIZE);
    pixels.forEach((value, i) => picture.data.set([value, value, value, 255], 4 * i));
    canvas.getContext("2d").putImageData(picture, 0, 0);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `a ${label}`);
    const mark = (who, says) => {
      const made = document.createElement("span");
      made.className = `${who} ${says === label ? "right" : "wrong"}`;
      made.textContent = `${says} ${says === label ? "✓" : "✗"}`;
      return made;
    };
    item.append(canvas, mark("source", source), mark("adapted", adapted));
    const strip = find("strip");
    strip.prepend(item);
    while (strip.children.length > CELLS) strip.lastChild.remove();
  }

  function drawChart() {
    const chart = find("chart"), width = Math.max(280, chart.clientWidth), height = 220, count = play.seen.length;
    const [left, right, top, bottom] = [44, 14, 16, 28];
    const first = Math.max(0, count - SHOWN), span = Math.max(500, count - first);
    const x = (n) => left + ((n - first) / span) * (width - left - right);
    const y = (error) => top + (1 - error) * (height - top - bottom);
    const wrong = { source: [0], adapted: [0] }; // running sums, so that a window is a difference
    for (const one of play.seen) for (const who in wrong) wrong[who].push(wrong[who].at(-1) + (one[who] !== one.label));
    const every = Math.max(BATCH, Math.ceil(span / 400));
    const line = (who) => {
      const points = [];
      for (let n = count; n >= first + 10; n -= every) {
        const from = Math.max(0, n - WINDOW);
        points.push(`${x(n).toFixed(1)},${y((wrong[who][n] - wrong[who][from]) / (n - from)).toFixed(1)}`);
      }
      return `<polyline class="${who}" points="${points.join(" ")}"/>`;
    };
    const rules = [0, 0.25, 0.5, 0.75, 1].map((e) =>
      `<line x1="${left}" x2="${width - right}" y1="${y(e)}" y2="${y(e)}"/>`
      + `<text x="${left - 6}" y="${y(e) + 4}" text-anchor="end">${100 * e} %</text>`);
    const unit = span > 1000 ? 500 : span > 500 ? 200 : 100;
    for (let n = Math.ceil(first / unit) * unit; n <= first + span; n += unit) {
      rules.push(`<text x="${x(n)}" y="${height - 8}" text-anchor="middle">${n}</text>`);
    }
    const shown = play.changes.filter(({ at }) => at >= first && at < count);
    const changes = shown.map(({ at, words }, i) => {
      const next = shown[i + 1]?.at ?? first + span, room = Math.floor((x(next) - x(at)) / 6.4) - 1;
      const text = words.length <= room ? words : room > 4 ? `${words.slice(0, room - 1)}…` : "";
      return `<line class="change" x1="${x(at)}" x2="${x(at)}" y1="${top - 6}" y2="${height - bottom}"/>`
        + `<text class="change" x="${x(at) + 4}" y="${top - 5}">${text}</text>`;
    });
    chart.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" aria-hidden="true">`
      + `${rules.join("")}${changes.join("")}${line("source")}${line("adapted")}</svg>`;
    if (count) chart.setAttribute("aria-label", summary());
  }

  /** Return the weights of the statistics of training and of each speed: what the model file computes, too. */
  function weights() {
    const { bonus, temperature } = stream.header.fields;
    const powers = Array.from(stream.state.score.data, (score, i) => Math.exp(((i ? 0 : bonus) - score) / temperature));
    const total = powers.reduce((a, b) => a + b);
    return powers.map((power) => power / total);
  }

  function drawInside() {
    const shares = weights(), now = stream.state["pooled.mean"].data;
    const { mean, deviation } = trained(), channels = mean.length;
    const canvas = find("drift"), scale = devicePixelRatio || 1, row = 16;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = row * LAYERS.length * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    let channel = 0, total = 0;
    LAYERS.forEach((count, layer) => {
      const wide = canvas.clientWidth / count;
      for (let i = 0; i < count; i++, channel++) {
        let shift = 0; // in standard deviations of the channel, of the mixture against training
        for (let v = 1; v < shares.length; v++) {
          shift += shares[v] * (now[(v - 1) * channels + channel] - mean[channel]) / deviation[channel];
        }
        total += Math.abs(shift);
        const colour = shift > 0 ? "234, 88, 12" : "37, 99, 235";
        pen.fillStyle = `rgba(${colour}, ${Math.min(1, 0.1 + 1.5 * Math.abs(shift))})`;
        pen.fillRect(i * wide + 0.5, layer * row + 0.5, wide - 1, row - 1);
      }
    });
    const moved = `On average, a mean has moved by ${(total / channels).toFixed(2)} standard deviations`;
    canvas.setAttribute("aria-label", moved);
    const words = shares.map((share, i) => `${SPEEDS[i]} ${Math.round(100 * share)} %`);
    find("trust").setAttribute("aria-label", words.join(", "));
    shares.forEach((share, i) => {
      const part = find("trust").children[i];
      part.querySelector("i").style.width = `${100 * share}%`;
      part.querySelector("b").textContent = `${Math.round(100 * share)} %`;
    });
  }

  /** Return what every speed begins at, the statistics of training: the first entries of a fresh state. */
  function trained() {
    const value = (name) => stream.start.find((tensor) => tensor.name === name).data;
    const channels = value("pooled.mean").length / (SPEEDS.length - 1);
    const deviation = value("pooled.var").subarray(0, channels).map((variance) => Math.sqrt(variance) + 1e-6);
    return { mean: value("pooled.mean").subarray(0, channels), deviation };
  }

  function render() {
    const count = play.seen.length;
    for (const who of ["source", "adapted"]) {
      const now = errors(who, count - WINDOW), all = errors(who, 0);
      find(`${who}-now`).textContent = now === null ? "–" : percent(now);
      find(`${who}-all`).textContent = all === null ? "–" : percent(all, 1);
      find(`${who}-bar`).style.width = `${100 * (now ?? 0)}%`;
    }
    for (const place of root.querySelectorAll("[data-seen]")) place.textContent = count.toLocaleString("en");
    root.dataset.seen = count;
    if (play.running && count % 250 === 0) say(summary()); // not oftener: a screen reader reads it aloud
    drawChart();
    drawInside();
  }

  // -- controls -------------------------------------------------------------------------------------------------------

  function changed() {
    const pressed = [...find("kinds").querySelectorAll("[aria-pressed=true]")];
    play.chosen = pressed.map((chip) => chip.dataset.kind).filter(Boolean);
    find("kinds").firstChild.setAttribute("aria-pressed", play.chosen.length === 0);
    find("mix").disabled = play.chosen.length < 2;
    find("severity-shown").textContent = `${find("severity").value} of 5`;
    find("severity").setAttribute("aria-valuetext", find("severity-shown").textContent);
    const joint = { together: " + ", turns: " → ", random: " | " }[find("mix").value];
    const names = play.chosen.map((name) => Corruptions.labels[name]).join(joint);
    const words = names ? `${names}, ${find("severity").value}` : "Nothing", at = play.seen.length;
    play.changes = [...play.changes.filter((change) => change.at !== at), { at, words }];
    render();
  }

  function build() {
    for (const [name, words] of [["", "Nothing"], ...Object.entries(Corruptions.labels)]) {
      const chip = document.createElement("button");
      Object.assign(chip, { type: "button", textContent: words, onclick: () => {
        const on = chip.getAttribute("aria-pressed") === "true";
        if (!name) for (const other of find("kinds").children) other.setAttribute("aria-pressed", false);
        else chip.setAttribute("aria-pressed", !on);
        changed();
      } });
      chip.dataset.kind = name;
      chip.setAttribute("aria-pressed", !name);
      find("kinds").append(chip);
    }
    for (const name of SPEEDS) {
      const part = document.createElement("div");
      part.innerHTML = `<span>${name}</span><span class="play-bar"><i></i></span><b></b>`;
      find("trust").append(part);
    }
    for (const id of ["severity", "mix"]) find(id).oninput = changed;
    find("order").oninput = () => { order = places(find("order").value === "bursts"); };
    find("run").onclick = () => run(!play.running);
    find("reset").onclick = () => reset().then(changed);
    find("freeze").onclick = () => {
      stream.frozen = !stream.frozen;
      find("freeze").setAttribute("aria-pressed", stream.frozen);
      find("freeze").textContent = stream.frozen ? "Learn again" : "Stop learning";
    };
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
      if (event.key === " " && !event.target.closest("button, a, summary")) find("run").click();
      else if (event.key.toLowerCase() === "r") find("reset").click();
      else return;
      event.preventDefault(); // space scrolls
    });
    document.addEventListener("visibilitychange", () => document.hidden && play.running && run(false));
    addEventListener("resize", render);
    for (const id of ["run", "reset", "freeze"]) find(id).disabled = false;
  }

  globalThis.tribePlay = play; // for the curious, and for the test
  start().then(() => {
    order = places(false);
    build();
    changed();
    run(!matchMedia("(prefers-reduced-motion: reduce)").matches);
    say("Ready. Choose what disturbs the camera.");
  }).catch(fail);
})();
