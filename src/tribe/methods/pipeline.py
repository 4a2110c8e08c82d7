"""A method that may learn rarely, with a guard over it and a time filter after it, used like a method alone.

    Pipeline(Tribe(classes=10), guard=tribe.Guard(), filter=Markov())     # the name of it is "tribe+guard+time"

`Rare` decides which batches the method learns from: see `tribe.methods.rare`. The guard decides what it may learn from
and limits its steps: see `tribe.health.guard`. The filter changes the predictions and never what the method learns: see
`tribe.filters`.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.moments import accumulation_dtype
from tribe.core.rng import Key
from tribe.core.rules import Frozen, PerBatch
from tribe.core.state import Info
from tribe.core.validation import wrong_count
from tribe.filters import TimeFilter
from tribe.methods.method import Deployed, Method
from tribe.methods.rare import Rare
from tribe.registry import Registry

guards: Registry[Any] = Registry("guard", home="tribe.health.guard")  # it registers "guard" and "watch"


class EmptyState(NamedTuple):
    """The state of a part that a pipeline does not have."""


class PipelineState(NamedTuple):
    """The states of the three parts."""

    method: Any
    guard: Any  # `EmptyState` without a guard
    filter: Any  # `EmptyState` without a filter

    @property
    def key(self) -> Key:
        """The method's seeds and clocks."""
        key: Key = self.method.key
        return key

    @property
    def info(self) -> Info:
        """The method's report, of its own predictions before the filter."""
        info: Info = self.method.info
        return info


def _of_the_method(name: str) -> Any:
    """Return a property that reads an attribute of the pipeline's method; see `Method`."""
    return property(lambda pipeline: getattr(pipeline.method, name))


@dataclass(frozen=True)
class Pipeline:
    """A method, a guard over it and a time filter after it, and how rarely it learns; all but the first may be None."""

    method: Method
    guard: Any = None  # a `tribe.health.Guard`, or a `tribe.health.Watch`, which only watches
    filter: TimeFilter | None = None
    rare: Rare | None = None  # None: it learns from every batch

    dense = False  # a guard and a filter need logits

    def __post_init__(self) -> None:
        if isinstance(self.method, Pipeline):
            raise ValueError(f"{self.method.name} is a pipeline already; expected a method alone")
        if self.rare is not None:
            self.rare.check(self.method)
        owners: dict[str, Any] = {}
        for part in self.parts:
            for field in dataclasses.fields(part):
                if field.name in owners:
                    raise TypeError(
                        f"{owners[field.name].name} and {part.name!r} both have a field {field.name!r}: rename the one "
                        f"of {type(self.method).__name__}"
                    )
                owners[field.name] = part

    @classmethod
    def of(cls, method: "Method | Pipeline") -> "Pipeline":
        """Return a pipeline as it is, and a method as a pipeline of itself alone."""
        return method if isinstance(method, Pipeline) else cls(method)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The method, and what there is of the others, in the order of the name."""
        return tuple(part for part in (self.method, self.rare, self.guard, self.filter) if part is not None)

    @property
    def name(self) -> str:
        """The names of the parts, joined by a plus."""
        return "+".join(part.name for part in self.parts)

    @property
    def answers_by(self) -> str:
        """The names of the parts that its answers depend on: all but what only watches."""
        return "+".join(part.name for part in self.parts if part is not self.guard or part.acts)

    @property
    def unfiltered(self) -> "AnyMethod":
        """The pipeline without its filter; the method itself if it is alone then."""
        alone = self.guard is None and self.rare is None
        return self.method if alone else dataclasses.replace(self, filter=None)

    # -- what it has from the method -------------------------------------------------------------------------------

    classes = _of_the_method("classes")
    needs = _of_the_method("needs")
    works_on = _of_the_method("works_on")
    not_savable_because = _of_the_method("not_savable_because")
    does_not_adapt = _of_the_method("does_not_adapt")
    study = _of_the_method("study")

    @property
    def capture(self) -> Literal["whole", "segments", "never"]:
        """The method's kind of capture; never if it learns rarely, because the host decides whether it does."""
        return self.method.capture if self.rare is None else "never"

    @property
    def augment(self) -> Any:
        """The method's augmentation; None without one."""
        return getattr(self.method, "augment", None)

    @property
    def not_exportable_because(self) -> str | None:
        """The reason why a pass of `deployed` does not predict what `predict` does; None: it does."""
        return self.method.not_exportable_because if self.filter is None else "filters its predictions over time"

    # -- steps -----------------------------------------------------------------------------------------------------

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> PipelineState:
        """Return the states of the parts before the first image."""
        state = self.method.init(net, streams, seed)
        if self.guard is not None:
            self.guard.check_calibration(self.answers_by)
        guard = EmptyState() if self.guard is None else self.guard.init(net, self.method, state)
        if self.filter is None:
            return PipelineState(state, guard, EmptyState())
        classes = self._count(net)
        if classes is None:
            raise ValueError(
                "a time filter needs the number of classes, which cannot be read from the network: classes="
            )
        source = net.source()[0].weight
        like = source.new_empty(0, dtype=accumulation_dtype(source.dtype))
        return PipelineState(state, guard, self.filter.init(streams, classes, like))

    def step(
        self,
        net: Backbone,
        state: PipelineState,
        x: Tensor,
        valid: Tensor | None = None,
        retired: PipelineState | None = None,
    ) -> tuple[Tensor, PipelineState]:
        """Take the method's step, if it is time, under the guard, then filter its predictions."""
        spare = None if retired is None else retired.method
        if self.guard is not None:
            given = state.method, state.guard, x, valid, spare
            deliver = partial(self.filter_output, net, state.filter, valid=valid)
            answer, *after = self.guard.step(net, self.method, *given, rare=self.rare, deliver=deliver)
            return answer, PipelineState(*after)
        step = self.method.step if self.rare is None else partial(self.rare.step, self.method)
        output, method = step(net, state.method, x, valid, spare)
        answer, filtered = self.filter_output(net, state.filter, output, valid)
        return answer, PipelineState(method, state.guard, filtered)

    def predict(self, net: Backbone, state: PipelineState, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict as the next step would; the state, and with it the filter's, stays as it is."""
        return self.predict_and_advance(net, state, x, valid)[0]

    def predict_and_advance(
        self, net: Backbone, state: PipelineState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, PipelineState]:
        """Predict without adapting the network; the filter's state moves on."""
        output = self.method.predict(net, state.method, x, valid, deploy=self.deploy)
        answer, after = self.filter_output(net, state.filter, output, valid)
        return answer, state._replace(filter=after)

    def deployed(self, net: Backbone, state: PipelineState) -> Deployed:
        """Return the network that predicts."""
        return self.deploy(net, state.method)

    def deploy(self, net: Backbone, state: Any) -> Deployed:
        """Return the network that predicts, for a state of the method: under a guard, it leans on the source."""
        if self.guard is None:
            return self.method.deployed(net, state)
        leaning: Deployed = self.guard.lean(net, self.method, state)
        return leaning

    def filter_output(self, net: Backbone, state: Any, output: Tensor, valid: Tensor | None) -> tuple[Tensor, Any]:
        """Filter what the method returned, (S, B, K), with a state of the filter: answers, and its next state."""
        if self.filter is None:
            return output, state
        if output.shape[-1] != (classes := self._count(net)):
            raise wrong_count(output, classes, net.classifier)  # a filter would fail with the sizes of its tensors
        real = torch.ones(output.shape[:2], dtype=torch.bool, device=output.device) if valid is None else valid
        return filter_logits(self.filter, state, output, real)

    def _count(self, net: Backbone) -> int | None:
        return self.method.classes if self.method.classes is not None else net.classes


AnyMethod = Method | Pipeline


@torch.no_grad()
def filter_logits(rule: TimeFilter, state: Any, logits: Tensor, valid: Tensor) -> tuple[Tensor, Any]:
    """Filter a method's logits (S, B, K): log-probabilities where the filter answers, and its next state."""
    filtered = rule.step(state, logits, valid)
    return torch.where(filtered.used.unsqueeze(-1), filtered.logits.to(logits.dtype), logits), filtered.state


NOT_EXPORTED = (
    "{0} cannot be exported as an ordinary module that predicts what it predicts, because {0} {1}. Keep the adapter in "
    "its place: freeze() stops it from adapting, save() and tribe.load() carry it elsewhere"
)


def plain_network(net: Backbone, method: AnyMethod, state: Any, stream: int) -> nn.Module:
    """Return a module with ordinary normalisation layers that predicts for one stream as the method does."""
    if (more := method.not_exportable_because) is not None:
        raise ValueError(NOT_EXPORTED.format(method.name, f"predicts with more than a pass of a network: {more}"))
    chosen = method.deployed(net, state).stream(stream)
    if type(chosen.norm) not in (Frozen, PerBatch):  # a subclass is another rule
        raise ValueError(NOT_EXPORTED.format(method.name, f"normalises as no ordinary layer does: {chosen.norm}"))
    frozen = chosen.stats if isinstance(chosen.norm, Frozen) else None
    return net.plain(chosen.affine, frozen, chosen.weights[0] if chosen.weights else None)


def with_fields(method: AnyMethod, **fields: Any) -> AnyMethod:
    """Return a copy with other values of some fields; a pipeline gives each to the part that has it."""
    if not isinstance(method, Pipeline):
        return dataclasses.replace(method, **fields)
    changed = {}
    for place in ("method", "rare", "guard", "filter"):
        part = getattr(method, place)
        own = set() if part is None else {field.name for field in dataclasses.fields(part)}
        mine = {name: fields.pop(name) for name in own & fields.keys()}
        changed[place] = dataclasses.replace(part, **mine) if mine else part
    if fields:
        raise TypeError(f"{method.name} has no field {next(iter(fields))!r}")
    return Pipeline(**changed)


def get_fields(component: Any) -> dict[str, Any]:
    """Return the values of all fields, by name: those of a component, or of all parts of a pipeline."""
    parts = component.parts if isinstance(component, Pipeline) else (component,)
    return {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
