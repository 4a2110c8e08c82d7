"""What a worker says of itself: a description of each stream, and the metrics."""

import contextlib
from typing import Any

from tribe.serve import execution
from tribe.serve.condition import Conditions
from tribe.serve.errors import UnknownStream
from tribe.serve.keeper import Keeper
from tribe.serve.metrics import Metrics
from tribe.serve.ownership import Served
from tribe.serve.scheduler import Scheduler

STATES = ("learning", "frozen", "followed", "unreachable", "lease", "lag")


class Watch:
    """Reads what a worker knows, and changes nothing."""

    def __init__(self, keeper: Keeper, scheduler: Scheduler, metrics: Metrics, conditions: Conditions) -> None:
        self.keeper, self.scheduler, self.metrics, self.conditions = keeper, scheduler, metrics, conditions

    def streams(self) -> list[dict[str, Any]]:
        """What is known of all streams."""
        return [self.describe(served) for served in self.keeper.streams.values()]

    def stream(self, name: str) -> dict[str, Any]:
        """What is known of one stream."""
        served = self.keeper.streams.get(name)
        if served is None:
            raise UnknownStream(f"there is no stream {name!r} here: its first request makes it")
        return self.describe(served)

    def describe(self, served: Served) -> dict[str, Any]:
        """What the state reports, and what the worker knows."""
        keeper, now, line = self.keeper, self.keeper.clock(), self.scheduler.lines.get(served.name)
        known = {
            "name": served.name,
            "state": self.state(served),
            "clock": served.clock,
            "generation": served.generation,
            "received": served.images,
            "owner": keeper.owner if served.role == "owned" else None,
            "lag": self.lag(served, now),
            "queued": 0 if line is None else len(line.jobs),
            "idle": now - served.used,
            "snapshots": [kept.clock for kept in served.snapshots],
        }
        known = served.condition | known
        with contextlib.suppress(LookupError):  # dropped from the fleet at this moment
            known = (execution.describe(keeper.fleet, served.name) if served.loaded else {}) | known
        return known

    def lag(self, served: Served, now: float) -> float:
        """How old the oldest step is that is not stored; 0 without a store, which stores nothing."""
        return 0.0 if self.keeper.store is None else served.lag(now)

    def state(self, served: Served) -> str:
        """One word: learning, frozen, followed, unreachable, or why it does not learn (lease, lag)."""
        if served.role != "owned":
            return served.role
        return "frozen" if served.frozen else self.keeper.blocked(served.name) or "learning"

    def metrics_text(self, streams: bool) -> str:
        """What was counted, and what is known now, as Prometheus reads it."""
        now, scheduler, keeper = self.keeper.clock(), self.scheduler, self.keeper
        lag = max((self.lag(served, now) for served in keeper.streams.values()), default=0.0)
        states = dict.fromkeys(STATES, 0.0)
        for served in keeper.streams.values():
            state = self.state(served)
            states[state] = states.get(state, 0.0) + 1
        alarms = self.conditions.alarms(keeper.streams.values())
        gauge, dropped = self.metrics.gauge, "Requests that were answered and never learned, by reason."
        found = [
            gauge("nv_inference_pending_request_count", "Requests without an answer.", scheduler.waiting),
            gauge("tribe_streams", "Streams by state.", states, "state"),
            gauge("tribe_learning_backlog", "Requests that were answered and not learned yet.", len(scheduler.backlog)),
            gauge("tribe_learning_backlog_bytes", "Bytes of their images.", scheduler.backlog_bytes),
            gauge("tribe_persist_lag_seconds", "Age of the oldest step that is not stored.", lag),
            gauge("tribe_alarms", "Streams that have an alarm now.", alarms, "kind"),
            self.metrics.counter("tribe_learning_dropped_total", dropped, scheduler.dropped, "reason"),
        ]
        if streams:
            some = list(keeper.streams.values())[: keeper.policy.stream_metrics]
            found += self.metrics.stream_gauges({served.name: self.describe(served) for served in some})
        return self.metrics.text(found)
