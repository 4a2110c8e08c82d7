"""A lock for objects whose methods may be called from several threads."""

import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar


class Lock:
    """A reentrant lock that survives copies and forks.

    A copy or a pickle gets a new lock, so an object that has one can be copied. In a forked process every lock is
    new: the thread that held it exists in the parent only.
    """

    _all: ClassVar[weakref.WeakSet["Lock"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.renew()
        self._all.add(self)

    def renew(self) -> None:
        """Free the lock, whoever holds it."""
        self._lock: Any = threading.RLock()

    @classmethod
    def renew_all(cls) -> None:
        """Free every lock."""
        for lock in cls._all:
            lock.renew()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return type(self), ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Lock.renew_all)


class Locked(Protocol):
    """An object with a lock."""

    _lock: Lock


S = TypeVar("S", bound=Locked)
P = ParamSpec("P")
R = TypeVar("R")


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Hold the object's lock during a call of the method."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call
