"""Run a program in a process that may take only so much memory and a minute of computing more than its imports."""

import os
import subprocess
import sys
from typing import NamedTuple

LIMIT = """
import resource
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
most = taken + {megabytes} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # a loop without an end is killed
"""
LIBRARY = """
import sys
import torch, tribe, tribe.train
"""
DATA_READERS = """
import sys, warnings
from pathlib import Path
import numpy as np, torch
from tribe import datasets
from tribe.datasets.image_files import read_image
from tribe.datasets.unpickle import UnpickleError, unpickle
import tribe.datasets.image_generation, PIL.Image
PIL.Image.init()
"""


class Ended(NamedTuple):
    """How a process ended: its exit code and its output."""

    code: int
    out: str
    err: str


def run_limited(program, *arguments, megabytes=512, imports=LIBRARY):
    """Run a program with ``sys.argv[1:]`` = arguments, after its imports, with so much memory left."""
    done = subprocess.run(
        [sys.executable, "-c", imports + LIMIT.format(megabytes=megabytes) + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def read_limited(program, *arguments):
    """The output of a program that runs after `DATA_READERS` with a gigabyte left; it must end without an error."""
    done = run_limited(program, *arguments, megabytes=1024, imports=DATA_READERS)
    assert done.code == 0, f"it ended with {done.code}:\n{done.err[-2000:]}"
    return done.out
