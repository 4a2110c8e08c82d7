"""Tell domains apart and normalise each image with the statistics of its own: BDN, of UniTTA (2024).

Where domains mix, statistics of all images fit none of them. BDN, balanced domain normalisation, needs no gradient. Per
batch, three passes:

    first     Balanced BN as it stands                                        -> labels
    second    Balanced BN, which the labels update; at one layer, each image is assigned to the domain whose statistics
              are nearest, by the 2-Wasserstein distance. One domain more than there are has the source's statistics:
              an image that is assigned to it founds a new domain
    third     the statistics of the image's domain, see `tribe.norms.domains`, which labels and domains update

The more confident one of the last two is the prediction. UniTTA's other part, COFA, is a time filter: `bdn+cofa`.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses
from tribe.core.bounds import Bounds
from tribe.core.moments import observe
from tribe.core.slots import Slot, StatisticsSlot, current_pass
from tribe.core.state import Info, Stats
from tribe.fields import Range
from tribe.methods import Backbone, Deployed, Frozen, Key, Method, ScreenedBatch, Update, finite, mask_logits, register
from tribe.norms.balanced import Balanced, published_eta
from tribe.norms.domains import Domains

# The published layers of WRN-28-10, ResNeXt-29 and ResNet-50, and a later one that only such networks have too.
PUBLISHED = {
    "block2.layer.0.bn1": "block3.layer.0.bn1",
    "stage_2.0.bn": "stage_3.0.bn",
    "layer3.0.bn1": "layer4.0.bn1",
}


DOMAINS = Bounds(1, lambda state: len(state.domains.mean) // len(state.known))  # how many of the D domains


class BdnState(NamedTuple):
    """Statistics of all images and of each domain."""

    stats: Stats  # (S, K, C)
    domains: Stats  # (D S, K, C), a row for each domain of a stream
    known: Annotated[Tensor, DOMAINS]  # (S,) int64, domains so far, and the next one: 2 at first
    key: Key
    info: Info


@register("bdn")
@dataclass(frozen=True)
class Bdn(Method):
    """BDN, UniTTA's "dynamic": the number of domains is not known.

    Published settings: eta and gamma are TRIBE's. The layer is block2.layer.0.bn1 of WRN-28-10, stage_2.0.bn of
    ResNeXt-29 and layer3.0.bn1 of ResNet-50; for networks without these, a third of the way is our reading.

    NOTE: in UniTTA domains are added without end, and for ImageNet-C rare ones are dropped to save memory. Here there
    are at most ``domains``; then images go to the nearest.
    """

    eta: float | None = None  # momentum of one image; max(0.0005 K, 0.01)
    gamma: float | None = None  # share of the class-agnostic update in the statistics of all images
    domains: Annotated[int, Range(low=2)] = 16  # D, most domains
    layer: str | None = None  # the normalisation layer whose input tells domains apart; None: as published
    confident: bool = True  # predict with the more confident of the last two passes; False: with the last

    paper = "Du et al., UniTTA: Unified benchmark and versatile framework towards realistic test-time adaptation, 2024"
    works_on = ("statistics",)
    per_class = "statistics of each class in each domain"
    not_exportable_because = "each image has the statistics of its domain, which the batch updates first"
    presets = {
        "mnist": {"eta": 0.01, "gamma": 0.0},
        "cifar10": {"eta": 0.01, "gamma": 0.0},
        "cifar100": {"eta": 0.05, "gamma": 0.1},
        "imagenet": {"eta": 0.5, "gamma": 0.5, "domains": 4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.norm, self.domain_norm  # check eta and gamma

    def defaults(self) -> dict[str, float]:
        """Return TRIBE's eta and gamma."""
        return {"eta": published_eta(self.class_count), "gamma": self.published(0.0, 0.1, 0.5)}

    @property
    def norm(self) -> Balanced:
        """Balanced BN with this method's settings."""
        return Balanced(self.class_count, self.eta or 0.0, self.gamma or 0.0)

    @property
    def domain_norm(self) -> Domains:
        """The rule of the third pass."""
        return Domains(self.class_count, self.domains, self.eta or 0.0)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> BdnState:
        """All statistics are the source's."""
        self._slot(net)  # checks layer
        stats, domains = (net.source(rows, self.class_count)[1] for rows in (streams, streams * self.domains))
        key, info = self.new_key_and_info(net, streams, seed)
        return BdnState(stats, domains, torch.full_like(key.clock, 2), key, info)

    def deployed(self, net: Backbone, state: BdnState) -> Deployed:
        """Return the network of the first pass: the source's parameters, the statistics of all images."""
        return Deployed(net.source(len(state.known))[0], self.norm.pool(state.stats), Frozen())

    def logits(self, net: Backbone, state: BdnState, batch: ScreenedBatch) -> Tensor:
        """Predict as a step would, and forget what the statistics became."""
        return self._passes(net, state, batch)[0]

    def adapt(self, net: Backbone, state: BdnState, batch: ScreenedBatch) -> Update:
        """Assign images to domains, update the statistics, and predict."""
        return Update(*self._passes(net, state, batch))

    @torch.no_grad()
    def _passes(self, net: Backbone, state: BdnState, batch: ScreenedBatch) -> tuple[Tensor, BdnState]:
        x, valid = batch.x, batch.valid
        first = super().logits(net, state, batch)
        labels = mask_logits(first, valid & finite(first)).argmax(-1)  # (S, B)
        affine, chosen = net.source(len(x))[0], self._slot(net)
        moments: list[Tensor] = []  # of the images (S, B, c) at that layer

        def hook(slot: Slot, images: Tensor) -> None:
            current = current_pass.get()
            if slot is chosen and current is not None and not moments:
                moments.extend(observe(slot.unfold(images, current)))

        second, _, stats = net(x, affine, state.stats, self.norm, labels, valid, slot_hook=hook)
        past = Stats(*(t.view(len(x), self.domain_norm.classes, -1) for t in state.domains))  # (S, D K, C)
        domain = self._nearest(past, state.known, chosen, *moments)  # (S, B)
        founded = (valid & (domain == state.known.unsqueeze(1) - 1)).any(1)
        known = (state.known + founded).clamp_max(self.domains)
        codes = domain * self.class_count + labels
        third, _, fresh = net(x, affine, past, self.domain_norm, codes, valid)
        domains = Stats(*(t.view(past_t.shape) for t, past_t in zip(fresh, state.domains, strict=True)))
        logits = third
        if self.confident:
            surer = [losses.probabilities(t).amax(-1, keepdim=True) for t in (second, third)]
            logits = torch.where(surer[0] >= surer[1], second, third)
        return logits, state._replace(stats=stats, domains=domains, known=known)

    def _nearest(self, domains: Stats, known: Tensor, slot: StatisticsSlot, mean: Tensor, var: Tensor) -> Tensor:
        """Return the known domain (S, B) nearest to each image, from the moments (S, B, c) of its input to a layer."""
        there = self.domain_norm.pool(domains.layer(slot.columns, slot.index))  # (S, D, c)
        apart = torch.cdist(mean.to(there.mean), there.mean, compute_mode="donot_use_mm_for_euclid_dist").square()
        spread = torch.cdist(var.to(there.var).sqrt(), there.var.sqrt(), compute_mode="donot_use_mm_for_euclid_dist")
        unknown = torch.arange(self.domains, device=mean.device) >= known.unsqueeze(1)  # (S, D)
        return (apart + spread.square()).masked_fill(unknown.unsqueeze(1), torch.inf).argmin(-1)

    def _slot(self, net: Backbone) -> StatisticsSlot:
        """Return the normalisation layer whose input tells domains apart."""
        slots = [slot for slot in net.slots if isinstance(slot, StatisticsSlot)]
        if not slots:
            raise ValueError(
                "bdn tells domains apart by the statistics of a BatchNorm layer, and the network has none: choose "
                "another method"
            )
        named = {slot.name: slot for slot in slots}
        if self.layer is None:
            published = (named[name] for name, later in PUBLISHED.items() if {name, later} <= named.keys())
            return next(published, slots[len(slots) // 3])
        if self.layer not in named:
            raise ValueError(f"layer of bdn is {self.layer!r}; the network's BatchNorm layers are {', '.join(named)}")
        return named[self.layer]
