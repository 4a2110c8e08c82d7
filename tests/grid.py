"""Run a grid of small experiments that is killed at given points; test_store.py starts it.

usage: grid.py RUNS SPECS [FILE:COUNT ...]. For each FILE:COUNT a new process runs the grid and is killed just before
the file of this name is replaced for the COUNT-th time. At the end the grid runs without a kill.
"""

import os
import signal
import sys

import torch

from processes import watch_files
from tribe.experiments.execution import ExperimentRunner, RunSettings
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.workbench import Workbench

DATA = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})
STREAM = ComponentSpec("gli-f", {"imbalance": 1_000_000})  # an eighth of the digits
METHODS = ("source", "tribe", "bn", "rotta", "tent", "selftrain/fixmatch")


def run_experiment(experiment, root, workbench=None, progress=None, wait=True, **settings):
    """The result of one experiment, in this process; an error is raised."""
    return ExperimentRunner(RunSettings(root, **settings), workbench).run(experiment, progress, wait)


class Stopped(Exception):
    """A run was stopped by a test."""


def stop_at(batch, error=Stopped):
    """A progress that stops a run after a batch."""

    def stop(done, *_):
        if done == batch:
            raise error

    return stop


def small(workbench, method="source", batch=16, **options):
    """Real digits under one corruption."""
    return Experiment.of(DATA, "compact", STREAM, method, workbench=workbench, batch=batch, **options)


def same(one, other, names=("domain", "label", "prediction", "confidence")):
    """Whether records are equal bit for bit, the times aside."""
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names)


def experiments(count, workbench):
    for i in range(count):
        yield small(workbench, METHODS[i % len(METHODS)], seeds=(i // len(METHODS),))


def play(runs, count):
    torch.set_num_threads(1)
    workbench = Workbench(device="cpu")
    for experiment in experiments(count, workbench):
        run_experiment(experiment, runs, every=3)


def main(runs, count, *points):
    for point in points:
        name, _, times = point.partition(":")
        child = os.fork()  # nothing has been computed in this process, so a child misses no threads
        if not child:
            watch_files(signal.SIGKILL, "os.rename", name, int(times))
            play(runs, int(count))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == -signal.SIGKILL, f"the grid ended with {code} before it came to {point}"
    play(runs, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
