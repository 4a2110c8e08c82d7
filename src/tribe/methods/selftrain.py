"""TRIBE taken apart: what its ablations put together, each part a field, from a norm rule alone to the whole (AAAI-24).

`SelfTraining(classes=K)` is TRIBE, number for number (read that in `tribe.methods.tribe`); here teacher, anchor,
norm rule and memory can be chosen. `SelfTraining.variants` names the rows of the paper's tables: "selftrain/fixmatch".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.engine.augment import view
from tribe.engine.backbone import Backbone
from tribe.engine.losses import cross_entropy, entropy, mean_over
from tribe.engine.memory import ROOM, Timely, admit_timely, arrival_numbers, check_size, fit, hold, images, new_timely
from tribe.engine.optim import Adam, adam_init, adam_step
from tribe.engine.rng import Key
from tribe.engine.segments import segment
from tribe.engine.state import Affine, Info, Stats, clone
from tribe.methods.base import Deployed, finish, new_info, new_key, register, screen
from tribe.methods.tribe import Tribe, twice
from tribe.norms import Norm
from tribe.norms.balanced import Balanced
from tribe.norms.batch import PerBatch
from tribe.norms.frozen import Frozen
from tribe.norms.instance import Instance
from tribe.norms.robust import Robust

RULES = ("balanced", "robust", "instance", "batch", "frozen")
ALONE: Mapping[str, Any] = {"learning": False}
PLAIN: Mapping[str, Any] = {"lambda_anc": 0.0}  # self-training without the anchored loss
EMA: Mapping[str, Any] = {"teacher": "ema", "lambda_anc": 0.0}


class SelfTrainingState(NamedTuple):
    """Parameters of student and teacher, the branches' statistics, the memory, and what Adam remembers."""

    affine: Affine  # (S, C), those that learn: the student's
    teacher: Affine  # (S, C), equal to them where teacher and student share
    pair: Stats  # (2 S, K, C), the teacher's row and the student's of each stream
    anchor: Stats  # (S, K, C)
    memory: Timely  # with a place or none in use
    adam: Adam
    key: Key
    info: Info


@register("selftrain")
@dataclass(frozen=True)
class SelfTraining(Tribe):
    """Self-training with any norm rule, with or without learning, anchor, moving-average teacher and memory.

    NOTE: the paper does not say how fast the mean teacher moves, what it teaches, or when rows with a memory learn.
    Here the speed is RoTTA's, targets and threshold are TRIBE's, and a memory is learned from once a batch. All rows
    predict with the statistics from before the batch, as TRIBE does.
    """

    rule: Literal["balanced", "robust", "instance", "batch", "frozen"] = "balanced"  # what normalises every branch
    alpha: float = 0.05  # share of the newest batch in the robust rule
    learning: bool = True  # False: statistics follow the stream, parameters stay
    teacher: Literal["shared", "ema"] = "shared"  # the teacher has the student's parameters, or their moving average
    nu: float = 0.001  # the student's share in each step of a moving-average teacher
    memory: int = 0  # images in RoTTA's memory, learned from in place of the batch; 0: none
    room: int = ROOM  # values of an image in memory, channels x height x width at most

    paper = (
        "Su et al., Towards real-world TTA: tri-net self-training with balanced normalization, AAAI 2024 (ablations)"
    )
    presets = {**Tribe.presets, "imagenet": {**Tribe.presets["imagenet"], "room": 3 * 224 * 224}}  # noqa: RUF012
    small = {"memory": 8}  # noqa: RUF012
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "iabn": {"rule": "instance", **ALONE},
        "robust-bn": {"rule": "robust", **ALONE},
        "robust-bn-slow": {"rule": "robust", "alpha": 0.005, **ALONE},
        "balanced-bn": {**ALONE},
        "bn+st": {"rule": "frozen", **PLAIN},  # rows called BN have the source's statistics
        "bn+st+anchor": {"rule": "frozen"},
        "robust+st": {"rule": "robust", **PLAIN},
        "robust+st+anchor": {"rule": "robust"},
        "robust+ema+st": {"rule": "robust", **EMA},
        "robust+memory+st": {"rule": "robust", "memory": 64, **PLAIN},
        "robust+memory+st+anchor": {"rule": "robust", "memory": 64},
        "balanced+memory+st+anchor": {"memory": 64},
        "balanced+memory+ema+st": {"memory": 64, **EMA},
        "fixmatch": {**PLAIN},
        "mean-teacher": {**EMA},
        "tribe": {},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise ValueError(f"rule is {', '.join(RULES[:-1])} or {RULES[-1]}; got {self.rule!r}")
        if self.teacher not in ("shared", "ema") or not 0 <= self.nu <= 1:
            raise ValueError(f"teacher is 'shared' or 'ema' and nu lies in [0, 1]; got {self.teacher!r}, {self.nu}")
        if self.memory != 0:
            check_size(self.memory, self.room)
            object.__setattr__(self, "eager_only", "the host decides which images enter its memory")
            object.__setattr__(self, "in_segments", True)
        if self.teacher == "ema" and self.lambda_anc:
            raise ValueError(
                "the anchored loss moves the teacher's own parameters, and a moving average has none to move: "
                "teacher='shared', or lambda_anc=0"
            )
        _ = self.norm  # its own check of alpha

    @property
    def norm(self) -> Norm:  # type: ignore[override]  # TRIBE's is Balanced BN
        """The rule that normalises, and moves the statistics."""
        if self.rule == "balanced":
            return super().norm
        if self.rule == "robust":
            return Robust(self.alpha)
        return Instance(observing=True) if self.rule == "instance" else PerBatch() if self.rule == "batch" else Frozen()

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SelfTrainingState:  # type: ignore[override]
        """All branches start from the source, the memory empty."""
        affine, anchor = net.source(streams, self.norm.classes)
        _, pair = net.source(2 * streams, self.norm.classes)
        places, room = (self.memory, self.room) if self.memory else (1, 1)
        memory = new_timely(streams, places, room=room, dtype=net.dtype, device=net.device)
        key, info = new_key(net, streams, seed), new_info(net, streams)
        return SelfTrainingState(affine, clone(affine), pair, anchor, memory, adam_init(affine), key, info)

    def deployed(self, net: Backbone, state: SelfTrainingState) -> Deployed:  # type: ignore[override]
        """The teacher, its statistics as they stand."""
        stats, norm = Stats(*(t[0::2] for t in state.pair)), self.norm
        if isinstance(norm, Balanced):
            stats, norm = norm.pool(stats), Frozen()
        elif isinstance(norm, Robust):
            norm = Frozen()
        elif isinstance(norm, Instance):
            norm = Instance()
        return Deployed(state.teacher, stats, norm)

    def step(  # type: ignore[override]
        self, net: Backbone, state: SelfTrainingState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, SelfTrainingState]:
        """Predict with the teacher; then the branches see the batch, or the memory, and the student learns from it."""
        x, valid, rejected = screen(x, valid)
        prediction = segment(self.predict, net, state, x, valid)
        labels, seen, counted, memory = prediction.argmax(-1), x, valid, state.memory
        if self.memory:
            memory = self._remember(state.memory, x, prediction, labels, valid)
            labels, seen = memory.label, images(memory, x.shape[2:])
            counted = memory.filled & valid.any(1, keepdim=True)
        new, share = segment(self._follow, net, state._replace(memory=memory), seen, labels, counted)
        trusted = None if share is None else share.unsqueeze(1).expand_as(valid)
        return finish(net, state, new, prediction, valid, rejected, trusted, new.teacher)

    def _follow(
        self, net: Backbone, state: SelfTrainingState, seen: Tensor, labels: Tensor, counted: Tensor
    ) -> tuple[SelfTrainingState, Tensor | None]:
        """Let statistics, and parameters if they learn, follow what is seen; also the share (S,) that was trusted."""
        if not self.learning:
            return state._replace(pair=self._observe(net, state, seen, labels, counted)), None
        anchor, anchor_stats = self._anchor(net, state, seen, labels, counted, None)  # type: ignore[arg-type]
        with torch.enable_grad():
            affine = state.affine.leaf()
            teaching = affine if self.teacher == "shared" else state.teacher
            branches = Affine(*(torch.stack(pair, 1).flatten(0, 1) for pair in zip(teaching, affine, strict=True)))
            views = torch.stack((seen, view(self.augment, seen, state.key)), 1).flatten(0, 1)  # (2 S, B, ...)
            pair, _, pair_stats = net(views, branches, state.pair, self.norm, twice(labels), twice(counted))
            teacher, student = pair.unflatten(0, (-1, 2)).unbind(1)  # (S, B, K) each

            certain = entropy(teacher.detach()) < self.h0 * math.log(self.classes or 0)  # type: ignore[operator]
            trusted = certain & counted
            loss = mean_over(cross_entropy(student, teacher.argmax(-1)), trusted)  # (S,)
            if anchor is not None:
                loss = loss + self.lambda_anc * mean_over(self._disagreement(teacher, anchor), trusted)
            grads = Affine(*torch.autograd.grad(loss.sum(), affine))

        moved, moments = adam_step(state.affine, grads, state.adam, self.lr)
        followed = clone(moved)
        if self.teacher == "ema":
            followed = Affine(*(torch.lerp(t, s, self.nu) for t, s in zip(state.teacher, moved, strict=True)))
        new = state._replace(affine=moved, teacher=followed, pair=pair_stats, anchor=anchor_stats, adam=moments)
        return new, mean_over(trusted.float(), counted)

    def _observe(self, net: Backbone, state: SelfTrainingState, x: Tensor, labels: Tensor, valid: Tensor) -> Stats:
        """Let the teacher's statistics follow; those of a student that does not learn stay."""
        if self.rule in ("frozen", "batch"):
            return state.pair
        with torch.no_grad():
            teacher, student = (Stats(*(t[i::2] for t in state.pair)) for i in (0, 1))
            seen = net(x, state.affine, teacher, self.norm, labels, valid).stats
            return Stats(*(torch.stack(rows, 1).flatten(0, 1) for rows in zip(seen, student, strict=True)))

    def _remember(self, memory: Timely, x: Tensor, prediction: Tensor, labels: Tensor, valid: Tensor) -> Timely:
        """The memory with the batch's images in it, as far as they were let in."""
        memory, doubt = fit(memory, x), entropy(prediction)
        turnover = admit_timely(memory, labels, doubt, valid, self.classes or 0)
        columns = {"image": x, "label": labels, "arrival": arrival_numbers(memory, valid), "uncertainty": doubt}
        whole = torch.full_like(memory.arrivals, x.shape[1])
        return hold(memory, columns, turnover, valid, whole)
