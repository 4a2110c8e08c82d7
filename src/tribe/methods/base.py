"""Base classes of methods: gradient steps on the batch's own predictions, and learning from a memory of images."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, memory, optim
from tribe.core.backbone import Backbone, Output
from tribe.core.graphs import segment
from tribe.core.memory import ROOM
from tribe.core.rng import Key
from tribe.core.rules import Norm, PerBatch
from tribe.core.state import Affine, Info, Stats, select
from tribe.fields import Count, NotNegative
from tribe.methods.method import Deployed, Method, Part
from tribe.methods.stepping import ScreenedBatch, Update


class EntropyState(NamedTuple):
    """Affine parameters, and the optimiser's moments of their gradients."""

    affine: Affine  # (S, C)
    adam: optim.Adam  # with SGD its first moment is the velocity
    key: Key
    info: Info


class MeanState(NamedTuple):
    """An `EntropyState` with a moving mean of the predictions."""

    affine: Affine  # (S, C)
    adam: optim.Adam  # with SGD its first moment is the velocity
    mean: Tensor  # (S, K) of probabilities
    key: Key
    info: Info


@dataclass(frozen=True)
class EntropyMethod(Method):
    """One gradient step a batch on the affine parameters, down a loss of the batch's own predictions.

    Every batch is normalised with its own statistics. A subclass defines `per_image_loss`, or `objective` if its
    loss also chooses images or needs more than the predictions. A state with more fields than `EntropyState` has
    `affine` and `adam` too; `follow` moves the rest of it. SGD is chosen by a field ``optimizer``, its options by
    ``momentum`` and ``nesterov``.
    """

    lr: NotNegative = 1e-3  # learning rate

    works_on = ("affine",)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> Any:
        """Start at the source."""
        affine, _ = net.source(streams)
        return EntropyState(affine, optim.adam_init(affine), *self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: Any) -> Deployed:
        """Return the adapted parameters with the batch's statistics; the source's only give the shape."""
        return Deployed(state.affine, net.source(len(state.key.seed))[1], PerBatch())

    def per_image_loss(self, logits: Tensor) -> Tensor:
        """Return the loss of each prediction: (S, B, K) -> (S, B)."""
        return losses.entropy(logits)

    def objective(
        self, net: Backbone, state: Any, batch: ScreenedBatch, affine: Affine, logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each stream (S,), and the images (S, B) that it trusts; None: all.

        A stream without a trusted image keeps its parameters.
        """
        return losses.mean_over(self.per_image_loss(logits), batch.valid), None

    def descend(self, net: Backbone, state: Any, grads: Affine) -> tuple[Affine, optim.Adam]:
        """Take a step of Adam, or of SGD if `optimizer` is "sgd"; the velocity is Adam's first moment."""
        if getattr(self, "optimizer", "adam") == "adam":
            return optim.adam_step(state.affine, grads, state.adam, self.lr)
        options = {name: getattr(self, name) for name in ("momentum", "nesterov") if hasattr(self, name)}
        moved, velocity = optim.sgd_step(state.affine, grads, state.adam.first, self.lr, **options)
        return moved, state.adam._replace(first=velocity, steps=state.adam.steps + 1)

    def follow(self, net: Backbone, state: Any, output: Output, batch: ScreenedBatch, trusted: Tensor | None) -> Any:
        """Return the state after the step with all else that follows the batch, besides parameters and moments."""
        return state

    def normalisation(self, net: Backbone, state: Any, batch: ScreenedBatch) -> tuple[Stats, Norm]:
        """Return the statistics and the rule that normalise the batch."""
        _, stats, norm = batch.deploy(net, state)
        return stats, norm

    def adapt(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Update:
        """Predict, then take one step down the loss of these predictions."""
        stats, norm = self.normalisation(net, state, batch)
        with torch.enable_grad():
            affine = state.affine.leaf()
            output = net(batch.x, affine, stats, norm, valid=batch.valid)
            loss, trusted = self.objective(net, state, batch, affine, output.logits)
            grads = affine.gradient(loss)
        moved, moments = self.descend(net, state, grads)
        new = state._replace(affine=moved, adam=moments)
        if trusted is not None:
            new = select(trusted.any(1), new, state)
        new = self.follow(net, new, output, batch, trusted)
        return Update(output.logits, new, trusted, new.affine)


def mean_prediction(logits: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of the probabilities over the images that count (S, B): (S, K)."""
    p = losses.probabilities(logits.detach())
    return losses.mean_over(p.transpose(1, 2), counts.unsqueeze(1))


def entropy_gradient(
    net: Backbone, at: Affine, stats: Stats, norm: Norm, x: Tensor, counts: Tensor
) -> tuple[Affine, Stats]:
    """Return the gradient of the mean entropy of the images that count (S, B), and the statistics after the pass."""
    with torch.enable_grad():
        affine = at.leaf()
        logits, _, stats = net(x, affine, stats, norm, valid=counts)
        return affine.gradient(losses.mean_over(losses.entropy(logits), counts)), stats


class MemoryPrediction(NamedTuple):
    """The predictions of a batch, and what a memory has to know of its images."""

    prediction: Tensor  # (S, B, K) logits
    counts: Tensor  # (S, B) bool, images that they are for
    labels: Tensor  # (S, B), the most likely classes
    score: Tensor  # (S, B)


@dataclass(frozen=True)
class MemoryMethod(Method):
    """Learning from a memory of images in place of the batch. The state has a field ``memory``.

    A subclass defines `remember`, which adds images to the memory, and `update`, which learns from it: once a batch,
    or, with a field ``every``, after every so many images. Predictions and updates are captured in segments: the host
    decides between them.
    """

    size: Count = 64  # images in memory
    room: Count = ROOM  # the most values of an image, channels x height x width: they fix the memory's size
    lr: NotNegative = 1e-3  # Adam's learning rate

    works_on: ClassVar[tuple[Part, ...]] = ("affine",)
    capture = "segments"  # the host decides which images enter the memory, and when it is time to learn
    small = {"size": 8}
    presets = {"imagenet": {"room": 3 * 224 * 224}}

    def score(self, p: Tensor) -> Tensor:
        """Return what the memory decides by, besides the labels, from probabilities: the confidences."""
        return p.amax(-1)

    def look(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Any:
        """Predict a batch: a `MemoryPrediction`."""
        prediction, counts = self.predict_batch(net, state, batch)
        p = losses.probabilities(prediction)
        return MemoryPrediction(prediction, counts, p.argmax(-1), self.score(p))

    def trusted(self, seen: Any) -> Tensor | None:
        """Return the images (S, B) of a prediction that may enter the memory; None: all."""
        return None

    def adapt(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Update:
        """Predict, remember, and learn from the memory when it is due."""
        seen = segment(self.look, net, state, batch)
        new = self.learn(net, state._replace(memory=memory.fit(state.memory, batch.x)), batch.x, seen)
        return Update(seen.prediction, new, self.trusted(seen), self.deployed(net, new).affine, seen=seen.counts)

    def learn(self, net: Backbone, state: Any, x: Tensor, seen: Any) -> Any:
        """Remember the images (S, B, ...); whenever it is due, learn from the memory as it is at that moment."""
        every = getattr(self, "every", None)
        if every is None:
            state = self.remember(state, x, seen, seen.counts)
            return segment(self.update, net, state, x.shape[2:], seen.counts.any(1))
        # A chunk has no more images than there are between updates, so at most one update.
        for images, *columns in zip(*(t.split(every, 1) for t in (x, *seen)), strict=True):
            chunk = type(seen)(*columns)
            missing = every - self.arrived(state) % every  # (S,) images until the next update
            due = chunk.counts.sum(1) >= missing
            before = chunk.counts & (chunk.counts.cumsum(1) <= missing.unsqueeze(1))
            state = self.remember(state, images, chunk, before)
            if bool(due.any()):
                state = segment(self.update, net, state, x.shape[2:], due)
                after = chunk.counts & ~before
                state = self.remember(state, images, chunk, after) if bool(after.any()) else state
        return state

    def arrived(self, state: Any) -> Tensor:
        """Return how many images came so far: (S,)."""
        arrivals: Tensor = state.memory.arrivals
        return arrivals

    @abstractmethod
    def remember(self, state: Any, x: Tensor, seen: Any, arriving: Tensor) -> Any:
        """Add those of the images (S, B, ...) to the memory that are ``arriving`` (S, B)."""

    def update(self, net: Backbone, state: Any, shape: tuple[int, ...], due: Tensor) -> Any:
        """Learn from the images in memory, of this shape, in the streams ``due`` (S,)."""
        raise NotImplementedError
