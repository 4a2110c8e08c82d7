"""What a folder with an SQLite ledger does when files are damaged, missing, full or in use."""

import contextlib
import os
import sqlite3
import threading

import pytest

from processes import ended
from stores import Clock, write
from tribe.serve.store import Fenced, SqliteStore, StoreDamaged, StoreDown, Write, open_store
from tribe.serve.store.ledger import Ledger

FILL = """
import ctypes, json, os, sys
from pathlib import Path
from tribe.serve.store import SqliteStore, StoreDown, Write

folder, small = Path(sys.argv[1]), sys.argv[2] == "small disk"
if small:  # a file system of its own, which ends with this process
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x00020000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE, MS_REC
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private, None) or libc.mount(
        b"none", os.fsencode(folder), b"tmpfs", 0, b"size=1m"
    ):
        print("cannot mount", os.strerror(ctypes.get_errno()))
        sys.exit(3)
store = SqliteStore(folder / "store", now=lambda: 1000.0)
claim = store.claim("cam", "a", 10)
store.write(claim, b"old" * 1000, clock=1, requests=["r1"], meta={})
store.write(claim, b"new" * 1000, clock=2, requests=["r2"], meta={})
before = store.read("cam"), store.read("cam", previous=True)

def refused(action):
    try:
        action()
    except StoreDown as error:
        assert (store.read("cam"), store.read("cam", previous=True)) == before, "what was stored is unchanged"
        return str(error)
    raise AssertionError("it was stored")

print(refused(lambda: store.write(claim, bytes(2_000_000), clock=3, requests=[], meta={})))
both = [Write(claim, bytes(10), 3, [], {}), Write(store.claim("other", "a", 10), bytes(2_000_000), 3, [], {})]
print(refused(lambda: store.write_many(both)))
assert store.read("other") is None
if small:  # no room is left, not even for the ledger
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass
    store.renew([claim], 10)
    print(refused(lambda: [store.claim(f"cam {i}", "a" * 200, 10) for i in range(10_000)]))
    os.remove(folder / "filler")
left = sorted(path.name for path in folder.rglob("*.state*"))
assert len(left) == 2, left
store.write(claim, b"next", clock=3, requests=["r3"], meta={})
store.close()
again = SqliteStore(folder / "store", now=lambda: 1000.0)
assert (again.read("cam").blob, again.read("cam", previous=True)) == (b"next", before[0])
"""


FORK = """
import os, sys
from tribe.serve.store import SqliteStore, StoreDown

store = SqliteStore(sys.argv[1])
store.claim("cam", "a", 10)
if not (pid := os.fork()):
    try:
        store.entry("cam")
    except StoreDown as error:
        os._exit(7 if "open it after the fork" in str(error) else 1)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert store.entry("cam").owner == "a"
"""


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    with contextlib.closing(SqliteStore(tmp_path / "store", now=clock)) as store:
        yield store


@pytest.fixture
def written(store):
    """A store with two states of a stream."""
    claim = store.claim("cam", "a", 10)
    write(store, claim, 1)
    write(store, claim, 2)
    return store


def blobs(store):
    return sorted(store.folder.rglob("*.state*"), key=lambda path: path.name.split("-")[1:3])


def test_a_place_is_a_folder_unless_it_is_an_address(tmp_path):
    store = open_store(tmp_path / "new" / "store")
    assert isinstance(store, SqliteStore)
    store.close()
    assert sorted(os.listdir(tmp_path / "new" / "store")) == ["blobs", "ledger.sqlite"]


# -- blobs -------------------------------------------------------------------------------------------------------------


def test_two_states_of_a_stream_are_kept_and_no_more(written):
    assert [path.read_bytes() for path in blobs(written)] == [b"state 1", b"state 2"]
    claim = written.claim("cam", "a", 10)
    write(written, claim, 3)
    assert [path.read_bytes() for path in blobs(written)] == [b"state 2", b"state 3"]
    written.delete(claim)
    assert blobs(written) == []


DAMAGE = {
    "does not hold what was written": lambda path: path.write_bytes(b"state 3"),
    "does not hold": lambda path: path.write_bytes(b""),
    "it has 8 bytes; expected 7 at most": lambda path: path.write_bytes(b"state 22"),
    "No such file": lambda path: path.unlink(),
    "it is a pipe; expected a regular file": lambda path: (path.unlink(), os.mkfifo(path)),
    "it is a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_state_is_refused_and_the_previous_one_is_named(written, words):
    DAMAGE[words](blobs(written)[1])
    with pytest.raises(StoreDamaged, match=words) as caught:
        written.read("cam")
    assert str(blobs(written)[1] if "No such" not in words else written.folder) in str(caught.value)
    assert "The previous state, of generation 1 and clock 1, is intact: read(..., previous=True)" in str(caught.value)
    assert written.read("cam", previous=True).blob == b"state 1"
    claim = written.claim("cam", "a", 10)
    write(written, claim, 3)
    assert written.read("cam").blob == b"state 3", "the stream goes on"


def test_two_damaged_states_are_both_refused(written):
    for path in blobs(written):
        path.write_bytes(b"other")
    with pytest.raises(StoreDamaged, match="No previous state is intact: delete the stream, or restore"):
        written.read("cam")
    with pytest.raises(StoreDamaged, match="does not hold what was written"):
        written.read("cam", previous=True)


def test_a_state_is_not_taken_for_that_of_another_stream_or_time(written):
    """Each value of the record is under the digest, so that an edited ledger is found, too."""
    other = written.claim("other", "a", 10)
    write(written, other, 2)
    edits = {"stream": "other", "clock": 3, "generation": 2, "requests": '["r"]', "meta": "{}"}
    for column, value in edits.items():
        with sqlite3.connect(written.folder / "ledger.sqlite") as ledger:
            ledger.execute("DELETE FROM states WHERE stream = 'other'")
            ledger.execute(f"UPDATE states SET {column} = ? WHERE stream = 'cam' AND place = 'current'", (value,))
        ledger.close()
        with pytest.raises(StoreDamaged, match="does not hold what was written"):
            written.read("other" if column == "stream" else "cam")
        with sqlite3.connect(written.folder / "ledger.sqlite") as ledger:
            ledger.execute("UPDATE states SET stream = 'cam', clock = 2, generation = 1, requests = ?, meta = ? "
                           "WHERE place = 'current'", ('["request 2"]', '{"clock": 2}'))  # fmt: skip
        ledger.close()
        assert written.read("cam").blob == b"state 2"


def test_what_killed_writers_left_is_removed(written, clock):
    """Blobs and temporary files of old generations; those of the current one may be about to be committed."""
    for generation in (1, 2):
        name = written._blobs.path(f"{blobs(written)[0].name[:32]}-{generation}-9-{'0' * 16}.state")
        name.write_bytes(b"left")
        name.with_name(f".{name.name}.{'1' * 16}.tmp").write_bytes(b"left")
    (written.folder / "blobs" / "notes.txt").write_text("not ours")
    stranger = written._blobs.path(f"{'f' * 32}-1-1-{'0' * 16}.state")
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"of a stream that the ledger does not know")
    clock.time += 10
    written.claim("cam", "b", 10)  # generation 2
    expected = {*(f"state {i}".encode() for i in (1, 2)), b"left", b"of a stream that the ledger does not know"}
    assert {path.read_bytes() for path in written.folder.rglob("*.state*")} == expected
    assert len(blobs(written)) == 5
    clock.time += 10
    written.release(written.claim("cam", "c", 10))  # generation 3
    assert len(blobs(written)) == 3
    written.close()
    SqliteStore(written.folder).close()
    assert len(blobs(written)) == 3
    assert (written.folder / "blobs" / "notes.txt").exists()


def test_opening_removes_what_killed_writers_left(written, clock):
    name = written._blobs.path(f"{blobs(written)[0].name[:32]}-1-9-{'0' * 16}.state")
    clock.time += 10
    written.claim("cam", "b", 10)
    name.write_bytes(b"left after the claim")
    SqliteStore(written.folder, now=clock).close()
    assert not name.exists()
    assert len(blobs(written)) == 2


def test_a_batch_that_was_fenced_or_failed_leaves_no_files(written, clock):
    other = written.claim("other", "a", 10)
    claim = written.claim("cam", "a", 10)
    clock.time += 10
    written.claim("cam", "b", 10)
    with (
        written._ledger.transaction(),
        pytest.raises(StoreDown),
        contextlib.closing(SqliteStore(written.folder, now=clock, patience=0.01)) as second,
    ):
        second.write_many([Write(other, b"other", 1, [], {})])
    assert len(blobs(written)) == 2
    refused = written.write_many([Write(claim, b"cam", 3, [], {}), Write(other, b"other", 1, [], {})])
    assert refused.keys() == {"cam"}
    assert [path.read_bytes() for path in blobs(written)] == [b"other", b"state 1", b"state 2"]


def test_a_reader_never_meets_a_half_written_state(store):
    """One thread writes as fast as it can, another one reads: each state that is read is whole."""
    claim, read, done = store.claim("cam", "a", 10), [], threading.Event()

    def look():
        while not done.is_set():
            if found := store.read("cam"):
                assert found.blob == b"%d" % found.clock * 1000
                assert found.requests == (str(found.clock),)
                read.append(found.clock)

    with contextlib.ExitStack() as stack:
        reader = threading.Thread(target=look)
        reader.start()
        stack.callback(reader.join)
        stack.callback(done.set)
        clock = 0
        while clock < 20 or not read:
            clock += 1
            store.write(claim, b"%d" % clock * 1000, clock=clock, requests=[str(clock)], meta={})
    assert read == sorted(read)


# -- the ledger --------------------------------------------------------------------------------------------------------


def edit(written, *statements):
    """Close the store and change its ledger."""
    written.close()
    with contextlib.closing(sqlite3.connect(written.folder / "ledger.sqlite", isolation_level=None)) as ledger:
        for statement in statements:
            ledger.execute(statement)


def test_a_ledger_of_a_newer_version_is_refused(written):
    edit(written, "PRAGMA user_version = 2")
    with pytest.raises(StoreDamaged, match=r"ledger.sqlite has schema 2; this version reads 1: upgrade tribe"):
        SqliteStore(written.folder)


@pytest.mark.parametrize("make", ["CREATE TABLE mail (subject TEXT)", "PRAGMA user_version = 1"])
def test_a_database_of_another_program_is_refused_and_unchanged(tmp_path, make):
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        other.execute(make)
    with pytest.raises(StoreDamaged, match="is an SQLite database, but not a ledger of tribe"):
        SqliteStore(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        assert ("streams",) not in other.execute("SELECT name FROM sqlite_master").fetchall()


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"a text of some length, which is not a database " * 100)
    with pytest.raises(StoreDamaged, match="file is not a database"):
        SqliteStore(tmp_path)


@pytest.mark.parametrize("damage", ["unlink", "truncate"])
def test_a_lost_ledger_is_not_replaced_while_there_are_states(written, damage):
    """A new ledger would let the states be removed as leftovers, one by one."""
    written.close()
    ledger = written.folder / "ledger.sqlite"
    ledger.unlink() if damage == "unlink" else ledger.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=r"holds states, but .*ledger.sqlite is empty: restore the ledger"):
            SqliteStore(written.folder)
    assert len(blobs(written)) == 2


@pytest.mark.parametrize("value", ["generation = 'x'", "expires = 'x'", "owner = x'00ff'"])
def test_a_value_of_another_type_is_refused(written, value):
    edit(written, f"UPDATE streams SET {value}")
    with contextlib.closing(SqliteStore(written.folder)) as store:
        for action in (lambda: store.entry("cam"), store.list, lambda: store.claim("cam", "b", 10)):
            with pytest.raises(StoreDamaged, match=r"ledger.sqlite is damaged \(a value is not of its type\)"):
                action()


@pytest.mark.parametrize("value", ["bytes = 'x'", "digest = 3", "written = 'x'", "clock = 1.5", "blob = '../../x'"])
def test_a_state_with_a_value_of_another_type_is_refused(written, value):
    edit(written, f"UPDATE states SET {value} WHERE place = 'current'")
    with contextlib.closing(SqliteStore(written.folder)) as store, pytest.raises(StoreDamaged, match="damaged"):
        store.read("cam")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_ledger_that_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "ledger.sqlite")
    with pytest.raises(StoreDamaged, match=r"ledger.sqlite is not a ledger: it is a (pipe|folder)"):
        SqliteStore(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreDown, match="cannot be made: Not a directory"):
        SqliteStore(tmp_path / "file" / "store")


def test_a_ledger_that_another_process_holds_can_still_be_read(written, clock):
    """A process may be stopped in a transaction: no write gets through, and reading goes on."""
    with contextlib.closing(SqliteStore(written.folder, now=clock, patience=0.01)) as other:
        claim = other.claim("cam", "a", 10)
        with written._ledger.transaction():
            for action in (
                lambda: other.claim("new", "b", 10),
                lambda: other.renew([claim], 10),
                lambda: write(other, claim, 3),
            ):
                with pytest.raises(StoreDown, match=r"another process holds the ledger. If that process is stopped"):
                    action()
            assert other.read("cam").clock == 2
            assert other.entry("cam").generation == 1
            assert [entry.stream for entry in other.list()] == ["cam"]
        assert len(blobs(other)) == 2, "the blob that was not committed is removed"
        write(other, claim, 3)
        assert other.read("cam").clock == 3


def test_a_closed_store_says_so(written):
    written.close()
    written.close()
    for action in (lambda: written.read("cam"), lambda: written.claim("cam", "a", 10), written.list):
        with pytest.raises(StoreDown, match=r"ledger.sqlite is closed"):
            action()


def test_a_store_is_not_carried_over_a_fork(tmp_path):
    """SQLite's locks belong to a process: two that share a connection corrupt the file."""
    result = ended("-c", FORK, tmp_path / "store")
    assert (result.code, result.out) == (0, "7\n"), result.err


def test_commits_are_synced(store):
    """With less, a power failure would leave a ledger that names blobs which were removed."""
    with store._ledger.transaction() as ledger:
        assert ledger.execute("PRAGMA synchronous").fetchall() == [(2,)]
        assert ledger.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


def test_an_error_in_a_transaction_leaves_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", 1.0, lambda: None)

    def fail():
        with ledger.transaction() as rows:
            rows.execute("INSERT INTO streams VALUES ('cam', 'a', 1, 0, 0)")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    with ledger.reading() as rows:
        assert rows.execute("SELECT * FROM streams").fetchall() == []
    ledger.close()


# -- full disks --------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path):
    """On a disk of 1 MB: a blob that does not fit, then a ledger that cannot grow; with space the store goes on."""
    result = ended("-c", FILL, tmp_path, "small disk")
    if result.code == 3:
        pytest.skip(f"a small file system cannot be mounted here: {result.out}")
    assert result.code == 0, result.err
    blob, many, ledger = result.out.splitlines()
    assert "the states of 2 streams were not stored" in many
    assert "No space left on device. It needs 2.0 MB, and " in many
    assert "the state of stream 'cam' was not stored" in blob
    assert "No space left on device. It needs 2.0 MB, and " in blob
    assert "the disk is full. Free some space; what was stored before is unchanged" in ledger


def test_a_file_that_may_not_grow_is_an_error_and_changes_nothing(tmp_path):
    result = ended("-c", FILL, tmp_path, "small files", limits={"RLIMIT_FSIZE": 1_000_000})
    assert result.code == 0, result.err
    assert "the state of stream 'cam' was not stored" in result.out
    assert "File too large. It needs 2.0 MB" in result.out


def test_a_write_that_fails_because_it_is_fenced_says_that(written, clock, monkeypatch):
    """The next owner removes the temporary file of a paused write: that is no fault of the disk."""
    claim = written.claim("cam", "a", 10)

    def paused(name, blob):
        clock.time += 10
        written.claim("cam", "b", 10)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(written._blobs, "write", paused)
    with pytest.raises(Fenced, match="the current one is 2"):
        write(written, claim, 3)
