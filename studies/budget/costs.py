"""Measure what methods cost beside plain inference, once for a network, and keep it beside the results."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from studies.play import BATCH, Bench, write
from tribe.core.backbone import Backbone
from tribe.methods import AnyMethod, Method, get_fields, with_fields
from tribe.streams.budget import Budget, StepCosts, measure, rare_field

REPEATS = 5  # measurements, of which the median counts


class Contestant(NamedTuple):
    """A method to play, and its mean cost."""

    net: Backbone
    method: Method
    every: int  # batches, of which one is learned from; 0: none
    cost: float  # multiples of plain inference


class BudgetTooSmall(ValueError):
    """The method costs more even if it hardly learns."""


class Costs:
    """The costs of the methods of a network, from a file; those that it lacks are measured and added."""

    def __init__(self, path: Path, shared: Mapping[str, Any]) -> None:
        self.path, self.shared = path, shared
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []

    def of(self, name: str, net: Backbone, method: AnyMethod, x: Tensor) -> StepCosts:
        """Return the costs of a method: of a batch that it learns from, and of another."""
        if name not in [row["method"] for row in self.rows]:
            found = _measured(net, method, x)
            row = {"method": name, "learn": found.learn, "rest": found.rest}
            self.rows.append(row | {"cost": round(mean_cost(found, every(method)), 3)})
            write(self.path, self.shared, self.rows)
        return next(StepCosts(row["learn"], row["rest"]) for row in self.rows if row["method"] == name)


def every(method: AnyMethod) -> int:
    """Return of how many batches a method learns from one; 0: from none."""
    number: int = get_fields(method).get(rare_field(method), 1)
    return number


def _measured(net: Backbone, method: AnyMethod, x: Tensor) -> StepCosts:
    """Measure as a budget does, several times: learning from each batch, and from none."""
    times = [measure(net, method, method.init(net), x, None) for _ in range(REPEATS)]
    learn, rest = ([getattr(t, name) / t.plain for t in times if t is not None] for name in ("learn", "rest"))
    return StepCosts(*(round(statistics.median(ratios), 3) for ratios in (learn, rest)))


def images(bench: Bench) -> Tensor:
    """Return a batch of all domains (1, B, C, H, W): the cost of some methods depends on what they see."""
    domains, chosen = bench.data.domains, []
    for i in range(BATCH):
        name = domains[i % len(domains)]
        chosen.append(bench.data.images(name, torch.tensor([i // len(domains) % len(bench.data.labels(name))])))
    return torch.cat(chosen).unsqueeze(0).to(bench.device)


def contestant(bench: Bench, name: str, costs: Costs) -> Contestant:
    """Return a method by its name, as in tent; name and how rarely it learns, bank-tribe:8; or its budget, tent@1.5.

    Raises:
        BudgetTooSmall: the method costs more even if it hardly learns.
    """
    rest, _, times = name.partition("@")
    alone, _, number = rest.partition(":")
    net, built = bench.method(alone)
    method: Any = built
    found = costs.of(alone, net, method, images(bench))
    if times:
        budget = Budget(float(times))
        method = budget.prepare(net, method, {})
        try:
            method = budget.resolve(method, found)
        except ValueError as error:
            raise BudgetTooSmall(str(error)) from error
    elif number:
        method = with_fields(method, **{rare_field(method): int(number)})
    return Contestant(net, method, every(method), round(mean_cost(found, every(method)), 3))


def mean_cost(costs: StepCosts, number: int) -> float:
    """Return the mean cost of a batch where one in so many is learned from; 0: none is.

    >>> mean_cost(StepCosts(learn=5, rest=1), 8)
    1.5
    """
    return costs.rest + (costs.learn - costs.rest) / number if number else costs.rest
