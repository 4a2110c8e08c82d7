"""Many experiments, one after the other or side by side on Ray, with the same results.

    outcomes = run_all(experiments, "runs")                    # in this process, in order
    outcomes = run_all(experiments, "runs", ray="auto")        # on a cluster, or on all cores of this machine
    [outcome for outcome in outcomes if isinstance(outcome, Failure)]

A worker gets an experiment as plain data and runs it as `run_experiment` does here. Device and threads are part of an
experiment, so the numbers are the same, bit for bit, on every machine. What was finished before an interruption or a
failure is kept; what was running resumes from its checkpoint when it is run again. Workers need tribe installed. They
are sent custom methods and norm rules; custom networks, data sets and scenarios are refused on Ray. The folder of
results may be shared by all machines; if it is not, workers send their results.

Ray is the extra `ray`: ``pip install 'tribe-tta[ray]'``.
"""

import contextlib
import functools
import json
import os
import socket
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from tribe.experiments.execution import EVERY
from tribe.experiments.experiment import Experiment
from tribe.experiments.jobs import (
    CLEAR_ERRORS,
    INTERVAL,
    CustomMethod,
    Job,
    Outcome,
    ProgressBoard,
    Reply,
    attempt,
    error_message,
    ray_library,
    run_job,
    store_files,
    versions,
)
from tribe.experiments.shared import SharedPlays, in_groups
from tribe.experiments.store import Result, find
from tribe.experiments.workbench import Workbench
from tribe.io.files import Busy

NOT_SENT = {"dataset": "the data set", "model": "the network", "scenario": "the scenario"}  # if they are custom
ExperimentProgress = Callable[[Experiment, int, int, float | None], None]  # batches done, in all, error so far


@dataclass(frozen=True)
class Failure:
    """An experiment that failed as often as it was tried, and why."""

    experiment: Experiment
    reason: str
    attempts: int

    def __str__(self) -> str:
        times = f"{self.attempts} times" if self.attempts > 1 else "once"
        spec = json.dumps(self.experiment.json(), sort_keys=True)
        return f"experiment {self.experiment.id} was tried {times} and failed: {self.reason}. It is {spec}"


def run_all(
    experiments: Iterable[Experiment],
    root: str | PathLike[str],
    *,
    ray: str | None = None,
    workers: int | None = None,
    workbench: Workbench | None = None,
    gpus: float = 0.25,
    retries: int = 2,
    every: int = EVERY,
    progress: ExperimentProgress | None = None,
    done: Callable[[Experiment, Result | Failure], None] | None = None,
) -> list[Result | Failure]:
    """Run what is missing; return the result of each, or its failure, in the order of ``experiments``.

    A failed experiment is tried again after the others. One that another process is computing comes last. In this
    process, experiments that differ only in the time filter play their method once; on Ray, each plays it.

    Args:
        experiments: what to run.
        root: the folder of results.
        ray: None runs them in this process, one after the other; "auto" uses the cluster of $RAY_ADDRESS or of this
            machine, or starts one here; "local" always starts one; else the address of a cluster. If the caller has
            started a session of Ray, it is used.
        workers: start a cluster here, with as many cores; None: with all, if one is started.
        workbench: where data and weights are, on all workers; by default in each worker's own $TRIBE_DATA.
        gpus: share of a GPU that an experiment on CUDA takes on Ray; 0.25 lets four share one.
        retries: how often a failed experiment is tried again.
        every: batches between checkpoints.
        progress: called at intervals, in this process, for each experiment that advanced.
        done: called once for each experiment, when it is finished or has failed.
    """
    requested = list(experiments)
    todo = list(dict.fromkeys(requested))
    _check(ray, workers, gpus, retries)
    if ray is not None:
        _refuse_custom(todo, root)
    with contextlib.ExitStack() as stack:
        executor: Executor
        if ray is None:
            todo = in_groups(todo)
            executor = LocalExecutor(root, workbench, every, progress, SharedPlays(todo))
        else:
            cluster = stack.enter_context(_cluster(ray, workers))
            executor = stack.enter_context(
                contextlib.closing(RayExecutor(cluster, root, workbench, gpus, every, progress))
            )
        outcomes = _run_until_done(executor, todo, retries, done)
    return [outcomes[experiment] for experiment in requested]


def _check(ray: str | None, workers: int | None, gpus: float, retries: int) -> None:
    if workers is not None and workers < 1:
        raise ValueError(f"workers is how many cores a new cluster takes, at least 1; got {workers}")
    if workers is not None and ray not in ("auto", "local"):
        raise ValueError(f"workers is for a cluster that is started here, with ray 'auto' or 'local'; got ray={ray!r}")
    if gpus <= 0 or (gpus > 1 and gpus != int(gpus)):
        raise ValueError(f"gpus is a share of a GPU such as 0.25, or a whole number of them; got {gpus}")
    if retries < 0:
        raise ValueError(f"retries is how often a failed experiment is tried again, at least 0; got {retries}")


def _refuse_custom(experiments: Sequence[Experiment], root: str | PathLike[str]) -> None:
    """Refuse experiments that have to be run and have custom components which workers do not get."""
    for experiment in experiments:
        parts = {word: getattr(experiment, role) for role, word in NOT_SENT.items()}
        custom = [f"{word} {part.name}" for word, part in parts.items() if part.code or ":" in part.name]
        if custom and find(experiment, root, verified=True, current=True) is None:
            raise ValueError(
                f"workers of Ray do not have the custom code of {' and '.join(custom)}: only custom methods and norm "
                "rules are sent to them. Run it without Ray"
            )


# -- the order of work ------------------------------------------------------------------------------------------------


class Executor(Protocol):
    """Attempts experiments."""

    def start(self, experiment: Experiment, wait: bool) -> None:
        """Queue an experiment; ``wait``: for another process that computes the same."""

    def next(self) -> tuple[Experiment, Outcome] | None:
        """The next attempt that ended; None if no attempt is queued or running."""


def _run_until_done(
    executor: Executor,
    experiments: Sequence[Experiment],
    retries: int,
    done: Callable[[Experiment, Result | Failure], None] | None,
) -> dict[Experiment, Result | Failure]:
    """Attempt all experiments until each is finished or has failed too often."""
    outcomes: dict[Experiment, Result | Failure] = {}
    reasons: dict[Experiment, list[str]] = defaultdict(list)
    queue, busy, wait = list(experiments), list[Experiment](), False
    while queue:
        for experiment in queue:
            executor.start(experiment, wait)
        while (ended := executor.next()) is not None:
            experiment, outcome = ended
            if isinstance(outcome, Busy):
                busy.append(experiment)
                continue
            if isinstance(outcome, str):
                reasons[experiment].append(outcome)
                if len(reasons[experiment]) <= retries:
                    executor.start(experiment, wait)
                    continue
                reason = "; then ".join(dict.fromkeys(reasons[experiment]))
                outcomes[experiment] = Failure(experiment, reason, len(reasons[experiment]))
            else:
                outcomes[experiment] = outcome
            if done is not None:
                done(experiment, outcomes[experiment])
        queue, busy, wait = busy, [], True
    return outcomes


class LocalExecutor:
    """Runs experiments in this process, one after the other."""

    def __init__(
        self,
        root: str | PathLike[str],
        workbench: Workbench | None,
        every: int,
        progress: ExperimentProgress | None,
        plays: SharedPlays | None = None,
    ) -> None:
        self._root, self._every, self._progress, self._plays = Path(root), every, progress, plays
        self._given, self._workbenches = workbench, dict[str, Workbench]()
        self._queue: deque[tuple[Experiment, bool]] = deque()

    def start(self, experiment: Experiment, wait: bool) -> None:
        """Put it at the end of the queue."""
        self._queue.append((experiment, wait))

    def next(self) -> tuple[Experiment, Outcome] | None:
        """Run the first of the queue."""
        if not self._queue:
            return None
        experiment, wait = self._queue.popleft()
        follow = None if self._progress is None else functools.partial(self._progress, experiment)
        try:
            workbench = self._workbench(experiment.device)
        except ValueError as error:  # no such device here
            return experiment, str(error)
        return experiment, attempt(experiment, self._root, workbench, follow, self._every, wait, self._plays)

    def _workbench(self, device: str) -> Workbench:
        if self._given is not None:
            return self._given
        if device not in self._workbenches:
            self._workbenches[device] = Workbench(device=device)
        return self._workbenches[device]


# -- on a cluster -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster(address: str, workers: int | None) -> Iterator[Any]:
    """A session of Ray: the caller's if there is one, else one that ends with the block."""
    ray = ray_library()
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports unless the user wants them
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if workers is not None or address == "local":
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    else:
        known = os.environ.get("RAY_ADDRESS") if address == "auto" else address
        if known not in (None, "auto", "local"):
            _check_address(str(known))
        ray.init(address=known, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Refuse an address that does not answer: Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        hint = "expected auto, local, HOST:PORT of a cluster that runs, or ray://HOST:PORT"
        raise ConnectionError(f"there is no cluster of Ray at {address!r} ({error}); {hint}") from error


class RayExecutor:
    """Runs experiments on the workers of a cluster, one task each."""

    def __init__(
        self,
        ray: Any,
        root: str | PathLike[str],
        workbench: Workbench | None,
        gpus: float,
        every: int,
        progress: ExperimentProgress | None,
    ) -> None:
        self._ray, self._root, self._gpus = ray, Path(root).resolve(), gpus
        self._every, self._progress = every, progress
        self._data = None if workbench is None or workbench.data is None else str(workbench.data.expanduser().resolve())
        places = {} if workbench is None else workbench.weights
        self._weights = tuple((name, str(path.expanduser().resolve())) for name, path in places.items())
        self._node = ray.get_runtime_context().get_node_id()
        self._task = ray.remote(max_retries=0)(run_job)  # retries are counted in one place, `_run_until_done`
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(ProgressBoard).remote()
        self._waiting: dict[Any, Experiment] = {}
        self._ended: deque[tuple[Experiment, Outcome]] = deque()

    def start(self, experiment: Experiment, wait: bool) -> None:
        """Send the experiment to a worker, unless its result is in the store."""
        try:
            if (found := find(experiment, self._root, verified=True, current=True)) is not None:
                self._ended.append((experiment, found))
                return
            job = Job(
                experiment.json(),
                str(self._root),
                self._data,
                self._weights,
                CustomMethod.of(experiment),
                versions(),
                self._node,
                self._every,
                wait,
                CustomMethod.norm_of(experiment),
            )
            task = self._task.options(**self._needs(experiment)).remote(job, self._board)
        except CLEAR_ERRORS as error:
            self._ended.append((experiment, error_message(error)))
        else:
            self._waiting[task] = experiment

    def _needs(self, experiment: Experiment) -> dict[str, Any]:
        """The resources of a task; never more cores than any machine has, since it would wait for ever."""
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

    def next(self) -> tuple[Experiment, Outcome] | None:
        """Wait until a task has ended, and show the progress of all."""
        while not self._ended and self._waiting:
            ended, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=INTERVAL)
            self._show()
            for task in ended:
                experiment = self._waiting.pop(task)
                self._ended.append((experiment, self._outcome(experiment, task)))
        return self._ended.popleft() if self._ended else None

    def _show(self) -> None:
        if self._progress is None:
            return
        try:
            latest = self._ray.get(self._board.take.remote(), timeout=10)
        except self._ray.exceptions.RayError:  # Ray restarts a lost board; the work goes on without it
            return
        named = {experiment.id: experiment for experiment in self._waiting.values()}
        for name, progress in latest.items():
            if name in named:
                self._progress(named[name], *progress)

    def _outcome(self, experiment: Experiment, task: Any) -> Outcome:
        try:
            reply: Reply = self._ray.get(task)
        except self._ray.exceptions.RayError as error:  # the worker died, or did not start
            return error_message(getattr(error, "cause", None) or error)
        for message in reply.warnings:
            warnings.warn(message, stacklevel=2)
        if reply.busy:
            return Busy(experiment.id)
        if reply.failed is not None:
            return reply.failed
        return store_files(experiment, self._root, reply.files)

    def close(self) -> None:
        """Stop the running tasks, as when the driver is interrupted; they resume from their checkpoints next time."""
        for task in self._waiting:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)
        with contextlib.suppress(Exception):
            self._ray.kill(self._board)
