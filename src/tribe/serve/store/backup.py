"""A store in one file: the newest state of every stream, with what a server needs to go on from it.

    00000001.json          stream, generation, clock, ids of requests, size and digest of its state
    00000001.safetensors   the state file of this stream
    backup.json            the number of streams, and a digest of all of the above

The file is a zip archive without compression. It is made while servers run: each state is whole, because a store
replaces a state at once or not at all, and streams do not depend on each other. Nothing in it is code, and nothing is
restored before all of it was checked.
"""

import contextlib
import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tribe.io import json_files, states
from tribe.io.files import open_regular, sync_folder, writing_atomically
from tribe.io.states import StateFileError
from tribe.serve.store import REDIS, Stored, StoreDamaged, StreamStore, Write, open_store
from tribe.serve.store.sqlite import LEDGER
from tribe.streams.names import check_request_id, check_stream_name

Progress = Callable[[int, int], None]  # of streams: done, all
FORMAT, VERSION = "tribe store", 1
INDEX = "backup.json"
MOST_HEAD = 2**20  # bytes of a JSON file in an archive
MOST_STATE = 2**34  # bytes of a state
GROUP, GROUP_BYTES = 64, 64 * 2**20  # states, and bytes of states, that are written together
LEASE = 60.0  # seconds for which a stream is claimed while it is restored
SHOWN = 6  # streams in a message
DATE = (1980, 1, 1, 0, 0, 0)  # of members: equal streams, equal files
HEAD = {"stream": str, "generation": int, "clock": int, "requests": [str], "bytes": int, "sha256": str}
WHOLE = {"format": str, "version": int, "streams": int, "sha256": str}


class BackupError(ValueError):
    """A backup that cannot be made or restored, and why; nothing was changed."""


class Member(NamedTuple):
    """A stream in a backup."""

    stream: str
    generation: int  # of the claim that the state was written with
    clock: int
    requests: list[str]
    bytes: int
    sha256: str


class BackedUp(NamedTuple):
    """The content of a backup."""

    streams: int
    bytes: int  # of all states
    stateless: int  # streams that have not been stored yet; not in the file
    older: dict[str, str]  # streams whose newest state is damaged, and how: the one before it is in the file
    damaged: dict[str, str]  # streams without a state that can be read, and why; not in the file


class Restored(NamedTuple):
    """The result of a restoration."""

    streams: int  # that were written
    bytes: int
    equal: int  # streams that were there already, with the same state


def _no_progress(done: int, total: int) -> None:
    """Take progress and do nothing."""


def backup(place: str | PathLike[str], path: str | PathLike[str], progress: Progress = _no_progress) -> BackedUp:
    """Write the newest state of every stream of a store to one file, atomically. Servers may go on meanwhile."""
    if not _is_redis(place) and not Path(place, LEDGER).exists():
        raise BackupError(
            f"{place} is not the folder of a store: it has no {LEDGER}. It is the --data of `tribe serve`"
        )
    store = open_store(place)
    try:
        with writing_atomically(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            return _write(store, archive, progress)
    finally:
        store.close()


def _write(store: StreamStore, archive: zipfile.ZipFile, progress: Progress) -> BackedUp:
    total, size, count, stateless = store.count(), 0, 0, 0
    older: dict[str, str] = {}
    damaged: dict[str, str] = {}
    whole = hashlib.sha256()
    progress(0, total)
    for seen, stream in enumerate(_names(store), 1):
        found, reasons = _readable(store, stream)
        if found is None:
            stateless += not reasons
            damaged |= {stream: "; ".join(reasons)} if reasons else {}
        else:
            older |= {stream: reasons[0]} if reasons else {}
            digest = hashlib.sha256(found.blob).hexdigest()
            head = Member(
                stream, found.generation, found.clock, list(found.requests), len(found.blob), digest
            )._asdict()
            content = json.dumps(head).encode()
            count, size = count + 1, size + len(found.blob)
            archive.writestr(zipfile.ZipInfo(f"{count:08d}.json", DATE), content)
            archive.writestr(zipfile.ZipInfo(f"{count:08d}.safetensors", DATE), found.blob)
            whole.update(content)
        progress(seen, max(seen, total))
    index = {"format": FORMAT, "version": VERSION, "streams": count, "sha256": whole.hexdigest()}
    archive.writestr(zipfile.ZipInfo(INDEX, DATE), json.dumps(index).encode())
    return BackedUp(count, size, stateless, older, damaged)


def _names(store: StreamStore) -> Iterator[str]:
    """The names of all streams, a page at a time."""
    after = ""
    while page := store.list(after=after):
        yield from (entry.stream for entry in page)
        after = page[-1].stream


def _readable(store: StreamStore, stream: str) -> tuple[Stored | None, list[str]]:
    """The newest state of a stream that can be read, and what is wrong with newer ones."""
    reasons = list[str]()
    for previous in (False, True):
        try:
            found = store.read(stream, previous=previous)
            if found is None and not previous:
                return None, []
            if found is not None:
                states.decode(found.blob, f"the state of stream {stream!r}")
                return found, reasons
        except (StoreDamaged, StateFileError) as error:
            reasons.append(str(error))
    return None, reasons


def restore(
    path: str | PathLike[str], place: str | PathLike[str], force: bool = False, progress: Progress = _no_progress
) -> Restored:
    """Write the streams of a backup into a store; other streams of the store stay as they are.

    Streams that are there with another state are an error, unless ``force``; streams that a server holds always are.
    Nothing is written before the whole file and all streams were checked. A new folder appears at once, and what a kill
    interrupts elsewhere goes on with the same call: streams that are equal stay.
    """
    with _opened(path) as archive:
        count = _check(path, archive, progress)
        if _is_redis(place) or Path(place, LEDGER).exists():
            store = open_store(place)
            try:
                return _fill(path, archive, count, store, force, progress)
            finally:
                store.close()
        return _fill_new(path, archive, count, Path(place), progress)


def _fill_new(path: Any, archive: zipfile.ZipFile, count: int, folder: Path, progress: Progress) -> Restored:
    """Restore into a folder that is not there, or is empty: it appears when all is in it."""
    if folder.exists() and any(folder.iterdir()):
        raise BackupError(f"{folder} is neither empty nor the folder of a store: name another one")
    hidden = folder.absolute().with_name(f".{folder.absolute().name}.{secrets.token_hex(8)}.tmp")
    hidden.parent.mkdir(parents=True, exist_ok=True)
    store = open_store(hidden)
    try:
        done = _fill(path, archive, count, store, False, progress)
    finally:
        store.close()
    os.replace(hidden, folder)
    sync_folder(hidden.parent)
    return done


def _fill(
    path: Any, archive: zipfile.ZipFile, count: int, store: StreamStore, force: bool, progress: Progress
) -> Restored:
    wanted, size, done = _wanted(path, archive, count, store, force), 0, 0
    owner, group = f"restore-{secrets.token_hex(8)}", list[Write]()
    for number in wanted:
        member = _head(path, archive, number)
        claim = store.claim(member.stream, owner, LEASE)
        if claim is None:
            _commit(store, group)
            raise BackupError(_held([member.stream], done))
        blob = archive.read(f"{number:08d}.safetensors")
        group.append(Write(claim, blob, member.clock, member.requests))
        size += len(blob)
        if len(group) == GROUP or sum(len(write.blob) for write in group) > GROUP_BYTES or number == wanted[-1]:
            done += _commit(store, group)
            group = []
            progress(count + done, count + len(wanted))
    return Restored(len(wanted), size, count - len(wanted))


def _commit(store: StreamStore, group: list[Write]) -> int:
    """Write states and release their streams; return how many."""
    refused = store.write(group) if group else {}
    for write in group:
        store.release(write.claim)
    for error in refused.values():
        raise error
    return len(group)


def _wanted(path: Any, archive: zipfile.ZipFile, count: int, store: StreamStore, force: bool) -> list[int]:
    """The numbers of the streams that are to be written; raise if some may not be."""
    wanted, held, there = [], [], []
    for number in range(1, count + 1):
        member = _head(path, archive, number)
        entry = store.entry(member.stream)
        if entry is not None and entry.written is not None:
            if _has(store, member):
                continue
            there.append(member.stream)
        if entry is not None and entry.held:
            held.append(member.stream)
        wanted.append(number)
    if held:
        raise BackupError(_held(held, 0))
    if there and not force:
        words = f"{len(there)} streams are there already with other states ({_some(there)})"
        raise BackupError(f"{words}. Nothing was written; --force replaces them")
    return wanted


def _has(store: StreamStore, member: Member) -> bool:
    """Whether a store has this very state of a stream."""
    try:
        found = store.read(member.stream)
    except StoreDamaged:
        return False
    return (
        found is not None
        and (found.clock, len(found.blob)) == (member.clock, member.bytes)
        and hashlib.sha256(found.blob).hexdigest() == member.sha256
    )


def _held(streams: list[str], done: int) -> str:
    words = f"a server holds {len(streams)} of the streams ({_some(streams)}): stop it, or end these streams"
    return f"{words}. {'Nothing was' if not done else f'{done} streams were'} written"


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


# -- reading -----------------------------------------------------------------------------------------------------------


def check(path: str | PathLike[str], progress: Progress = _no_progress) -> int:
    """Return how many streams a backup holds, or raise `BackupError` if any part of it is damaged."""
    with _opened(path) as archive:
        return _check(path, archive, progress)


@contextlib.contextmanager
def _opened(path: str | PathLike[str]) -> Iterator[zipfile.ZipFile]:
    """Open the archive in a file."""
    with open_regular(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise _damaged(path, f"it is not a backup, or was cut short ({error})") from None
        with archive:
            yield archive


def _damaged(path: Any, reason: object) -> BackupError:
    return BackupError(f"{path} is damaged: {reason}. Nothing was written; restore another backup")


def _content(path: Any, archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """The content of a member, whose size is known before it is read: nothing is compressed."""
    try:
        info = archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.file_size > most:
            raise _damaged(path, f"{name} is compressed or too large")
        return archive.read(info)
    except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        if isinstance(error, BackupError):
            raise
        raise _damaged(path, f"{name} cannot be read ({error})") from None


def _parsed(path: Any, archive: zipfile.ZipFile, name: str, schema: Any) -> tuple[Any, bytes]:
    content = _content(path, archive, name, MOST_HEAD)
    try:
        return json_files.parse(content, schema, name), content
    except ValueError as error:
        raise _damaged(path, error) from None


def _head(path: Any, archive: zipfile.ZipFile, number: int) -> Member:
    found, _ = _parsed(path, archive, f"{number:08d}.json", HEAD)
    return Member(*(found[name] for name in Member._fields))


def _check(path: Any, archive: zipfile.ZipFile, progress: Progress) -> int:
    """Check all of an archive, and return how many streams it holds."""
    index, _ = _parsed(path, archive, INDEX, WHOLE)
    if index["format"] != FORMAT or index["version"] != VERSION:
        raise BackupError(f"{path} is not a backup of a store, or one of another version of tribe")
    count, whole, names = index["streams"], hashlib.sha256(), set[str]()
    if not 0 <= count <= len(archive.namelist()) // 2:
        raise _damaged(path, f"{INDEX} says {count} streams, and the file has {len(archive.namelist())} parts")
    for number in range(1, count + 1):
        found, content = _parsed(path, archive, f"{number:08d}.json", HEAD)
        whole.update(content)
        member = Member(*(found[name] for name in Member._fields))
        try:
            check_stream_name(member.stream)
            for request in member.requests:
                check_request_id(request)
            blob = _content(path, archive, f"{number:08d}.safetensors", MOST_STATE)
            if member.clock < 0 or len(blob) != member.bytes or hashlib.sha256(blob).hexdigest() != member.sha256:
                raise _damaged(path, f"the state of stream {member.stream!r} is not what was backed up")
            states.decode(blob, f"the state of stream {member.stream!r}")
        except BackupError:
            raise
        except ValueError as error:  # also a StateFileError
            raise _damaged(path, error) from None
        names.add(member.stream)
        progress(number, 2 * count)
    if whole.hexdigest() != index["sha256"] or len(names) != count:
        raise _damaged(path, "its streams are not those that were backed up")
    return int(count)


def _is_redis(place: str | PathLike[str]) -> bool:
    return isinstance(place, str) and place.startswith(REDIS)
