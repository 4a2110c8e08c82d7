"""The corruptions that the page "Try it" computes in JavaScript."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch

from places import ROOT
from tribe import corruptions, datasets

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node: make extras")
COUNT = 24
SCRIPT = """
const corruptions = require(process.argv[1]);
const digits = require("node:fs").readFileSync(0), found = {};
for (const name of Object.keys(corruptions.labels)) {
  for (const severity of [1, 2, 3, 4, 5]) {
    const apply = (i) => [...corruptions.apply(digits.subarray(784 * i, 784 * (i + 1)), [name], severity, i)];
    found[`${name} ${severity}`] = Array.from({ length: digits.length / 784 }, (_, i) => apply(i));
  }
}
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def clean():
    return datasets.create("mnist").images("clean", torch.arange(COUNT))


@pytest.fixture(scope="module")
def corrupt(clean):
    """Corrupt the digits in node: the name and severity, to images."""

    def run():
        command = [NODE, "-e", SCRIPT, str(ROOT / "website/play/corruptions.js")]
        pixels = (255 * clean).round().byte().numpy().tobytes()
        done = subprocess.run(command, input=pixels, capture_output=True, check=True)
        return {name: np.array(x).reshape(COUNT, 1, 28, 28) / 255 for name, x in json.loads(done.stdout).items()}

    return run


def test_they_change_digits_more_at_each_severity_and_the_same_in_every_run(clean, corrupt):
    made, again = corrupt(), corrupt()
    names = {name.split()[0] for name in made}
    assert len(names) >= 10
    for name in names:
        moved = [np.abs(made[f"{name} {severity}"] - clean.numpy()).mean() for severity in range(1, 6)]
        assert moved[0] > 0, name
        assert moved == sorted(moved), name
    assert all(np.array_equal(x, again[name]) for name, x in made.items())


@pytest.mark.parametrize(("name", "own"), [("contrast", "contrast"), ("light", "brightness")])
def test_what_is_not_random_equals_the_librarys(clean, corrupt, name, own):
    made = corrupt()
    for severity in range(1, 6):
        theirs = corruptions.apply(clean.expand(-1, 3, -1, -1), own, severity, family="common")[:, :1]
        np.testing.assert_allclose(made[f"{name} {severity}"], theirs.numpy(), atol=1.01 / 255)


def test_noise_has_the_deviation_that_is_published(clean, corrupt):
    made, grey = corrupt(), (clean > 0.4) & (clean < 0.6)
    for severity, deviation in enumerate((0.08, 0.12), 1):
        noise = (made[f"noise {severity}"] - clean.numpy())[grey.numpy()]
        assert np.std(noise) == pytest.approx(deviation, rel=0.15)
        assert abs(np.mean(noise)) < 0.02
