"""Model files for these tests, each exported once for all processes of a test run."""

import functools

import pytest
import torch
from filelock import FileLock

import tribe
import tribe.onnx
from tribe import models
from tribe.testing import images, small_network

WORLDS = ("fog", "dotted_line", "impulse_noise", "scale")


@functools.cache
def digits_network():
    return models.load("compact", models.find("compact", "mnist"))


@functools.cache
def digits(count=1024):
    """Digits in four worlds, one after the other, and their classes."""
    data = tribe.datasets.create("live-mnist-c", corruptions=WORLDS)
    each = count // len(data.domains)
    index = torch.arange(each)
    images = [data.images(domain, index) for domain in data.domains]
    return torch.cat(images), torch.cat([data.labels(domain)[index] for domain in data.domains])


def marked():
    """An adapter of a small network with a time filter that has seen a few images; every image is observed."""
    sticky = tribe.filters.create("time", evidence_on=1.0)
    adapter = tribe.adapt(small_network(), "bank", compare=0, observe=1, time=sticky)
    adapter(images(1, 20)[0])
    return adapter


FILES = {  # the network or the adapter, the shape of an image, and options
    "digits": (digits_network, (1, 28, 28), {}),
    "marked": (marked, (3, 8, 8), {"valid": True, "opset": 20}),
    "watched": (small_network, (3, 16, 16), {"frames": True, "uint8": True, "source_logits": True, "observe": 1}),
}


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
