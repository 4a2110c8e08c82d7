"""Recorded frames in their order: a folder of pictures, a list, an array; videos are in `tribe.trial.video`.

Frames are read when they are needed, a batch at a time, and again when they are shown: none is kept.
"""

import csv
import hashlib
import io
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from tribe.core.validation import looks_like_bytes
from tribe.data.datasets.files import open_npy, read_npz
from tribe.data.images import ImageFileError, cores, is_image_file, read_image
from tribe.fields import is_whole, require
from tribe.io.files import read_regular

LISTS, ARRAYS = (".txt", ".csv", ".lst"), (".npy", ".npz")
HEADERS = ("file", "frame", "image", "path", "name", "filename")  # of the first column of a list
MOST_LIST = 2**27  # bytes
SAMPLED = 2**16  # bytes of an array or video, from its beginning and its end, that are part of its digest
RESIZE = (
    "--size HEIGHTxWIDTH (in Python size=(height, width)) resizes every frame so that it covers this size, and cuts "
    "the middle; --set frames.stretch=True cuts nothing and changes the shape"
)
SKIPPING = "--set frames.skip=True warns, and goes on with the others"


@dataclass(frozen=True)
class FrameFit:
    """Bring every frame into the shape that a network takes, or say why that cannot be done."""

    size: tuple[int, int] | None = None  # height and width; None: frames have the right size
    stretch: bool = False  # change the shape of frames instead of cutting the middle
    shape: tuple[int | None, ...] | None = None  # (C, H, W) of what the network takes; None: any

    def __post_init__(self) -> None:
        whole = self.size is None or (len(self.size) == 2 and all(is_whole(side, 1) for side in self.size))
        require(whole, "size is height and width, whole numbers of at least 1", self.size)

    def __call__(self, frame: Tensor) -> Tensor:
        """Return a frame (C, H, W), bytes or floats in [0, 1], as floats in the shape that is wanted."""
        x = frame.float() / 255 if frame.dtype == torch.uint8 else frame.float()
        channels = None if self.shape is None else self.shape[0]
        if channels == 1 and len(x) == 3:
            x = x.mean(0, keepdim=True)
        elif channels == 3 and len(x) == 1:
            x = x.expand(3, -1, -1)
        if self.size is not None and tuple(x.shape[1:]) != self.size:
            x = self._resized(x, self.size)
        return x

    def _resized(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = x.shape[1:]
        scale = max(size[0] / height, size[1] / width)
        covering = size if self.stretch else (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
        x = interpolate(x[None], covering, mode="bilinear", antialias=True)[0].clamp(0, 1)
        top, left = (covering[0] - size[0]) // 2, (covering[1] - size[1]) // 2
        return x[:, top : top + size[0], left : left + size[1]]

    def misfit(self, x: Tensor) -> str | None:
        """Return why the network does not take a frame that was brought into shape; None if it does."""
        if self.shape is None or (
            len(self.shape) == 3 and all(want in (None, got) for want, got in zip(self.shape, x.shape, strict=True))
        ):
            return None
        if len(self.shape) == 3 and self.shape[0] == len(x):
            return f"{shown_size(x)}; the network takes {_side(self.shape[1])}x{_side(self.shape[2])}. {RESIZE}"
        return f"{len(x)} channels; the network takes images of the shape {self.shape}"


class ReadFrame(NamedTuple):
    """A frame as it was recorded, or why it cannot be read."""

    pixels: Tensor | None  # (C, H, W), bytes, or floats in [0, 1]
    error: str = ""


class Recording(ABC):
    """Recorded frames. ``length`` is None until it is known; ``remarks`` say after a pass what was not as expected."""

    def __init__(self, place: Path, fit: FrameFit, length: int | None, skip: bool = False) -> None:
        self.place, self.fit, self.length, self.skip = place, fit, length, skip
        self.remarks: list[str] = []
        self.times: list[int] = []  # of the frames of a video that were played, in units of its time base
        self.size: tuple[int, int] | None = None  # height and width of the frames that were played

    @abstractmethod
    def read(self) -> Iterator[ReadFrame]:
        """Yield all frames in their order, as they were recorded."""

    @abstractmethod
    def frame(self, index: int) -> Tensor:
        """Return a frame as it was recorded; ValueError or OSError if it cannot be read."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return what people call a frame: its file, or its time; may be empty."""

    @abstractmethod
    def digest(self) -> str:
        """Return a hash by which the same frames are recognised."""

    def spec(self) -> dict[str, Any]:
        """Return where the frames are, and which frames they are, as plain data."""
        fit = {"size": None if self.fit.size is None else list(self.fit.size), "stretch": self.fit.stretch}
        return {"place": str(self.place), "digest": self.digest(), **fit}

    def batches(self, batch: int) -> Iterator[Tensor]:
        """Yield batches (B, C, H, W) of frames in [0, 1]; an unreadable frame that is skipped is NaN."""
        frames = self._fitted()
        while part := list(islice(frames, batch)):
            yield torch.stack(part)

    def _fitted(self) -> Iterator[Tensor]:
        self.remarks, self.size = [], None
        first: Tensor | None = None
        waiting = 0  # unreadable frames before the first readable one
        i = -1
        for i, (pixels, error) in enumerate(self.read()):
            if pixels is None:
                if not self.skip:
                    raise ImageFileError(f"frame {i}: {error}; {SKIPPING}")
                self._remark(f"frame {i} was left out: {error}")
                if first is None:
                    waiting += 1
                else:
                    yield torch.full_like(first, torch.nan)
                continue
            x = self.fit(pixels)
            if first is None:
                if why := self.fit.misfit(x):
                    raise ValueError(f"{self._shown(i)} has {why}")
                first, self.size = x, (x.shape[1], x.shape[2])
                yield from [torch.full_like(x, torch.nan)] * waiting
            elif x.shape != first.shape:
                raise ValueError(
                    f"{self._shown(i)} is {shown_size(x)} with {len(x)} channels; the frames before it are "
                    f"{shown_size(first)} with {len(first)}. {RESIZE}"
                )
            yield x
        self.length = i + 1
        if first is None:
            raise ValueError(f"{self.place} holds no frame that can be read")

    def _remark(self, words: str) -> None:
        self.remarks.append(words)
        warnings.warn(words, stacklevel=4)

    def _shown(self, index: int) -> str:
        name = self.name(index)
        return f"frame {index} ({name})" if name else f"frame {index}"


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
        return _hash(f"{name}\n{size}\n".encode() for name, size in zip(self.names, sizes, strict=True))


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
    from tribe.trial.video import Video

    return Video(path, every, fit)


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names as people count.

    >>> sorted(["f10.png", "f9.png", "a.png"], key=natural)
    ['a.png', 'f9.png', 'f10.png']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def shown_size(x: Tensor) -> str:
    """Return height and width of a frame (C, H, W) as people write them."""
    return f"{x.shape[1]}x{x.shape[2]} (height x width)"


def file_digest(path: Path, every: int) -> str:
    """Return a hash of the beginning, the end and the size of a file, and of which frames are taken."""
    with path.open("rb") as file:
        start = file.read(SAMPLED)
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - SAMPLED))
        return _hash((start, file.read(SAMPLED), f"{size} {every}".encode()))


def _hash(parts: Iterable[bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made.hexdigest()[:32]


def _side(length: int | None) -> str:
    return "any" if length is None else str(length)


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
    try:
        text = read_regular(path, MOST_LIST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a list of frames: it is not UTF-8 ({error.reason})") from None
    if path.suffix.lower() == ".csv":
        names = [row[0].strip() for row in csv.reader(io.StringIO(text)) if row and row[0].strip()]
        names = names[1:] if names and names[0].lower() in HEADERS else names
    else:
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
