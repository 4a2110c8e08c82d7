"""What all tests share. One thread: the networks here are so small that a second one only waits for the first."""

import gc
import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start


def pytest_collection_finish():
    """Let the garbage collector look at what tests make, and not at ten thousand tests and all modules each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No data but what the package brings, and an empty folder to write into."""
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory):
    """A folder with the first 2,000 of MNIST's test images: streams of them are a fifth as long as those of all."""
    from layouts import write_digits

    return write_digits(tmp_path_factory.mktemp("digits"), train=0, test=2000)
