"""Any method with a time filter after it: its predictions pass through the filter; what it learns stays the same.

``tribe+time`` names TRIBE with the filter of `tribe.filters.markov`. The filter never feeds what the method learns:
see docs/time.md for what happens if it does.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.checks import check_count
from tribe.core.moments import accumulation_dtype
from tribe.filters import FilterInfo, TimeFilter
from tribe.methods.composed import Composed, ComposedState, compose
from tribe.methods.method import Method


class _TimedState(NamedTuple):
    inner: Any
    time: Any


class TimedState(_TimedState, ComposedState):
    """The state of the method and that of the filter; `info` is of the method's own predictions, before the filter."""

    __slots__ = ()


@dataclass(frozen=True)
class Timed(Composed):
    """A method and a filter."""

    not_exportable_because = "filters its predictions over time"

    @property
    def time_filter(self) -> TimeFilter:
        """The filter alone."""
        rule: TimeFilter = self.part
        return rule

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> TimedState:
        """The first states of the method and of the filter."""
        classes = self._count(net)
        if classes is None:
            raise ValueError(
                "a time filter needs the number of classes, which cannot be read from the network: classes="
            )
        source = net.source()[0].weight
        like = source.new_empty(0, dtype=accumulation_dtype(source.dtype))
        return TimedState(self.inner.init(net, streams, seed), self.time_filter.init(streams, classes, like))

    def step(
        self, net: Backbone, state: TimedState, x: Tensor, valid: Tensor | None = None, retired: Any = None
    ) -> tuple[Tensor, TimedState]:
        """Take the method's step, then filter its predictions."""
        output, inner = self.inner.step_reusing(net, state.inner, x, valid, retired and retired.inner)
        answer, after = self.filter_after(net, state.time, output, valid)
        return answer, TimedState(inner, after)

    def predict(self, net: Backbone, state: TimedState, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict as the next step would; the state, and with it the belief in the current class, stays as it is."""
        return self.predict_and_advance(net, state, x, valid)[0]

    def predict_and_advance(
        self, net: Backbone, state: TimedState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, TimedState]:
        """Predict without adapting the network; the filter goes on."""
        answer, after = self.filter_after(net, state.time, self.inner.predict(net, state.inner, x, valid), valid)
        return answer, state._replace(time=after)

    def filter_info(self, state: TimedState) -> list[FilterInfo] | None:
        """What the filter does for each stream."""
        return self.time_filter.info(state.time)

    def filter_after(self, net: Backbone, state: Any, output: Tensor, valid: Tensor | None) -> tuple[Tensor, Any]:
        """Filter what the method returned, (S, B, K), with a state of the filter: answers, and its next state."""
        check_count(output, self._count(net), net.classifier)  # a filter would fail with the sizes of its tensors
        real = torch.ones(output.shape[:2], dtype=torch.bool, device=output.device) if valid is None else valid
        return filter_output(self.time_filter, state, output, real, self.output)

    def _count(self, net: Backbone) -> int | None:
        return self.classes if self.classes is not None else net.classes


@torch.no_grad()
def filter_output(
    rule: TimeFilter, state: Any, output: Tensor, valid: Tensor, kind: Literal["logits", "probabilities"]
) -> tuple[Tensor, Any]:
    """Filter what a method returned, (S, B, K): the same kind comes back, and the next state of the filter."""
    probabilities = kind == "probabilities"
    logits = output.clamp_min(torch.finfo(torch.float32).tiny).log() if probabilities else output
    filtered = rule.step(state, logits, valid)
    answer = (filtered.logits.exp() if probabilities else filtered.logits).to(output.dtype)
    return torch.where(filtered.used.unsqueeze(-1), answer, output), filtered.state


def timed(method: type[Method], rule: type[TimeFilter]) -> type[Method]:
    """The class of a method with a filter: its fields are those of both."""
    return compose(Timed, method, rule)


def with_filter(method: Method, rule: TimeFilter) -> Method:
    """A method that is built already, with a filter."""
    if isinstance(method, Timed):
        raise ValueError(f"{method.name} has a time filter already")
    return Timed.around(method, rule)
