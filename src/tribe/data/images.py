"""Read image files such as JPEG and PNG into tensors, with the pixels that torchvision's evaluation transforms give.

Pillow decodes (the extra `images`). An EXIF orientation is not applied, because networks are trained without it. A
small file can describe a huge image, so its size is checked before it is decoded.
"""

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tribe.io.files import open_regular

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"))
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # of the suffixes; some others start programs
EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"))
LARGEST_FILE = 2**28  # bytes; 64 million pixels that are not compressed take less
PIXELS = 64_000_000  # of an image, before and after it is resized; decoding one takes up to 16 bytes a pixel
Unreadable = Literal["raise", "skip"]
SKIP = "unreadable='skip' (--set dataset.unreadable=skip) warns and plays the others"


class ImageFileError(ValueError):
    """An image file that cannot be used, and why."""


def require_pillow(feature: str) -> ModuleType:
    """Return Pillow's Image module, or raise an error that says which feature needs it and how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"{feature} needs Pillow: pip install 'tribe-tta[images]' (or pip install pillow)") from error
    return Image


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_image_file(name: str) -> bool:
    """Whether the name is that of an image file: a known suffix, and not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def list_folder(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the folders, images and other files in a folder, each sorted by name, without hidden ones."""
    folders, images, others = list[Path](), list[Path](), list[Path]()
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if not path.name.startswith("."):
            (folders if path.is_dir() else images if is_image_file(path.name) else others).append(path)
    return folders, images, others


def read_image(path: str | PathLike[str], *, resize: int | None = None, crop: int | None = None) -> Tensor:
    """Decode an image to (3, H, W) bytes, red green blue; convert greyscale, palette and CMYK, drop alpha.

    Colours with 16 bits a channel are reduced to eight, as Pillow does, and so is greyscale with alpha. Greyscale with
    16 bits and without alpha is refused, because Pillow would turn every value above 255 into white.

    ``resize`` is the length of the shorter side, bilinear with antialiasing, as torchvision's Resize does;
    ``crop`` the side of a square cut from the middle, like torchvision's CenterCrop, black where the image is smaller.
    """
    pillow = require_pillow("reading images")
    try:
        with open_regular(path, LARGEST_FILE) as file, pillow.open(file, formats=FORMATS) as image:
            _check_header(image, resize)
            image.load()
            colours = image if image.mode == "RGB" else image.convert("RGB")
            if resize is not None and min(colours.size) != resize:
                colours = colours.resize(_resized(colours.size, resize), pillow.Resampling.BILINEAR)
            if crop is not None:
                left, top = (_offset(length, crop) for length in colours.size)
                colours = colours.crop((left, top, left + crop, top + crop))
            return torch.from_numpy(np.array(colours)).permute(2, 0, 1).contiguous()
    except pillow.UnidentifiedImageError as error:
        raise ImageFileError(f"{path} cannot be read as an image: it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow fails in many ways on damaged bytes, also with a MemoryError
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageFileError(f"{path} cannot be read as an image: {reason}") from error


def image_size(path: str | PathLike[str]) -> tuple[int, int] | None:
    """Return height and width of an image by its header, which is all that is read; None if it is not an image."""
    pillow = require_pillow("reading images")
    try:
        with open_regular(path, LARGEST_FILE) as file, pillow.open(file, formats=FORMATS) as image:
            width, height = image.size
            return height, width
    except Exception:  # `read_image` says why
        return None


def read_images(
    paths: Sequence[Path],
    size: tuple[int, int],
    *,
    hint: str,
    resize: int | None = None,
    unreadable: Unreadable = "raise",
    workers: int | None = 1,
) -> Tensor:
    """Decode image files to (n, 3, H, W) floats in [0, 1], on several threads.

    Each must have the height and width ``size``, after ``resize`` and a crop if that is given; ``hint`` ends the
    message about another one. A skipped file is named in a warning; its image is NaN, which a stream marks as not
    valid.
    """
    images = torch.empty(len(paths), 3, *size)

    def read(i: int) -> ImageFileError | None:
        try:
            image = read_image(paths[i], resize=resize, crop=None if resize is None else size[0])
        except ImageFileError as error:
            if unreadable == "raise":
                raise ImageFileError(f"{error}; {SKIP}") from error
            images[i] = float("nan")
            return error
        if tuple(image.shape[1:]) != size:
            got, wanted = (f"{width}x{height}" for height, width in (image.shape[1:], size))
            raise ValueError(f"{paths[i]} is {got} pixels; expected {wanted}: {hint}")
        torch.div(image, 255, out=images[i])
        return None

    with ThreadPoolExecutor(workers or cores(), "tribe-images") as pool:
        errors = list(pool.map(read, range(len(paths))))
    for error in errors:
        if error is not None:
            warnings.warn(f"skipped: {error}", stacklevel=3)
    return images


def _check_header(image: Any, resize: int | None) -> None:
    """Raise if an image cannot be used by what its header says, before it is decoded."""
    if image.mode not in EIGHT_BITS:
        raise ValueError(f"mode {image.mode}, more than eight bits a channel; convert it to eight bits first")
    width, height = image.size
    final = image.size if resize is None or not min(image.size) else _resized(image.size, resize)
    if not 1 <= width * height <= PIXELS or final[0] * final[1] > PIXELS:
        resized = "" if resize is None else f", resized to {final[0]}x{final[1]}"
        raise ValueError(f"it has {width}x{height} pixels{resized}; expected 1 to {PIXELS:,}")


def _resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return width and height after resizing, by torchvision's rule."""
    width, height = size
    longer = int(shorter * max(width, height) / min(width, height))
    return (shorter, longer) if width <= height else (longer, shorter)


def _offset(length: int, side: int) -> int:
    """Return where the middle begins; torchvision rounds when it cuts, and rounds down when it pads."""
    return round((length - side) / 2) if length >= side else -((side - length) // 2)
