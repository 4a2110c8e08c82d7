"""Your own pictures: ``root/<domain>/<class>/*``, or without labels ``root/<domain>/*``."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.datasets import register
from tribe.datasets.files import MissingData, positions
from tribe.datasets.pictures import SKIP, PictureError, Unreadable, is_picture, read_picture, read_pictures
from tribe.fields import is_whole, plain_numbers, require
from tribe.registry import nearest

LOOKED_AT = 16  # pictures of a domain whose bytes are part of what it is; of all others their names and sizes are
LAYOUT = "expected root/<domain>/<class>/pictures, or root/<domain>/pictures without labels"


class _Domain(NamedTuple):
    paths: tuple[Path, ...]
    kinds: tuple[str | None, ...]  # the class folder of each picture; None: no label


@register("folder")
@dataclass(frozen=True)
class Folder:
    """Pictures in folders, domains by name, each in the order of class and file names; hidden files are left out.

    A domain either has class folders or is unlabelled (-1), which the scenario "replay" plays. Only names are held;
    pictures are decoded when they are read.
    """

    root: str  # the folder of the domains
    size: int | None = None  # resize the shorter side, crop the middle; None: as they are, all of one size
    class_names: Sequence[str] | None = None  # in the order of the network's outputs; None: all class folders, sorted
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid
    workers: int = 4  # threads that decode

    def __post_init__(self) -> None:
        plain_numbers(self)
        require(self.size is None or is_whole(self.size, least=1), "size is a number of pixels, at least 1", self.size)
        require(self.unreadable in ("raise", "skip"), "unreadable is 'raise' or 'skip'", self.unreadable)
        require(is_whole(self.workers, least=1), "workers is a number of threads, at least 1", self.workers)
        if self.class_names is not None:
            different = not isinstance(self.class_names, str) and len(set(self.class_names)) == len(self.class_names)
            require(different, "class_names are different names of folders", self.class_names)

    @cached_property
    def classes(self) -> Sequence[str]:
        """As given, or the class folders of all domains, sorted; none if nothing is labelled."""
        kinds = sorted({kind for domain in self._domains.values() for kind in domain.kinds if kind is not None})
        if self.class_names is None:
            return tuple(kinds)
        if unknown := [kind for kind in kinds if kind not in self.class_names]:
            raise ValueError(
                f"{self._root} has a class folder {unknown[0]!r} that class_names lacks: "
                f"{nearest(unknown[0], self.class_names)}"
            )
        return tuple(self.class_names)

    @property
    def domains(self) -> Sequence[str]:
        """The folders in the root, sorted."""
        return tuple(self._domains)

    def labels(self, domain: str) -> Tensor:
        """The classes' numbers in file order; -1 where there are no class folders."""
        number: dict[str | None, int] = {kind: k for k, kind in enumerate(self.classes)}
        return torch.tensor([number.get(kind, -1) for kind in self._domain(domain).kinds])

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Decode some pictures."""
        paths = self._domain(domain).paths
        return read_pictures(
            [paths[i] for i in positions(index, len(paths), domain)],
            self._size,
            hint="all images of a stream have one size; size= would resize and crop them",
            fit=self.size,
            unreadable=self.unreadable,
            warned=self._warned,
            workers=self.workers,
        )

    def digest(self, domain: str) -> str:
        """Which pictures they are, see `tribe.datasets.fingerprint`."""
        paths = self._domain(domain).paths
        names = [f"{path.relative_to(self._root)} {path.stat().st_size}" for path in paths]
        seen = hashlib.sha256("\n".join(names).encode())
        for path in paths[:: max(1, len(paths) // LOOKED_AT)]:
            seen.update(path.read_bytes())
        return seen.hexdigest()

    @property
    def _root(self) -> Path:
        return Path(self.root).expanduser()

    @cached_property
    def _warned(self) -> set[Path]:
        return set()

    @cached_property
    def _size(self) -> tuple[int, int]:
        """Height and width: as asked for, or of the first picture that can be read."""
        if self.size is not None:
            return self.size, self.size
        for path in (path for domain in self._domains.values() for path in domain.paths):
            try:
                height, width = read_picture(path).shape[1:]
            except PictureError as error:
                if self.unreadable == "raise":
                    raise PictureError(f"{error}; {SKIP}") from error
            else:
                return height, width
        raise PictureError(f"none of the pictures in {self._root} can be read")

    def _domain(self, name: str) -> _Domain:
        if name not in self._domains:
            raise ValueError(f"unknown domain {name!r}: {nearest(name, self._domains)}")
        return self._domains[name]

    @cached_property
    def _domains(self) -> dict[str, _Domain]:
        if not self._root.is_dir():
            raise MissingData(f"there is no folder {self._root}; {LAYOUT}")
        folders, pictures, ignored = _entries(self._root)
        if pictures:
            raise ValueError(f"{self._root} holds pictures itself, such as {pictures[0].name}; {LAYOUT}")
        if not folders:
            raise MissingData(f"{self._root} holds no folders; {LAYOUT}")
        domains = {}
        for folder in folders:
            domains[folder.name], strange = _read_domain(folder)
            ignored += strange
        if ignored:
            more = f" and {len(ignored) - 1} more" if len(ignored) > 1 else ""
            warnings.warn(f"left out, by the name no picture: {ignored[0]}{more}", stacklevel=2)
        return domains


def _read_domain(folder: Path) -> tuple[_Domain, list[Path]]:
    """A domain, and the files in it that are no pictures."""
    kinds, pictures, ignored = _entries(folder)
    if kinds and pictures:
        both = f"pictures, such as {pictures[0].name}, beside class folders, such as {kinds[0].name}"
        raise ValueError(f"{folder} holds {both}; {LAYOUT}")
    found: list[tuple[Path, str | None]] = [(path, None) for path in pictures]
    for kind in kinds:
        deeper, pictures, strange = _entries(kind)
        if deeper:
            raise ValueError(f"{kind} is a class folder, but holds a folder, {deeper[0].name}; {LAYOUT}")
        found += [(path, kind.name) for path in pictures]
        ignored += strange
    if not found:
        raise MissingData(f"domain {folder} holds no pictures; remove it, or add some: {LAYOUT}")
    paths, names = zip(*found, strict=True)
    return _Domain(paths, names), ignored


def _entries(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Folders, pictures and other files, each sorted by name; what is hidden is not there."""
    folders: list[Path] = []
    pictures: list[Path] = []
    others: list[Path] = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not entry.name.startswith("."):
                kind = folders if entry.is_dir() else pictures if is_picture(entry.name) else others
                kind.append(Path(entry.path))
    return folders, pictures, others
