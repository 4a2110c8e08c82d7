"""The main job as people start it: `tribe run` and `tribe schedule`, on the images and the network of the package."""

import hashlib
import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tribe
from commands import assert_refused, message, succeeded, tribe_command, write_method
from processes import ended
from tribe import scenarios
from tribe.data.datasets.files import mnist_test
from tribe.experiments.store import finished

IMBALANCE = ("--set", "scenario.imbalance=1000000")
pytestmark = pytest.mark.usefixtures("few")
SHORT = ("--set", "dataset.corruptions=('impulse_noise','motion_blur')", *IMBALANCE)  # two domains
TINY = ("--set", "dataset.corruptions=('impulse_noise',)", *IMBALANCE)  # one of about 230 images


@pytest.fixture
def all_digits(few, monkeypatch):
    """The package's own images after all."""
    monkeypatch.setenv("TRIBE_DATA", "nothing")


def tribe_run(*arguments):
    return tribe_command("run", *arguments)


def play(*arguments):
    return succeeded(tribe_run(*arguments))


def setting(*texts):
    """The options that set these fields."""
    return [word for text in texts for word in ("--set", text)]


def results(folder):
    """The results in a folder by the name of their method."""
    return {result.experiment.method.name: result for result in finished(folder)}


def record(folder, method, seed=0):
    return tribe.Record.load(results(folder)[method].folder / f"record-{seed}.npz")


def summary(folder):
    """The summary of the one command that was run into a folder."""
    (path,) = Path(folder).glob("*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def played(tmp_path_factory, few_digits):
    folder = tmp_path_factory.mktemp("run")
    options = ("--methods", "source,tribe", "--seeds", 2, "--data", few_digits, "--out", folder, "--json", "-")
    result = play(*SHORT, *options)
    return folder, json.loads(result.stdout)


def test_the_summary_holds_the_errors_of_the_records(played):
    folder, report = played
    assert summary(folder) == report
    assert [(row["method"], row["seed"]) for row in report["results"]] == [
        *(("source", 0), ("source", 1), ("tribe", 0), ("tribe", 1))
    ]
    for row in report["results"]:
        made = record(folder, row["method"], row["seed"])
        assert row["id"] == made.spec["experiment"]
        assert row["images"] == len(made.label)
        assert row["instance_error"] == pytest.approx(tribe.metrics.instance_error(made).item())
        assert row["category_error"] == pytest.approx(tribe.metrics.category_error(made).item())
        assert row["domain_error"].keys() == {"impulse_noise@5", "motion_blur@5"}
        assert made.spec["scenario"]["fields"]["imbalance"] == 1_000_000
        assert made.spec["dataset"]["name"] == "live-mnist-c"
    assert report["spec"]["scenario"]["name"] == "gli-f"
    assert report["machine"]["torch"] == torch.__version__
    error = {(row["method"], row["seed"]): row["instance_error"] for row in report["results"]}
    assert error["tribe", 0] < 0.8 * error["source", 0], "adaptation helps on real digits"


def test_more_seeds_are_those_that_are_missing_and_rows_name_their_folders(played):
    folder = shutil.copytree(played[0], "more")
    play(*SHORT, "--methods", "source", "--seeds", "1,5", "--out", folder, "--json", "more.json")
    rows = {row["seed"]: row["id"] for row in json.loads(Path("more.json").read_text())["results"]}
    assert rows.keys() == {1, 5}
    assert all(Path(folder, id, f"record-{seed}.npz").is_file() for seed, id in rows.items())


def test_the_chart_is_an_svg_that_names_methods_and_domains(played):
    pytest.importorskip("matplotlib")
    (path,) = played[0].glob("*.svg")
    text = path.read_text()
    assert text.lstrip().startswith("<?xml")
    for word in ("source: ", "tribe: ", "motion_blur@5", "instance error"):
        assert word in text


def test_a_table_is_printed_and_results_are_under_their_id():
    result = play(*SHORT, "--methods", "source", "--json", "out.json")
    assert "instance error" in result.stdout
    assert "source" in result.stdout
    (file,) = Path("runs").glob("*.json")
    assert re.fullmatch("live-mnist-c-compact-gli-f-[0-9a-f]{8}", file.stem)
    (row,) = json.loads(file.read_text())["results"]
    assert {path.name for path in Path("runs").iterdir() if path.suffix != ".svg"} == {
        *(file.name, row["id"], ".lock", "live-mnist-c-cpu.jsonl")
    }
    assert (Path("runs") / row["id"] / "record-0.npz").is_file()
    assert json.loads(Path("out.json").read_text())["results"][0]["method"] == "source"


def test_fields_of_any_component_can_be_set():
    fields = setting("tribe.gamma=0.25", "scenario.sigma=10.0", "scenario.draw=paper", "dataset.seed=3")
    play(*SHORT, "--methods", "tribe", "--json", "-", *fields)
    spec = record("runs", "tribe").spec
    assert spec["method"]["fields"]["gamma"] == 0.25
    assert spec["scenario"]["fields"]["sigma"] == 10.0
    assert spec["scenario"]["fields"]["draw"] == "paper"
    assert spec["dataset"]["fields"]["seed"] == 3


def test_one_value_and_words_with_commas_are_sequences():
    words = ("dataset.corruptions=impulse_noise, motion_blur", "sar.frozen_tail=layers.13,layers.16")
    fields = setting(*words, "dataset.severities=4", "scenario.domains=motion_blur@4")
    play(*IMBALANCE, *fields, "--methods", "sar", "--out", "out")
    made = record("out", "sar")
    assert made.domains == ("motion_blur@4",)
    assert made.spec["dataset"]["fields"]["corruptions"] == ["impulse_noise", "motion_blur"]
    assert made.spec["dataset"]["fields"]["severities"] == [4]
    assert made.spec["method"]["fields"]["frozen_tail"] == ["layers.13", "layers.16"]


def test_own_network_from_a_file():
    Path("mine.py").write_text("import tribe\ndef net():\n    return tribe.models.create('compact')\n")
    weights = tribe.models.find("compact", "mnist", "nowhere")
    result = play(*SHORT, "--model", "mine.py:net", "--weights", weights, "--methods", "source", "--json", "-")
    named = tribe_run(*SHORT, "--methods", "source", "--json", "-")
    reports = [json.loads(r.stdout) for r in (result, named)]
    errors = [report["results"][0]["instance_error"] for report in reports]
    assert errors[0] == errors[1]
    assert reports[0]["spec"]["model"]["code"] == hashlib.sha256(Path("mine.py").read_bytes()).hexdigest()


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
with_classifier = tribe.Backbone(net, classifier="fc")
"""


def test_own_network_that_names_its_classifier():
    """What the error of a network without one says to do."""
    Path("mine.py").write_text(HEADLESS)
    refused = tribe_run(*TINY, "--model", "mine.py:net", "--methods", "lame", "--out", "out")
    assert_refused(refused, "tribe.Backbone(model, classifier=...)")
    result = play(*TINY, "--model", "mine.py:with_classifier", "--methods", "lame", "--out", "out", "--json", "-")
    named = tribe_run(*TINY, "--methods", "lame", "--out", "named", "--json", "-")
    errors = [json.loads(r.stdout)["results"][0]["instance_error"] for r in (result, named)]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("lead", ["", "+"])
def test_own_method_from_a_file(lead):
    methods = f"bn, {lead}{write_method('Mine', fields='rate: float = 0.5')}"
    result = play(*TINY, "--methods", methods, "--set", "mine.rate=0.25", "--json", "-", "--out", "out")
    errors = {row["method"]: row["instance_error"] for row in json.loads(result.stdout)["results"]}
    assert errors.keys() == {"bn", "mine"}
    assert errors["mine"] == errors["bn"]
    spec = record("out", "mine").spec["method"]
    assert spec["fields"]["rate"] == 0.25
    assert spec["code"] == hashlib.sha256(Path("mine.py").read_bytes()).hexdigest()


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_other_settings_are_another_result_and_the_same_are_found():
    def rows(*options):
        result = play(*TINY, "--json", "-", *options)
        return result, {row["id"] for row in json.loads(result.stdout)["results"]}

    _, ids = rows("--methods", "source,bn")
    before = contents("runs")
    for options in (("--set", "scenario.imbalance=10"), ("--set", "batch=32"), ("--set", "precision=bf16")):
        ids |= rows("--methods", "source", *options)[1]
    ids |= rows("--methods", "source", "--set", "dataset.severities=3")[1]
    ids |= rows("--methods", "source,tent", "--set", "tent.lr=0.5")[1]
    assert len(ids) == 7
    assert ids == {result.experiment.id for result in finished("runs")}
    weights = tribe.models.find("compact", "mnist", "nowhere")
    result, same = rows("--methods", "bn,source", *IMBALANCE, "--set", "precision=float32", "--weights", weights)
    assert same < ids, "the same weights, wherever they are"
    assert "found in runs, not computed again: bn, source" in message(result)
    after = contents("runs")
    assert all(after[path].startswith(before[path]) for path in before), "lines were added, and nothing was touched"


def test_force_computes_anew():
    def source(*options):
        result = play(*TINY, "--methods", "source", "--out", "out", *options)
        return result, results("out")["source"]

    _, first = source()
    found, second = source()
    forced, third = source("--force")
    assert "not computed again: source" in message(found)
    assert "not computed again" not in message(forced)
    assert second.environment == first.environment
    assert third.environment["seconds_per_image"] != first.environment["seconds_per_image"]
    assert third.metrics == first.metrics


DEADLY = """log, killed = pathlib.Path("steps"), pathlib.Path("killed")
with log.open("a") as file:
    file.write("step\\n")
if not killed.exists() and len(log.read_text().splitlines()) == 60:
    killed.touch()
    os.kill(os.getpid(), signal.SIGKILL)"""


def test_a_killed_run_goes_on_from_its_checkpoint():
    """Killed in batch 60; the checkpoint is of batch 50."""
    command = (*TINY, "--methods", write_method("Deadly", DEADLY), "--set", "batch=3")
    assert in_a_process(*command).code == -signal.SIGKILL
    assert not list(finished("out"))
    assert len(list(Path("out").glob("*/checkpoint.safetensors"))) == 1
    Path("steps").unlink()
    result = in_a_process(*command)
    assert result.code == 0, result.err
    resumed = record("out", "deadly")
    batches = -(-len(resumed.label) // 3)
    assert len(Path("steps").read_text().splitlines()) == batches - 50
    assert not list(Path("out").glob("*/checkpoint.safetensors"))
    succeeded(tribe_run(*TINY, "--methods", "bn", "--set", "batch=3", "--out", "whole"))
    whole = record("whole", "bn")
    assert torch.equal(resumed.prediction, whole.prediction)
    assert torch.equal(resumed.confidence, whole.confidence)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset", "cifar10-d"], ["unknown data set", "cifar10-c"]),
        (["--scenario", "gli"], ["unknown scenario", "gli-f"]),
        (["--methods", "tribe,trent"], ["unknown method", "tent"]),
        (["--methods", " ,"], ["names no method", "tribe"]),
        (["--methods", "absent.py:Mine"], ["no file at absent.py"]),
        (["--methods", "wide.py:net"], ["wide.py:net is not a method"]),
        (["--methods", "wide.py:Nope"], ["wide.py has no attribute 'Nope'", "Known: Mine", "!tribe_target"]),
        (["--methods", "CoTTA"], ["unknown method 'CoTTA'", "did you mean 'cotta'"]),
        (["--scenario", "wide.py:Mine"], ["wide.py:Mine is not a scenario", "tribe.scenarios.Scenario"]),
        (["--scenario", "absent.py:Mine"], ["no file at absent.py"]),
        (["--scenario", "gradual"], ["need domain", "1,2,3,4,5"]),
        (["--dataset", "wide.py:Mine"], ["wide.py:Mine is not a data set", "images(domain, index)"]),
        (["--json", "nope/x.json"], ["no folder nope"]),
        (["--json", "."], ["is a folder"]),
        (["--model", "wrn28"], ["unknown model", "did you mean", "wrn28_10"]),
        (["--model", "wrn28_10"], ["no weights of wrn28_10 for mnist", "train mnist --model wrn28_10"]),
        (["--dataset", "folder"], ["--data FOLDER"]),
        (["--dataset", "cifar10-c"], ["CIFAR-10-C", "tribe corrupt cifar10"]),
        (["--dataset", "live-cifar10-c"], ["cifar-10-batches-bin"]),
        (["--set", "device=cuda:x"], ["unknown device"]),
        (["--set", "precision=half"], ["float32, tf32 or bf16"]),
        (["--seeds", "0"], ["at least 1"]),
        (["--set", "batch=0"], ["at least 1"]),
        (["--set", "threads=0"], ["threads"]),
        (["--set", "scenario.imbalance=0.5"], ["imbalance"]),
        (["--set", "scenario.imbalance=1e30"], ["without an image"]),
        (["--scenario", "ptta", "--set", "scenario.imbalance=10"], ["no field 'imbalance'"]),
        (["--set", "tribe.gama=1"], ["no field 'gama'", "gamma"]),
        (["--set", "tribe.rate_cap=perhaps"], ["rate_cap of tribe is True or False; got 'perhaps'"]),
        (["--set", "gamma=1"], ["COMPONENT.FIELD=VALUE"]),
        (["--set", "cotta.lr=1"], ["takes no part", "tribe"]),
        (["--set", "dataset.corruptions=('fgo',)"], ["unknown corruption 'fgo'", "fog"]),
        (["--set", "dataset.corruptions=stripe,fgo"], ["unknown corruption 'fgo'", "fog"]),
        (["--set", "dataset.severities=6"], ["a severity is 1, 2, 3, 4 or 5; got 6"]),
        (["--weights", "absent.safetensors"], ["no weights file at absent.safetensors"]),
        (["--weights", "wide.safetensors"], ["wide.safetensors"]),
        (["--out", "file"], ["file"]),
        (["--model", "wide.py:net"], ["7 outputs", "10"]),
        (["--model", "wide.py:one"], ["classifier 'fc' has a single output", "(0, z)"]),
    ],
)
def test_an_impossible_run_is_refused_with_a_message(options, words):
    Path("file").write_text("in the way")
    save_file({"fc.weight": torch.zeros(10, 3)}, "wide.safetensors")
    own = (f"{name} = tribe.models.create('compact', classes={k})" for name, k in (("net", 7), ("one", 1)))
    Path("wide.py").write_text("\n".join(("import tribe", *own, "class Mine(tribe.methods.Method): pass")))
    result = tribe_run(*options)
    assert result.exit_code == 2, result.output
    for word in words:
        assert (word.removeprefix("!") in message(result)) != word.startswith("!"), message(result)
    assert not Path("runs").exists(), "nothing was begun"


def in_a_process(*options, **surroundings):
    """A real process, which a signal or a limit can meet; it says on stderr how far it is."""
    return ended("-m", "tribe", "run", *options, "--out", "out", **surroundings)


@pytest.mark.usefixtures("all_digits")
def test_on_a_full_disk_the_error_names_the_file_and_the_same_command_goes_on():
    options = (*TINY, "--set", "scenario.imbalance=300", "--methods", "source")  # a record of over 8 kB
    full = in_a_process(*options, limits={"RLIMIT_FSIZE": 8192})  # a write beyond fails as on a full disk
    assert full.code == 2
    words = r"source: out/.*/record-0.npz could not be written: File too large. It needs 0.0 MB, and"
    assert re.search(words, full.err)
    assert not list(finished("out"))
    assert not list(Path("out").rglob("record*"))
    assert in_a_process(*options).code == 0
    assert results("out").keys() == {"source"}


def test_after_ctrl_c_it_prints_what_is_finished():
    hear = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a parent may ignore it
    interrupted = write_method("Interrupted", hear + "os.kill(os.getpid(), signal.SIGINT)")
    stopped = in_a_process(*TINY, "--methods", f"source,{interrupted}")
    assert stopped.code == 130
    assert "stopped. What was finished before (source) is in out" in stopped.err
    assert "could not be played" not in stopped.err
    assert results("out").keys() == {"source"}
    assert [row["method"] for row in summary("out")["results"]] == ["source"]


@pytest.mark.parametrize("error", ["RuntimeError", "TypeError", "KeyError", None])
def test_one_method_that_fails_does_not_end_the_others(error):
    """A custom method may fail in any way: the message names the line."""
    broken, fields = (write_method("Broken", f"raise {error}('of mine')"), ()) if error else ("note", ["note.room=5"])
    options = ("--methods", f"source,{broken},bn", *setting(*fields), "--out", "out", "--json", "-")
    result = tribe_run(*TINY, *options)
    assert result.exit_code == 2
    name, words = ("broken", rf"{error}.*of mine.*broken\.py, line 10") if error else ("note", "images of shape .* 784")
    assert re.search(f"error: {name}: {words}", message(result)), message(result)
    assert message(result).endswith(f"error: {name} could not be played to the end; the reasons are above")
    assert [row["method"] for row in json.loads(result.stdout)["results"]] == ["source", "bn"]
    assert [row["method"] for row in summary("out")["results"]] == ["source", "bn"]
    assert results("out").keys() == {"source", "bn"}


OWN_PARTS = """
from dataclasses import dataclass
import torch, tribe
from tribe.data.datasets.corrupted import LiveMnistC
from tribe.methods.source import BN
from tribe.data.scenarios import Scenario

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


@pytest.mark.usefixtures("all_digits")
def test_custom_components_are_played_and_what_they_print_is_no_result():
    Path("parts.py").write_text(OWN_PARTS)
    names = (*TINY[:2], "--set", "scenario.every=50", "--scenario", "parts.py:Backwards", "--dataset", "parts.py:Dark")
    result = play(*names, "--model", "parts.py:net", "--methods", "parts.py:Steps", "--out", "out", "--json", "-")
    planned = tribe_command(
        "schedule", "parts.py:Backwards", "--dataset", "parts.py:Dark", *names[:4], "--out", "plan.npz", "--json"
    )
    report = json.loads(result.stdout)
    assert report["spec"]["dataset"]["name"] == "dark"
    assert report["spec"]["scenario"]["name"] == "backwards"
    assert report["spec"]["scenario"]["fields"]["every"] == 50
    assert [(row["method"], row["images"]) for row in report["results"]] == [("steps", 200)]
    for place in ("at import", "of a step", "of a scenario", "of images", "of a network"):
        assert f"words {place}" in result.stderr
    assert json.loads(planned.stdout)["images"] == 200
    assert np.load("plan.npz")["index"][:2].tolist() == [9999, 9949]


class TestSchedule:
    def run(self, *arguments):
        return tribe_command("schedule", *arguments)

    def test_it_is_the_stream_that_run_plays(self, played):
        result = succeeded(self.run("gli-f", *SHORT, "--seed", 1, "--json", "--out", "plan.npz"))
        planned = json.loads(result.stdout)
        made = record(played[0], "source", 1)
        assert planned["images"] == len(made.label)
        assert planned["class_counts"] == tribe.metrics.class_counts(made).tolist()
        plan = scenarios.Schedule(**{name: torch.from_numpy(array) for name, array in np.load("plan.npz").items()})
        assert scenarios.digest(plan) == planned["digest"]
        assert torch.equal(plan.domain, made.domain)

    def test_the_table_and_the_picture(self):
        pytest.importorskip("matplotlib")
        result = succeeded(self.run("gli-v", *SHORT, "--plot", "plan.png"))
        assert "impulse_noise@5" in result.stdout
        assert re.search(r"BLAKE2b-128\s+[0-9a-f]{32}\b", result.stdout), result.stdout
        assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


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

    def test_several_seeds_of_one_stream_are_warned_of(self):
        def warnings(*options):
            result = play(*self.OPTIONS, "--scenario", "replay", *options)
            return message(result).count("play the same images in the same order, and do not reduce uncertainty")

        assert warnings("--seeds", 2) == 1
        assert warnings() == warnings("--seeds", 2, "--set", "scenario.order=random") == 0

    def test_they_are_played_in_order(self):
        result = play(*self.OPTIONS, "--scenario", "replay", "--out", "out")
        assert "no labels" in result.stdout
        made = record("out", "source")
        assert made.domain.tolist() == [0] * 20 + [1] * 10
        assert (made.prediction == torch.as_tensor(mnist_test()[1][:30].astype(int))).double().mean() > 0.9

    def test_memories_have_room_for_large_pictures(self):
        image = pytest.importorskip("PIL.Image")
        for path in Path("pictures").rglob("*.png"):
            image.open(path).resize((64, 64)).save(path)
        memories = "note,rotta,selftrain/balanced+memory+st+anchor"
        play(*self.OPTIONS[:-1], memories, "--scenario", "replay", "--out", "out")
        rooms = {result.experiment.method.fields["room"] for result in finished("out")}
        assert rooms == {3 * 64 * 64}

    def test_a_scenario_that_draws_by_class_says_what_plays_them(self):
        assert_refused(tribe_run(*self.OPTIONS, "--scenario", "gli-f"), "'replay'")

    def test_a_damaged_picture_is_named_and_fatal_or_skipped_as_chosen(self):
        Path("pictures/monday/03.png").write_bytes(b"nothing")
        result = tribe_run(*self.OPTIONS, "--scenario", "replay")
        assert_refused(result, "pictures/monday/03.png", "--set dataset.unreadable=skip")
        result = play(*self.OPTIONS, "--scenario", "replay", "--set", "dataset.unreadable=skip", "--out", "out")
        assert "skipped: pictures/monday/03.png" in message(result)
        assert len(record("out", "tribe").prediction) == 29
