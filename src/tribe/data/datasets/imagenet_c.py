"""ImageNet-C as published: ``<corruption>/<severity>/<wnid>/*.JPEG``, decoded when they are read.

Hendrycks & Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, ICLR 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from tribe.data.datasets import BySeverity, register
from tribe.data.datasets.files import data_root, download_hint, find
from tribe.data.datasets.imagenet import ListedImages
from tribe.data.datasets.manifest import require_block
from tribe.data.images import Unreadable, check_reading
from tribe.data.scenarios import IMAGENET_C
from tribe.io.files import read_regular

LARGEST_LIST = 2**26  # bytes; a list of all 50,000 images has 2 MB
ARCHIVE = "https://zenodo.org/records/2235448/files/{}.tar"
GROUPS = {  # the published archives, and the corruptions in each
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}


@register("imagenet-c")
@dataclass(frozen=True)
class ImageNetC(BySeverity, ListedImages):
    """The ImageNet validation images under each corruption, 224x224. A domain is a corruption at a severity, "fog@5".

    Only file names are held in memory. `ids` selects images, such as the usual subset of 5,000. Classes are the folders
    ("wnids") in the order of the networks' outputs, also if `ids` selects only some of them.
    """

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = IMAGENET_C
    severities: Sequence[int] = (5,)
    ids: str | None = None  # file with one line "wnid/NAME.JPEG" per image, in this order; None: all
    unreadable: Unreadable = "raise"  # "skip": warn, and mark the image as not valid
    workers: int | None = None  # threads that decode; None: one for each core

    clean_name: ClassVar[str] = "imagenet"  # the clean data set that it is made from
    folder: ClassVar[str] = "ImageNet-C"

    def __post_init__(self) -> None:
        check_reading(self)
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
