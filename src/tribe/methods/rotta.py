"""Learn from a small class-balanced memory of recent and certain images: RoTTA (Yuan et al., CVPR 2023).

A teacher predicts and a student learns from a category-balanced memory, because the classes of the stream come in
bursts. Per batch:

    predict        the teacher, with its present statistics           -> what is returned, and labels for the memory
    remember       add each image to the memory; see `tribe.core.memory`
    every 64       images, also in the middle of a batch: the teacher and the student, with Robust BN, see the memory
                   and its augmentation; the student follows the teacher, older images weighing less (one Adam step,
                   affine only), and the teacher follows the student (a moving average)
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, memory, optim
from tribe.core.augment import Augment, View, view
from tribe.core.memory import Timely
from tribe.core.state import Affine, Info, Stats, select, tree_map
from tribe.fields import Count, Share
from tribe.methods import Backbone, Deployed, Frozen, Key, MemoryMethod, register, report_agreement
from tribe.norms.batch import Robust


class Branch(NamedTuple):
    """One of the two networks: its parameters and its statistics."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)


class RottaState(NamedTuple):
    """Teacher and student, Adam's moments of the student's gradients, and the memory."""

    teacher: Branch
    student: Branch
    adam: optim.Adam
    memory: Timely
    key: Key
    info: Info


class TimelyMethod(MemoryMethod):
    """A teacher predicts; the memory prefers recent and certain images."""

    def score(self, p: Tensor) -> Tensor:
        """Return the entropies."""
        return -(p * (p + 1e-6).log()).sum(-1)

    def remember(self, state: Any, x: Tensor, seen: Any, arriving: Tensor) -> Any:
        """Add images to the memory, as far as it admits them."""
        bank = memory.add_timely(state.memory, x, seen.labels, seen.score, arriving, self.class_count)
        return state._replace(memory=bank)

    def deployed(self, net: Backbone, state: Any) -> Deployed:
        """Return the teacher."""
        return Deployed(state.teacher.affine, state.teacher.stats, Frozen())


@register("rotta")
@dataclass(frozen=True)
class Rotta(TimelyMethod):
    """RoTTA. On a network without BatchNorm, teacher and student differ only in their affine parameters."""

    alpha: Share = 0.05  # the newest batch's share in the statistics of Robust BN
    nu: Share = 0.001  # the student's share in each step of the teacher
    every: Count = 64  # images between updates
    augment: View = Augment()  # noqa: RUF009  what the student sees; a callable gets (B, ...)

    small = {"size": 8, "every": 4}
    paper = "Yuan et al., Robust test-time adaptation in dynamic scenarios, CVPR 2023"
    per_class = "a share of its memory for each class"

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> RottaState:
        """Teacher and student start from the source, the memory empty."""
        teacher, student = Branch(*net.source(streams)), Branch(*net.source(streams))
        bank = memory.new_timely(net, streams, self.size, self.room)
        return RottaState(
            teacher, student, optim.adam_init(student.affine), bank, *self.new_key_and_info(net, streams, seed)
        )

    def update(self, net: Backbone, state: RottaState, shape: tuple[int, ...], due: Tensor) -> RottaState:
        """Move the student towards the teacher and the teacher towards the student, in the streams ``due``."""
        bank, norm = state.memory, Robust(self.alpha)
        seen, valid = memory.images(bank, shape), memory.filled(bank)
        with torch.no_grad():
            teacher, _, teacher_stats = net(seen, *state.teacher, norm, valid=valid)
            # The number of updates is the clock: the view does not depend on the batch size.
            augmented = view(self.augment, seen, state.key._replace(clock=state.adam.steps))
            a = bank.age.to(bank.uncertainty.dtype) / self.size  # (S, M)
            weight = (-a).sigmoid()  # exp(-a) / (1 + exp(-a))
        with torch.enable_grad():
            affine = state.student.affine.leaf()
            student, _, student_stats = net(augmented, affine, state.student.stats, norm, valid=valid)
            loss = losses.mean_over(weight * losses.soft_cross_entropy(student, teacher), valid)  # (S,)
            grads = affine.gradient(loss)
        moved, moments = optim.adam_step(state.student.affine, grads, state.adam, self.lr)
        followed = tree_map(lambda t, s: torch.lerp(t, s, self.nu), state.teacher.affine, moved)
        new = state._replace(
            teacher=Branch(followed, teacher_stats),
            student=Branch(moved, student_stats),
            adam=moments,
            info=report_agreement(state.info, teacher, student, None, valid),
        )
        return select(due, new, state)
