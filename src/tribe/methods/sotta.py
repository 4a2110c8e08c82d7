"""Learn from confident images of all classes, where the entropy is flat: SoTTA (Gong et al., NeurIPS 2023).

A stream may hold images of nothing that the network knows. So images that it is not sure of are screened out, and no
gradient of a single batch may move the parameters far. Per batch:

    predict    with the running statistics                               -> what is returned, labels and confidence
    remember   HUS: images of a confidence of at least C_0 enter a memory; when it is full, a random image of one of
               the classes that hold the most leaves, or of the same class if that is among them
    every 64   images, also in the middle of a batch: ESM, one Adam step down the entropy of the memory along the
               gradient found at the worst point nearby, as in SAR. BatchNorm is in training: the memory's statistics
               normalise it, and the running ones follow in both passes; affine only
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from torch import Tensor

from tribe.core import memory, optim
from tribe.core.bounds import COUNT
from tribe.core.memory import Reservoir
from tribe.core.state import Affine, Info, Stats, select, tree_map
from tribe.fields import Count, NotNegative, Share
from tribe.methods import Backbone, Deployed, Frozen, Key, MemoryMethod, register
from tribe.methods.base import MemoryPrediction, entropy_gradient
from tribe.methods.sar import Tail, adapted_channels, worst_nearby
from tribe.norms.batch import Training


class SottaState(NamedTuple):
    """Parameters, running statistics, Adam's moments, the memory, and how many images came."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    adam: optim.Adam
    memory: Reservoir
    seen: Annotated[Tensor, COUNT]  # (S,) int64, images so far, those that the memory refused included
    key: Key
    info: Info


@register("sotta")
@dataclass(frozen=True)
class Sotta(MemoryMethod):
    """SoTTA. Published settings: the defaults, and C_0 by data set.

    NOTE: as in SAR, the released code freezes layer4 of ResNets, and ``frozen_tail`` is SAR's: ImageNet's preset
    freezes what the code does, and the default is our reading for networks with other names. The released entropy is a
    mean over classes too, which Adam does not notice.
    """

    c_0: Share | None = None  # C_0, least confidence of an image in memory; None: from the number of classes
    rho: NotNegative = 0.05  # radius of the ball in which ESM looks for the worst point
    momentum: Share = 0.2  # share of the memory in the running statistics, in each pass
    every: Count = 64  # images between updates
    frozen_tail: Tail = 0.25  # frozen layers: a share of all layers, from the end, or names, or "published"

    small = {"size": 8, "every": 4}
    paper = "Gong et al., SoTTA: robust test-time adaptation on noisy data streams, NeurIPS 2023"
    per_class = "a share of its memory for each class"
    presets = {
        "mnist": {"c_0": 0.99},
        "cifar10": {"c_0": 0.99},
        "cifar100": {"c_0": 0.66},
        "imagenet": {"c_0": 0.33, "frozen_tail": "published"},
    }

    def defaults(self) -> dict[str, float]:
        """Return the published confidence."""
        return {"c_0": self.published(0.99, 0.66, 0.33)}

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SottaState:
        """Start at the source, the memory empty."""
        adapted_channels(net, self.frozen_tail)  # checks frozen_tail
        affine, stats = net.source(streams)
        bank = memory.new_reservoir(net, streams, self.size, self.room, self.class_count)
        key, info = self.new_key_and_info(net, streams, seed)
        return SottaState(affine, stats, optim.adam_init(affine), bank, key.clock.clone(), key, info)

    def deployed(self, net: Backbone, state: SottaState) -> Deployed:
        """Return the adapted parameters and the running statistics."""
        return Deployed(state.affine, state.stats, Frozen())

    def trusted(self, seen: MemoryPrediction) -> Tensor:
        """Return the images that the network is sure of."""
        return seen.counts & (seen.score >= self.c_0)  # type: ignore[operator]

    def arrived(self, state: SottaState) -> Tensor:
        """Return how many images came so far: the memory counts only those that it is offered."""
        return state.seen

    def remember(self, state: SottaState, x: Tensor, seen: MemoryPrediction, arriving: Tensor) -> SottaState:
        """HUS: add the confident images."""
        chosen, seed = arriving & self.trusted(seen), state.key.seed
        bank = memory.add_reservoir(state.memory, x, seen.labels, chosen, seed, always=True)
        return state._replace(memory=bank, seen=state.seen + arriving.sum(1))

    def update(self, net: Backbone, state: SottaState, shape: tuple[int, ...], due: Tensor) -> SottaState:
        """ESM, in the streams ``due`` (S,) with an image in memory."""
        counts = memory.filled(state.memory) & due.unsqueeze(1)  # (S, M)
        adapted, x = adapted_channels(net, self.frozen_tail), memory.images(state.memory, shape)
        norm = Training(self.momentum)
        grads, stats = entropy_gradient(net, state.affine, state.stats, norm, x, counts)
        worst = worst_nearby(state.affine, tree_map(adapted.mul, grads), self.rho)
        grads, stats = entropy_gradient(net, worst, stats, norm, x, counts)
        moved, moments = optim.adam_step(state.affine, tree_map(adapted.mul, grads), state.adam, self.lr)
        return select(counts.any(1), state._replace(affine=moved, stats=stats, adam=moments), state)
