"""The streams that calibration plays: labelled source images, clean and corrupted, in several orders.

A `Plan` says which image comes when, and under which condition; it depends on labels alone. There is one plan for each
of `ORDERS`. One stream mixes all conditions, in the others one condition follows another; classes come in random order,
or in bursts with rare classes. So the windows that an estimator is fitted to are like those that it will meet.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.data import corruptions as corrupting
from tribe.data import scenarios
from tribe.registry import nearest

ORDERS = ("iid", "continual", "ptta")  # scenarios: conditions mixed, one after another, and with bursts of classes
STRETCH = 512  # images of one condition after another: a method is better at the end of a stretch than at its beginning
MIXED = 128  # images of each condition where all are mixed: there are no stretches
LEAST_CORRUPTIONS = 3
IMBALANCE = 100.0  # the most images of a class over the fewest, in the stream with bursts
SEVERITIES = {"mnist": (5,)}  # MNIST-C has a single strength
USUAL_SEVERITIES = (3, 5)

Condition = tuple[str, int]  # a corruption and a severity; ("clean", 0)


class Plan(NamedTuple):
    """One stream of N images."""

    order: str  # the name of the scenario
    condition: Tensor  # (N,) int64, the place in the list of conditions
    number: Tensor  # (N,) int64, the place among the labelled images


def choose_conditions(shape: Sequence[int], names: Sequence[str] | None) -> list[Condition]:
    """The corruptions and severities that are played, for images (C, H, W); None: all corruptions of their family."""
    family = corrupting.family_for(shape)
    known = corrupting.names(family)
    chosen = tuple(known) if names is None else tuple(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"unknown corruption {name!r} of family {family!r}: {nearest(name, known)}")
    if len(set(chosen)) < LEAST_CORRUPTIONS:
        raise ValueError(
            f"corruptions are {len(set(chosen))} different names; expected at least {LEAST_CORRUPTIONS}, so that the "
            "error on one that is left out can be measured"
        )
    severities = SEVERITIES.get(family, USUAL_SEVERITIES)
    return [("clean", 0), *((name, severity) for name in dict.fromkeys(chosen) for severity in severities)]


def plan_streams(labels: Tensor, conditions: Sequence[Condition], seed: int) -> list[Plan]:
    """A plan for each of `ORDERS`."""
    return [_plan(labels, conditions, order, seed) for order in ORDERS]


def side_by_side(plans: Sequence[Plan]) -> list[list[Plan]]:
    """The plans in groups of equal length: a method plays the streams of a group in one call."""
    lengths = dict.fromkeys(len(plan.number) for plan in plans)
    return [[plan for plan in plans if len(plan.number) == length] for length in lengths]


def _plan(labels: Tensor, conditions: Sequence[Condition], order: str, seed: int) -> Plan:
    """In bursts, each condition has its own frequent classes: a long tail of imbalance 1 to 100, with replacement."""
    draw = torch.Generator().manual_seed(seed)
    count = min(MIXED if order == "iid" else STRETCH, len(labels))
    present, class_number = labels.unique(return_inverse=True)
    chosen = []
    for _ in conditions:
        if order != "ptta":
            chosen.append(torch.randperm(len(labels), generator=draw)[:count])
            continue
        rank = torch.randperm(len(present), generator=draw) / max(len(present) - 1, 1)
        share = IMBALANCE ** -(rank * torch.rand(1, generator=draw)) / class_number.bincount()
        chosen.append(torch.multinomial(share[class_number], count, replacement=True, generator=draw))
    names = [f"{name}@{severity}" for name, severity in conditions]
    whole = scenarios.create(order, order="random").on(names).schedule([labels[i] for i in chosen], seed)
    return Plan(order, whole.domain, torch.stack(chosen)[whole.domain, whole.index])


def corrupt_images(images: Tensor, number: Tensor, conditions: Sequence[Condition], seed: int) -> Tensor:
    """Images by their numbers (N,), each under its condition."""
    x = images[number]
    for name, severity in set(conditions):
        if severity:
            here = torch.tensor([condition == (name, severity) for condition in conditions])
            x[here] = corrupting.apply(x[here], name, severity, seed=seed, index=number[here])
    return x
