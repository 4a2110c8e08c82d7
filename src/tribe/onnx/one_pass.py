"""The one pass of `bank` with compare=0, as plain tensor arithmetic that a model file can hold.

It is `tribe.methods.bank` for a single stream, without branches on values. tests/model_files holds it against
the library.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.validation import LIMIT
from tribe.methods.bank import MOST_WEIGHT, Bank
from tribe.onnx.layers import RecordingNetwork

# The tensors of a bank's state that change where compare is 0: those that follow the stream, and those that count.
FOLLOWS = ("stats.mean", "stats.var", "pooled.mean", "pooled.var", "score", "frequency")
COUNTS = ("key.clock", "info.images", "info.skipped", "info.trusted", "info.entropy")
MOVES = (*FOLLOWS, *COUNTS)


class Screened(NamedTuple):
    """The images of a batch, bad ones replaced."""

    x: Tensor  # (N, ...)
    valid: Tensor  # (N,), real and good ones
    offered: Tensor  # how many of them
    rejected: Tensor  # how many real ones are bad


class Seen(NamedTuple):
    """Sums over the observed images of each class; the first image of a class has them, the others have none."""

    labels: Tensor  # (G,), of the images
    images: Tensor  # (G, 1)
    linear: Tensor  # (G, C), of mean - origin
    square: Tensor  # (G, C), of var + (mean - origin) ** 2


def screen(x: Tensor, valid: Tensor | None) -> Screened:
    """Replace padding and bad images by the first good one, as `tribe.methods.stepping.screen` does."""
    offered = torch.ones_like(x[:, 0, 0, 0], dtype=torch.bool) if valid is None else valid
    if not x.is_floating_point():
        return Screened(x, offered, offered.sum(), offered.sum() * 0)
    pixels = x.flatten(1)
    good = (pixels.amin(1) >= -LIMIT) & (pixels.amax(1) <= LIMIT)  # no comparison with NaN is true
    counted = good & offered
    first = x.index_select(0, counted.to(torch.int64).argmax(0, keepdim=True))
    spare = torch.where(counted.any(), first, torch.zeros_like(first))
    x = torch.where(counted.view(-1, 1, 1, 1), x, spare)
    return Screened(x, counted, counted.sum(), (offered & ~good).sum())


class OnePass(nn.Module):
    """A step of a bank: images and the state of one stream in, logits and its next state out."""

    weight: Tensor  # of the source's layers with statistics, (C,)
    bias: Tensor
    mean: Tensor  # the source's, (1, C), the origin of moments
    var: Tensor
    eps: Tensor  # (C,)
    speeds: Tensor  # (V,)

    def __init__(self, net: Backbone, method: Bank) -> None:
        super().__init__()
        self.network, self.method, self.norm = RecordingNetwork(net), method, method.norm
        source = net.origin.state
        self.register_buffer("weight", _columns(net, source.affine.weight))
        self.register_buffer("bias", _columns(net, source.affine.bias))
        self.register_buffer("mean", source.stats.mean[0].clone())
        self.register_buffer("var", source.stats.var[0].clone())
        self.register_buffer("eps", net.eps.clone())
        self.register_buffer("speeds", torch.tensor(method.speeds, dtype=torch.float32))

    def forward(
        self, batch: Screened, held: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the logits, the next values of `MOVES`, and values with names: see `tribe.onnx.tuning`.

        One of these, ``observed``, says whether any image was; else `FOLLOWS` stay. Images that are ``held`` (N,) are
        predicted and not observed.
        """
        mean, var = self.mixture(state)
        order = batch.valid.to(torch.int64).cumsum(0) - 1 + state["info.images"]
        observed = batch.valid & (order % self.method.observe == 0)
        if held is not None:
            observed = observed & ~held
        chosen = observed.nonzero()[:, 0] if self.method.observe > 1 else None
        scale, shift = self.folded(mean, var)
        raw, recorded = self.network(batch.x, scale, shift, chosen)
        seen = batch.valid & (raw.sum(1).abs() < math.inf)
        logits = torch.where(seen.unsqueeze(1), raw, 0)
        shown, labels = observed & seen, raw.argmax(1)  # OpenVINO's branches cannot read an output of the graph
        if chosen is not None:
            shown, labels = shown.index_select(0, chosen), labels.index_select(0, chosen)
        moments = self.moments(recorded, mean, var, shown.shape[0])
        sums = self.sum_classes(moments, labels, shown)
        new = self.follow(state, sums) | self.report(state, batch, logits, seen)
        named = {"x": batch.x, "scale": scale, "shift": shift, "logits": raw, "moments": moments}
        named |= {} if chosen is None else {"chosen": chosen}
        return logits, new, {"observed": observed.any(), **{f"net.{name}": t for name, t in named.items()}}

    def folded(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and the shift (C,) of layers that see their input less the source's mean."""
        scale = self.weight * torch.rsqrt(var + self.eps)
        return scale, self.bias - scale * (mean - self.mean[0])

    def source_logits(self, batch: Screened) -> Tensor:
        """Return the logits (N, K) of the source."""
        logits, _ = self.network(batch.x, *self.folded(self.mean[0], self.var[0]), None)
        seen = batch.valid & (logits.sum(1).abs() < math.inf)
        return torch.where(seen.unsqueeze(1), logits, 0)

    def mixture(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the statistics (C,) that normalise."""
        bonus = torch.zeros_like(state["score"])
        bonus[:, 0] = self.method.bonus
        weights = ((bonus - state["score"]) / self.method.temperature).softmax(1)  # (1, V + 1)
        mean, var = (weights @ t for t in self.candidates(state))
        return mean[0], var[0]

    def candidates(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the statistics of the source and the pooled ones of every speed, (V + 1, C)."""
        own = {"pooled.mean": self.mean, "pooled.var": self.var}
        mean, var = (torch.cat((source, state[name][:, 0])) for name, source in own.items())
        return mean, var

    def moments(self, recorded: dict[int, tuple[Tensor, ...]], mean: Tensor, var: Tensor, count: int) -> Tensor:
        """Join the moments of all layers: (images, 2 C). A layer that was not called has those it normalises with."""
        widths = self.network.widths
        off = (mean - self.mean[0]).split(widths)
        spread = var.split(widths)
        parts = []
        for i, width in enumerate(widths):
            own = recorded.get(i) or (off[i].expand(count, width), (spread[i] + off[i] * off[i]).expand(count, width))
            parts.append(own)
        return torch.cat([part for column in zip(*parts, strict=True) for part in column], 1)

    def sum_classes(self, moments: Tensor, labels: Tensor, shown: Tensor) -> Seen:
        """Sum moments over the images of each class.

        NOTE: an image whose moments are not finite, though its logits are, is left out. The library leaves out its
        batch.
        """
        shown = shown & (moments.abs().sum(1) < math.inf)
        joint = torch.where(shown.unsqueeze(1), moments, 0)
        member = (labels.unsqueeze(0) == labels.unsqueeze(1)) & shown.unsqueeze(0) & shown.unsqueeze(1)
        first = member.to(torch.int64).argmax(1) == torch.arange(labels.shape[0])
        counted = (member & first.unsqueeze(1)).to(joint.dtype)  # (G, images)
        linear, square = (counted @ joint).chunk(2, 1)
        return Seen(labels, counted.sum(1, keepdim=True), linear, square)

    def follow(self, state: Mapping[str, Tensor], sums: Seen) -> dict[str, Tensor]:
        """Score and update every speed: `Bank._follow`."""
        method, observe = self.method, self.method.observe
        images = sums.images.sum()
        some, images = images > 0, images.clamp_min(1)
        keep = torch.exp(-observe * images / method.horizon)
        came = (sums.images / images).view(1, -1)
        seldom = (1 / (method.class_count * state["frequency"])).clamp_max(MOST_WEIGHT) / images  # (1, K)
        seldom = seldom.index_select(1, sums.labels)
        came = torch.zeros_like(state["frequency"]).index_add(1, sums.labels, came)
        gain = self.surprise(state, sums, seldom)
        score = torch.lerp(gain - gain[:, :1], state["score"], keep)
        frequency = torch.lerp(came, state["frequency"], keep)
        mean, var = self.balance(state, sums)
        centre, within = mean.mean(1, keepdim=True), var.mean(1, keepdim=True)
        apart = mean - centre
        pooled = within + (apart * apart).sum(1, keepdim=True) / self.norm.freedom
        small = {"pooled.mean": centre, "pooled.var": pooled.clamp_min(0), "score": score, "frequency": frequency}
        small = {name: torch.where(some, t, state[name]) for name, t in small.items()}
        return {"stats.mean": mean, "stats.var": var, **small}

    def surprise(self, state: Mapping[str, Tensor], sums: Seen, weight: Tensor) -> Tensor:
        """Return the negative log-likelihood of the images, weighted by class (1, G): (1, V + 1)."""
        mean, var = self.candidates(state)
        offset, spread = mean - self.mean, var + self.eps
        total, linear, square = weight @ sums.images, weight @ sums.linear, weight @ sums.square  # (1, 1 or C)
        apart = square + total * self.eps + offset * (total * offset - 2 * linear)
        surprise: Tensor = 0.5 * (apart / spread + total * spread.log()).mean(1)
        return surprise.unsqueeze(0)

    def balance(self, state: Mapping[str, Tensor], sums: Seen) -> tuple[Tensor, Tensor]:
        """Update the statistics (V, K, C) of each class: `Balanced.follow`."""
        norm, n, labels = self.norm, sums.images, sums.labels  # (G, 1)
        past = state["stats.mean"], state["stats.var"]
        mu, sigma2 = (t.index_select(1, labels) for t in past)  # (V, G, C)
        eta = torch.clamp_max(self.speeds * self.method.observe, 1).view(-1, 1, 1)
        rate = torch.minimum(eta, 1 / n.clamp_min(1)) if norm.rate_cap else eta.expand(-1, n.shape[0], 1)
        weight = rate * n  # (V, G, 1)
        off = mu - self.mean
        by_mean = rate * sums.linear
        delta = by_mean - weight * off
        fresh = rate * sums.square - off * (by_mean + delta) - delta * delta
        step, growth, (mean, var) = delta, fresh - weight * sigma2, past
        if norm.gamma:
            present = (n > 0).to(n.dtype).sum().clamp_min(1)
            share = norm.gamma / (present if norm.gamma_over == "present" else norm.classes)
            shrink = share * weight.sum(1, keepdim=True)  # (V, 1, 1)
            kept = (1 - norm.gamma) * ((1 - shrink) if norm.gamma_over == "present" else 1)
            mean = mean + share * delta.sum(1, keepdim=True)
            var = var * (1 - shrink) + share * fresh.sum(1, keepdim=True)
            step, growth = (1 - norm.gamma) * delta, kept * growth
        return mean.index_add(1, labels, step), var.index_add(1, labels, growth)

    def report(self, state: Mapping[str, Tensor], batch: Screened, logits: Tensor, seen: Tensor) -> dict[str, Tensor]:
        """Count the images, as `tribe.methods.stepping.commit_step` does."""
        count = seen.to(torch.int64).sum()
        moves = count > 0
        log_p = logits.log_softmax(1)
        share = -(log_p.exp() * log_p).sum(1) / math.log(self.method.class_count)
        entropy = torch.where(seen, share, 0).sum() / count.clamp_min(1)
        old = state["info.trusted"]
        return {
            "key.clock": state["key.clock"] + moves.to(torch.int64),
            "info.images": state["info.images"] + count,
            "info.skipped": state["info.skipped"] + batch.rejected + batch.offered - count,
            "info.trusted": torch.where(moves, torch.ones_like(old), old),
            "info.entropy": torch.where(moves, entropy, state["info.entropy"]),
        }


def _columns(net: Backbone, row: Tensor) -> Tensor:
    """Return the entries of an affine row (1, all channels) that belong to layers with statistics."""
    parts = zip(net.slots, row[0].split([slot.channels for slot in net.slots]), strict=True)
    return torch.cat([part for slot, part in parts if slot.tracked])
