"""Model files for these tests, each exported once for all processes of a test run."""

import functools

import pytest
from filelock import FileLock

import tribe.onnx
from exported import FILES


@pytest.fixture(scope="session")
def model_file(tmp_path_factory, worker_id):
    """The path of one of `FILES`."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder if worker_id == "master" else folder.parent

    @functools.cache
    def find(name):
        path = folder / f"{name}.onnx"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                make, shape, options = FILES[name]
                tribe.onnx.export(make(), path, shape, **options)
        return path

    return find


@pytest.fixture
def session(model_file):
    """A new session of one of `FILES`, with one thread."""
    return lambda name: tribe.onnx.Session(model_file(name), threads=1)
