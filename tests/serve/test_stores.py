"""One contract for both stores: claims, leases, generations, states, pages, words, and what a pause or damage does."""

import contextlib
from functools import partial

import pytest

from networks import at_once
from stores import a_write, write
from tribe.serve.store import BEFORE, UNDONE, Claim, ClockFell, Fenced, KeptState, StoreDamaged, StoreDown, Write
from tribe.serve.store.sqlite import SqliteStore


def blobs(store):
    """The names of all blobs in the store, the oldest first; each has one part."""
    if isinstance(store, SqliteStore):
        names = [path.name for path in store.folder.rglob("*.state")]
    else:
        keys = store._client.scan_iter(match=f"{store._prefix}blob:*")
        names = [key.decode().removeprefix(f"{store._prefix}blob:").removesuffix(":1") for key in keys]
    return sorted(names, key=lambda name: [int(part) for part in name.split("-")[1:3]])


def damage(store, name, data):
    """Replace a blob; None removes it."""
    if isinstance(store, SqliteStore):
        path = store._blobs.path(name)
        path.unlink() if data is None else path.write_bytes(data)
    else:
        key = f"{store._blob(name)}:1"
        store._client.delete(key) if data is None else store._client.set(key, data)


# -- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_keeps_others_out_until_its_lease_ends(store, clock):
    assert store.claim("cam", "a", 10) == Claim("cam", "a", 1, 1010.0)
    clock.time = 1009.9
    assert store.claim("cam", "b", 10) is None
    clock.time = 1010.0
    assert store.claim("cam", "b", 10) == Claim("cam", "b", 2, 1020.0)
    assert store.claim("cam", "a", 10) is None


def test_the_owner_of_a_live_lease_gets_its_claim_back_renewed(store, clock):
    store.claim("cam", "a", 10)
    clock.time += 5
    assert store.claim("cam", "a", 10) == Claim("cam", "a", 1, 1015.0)
    clock.time += 10
    assert store.claim("cam", "a", 10).generation == 2, "its lease had ended"


def test_renew_returns_what_is_still_held(store, clock):
    claims = [store.claim(name, "a", 10) for name in ("held", "released", "taken", "deleted", "late")]
    store.release(claims[1])
    store.delete(claims[3])
    clock.time += 20
    taken = store.claim("taken", "b", 10)
    renewed = store.renew(claims, 10)
    assert renewed == {name: Claim(name, "a", 1, 1030.0) for name in ("held", "late")}
    assert store.renew([taken], 10) == {"taken": taken._replace(expires=1030.0)}
    assert store.claim("late", "b", 10) is None, "nobody claimed it in between, so it is held again"
    assert store.renew([], 10) == {}


def test_a_released_stream_is_free_at_once(store):
    first = store.claim("cam", "a", 10)
    store.release(first)
    assert store.entry("cam").owner is None
    assert store.claim("cam", "b", 10).generation == 2
    store.release(first)  # it is lost, so nothing happens
    assert store.entry("cam").owner == "b"


def test_of_many_threads_one_gets_a_stream(store):
    """Eight owners claim the same streams at the same time; each stream has one owner, in its first generation."""
    names, won = [f"cam{i}" for i in range(10)], {}

    def work(owner):
        won[owner] = [claim for name in names if (claim := store.claim(name, owner, 100))]
        for claim in won[owner]:
            write(store, claim, 1, owner.encode())

    at_once(*(partial(work, f"owner{i}") for i in range(8)))
    claims = [claim for claims in won.values() for claim in claims]
    assert sorted((claim.stream, claim.generation) for claim in claims) == sorted((name, 1) for name in names)
    for claim in claims:
        assert store.read(claim.stream).blob == claim.owner.encode()


# -- states -----------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(store, clock):
    claim = store.claim("cam", "a", 10)
    assert store.read("cam") is None
    store.write([Write(claim, b"first", 3, ["r1", "ü\n"])])
    clock.time += 1
    store.write([Write(claim, b"second", 3, [])])
    assert store.read("cam") == (1, 3, (), b"second")
    assert store.read("cam", previous=True) == (1, 3, ("r1", "ü\n"), b"first")
    assert store.entry("cam") == ("cam", "a", 1, 1010.0, True, 3, 6, 1001.0)


def test_a_state_outlives_its_owner(store, clock):
    write(store, store.claim("cam", "a", 10), 7)
    clock.time += 10
    claim = store.claim("cam", "b", 10)
    assert store.read("cam")[:2] == (1, 7)
    write(store, claim, 2)  # an earlier clock: another generation may go back
    assert store.read("cam")[:2] == (2, 2)
    assert store.read("cam", previous=True)[:2] == (1, 7)


def test_two_states_of_a_stream_are_stored_and_no_more(written):
    claim = written.claim("cam", "a", 10)
    assert [name.split("-")[2] for name in blobs(written)] == ["1", "2"]
    write(written, claim, 3)
    assert [name.split("-")[2] for name in blobs(written)] == ["2", "3"]
    written.delete(claim)
    assert blobs(written) == []


def test_an_old_generation_cannot_write_or_delete(store, clock):
    old = store.claim("cam", "a", 10)
    write(store, old, 1)
    clock.time += 10
    write(store, old, 2)  # its lease has ended, but nobody else has learned
    new = store.claim("cam", "b", 10)
    for action in (lambda: write(store, old, 3), lambda: store.delete(old)):
        with pytest.raises(Fenced, match="current"):
            action()
    assert store.read("cam").clock == 2
    assert len(blobs(store)) == 2, "the fenced blob is removed"
    store.release(new)
    with pytest.raises(Fenced, match="released"):
        write(store, new, 3)
    with pytest.raises(Fenced, match="have"):
        write(store, Claim("other", "a", 1, 0.0), 1)
    again = store.claim("cam", "b", 10)
    with pytest.raises(Fenced, match="belongs"):
        write(store, again._replace(owner="a"), 3)


def test_many_streams_are_written_together_and_each_is_refused_by_itself(store, clock):
    claims = {name: store.claim(name, "a", 10) for name in ("good", "lost", "back", "empty")}
    write(store, claims["back"], 5)
    clock.time += 10
    store.claim("lost", "b", 10)
    writes = {name: Write(claim, name.encode(), 1, ["r"]) for name, claim in claims.items()}
    writes["empty"] = writes["empty"]._replace(blob=b"")
    refused = store.write(list(writes.values()))
    assert {name: type(error) for name, error in refused.items()} == {"lost": Fenced, "back": ClockFell}
    for name in ("good", "empty"):
        assert store.read(name) == (1, 1, ("r",), writes[name].blob)
    assert (store.read("lost"), store.read("back").clock) == (None, 5)
    assert store.write([]) == {}
    with pytest.raises(ValueError, match="another"):
        store.write([writes["good"], writes["good"]])


def test_a_deleted_stream_is_gone_and_keeps_its_generation(written):
    claim = written.claim("cam", "a", 10)
    written.delete(claim)
    assert (written.read("cam"), written.read("cam", previous=True), written.entry("cam")) == (None, None, None)
    assert written.list() == []
    with pytest.raises(Fenced):
        write(written, claim, 3)
    assert written.claim("cam", "b", 10).generation == 2
    assert written.entry("cam")[5:] == (0, 0, None)


@pytest.mark.parametrize("data", [b"cut", b"state 22", None])
def test_a_state_of_another_size_is_refused_and_the_stream_goes_on(written, data):
    damage(written, blobs(written)[1], data)
    with pytest.raises(StoreDamaged, match="cam"):
        written.read("cam")
    assert written.read("cam", previous=True).blob == b"state 1"
    write(written, written.claim("cam", "a", 10), 3)
    assert written.read("cam").blob == b"state 3"


def test_a_closed_store_is_down(written):
    written.close()
    for action in (lambda: written.read("cam"), lambda: written.claim("cam", "a", 10), written.list):
        with pytest.raises(StoreDown, match="closed"):
            action()


def test_streams_are_counted_by_the_beginning_of_their_names(store):
    names = ["a", "b-1", "b-10", "b-2", "b:x", "bA", "c._"]
    claims = {name: store.claim(name, "w", 10) for name in names}
    store.release(claims["b-2"])
    counted = {prefix: store.count(prefix) for prefix in ("", "b", "b-1", "b-10", "b-100", "c.", "z")}
    assert counted == {"": 7, "b": 5, "b-1": 2, "b-10": 1, "b-100": 0, "c.": 1, "z": 0}
    store.delete(claims["b-1"])
    store.delete(store.claim("a", "w", 10))
    assert (store.count(), store.count("b"), store.count("b-1")) == (5, 4, 1)
    assert all(store.count(prefix) == len(store.list(prefix)) for prefix in ("", "a", "b", "b-", "b-1"))


def test_pages_of_streams_are_in_order(store):
    names = ["a", "b-1", "b-10", "b-2", "b:x", "bA", "c._"]
    for name in reversed(names):
        store.claim(name, "w", 10)
    assert [entry.stream for entry in store.list()] == names
    assert [entry.stream for entry in store.list("b")] == names[1:6]
    assert [entry.stream for entry in store.list("b-1")] == ["b-1", "b-10"]
    assert [entry.stream for entry in store.list(limit=2)] == names[:2]
    assert [entry.stream for entry in store.list("b", limit=2, after="b-10")] == ["b-2", "b:x"]
    assert [entry.stream for entry in store.list("b", after="a")] == names[1:6]
    assert store.list("c.", after="d") == []


# -- the state that stays after a move --------------------------------------------------------------------------------


def moved(store, clock, keep=BEFORE):
    """A stream with states of clocks 1 and 2, then claimed anew and moved: clock 0; the claim."""
    claim = store.claim("cam", "a", 10)
    write(store, claim, 1)
    write(store, claim, 2)
    store.release(claim)
    claim = store.claim("cam", "a", 10)
    assert store.write([a_write(claim, 0)._replace(keep=keep)]) == {}
    return claim


def test_the_state_before_a_move_stays_while_later_ones_are_written(store, clock):
    claim = moved(store, clock)
    for i in range(1, 6):
        write(store, claim, i, b"moved %d" % i)
    clock.time += 5
    assert store.kept("cam") == KeptState(BEFORE, 5.0)
    kept = store.read("cam", place=BEFORE)
    assert (kept.blob, kept.clock, kept.requests, kept.generation) == (b"state 2", 2, ("request 2",), 1)
    assert [store.read("cam").blob, store.read("cam", previous=True).blob] == [b"moved 5", b"moved 4"]
    assert len(blobs(store)) == 3


def test_a_move_that_is_written_again_keeps_the_same_state(store, clock):
    claim = moved(store, clock)
    assert store.write([a_write(claim, 1, b"again")._replace(keep=BEFORE)]) == {}
    assert store.read("cam", place=BEFORE).blob == b"state 2"


def test_one_state_is_kept_at_a_time(store, clock):
    store.release(moved(store, clock))
    claim = store.claim("cam", "a", 10)
    assert store.write([a_write(claim, 2, b"back")._replace(keep=UNDONE)]) == {}
    assert store.read("cam", place=BEFORE) is None
    assert store.read("cam", place=UNDONE).clock == 0
    assert store.kept("cam").place == UNDONE
    write(store, claim, 3)
    assert len(blobs(store)) == 3


def test_what_is_kept_is_removed_on_demand_and_with_the_stream(store, opened, clock):
    claim = moved(store, clock)
    write(store, claim, 1)
    write(store, claim, 2)
    store.forget(claim._replace(generation=1))
    assert store.kept("cam") is not None, "by its owner alone"
    store.forget(claim)
    assert store.kept("cam") is None
    assert len(blobs(store)) == 2
    store.delete(claim)
    store.delete(moved(store, clock))
    assert store.kept("cam") is None
    assert blobs(store) == []


def test_a_store_that_is_opened_again_has_what_is_kept(store, opened, clock):
    claim = moved(store, clock)
    write(store, claim, 1)
    write(store, claim, 2)
    store.close()
    with contextlib.closing(opened()) as again:
        assert again.read("cam", place=BEFORE).blob == b"state 2"
        again.claim("cam", "a", 10)
        assert len(blobs(again)) == 3
