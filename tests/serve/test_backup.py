"""A store in one file: made beside a server, restored to a folder or to Redis; kills and damage lose nothing."""

import contextlib
import io
import itertools
import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from small_server import serving, small_fleet

from commands import assert_refused, message, succeeded, tribe_command
from places import ROOT
from processes import Touches, killed
from stores import need_redis, shared_server
from tribe.io import states
from tribe.serve.client import Client
from tribe.serve.store import Write, backup, open_store
from tribe.serve.worker import Worker
from tribe.testing import images

databases = itertools.count(1)
CAMERAS = ("door", "gate", "hall")


@pytest.fixture(params=["folder", "redis"])
def new_place(request, tmp_path):
    """A function that returns where an empty store may be."""
    if request.param == "folder":
        numbers = itertools.count()
        return lambda: str(tmp_path / f"store-{next(numbers)}")
    need_redis()
    return lambda: f"{shared_server().address}?db={next(databases)}"


@contextlib.contextmanager
def opened(place):
    with contextlib.closing(open_store(place)) as store:
        yield store


@contextlib.contextmanager
def served(place):
    """A client of a server whose streams are kept at a place."""
    with opened(place) as store, serving(Worker(small_fleet(), store)) as server, Client(server.url, "small") as client:
        yield client


def fill(place, names=CAMERAS, seed=0):
    """Let a server learn from a few images of each stream."""
    with served(place) as client:
        for i, name in enumerate(names):
            for step in range(2 + i):
                client.predict(name, images(1, 2, seed + step)[0].numpy(), id=f"{name}-{seed + step}")


def kept(place):
    """Of each stream: the clock, the ids of requests and the bytes of its state."""
    with opened(place) as store:
        found = {entry.stream: store.read(entry.stream) for entry in store.list()}
    return {name: None if state is None else (state.clock, state.requests, state.blob) for name, state in found.items()}


def claimed(store, stream):
    claim = store.claim(stream, "a test", 60)
    assert claim is not None
    return claim


@pytest.fixture
def filled(new_place):
    place = new_place()
    fill(place)
    return place


def test_streams_go_on_bit_for_bit_in_another_place(filled, new_place, tmp_path):
    file, other = tmp_path / "night.backup", new_place()
    done = backup.backup(filled, file)
    assert (done.streams, done.stateless, done.older, done.damaged) == (3, 0, {}, {})
    assert backup.restore(file, other) == (3, done.bytes, 0)
    assert kept(other) == kept(filled)
    x = images(1, 2, 9)[0].numpy()
    with served(filled) as here, served(other) as there:
        for name in CAMERAS:
            assert np.array_equal(here.predict(name, x), there.predict(name, x))
        clock = there.stream("hall")["clock"]
        there.predict("hall", x, id="hall-0")
        assert there.stream("hall")["clock"] == clock, (
            "a request that was learned before the backup is not learned again"
        )


def test_a_server_goes_on_while_it_is_backed_up(new_place, tmp_path):
    """Every state in the file is one that the server had stored, and the server learns on."""
    place, file = new_place(), tmp_path / "night.backup"
    fill(place)
    with served(place) as client:
        for step in range(5):
            for name in CAMERAS:
                client.predict(name, images(1, 2, 20 + step)[0].numpy())
            assert backup.backup(place, file).streams == 3
            assert backup.check(file) == 3
        other = new_place()
        backup.restore(file, other)
        before = client.stream("door")["clock"]
        client.predict("door", images(1, 2, 1)[0].numpy())
        assert client.stream("door")["clock"] == before + 1
    last, restored = kept(place), kept(other)
    assert all(restored[name][0] <= last[name][0] for name in CAMERAS)
    for name in CAMERAS:
        assert int(states.decode(restored[name][2]).tensors["key.clock"][0]) == restored[name][0]


def test_streams_that_differ_need_force_and_equal_ones_stay(filled, new_place, tmp_path):
    file, other = tmp_path / "night.backup", new_place()
    backup.backup(filled, file)
    fill(other, ("door", "new"), seed=5)
    before = kept(other)
    with pytest.raises(backup.BackupError, match="--force"):
        backup.restore(file, other)
    assert kept(other) == before
    backup.restore(file, other, force=True)
    assert kept(other) == {**kept(filled), "new": before["new"]}
    with opened(other) as store:
        generations = {entry.stream: entry.generation for entry in store.list()}
    assert backup.restore(file, other) == (0, 0, 3), "all are there"
    with opened(other) as store:
        assert generations == {entry.stream: entry.generation for entry in store.list()}


def test_streams_that_a_server_holds_are_never_replaced(filled, tmp_path):
    file = tmp_path / "night.backup"
    backup.backup(filled, file)
    fill(filled, seed=5)
    before = kept(filled)
    with opened(filled) as store:
        claim = claimed(store, "gate")
        with pytest.raises(backup.BackupError, match="gate"):
            backup.restore(file, filled, force=True)
        assert kept(filled) == before
        store.release(claim)
    assert backup.restore(file, filled, force=True).streams == 3
    assert kept(filled) != before
    assert claim.generation < 99
    with opened(filled) as store:
        late = store.write([Write(claim, b"late", 99, ())])
    assert list(late) == ["gate"], "an owner of before the restoration writes nothing"


def test_the_state_before_a_damaged_one_is_backed_up_and_a_stream_without_any_is_named(tmp_path):
    place, file = tmp_path / "store", tmp_path / "night.backup"
    fill(place)
    with opened(place) as store:
        claim = claimed(store, "door")
        good = store.read("door")
        store.write([Write(claim, b"no state", good.clock + 1, ())])
        store.write(
            [Write(claimed(store, "gate"), b"neither", 9, ()), Write(claimed(store, "hall"), b"nor this", 9, ())]
        )
        store.write([Write(claimed(store, "gate"), b"neither", 10, ())])
        claimed(store, "empty")
    result = tribe_command("store", "backup", place, file, "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["streams"], said["stateless"], list(said["damaged"]), sorted(said["older"])) == (
        2,
        1,
        ["gate"],
        ["door", "hall"],
    )
    assert "gate" in message(result)
    backup.restore(file, tmp_path / "other")
    assert kept(tmp_path / "other")["door"] == (good.clock, good.requests, good.blob)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A store with three streams, and its backup."""
    folder = tmp_path_factory.mktemp("backed-up")
    fill(folder / "store")
    backup.backup(folder / "store", folder / "night.backup")
    return folder


def rewritten(content, change):
    """An archive whose members went through a function of name and bytes; None leaves a member out."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            if (data := change(name, old.read(name))) is not None:
                new.writestr(name, data)
    return file.getvalue()


def other_name(name, data):
    return data.replace(b'"gate"', b'"../x"') if name == "00000002.json" else data


def compressed(content):
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


DAMAGED = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "no archive": lambda content: b"PK" + content[2:500],
    "a bit of a state": lambda content: rewritten(
        content, lambda name, data: bytes((data[0] ^ 1,)) + data[1:] if name == "00000003.safetensors" else data
    ),
    "a state is missing": lambda content: rewritten(
        content, lambda name, data: None if name == "00000003.safetensors" else data
    ),
    "a stream is missing": lambda content: rewritten(
        content, lambda name, data: None if name == "00000002.json" else data
    ),
    "another name": lambda content: rewritten(content, other_name),
    "a wrong clock": lambda content: rewritten(
        content, lambda name, data: data.replace(b'"clock": 2', b'"clock": "2"') if name == "00000001.json" else data
    ),
    "another count": lambda content: rewritten(
        content, lambda name, data: data.replace(b'"streams": 3', b'"streams": 2') if name == "backup.json" else data
    ),
    "another version": lambda content: rewritten(
        content, lambda name, data: data.replace(b'"version": 1', b'"version": 2') if name == "backup.json" else data
    ),
    "compressed": compressed,
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_and_nothing_is_written(one, case, tmp_path):
    content = (one / "night.backup").read_bytes()
    file, target = tmp_path / "bad.backup", tmp_path / "new"
    file.write_bytes(DAMAGED[case](content))
    assert file.read_bytes() != content
    assert_refused(tribe_command("store", "restore", file, target), "bad.backup")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.backup"]


def test_a_killed_backup_leaves_the_old_file_and_a_killed_restoration_no_folder(one, tmp_path):
    place, file, target = one / "store", tmp_path / "night.backup", tmp_path / "new"
    file.write_bytes(b"the one of yesterday")
    killed("-m", "tribe", "store", "backup", place, file, when=Touches("os.rename", "night.backup"))
    assert file.read_bytes() == b"the one of yesterday"
    succeeded(tribe_command("store", "backup", place, file))
    for point in (Touches("open", ".state", 3), Touches("os.rename", "new")):
        killed("-m", "tribe", "store", "restore", file, target, when=point)
        assert not target.exists()
    succeeded(tribe_command("store", "restore", file, target))
    assert kept(target) == kept(place)


def test_a_killed_restoration_into_a_store_goes_on_with_the_same_command(one, tmp_path):
    """Streams are whole at every moment; those that were restored before the kill are not written again."""
    file, target = one / "night.backup", tmp_path / "store"
    fill(target, ("new",))
    killed("-m", "tribe", "store", "restore", file, target, when=Touches("os.rename", ".state", 2))
    between = kept(target)
    assert all(between[name] in (None, own) for name, own in kept(one / "store").items() if name in between)
    again = backup.restore
    with opened(target) as store:  # as after the end of the killed process's leases
        for entry in store.list():
            if entry.held:
                store.release(store.claim(entry.stream, entry.owner, 1))
    again(file, target)
    assert kept(target) == {**kept(one / "store"), "new": between["new"]}


def test_the_command_checks_backs_up_and_restores(one, tmp_path):
    file, target = tmp_path / "b.backup", tmp_path / "copy"
    assert "3 streams" in succeeded(tribe_command("store", one / "store")).stdout
    assert "3 streams" in succeeded(tribe_command("store", "check", one / "store")).stdout
    assert "3 streams" in succeeded(tribe_command("store", "backup", one / "store", file)).stdout
    assert "3 streams restored" in succeeded(tribe_command("store", "restore", file, target)).stdout
    said = json.loads(succeeded(tribe_command("store", "restore", file, target, "--json")).stdout)
    assert (said["streams"], said["equal"]) == (0, 3)
    assert file.read_bytes() == (one / "night.backup").read_bytes(), "equal streams, equal files"


def test_wrong_places_are_refused_and_nothing_is_made(one, tmp_path):
    assert_refused(tribe_command("store", "backup", tmp_path / "none", tmp_path / "x"), "ledger")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert_refused(tribe_command("store", "restore", one / "night.backup", tmp_path / "full"), "empty")
    assert_refused(tribe_command("store", "restore", tmp_path / "no.backup", tmp_path / "new"), "no.backup")
    assert [path.name for path in Path(tmp_path).rglob("*")] == ["full", "thesis.txt"]


def test_the_page_on_serving_backs_up_and_restores(one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(one / "store", "streams")
    page = (ROOT / "docs/serving.md").read_text()
    lines = re.findall(r"^tribe (store (?:backup|restore) .*)$", page, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        succeeded(tribe_command(*line.split()))
    assert kept("elsewhere") == kept("streams")
