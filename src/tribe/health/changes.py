"""Changes of the layers and classes of an adapted network.

Affine parameters and weights: the norm of the difference, relative to the norm of the older ones. Statistics: each
channel is a normal distribution; the number is the Wasserstein distance of the two, sqrt(dmean^2 + dstd^2), in standard
deviations of the older one, root mean square over channels. 0 means unchanged; 1 is a move by a standard deviation.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.packed import ClassStats
from tribe.core.rules import PerBatch
from tribe.core.state import Stats, rows_of
from tribe.methods import AnyMethod, Deployed
from tribe.methods.places import PlaceMemory

SHOWN = 10  # rows of each table that the text of a comparison shows


class LayerChange(NamedTuple):
    """The change of one layer."""

    name: str  # the name of the layer in the network that was adapted
    affine: float | None  # of scale and shift, relative to the norm of the older ones; None for layers without
    statistics: float | None  # of mean and variance, in standard deviations of the older; None where none are kept
    weights: float | None  # of other weights, relative to their older norm; None for methods that leave them


class ClassChange(NamedTuple):
    """The change of the statistics of one class."""

    number: int  # of the class: its place among the logits
    statistics: float  # in standard deviations of the older, over all that the method keeps for it


class StreamChange(NamedTuple):
    """The change of one stream as a whole; the last three fields are as of `LayerChange`."""

    stream: int
    learned: tuple[int, int]  # how many images it had learned from then, and now
    affine: float | None
    statistics: float | None
    weights: float | None


PARTS = ("affine", "statistics", "weights")


class Comparison(NamedTuple):
    """The changes between an older state and this one; numbers are root mean squares over the streams compared."""

    since: str  # what it was compared with: "the source", or the age of a snapshot
    streams: tuple[StreamChange, ...]  # each stream as a whole
    layers: tuple[LayerChange, ...]  # all layers that can move, those that moved most first
    classes: tuple[ClassChange, ...]  # those that moved most first; empty for methods without statistics of classes

    def __repr__(self) -> str:
        parts = [f"changes since {self.since}"]
        streams = [(f"{s.stream}: {s.learned[0]:,} -> {s.learned[1]:,}", *s[2:]) for s in self.streams]
        parts += _table(("stream: images", *PARTS), streams)
        parts += _table(("layer", *PARTS), self.layers)
        parts += _table(("class", "statistics"), [(str(c.number), c.statistics) for c in self.classes])
        return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """Columns that have a number in some row, and the first rows."""
    columns = [i for i in range(len(header)) if i == 0 or any(row[i] is not None for row in rows)]
    if len(columns) < 2:
        return []
    texts = [[row[0], *("-" if row[i] is None else f"{row[i]:.4f}" for i in columns[1:])] for row in rows[:SHOWN]]
    texts.insert(0, [header[i] for i in columns])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "  ".join([f"{row[0]:{widths[0]}}", *(f"{t:>{w}}" for t, w in zip(row[1:], widths[1:], strict=True))])
        for row in texts
    ]
    return ["", *lines, *([f"... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])]


@torch.no_grad()
def compare_states(
    net: Backbone, method: AnyMethod, old: Any, new: Any, since: str, streams: Sequence[int] | None = None
) -> Comparison:
    """Compare the networks that two states of a method predict with; ``streams``: some of them, None: all."""
    count = len(new.key.seed)
    chosen = list(range(count)) if streams is None else list(streams)
    before, after = method.deployed(net, old), method.deployed(net, new)
    parts = {
        "affine": _affine(net, before, after),
        "statistics": _statistics(net, before, after),
        "weights": _weights(before, after),
    }
    named = {name for found in parts.values() for name in found}
    layers = [
        LayerChange(name, **{part: _over(found.get(name), chosen) for part, found in parts.items()})
        for name, _ in net.model.named_modules(remove_duplicate=False)
        if name in named
    ]
    classes = [ClassChange(i, change) for i, change in enumerate(_classes(net, old, new, chosen))]
    learned = list(zip(old.info.images.tolist(), new.info.images.tolist(), strict=True))
    whole = {part: torch.stack([*found.values()]).sum(0) if found else None for part, found in parts.items()}
    shares = [[None] * count if t is None else _relative(t).tolist() for t in whole.values()]
    each = [StreamChange(i, learned[i], *(share[i] for share in shares)) for i in chosen]
    return Comparison(
        since,
        tuple(each),
        tuple(sorted(layers, key=lambda layer: -max(change or 0.0 for change in layer[1:]))),
        tuple(sorted(classes, key=lambda change: -change.statistics)),
    )


Part = Tensor  # (2, S) squared changes, and what they are relative to


def _relative(part: Part) -> Tensor:
    """(S,): 0 / 0 counts as 0."""
    return (part[0] / part[1].clamp_min(torch.finfo(torch.float32).tiny)).sqrt()


def _over(part: Part | None, chosen: Sequence[int]) -> float | None:
    return None if part is None else float(_relative(part)[chosen].square().mean().sqrt())


def _square(*tensors: Tensor) -> Tensor:
    squares = [t.float().square().flatten(1).sum(1) for t in tensors]
    return torch.stack(squares).sum(0)


def _affine(net: Backbone, old: Deployed, new: Deployed) -> dict[str, Part]:
    widths = [slot.channels for slot in net.slots]
    scale, shift, new_scale, new_shift = (t.split(widths, 1) for t in (*old.affine, *new.affine))
    return {
        slot.name: torch.stack((_square(new_scale[i] - scale[i], new_shift[i] - shift[i]), _square(scale[i], shift[i])))
        for i, slot in enumerate(net.slots)
        if slot.layer.weight is not None
    }


def _statistics(net: Backbone, old: Deployed, new: Deployed) -> dict[str, Part]:
    if isinstance(new.norm, PerBatch):  # those of each batch; none are kept
        return {}
    squares = squared_moves(net, old.stats, new.stats)[:, 0]  # (S, C)
    columns = {slot.name: squares[:, slot.columns] for slot in net.slots}
    return {n: torch.stack((t.sum(1), torch.full_like(t[:, 0], t.shape[1]))) for n, t in columns.items() if t.shape[1]}


def squared_moves(net: Backbone, old: Stats, new: Stats) -> Tensor:
    """The squared distance of each pair of channels in standard deviations of the older, (R, K, C): Wasserstein's."""
    eps = constants(net, old.mean).eps
    std, new_std = (old.var + eps).sqrt(), (new.var + eps).sqrt()
    return ((new.mean - old.mean) / std).square_().add_((new_std / std - 1).square_())


DEPTHS = 3  # parts of a network, by depth: the first, middle and last third of the layers with statistics


def moves_by_depth(net: Backbone, old: Stats, new: Stats) -> Tensor:
    """Return how far statistics (S, 1, C) moved in each part of the network, (S, 3); its layers count the same."""
    squares = squared_moves(net, old, new)[:, 0]
    return (squares.unsqueeze(2) * constants(net, squares).shares).sum(1).sqrt()


class Constants(NamedTuple):
    """Constants of a network's channels, on a device: (C,) each."""

    eps: Tensor
    shares: Tensor  # (C, 3) how much each channel counts in the mean over the layers of each part
    mean: Tensor  # of the source
    std: Tensor  # of the source
    scale: Tensor  # the root of how much a channel of the middle part counts, over its standard deviation


_made: WeakKeyDictionary[Backbone, dict[Any, Constants]] = WeakKeyDictionary()  # by type and device


def constants(net: Backbone, like: Tensor) -> Constants:
    """Made once: each would be as many launches as there are layers."""
    made = _made.setdefault(net, {})
    place = like.dtype, like.device
    if place not in made:
        widths = [slot.columns.stop - slot.columns.start for slot in net.slots]
        eps = torch.cat([like.new_full((n,), s.layer_eps) for n, s in zip(widths, net.slots, strict=True)])
        shares, slots = like.new_zeros(len(eps), DEPTHS), [s for n, s in zip(widths, net.slots, strict=True) if n]
        third = max(len(slots) // DEPTHS, 1)
        for depth, part in enumerate((slots[:third], slots[third : len(slots) - third], slots[len(slots) - third :])):
            for slot in part or slots:
                width = slot.columns.stop - slot.columns.start
                shares[slot.columns, depth] = 1 / (len(part or slots) * width)
        mean, var = (t[0, 0].to(like) for t in net.origin.state.stats)
        std = (var + eps).sqrt()
        made[place] = Constants(eps, shares, mean.clone(), std, shares[:, DEPTHS // 2].sqrt() / std)
    return made[place]


def _weights(old: Deployed, new: Deployed) -> dict[str, Part]:
    if old.weights is None or new.weights is None:
        return {}
    found: dict[str, list[Part]] = defaultdict(list)
    for name in new.weights[0]:
        before, after = (torch.stack([row[name].float() for row in rows]) for rows in (old.weights, new.weights))
        found[name.rpartition(".")[0]].append(torch.stack((_square(after - before), _square(before))))
    return {layer: torch.stack(parts).sum(0) for layer, parts in found.items()}


def _classes(net: Backbone, old: Any, new: Any, chosen: Sequence[int]) -> list[float]:
    """For each class the change of its statistics over all channels and branches; empty if none has its own."""
    totals: list[Tensor] = []  # (K,) each
    for before, after in zip(_class_statistics(old), _class_statistics(new), strict=True):
        branches = len(before.mean) // len(new.key.seed)  # rows of a stream
        for row in (i * branches + j for i in chosen for j in range(branches)):
            # row by row: class statistics may be hundreds of megabytes
            old_row, new_row = (
                rows_of(s, slice(row, row + 1)).map_layers(Stats.in_full, net.columns) for s in (before, after)
            )
            totals.append(squared_moves(net, old_row, new_row)[0].float().mean(1))
    return [math.sqrt(t) for t in torch.stack(totals).mean(0).tolist()] if totals else []


def _class_statistics(state: Any) -> list[Any]:
    """The statistics of several classes anywhere in a state, in full or packed."""
    if isinstance(state, ClassStats):
        return [state] if state.mean.dim() == 3 and state.mean.shape[1] > 1 and state.mean.numel() else []
    if isinstance(state, Tensor | PlaceMemory):  # places are not classes
        return []
    return [stats for value in state for stats in _class_statistics(value)]
