// Corruptions of grey digits of 28 x 28, after the published definitions of MNIST-C and ImageNet-C.
//
// An image is a Float32Array of 784 numbers in [0, 1]. `apply` depends on nothing but its arguments: the same digit,
// corruptions and seed give the same picture in every run.
"use strict";

const Corruptions = (() => {
  const SIZE = 28, PIXELS = SIZE * SIZE;

  /** Return a generator of random numbers in [0, 1) (mulberry32), with draws from other distributions. */
  function randomness(seed) {
    let a = Math.imul(seed + 1, 0x9e3779b1);
    const draw = () => {
      a = (a + 0x6d2b79f5) | 0;
      let t = Math.imul(a ^ (a >>> 15), 1 | a);
      t ^= t + Math.imul(t ^ (t >>> 7), 61 | t);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    draw.between = (low, high) => low + (high - low) * draw();
    draw.below = (count) => Math.floor(count * draw());
    draw.normal = () => Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
    draw.poisson = (mean) => { // how often numbers can be multiplied before they fall below exp(-mean)
      let count = 0;
      for (let product = draw(); product > Math.exp(-mean); product *= draw()) count++;
      return count;
    };
    return draw;
  }

  const each = (x, change) => x.map((value, place) => change(value, place % SIZE, Math.floor(place / SIZE)));
  const mean = (x) => x.reduce((sum, value) => sum + value, 0) / x.length;
  const mirrored = (i) => (i < 0 ? -i : i >= SIZE ? 2 * SIZE - 2 - i : i); // borders reflect

  /** Return the weighted mean of pixels around each pixel; `taps` are [dx, dy, weight], whose sum is divided out. */
  function filter(x, taps) {
    const total = taps.reduce((sum, [, , weight]) => sum + weight, 0);
    return each(x, (_, column, row) => {
      let sum = 0;
      for (const [dx, dy, weight] of taps) sum += weight * x[mirrored(row + dy) * SIZE + mirrored(column + dx)];
      return sum / total;
    });
  }

  /** Sample an image where `from` says each pixel comes from: bilinear, and black outside. */
  function warp(x, from) {
    const at = (column, row) => (column < 0 || row < 0 || column >= SIZE || row >= SIZE ? 0 : x[row * SIZE + column]);
    return each(x, (_, column, row) => {
      const [u, v] = from(column - (SIZE - 1) / 2, row - (SIZE - 1) / 2).map((offset) => offset + (SIZE - 1) / 2);
      const left = Math.floor(u), top = Math.floor(v), du = u - left, dv = v - top;
      const upper = (1 - du) * at(left, top) + du * at(left + 1, top);
      return (1 - dv) * upper + dv * ((1 - du) * at(left, top + 1) + du * at(left + 1, top + 1));
    });
  }

  /** Return a fractal cloud, scaled to [0, 1]: the corner of a map of 32 x 32, by midpoint displacement. */
  function cloud(decay, draw) {
    const map = new Float32Array(32 * 32), at = (row, column) => map[(row & 31) * 32 + (column & 31)];
    for (let step = 32, height = 10; step > 1; step /= 2, height /= decay) {
      const half = step / 2, wobble = () => height * draw.between(-height, height);
      for (let row = half; row < 32; row += step) {
        for (let column = half; column < 32; column += step) { // the centres of squares
          const corners = at(row - half, column - half) + at(row - half, column + half)
            + at(row + half, column - half) + at(row + half, column + half);
          map[row * 32 + column] = corners / 4 + wobble();
        }
      }
      for (let row = 0; row < 32; row += half) {
        for (let column = (row + half) % step; column < 32; column += step) { // the centres of their sides
          const sides = at(row - half, column) + at(row + half, column)
            + at(row, column - half) + at(row, column + half);
          map[row * 32 + column] = sides / 4 + wobble();
        }
      }
    }
    const low = map.reduce((a, b) => Math.min(a, b)), high = map.reduce((a, b) => Math.max(a, b));
    return (column, row) => (at(row, column) - low) / (high - low);
  }

  function disk(radius) { // soft at the edge, so that radii between whole numbers differ
    const taps = [], reach = Math.ceil(radius);
    for (let dy = -reach; dy <= reach; dy++) {
      for (let dx = -reach; dx <= reach; dx++) {
        const weight = Math.min(1, Math.max(0, radius + 0.5 - Math.hypot(dx, dy)));
        if (weight > 0) taps.push([dx, dy, weight]);
      }
    }
    return taps;
  }

  // Name, words for people, a parameter for each of five severities, and the change. A network that has only seen
  // digits on black fails in the lightest published fog, so the fog here begins below it.
  const kinds = {
    fog: ["Fog", [[0.05, 3], [0.1, 3], [0.2, 3], [0.35, 3], [0.5, 3]], (x, [amount, decay], draw) => {
      const fog = cloud(decay, draw), most = x.reduce((a, b) => Math.max(a, b));
      return each(x, (value, column, row) => (value + amount * fog(column, row)) * most / (most + amount));
    }],
    noise: ["Noise", [0.08, 0.12, 0.18, 0.26, 0.38], (x, deviation, draw) =>
      x.map((value) => value + deviation * draw.normal())],
    dots: ["Black and white dots", [0.03, 0.06, 0.09, 0.17, 0.27], (x, share, draw) =>
      x.map((value) => (draw() < share ? Math.round(draw()) : value))],
    night: ["Few photons", [25, 12, 5, 3, 1.5], (x, photons, draw) =>
      x.map((value) => draw.poisson(value * photons) / photons)],
    light: ["Bright light", [0.05, 0.1, 0.15, 0.2, 0.3], (x, amount) => x.map((value) => value + amount)],
    contrast: ["Low contrast", [0.75, 0.5, 0.4, 0.3, 0.15], (x, share) => {
      const middle = mean(x);
      return x.map((value) => middle + share * (value - middle));
    }],
    blur: ["Out of focus", [1, 1.5, 2, 2.5, 3], (x, radius) => filter(x, disk(radius))],
    motion: ["Moving camera", [[6, 1], [6, 1.5], [6, 2], [8, 2], [10, 3]], (x, [radius, deviation], draw) => {
      const angle = draw.between(-Math.PI / 4, Math.PI / 4), taps = [];
      for (let i = 0; i <= 2 * radius; i++) {
        const there = [Math.round(i * Math.cos(angle)), Math.round(i * Math.sin(angle))];
        taps.push([...there, Math.exp(-(i * i) / (2 * deviation * deviation))]);
      }
      return filter(x, taps);
    }],
    stripes: ["Stripes", [1, 2, 3, 4, 5], (x, width) =>
      each(x, (value, column) => (column < width || column >= SIZE - width ? 1 - value : value))],
    pixels: ["Coarse pixels", [16, 13, 11, 9, 8], (x, cells) => {
      const sums = new Float32Array(cells * cells), counts = new Float32Array(cells * cells);
      const cell = (column, row) => Math.floor(row * cells / SIZE) * cells + Math.floor(column * cells / SIZE);
      each(x, (value, column, row) => { sums[cell(column, row)] += value; counts[cell(column, row)]++; return 0; });
      return each(x, (_, column, row) => sums[cell(column, row)] / counts[cell(column, row)]);
    }],
    tilt: ["Tilted", [0.2, 0.3, 0.4, 0.5, 0.6], (x, most, draw) => { // in radians, to either side
      const angle = draw() < 0.5 ? most : -most, c = Math.cos(angle), s = Math.sin(angle);
      return warp(x, (column, row) => [c * column - s * row, s * column + c * row]);
    }],
    small: ["Far away", [1.2, 1.3, 1.45, 1.6, 1.8], (x, factor) =>
      warp(x, (column, row) => [column * factor, row * factor])],
  };

  /** Corrupt a digit (784 bytes) with the named corruptions, one after the other, at a severity of 1 to 5. */
  function apply(digit, names, severity, seed) {
    let x = Float32Array.from(digit, (byte) => byte / 255);
    for (const name of names) {
      const [, table, change] = kinds[name];
      const draw = randomness(seed * 31 + Object.keys(kinds).indexOf(name));
      x = change(x, table[severity - 1], draw).map((value) => Math.min(1, Math.max(0, value)));
    }
    return Uint8Array.from(x, (value) => Math.floor(255 * value + 1e-3)); // as the benchmarks store them
  }

  const labels = Object.fromEntries(Object.entries(kinds).map(([name, [label]]) => [name, label]));
  return { apply, labels, randomness, SIZE, PIXELS };
})();

if (typeof module === "object") module.exports = Corruptions;
