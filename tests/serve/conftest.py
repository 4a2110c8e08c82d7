"""Servers that listen on a free port of this machine, each with a worker that really adapts; and empty stores."""

import contextlib

import pytest
from small_server import has_grpc, listening

from stores import KINDS, Clock, open_kind, write
from tribe.serve.config import Limits


@pytest.fixture(scope="module")
def server():
    """A server with gRPC, if that is installed."""
    with listening(grpc_port=0 if has_grpc() else None) as found:
        yield found


@pytest.fixture(scope="module")
def strict():
    """A server with small limits."""
    limits = Limits(body=20_000, body_seconds=0.5, connections=8, pixels=1000)
    with listening(limits=limits) as found:
        yield found


@pytest.fixture(params=KINDS)
def kind(request):
    """The kind of a store."""
    return request.param


@pytest.fixture
def clock():
    """The clock of a store."""
    return Clock()


@pytest.fixture
def opened(kind, tmp_path, clock):
    """A function that opens the same store again and again."""
    return open_kind(kind, tmp_path, clock)


@pytest.fixture
def store(opened):
    with contextlib.closing(opened()) as store:
        yield store


@pytest.fixture
def written(store, clock):
    """A store with two states of a stream that "a" owns."""
    claim = store.claim("cam", "a", 100 if clock is None else 10)
    write(store, claim, 1)
    write(store, claim, 2)
    return store
