"""`tribe sweep` as people call it: grids and lists, resumed sweeps, the summary, heat maps, and wrong fields."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from commands import assert_refused, message, succeeded, tribe_command, write_method
from layouts import write_folder
from processes import Touches, ended, interrupted
from tribe.experiments.store import finished

pytestmark = pytest.mark.usefixtures("few")
TINY = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=1000000")
TENT = ("--method", "tent", *TINY)


def sweep(*arguments):
    return tribe_command("sweep", *arguments)


def files(folder):
    """What is on disk of each result."""
    return {path: path.stat().st_ino for path in Path(folder).glob("*/*") if path.name != ".lock"}


def assert_drawn(path, *words):
    """A chart with these words, where charts can be drawn."""
    if find_spec("matplotlib") is not None:
        assert all(word in Path(path).read_text() for word in words)


def test_a_grid_and_the_same_again():
    grid = ("--grid", "tent.lr=0,1e-3", "--grid", "batch=32,64", *TENT)
    result = succeeded(sweep(*grid, "--json", "summary.json"))
    report = json.loads(Path("summary.json").read_text())
    assert [point["fields"] for point in report["points"]] == [
        {"tent.lr": lr, "batch": batch} for lr in (0, 1e-3) for batch in (32, 64)
    ]
    results = {result.experiment.id: result for result in finished("runs")}
    for point in report["points"]:
        result_of = results[point["id"]]
        assert point["instance_error"] == [result_of.error()]
        assert result_of.experiment.method.fields["lr"] == point["fields"]["tent.lr"]
        assert result_of.experiment.batch == point["fields"]["batch"]
    assert len(results) == 4
    assert report["score"]["name"] == "entropy", "tent has no student"
    best = min(report["points"], key=lambda point: point["instance_error"][0])
    assert report["best"]["with_labels"]["fields"] == best["fields"]
    chosen = min(report["points"], key=lambda point: point["scores"]["entropy"])
    assert report["best"]["without_labels"]["fields"] == chosen["fields"]
    assert "best without labels, by entropy" in result.stdout
    assert "best with labels" in result.stdout
    before = files("runs")
    listed = ("--list", "tent.lr=0,1e-3", "--list", "batch=64,32", *TENT)
    again = json.loads(sweep(*listed, "--json", "-", "--score", "confidence").stdout)
    assert again["points"] == [report["points"][1], report["points"][2]]
    assert again["score"]["name"] == "confidence"
    assert files("runs") == before, "nothing is computed twice"
    (chart, *_) = Path("runs").glob("*.svg")
    assert_drawn(chart, "instance error, %", "entropy, lower is better", "tent.lr", "batch", "best with labels")


def test_a_sweep_that_was_stopped_goes_on():
    options = ("-m", "tribe", "sweep", "--grid", "tent.lr=0,1e-3", *TENT)
    stopped = interrupted(*options, when=Touches("os.rename", "record-0.npz", 2))
    assert stopped.code == 130
    assert "stopped; finished work is in runs, and the same command resumes from there" in stopped.err
    assert len(list(finished("runs"))) == 1
    before = files("runs")
    assert ended(*options).code == 0
    assert len(list(finished("runs"))) == 2
    first = next(result for result in finished("runs") if (result.folder / "record-0.npz") in before)
    assert files("runs")[first.folder / "record-0.npz"] == before[first.folder / "record-0.npz"]


def test_points_on_different_streams_have_no_best():
    result = succeeded(sweep("--grid", "scenario.imbalance=1e6,1e5", "--method", "source", *TINY[:2]))
    assert "no best point: the points were played on 2 different streams" in result.stdout


def test_a_dry_run_lists_points():
    result = sweep("--grid", "tent.lr=0,1e-3", *TENT, "--dry-run", "--json", "-")
    assert [point["done"] for point in json.loads(result.stdout)["points"]] == [False, False]
    assert "2 points, 0 done" in result.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "the sweep is empty"),
        (("--grid", "tent.lr"), "--grid takes COMPONENT.FIELD=VALUE,VALUE"),
        (("--grid", "lr=1"), "'lr' is not a field: expected COMPONENT.FIELD, such as tent.lr, or batch"),
        (("--grid", "tent.rate=1,2"), "method 'tent' has no field 'rate'"),
        (("--grid", "tnt.lr=1,2"), "'tnt' takes no part in this sweep: did you mean 'tent'?"),
        (("--grid", "tribe.lr=1,2"), "tribe.lr: 'tribe' takes no part in this sweep: --method tribe sweeps it"),
        (("--grid", "scenario.sigm=1,2"), "has no field 'sigm': did you mean 'sigma'?"),
        (("--grid", "tent.lr=0.1,fast"), "lr of tent is a finite number; got 'fast'"),
        (("--grid", "batch=0"), "an integer of at least 1; got 0"),
        (("--grid", "tent.lr=1", "--set", "tent.lr=2"), "tent.lr is set and swept: leave out --set tent.lr"),
        (("--grid", "tent.lr=1", "--grid", "tent.lr=2"), "--grid names tent.lr twice"),
        (("--grid", "tent.lr=1", "--score", "luck"), "--score 'luck' is unknown"),
        (("--grid", "scenario.imbalance=1,2"), "scenario.imbalance is set and swept"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_played(options, words):
    assert_refused(sweep(*options, *TENT), words)
    assert not Path("runs").exists()


def test_a_point_that_fails_does_not_stop_the_others():
    fails = write_method("Fails", "if self.at:\n    raise RuntimeError(f'trouble {self.at}')", "at: int = 0")
    result = sweep("--method", fails, "--grid", "fails.at=1,0", *TINY, "--json", "s.json")
    assert result.exit_code == 2
    assert re.search(
        r"1 of 2 points could not be played .*: RuntimeError: trouble 1 \(.*fails.py, line", message(result)
    )
    one, other = json.loads(Path("s.json").read_text())["points"]
    assert "trouble 1" in one["failed"]
    assert other["instance_error"][0] > 0


NETWORK = """
import torch, tribe

class Grey(torch.nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True)

net = torch.nn.Sequential(Grey(), tribe.models.create("compact", classes=2))
"""


def test_folders_of_images_are_points():
    """The spec of an experiment does not name the folder: what is built for one must not be used for the other."""
    pytest.importorskip("PIL.Image")
    for seed in (0, 1):
        write_folder(Path(f"camera{seed}"), np.random.default_rng(seed))
    Path("network.py").write_text(NETWORK)
    played = ("--dataset", "folder", "--model", "network.py:net", "--scenario", "replay", "--json", "s.json")
    result = sweep("--method", "bn", "--grid", "dataset.root=camera0,camera1", *played)
    assert result.exit_code == 0, message(result)
    results = [*finished("runs")]
    assert len({result.experiment.images for result in results}) == 2
    assert len({tuple(result.records()[0].confidence.tolist()) for result in results}) == 2
    assert len({point["id"] for point in json.loads(Path("s.json").read_text())["points"]}) == 2
