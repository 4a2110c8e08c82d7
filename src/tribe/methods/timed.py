"""Any method with a time filter after it: its predictions pass through the filter; what it learns stays the same.

``tribe+time`` names TRIBE with the Markov filter of `tribe.time.markov`. The filter never feeds what the method learns:
see docs/time.md for what happens if it does.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.moments import wide
from tribe.engine.rng import Key
from tribe.engine.state import Info
from tribe.knowledge import Knowledge
from tribe.methods.method import Deployed, Method
from tribe.time import FilterInfo, TimeFilter

SHARED = (  # what a method with a filter has in common with the method alone
    "output", "per_class", "presets", "small", "variants", "eager_only", "in_segments", "needs", "works_on",
    "does_not_adapt",
)  # fmt: skip


class TimedState(NamedTuple):
    """The state of the method and that of the filter."""

    inner: Any
    time: Any

    @property
    def key(self) -> Key:
        """The method's seeds and clocks."""
        key: Key = self.inner.key
        return key

    @property
    def info(self) -> Info:
        """The method's report: of its own predictions, before the filter."""
        info: Info = self.inner.info
        return info


@dataclass(frozen=True)
class Timed(Method):
    """A method and a filter. `timed` makes a subclass for each pair, with the fields of both."""

    inner_class: ClassVar[Any]  # set by `timed`
    filter_class: ClassVar[Any]
    more_than_a_pass = "filters its predictions over time"

    def __post_init__(self) -> None:
        inner, rule = (
            cls(**{field.name: getattr(self, field.name) for field in dataclasses.fields(cls)})
            for cls in (self.inner_class, self.filter_class)
        )
        for part in (inner, rule):  # a field that was None, or given by path, has its value now
            for field in dataclasses.fields(part):
                object.__setattr__(self, field.name, getattr(part, field.name))
        object.__setattr__(self, "_parts", (inner, rule))

    @property
    def inner(self) -> Method:
        """The method alone."""
        method: Method = self._parts[0]  # type: ignore[attr-defined]
        return method

    @property
    def time_filter(self) -> TimeFilter:
        """The filter alone."""
        rule: TimeFilter = self._parts[1]  # type: ignore[attr-defined]
        return rule

    def study(self, net: Backbone, batches: Any) -> Knowledge:
        """As the method alone."""
        return self.inner.study(net, batches)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> TimedState:
        """The first states of the method and of the filter."""
        classes = self.classes if self.classes is not None else net.classes
        if classes is None:
            raise ValueError(
                "a time filter needs the number of classes, which cannot be read from the network: classes="
            )
        source = net.source()[0].weight
        like = source.new_empty(0, dtype=wide(source.dtype))
        return TimedState(self.inner.init(net, streams, seed), self.time_filter.init(streams, classes, like))

    def step(
        self, net: Backbone, state: TimedState, x: Tensor, valid: Tensor | None = None, retired: Any = None
    ) -> tuple[Tensor, TimedState]:
        """Take the method's step, then filter its predictions."""
        output, inner = self.inner.step_reusing(net, state.inner, x, valid, retired and retired.inner)
        answer, after = self._filter(state.time, output, valid)
        return answer, TimedState(inner, after)

    def deployed(self, net: Backbone, state: TimedState) -> Deployed:
        """The network of the method alone."""
        return self.inner.deployed(net, state.inner)

    def predict(self, net: Backbone, state: TimedState, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict as the next step would; the state, and with it the belief in the current class, stays as it is."""
        return self.follow(net, state, x, valid)[0]

    def follow(
        self, net: Backbone, state: TimedState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, TimedState]:
        """Predict without adapting the network; the filter goes on."""
        answer, after = self._filter(state.time, self.inner.predict(net, state.inner, x, valid), valid)
        return answer, state._replace(time=after)

    def filter_info(self, state: TimedState) -> list[FilterInfo] | None:
        """What the filter does for each stream."""
        return self.time_filter.info(state.time)

    def _filter(self, state: Any, output: Tensor, valid: Tensor | None) -> tuple[Tensor, Any]:
        real = torch.ones(output.shape[:2], dtype=torch.bool, device=output.device) if valid is None else valid
        return filter_output(self.time_filter, state, output, real, self.output)


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


@functools.cache
def timed(method: type[Method], rule: type[TimeFilter]) -> type[Method]:
    """The class of a method with a filter: its fields are those of both."""
    own, added = ([*dataclasses.fields(cls)] for cls in (method, rule))
    if taken := {field.name for field in (*own, *added)} & {"inner", "time_filter"}:
        raise TypeError(f"{method.name} with the time filter {rule.name!r} has a field {sorted(taken)[0]!r}: rename it")
    if both := {field.name for field in own} & {field.name for field in added}:
        raise TypeError(
            f"{method.name} and the time filter {rule.name!r} both have a field {sorted(both)[0]!r}: rename the one of "
            f"{method.__name__}"
        )

    shared = {name: getattr(method, name) for name in SHARED}
    # A custom method's file counts among the code that a result depends on: see tribe.lab.provenance.
    names = {"__module__": method.__module__, "__doc__": f"{_summary(method)} Then: {_summary(rule)}"}
    names |= {"name": f"{method.name}+{rule.name}", "paper": f"{method.paper}; {rule.paper}"}
    fields = [(field.name, field.type, _copy(field)) for field in (*own, *added)]
    cls: type[Method] = dataclasses.make_dataclass(
        f"{method.__name__}{rule.__name__}",
        fields,
        bases=(Timed,),
        namespace={**shared, **names, "inner_class": method, "filter_class": rule},
        frozen=True,
    )
    cls.reuses_memory = method.reuses_memory  # step has the argument for every method
    return cls


def with_filter(method: Method, rule: TimeFilter) -> Method:
    """A method that is built already, with a filter."""
    if isinstance(method, Timed):
        raise ValueError(f"{method.name} has a time filter already")
    fields = {field.name: getattr(part, field.name) for part in (method, rule) for field in dataclasses.fields(part)}
    return timed(type(method), type(rule))(**fields)


def _copy(field: Any) -> Any:
    """A new dataclass field with the same default: a field belongs to one class."""
    options = {name: getattr(field, name) for name in ("default", "default_factory")}
    return dataclasses.field(**options)


def _summary(component: type[Any]) -> str:
    return (component.__doc__ or component.__name__).strip().partition("\n")[0]
