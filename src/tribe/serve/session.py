"""A stream that a worker answers for: who owns it, and how much of its learning is stored. No threads, no store."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tribe.serve.store import Claim

Role = Literal["owned", "followed", "unreachable"]
Mark = tuple[int, int, float | None]  # generation, clock and time of a stored state, which identify it


@dataclass(eq=False)
class StreamSession:
    """A stream that this worker answers for."""

    name: str
    role: Role
    used: float  # when the last request came
    claim: Claim | None = None
    learn_until: float = float("inf")  # by the worker's clock: from then on the lease may have ended
    mark: Mark | None = None  # of the stored state that a follower has
    looked_up: float | None = None  # when the store was last asked
    loaded: bool = True  # whether the fleet has a state of it; without one the source model predicts
    recent: dict[str, None] = field(default_factory=dict)  # ids of the last requests that its state has learned
    clock: int = 0  # steps that its state has taken
    report: dict[str, Any] = field(default_factory=dict)  # after the last step; see `execution.read_reports`
    dirty_since: float | None = None  # when the oldest step was taken that no write has begun to store
    writing_since: float | None = None  # the same of the write that runs
    unstorable: str | None = None  # why its state cannot be stored
    snapshots: list[Any] = field(default_factory=list)  # for rollback; see `controls.SessionSnapshot`
    images: int = 0  # images that came since it was opened
    holding: bool = False  # whether the guard let it learn nothing in the last step

    @property
    def generation(self) -> int | None:
        """The generation of the claim, or of the state that a follower has."""
        if self.claim is not None:
            return self.claim.generation
        return None if self.mark is None else self.mark[0]

    @property
    def frozen(self) -> bool:
        """Return whether it only predicts."""
        return bool(self.report.get("frozen"))

    @property
    def changed(self) -> bool:
        """Return whether some of its learning is not stored yet."""
        return self.dirty_since is not None or self.writing_since is not None

    def lag(self, now: float) -> float:
        """Return the age of the oldest step that is not stored."""
        times = [since for since in (self.dirty_since, self.writing_since) if since is not None]
        return now - min(times) if times else 0.0

    def touch(self, now: float) -> None:
        """Note that the state has changed and must be written."""
        if self.dirty_since is None:
            self.dirty_since = now

    def note_report(self, report: dict[str, Any]) -> None:
        """Replace the report, and the clock that it contains."""
        self.report, self.clock = report, report.get("steps", self.clock)

    def note_learned(self, request_id: str | None, most: int) -> None:
        """Add the id of a learned request to the recent ones, of which there are at most ``most``."""
        if request_id is None:
            return
        self.recent.pop(request_id, None)
        self.recent[request_id] = None
        while len(self.recent) > most:
            del self.recent[next(iter(self.recent))]

    def renewed(self, claim: Claim, asked: float, lease: float, margin: float) -> None:
        """Note that the store has confirmed the claim; it was asked at ``asked`` by this worker's clock."""
        self.claim, self.role, self.learn_until = claim, "owned", asked + lease - margin

    def lost(self) -> None:
        """Note that the claim may not be used any more."""
        self.claim, self.learn_until = None, float("-inf")
