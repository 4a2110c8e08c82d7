"""Servers that listen on a free port of this machine, each with a worker that really adapts."""

import pytest
from small_server import has_grpc, listening

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
