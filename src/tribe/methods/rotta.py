"""Learn from a small memory that holds all classes alike, fresh and sure images first: RoTTA (Yuan et al., CVPR 2023).

A teacher predicts, a student learns, and a category-balanced memory stands between them and a stream whose classes
come in bursts. Per batch:

    predict        the teacher, with its statistics as they stand     -> what is returned, and labels for the memory
    remember       each image in turn; see `tribe.engine.memory`
    every 64       images, wherever in a batch that falls: the teacher and the student, with Robust BN, see the memory
                   and its augmentation; the student follows the teacher, older images weighing less (one Adam step,
                   affine only), and the teacher follows the student (a moving average)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.engine.augment import Augment, View, check_view, view
from tribe.engine.backbone import Backbone
from tribe.engine.losses import mean_over, soft_cross_entropy
from tribe.engine.memory import ROOM, Timely, admit_timely, arrival_numbers, check_size, fit, hold, images, new_timely
from tribe.engine.moments import wide
from tribe.engine.optim import Adam, adam_init, adam_step
from tribe.engine.rng import Key
from tribe.engine.segments import segment
from tribe.engine.state import Affine, Info, Stats, select
from tribe.methods.base import Deployed, Method, finish, new_info, new_key, quiet, register, screen
from tribe.norms.frozen import Frozen
from tribe.norms.robust import Robust


class Branch(NamedTuple):
    """One of the two networks: its parameters, and its own statistics."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)


class RottaState(NamedTuple):
    """Teacher and student, what Adam remembers of the student's gradients, and the memory."""

    teacher: Branch
    student: Branch
    adam: Adam
    memory: Timely
    key: Key
    info: Info


@register("rotta")
@dataclass(frozen=True)
class Rotta(Method):
    """RoTTA. Where a network has no BatchNorm, teacher and student differ in their affine parameters alone."""

    alpha: float = 0.05  # the newest batch's share in the statistics of Robust BN
    nu: float = 0.001  # the student's share in each step of the teacher
    lr: float = 1e-3  # Adam's learning rate
    size: int = 64  # images in memory; ages count in this unit, too
    every: int = 64  # images between updates
    room: int = ROOM  # values of an image, channels x height x width at most: the memory's size is settled beforehand
    augment: View = Augment()  # noqa: RUF009  what the student sees; a callable gets (B, ...)

    eager_only, in_segments = "the host decides which images enter its memory, and when it is time to learn", True
    small = {"size": 8, "every": 4}  # noqa: RUF012
    paper = "Yuan et al., Robust test-time adaptation in dynamic scenarios, CVPR 2023"
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
            raise ValueError("RoTTA shares its memory out among the classes and needs their number: classes=")
        check_size(self.size, self.room)
        if self.every < 1:
            raise ValueError(f"every is how many images pass between updates, at least 1; got {self.every}")
        if not 0 <= self.nu <= 1:
            raise ValueError(f"nu is the student's share in a step of the teacher, 0 to 1; got {self.nu}")
        if not self.lr >= 0:
            raise ValueError(f"lr, Adam's learning rate, is not negative; got {self.lr}")
        check_view(self.augment)
        _ = self.norm  # its own check of alpha

    @property
    def norm(self) -> Robust:
        """Robust BN with this method's settings."""
        return Robust(self.alpha)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> RottaState:
        """Teacher and student start from the source, the memory empty."""
        teacher, student = Branch(*net.source(streams)), Branch(*net.source(streams))
        memory = new_timely(streams, self.size, room=self.room, dtype=net.dtype, device=net.device)
        key, info = new_key(net, streams, seed), new_info(net, streams)
        return RottaState(teacher, student, adam_init(student.affine), memory, key, info)

    def deployed(self, net: Backbone, state: RottaState) -> Deployed:
        """The teacher."""
        return Deployed(*state.teacher, Frozen())

    def step(
        self, net: Backbone, state: RottaState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, RottaState]:
        """Predict with the teacher, remember, and learn from the memory whenever another 64 images have passed."""
        x, valid, rejected = screen(x, valid)
        prediction, seen, labels, uncertainty = segment(self._look, net, state, x, valid)
        valid, rejected = seen, rejected + (valid & ~seen).sum(1)  # what has no features must not enter the memory
        new = state._replace(memory=fit(state.memory, x))
        # A part of no more images than there are between updates holds one update at most.
        for some in zip(*(t.split(self.every, 1) for t in (x, labels, uncertainty, valid)), strict=True):
            new = self._remember(net, new, *some)
        return finish(net, state, new, prediction, valid, rejected, affine=new.teacher.affine)

    def _look(self, net: Backbone, state: RottaState, x: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """What the teacher says, and of which images (see `look`); the class it sees and how unsure it is (S, B)."""
        said, seen = self.look(net, state, x, valid)
        prediction = quiet(said, seen)
        p = prediction.to(wide(prediction.dtype)).softmax(-1)
        return prediction, seen, p.argmax(-1), -(p * (p + 1e-6).log()).sum(-1)

    def _remember(
        self, net: Backbone, state: RottaState, x: Tensor, labels: Tensor, uncertainty: Tensor, valid: Tensor
    ) -> RottaState:
        """Let images arrive in memory and, where the 64th is among them, learn from the memory at that moment."""
        memory = state.memory
        turnover = admit_timely(memory, labels, uncertainty, valid, self.classes or 0)
        columns = {"image": x, "label": labels, "arrival": arrival_numbers(memory, valid), "uncertainty": uncertainty}

        wanted = self.every - memory.arrivals % self.every  # (S,) arrivals until the next update
        due = valid.sum(1) >= wanted
        if bool(due.any()):
            passed = (valid.cumsum(1) < wanted.unsqueeze(1)).sum(1) + 1
            then = hold(memory, columns, turnover, valid, passed)
            state = segment(self._update, net, state, then, x.shape[2:], due)
        whole = torch.full_like(wanted, x.shape[1])
        return state._replace(memory=hold(memory, columns, turnover, valid, whole))

    def _update(
        self, net: Backbone, state: RottaState, memory: Timely, shape: tuple[int, ...], due: Tensor
    ) -> RottaState:
        """One step of the student towards the teacher and of the teacher towards the student, for streams ``due``."""
        seen, valid, norm = images(memory, shape), memory.filled, self.norm
        with torch.no_grad():
            teacher, _, teacher_stats = net(seen, *state.teacher, norm, valid=valid)
            # The number of updates is the clock: the same view, however the images fell into batches.
            seen_anew = view(self.augment, seen, state.key._replace(clock=state.adam.steps))
            a = memory.age.to(memory.uncertainty.dtype) / self.size  # (S, M)
            weight = (-a).sigmoid()  # exp(-a) / (1 + exp(-a))
        with torch.enable_grad():
            affine = state.student.affine.leaf()
            student, _, student_stats = net(seen_anew, affine, state.student.stats, norm, valid=valid)
            loss = mean_over(weight * soft_cross_entropy(student, teacher), valid)  # (S,)
            grads = Affine(*torch.autograd.grad(loss.sum(), affine))
        moved, moments = adam_step(state.student.affine, grads, state.adam, self.lr)
        followed = Affine(*(torch.lerp(t, s, self.nu) for t, s in zip(state.teacher.affine, moved, strict=True)))
        new = state._replace(
            teacher=Branch(followed, teacher_stats), student=Branch(moved, student_stats), adam=moments
        )
        return select(due, new, state)
