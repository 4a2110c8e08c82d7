"""What an adapter reads from the state of a guarded or watched method: events as they come, and health on request."""

from collections.abc import Callable
from typing import Any

from tribe.core.backbone import Backbone
from tribe.health.alarms import read
from tribe.health.events import Event, EventLog
from tribe.health.guard import Guarded
from tribe.health.watch import Health
from tribe.methods import Composed, Method

EVERY = 50  # steps between two readings on a GPU: reading waits for the device


class Observer:
    """Reads alarms after each step on a CPU, every 50 steps on a GPU, and whenever it is asked."""

    def __init__(self, method: Method, callback: Callable[[Event], object] | None = None) -> None:
        self._guarded = find_guarded(method) is not None
        check_callback(callback, self._guarded)
        self.log = EventLog(callback)
        self._seen: Any = None
        self._steps = 0

    def resume(self, method: Method, state: Any) -> None:
        """Start after the alarms that a loaded state has seen already."""
        if self._guarded:
            self._seen = read(find_guarded(method, state)[1].guard.watch.alarms)[1]

    def after_step(self, method: Method, state: Any) -> None:
        """Look for new events, if it is time."""
        if not self._guarded:
            return
        self._steps += 1
        if state.key.seed.device.type == "cpu" or self._steps % EVERY == 0:
            self.look(method, state)

    def look(self, method: Method, state: Any) -> None:
        """Look for new events now."""
        if self._guarded:
            events, self._seen = read(find_guarded(method, state)[1].guard.watch.alarms, self._seen)
            self.log.add(*events)

    def health(self, method: Method, net: Backbone, state: Any) -> list[Health] | None:
        """How each stream does; None if nothing watches."""
        if not self._guarded:
            return None
        guarded, own = find_guarded(method, state)
        found: list[Health] = guarded.health(net, own)
        return found


def check_callback(callback: Callable[[Event], object] | None, watched: bool) -> None:
    """Refuse a callback for alarms where nothing watches."""
    if callback is not None and not watched:
        raise ValueError("on_event is called with alarms, which need health=True or guard=True")


def find_guarded(method: Method, state: Any = None) -> Any:
    """The guarded or watched method inside a method, and its state; None if there is none."""
    while not isinstance(method, Guarded):
        if not isinstance(method, Composed):
            return None
        method, state = method.inner, None if state is None else state.inner
    return method, state
