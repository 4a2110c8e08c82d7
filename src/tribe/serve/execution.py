"""Step or predict a batch of requests, in a thread. A request that fails does not affect the others."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.health import Health
from tribe.serve.scheduler import Job
from tribe.streams import Fleet

log = logging.getLogger("tribe.serve")

HEALTH = {  # name in answers and descriptions -> field of `tribe.health.Health`
    "accuracy": "accuracy",
    "accuracy_low": "low",
    "accuracy_high": "high",
    "accuracy_overall": "overall",
    "source_agreement": "source_agreement",
    "held": "held",
    "returned": "returned",
}


class InferResult(NamedTuple):
    """The answer to a request."""

    logits: Tensor  # of each image, (B, K); probabilities for methods that return those
    adapted: bool = False  # whether the stream has learned from these images; it may learn from them later
    clock: int | None = None  # steps that the state has taken which predicted, or after the step; None: no stream
    generation: int | None = None  # how often the stream has been claimed; None without a store
    health: dict[str, Any] | None = None  # the report of the stream, see `read_reports`; None: no stream


Outcome = InferResult | Exception


def step(fleet: Fleet, jobs: list[Job]) -> list[Outcome]:
    """Step the streams of these requests together; if that fails, one by one, so that only the culprit fails.

    The steps of a result are committed: a report that cannot be read is logged, and is not an error of the request.
    """
    outcomes = _isolated(_step, fleet, jobs)
    stepped = [_name(job) for job, outcome in zip(jobs, outcomes, strict=True) if isinstance(outcome, InferResult)]
    reports = _reports_after_step(fleet, stepped)
    for i, (job, outcome) in enumerate(zip(jobs, outcomes, strict=True)):
        if isinstance(outcome, InferResult):
            report = reports.get(_name(job), {})
            outcomes[i] = outcome._replace(clock=report.get("steps"), health=report)
    return outcomes


def predict(fleet: Fleet, jobs: list[Job]) -> list[Outcome]:
    """Predict these requests together, at most one of a stream; if that fails, one by one."""
    return _isolated(_predict, fleet, jobs)


def _isolated(run: Callable[[Fleet, list[Job]], Sequence[InferResult]], fleet: Fleet, jobs: list[Job]) -> list[Outcome]:
    try:
        return list(run(fleet, jobs))
    except Exception as error:
        if len(jobs) == 1:
            return [error]
    return [_isolated(run, fleet, [job])[0] for job in jobs]


def _step(fleet: Fleet, jobs: list[Job]) -> list[InferResult]:
    logits = fleet({_name(job): job.images for job in jobs})
    return [InferResult(logits[_name(job)]) for job in jobs]


def _predict(fleet: Fleet, jobs: list[Job]) -> list[InferResult]:
    results: dict[Job, InferResult] = {}
    of_streams = {_name(job): job for job in jobs if job.stream is not None and not job.source}
    if of_streams:
        infos = fleet.info_many(of_streams)  # before the prediction: a step may end meanwhile
        logits = fleet.predict({name: job.images for name, job in of_streams.items()})
        for name, job in of_streams.items():
            results[job] = InferResult(logits[name], clock=infos[name].steps, health=infos[name]._asdict())
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        if job not in results:
            groups.setdefault((job.images.shape[1:], job.images.dtype), []).append(job)
    for group in groups.values():
        together = fleet.predict_source(torch.cat([job.images for job in group]))
        for job, own in zip(group, together.split([job.size for job in group]), strict=True):
            results[job] = InferResult(own)
    return [results[job] for job in jobs]


def read_reports(fleet: Fleet, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what each stream reports, in plain numbers by name; estimates that do not exist are left out."""
    reports = fleet.report_many(names)
    return {name: report.info._asdict() | _plain(report.health) for name, report in reports.items()}


def _plain(health: Health | None) -> dict[str, Any]:
    if health is None:
        return {}
    numbers = {name: getattr(health, field) for name, field in HEALTH.items()}
    return {name: value for name, value in numbers.items() if value is not None} | {"alarms": list(health.alarms)}


def _reports_after_step(fleet: Fleet, names: list[str]) -> dict[str, dict[str, Any]]:
    try:
        fleet.look(names)
        return read_reports(fleet, names)
    except Exception:
        if len(names) == 1:
            log.exception("stream %r was stepped, and its report could not be read", names[0])
            return {}
    return {name: report for each in names for name, report in _reports_after_step(fleet, [each]).items()}


def _name(job: Job) -> str:
    assert job.stream is not None
    return job.stream
