"""What happened to a stream, in words: alarms that the host has read from the device.

The alarms themselves are tensors (see `tribe.health.alarms`). An `EventLog` turns what is new in them into `Event`s,
keeps the last ones, writes them to the log ``tribe.health``, with their parts as attributes of the record, and gives
them to a callback.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tribe.fields import document, is_whole, require

logger = logging.getLogger("tribe.health")


class Event(NamedTuple):
    """Something that a person should know."""

    stream: int | str
    kind: str
    image: int
    since: int
    words: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        return f"stream {self.stream}, image {self.image:,}: {self.words}"

    def json(self) -> dict[str, Any]:
        """Plain data: texts, numbers and a dict of numbers."""
        return self._asdict()


document(
    Event,
    stream="The number of the stream; in a fleet its name.",
    kind='What happened, one word: "black", "frozen", "shift", "drift", "collapse", ...',
    image="How many images the stream had seen when it was found.",
    since="After how many images it began, as far as is known.",
    words="What happened and why, for people.",
    numbers="The numbers behind the words.",
)


class EventLog:
    """The last events of an adapter, the newest last; its owner's lock protects it.

    Args:
        callback: called with every event. An error in it is logged and stops nothing.
        keep: how many events are kept.
    """

    def __init__(self, callback: Callable[[Event], object] | None = None, keep: int = 1000) -> None:
        require(callback is None or callable(callback), "callback is a function that takes an event", callback)
        require(is_whole(keep, least=1), "keep is how many events are kept, a whole number of at least 1", keep)
        self.callback = callback
        self.events: deque[Event] = deque(maxlen=int(keep))

    def add(self, *events: Event) -> None:
        """Keep events, log them and call back."""
        for event in events:
            self.events.append(event)
            parts = {"stream": event.stream, "kind": event.kind, "numbers": event.numbers}
            logger.warning("%s", event, extra=parts)
            if self.callback is not None:
                try:
                    self.callback(event)
                except Exception:  # a camera must not stop because its dashboard is down
                    logger.exception("the callback failed for: %s", event)
