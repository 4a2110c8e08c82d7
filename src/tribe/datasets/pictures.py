"""A picture file becomes a tensor of bytes, prepared as torchvision's evaluation transforms prepare it.

Pillow decodes (the extra `images`), so what the field's loaders read is read here, to the same pixels. Like them, this
one takes the pixels as they are stored: an EXIF orientation is not applied, since the networks were trained so.
"""

import struct
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tribe.fields import is_whole, require

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"))
EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"))
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, OverflowError, TypeError, struct.error, zlib.error)
Unreadable = Literal["raise", "skip"]
SKIP = "unreadable='skip' (--set dataset.unreadable=skip) warns and plays the others"


class PictureError(ValueError):
    """A picture file that cannot be used, and why."""


def is_picture(name: str) -> bool:
    """Whether a file is to be read as a picture, by its name: a known suffix, and not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def read_picture(path: str | PathLike[str], *, resize: int | None = None, crop: int | None = None) -> Tensor:
    """Decode a picture to (3, H, W) bytes, red green blue; greyscale, palette and CMYK are converted, alpha is dropped.

    Args:
        path: the file.
        resize: length of the shorter side, bilinear with antialiasing, as torchvision's Resize on Pillow images.
        crop: side of a square cut from the middle, as torchvision's CenterCrop; black where the picture is smaller.

    Raises:
        PictureError: the file is missing, damaged, cut short, no picture, or holds more than eight bits a channel.
    """
    for name, side in (("resize", resize), ("crop", crop)):
        require(side is None or is_whole(side, least=1), f"{name} is a number of pixels, at least 1", side)
    image = _pillow()
    try:
        with image.open(path) as opened:
            if opened.mode not in EIGHT_BITS:
                raise ValueError(f"mode {opened.mode}, more than eight bits a channel; convert it to eight bits first")
            picture = _cropped(_resized(opened.convert("RGB"), resize, image), crop)
    except (*DAMAGE, image.DecompressionBombError) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise PictureError(f"{path} cannot be read as a picture: {said}") from error
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def read_pictures(
    paths: Sequence[Path],
    size: tuple[int, int],
    *,
    hint: str,
    fit: int | None = None,
    unreadable: Unreadable = "raise",
    warned: set[Path] | None = None,
    workers: int = 1,
) -> Tensor:
    """Decode some pictures to (n, 3, H, W) floats in [0, 1], on several threads.

    Args:
        paths: the files.
        size: height and width that each must have.
        hint: what to say where one has not.
        fit: resize the shorter side and crop the middle to this size first; None: as they are.
        unreadable: "raise", or "skip": a warning, and an image of nothing but NaN, which a stream marks as not valid.
        warned: files that were warned about; they are not named again, and new ones are added.
        workers: threads; Pillow lets them run at once.
    """
    images = torch.empty(len(paths), 3, *size)

    def read(i: int) -> PictureError | None:
        try:
            picture = read_picture(paths[i], resize=fit, crop=fit)
        except PictureError as error:
            if unreadable == "raise":
                raise PictureError(f"{error}; {SKIP}") from error
            images[i] = float("nan")
            return error
        if tuple(picture.shape[1:]) != size:
            got, wanted = (f"{width}x{height}" for height, width in (picture.shape[1:], size))
            raise ValueError(f"{paths[i]} is {got} pixels; expected {wanted}: {hint}")
        torch.div(picture, 255, out=images[i])
        return None

    with ThreadPoolExecutor(workers, "tribe-pictures") as pool:
        errors = list(pool.map(read, range(len(paths))))
    warned = set() if warned is None else warned
    for path, error in zip(paths, errors, strict=True):
        if error is not None and path not in warned:
            warned.add(path)
            warnings.warn(f"skipped: {error}", stacklevel=3)
    return images


def _resized(picture: Any, shorter: int | None, image: ModuleType) -> Any:
    width, height = picture.size
    if shorter is None or min(width, height) == shorter:
        return picture
    longer = int(shorter * max(width, height) / min(width, height))
    return picture.resize((shorter, longer) if width <= height else (longer, shorter), image.Resampling.BILINEAR)


def _cropped(picture: Any, side: int | None) -> Any:
    if side is None:
        return picture
    left, top = (_offset(have, side) for have in picture.size)
    return picture.crop((left, top, left + side, top + side))


def _offset(have: int, want: int) -> int:
    """Where a centred stretch begins; torchvision rounds where it cuts, and rounds down where it pads."""
    return round((have - want) / 2) if have >= want else -((want - have) // 2)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading pictures needs Pillow: pip install 'tribe-tta[images]'") from error
    return Image
