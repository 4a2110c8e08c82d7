"""How streams do, as a worker says it: in answers and descriptions, as events, and in metrics.

A guarded or watched fleet judges a stream in every step. What it found stays with the stream, so that answers and the
page cost nothing more. All of it is used on the event loop; alarms come from the thread that steps.
"""

import asyncio
import logging
from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any

from tribe.health import Event, Health
from tribe.serve.events import Events
from tribe.serve.metrics import Metrics
from tribe.serve.ownership import Served
from tribe.streams import Fleet

NAMES = {  # of numbers in answers and descriptions: the field of `tribe.health.Health`
    "accuracy": "accuracy",
    "accuracy_low": "low",
    "accuracy_high": "high",
    "accuracy_overall": "overall",
    "source_agreement": "source_agreement",
    "held": "held",
    "returned": "returned",
}
HELD = "the guard lets it learn nothing from such frames"
RETURNED = "something had gone wrong, and the guard returned it to its last good state"


def plain(health: Health | None) -> dict[str, Any]:
    """What is known of a stream's health, by name; what is not known is left out."""
    if health is None:
        return {}
    numbers = {name: getattr(health, field) for name, field in NAMES.items()}
    return {name: value for name, value in numbers.items() if value is not None} | {"alarms": list(health.alarms)}


class Conditions:
    """Keeps the condition of every stream, and says what changes in it.

    Args:
        fleet: what judges its streams, if it is guarded or watched.
        events: where to say it.
        metrics: where alarms are counted.
    """

    def __init__(self, fleet: Fleet, events: Events, metrics: Metrics) -> None:
        self._fleet, self._events, self._metrics = fleet, events, metrics
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Hear the fleet's alarms, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._fleet.listeners.append(self._from_thread)

    def stop(self) -> None:
        """Hear no more of them."""
        if self._loop is not None:
            self._fleet.listeners.remove(self._from_thread)
            self._loop = None

    def _from_thread(self, event: Event) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begins, event)

    def _begins(self, event: Event) -> None:
        self._metrics.alarm_began(event.kind)
        numbers = {"image": event.image, "since": event.since} | event.numbers
        level = logging.DEBUG  # the log tribe.health has it, with the same parts
        self._events.add(f"alarm-{event.kind}", event.words, str(event.stream), level, **numbers)

    def note(self, served: Served, now: dict[str, Any]) -> None:
        """A stream was stepped: keep its condition, and say what the guard did and which alarms are over."""
        before, served.condition = served.condition, now
        if not now:
            return
        for kind in before.get("alarms", ()):
            if kind not in now["alarms"]:
                self._events.add(f"over-{kind}", f"the alarm is over: {kind}", served.name)
        held = now["held"] - before.get("held", 0)
        if held > 0:
            self._metrics.held.inc(held)
            if not served.holding:
                self._events.add("guard-held", _held(now), served.name, logging.WARNING, held=now["held"])
        served.holding = held > 0
        returned = now["returned"] - before.get("returned", 0)
        if returned > 0:
            self._metrics.returned.inc(returned)
            self._events.add("guard-returned", RETURNED, served.name, logging.WARNING, returned=now["returned"])

    @staticmethod
    def alarms(streams: Iterable[Served]) -> dict[str, int]:
        """How many streams have each alarm now."""
        known = [served.condition for served in streams if served.condition]
        return Tally(kind for condition in known for kind in condition["alarms"])


def _held(condition: dict[str, Any]) -> str:
    alarms = ", ".join(condition["alarms"])
    return f"{HELD}{f' ({alarms})' if alarms else ''}; predictions go on"
