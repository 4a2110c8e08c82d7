"""ImageNet-C as published: ``<corruption>/<severity>/<wnid>/*.JPEG``, pictures decoded when they are read.

Hendrycks & Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, ICLR 2019.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.datasets import register
from tribe.datasets.files import MissingData, data_root, find, positions, unpack
from tribe.datasets.made import check_made
from tribe.datasets.pictures import Unreadable, is_picture, read_pictures
from tribe.fields import is_whole, plain_numbers, require
from tribe.registry import nearest
from tribe.scenarios.orders import IMAGENET_C

SIZE = (224, 224)
ARCHIVE = "https://zenodo.org/records/2235448/files/{}.tar"
GROUPS = {  # the published archives, and the corruptions in each
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}


class _Listing(NamedTuple):
    folder: Path
    names: tuple[str, ...]  # "wnid/NAME.JPEG"
    labels: Tensor


@register("imagenet-c")
@dataclass(frozen=True)
class ImageNetC:
    """The ImageNet validation images under each corruption, 224x224; a domain is a corruption at a severity, "fog@5".

    Only names are held; `ids` is how the field plays its subset of 5,000. Classes are the folders ("wnids"), sorted, so
    that their numbers are those of the networks, whichever of them `ids` selects.
    """

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = IMAGENET_C
    severities: Sequence[int] = (5,)
    ids: str | None = None  # file with a line "wnid/NAME.JPEG" or "NAME.JPEG" an image: these, in this order; None: all
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid
    workers: int = 4  # threads that decode

    clean_name: ClassVar[str] = "imagenet"  # the clean data set it can be made from
    folder: ClassVar[str] = "ImageNet-C"

    def __post_init__(self) -> None:
        plain_numbers(self)
        for severity in self.severities:
            require(severity in range(1, 6), "a severity is 1 to 5", severity)
        require(self.unreadable in ("raise", "skip"), "unreadable is 'raise' or 'skip'", self.unreadable)
        require(is_whole(self.workers, least=1), "workers is a number of threads, at least 1", self.workers)

    @cached_property
    def classes(self) -> Sequence[str]:
        """The wnids of the first domain's folder; every other has the same."""
        return _subfolders(self._folder(self.domains[0]))

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every severity asked for."""
        return tuple(f"{name}@{severity}" for name in self.corruptions for severity in self.severities)

    def labels(self, domain: str) -> Tensor:
        """The classes' numbers, in the order of the names, or of `ids`."""
        return self._listing(domain).labels

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Decode some images."""
        listing = self._listing(domain)
        paths = [listing.folder / listing.names[i] for i in positions(index, len(listing.names), domain)]
        return read_pictures(
            paths,
            SIZE,
            hint="ImageNet-C is published at that size",
            unreadable=self.unreadable,
            warned=self._warned,
            workers=self.workers,
        )

    @cached_property
    def _warned(self) -> set[Path]:
        return set()

    @cached_property
    def _listings(self) -> dict[str, _Listing]:
        return {}

    def _listing(self, domain: str) -> _Listing:
        if domain not in self.domains:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.domains)}")
        if domain not in self._listings:
            self._listings[domain] = self._list(domain)
        return self._listings[domain]

    def _list(self, domain: str) -> _Listing:
        folder, classes = self._folder(domain), self.classes
        if differing := set(classes) ^ set(_subfolders(folder)):
            raise ValueError(
                f"{folder} has other classes than {self._folder(self.domains[0])}: {min(differing)!r} is in one only, "
                "so that labels would be wrong. Unpack the published archive again"
            )
        names = [f"{wnid}/{name}" for wnid in classes for name in _pictures(folder / wnid)]
        if not names:
            raise MissingData(f"{folder} holds no pictures in class folders. Unpack the published archive again")
        if self._ids is not None:
            names = _selected(names, self._ids, f"{folder}, as listed in {self.ids}")
        number = {wnid: k for k, wnid in enumerate(classes)}
        labels = torch.tensor([number[name.partition("/")[0]] for name in names])
        for other in self._listings.values():
            if other.names == tuple(names):  # as published: 75 domains share one list of 50,000 names
                return other._replace(folder=folder)
        return _Listing(folder, tuple(names), labels)

    @cached_property
    def _ids(self) -> Sequence[str] | None:
        if self.ids is None:
            return None
        path = Path(self.ids).expanduser()
        if not path.is_file():
            raise MissingData(f"no list of image ids at {path}; expected a text file with one id a line")
        ids = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        if not ids:
            raise ValueError(f"{path} lists no images; expected one id a line")
        return ids

    def _folder(self, domain: str) -> Path:
        name, _, severity = domain.partition("@")
        groups = [group for group, members in GROUPS.items() if name in members] or list(GROUPS)
        root = data_root(self.data) / self.folder
        make = f"tribe corrupt imagenet --images VAL --severity {severity} --corruptions {name} --out {root.parent}"
        check_made(root, domain, make)
        published = unpack(ARCHIVE.format(groups[0] if len(groups) == 1 else "GROUP"), root)
        hint = f"To make it from the clean validation pictures VAL: {make}. {published}"
        places = [f"{name}/{severity}", *(f"{group}/{name}/{severity}" for group in groups)]
        return find(root, *places, what=f"{self.folder} {domain}", hint=hint)


def _subfolders(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _pictures(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if is_picture(name))


def _selected(names: Sequence[str], ids: Sequence[str], where: str) -> list[str]:
    """The names that the ids mean, in their order."""
    known: dict[str, list[str]] = {name: [name] for name in names}
    for name in names:
        known.setdefault(name.partition("/")[2], []).append(name)
    for given in ids:
        if len(meant := known.get(given, [])) != 1:
            raise ValueError(f"{given!r} is {len(meant)} images in {where}; expected one for each line")
    selected = [known[given][0] for given in ids]
    if len(set(selected)) != len(ids):
        raise ValueError(f"an image is listed twice; expected {where} to be played once each")
    return selected
