"""What the model's threads do: step or predict a batch of requests. A request that fails does not harm the others."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tribe.serve.scheduler import Job


class FleetLike(Protocol):
    """What a worker needs of a fleet; the one of `tribe` has it."""

    @property
    def names(self) -> Any:
        """The streams that it has."""

    def __call__(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Predict, then adapt, the streams that have images."""

    def predict(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Predict with the last states; never waits for a step."""

    def predict_source(self, x: Tensor) -> Tensor:
        """Predict with the source model."""

    def info(self, name: str) -> Any:
        """What a stream does, a `StreamInfo`."""

    def add(self, name: str) -> Any:
        """Add a stream that starts at the source."""

    def drop(self, name: str) -> Any:
        """Forget a stream."""

    def reset(self, name: str) -> Any:
        """Return a stream to the source."""

    def freeze(self, name: str) -> Any:
        """Stop adapting a stream."""

    def unfreeze(self, name: str) -> Any:
        """Adapt a stream again."""

    def snapshot(self, name: str) -> Any:
        """A copy of a stream's state."""

    def restore(self, name: str, snapshot: Any) -> Any:
        """Return a stream to a copy."""

    def to_bytes(self, name: str) -> bytes:
        """The state file of a stream."""

    def from_bytes(self, name: str, data: bytes) -> Any:
        """Add a stream with the state of a file, or replace its state."""


class Result(NamedTuple):
    """What came of one request."""

    logits: Tensor | None = None
    clock: int | None = None
    health: dict[str, Any] | None = None
    error: Exception | None = None


def step(fleet: FleetLike, jobs: list[Job]) -> list[Result]:
    """Step the streams of these requests together; if that fails, one by one, so that only the culprit fails."""
    return _isolated(_step, fleet, jobs)


def predict(fleet: FleetLike, jobs: list[Job]) -> list[Result]:
    """Predict these requests together, at most one of a stream; if that fails, one by one."""
    return _isolated(_predict, fleet, jobs)


def _isolated(run: Callable[[FleetLike, list[Job]], list[Result]], fleet: FleetLike, jobs: list[Job]) -> list[Result]:
    try:
        return run(fleet, jobs)
    except Exception as error:
        if len(jobs) == 1:
            return [Result(error=error)]
    return [_isolated(run, fleet, [job])[0] for job in jobs]


def _step(fleet: FleetLike, jobs: list[Job]) -> list[Result]:
    logits = fleet({_name(job): job.images for job in jobs})
    return [Result(logits[name], *_report(fleet, name)) for name in map(_name, jobs)]


def _predict(fleet: FleetLike, jobs: list[Job]) -> list[Result]:
    results: dict[Job, Result] = {}
    own = {_name(job): job for job in jobs if job.stream is not None and not job.source}
    if own:
        reports = {name: _report(fleet, name) for name in own}  # before: a step may end meanwhile
        logits = fleet.predict({name: job.images for name, job in own.items()})
        results |= {job: Result(logits[name], *reports[name]) for name, job in own.items()}
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        if job not in results:
            groups.setdefault((job.images.shape[1:], job.images.dtype), []).append(job)
    for group in groups.values():
        together = fleet.predict_source(torch.cat([job.images for job in group]))
        for job, logits_of_job in zip(group, together.split([job.size for job in group]), strict=True):
            results[job] = Result(logits_of_job)
    return [results[job] for job in jobs]


def _report(fleet: FleetLike, name: str) -> tuple[int, dict[str, Any]]:
    known = describe(fleet, name)
    return known["steps"], known


def describe(fleet: FleetLike, name: str) -> dict[str, Any]:
    """What a stream does, in plain numbers by name."""
    known: dict[str, Any] = fleet.info(name)._asdict()
    return known


def _name(job: Job) -> str:
    assert job.stream is not None
    return job.stream
