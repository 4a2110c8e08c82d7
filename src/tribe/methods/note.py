"""Correct normalisation by instance and learn from a memory as balanced as i.i.d.: NOTE (Gong et al., NeurIPS 2022).

Per batch:

    predict        instance-aware BN on the running statistics                -> what is returned, and labels
    remember       each image in turn, in a prediction-balanced reservoir; see `tribe.engine.memory`
    learn          one Adam step down the mean entropy of the whole memory, instance-aware BN on its batch statistics,
                   which the running ones follow slowly; affine only
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.losses import entropy, mean_over
from tribe.engine.memory import (
    ROOM,
    Reservoir,
    admit_reservoir,
    check_size,
    count_predictions,
    fit,
    hold,
    images,
    new_reservoir,
)
from tribe.engine.optim import Adam, adam_init, adam_step
from tribe.engine.rng import Key
from tribe.engine.segments import segment
from tribe.engine.state import Affine, Info, Stats
from tribe.methods.base import Deployed, Method, finish, new_info, new_key, quiet, register, screen
from tribe.norms.instance import Instance


class NoteState(NamedTuple):
    """Parameters, running statistics, what Adam remembers, and the memory."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    adam: Adam
    memory: Reservoir
    key: Key
    info: Info


@register("note")
@dataclass(frozen=True)
class Note(Method):
    """NOTE, on a network trained with ordinary BatchNorm: instance-aware BN takes its place at test time.

    On a network without BatchNorm the memory and the entropy are all there is to it.
    """

    k: float = 4.0  # standard errors by which an instance may deviate before it is corrected for
    m: float = 0.01  # the newest batch's share in the running statistics
    lr: float = 1e-4  # Adam's learning rate
    size: int = 64  # images in memory
    room: int = ROOM  # values of an image, channels x height x width at most: the memory's size is settled beforehand

    eager_only, in_segments = "the host decides which images enter its memory", True
    small = {"size": 8}  # noqa: RUF012
    paper = "Gong et al., NOTE: robust continual test-time adaptation against temporal correlation, NeurIPS 2022"
    works_on = ("affine",)
    presets = {  # noqa: RUF012
        "mnist": {"classes": 10},
        "cifar10": {"classes": 10},
        "cifar100": {"classes": 100},
        "imagenet": {"classes": 1000, "room": 3 * 224 * 224},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is None:
            raise ValueError("NOTE counts predictions of each class and needs their number: classes=")
        check_size(self.size, self.room)
        if not self.lr >= 0:
            raise ValueError(f"lr, Adam's learning rate, is not negative; got {self.lr}")
        _ = self._norm(observing=True)  # its own checks of k and m

    def _norm(self, observing: bool) -> Instance:
        return Instance(self.k, self.m, observing)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> NoteState:
        """Start at the source, the memory empty."""
        affine, stats = net.source(streams)
        memory = new_reservoir(
            streams, self.size, self.classes or 0, room=self.room, dtype=net.dtype, device=net.device
        )
        key, info = new_key(net, streams, seed), new_info(net, streams)
        return NoteState(affine, stats, adam_init(affine), memory, key, info)

    def deployed(self, net: Backbone, state: NoteState) -> Deployed:
        """The adapted parameters and running statistics, corrected for each image."""
        return Deployed(state.affine, state.stats, self._norm(observing=False))

    def remember(self, memory: Reservoir, x: Tensor, labels: Tensor, valid: Tensor, key: Key) -> Reservoir:
        """Let a batch (S, B, ...) with its predicted labels arrive in memory."""
        memory = fit(memory, x)
        # In parts no larger than the memory: what a part costs grows with its square.
        for some, label, counted in zip(*(t.split(self.size, 1) for t in (x, labels, valid)), strict=True):
            turnover = admit_reservoir(memory, label, counted, key.seed)
            whole = torch.full_like(memory.held, label.shape[1])
            memory = hold(memory, {"image": some, "label": label}, turnover, counted, whole)
            memory = count_predictions(memory, label, counted)
        return memory

    def step(self, net: Backbone, state: NoteState, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, NoteState]:
        """Predict, remember, then take one Adam step down the entropy of the memory."""
        x, valid, rejected = screen(x, valid)
        said, seen = segment(self.look, net, state, x, valid)
        prediction = quiet(said, seen)
        valid, rejected = seen, rejected + (valid & ~seen).sum(1)  # what has no features must not enter the memory
        memory = self.remember(state.memory, x, prediction.argmax(-1), valid, state.key)

        new = segment(self._learn, net, state._replace(memory=memory), x.shape[2:], valid.any(1))
        return finish(net, state, new, prediction, valid, rejected, affine=new.affine)

    def _learn(self, net: Backbone, state: NoteState, shape: tuple[int, ...], due: Tensor) -> NoteState:
        """One step down the entropy of the memory."""
        counts = state.memory.filled & due.unsqueeze(1)  # (S, M): a stream that saw nothing does nothing
        with torch.enable_grad():
            affine = state.affine.leaf()
            norm = self._norm(observing=True)
            logits, _, stats = net(images(state.memory, shape), affine, state.stats, norm, valid=counts)
            loss = mean_over(entropy(logits), counts)  # (S,)
            grads = Affine(*torch.autograd.grad(loss.sum(), affine))
        moved, moments = adam_step(state.affine, grads, state.adam, self.lr)
        return state._replace(affine=moved, stats=stats, adam=moments)
