"""Your own images: ``root/<domain>/<class>/*``, or without labels ``root/<domain>/*``."""

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.data.datasets import register, require_domain
from tribe.data.datasets.files import MissingData, positions
from tribe.data.datasets.imagenet import outputs_of, wnids
from tribe.data.images import (
    LARGEST_FILE,
    SKIP,
    ImageFileError,
    Unreadable,
    list_folder,
    read_image,
    read_images,
)
from tribe.fields import Count, check_fields, require
from tribe.io.files import read_regular, regular_size
from tribe.registry import nearest

HASHED = 16  # images of a domain whose bytes are part of its digest; of the others only names and sizes are
UNREADABLE = b"unreadable"  # in a digest, instead of a size or of bytes
LAYOUT = "expected root/<domain>/<class>/images, or root/<domain>/images without labels"


class _Domain(NamedTuple):
    paths: tuple[Path, ...]
    kinds: tuple[str | None, ...]  # the class folder of each image; None: no label


@register("folder")
@dataclass(frozen=True)
class Folder:
    """Images in folders: domains sorted by name, each in the order of class and file names; hidden files are ignored.

    A domain has class folders, or its images have no labels (-1) and the scenario "replay" plays them. Only file names
    are held in memory.
    """

    root: str  # the folder of the domains
    one_domain: bool = False  # the root is a domain itself: its folders are classes
    size: Count | None = None  # resize the shorter side, crop the middle; None: all images have one size already
    class_names: Sequence[str] | None = None  # in the order of the network's outputs; None: all class folders, sorted
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid
    workers: Count | None = None  # threads that decode; None: one for each core

    def __post_init__(self) -> None:
        check_fields(self)
        if self.class_names is not None:
            several = isinstance(self.class_names, Sequence) and not isinstance(self.class_names, str)
            text = several and all(isinstance(name, str) for name in self.class_names)
            different = text and len(set(self.class_names)) == len(self.class_names)
            require(different, "class_names are different names of folders, each a text such as '0'", self.class_names)

    @cached_property
    def classes(self) -> Sequence[str]:
        """``class_names``, or the class folders of all domains, sorted; empty if no image has a label."""
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
    def outputs(self) -> Sequence[int] | None:
        """The outputs of an ImageNet network that are the classes, if they have the names of ImageNet's ("wnids")."""
        return outputs_of(self.classes) if all(name in wnids() for name in self.classes) else None

    @property
    def domains(self) -> Sequence[str]:
        """The folders in the root, sorted."""
        return tuple(self._domains)

    def labels(self, domain: str) -> Tensor:
        """Return the numbers of the classes, in file order; -1 where there are no class folders."""
        number: dict[str | None, int] = {kind: k for k, kind in enumerate(self.classes)}
        return torch.tensor([number.get(kind, -1) for kind in self._domain(domain).kinds])

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Decode some images."""
        paths = self._domain(domain).paths
        return read_images(
            [paths[i] for i in positions(index, len(paths), domain)],
            self._size,
            hint="all images of a stream have one size; size= would resize and crop them",
            resize=self.size,
            unreadable=self.unreadable,
            workers=self.workers,
        )

    def digest(self, domain: str) -> str:
        """Return a hash of all names and sizes and of the bytes of a few files."""
        paths = self._domain(domain).paths
        names = [os.fsencode(path.relative_to(self._root)) for path in paths]
        sizes = [self._read(path, lambda path, most: b"%d" % regular_size(path, most)) for path in paths]
        contents = [self._read(path, read_regular) for path in paths[:: max(1, len(paths) // HASHED)]]
        head = b"\n".join(b"%b %b" % line for line in zip(names, sizes, strict=True))
        return hashlib.sha256(b"".join((head, *contents))).hexdigest()

    def _read(self, path: Path, read: Callable[[Path, int], bytes]) -> bytes:
        """Return bytes about an image file; `UNREADABLE` if it cannot be read and such images are skipped."""
        try:
            return read(path, LARGEST_FILE)
        except OSError as error:
            if self.unreadable == "raise":
                raise ImageFileError(f"{path} cannot be read as an image: {error.strerror}; {SKIP}") from error
            return UNREADABLE

    @property
    def _root(self) -> Path:
        return Path(self.root).expanduser()

    @cached_property
    def _size(self) -> tuple[int, int]:
        """Height and width: ``size``, or those of the first readable image."""
        if self.size is not None:
            return self.size, self.size
        for path in (path for domain in self._domains.values() for path in domain.paths):
            try:
                height, width = read_image(path).shape[1:]
            except ImageFileError as error:
                if self.unreadable == "raise":
                    raise ImageFileError(f"{error}; {SKIP}") from error
                continue
            return height, width
        raise ImageFileError(f"none of the images in {self._root} can be read")

    def _domain(self, name: str) -> _Domain:
        require_domain(name, self.domains)
        return self._domains[name]

    @cached_property
    def _domains(self) -> dict[str, _Domain]:
        if not self._root.is_dir():
            raise MissingData(f"no folder {self._root}; {LAYOUT}")
        folders, images, ignored = list_folder(self._root)
        if self.one_domain:
            return {self._root.name: _list_domain(self._root, ignored)}
        if images:
            raise ValueError(f"{self._root} itself holds images, such as {images[0].name}; {LAYOUT}")
        if not folders:
            raise MissingData(f"{self._root} holds no folders; {LAYOUT}")
        if all(folder.name in wnids() for folder in folders):
            instead = f"--dataset imagenet --data {self._root}, or the folder above it"
            raise ValueError(f"{self._root} holds the classes of ImageNet, not domains; {LAYOUT}. Use {instead}")
        domains = {folder.name: _list_domain(folder, ignored) for folder in folders}
        if ignored:
            more = f" and {len(ignored) - 1} more" if len(ignored) > 1 else ""
            warnings.warn(f"ignored, no image by its name: {ignored[0]}{more}", stacklevel=2)
        return domains


def holds_one_domain(root: Path) -> bool:
    """Return whether a folder holds images, or folders with images: class folders, not domains with class folders."""
    if not root.is_dir():
        return False
    folders, images, _ = list_folder(root)
    return bool(images) or any(list_folder(folder)[1] for folder in folders)


def _list_domain(folder: Path, ignored: list[Path]) -> _Domain:
    """List a domain; add the files in it that are not images to ``ignored``."""
    kinds, images, others = list_folder(folder)
    ignored += others
    if kinds and images:
        both = f"images, such as {images[0].name}, beside class folders, such as {kinds[0].name}"
        raise ValueError(f"{folder} holds {both}; {LAYOUT}")
    labels: list[str | None] = [None] * len(images)
    for kind in kinds:
        deeper, inside, others = list_folder(kind)
        if deeper:
            raise ValueError(f"{kind} is a class folder, but holds a folder, {deeper[0].name}; {LAYOUT}")
        images += inside
        labels += [kind.name] * len(inside)
        ignored += others
    if not images:
        raise MissingData(f"domain {folder} holds no images; remove it, or add some: {LAYOUT}")
    return _Domain(tuple(images), tuple(labels))
