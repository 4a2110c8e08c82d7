"""ImageNet's validation images, and the sets with the same labels: ImageNet-V2, -R, -A and -Sketch, as published.

Images of any size are resized and cropped when they are read, as everybody evaluates: shorter side 256, centre 224. A
folder whose images are all 224 x 224 holds cropped images, which stay as they are.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from tribe.data.datasets import register, require_domain
from tribe.data.datasets.class_folders import COUNT, ListedImages, class_folders, output_of
from tribe.data.datasets.files import MissingData, data_root, download_hint, find
from tribe.data.images import Unreadable, check_reading, image_size, is_image_file
from tribe.fields import is_whole, plain_numbers, require
from tribe.registry import nearest

SAMPLED = 16  # images of a folder whose size says whether its images are cropped
CLASSES = f"expected class folders with wnids, such as n01440764, or with the numbers 0 to {COUNT - 1}"


@dataclass(frozen=True)
class ClassFolders(ListedImages):
    """A base class: images by class in one folder a domain. Only file names are held in memory."""

    data: str | None = None  # root folder, or the folder of the classes; None: $TRIBE_DATA or the cache directory
    size: int = 224  # rows and columns; the shorter side is resized to 8/7 of it first
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid
    workers: int | None = None  # threads that decode; None: one for each core

    clean_name: ClassVar[str | None] = "imagenet"  # the networks that fit it were trained on this
    title: ClassVar[str]
    places: ClassVar[dict[str, tuple[str, ...]]]  # the folders of each domain, below the root
    archive: ClassVar[str]  # where it is published; {} is the domain

    def __post_init__(self) -> None:
        plain_numbers(self)
        require(is_whole(self.size, least=1), "size is a number of pixels, at least 1", self.size)
        check_reading(self.unreadable, self.workers)

    @property
    def side(self) -> int:
        """Rows and columns of the images."""
        return self.size

    @property
    def domains(self) -> Sequence[str]:
        """The names of the folders."""
        return tuple(self.places)

    def image_folder(self, domain: str) -> Path:
        """Return the folder with the class folders of a domain: a published one below the root, or the root itself."""
        require_domain(domain, self.domains)
        root, places = data_root(self.data), self.places[domain]
        named = self.data is not None and not any((root / place).is_dir() for place in places)
        if named and (holds_classes(root) or looks_like_class_folders(root)):
            return root  # `list_classes` says which folders are not classes
        return find(root, *places, what=f"{self.title} ({domain})", hint=self._hint(root, domain))

    def list_classes(self, folder: Path) -> tuple[str, ...]:
        """Return the class folders in a folder; raise if they are not classes of ImageNet."""
        return expected_classes(folder)

    def resize(self, domain: str) -> int | None:
        """Return the length of the shorter side before the crop; None if the images are cropped already."""
        if domain not in self._sides:
            folder, names, _ = self.listing(domain)
            self._sides[domain] = resize_for([folder / name for name in names], self.size)
        return self._sides[domain]

    def _hint(self, root: Path, domain: str) -> str:
        return download_hint(self.archive.format(domain), root)

    @cached_property
    def _sides(self) -> dict[str, int | None]:
        return {}


def holds_classes(folder: Path) -> bool:
    """Whether a folder has a class folder of ImageNet in it."""
    return folder.is_dir() and any(output_of(name) is not None for name in class_folders(folder))


def looks_like_class_folders(folder: Path) -> bool:
    """Whether the folders in a folder hold images, as class folders do."""
    kinds = class_folders(folder)[:SAMPLED] if folder.is_dir() else ()
    return any(is_image_file(name) for kind in kinds for name in os.listdir(folder / kind))


def expected_classes(folder: Path) -> tuple[str, ...]:
    """Return the class folders in a folder; raise unless all are classes of ImageNet, each once."""
    names = class_folders(folder)
    if not names:
        raise MissingData(f"{folder} holds no folders; {CLASSES}")
    strange = [name for name in names if output_of(name) is None]
    if inner := [name for name in strange if holds_classes(folder / name)]:
        raise ValueError(f"{folder} holds no class folders, but {folder / inner[0]} does: name that folder")
    if strange:
        own = "--dataset folder --data ROOT plays images of other classes, in ROOT/<domain>/<class>"
        raise ValueError(f"{folder} holds a folder {strange[0]!r}, which is not a class of ImageNet; {CLASSES}. {own}")
    outputs = [output_of(name) for name in names]
    for name, following, a, b in zip(names, names[1:], outputs, outputs[1:], strict=False):
        if a == b:
            raise ValueError(f"{folder} holds the same class twice, as {name!r} and {following!r}; {CLASSES}")
    return names


def resize_for(paths: Sequence[Path], size: int) -> int | None:
    """Return the shorter side before a crop to ``size``; None if a sample of the images is cropped already."""
    sample = paths[:: max(1, len(paths) // SAMPLED)]
    return None if all(image_size(path) == (size, size) for path in sample) else round(size * 8 / 7)


@register("imagenet")
@dataclass(frozen=True)
class ImageNet(ClassFolders):
    """ImageNet's validation images (Russakovsky et al., 2015) in class folders, also a few of them; clean."""

    clean_name = None
    title = "the ImageNet validation images"
    shape: ClassVar[tuple[int, int, int]] = (3, 224, 224)
    places = {"clean": ("imagenet/val", "imagenet", "ILSVRC2012/val", "ILSVRC/Data/CLS-LOC/val", "val")}  # noqa: RUF012

    def _hint(self, root: Path, domain: str) -> str:
        return (
            f"They are not free to download: get them from https://image-net.org and place them as "
            f"{root}/imagenet/val/<wnid>/NAME.JPEG, or name their folder"
        )


@register("imagenet-v2")
@dataclass(frozen=True)
class ImageNetV2(ClassFolders):
    """ImageNet-V2 (Recht et al., 2019): new images, collected as ImageNet's were; class folders 0 to 999."""

    variants: Sequence[str] = ("matched-frequency",)  # also "threshold0.7" and "top-images", which are easier

    title = "ImageNet-V2"
    places = {  # noqa: RUF012
        name: (f"imagenetv2-{name}-format-val",) for name in ("matched-frequency", "threshold0.7", "top-images")
    }
    archive = "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/imagenetv2-{}.tar.gz"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.variants), "variants names at least one", self.variants)
        for name in self.variants:
            if name not in self.places:
                raise ValueError(f"unknown variant {name!r} of ImageNet-V2: {nearest(name, self.places)}")

    @property
    def domains(self) -> Sequence[str]:
        """The chosen variants."""
        return tuple(self.variants)


@register("imagenet-r")
@dataclass(frozen=True)
class ImageNetR(ClassFolders):
    """ImageNet-R (Hendrycks et al., 2021): paintings, toys and other renditions of 200 classes."""

    title = "ImageNet-R"
    places = {"renditions": ("imagenet-r",)}  # noqa: RUF012
    archive = "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar"


@register("imagenet-a")
@dataclass(frozen=True)
class ImageNetA(ClassFolders):
    """ImageNet-A (Hendrycks et al., 2021): photographs of 200 classes that a ResNet-50 got wrong."""

    title = "ImageNet-A"
    places = {"adversarial": ("imagenet-a",)}  # noqa: RUF012
    archive = "https://people.eecs.berkeley.edu/~hendrycks/imagenet-a.tar"


@register("imagenet-sketch")
@dataclass(frozen=True)
class ImageNetSketch(ClassFolders):
    """ImageNet-Sketch (Wang et al., 2019): drawings of all 1,000 classes in black and white."""

    title = "ImageNet-Sketch"
    places = {"sketches": ("sketch", "ImageNet-Sketch/sketch", "imagenet-sketch")}  # noqa: RUF012

    def _hint(self, root: Path, domain: str) -> str:
        return f"Get it from https://github.com/HaohanWang/ImageNet-Sketch and unpack it to {root}/sketch"
