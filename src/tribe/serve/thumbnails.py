"""The last frame of each stream, small, for people: off by default, and bounded in bytes."""

import io
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tribe.data.images import require_pillow

SIDE = 96  # most pixels of a thumbnail's side


class Thumbnail(NamedTuple):
    """A small frame."""

    pixels: NDArray[np.uint8]  # (H, W) or (H, W, 3)
    number: int  # of the frame: another number, another frame


class Thumbnails:
    """The last frames of streams; the oldest frames are dropped first. Used on the event loop.

    Args:
        limit: the most bytes of all frames; 0: none is kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self._frames = limit, 0, 0
        self._thumbnails: OrderedDict[str, Thumbnail] = OrderedDict()

    def update(self, stream: str, images: Tensor) -> None:
        """Keep the last of some images (B, C, H, W) in [0, 1], if it can be shown: one channel or three."""
        if not self.limit or images.dim() != 4 or images.shape[1] not in (1, 3):
            return
        self.drop(stream)
        pixels = shrink(images[-1])
        self._frames += 1
        self._thumbnails[stream] = Thumbnail(pixels, self._frames)
        self.bytes += pixels.nbytes
        while self.bytes > self.limit:
            self.drop(next(iter(self._thumbnails)))

    def drop(self, stream: str) -> None:
        """Drop the frame of a stream."""
        if (old := self._thumbnails.pop(stream, None)) is not None:
            self.bytes -= old.pixels.nbytes

    def get(self, stream: str) -> Thumbnail | None:
        """Return the last frame of a stream."""
        return self._thumbnails.get(stream)

    def number(self, stream: str) -> int | None:
        """Return the number of a stream's frame; None: there is none."""
        return None if (thumbnail := self.get(stream)) is None else thumbnail.number


def shrink(image: Tensor) -> NDArray[np.uint8]:
    """Return every n-th pixel of an image (C, H, W) in [0, 1], at most 96 a side: (H, W), or (H, W, 3).

    >>> shrink(__import__("torch").ones(1, 200, 10)).shape
    (67, 4)
    """
    every = max(1, -(-max(image.shape[1:]) // SIDE))
    small = image[:, ::every, ::every].detach().cpu().nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().numpy()
    return np.ascontiguousarray(small[0] if len(small) == 1 else small.transpose(1, 2, 0))


def encode(thumbnail: Thumbnail) -> bytes:
    """Return the frame as a PNG."""
    file = io.BytesIO()
    require_pillow("thumbnails").fromarray(thumbnail.pixels).save(file, "PNG")
    return file.getvalue()
