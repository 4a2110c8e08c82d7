"""Real time: the stream does not wait for a method that is still busy with a batch.

The protocol of Alfarra et al., Evaluation of test-time adaptation under computational time constraints, ICML 2024. The
clock counts images: ``speed`` of them arrive while plain inference of the source network predicts one. A step takes
``cost`` times as long as plain inference of the same images. A method that is free while a batch arrives takes it; a
batch that ends while the method is busy is predicted by its last state. So it takes 1 / (speed * cost) of a long
stream, and a method that keeps up takes all of it.

NOTE: as in the paper, the last state is that after the batch that the method took last, even while it is busy with it,
and predicting the batches that it does not take costs it nothing.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.precision import deterministic
from tribe.core.state import select
from tribe.experiments.stream import Stream
from tribe.fields import Positive, check_fields
from tribe.methods import AnyMethod, Method, Pipeline, ScreenedBatch, finite, mask_logits, screen


@dataclass(frozen=True)
class Realtime:
    """The speed of the stream, and the cost of the method; both relative to plain inference of the source network."""

    speed: Positive  # images that arrive while plain inference predicts one
    cost: Positive  # mean time of a step, divided by that of plain inference of the same batch

    def __post_init__(self) -> None:
        check_fields(self)

    def json(self) -> dict[str, float]:
        """Return the fields as plain data."""
        return {"speed": self.speed, "cost": self.cost}

    @property
    def share(self) -> float:
        """The share of a long stream that the method takes."""
        return min(1.0, 1 / (self.speed * self.cost))

    def taken(self, sizes: Sequence[int]) -> list[bool]:
        """Return which batches of these sizes the method takes.

        >>> Realtime(speed=1, cost=2.5).taken([64] * 8)
        [True, False, True, False, False, True, False, True]
        """
        each = Fraction(self.speed) * Fraction(self.cost)  # images that arrive during a step, for each image of it
        taken, begins, free = [], 0, Fraction(0)
        for size in sizes:
            ends = begins + size
            taken.append(free < ends)
            if taken[-1]:
                free = max(free, Fraction(begins)) + each * size
            begins = ends
        return taken

    def plan(self, stream: Stream) -> Tensor:
        """Return which batches are taken, (steps, S); a stream that is over takes those that another one takes."""
        plan = torch.zeros(len(stream), len(stream.cuts), dtype=torch.bool)
        over = torch.ones_like(plan)
        for s, cuts in enumerate(stream.cuts):
            plan[: len(cuts), s] = torch.tensor(self.taken([cut.stop - cut.start for cut in cuts]), dtype=torch.bool)
            over[: len(cuts), s] = False
        return plan | over & plan.any(1, keepdim=True)


def predict_last(
    net: Backbone, method: AnyMethod, state: Any, x: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Predict without learning, in one pass of the network that the state deploys; a time filter moves on.

    All that a method does besides that pass is left out: the neighbours of LAME, whose last state is the source
    network, the views of CoTTA and PETAL, the prior of ROID.
    """
    pipeline = Pipeline.of(method)
    inner = state.method if isinstance(method, Pipeline) else state
    x, real, _ = screen(x, valid)
    batch = ScreenedBatch(x, real, pipeline.deploy)
    with torch.no_grad():
        logits = Method.logits(pipeline.method, net, inner, batch)
        output = mask_logits(logits, real & finite(logits))
    if pipeline.filter is None:
        return output, state
    answer, after = pipeline.filter_output(net, state.filter, output, valid)
    return answer, state._replace(filter=after)


class ClockedSteps:
    """Takes the steps of a run; under a clock, only those that the method has the time for."""

    def __init__(self, steps: Steps, stream: Stream, realtime: Realtime | None) -> None:
        self.steps, self.plan = steps, None if realtime is None else realtime.plan(stream)

    def __call__(self, step: int, state: Any, x: Tensor, valid: Tensor, retired: Any) -> tuple[Tensor, Any, Any]:
        """Return predictions, the next state, and a state that is not read any more; the first step is 0."""
        taken = None if self.plan is None else self.plan[step]
        if taken is None or taken.all():
            return *self.steps(state, x, valid, retired), state
        steps, chosen = self.steps, taken.to(x.device)
        with deterministic() if steps.deterministic else contextlib.nullcontext():
            waiting = valid & ~chosen.unsqueeze(1)
            output, kept = predict_last(steps.net, steps.method, state, x, waiting)
        if not taken.any():
            return output, kept, retired
        learned, new = steps(state, x, valid & chosen.unsqueeze(1))
        return torch.where(chosen.view(-1, 1, 1), learned, output), select(chosen, new, kept), None
