"""Servers of a small network on a free port of this machine, with the real worker."""

import hashlib
import importlib.util

import tribe
from tribe.serve.protocol import ModelInfo
from tribe.serve.security import Token
from tribe.serve.server import Listener, new_access
from tribe.serve.service import Service
from tribe.serve.worker import Worker
from tribe.testing import CLASSES, small_network

MODEL = ModelInfo("small", (3, 8, 8), CLASSES, labels=tuple("abcdefgh"[:CLASSES]), method="tribe")


def small_fleet(**options):
    """A fleet that trusts more, so that a network that was never trained learns something."""
    return tribe.fleet(small_network(), **{"h0": 2.0, "exact": True, **options})


def serving(worker, *, tokens=None, limits=None, port=0, **options):
    """A server of a worker."""
    return Listener(Service(worker, MODEL, new_access(tokens), limits), port=port, **options)


def listening(**options):
    """A server of the small network, without a store."""
    return serving(Worker(small_fleet()), **options)


def token(name, **fields):
    """A token whose secret is its name."""
    return Token(name, hashlib.sha256(name.encode()).hexdigest(), **fields)


def has_grpc():
    """Whether the extra `grpc` is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("grpc", "google.protobuf"))
