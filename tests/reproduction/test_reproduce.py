"""`tribe reproduce`: its options, its output, and what happens when something fails."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import layouts
from commands import message
from processes import Touches, ended, interrupted
from reproduce_helpers import EMBEDDED, MINE, SMALL, call
from reproduction import tables
from tribe.cli.custom import import_file
from tribe.data.scenarios import CIFAR_C
from tribe.experiments.store import finished

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]


SLOW = """
from tribe.methods.source import Source

class Slow(Source):
    def step(self, net, state, x, valid=None):
        with open("steps", "a") as file:
            file.write("a step\\n")
        return super().step(net, state, x, valid)
"""


def test_ours_is_the_result_in_runs_next_to_the_papers_number(played):
    _, runs, parsed = played
    by_method = {result.experiment.method.name: result for result in finished(runs)}
    assert by_method.keys() == {"source", "bn", "pl"}
    cells = {(cell["row"], cell["column"]): cell for cell in parsed["cells"]}
    assert [row for row, column in cells if column == "error"] == ["TEST", "BN", "pl"]
    for row, method, says in (("TEST", "source", 41.71), ("BN", "bn", 70.0), ("pl", "pl", None)):
        cell, result = cells[row, "error"], by_method[method]
        values = result.values("instance_error")
        assert cell["ours"] == pytest.approx(100 * sum(values) / 2)
        assert cell["deviation"] == pytest.approx(100 * abs(values[0] - values[1]) / 2**0.5)
        assert cell["paper"] == says
        assert cell["experiment"] == result.experiment.id
        assert cell["difference"] == (None if says is None else pytest.approx(cell["ours"] - says))
        seconds = result.values("seconds_per_image")
        assert cells[row, "seconds"]["ours"] == pytest.approx(sum(seconds) / 2)
    by_row = {row: cells[row, "error"]["ours"] for row in ("TEST", "BN", "pl")}
    best, second, _ = sorted(by_row, key=by_row.get)
    gap = ".* points better" if by_row[best] < by_row[second] else "no difference"
    duel = rf"gli-f \(imbalance 100, sigma 0.1\): {best} against {second}: {gap}"
    assert any(re.match(duel, note) for note in parsed["notes"]), parsed["notes"]
    assert any("the paper uses cifar10-c, wrn28_10" in note for note in parsed["notes"])
    assert "Ours differs from the paper: dataset.corruptions=('impulse_noise',)." in parsed["notes"]
    assert parsed["title"].endswith("(ours: live-mnist-c, compact)")
    verdicts = {claim["name"]: claim for claim in parsed["claims"]}
    assert verdicts["wall-clock-best-error"]["paper"]["holds"] is True
    assert verdicts["wall-clock-best-error"]["ours"]["holds"] is None, "TRIBE was not run"


def test_a_second_call_runs_nothing_and_writes_nothing(played, monkeypatch):
    options, runs, parsed = played
    monkeypatch.setattr("reproduction.command.check_folder", lambda _: pytest.fail("it wrote a probe"))
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    result = call(*options, "--format", "json")
    assert json.loads(result.stdout) == parsed
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_options_without_effect_are_refused():
    for artifact in ("claims", "document"):
        for option in (("--methods", "tribe"), ("--rows", "*"), ("--columns", "*"), ("--plot", "chart.svg")):
            result = call(artifact, "--runs", ".", *option)
            assert result.exit_code == 2
            assert option[0] in message(result)
    assert "comes as markdown" in message(call("document", "--runs", ".", "--format", "json"))
    assert "takes no part" in message(call("claims", "--runs", ".", "--set", "tribe.h0=1"))


@pytest.mark.parametrize(
    "words", [("claims",), ("claims", "--no-run"), ("norms", "--no-run"), ("document",), ("--keep", "kept")]
)
def test_a_missing_folder_of_results_is_refused(words):
    result = call(*words)
    assert result.exit_code == 2
    assert "there is no folder runs: --runs names the folder of results" in message(result)
    assert result.stdout == ""


def test_a_custom_method_becomes_a_row(played, mine):
    _, runs, _ = played
    options = (*SMALL, "--seeds", 2, "--runs", runs, "--format", "json")
    result = call("wall-clock", *options, "--methods", f"BN,{mine}")
    assert result.exit_code == 0, result.output
    cells = {(c["row"], c["column"]): c for c in json.loads(result.stdout)["cells"]}
    assert cells["mine", "error"]["ours"] == cells["BN", "error"]["ours"]
    assert cells["mine", "error"]["paper"] is None
    assert cells["mine", "error"]["experiment"] != cells["BN", "error"]["experiment"]


def test_a_failing_method_leaves_the_other_rows(played, mine):
    _, runs, _ = played
    options = (*SMALL, "--seeds", 2, "--runs", runs, "--format", "json", "--set", "mine.broken=True")
    result = call("wall-clock", *options, "--methods", f"BN,{mine}")
    assert result.exit_code == 1
    line = 1 + MINE.splitlines().index('            raise ValueError("mine is broken")')
    place = f"({Path('mine.py').resolve()}, line {line})"
    assert f"missing: mine, error; mine, seconds: mine is broken {place}" in message(result)
    cells = {(c["row"], c["column"]): c["ours"] for c in json.loads(result.stdout)["cells"]}
    assert cells["mine", "error"] is None
    assert cells["BN", "error"] > 0


@pytest.mark.parametrize("word", ["+CoTTA", "+COTTA", "+cotta"])
def test_an_added_method_may_be_spelled_as_in_the_paper(word):
    result = call("norms", *SMALL, "--methods", word, "--set", "cotta.lr=0.1", "--dry-run", "--format", "json")
    assert result.exit_code == 0, result.output
    assert "cotta" in {row["method"] for row in json.loads(result.stdout)["runs"]}


def test_list_names_all_tables():
    parsed = json.loads(call("--list", "--format", "json").stdout)
    assert sorted(t["name"] for t in parsed) == tables.names()
    assert [t.name for t in tables.all_tables()] == [t["name"] for t in parsed]
    assert "tab:component_ablation" in call("--list").stdout
    assert call("--list", "--out", "list.txt").stdout == ""
    assert "tab:component_ablation" in Path("list.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["name what to reproduce", "cifar10"]),
        (["cifar11"], ["no table or figure 'cifar11'", "cifar10"]),
        (["norms", "--methods", "tribe"], ["no row 'tribe'", "+tribe"]),
        (["norms", "--methods", "+trbe"], ["unknown method 'trbe'", "tribe"]),
        (["norms", "--methods", "+absent.py:Mine"], ["no file at absent.py"]),
        (["norms", "--methods", "+bad.py:Mine"], ["importing bad.py", "failed: ZeroDivisionError"]),
        (["norms", "--methods", "+no.py:Mine"], ["no.py:Mine is no method"]),
        (["gamma", "--methods", "tent"], ["rows of gamma are not methods"]),
        (["learning-rate", "--methods", "+sar"], ["set lr"]),
        (["norms", "--columns", "300"], ["no column '300'", "100"]),
        (["gamma", "--rows", "CIFAR11*"], ["no row 'CIFAR11*'", "CIFAR10-C inst"]),
        (["norms", "--format", "html"], ["--format 'html'", "markdown"]),
        (["norms", "--plot", "chart.txt"], [".svg"]),
        (["norms", "--out", "absent/table.txt"], ["no folder absent"]),
        (["norms", "--seeds", "0"], ["at least 1"]),
        (["norms", "--precision", "half"], ["float32, tf32 or bf16"]),
        (["norms", "--device", "cuda:x"], ["unknown device"]),
        (["norms", "--set", "tent.lr=1"], ["takes no part"]),
        (["norms", "--set", "dataset.corruptionz=fog"], ["no field 'corruptionz'", "did you mean 'corruptions'"]),
        (["norms", "--set", "scenario.sigmaa=1"], ["no field 'sigmaa'", "did you mean 'sigma'", "imbalance"]),
        (["norms", "--set", "model.clases=1"], ["no field 'clases'", "did you mean 'classes'"]),
        (["wall-clock", "--set", "tribe.h00=1"], ["no field 'h00'", "did you mean 'h0'"]),
        (["norms", "--methods", "+tent", "--set", "tent.lrr=1"], ["no field 'lrr'", "did you mean 'lr'"]),
        (["claims", "--runs", ".", "--set", "dataset.corruptionz=fog"], ["no field 'corruptionz'", "corruptions"]),
        (["norms", "--dataset", "cifar10-d"], ["unknown data set", "cifar10-c"]),
        (["norms", *EMBEDDED, "--runs", "file"], ["file"]),
    ],
)
def test_error_messages(arguments, words):
    Path("file").write_text("in the way")
    Path("bad.py").write_text("1 / 0")
    Path("no.py").write_text("Mine = 3")
    result = call(*arguments)
    if "--dataset" in arguments and "cifar10-d" in arguments:
        assert result.exit_code == 1, "cells cannot be made; said like missing data"
    else:
        assert result.exit_code == 2, result.output
    for word in words:
        assert word in message(result), message(result)


def test_ctrl_c_prints_how_to_resume(tmp_path):
    Path("slow.py").write_text(SLOW)
    steps = tmp_path / "steps"
    words = ("norms", *SMALL, "--columns", "200", "--methods", "TEST,+slow.py:Slow")
    command = ("-m", "tribe", "reproduce", *words)
    stopped = interrupted(*command, when=Touches("open", "steps", 3), cwd=tmp_path)
    assert stopped.code == 130, stopped.err
    assert stopped.err.splitlines()[-1] == "stopped; finished work is in runs, and the same command resumes from there"
    assert "Traceback" not in stopped.err
    (checkpoint,) = Path("runs").glob("*/checkpoint.safetensors")
    steps.unlink()
    again = ended(*command, cwd=tmp_path)
    assert again.code == 0, again.err
    batches = -(-next(r for r in finished("runs") if r.folder == checkpoint.parent).metrics["0"]["images"] // 64)
    assert len(steps.read_text().splitlines()) <= batches - 2, "it went on, long before the 50th batch"


def test_keep_copies_json_and_how_the_data_were_made(played, tmp_path):
    options, runs, _ = played
    made = tmp_path / "data" / "CIFAR-10-C" / "made.json"
    made.parent.mkdir(parents=True)
    made.write_text("{}")
    result = call("--runs", runs, "--keep", "results", "--data", tmp_path / "data")
    assert result.exit_code == 0, result.output
    assert re.match(r"results: \d+ results, [\d,]+ kB of JSON", result.stdout)
    kept = {r.experiment.id: r for r in finished("results")}
    assert kept.keys() == {r.experiment.id for r in finished(runs)}
    assert not list(Path("results").rglob("*.npz"))
    assert Path("results/data/CIFAR-10-C/made.json").read_text() == "{}"
    again = [Path("results") if word == runs else word for word in options]
    cells = json.loads(call(*again, "--no-run", "--format", "json").stdout)["cells"]
    assert all(cell["ours"] is not None for cell in cells)


def test_the_released_numbers_are_a_table(played):
    _, runs, _ = played
    words = ("released", *SMALL, "--seeds", 2, "--columns", "MNIST-C *", "--methods", "TEST,BN", "--runs", runs)
    parsed = json.loads(call(*words, "--format", "json").stdout)
    cells = {(c["row"], c["column"]): c for c in parsed["cells"]}
    assert cells["BN", "MNIST-C inst"]["paper"] == 73.77
    assert isinstance(cells["BN", "MNIST-C inst"]["ours"], float)
    assert parsed["claims"] == []


def test_stdout_holds_nothing_but_the_table(tmp_path, played):
    options, _, parsed = played
    done = ended("-m", "tribe", "reproduce", *options, "--format", "json", cwd=tmp_path)
    assert done.code == 0, done.err
    errors = [[c["ours"] for c in t["cells"] if c["column"] == "error"] for t in (json.loads(done.out), parsed)]
    assert errors[0] == errors[1]


WIDE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 7, 8), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, 1000)).eval()
"""


@pytest.fixture
def imagenet_c(tmp_path):
    """Fifteen corruptions of three images, which look the same."""
    pytest.importorskip("PIL")
    encoded = io.BytesIO()
    layouts.picture(np.random.default_rng(0), 224, 224).save(encoded, "JPEG")
    for corruption in CIFAR_C:
        for wnid in layouts.WNIDS:
            (tmp_path / "ImageNet-C" / corruption / "5" / wnid).mkdir(parents=True)
            (tmp_path / "ImageNet-C" / corruption / "5" / wnid / "a.JPEG").write_bytes(encoded.getvalue())
    return tmp_path


def test_imagenet_with_a_custom_network_its_weights_and_another_batch(imagenet_c):
    """The paper's fourth data set on other images and another network; results are found without the network's file."""
    Path("wide.py").write_text(WIDE)
    options = ("imagenet", "--methods", "TEST,BN", "--model", "wide.py:net", "--data", imagenet_c, "--format", "json")
    options += ("--paper-only", "--device", "cpu")
    weights = import_file(Path("wide.py")).net()
    torch.nn.init.zeros_(weights[-1].weight)
    with torch.no_grad():
        weights[-1].bias.copy_(torch.arange(1000) == 1)  # every image is of the class with output 1
    save_file(weights.state_dict(), "wide.safetensors")
    parsed = json.loads(call(*options, "--batch", 4, "--weights", "wide.safetensors").stdout)
    assert "Ours plays 3 images of each corruption, the paper 5,000." in parsed["notes"]
    assert parsed["title"].endswith("(ours: wide.py:net)")
    assert {round(cell["ours"], 2) for cell in parsed["cells"]} == {66.67}, "one of three classes is right"
    assert {found.experiment.batch for found in finished("runs")} == {4}
    Path("wide.py").unlink()
    again = json.loads(call(*options, "--no-run", "--batch", 4).stdout)
    assert again["cells"] == parsed["cells"]
    assert "its batch is 4, not 64" in call(*options, "--no-run", "--batch", 64).stderr
    page = call("document", "--runs", "runs").stdout
    call("document", "--runs", "runs", "--out", "page.md")
    assert Path("page.md").read_text() == page.replace("(reproduction/", "(page/")
    assert "batch 4" in page
    assert "(ours: imagenet-c, wide.py:net)" in page
    file = Path("page/imagenet.csv").read_text()
    assert "TEST,ours,66.67," in file
    assert "TEST,paper,85.15," in file, "each corruption beside the paper's"
    assert "--weights are those of a network" in message(call("imagenet", "--weights", "wide.safetensors"))
