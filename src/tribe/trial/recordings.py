"""Recordings: a folder of pictures, a list of them, an array file. A video is in `tribe.trial.video`."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.core.validation import looks_like_bytes
from tribe.data.datasets.files import open_npy, read_npz
from tribe.data.images import ImageFileError, cores, is_image_file, read_image
from tribe.fields import is_whole, require
from tribe.io.files import read_regular
from tribe.trial.frames import MOST_CSV, FrameFit, ReadFrame, Recording, csv_rows, file_digest, hash_parts
from tribe.trial.video import Video

LISTS, ARRAYS = (".txt", ".csv", ".lst"), (".npy", ".npz")
HEADERS = ("file", "frame", "image", "path", "name", "filename")  # of the first column of a list
LIST = "a list of frames"


class Pictures(Recording):
    """Picture files, each a frame."""

    def __init__(self, place: Path, paths: list[Path], names: list[str], fit: FrameFit, skip: bool = False) -> None:
        super().__init__(place, fit, len(paths), skip)
        self.paths, self.names = paths, names

    def read(self) -> Iterator[ReadFrame]:
        """Decode pictures on several threads, a few ahead."""
        ahead = 4 * cores()
        with ThreadPoolExecutor(cores(), "tribe-frames") as pool:
            waiting = [pool.submit(_read, path) for path in self.paths[:ahead]]
            for i in range(len(self.paths)):
                done = waiting.pop(0).result()
                if i + ahead < len(self.paths):
                    waiting.append(pool.submit(_read, self.paths[i + ahead]))
                yield done

    def frame(self, index: int) -> Tensor:
        """Decode one picture."""
        return read_image(self.paths[index])

    def name(self, index: int) -> str:
        """Return its file."""
        return self.names[index]

    def digest(self) -> str:
        """Hash names and sizes of the files."""
        sizes = (path.stat().st_size if path.is_file() else -1 for path in self.paths)
        return hash_parts(f"{name}\n{size}\n".encode() for name, size in zip(self.names, sizes, strict=True))


class ArrayFrames(Recording):
    """Frames in an array (N, H, W), (N, C, H, W) or (N, H, W, C), bytes or floats in [0, 1]."""

    def __init__(self, place: Path, array: NDArray[Any], every: int, fit: FrameFit) -> None:
        shape = array.shape
        right = array.dtype == np.uint8 or np.issubdtype(array.dtype, np.floating)
        last = len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3)
        if not right or len(shape) not in (3, 4) or 0 in shape or not (len(shape) == 3 or last or shape[1] in (1, 3)):
            raise ValueError(
                f"{place} holds {array.dtype} of shape {shape}; expected frames (N, H, W), (N, C, H, W) or (N, H, W, "
                "C) with 1 or 3 channels, uint8 or floating point in [0, 1]"
            )
        self.array, self.last, self.every = array[::every], last, every
        super().__init__(place, fit, len(self.array))

    def read(self) -> Iterator[ReadFrame]:
        """Yield rows of the array."""
        return (ReadFrame(self.frame(i)) for i in range(len(self.array)))

    def frame(self, index: int) -> Tensor:
        """Copy a row of the array."""
        row = np.array(self.array[index])
        pixels = torch.from_numpy(row.transpose(2, 0, 1).copy() if self.last else row)
        if pixels.dim() == 2:
            pixels = pixels[None]
        if pixels.is_floating_point():
            low, high = (float(value) for value in pixels.float().aminmax())
            if looks_like_bytes(low, high):
                raise ValueError(f"frame {index} of {self.place} reaches {high:.4g}; expected [0, 1]: divide by 255")
        return pixels

    def name(self, index: int) -> str:
        """Return nothing: rows have numbers only."""
        return ""

    def digest(self) -> str:
        """Hash the beginning, the end and the size of the file."""
        return file_digest(self.place, self.every)


def open_recording(
    place: str | PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    stretch: bool = False,
    every: int = 1,
    skip: bool = False,
    shape: tuple[int | None, ...] | None = None,
) -> Recording:
    """Open recorded frames: a folder of pictures, a list (.txt, .csv), an array (.npy, .npz), or a video.

    Args:
        place: The folder or the file.
        size: Height and width that every frame is brought into; None: as they are.
        stretch: Change the shape of frames instead of cutting the middle.
        every: Take one frame in so many.
        skip: Warn of a picture that cannot be read, and go on; else it is an error.
        shape: (C, H, W) of the images that the network takes, None where any will do.
    """
    require(is_whole(every, 1), "every is a whole number, at least 1", every)
    path, fit, kind = Path(place), FrameFit(size, stretch, shape), Path(place).suffix.lower()
    if path.is_dir():
        return _folder(path, every, fit, skip)
    if not path.exists():
        raise FileNotFoundError(f"no recording at {path}: expected a folder of pictures, a list, an array or a video")
    if kind in LISTS:
        return _listed(path, every, fit, skip)
    if kind in ARRAYS:
        return ArrayFrames(path, _array(path), every, fit)
    if is_image_file(path.name) and kind != ".gif":
        raise ValueError(f"{path} is one picture; expected the folder of a recording, a list, an array or a video")
    return Video(path, every, fit)


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names as people count.

    >>> sorted(["f10.png", "f9.png", "a.png"], key=natural)
    ['a.png', 'f9.png', 'f10.png']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _read(path: Path) -> ReadFrame:
    try:
        return ReadFrame(read_image(path))
    except ImageFileError as error:
        return ReadFrame(None, str(error))


def _folder(path: Path, every: int, fit: FrameFit, skip: bool) -> Pictures:
    inside = [one for one in path.iterdir() if not one.name.startswith(".")]
    paths = sorted(
        (one for one in inside if is_image_file(one.name) and not one.is_dir()), key=lambda p: natural(p.name)
    )
    if not paths:
        folders = sorted(one.name for one in inside if one.is_dir())
        more = f"; it holds folders, such as {folders[0]}: name one of them" if folders else ""
        raise ValueError(f"{path} holds no pictures{more}; expected a folder of frames, named in their order")
    paths = paths[::every]
    return Pictures(path, paths, [one.name for one in paths], fit, skip)


def _listed(path: Path, every: int, fit: FrameFit, skip: bool) -> Pictures:
    if path.suffix.lower() == ".csv":
        names = [row[0] for _, row in csv_rows(path, LIST) if row[0]]
        names = names[1:] if names and names[0].lower() in HEADERS else names
    else:
        try:
            text = read_regular(path, MOST_CSV).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not {LIST}: it is not UTF-8 ({error.reason})") from None
        names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise ValueError(f"{path} lists no frames; expected one path a line, in their order")
    names = names[::every]
    paths = [path.parent / name for name in names]
    if missing := next((one for one in paths if not one.exists()), None):
        raise FileNotFoundError(f"{path} lists {missing}, which does not exist; paths count from the list's folder")
    return Pictures(path, paths, names, fit, skip)


def _array(path: Path) -> NDArray[Any]:
    try:
        if path.suffix.lower() == ".npy":
            return open_npy(path)
        arrays = {name: array for name, array in read_npz(path).items() if array.ndim in (3, 4)}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as an array of frames: {error}") from error
    if len(arrays) != 1:
        names = ", ".join(list(arrays)[:8]) or "none"
        raise ValueError(f"{path} holds {len(arrays)} arrays that could be frames ({names}); expected one")
    return next(iter(arrays.values()))
