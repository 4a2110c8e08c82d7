"""Results are found, selected, shared between processes, and checked for damage."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tribe
from commands import message, tribe_command
from places import ROOT
from processes import Process
from reproduce_helpers import SMALL, call, draw, fabricate, outdate, rename
from reproduction import gather, tables
from reproduction.gather import read_draws
from reproduction.plan import Choices, make_plan
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import finished
from tribe.experiments.workbench import Workbench

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]


COUNTED = """
import os, time
from pathlib import Path
from tribe.methods.source import Source

class Counted(Source):
    def init(self, net, streams=1, seed=0):
        book, until = Path("computed.txt"), time.monotonic() + 120
        with book.open("a") as file:
            file.write(f"{self.name} {os.getpid()}\\n")
        while len({line.split()[1] for line in book.read_text().splitlines()}) < 3:
            assert time.monotonic() < until, "the others do not compute"
            time.sleep(0.01)
        return super().init(net, streams, seed)

class One(Counted): pass
class Two(Counted): pass
class Three(Counted): pass
class Four(Counted): pass
class Five(Counted): pass
"""


def test_results_without_records_are_enough(played, tmp_path):
    options, runs, parsed = played
    for path in runs.rglob("*.json"):
        target = tmp_path / "kept" / path.relative_to(runs)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    again = [word if word != runs else tmp_path / "kept" for word in options]
    kept = json.loads(call(*again, "--format", "json").stdout)
    assert kept["cells"] == parsed["cells"]
    assert kept["notes"] == parsed["notes"], "who beats whom is judged over seeds, from the metrics"
    assert not list((tmp_path / "kept").rglob("*.npz")), "nothing was run"


def test_a_table_is_made_of_results_alone(played, tmp_path):
    """Where neither weights nor the device are at hand."""
    options, runs, parsed = played
    elsewhere = tmp_path / "elsewhere"
    for result in finished(runs):
        spec = result.experiment.json()
        spec["model"]["name"], spec["device"], spec["threads"] = "wrn28_10", "cuda", None
        rename(result, spec, elsewhere)
    foreign = [{runs: elsewhere, "compact": "wrn28_10"}.get(word, word) for word in options]
    assert "no result fits: its device is cuda, not cpu" in message(call(*foreign, "--no-run"))
    foreign = [{"cpu": "cuda"}.get(word, word) for word in foreign]
    result = call(*foreign, "--no-run", "--format", "json")
    assert result.exit_code == 0, result.output
    kept = json.loads(result.stdout)
    assert [(c["row"], c["ours"]) for c in kept["cells"]] == [(c["row"], c["ours"]) for c in parsed["cells"]]
    more = [{"source,BN,+pl": "source,TENT"}.get(word, word) for word in foreign]
    lacking = call(*more, "--no-run", "--format", "json")
    assert lacking.exit_code == 1
    assert "missing: TENT, error; TENT, seconds: no result fits" in message(lacking)


@pytest.mark.parametrize("name", tables.names())
def test_a_table_without_results_names_every_cell_as_missing(name):
    Path("runs").mkdir()
    result = call(name, "--no-run", "--format", "json")
    parsed = json.loads(result.stdout)
    if name in ("classes-cifar10", "classes-cifar100"):
        assert "not found" in parsed["missing"][0]["reason"], "labels are needed"
    else:
        assert [m["reason"] for m in parsed["missing"]] == ([] if name == "protocols" else ["no result fits"])
    assert result.exit_code == (name != "protocols")


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": "0" * 32}, "weights"),
        ({"device": "cuda", "threads": None}, "device"),
        ({"batch": 48}, "batch"),
    ],
)
def test_results_of_different_specs_are_refused(played, tmp_path, change, field, beside):
    """Two that fit one cell, or cells that do not fit together."""
    options, runs, _ = played
    mixed = tmp_path / "mixed"
    for result in finished(runs):
        other = result.experiment.method.name == "bn"
        if not other or beside:
            rename(result, result.experiment.json(), mixed)
        if other:
            rename(result, result.experiment.json() | change, mixed)
    words = [{runs: mixed, "cpu": "auto"}.get(word, word) for word in options]
    result = call(*words, "--no-run")
    assert result.exit_code == 2, result.output
    assert "--seed, --seeds, --precision, --device, --threads and --batch" in message(result)
    assert re.search(rf"{field} is .* and ", message(result)), message(result)
    assert ("both fit" if beside else "do not belong into one table") in message(result)


def test_options_select_one_of_several_results(played, tmp_path):
    """By seeds, precision, device and threads; where they are not given, any will do, but not two; seeds add up."""
    options, runs, parsed = played
    spec = next(finished(runs)).experiment
    many = tmp_path / "many"
    for result in finished(runs):
        gpu = {"device": "cuda", "threads": None}
        for change in ({}, {"seeds": [7, 8]}, {"precision": "bf16"}, {"threads": spec.threads + 1}, gpu):
            rename(result, result.experiment.json() | change, many)
    every = [many if word == runs else word for word in options]
    given = {"--seed": 0, "--precision": "float32", "--device": "cpu", "--threads": spec.threads}
    named = every[: every.index("--seeds")] + every[every.index("--seeds") + 2 :]
    every.remove("--device")
    every.remove("cpu")

    def words(values):
        return [word for pair in values.items() for word in pair]

    for left in ("--precision", "--device", "--threads"):
        refused = call(*every, "--no-run", *words({k: v for k, v in given.items() if k != left}))
        assert refused.exit_code == 2, refused.output
        assert "both fit a cell" in message(refused)
        assert f"{left[2:]} is " in message(refused)
    cells = {}
    changes = ({"--seed": 7}, {"--precision": "bf16"}, {"--device": "cuda"}, {"--threads": spec.threads + 1})
    for change in ({}, *changes):
        result = call(*every, "--no-run", "--format", "json", *words(given | change))
        assert result.exit_code == 0, result.output
        cells[str(change)] = json.loads(result.stdout)["cells"]
    assert cells["{}"] == parsed["cells"]
    assert len({cell[0]["experiment"] for cell in cells.values()}) == 5
    result = call(*every, "--no-run", "--format", "json", *words(given | {"--precision": "tf32"}))
    assert json.loads(result.stdout)["cells"] == parsed["cells"], "tf32 is float32 on the CPU that made them"
    lacking = call(*every, "--no-run", "--seed", 9)
    assert lacking.exit_code == 1
    assert "no result fits: its seeds are 0, 1, 7, 8, not 9, 10" in message(lacking)
    alike = words({name: value for name, value in given.items() if name != "--seed"})
    for seeds, found in ((), ["0", "1", "7", "8"]), (("--seeds", "8,0,9"), ["8", "0"]):
        whole = json.loads(call(*named, "--no-run", "--format", "json", *alike, *seeds).stdout)["cells"]
        assert [list(cell["by_seed"]) for cell in whole if cell["by_seed"]] == [found] * sum(
            cell["experiment"] is not None for cell in whole
        )
    assert "unknown device 'gpu'" in message(call(*every, "--no-run", "--device", "gpu"))


def test_device_selects_among_the_results_in_the_repository():
    words = ("released", "--no-run", "--runs", ROOT / "results", "--seed", 425, "--format", "json")
    mixed = call(*words)
    assert mixed.exit_code == 2
    assert "device is 'cuda' and 'cpu'" in message(mixed)
    assert "--device" in message(mixed)
    assert "--columns" in message(mixed)
    there = {}
    for device in ("cuda", "cpu"):
        result = call(*words, "--device", device)
        assert result.exit_code == 1, "cells of the other device are missing"
        cells = json.loads(result.stdout)["cells"]
        there[device] = {c["column"].partition(" ")[0] for c in cells if c["ours"] is not None}
    assert "MNIST-C" in there["cpu"]
    assert "CIFAR10-C" in there["cuda"]
    assert not there["cuda"] & there["cpu"]


def test_a_damaged_record_is_named_and_computed_again(played):
    options, runs, parsed = played
    (result,) = [r for r in finished(runs) if r.experiment.method.name == "bn"]
    (result.folder / "record-0.npz").write_bytes(b"torn")
    again = call(*options, "--format", "json")
    assert "record-0.npz.damaged-1" in message(again)
    cells = [{k: v for k, v in c.items() if c["column"] == "error"} for c in json.loads(again.stdout)["cells"]]
    assert cells == [{k: v for k, v in c.items() if c["column"] == "error"} for c in parsed["cells"]]


@pytest.mark.parametrize("harm", ["torn", "gone", "another"])
def test_no_run_names_a_damaged_record(played, tmp_path, harm):
    options, runs, _ = played
    kept = tmp_path / "kept"
    shutil.copytree(runs, kept)
    (result,) = [r for r in finished(kept) if r.experiment.method.name == "bn"]
    record = result.folder / "record-0.npz"
    if harm == "torn":
        record.write_bytes(record.read_bytes()[:-200])
    elif harm == "gone":
        record.unlink()
    else:
        (other,) = [r for r in finished(kept) if r.experiment.method.name == "source"]
        record.write_bytes((other.folder / "record-0.npz").read_bytes())
    named = str(result.folder if harm == "another" else record)
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    words = [kept if word == runs else word for word in options]
    parsed = call(*words, "--no-run", "--format", "json")
    assert parsed.exit_code == 1
    assert "missing: BN, error; BN, seconds: " in message(parsed)
    assert named in message(parsed)
    assert "computes it again" in message(parsed)
    assert [named in m["reason"] for m in json.loads(parsed.stdout)["missing"]] == [True]
    cells = {(c["row"], c["column"]): c["ours"] for c in json.loads(parsed.stdout)["cells"]}
    assert cells["BN", "error"] is None
    assert cells["TEST", "error"] > 0
    for artifact in ("claims", "document"):
        spoken = call(artifact, "--runs", kept, "--out", "out.txt")
        assert spoken.exit_code == 1
        assert named in message(spoken)
        assert Path("out.txt").read_text()
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["metrics", "environment", "spec"])
def test_a_damaged_file_empties_only_its_own_cells(played, tmp_path, name):
    options, runs, parsed = played
    torn = tmp_path / "torn"
    shutil.copytree(runs, torn)
    (result,) = [r for r in finished(torn) if r.experiment.method.name == "bn"]
    others = {r.experiment.id for r in finished(torn)} - {result.experiment.id}
    path = result.folder / f"{name}.json"
    path.write_bytes(path.read_bytes()[:-20])
    words = [torn if word == runs else word for word in options]
    shown = call(*words, "--no-run", "--format", "json")
    assert shown.exit_code == 1
    assert "missing: BN, error; BN, seconds: " in message(shown)
    whole = [{**c, "ours": None, "deviation": None} if c["row"] == "BN" else c for c in parsed["cells"]]
    ours = [[(c["row"], c["column"], c["ours"]) for c in cells] for cells in (whole, json.loads(shown.stdout)["cells"])]
    assert ours[0] == ours[1]
    spoken = [call(artifact, "--runs", torn, "--out", f"{artifact}.txt") for artifact in ("claims", "document")]
    assert Path("document.txt").read_text().count("live-mnist-c") > 0
    kept = call("--runs", torn, "--keep", "kept")
    assert {r.experiment.id for r in finished("kept")} == others
    for said_of in (shown, *spoken, kept):
        assert said_of.exit_code == 1
        assert f"{path} is damaged" in message(said_of)
        assert "without --no-run computes it again; else move its folder away" in message(said_of)
    again = call(*words, "--format", "json")
    assert again.exit_code == 0, again.output
    errors = [[c["ours"] for c in t["cells"] if c["column"] == "error"] for t in (json.loads(again.stdout), parsed)]
    assert errors[0] == errors[1]
    assert call(*words, "--no-run").exit_code == 0


def test_a_damaged_file_of_another_table_has_no_effect(played, tmp_path):
    options, runs, _ = played
    torn = tmp_path / "torn"
    shutil.copytree(runs, torn)
    for name, method in (("metrics", "bn"), ("spec", "pl")):
        (result,) = [r for r in finished(torn, damaged="skip") if r.experiment.method.name == method]
        (result.folder / f"{name}.json").write_text("{")
    words = [{runs: torn, "source,BN,+pl": "source"}.get(word, word) for word in options]
    assert call(*words, "--no-run").exit_code == 0


def test_an_experiment_that_another_process_computes_is_left_for_the_end():
    workbench = Workbench(device="cpu")
    choices = Choices(
        "live-mnist-c", "compact", ("TEST", "BN"), overrides={"dataset": {"corruptions": ["impulse_noise"]}}
    )
    plan = make_plan(tables.get("wall-clock"), choices, workbench)
    first, second = plan.experiments
    folder = Path("runs") / first.id
    folder.mkdir(parents=True)
    hold = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'wb')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(folder / ".lock")]
    order = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"

        def done(experiment, result):
            order.append(experiment)
            if experiment == second:
                other.stdin.close()  # lets go of the first

        gather.run(plan, "runs", done=done)
    assert order == [second, first]
    assert len(list(finished("runs"))) == 2


def test_processes_share_the_work(tmp_path):
    """Three, of six experiments: each is computed once, none waits while others are left, and all print the table.

    Five write down who computes them, and are not computed before all three processes compute one.
    """
    Path("counted.py").write_text(COUNTED)
    own = ("One", "Two", "Three", "Four", "Five")
    words = ("norms", *SMALL, "--columns", "200", "--set", "scenario.imbalance=1000000", "--threads", 1)
    words += ("--methods", ",".join(["TEST", *(f"+counted.py:{name}" for name in own)]), "--format", "json")
    processes = [Process("-m", "tribe", "reproduce", *words, cwd=tmp_path) for _ in range(3)]
    printed = [process.end() for process in processes]
    assert [process.code for process in printed] == [0, 0, 0], printed
    computed = [line.split() for line in Path("computed.txt").read_text().splitlines()]
    assert sorted(name for name, _ in computed) == sorted(name.lower() for name in own), "each once"
    assert {int(process) for _, process in computed} == {process.pid for process in processes}
    tables = [json.loads(process.out) for process in printed]
    assert tables[0]["cells"] == tables[1]["cells"] == tables[2]["cells"]
    assert len(tables[0]["cells"]) == 6
    assert all(isinstance(cell["ours"], float) for cell in tables[0]["cells"])
    assert len(list(finished("runs"))) == 6
    assert not list(Path("runs").glob("*/*.damaged-*"))


def test_the_longest_experiment_is_run_first():
    workbench, overrides = Workbench(device="cpu"), {"dataset": {"corruptions": ["impulse_noise"]}}
    only, columns = ("TEST", "Balanced BN"), ("100", "200")
    choices = Choices("live-mnist-c", "compact", only, ("tent",), columns=columns, overrides=overrides)
    plan = make_plan(tables.get("norms"), choices, workbench)
    order = [(e.method.name, e.length(workbench)) for e in gather.longest_first(plan, "runs")]
    most, least = sorted({count for _, count in order}, reverse=True)
    names = ("selftrain/balanced-bn", "tent", "source")
    assert order == [(name, count) for name in names for count in (most, least)], "though tent is the last row"
    assert sorted(map(str, order)) == sorted(str((e.method.name, e.length(workbench))) for e in plan.experiments)
    done = []
    gather.run(plan, "runs", done=lambda experiment, _: done.append(experiment))
    assert [(e.method.name, e.length(workbench)) for e in done] == order


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "dataset is missing; expected text"),
        ("[]", "it is a list of 0; expected an object"),
        ('{"dataset": "cifar', "it is not JSON, or it was cut short"),
        ({"weights": None}, "weights is missing; expected text."),
        ({"ours": {"inst": [80.0, 81.0]}}, "ours.cat is missing; expected a number for every draw"),
        ({"textbook": {"inst": [], "cat": []}}, "textbook.inst is a list of 0; expected a number for every draw"),
        ({"textbook": {"inst": [float("nan")] * 2, "cat": [1.0] * 2}}, "it is not JSON, or it was cut short (NaN"),
        ({"textbook": {"inst": [80.0], "cat": [60.0]}}, "it does not have as many draws of ours as of the textbook"),
    ],
)
def test_unreadable_draws_are_named(content, words):
    fabricate((83.0, 63.0), "results", method="tent")
    draw("broken", [80.0, 81.0], [80.0, 82.0])
    path = Path("results/draws/broken.json")
    if isinstance(content, dict):
        whole = json.loads(path.read_text()) | content
        content = json.dumps({name: value for name, value in whole.items() if value is not None})
    path.write_text(content)
    result = call("document", "--runs", "results")
    assert result.exit_code == 2
    assert f"{path} is damaged: {words}" in message(result)
    assert "benchmarks.textbook --json" in message(result)


def test_draws_have_the_fingerprints_of_their_experiment():
    textbook = pytest.importorskip("benchmarks.textbook")
    words = ["--dataset", "live-mnist-c", "--model", "compact", "--device", "cpu", "--precision", "float32"]
    setting = textbook.setting(textbook.options(words), tribe.core.precision.choose_device("cpu"))
    errors = {"inst": [1.0], "cat": [2.0]}
    Path("draws").mkdir()
    Path("draws/one.json").write_text(json.dumps(setting | {"ours": errors, "textbook": errors}))
    protocol = ComponentSpec("gli-f", {"imbalance": 100})
    how = {"seeds": (425,), "precision": "float32", "workbench": Workbench(device="cpu")}
    experiment = Experiment.of("live-mnist-c", "compact", protocol, "tent", **how)
    (draws,) = read_draws(".")
    assert (draws.images, draws.weights) == (experiment.images, experiment.weights)
    assert draws.are_of(experiment)
    assert not dataclasses.replace(draws, weights="0" * 32).are_of(experiment)
    assert not dataclasses.replace(draws, images="0" * 32).are_of(experiment)


def test_a_stale_result_with_more_seeds_is_not_shown_beside_fresh_ones(played):
    options, runs, parsed = played
    for result in [*finished(runs)]:
        outdate(result.folder)
    one = [word if word != 2 else 1 for word in options]
    assert call(*one).exit_code == 0
    assert call(*one, "--seed", 1).exit_code == 0
    for more in ((), ("--no-run",)):
        again = json.loads(call(*options, *more, "--format", "json").stdout)
        errors = [[cell["ours"] for cell in t["cells"] if cell["column"] != "seconds"] for t in (again, parsed)]
        assert errors[0] == errors[1] != []
        assert not any("Stale" in note for note in again["notes"])


def test_a_result_of_tribe_run_is_not_computed_again():
    """`tribe run` writes an imbalance of 100.0, `tribe reproduce` one of 100."""
    stream = (*SMALL, "--scenario", "gli-f", "--imbalance", 100, "--precision", "float32")
    assert tribe_command("run", *stream, "--methods", "source", "--out", "runs", "--no-chart").exit_code == 0
    options = ("wall-clock", *SMALL, "--methods", "source,BN", "--runs", "runs")
    assert call(*options).exit_code == 0
    played = sorted((r.experiment.method.name, r.experiment.scenario.fields["imbalance"]) for r in finished("runs"))
    assert played == [("bn", 100), ("source", 100.0)]
    for result in [*finished("runs")]:  # results of both numbers, as older versions have left them
        spec = result.experiment.json()
        rename(result, spec | {"scenario": _with_other_number(spec["scenario"])}, Path("runs"))
    assert len([*finished("runs")]) == 4
    for words in ((*options, "--no-run"), ("claims", *SMALL, "--runs", "runs"), ("document", "--runs", "runs")):
        shown = call(*words)
        assert shown.exit_code == 0, message(shown)


def _with_other_number(scenario):
    """The same scenario with 100.0 in place of 100, or the reverse."""
    imbalance = scenario["fields"]["imbalance"]
    other = int(imbalance) if isinstance(imbalance, float) else float(imbalance)
    return {**scenario, "fields": {**scenario["fields"], "imbalance": other}}


def test_a_memory_for_large_images_is_found_without_running(tmp_path):
    """A method with a memory has as much room as an image needs, and --no-run reads no image."""
    table, choices = tables.get("mnist"), Choices("live-mnist-c", "compact", only=["RoTTA"])
    plan = make_plan(table, choices, Workbench(device="cpu"))
    experiments = [
        dataclasses.replace(e, method=dataclasses.replace(e.method, fields={**e.method.fields, "room": 12288}))
        for e in plan.experiments
    ]
    assert experiments
    found = gather.plan_from_experiments(table, choices, experiments, Workbench(device="cpu"))
    assert found.experiments == experiments
    for room, count in ((12288, len(experiments)), (20000, 0)):
        overridden = dataclasses.replace(choices, overrides={"rotta": {"room": room}})
        found = gather.plan_from_experiments(table, overridden, experiments, Workbench(device="cpu"))
        assert len(found.experiments) == count
