"""Checks of the images that an adapter gets: what is wrong with them, what was expected, what to do."""

import sys
import warnings

import torch
from torch import Tensor

from tribe.core.backbone import Backbone

TOLERANCE = 1e-3  # how far values may leave [0, 1] without a warning


def as_streams(x: Tensor, net: Backbone, streams: int) -> tuple[Tensor, bool]:
    """Bring images into (S, B, ...) in the network's precision, or refuse them; and whether the S axis was added."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor of images; got {type(x).__name__}. For an array: torch.from_numpy(x)")
    if not x.is_floating_point():
        hint = "divide by 255: images.float() / 255" if x.dtype == torch.uint8 else "convert them: images.float()"
        raise TypeError(f"images are {x.dtype}; expected floating point in [0, 1]; {hint}")
    x = x.detach().as_subclass(Tensor).to(net.dtype)  # a plain tensor: a subclass may redefine operations
    if x.is_inference():
        x = x.clone()
    added = streams == 1 and not (net.rank and x.dim() == net.rank + 1 and x.shape[0] == 1)
    if added:
        x = x.unsqueeze(0)
    if x.dim() < 3 or x.shape[0] != streams:
        layout = "(B, ...)" if streams == 1 else f"({streams}, B, ...): one row of images a stream"
        raise ValueError(f"expected images {layout}; got {tuple(x.shape[1:] if added else x.shape)}")
    if x.device != net.device:
        raise ValueError(f"images are on {x.device}, the network on {net.device}: move one with .to()")
    return x, added


def as_mask(valid: Tensor, x: Tensor, added: bool) -> Tensor:
    """Bring the mask of images (S, B, ...) into (S, B), or refuse it."""
    expected = tuple(x.shape[added:2])
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != expected:
        found = f"{valid.dtype} of shape {tuple(valid.shape)}" if isinstance(valid, Tensor) else repr(valid)
        raise ValueError(f"valid is a tensor of booleans, one for each image, of shape {expected}; got {found}")
    valid = valid.to(x.device)
    return valid.unsqueeze(0) if added else valid


def as_order(order: Tensor, x: Tensor, added: bool, valid: Tensor | None = None) -> Tensor:
    """Turn times of images (S, B, ...) into the positions (S, B) that sort them, or refuse them; ties keep their order.

    Images that are not ``valid`` (S, B) have no time, whatever ``order`` says, and stay where they are.

    >>> as_order(torch.tensor([0.3, 0.1, 0.2]), torch.zeros(1, 3, 4), added=True)
    tensor([[1, 2, 0]])
    """
    expected = tuple(x.shape[added:2])
    if not isinstance(order, Tensor) or tuple(order.shape) != expected or not _can_sort(order.dtype):
        found = f"{order.dtype} of shape {tuple(order.shape)}" if isinstance(order, Tensor) else repr(order)
        raise ValueError(f"order is a tensor of numbers, one for each image, of shape {expected}; got {found}")
    order = order.to(x.device)
    order = order.unsqueeze(0) if added else order
    if order.is_floating_point() and bool((order.isnan() if valid is None else order.isnan() & valid).any()):
        raise ValueError("order holds NaN; expected a time, or a position in time, for each image")
    if valid is None:
        return torch.argsort(order, dim=1, stable=True)
    places = _valid_first(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]), valid)
    images = _valid_first(torch.argsort(torch.where(valid, order, 0), dim=1, stable=True), valid)
    return torch.empty_like(images).scatter_(1, places, images)


def _valid_first(positions: Tensor, valid: Tensor) -> Tensor:
    """Positions (S, B), those of valid images first; otherwise they keep their order."""
    return in_order(positions, torch.argsort((~in_order(valid, positions)).byte(), dim=1, stable=True))


def _can_sort(dtype: torch.dtype) -> bool:
    """Whether torch sorts such numbers: no truth values, no complex numbers, no floating point of 8 bits."""
    return not (dtype == torch.bool or dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 2))


def in_order(values: Tensor, positions: Tensor) -> Tensor:
    """Reorder values (S, B, ...) by positions (S, B) of each stream."""
    index = positions.view(*positions.shape, *[1] * (values.dim() - 2))
    return torch.take_along_dim(values, index, 1)


def in_range(x: Tensor) -> bool:
    """Whether all values lie in [0, 1]; NaN does not. Waits for the device."""
    low, high = (v.item() for v in x.aminmax())
    return low >= -TOLERANCE and high <= 1 + TOLERANCE


def warn_of_range(x: Tensor) -> bool:
    """Warn of finite values outside [0, 1], and say whether there were any."""
    if not x.numel() or in_range(x):
        return False
    low, high = (v.item() for v in x.aminmax())
    if high > 2 and low >= 0:
        cause = "they look like 0 to 255: divide by 255"
    elif low < 0:
        cause = (
            "they look normalised already: give images in [0, 1] and put the normalisation into the network, "
            "torch.nn.Sequential(tribe.Normalize(mean, std), net), because augmentation works on [0, 1]"
        )
    else:
        cause = "check how they are scaled"
    warn(f"images reach from {low:.3g} to {high:.3g}, outside [0, 1]; {cause}")
    return True


def warn(message: str) -> None:
    """Warn at the caller's line, outside tribe and torch (`skip_file_prefixes` needs Python 3.12)."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("tribe", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
