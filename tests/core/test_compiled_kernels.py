"""One launch of each kind of kernel compiles for four GPUs of NVIDIA and one of AMD, and needs what it did before."""

import csv
import os
import re
import subprocess
import sys

import pytest

from places import ROOT
from tribe.core import kernels

TABLE = ROOT / "tests/core/compiled_kernels.csv"
PINNED = re.search(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
SPILLING = ("update: 1000 classes", "scan: filter of 21841", "smooth: filter of 21841", "philox normal")

pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="takes a minute: make test-kernels")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The table as it is now, compiled in another process: in this one Triton has chosen the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, TABLE.with_suffix(".py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(csv.DictReader(done.stdout.splitlines()))


def test_registers_stack_and_vector_loads_are_those_of_the_table(rows):
    """A table that is meant to change is written by tests/core/compiled_kernels.py."""
    import triton

    if triton.__version__ != PINNED:
        pytest.skip(f"the table is of Triton {PINNED}, as in constraints.txt; this is {triton.__version__}")
    assert rows == list(csv.DictReader(TABLE.read_text().splitlines()))


def test_no_kernel_spills_more_than_is_known(rows):
    """Catches a time filter of many classes whose few warps held thousands of bytes of each thread on the stack."""
    spilling = [row for row in rows if int(row["stack"]) > 0 and not row["kernel"].startswith(SPILLING)]
    assert not spilling
    assert max(int(row["stack"]) for row in rows) < 2048


@pytest.mark.parametrize("width", ["24 channels", "64 channels", "160 channels"])
def test_activations_are_read_as_vectors(rows, width):
    """Catches widths that are no multiples of 16 and are read number by number."""
    passes = [row for row in rows if row["kernel"].endswith(width) and not row["kernel"].startswith("join:")]
    assert len(passes) >= 28
    assert all(row["loads"] == row["vector_loads"] for row in passes)
