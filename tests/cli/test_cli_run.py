"""The main job as people start it: `tribe run` and `tribe schedule`, on the images and the network of the package."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tribe
from commands import message, tribe_command
from tribe import scenarios
from tribe.cli.folders import departures, folder_name
from tribe.datasets.embedded import mnist_test

SHORT = (
    "--set",
    "dataset.corruptions=('impulse_noise','motion_blur')",
    "--imbalance",
    "300",
)  # two domains
TINY = ("--set", "dataset.corruptions=('impulse_noise',)", "--imbalance", "300")  # one of about 2,000 images


pytestmark = pytest.mark.usefixtures("nowhere")


def tribe_run(*arguments):
    return tribe_command("run", *arguments)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    result = tribe_run(*SHORT, "--methods", "source,tribe", "--seeds", 2, "--out", folder, "--json", "-")
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_a_network_of_bfloat16(played, tmp_path):
    result = tribe_run(*SHORT, "--methods", "source,eata", "--precision", "bf16", "--out", tmp_path, "--json", "-")
    assert result.exit_code == 0, result.output
    report, (_, whole) = json.loads(result.stdout), played
    assert report["spec"]["precision"] == "bf16"
    assert whole["spec"]["precision"] == "float32", "a CPU has no TF32"
    assert report["spec"]["model"] == whole["spec"]["model"], "the fingerprint is that of the float32 network"
    row, exact = report["results"][0], whole["results"][0]
    assert row["calibration_error"] != exact["calibration_error"]
    assert row["instance_error"] == pytest.approx(exact["instance_error"], abs=0.02)


def test_the_summary_holds_the_errors_of_the_records(played):
    folder, report = played
    assert json.loads((folder / "summary.json").read_text()) == report
    assert [(row["method"], row["seed"]) for row in report["results"]] == [
        *(("source", 0), ("source", 1), ("tribe", 0), ("tribe", 1))
    ]
    for row in report["results"]:
        record = tribe.Record.load(folder / f"{row['method']}-seed{row['seed']}.npz")
        assert row["images"] == len(record.label)
        assert row["instance_error"] == pytest.approx(tribe.metrics.instance_error(record).item())
        assert row["category_error"] == pytest.approx(tribe.metrics.category_error(record).item())
        assert row["domain_error"].keys() == {"impulse_noise@5", "motion_blur@5"}
        assert record.spec["scenario"]["fields"]["imbalance"] == 300
        assert record.spec["dataset"]["name"] == "live-mnist-c"
    assert report["spec"]["scenario"]["name"] == "gli-f"
    assert report["machine"]["torch"] == torch.__version__


def test_two_seeds_are_two_streams_and_each_is_what_it_would_be_alone(played):
    folder, _ = played
    result = tribe_run(*SHORT, "--methods", "tribe", "--seed", 1, "--out", "alone")
    assert result.exit_code == 0, result.output
    together, alone = (tribe.Record.load(Path(f) / "tribe-seed1.npz") for f in (folder, "alone"))
    assert torch.equal(together.label, alone.label)
    assert (together.prediction == alone.prediction).double().mean() > 0.999  # sums of a larger batch round otherwise


def test_adaptation_helps_on_real_digits(played):
    _, report = played
    error = {(row["method"], row["seed"]): row["instance_error"] for row in report["results"]}
    assert error["tribe", 0] < 0.8 * error["source", 0]


def test_the_chart_is_an_svg_that_names_methods_and_domains(played):
    pytest.importorskip("matplotlib")
    text = (played[0] / "chart.svg").read_text()
    assert text.lstrip().startswith("<?xml")
    for word in ("source: ", "tribe: ", "motion_blur@5", "instance error"):
        assert word in text


def test_a_table_is_printed_and_the_folder_is_named_after_the_run():
    result = tribe_run(*SHORT, "--methods", "source", "--no-chart", "--json", "out.json")
    assert result.exit_code == 0, result.output
    assert "instance error" in result.stdout
    assert "source" in result.stdout
    (folder,) = Path("runs").iterdir()
    assert folder.name == "live-mnist-c-compact-gli-f-dataset.corruptions=impulse_noise,motion_blur-imbalance=300"
    assert sorted(path.name for path in folder.iterdir()) == ["source-seed0.npz", "summary.json"]
    assert json.loads(Path("out.json").read_text())["results"][0]["method"] == "source"


def test_fields_of_any_component_can_be_set():
    settings = ("tribe.gamma=0.25", "scenario.sigma=10.0", "scenario.draw=paper", "dataset.seed=3")
    result = tribe_run(*SHORT, "--methods", "tribe", "--json", "-", *(w for s in settings for w in ("--set", s)))
    assert result.exit_code == 0, result.output
    (path,) = Path("runs").glob("*/tribe-seed0.npz")
    assert re.fullmatch("live-mnist-c-compact-gli-f-[0-9a-f]{8}", path.parent.name), "too much for a name is a hash"
    spec = tribe.Record.load(path).spec
    assert spec["fields"]["gamma"] == 0.25
    assert spec["scenario"]["fields"]["sigma"] == 10.0
    assert spec["scenario"]["fields"]["draw"] == "paper"
    assert spec["dataset"]["fields"]["seed"] == 3


@pytest.mark.parametrize(("word", "truth"), [("false", False), ("TRUE", True)])
def test_truths_are_words_in_any_case(word, truth):
    options = ("--methods", "roid", "--set", f"roid.consistency={word}", "--set", "roid.prior=none", "--out", "out")
    result = tribe_run(*TINY, *options, "--no-chart")
    assert result.exit_code == 0, result.output
    fields = tribe.Record.load("out/roid-seed0.npz").spec["fields"]
    assert fields["consistency"] is truth
    assert fields["prior"] == "none", "a word of the field's own"


def test_one_value_and_words_with_commas_are_sequences():
    settings = (
        "dataset.corruptions=impulse_noise, motion_blur",
        "dataset.severities=4",
        "scenario.domains=motion_blur@4",
        "sar.frozen_tail=layers.13,layers.16",
    )
    options = ("--imbalance", 300, "--methods", "sar", "--out", "out", *(w for s in settings for w in ("--set", s)))
    result = tribe_run(*options)
    assert result.exit_code == 0, result.output
    record = tribe.Record.load("out/sar-seed0.npz")
    assert record.domains == ("motion_blur@4",)
    assert record.spec["dataset"]["fields"]["corruptions"] == ["impulse_noise", "motion_blur"]
    assert record.spec["dataset"]["fields"]["severities"] == [4]
    assert record.spec["fields"]["frozen_tail"] == ["layers.13", "layers.16"]


def test_own_network_from_a_file():
    Path("mine.py").write_text("import tribe\ndef net():\n    return tribe.models.create('compact')\n")
    weights = tribe.models.find("compact", "mnist", "nowhere")
    result = tribe_run(*SHORT, "--model", "mine.py:net", "--weights", weights, "--methods", "source", "--json", "-")
    assert result.exit_code == 0, result.output
    named = tribe_run(*SHORT, "--methods", "source", "--json", "-")
    errors = [json.loads(r.stdout)["results"][0]["instance_error"] for r in (result, named)]
    assert errors[0] == errors[1]


HEADLESS = """
import torch, tribe

class Head(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)

net = tribe.models.load("compact", tribe.models.find("compact", "mnist", "nowhere"))
net.fc = Head(net.fc)
told = tribe.Backbone(net, classifier="fc")
"""


def test_own_network_that_names_its_classifier():
    """What the error of a network without one says to do."""
    Path("mine.py").write_text(HEADLESS)
    refused = tribe_run(*TINY, "--model", "mine.py:net", "--methods", "lame", "--out", "out")
    assert refused.exit_code == 2
    assert "tribe.Backbone(model, classifier=...)" in message(refused)
    result = tribe_run(*TINY, "--model", "mine.py:told", "--methods", "lame", "--out", "out", "--json", "-")
    assert result.exit_code == 0, result.output
    named = tribe_run(*TINY, "--methods", "lame", "--out", "named", "--json", "-")
    errors = [json.loads(r.stdout)["results"][0]["instance_error"] for r in (result, named)]
    assert errors[0] == errors[1]


OWN_METHOD = """
from dataclasses import dataclass
from tribe.methods.bn import BN

@dataclass(frozen=True)
class Mine(BN):
    '''Batch statistics again.'''
    rate: float = 0.5
"""


@pytest.mark.parametrize("lead", ["", "+"])
def test_own_method_from_a_file(lead):
    Path("mine.py").write_text(OWN_METHOD)
    try:
        methods = f"bn, {lead}mine.py:Mine"
        result = tribe_run(*TINY, "--methods", methods, "--set", "mine.rate=0.25", "--json", "-", "--out", "out")
    finally:
        tribe.methods.registry._classes.pop("mine", None)
    assert result.exit_code == 0, result.output
    errors = {row["method"]: row["instance_error"] for row in json.loads(result.stdout)["results"]}
    assert errors.keys() == {"bn", "mine"}
    assert errors["mine"] == errors["bn"]
    assert tribe.Record.load("out/mine-seed0.npz").spec["fields"]["rate"] == 0.25


def test_own_method_is_measured():
    Path("mine.py").write_text(OWN_METHOD)
    try:
        result = tribe_command(
            "bench", "--model", "compact", "--methods", "mine.py:Mine", "--repeats", 1, "--json", "-"
        )
    finally:
        tribe.methods.registry._classes.pop("mine", None)
    assert result.exit_code == 0, result.output
    assert "mine" in [row["name"] for row in json.loads(result.stdout)["rows"]]


# -- what lies in the folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scenarios.names())
def test_a_folder_of_defaults_has_a_short_name(name):
    parts = {"dataset": tribe.datasets.create("live-mnist-c"), "scenario": scenarios.create(name)}
    told = departures(parts, {"model": {}, "tribe": {}})
    assert folder_name(f"live-mnist-c-compact-{name}", told) == f"live-mnist-c-compact-{name}"


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_other_settings_are_another_folder_and_the_same_go_on():
    def play(*options):
        result = tribe_run(*TINY, "--no-chart", *options)
        assert result.exit_code == 0, result.output
        return re.search(r"records and summary in (\S+)(?: \(beside (.*) of before\))?", result.stdout).groups()

    first, _ = play("--methods", "source,bn")
    before = contents(first)
    other, _ = play("--methods", "source", "--imbalance", 10)
    names = {first, other}
    for options in (("--seed", 1), ("--seeds", 2), ("--batch", 32), ("--precision", "bf16"), ("--severity", 3)):
        names.add(play("--methods", "source", *options)[0])
    names.add(play("--methods", "source,tent", "--set", "tent.lr=0.5")[0])
    names.add(play("--methods", "source", "--weights", tribe.models.find("compact", "mnist", "nowhere"))[0])
    assert len(names) == 9
    assert contents(first) == before, "nothing was touched"
    assert play("--methods", "tent", "--imbalance", 300, "--seed", 0, "--precision", "float32") == (first, "bn, source")
    after = contents(first)
    assert all(after[name] == before[name] for name in before if name != "summary.json")
    told = json.loads(after["summary.json"])
    assert [row["method"] for row in told["results"]] == ["tent", "bn", "source"]
    assert told["results"][1:] == json.loads(before["summary.json"])["results"][::-1]


def test_a_folder_of_other_settings_is_refused_and_left_alone():
    def play(*options):
        return tribe_run(*TINY, "--no-chart", "--out", "out", *options)

    assert play("--methods", "source,tent").exit_code == 0
    before = contents("out")
    for options, words in (
        (["--methods", "bn", "--imbalance", "10"], "scenario.fields.imbalance is 300.0 there and 10.0 here"),
        (["--methods", "bn", "--severity", "3"], "dataset.fields.severities is [5] there and [3] here"),
        (["--methods", "bn", "--batch", "32"], "batch is 64 there and 32 here"),
        (["--methods", "bn", "--precision", "bf16"], "precision is 'float32' there and 'bf16' here"),
        (["--methods", "tent", "--set", "tent.lr=0.5"], "fields.lr is "),
        (["--methods", "tent", "--set", "tent.lr=0.5", "--seed", "1"], "fields.lr is "),
    ):
        result = play(*options)
        assert result.exit_code == 2, result.output
        assert words in message(result), message(result)
        assert "--out ANOTHER" in message(result)
    assert contents("out") == before
    tent = tribe.Record.load("out/tent-seed0.npz")
    tent._replace(spec={**tent.spec, "newer": 1}).save("out/tent-seed0.npz")
    assert "newer is 1 there and None here" in message(play("--methods", "bn"))
    tent._replace(spec={**tent.spec, "newer": None}).save("out/tent-seed0.npz")
    assert play("--methods", "source", "--seed", "1").exit_code == 0, "seeds are added, and None is as good as nothing"
    rows = json.loads(Path("out/summary.json").read_text())["results"]
    assert [(row["method"], row["seed"]) for row in rows] == [("source", 0), ("source", 1), ("tent", 0)]
    torn = Path("out/tent-seed0.npz").read_bytes()[:-100]
    Path("out/tent-seed0.npz").write_bytes(torn)
    result = play("--methods", "tent")
    assert result.exit_code == 2
    assert "out/tent-seed0.npz is not a record, or it is damaged" in message(result)
    assert Path("out/tent-seed0.npz").read_bytes() == torn
    result = play("--methods", "bn")
    assert result.exit_code == 0, "it is in nobody's way"
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "out/tent-seed0.npz is not a record, or it is damaged" in warning
    assert warning.endswith("It is left out of the summary")
    rows = json.loads(Path("out/summary.json").read_text())["results"]
    assert [row["method"] for row in rows] == ["bn", "source", "source"]


def test_variants_of_a_method_lie_side_by_side():
    """All are called selftrain in their records; the names of the files tell them apart."""
    for variant in ("robust-bn", "balanced-bn"):
        result = tribe_run(*TINY, "--no-chart", "--out", "out", "--methods", f"selftrain/{variant}")
        assert result.exit_code == 0, result.output
    rows = json.loads(Path("out/summary.json").read_text())["results"]
    assert [row["method"] for row in rows] == ["selftrain/balanced-bn", "selftrain/robust-bn"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset", "cifar10-d"], ["unknown data set", "cifar10-c"]),
        (["--scenario", "gli"], ["unknown scenario", "gli-f"]),
        (["--methods", "tribe,trent"], ["unknown method", "tent"]),
        (["--methods", " ,"], ["names no method", "tribe"]),
        (["--methods", "absent.py:Mine"], ["no file at absent.py"]),
        (["--methods", "wide.py:net"], ["wide.py:net is no method"]),
        (["--methods", "wide.py:Nope"], ["wide.py has no attribute 'Nope'", "Known: Mine", "!tribe_target"]),
        (["--methods", "CoTTA"], ["unknown method 'CoTTA'", "did you mean 'cotta'"]),
        (["--scenario", "wide.py:Mine"], ["wide.py:Mine is no scenario", "tribe.scenarios.Scenario"]),
        (["--scenario", "absent.py:Mine"], ["no file at absent.py"]),
        (["--scenario", "gradual"], ["need domain", "--severity 1,2,3,4,5"]),
        (["--dataset", "wide.py:Mine"], ["wide.py:Mine is no data set", "images(domain, index)"]),
        (["--json", "nope/x.json"], ["there is no folder nope to write x.json into"]),
        (["--json", "."], ["is a folder"]),
        (["--model", "wrn28"], ["unknown model", "did you mean", "wrn28_10"]),
        (
            ["--model", "wrn28_10"],
            ["no weights of wrn28_10 for mnist", "--weights FILE", "train mnist --model wrn28_10"],
        ),
        (["--dataset", "folder"], ["--data FOLDER"]),
        pytest.param(
            ["--model", "torchvision/resnet18"],
            ["needs torchvision", "tribe-tta[models]"],
            marks=pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is here"),
        ),
        (["--dataset", "cifar10-c"], ["CIFAR-10-C", "tribe corrupt cifar10"]),
        (["--dataset", "live-cifar10-c"], ["cifar-10-batches-bin"]),
        (["--device", "cuda:x"], ["unknown device"]),
        (["--precision", "half"], ["float32, tf32 or bf16"]),
        (["--seeds", "0"], ["at least 1"]),
        (["--batch", "0"], ["at least 1"]),
        (["--seed", "-1"], ["seed"]),
        (["--imbalance", "0.5"], ["imbalance"]),
        (["--imbalance", "1e30"], ["without an image"]),
        (["--severity", "6"], ["severity", "6"]),
        (["--severity", "x"], ["--severity"]),
        (["--scenario", "ptta", "--imbalance", "10"], ["no field 'imbalance'"]),
        (["--set", "tribe.gama=1"], ["no field 'gama'", "gamma"]),
        (["--set", "tribe.rate_cap=perhaps"], ["rate_cap of tribe is True or False; got 'perhaps'"]),
        (["--set", "gamma=1"], ["COMPONENT.FIELD=VALUE"]),
        (["--set", "rotta.nu=1"], ["takes no part", "tribe"]),
        (["--set", "dataset.corruptions=('fgo',)"], ["unknown corruption 'fgo'", "fog"]),
        (["--set", "dataset.corruptions=stripe,fgo"], ["unknown corruption 'fgo'", "fog"]),
        (["--set", "dataset.severities=6"], ["a severity is 1, 2, 3, 4 or 5; got 6"]),
        (["--weights", "absent.safetensors"], ["no weights file at absent.safetensors"]),
        (["--weights", "wide.safetensors"], ["wide.safetensors"]),
        (["--out", "file"], ["file"]),
        (["--model", "wide.py:net"], ["7 classes", "10"]),
        (["--model", "wide.py:one"], ["classifier 'fc' has a single output", "(0, z)"]),
    ],
)
def test_what_cannot_be_done_is_said_in_a_paragraph(options, words):
    Path("file").write_text("in the way")
    save_file({"fc.weight": torch.zeros(10, 3)}, "wide.safetensors")
    own = (f"{name} = tribe.models.create('compact', classes={k})" for name, k in (("net", 7), ("one", 1)))
    Path("wide.py").write_text("\n".join(("import tribe", *own, "class Mine(tribe.methods.Method): pass")))
    result = tribe_run(*options)
    assert result.exit_code == 2, result.output
    for word in words:
        assert (word.removeprefix("!") in message(result)) != word.startswith("!"), message(result)
    assert not Path("runs").exists(), "nothing was begun"


def begun(*options, before=""):
    """A real process, which a signal or a limit can meet; it says on stderr how far it is."""
    words = shlex.join([sys.executable, "-m", "tribe", "run", *options, "--no-chart", "--out", "out"])
    return subprocess.Popen(
        ["bash", "-c", f"{before} exec {words}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_full_disk_is_told_and_nothing_is_claimed():
    process = begun(*TINY, "--methods", "source", before="ulimit -f 2;")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "File too large" in errors
    assert "finished before" not in errors
    assert list(Path("out").iterdir()) == []


def test_stopped_by_hand_it_says_what_is_there():
    process = begun("--methods", "source,tribe")
    while not list(Path("out").glob("source*.npz")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped. What was finished before (source) is in out" in errors
    assert "could not be played" not in errors
    assert {path.name for path in Path("out").iterdir()} == {"source-seed0.npz", "summary.json"}
    assert [row["method"] for row in json.loads(Path("out/summary.json").read_text())["results"]] == ["source"]


def test_a_failure_half_way_keeps_what_was_finished(tmp_path):
    """An unreadable file shows only when it is its turn."""
    shape = (20, 28, 28, 1)
    for name in ("fog", "stripe"):
        folder = tmp_path / "mnist_c" / name
        folder.mkdir(parents=True)
        np.save(folder / "test_images.npy", np.zeros(shape, np.uint8))
        np.save(folder / "test_labels.npy", np.arange(20) % 10)
    good = (
        "--dataset",
        "mnist-c",
        "--data",
        tmp_path,
        "--scenario",
        "continual",
        "--set",
        "dataset.corruptions=('fog','stripe')",
    )
    assert tribe_run(*good, "--methods", "source").exit_code == 0
    whole = (tmp_path / "mnist_c/stripe/test_images.npy").read_bytes()
    (tmp_path / "mnist_c/stripe/test_images.npy").write_bytes(whole[:-9])
    result = tribe_run(*good, "--methods", "source,tribe")
    assert result.exit_code == 2
    assert "stripe/test_images.npy" in message(result)


def test_one_method_that_fails_does_not_end_the_others():
    options = ("--methods", "note,source,tent", "--set", "note.room=5", "--out", "out", "--no-chart")
    result = tribe_run(*TINY, *options, "--json", "-")
    assert result.exit_code == 2
    assert "error: note: images of shape (1, 28, 28) have 784 values each; the memory has room for 5" in message(result)
    assert message(result).endswith("error: note could not be played to the end; the reasons are told above")
    assert [row["method"] for row in json.loads(result.stdout)["results"]] == ["source", "tent"]
    told = json.loads(Path("out/summary.json").read_text())
    assert [row["method"] for row in told["results"]] == ["source", "tent"]
    assert {path.name for path in Path("out").iterdir()} == {"source-seed0.npz", "tent-seed0.npz", "summary.json"}


BROKEN = """
from dataclasses import dataclass
from tribe.methods.bn import BN

@dataclass(frozen=True)
class Broken(BN):
    def step(self, *given, **options):
        raise {error}
"""


@pytest.mark.parametrize("error", ["RuntimeError('of mine')", "TypeError('of mine')", "KeyError('of mine')"])
def test_a_method_of_one_s_own_may_fail_in_any_way(error):
    """And its author is told where."""
    Path("broken.py").write_text(BROKEN.format(error=error))
    options = ("--methods", "source,broken.py:Broken,bn", "--out", "out", "--no-chart", "--json", "-")
    try:
        result = tribe_run(*TINY, *options)
    finally:
        tribe.methods.registry._classes.pop("broken", None)
    assert result.exit_code == 2
    kind = error.partition("(")[0]
    assert re.search(rf"error: broken: {kind}: '?of mine'?, at \S*broken\.py:8 ", message(result)), message(result)
    assert message(result).endswith("error: broken could not be played to the end; the reasons are told above")
    assert [row["method"] for row in json.loads(result.stdout)["results"]] == ["source", "bn"]
    told = json.loads(Path("out/summary.json").read_text())
    assert [row["method"] for row in told["results"]] == ["source", "bn"]


SLOW = """
import pathlib, time
from dataclasses import dataclass
from tribe.methods.bn import BN

@dataclass(frozen=True)
class Slow(BN):
    def step(self, *given, **options):
        pathlib.Path("begun").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.05)
        return super().step(*given, **options)
"""


def test_two_runs_into_one_folder_are_both_in_its_summary():
    """One starts first and ends last: when it began, nothing lay there."""
    Path("slow.py").write_text(SLOW)
    process = begun(*TINY, "--methods", "slow.py:Slow")
    while not Path("begun").exists():
        assert process.poll() is None
        time.sleep(0.1)
    assert tribe_run(*TINY, "--methods", "source", "--no-chart", "--out", "out").exit_code == 0
    Path("go").touch()
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    rows = json.loads(Path("out/summary.json").read_text())["results"]
    assert [row["method"] for row in rows] == ["slow", "source"]
    assert "beside source of before" in out


def test_the_command_runs_as_a_process_with_nothing_on_stdout_but_json(tmp_path):
    command = [sys.executable, "-m", "tribe", "run", *SHORT, "--methods", "source", "--json", "-"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["images"] > 1000


OWN_PARTS = """
from dataclasses import dataclass
import torch, tribe
from tribe.datasets.corrupted import LiveMnistC
from tribe.methods.bn import BN
from tribe.scenarios import Scenario

print("words at import")

@dataclass(frozen=True)
class Steps(BN):
    def step(self, *given, **options):
        print("words of a step")
        return super().step(*given, **options)

@dataclass(frozen=True)
class Backwards(Scenario):
    every: int = 1  # of which images one is played

    def play(self, labels, classes, rng):
        print("words of a scenario")
        return torch.arange(len(labels)).numpy()[:: -self.every]

@dataclass(frozen=True)
class Dark(LiveMnistC):
    def images(self, domain, index):
        print("words of images")
        return super().images(domain, index) / 2

def net():
    print("words of a network")
    return tribe.models.load("compact", tribe.models.find("compact", "mnist"))
"""


def test_components_of_one_s_own_are_played_and_what_they_print_is_no_result():
    Path("parts.py").write_text(OWN_PARTS)
    names = (*TINY[:2], "--set", "scenario.every=50", "--scenario", "parts.py:Backwards", "--dataset", "parts.py:Dark")
    try:
        result = tribe_run(
            *names,
            "--model",
            "parts.py:net",
            "--methods",
            "parts.py:Steps",
            "--no-chart",
            "--out",
            "out",
            "--json",
            "-",
        )
        planned = tribe_command(
            "schedule", "parts.py:Backwards", "--dataset", "parts.py:Dark", *names[:4], "--out", "plan.npz", "--json"
        )
    finally:
        for registry, name in ((tribe.methods, "steps"), (tribe.scenarios, "backwards"), (tribe.datasets, "dark")):
            registry.registry._classes.pop(name, None)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["spec"]["dataset"]["name"] == "dark"
    assert report["spec"]["scenario"]["name"] == "backwards"
    assert report["spec"]["scenario"]["fields"]["every"] == 50
    assert [(row["method"], row["images"]) for row in report["results"]] == [("steps", 200)]
    for place in ("at import", "of a step", "of a scenario", "of images", "of a network"):
        assert f"words {place}" in result.stderr
    assert json.loads(planned.stdout)["images"] == 200
    assert scenarios.load("plan.npz").index[:2].tolist() == [9999, 9949]


class TestSchedule:
    def run(self, *arguments):
        return tribe_command("schedule", *arguments)

    def test_it_is_the_stream_that_run_plays(self, played):
        result = self.run("gli-f", *SHORT, "--seed", 1, "--json", "--out", "plan.npz")
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        record = tribe.Record.load(played[0] / "source-seed1.npz")
        assert told["images"] == len(record.label)
        assert told["class_counts"] == tribe.metrics.class_counts(record).tolist()
        plan = scenarios.load("plan.npz")
        assert scenarios.digest(plan) == told["digest"]
        assert torch.equal(plan.domain, record.domain)

    def test_the_table_and_the_picture(self):
        pytest.importorskip("matplotlib")
        result = self.run("gli-v", *SHORT, "--plot", "plan.png")
        assert result.exit_code == 0, result.output
        assert "impulse_noise@5" in result.stdout
        assert re.search(r"BLAKE2b-128\s+[0-9a-f]{32}\b", result.stdout), result.stdout
        assert Path("plan.png").read_bytes().startswith(b"\x89PNG")

    def test_bad_input(self):
        for options, word in ((["gli-x"], "unknown scenario"), (["gli-f", "--plot", "plan.txt"], ".svg")):
            result = self.run(*options)
            assert result.exit_code == 2
            assert word in message(result)


class TestOwnPictures:
    """A folder without labels, replayed to a network from a file; one of its pictures is damaged."""

    OWN = """
import torch, tribe
class Grey(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = tribe.models.load("compact", tribe.models.find("compact", "mnist", "."))
    def forward(self, x):
        return self.net(x.mean(1, keepdim=True))
net = Grey()
"""
    OPTIONS = ("--dataset", "folder", "--data", "pictures", "--model", "mine.py:net", "--methods", "source,tribe")

    @pytest.fixture(autouse=True)
    def pictures(self, nowhere):
        image = pytest.importorskip("PIL.Image")
        digits, _ = mnist_test()
        for i in range(30):
            path = Path("pictures") / ("monday" if i < 20 else "tuesday") / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(digits[i]).convert("RGB").save(path)
        Path("mine.py").write_text(self.OWN)

    def test_they_are_played_in_order(self):
        result = tribe_run(*self.OPTIONS, "--scenario", "replay", "--out", "out")
        assert result.exit_code == 0, result.output
        assert "no labels" in result.stdout
        record = tribe.Record.load("out/source-seed0.npz")
        assert record.domain.tolist() == [0] * 20 + [1] * 10
        assert (record.prediction == torch.as_tensor(mnist_test()[1][:30].astype(int))).double().mean() > 0.9

    def test_other_pictures_are_another_folder(self):
        """Of the same name, number and labels."""
        for day in ("one", "two"):
            for path in Path("pictures").rglob("*.png"):
                target = Path(day) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        a, b = Path("two/pictures/monday/00.png"), Path("two/pictures/monday/01.png")
        swapped = a.read_bytes(), b.read_bytes()
        b.write_bytes(swapped[0])
        a.write_bytes(swapped[1])
        options = ("--dataset", "folder", "--model", "mine.py:net", "--methods", "source", "--scenario", "replay")
        for place in ("one/pictures", "two/pictures", "pictures"):
            assert tribe_run(*options, "--data", place).exit_code == 0
        assert len(list(Path("runs").iterdir())) == 2
        assert tribe_run(*options, "--data", "one/pictures", "--out", "out").exit_code == 0
        refused = tribe_run(*options, "--data", "two/pictures", "--out", "out")
        assert refused.exit_code == 2
        assert "dataset.fingerprint is " in message(refused)

    def test_memories_have_room_for_large_pictures(self):
        image = pytest.importorskip("PIL.Image")
        for path in Path("pictures").rglob("*.png"):
            image.open(path).resize((64, 64)).save(path)
        memories = "note,rotta,selftrain/balanced+memory+st+anchor"
        result = tribe_run(*self.OPTIONS[:-1], memories, "--scenario", "replay", "--out", "out")
        assert result.exit_code == 0, result.output
        rooms = {tribe.Record.load(path).spec["fields"]["room"] for path in Path("out").glob("*.npz")}
        assert rooms == {3 * 64 * 64}

    def test_a_scenario_that_draws_by_class_says_what_plays_them(self):
        result = tribe_run(*self.OPTIONS, "--scenario", "gli-f")
        assert result.exit_code == 2
        assert "'replay'" in message(result)

    def test_a_damaged_picture_is_named_and_fatal_or_skipped_as_chosen(self):
        Path("pictures/monday/03.png").write_bytes(b"nothing")
        result = tribe_run(*self.OPTIONS, "--scenario", "replay")
        assert result.exit_code == 2
        assert "pictures/monday/03.png" in message(result)
        assert "--set dataset.unreadable=skip" in message(result)
        with pytest.warns(UserWarning, match=r"skipped: pictures/monday/03\.png"):
            result = tribe_run(
                *self.OPTIONS, "--scenario", "replay", "--set", "dataset.unreadable=skip", "--out", "out"
            )
        assert result.exit_code == 0, result.output
        assert len(tribe.Record.load("out/tribe-seed0.npz").prediction) == 29


def test_a_network_without_affine_parameters_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    norm = "nn.BatchNorm2d(4, affine=False), nn.AdaptiveAvgPool2d(1)"
    code = f"from torch import nn\nnet = nn.Sequential(nn.Conv2d(1, 4, 3), {norm}, nn.Flatten(), nn.Linear(4, 10))\n"
    (tmp_path / "plain.py").write_text(code)
    result = tribe_command("run", "--model", "plain.py:net", "--methods", "tribe")
    assert result.exit_code == 2, result.output
    assert "no normalisation layer of the network has affine parameters to learn" in message(result)
