"""Run a program in a process that may take only so much memory and a minute of computing more than its imports."""

from processes import ended

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
import torch, tribe, reproduction.train
"""
DATA_READERS = """
import sys, warnings
from pathlib import Path
import numpy as np, torch
from tribe import datasets
from tribe.data.datasets.image_files import read_image
from tribe.data.datasets.unpickle import UnpickleError, unpickle
import tribe.data.datasets.image_generation, PIL.Image
PIL.Image.init()
"""


def run_limited(program, *arguments, megabytes=512, imports=LIBRARY):
    """Run a program with ``sys.argv[1:]`` = arguments, after its imports, with so much memory left."""
    return ended("-c", imports + LIMIT.format(megabytes=megabytes) + program, *arguments)


def read_limited(program, *arguments):
    """The output of a program that runs after `DATA_READERS` with a gigabyte left; it must end without an error."""
    done = run_limited(program, *arguments, megabytes=1024, imports=DATA_READERS)
    assert done.code == 0, f"it ended with {done.code}:\n{done.err[-2000:]}"
    return done.out
