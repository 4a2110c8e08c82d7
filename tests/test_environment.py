"""What a process does to the machine it runs on."""

import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource
import torch
from tribe.environment import keep_memory
{}
def round():
    return [torch.ones(6 << 20) for _ in range(4)]  # of 24 MB
round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(command=""):
    """Pages that the kernel had to bring while buffers were made and freed again and again."""
    code = [sys.executable, "-c", ROUNDS.format(command)]
    return int(subprocess.run(code, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_is_kept_needs_no_fresh_pages():
    assert 10 * faults("assert keep_memory()") < faults()
