"""A state machine draws what owners, crashes, pauses and clocks do to a store, and compares it with a model in memory.

A paused owner is a write in two halves: its blob is there, and the ledger does not name it yet. Anything may happen
between the halves.
"""

import contextlib
import json
import shutil
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from stores import KINDS, Clock, fast_folder, open_kind
from tribe.serve.store import Claim, ClockFell, Fenced, Stored, Write, stream_hash
from tribe.serve.store.blobs import BLOB
from tribe.serve.store.sqlite import SqliteStore

STREAMS, OWNERS = st.sampled_from(("gate", "yard:2")), st.sampled_from(("a", "b", "c"))
LEASES = st.sampled_from((1.0, 5.0, 10.0))


@dataclass
class Model:
    """The stream as it should be."""

    owner: str | None = None
    generation: int = 0
    expires: float = 0.0
    deleted: bool = True  # also if it was never claimed
    current: Stored | None = None
    previous: Stored | None = None

    def is_held(self, now):
        return self.owner is not None and now < self.expires

    def is_current(self, claim):
        return (self.owner, self.generation) == (claim.owner, claim.generation)

    def accepts(self, state):
        """Whether a state's clock does not fall within its generation."""
        old = self.current
        return old is None or old.generation != state.generation or state.clock >= old.clock


class StoreMachine(RuleBasedStateMachine):
    """Owners, crashes, pauses and clocks."""

    kind, mutant = "", None
    claims, paused = Bundle("claims"), Bundle("paused")

    @initialize()
    def start(self):
        self.folder = fast_folder()
        self.clock, self.model, self.written = Clock(), {}, {}
        self.open = open_kind(self.kind, self.folder, self.clock, self.mutant)
        self.store = self.open()

    def teardown(self):
        self.store.close()
        try:
            self.open().close()  # removes what was left
            self.check_files()
        finally:
            shutil.rmtree(self.folder)

    def newest(self, claim):
        """The current claim of a claim's stream, if there is one: among all claims that ever were, it is rare."""
        model = self.of(claim.stream)
        return claim if model.owner is None else Claim(claim.stream, model.owner, model.generation, model.expires)

    def of(self, stream):
        return self.model.setdefault(stream, Model())

    # -- what owners do ------------------------------------------------------------------------------------------------

    @rule(target=claims, stream=STREAMS, owner=OWNERS, lease=LEASES)
    def claim(self, stream, owner, lease):
        model, now = self.of(stream), self.clock()
        found = self.store.claim(stream, owner, lease)
        if model.is_held(now) and model.owner != owner:
            assert found is None
            return multiple()
        if not model.is_held(now):
            model.generation += 1
        model.owner, model.expires, model.deleted = owner, now + lease, False
        assert found == Claim(stream, owner, model.generation, now + lease)
        return found

    @rule(claims=st.lists(claims, max_size=3), lease=LEASES)
    def renew(self, claims, lease):
        held = {claim.stream: claim for claim in claims if self.of(claim.stream).is_current(claim)}
        found = self.store.renew(claims, lease)
        assert found == {name: claim._replace(expires=self.clock() + lease) for name, claim in held.items()}
        for name in held:
            self.of(name).expires = self.clock() + lease

    @rule(claim=claims)
    def release(self, claim):
        self.store.release(claim)
        if (model := self.of(claim.stream)).is_current(claim):
            model.owner, model.expires = None, 0.0

    @rule(claim=claims, newest=st.booleans(), step=st.integers(-1, 2))
    def write(self, claim, newest, step):
        """The two halves of a write, one right after the other."""
        claim = self.newest(claim) if newest else claim
        state = self.next_state(claim, step)
        with self.expected(claim, state):
            for error in self.store.write([as_write(claim, state)]).values():
                raise error

    @rule(pair=st.lists(claims, min_size=2, max_size=2, unique_by=lambda claim: claim.stream), step=st.integers(-1, 2))
    def write_two(self, pair, step):
        """Each of two streams is written or refused by itself."""
        states = [self.next_state(claim, step) for claim in pair]
        refused = self.store.write([as_write(claim, state) for claim, state in zip(pair, states, strict=True)])
        for claim, state in zip(pair, states, strict=True):
            with self.expected(claim, state):
                if claim.stream in refused:
                    raise refused[claim.stream]

    @rule(target=paused, claim=claims, newest=st.booleans(), step=st.integers(0, 2))
    def write_and_pause(self, claim, newest, step):
        claim = self.newest(claim) if newest else claim
        state = self.next_state(claim, step)
        return claim, state, self.store._upload([as_write(claim, state)])

    @rule(write=consumes(paused))
    def go_on(self, write):
        claim, state, uploads = write
        with self.expected(claim, state):
            for error in self.store._commit(uploads).values():
                raise error

    @rule(claim=claims)
    def delete(self, claim):
        model = self.of(claim.stream)
        if model.is_current(claim):
            self.store.delete(claim)
            self.model[claim.stream] = Model(generation=model.generation)
        elif model.deleted and model.generation == claim.generation:
            self.store.delete(claim)
        else:
            with pytest.raises(Fenced):
                self.store.delete(claim)

    @rule(seconds=st.sampled_from((0.5, 4.0, 9.5, 20.0)))
    def time_passes(self, seconds):
        self.clock.time += seconds

    @rule()
    def crash(self):
        """The process ends, and another one opens the store; the writes that are paused are those of others."""
        self.store.close()
        self.store = self.open()

    # -- what must hold ------------------------------------------------------------------------------------------------

    def next_state(self, claim, step):
        """A state whose clock is a few steps after the stored one, or before it; its blob says all of it."""
        current = self.of(claim.stream).current
        clock = max(0, (current.clock if current else 0) + step)
        requests = tuple(f"{claim.owner}-{claim.generation}-{n}" for n in range(clock, clock + 3))
        blob = json.dumps([claim.stream, claim.generation, clock, requests]).encode()
        return Stored(claim.generation, clock, requests, blob)

    @contextlib.contextmanager
    def expected(self, claim, state):
        """The block must raise what the model says, or store the state."""
        model = self.of(claim.stream)
        if not model.is_current(claim):
            with pytest.raises(Fenced):
                yield
        elif not model.accepts(state):
            with pytest.raises(ClockFell):
                yield
        else:
            yield
            model.previous, model.current = model.current, state
            self.written.setdefault(claim.stream, []).append(claim)

    @invariant()
    def the_store_is_as_the_model_says(self):
        now = self.clock()
        for stream, model in self.model.items():
            assert self.store.read(stream) == model.current
            assert self.store.read(stream, previous=True) == model.previous
            entry = self.store.entry(stream)
            assert (entry is None) == model.deleted
            if entry is not None:
                assert entry[:5] == (stream, model.owner, model.generation, model.expires, model.is_held(now))
                assert entry.clock == (model.current.clock if model.current else 0)
        assert self.store.list() == [self.store.entry(s) for s in sorted(self.model) if not self.of(s).deleted]

    @invariant()
    def each_generation_has_one_writer_and_none_comes_back(self):
        """This does not ask the model: it looks at the writes that the store accepted, in their order."""
        for claims in self.written.values():
            generations = [claim.generation for claim in claims]
            assert generations == sorted(generations)
            assert len({(claim.generation, claim.owner) for claim in claims}) == len(set(generations))

    @invariant()
    def a_blob_agrees_with_its_clock_and_requests(self):
        for stream in self.model:
            if found := self.store.read(stream):
                assert json.loads(found.blob) == [stream, found.generation, found.clock, list(found.requests)]

    def check_files(self):
        """No file is left but the states of the ledger, and those of writes that may still go on."""
        if self.kind != "sqlite":
            return
        current = {stream_hash(stream): model.generation for stream, model in self.model.items()}
        named = {
            (stream_hash(stream), state.generation, state.clock)
            for stream, model in self.model.items()
            for state in (model.current, model.previous)
            if state is not None
        }
        for path in (self.folder / "store" / "blobs").rglob("*.state*"):
            whose, generation = BLOB.fullmatch(path.name.removesuffix(".new")).groups()
            clock = int(path.name.split("-")[2])
            assert (whose, int(generation), clock) in named or int(generation) == current[whose]


def as_write(claim, state):
    return Write(claim, state.blob, state.clock, state.requests)


def play(kind, examples, steps, mutant=None):
    """Hypothesis draws the same histories every time."""
    machine = type(f"{kind}Machine", (StoreMachine,), {"kind": kind, "mutant": mutant})
    options = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
    phases = (Phase.generate,) if mutant else (Phase.generate, Phase.shrink)
    chosen = settings(max_examples=examples, stateful_step_count=steps, phases=phases, **options)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize(("examples", "steps"), [(12, 30), pytest.param(1000, 60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_owners_crashes_pauses_and_clocks(kind, examples, steps, tmp_path):
    open_kind(kind, tmp_path)  # skips if it is not installed
    play(kind, examples, steps)


# -- stores with a defect, which the machine must find -----------------------------------------------------------------


class NoFence(SqliteStore):
    """Any claim may write."""

    def _fence(self, rows, claim):
        return None


class ChecksTooEarly(SqliteStore):
    """The generation is checked before the blob is written, and not when it is committed."""

    early = {}  # noqa: RUF012 - shared: a paused write goes on in the store that is opened after a crash

    def _upload(self, writes):
        uploads = super()._upload(writes)
        with self._ledger.reading() as rows:
            early = {id(write): self._refusal(rows, write) for write, _ in uploads.values()}
        self.early.update(early)
        return uploads

    def _commit(self, uploads):
        refuse, self._refusal = self._refusal, lambda rows, write: self.early[id(write)]
        try:
            return super()._commit(uploads)
        finally:
            self._refusal = refuse


class SameGeneration(SqliteStore):
    """A released stream is claimed again with the same generation."""

    def claim(self, stream, owner, lease):
        entry = self.entry(stream)
        claim = super().claim(stream, owner, lease)
        if claim is None or entry is None or entry.owner is not None:
            return claim
        with self._ledger.transaction() as ledger:
            ledger.execute("UPDATE streams SET generation = generation - 1 WHERE stream = ?", (stream,))
        return claim._replace(generation=claim.generation - 1)


class ForgetsTheGeneration(SqliteStore):
    """Deleting leaves nothing, so that an old owner is current again."""

    def delete(self, claim):
        super().delete(claim)
        with self._ledger.transaction() as ledger:
            ledger.execute("DELETE FROM streams WHERE stream = ?", (claim.stream,))


class RenewsWhatIsLost(SqliteStore):
    """A renewal by an old owner lengthens the lease of the new one."""

    def renew(self, claims, lease):
        current = [(claim, self.entry(claim.stream)) for claim in claims]
        newest = [c._replace(owner=e.owner, generation=e.generation) for c, e in current if e and e.owner]
        return super().renew(newest, lease)


class SweepsTooMuch(SqliteStore):
    """Opening the store removes blobs whose writer is about to commit."""

    def _sweep(self):
        with self._ledger.reading() as ledger:
            named = {name for (name,) in ledger.execute("SELECT blob FROM states")}
        self._blobs.remove(file.name for file in self._blobs.files() if file.name not in named)
        return 0


class SweepsNothing(SqliteStore):
    """Blobs of killed writers stay for ever."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._blobs.sweep = lambda *_: []

    def _sweep(self):
        return 0


class OldRequests(SqliteStore):
    """The requests are those of the state before."""

    def _commit(self, uploads):
        old = {stream: self._find(stream, "current") for stream in uploads}
        requests = {stream: before.requests if before else "[]" for stream, before in old.items()}
        return super()._commit({s: (w, r._replace(requests=requests[s])) for s, (w, r) in uploads.items()})


FOUND_SOON = (NoFence, SameGeneration, RenewsWhatIsLost, OldRequests)
FOUND_LATE = (ChecksTooEarly, ForgetsTheGeneration, SweepsTooMuch, SweepsNothing)


@pytest.mark.parametrize("mutant", [*FOUND_SOON, *(pytest.param(m, marks=pytest.mark.slow) for m in FOUND_LATE)])
def test_the_machine_finds_a_defect(mutant):
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, Fenced)):
        play("sqlite", examples=300, steps=30, mutant=mutant)
