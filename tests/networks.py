"""Networks with unusual habits, and adapters of them, for several test files."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import tribe
from tribe.testing import CLASSES, images, ready, small_network


def batch(seed=0, size=6):
    return images(1, size, seed)[0]


def learner(net, method="tribe", **given):
    """An adapter that learns something of networks that were never trained."""
    fields = {"h0": 2.0} if method == "tribe" else {}
    return tribe.adapt(net, ready(method) if method != "tribe" else method, **given, **fields)


def started(streams=1, **fields):
    """An adapter that has learned from a batch."""
    adapter = tribe.adapt(small_network(), streams=streams, **fields)
    adapter(images(streams, 6) if streams > 1 else batch())
    return adapter


@contextmanager
def refused(adapter, error, match):
    """Expect an error that leaves the state of an adapter as it was."""
    before = adapter.digest()
    with pytest.raises(error, match=match):
        yield
    assert adapter.digest() == before


def at_once(*calls):
    """Call functions in threads that start together; the first error is raised here."""
    start = threading.Barrier(len(calls))

    def run(call):
        start.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, calls))


class Around(nn.Module):
    """Runs a network in some way of its own."""

    def __init__(self, run, inner=None):
        super().__init__()
        self.inner, self.run = inner or small_network(), run

    def forward(self, x):
        return self.run(self.inner, x)


class Viewed(nn.Module):
    """Flattens feature maps with view, which needs them laid out as images are."""

    def __init__(self, flat=lambda x: x.view(x.size(0), -1)):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6 * 36, CLASSES)
        self.flat = flat

    def forward(self, x):
        return self.fc(self.flat(self.norm(self.conv(x)).relu()))


class Frames(nn.Module):
    """Classifies the rows of an image one by one."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm2d(3), nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.fc(self.norm(x).transpose(1, 2).flatten(0, 1).flatten(1)).unflatten(0, (len(x), -1)).mean(1)


class Counting(nn.Module):
    """Counts its passes in a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = small_network()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.inner(x)


def apart(inner, x):
    a, b = inner(torch.cat((x, x.flip(-1)))).chunk(2)
    return (a + b) / 2


def side_by_side(inner, x):
    return inner(torch.stack((x, x.flip(-1)), 1).flatten(0, 1)).unflatten(0, (-1, 2)).mean(1)
