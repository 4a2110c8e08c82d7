"""Which streams this worker may teach: claims, leases by its own clock, and what it knows of streams that others own.

The functions that call the store block, and run in a thread. Everything else is bookkeeping on the event loop.
"""

import math
import os
import secrets
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tribe.serve.store.protocol import Claim, Store, Stored, StoreDamaged

Role = Literal["owned", "followed", "unreachable"]
Mark = tuple[int, int, float | None]  # generation, clock and time of a stored state: another one, another state


def new_owner() -> str:
    """A name for one start of one process: a restarted worker must not be taken for the one before it."""
    return f"{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(4)}"


class Kept(NamedTuple):
    """A copy of a stream's state for rollback, and what belongs to it."""

    clock: int
    snapshot: Any
    requests: tuple[str, ...]  # ids of the last requests that it has learned


@dataclass(eq=False)
class Served:
    """A stream that this worker answers for."""

    name: str
    role: Role
    used: float  # when the last request came
    claim: Claim | None = None
    learn_until: float = math.inf  # by the worker's clock: from then on the lease may have ended
    mark: Mark | None = None  # of the stored state that a follower has
    checked: float = -math.inf  # when the store was last asked
    loaded: bool = True  # whether the fleet has a state of it; without one the source model predicts
    frozen: bool = False
    recent: dict[str, None] = field(default_factory=dict)  # ids of the last requests that its state has learned
    clock: int = 0
    dirty_since: float | None = None  # when the oldest step was taken that no write has begun to store
    writing_since: float | None = None  # the same of the write that runs
    unstorable: str | None = None  # why its state cannot be stored
    learned_at: float = 0.0  # wall clock of the last step, stored with the state
    snapshots: deque[Kept] = field(default_factory=deque)
    images: int = 0  # images that came since it was opened
    condition: dict[str, Any] = field(default_factory=dict)  # its health after the last step; see condition.py
    holding: bool = False  # whether the guard let it learn nothing in the last step

    @property
    def generation(self) -> int | None:
        """That of the claim, or of the state that a follower has."""
        if self.claim is not None:
            return self.claim.generation
        return None if self.mark is None else self.mark[0]

    def lag(self, now: float) -> float:
        """How old the oldest step is that is not stored."""
        times = [since for since in (self.dirty_since, self.writing_since) if since is not None]
        return now - min(times) if times else 0.0

    @property
    def changed(self) -> bool:
        """Whether something of it is not stored yet."""
        return self.dirty_since is not None or self.writing_since is not None

    def touch(self, now: float) -> None:
        """Note that the state has changed and must be written."""
        if self.dirty_since is None:
            self.dirty_since = now

    def note_learned(self, request_id: str | None, keep: int) -> None:
        """Keep the id of a learned request, and of the ones before it the last."""
        if request_id is None:
            return
        self.recent.pop(request_id, None)
        self.recent[request_id] = None
        while len(self.recent) > keep:
            del self.recent[next(iter(self.recent))]

    def renewed(self, claim: Claim, asked: float, lease: float, margin: float) -> None:
        """The store has confirmed the claim; it was asked at ``asked`` by this worker's clock."""
        self.claim, self.role, self.learn_until = claim, "owned", asked + lease - margin


class Found(NamedTuple):
    """What the store says of a stream: this worker's claim, or the mark of another's state; a state if it is new."""

    claim: Claim | None
    stored: Stored | None
    mark: Mark | None
    damaged: str | None = None  # why the last state could not be used, and the one before it was


def look_up(store: Store, stream: str, owner: str, lease: float, mark: Mark | None = None) -> Found:
    """Claim a stream and read its state; if another worker owns it, read that one's last state unless it is known."""
    entry = store.entry(stream)
    if entry is None or not entry.held or entry.owner == owner:
        claim = store.claim(stream, owner, lease)
        if claim is not None:
            stored, damaged = read_intact(store, stream)
            return Found(claim, stored, None, damaged)
        entry = store.entry(stream)
    new = None if entry is None else (entry.generation, entry.clock, entry.written)
    if entry is None or entry.written is None or new == mark:
        return Found(None, None, new)
    stored, damaged = read_intact(store, stream)
    return Found(None, stored, new, damaged)


def read_intact(store: Store, stream: str) -> tuple[Stored | None, str | None]:
    """The last state, or the one before it if the last one is damaged; and the words about the damage."""
    try:
        return store.read(stream), None
    except StoreDamaged as error:
        return store.read(stream, previous=True), str(error)


def new_generation(store: Store, claim: Claim, lease: float) -> Claim | None:
    """End a claim and claim the stream again, so that an earlier state may be stored; None: another worker has it."""
    store.release(claim)
    return store.claim(claim.stream, claim.owner, lease)
