"""Run code in a process that may take only so much memory, so that a test fails where a crafted file takes more."""

import subprocess
import sys
from typing import NamedTuple

LIMIT = """
import resource, sys
import torch, tribe, tribe.train
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + {megabytes} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
"""


class Ended(NamedTuple):
    """How a process ended: its exit code and its output."""

    code: int
    out: str
    err: str


def limited(code, *arguments, megabytes=512):
    """Run Python code with ``sys.argv[1:]`` = arguments, after tribe was imported, with so much memory left."""
    script = LIMIT.format(megabytes=megabytes) + code
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return Ended(done.returncode, done.stdout, done.stderr)
