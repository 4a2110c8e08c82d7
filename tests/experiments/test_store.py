"""The store: results that are found again, and that survive kills and damage with the same numbers."""

import fcntl
import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import tribe
from grid import DATA, Stopped, run_experiment, same, small, stop_at
from places import TESTS
from processes import Process, ended
from reproduction.keep import keep, stale
from tribe import metrics
from tribe.experiments.experiment import Experiment, difference
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import Result, ResultStore, StreamResult, finished
from tribe.experiments.workbench import Workbench
from tribe.io.files import Busy

GRID = TESTS / "grid.py"
PACK = "live-mnist-c-cpu.jsonl"

pytestmark = [pytest.mark.usefixtures("few"), pytest.mark.filterwarnings("ignore:an imbalance of")]


@pytest.fixture(scope="module")
def workbench(few_digits):
    return Workbench(few_digits, device="cpu")


@pytest.fixture(scope="module")
def result(workbench, tmp_path_factory):
    """TENT on two streams, never disturbed."""
    return run_experiment(small(workbench, "tent", seeds=(0, 1)), tmp_path_factory.mktemp("runs"))


def never(*_):
    raise AssertionError("computed, although the results are there")


def check_equal(one, other):
    assert one.metrics == other.metrics
    assert same(one.records(), other.records())


def test_the_layout(result):
    assert {path.name for path in result.root.iterdir()} == {PACK, ".lock", result.experiment.id}
    assert {path.name for path in result.folder.iterdir()} == {"record-0.npz", "record-1.npz", ".lock"}
    lines = [json.loads(line) for line in (result.root / PACK).read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 1]
    assert {Experiment.from_json(line["spec"], (0, 1)) for line in lines} == {result.experiment}
    for record in ResultStore(result.root).find(result.experiment).records():
        scores = result.metrics[record.spec["seed"]]
        assert record.spec["experiment"] == result.experiment.id
        assert scores["images"] == len(record.label)
        assert scores["instance_error"] == metrics.instance_error(record).item()
        assert scores["domain_error"] == {"impulse_noise@5": metrics.domain_error(record).item()}
        assert scores["class_counts"] == {"impulse_noise@5": metrics.class_counts(record)[0].tolist()}
    assert result.values("domain_error", "impulse_noise") == result.values("instance_error")
    assert result.error() == pytest.approx(sum(result.values("instance_error")) / 2)
    assert result.environment["machine"]["torch"] == torch.__version__
    assert result.environment["code"].keys() == {"dataset", "model", "scenario", "method"}


def test_what_is_there_is_not_computed_again(result):
    found = run_experiment(result.experiment, result.root, progress=never)
    assert found.metrics == result.metrics
    assert [r.experiment.id for r in finished(result.root)] == [result.experiment.id]
    assert list(finished("nowhere")) == []


def test_a_seed_that_is_missing_is_played_alone(result, tmp_path):
    lines = (result.root / PACK).read_text().splitlines(keepends=True)
    (tmp_path / PACK).write_text(lines[1])
    assert ResultStore(tmp_path).find(result.experiment) is None
    completed = run_experiment(result.experiment, tmp_path)
    assert list(completed.memory) == [0]
    assert completed.metrics == result.metrics
    (merged,) = finished(tmp_path)
    assert merged.experiment.seeds == (0, 1)


def test_a_result_is_one_without_its_records(result, tmp_path):
    (tmp_path / PACK).write_bytes((result.root / PACK).read_bytes())
    found = run_experiment(result.experiment, tmp_path, progress=never)
    assert found.metrics == result.metrics
    assert not found.has_records
    with pytest.raises(FileNotFoundError, match="record"):
        found.records()


def test_force_computes_anew(result, tmp_path):
    (tmp_path / PACK).write_bytes((result.root / PACK).read_bytes())
    again = run_experiment(result.experiment, tmp_path, force=True)
    check_equal(again, result)
    (stored,) = finished(tmp_path)
    assert stored.environment["finished"] == again.environment["finished"], "the last line counts"


def test_logits_are_kept_where_they_are_asked_for(workbench, tmp_path):
    experiment = small(workbench)
    assert run_experiment(experiment, tmp_path).records()[0].outputs is None
    run_experiment(experiment, tmp_path, keep_outputs=True)
    (record,) = run_experiment(experiment, tmp_path, keep_outputs=True, progress=never).records()
    assert record.outputs.values.shape == (len(record.label), 10)


def test_it_goes_on_in_the_middle_of_the_stream_and_ends_with_the_same_numbers(result, tmp_path):
    steps = []
    with pytest.raises(Stopped):
        run_experiment(result.experiment, tmp_path, progress=stop_at(11), every=4)
    assert (tmp_path / result.experiment.id / "checkpoint.safetensors").is_file()
    assert list(finished(tmp_path)) == []
    resumed = run_experiment(result.experiment, tmp_path, progress=lambda done, *_: steps.append(done), every=4)
    assert steps[0] == 9, "after the checkpoint of batch 8"
    check_equal(resumed, result)
    assert not (tmp_path / result.experiment.id / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    "harm",
    [
        lambda line: line[:-40],
        lambda line: line[:-40] + b"\n",
        lambda line: line.replace(b'"batch":16', b'"batch":32'),
        lambda line: line.replace(b'"images":', b'"images":-'),
        lambda line: b"{}\n",
        lambda line: b"[" * 100_000 + b"\n",
        lambda line: b"\xff" * 20 + b"\n",
    ],
)
@pytest.mark.filterwarnings("always:a line of")
def test_a_damaged_line_is_left_out_and_computed_again(result, tmp_path, harm, recwarn):
    first, second = (result.root / PACK).read_bytes().splitlines(keepends=True)
    (tmp_path / PACK).write_bytes(first + harm(second))
    store = ResultStore(tmp_path)
    assert store.streams_of(result.experiment).keys() == {0}
    assert len(store.damaged) == len([w for w in recwarn if PACK in str(w.message)]) == harm(second).endswith(b"\n")
    repaired = run_experiment(result.experiment, tmp_path)
    assert repaired.metrics == result.metrics
    assert run_experiment(result.experiment, tmp_path, progress=never).metrics == result.metrics


def test_a_damaged_record_is_named(result, tmp_path):
    (tmp_path / PACK).write_bytes((result.root / PACK).read_bytes())
    folder = tmp_path / result.experiment.id
    folder.mkdir()
    whole = (result.folder / "record-0.npz").read_bytes()
    (folder / "record-1.npz").write_bytes((result.folder / "record-1.npz").read_bytes())
    for bad in (whole[:-100], b"", (result.folder / "record-1.npz").read_bytes()):
        (folder / "record-0.npz").write_bytes(bad)
        with pytest.raises(ValueError, match=r"record-0\.npz"):
            ResultStore(tmp_path).find(result.experiment).records()


def test_records_that_cannot_be_written_do_not_cost_the_run(result, tmp_path):
    """A disk may be full at the last moment; here a folder is where a record belongs."""
    folder, first, second = tmp_path / result.experiment.id, [], []
    (folder / "record-1.npz").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        run_experiment(result.experiment, tmp_path, every=3, progress=lambda done, *_: first.append(done))
    (folder / "record-1.npz").rmdir()
    written = run_experiment(result.experiment, tmp_path, every=3, progress=lambda done, *_: second.append(done))
    assert second == first[len(first) // 3 * 3 :], "what came after the last checkpoint"
    assert written.metrics == result.metrics
    assert not (folder / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("harm", ["a flipped bit", "torn", "of another run"])
def test_a_checkpoint_that_cannot_be_used_is_set_aside_and_changes_no_number(result, tmp_path, harm):
    with pytest.raises(Stopped):
        run_experiment(result.experiment, tmp_path, progress=stop_at(9), every=4)
    path = tmp_path / result.experiment.id / "checkpoint.safetensors"
    bad = bytearray(path.read_bytes())
    bad[-5] ^= 0x40
    experiment = replace(result.experiment, seeds=(1, 0)) if harm == "of another run" else result.experiment
    if harm != "of another run":
        path.write_bytes(bad if harm == "a flipped bit" else b"torn")
    content = path.read_bytes()
    with pytest.warns(UserWarning, match="set aside"):
        computed = run_experiment(experiment, tmp_path)
    assert computed.metrics == result.metrics
    assert path.with_name(f"{path.name}.damaged-1").read_bytes() == content, "nothing is lost"


def test_bf16_is_a_network_of_bfloat16_and_a_precision_of_its_own(workbench, tmp_path):
    experiment, whole = small(workbench, "tent", precision="bf16"), small(workbench, "tent")
    assert difference(experiment, whole) == ["precision is 'bf16' and 'float32'"], "the weights are those of float32"
    (record,) = run_experiment(experiment, tmp_path).records()
    net = tribe.models.load("compact", tribe.models.find("compact", "mnist", "nowhere"))
    rounded, method = tribe.Backbone(net).to(torch.bfloat16), tribe.methods.create("tent", classes=10)
    (expected,) = tribe.run(rounded, method, experiment.parts.stream)
    assert same([record], [expected])
    (plain,) = run_experiment(whole, tmp_path).records()
    assert not torch.equal(record.confidence, plain.confidence)
    assert metrics.instance_error(record).item() == pytest.approx(metrics.instance_error(plain).item(), abs=0.02)


@pytest.mark.parametrize("method", ["eata", "ttac", "petal"])
def test_source_knowledge_of_a_network_serves_its_bf16_self(workbench, tmp_path, method):
    stream = ComponentSpec("gli-f", {"imbalance": 1e9, "sigma": 1.0})
    experiment = Experiment.of(DATA, "compact", stream, method, precision="bf16", workbench=workbench)
    with pytest.raises(Stopped):  # after a step: all its parts were there
        run_experiment(experiment, tmp_path, progress=stop_at(1))


def test_kept_results_are_read_as_others_are(result, workbench, tmp_path):
    runs, target = tmp_path / "runs", tmp_path / "kept"
    runs.mkdir()
    (runs / PACK).write_bytes((result.root / PACK).read_bytes())
    other = run_experiment(small(workbench), runs)
    keep(runs, target)
    assert {path.name for path in target.iterdir()} == {".lock", PACK}
    lines = [json.loads(line) for line in (target / PACK).read_text().splitlines()]
    ids = [(line["id"], line["seed"]) for line in lines]
    assert ids == sorted([(result.experiment.id, 0), (result.experiment.id, 1), (other.experiment.id, 0)])
    for one in (result, other):
        found = run_experiment(one.experiment, target, progress=never)
        assert (found.experiment, found.metrics, found.streams) == (one.experiment, one.metrics, one.streams)
    before = (target / PACK).read_bytes()
    keep(runs, target)
    assert (target / PACK).read_bytes() == before, "results do not change"


def edited(result, root, **environment):
    """The same result in another folder, with changes of its environment."""
    streams = {seed: StreamResult(s.metrics, {**s.environment, **environment}) for seed, s in result.streams.items()}
    ResultStore(root).add(Result(result.experiment, root, streams))


def test_a_result_of_other_code_is_stale_and_computed_again(result, tmp_path):
    edited(result, tmp_path, code={**result.environment["code"], "method": "0" * 16})
    assert stale(ResultStore(tmp_path).find(result.experiment)) == ["method"]
    with pytest.warns(UserWarning, match="the method tent"):
        again = run_experiment(result.experiment, tmp_path)
    assert again.metrics == result.metrics
    assert stale(ResultStore(tmp_path).find(result.experiment)) == []
    edited(result, tmp_path / "unknown", code={})
    assert stale(ResultStore(tmp_path / "unknown").find(result.experiment)) == []


def test_keep_replaces_what_is_stale_and_leaves_out_paths(result, tmp_path):
    edited(result, tmp_path / "kept", code={"method": "0" * 16}, finished="long ago")
    edited(result, tmp_path / "runs", command=["tribe", "run", "--data", "/home/me"])
    keep(tmp_path / "runs", tmp_path / "kept")
    (kept,) = finished(tmp_path / "kept")
    assert kept.environment["finished"] == result.environment["finished"]
    assert "command" not in kept.environment


def test_a_store_reads_what_another_added(result, workbench, tmp_path):
    reader = ResultStore(tmp_path)
    assert reader.results() == []
    edited(result, tmp_path)
    assert [r.experiment.id for r in reader.results()] == [result.experiment.id]
    other = run_experiment(small(workbench), tmp_path)
    assert reader.find(other.experiment).metrics == other.metrics


def test_the_second_process_gets_busy_or_waits(workbench, tmp_path):
    experiment = small(workbench)
    folder = tmp_path / experiment.id
    folder.mkdir()
    hold = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'wb')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Busy, match="another process"):
            run_experiment(experiment, tmp_path, wait=False)
        waiting = threading.Thread(target=run_experiment, args=(experiment, tmp_path))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        other.stdin.close()
        waiting.join(60)
    assert ResultStore(tmp_path).find(experiment) is not None
    with (folder / ".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go


def test_two_processes_that_race_compute_each_experiment_once(tmp_path):
    processes = [Process(GRID, tmp_path, 2) for _ in range(2)]
    assert [process.end().code for process in processes] == [0, 0]
    assert len((tmp_path / PACK).read_text().splitlines()) == 2
    assert not list(tmp_path.glob("*/*.damaged-*"))


def killed_grid(root, specs, points):
    for runs, kills in (("whole", ()), ("killed", points)):
        done = ended(GRID, root / runs, specs, *kills)
        assert done.code == 0, done.err
    whole, killed = (list(finished(root / runs)) for runs in ("whole", "killed"))
    assert [r.experiment for r in whole] == [r.experiment for r in killed]
    assert sum(len(r.streams) for r in whole) == specs
    for one, other in zip(whole, killed, strict=True):
        check_equal(one, other)
    assert not list(root.glob("killed/*/*.damaged-*"))
    assert not list(root.glob("killed/*/checkpoint.safetensors"))


def test_a_grid_that_is_killed_ends_with_the_same_numbers(tmp_path):
    killed_grid(tmp_path, 2, ("checkpoint:2", "record-:1", "checkpoint:1"))


@pytest.mark.slow
def test_a_grid_of_twelve_that_is_killed_twenty_times_ends_with_the_same_numbers(tmp_path):
    """A round of four kills ends one experiment, so five rounds fit."""
    killed_grid(tmp_path, 12, ("checkpoint:2", "record-:1", "record-:2", "checkpoint:2") * 5)
