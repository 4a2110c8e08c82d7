"""What threads need: a lock that survives copies and forks, and copies of a network."""

import copy
import itertools
import os
import threading
import weakref
from typing import Any, ClassVar

from torch import nn

from tribe.core.slots import Slot


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


class ThreadCopies(threading.local):
    """A thread's copy of a network, for passes that put other weights into its modules.

    The copy has modules of its own and shares the network's tensors. So other threads, and code that reads the network
    during such a pass, see the source's weights only. The copy is made when it is first needed; a copy or pickle of
    this object starts empty.
    """

    model: nn.Module | None = None

    def of(self, model: nn.Module) -> nn.Module:
        """Return this thread's copy of the model."""
        if self.model is None:
            layers = [slot.layer for slot in model.modules() if isinstance(slot, Slot)]
            tensors = (t for m in (model, *layers) for t in itertools.chain(m.parameters(), m.buffers()))
            self.model = copy.deepcopy(model, {id(t): t for t in tensors})
        return self.model

    def __reduce__(self) -> Any:
        return type(self), ()
