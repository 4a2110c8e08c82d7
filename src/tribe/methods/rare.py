"""Learn rarely: a method's own step on every n-th batch, and on the others the prediction of its last state.

    Pipeline(Tent(), rare=Rare(learn_every=8))     # or create("tent+rare", learn_every=8)

The batches between are not shown to the method: a memory of images (rotta, sotta, ...) is not fed by them, and its own
``every`` counts the images of the batches that the method learns from.

What counts is the clock in the state, which also ticks for the batches between. So a stream that is resumed goes on
exactly, and streams in one call may be at different places: those that learn are stepped together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import per_stream, tree_map
from tribe.fields import Count, check_fields
from tribe.methods.method import Deployed, Method
from tribe.methods.stepping import ScreenedBatch, Update, commit_step, screen


@dataclass(frozen=True)
class Rare:
    """Settings of learning rarely."""

    learn_every: Count = 8  # batches, of which the first is learned from; 1: every batch

    name: ClassVar[str] = "rare"
    paper: ClassVar[str] = "beyond the paper: docs/budget.md"
    small: ClassVar[Mapping[str, Any]] = {"learn_every": 2}  # values for tests; see `tribe.testing`

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, method: Method) -> None:
        """Refuse a method that cannot be stepped rarely, or that says itself how rarely it learns."""
        if method.does_not_adapt is not None:
            raise ValueError(f"{method.name} cannot learn rarely: it never learns, since {method.does_not_adapt}")
        if method.rare_field is not None:
            raise ValueError(f"{method.name} has a field {method.rare_field!r}: set it, and leave out +{self.name}")

    def due(self, state: Any) -> Tensor:
        """Return which streams (S,) learn from the next batch, for a state of the method. Waits for the device."""
        due: Tensor = state.key.clock.cpu() % self.learn_every == 0
        return due

    def step(
        self,
        method: Method,
        net: Backbone,
        state: Any,
        x: Tensor,
        valid: Tensor | None = None,
        retired: Any = None,
        *,
        deploy: Callable[[Backbone, Any], Deployed] | None = None,
    ) -> tuple[Tensor, Any]:
        """Take the method's step in the streams that are due; predict in the others. See `Method.step`."""
        due = self.due(state)
        if due.all():
            return method.step(net, state, x, valid, retired, deploy=deploy)
        if not due.any():
            return _rest(method, net, state, x, valid, deploy)
        parts = []
        for chosen in (due, ~due):
            rows = chosen.nonzero().flatten().to(x.device)
            own = tree_map(lambda t, rows=rows: per_stream(t, len(due))[rows].flatten(0, 1), state)
            given = net, own, x[rows], None if valid is None else valid[rows]
            learns = chosen is due
            parts.append(method.step(*given, deploy=deploy) if learns else _rest(method, *given, deploy))
        place = torch.cat((due.nonzero(), (~due).nonzero())).flatten().argsort().to(x.device)
        (output, learned), (other, rested) = parts

        def join(one: Tensor, two: Tensor, streams: int) -> Tensor:
            rows = torch.cat((per_stream(one, streams), per_stream(two, len(due) - streams)))
            return rows[place].flatten(0, 1)

        count = int(due.sum())
        return torch.cat((output, other))[place], tree_map(lambda a, b: join(a, b, count), learned, rested)


def _rest(
    method: Method,
    net: Backbone,
    state: Any,
    x: Tensor,
    valid: Tensor | None,
    deploy: Callable[[Backbone, Any], Deployed] | None,
) -> tuple[Tensor, Any]:
    """Predict as `Method.predict` does; only the clock and the report of the state move on."""
    x, valid, rejected = screen(x, valid)
    logits, seen = method.predict_batch(net, state, ScreenedBatch(x, valid, deploy or method.deployed))
    output, new = commit_step(net, state, Update(logits, state, seen=seen), valid, rejected)
    new = new._replace(info=new.info._replace(trusted=state.info.trusted))  # of the last batch that it learned from
    return output, new
