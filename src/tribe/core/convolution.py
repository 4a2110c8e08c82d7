"""Convolutions with frozen weights: without their bias where a later pass adds it, and without keeping their input.

To learn the affine parameters of normalisation, a gradient must pass through each convolution, but its weights need
none. Torch keeps the input of a convolution for the gradient of its weights all the same, which would be half of the
memory of a step. The gradient of the input needs the weights only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")  # of their arguments
DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def bias_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the bias of a call of a convolution with these arguments; None without one, or if x is not a batch."""
    given = _named(args, kwargs)
    bias: Tensor | None = given["bias"]
    return bias if given["input"].dim() == given["weight"].dim() else None


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], add_bias: bool = True) -> Tensor:
    """Call a convolution; with gradients it keeps its weights only, where these are frozen."""
    given = _named(args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    bias = bias if add_bias else None
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    plain = not isinstance(given["padding"], str) and x.dim() == weight.dim() and x.dtype == weight.dtype
    plain = plain and not torch.is_autocast_enabled(x.device.type)
    settings = [given[name] for name in NAMES[3:]]
    if torch.is_grad_enabled() and x.requires_grad and frozen and plain:
        return _Frozen.apply(func, x, weight, bias, *settings)  # type: ignore[no-any-return,no-untyped-call]
    return func(x, weight, bias, *settings)  # type: ignore[no-any-return]


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**DEFAULTS, **dict(zip(NAMES, args, strict=False)), **kwargs}


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.strides, ctx.settings = x.shape, x.stride(), settings
        return func(x, weight, bias, *settings)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        axes = weight.dim() - 2
        stride, padding, dilation = ([t] * axes if isinstance(t, int) else list(t) for t in ctx.settings[:3])
        # Of x only shape and strides are read: memory in its order, which is never written. An expanded number would do
        # on the CPU, but cuDNN copies g into the order that x seems to have, and back into that of the weights.
        x = g.new_empty_strided(ctx.shape, ctx.strides)
        dx, _, _ = torch.ops.aten.convolution_backward(
            g, x, weight, None, stride, padding, dilation, False, [0] * axes, ctx.settings[3], (True, False, False)
        )
        return (None, dx, *[None] * (2 + len(ctx.settings)))
