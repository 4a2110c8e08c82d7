"""Support threads: a lock that can be copied, and a copy of a network for each thread."""

import copy
import itertools
import threading
from typing import Any

from torch import nn

from tribe.core.slots import Slot


class Lock(threading.Condition):
    """A reentrant lock. A copy or a pickle gets a new one, so an object that has a lock can be copied."""

    def __reduce__(self) -> Any:
        return type(self), ()


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
