// Run a model file that adapts, in node or in a web page: one stream, whose state is kept between images.
//
//   npm install onnxruntime-web
//   node adapting_stream.js net.onnx images.bin 8      # prints the class of each image; learns from 8 at a time
// images.bin: images one after the other, as the file takes them: float32, or bytes after export(uint8=True).
// In a page, load ONNX Runtime's script, then this one, and call `AdaptingStream.open(ort, bytes)`.
"use strict";

class AdaptingStream {
  /** Open a model file: `ort` is what onnxruntime-web exports, `bytes` (Uint8Array) is the file. */
  static async open(ort, bytes) {
    const stream = new AdaptingStream(), notes = readNotes(bytes);
    if (!("tribe.format" in notes)) throw new Error("this is no file that tribe.onnx.export wrote");
    stream.ort = ort;
    stream.header = JSON.parse(notes["tribe.header"]); // method, fields, shape of an image, names of the state
    stream.start = readTensors(fromBase64(notes["tribe.start"]), stream.header);
    stream.session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
    stream.frozen = stream.header.frozen;
    return stream.reset();
  }

  /** Return to the state that the file was exported with. */
  reset() {
    const { Tensor } = this.ort;
    this.state = Object.fromEntries(this.start.map((t) => [t.name, new Tensor(t.type, t.data, t.shape)]));
    return this;
  }

  /** Predict images, then adapt, unless frozen: {logits, ...}. Each run waits for the state of the one before. */
  run(images) {
    return (this.queue = Promise.resolve(this.queue).catch(() => {}).then(() => this.step(images)));
  }

  async step(images) {
    const before = this.state, { shape, options } = this.header;
    const count = images.length / shape.reduce((a, b) => a * b);
    if (!(count >= 1 && count % 1 === 0)) throw new Error(`expected whole images of ${shape.join(" x ")}`);
    const given = new this.ort.Tensor(options.uint8 ? "uint8" : "float32", images, [count, ...shape]);
    const out = await this.session.run({ images: given, ...before });
    // The next state comes out beside the logits. Frozen, only a time filter moves on; what overflowed is not kept.
    const sound = (name) => !name.includes("pooled.") || out[`next.${name}`].data.every(Number.isFinite);
    const learn = Object.keys(before).every(sound);
    const moves = (name) => (this.frozen ? name.startsWith("filter.") : learn);
    const next = Object.keys(before).map((name) => [name, moves(name) ? out[`next.${name}`] : before[name]]);
    if (this.state === before) this.state = Object.fromEntries(next); // else it was reset meanwhile
    return out;
  }

  /** Return the class of each image: where a row of logits (N, K) is largest. */
  static classes({ data, dims: [count, classes] }) {
    const rows = Array.from({ length: count }, (_, i) => data.slice(i * classes, (i + 1) * classes));
    return rows.map((row) => row.indexOf(Math.max(...row)));
  }
}

/** Yield the fields of a protobuf message that are bytes: [number, bytes]. */
function* fields(bytes) {
  let at = 0;
  const next = (value = 0, scale = 1) =>
    bytes[at] > 127 ? next(value + (bytes[at++] - 128) * scale, scale * 128) : value + bytes[at++] * scale;
  while (at < bytes.length) {
    const tag = next(), value = next(); // the value, or how many bytes it has
    if (tag % 8) yield [tag >> 3, bytes.subarray(at, (at += value))];
  }
}

/** Read the metadata of an ONNX file, which the runtime does not show in JavaScript: field 14, pairs of texts. */
function readNotes(bytes) {
  const pairs = [...fields(bytes)].filter(([number]) => number === 14).map(([, pair]) => [...fields(pair)]);
  return Object.fromEntries(pairs.map((pair) => pair.map(([, text]) => new TextDecoder().decode(text))));
}

/** Read the state's tensors from safetensors, where an axis that is constant has a single entry. */
function readTensors(bytes, { moving, shapes }) {
  const begin = 8 + Number(new DataView(bytes.buffer).getBigUint64(0, true));
  const entries = JSON.parse(new TextDecoder().decode(bytes.subarray(8, begin)));
  const types = { F32: ["float32", Float32Array], I64: ["int64", BigInt64Array], U8: ["uint8", Uint8Array] };
  return moving.map((name) => {
    const { dtype, shape: small, data_offsets: ends } = entries[name], shape = shapes[name];
    const [type, Numbers] = types[dtype], values = new Numbers(bytes.slice(...ends.map((end) => begin + end)).buffer);
    const spread = (axis, at) => // all entries from an axis on; `at` is their place in the file
      axis === shape.length ? [values[at]] : Array.from({ length: shape[axis] },
        (_, i) => spread(axis + 1, at * small[axis] + (small[axis] > 1 ? i : 0))).flat();
    return { name, type, data: Numbers.from(spread(0, 0)), shape };
  });
}

const fromBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
async function main([model, images, batch = 1]) {
  const { readFileSync } = require("node:fs"), read = (path) => new Uint8Array(readFileSync(path));
  const stream = await AdaptingStream.open(require("onnxruntime-web"), read(model)), { shape, options } = stream.header;
  const all = options.uint8 ? read(images) : new Float32Array(read(images).buffer);
  const size = batch * shape.reduce((a, b) => a * b);
  for (let at = 0; at < all.length; at += size) {
    console.log(AdaptingStream.classes((await stream.run(all.slice(at, at + size))).logits).join(" "));
  }
}

if (typeof module === "object") module.exports = { AdaptingStream };
if (typeof require === "function" && require.main === module) main(process.argv.slice(2));
