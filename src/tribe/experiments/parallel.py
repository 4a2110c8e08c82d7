"""Run many experiments: in this process, in a pool of processes on this machine, or on a cluster of Ray.

run_all(experiments, "runs")                        # one after the other
run_all(experiments, "runs", workers=4)             # four processes
run_all(experiments, "runs", workers="10.0.0.1:6379")   # a cluster; "auto": that of $RAY_ADDRESS, or a new one here
"""

import concurrent.futures
import contextlib
import functools
import importlib
import os
import queue
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from os import PathLike
from typing import Any

from tribe.experiments.execution import EVERY, ExperimentRunner, RunSettings
from tribe.experiments.experiment import Experiment
from tribe.experiments.store import Result, ResultStore
from tribe.experiments.workbench import Workbench
from tribe.experiments.workers import (
    CLEAR_ERRORS,
    INTERVAL,
    ExperimentJob,
    ExperimentProgress,
    Reply,
    error_message,
    failed,
    make_job,
    ray_node,
    run_job,
)

IN_MEMORY = 32  # results of a call whose records stay in memory; with more, they are read from the disk again
NOT_SENT = {"dataset": "the data set", "model": "the network", "scenario": "the scenario"}  # if they are custom


@dataclass(frozen=True)
class Failure:
    """An experiment that failed as often as it was tried, and why."""

    experiment: Experiment
    reason: str
    attempts: int


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
        parts = {word: getattr(experiment, role) for role, word in NOT_SENT.items()}
        custom = [f"{word} {part.name}" for word, part in parts.items() if part.code or ":" in part.name]
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

    def job(self, experiment: Experiment, wait: bool, node: str | None = None) -> ExperimentJob:
        """Return what a worker gets."""
        self.sent[experiment.id] = experiment
        return make_job(experiment, self.runner.settings, self.runner.workbench, wait, node)

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
        return self._pool.submit(_run_job_of_pool, self.job(experiment, wait))

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
            job = self.job(experiment, wait, ray_node())
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
            else:
                result = reply.result
                outcomes[experiment] = result if len(experiments) <= IN_MEMORY else replace(result, memory={})
            if done is not None:
                done(experiment, outcomes[experiment])
    return outcomes
