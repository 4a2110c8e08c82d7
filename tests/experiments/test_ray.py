"""Many experiments, here or on real workers of Ray: the same results, through failures, kills and interruptions."""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import layouts
import tribe
from grid import experiments
from tribe.cli.commands import app
from tribe.cli.custom import METHOD, component_name
from tribe.data.datasets.files import MissingData
from tribe.experiments.execution import run_experiment
from tribe.experiments.experiment import Experiment
from tribe.experiments.jobs import CustomMethod, Job, result_files, run_job, store_files
from tribe.experiments.ray import Failure, run_all
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import Result
from tribe.experiments.workbench import Workbench

DATA = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})
STREAM = ComponentSpec("gli-f", {"imbalance": 1_000_000})  # about 1,200 images

pytestmark = pytest.mark.filterwarnings("ignore:an imbalance of")

TROUBLE = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

from tribe.methods import register
from tribe.methods.bn import BN


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
        if clock == 5 and first and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while clock == 5 and first and self.kind == "hang":
            time.sleep(0.1)
        return super().step(net, state, x, valid)
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
def trouble(tmp_path, workbench):
    """Experiments with a custom method in a file, and the log of its steps."""
    (tmp_path / "mine.py").write_text(TROUBLE)
    name, log = component_name(METHOD, f"{tmp_path / 'mine.py'}:Trouble"), tmp_path / "log"
    yield lambda kind: small(workbench, ComponentSpec(name, {"kind": kind, "log": str(log)})), log
    tribe.methods.registry._classes.pop(name)


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


# -- the same results -------------------------------------------------------------------------------------------------


def test_on_ray_as_in_order(address, workbench, tmp_path):
    """Two threads, more than a machine has, are part of the experiment, and kept to."""
    asked = [
        small(workbench, "bn"),
        small(workbench, "tent", seeds=(0, 1)),
        small(Workbench(device="cpu", threads=2), "tent"),
    ]
    seen, ended = {}, []
    there = run_all(
        [*asked, asked[0]],
        tmp_path / "there",
        ray=address,
        workbench=workbench,
        progress=lambda experiment, *updates: seen.__setitem__(experiment, updates),
        done=lambda experiment, outcome: ended.append((experiment, outcome)),
    )
    here = run_all([*asked, asked[0]], tmp_path / "here", workbench=workbench)
    for one, other in zip(there, here, strict=True):
        same(one, other)
    assert [result.experiment for result in there] == [*asked, asked[0]]
    assert [result.environment["machine"]["threads"] for result in there] == [1, 1, 2, 1]
    assert {experiment: done == of > 1 for experiment, (done, of, _) in seen.items()} == dict.fromkeys(asked, True)
    assert sorted(e.id for e, _ in ended) == sorted(e.id for e in asked)
    assert all(outcome in there for _, outcome in ended)


@pytest.mark.slow
def test_a_grid_of_twelve_on_two_workers(address, workbench, tmp_path):
    grid = list(experiments(12, workbench))
    there = run_all(grid, tmp_path / "there", ray=address, workbench=workbench)
    for one, other in zip(there, run_all(grid, tmp_path / "here", workbench=workbench), strict=True):
        same(one, other)


def test_what_is_finished_is_not_run_again(workbench, tmp_path):
    asked = [small(workbench, "bn"), small(workbench, "source")]
    first = run_all(asked, tmp_path, workbench=workbench)
    updates = []
    again = run_all(asked, tmp_path, workbench=workbench, progress=lambda *words: updates.append(words))
    assert [r.environment for r in again] == [r.environment for r in first]
    assert not updates


def test_what_another_process_computes_is_left_for_the_end(workbench, tmp_path):
    busy, free = small(workbench, "bn"), small(workbench, "source")
    (tmp_path / busy.id).mkdir()
    with (tmp_path / busy.id / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def done(experiment, outcome):
            order.append(experiment)
            fcntl.flock(lock, fcntl.LOCK_UN)

        order = []
        run_all([busy, free], tmp_path, workbench=workbench, done=done)
    assert order == [free, busy]


def test_results_of_another_machine_are_stored(workbench, tmp_path):
    """Also those whose seeds the other machine has in several folders."""
    experiment = small(workbench, "bn", seeds=(0, 1))
    for seeds in ((0,), (0, 1)):
        away = run_experiment(experiment.with_seeds(seeds), tmp_path / "away", workbench=workbench)
        same(store_files(away.experiment, tmp_path / f"home-{len(seeds)}", result_files(away)), away)
    assert len(away.parts) == 2
    assert "are not in" in store_files(experiment, tmp_path / "lost", {})


@pytest.mark.slow
def test_a_table_on_ray_with_a_custom_method(address, trouble, tmp_path):
    _, log = trouble
    options = ["--set", "dataset=live-mnist-c", "--set", "model=compact", "--set", "threads=1"]
    options += ["--device", "cpu", "--format", "csv"]
    options += ["--set", "dataset.corruptions=('impulse_noise',)", "--set", f"trouble.log={log}"]
    options += ["--rows", f"BN,+{tmp_path / 'mine.py'}:Trouble", "--columns", "error"]
    tables = []
    for runs, where in (("there", ["--workers", address]), ("here", [])):
        command = ["reproduce", "wall-clock", *options, "--runs", str(tmp_path / runs), *where]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        tables.append(result.stdout)
    assert tables[0] == tables[1]
    assert len(steps(log)) == 2, "a worker took the steps the first time"


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_ray", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failure_is_tried_again_and_reported_and_the_others_finish(on_ray, trouble, workbench, tmp_path, request):
    made, log = trouble
    bad, good = made("error"), small(workbench, "bn")
    ray = request.getfixturevalue("address") if on_ray else None
    failure, result = run_all([bad, good], tmp_path / "runs", ray=ray, workbench=workbench, every=3)
    assert isinstance(failure, Failure)
    assert failure.attempts == 3
    assert "RuntimeError: this method never gets further" in failure.reason
    assert failure.reason.count("never gets further") == 1
    for words in (bad.id, "tried 3 times", '"kind": "error"', bad.weights):
        assert words in str(failure)
    assert [clock for taken in steps(log) for clock in taken] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]
    assert result.error() > 0


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_goes_on(address, trouble, workbench, tmp_path):
    made, log = trouble
    deadly = made("kill")
    (there,) = run_all([deadly], tmp_path / "there", ray=address, workbench=workbench, every=3)
    killed, last = steps(log)
    assert killed == [0, 1, 2, 3, 4, 5]
    assert last[0] == 3
    same(there, run_experiment(deadly, tmp_path / "here", workbench=workbench))


@pytest.mark.slow
def test_who_kills_every_worker_is_given_up(address, trouble, workbench, tmp_path):
    made, _ = trouble
    deadly = made("kill")
    failure, result = run_all([deadly, small(workbench, "bn")], tmp_path, ray=address, workbench=workbench, retries=0)
    assert isinstance(failure, Failure)
    assert "died" in failure.reason
    assert "tried once" in str(failure)
    assert isinstance(result, Result)


@pytest.mark.slow
def test_an_interrupted_driver_stops_its_workers(address, trouble, workbench, tmp_path):
    import ray

    made, log = trouble
    hanging = made("hang")
    ray.init(address=address, log_to_driver=False, logging_level="error")  # the caller's: it outlives the call
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(
                [hanging],
                tmp_path / "there",
                ray=address,
                workbench=workbench,
                every=3,
                progress=lambda *_: signal.raise_signal(signal.SIGINT),
            )
        assert ray.is_initialized()
        with (tmp_path / "there" / hanging.id / ".lock").open("wb") as lock:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.1)
            else:
                pytest.fail("the worker goes on")
    finally:
        signal.signal(signal.SIGINT, before)
        ray.shutdown()
    log.write_text("0 5\n")  # so that it does not hang
    same(
        run_experiment(hanging, tmp_path / "there", workbench=workbench),
        run_experiment(hanging, tmp_path / "here", workbench=workbench),
    )


@pytest.mark.slow
def test_a_worker_without_the_data_says_what_is_missing_and_where(address, tmp_path):
    layouts.write_mnist_c(tmp_path / "data" / "mnist_c", np.random.default_rng(0))
    workbench = Workbench(tmp_path / "data", "cpu", threads=1)
    missing = Experiment.of(
        ComponentSpec("mnist-c", {"corruptions": ["fog"]}), "compact", "ptta", "bn", workbench=workbench
    )
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(MissingData) as error:
        run_experiment(missing, tmp_path / "here", workbench=Workbench(tmp_path / "data", "cpu"))
    (failure,) = run_all([missing], tmp_path / "there", ray=address, workbench=workbench, retries=0)
    assert failure.reason == f"on {os.uname().nodename}: {' '.join(str(error.value).split())}"
    assert str(tmp_path / "data" / "mnist_c") in failure.reason


@pytest.mark.slow
def test_a_gpu_that_the_cluster_does_not_have(address, workbench, tmp_path):
    on_gpu = dataclasses.replace(small(workbench, "bn"), device="cuda", threads=None)
    (failure,) = run_all([on_gpu], tmp_path, ray=address, workbench=workbench)
    assert "needs 0.25 of a GPU, but no machine of the cluster has more than 0" in failure.reason


def test_a_worker_with_other_versions_refuses(workbench, tmp_path):
    versions = {"tribe": tribe.__version__, "torch": "1.0"}
    job = Job(small(workbench, "bn").json(), str(tmp_path), None, (), None, versions, "", 50, False)
    assert f"torch is {torch.__version__}, not 1.0" in run_job(job, None).failed
    assert not list(tmp_path.iterdir())


def test_a_method_reaches_a_machine_that_has_not_its_file(trouble):
    made, _ = trouble
    experiment = made("none")
    sent = CustomMethod.of(experiment)._replace(file="/nowhere/mine.py")
    tribe.methods.registry._classes.pop("trouble")
    sys.modules.pop(next(name for name in sys.modules if name.startswith("tribe_target_")))
    sent.register()
    assert small(Workbench(device="cpu", threads=1), ComponentSpec("trouble", experiment.method.fields)) == experiment
    sent.register()  # known already
    assert CustomMethod.of(small(Workbench(device="cpu"), "bn")) is None


def test_without_ray(workbench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tribe-tta\[ray\]'"):
        run_all([small(workbench, "bn")], tmp_path / "runs", ray="auto", workbench=workbench)
    embedded = [
        "--set",
        "dataset=live-mnist-c",
        "--set",
        "model=compact",
        "--rows",
        "BN",
        "--runs",
        str(tmp_path / "runs"),
    ]
    result = CliRunner().invoke(app, ["reproduce", "wall-clock", *embedded, "--workers", "auto"])
    assert result.exit_code == 2
    assert "pip install 'tribe-tta[ray]'" in " ".join(result.stderr.split())
    assert not list(tmp_path.rglob("spec.json"))


@pytest.mark.parametrize("given", ["127.0.0.1:1", "ray://127.0.0.1:1", "somewhere"])
def test_an_address_where_no_cluster_is(given, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'tribe-tta[ray]'")
    with pytest.raises(ConnectionError, match=f"no cluster of Ray at '{re.escape(given)}'.*expected auto, local"):
        run_all([], tmp_path, ray=given)


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_work(workbench, tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tribe-tta[ray]'")
    (result,) = run_all([small(workbench, "bn")], tmp_path / "there", ray="auto", workers=1, workbench=workbench)
    same(result, run_experiment(small(workbench, "bn"), tmp_path / "here", workbench=workbench))
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ray": "auto", "workers": 0}, "at least 1; got 0"),
        ({"ray": "10.0.0.1:6379", "workers": 2}, "for a cluster that is started here"),
        ({"workers": 2}, "for a cluster that is started here"),
        ({"gpus": 0.0}, "share of a GPU"),
        ({"gpus": 1.5}, "share of a GPU"),
        ({"retries": -1}, "at least 0; got -1"),
    ],
)
def test_options_that_cannot_be_meant(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run_all([], tmp_path, **options)


@pytest.mark.parametrize(
    ("role", "words"),
    [("model", "the network"), ("dataset", "the data set"), ("scenario", "the scenario")],
)
def test_custom_code_that_workers_do_not_get_is_refused_before_a_cluster_starts(role, words, workbench, tmp_path):
    known = small(workbench, "bn")
    custom = dataclasses.replace(known, **{role: dataclasses.replace(getattr(known, role), code="5f")})
    with pytest.raises(ValueError, match=f"do not have the custom code of {words} .*Run it without Ray"):
        run_all([known, custom], tmp_path / "runs", ray="auto", workbench=workbench)
    assert not (tmp_path / "runs").exists()
