"""What the tests of the reproduction share: runs of a small stream, and a custom method."""

import json
import shutil
from pathlib import Path

import pytest

from commands import succeeded
from reproduce_helpers import MINE, SMALL, call


@pytest.fixture
def nowhere(tmp_path, monkeypatch, few_digits):
    """No data but a fifth of MNIST's test images, and an empty folder to write into."""
    monkeypatch.setenv("TRIBE_DATA", few_digits)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory, few_digits):
    """Wall clock: imbalance 100, three rows, two seeds: options, folder, and the table as JSON."""
    runs = tmp_path_factory.mktemp("runs")
    options = ("wall-clock", *SMALL, "--rows", "source,BN,+pl", "--seeds", 2, "--runs", runs, "--data", few_digits)
    result = succeeded(call(*options, "--format", "json"))
    return options, runs, json.loads(result.stdout)


@pytest.fixture
def played(finished_runs, tmp_path):
    """A copy of the finished runs, which a test may change."""
    options, runs, table = finished_runs
    copy = tmp_path / "played"
    shutil.copytree(runs, copy)
    return tuple(copy if word == runs else word for word in options), copy, table


@pytest.fixture
def mine(registries):
    Path("mine.py").write_text(MINE)
    return "+mine.py:Mine"
