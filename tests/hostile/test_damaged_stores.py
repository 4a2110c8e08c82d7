"""Stores whose ledger was damaged, or whose files are links: no state is dropped, or written elsewhere, in silence."""

import contextlib
import json
import os
import shutil

import pytest

from commands import message, tribe_command
from stores import a_write, write
from tribe.io.files import CannotWrite, check_file, open_plain, write_atomically
from tribe.serve.store import StoreDamaged, StoreDown, stream_hash
from tribe.serve.store.sqlite import SqliteStore

STREAMS = [f"cam{i}" for i in range(4)]
WRITES = 6


@pytest.fixture
def killed(tmp_path):
    """The folder of a store whose only process was killed: with a write-ahead log that no one has merged."""
    with contextlib.closing(SqliteStore(tmp_path / "live", now=lambda: 1000.0)) as store:
        claims = {stream: store.claim(stream, "killed", 10) for stream in STREAMS}
        for clock in range(1, WRITES + 1):
            store.write(
                [a_write(claim, clock, json.dumps([stream, clock]).encode()) for stream, claim in claims.items()]
            )
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    return tmp_path / "killed"


def flipped(at):
    def damage(folder):
        path = folder / "ledger.sqlite-wal"
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= 0x40
        path.write_bytes(content)

    return damage


def cut(at):
    def damage(folder):
        path = folder / "ledger.sqlite-wal"
        os.truncate(path, int(at * path.stat().st_size))

    return damage


def without_log(folder):
    (folder / "ledger.sqlite-wal").unlink()


SHARES = [0.0, 0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99]
DAMAGES = [*(flipped(at) for at in SHARES), *(cut(at) for at in SHARES), without_log]


def later(folder, **options):
    return contextlib.closing(SqliteStore(folder, now=lambda: 2000.0, **options))


def check_last(store):
    """Each stream is claimed in a later generation, and goes on from the last state that was acknowledged."""
    for stream in STREAMS:
        claim = store.claim(stream, "next", 10)
        assert claim.generation > 1
        assert json.loads(store.read(stream).blob) == [stream, WRITES]
        assert json.loads(store.read(stream, previous=True).blob) == [stream, WRITES - 1]
        write(store, claim, 1)
        assert store.read(stream).clock == 1


def refused(folder):
    """Whether a store is not opened, again and again, with an error that says what to do."""
    try:
        SqliteStore(folder).close()
    except StoreDamaged:
        with pytest.raises(StoreDamaged, match=r"--adopt.*--set-aside"):
            SqliteStore(folder)
        return True
    return False


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__qualname__)
def test_a_damaged_log_drops_no_state_in_silence(killed, damage):
    """Streams began anew at generation 1, and their states were removed as those of killed writers."""
    damage(killed)
    if not refused(killed):
        with later(killed) as store:
            check_last(store)
        return
    with later(killed, lost="adopt") as store:
        assert store.unexplained > 0
        check_last(store)
    with later(killed) as store:  # and all is well
        assert store.count() == len(STREAMS)


@pytest.mark.parametrize("damage", [without_log, cut(0.5), flipped(0.3)])
def test_states_that_the_ledger_has_lost_can_be_set_aside(killed, damage):
    damage(killed)
    count = len(list(killed.rglob("*.state")))
    with later(killed, lost="set-aside") as store:
        moved = store.unexplained
    assert moved == len(list((killed / "set-aside").iterdir())) > 0
    assert len(list(killed.rglob("*.state"))) == count
    with later(killed) as store:
        write(store, store.claim("cam0", "next", 10), WRITES + 1)


def test_at_least_half_of_the_damages_are_found(killed, tmp_path):
    """Else the test above shows nothing: SQLite reads past damage at the end of what it has merged."""
    found = 0
    for i, damage in enumerate(DAMAGES):
        shutil.copytree(killed, tmp_path / str(i))
        damage(tmp_path / str(i))
        found += refused(tmp_path / str(i))
    assert found >= len(DAMAGES) / 2


def test_what_a_killed_writer_or_deletion_left_is_no_damage(killed):
    with later(killed) as store:
        claims = {stream: store.claim(stream, "next", 10) for stream in STREAMS}
        uploads = store._upload([a_write(claims["cam0"], 9)])  # killed before its transaction
        assert uploads
        store._commit(store._upload([a_write(claims["cam1"], 9)]))
        left = [path for path in killed.rglob("*.state") if path.name in {r.blob for r in records(store, "cam1")}]
        store.delete(claims["cam1"])
        for path in left:  # killed before it removed the files
            path.write_bytes(b"left")
    for _ in range(2):
        with contextlib.closing(SqliteStore(killed, now=lambda: 3000.0)) as store:
            store.claim("cam1", "another", 10)
            assert store.read("cam1") is None
    SqliteStore(killed).close()


def records(store, stream):
    return [store._find(stream, place) for place in ("current", "previous")]


def test_a_writer_that_was_killed_after_its_transaction_has_stored(killed):
    """The file does not have its last name yet."""
    for path in killed.rglob("*.state"):
        path.rename(f"{path}.new")
    with later(killed) as store:
        check_last(store)


def test_the_command_finds_what_a_ledger_has_lost_and_adopts_it(killed, nowhere):
    result = tribe_command("store", str(killed))
    assert result.exit_code == 0
    assert "4 streams" in result.stdout
    (killed / "ledger.sqlite").write_bytes(b"")
    for command in (["store", str(killed)], ["serve", "--port", "0", "--data", str(killed)]):
        result = tribe_command(*command)
        assert result.exit_code == 2
        assert "--adopt" in message(result)
    assert tribe_command("store", str(killed), "--adopt", "--set-aside").exit_code == 2
    result = tribe_command("store", str(killed), "--adopt")
    assert result.exit_code == 0, message(result)
    assert "8 states were adopted" in result.stdout
    with later(killed) as store:
        check_last(store)


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def precious(tmp_path):
    """A file of somebody who writes where others may make links."""
    path = tmp_path / "precious"
    path.write_bytes(b"notes")
    return path


@pytest.fixture
def shared(tmp_path):
    """A folder that everybody may write to, as /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_file_is_not_written_through_a_link_in_a_shared_folder(shared, precious):
    for target in (precious, shared.parent / "new"):
        (shared / "link").symlink_to(target)
        for call in (lambda: write_atomically(shared / "link", b"new"), lambda: check_file(shared / "link")):
            with pytest.raises(CannotWrite, match="symbolic link"):
                call()
        (shared / "link").unlink()
    assert precious.read_bytes() == b"notes"
    assert not (shared.parent / "new").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives a link to another user")
def test_a_file_is_not_written_through_a_link_of_another_user(tmp_path, precious):
    (tmp_path / "link").symlink_to(precious)
    os.lchown(tmp_path / "link", 12345, 12345)
    with pytest.raises(CannotWrite, match="another user"):
        write_atomically(tmp_path / "link", b"new")
    assert precious.read_bytes() == b"notes"


def test_a_path_that_becomes_a_link_is_replaced_itself(shared, precious, monkeypatch):
    """The check and the replacement are two calls; a link may be made in between."""
    replace = os.replace

    def late(source, target):
        os.symlink(precious, target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    write_atomically(shared / "file", b"new")
    assert precious.read_bytes() == b"notes"
    assert (shared / "file").read_bytes() == b"new"
    assert not (shared / "file").is_symlink()


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "blobs", "adopt"])
def test_a_store_is_not_opened_through_a_link_inside_it(shared, tmp_path, name):
    target = tmp_path / "target"
    target.mkdir() if name in ("blobs", "adopt") else target.write_bytes(b"")
    (shared / "store").mkdir()
    (shared / "store" / name).symlink_to(target)
    with pytest.raises(StoreDown, match="symbolic link"):
        SqliteStore(shared / "store")
    assert not (os.listdir(target) if target.is_dir() else target.read_bytes())


def test_a_state_is_not_written_through_a_link(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with contextlib.closing(SqliteStore(tmp_path / "store")) as store:
        claim = store.claim("cam", "a", 100)
        (tmp_path / "store" / "blobs" / stream_hash("cam")[:2]).symlink_to(target)
        with pytest.raises(StoreDown, match="symbolic link"):
            write(store, claim, 1)
    assert not os.listdir(target)


def test_the_folder_of_a_store_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with contextlib.closing(SqliteStore(tmp_path / "link")) as store:
        write(store, store.claim("cam", "a", 100), 1)
    with contextlib.closing(SqliteStore(tmp_path / "real")) as store:
        assert store.read("cam").clock == 1


def test_results_are_not_added_through_a_link(tmp_path, precious):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "pack").symlink_to(precious)
    with pytest.raises(OSError, match="link"), open(tmp_path / "runs" / "pack", "ab+", opener=open_plain):
        pass
    assert precious.read_bytes() == b"notes"
