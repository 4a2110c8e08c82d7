"""The protocol of a norm rule, the two that the engine itself needs (stored and batch statistics), and shared steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tribe.core import kernels
from tribe.core.kernels import statistics
from tribe.core.moments import Epilogue, fold, normalise, observe
from tribe.core.state import Stats


class Norm(Protocol):
    """A function from the per-sample moments of a batch to the statistics that normalise it.

    A rule may also have ``group(labels, valid, dtype)``. It is called once a pass, and every layer gets its result in
    place of the labels. So work that is the same for all layers is done once. With ``prepare(groups, stats, room)`` a
    rule may also work on the statistics of all layers at once: it gets the result of ``group``, the statistics before
    the pass and memory for those after it, and returns what a layer gets in place of the labels at its first call, as a
    function of its columns (or None). A layer may keep its statistics in that memory. A rule whose gradient is not that
    of what it computes, on purpose, says why in ``stops_gradient``.
    """

    @property
    def classes(self) -> int:
        """Return K, the number of statistics that are kept per channel."""
        ...

    observes: ClassVar[bool]  # False: the rule ignores mean and var, which are then not computed

    def __call__(
        self,
        mean: Tensor,  # (R, B, C) over the `count` pixels of each sample
        var: Tensor,  # (R, B, C) biased
        count: int,
        stats: Stats,  # (R, K, C) as they stood before this batch
        labels: Tensor | None,  # (R, B) pseudo labels, if there are any
        valid: Tensor,  # (R, B) False: padding or a bad image, which weighs nothing
        eps: float,
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the mean and var to normalise with, (R, 1|B, C), and the statistics to keep."""
        ...


@dataclass(frozen=True)
class Frozen:
    """The stored statistics (R, 1, C), for every batch."""

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = False

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the stored statistics."""
        return stats.mean, stats.var, stats


@dataclass(frozen=True)
class Recorded(Frozen):
    """The stored statistics, for every batch; the pass returns the moments of samples (R, n, C) in place of them."""

    first: int = 0  # of the samples of each row, from this one
    every: int = 1  # one in so many is recorded

    @property
    def part(self) -> slice:
        """Return which samples are recorded."""
        return slice(self.first, None, self.every)


def pool_batch(mean: Tensor, var: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Pool per-sample moments (R, B, C) over the valid samples: (R, 1, C) mean and biased variance."""
    if kernels.can_run(mean, kernels.EXACT):
        return _PoolBatch.apply(mean, var, valid)  # type: ignore[no-any-return,no-untyped-call]
    share = valid.to(mean.dtype)
    share = (share / share.sum(1, keepdim=True).clamp_min(1)).unsqueeze(-1)  # (R, B, 1)
    centre = (share * mean).sum(1, keepdim=True)
    return centre, (share * (var + (mean - centre).square())).sum(1, keepdim=True)


def unbiased_variance(var: Tensor, count: int, valid: Tensor) -> Tensor:
    """Return the unbiased variance of pooled values, from the biased one: ``count`` values of each valid sample."""
    values = count * valid.sum(1).to(var.dtype).view(-1, 1, 1)  # (R, 1, 1)
    return var * (values / (values - 1).clamp_min(1))


def move_towards(stats: Stats, mean: Tensor, var: Tensor, share: float, valid: Tensor) -> Stats:
    """Move statistics a share of the way to those of a batch; a row with no valid sample stays."""
    step = share * valid.any(1).to(mean.dtype).view(-1, 1, 1)  # (R, 1, 1)
    return Stats(stats.mean + step * (mean - stats.mean), stats.var + step * (var - stats.var))


class _PoolBatch(torch.autograd.Function):
    """`pool_batch` by a kernel."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        centre, spread, count = statistics.pool(mean, var, valid)
        ctx.save_for_backward(mean, valid, centre, count)
        return centre, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_centre: Tensor, by_spread: Tensor) -> tuple[Tensor, Tensor, None]:
        return *statistics.pool_backward(by_centre, by_spread, *ctx.saved_tensors), None


@kernels.comparison
def _layer(device: torch.device) -> dict[str, Sequence[Tensor]]:
    """Compute a layer of 24 channels and its gradients: by batch, with an invalid sample; and by sample, in parts."""
    draw = kernels.numbers
    x, g, residual = (draw(device, 2, 2, 5, 5, 24, seed=seed).movedim(4, 2) + 1 for seed in (0, 1, 2))
    large = draw(device, 1, 1, 23, 23, 24, seed=3).movedim(4, 2) + 3
    given = [t.requires_grad_() for t in (draw(device, 2, 24), draw(device, 2, 24, seed=4), x, residual, large)]
    weight, bias, *_ = given
    offset, valid = draw(device, 24, seed=5), torch.tensor([[True, True], [True, False]], device=device)
    moments = [observe(t.detach(), offset) for t in (x, large)]
    pooled = pool_batch(*moments[0], valid)
    folded = fold(*pooled, weight, bias, 1e-5)

    def by_batch(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return fold(*pool_batch(mean, var, valid), weight, bias, 1e-5)

    outputs = (
        normalise(x, by_batch, Epilogue(True, offset, residual)),
        normalise(x, by_batch, Epilogue(True)),
        normalise(large, lambda mean, var: fold(mean, var, weight[:1], bias[:1], 1e-5), Epilogue(True)),
    )
    gradients = torch.autograd.grad(outputs, given, (g, g, outputs[2].detach().sin()))
    return {
        "moments": [t for pair in moments for t in pair],
        "pooled moments": pooled,
        "scale and shift": folded,
        "normalised activations": outputs,
        "gradients of scale and shift": gradients[:2],
        "gradients of activations": gradients[2:],
    }


@dataclass(frozen=True)
class PerBatch:
    """The statistics of the batch. A batch of one sample without pixels normalises to the bias."""

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the batch's statistics; the stored ones stay."""
        return *pool_batch(mean, var, valid), stats
