"""The benchmark of a ResNet-50 beside its yardstick runs, here with a small network, and keeps what it was run with."""

import json

import pytest
from benchmarks import resnet50

NETWORK = """
from torch import nn

def ResNet50():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4))
"""


@pytest.mark.slow
def test_it_measures_steps_memory_and_yardstick(tmp_path):
    (tmp_path / "net.py").write_text(NETWORK)
    small = {"device": "cpu", "batch": "2", "size": "8", "rounds": "1", "precisions": "tf32", "wrn": "resnet8"}
    small |= {
        "contenders": "tent,tribe",
        "model": str(tmp_path / "net.py"),
        "out": str(tmp_path),
        "note": "commit 1234567",
    }
    resnet50.main([part for name, value in small.items() for part in (f"--{name}", value)])
    found = json.loads((tmp_path / "resnet50.json").read_text())
    assert found["settings"] == {"note": "commit 1234567", "batch": 2, "size": 8, "rounds": 1, "yardstick": None}
    passes = 2 * found["tf32 inference, ms an image"] + 2 * found["tf32 forward and backward, ms an image"]
    assert found["tf32 yardstick, ms an image"] == passes > 0
    for name in ("tent", "tribe"):
        assert found[f"tf32 {name} / yardstick"] == found[f"tf32 {name}, ms an image"] / passes
    assert found["tf32 resnet8 tribe, ms an image"] > 0 < found["tf32 resnet8 tribe-unfused, ms an image"]
