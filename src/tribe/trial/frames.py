"""Recorded frames in their order: what every recording can do. `tribe.trial.recordings` opens them.

Frames are read when they are needed, a batch at a time, and again when they are shown: none is kept.
"""

import csv
import hashlib
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from tribe.data.images import ImageFileError
from tribe.fields import is_whole, require
from tribe.io.files import read_regular

MOST_CSV = 2**27  # bytes
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


def shown_size(x: Tensor) -> str:
    """Return height and width of a frame (C, H, W) as people write them."""
    return f"{x.shape[1]}x{x.shape[2]} (height x width)"


def file_digest(path: Path, every: int) -> str:
    """Return a hash of the beginning, the end and the size of a file, and of which frames are taken."""
    with path.open("rb") as file:
        start = file.read(SAMPLED)
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - SAMPLED))
        return hash_parts((start, file.read(SAMPLED), f"{size} {every}".encode()))


def csv_rows(path: str | PathLike[str], what: str) -> list[tuple[int, list[str]]]:
    """Return the rows of a CSV file that are not empty, with the numbers of their lines; ValueError if it is none."""
    try:
        text = read_regular(path, MOST_CSV).decode("utf-8-sig")
        rows = csv.reader(io.StringIO(text, newline=None))
        return [(rows.line_num, [cell.strip() for cell in row]) for row in rows if any(cell.strip() for cell in row)]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {what}: it is not UTF-8 ({error.reason})") from None
    except csv.Error as error:
        raise ValueError(f"{path} is not {what}: {error}") from None


def hash_parts(parts: Iterable[bytes]) -> str:
    """Return a hash of some bytes."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made.hexdigest()[:32]


def _side(length: int | None) -> str:
    return "any" if length is None else str(length)
