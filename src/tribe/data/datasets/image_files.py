"""Read image files such as JPEG and PNG into tensors, with the pixels that torchvision's evaluation transforms give.

Pillow decodes (the extra `images`). An EXIF orientation is not applied, because networks are trained without it.
A small file can describe a huge image, so its size is checked before it is decoded, and all threads together decode at
most `PIXELS` at once.
"""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tribe.data.corruptions.pillow import require_pillow
from tribe.fields import is_whole, require
from tribe.io.files import open_regular, regular_size

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"))
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # of the suffixes; some others start programs
EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"))
LARGEST_FILE = 2**28  # bytes; 64 million pixels that are not compressed take less
PIXELS = 64_000_000  # of an image, and of all that are decoded at once. A pixel takes 4 to 12 bytes while it is decoded
WEBP_PIXELS = PIXELS // 2  # WebP takes 16 bytes
ASPECT = 50  # longer side / shorter side of an image to resize: a strip of 1 x 20,000 would become 224 x 4,480,000
SCANS = 64  # passes over the pixels in a JPEG. Progressive ones have about 10; each costs time, and takes few bytes
Unreadable = Literal["raise", "skip"]
SKIP = "unreadable='skip' (--set dataset.unreadable=skip) warns and plays the others"


class ImageFileError(ValueError):
    """An image file that cannot be used, and why."""


def check_reading(unreadable: str, workers: int | None) -> None:
    """Check the fields of a data set that `read_images` takes."""
    require(unreadable in get_args(Unreadable), "unreadable is 'raise' or 'skip'", unreadable)
    fits = workers is None or is_whole(workers, least=1)
    require(fits, "workers is a number of threads, at least 1, or None for one for each core", workers)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_image_file(name: str) -> bool:
    """Whether the name is that of an image file: a known suffix, and not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a folder or a link to one; a link that leads nowhere or to itself is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_image(path: str | PathLike[str], *, resize: int | None = None, crop: int | None = None) -> Tensor:
    """Decode an image to (3, H, W) bytes, red green blue; convert greyscale, palette and CMYK, drop alpha.

    Colours with 16 bits a channel are reduced to eight, as Pillow does, and so is greyscale with alpha. Greyscale with
    16 bits and without alpha is refused, because Pillow would turn every value above 255 into white.

    Args:
        path: the file.
        resize: length of the shorter side, bilinear with antialiasing, like torchvision's Resize on Pillow images.
        crop: side of a square cut from the middle, like torchvision's CenterCrop; black where the image is smaller.

    Raises:
        ImageFileError: the file is missing, damaged, no image, no regular file, greyscale with more than eight bits,
            has more than `PIXELS`, or is longer than `ASPECT` times its shorter side and would be resized.
    """
    for name, side in (("resize", resize), ("crop", crop)):
        require(side is None or is_whole(side, least=1), f"{name} is a number of pixels, at least 1", side)
    pillow = require_pillow("reading images")
    try:
        with open_regular(path, LARGEST_FILE) as file, pillow.open(file, formats=FORMATS) as opened:
            _check(opened, resize)
            with _decoding.reserve(_cost(opened, resize)):
                return _decode(opened, resize, crop, pillow)
    except pillow.UnidentifiedImageError as error:
        raise ImageFileError(f"{path} cannot be read as an image: it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # damaged bytes make Pillow fail in any way, also with a MemoryError
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageFileError(f"{path} cannot be read as an image: {reason}") from error


def image_size(path: str | PathLike[str]) -> tuple[int, int] | None:
    """Height and width of an image by its header, which is all that is read; None if it is not an image."""
    pillow = require_pillow("reading images")
    try:
        with open_regular(path, LARGEST_FILE) as file, pillow.open(file, formats=FORMATS) as opened:
            width, height = opened.size
            return height, width
    except Exception:  # damaged bytes make Pillow fail in any way; `read_image` says how
        return None


def image_file_size(path: Path) -> int:
    """How many bytes an image file has, without opening it.

    Raises:
        ImageFileError: it is missing, not a regular file, or too large to be read.
    """
    try:
        return regular_size(path, LARGEST_FILE)
    except OSError as error:
        raise ImageFileError(f"{path} cannot be read as an image: {error.strerror or error}") from error


def read_images(
    paths: Sequence[Path],
    size: tuple[int, int],
    *,
    hint: str,
    resize: int | None = None,
    unreadable: Unreadable = "raise",
    warned: set[Path] | None = None,
    workers: int | None = 1,
) -> Tensor:
    """Decode image files to (n, 3, H, W) floats in [0, 1], on several threads.

    Args:
        paths: the files.
        size: height and width that each must have.
        hint: the end of the message about an image of another size.
        resize: resize the shorter side to this length and crop the middle to ``size`` first; None: leave the size.
        unreadable: "raise", or "skip": warn, and return an image of NaN, which a stream marks as not valid.
        warned: files with a warning so far; each file is named once, and new ones are added.
        workers: threads; Pillow decodes in parallel. None: one for each core.
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
    warned = set() if warned is None else warned
    for path, error in zip(paths, errors, strict=True):
        if error is not None and path not in warned:
            warned.add(path)
            warnings.warn(f"skipped: {error}", stacklevel=3)
    return images


class _PixelBudget:
    """How many pixels may still be decoded at the same time."""

    def __init__(self, pixels: int) -> None:
        self.free = pixels
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Wait until so many pixels are free, and take them for the duration of a block."""
        with self.changed:
            self.changed.wait_for(lambda: pixels <= self.free)
            self.free -= pixels
        try:
            yield
        finally:
            with self.changed:
                self.free += pixels
                self.changed.notify_all()


_decoding = _PixelBudget(PIXELS)


def _forget_reservations() -> None:
    """The threads that held reservations do not exist in a forked process."""
    global _decoding
    _decoding = _PixelBudget(PIXELS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_reservations)


def _check(image: Any, resize: int | None) -> None:
    """Refuse an image by what its header says, before it is decoded."""
    if image.mode not in EIGHT_BITS:
        raise ValueError(f"mode {image.mode}, more than eight bits a channel; convert it to eight bits first")
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"it has {width}x{height} pixels; expected at least one")
    if resize is not None and max(width, height) > ASPECT * min(width, height):
        raise ValueError(f"it has {width}x{height} pixels; expected sides that differ by a factor of {ASPECT} at most")
    if _cost(image, resize) > PIXELS:
        most = WEBP_PIXELS if image.format == "WEBP" else PIXELS
        resized = "" if resize is None else f", resized to {'x'.join(map(str, _resized(image.size, resize)))}"
        raise ValueError(f"it has {width}x{height} pixels{resized}; expected {most:,} at most")
    if image.format in ("JPEG", "MPO") and (scans := _count_scans(image.fp)) > SCANS:
        raise ValueError(f"it has {scans} scans; expected {SCANS} at most")


def _cost(image: Any, resize: int | None) -> int:
    """What decoding takes of the budget of pixels."""
    width, height = image.size
    pixels = int(width * height * (PIXELS / WEBP_PIXELS if image.format == "WEBP" else 1))
    longer, shorter = (0, 0) if resize is None else _resized(image.size, resize)
    return max(pixels, longer * shorter)


def _count_scans(file: Any) -> int:
    """Count the markers that begin a scan; Pillow continues where it was."""
    place, scans = file.tell(), 0
    file.seek(0)
    while chunk := file.read(2**20):
        scans += chunk.count(b"\xff\xda")
    file.seek(place)
    return scans


def _decode(opened: Any, resize: int | None, crop: int | None, pillow: ModuleType) -> Tensor:
    opened.load()
    image = opened if opened.mode == "RGB" else opened.convert("RGB")  # convert would copy
    pixels = np.array(_crop(_resize(image, resize, pillow), crop))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Width and height after resizing, by torchvision's rule."""
    width, height = size
    longer = int(shorter * max(width, height) / min(width, height))
    return (shorter, longer) if width <= height else (longer, shorter)


def _resize(image: Any, shorter: int | None, pillow: ModuleType) -> Any:
    if shorter is None or min(image.size) == shorter:
        return image
    return image.resize(_resized(image.size, shorter), pillow.Resampling.BILINEAR)


def _crop(image: Any, side: int | None) -> Any:
    if side is None:
        return image
    left, top = (_offset(length, side) for length in image.size)
    return image.crop((left, top, left + side, top + side))


def _offset(length: int, side: int) -> int:
    """Where the middle begins; torchvision rounds when it cuts, and rounds down when it pads."""
    return round((length - side) / 2) if length >= side else -((side - length) // 2)
