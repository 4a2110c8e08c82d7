"""Many experiments, here, in a pool, or on Ray: the same results, through failures, kills and interruptions."""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import layouts
import tribe
from grid import DATA, STREAM, run_experiment, stop_at
from tribe import scenarios
from tribe.cli.custom import METHOD, component_name
from tribe.data.datasets.files import MissingData
from tribe.data.scenarios import Scenario, Schedule
from tribe.experiments import execution
from tribe.experiments.execution import ExperimentRunner, RunSettings, in_groups
from tribe.experiments.experiment import Experiment
from tribe.experiments.parallel import Failure, run_all
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import Result, ResultStore
from tribe.experiments.workbench import Workbench
from tribe.experiments.workers import custom_code, make_job, run_job

pytestmark = pytest.mark.filterwarnings("ignore:an imbalance of")

TROUBLE = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

from tribe.methods import register
from tribe.methods.source import BN


@register("trouble")
@dataclass(frozen=True)
class Trouble(BN):
    '''Batch statistics, and trouble in the middle of the stream.'''
    kind: str = "none"
    log: str = ""

    def step(self, net, state, x, valid=None, retired=None):
        clock, log = int(state.key.clock[0]), Path(self.log)
        first = not log.exists() or " 5\\n" not in log.read_text()
        with log.open("a") as file:
            file.write(f"{os.getpid()} {clock}\\n")
        if clock == 5 and self.kind == "error":
            raise RuntimeError("this method never gets further")
        if clock == 5 and (self.kind == "kill always" or (first and self.kind == "kill")):
            os.kill(os.getpid(), signal.SIGKILL)
        while clock == 5 and first and self.kind == "hang":
            time.sleep(0.1)
        return super().step(net, state, x, valid, retired)
"""


@pytest.fixture(scope="module")
def workbench():
    return Workbench(device="cpu", threads=1)


@pytest.fixture(scope="module")
def address():
    """A cluster of two machines with a core each, and a driver on a third that has none."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'tribe-tta[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster.address
        cluster.shutdown()


@pytest.fixture
def trouble(tmp_path, workbench, registries):
    """Experiments with a custom method in a file, and the log of its steps."""
    (tmp_path / "mine.py").write_text(TROUBLE)
    name, log = component_name(METHOD, f"{tmp_path / 'mine.py'}:Trouble"), tmp_path / "log"
    return lambda kind: small(workbench, ComponentSpec(name, {"kind": kind, "log": str(log)})), log


def small(workbench, method, **options):
    return Experiment.of(DATA, "compact", STREAM, method, workbench=workbench, **options)


def same(one, other):
    """Equal metrics, and equal records but for the time they took."""
    assert isinstance(one, Result), one
    assert isinstance(other, Result), other
    assert one.metrics == other.metrics
    for a, b in zip(one.records(), other.records(), strict=True):
        assert (a.spec, a.domains, a.classes) == (b.spec, b.domains, b.classes)
        for name in ("domain", "label", "prediction", "confidence"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def steps(log):
    """Which process took which steps, in order."""
    taken = {}
    for line in log.read_text().splitlines():
        process, clock = map(int, line.split())
        taken.setdefault(process, []).append(clock)
    return list(taken.values())


@pytest.mark.parametrize("where", ["pool", pytest.param("ray", marks=pytest.mark.slow)])
def test_on_workers_as_in_order(where, workbench, tmp_path, request):
    """Two threads, more than a machine has, are part of the experiment, and kept to."""
    workers = 2 if where == "pool" else request.getfixturevalue("address")
    asked = [
        small(workbench, "bn"),
        small(workbench, "tent", seeds=(0, 1)),
        small(Workbench(device="cpu", threads=2), "tent"),
    ]
    reports, ended = {}, []
    there = run_all(
        [*asked, asked[0]],
        tmp_path / "there",
        workers=workers,
        workbench=workbench,
        progress=lambda experiment, *report: reports.__setitem__(experiment, report),
        done=lambda experiment, outcome: ended.append((experiment, outcome)),
    )
    here = run_all([*asked, asked[0]], tmp_path / "here", workbench=workbench)
    for one, other in zip(there, here, strict=True):
        same(one, other)
    assert [result.experiment for result in there] == [*asked, asked[0]]
    assert [result.environment["machine"]["threads"] for result in there] == [1, 1, 2, 1]
    assert reports.keys() <= set(asked)
    assert sorted(e.id for e, _ in ended) == sorted(e.id for e in asked)


def test_what_another_process_computes_is_left_for_the_end(workbench, tmp_path):
    busy, free, order = small(workbench, "bn"), small(workbench, "source"), []
    (tmp_path / busy.id).mkdir()
    with (tmp_path / busy.id / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def done(experiment, outcome):
            order.append(experiment)
            fcntl.flock(lock, fcntl.LOCK_UN)

        run_all([busy, free], tmp_path, workbench=workbench, done=done)
    assert order == [free, busy]


ALWAYS = {"evidence_on": 0.0, "evidence_drift": 0.0}  # short streams give little evidence
METHODS = ("bn", ComponentSpec("bn+time", ALWAYS), ComponentSpec("bn+time", {"within": "batch", **ALWAYS}), "bn+cofa")


@dataclass(frozen=True)
class Short(Scenario):
    """Bursts of nine digits; the stream goes back to the source once."""

    def schedule(self, labels, seed):
        images = [(labels[0] == c).nonzero().flatten()[seed : seed + 9] for c in range(10)]
        index = torch.cat(images)
        return Schedule(torch.zeros_like(index), index, torch.arange(90) == 50)


@pytest.fixture(scope="module")
def filtered():
    """Experiments that differ in the time filter alone."""
    scenarios.registry.register("short")(Short)
    options = {"seeds": (0, 1), "batch": 16, "workbench": Workbench(device="cpu")}
    yield [Experiment.of(DATA, "compact", "short", method, **options) for method in METHODS]
    scenarios.registry._classes.pop("short")


@pytest.fixture(scope="module")
def separate(filtered, tmp_path_factory):
    root = tmp_path_factory.mktemp("separate")
    return [run_experiment(e, root) for e in filtered]


@pytest.fixture
def played(monkeypatch):
    """The names of the methods that were played to the end."""
    names, run = [], execution.run

    def counting(net, method, *rest, **options):
        records = run(net, method, *rest, **options)
        names.append(method.name)
        return records

    monkeypatch.setattr(execution, "run", counting)
    return names


@pytest.mark.parametrize("asked", [slice(None), slice(1, 3)], ids=["all", "without the method alone"])
def test_one_play_gives_the_results_of_separate_runs(asked, filtered, separate, played, tmp_path):
    for one, other in zip(run_all(filtered[asked], tmp_path), separate[asked], strict=True):
        same(one, other)
    assert played == ["bn"]
    same(ResultStore(tmp_path).find(filtered[0]), separate[0])
    assert len({str(r.records()[0].confidence.tolist()) for r in separate}) == len(METHODS), "all filters differ"
    assert not list(tmp_path.glob("*/checkpoint*"))


def test_a_shared_play_that_was_stopped_goes_on(filtered, separate, played, tmp_path):
    runner, batches = ExperimentRunner(RunSettings(tmp_path), planned=filtered[1:3]), []
    with pytest.raises(KeyboardInterrupt):
        runner.run(filtered[1], progress=stop_at(4, KeyboardInterrupt))
    first = runner.run(filtered[1], progress=lambda done, *_: batches.append(done))
    assert batches[0] == 4, "from the checkpoint on"
    same(first, separate[1])
    same(runner.run(filtered[2]), separate[2])
    assert played == ["bn"]


def test_too_many_outputs_are_not_kept(filtered, played, tmp_path, monkeypatch):
    images = filtered[0].parts.stream.images
    monkeypatch.setattr(execution, "MOST_NUMBERS", 10 * images - 1)
    run_all(filtered[1:3], tmp_path)
    assert played == ["bn+time", "bn+time"]


def test_groups_stand_together_with_the_method_alone_first(filtered):
    bn, timed, _, cofa = filtered
    other = dataclasses.replace(bn, batch=8)
    assert in_groups([timed, other, cofa, bn]) == [bn, timed, cofa, other]
    assert cofa.without_filter == timed.without_filter == bn == bn.without_filter


@pytest.mark.parametrize("where", ["here", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_failure_is_tried_again_and_reported_and_the_others_finish(where, trouble, workbench, tmp_path, request):
    made, log = trouble
    bad, good = made("error"), small(workbench, "bn")
    workers = request.getfixturevalue("address") if where == "ray" else None
    options = {"workers": workers, "workbench": workbench, "every": 3, "retries": 2}
    failure, result = run_all([bad, good], tmp_path / "runs", **options)
    assert isinstance(failure, Failure)
    assert failure.attempts == 3
    assert "RuntimeError: this method never gets further" in failure.reason
    assert "mine.py, line" in failure.reason
    assert failure.reason.count("never gets further") == 1
    assert [clock for taken in steps(log) for clock in taken] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]
    assert result.error() > 0


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_goes_on(address, trouble, workbench, tmp_path):
    made, log = trouble
    deadly = made("kill")
    options = {"workers": address, "workbench": workbench, "every": 3, "retries": 2}
    (there,) = run_all([deadly], tmp_path / "there", **options)
    killed, last = steps(log)
    assert killed == [0, 1, 2, 3, 4, 5]
    assert last[0] == 3
    same(there, run_experiment(deadly, tmp_path / "here"))


@pytest.mark.slow
def test_who_kills_every_worker_is_given_up(address, trouble, workbench, tmp_path):
    made, _ = trouble
    deadly, other = made("kill always"), small(workbench, "bn")
    failure, result = run_all([deadly, other], tmp_path, workers=address, workbench=workbench)
    assert isinstance(failure, Failure)
    assert "died" in failure.reason
    assert isinstance(result, Result)


def is_free(path, seconds=60):
    """Whether a lock is let go within some seconds."""
    deadline = time.monotonic() + seconds
    with path.open("wb") as lock:
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("where", ["pool", "ray"])
def test_an_interrupted_driver_stops_its_workers(where, trouble, workbench, tmp_path, request):
    made, log = trouble
    hanging, workers = made("hang"), 1 if where == "pool" else request.getfixturevalue("address")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(
                [hanging],
                tmp_path / "there",
                workers=workers,
                workbench=workbench,
                every=3,
                progress=lambda *_: signal.raise_signal(signal.SIGINT),
            )
        assert is_free(tmp_path / "there" / hanging.id / ".lock"), "the worker goes on"
    finally:
        signal.signal(signal.SIGINT, before)
    log.write_text("0 5\n")  # so that it does not hang
    same(run_experiment(hanging, tmp_path / "there"), run_experiment(hanging, tmp_path / "here"))


def test_a_worker_without_the_data_says_what_is_missing_and_where(tmp_path):
    layouts.write_mnist_c(tmp_path / "data" / "mnist_c", np.random.default_rng(0))
    workbench = Workbench(tmp_path / "data", "cpu", threads=1)
    data = ComponentSpec("mnist-c", {"corruptions": ["fog"]})
    missing = dataclasses.replace(Experiment.of(data, "compact", "ptta", "bn", workbench=workbench), parts=None)
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(MissingData) as error:
        run_experiment(missing, tmp_path / "here", workbench=Workbench(tmp_path / "data", "cpu"))
    (failure,) = run_all([missing], tmp_path / "there", workers=1, workbench=workbench)
    assert failure.reason == f"on {os.uname().nodename}: {' '.join(str(error.value).split())}"


@pytest.mark.slow
def test_a_gpu_that_the_cluster_does_not_have(address, workbench, tmp_path):
    on_gpu = dataclasses.replace(small(workbench, "bn"), device="cuda", threads=None)
    (failure,) = run_all([on_gpu], tmp_path, workers=address, workbench=workbench)
    assert "needs 0.25 of a GPU" in failure.reason


def job_of(experiment, root):
    return make_job(experiment, RunSettings(str(root)), None, wait=False)


def test_a_worker_with_other_versions_refuses(workbench, tmp_path):
    job = job_of(small(workbench, "bn"), tmp_path)._replace(versions={"tribe": tribe.__version__, "torch": "1.0"})
    assert f"torch is {torch.__version__}, not 1.0" in run_job(job, None).failed
    assert not list(tmp_path.iterdir())


def test_a_method_reaches_a_machine_that_has_not_its_file(trouble, workbench):
    made, _ = trouble
    experiment = made("none")
    (sent,) = custom_code(experiment)
    sent = sent._replace(file=sent.file.with_name("elsewhere.py"))
    tribe.methods.registry._classes.pop("trouble")
    sys.modules.pop(next(name for name in sys.modules if name.startswith("tribe_target_")))
    sent.register()
    assert small(workbench, ComponentSpec("trouble", experiment.method.fields)) == experiment
    sent.register()  # again: it is there
    assert custom_code(small(workbench, "bn")) == ()


def test_without_ray(workbench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        run_all([small(workbench, "bn")], tmp_path / "runs", workers="auto", workbench=workbench)
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("given", ["127.0.0.1:1", "ray://127.0.0.1:1", "somewhere"])
def test_an_address_where_no_cluster_is(given, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'tribe-tta[ray]'")
    with pytest.raises(ConnectionError, match=re.escape(given)):
        run_all([], tmp_path, workers=given)


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_work(workbench, tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tribe-tta[ray]'")
    (result,) = run_all([small(workbench, "bn")], tmp_path / "there", workers="local", workbench=workbench)
    same(result, run_experiment(small(workbench, "bn"), tmp_path / "here"))
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": "auto", "gpus": 0.0}, "gpus"),
        ({"workers": "auto", "gpus": 1.5}, "gpus"),
        ({"retries": -1}, "retries"),
    ],
)
def test_options_that_cannot_be_meant(options, word, tmp_path):
    with pytest.raises(ValueError, match=word):
        run_all([], tmp_path, **options)


@pytest.mark.parametrize(
    ("role", "words"), [("model", "the network"), ("dataset", "the data set"), ("scenario", "the scenario")]
)
def test_custom_code_that_workers_do_not_get_is_refused_before_they_start(role, words, workbench, tmp_path):
    plain = small(workbench, "bn")
    custom = dataclasses.replace(plain, **{role: dataclasses.replace(getattr(plain, role), code="5f")})
    with pytest.raises(ValueError, match=f"custom code of {words}"):
        run_all([plain, custom], tmp_path / "runs", workers="auto", workbench=workbench)
    assert not (tmp_path / "runs").exists()
