"""Learn from a slow copy of the network, averaged over views, and reset some weights: CoTTA (Wang et al., CVPR 2022).

All weights adapt, and every batch is normalised with its own statistics. Per batch:

    predict        the teacher; where the source model is uncertain, the mean of its logits on N augmented views
    learn          the student's cross-entropy with that prediction; one Adam step
    follow         teacher <- alpha teacher + (1 - alpha) student
    forget         each of the student's weights goes back to the source's with probability p
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.core import all_weights, losses, optim
from tribe.core.all_weights import Parameters, WeightLayout
from tribe.core.augment import Augment, View, view
from tribe.core.moments import accumulation_dtype
from tribe.core.state import tree_map
from tribe.fields import Count, NotNegative, Share
from tribe.methods import Backbone, Deployed, Info, Key, Method, PerBatch, ScreenedBatch, Update, register

RESTORE = 0x434F5454  # purpose of the draw, "COTT" in ASCII


class CottaState(NamedTuple):
    """Two networks, and Adam's moments of the student's gradients."""

    student: Parameters  # (S, C) and (S, P)
    teacher: Parameters
    adam: optim.Adam
    key: Key
    info: Info


@dataclass(frozen=True)
class AveragedTeacher(Method):
    """CoTTA and PETAL, but for the second term of the loss and the choice of weights to reset."""

    lr: NotNegative = 1e-3  # Adam's learning rate
    alpha: Share = 0.999  # the teacher's own share in its moving average
    p_th: float | None = None  # mean confidence of the source model below which views are averaged; None: from K
    n: Count = 32  # augmented views that are averaged, each normalised with its own statistics
    chunk: Count | None = None  # views in one pass; None: 16, on a CPU 128 images' worth. Affects only rounding
    # NOTE: the released augmentation crops every view to 32 x 32; here a view has the size of its image.
    augment: View = Augment()  # noqa: RUF009  makes a view; a callable gets (B, ...)

    capture = "never"  # the host checks whether any stream needs the averaged views
    not_exportable_because = "where the source model is uncertain, passes over several views are averaged"
    # NOTE: the authors publish no setting for MNIST: CIFAR-10's.
    presets = {
        "mnist": {"p_th": 0.92},
        "cifar10": {"p_th": 0.92},
        "cifar100": {"p_th": 0.72},
        "imagenet": {"p_th": 0.1, "chunk": 4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_th <= 0:  # type: ignore[operator]  # no confidence is below: views are never averaged
            object.__setattr__(self, "not_exportable_because", None)

    def defaults(self) -> dict[str, float]:
        """Return the published threshold."""
        if self.p_th is None and self.classes is None:
            raise ValueError(f"{self.name} derives p_th from the number of classes: give classes= or p_th=")
        return {"p_th": self.published(0.92, 0.72, 0.1)} if self.p_th is None else {}

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> CottaState:
        """Student and teacher start at the source."""
        student = WeightLayout(net).source(streams)
        teacher = tree_map(Tensor.clone, student)
        return CottaState(student, teacher, optim.adam_init(student), *self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: CottaState) -> Deployed:
        """Return the teacher, the batch's statistics."""
        layout = WeightLayout(net)
        views = [layout.views(row) for row in state.teacher.weights]
        return Deployed(state.teacher.affine, net.source(len(views))[1], PerBatch(), views)

    def logits(self, net: Backbone, state: CottaState, batch: ScreenedBatch) -> Tensor:
        """Predict as a step would: the views are drawn from the state's key."""
        return self._teach(WeightLayout(net), state, batch.x, batch.valid)

    def adapt(self, net: Backbone, state: CottaState, batch: ScreenedBatch) -> Update:
        """Predict with the teacher, teach the student, let the teacher follow, forget."""
        x, valid, layout = batch.x, batch.valid, WeightLayout(net)
        logits = self._teach(layout, state, x, valid)
        grads = self._learn(layout, state, x, valid, logits)
        student, moments = optim.adam_step(state.student, grads, state.adam, self.lr)
        teacher = tree_map(lambda t, s: torch.lerp(t, s, 1 - self.alpha), state.teacher, student)
        student = self.forget(layout, state, student, grads)
        new = state._replace(student=student, teacher=teacher, adam=moments)
        return Update(logits, new, affine=teacher.affine)

    @torch.no_grad()
    def _teach(self, layout: WeightLayout, state: CottaState, x: Tensor, valid: Tensor) -> Tensor:
        """Return the teacher's logits (S, B, K), averaged over views in streams whose source model is uncertain."""
        net = layout.net
        source = net(x, *net.source(len(x)), PerBatch(), valid=valid).logits
        confidence = losses.mean_over(losses.probabilities(source).amax(-1), valid)  # (S,)
        uncertain = (confidence < self.p_th) & valid.any(1)  # type: ignore[operator]
        logits = []
        averaging = uncertain.tolist()  # waits for the device, which N saved passes are worth
        for i in state.teacher.streams(x):
            teacher, counts = state.teacher.stream(i), valid[i : i + 1]
            if averaging[i]:
                # On a CPU larger chunks leave the caches, and need fresh memory from the kernel.
                chunk = self.chunk or (max(1, 128 // x.shape[1]) if x.device.type == "cpu" else 16)
                numbers = (range(first, min(first + chunk, self.n)) for first in range(0, self.n, chunk))
                views = (self.views(x, state.key, i, chosen) for chosen in numbers)
                parts = [all_weights.forward(layout, teacher, seen, PerBatch(), counts).logits for seen in views]
                logits.append(
                    torch.cat(parts).to(accumulation_dtype(source.dtype)).mean(0, keepdim=True).to(source.dtype)
                )
            else:
                logits.append(all_weights.forward(layout, teacher, x[i : i + 1], PerBatch(), counts).logits)
        return torch.cat(logits)

    def views(self, x: Tensor, key: Key, index: int, numbers: range) -> Tensor:
        """Some of the views of a stream's images, by their numbers: (n, B, ...)."""
        images, count = x[index], len(numbers)
        # A view's number is in bits that no clock reaches, so that no two draws are the same.
        clock = key.clock[index] + (torch.arange(numbers.start, numbers.stop, device=x.device) << 32)
        return view(self.augment, images.expand(count, *images.shape), Key(key.seed[index].expand(count), clock))

    def _learn(self, layout: WeightLayout, state: CottaState, x: Tensor, valid: Tensor, target: Tensor) -> Parameters:
        """Return the gradient of the student's loss, one stream after another."""
        grads = []
        for i in state.student.streams(x):
            row = slice(i, i + 1)
            with torch.enable_grad():
                student = all_weights.leaf(state.student.stream(i))
                logits = all_weights.forward(layout, student, x[row], PerBatch(), valid[row]).logits
                loss = losses.mean_over(losses.soft_cross_entropy(logits, target[row]), valid[row]).sum()
                grads.append(all_weights.gradients(loss, student))
        return self.regularised(layout, state, all_weights.stack_streams(grads))

    def regularised(self, layout: WeightLayout, state: CottaState, grads: Parameters) -> Parameters:
        """Add the gradients of further terms of the loss."""
        return grads

    @abstractmethod
    def forget(self, layout: WeightLayout, state: CottaState, student: Parameters, grads: Parameters) -> Parameters:
        """Reset some of the student's weights to the source's."""


@register("cotta")
@dataclass(frozen=True)
class Cotta(AveragedTeacher):
    """CoTTA: the weights to reset are drawn at random."""

    p: Share = 0.01  # probability with which a weight goes back to the source in a step; Adam's moments stay

    paper = "Wang et al., Continual test-time domain adaptation, CVPR 2022"
    # NOTE: for ImageNet the authors use SGD and a symmetric cross-entropy; here Adam and the plain one, as in the
    # comparison.
    presets = {"imagenet": {"p": 0.001}}

    def forget(self, layout: WeightLayout, state: CottaState, student: Parameters, grads: Parameters) -> Parameters:
        """Reset each weight with probability p, independently."""
        if self.p == 0:
            return student
        count = sum(t.shape[1] for t in (*student.affine, student.weights))
        chosen = all_weights.bernoulli_mask(state.key, RESTORE, self.p, count)
        return all_weights.restore(chosen, student, layout.source())
