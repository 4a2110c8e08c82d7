"""The files of states in the folder of a store, and what they say of a ledger that was damaged.

    blobs/ab/NAME.state.new   is written, and not committed yet: a killed writer leaves it
    blobs/ab/NAME.state       was committed: it got this name after its transaction
    adopt/NAME.state          was committed, by a transaction that the ledger has lost; the next claim goes on from it
    set-aside/NAME.state      the same; it is never read

Without the difference between the first two, a lost transaction would look like a killed writer: SQLite skips what it
cannot read at the end of a damaged write-ahead log, without an error.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tribe.io.files import sync_folder
from tribe.serve.store import StoreDamaged, StoreDown

BLOBS, ADOPT, SET_ASIDE = "blobs", "adopt", "set-aside"
NEW = ".new"
BLOB = re.compile(r"([0-9a-f]{32})-([0-9]+)-[0-9]+-[0-9a-f]{16}\.state")  # hash of the stream, generation, clock


class BlobFile(NamedTuple):
    """A file of a state."""

    path: Path
    name: str  # of the blob
    stream: str  # `stream_hash`
    order: tuple[int, int]  # generation and clock: a stream's committed states never go back in it
    committed: bool

    @classmethod
    def of(cls, path: Path) -> "BlobFile | None":
        """Return the file of a path; None if it is none of a store."""
        name = path.name.removesuffix(NEW)
        if (match := BLOB.fullmatch(name)) is None:
            return None
        return cls(path, name, match[1], (int(match[2]), int(name.split("-")[2])), name == path.name)


class KnownStream(NamedTuple):
    """An entry of the ledger about a stream."""

    generation: int
    newest: tuple[int, int] | None  # generation and clock of its current state; None: it has none
    deleted: bool = False


class Blobs:
    """The files of states, spread over up to 256 folders by the first two digits of their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / BLOBS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreDown(f"the store {folder} cannot be made: {error.strerror}") from error
        self._adopt = folder / ADOPT
        for inside in (self.folder, self._adopt, folder / SET_ASIDE):
            refuse_link(inside)

    def path(self, name: str) -> Path:
        """Return the path of a committed blob."""
        if not BLOB.fullmatch(name):
            raise StoreDamaged(f"{name[:80]!r} is not the name of a state. Restore the ledger from a backup")
        return self.folder / name[:2] / name

    def new_path(self, name: str) -> Path:
        """Return the path of a blob that is not committed."""
        path = self.path(name)
        return path.with_name(path.name + NEW)

    def make_folders(self, names: Iterable[str]) -> None:
        """Make the folders of blobs that are about to be written."""
        made = False
        for folder in {self.path(name).parent for name in names}:
            refuse_link(folder)
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                made = True
        if made:
            sync_folder(self.folder)

    def read(self, name: str) -> bytes:
        """Return the content of a blob that the ledger names; its writer may be about to rename it."""
        for path in (self.path(name), self.new_path(name)):
            with contextlib.suppress(FileNotFoundError):
                return path.read_bytes()
        return self.path(name).read_bytes()

    def publish(self, names: Iterable[str]) -> None:
        """Give blobs that were committed their names. Until that succeeds, `read` finds them by the old ones."""
        for name in names:
            with contextlib.suppress(OSError):
                os.replace(self.new_path(name), self.path(name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove blobs that the ledger no longer names. If one cannot be removed now, `sweep` does it later."""
        for name in names:
            for path in (self.path(name), self.new_path(name)):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def files(self, stream: str | None = None) -> list[BlobFile]:
        """Return the files of all streams, or of one by its hash. List them before the ledger is read: see `sweep`."""
        folders = self.folder.iterdir() if stream is None else [self.folder / stream[:2]]
        found = (BlobFile.of(path) for folder in folders for path in _inside(folder))
        return [file for file in found if file is not None and stream in (None, file.stream)]

    def sweep(
        self, files: Iterable[BlobFile], known: Mapping[str, KnownStream], named: Collection[str]
    ) -> list[BlobFile]:
        """Remove what killed writers left, and return the files that the ledger cannot explain.

        The ledger, with the streams ``known`` by `stream_hash` and the blobs that it names, was read after the files
        were listed: so a file that was committed by then is in the ledger, or is older than what is. Files that are not
        committed stay while their generation can write; a later claim removes them.
        """
        unexplained = []
        for file in files:
            stream = known.get(file.stream)
            if file.name in named:
                if not file.committed:
                    self.publish([file.name])
            elif not file.committed:
                if stream is not None and file.order[0] < stream.generation:
                    _unlink(file.path)
            elif (
                stream is not None
                and file.order[0] <= stream.generation
                and (stream.deleted or (stream.newest is not None and file.order <= stream.newest))
            ):
                _unlink(file.path)
            else:
                unexplained.append(file)
        return unexplained

    def move(self, files: Iterable[BlobFile], place: str) -> None:
        """Move files to a folder of the store: `ADOPT` or `SET_ASIDE`."""
        target = self.folder.parent / place
        target.mkdir(exist_ok=True)
        for file in files:
            os.replace(file.path, target / file.name)

    def adoptable(self, stream: str) -> list[BlobFile]:
        """Return the states of a stream, by its hash, that wait to be adopted: the newest first."""
        found = (BlobFile.of(path) for path in _inside(self._adopt))
        return sorted((f for f in found if f is not None and f.stream == stream), key=lambda f: f.order, reverse=True)

    def adopt(self, file: BlobFile) -> None:
        """Move a file back among the committed blobs."""
        self.make_folders([file.name])
        os.replace(file.path, self.path(file.name))


def refuse_link(path: Path) -> None:
    """Raise `StoreDown` for a symbolic link inside a store: states would be written where it leads."""
    if path.is_symlink():
        raise StoreDown(f"{path} is a symbolic link: a store writes within its folder, which may be a link itself")


def _inside(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from folder.iterdir()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
