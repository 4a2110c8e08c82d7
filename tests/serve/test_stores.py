"""Both stores do the same: claims, leases, generations, states, pages and words."""

import contextlib
import threading

import pytest

from stores import KINDS, Clock, open_kind, write
from tribe.serve.store import Claim, Fenced, Write
from tribe.serve.store.protocol import Store


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=KINDS)
def store(request, tmp_path, clock):
    with contextlib.closing(open_kind(request.param, tmp_path, clock)()) as store:
        yield store


def test_it_is_a_store(store):
    typed: Store = store
    assert all(callable(getattr(typed, name)) for name in vars(Store) if not name.startswith("_"))


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


def test_what_was_written_is_read(store, clock):
    claim = store.claim("cam", "a", 10)
    assert store.read("cam") is None
    store.write(claim, b"first", clock=3, requests=["r1", "ü\n"], meta={"method": "tribe", "share": 0.5})
    clock.time += 1
    store.write(claim, b"second", clock=3, requests=[], meta={})
    assert store.read("cam") == ("cam", 1, 3, (), b"second", {})
    assert store.read("cam", previous=True) == (
        *("cam", 1, 3, ("r1", "ü\n"), b"first"),
        {"method": "tribe", "share": 0.5},
    )
    assert store.entry("cam") == ("cam", "a", 1, 1010.0, True, 3, 6, 1001.0)


def test_a_state_outlives_its_owner_and_says_who_wrote_it(store, clock):
    write(store, store.claim("cam", "a", 10), 7)
    clock.time += 10
    claim = store.claim("cam", "b", 10)
    assert store.read("cam")[:3] == ("cam", 1, 7)
    write(store, claim, 2)  # an earlier clock: another generation may go back
    assert store.read("cam")[:3] == ("cam", 2, 2)
    assert store.read("cam", previous=True)[:3] == ("cam", 1, 7)


def test_an_old_generation_cannot_write_or_delete(store, clock):
    old = store.claim("cam", "a", 10)
    write(store, old, 1)
    clock.time += 10
    write(store, old, 2)  # its lease has ended, but nobody else has learned
    new = store.claim("cam", "b", 10)
    for action in (lambda: write(store, old, 3), lambda: store.delete(old)):
        with pytest.raises(Fenced, match="generation 1, but the current one is 2"):
            action()
    assert store.read("cam").clock == 2
    store.release(new)
    with pytest.raises(Fenced, match="which was released"):
        write(store, new, 3)
    with pytest.raises(Fenced, match="does not know the stream"):
        write(store, Claim("other", "a", 1, 0.0), 1)
    again = store.claim("cam", "b", 10)
    with pytest.raises(Fenced, match="belongs to 'b'"):
        write(store, again._replace(owner="a"), 3)


def test_many_streams_are_written_together_and_each_is_refused_by_itself(store, clock):
    claims = {name: store.claim(name, "a", 10) for name in ("good", "lost", "back", "wrong", "empty")}
    write(store, claims["back"], 5)
    clock.time += 10
    store.claim("lost", "b", 10)
    writes = {name: Write(claim, name.encode(), 1, ["r"], {"name": name}) for name, claim in claims.items()}
    writes["wrong"] = writes["wrong"]._replace(meta={"x": object()})
    writes["empty"] = writes["empty"]._replace(blob=b"")
    refused = store.write_many(list(writes.values()))
    assert {name: type(error) for name, error in refused.items()} == {
        "lost": Fenced,
        "back": ValueError,
        "wrong": ValueError,
    }
    for name in ("good", "empty"):
        assert store.read(name) == (name, 1, 1, ("r",), writes[name].blob, {"name": name})
    assert (store.read("lost"), store.read("back").clock, store.read("wrong")) == (None, 5, None)
    assert store.write_many([]) == {}
    with pytest.raises(ValueError, match="each write is of another stream; got 'good'"):
        store.write_many([writes["good"], writes["good"]])


def test_a_clock_never_falls_within_a_generation(store):
    claim = store.claim("cam", "a", 10)
    write(store, claim, 5)
    with pytest.raises(ValueError, match="falls from 5 to 4 within generation 1: release"):
        write(store, claim, 4)
    assert store.read("cam").clock == 5


def test_a_deleted_stream_is_gone_and_keeps_its_generation(store):
    claim = store.claim("cam", "a", 10)
    write(store, claim, 1)
    write(store, claim, 2)
    store.delete(claim)
    assert store.read("cam") is None
    assert store.read("cam", previous=True) is None
    assert store.entry("cam") is None
    assert store.list() == []
    with pytest.raises(Fenced):
        write(store, claim, 3)
    assert store.claim("cam", "b", 10).generation == 2
    assert store.entry("cam")[5:] == (0, 0, None)


def test_pages_of_streams_are_in_order(store):
    names = ["a", "b/1", "b/10", "b/2", "bÿ", "b😀", "c%_"]
    for name in reversed(names):
        store.claim(name, "w", 10)
    assert [e.stream for e in store.list()] == names
    assert [e.stream for e in store.list("b")] == names[1:6]
    assert [e.stream for e in store.list("b/1")] == ["b/1", "b/10"]
    assert [e.stream for e in store.list(limit=2)] == names[:2]
    assert [e.stream for e in store.list("b", limit=2, after="b/10")] == ["b/2", "bÿ"]
    assert [e.stream for e in store.list("b", after="a")] == names[1:6]
    assert store.list("c%", after="d") == []


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/", "..", ".", "a\\b", "x" * 200, "ß 猫 😀", "%00", "*", "'; --"]
)
def test_any_printable_name_is_a_stream(store, name):
    write(store, store.claim(name, "w", 10), 1)
    assert store.read(name).stream == name
    assert [entry.stream for entry in store.list(name)] == [name]


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\x00", "a\u202eb", "\ud800", 3, None, b"cam"])
def test_other_names_are_refused(store, name):
    for action in (lambda: store.claim(name, "w", 10), lambda: store.read(name), lambda: store.entry(name)):
        with pytest.raises(ValueError, match="a stream's name is 1 to 200 printable characters"):
            action()
    with pytest.raises(ValueError, match="an owner's name is 1 to 200 printable characters"):
        store.claim("cam", name, 10)
    assert store.list() == []


BAD_WRITES = {
    "a clock is a whole number": {"clock": -1},
    "from 0 to 2.53 - 1; got 9007199254740992": {"clock": 2**53},
    "a clock is a whole number, from": {"clock": 1.5},
    "a blob is bytes; got 'str'": {"blob": "text"},
    "requests are a list of texts": {"requests": "r1"},
    "a request is a text of at most": {"requests": [1]},
    "a request is a text of at most 1,000": {"requests": ["x" * 1001]},
    "a state has at most 10,000 requests": {"requests": ["x"] * 10_001},
    "meta is a mapping that JSON can hold": {"meta": {"x": object()}},
    "meta is a mapping .* finite": {"meta": {"x": float("nan")}},
    "meta has at most": {"meta": {"x": "x" * 2**20}},
}


@pytest.mark.parametrize("words", BAD_WRITES)
def test_a_wrong_write_is_refused_in_words(store, words):
    claim = store.claim("cam", "a", 10)
    write(store, claim, 0)
    fields = {"blob": b"", "clock": 1, "requests": [], "meta": {}} | BAD_WRITES[words]
    with pytest.raises(ValueError, match=words):
        store.write(claim, **fields)
    assert store.read("cam").blob == b"state 0"


@pytest.mark.parametrize("lease", [0, -1, float("nan"), float("inf"), 86_401, "10", None])
def test_a_lease_is_some_seconds(store, lease):
    with pytest.raises(ValueError, match="a lease is a number of seconds, more than 0"):
        store.claim("cam", "a", lease)
    with pytest.raises(ValueError, match="a lease is a number of seconds, more than 0"):
        store.renew([], lease)


@pytest.mark.parametrize("page", [{"limit": 0}, {"limit": 1.5}, {"prefix": "\n"}, {"prefix": 1}, {"after": ""}])
def test_a_wrong_page_is_refused(store, page):
    with pytest.raises(ValueError, match="; got"):
        store.list(**page)


def test_of_many_threads_one_gets_a_stream(store):
    """Eight owners claim the same streams at the same time; each stream has one owner, in its first generation."""
    names, won = [f"cam {i}" for i in range(10)], {}

    def work(owner):
        won[owner] = [claim for name in names if (claim := store.claim(name, owner, 100))]
        for claim in won[owner]:
            store.write(claim, owner.encode(), clock=1, requests=[owner], meta={})

    threads = [threading.Thread(target=work, args=(f"owner {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claims = [claim for claims in won.values() for claim in claims]
    assert sorted((claim.stream, claim.generation) for claim in claims) == sorted((name, 1) for name in names)
    for claim in claims:
        assert store.read(claim.stream).blob == claim.owner.encode()
