"""Run many experiments: in this process, in a pool of processes on this machine, or on a cluster of Ray.

run_all(experiments, "runs")                        # one after the other
run_all(experiments, "runs", workers=4)             # four processes
run_all(experiments, "runs", workers="10.0.0.1:6379")   # a cluster; "auto": that of $RAY_ADDRESS, or a new one here
"""

import concurrent.futures
import contextlib
import functools
import json
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Protocol

from tribe.experiments.execution import EVERY, ExperimentRunner, in_groups
from tribe.experiments.experiment import Experiment
from tribe.experiments.store import Result, ResultStore
from tribe.experiments.workbench import Workbench
from tribe.experiments.workers import (
    INTERVAL,
    ExperimentProgress,
    PoolEngine,
    RayEngine,
    Reply,
    RunSettings,
    Sender,
    attempt,
    error_message,
)

IN_MEMORY = 32  # results of a call whose records stay in memory; with more, they are read from the disk again
NOT_SENT = {"dataset": "the data set", "model": "the network", "scenario": "the scenario"}  # if they are custom


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
    workers: int | str | None = None,
    workbench: Workbench | None = None,
    gpus: float = 0.25,
    retries: int = 0,
    every: int = EVERY,
    force: bool = False,
    keep_outputs: bool = False,
    command: Sequence[str] | None = None,
    progress: ExperimentProgress | None = None,
    done: Callable[[Experiment, Result | Failure], None] | None = None,
) -> list[Result | Failure]:
    """Run what is missing; return the result of each, or its failure, in the order of ``experiments``.

    A failed experiment is tried again after the others. One that another process is computing comes last.

    Args:
        experiments: What to run.
        root: The folder of results.
        workers: None runs them in this process, one after the other; a number, in as many processes; a text, on Ray:
            "auto" is the cluster of $RAY_ADDRESS or of this machine, or a new one here, "local" always a new one, else
            it is the address of a cluster.
        workbench: Where data and weights are, on all workers; by default in each worker's own $TRIBE_DATA.
        gpus: Share of a GPU that an experiment on CUDA takes on Ray; 0.25 lets four share one.
        retries: How often a failed experiment is tried again.
        every: Batches between checkpoints.
        force: Compute what is there anew.
        keep_outputs: Also keep the outputs of the methods, such as logits, in the records.
        command: The command line, kept with the results.
        progress: Called at intervals, in this process, for each experiment that advanced.
        done: Called once for each experiment, when it is finished or has failed.
    """
    requested = list(experiments)
    todo = in_groups(dict.fromkeys(requested))
    if retries < 0:
        raise ValueError(f"retries is how often a failed experiment is tried again, at least 0; got {retries}")
    settings = RunSettings(str(root), every, force, keep_outputs, command)
    engine: Engine
    with contextlib.ExitStack() as stack:
        if workers is None:
            engine = SerialEngine(settings, workbench, todo, progress)
        else:
            _refuse_custom(todo, root)
            sender = Sender(settings, workbench, progress)
            engine = PoolEngine(sender, workers) if isinstance(workers, int) else RayEngine(sender, workers, gpus)
            stack.enter_context(contextlib.closing(engine))
        outcomes = _run_until_done(engine, todo, retries, done)
    return [outcomes[experiment] for experiment in requested]


def _refuse_custom(experiments: Sequence[Experiment], root: str | PathLike[str]) -> None:
    """Refuse experiments that have to be run and have custom components which workers do not get."""
    store = ResultStore(root)
    for experiment in experiments:
        parts = {word: getattr(experiment, role) for role, word in NOT_SENT.items()}
        custom = [f"{word} {part.name}" for word, part in parts.items() if part.code or ":" in part.name]
        if custom and store.find(experiment) is None:
            raise ValueError(
                f"workers do not have the custom code of {' and '.join(custom)}: only custom methods and norm rules "
                "are sent to them. Run it without workers"
            )


# -- the order of work ------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """Attempts experiments."""

    slots: int  # how many at the same time

    def submit(self, experiment: Experiment, wait: bool) -> "Future[Reply]":
        """Begin an attempt; ``wait``: for another process that computes the same."""

    def receive(self, reply: Reply) -> Reply:
        """Take the end of an attempt."""

    def show(self) -> None:
        """Pass on the progress of running attempts."""

    def close(self) -> None:
        """Stop what is running."""


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
            reply = engine.receive(_reply_of(future))
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


def _reply_of(future: "Future[Reply]") -> Reply:
    try:
        return future.result()
    except Exception as error:  # the worker died, or did not start
        return Reply(failed=error_message(getattr(error, "cause", None) or error))


class SerialEngine:
    """Runs experiments in this process."""

    slots = 1

    def __init__(
        self,
        settings: RunSettings,
        workbench: Workbench | None,
        planned: Sequence[Experiment],
        progress: ExperimentProgress | None,
    ) -> None:
        self._settings, self._progress = settings, progress
        self._runner = ExperimentRunner(settings.root, workbench, settings.every, planned, settings.command)

    def submit(self, experiment: Experiment, wait: bool) -> "Future[Reply]":
        """Run the experiment, and return when it has ended."""
        follow = None if self._progress is None else functools.partial(self._progress, experiment)
        future: Future[Reply] = Future()
        future.set_result(attempt(self._runner, experiment, self._settings, wait, follow))
        return future

    def receive(self, reply: Reply) -> Reply:
        """Return a reply as it is."""
        return reply

    def show(self) -> None:
        """Do nothing: progress is shown while an experiment runs."""

    def close(self) -> None:
        """Do nothing."""
