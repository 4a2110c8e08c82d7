"""Folders of images by class, ``<class>/NAME.JPEG``, as ImageNet and the sets beside it are published.

A class folder has the name of a synset in WordNet ("wnid"), such as n01440764, or the number of its class, 0 to 999.
Networks of ImageNet number their outputs by the sorted wnids.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tribe.data.datasets.image_files import SKIP, ImageFileError, Unreadable, is_folder, is_image_file

COUNT = 1000  # classes of ImageNet
WNIDS = Path(__file__).parent / "data" / "imagenet_wnids.txt"


@cache
def wnids() -> tuple[str, ...]:
    """The 1,000 wnids of ImageNet, in the order of a network's outputs.

    >>> len(wnids()), wnids()[0]
    (1000, 'n01440764')
    """
    return tuple(WNIDS.read_text().split())


@cache
def _numbers() -> dict[str, int]:
    return {wnid: number for number, wnid in enumerate(wnids())}


def output_of(name: str) -> int | None:
    """The output of an ImageNet network for a class folder; None: it is no class of ImageNet.

    >>> output_of("n01443537"), output_of("0007"), output_of("1000"), output_of("cat")
    (1, 7, None, None)
    """
    if name.isascii() and name.isdigit() and len(name) <= 4:
        return number if (number := int(name)) < COUNT else None
    return _numbers().get(name)


def outputs_of(names: Iterable[str]) -> tuple[int, ...] | None:
    """The outputs of an ImageNet network for class folders, in their order; None: some are no classes of ImageNet."""
    found = [output_of(name) for name in names]
    return tuple(number for number in found if number is not None) if found and None not in found else None


def class_folders(folder: Path) -> tuple[str, ...]:
    """The class folders in a folder, in the order of a network's outputs; of classes not of ImageNet, by name."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if is_folder(entry) and not entry.name.startswith("."))
    outputs = outputs_of(names)
    return tuple(names if outputs is None else [name for _, name in sorted(zip(outputs, names, strict=True))])


def list_images(folder: Path, classes: Sequence[str], unreadable: Unreadable = "raise") -> list[str]:
    """The images "class/NAME.JPEG" of a folder, by class and name.

    A class folder that cannot be listed is an error, or left out with a warning if what is unreadable is skipped.
    """
    return [f"{kind}/{name}" for kind in classes for name in _image_names(folder / kind, unreadable)]


def _image_names(folder: Path, unreadable: Unreadable) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if is_image_file(name))
    except OSError as error:
        refusal = f"{folder} cannot be listed: {error.strerror or error}"
        if unreadable == "raise":
            raise ImageFileError(f"{refusal}; {SKIP}") from error
        warnings.warn(f"skipped: {refusal}", stacklevel=2)
        return []
