"""Play a method over labelled images, clean and corrupted, as streams that a calibration learns from.

A plan says which image comes when, and under which condition: all conditions mixed, one for hundreds of images after
another, and the same with bursts of classes, some of which are rare.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import leaves, rebuild
from tribe.health.estimate import Images, per_image_signals
from tribe.health.fitting import Labelled
from tribe.health.probe import BATCH, ask, source_logits, start_shift
from tribe.methods import AnyMethod
from tribe.registry import nearest

PROBE = 4  # one image in so many is also predicted by the source
ORDERS = ("iid", "continual", "ptta")  # scenarios: conditions mixed, one after another, and with bursts of classes
STRETCH = 512  # images of one condition after another: a method is better at the end of a stretch than at its beginning
MIXED = 128  # images of each condition where all are mixed: there are no stretches
LEAST_CORRUPTIONS = 3
IMBALANCE = 100.0  # the most images of a class over the fewest, in the stream with bursts
SEVERITIES = {"mnist": (5,)}  # MNIST-C has a single strength
USUAL_SEVERITIES = (3, 5)

Condition = tuple[str, int]  # a corruption and a severity; ("clean", 0)
Progress = Callable[[int, int], None]  # batches done, of so many


class Plan(NamedTuple):
    """One stream of N images."""

    order: str  # the name of the scenario
    condition: Tensor  # (N,) int64, the place in the list of conditions
    number: Tensor  # (N,) int64, the place among the labelled images


def choose_conditions(shape: Sequence[int], names: Sequence[str] | None) -> list[Condition]:
    """The corruptions and severities that are played, for images (C, H, W); None: all corruptions of their family."""
    from tribe.data import corruptions as corrupting  # not imported with `tribe`: an adapter does not need it

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


class Lengths(NamedTuple):
    """Images of each condition."""

    stretch: int
    mixed: int


def plan_streams(
    labels: Tensor,
    conditions: Sequence[Condition],
    seed: int,
    lengths: Lengths | None = None,
) -> list[Plan]:
    """A plan for each of `ORDERS`."""
    lengths = lengths or Lengths(STRETCH, MIXED)
    return [_plan(labels, conditions, order, seed, lengths) for order in ORDERS]


def side_by_side(plans: Sequence[Plan]) -> list[list[Plan]]:
    """The plans in groups of equal length: a method plays the streams of a group in one call."""
    lengths = dict.fromkeys(len(plan.number) for plan in plans)
    return [[plan for plan in plans if len(plan.number) == length] for length in lengths]


def _plan(labels: Tensor, conditions: Sequence[Condition], order: str, seed: int, lengths: Lengths) -> Plan:
    """In bursts, each condition has its own frequent classes: a long tail of imbalance 1 to 100, with replacement."""
    from tribe.data import scenarios  # not imported with `tribe`

    draw = torch.Generator().manual_seed(seed)
    count = min(lengths.mixed if order == "iid" else lengths.stretch, len(labels))
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
    from tribe.data import corruptions as corrupting  # not imported with `tribe`

    x = images[number]
    for name, severity in set(conditions):
        if severity:
            here = torch.tensor([condition == (name, severity) for condition in conditions])
            x[here] = corrupting.apply(x[here], name, severity, seed=seed, index=number[here])
    return x


class Player:
    """Play a method over one stream of each order; streams of equal length play side by side.

    What it has done is a few tensors, so that it can stop and go on: `save` and `restore`.
    """

    def __init__(
        self,
        net: Backbone,
        method: AnyMethod,
        images: Tensor,
        labels: Tensor,
        conditions: Sequence[Condition],
        temperature: float,
        seed: int,
        lengths: Lengths | None = None,
    ) -> None:
        self.net, self.method, self.images, self.labels = net, method, images, labels
        self.conditions, self.temperature, self.seed = conditions, temperature, seed
        self.names = tuple(dict.fromkeys(name for name, _ in conditions))  # `Labelled.condition` counts them
        self.groups = side_by_side(plan_streams(labels, conditions, seed, lengths))
        self._batches = [math.ceil(len(plans[0].number) / BATCH) for plans in self.groups]
        self.batches, self.done = sum(self._batches), 0
        self._seen: list[list[tuple[Tensor, ...]]] = [[] for _ in self.groups]  # `Images` and who is right, by batch
        self._state: Any = None
        self._shift: Any = None

    def run(self, progress: Progress | None = None, on_batch: Callable[[], object] = lambda: None) -> list[Labelled]:
        """Play what is left, and return all streams."""
        first = 0
        for group, batches in enumerate(self._batches):
            for batch in range(max(self.done - first, 0), batches):
                if not batch:
                    self._begin(group)
                self._seen[group].append(self._step(group, batch))
                self.done += 1
                on_batch()
                if progress is not None:
                    progress(self.done, self.batches)
            first += batches
        return list(self._streams())

    def _begin(self, group: int) -> None:
        streams = len(self.groups[group])
        self._state, self._shift = self.method.init(self.net, streams, self.seed), start_shift(self.net, streams)

    def _step(self, group: int, batch: int) -> tuple[Tensor, ...]:
        net, method, here = self.net, self.method, slice(batch * BATCH, (batch + 1) * BATCH)
        plans = self.groups[group]
        d, i = (
            torch.stack([t[here] for t in column])
            for column in zip(*((p.condition, p.number) for p in plans), strict=True)
        )
        given = [self.conditions[k] for k in d.flatten()]
        x = corrupt_images(self.images, i.flatten(), given, self.seed).unflatten(0, i.shape).to(net.device)
        every = torch.ones_like(d, dtype=torch.bool, device=net.device)
        answers, self._shift = ask(net, self._shift, x, every, PROBE)
        source = source_logits(net, x.flatten(0, 1)).argmax(-1).view_as(d)
        logits, self._state = method.step(net, self._state, x)
        signals = per_image_signals(logits, self.temperature, self._state.info.student_agreement, answers)
        right = logits.argmax(-1).cpu() == self.labels[i]
        return *(t.cpu() for t in signals), right, source == self.labels[i]

    def _streams(self) -> Iterator[Labelled]:
        kind = torch.tensor([self.names.index(name) for name, _ in self.conditions])
        for plans, seen in zip(self.groups, self._seen, strict=True):
            *signals, right, source_right = (torch.cat(column, 1) for column in zip(*seen, strict=True))
            for s, plan in enumerate(plans):
                images = Images(*(t[s] for t in signals))
                yield Labelled(images, right[s], kind[plan.condition], source_right[s])

    # -- to stop and go on -----------------------------------------------------------------------------------------

    def save(self) -> dict[str, Tensor]:
        """Return what it has done, as tensors."""
        held = {"done": torch.tensor(self.done), **leaves(self._state, "state."), **leaves(self._shift, "shift.")}
        for group, seen in enumerate(self._seen):
            columns = enumerate(zip(*seen, strict=True))
            held |= {f"seen.{group}.{place}": torch.cat(column, 1) for place, column in columns}
        return held

    def restore(self, held: Mapping[str, Tensor]) -> None:
        """Go on from what `save` returned for the same arguments."""
        self.done = int(held["done"])
        begun = [group for group in range(len(self.groups)) if f"seen.{group}.0" in held]
        self._begin(begun[-1])
        self._state, self._shift = (
            rebuild(
                like,
                {name.removeprefix(start): t.to(self.net.device) for name, t in held.items() if name.startswith(start)},
            )
            for like, start in ((self._state, "state."), (self._shift, "shift."))
        )
        for group in begun:
            columns = [held[f"seen.{group}.{place}"] for place in range(len(Images._fields) + 2)]
            self._seen[group] = [tuple(columns)]
