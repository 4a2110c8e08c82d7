"""ImageNet-C as published: ``<corruption>/<severity>/<wnid>/*.JPEG``, decoded when they are read.

Hendrycks & Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, ICLR 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.data.corruptions import require_severity
from tribe.data.datasets import register
from tribe.data.datasets.array_files import positions
from tribe.data.datasets.class_folders import class_folders, list_images, outputs_of
from tribe.data.datasets.image_files import Unreadable, check_reading, read_images
from tribe.data.datasets.locations import MissingData, data_root, download_hint, find
from tribe.data.datasets.manifest import require_block
from tribe.data.scenarios.orders import IMAGENET_C
from tribe.fields import plain_numbers
from tribe.io.files import read_regular
from tribe.registry import nearest

SIZE = (224, 224)
LARGEST_LIST = 2**26  # bytes; a list of all 50,000 images has 2 MB
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
    """The ImageNet validation images under each corruption, 224x224. A domain is a corruption at a severity, "fog@5".

    Only file names are held in memory. `ids` selects images, such as the usual subset of 5,000. Classes are the folders
    ("wnids") in the order of the networks' outputs, also if `ids` selects only some of them.
    """

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = IMAGENET_C
    severities: Sequence[int] = (5,)
    ids: str | None = None  # file with one line "wnid/NAME.JPEG" or "NAME.JPEG" per image, in this order; None: all
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid; leave out folders
    workers: int | None = None  # threads that decode; None: one for each core

    clean_name: ClassVar[str] = "imagenet"  # the clean data set that it is made from
    folder: ClassVar[str] = "ImageNet-C"

    def __post_init__(self) -> None:
        plain_numbers(self)
        for severity in self.severities:
            require_severity(severity)
        check_reading(self.unreadable, self.workers)

    @cached_property
    def classes(self) -> Sequence[str]:
        """The wnids of the first domain's folder; all domains have the same."""
        return class_folders(self._folder(self.domains[0]))

    @property
    def outputs(self) -> Sequence[int] | None:
        """The outputs of an ImageNet network that are these classes."""
        return outputs_of(self.classes)

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every chosen severity."""
        return tuple(f"{name}@{severity}" for name in self.corruptions for severity in self.severities)

    def labels(self, domain: str) -> Tensor:
        """The numbers of the classes, in the order of the file names, or of `ids`."""
        return self._listing(domain).labels

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Decode some images."""
        listing = self._listing(domain)
        paths = [listing.folder / listing.names[i] for i in positions(index, len(listing.names), domain)]
        return read_images(
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
        if differing := set(classes) ^ set(class_folders(folder)):
            raise ValueError(
                f"{folder} has other classes than {self._folder(self.domains[0])}: {min(differing)!r} is in only one "
                "of them, so labels would be wrong. Unpack the published archive again"
            )
        names = list_images(folder, classes, self.unreadable)
        if not names:
            raise MissingData(f"{folder} holds no images in class folders. Unpack the published archive again")
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
            raise MissingData(f"no list of image ids at {path}; expected a text file with one id per line")
        try:
            lines = read_regular(path, LARGEST_LIST).decode().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text file ({error}); expected one id per line") from error
        ids = [line.strip() for line in lines if line.strip()]
        if not ids:
            raise ValueError(f"{path} lists no images; expected one id per line")
        return ids

    def _folder(self, domain: str) -> Path:
        name, _, severity = domain.partition("@")
        groups = [group for group, members in GROUPS.items() if name in members] or list(GROUPS)
        root = data_root(self.data) / self.folder
        make = f"tribe corrupt imagenet --data VAL --severity {severity} --corruptions {name} --out {root.parent}"
        require_block(root, domain, make)
        download = download_hint(ARCHIVE.format(groups[0] if len(groups) == 1 else "GROUP"), root)
        hint = f"To make it from the clean validation images VAL: {make}. {download}"
        places = [f"{name}/{severity}", *(f"{group}/{name}/{severity}" for group in groups)]
        return find(root, *places, what=f"{self.folder} {domain}", hint=hint)


def _selected(names: Sequence[str], ids: Sequence[str], where: str) -> list[str]:
    """The names that the ids select, in the order of the ids."""
    matches: dict[str, list[str]] = {name: [name] for name in names}
    for name in names:
        matches.setdefault(name.partition("/")[2], []).append(name)
    for image in ids:
        if (count := len(matches.get(image, []))) != 1:
            raise ValueError(f"{image!r} is {count} images in {where}; expected one for each line")
    selected = [matches[image][0] for image in ids]
    if len(set(selected)) != len(ids):
        raise ValueError(f"an image is listed twice; expected {where} to be played once each")
    return selected
