"""Learn from one's own slow copy, averaged over views, and always forget a little: CoTTA (Wang et al., CVPR 2022).

All weights adapt, and every batch is normalised with its own statistics. Per batch:

    predict        the teacher; where the source model is unsure, the mean of its logits on N augmented views
    learn          the student's cross-entropy with that prediction; one Adam step
    follow         teacher <- alpha teacher + (1 - alpha) student
    forget         each of the student's weights goes back to the source's with probability p
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.engine.all_weights import (
    Parameters,
    WeightLayout,
    bernoulli_mask,
    forward,
    gradients,
    leaf,
    restore,
    stack_streams,
)
from tribe.engine.augment import Augment, View, check_view, view
from tribe.engine.backbone import Backbone
from tribe.engine.losses import mean_over, soft_cross_entropy
from tribe.engine.moments import wide
from tribe.engine.optim import Adam, adam_init, adam_step
from tribe.engine.rng import Key
from tribe.engine.state import Info, tree_map
from tribe.methods.base import Deployed, Method, finish, finite, new_info, new_key, quiet, register, screen
from tribe.norms.batch import PerBatch

RESTORE = 0x434F5454  # purpose of the draw, "COTT" in ASCII


class CottaState(NamedTuple):
    """Two networks, and what Adam remembers of the student's gradients."""

    student: Parameters  # (S, C) and (S, P)
    teacher: Parameters
    adam: Adam
    key: Key
    info: Info


@dataclass(frozen=True)
class AveragedTeacher(Method):
    """What CoTTA and PETAL share: all but the loss's second term and what is forgotten."""

    lr: float = 1e-3  # Adam's learning rate
    alpha: float = 0.999  # the share of itself that the teacher keeps in a step
    p_th: float | None = None  # mean confidence of the source model below which views are averaged; follows from K
    n: int = 32  # augmented views that are averaged, each normalised with its own statistics
    chunk: int | None = None  # views in one pass; None: 16, on a CPU 128 images' worth. It changes rounding alone
    # NOTE: the released augmentation crops every view to 32 x 32; here a view has the size of its image.
    augment: View = Augment()  # noqa: RUF009  makes a view; a callable gets (B, ...)

    eager_only = "the host looks whether any stream needs the averaged views"
    more_than_a_pass = "where the source model is unsure, passes over several views are averaged"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_th is None:
            if self.classes is None:
                raise ValueError(f"{self.name} chooses p_th by the number of classes: give classes=, or p_th= itself")
            # NOTE: published for 10, 100 and 1000 classes; between them the nearest.
            p_th = 0.92 if self.classes <= 20 else 0.72 if self.classes <= 300 else 0.1
            object.__setattr__(self, "p_th", p_th)
        if self.lr < 0 or not 0 <= self.alpha <= 1:
            raise ValueError(f"lr is not negative and alpha within 0 and 1; got {self.lr} and {self.alpha}")
        if self.n < 1 or (self.chunk is not None and self.chunk < 1):
            raise ValueError(f"n, the views, and chunk, those in one pass, are at least 1; got {self.n}, {self.chunk}")
        check_view(self.augment)
        if self.p_th <= 0:  # type: ignore[operator]  # a confidence is never below: no view is averaged
            object.__setattr__(self, "more_than_a_pass", None)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> CottaState:
        """Student and teacher start at the source."""
        student = WeightLayout(net).source(streams)
        teacher = tree_map(Tensor.clone, student)
        return CottaState(student, teacher, adam_init(student), new_key(net, streams, seed), new_info(net, streams))

    def deployed(self, net: Backbone, state: CottaState) -> Deployed:
        """The teacher, the batch's statistics."""
        layout, streams = WeightLayout(net), len(state.key.seed)
        weights = [layout.views(row) for row in state.teacher.weights]
        return Deployed(state.teacher.affine, net.source(streams)[1], PerBatch(), weights)

    def predict(self, net: Backbone, state: CottaState, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict as a step would: the views are drawn from the state's key."""
        x, valid, _ = screen(x, valid)
        said = self._teach(WeightLayout(net), state, x, valid)
        return quiet(said, valid & finite(said))

    def step(
        self, net: Backbone, state: CottaState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, CottaState]:
        """Predict with the teacher, teach the student, let the teacher follow, forget."""
        x, valid, rejected = screen(x, valid)
        layout = WeightLayout(net)
        logits = self._teach(layout, state, x, valid)
        grads = self._learn(layout, state, x, valid, logits)
        student, moments = adam_step(state.student, grads, state.adam, self.lr)
        teacher = tree_map(lambda t, s: torch.lerp(t, s, 1 - self.alpha), state.teacher, student)
        student = self.forget(layout, state, student, grads)
        new = state._replace(student=student, teacher=teacher, adam=moments)
        return finish(net, state, new, logits, valid, rejected, affine=teacher.affine)

    @torch.no_grad()
    def _teach(self, layout: WeightLayout, state: CottaState, x: Tensor, valid: Tensor) -> Tensor:
        """The teacher's logits (S, B, K), averaged over views for the streams whose source model is unsure."""
        net = layout.net
        source = net(x, *net.source(len(x)), PerBatch(), valid=valid).logits
        confidence = mean_over(source.to(wide(source.dtype)).softmax(-1).amax(-1), valid)  # (S,)
        unsure = (confidence < self.p_th) & valid.any(1)  # type: ignore[operator]
        logits = []
        averaging = unsure.tolist()  # N passes are worth a look at the device
        for i in state.teacher.streams(x):
            teacher, counts = state.teacher.stream(i), valid[i : i + 1]
            if averaging[i]:
                # On a CPU more would leave its caches, and ask the kernel for fresh memory.
                chunk = self.chunk or (max(1, 128 // x.shape[1]) if x.device.type == "cpu" else 16)
                numbers = (range(first, min(first + chunk, self.n)) for first in range(0, self.n, chunk))
                views = (self.views(x, state.key, i, some) for some in numbers)
                parts = [forward(layout, teacher, seen, PerBatch(), counts).logits for seen in views]
                logits.append(torch.cat(parts).to(wide(source.dtype)).mean(0, keepdim=True).to(source.dtype))
            else:
                logits.append(forward(layout, teacher, x[i : i + 1], PerBatch(), counts).logits)
        return torch.cat(logits)

    def views(self, x: Tensor, key: Key, index: int, numbers: range) -> Tensor:
        """Some of the views of a stream's images, by their numbers: (n, B, ...)."""
        mine, count = x[index], len(numbers)
        # A view's number goes where no clock will ever reach, so that no two draws are the same.
        clock = key.clock[index] + (torch.arange(numbers.start, numbers.stop, device=x.device) << 32)
        return view(self.augment, mine.expand(count, *mine.shape), Key(key.seed[index].expand(count), clock))

    def _learn(self, layout: WeightLayout, state: CottaState, x: Tensor, valid: Tensor, target: Tensor) -> Parameters:
        """The gradient of the student's loss, one stream after another."""
        grads = []
        for i in state.student.streams(x):
            row = slice(i, i + 1)
            with torch.enable_grad():
                student = leaf(state.student.stream(i))
                logits = forward(layout, student, x[row], PerBatch(), valid[row]).logits
                loss = mean_over(soft_cross_entropy(logits, target[row]), valid[row]).sum()
                grads.append(gradients(loss, student))
        return self.regularised(layout, state, stack_streams(grads))

    def regularised(self, layout: WeightLayout, state: CottaState, grads: Parameters) -> Parameters:
        """Add the gradient of what else the loss holds."""
        return grads

    @abstractmethod
    def forget(self, layout: WeightLayout, state: CottaState, student: Parameters, grads: Parameters) -> Parameters:
        """Put some of the student's weights back to the source's."""


@register("cotta")
@dataclass(frozen=True)
class Cotta(AveragedTeacher):
    """CoTTA: what is forgotten is drawn by lot."""

    p: float = 0.01  # probability with which a weight goes back to the source in a step; Adam's moments stay

    paper = "Wang et al., Continual test-time domain adaptation, CVPR 2022"
    # NOTE: the authors publish no setting for MNIST: CIFAR-10's. For ImageNet they use SGD and a symmetric
    # cross-entropy; here Adam and the plain one, as in the comparison.
    presets = {  # noqa: RUF012
        "mnist": {"classes": 10, "p_th": 0.92},
        "cifar10": {"classes": 10, "p_th": 0.92},
        "cifar100": {"classes": 100, "p_th": 0.72},
        "imagenet": {"classes": 1000, "p_th": 0.1, "p": 0.001, "chunk": 4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p <= 1:
            raise ValueError(f"p, the probability of a restored weight, is within 0 and 1; got {self.p}")

    def forget(self, layout: WeightLayout, state: CottaState, student: Parameters, grads: Parameters) -> Parameters:
        """Each weight with probability p, independently."""
        if self.p == 0:
            return student
        count = sum(t.shape[1] for t in (*student.affine, student.weights))
        return restore(bernoulli_mask(state.key, RESTORE, self.p, count), student, layout.source())
