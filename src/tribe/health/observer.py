"""What an adapter reads from the state of a guarded or watched method: events as they come, and health on request."""

from collections.abc import Callable
from typing import Any

from tribe.core.backbone import Backbone
from tribe.health.alarms import read
from tribe.health.events import Event, EventLog
from tribe.health.watch import Health
from tribe.methods import AnyMethod, Pipeline

EVERY = 50  # steps between two readings on a GPU: reading waits for the device


class Observer:
    """Reads alarms after each step on a CPU, every 50 steps on a GPU, and whenever it is asked."""

    def __init__(self, method: AnyMethod, callback: Callable[[Event], object] | None = None) -> None:
        self._guarded = is_watched(method)
        check_callback(callback, self._guarded)
        self.log = EventLog(callback)
        self._seen: Any = None
        self._steps = 0

    def resume(self, method: AnyMethod, state: Any) -> None:
        """Start after the alarms that a loaded state has seen already."""
        if self._guarded:
            self._seen = read(state.guard.watch.alarms)[1]

    def after_step(self, method: AnyMethod, state: Any) -> None:
        """Look for new events, if it is time."""
        if not self._guarded:
            return
        self._steps += 1
        if state.key.seed.device.type == "cpu" or self._steps % EVERY == 0:
            self.look(method, state)

    def look(self, method: AnyMethod, state: Any) -> None:
        """Look for new events now."""
        if self._guarded:
            events, self._seen = read(state.guard.watch.alarms, self._seen)
            self.log.add(*events)

    def health(self, method: AnyMethod, net: Backbone, state: Any) -> list[Health] | None:
        """How each stream does; None if nothing watches."""
        return read_health(method, net, state)


def check_callback(callback: Callable[[Event], object] | None, watched: bool) -> None:
    """Refuse a callback for alarms where nothing watches."""
    if callback is not None and not watched:
        raise ValueError("on_event is called with alarms, which need health=True or guard=True")


def is_watched(method: AnyMethod) -> bool:
    """Return whether a guard, or what only watches, is in a pipeline."""
    return isinstance(method, Pipeline) and method.guard is not None


def read_health(method: AnyMethod, net: Backbone, state: Any) -> list[Health] | None:
    """Return the health of each stream; None if nothing watches. Waits for the device."""
    if not isinstance(method, Pipeline) or method.guard is None:
        return None
    health: list[Health] = method.guard.health(net, method.method, state)
    return health
