"""Blob files: one file for each written state. It is never changed, and it is removed when no ledger names it.

A name is made from a hash of the stream's name, so that no name leaves its folder, and from the generation and the
clock. It ends in random digits: a name is used once, so a late removal never hits a newer file.
"""

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from tribe.io.files import read_regular, sync_folder, write_atomically, write_new

HASH = 32  # digits of a stream's hash: 128 bits, so two streams never share one
NAME = re.compile(r"([0-9a-f]{32})-([0-9]{1,16})-[0-9]{1,16}-[0-9a-f]{16}\.state")
FILE = re.compile(rf"\.?({NAME.pattern})(?:\.[0-9a-f]{{16}}\.tmp)?")  # a blob, or the temporary file that becomes one


def stream_hash(stream: str) -> str:
    """The part of a file's name that says whose state it is."""
    return hashlib.sha256(stream.encode()).hexdigest()[:HASH]


def new_name(stream: str, generation: int, clock: int) -> str:
    """A name for a blob, which no other blob has."""
    return f"{stream_hash(stream)}-{generation}-{clock}-{secrets.token_hex(8)}.state"


class Blobs:
    """The blob files in a folder, spread over up to 256 folders by the first two digits of their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Where a blob is; ValueError for a name that `new_name` does not make."""
        if not NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not the name of a blob")
        return self.folder / name[:2] / name

    def write(self, name: str, blob: bytes) -> None:
        """Write a blob to the disk."""
        self._make_folders([name])
        write_atomically(self.path(name), blob)

    def write_many(self, blobs: Mapping[str, bytes]) -> None:
        """Write blobs to the disk, by their names; after an error some may be there, and torn."""
        self._make_folders(blobs)
        write_new({self.path(name): blob for name, blob in blobs.items()})

    def _make_folders(self, names: Iterable[str]) -> None:
        missing = [folder for folder in {self.path(name).parent for name in names} if not folder.is_dir()]
        for folder in missing:
            folder.mkdir(exist_ok=True)
        if missing:
            sync_folder(self.folder)

    def read(self, name: str, largest: int) -> bytes:
        """Read a blob of at most so many bytes."""
        return read_regular(self.path(name), largest)

    def remove(self, names: Iterable[str]) -> None:
        """Remove blobs that no ledger names any more. What cannot be removed now is a leftover, removed later."""
        for name in names:
            with contextlib.suppress(OSError):
                self.path(name).unlink(missing_ok=True)

    def any(self) -> bool:
        """Whether there is any blob."""
        return any(True for _ in self._files())

    def sweep(self, generations: Mapping[str, int], named: Collection[str]) -> None:
        """Remove what killed writers left: files that no ledger names, of generations that cannot write any more.

        A file of the current generation may be one whose writer is about to add it to the ledger, so it stays until the
        next claim. A file of an unknown stream stays, too: the ledger may have been lost.

        Args:
            generations: the current generation of each stream, by `stream_hash`.
            named: the blobs that the ledger names.
        """
        folders = {whose[:2] for whose in generations}
        for path, name, whose, generation in self._files(folders):
            if name not in named and generation < generations.get(whose, 0):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _files(self, folders: Collection[str] | None = None) -> Iterator[tuple[Path, str, str, int]]:
        """The path, name, stream hash and generation of all blobs and temporary files."""
        for folder in self.folder.iterdir() if folders is None else map(self.folder.joinpath, folders):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
                for entry in entries:
                    if match := FILE.fullmatch(entry.name):
                        yield Path(entry.path), match[1], match[2], int(match[3])
