"""Keep statistics per class and pool them evenly, so that no class dominates the normalisation: Balanced BN (AAAI-24).

Equation numbers are the paper's. F_bhw enters only through each sample's mean and variance over its pixels, because
(1/HW) sum_hw (F_bhw - mu)^2 = var_b + (mean_b - mu)^2. Every sum over classes is computed as a sum over samples: each
sample has the totals of its class, and only the first sample of a class (`lead`) counts. So the cost grows with the
batch and not with K, except for the pooling of the past, which needs no gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tribe.core import kernels
from tribe.core.kernels import activations, statistics
from tribe.core.kernels.statistics import UpdateTerms
from tribe.core.moments import observe_samples
from tribe.core.packed import ClassStats, PackedStats
from tribe.fields import Count, PositiveShare, Share, require
from tribe.norms import NormRule, Stats, register

Convention = Literal["released", "paper"]
BIG = 2**22  # numbers of class statistics from which a tensor of their deviations is too large for a processor's cache

# Where the released implementation and the paper differ. NOTE: the paper prints sigma_k, not sigma_k', inside the sum
# over k' of Eq. 4; "paper" computes it as printed.
CONVENTIONS: dict[str, dict[str, Any]] = {
    "released": {"pooled_ddof": 1, "rate_cap": True, "gamma_over": "present"},
    "paper": {"pooled_ddof": 0, "rate_cap": False, "gamma_over": "all"},
}


def apply_convention(config: Any, conventions: dict[str, dict[str, Any]]) -> None:
    """Fill the open fields (None) of a dataclass from its convention, so that its repr shows the values in use."""
    expected = f"convention is one of {', '.join(conventions)}"
    require(config.convention in conventions, expected, config.convention)
    for field, value in conventions[config.convention].items():
        if getattr(config, field) is None:
            object.__setattr__(config, field, value)


def published_eta(classes: int, convention: Convention = "released") -> float:
    """Return TRIBE's momentum of one instance.

    NOTE: the paper's is 0.0005 K; the released settings never go below 0.01. Above K = 2000 it would pass 1.
    """
    return min(max(0.0005 * classes, 0.0 if convention == "paper" else 0.01), 1.0)


class Groups(NamedTuple):
    """The samples of a batch that share a class. They are the same for every layer, so each pass finds them once."""

    labels: Tensor  # (R, B)
    code: Tensor  # (R, B) the same, but -1 for samples that do not count
    same: Tensor  # (R, B, B) float64, 1 where two valid samples share a class
    lead: Tensor  # (R, B, 1), 1 for the first valid sample of each class
    rate: Tensor  # (R, B, 1), how much one sample of this class counts
    weight: Tensor  # (R, B, 1), rate * n_k: how much this class moves
    over: Tensor  # (R, 1, 1), how many classes share the class-agnostic update
    shrink: Tensor  # (R, 1, 1), how much every class shrinks for that update
    present: Tensor  # (R, K), which classes are in the batch


class ClassSums(NamedTuple):
    """Sums over the images of each class in a batch: images of one class move its statistics together."""

    labels: Tensor | None  # (S, G), the classes; None: all of them, G = K
    images: Tensor  # (S, G, 1), of each class; 0: nothing moves
    joint: Tensor  # (S, G, 2 C), sums of mean - origin, and of var + (mean - origin) ** 2
    origin: Tensor  # (1, 1, C), near the means, so that nothing cancels


class PreparedLayer(NamedTuple):
    """Values that a pass has computed for a layer before it is called."""

    groups: Groups
    over_classes: Tensor  # (3, R, C), see `_over_classes`
    room: Stats  # (R, K, C), the memory for the statistics to keep


Labels = Tensor | Groups | PreparedLayer | None


@register("balanced")
@dataclass(frozen=True)
class Balanced(NormRule):
    """Balanced BN. Without labels (None) it normalises with the stored statistics, pooled."""

    classes: Count = 10
    eta: PositiveShare = 0.01  # momentum of one instance
    # The share of the class-agnostic update: 0 is per class. With 1 the mean is that of Robust BN. The variance is not:
    # Eq. 4 takes the spread of a batch around the mean that was kept, not around the batch's own.
    gamma: Share = 0.0
    convention: Convention = "released"
    pooled_ddof: Literal[0, 1] | None = None  # the spread of the class means is divided by K - pooled_ddof
    rate_cap: bool | None = None  # limit the weight of the n_k samples of a class to 1: rate min(eta, 1 / n_k)
    gamma_over: Literal["present", "all"] | None = None  # classes that share the class-agnostic update

    def __post_init__(self) -> None:
        apply_convention(self, CONVENTIONS)
        super().__post_init__()

    @property
    def freedom(self) -> int:
        """Return the divisor of the spread of the class means."""
        return max(self.classes - (self.pooled_ddof or 0), 1)

    @property
    def settings(self) -> tuple[int, float, int, bool]:
        """Return the settings of the kernels."""
        return self.classes, self.gamma, self.freedom, self.gamma_over == "present"

    def pool(self, stats: ClassStats) -> Stats:
        """Pool as Eq. 2: the statistics of a population with equally frequent classes. (R, K, C) -> (R, 1, C).

        Packed statistics must be of one layer.
        """
        centre, within, between = _over_classes(stats.in_full())
        return Stats(centre, (within + between / self.freedom).clamp_min(0))  # see the NOTE in `_update`

    def sum_classes(self, moments: Stats, labels: Tensor, valid: Tensor, origin: Tensor) -> ClassSums:
        """Sum moments (S, B, C) over the valid images of each class; labels and valid marks are (S, B)."""
        mean = moments.mean - origin
        joint = torch.cat((mean, torch.addcmul(moments.var, mean, mean)), 2)
        joint = torch.where(valid.unsqueeze(2), joint, 0)
        if labels.shape[1] == 1:
            return ClassSums(labels, valid.unsqueeze(2).to(mean.dtype), joint, origin)
        index = None
        if self.classes < labels.shape[1]:
            every = torch.arange(self.classes, device=labels.device)
            member = (labels.unsqueeze(1) == every.unsqueeze(1)) & valid.unsqueeze(1)  # (S, K, B)
        else:  # the first image of each class has its sums
            member, index = self._same(labels, valid), labels
            member = member & (
                member.byte().argmax(2) == torch.arange(labels.shape[1], device=labels.device)
            ).unsqueeze(2)
        exact = self._exact(member.device)
        return ClassSums(
            index,
            member.sum(2, keepdim=True).to(mean.dtype),
            (member.to(exact) @ joint.to(exact)).to(mean.dtype),
            origin,
        )

    def follow(self, stats: Stats, eta: Tensor, sums: ClassSums, room: Stats) -> Stats:
        """Update statistics (S V, K, C) of V momenta (V, 1, 1) into ``room``, without gradient; return them pooled."""
        index, n, joint, origin = sums
        streams, speeds = len(n), len(eta)
        past, kept = (Stats(*(t.unflatten(0, (streams, speeds)) for t in pair)) for pair in (stats, room))
        mu, sigma2 = past
        n = n.unsqueeze(1)  # (S, 1, G, 1)
        if index is not None:
            index = index[:, None, :, None].expand(-1, speeds, -1, mu.shape[3])
            mu, sigma2 = (t.gather(2, index) for t in past)
        rate = torch.minimum(eta, 1 / n.clamp_min(1)) if self.rate_cap else eta.expand(streams, -1, -1, -1)
        weight = rate * n  # (S, V, G, 1)

        # Eq. 1, from the sums around the origin.
        off_origin = mu - origin
        by_mean, square = (rate * joint.unsqueeze(1)).chunk(2, 3)
        delta = torch.addcmul(by_mean, weight, off_origin, value=-1)
        fresh = torch.addcmul(square, off_origin, by_mean + delta, value=-1).addcmul_(delta, delta, value=-1)
        growth = torch.addcmul(fresh, weight, sigma2, value=-1)
        step = delta

        # Eqs. 3 and 4.
        if self.gamma:
            present = (n > 0).sum(2, keepdim=True, dtype=n.dtype).clamp_min(1)
            share = self.gamma / (present if self.gamma_over == "present" else self.classes)
            shrink = share * weight.sum(2, keepdim=True)
            step = (1 - self.gamma) * delta
            growth.mul_((1 - self.gamma) * ((1 - shrink) if self.gamma_over == "present" else 1))
            torch.add(past.mean, share * delta.sum(2, keepdim=True), out=kept.mean)
            torch.addcmul(share * fresh.sum(2, keepdim=True), past.var, 1 - shrink, out=kept.var)
        else:
            kept.mean.copy_(past.mean), kept.var.copy_(past.var)
        for t, change in zip(kept, (step, growth), strict=True):
            t.add_(change) if index is None else t.scatter_add_(2, index, change)
        return self.pool(room)

    def _same(self, labels: Tensor, valid: Tensor) -> Tensor:
        """Return which valid samples share a class: (R, B, B)."""
        return (labels.unsqueeze(2) == labels.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)

    def _exact(self, device: torch.device) -> torch.dtype:
        """Return float64 where the device has it: class sums are small, and TF32 and autocast do not apply to it."""
        return torch.float32 if device.type == "mps" else torch.float64

    def group(self, labels: Tensor, valid: Tensor, dtype: torch.dtype) -> Groups:
        """Find which samples share a class, from (R, B) labels and valid marks."""
        labels, valid = labels.contiguous(), valid.contiguous()  # kernels read what follows row by row
        same = self._same(labels, valid)
        lead = (valid & ~same.tril(-1).any(2)).unsqueeze(2).to(dtype)
        n = same.sum(2, keepdim=True).to(dtype)
        rate = self.eta * valid.unsqueeze(2).to(dtype)
        if self.rate_cap:
            rate = torch.minimum(rate, 1 / n.clamp_min(1))
        over = lead.sum(1, keepdim=True).clamp_min(1)
        if self.gamma_over == "all":
            over = torch.full_like(over, self.classes)
        exact = self._exact(labels.device)
        weight = rate * n
        shrink = self.gamma * (lead * weight).sum(1, keepdim=True) / over
        code = torch.where(valid, labels, -1)
        present = torch.zeros(len(labels), self.classes + 1, dtype=torch.bool, device=labels.device)
        present = present.scatter_(1, code + 1, True)[:, 1:].contiguous()
        return Groups(labels, code, same.to(exact), lead, rate, weight, over, shrink, present)

    def prepare(self, groups: Groups, stats: Any, room: Any) -> Callable[[slice], PreparedLayer] | None:
        """Pool the past of all layers at once; returns what each layer gets in place of ``groups``, by its columns.

        None where kernels cannot do the update: there each layer pools its own.
        """
        if not isinstance(stats, Stats):
            return None
        as_moments = stats.mean[:, :1].expand(-1, groups.code.shape[1], -1)  # (R, B, C)
        if not kernels.can_update(as_moments):
            return None
        over_classes = torch.cat(_over_classes(stats), 1).transpose(0, 1)  # (3, R, C)
        return lambda columns: PreparedLayer(groups, over_classes[..., columns], room.layer(columns, 0))

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: ClassStats, labels: Labels, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Any]:
        """Update the statistics of the classes in the batch (Eqs. 1, 3, 4) and pool them (Eq. 2).

        Packed statistics are computed with in full, and stay packed.
        """
        if labels is None:
            return *self.pool(stats), stats
        prepared = labels if isinstance(labels, PreparedLayer) else None
        if isinstance(labels, Tensor):
            labels = self.group(labels, valid, mean.dtype)
        groups = labels.groups if isinstance(labels, PreparedLayer) else labels
        if isinstance(stats, PackedStats):
            past = stats.in_full()
            pooled_mean, pooled_var, full = self(mean, var, count, past, groups, valid, eps)
            return pooled_mean, pooled_var, stats.updated(past, full, groups.code, groups.present, groups.shrink)
        results = _Update.apply(mean, var, *stats, groups, self, prepared)  # type: ignore[no-untyped-call]
        pooled_mean, pooled_var, *kept = results
        return pooled_mean, pooled_var, Stats(*kept)


class _Update(torch.autograd.Function):
    """Eqs. 1 to 4 with their gradient, which flows through this batch's share and not through the past."""

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        var: Tensor,
        past_mean: Tensor,
        past_var: Tensor,
        groups: Groups,
        norm: Balanced,
        prepared: PreparedLayer | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        past = Stats(past_mean, past_var)
        ctx.groups, ctx.norm, ctx.by_kernel = groups, norm, kernels.can_update(mean)
        if ctx.by_kernel:
            pooled = torch.cat(_over_classes(past), 1).transpose(0, 1) if prepared is None else prepared.over_classes
            room = None if prepared is None else prepared.room
            *results, terms = statistics.update(mean, var, past, pooled, groups, *norm.settings, room)
        else:
            *results, terms = _update(mean, var, past, groups, norm)
        ctx.save_for_backward(*terms)
        ctx.mark_non_differentiable(*results[2:])
        ctx.set_materialize_grads(False)  # else autograd makes zeros as large as the class statistics
        return tuple(results)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor | None, g_var: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        terms = UpdateTerms(*ctx.saved_tensors)
        g_mean, g_var = (torch.zeros_like(terms.move) if g is None else g for g in (g_mean, g_var))
        if ctx.by_kernel:
            by_moments = statistics.update_backward(g_mean, g_var, terms, ctx.groups, *ctx.norm.settings)
        else:
            by_moments = _update_backward(g_mean, g_var, terms, ctx.groups, ctx.norm)
        return *by_moments, None, None, None, None, None


def _update(
    mean: Tensor, var: Tensor, past: Stats, groups: Groups, norm: Balanced
) -> tuple[Tensor, Tensor, Tensor, Tensor, UpdateTerms]:
    labels, _, same, lead, rate, weight, over, shrink, _ = groups
    classes, gamma = norm.classes, norm.gamma
    index = labels.unsqueeze(2).expand(mean.shape)  # (R, B, C)
    mu, sigma2 = (t.gather(1, index) for t in past)  # of each sample's class, before this batch

    # Eq. 1: the sums over each class in this batch, for every sample of it.
    d = mean - mu
    sums = same @ torch.cat((d, torch.addcmul(var, d, d)), 2).to(same.dtype)  # (R, B, 2 C): sums over a class
    delta, square = (rate * sums.to(mean.dtype)).chunk(2, 2)  # delta_k, and eta sum_b (1/HW) sum_hw (F - mu_k)^2
    fresh = torch.addcmul(square, delta, delta, value=-1)

    def total(t: Tensor) -> Tensor:  # over the classes present: (R, B, C) -> (R, 1, C)
        return (lead * t).sum(1, keepdim=True)

    # The per-class update, for the first sample of each class only.
    step, growth = lead * delta, lead * torch.addcmul(fresh, weight, sigma2, value=-1)
    if gamma:
        step, growth = (1 - gamma) * step, (1 - gamma) * growth
        if norm.gamma_over == "present":  # released: the shared update shrinks the per-class update too
            growth = growth * (1 - shrink)

    # Eq. 2, from the past's pooled moments and this batch's increments.
    centre, within, between = _over_classes(past)
    off_centre = mu - centre
    move = step.sum(1, keepdim=True) / classes
    spread = (step * (2 * off_centre + step)).sum(1, keepdim=True) - classes * move.square()
    pooled_mean = centre + move

    # Eqs. 3 and 4: a share gamma of the update goes to all classes alike.
    if gamma:
        shared_step, shared_square = gamma * total(delta) / over, gamma * total(fresh) / over
        pooled_mean, within = pooled_mean + shared_step, torch.addcmul(shared_square, within, 1 - shrink)
        kept_mean, kept_var = past.mean + shared_step, torch.addcmul(shared_square, past.var, 1 - shrink)
    else:
        kept_mean, kept_var = past.mean.clone(), past.var.clone()
    kept_mean.scatter_add_(1, index, step)
    kept_var.scatter_add_(1, index, growth)

    pooled_var = within + growth.sum(1, keepdim=True) / classes + (between + spread) / norm.freedom
    # NOTE: the clamp is in no equation. Without the rate cap (as printed) the variance of a class with
    # n_k > 1 / eta can fall below 0.
    terms = UpdateTerms(d, delta, off_centre, move, pooled_var)
    return pooled_mean, pooled_var.clamp_min(0), kept_mean, kept_var, terms


def _update_backward(
    g_mean: Tensor, g_var: Tensor, terms: UpdateTerms, groups: Groups, norm: Balanced
) -> tuple[Tensor, Tensor]:
    """Return the gradients. A sample moves the delta of its class by rate, and its square by rate * (1, 2 d)."""
    d, delta, off_centre, move, pooled_var = terms
    g_var = torch.where(pooled_var >= 0, g_var, 0)
    single, shared = (1 - norm.gamma) / norm.classes, norm.gamma / groups.over
    by_fresh = g_var * (single * ((1 - groups.shrink) if norm.gamma_over == "present" else 1) + shared)  # (R, 1, C)
    by_spread = g_var * (2 * (1 - norm.gamma) / norm.freedom)
    by_delta = g_mean * (single + shared) + by_spread * (off_centre + (1 - norm.gamma) * delta - move)
    by_mean = groups.rate * (by_delta + 2 * by_fresh * (d - delta))
    return by_mean, groups.rate * by_fresh


@kernels.comparison
def _updated(device: torch.device) -> dict[str, Sequence[Tensor]]:
    """Update 70 classes of 20 channels with a batch of which some images share a class, and one does not count."""
    norm, draw = Balanced(70, 0.3, 0.4), kernels.numbers
    past = Stats(draw(device, 2, 70, 20), draw(device, 2, 70, 20, seed=1).abs() + 0.5)
    mean, var = draw(device, 2, 5, 20, seed=2), draw(device, 2, 5, 20, seed=3).abs()
    given = mean.requires_grad_(), var.requires_grad_()
    labels = torch.tensor([[0, 69, 69, 64, 7], [3, 3, 3, 0, 68]], device=device)
    valid = torch.tensor([[True] * 5, [True, False, True, True, True]], device=device)
    *pooled, kept = norm(mean, var, 9, past, labels, valid, 1e-5)
    gradients = torch.autograd.grad(pooled, given, [draw(device, 2, 1, 20, seed=seed) for seed in (4, 5)])
    return {"pooled class statistics": pooled, "class statistics": kept, "gradients of class statistics": gradients}


def _over_classes(stats: Stats) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of class means, the mean of class variances, and the summed squared deviation of class means."""
    means, vars = (t.transpose(1, 2).unsqueeze(1) for t in stats)  # (R, 1, C, K): classes in place of pixels
    if kernels.can_normalise(means) and kernels.can_normalise(vars):
        centre, between = activations.observe(means)
        return centre, activations.observe(vars)[0], between * stats.mean.shape[1]
    centre, within = (t.mean(1, keepdim=True) for t in stats)
    if means.device.type == "cpu" and means.numel() > BIG:
        return centre, within, observe_samples(means.movedim(1, 3))[1].unsqueeze(1) * means.shape[3]
    return centre, within, (stats.mean - centre).square_().sum(1, keepdim=True)
