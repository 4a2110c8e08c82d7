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


def run_limited(program, *arguments, megabytes=512, imports=LIBRARY):
    """Run a program with ``sys.argv[1:]`` = arguments, after its imports, with so much memory left."""
    return ended("-c", imports + LIMIT.format(megabytes=megabytes) + program, *arguments)
