"""The two passes over activations that every norm rule needs, with one joint backward.

A rule (`tribe.norms`) is a function of per-sample moments. So a normalisation layer has three steps: *observe* the mean
and variance of each sample; let the rule turn these into a scale and a shift; *apply* them. Only the first and the last
read pixels. Computed separately, their backwards would each write a gradient as large as the activations, and then add
the two. Here one pass computes both:

    dx = g * scale + x * a + b,    a = 2 dvar / L,    b = dmean / L - a * mean

where dmean and dvar are the gradients that autograd takes through the rule.

An `Epilogue` is computed in the same passes (`tribe.core.fusion` finds it): the ``offset`` (C,) to add to x, which is
the bias of the convolution before; the ``residual`` to add afterwards; and ReLU.

Every function has a kernel in `tribe.core.kernels`, which is used where it can run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tribe.core import kernels
from tribe.core.kernels import activations, statistics

# Per-sample mean and var (R, B, C) -> scale and shift (R, 1|B, C).
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision for statistics and sums: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def observe(x: Tensor, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance of each sample and channel: (R, B, C, ...) -> (R, B, C) twice."""
    if kernels.can_normalise(x):
        return activations.observe(x, offset)
    mean, var = (t.view(x.shape[:3]) for t in observe_samples(x.flatten(0, 1)))
    return (mean if offset is None else mean + offset), var


def _is_channels_last(x: Tensor) -> bool:
    """Return whether each sample is, whatever lies between samples."""
    return x.dim() == 4 and x[:1].is_contiguous(memory_format=torch.channels_last)


LARGE = 2**15  # numbers of an image: the squares of a batch of such images leave the cache of a processor


def observe_samples(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance of each sample and channel, without kernels: (N, C, ...) -> (N, C) twice."""
    x = x.to(accumulation_dtype(x.dtype))
    pixels, samples = tuple(range(2, x.dim())), x.shape[0]
    if not pixels:
        return x.clone(), torch.zeros_like(x)
    if x.device.type != "cpu":
        var, mean = torch.var_mean(x, pixels, correction=0)
        return mean, var
    if (samples == 1 or x.numel() >= LARGE * samples > 0) and _is_channels_last(x):
        # Sample by sample, without a tensor of squares.
        each = [torch.batch_norm_update_stats(t, None, None, 0.0) for t in (x.split(1) if samples > 1 else (x,))]
        mean, var = each[0] if samples == 1 else map(torch.stack, zip(*each, strict=True))
        return mean.view(samples, -1), var.view(samples, -1)
    # var_mean is many times slower here than two plain sums. Centred first: E[x^2] - E[x]^2 would cancel.
    mean = x.mean(pixels)
    return mean, F.mse_loss(x, _over_pixels(mean, x).expand_as(x), reduction="none").mean(pixels)


class Epilogue(NamedTuple):
    """Operations next to a normalisation that are computed in the same pass."""

    relu: bool = False  # set negative results to zero
    offset: Tensor | None = None  # (C,) to add to x first
    residual: Tensor | None = None  # (R, B, C, ...) to add to the result, before ReLU


NO_EPILOGUE = Epilogue()


def normalise(x: Tensor, rule: Rule, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    """Scale and shift (R, B, C, ...) as ``rule`` says for its per-sample moments; gradients flow through both."""
    if not torch.is_grad_enabled():
        return _apply(x, *rule(*observe(x, epilogue.offset)), epilogue)
    joint = _Joint()
    observed, mean, var = _Observe.apply(x, joint, epilogue.offset)  # type: ignore[no-untyped-call]
    return _Apply.apply(observed, *rule(mean, var), epilogue.residual, joint, epilogue)  # type: ignore[no-any-return,no-untyped-call]


def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    """Compute x * scale + shift for (R, B, C, ...) and (R, 1|B, C), where scale and shift do not depend on x."""
    if not torch.is_grad_enabled():
        return _apply(x, scale, shift, epilogue)
    return _Apply.apply(x, scale, shift, epilogue.residual, None, epilogue)  # type: ignore[no-any-return,no-untyped-call]


def fold(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Turn statistics (R, 1|B, C) and affine parameters (R, C) into a scale and a shift, (R, 1|B, C)."""
    if kernels.can_run(mean, kernels.EXACT) and weight.dtype == torch.float32:
        return _Fold.apply(mean, var, weight, bias, eps)  # type: ignore[no-any-return,no-untyped-call]
    scale = weight.unsqueeze(1) * torch.rsqrt(var + eps)
    return scale, torch.addcmul(bias.unsqueeze(1), mean, scale, value=-1)  # the bits of torch.batch_norm


def _over_pixels(t: Tensor, x: Tensor) -> Tensor:
    return t.view(*t.shape, *[1] * (x.dim() - t.dim()))


def _apply(x: Tensor, scale: Tensor, shift: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    relu, offset, residual = epilogue
    if kernels.can_normalise(x):
        residual = None if residual is None else activations.match_layout(residual, x)
        return activations.apply(x, scale, shift, relu, offset, residual)
    if offset is not None:
        shift = torch.addcmul(shift, scale, offset.to(shift.dtype))
    if x.dtype != shift.dtype and residual is None and _by_row(x, scale):  # without a copy in full precision
        y, unused = torch.empty_like(x), scale.new_empty(0)
        for row in zip(x, scale[:, 0], shift[:, 0], y, strict=True):
            torch.native_batch_norm(*row[:3], *_identity(scale), False, 0.0, 0.0, out=(row[3], unused, unused))
        return y.relu_() if relu else y
    y = torch.addcmul(_over_pixels(shift, x), x.to(shift.dtype), _over_pixels(scale, x))
    y = (y if residual is None else y.add_(residual)).to(x.dtype)
    return y.relu_() if relu else y


def _by_row(x: Tensor, scale: Tensor) -> bool:
    """Return whether torch's batch norm on a CPU can serve each row of (R, B, C, ...): it takes one scale a channel.

    NOTE: not for one image, whose stride along B may be anything: torch then takes the wrong order of memory.
    """
    return x.device.type == "cpu" and scale.shape[1] == 1 and x.shape[1] > 1 and x.numel() > 0


def _identity(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (C,) with which batch norm, with eps = 0, only scales and shifts."""
    return torch.zeros_like(scale[0, 0]), torch.ones_like(scale[0, 0])


def _sums(g: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of g and of g * x, both (R, B, C, ...), in the shape of a scale (R, 1|B, C)."""
    if _by_row(x, scale) and x.dtype == g.dtype:  # in one pass without a product
        mean, var = _identity(scale)
        rows = [
            torch.ops.aten.native_batch_norm_backward(*row, var, mean, var, mean, var, False, 0.0, [False, True, True])
            for row in zip(g, x, strict=True)
        ]
        of_g, of_product = (torch.stack([sums[i] for sums in rows]).unsqueeze(1) for i in (2, 1))
        return of_g, of_product
    pixels = tuple(range(3, x.dim())) + ((1,) if scale.shape[1] != x.shape[1] else ())
    g = g.to(scale.dtype)
    return tuple(t.sum(pixels).view_as(scale) if pixels else t for t in (g, g * x))  # type: ignore[return-value]


class _Joint:
    """Links the two backwards: `_Apply` passes g and its scale to `_Observe` instead of their product."""

    scale: Tensor
    shift: Tensor
    relu: bool  # whether g is still to be set to zero where ReLU was not active


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: _Joint, offset: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = observe(x, offset)
        ctx.save_for_backward(x, mean, offset)
        ctx.joint, ctx.by_kernel = joint, kernels.can_normalise(x)
        return x.view_as(x), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, dmean: Tensor, dvar: Tensor) -> tuple[Tensor, None, None]:
        x, mean, offset = ctx.saved_tensors
        joint: _Joint = ctx.joint
        if ctx.by_kernel:
            g, moments = activations.match_layout(g, x), (mean, dmean, dvar)
            return activations.joint_backward(g, x, joint.scale, joint.shift, moments, joint.relu, offset), None, None
        count = max(x[0, 0, 0].numel(), 1)
        a = dvar * (2 / count)
        b = dmean / count - a * (mean if offset is None else mean - offset)
        wide, a, b = x.to(mean.dtype), _over_pixels(a, x), _over_pixels(b, x)
        dx = torch.addcmul(b, wide, a, out=None if wide is x else wide)
        return dx.addcmul_(g.to(mean.dtype), _over_pixels(joint.scale, x)).to(x.dtype), None, None


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        residual: Tensor | None,  # also in ``epilogue``; here for its gradient
        joint: _Joint | None,
        epilogue: Epilogue,
    ) -> Tensor:
        ctx.joint, ctx.relu, ctx.by_kernel = joint, epilogue.relu, kernels.can_normalise(x)
        # Where ReLU was active: kernels compute it again from x, or save it in a byte each if a residual was added.
        # Without kernels the output shows it, which the next layer saves anyway.
        active = None
        if ctx.by_kernel and epilogue.relu and residual is not None:
            active, residual = torch.empty_like(x, dtype=torch.int8), activations.match_layout(residual, x)
            y = activations.apply(x, scale, shift, True, epilogue.offset, residual, active)
        else:
            y = _apply(x, scale, shift, epilogue)
            active = y if epilogue.relu and not ctx.by_kernel else None
        ctx.save_for_backward(x, scale, shift, epilogue.offset, active)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, offset, active = ctx.saved_tensors
        joint: _Joint | None = ctx.joint
        relu = ctx.relu and ctx.by_kernel and active is None  # still to be applied to g
        if joint is not None:  # detached: with their graph they would form a cycle that is never freed
            joint.scale, joint.shift, joint.relu = scale.detach(), shift.detach(), relu
        if ctx.by_kernel:
            g = activations.match_layout(g, x)
            by_scale, by_shift, g = activations.apply_backward(g, x, scale, shift, relu, offset, active)
            dx = g if joint is not None else activations.joint_backward(g, x, scale, shift, None, relu, offset)
            return dx, by_scale, by_shift, g if ctx.needs_input_grad[3] else None, None, None
        if active is not None:
            g = torch.ops.aten.threshold_backward(g, active, 0)
        dshift, dscale = _sums(g, x, scale)
        if offset is not None:
            dscale = torch.addcmul(dscale, dshift, offset.to(dshift.dtype))
        dx = g if joint is not None else (g.to(scale.dtype) * _over_pixels(scale, x)).to(x.dtype)
        return dx, dscale, dshift, g if ctx.needs_input_grad[3] else None, None, None


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mean, var, weight)
        ctx.eps = eps
        return statistics.fold(mean, var, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscale: Tensor, dshift: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        mean, var, weight = ctx.saved_tensors
        return *statistics.fold_backward(dscale, dshift, mean, var, weight, ctx.eps), None
