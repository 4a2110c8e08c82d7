"""Prepare a network: choose the method, play it over corrupted images, and keep what was learned in one file."""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.clock import seconds, time_in_turns, warm_up
from tribe.core.state import count_bytes, hash_tensors
from tribe.core.validation import warn
from tribe.fields import require
from tribe.health.calibration import (
    Calibration,
    calibrate_played,
    check_images,
    check_labels,
    doubt_labels,
    fit_temperature,
)
from tribe.health.fitting import Labelled
from tribe.health.guard import Guard
from tribe.health.playing import (
    MIXED,
    ORDERS,
    STRETCH,
    Condition,
    Lengths,
    Player,
    Progress,
    choose_conditions,
    corrupt_images,
)
from tribe.health.prepared import Card, CardRow, Cost, Inputs, Prepared, describe, mean_errors
from tribe.health.probe import source_logits
from tribe.io import tensors as tensor_file
from tribe.methods import AnyMethod, Pipeline, get_fields
from tribe.methods.building import build_method
from tribe.methods.encoding import method_from_file
from tribe.streams.budget import Budget, measure

TIMES, IMAGES = 200, 500  # a preparation takes at most so many passes over so many images ...
MOST_SECONDS = 300.0  # ... and at most so long, on a large network
QUICK = 4  # a quick one takes this part of it
LEAST_STRETCH, LEAST_MIXED = 125, 32  # images of each condition, however slow the network is
BATCHES = (64, 1)  # sizes of batches whose cost is measured
ROUNDS, BLOCK = 5, 0.02  # of a measurement of costs; seconds of a timing
NEARLY = 1.1  # a budget is kept to so much: two measurements differ by as much
FIT = 0.3  # seconds that the fit of a calibration takes, whatever the network
EVERY = 15.0  # seconds between two writes of what was done

PART = tensor_file.Kind(
    "tribe-preparing",
    1,
    {"key": str, "method": str, "fields": dict, "lengths": [int], "notes": [str]},
    noun="file of an unfinished preparation",
    advice="Delete it to begin anew",
)


class Begun(NamedTuple):
    """The decisions before the images are played."""

    method: AnyMethod
    lengths: Lengths
    notes: list[str]


@torch.inference_mode(False)
def prepare(
    model: nn.Module | Backbone,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    path: str | PathLike[str] | None = None,
    class_names: Sequence[str] = (),
    method: str | AnyMethod | None = None,
    budget: float | None = 1.5,
    time: str | None = "time-checked",
    corruptions: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    origin: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Prepare a trained network for deployment, from clean images that it was not trained on.

    It takes at most as long as 200 passes over 500 images, and five minutes; more where so few images of each
    corruption would say nothing.

    Args:
        model: the classifier, as for `tribe.adapt`.
        images: (N, C, H, W) in [0, 1], or bytes; at least 200, better 1,000.
        labels: (N,) class numbers. Without them the file holds no calibration, and its card compares with what the
            network predicts of the clean images.
        path: where to write the file, such as "net.tribe". What is done is kept in "net.tribe.part" meanwhile: the same
            call goes on after it was stopped.
        class_names: the names of the classes, in the order of the network's outputs.
        method: how it adapts. None: "bank-tribe" if the budget allows a learning step now and then, else "bank"; on a
            network without BatchNorm "source", with the time filter alone.
        budget: the most that a batch may cost on average, as a multiple of plain inference on this machine.
        time: the time filter; None: images stand alone.
        corruptions: names of the corruptions to play; None: all of the family.
        quick: take a quarter of the time: fewer images of each corruption.
        seed: of the order of images and of the corruptions.
        origin: names of the network and of the data, for commands that build it again.
        progress: called after every batch, with how many are done and how many there are.
    """
    start = monotonic()
    net = model if isinstance(model, Backbone) else Backbone(model)
    if isinstance(images, Tensor) and images.dtype == torch.uint8:
        images = images.float() / 255
    known = labels is not None
    images, labels = check_images(images, labels if labels is not None else torch.zeros(len(images), dtype=torch.int64))
    logits = source_logits(net, images)
    names = tuple(map(str, class_names))
    require(len(names) in (0, logits.shape[-1]), f"class_names are the names of {logits.shape[-1]} classes", len(names))
    if known:
        check_labels(logits, labels)
    else:
        labels = logits.argmax(-1)
    conditions = choose_conditions(images.shape[1:], corruptions)
    asked = [method if isinstance(method, str | None) else describe(method), budget, time, conditions, quick, seed]
    part = None if path is None else Part(path, net, images, labels, asked)
    found = None if part is None else part.read()
    begun = _begin(net, images, method, budget, time, conditions, quick, start) if found is None else found[0]
    player = Player(
        net,
        begun.method,
        images,
        labels,
        conditions,
        fit_temperature(logits, labels) if known else 1.0,
        seed,
        begun.lengths,
    )
    if found is not None:
        player.restore(found[1])
    streams = player.run(progress, lambda: None if part is None else part.write(begun, player))
    calibration = calibrate_played(player, streams, logits) if known else None
    doubts = doubt_labels(logits, labels, names) if known else []
    prepared = Prepared(
        net.fingerprint(exact=False),
        **describe(begun.method),
        calibration=calibration,
        inputs=describe_inputs(images),
        card=_card(player, streams, calibration, [*doubts, *begun.notes], budget if method is None else None),
        class_names=names,
        origin=dict(origin or {}),
    )
    if part is not None:
        prepared.save(part.target)
        part.path.unlink(missing_ok=True)
    return prepared


def _begin(
    net: Backbone,
    images: Tensor,
    method: str | AnyMethod | None,
    budget: float | None,
    time: str | None,
    conditions: Sequence[Condition],
    quick: bool,
    start: float,
) -> Begun:
    built, notes = choose(net, images, method, Budget.of(budget), time)
    return Begun(built, choose_lengths(net, built, images, conditions, quick, start), notes)


def choose(
    net: Backbone, images: Tensor, method: str | AnyMethod | None, limit: Budget | None, time: str | None
) -> tuple[AnyMethod, list[str]]:
    """Return how the network adapts: a method, as often as a budget allows, a guard and a time filter; and notes."""
    if method is not None:
        return _guarded(net, images, method, time), []
    if not net.has_statistics:
        words = "the network has no BatchNorm: it does not adapt, and only the time filter uses the stream"
        return _guarded(net, images, "source", time), [words]
    learner, bank = (_guarded(net, images, name, time) for name in ("bank-tribe", "bank"))
    if limit is None:
        return learner, []
    x = images[: BATCHES[0]].unsqueeze(0).to(net.device)
    learner = limit.prepare(net, learner, {})
    costs = measure(net, learner, learner.init(net), x, None)
    words = f"a budget of {limit.times:g} leaves no time to learn: it follows the images in one pass"
    if costs is None or limit.times < costs.rest / costs.plain:
        return bank, [words]
    resolved = limit.resolve(learner, costs)
    return (resolved, []) if get_fields(resolved)["learn_every"] else (bank, [words])


def _guarded(net: Backbone, images: Tensor, method: str | AnyMethod, time: str | None) -> AnyMethod:
    """Return a method with a guard, which is fitted where it leans on the source, and a time filter."""
    whole = Pipeline.of(build_method(net, method, None, None, {}))
    if whole.guard is not None or whole.filter is not None:
        return whole
    inner = whole.method
    leans = net.has_statistics and inner.does_not_adapt is None and inner.followed(inner.init(net)) is None
    return build_method(net, whole, time, None, {}, Guard.fitted(net, images, inner) if leans else Guard())


def choose_lengths(
    net: Backbone, method: AnyMethod, images: Tensor, conditions: Sequence[Condition], quick: bool, start: float
) -> Lengths:
    """Return how many images of each condition are played, so that all takes at most the promised time.

    What was done since the ``start`` counts (the fit of the guard, the choice of the method), and what follows: the fit
    of the calibration, the measurement of costs.
    """
    some = images[: BATCHES[0]]
    x = some.unsqueeze(0).to(net.device)
    state = method.init(net)
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: source_logits(net, some),
        "step": lambda: method.step(net, state, x),
        "corrupt": lambda: corrupt_images(images, torch.arange(len(conditions)) % len(images), conditions, 0),
    }
    for call in calls.values():
        warm_up(call, net.device, 1)
    plain, step, corrupt = (seconds(call, 2, net.device) for call in calls.values())
    later = FIT + len(BATCHES) * (_rounds(method) + 3) * sum(max(BLOCK, t) for t in (plain, step * _period(method)))
    plain, step, corrupt = plain / len(some), step / len(some), corrupt / len(conditions)
    whole = min(TIMES * IMAGES * plain, MOST_SECONDS) / (QUICK if quick else 1)
    left = whole - later - (monotonic() - start)
    each = left / (step + 1.25 * plain + corrupt) / len(conditions)  # images of a condition, in all streams
    share = max(min(each / (MIXED + (len(ORDERS) - 1) * STRETCH), 1.0), 0.0)
    return Lengths(max(int(share * STRETCH), LEAST_STRETCH), max(int(share * MIXED), LEAST_MIXED))


def measure_rows(player: Player, streams: Sequence[Labelled]) -> tuple[CardRow, ...]:
    """Return the errors of source and method under each corruption, over all streams."""
    condition, right, source = (
        torch.cat([getattr(stream, name) for stream in streams]) for name in ("condition", "right", "source_right")
    )
    rows = []
    for number, name in enumerate(player.names):
        here = condition == number
        errors = (float(1 - t[here].double().mean()) for t in (source, right))
        rows.append(CardRow(name, int(here.sum()), *errors))
    return tuple(rows)


def measure_costs(net: Backbone, method: AnyMethod, images: Tensor) -> tuple[Cost, ...]:
    """Return the milliseconds of an image, plain and adapting, in batches of each of `BATCHES`."""
    costs = []
    for batch in BATCHES:
        x = images[:batch].to(net.device)
        state, model = method.init(net), net.plain(*net.source())

        def step(x: Tensor = x) -> None:
            nonlocal state
            _, state = method.step(net, state, x.unsqueeze(0))

        calls: dict[str, Callable[[], object]] = {"plain": torch.no_grad()(lambda x=x, m=model: m(x)), "adapting": step}
        for call in calls.values():
            warm_up(call, net.device, 2)
        times = time_in_turns(calls, _rounds(method), net.device, block=BLOCK, periods={"adapting": _period(method)})
        plain, adapting = (1000 * median(times[name]) / batch for name in calls)
        costs.append(Cost(batch, plain, adapting))
    return tuple(costs)


def _period(method: AnyMethod) -> int:
    """Return after how many batches the cost of a batch repeats."""
    return min(getattr(Pipeline.of(method).method, "learn_every", 1) or 1, 64)


def _rounds(method: AnyMethod) -> int:
    """Return how often costs are measured: a long period is an average already."""
    return ROUNDS if _period(method) < 2 * ROUNDS else 2


def describe_inputs(images: Tensor) -> Inputs:
    """Return what images look like."""
    mean, std = (getattr(images.double(), name)((0, 2, 3)).tolist() for name in ("mean", "std"))
    return Inputs(tuple(images.shape[1:]), float(images.min()), float(images.max()), tuple(mean), tuple(std))


def _card(
    player: Player,
    streams: Sequence[Labelled],
    calibration: Calibration | None,
    notes: Sequence[str],
    budget: float | None,
) -> Card:
    net, rows = player.net, measure_rows(player, streams)
    costs = measure_costs(net, player.method, player.images)
    return Card(
        rows=rows,
        costs=costs,
        state_bytes=count_bytes(player.method.init(net)),
        labelled=calibration is not None,
        source_accuracy=None if calibration is None else calibration.accuracy,
        estimate_error=None if calibration is None else calibration.estimator.unseen,
        machine="a GPU" if net.device.type != "cpu" else f"{platform.machine()} with {torch.get_num_threads()} threads",
        notes=(*notes, *_dear(costs, budget), *_doubts(rows)),
    )


def _dear(costs: Sequence[Cost], budget: float | None) -> list[str]:
    """Return in which batches the budget does not hold."""
    if budget is None:
        return []
    ratios = {cost.batch: cost.adapting / cost.plain for cost in costs}
    if over := [f"{ratio:.1f} x in batches of {batch}" for batch, ratio in ratios.items() if ratio > NEARLY * budget]:
        words = f"it is measured in batches of {BATCHES[0]}, and the smaller batch and network are, the more each costs"
        return [f"more than the budget of {budget:g}: {', '.join(over)}; {words}"]
    return []


def _doubts(rows: Sequence[CardRow]) -> list[str]:
    """Return what speaks against adapting."""
    source, adapting = mean_errors(rows)
    if adapting > source:
        return ["adapting does not help this network under these corruptions: begin in shadow mode, shadow=True"]
    return []


# -- stop and go on ----------------------------------------------------------------------------------------------------


class Part:
    """The file of an unfinished preparation, written every few seconds; one of other images or settings is ignored."""

    def __init__(
        self, path: str | PathLike[str], net: Backbone, images: Tensor, labels: Tensor, asked: Sequence[Any]
    ) -> None:
        self.target, self.path = Path(path), Path(f"{fspath(path)}.part")
        self._next = monotonic() + EVERY
        parts = [net.fingerprint(), hash_tensors({"images": images, "labels": labels}), *asked]
        self._key = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    def read(self) -> tuple[Begun, dict[str, Tensor]] | None:
        """Return what was decided and what was done; None if there is nothing to go on from."""
        if not self.path.is_file():
            return None
        try:
            header, tensors = tensor_file.read(self.path, PART)
            if header["key"] != self._key:
                return None
            method = method_from_file(self.path, header["method"], header["fields"], {})
            return Begun(method, Lengths(*header["lengths"]), header["notes"]), tensors
        except ValueError as error:
            warn(f"the preparation begins anew: {error}")
            return None

    def write(self, begun: Begun, player: Player) -> None:
        """Write what is done, if it is time."""
        if monotonic() >= self._next:
            header = {"key": self._key, **describe(begun.method), "lengths": list(begun.lengths), "notes": begun.notes}
            tensor_file.write(self.path, PART, header, player.save())
            self._next = monotonic() + EVERY
