"""A budget of compute and a deadline: how rarely a method learns, from what its steps cost on this machine.

A budget resolves once, at the first batch, into the field ``learn_every`` (see `tribe.methods.rare`), or into the field
that a method names in ``rare_field``. A deadline decides before every batch whether there is time to learn from it.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.clock import Call, time_in_turns, wait, warm_up
from tribe.core.state import clone
from tribe.core.validation import warn
from tribe.fields import is_number, is_whole, require
from tribe.methods import AnyMethod, Pipeline, get_fields, with_fields
from tribe.methods.rare import Rare
from tribe.streams.entries import Entry

MOST = 1000  # batches between two learning steps: with fewer steps it hardly learns
ROUNDS = 5  # of a measurement; the median counts
BLOCK = 0.02  # seconds of a timing, at least: a small network takes less than the clock can tell
RECENT = 16  # batches whose times a deadline judges by
TYPICAL = 0.9  # quantile of these times
log = logging.getLogger("tribe.streams")


class StepCosts(NamedTuple):
    """Costs of batches: seconds, or multiples of plain inference of the same images."""

    learn: float  # a batch that the method learns from
    rest: float  # a batch that it only predicts
    plain: float = 1.0  # plain inference


@dataclass(frozen=True)
class Budget:
    """The most that a batch may cost on average, as a multiple of plain inference on this machine.

    ``tribe.adapt(net, budget=1.5)``. With ``costs`` from elsewhere nothing is measured.
    """

    times: float
    costs: StepCosts | tuple[float, float] | None = None  # None: measured at the first batch

    def __post_init__(self) -> None:
        expected = "a budget is a finite multiple of plain inference, at least 1 (budget=1.5); None: no limit"
        require(is_number(self.times) and self.times >= 1, expected, self.times)
        if self.costs is not None:
            costs = StepCosts(*self.costs)
            fine = all(is_number(cost) and cost > 0 for cost in costs)
            require(fine, "costs of a budget are (learn, rest): multiples of plain inference above 0", self.costs)
            object.__setattr__(self, "costs", costs)

    @classmethod
    def of(cls, budget: "float | Budget | None") -> "Budget | None":
        """Return a budget from what a person gives."""
        return budget if isinstance(budget, Budget) or budget is None else cls(budget)

    def prepare(self, net: Backbone, method: AnyMethod, fields: Mapping[str, Any]) -> AnyMethod:
        """Return the method with a field that the budget will set; ``fields`` are those that a person gave."""
        whole = Pipeline.of(method)
        inner, field = whole.method, rare_field(method)
        if inner.does_not_adapt is not None:
            raise ValueError(
                f"a budget says how rarely a method learns, and {inner.name} never learns: {inner.does_not_adapt}. "
                "Leave out budget="
            )
        if field in fields:
            raise ValueError(f"a budget sets {field}: give budget= or {field}=, not both")
        if not net.source()[1].mean.shape[-1]:
            words = "the network has no BatchNorm, so no statistics can follow its images in one pass"
            able = f"tent can learn, rarely, the affine parameters of its {len(net.slots)} other layers"
            if "statistics" in inner.works_on:
                raise ValueError(
                    f"{words}, and {inner.name} learns nothing else. {able}: tribe.adapt(net, 'tent', ...)"
                )
            warn(f"{words}. The budget buys steps of {inner.name} on every n-th batch, and nothing between them")
        if inner.rare_field is None and whole.rare is None:
            method = replace(whole, rare=Rare())
        return with_fields(method, **{field: 1})

    def resolve(self, method: AnyMethod, costs: StepCosts) -> AnyMethod:
        """Return the method that learns as often as the budget allows.

        Raises:
            ValueError: it would never learn, and does nothing else.
        """
        learn, rest = (Fraction(cost) / Fraction(costs.plain) for cost in costs[:2])
        spare, more = Fraction(self.times) - rest, max(learn - rest, Fraction(0))
        found = f"a batch that it learns from takes {float(learn):.2f} x plain inference, another {float(rest):.2f} x"
        if more > spare * MOST:
            if Pipeline.of(method).method.follows_without_learning:
                if spare < 0:
                    warn(f"a budget of {self.times:g} is less than {method.name} needs without learning: {found}")
                return with_fields(method, **{rare_field(method): 0})
            least = math.ceil(100 * (rest + more / MOST)) / 100
            raise ValueError(
                f"a budget of {self.times:g} is too small for {method.name} on this machine: {found}. The smallest is "
                f"{max(least, 1.0):g}, with one learning step in {MOST} batches"
            )
        every = max(1, math.ceil(more / spare)) if more else 1
        log.info("budget %g: %s learns from one batch in %d; %s", self.times, method.name, every, found)
        return with_fields(method, **{rare_field(method): every})


def choose_method(method: str | AnyMethod | None, net: Backbone, budget: float | Budget | None) -> str | AnyMethod:
    """Return the method that a person names, or the one to take without a name."""
    if method is not None:
        return method
    return "bank-tribe" if budget is not None and net.has_statistics else "tribe"


def rare_field(method: AnyMethod) -> str:
    """Return the name of the field that says how rarely a method learns, or would if it learned rarely."""
    return Pipeline.of(method).method.rare_field or "learn_every"


def learns_next(method: AnyMethod, state: Any) -> bool:
    """Return whether a stream of a state learns from the next batch, as far as the stage `Rare` says."""
    return not isinstance(method, Pipeline) or method.rare is None or bool(method.rare.due(state.method).any())


def measure(net: Backbone, method: AnyMethod, state: Any, x: Tensor, valid: Tensor | None) -> StepCosts | None:
    """Return the seconds of batches like this one, taking turns; None if nothing can be learned from it.

    It works on copies: the streams of ``state`` stay where they are.
    """
    often, field = method, rare_field(method)
    fields = get_fields(method)
    if field in fields:
        often, seldom = (with_fields(method, **{field: every}) for every in (1, MOST))
    start = clone(state)
    _, now = often.step(net, start, x, valid)
    if bool((now.key.clock == start.key.clock).all()):
        return None  # a black or broken image
    after, model, flat = now, net.plain(*net.source()), x.flatten(0, 1)

    def learn() -> None:
        nonlocal now
        _, now = often.step(net, now, x, valid)

    def rest() -> None:
        if field in fields:
            seldom.step(net, after, x, valid)
        else:
            method.predict_and_advance(net, after, x, valid)

    calls: dict[str, Call] = {"learn": learn, "rest": rest, "plain": torch.no_grad()(lambda: model(flat))}
    every = fields.get("every") or 1  # images between updates of a method with a memory
    periods = {"learn": every // math.gcd(every, x.shape[1])}
    for call in calls.values():
        warm_up(call, x.device, 1)
    times = time_in_turns(calls, ROUNDS, x.device, block=BLOCK, periods=periods)
    plain = statistics.median(times["plain"])
    ratios = ([own / other for own, other in zip(times[name], times["plain"], strict=True)] for name in calls)
    return StepCosts(*(plain * statistics.median(each) for each in ratios))  # of a round: its speed may change between


class Deadline:
    """A time by which a call must return: it learns only if that is expected to end in time.

    ``costs`` are those of every batch, in seconds; None: measured at the first batch of a shape. ``clock`` returns
    seconds.
    """

    def __init__(
        self, ms: float, *, costs: StepCosts | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        expected = "a deadline is a number of milliseconds above 0 (deadline_ms=20); None: there is none"
        require(is_number(ms) and ms > 0, expected, ms)
        self.ms, self.clock, self._given = float(ms), clock, costs
        self._kinds: dict[Hashable, tuple[float, deque[float]]] = {}  # learn / rest, and the last times of rest
        self._beside: dict[Hashable, float] = {}  # seconds of a call that are neither: those of the source's pass

    @classmethod
    def of(cls, deadline: "float | Deadline | None") -> "Deadline | None":
        """Return a deadline from what a person gives."""
        return deadline if isinstance(deadline, Deadline) or deadline is None else cls(deadline)

    def fits(self, kind: Hashable, find: Callable[[], StepCosts | None]) -> bool:
        """Return whether learning from a batch of this kind ends in time; ``find`` measures the first one."""
        if kind not in self._kinds:
            costs = self._given or find()
            if costs is None:
                return True
            self._kinds[kind] = max(costs.learn / costs.rest, 1.0), deque([costs.rest], RECENT)
        ratio, times = self._kinds[kind]
        typical = sorted(times)[math.ceil(TYPICAL * len(times)) - 1]
        return 1000 * (ratio * typical + self._beside.get(kind, 0.0)) <= self.ms

    def observe(self, kind: Hashable, began: float, learned: bool, device: Any, beside: float = 0.0) -> None:
        """Add the time of a batch, learned from or not: the machine may get slower or faster.

        ``beside`` are the seconds of the source's pass, where it answers.
        """
        if kind in self._kinds:
            wait(device)
            ratio, times = self._kinds[kind]
            times.append((self.clock() - began - beside) / (ratio if learned else 1.0))
            self._beside[kind] = beside


class Began(NamedTuple):
    """A batch with a deadline."""

    deadline: Deadline
    kind: Hashable
    at: float
    learns: bool
    hurries: bool  # it would be learned from, and there is no time

    def seconds(self, device: Any) -> float:
        """Return the time now, after the device has done what it was given."""
        wait(device)
        return self.deadline.clock()

    def end(self, entry: Entry, x: Tensor, valid: Tensor | None, beside: float = 0.0) -> Entry:
        """Note how long it took; return the entry after it, with the images that were not learned from."""
        self.deadline.observe(self.kind, self.at, self.learns, x.device, beside)
        if not self.hurries:
            return entry
        counts = [x.shape[1]] * len(x) if valid is None else valid.sum(1).tolist()
        before = entry.unlearned or [0] * len(x)
        return replace(entry, unlearned=tuple(a + b for a, b in zip(before, counts, strict=True)))


class Pace:
    """The budget, until it is resolved, and the deadline of streams."""

    def __init__(self, budget: Budget | None, deadline: Deadline | None) -> None:
        self.budget, self.deadline = budget, deadline
        self.unresolved: AnyMethod | None = None  # the method before the budget was resolved

    def prepare(self, net: Backbone, method: AnyMethod, fields: Mapping[str, Any]) -> AnyMethod:
        """Return the method with a field that the budget will set, if there is one."""
        return method if self.budget is None else self.budget.prepare(net, method, fields)

    def resolve(self, net: Backbone, method: AnyMethod, state: Any, x: Tensor, valid: Tensor | None) -> AnyMethod:
        """Return the method with what the budget allows; as it is, if these images say nothing about it."""
        if self.budget is None:
            return method
        given = self.budget.costs
        costs = measure(net, method, state, x, valid) if given is None else StepCosts(*given)
        if costs is None:
            return method
        self.budget = replace(self.budget, costs=costs)  # an error is not measured again
        return self.budget.resolve(method, costs)

    def adopt(self, method: AnyMethod, name: str, fields: Mapping[str, Any]) -> AnyMethod:
        """Return the method with what a state file says of its budget, if this one is not resolved yet."""
        field, least = rare_field(method), 0 if Pipeline.of(method).method.follows_without_learning else 1
        if self.budget is None or name != method.name or not is_whole(fields.get(field), least=least):
            return method
        return with_fields(method, **{field: fields[field]})

    def begin(self, net: Backbone, method: AnyMethod, state: Any, x: Tensor, valid: Tensor | None) -> "Began | None":
        """Decide whether there is time to learn from a batch; None without a deadline."""
        if self.deadline is None:
            return None
        learns = learns_next(method, state)
        fits = not learns or self.deadline.fits(x.shape, lambda: measure(net, method, state, x, valid))
        return Began(self.deadline, x.shape, self.deadline.clock(), learns and fits, not fits)

    def check_resolved(self) -> None:
        """Refuse to store a state whose method is not known yet."""
        if self.budget is not None:
            raise ValueError(
                "nothing to save yet: the first batch measures what the budget allows, and the file must say it"
            )
