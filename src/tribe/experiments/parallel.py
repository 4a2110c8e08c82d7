"""Run many experiments: in this process, in a pool of processes on this machine, or on a cluster of Ray.

run_all(experiments, "runs")                        # one after the other
run_all(experiments, "runs", workers=4)             # four processes
run_all(experiments, "runs", workers="10.0.0.1:6379")   # a cluster; "auto": that of $RAY_ADDRESS, or a new one here
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import inspect
import operator
import os
import platform
import queue
import socket
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tribe import methods, norms
from tribe._version import __version__
from tribe.experiments.execution import EVERY, ExperimentRunner, RunSettings
from tribe.experiments.experiment import Experiment
from tribe.experiments.provenance import from_file, is_ours
from tribe.experiments.runner import Progress
from tribe.experiments.store import Result, ResultStore
from tribe.experiments.workbench import Workbench
from tribe.io.files import Busy
from tribe.methods.bridged import bridge_class, is_factory
from tribe.norms.named import find_class
from tribe.registry import Registry

IN_MEMORY = 32  # results of a call whose records stay in memory; with more, they are read from the disk again
NOT_SENT = {"dataset": "the data set", "model": "the network", "scenario": "the scenario"}  # if they are custom
VERSIONS = {"tribe": __version__, "torch": torch.__version__}  # that the numbers depend on
INTERVAL = 0.2  # seconds between two reports of progress
CLEAR_ERRORS = (ValueError, OSError, ImportError, torch.OutOfMemoryError)  # messages without their type
ExperimentProgress = Callable[[Experiment, int, int, float | None], None]  # batches done, in all, error so far


@dataclass(frozen=True)
class Failure:
    """An experiment that failed as often as it was tried, and why."""

    experiment: Experiment
    reason: str
    attempts: int


class Reply(NamedTuple):
    """The end of an attempt: a result, or why there is none."""

    result: Result | None = None
    failed: str = ""
    busy: bool = False
    warnings: tuple[str, ...] = ()


def failed(error: Exception, experiment: Experiment) -> Reply:
    """Return the end of an attempt that raised an error; the message names the line of custom code."""
    if isinstance(error, Busy):
        return Reply(busy=True)
    frames = traceback.extract_tb(error.__traceback__)
    files = set[str]()
    with contextlib.suppress(ValueError, OSError):  # the custom code itself may be what is missing here
        files = {str(custom.file) for custom in custom_code(experiment)}
    inside = [frame for frame in frames if str(Path(frame.filename).resolve()) in files]
    last = inside[-1:] or ([] if isinstance(error, CLEAR_ERRORS) else frames[-1:])
    place = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in last)
    return Reply(failed=error_message(error) + place)


def error_message(error: BaseException) -> str:
    """Return an error in one line."""
    message = " ".join(str(error).split())
    return message if isinstance(error, CLEAR_ERRORS) and message else f"{type(error).__name__}: {message}"


class CustomCode(NamedTuple):
    """A custom method, or the custom norm rule of a method, with the content of its file."""

    kind: Literal["method", "norm"]
    name: str  # in the registry
    module: str
    attribute: str
    file: Path
    content: bytes

    def register(self) -> None:
        """Register it in this process: from its package where that is installed, else from its file."""
        registry: Registry[Any] = methods.registry if self.kind == "method" else norms.registry
        with contextlib.suppress(OSError, ValueError):  # its file is gone, or its name is unknown here
            if Path(inspect.getfile(registry.get(self.name))).read_bytes() == self.content:
                return
        find = operator.attrgetter(self.attribute)
        try:
            cls = find(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            path = self.file
            if not path.is_file() or path.read_bytes() != self.content:
                path = Path(_folder().name) / hashlib.sha256(self.content).hexdigest() / path.name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self.content)
            # The module is named by its path, so that a changed file replaces its older version in the registry.
            cls = find(from_file(path, f"tribe_{self.kind}_{hashlib.sha256(str(self.file).encode()).hexdigest()[:16]}"))
        if self.name not in registry.names():
            registry.register(self.name)(bridge_class(cls) if is_factory(cls) else cls)


def custom_code(experiment: Experiment) -> tuple[CustomCode, ...]:
    """Return the custom norm rule and method of an experiment."""
    if experiment.method.code is None:
        return ()
    found = []
    rule = find_class(experiment.method.fields.get("rule"))
    for kind, cls in (("norm", rule), ("method", methods.get(experiment.method.name))):
        if cls is not None and not is_ours(cls):
            file = Path(inspect.getfile(cls)).resolve()
            name, content = str(getattr(cls, "name", "")), file.read_bytes()
            found.append(CustomCode(kind, name, cls.__module__, cls.__qualname__, file, content))  # type: ignore[arg-type]
    return tuple(found)


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder for files that were sent; it is removed with the process."""
    return tempfile.TemporaryDirectory(prefix="tribe-methods-")


class ExperimentJob(NamedTuple):
    """All that a worker needs, in plain data: an experiment, and the files of a custom method or norm rule."""

    experiment: Experiment  # without its components
    settings: RunSettings
    wait: bool
    data: str | None
    weights: tuple[tuple[str, str], ...]
    custom: tuple[CustomCode, ...]
    versions: dict[str, str]  # of the sender
    node: str | None  # of the sender, on Ray


def make_job(
    experiment: Experiment, settings: RunSettings, workbench: Workbench | None, wait: bool, node: str | None = None
) -> ExperimentJob:
    """Return the job of an experiment."""
    data, weights = (None, {}) if workbench is None else (workbench.data, workbench.weights)
    return ExperimentJob(
        experiment=replace(experiment, parts=None),
        settings=settings._replace(root=str(Path(settings.root).absolute())),
        wait=wait,
        data=None if data is None else str(data.expanduser().resolve()),
        weights=tuple((name, str(path.expanduser().resolve())) for name, path in weights.items()),
        custom=custom_code(experiment),
        versions=VERSIONS,
        node=node,
    )


def run_job(job: ExperimentJob, reports: Any) -> Reply:
    """Run a job; the message of an error names the machine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            reply = Reply(_run_job(job, reports))
        except Exception as error:
            reply = failed(error, job.experiment)
    if reply.failed:
        reply = reply._replace(failed=f"on {platform.node()}: {reply.failed}")
    messages = (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
    return reply._replace(warnings=tuple(dict.fromkeys(messages)))


def _run_job(job: ExperimentJob, reports: Any) -> Result:
    if differ := "; ".join(f"{n} is {VERSIONS[n]}, not {v}" for n, v in job.versions.items() if VERSIONS[n] != v):
        raise ValueError(f"this worker would compute another result: {differ}. Install the same versions everywhere")
    for custom in job.custom:
        custom.register()
    experiment = job.experiment
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)  # building a data set computes, too
    runner = ExperimentRunner(job.settings, _workbench(job.data, experiment.device, job.weights))
    result = runner.run(experiment, _reporter(reports, experiment.id), job.wait)
    is_elsewhere = job.node is not None and job.node != ray_node()  # the sender may not share this folder
    return result if is_elsewhere else replace(result, memory={})


@functools.lru_cache(maxsize=2)
def _workbench(data: str | None, device: str, weights: tuple[tuple[str, str], ...]) -> Workbench:
    """Return the workbench of a worker: it runs many experiments, and reads data and networks once."""
    return Workbench(data, device, dict(weights))


def _reporter(reports: Any, name: str) -> Progress:
    """Return a function that reports the progress of an experiment, at intervals."""
    last = float("-inf")

    def report(done: int, of: int, wrong: float | None) -> None:
        nonlocal last
        if done == of or time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            with contextlib.suppress(Exception):  # a display must not cost a result
                reports.put((name, done, of, wrong))

    return report


def ray_node() -> str:
    """Return the id of this machine in a cluster of Ray."""
    return str(importlib.import_module("ray").get_runtime_context().get_node_id())


def run_all(
    experiments: Iterable[Experiment],
    root: str | PathLike[str],
    *,
    workers: int | str | None = None,
    workbench: Workbench | None = None,
    gpus: float = 0.25,
    retries: int | None = None,
    every: int = EVERY,
    force: bool = False,
    keep_outputs: bool = False,
    command: Sequence[str] | None = None,
    progress: ExperimentProgress | None = None,
    done: Callable[[Experiment, Result | Failure], None] | None = None,
) -> list[Result | Failure]:
    """Run what is missing; return the result of each, or its failure, in the order of ``experiments``.

    A failed experiment is tried again after the others. One that another process is computing comes last. Arguments
    that are not listed are fields of `RunSettings`.

    Args:
        workers: None runs them in this process, one after the other; a number, in as many processes; other text, on
            Ray: "auto" is the cluster of $RAY_ADDRESS or of this machine, or a new one here, "local" always a new one,
            else it is the address of a cluster.
        workbench: Where data and weights are, on all workers; by default in each worker's own $TRIBE_DATA.
        gpus: Share of a GPU that an experiment on CUDA takes on Ray; 0.25 lets four share one.
        retries: How often a failed experiment is tried again; None: twice on Ray, else never.
        progress: Called at intervals, in this process, for each experiment that advanced.
        done: Called once for each experiment, when it is finished or has failed.
    """
    if isinstance(workers, str) and workers.isdigit():
        workers = int(workers)
    if retries is None:
        retries = 2 if isinstance(workers, str) else 0
    requested = list(experiments)
    todo = list(dict.fromkeys(requested))
    if retries < 0:
        raise ValueError(f"retries is how often a failed experiment is tried again, at least 0; got {retries}")
    settings = RunSettings(str(root), every, force, keep_outputs, command)
    runner = ExperimentRunner(settings, workbench)
    if workers is not None:
        _refuse_custom(todo, runner.store)
    if isinstance(workers, int):
        engine: Engine = PoolEngine(runner, progress, workers)
    else:
        engine = Engine(runner, progress) if workers is None else RayEngine(runner, progress, workers, gpus)
    with contextlib.closing(engine):
        outcomes = _run_until_done(engine, todo, retries, done)
    return [outcomes[experiment] for experiment in requested]


def _refuse_custom(experiments: Sequence[Experiment], store: ResultStore) -> None:
    """Refuse experiments that have to be run and have custom components which workers do not get."""
    for experiment in experiments:
        parts = ((word, getattr(experiment, role)) for role, word in NOT_SENT.items())
        custom = [f"{word} {part.name}" for word, part in parts if part.code or ":" in part.name]
        if custom and store.find(experiment) is None:
            raise ValueError(
                f"workers do not have the custom code of {' and '.join(custom)}: only custom methods and norm rules "
                "are sent to them. Run it without workers"
            )


@dataclass(eq=False)
class Engine:
    """Runs experiments in this process; the others send them to workers, which report their progress into a queue."""

    runner: ExperimentRunner
    progress: ExperimentProgress | None
    slots: int = 1  # attempts at the same time
    queue: Any = None
    sent: dict[str, Experiment] = field(default_factory=dict)

    def submit(self, experiment: Experiment, wait: bool) -> "Future[Reply]":
        """Begin an attempt; ``wait``: for another process that computes the same."""
        follow = None if self.progress is None else functools.partial(self.progress, experiment)
        future: Future[Reply] = Future()
        try:
            future.set_result(Reply(self.runner.run(experiment, follow, wait)))
        except Exception as error:  # a custom method may raise anything; the others go on
            future.set_result(failed(error, experiment))
        return future

    def receive(self, reply: Reply) -> Reply:
        """Take the end of an attempt, whose result is in the store."""
        return reply

    def show(self) -> None:
        """Pass on the progress that workers have reported since the last call."""
        latest = {}
        with contextlib.suppress(queue.Empty, EOFError, OSError):
            while self.queue is not None:
                name, *report = self.queue.get_nowait()
                latest[name] = report
        for name, report in latest.items():
            if self.progress is not None:
                self.progress(self.sent[name], *report)

    def close(self) -> None:
        """Stop what is running."""


_reports: list[Any] = []  # in a process of a pool: the queue that progress is reported to


def _keep_queue(reports: Any) -> None:
    """Keep the queue of a pool, which a process gets when it starts and not with a job."""
    _reports.append(reports)


def _run_job_of_pool(job: ExperimentJob) -> Reply:
    return run_job(job, _reports[0])


class PoolEngine(Engine):
    """Runs experiments in a pool of processes on this machine."""

    def __init__(self, runner: ExperimentRunner, progress: ExperimentProgress | None, workers: int) -> None:
        super().__init__(runner, progress)
        if workers < 1:
            raise ValueError(f"workers is how many processes run experiments, at least 1; got {workers}")
        context = get_context("spawn")
        self.slots, self.queue = workers, context.Queue()
        self._pool = ProcessPoolExecutor(workers, context, _keep_queue, (self.queue,))

    def submit(self, experiment: Experiment, wait: bool) -> "Future[Reply]":
        """Send the experiment to a process."""
        return self._pool.submit(
            _run_job_of_pool, make_job(experiment, self.runner.settings, self.runner.workbench, wait)
        )

    def close(self) -> None:
        """Stop the processes; an experiment resumes from its checkpoint next time."""
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


class RayEngine(Engine):
    """Runs experiments on a cluster of Ray, one task each: in the caller's session, else in one that `close` ends."""

    def __init__(
        self, runner: ExperimentRunner, progress: ExperimentProgress | None, address: str, gpus: float
    ) -> None:
        super().__init__(runner, progress, slots=2**20)  # Ray queues tasks
        if gpus <= 0 or (gpus > 1 and gpus != int(gpus)):
            raise ValueError(f"gpus is a share of a GPU such as 0.25, or a whole number of them; got {gpus}")
        try:
            self._ray, self._gpus = importlib.import_module("ray"), gpus
        except ImportError as error:
            message = "running on a cluster needs Ray, which is not installed: pip install 'tribe-tta[ray]'"
            raise ModuleNotFoundError(message) from error
        self._started = not self._ray.is_initialized()
        if self._started:
            _start_session(self._ray, address)
        self._tasks: list[Any] = []
        self._task = self._ray.remote(max_retries=0)(run_job)  # retries are counted in one place, `_run_until_done`
        self.queue = importlib.import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})

    def submit(self, experiment: Experiment, wait: bool) -> "Future[Reply]":
        """Send the experiment to the cluster."""
        future: Future[Reply] = Future()
        try:
            job = make_job(experiment, self.runner.settings, self.runner.workbench, wait, ray_node())
            task = self._task.options(**self._needs(experiment)).remote(job, self.queue)
            self._tasks.append(task)
            future = task.future()
        except CLEAR_ERRORS as error:
            future.set_result(failed(error, experiment))
        return future

    def receive(self, reply: Reply) -> Reply:
        """Write a result that came from another machine, unless its worker wrote into the same folder."""
        store = self.runner.store
        if reply.result is None or not reply.result.memory or store.find(reply.result.experiment) is not None:
            return reply
        result = replace(reply.result, root=store.root)
        store.add(result)
        return reply._replace(result=result)

    def _needs(self, experiment: Experiment) -> dict[str, Any]:
        """Return the resources of a task; never more cores than any machine has, since it would wait for ever."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cores, accelerators = (max((m.get(kind, 0) for m in machines), default=0) for kind in ("CPU", "GPU"))
        if experiment.device == "cuda":
            if accelerators < self._gpus:
                raise ValueError(
                    f"it needs {self._gpus:g} of a GPU, but no machine of the cluster has more than {accelerators:g}"
                )
            return {"num_cpus": min(1, cores), "num_gpus": self._gpus}
        threads = experiment.threads or 1
        return {
            "num_cpus": min(threads, cores),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},  # before any library starts its threads
        }

    def show(self) -> None:
        """Pass on the progress of running attempts."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # the queue was lost; the work goes on without it
            super().show()

    def close(self) -> None:
        """Stop the running tasks, as when the caller is interrupted; they resume from their checkpoints next time."""
        for task in self._tasks:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)
        with contextlib.suppress(Exception):
            self.queue.shutdown(force=True)
        if self._started:
            self._ray.shutdown()


def _start_session(ray: Any, address: str) -> None:
    """Join a cluster, or start one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports unless the user wants them
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        ray.init(address="local", include_dashboard=False, **quiet)
        return
    place = os.environ.get("RAY_ADDRESS") if address == "auto" else address
    if place not in (None, "auto", "local"):
        host, _, port = str(place).removeprefix("ray://").rpartition(":")
        try:  # Ray itself would try for many minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            hint = "expected auto, local, HOST:PORT of a cluster that runs, or ray://HOST:PORT"
            raise ConnectionError(f"no cluster of Ray at {place!r} ({error}); {hint}") from error
    ray.init(address=place, **quiet)


def _run_until_done(
    engine: Engine,
    experiments: Sequence[Experiment],
    retries: int,
    done: Callable[[Experiment, Result | Failure], None] | None,
) -> dict[Experiment, Result | Failure]:
    """Attempt all experiments until each is finished or has failed too often."""
    outcomes: dict[Experiment, Result | Failure] = {}
    todo, running = deque((experiment, tuple[str, ...]()) for experiment in experiments), dict[Any, Any]()
    busy, wait = deque[tuple[Experiment, tuple[str, ...]]](), False
    while todo or running or busy:
        if not todo and not running:
            todo, busy, wait = busy, deque(), True
        while todo and len(running) < engine.slots:
            experiment, reasons = todo.popleft()
            engine.sent[experiment.id] = experiment
            running[engine.submit(experiment, wait)] = experiment, reasons
        ended, _ = concurrent.futures.wait(running, INTERVAL, concurrent.futures.FIRST_COMPLETED)
        engine.show()
        for future in ended:
            experiment, reasons = running.pop(future)
            try:
                reply = engine.receive(future.result())
            except Exception as error:  # the worker died, or did not start
                reply = Reply(failed=error_message(getattr(error, "cause", None) or error))
            for message in reply.warnings:
                warnings.warn(message, stacklevel=2)
            if reply.busy:
                busy.append((experiment, reasons))
                continue
            if reply.result is None:
                reasons = (*reasons, reply.failed)
                if len(reasons) <= retries:
                    todo.append((experiment, reasons))
                    continue
                outcomes[experiment] = Failure(experiment, "; then ".join(dict.fromkeys(reasons)), len(reasons))
            elif len(experiments) <= IN_MEMORY:
                outcomes[experiment] = reply.result
            else:
                outcomes[experiment] = replace(reply.result, memory={})
            if done is not None:
                done(experiment, outcomes[experiment])
    return outcomes
