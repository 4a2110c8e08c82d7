"""Images as people have them, as one tensor: floating point or bytes, NumPy arrays, pictures of Pillow, lists of these.

Neither NumPy nor Pillow is imported: whoever gives such an object has imported it.
"""

import sys
from typing import Any, Protocol

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.validation import warn

EXPECTED = "expected images: a tensor, a NumPy array, a picture of Pillow, or a list of these"
CHANNELS_LAST = (
    "images came channels last, {0}, and were turned into {1}: the network takes {2}, and cannot take {0} as it is. "
    "images.movedim(-1, {3}) says so without this warning (for an array: numpy.moveaxis(images, -1, {3}))"
)


class Picture(Protocol):
    """An image of Pillow."""

    mode: str

    def convert(self, mode: str) -> Any:
        """Return the picture in another mode."""


class Array(Protocol):
    """An array of NumPy."""

    shape: tuple[int, ...]
    dtype: Any


Images = Tensor | Array | Picture | list[Any] | tuple[Any, ...]


def as_floats(images: Images, net: Backbone) -> Tensor:
    """Return images as a tensor of floating point; bytes are divided by 255.

    Tensors stay where they are; other images go to the network's device.
    """
    x = images if isinstance(images, Tensor) else _as_tensor(images, net).to(net.device)
    if x.dtype == torch.uint8:
        return x.to(torch.promote_types(net.dtype, torch.float32)).div_(255)
    if not x.is_floating_point():
        hint = "convert them: images.to(torch.uint8) if they reach from 0 to 255"
        if x.dtype in (torch.int16, torch.uint16, torch.int32):
            hint += ", images.float() / 65535 if they have 16 bits"
        raise TypeError(f"images are {x.dtype}; expected uint8, or floating point in [0, 1]; {hint}")
    return x


def _as_tensor(images: Any, net: Backbone) -> Tensor:
    """Return a tensor of images of another type; a picture is (C, H, W)."""
    numpy, pillow = sys.modules.get("numpy"), sys.modules.get("PIL.Image")
    if isinstance(images, Tensor):
        return images
    if pillow is not None and isinstance(images, pillow.Image):
        return _of_picture(images, net)
    if numpy is not None and isinstance(images, numpy.ndarray):
        return _of_array(images, numpy)
    if isinstance(images, list | tuple) and images:
        parts = [_as_tensor(image, net) for image in images]
        kinds = sorted({f"{tuple(part.shape)} of {part.dtype}" for part in parts})
        if len(kinds) > 1:
            raise ValueError(f"the images of a list differ: {', '.join(kinds[:4])}. Give all the same size and type")
        return torch.stack(parts)
    what = "an empty list" if isinstance(images, list | tuple) else type(images).__name__
    hint = " (numpy.asarray(images) makes an array of most things)" if hasattr(images, "__array__") else ""
    raise TypeError(f"{EXPECTED}; got {what}{hint}")


def _of_picture(picture: Any, net: Backbone) -> Tensor:
    """Return a picture as bytes (C, H, W): grey for a network of one channel, else red, green and blue."""
    from tribe.data.images import EIGHT_BITS

    if picture.mode not in EIGHT_BITS:
        words = f"a picture of mode {picture.mode} has more than eight bits a channel"
        raise TypeError(f"{words}: give an array of floating point in [0, 1] instead")
    plain = picture.convert("L" if net.image_channels == 1 else "RGB")
    pixels = torch.frombuffer(bytearray(plain.tobytes()), dtype=torch.uint8)
    return pixels.view(plain.height, plain.width, -1).movedim(-1, 0)


def _of_array(array: Any, numpy: Any) -> Tensor:
    """Return an array as a tensor, which shares its memory where torch can."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:  # torch refuses, or warns
        array = numpy.array(array)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(f"{EXPECTED}; got an array of {array.dtype}") from error


def arrange(x: Tensor, net: Backbone, streams: int) -> tuple[Tensor, bool]:
    """Bring images of an unusual shape into the usual one; return them, and whether they had no axis of batches.

    One image, or one image of each stream, gets an axis of batches. Channels last become channels first, with one
    warning. Both are done only if the network cannot take the images as they are, and can take them afterwards.
    """
    assert net.rank is not None
    axes, channels = net.rank - 1, net.image_channels  # of an image
    whole = 1 if streams == 1 else 2  # axes before those of an image
    if x.dim() > whole and net.takes(tuple(x.shape[whole:])):
        return x, False
    given, single = x, False
    if channels == 1 and x.dim() == axes + whole - 2:  # a grey image without an axis of channels
        x = x.unsqueeze(whole - 1)
    if x.dim() < axes:
        return given, False
    last = x.shape[-1] == channels != x.shape[-axes]
    if last:
        x = x.movedim(-1, -axes)
    if x.dim() == axes + whole - 1 and (streams == 1 or x.shape[0] == streams):
        x, single = x.unsqueeze(whole - 1), True
    if not net.takes(tuple(x.shape[-axes:])):
        return given, False
    if last and not net.channels_last_told:
        net.channels_last_told = True
        wanted = tuple(x.shape[-axes:])
        warn(CHANNELS_LAST.format((*wanted[1:], wanted[0]), wanted, f"{channels} channels first", -axes))
    return x, single
