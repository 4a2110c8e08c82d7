"""A grid of small experiments that is killed again and again: started as a process by tests/lab/test_experiment.py.

usage: grid.py RUNS SPECS KILLS SEED. The grid is started afresh, as a process of its own, after each kill (SIGKILL, at
a random moment) and in the end left alone until it is finished. With 0 kills: undisturbed.
"""

import os
import random
import signal
import sys
import time

import torch

from tribe.lab.execution import run_experiment
from tribe.lab.experiment import Experiment
from tribe.lab.spec import ComponentSpec
from tribe.lab.workbench import Workbench

METHODS = ("source", "tribe", "bn", "rotta", "tent", "selftrain/fixmatch")


def experiments(count, workbench):
    """Real digits under one corruption, about 1,200 images each."""
    data = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})
    scenario = ComponentSpec("gli-f", {"imbalance": 1_000_000})
    for i in range(count):
        seed = i // len(METHODS)
        yield Experiment.of(data, "compact", scenario, METHODS[i % len(METHODS)], seeds=(seed,), workbench=workbench)


def play(runs, count):
    torch.set_num_threads(1)
    workbench = Workbench(device="cpu")
    for experiment in experiments(count, workbench):
        run_experiment(experiment, runs, workbench=workbench, every=3)


def main(runs, count, kills, seed):
    moments = random.Random(seed)
    for _ in range(kills):
        child = os.fork()  # nothing has been computed in this process, so there are no threads that a child could miss
        if not child:
            play(runs, count)
            os._exit(0)
        time.sleep(moments.uniform(0.05, 1.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    play(runs, count)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
