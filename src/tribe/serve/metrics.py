"""Events and Prometheus metrics of one worker, for operators; metrics have Triton's names where there are any."""

import asyncio
import logging
import time
from collections import Counter as TallyOfVersions
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tribe.fields import printable

log = logging.getLogger("tribe.serve")

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # upper ends of buckets
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
ANSWERED = ("adapted", "unchanged", "predicted", "shadow", "source")  # outcomes of requests that were answered
REASONS = {"refused": "REJECTED", "canceled": "CANCELED", "failed": "BACKEND"}  # of the others: Triton's reasons
COMMON = ("model", "version")  # labels of every metric of a worker
STREAM_GAUGES = {  # entries of the description of a stream -> the help text of tribe_stream_NAME
    "clock": "Steps that the stream has taken.",
    "lag": "Seconds of learning that are not stored.",
    "images": "Images learned from so far.",
    "skipped": "Images that were not finite, or whose output was not; they changed nothing.",
    "trusted": "Share of the last batch that was trusted; 1 for methods that do not select images.",
    "entropy": "Mean entropy of the last predictions, as a share of log K: 0 is certain, 1 is uniform.",
    "distance": "Distance of the adapted affine parameters from the source's, relative to the norm of these.",
    "accuracy": "Estimated accuracy of the last 500 images; with a calibration.",
    "accuracy_low": "Lower end of its 90 % interval.",
    "accuracy_high": "Upper end of its 90 % interval.",
    "accuracy_familiar": "0 if calibration saw no such images: the accuracy is not known.",
    "accuracy_overall": "Estimated accuracy of the whole stream; with a calibration.",
    "source_accuracy": "Estimated accuracy of the source model on the last 500 images; with a calibration.",
    "source_accuracy_low": "Lower end of its 90 % interval.",
    "source_accuracy_high": "Upper end of its 90 % interval.",
    "source_agreement": "Share of the last images on which the source model agrees.",
    "shadow": "1 if the stream is in shadow: the source model answers.",
    "differ": "Share of the last images that source and adapted model answer differently.",
    "held": "Images that the guard excluded from learning.",
    "returned": "How often the guard returned the stream to its last good state.",
    "alarms": "Alarms that are on now.",
}


class Metrics:
    """Counters and histograms of one worker; ``model`` and ``version``, the default one, are labels of all."""

    def __init__(self, model: str, version: str = "1") -> None:
        self.registry = CollectorRegistry()
        self._common = (model, version)
        self._labels = dict(zip(COMMON, self._common, strict=True))
        requests = self._counter("tribe_requests_total", "Requests by outcome.", "outcome")
        self.requests = {outcome: requests.labels(*self._common, outcome) for outcome in (*ANSWERED, *REASONS)}
        self.images = 0  # in requests that were answered
        self.version_images = TallyOfVersions[str]()  # the same, by version
        self._moves = self._counter("tribe_version_moves_total", "Moves of streams between versions.", "to", "by")
        self.queue_seconds = self._histogram("tribe_queue_seconds", "Time that requests waited for their batch.")
        self.request_seconds = self._histogram("tribe_request_seconds", "Time from arrival of a request to its answer.")
        self.step_seconds = self._histogram("tribe_step_seconds", "Duration of steps.")
        self.predict_seconds = self._histogram("tribe_predict_seconds", "Duration of predictions.")
        self.batch_streams = self._histogram("tribe_batch_streams", "Streams in a step.", COUNTS)
        self.writes = self._total("tribe_writes_total", "States that were stored.")
        self.write_bytes = self._total("tribe_write_bytes_total", "Bytes of states that were stored.")
        self.fenced = self._total("tribe_fenced_writes_total", "Refused writes: another worker owns the stream.")
        self.store_errors = self._total("tribe_store_errors_total", "Calls of the store that failed.")
        self.responses = Counter(
            "tribe_http_responses_total", "Answers over HTTP by status.", ["status"], registry=self.registry
        )
        self._alarms = self._counter("tribe_alarms_total", "Alarms that began, by kind.", "kind")
        demotions = self._counter("tribe_demotions_total", "Streams that went back to shadow.", "cause")
        self.demotions = {who: demotions.labels(*self._common, who) for who in ("person", "policy")}
        self.held = self._total("tribe_guard_held_images_total", "Images that the guard excluded from learning.")
        self.returned = self._total("tribe_guard_returns_total", "Returns of streams to a good state by the guard.")

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, (*COMMON, *labels), registry=self.registry)

    def _total(self, name: str, words: str) -> Counter:
        return self._counter(name, words).labels(*self._common)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, words, COMMON, buckets=buckets, registry=self.registry).labels(*self._common)

    def moved(self, to: str, by: str) -> None:
        """Count a move of a stream; ``by``: move, back, or auto for one that went back by itself."""
        self._moves.labels(*self._common, to, by).inc()

    def of_versions(self, streams: Mapping[str, int]) -> list[Metric]:
        """Return metrics of each version: its streams now, and the images that it answered."""
        metrics: list[Any] = []
        for name, words, kind, values in (
            ("tribe_version_streams", "Streams that are in this version.", GaugeMetricFamily, streams),
            (
                "tribe_version_images_total",
                "Images that this version answered.",
                CounterMetricFamily,
                self.version_images,
            ),
        ):
            metrics.append(kind(name, words, labels=COMMON))
            for version, number in values.items():
                metrics[-1].add_metric([self._common[0], version], number)
        return metrics

    def alarm_began(self, kind: str) -> None:
        """Count an alarm."""
        self._alarms.labels(*self._common, kind).inc()

    def read(
        self,
        name: str,
        words: str,
        values: Mapping[str, float] | float,
        label: str | None = None,
        kind: type[Metric] = GaugeMetricFamily,
    ) -> Metric:
        """Return a gauge, or a counter kept elsewhere, as it is now: a number, or one for each value of ``label``."""
        metric: Any = kind(name, words, labels=COMMON if label is None else (*COMMON, label))  # type: ignore[call-arg]
        for value, number in values.items() if isinstance(values, Mapping) else [(None, values)]:
            metric.add_metric([*self._common, *([] if value is None else [value])], number)
        return cast(Metric, metric)

    def stream_gauges(self, streams: Mapping[str, Mapping[str, Any]]) -> list[Metric]:
        """Return the gauges of single streams, from the description of each."""
        metrics = []
        for name, words in STREAM_GAUGES.items():
            found = {stream: facts[name] for stream, facts in streams.items() if name in facts}
            if found:
                numbers = {stream: len(value) if isinstance(value, list) else value for stream, value in found.items()}
                unit = "_seconds" if name == "lag" else ""
                metrics.append(self.read(f"tribe_stream_{name}{unit}", words, numbers, "stream"))
        return metrics

    def total(self, name: str, **labels: str) -> float:
        """Return the value of a sample, such as ``total("tribe_requests_total", outcome="adapted")``."""
        value = self.registry.get_sample_value(name, self._labels | labels)
        return 0.0 if value is None else value

    def text(self, now: Iterable[Metric] = ()) -> str:
        """Return all metrics as Prometheus reads them; ``now`` are those that are read at this moment."""
        readings: Any = SimpleNamespace(collect=lambda: [*self._triton(), *now])
        return (generate_latest(self.registry) + generate_latest(readings)).decode()

    def _triton(self) -> list[Metric]:
        """Return Triton's metrics. They have no type: prometheus_client would append _total to names of counters."""
        sums = {name: 1e6 * self.total(f"tribe_{name}_seconds_sum") for name in ("request", "queue", "step", "predict")}
        batches = sum(self.total(f"tribe_{name}_seconds_count") for name in ("step", "predict"))
        answered = sum(self.total("tribe_requests_total", outcome=name) for name in ANSWERED)
        failed = {reason: self.total("tribe_requests_total", outcome=name) for name, reason in REASONS.items()}
        metrics = []
        for name, words, value in (
            ("request_success", "Requests that were answered.", answered),
            ("request_failure", "Requests that were not answered, by reason.", failed),
            ("count", "Images in requests that were answered.", self.images),
            ("exec_count", "Batches that the model ran: steps and predictions.", batches),
            ("request_duration_us", "Total time of requests, in microseconds.", sums["request"]),
            ("queue_duration_us", "Total time that requests waited, in microseconds.", sums["queue"]),
            ("compute_infer_duration_us", "Total time of batches, in microseconds.", sums["step"] + sums["predict"]),
        ):
            metrics.append(metric := Metric(f"nv_inference_{name}", words, "unknown"))
            for reason, number in value.items() if isinstance(value, dict) else ((None, value),):
                labels = self._labels if reason is None else self._labels | {"reason": reason}
                metric.add_sample(metric.name, labels, number)
        return metrics


class ServeEvent(NamedTuple):
    """An event for operators."""

    time: float  # seconds since 1970
    stream: str | None  # the stream it happened to; None: the worker
    kind: str  # a name for programs, such as opened, fenced, store-down
    words: str  # what happened and what it means, for people
    numbers: dict[str, float]  # numbers that belong to it


class Events:
    """The last events, at most ``keep``, and queues of subscribers, as long. Used on the event loop only."""

    def __init__(self, keep: int) -> None:
        self.kept: deque[ServeEvent] = deque(maxlen=keep)
        self._subscribers: list[tuple[deque[ServeEvent], asyncio.Event]] = []
        self._closed = False

    def add(
        self,
        kind: str,
        words: str,
        stream: str | None = None,
        level: int = logging.INFO,
        error: object = None,
        **numbers: float,
    ) -> None:
        """Add an event to the log, send it to every subscriber, and log it with its parts as attributes.

        ``error`` is for the server's log alone: it may tell what clients should not know.
        """
        event = ServeEvent(time.time(), stream, kind, words, numbers)
        self.kept.append(event)
        for queue, arrived in self._subscribers:
            queue.append(event)  # a subscriber that is too slow loses its oldest
            arrived.set()
        extra: dict[str, Any] = {"stream": stream, "kind": kind, "numbers": numbers}
        whose, why = f"{printable(stream)}: " if stream is not None else "", "" if error is None else f" ({error})"
        log.log(level, "%s%s%s", whose, words, printable(why), extra=extra)

    def close(self) -> None:
        """End all subscriptions."""
        self._closed = True
        for _, arrived in self._subscribers:
            arrived.set()

    async def listen(self, heartbeat: float | None = None) -> AsyncIterator[ServeEvent | None]:
        """Yield the events of the log, then every new one until `close`; None after ``heartbeat`` seconds without."""
        subscriber = queue, arrived = deque(self.kept, maxlen=self.kept.maxlen), asyncio.Event()
        self._subscribers.append(subscriber)
        try:
            while True:
                arrived.clear()
                while queue:
                    yield queue.popleft()
                if self._closed:
                    return
                try:
                    async with asyncio.timeout(heartbeat):
                        await arrived.wait()
                except TimeoutError:
                    yield None
        finally:
            self._subscribers.remove(subscriber)
