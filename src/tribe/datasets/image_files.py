"""Read image files such as JPEG and PNG into tensors, with the pixels that torchvision's evaluation transforms give.

Pillow decodes (the extra `images`). An EXIF orientation is not applied, because networks are trained without it.
"""

import struct
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tribe.corruptions.pillow import require_pillow
from tribe.fields import is_whole, require

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"))
EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"))
DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    OverflowError,
    TypeError,
    struct.error,
    zlib.error,
)
Unreadable = Literal["raise", "skip"]
SKIP = "unreadable='skip' (--set dataset.unreadable=skip) warns and plays the others"


class ImageFileError(ValueError):
    """An image file that cannot be used, and why."""


def check_reading(unreadable: str, workers: int) -> None:
    """Check the fields of a data set that `read_images` takes."""
    require(unreadable in get_args(Unreadable), "unreadable is 'raise' or 'skip'", unreadable)
    require(is_whole(workers, least=1), "workers is a number of threads, at least 1", workers)


def is_image_file(name: str) -> bool:
    """Whether the name is that of an image file: a known suffix, and not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def read_image(path: str | PathLike[str], *, resize: int | None = None, crop: int | None = None) -> Tensor:
    """Decode an image to (3, H, W) bytes, red green blue; convert greyscale, palette and CMYK, drop alpha.

    Args:
        path: the file.
        resize: length of the shorter side, bilinear with antialiasing, like torchvision's Resize on Pillow images.
        crop: side of a square cut from the middle, like torchvision's CenterCrop; black where the image is smaller.

    Raises:
        ImageFileError: the file is missing, damaged, no image, or holds more than eight bits per channel.
    """
    for name, side in (("resize", resize), ("crop", crop)):
        require(side is None or is_whole(side, least=1), f"{name} is a number of pixels, at least 1", side)
    pillow = require_pillow("reading images")
    try:
        with pillow.open(path) as opened:
            if opened.mode not in EIGHT_BITS:
                raise ValueError(f"mode {opened.mode}, more than eight bits a channel; convert it to eight bits first")
            image = _crop(_resize(opened.convert("RGB"), resize, pillow), crop)
    except (*DECODING_ERRORS, pillow.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageFileError(f"{path} cannot be read as an image: {reason}") from error
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def read_images(
    paths: Sequence[Path],
    size: tuple[int, int],
    *,
    hint: str,
    fit: int | None = None,
    unreadable: Unreadable = "raise",
    warned: set[Path] | None = None,
    workers: int = 1,
) -> Tensor:
    """Decode image files to (n, 3, H, W) floats in [0, 1], on several threads.

    Args:
        paths: the files.
        size: height and width that each must have.
        hint: the end of the message about an image of another size.
        fit: resize the shorter side and crop the middle to this size first; None: leave the size.
        unreadable: "raise", or "skip": warn, and return an image of NaN, which a stream marks as not valid.
        warned: files with a warning so far; each file is named once, and new ones are added.
        workers: threads; Pillow decodes in parallel.
    """
    images = torch.empty(len(paths), 3, *size)

    def read(i: int) -> ImageFileError | None:
        try:
            image = read_image(paths[i], resize=fit, crop=fit)
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

    with ThreadPoolExecutor(workers, "tribe-images") as pool:
        errors = list(pool.map(read, range(len(paths))))
    warned = set() if warned is None else warned
    for path, error in zip(paths, errors, strict=True):
        if error is not None and path not in warned:
            warned.add(path)
            warnings.warn(f"skipped: {error}", stacklevel=3)
    return images


def _resize(image: Any, shorter: int | None, pillow: ModuleType) -> Any:
    width, height = image.size
    if shorter is None or min(width, height) == shorter:
        return image
    longer = int(shorter * max(width, height) / min(width, height))
    return image.resize((shorter, longer) if width <= height else (longer, shorter), pillow.Resampling.BILINEAR)


def _crop(image: Any, side: int | None) -> Any:
    if side is None:
        return image
    left, top = (_offset(length, side) for length in image.size)
    return image.crop((left, top, left + side, top + side))


def _offset(length: int, side: int) -> int:
    """Where the middle begins; torchvision rounds when it cuts, and rounds down when it pads."""
    return round((length - side) / 2) if length >= side else -((side - length) // 2)
