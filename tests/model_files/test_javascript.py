"""The example of a host in JavaScript, in node: a stream's state is kept between images, as a session keeps it."""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from exported import digits
from places import ROOT
from tribe.onnx import Session

MODULES = ROOT / "build/npm/node_modules"
NODE = shutil.which("node")
HOST = ROOT / "examples/adapting_stream.js"
pytestmark = [
    pytest.mark.skipif(NODE is None, reason="needs node: make extras"),
    pytest.mark.skipif(not (MODULES / "onnxruntime-web").is_dir(), reason="needs onnxruntime-web: make extras"),
]


def run(*arguments):
    command = [NODE, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "NODE_PATH": str(MODULES)}
    )


def test_the_example_is_short():
    assert len(HOST.read_text().splitlines()) <= 100


def test_it_predicts_what_a_session_predicts(model_file, session, tmp_path):
    x = digits(512)[0].numpy()
    x.tofile(tmp_path / "images.bin")
    done = run(HOST, model_file("digits"), tmp_path / "images.bin", 7)
    assert done.returncode == 0, done.stderr
    lines = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    ours = session("digits")
    assert lines == [ours(x[at : at + 7]).argmax(1).tolist() for at in range(0, 512, 7)]


BY_HAND = """
const { AdaptingStream } = require(process.argv[2]), { readFileSync } = require("node:fs");
const bytes = new Uint8Array(readFileSync(process.argv[3])), x = new Uint8Array(readFileSync(process.argv[4]));
(async () => {
  const stream = await AdaptingStream.open(require("onnxruntime-web"), bytes), size = 3 * 16 * 16, states = [];
  const keep = () => states.push(Object.fromEntries(
    Object.entries(stream.state).map(([name, tensor]) => [name, Array.from(tensor.data, Number)])));
  keep();
  await Promise.all([stream.run(x.slice(0, 4 * size)), stream.run(x.slice(4 * size, 8 * size))]); // at once
  keep();
  stream.frozen = true;
  const { logits, source_logits } = await stream.run(x);
  keep();
  stream.reset();
  keep();
  const others = [];
  for (const bad of [x.slice(0, 5), x.slice(0, 0)]) await stream.run(bad).catch((error) => others.push(error.message));
  stream.frozen = false;
  await stream.run(x); // an error before it takes nothing with it
  let refused = "";
  await AdaptingStream.open(require("onnxruntime-web"), new Uint8Array([8, 7])).catch((e) => (refused = e.message));
  console.log(JSON.stringify({ states, logits: [...logits.data], source: [...source_logits.data], others, refused }));
})();
"""


def test_states_freeze_reset_and_errors(model_file, session, tmp_path):
    """A file with frame checks and the source's predictions, of bytes."""
    x = np.random.default_rng(0).integers(20, 230, (12, 3, 16, 16), dtype=np.uint8)
    x.tofile(tmp_path / "images.bin")
    (tmp_path / "by_hand.js").write_text(BY_HAND)
    done = run(tmp_path / "by_hand.js", HOST, model_file("watched"), tmp_path / "images.bin")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours: Session = session("watched")
    first, moved, frozen, reset = found["states"]

    def equal(theirs):
        state = ours.state()
        for name, values in theirs.items():
            np.testing.assert_allclose(values, state[name].astype(float).ravel(), atol=1e-5, err_msg=name)

    assert sorted(first) == sorted(ours.moving)
    equal(first)
    ours(x[:4])
    ours(x[4:8])
    equal(moved)
    out = ours.freeze().run(x)
    assert frozen == moved
    np.testing.assert_allclose(found["logits"], out["logits"].ravel(), atol=1e-4)
    np.testing.assert_allclose(found["source"], out["source_logits"].ravel(), atol=1e-4)
    assert reset == first
    assert len(found["others"]) == 2
    assert "export" in found["refused"]
