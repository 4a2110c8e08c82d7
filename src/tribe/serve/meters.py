"""The metrics of a worker. Where Triton has an equivalent, it goes by Triton's name."""

from collections.abc import Iterable, Mapping
from typing import Any

from tribe.health.snapshots import StreamInfo
from tribe.health.watch import Health
from tribe.serve.condition import NAMES
from tribe.serve.exposition import COUNTS, Counter, Histogram, Labels, exposition, gauge

REPORTED = ("images", "skipped", "trusted", "entropy", "distance")  # gauges of one stream: what its state reports
WATCHED = {  # if it is guarded or watched
    **{name: str(getattr(Health, field).__doc__) for name, field in NAMES.items()},
    "alarms": "How many alarms are on now.",
}


class Meters:
    """What a worker counts while it serves; `text` adds what it knows at the moment of asking."""

    def __init__(self, model: str) -> None:
        self.common: Labels = (("model", model), ("version", "1"))
        self.success = Counter("nv_inference_request_success", "Requests that were answered.")
        self.failure = Counter("nv_inference_request_failure", "Requests that were not answered, by reason.")
        self.inferences = Counter("nv_inference_count", "Images in requests that were answered.")
        self.executions = Counter("nv_inference_exec_count", "Batches that the model ran: steps and predictions.")
        self.request_us = Counter("nv_inference_request_duration_us", "Total time of requests, in microseconds.")
        self.queue_us = Counter("nv_inference_queue_duration_us", "Total time that requests waited, in microseconds.")
        self.compute_us = Counter("nv_inference_compute_infer_duration_us", "Total time of batches, in microseconds.")
        self.requests = Counter("tribe_requests_total", "Requests by outcome.")
        self.queue = Histogram("tribe_queue_seconds", "How long requests waited for their batch.")
        self.request = Histogram("tribe_request_seconds", "How long requests took, from arrival to answer.")
        self.step = Histogram("tribe_step_seconds", "How long steps took.")
        self.predict = Histogram("tribe_predict_seconds", "How long predictions took.")
        self.batch = Histogram("tribe_batch_streams", "Streams in a step.", COUNTS)

    def answered(self, outcome: str, images: int, arrived: float, launched: float, now: float) -> None:
        """Count a request that got its answer."""
        self.success.add()
        self.inferences.add(images)
        self.requests.add(outcome=outcome)
        self.request_us.add(1e6 * (now - arrived))
        self.queue_us.add(1e6 * (launched - arrived))
        self.request.observe(now - arrived)
        self.queue.observe(launched - arrived)

    def refused(self, outcome: str, reason: str) -> None:
        """Count a request that got none; ``reason`` is one of Triton's: REJECTED, CANCELED, BACKEND or OTHER."""
        self.failure.add(reason=reason)
        self.requests.add(outcome=outcome)

    def ran(self, histogram: Histogram, seconds: float) -> None:
        """Count a batch."""
        self.executions.add()
        self.compute_us.add(1e6 * seconds)
        histogram.observe(seconds)

    def text(self, now: Iterable[Counter | Histogram]) -> str:
        """All metrics as Prometheus reads them."""
        return exposition([*(m for m in vars(self).values() if isinstance(m, Counter | Histogram)), *now], self.common)


def stream_gauges(streams: Mapping[str, Mapping[str, Any]]) -> list[Counter]:
    """Gauges of single streams, from what is known of each."""
    names = {"clock": "Steps that a stream has taken.", "lag": "Seconds of learning that are not stored."}
    names |= {name: str(getattr(StreamInfo, name).__doc__) for name in REPORTED} | WATCHED
    return [
        gauge(
            f"tribe_stream_{name}" + ("_seconds" if name == "lag" else ""),
            words,
            {(("stream", stream),): _number(known[name]) for stream, known in streams.items() if name in known},
        )
        for name, words in names.items()
        if any(name in known for known in streams.values())
    ]


def _number(value: Any) -> float:
    return float(len(value)) if isinstance(value, list) else float(value)
