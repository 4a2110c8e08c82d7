"""The two passes over activations that every norm rule needs, with one joint backward.

A rule (`tribe.norms`) is a function of per-sample moments. So a normalisation layer has three steps: *observe* the mean
and variance of each sample; let the rule turn these into a scale and a shift; *apply* them. Only the first and the last
read pixels. Computed separately, their backwards would each write a gradient as large as the activations, and then add
the two. Here one pass computes both:

    dx = g * scale + x * a + b,    a = 2 dvar / L,    b = dmean / L - a * mean

where dmean and dvar are the gradients that autograd takes through the rule.

Every function has a kernel in `tribe.engine.kernels`, which is used where it can run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tribe.engine import kernels

# Per-sample mean and var (R, B, C) -> scale and shift (R, 1|B, C).
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of statistics: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def observe(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of each sample and channel over its pixels: (R, B, C, ...) -> (R, B, C) twice."""
    if kernels.can_normalise(x):
        return kernels.observe(x)
    x, pixels = x.to(wide(x.dtype)), tuple(range(3, x.dim()))
    if not pixels:
        return x.clone(), torch.zeros_like(x)
    if x.device.type != "cpu":
        var, mean = torch.var_mean(x, pixels, correction=0)
        return mean, var
    # On the CPU var_mean is many times slower than two plain sums. Centred first: E[x^2] - E[x]^2 would cancel.
    mean = x.mean(pixels)
    centred = x - _over_pixels(mean, x)
    return mean, centred.mul_(centred).mean(pixels)


def normalise(x: Tensor, rule: Rule, relu: bool = False) -> Tensor:
    """Scale and shift (R, B, C, ...) as ``rule`` says for its per-sample moments; gradients flow through both.

    ``relu`` sets negative results to zero in the same pass.
    """
    if not torch.is_grad_enabled():
        return _apply(x, *rule(*observe(x)), relu)
    joint = _Joint()
    seen, mean, var = _Observe.apply(x, joint)  # type: ignore[no-untyped-call]
    return _Apply.apply(seen, *rule(mean, var), joint, relu)  # type: ignore[no-any-return,no-untyped-call]


def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> Tensor:
    """x * scale + shift for (R, B, C, ...) and (R, 1|B, C), where scale and shift do not depend on x."""
    if not torch.is_grad_enabled():
        return _apply(x, scale, shift, relu)
    return _Apply.apply(x, scale, shift, None, relu)  # type: ignore[no-any-return,no-untyped-call]


def fold(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Turn statistics (R, 1|B, C) and affine parameters (R, C) into a scale and a shift, (R, 1|B, C)."""
    if kernels.can_run(mean) and mean.dtype == weight.dtype == torch.float32:
        return _Fold.apply(mean, var, weight, bias, eps)  # type: ignore[no-any-return,no-untyped-call]
    scale = weight.unsqueeze(1) * torch.rsqrt(var + eps)
    return scale, bias.unsqueeze(1) - mean * scale


def _over_pixels(t: Tensor, x: Tensor) -> Tensor:
    return t.view(*t.shape, *[1] * (x.dim() - t.dim()))


def _apply(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> Tensor:
    if kernels.can_normalise(x):
        return kernels.apply(x, scale, shift, relu)
    y = torch.addcmul(_over_pixels(shift, x), x.to(shift.dtype), _over_pixels(scale, x)).to(x.dtype)
    return y.relu_() if relu else y


class _Joint:
    """Links the two backwards: `_Apply` passes g and its scale to `_Observe` instead of their product."""

    scale: Tensor
    shift: Tensor
    relu: bool


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: _Joint) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = observe(x)
        ctx.save_for_backward(x, mean)
        ctx.joint, ctx.by_kernel = joint, kernels.can_normalise(x)
        return x.view_as(x), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, dmean: Tensor, dvar: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        if ctx.by_kernel:
            joint, g = ctx.joint, kernels.match_layout(g, x)
            return kernels.joint_backward(g, x, joint.scale, joint.shift, (mean, dmean, dvar), joint.relu), None
        count = max(x[0, 0, 0].numel(), 1)
        a = dvar * (2 / count)
        b = dmean / count - a * mean
        dx = _apply(x.to(mean.dtype), a, b).addcmul_(g.to(mean.dtype), _over_pixels(ctx.joint.scale, x))
        return dx.to(x.dtype), None


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, joint: _Joint | None, relu: bool) -> Tensor:
        y = _apply(x, scale, shift, relu)
        ctx.joint, ctx.relu, ctx.by_kernel = joint, relu, kernels.can_normalise(x)
        # The output shows where ReLU was active, and the next layer saves it anyway; kernels compute it again.
        ctx.save_for_backward(x, scale, shift, y if relu and not ctx.by_kernel else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, scale, shift, y = ctx.saved_tensors
        if ctx.joint is not None:  # detached: with their graph they would form a cycle that is never freed
            ctx.joint.scale, ctx.joint.shift, ctx.joint.relu = scale.detach(), shift.detach(), ctx.relu
        if ctx.by_kernel:
            g = kernels.match_layout(g, x)
            by_scale, by_shift = kernels.apply_backward(g, x, scale, shift, ctx.relu)
            dx = g if ctx.joint is not None else kernels.joint_backward(g, x, scale, shift, None, ctx.relu)
            return dx, by_scale, by_shift, None, None
        if ctx.relu:
            g = torch.ops.aten.threshold_backward(g, y, 0)
        pixels = tuple(range(3, x.dim())) + ((1,) if scale.shape[1] != x.shape[1] else ())
        wide_g = g.to(scale.dtype)
        dshift, dscale = wide_g, wide_g * x
        if pixels:
            dshift, dscale = (t.sum(pixels).view_as(scale) for t in (dshift, dscale))
        dx = g if ctx.joint is not None else (wide_g * _over_pixels(scale, x)).to(x.dtype)
        return dx, dscale, dshift, None, None


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mean, var, weight)
        ctx.eps = eps
        return kernels.fold(mean, var, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscale: Tensor, dshift: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        mean, var, weight = ctx.saved_tensors
        return *kernels.fold_backward(dscale, dshift, mean, var, weight, ctx.eps), None
