"""Folders of images by class, ``<class>/NAME.JPEG``, as ImageNet and the sets beside it are published.

A class folder has the name of a synset in WordNet ("wnid"), such as n01440764, or the number of its class, 0 to 999.
Networks of ImageNet number their outputs by the sorted wnids.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.data.datasets import require_domain
from tribe.data.datasets.files import MissingData, positions
from tribe.data.images import Unreadable, is_image_file, read_images

COUNT = 1000  # classes of ImageNet
WNIDS = Path(__file__).parent / "data" / "imagenet_wnids.txt"


@cache
def wnids() -> Mapping[str, int]:
    """Return the 1,000 wnids of ImageNet, and the output of a network for each.

    >>> len(wnids()), wnids()["n01440764"]
    (1000, 0)
    """
    return {wnid: number for number, wnid in enumerate(WNIDS.read_text().split())}


def output_of(name: str) -> int | None:
    """Return the output of an ImageNet network for a class folder; None: it is not a class of ImageNet.

    >>> output_of("n01443537"), output_of("0007"), output_of("1000"), output_of("cat")
    (1, 7, None, None)
    """
    if name.isascii() and name.isdigit() and len(name) <= 4:
        return number if (number := int(name)) < COUNT else None
    return wnids().get(name)


def outputs_of(names: Iterable[str]) -> tuple[int, ...] | None:
    """Return the outputs of an ImageNet network for class folders, in order; None: some are not classes of ImageNet."""
    outputs = [output_of(name) for name in names]
    return tuple(number for number in outputs if number is not None) if outputs and None not in outputs else None


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the class folders in a folder, in the order of a network's outputs; other classes by name."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if Path(entry.path).is_dir() and not entry.name.startswith("."))
    outputs = outputs_of(names)
    return tuple(names if outputs is None else [name for _, name in sorted(zip(outputs, names, strict=True))])


class Listing(NamedTuple):
    """The images of a domain."""

    folder: Path
    names: tuple[str, ...]  # "class/NAME.JPEG"
    labels: Tensor


class ListedImages(ABC):
    """A base class of data sets: images in class folders, one folder a domain. Only file names are held in memory."""

    unreadable: Unreadable
    workers: int | None

    @property
    @abstractmethod
    def side(self) -> int:
        """Rows and columns of the images."""

    @property
    @abstractmethod
    def domains(self) -> Sequence[str]:
        """The names of the domains."""

    @abstractmethod
    def image_folder(self, domain: str) -> Path:
        """Return the folder that holds the class folders of a domain."""

    def list_classes(self, folder: Path) -> tuple[str, ...]:
        """Return the class folders in a folder, in the order of the networks' outputs."""
        return class_folders(folder)

    def select(self, names: list[str], folder: Path) -> list[str]:
        """Return the images of a folder that are played, in order."""
        return names

    def resize(self, domain: str) -> int | None:
        """Return the length of the shorter side before the crop; None if the images are cropped already."""
        return None

    @cached_property
    def classes(self) -> Sequence[str]:
        """The class folders of the first domain; all domains have the same."""
        return self.list_classes(self.image_folder(self.domains[0]))

    @property
    def outputs(self) -> Sequence[int] | None:
        """The outputs of an ImageNet network that are these classes."""
        return outputs_of(self.classes)

    def labels(self, domain: str) -> Tensor:
        """Return the positions of the images' classes in `classes`."""
        return self.listing(domain).labels

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Decode some images."""
        listing = self.listing(domain)
        return read_images(
            [listing.folder / listing.names[i] for i in positions(index, len(listing.names), domain)],
            (self.side, self.side),
            hint="the images of this folder are cropped already, and those of a stream have one size",
            resize=self.resize(domain),
            unreadable=self.unreadable,
            warned=self._warned,
            workers=self.workers,
        )

    def listing(self, domain: str) -> Listing:
        """Return the images of a domain, listed once."""
        require_domain(domain, self.domains)
        if domain not in self._listings:
            folder, classes = self.image_folder(domain), self.classes
            if differing := set(classes) ^ set(self.list_classes(folder)):
                raise ValueError(
                    f"{folder} has other classes than {self.image_folder(self.domains[0])}: {min(differing)!r} is in "
                    "only one of them, so labels would be wrong. Unpack the published archive again"
                )
            names = [
                f"{kind}/{name}"
                for kind in classes
                for name in sorted(os.listdir(folder / kind))
                if is_image_file(name)
            ]
            if not names:
                raise MissingData(f"{folder} holds no images in its class folders. Unpack the published archive again")
            names = self.select(names, folder)
            number = {kind: k for k, kind in enumerate(classes)}
            labels = torch.tensor([number[name.partition("/")[0]] for name in names])
            listing = Listing(folder, tuple(names), labels)
            for other in self._listings.values():
                if other.names == listing.names:  # 75 domains of ImageNet-C share one list of 50,000 names
                    listing = other._replace(folder=folder)
            self._listings[domain] = listing
        return self._listings[domain]

    @cached_property
    def _warned(self) -> set[Path]:
        return set()

    @cached_property
    def _listings(self) -> dict[str, Listing]:
        return {}
