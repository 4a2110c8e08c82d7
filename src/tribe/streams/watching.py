"""What is read from the states of streams: their numbers, their health, and alarms as they begin."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tribe.core.backbone import Backbone
from tribe.health.alarms import read
from tribe.health.events import Event, EventLog
from tribe.health.observer import EVERY, check_callback, is_watched, read_health
from tribe.health.watch import Health
from tribe.methods import AnyMethod, EmptyState, Pipeline
from tribe.streams.batching import gather
from tribe.streams.pool import Entry

Listener = Callable[[Event], object]
Seen = dict[str, Any]  # of each stream: how often each alarm had begun when it was last read


class Watching:
    """Reads alarms after each step on a CPU, every 50 steps of a stream on a GPU, and whenever it is asked.

    Args:
        method: what adapts; if it is not watched, there is nothing to read.
        net: the network.
        listener: called with every alarm; more may be added to `listeners`.
    """

    def __init__(self, method: AnyMethod, net: Backbone, listener: Listener | None) -> None:
        self.method, self.net = method, net
        self.guarded = is_watched(method)
        check_callback(listener, self.guarded)
        self.listeners: list[Listener] = [] if listener is None else [listener]
        self.log = EventLog(self._tell)

    def _tell(self, event: Event) -> None:
        for listener in list(self.listeners):
            listener(event)

    def seen(self, state: Any) -> Any:
        """How often each alarm of a stream has begun."""
        return read(state.guard.watch.alarms)[1] if self.guarded else None

    def after_step(self, before: Mapping[str, Entry], after: Mapping[str, Any]) -> tuple[list[Event], Seen]:
        """The alarms that began in a step, of the streams whose turn it is."""
        if not self.guarded:
            return [], {}
        on_cpu = self.net.device.type == "cpu"
        return self.look({n: (s, before[n].seen) for n, s in after.items() if on_cpu or before[n].version % EVERY == 0})

    def look(self, states: Mapping[str, tuple[Any, Any]]) -> tuple[list[Event], Seen]:
        """The alarms of streams that began since they were seen, in the order of the streams."""
        events: list[Event] = []
        seen: Seen = {}
        for name, (state, last) in states.items():
            found, seen[name] = read(state.guard.watch.alarms, last)
            events += [event._replace(stream=name) for event in found]
        return events, seen

    def health(self, state: Any) -> Health | None:
        """How one stream does; None if nothing watches."""
        found = read_health(self.method, self.net, state)
        return None if found is None else found[0]

    def health_many(self, states: Sequence[Any]) -> list[Health | None]:
        """How several streams do, read together, without what takes a look at all statistics; on one device."""
        if not isinstance(self.method, Pipeline) or self.method.guard is None or not states:
            return [None] * len(states)
        guard = gather([state.guard._replace(good=EmptyState()) for state in states])
        info = gather([state.info for state in states])
        found: list[Health | None] = self.method.guard.read_health(self.net, self.method.method, guard, info)
        return found
