"""The ablations of TRIBE, each component a field, from a norm rule alone to the whole method (AAAI-24).

`SelfTraining(classes=K)` gives TRIBE's numbers (read `tribe.methods.tribe` first); teacher, anchor, norm rule and
memory are fields. `SelfTraining.variants` names the rows of the paper's tables, such as "selftrain/fixmatch".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, memory, optim
from tribe.core.graphs import segment
from tribe.core.memory import ROOM, Timely
from tribe.core.packed import ClassStats
from tribe.core.state import Affine, Info, Stats, clone, rows_of, tree_map
from tribe.fields import Count, Range, Share, require
from tribe.methods import Backbone, Deployed, Frozen, Key, ScreenedBatch, Update, register
from tribe.methods.tribe import STUDENT, TEACHER, Tribe, interleave
from tribe.norms import Norm
from tribe.norms.balanced import Balanced
from tribe.norms.batch import Robust
from tribe.norms.instance import Instance
from tribe.norms.named import from_text as norm_from_text

ALONE: Mapping[str, Any] = {"learning": False}
PLAIN: Mapping[str, Any] = {"lambda_anc": 0.0}  # self-training without the anchored loss
EMA: Mapping[str, Any] = {"teacher": "ema", "lambda_anc": 0.0}


class SelfTrainingState(NamedTuple):
    """Parameters of student and teacher, the branches' statistics, the memory, and Adam's moments."""

    affine: Affine  # (S, C), the student's, which learn
    teacher: Affine  # (S, C), the same values if teacher and student share them
    pair: ClassStats  # (2 S, K, C), the teacher's row and the student's row of each stream
    anchor: ClassStats  # (S, K, C)
    memory: Timely  # of one free place, if the method has none
    adam: optim.Adam
    key: Key
    info: Info


@register("selftrain")
@dataclass(frozen=True)
class SelfTraining(Tribe):
    """Self-training with any norm rule, with or without learning, anchor, moving-average teacher and memory.

    NOTE: the paper does not say how fast the mean teacher moves, its targets, or when rows with a memory learn.
    Here the rate is RoTTA's, targets and threshold are TRIBE's, and rows with a memory learn once a batch. All rows
    predict with the statistics from before the batch, as TRIBE does.
    """

    # What normalises every branch: a norm rule by name, with fields in brackets where it has some, such as
    # "mixed(share=0.5)". "robust" and "instance" alone have the settings of the ablations.
    rule: str = "balanced"
    alpha: float = 0.05  # share of the newest batch in the robust rule
    learning: bool = True  # False: statistics follow the stream, parameters stay
    teacher: Literal["shared", "ema"] = "shared"  # the teacher has the student's parameters, or their moving average
    nu: Share = 0.001  # the student's share in each step of a moving-average teacher
    memory: Annotated[int, Range()] = 0  # images in RoTTA's memory, which replaces the batch in learning; 0: no memory
    room: Count = ROOM  # the most values of an image in memory, channels x height x width

    paper = (
        "Su et al., Towards real-world TTA: tri-net self-training with balanced normalization, AAAI 2024 (ablations)"
    )
    presets = {"imagenet": {"room": 3 * 224 * 224}}
    small = {"memory": 8}
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
        require(isinstance(self.rule, str), "rule of selftrain is the name of a norm rule", self.rule)
        super().__post_init__()
        if self.teacher == "ema" and self.lambda_anc:
            raise ValueError(
                "the anchored loss moves the teacher's own parameters, and a moving-average teacher has none: set "
                "teacher='shared' or lambda_anc=0"
            )
        _ = self.norm  # checks alpha
        if self.class_stats == "packed" and self.rule != "balanced":
            raise ValueError(
                f"class_stats='packed' is for statistics of classes, which the rule {self.rule!r} has not: "
                "set rule='balanced' or class_stats='full'"
            )

    @property
    def capture(self) -> Literal["whole", "segments"]:  # type: ignore[override]  # the same for all of TRIBE
        """The way a step is captured: with a memory, the host decides which images enter it."""
        return "segments" if self.memory else "whole"

    @property
    def norm(self) -> Norm:  # type: ignore[override]  # TRIBE's is Balanced BN
        """The rule that normalises, and moves the statistics."""
        if self.rule == "balanced":
            return super().norm
        if self.rule == "robust":
            return Robust(self.alpha)
        return Instance(observing=True) if self.rule == "instance" else norm_from_text(self.rule, self.class_count)

    @property
    def functions(self) -> tuple[type[Norm], ...]:
        """The classes whose code a result depends on, besides the method's own."""
        return (type(self.norm),)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SelfTrainingState:  # type: ignore[override]
        """All branches start from the source, the memory empty."""
        affine, _ = net.source(streams)
        pair, anchor = (self.first_stats(net, rows) for rows in (2 * streams, streams))
        size, room = (self.memory, self.room) if self.memory else (1, 1)
        bank = memory.new_timely(net, streams, size, room)
        moments, clocks = optim.adam_init(affine), self.new_key_and_info(net, streams, seed)
        return SelfTrainingState(affine, clone(affine), pair, anchor, bank, moments, *clocks)

    def deployed(self, net: Backbone, state: SelfTrainingState) -> Deployed:  # type: ignore[override]
        """Return the teacher, with its present statistics."""
        stats: Any = rows_of(state.pair, TEACHER)
        norm = self.norm
        if isinstance(norm, Balanced):
            stats, norm = self.pooled(net, stats), Frozen()
        elif isinstance(norm, Robust):
            norm = Frozen()
        elif isinstance(norm, Instance) and self.rule == "instance":
            norm = Instance()
        return Deployed(state.teacher, stats, norm)

    def anchored(self, net: Backbone, state: SelfTrainingState) -> Stats | None:
        """As TRIBE's with Balanced BN; None with other rules."""
        return super().anchored(net, state) if isinstance(self.norm, Balanced) else None

    def adapt(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Update:
        """Predict with the teacher; then update the branches on the batch, or on the memory, and teach the student."""
        prediction, _ = segment(self.predict_batch, net, state, batch._replace(retired=None))
        if batch.on_prediction is not None:
            batch.on_prediction(prediction)
        x, labels, counted, bank = batch.x, prediction.argmax(-1), batch.valid, state.memory
        if self.memory:
            bank, uncertainty = memory.fit(bank, x), losses.entropy(prediction)
            bank = memory.add_timely(bank, x, labels, uncertainty, batch.valid, self.class_count)
            labels, x = bank.label, memory.images(bank, batch.x.shape[2:])
            counted = memory.filled(bank) & batch.valid.any(1, keepdim=True)
        new, share = segment(self._update, net, state._replace(memory=bank), x, labels, counted)
        trusted = None if share is None else share.unsqueeze(1).expand_as(batch.valid)
        return Update(prediction, new, trusted, new.teacher)

    def _update(
        self, net: Backbone, state: SelfTrainingState, seen: Tensor, labels: Tensor, counted: Tensor
    ) -> tuple[SelfTrainingState, Tensor | None]:
        """Update statistics, and parameters if they learn; also return the share (S,) of trusted samples."""
        if not self.learning:
            return state._replace(pair=self._observe(net, state, seen, labels, counted)), None
        teaching = None if self.teacher == "shared" else state.teacher
        new, trusted = self._learn(net, state, seen, labels, counted, teaching)
        teacher = clone(new.affine)
        if self.teacher == "ema":
            teacher = tree_map(lambda t, s: torch.lerp(t, s, self.nu), state.teacher, new.affine)
        return new._replace(teacher=teacher), losses.mean_over(trusted.float(), counted)

    def _observe(self, net: Backbone, state: SelfTrainingState, x: Tensor, labels: Tensor, valid: Tensor) -> Any:
        """Update the teacher's statistics; a student that does not learn keeps its own."""
        if self.rule in ("frozen", "batch"):
            return state.pair
        with torch.no_grad():
            teacher, student = rows_of(state.pair, TEACHER), rows_of(state.pair, STUDENT)
            seen = net(x, state.affine, teacher, self.norm, labels, valid).stats
            return tree_map(interleave, seen, student)
