"""What the model's threads do: step or predict a batch of requests. A request that fails does not harm the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.serve import condition
from tribe.serve.jobs import Job
from tribe.streams import Fleet


class Result(NamedTuple):
    """What came of one request."""

    logits: Tensor | None = None
    clock: int | None = None
    health: dict[str, Any] | None = None  # what the state reports
    condition: dict[str, Any] | None = None  # after a step: what a guarded or watched fleet found, see condition.py
    error: Exception | None = None


def step(fleet: Fleet, jobs: list[Job]) -> list[Result]:
    """Step the streams of these requests together; if that fails, one by one, so that only the culprit fails."""
    found = _isolated(_step, fleet, jobs)
    names = [_name(job) for job, result in zip(jobs, found, strict=True) if result.error is None]
    fleet.look(names)
    infos, healths = fleet.info_many(names), fleet.health_many(names)
    reports = {name: (infos[name].steps, infos[name]._asdict(), condition.plain(healths[name])) for name in names}
    return [
        result if result.error is not None else Result(result.logits, *reports[_name(job)])
        for job, result in zip(jobs, found, strict=True)
    ]


def predict(fleet: Fleet, jobs: list[Job]) -> list[Result]:
    """Predict these requests together, at most one of a stream; if that fails, one by one."""
    return _isolated(_predict, fleet, jobs)


def _isolated(run: Callable[[Fleet, list[Job]], list[Result]], fleet: Fleet, jobs: list[Job]) -> list[Result]:
    try:
        return run(fleet, jobs)
    except Exception as error:
        if len(jobs) == 1:
            return [Result(error=error)]
    return [_isolated(run, fleet, [job])[0] for job in jobs]


def _step(fleet: Fleet, jobs: list[Job]) -> list[Result]:
    logits = fleet({_name(job): job.images for job in jobs})
    return [Result(logits[_name(job)]) for job in jobs]


def _predict(fleet: Fleet, jobs: list[Job]) -> list[Result]:
    results: dict[Job, Result] = {}
    own = {_name(job): job for job in jobs if job.stream is not None and not job.source}
    if own:
        infos = fleet.info_many(own)  # before: a step may end meanwhile
        logits = fleet.predict({name: job.images for name, job in own.items()})
        results |= {job: Result(logits[name], infos[name].steps, infos[name]._asdict()) for name, job in own.items()}
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        if job not in results:
            groups.setdefault((job.images.shape[1:], job.images.dtype), []).append(job)
    for group in groups.values():
        together = fleet.predict_source(torch.cat([job.images for job in group]))
        for job, logits_of_job in zip(group, together.split([job.size for job in group]), strict=True):
            results[job] = Result(logits_of_job)
    return [results[job] for job in jobs]


def describe(fleet: Fleet, name: str) -> dict[str, Any]:
    """What a stream does, in plain numbers by name."""
    known: dict[str, Any] = fleet.info(name)._asdict()
    return known


def _name(job: Job) -> str:
    assert job.stream is not None
    return job.stream
