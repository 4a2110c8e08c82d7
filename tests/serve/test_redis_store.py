"""A store in Redis when the server dies, is full, holds other things, or is not there."""

import sys

import pytest

import tribe.serve.store.redis as module
from stores import RedisServer, a_write, need_redis, shared_server, write
from tribe.serve.store import Fenced, StoreDamaged, StoreDown, open_store
from tribe.serve.store.redis import RedisStore


@pytest.fixture
def kind():
    return "redis"


@pytest.fixture
def clock():
    """The server's own."""


def blob_keys(store):
    return sorted(store._client.scan_iter(match=f"{store._prefix}blob:*"), key=lambda key: key.split(b"-")[1:3])


def test_an_address_opens_it():
    need_redis()
    store = open_store(shared_server().address)
    assert isinstance(store, RedisStore)
    assert store.place == shared_server().address
    store.close()


def test_leases_end_by_the_clock_of_the_server(store):
    claim = store.claim("cam", "a", 100)
    seconds, micros = store._client.time()
    assert 0 <= seconds + micros / 1e6 + 100 - claim.expires < 100
    assert store.entry("cam").held
    store._client.hset(store._stream("cam"), "expires", repr(seconds - 1.0))
    assert not store.entry("cam").held
    assert store.claim("cam", "b", 100).generation == 2


def test_a_blob_that_is_never_committed_expires(store):
    claim = store.claim("cam", "a", 100)
    uploads = store._upload([a_write(claim, 1)])
    assert [0 < store._client.ttl(key) <= 3600 for key in blob_keys(store)] == [True]
    store._client.delete(*blob_keys(store))
    with pytest.raises(StoreDown, match="again"):
        store._commit(uploads)
    assert store.read("cam") is None
    write(store, claim, 1)
    assert [store._client.ttl(key) for key in blob_keys(store)] == [-1], "it does not expire"
    store.delete(claim)
    keys = {key.removeprefix(store._prefix.encode()) for key in store._client.scan_iter(f"{store._prefix}*")}
    assert keys == {b"stream:cam", b"schema"}


def test_scripts_that_are_sent_twice_have_one_effect(written):
    """A client sends a script again if the connection breaks before the answer comes."""
    claim = written.claim("cam", "a", 100)
    uploads = written._upload([a_write(claim, 3)])
    written._commit(uploads)
    written._commit(uploads)
    assert (written.read("cam").clock, written.read("cam", previous=True).clock) == (3, 2)
    written.release(claim)
    written._commit(uploads)
    written.release(claim)
    again = written.claim("cam", "a", 100)
    written.delete(again)
    written.delete(again)
    assert written.claim("cam", "b", 100).generation == 3
    with pytest.raises(Fenced):
        written.delete(again)


def test_a_large_blob_is_kept_in_parts(store, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 10)
    claim = store.claim("cam", "a", 100)
    for clock, size in enumerate((0, 1, 10, 11, 20, 25)):
        write(store, claim, clock, bytes(range(size)))
        assert store.read("cam").blob == bytes(range(size))
    assert sorted(store._client.strlen(key) for key in blob_keys(store)) == [5, 10, 10, 10, 10]
    store.delete(claim)
    assert blob_keys(store) == []


def test_other_values_are_refused(written):
    written._client.hset(written._stream("cam"), "current:clock", "x")
    with pytest.raises(StoreDamaged, match="damaged"):
        written.read("cam")
    written._client.set(written._stream("text"), "not a stream")
    for action in (lambda: written.claim("text", "a", 10), lambda: written.entry("text"), lambda: written.read("text")):
        with pytest.raises(StoreDamaged, match="WRONGTYPE"):
            action()


def test_data_of_a_newer_version_is_refused(store, opened):
    store._client.set(f"{store._prefix}schema", 2)
    with pytest.raises(StoreDamaged, match="schema"):
        opened()


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    need_redis()
    server = RedisServer()
    yield server
    server.remove()


def test_a_server_that_is_killed_and_started_again(server):
    store = RedisStore(server.address)
    claim = store.claim("cam", "a", 100)
    write(store, claim, 1)
    write(store, claim, 2)
    before = store.read("cam"), store.read("cam", previous=True), store.entry("cam")
    server.kill()
    for action in (
        lambda: store.claim("new", "a", 10),
        lambda: store.renew([claim], 10),
        lambda: store.release(claim),
        lambda: write(store, claim, 3),
        lambda: store.read("cam"),
        lambda: store.entry("cam"),
        lambda: store.list(),
        lambda: store.delete(claim),
        lambda: RedisStore(server.address),
    ):
        with pytest.raises(StoreDown, match="reached"):
            action()
    server.start()
    assert (store.read("cam"), store.read("cam", previous=True), store.entry("cam")) == before
    assert store.renew([claim], 100).keys() == {"cam"}
    write(store, claim, 3)
    assert store.read("cam").clock == 3
    store.close()


def test_a_server_that_dies_between_a_blob_and_its_commit(server):
    store = RedisStore(server.address)
    claim = store.claim("cam", "a", 100)
    uploads = store._upload([a_write(claim, 1)])
    server.kill()
    with pytest.raises(StoreDown):
        store._commit(uploads)
    server.start()
    assert store.read("cam") is None
    assert store._commit(uploads) == {}
    assert store.read("cam").blob == b"state 1"
    store.close()


def test_a_server_without_memory_refuses_and_keeps_what_it_has(server):
    """It refuses to set a field in the middle of a script, too; to release and to delete still works."""
    store = RedisStore(server.address)
    claim, other = store.claim("cam", "a", 100), store.claim("other", "a", 100)
    for clock in (1, 2, 3):
        write(store, claim, clock)
        write(store, other, clock)
    before = store.read("cam"), store.read("cam", previous=True), store.entry("cam")
    uploads = store._upload([a_write(claim, 4)])
    store._client.config_set("maxmemory", store._client.info("memory")["used_memory"] // 2)
    for action in (
        lambda: store.claim("new", "a", 10),
        lambda: store.renew([claim], 10),
        lambda: write(store, claim, 4),
        lambda: store._commit(uploads),
    ):
        with pytest.raises(StoreDown, match="memory"):
            action()
    assert (store.read("cam"), store.read("cam", previous=True), store.entry("cam")) == before
    store.delete(other)
    assert store.read("other") is None
    store.release(claim)
    assert store.entry("cam").owner is None
    store._client.config_set("maxmemory", 0)
    assert [store.claim(name, "b", 10).generation for name in ("cam", "other")] == [2, 2]
    store.close()


def test_a_server_that_removes_keys_is_refused(server):
    store = RedisStore(server.address)
    store._client.config_set("maxmemory-policy", "allkeys-lru")
    store.close()
    RedisStore(server.address).close()  # without a limit of memory it removes none
    store._client.config_set("maxmemory", 10_000_000)
    with pytest.raises(StoreDown, match="noeviction"):
        RedisStore(server.address)


def test_a_password_is_needed_and_never_shown(server):
    store = RedisStore(server.address)
    store._client.config_set("requirepass", "secret")
    store.close()
    with pytest.raises(StoreDown, match="password"):
        RedisStore(server.address)
    with pytest.raises(StoreDown, match="password") as caught:
        RedisStore(server.address.replace("unix://", "unix://:wrong-one@"))
    assert "wrong-one" not in str(caught.value)
    RedisStore(server.address.replace("unix://", "unix://:secret@")).close()


def test_a_replica_is_refused(server):
    store = RedisStore(server.address)
    store._client.replicaof("localhost", "1")
    with pytest.raises(StoreDown, match="replica"):
        store.claim("cam", "a", 10)
    store.close()


def test_no_server_and_a_wrong_address(tmp_path):
    pytest.importorskip("redis")
    with pytest.raises(StoreDown, match="reached"):
        RedisStore(f"unix://{tmp_path}/none")
    with pytest.raises(ValueError, match="address"):
        RedisStore("http://localhost")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match="redis"):
        open_store("redis://localhost")


def test_a_server_that_keeps_nothing_on_a_disk_is_warned_of(caplog):
    """A Redis server without persistence came back empty, and all streams began anew without a word before."""
    need_redis()
    for options, warned in (
        (("--appendonly", "no"), True),
        (("--appendonly", "no", "--save", "60 1"), False),
        (("--appendonly", "yes"), False),
        (("--appendonly", "no", "--rename-command", "CONFIG", ""), False),  # as hosted servers do: it is not known
    ):
        server = RedisServer(*options)
        try:
            caplog.clear()
            RedisStore(server.address).close()
            assert ("keeps nothing" in caplog.text) == warned, options
        finally:
            server.remove()
