"""Batches of requests: stepped and predicted in a thread, those of each version of the network together."""

from typing import Any, Literal

import torch

from tribe.serve.jobs import Job
from tribe.serve.protocol import InferResult
from tribe.serve.runtime import AfterCommit, facts_of
from tribe.serve.versions import Versions
from tribe.streams import Fleet

Outcome = InferResult | Exception


def step_versions(versions: Versions, jobs: list[Job], after: AfterCommit) -> list[Outcome]:
    """Step the streams of these requests, those of each version together.

    A stream may have moved since its request came: a version that the request names then only predicts.
    """
    results: dict[Job, Outcome] = {}
    for version, fleet, some, source in versions.groups(jobs):
        outcomes = predict(fleet, some, source) if source else step(fleet, some, after)
        results |= zip(some, _of_version(outcomes, version), strict=True)
    return [results[job] for job in jobs]


def predict_versions(versions: Versions, jobs: list[Job]) -> list[Outcome]:
    """Predict these requests, at most one of a stream, those of each version together."""
    results: dict[Job, Outcome] = {}
    for version, fleet, some, source in versions.groups(jobs):
        results |= zip(some, _of_version(predict(fleet, some, source), version), strict=True)
    return [results[job] for job in jobs]


def _of_version(outcomes: list[Outcome], version: str) -> list[Outcome]:
    return [each._replace(version=version) if isinstance(each, InferResult) else each for each in outcomes]


def step(fleet: Fleet, jobs: list[Job], after: AfterCommit) -> list[Outcome]:
    """Step the streams of these requests together; if that fails, one by one, so that only the culprit fails.

    The steps of a result are committed: the request does not fail if a report cannot be read.
    """
    try:
        # The streams are held: no request promotes or demotes them before the step, which may demote them after it.
        answered = {str(job.stream): who_answers(fleet.in_shadow(str(job.stream))) for job in jobs}
        logits = fleet({str(job.stream): job.images for job in jobs})
    except Exception as error:
        return [error] if len(jobs) == 1 else [step(fleet, [job], after)[0] for job in jobs]
    reports = after.reports(fleet, logits, look=True)
    return [
        InferResult(logits[name], clock=reports[name].get("steps"), health=reports[name], answered=answered[name])
        for name in logits
    ]


def predict(fleet: Fleet, jobs: list[Job], source: bool = False) -> list[Outcome]:
    """Predict these requests together, at most one of a stream; if that fails, one by one.

    ``source``: with the source model, also for streams that have a state.
    """
    results: dict[Job, InferResult] = {}
    by_source = {job: source or job.source or job.stream is None for job in jobs}
    of_streams = {str(job.stream): job for job in jobs if not by_source[job]}
    of_source: dict[Any, list[Job]] = {}
    for job in jobs:
        if by_source[job]:
            of_source.setdefault((job.images.shape[1:], job.images.dtype), []).append(job)
    try:
        if of_streams:
            infos = fleet.info_many(of_streams)  # before the prediction: a step may end meanwhile
            shadow = {name: info.shadow for name, info in infos.items()}  # which may change meanwhile, too
            logits = fleet.predict({name: job.images for name, job in of_streams.items()}, shadow=shadow)
            for name, job in of_streams.items():
                clock, facts, answered = infos[name].steps, facts_of(infos[name]), who_answers(shadow[name])
                results[job] = InferResult(logits[name], clock=clock, health=facts, answered=answered)
        for group in of_source.values():
            together = fleet.predict_source(torch.cat([job.images for job in group]))
            for job, own in zip(group, together.split([job.size for job in group]), strict=True):
                results[job] = InferResult(own, answered="source")
    except Exception as error:
        return [error] if len(jobs) == 1 else [predict(fleet, [job], source)[0] for job in jobs]
    return [results[job] for job in jobs]


def who_answers(shadow: bool) -> Literal["adapted", "source"]:
    """Return which model answers for a stream that is in shadow or not."""
    return "source" if shadow else "adapted"


def is_shadowed(outcome: Outcome) -> bool:
    """Return whether the source has answered a request."""
    return isinstance(outcome, InferResult) and outcome.answered == "source"
