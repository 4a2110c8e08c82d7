"""A folder with an SQLite ledger when files are damaged, missing, full or in use."""

import contextlib
import os
import sqlite3
import threading

import pytest

from processes import ended
from stores import a_write, write
from tribe.serve.store import StoreDamaged, StoreDown, Write, open_store
from tribe.serve.store.sqlite import Ledger, SqliteStore

FILL = """
import ctypes, json, os, sys
from pathlib import Path
from tribe.serve.store import StoreDown, Write
from tribe.serve.store.sqlite import SqliteStore

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
assert not store.write([Write(claim, b"old" * 1000, 1, ["r1"])])
assert not store.write([Write(claim, b"new" * 1000, 2, ["r2"])])
before = store.read("cam"), store.read("cam", previous=True)

def refused(action):
    try:
        action()
    except StoreDown as error:
        assert (store.read("cam"), store.read("cam", previous=True)) == before, "what was stored is unchanged"
        return str(error)
    raise AssertionError("it was stored")

other = Write(store.claim("other", "a", 10), bytes(2_000_000), 3, [])
print(refused(lambda: store.write([Write(claim, bytes(10), 3, []), other])))
assert store.read("other") is None
if small:  # no room is left, not even for the ledger
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass
    store.renew([claim], 10)
    print(refused(lambda: [store.claim(f"cam{i}", "a" * 100, 10) for i in range(10_000)]))
    os.remove(folder / "filler")
left = sorted(path.name for path in folder.rglob("*.state*"))
assert len(left) == 2, left
assert not store.write([Write(claim, b"next", 3, ["r3"])])
store.close()
again = SqliteStore(folder / "store", now=lambda: 1000.0)
assert (again.read("cam").blob, again.read("cam", previous=True)) == (b"next", before[0])
"""


FORK = """
import os, sys
from tribe.serve.store import StoreDown
from tribe.serve.store.sqlite import SqliteStore

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
def kind():
    return "sqlite"


def blobs(store):
    return sorted(store.folder.rglob("*.state*"), key=lambda path: path.name.split("-")[1:3])


def test_a_place_is_a_folder_unless_it_is_an_address(tmp_path):
    store = open_store(tmp_path / "new" / "store")
    assert isinstance(store, SqliteStore)
    store.close()
    assert sorted(os.listdir(tmp_path / "new" / "store")) == ["blobs", "ledger.sqlite"]


# -- blobs -------------------------------------------------------------------------------------------------------------


def test_what_killed_writers_left_is_removed(written, clock):
    """Blobs of old generations; those of the current one may be about to be committed."""
    hash_of_cam = blobs(written)[0].name[:32]
    for generation in (1, 2):
        written._blobs.new_path(f"{hash_of_cam}-{generation}-9-{'0' * 16}.state").write_bytes(b"left")
    (written.folder / "blobs" / "notes.txt").write_text("not ours")
    stranger = written._blobs.new_path(f"{'f' * 32}-1-1-{'0' * 16}.state")
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"of a stream that the ledger does not have")
    clock.time += 10
    written.claim("cam", "b", 10)  # generation 2
    assert sorted(path.read_bytes()[:7] for path in blobs(written)) == [b"left", b"of a st", b"state 1", b"state 2"]
    clock.time += 10
    written.release(written.claim("cam", "c", 10))  # generation 3
    assert len(blobs(written)) == 3
    name = written._blobs.new_path(f"{hash_of_cam}-1-9-{'0' * 16}.state")
    name.write_bytes(b"left after the claim")
    written.close()
    SqliteStore(written.folder).close()
    assert not name.exists()
    assert len(blobs(written)) == 3
    assert (written.folder / "blobs" / "notes.txt").exists()


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
            store.write([Write(claim, b"%d" % clock * 1000, clock, [str(clock)])])
    assert read == sorted(read)


# -- the ledger --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["CREATE TABLE mail (subject TEXT)", "PRAGMA user_version = 1", "newer"])
def test_a_database_of_another_program_or_version_is_refused_and_unchanged(tmp_path, make):
    if make == "newer":
        SqliteStore(tmp_path).close()
        make = "PRAGMA user_version = 2"
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        other.execute(make)
        tables = other.execute("SELECT name FROM sqlite_master").fetchall()
    with pytest.raises(StoreDamaged, match="version"):
        SqliteStore(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == tables


def test_a_file_that_is_not_a_database_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"a text of some length, which is not a database " * 100)
    with pytest.raises(StoreDamaged, match="database"):
        SqliteStore(tmp_path)


@pytest.mark.parametrize("damage", ["unlink", "truncate"])
def test_a_lost_ledger_is_not_replaced_while_there_are_states(written, damage):
    """A new ledger would let the states be removed as leftovers, one by one."""
    written.close()
    ledger = written.folder / "ledger.sqlite"
    ledger.unlink() if damage == "unlink" else ledger.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="empty"):
            SqliteStore(written.folder)
    assert len(blobs(written)) == 2


def test_a_name_in_a_damaged_ledger_does_not_leave_the_folder(written):
    with written._ledger.transaction() as rows:
        rows.execute("UPDATE states SET blob = '../../x' WHERE place = 'current'")
    with pytest.raises(StoreDamaged, match="name"):
        written.read("cam")


@pytest.mark.parametrize("change", ["generation = 'x'", "clock = 1.5", "requests = x'00'", "bytes = 'x'"])
def test_a_ledger_with_values_of_other_types_is_refused(written, change):
    written.close()
    with contextlib.closing(sqlite3.connect(written.folder / "ledger.sqlite", isolation_level=None)) as ledger:
        ledger.execute("PRAGMA ignore_check_constraints = ON")
        ledger.execute(f"UPDATE states SET {change}")
    with pytest.raises(StoreDamaged, match="backup"):
        SqliteStore(written.folder)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreDown, match="made"):
        SqliteStore(tmp_path / "file" / "store")


def test_a_ledger_that_another_process_holds_can_still_be_read(written, clock):
    """A process may be stopped in a transaction: no write gets through, and reading goes on."""
    with contextlib.closing(SqliteStore(written.folder, now=clock, patience=0.01)) as other:
        claim = other.claim("cam", "a", 10)
        with written._ledger.transaction():
            for action in (
                lambda: other.claim("new", "b", 10),
                lambda: other.renew([claim], 10),
                lambda: other.write([a_write(claim, 3)]),
            ):
                with pytest.raises(StoreDown, match="another process"):
                    action()
            assert other.read("cam").clock == 2
            assert other.entry("cam").generation == 1
            assert [entry.stream for entry in other.list()] == ["cam"]
        assert len(blobs(other)) == 2, "the blob that was not committed is removed"
        write(other, claim, 3)
        assert other.read("cam").clock == 3


def test_a_store_is_not_carried_over_a_fork(tmp_path):
    """SQLite's locks belong to a process: two that share a connection corrupt the file."""
    result = ended("-c", FORK, tmp_path / "store")
    assert (result.code, result.out) == (0, "7\n"), result.err


def test_commits_are_synced(store):
    """With less, a power failure would leave a ledger that names blobs which were removed."""
    with store._ledger.transaction() as rows:
        assert rows.execute("PRAGMA synchronous").fetchall() == [(2,)]
        assert rows.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


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
    blob, ledger = result.out.splitlines()
    assert "the states of 2 streams ('cam', 'other') were not stored" in blob
    assert "No space left on device. It needs 2.0 MB, and " in blob
    assert "the disk is full. Free some space; what was stored before is unchanged" in ledger


def test_a_file_that_may_not_grow_is_an_error_and_changes_nothing(tmp_path):
    result = ended("-c", FILL, tmp_path, "small files", limits={"RLIMIT_FSIZE": 1_000_000})
    assert result.code == 0, result.err
    assert "File too large. It needs 2.0 MB" in result.out
