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

import torch
from torch import Tensor

from tribe.core import losses, memory, optim
from tribe.core.backbone import Backbone
from tribe.core.state import Affine, Info, Stats, select
from tribe.methods import Deployed, Instance, Key, MemoryMethod, Reservoir, ScreenedBatch, Update, register, segment


class NoteState(NamedTuple):
    """Parameters, running statistics, Adam's moments, and the memory."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    adam: optim.Adam
    memory: Reservoir
    key: Key
    info: Info


class NotePrediction(NamedTuple):
    """The predictions of a batch."""

    prediction: Tensor  # (S, B, K) logits
    counts: Tensor  # (S, B) bool, images that they are for


@register("note")
@dataclass(frozen=True)
class Note(MemoryMethod):
    """NOTE, on a network trained with ordinary BatchNorm: instance-aware BN takes its place at test time.

    On a network without BatchNorm only the memory and the entropy remain.
    """

    k: float = 4.0  # standard errors by which an instance may deviate before it is corrected
    m: float = 0.01  # the newest batch's share in the running statistics
    lr: float = 1e-4  # Adam's learning rate
    every: int | None = None  # images between updates, 64 in the paper; None: one update a batch, as released

    paper = "Gong et al., NOTE: robust continual test-time adaptation against temporal correlation, NeurIPS 2022"
    per_class = "counts of the predicted classes"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_range("every", low=1)
        _ = self._norm(observing=True)  # checks k and m

    def _norm(self, observing: bool) -> Instance:
        return Instance(self.k, self.m, observing)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> NoteState:
        """Start at the source, the memory empty."""
        affine, stats = net.source(streams)
        bank = self.new_reservoir(net, streams)
        return NoteState(affine, stats, optim.adam_init(affine), bank, *self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: NoteState) -> Deployed:
        """Return the adapted parameters and running statistics, corrected for each image."""
        return Deployed(state.affine, state.stats, self._norm(observing=False))

    def remember(self, bank: Reservoir, x: Tensor, labels: Tensor, valid: Tensor, key: Key) -> Reservoir:
        """Add a batch (S, B, ...) with its predicted labels to the memory."""
        # In chunks no larger than the memory: the cost of a chunk grows with its square.
        for chunk, label, counted in zip(*(t.split(self.size, 1) for t in (x, labels, valid)), strict=True):
            turnover = memory.admit_reservoir(bank, label, counted, key.seed)
            whole = torch.full_like(bank.held, label.shape[1])
            bank = memory.hold(bank, {"image": chunk, "label": label}, turnover, counted, whole)
            bank = memory.count_predictions(bank, label, counted)
        return bank

    def look(self, net: Backbone, state: NoteState, batch: ScreenedBatch) -> NotePrediction:
        """Predict with instance-aware BN."""
        return NotePrediction(*self.predict_batch(net, state, batch))

    def learn(self, net: Backbone, state: NoteState, x: Tensor, seen: NotePrediction) -> Update:
        """Remember the images, and take an Adam step down the entropy of the memory whenever it is due."""
        labels, counts = seen.prediction.argmax(-1), seen.counts
        if self.every is None:
            state = state._replace(memory=self.remember(state.memory, x, labels, counts, state.key))
            state = segment(self._learn, net, state, x.shape[2:], counts.any(1))
        else:  # a chunk has no more images than there are between updates, so at most one update
            for chunk in zip(*(t.split(self.every, 1) for t in (x, labels, counts)), strict=True):
                state = self._remember_and_learn(net, state, self.every, *chunk)
        return Update(seen.prediction, state, affine=state.affine)

    def _remember_and_learn(
        self, net: Backbone, state: NoteState, every: int, x: Tensor, labels: Tensor, valid: Tensor
    ) -> NoteState:
        """Add images to the memory; after the one that is due, learn from the memory as it is at that moment."""
        missing = every - state.memory.arrivals % every  # (S,) arrivals until the next update
        due = valid.sum(1) >= missing
        before = valid & (valid.cumsum(1) <= missing.unsqueeze(1))
        state = state._replace(memory=self.remember(state.memory, x, labels, before, state.key))
        if bool(due.any()):
            state = select(due, segment(self._learn, net, state, x.shape[2:], due), state)
        return state._replace(memory=self.remember(state.memory, x, labels, valid & ~before, state.key))

    def _learn(self, net: Backbone, state: NoteState, shape: tuple[int, ...], due: Tensor) -> NoteState:
        """Take one step down the entropy of the memory, in the streams ``due``."""
        counts = state.memory.filled & due.unsqueeze(1)  # (S, M): nothing counts in the other streams
        with torch.enable_grad():
            affine = state.affine.leaf()
            norm = self._norm(observing=True)
            logits, _, stats = net(memory.images(state.memory, shape), affine, state.stats, norm, valid=counts)
            loss = losses.mean_over(losses.entropy(logits), counts)  # (S,)
            grads = affine.gradient(loss)
        moved, moments = optim.adam_step(state.affine, grads, state.adam, self.lr)
        return state._replace(affine=moved, stats=stats, adam=moments)
