"""Correct normalisation for each image and learn from a balanced memory: NOTE (Gong et al., NeurIPS 2022).

Per batch:

    predict        instance-aware BN on the running statistics                -> what is returned, and labels
    remember       add each image to a prediction-balanced reservoir; see `tribe.core.memory`
    learn          one Adam step down the mean entropy of the whole memory, instance-aware BN on its batch statistics,
                   which the running ones follow slowly; affine only. At the end of the batch or, with `every`, after
                   so many images, also in the middle of a batch
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tribe.core import memory, optim
from tribe.core.memory import Reservoir
from tribe.core.state import select
from tribe.fields import Count, NotNegative, Share
from tribe.methods import Affine, Backbone, Deployed, Info, Key, MemoryMethod, Stats, register
from tribe.methods.base import MemoryPrediction, entropy_gradient
from tribe.norms.instance import Instance


class NoteState(NamedTuple):
    """Parameters, running statistics, Adam's moments, and the memory."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    adam: optim.Adam
    memory: Reservoir
    key: Key
    info: Info


@register("note")
@dataclass(frozen=True)
class Note(MemoryMethod):
    """NOTE, on a network trained with ordinary BatchNorm: instance-aware BN takes its place at test time.

    On a network without BatchNorm only the memory and the entropy remain.
    """

    k: NotNegative = 4.0  # standard errors by which an instance may deviate before it is corrected
    m: Share = 0.01  # the newest batch's share in the running statistics
    lr: NotNegative = 1e-4  # Adam's learning rate
    every: Count | None = None  # images between updates, 64 in the paper; None: one update a batch, as released

    paper = "Gong et al., NOTE: robust continual test-time adaptation against temporal correlation, NeurIPS 2022"
    per_class = "counts of the predicted classes"

    def _norm(self, observing: bool) -> Instance:
        return Instance(self.k, self.m, observing)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> NoteState:
        """Start at the source, the memory empty."""
        affine, stats = net.source(streams)
        bank = memory.new_reservoir(net, streams, self.size, self.room, self.class_count)
        return NoteState(affine, stats, optim.adam_init(affine), bank, *self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: NoteState) -> Deployed:
        """Return the adapted parameters and running statistics, corrected for each image."""
        return Deployed(state.affine, state.stats, self._norm(observing=False))

    def remember(self, state: NoteState, x: Tensor, seen: MemoryPrediction, arriving: Tensor) -> NoteState:
        """Add images to the memory, as far as it admits them."""
        return state._replace(memory=memory.add_reservoir(state.memory, x, seen.labels, arriving, state.key.seed))

    def update(self, net: Backbone, state: NoteState, shape: tuple[int, ...], due: Tensor) -> NoteState:
        """Take one step down the entropy of the memory, in the streams ``due``."""
        counts = memory.filled(state.memory) & due.unsqueeze(1)  # (S, M): nothing counts in the other streams
        x, norm = memory.images(state.memory, shape), self._norm(observing=True)
        grads, stats = entropy_gradient(net, state.affine, state.stats, norm, x, counts)
        moved, moments = optim.adam_step(state.affine, grads, state.adam, self.lr)
        return select(due, state._replace(affine=moved, stats=stats, adam=moments), state)
