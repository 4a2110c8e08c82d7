"""The two passes over activations that every norm rule needs, with one joint backward.

A rule (`tribe.norms`) is a function of per-sample moments. So a normalisation layer is: *observe* the mean and
variance of each sample, let the rule turn these few numbers into a scale and a shift, *apply* them. Only the first
and the last touch pixels. Done naively their backwards would each write a gradient as large as the activations, to be
added up; here they make one pass together:

    dx = g * scale + x * a + b,    a = 2 dvar / L,    b = dmean / L - a * mean

where dmean and dvar are what autograd brought back through the rule.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Per-sample mean and var (R, B, C) -> scale and shift (R, 1|B, C).
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision statistics are kept in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def observe(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of each sample and channel over its pixels: (R, B, C, ...) -> (R, B, C) twice."""
    x, pixels = x.to(wide(x.dtype)), tuple(range(3, x.dim()))
    if not pixels:
        return x.clone(), torch.zeros_like(x)
    if x.is_cuda:
        var, mean = torch.var_mean(x, pixels, correction=0)
        return mean, var
    # On the CPU var_mean is many times slower than these two plain sums. Centred first: E[x^2] - E[x]^2 would cancel.
    mean = x.mean(pixels)
    centred = x - _over_pixels(mean, x)
    return mean, centred.mul_(centred).mean(pixels)


def normalise(x: Tensor, rule: Rule) -> Tensor:
    """Scale and shift (R, B, C, ...) by what ``rule`` makes of its per-sample moments; gradients flow through both."""
    if not torch.is_grad_enabled():
        return _apply(x, *rule(*observe(x)))
    joint = _Joint()
    seen, mean, var = _Observe.apply(x, joint)  # type: ignore[no-untyped-call]
    return _Apply.apply(seen, *rule(mean, var), joint)  # type: ignore[no-any-return,no-untyped-call]


def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift for (R, B, C, ...) and (R, 1|B, C), where scale and shift do not depend on x."""
    if not torch.is_grad_enabled():
        return _apply(x, scale, shift)
    return _Apply.apply(x, scale, shift, None)  # type: ignore[no-any-return,no-untyped-call]


def _over_pixels(t: Tensor, x: Tensor) -> Tensor:
    return t.view(*t.shape, *[1] * (x.dim() - t.dim()))


def _apply(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = torch.addcmul(_over_pixels(shift, x), x.to(shift.dtype), _over_pixels(scale, x))
    return y.to(x.dtype)


class _Joint:
    """The private line between the two halves: `_Apply` hands g and its scale back instead of their product."""

    scale: Tensor


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: _Joint) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = observe(x)
        ctx.save_for_backward(x, mean)
        ctx.joint = joint
        return x.view_as(x), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, dmean: Tensor, dvar: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        count = max(x[0, 0, 0].numel(), 1)
        a = dvar * (2 / count)
        b = dmean / count - a * mean
        dx = _apply(x.to(mean.dtype), a, b).addcmul_(g.to(mean.dtype), _over_pixels(ctx.joint.scale, x))
        return dx.to(x.dtype), None


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, joint: _Joint | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.joint = joint
        return _apply(x, scale, shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        pixels = tuple(range(3, x.dim())) + ((1,) if scale.shape[1] != x.shape[1] else ())
        wide_g = g.to(scale.dtype)
        dshift, dscale = wide_g, wide_g * x
        if pixels:
            dshift, dscale = (t.sum(pixels).view_as(scale) for t in (dshift, dscale))
        if ctx.joint is None:
            return (wide_g * _over_pixels(scale, x)).to(x.dtype), dscale, dshift, None
        ctx.joint.scale = scale.detach()  # with its graph it would hold the node that holds it, for ever
        return g, dscale, dshift, None
