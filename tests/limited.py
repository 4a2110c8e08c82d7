"""Run a program in a process that may take a gigabyte of memory and a minute of computing more than its imports."""

import os
import subprocess
import sys

IMPORTS = """
import resource, sys, warnings
from pathlib import Path
import numpy as np, torch
from tribe import datasets
from tribe.datasets.image_files import read_image
from tribe.datasets.unpickle import UnpickleError, unpickle
import tribe.datasets.image_generation, PIL.Image
PIL.Image.init()
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, taken + 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # a loop without an end is killed
"""


def limited(program, *arguments):
    """The output of a program that runs after `IMPORTS`; it must end without an error."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stderr[-2000:]}"
    return done.stdout
