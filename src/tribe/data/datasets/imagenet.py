"""ImageNet's validation images, and the sets with the same labels: ImageNet-V2, -R, -A, -Sketch and -C, as published.

They are folders of images by class, ``<class>/NAME.JPEG``. A class folder has the name of a synset in WordNet ("wnid"),
such as n01440764, or the number of its class, 0 to 999. Networks of ImageNet number their outputs by the sorted wnids.

Images of any size are resized and cropped when they are read, as everybody evaluates: shorter side 256, centre 224. A
folder whose images are all 224 x 224 holds cropped images, which stay as they are.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.data.datasets import BySeverity, register, require_domain
from tribe.data.datasets.files import MissingData, data_root, download_hint, find, positions
from tribe.data.datasets.manifest import require_block
from tribe.data.images import Unreadable, image_size, is_image_file, list_folder, read_images
from tribe.data.scenarios import IMAGENET_C
from tribe.fields import Count, check_fields, require
from tribe.io.files import read_regular
from tribe.registry import nearest

COUNT = 1000  # classes of ImageNet
WNIDS = Path(__file__).parent / "data" / "imagenet_wnids.txt"
SAMPLED = 16  # images of a folder whose size says whether its images are cropped
CLASSES = f"expected class folders with wnids, such as n01440764, or with the numbers 0 to {COUNT - 1}"
LARGEST_LIST = 2**26  # bytes; a list of all 50,000 images has 2 MB
ARCHIVE = "https://zenodo.org/records/2235448/files/{}.tar"
GROUPS = {  # the published archives, and the corruptions in each
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}


@cache
def wnids() -> Mapping[str, int]:
    """Return the 1,000 wnids of ImageNet, and the output of a network for each."""
    return {wnid: number for number, wnid in enumerate(WNIDS.read_text().split())}


def output_of(name: str) -> int | None:
    """Return the output of an ImageNet network for a class folder; None: it is not a class of ImageNet."""
    if name.isascii() and name.isdigit() and len(name) <= 4:
        return number if (number := int(name)) < COUNT else None
    return wnids().get(name)


def outputs_of(names: Iterable[str]) -> tuple[int, ...] | None:
    """Return the outputs of an ImageNet network for class folders, in order; None: some are not classes of ImageNet."""
    outputs = [output_of(name) for name in names]
    return tuple(number for number in outputs if number is not None) if outputs and None not in outputs else None


def holds_classes(folder: Path) -> bool:
    """Whether a folder has a class folder of ImageNet in it."""
    return folder.is_dir() and any(output_of(inner.name) is not None for inner in list_folder(folder)[0])


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the class folders in a folder, in the order of a network's outputs; raise unless all are of ImageNet."""
    by_output: dict[int, str] = {}
    for name in (inner.name for inner in list_folder(folder)[0]):
        output = output_of(name)
        if output is None:
            own = "--dataset folder --data ROOT plays images of other classes, in ROOT/<domain>/<class>"
            raise ValueError(f"{folder} holds a folder {name!r}, which is not a class of ImageNet; {CLASSES}. {own}")
        if output in by_output:
            raise ValueError(f"{folder} holds the same class twice, as {by_output[output]!r} and {name!r}; {CLASSES}")
        by_output[output] = name
    if not by_output:
        raise MissingData(f"{folder} holds no folders; {CLASSES}")
    return tuple(by_output[output] for output in sorted(by_output))


class Listing(NamedTuple):
    """The images of a domain."""

    folder: Path
    names: tuple[str, ...]  # "class/NAME.JPEG"
    labels: Tensor
    resize: int | None


class ListedImages(ABC):
    """A base class of data sets: images in class folders, one folder a domain. Only file names are held in memory."""

    unreadable: Unreadable
    workers: int | None

    @property
    def size(self) -> int:
        """Rows and columns of the images."""
        return 224

    @property
    @abstractmethod
    def domains(self) -> Sequence[str]:
        """The names of the domains."""

    @abstractmethod
    def image_folder(self, domain: str) -> Path:
        """Return the folder that holds the class folders of a domain."""

    def select(self, names: list[str], folder: Path) -> list[str]:
        """Return the images of a folder that are played, in order."""
        return names

    def resize(self, paths: Sequence[Path]) -> int | None:
        """Return the length of the shorter side before the crop; None if the images are cropped already."""
        return None

    @cached_property
    def classes(self) -> Sequence[str]:
        """The class folders of the first domain; all domains have the same."""
        return class_folders(self.image_folder(self.domains[0]))

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
            (self.size, self.size),
            hint="the images of this folder are cropped already, and those of a stream have one size",
            resize=listing.resize,
            unreadable=self.unreadable,
            workers=self.workers,
        )

    def listing(self, domain: str) -> Listing:
        """Return the images of a domain, listed once."""
        require_domain(domain, self.domains)
        if domain not in self._listings:
            folder, classes = self.image_folder(domain), self.classes
            if differing := set(classes) ^ set(class_folders(folder)):
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
            listing = Listing(folder, tuple(names), labels, self.resize([folder / name for name in names]))
            for other in self._listings.values():
                if other.names == listing.names:  # 75 domains of ImageNet-C share one list of 50,000 names
                    listing = other._replace(folder=folder)
            self._listings[domain] = listing
        return self._listings[domain]

    @cached_property
    def _listings(self) -> dict[str, Listing]:
        return {}


@dataclass(frozen=True)
class ClassFolders(ListedImages):
    """A base class: images by class in one folder a domain. Only file names are held in memory."""

    data: str | None = None  # root folder, or the folder of the classes; None: $TRIBE_DATA or the cache directory
    size: Count = 224  # rows and columns; the shorter side is resized to 8/7 of it first
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid
    workers: Count | None = None  # threads that decode; None: one for each core

    clean_name: ClassVar[str | None] = "imagenet"  # the networks that fit it were trained on this
    title: ClassVar[str]
    places: ClassVar[dict[str, tuple[str, ...]]]  # the folders of each domain, below the root
    archive: ClassVar[str]  # where it is published; {} is the domain
    hint: ClassVar[str] = ""  # how to get the images if they are not an archive; {root} is the folder of all data sets

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def domains(self) -> Sequence[str]:
        """The names of the folders."""
        return tuple(self.places)

    def image_folder(self, domain: str) -> Path:
        """Return the folder with the class folders of a domain: a published one below the root, or the root itself."""
        require_domain(domain, self.domains)
        root, places = data_root(self.data), self.places[domain]
        named = self.data is not None and not any((root / place).is_dir() for place in places)
        if named and holds_classes(root):
            return root
        hint = self.hint.format(root=root) or download_hint(self.archive.format(domain), root)
        return find(root, *places, what=f"{self.title} ({domain})", hint=hint)

    def resize(self, paths: Sequence[Path]) -> int | None:
        """Return the length of the shorter side before the crop; None if a sample of the images is cropped already."""
        sample = paths[:: max(1, len(paths) // SAMPLED)]
        cropped = all(image_size(path) == (self.size, self.size) for path in sample)
        return None if cropped else round(self.size * 8 / 7)


@register("imagenet")
@dataclass(frozen=True)
class ImageNet(ClassFolders):
    """ImageNet's validation images (Russakovsky et al., 2015) in class folders, also a few of them; clean."""

    clean_name = None
    title = "the ImageNet validation images"
    shape: ClassVar[tuple[int, int, int]] = (3, 224, 224)
    places = {"clean": ("imagenet/val", "imagenet", "ILSVRC2012/val", "ILSVRC/Data/CLS-LOC/val", "val")}  # noqa: RUF012

    hint = (
        "They are not free to download: get them from https://image-net.org and place them as "
        "{root}/imagenet/val/<wnid>/NAME.JPEG, or name their folder"
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
    hint = "Get it from https://github.com/HaohanWang/ImageNet-Sketch and unpack it to {root}/sketch"


@register("imagenet-c")
@dataclass(frozen=True)
class ImageNetC(BySeverity, ListedImages):
    """ImageNet-C (Hendrycks & Dietterich, ICLR 2019): the validation images under each corruption, 224x224.

    The images are ``<corruption>/<severity>/<wnid>/*.JPEG``; a domain is a corruption at a severity, "fog@5". `ids`
    selects images, such as the usual subset of 5,000; all class folders are classes also then.
    """

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = IMAGENET_C
    severities: Sequence[int] = (5,)
    ids: str | None = None  # file with one line "wnid/NAME.JPEG" per image, in this order; None: all
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid
    workers: Count | None = None  # threads that decode; None: one for each core

    clean_name: ClassVar[str] = "imagenet"  # the clean data set that it is made from
    folder: ClassVar[str] = "ImageNet-C"

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()

    def select(self, names: list[str], folder: Path) -> list[str]:
        """Return the images that `ids` lists, in its order."""
        if self._ids is None:
            return names
        if missing := sorted(set(self._ids) - set(names)):
            raise ValueError(f"{missing[0]!r}, listed in {self.ids}, is not an image in {folder}")
        return self._ids

    @cached_property
    def _ids(self) -> list[str] | None:
        if self.ids is None:
            return None
        content = read_regular(Path(self.ids).expanduser(), LARGEST_LIST).decode(errors="replace")
        ids = [line.strip() for line in content.splitlines() if line.strip()]
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"{self.ids} lists no images, or one of them twice; expected one id per line")
        return ids

    def image_folder(self, domain: str) -> Path:
        """Return the folder of a domain, as in the archives or in the archives' groups."""
        name, _, severity = domain.partition("@")
        groups = [group for group, members in GROUPS.items() if name in members] or list(GROUPS)
        root = data_root(self.data) / self.folder
        make = f"tribe corrupt imagenet --data VAL --severity {severity} --corruptions {name} --out {root.parent}"
        require_block(root, domain, make)
        download = download_hint(ARCHIVE.format(groups[0] if len(groups) == 1 else "GROUP"), root)
        hint = f"To make it from the clean validation images VAL: {make}. {download}"
        places = [f"{name}/{severity}", *(f"{group}/{name}/{severity}" for group in groups)]
        return find(root, *places, what=f"{self.folder} {domain}", hint=hint)
