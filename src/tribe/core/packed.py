"""Class statistics in 8 bits a number: a quarter of the memory, for networks of many classes. Beyond the paper.

The statistics of a class are what all classes share plus an offset of its own. The shared part is float32. An update
that is the same for all classes moves it alone, so the classes that a batch does not hold are never rounded again. An
offset is stored in 8 bits, relative to the standard deviation of its channel:

    offset = unit * scale * code * |code|,    -127 <= code <= 127

where ``scale`` belongs to one class in one layer and makes its largest offset the code 127. The square makes small
offsets finer. Codes are rounded up or down at random, so that the mean of many roundings is the number itself: an
average that moves by less than a code still moves, and errors of the pooled statistics shrink with the number of
classes. The random numbers depend on the class and on how often it was seen, and on nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import Bounds
from tribe.core.kernels import random_numbers
from tribe.core.rng import Key
from tribe.core.state import Stats

MOST = 127  # the largest code
CODE = Bounds(-MOST, MOST)
ROUNDING = 0x8B17  # purpose of the random numbers


class PackedStats(NamedTuple):
    """Class statistics of all layers, or of one (N = 1)."""

    mean: Annotated[Tensor, CODE]  # (R, K, C) int8, codes
    var: Annotated[Tensor, CODE]  # (R, K, C) int8
    shared: Tensor  # (R, 3, C): the mean and the variance that all classes share, and the unit
    scale: Tensor  # (R, 3 K, N) for N layers: of the means, of the variances, and how often a class was seen

    def layer(self, columns: slice, index: int) -> "PackedStats":
        """Return the statistics of one layer."""
        mean, var, shared = (t[..., columns] for t in self[:3])
        return PackedStats(mean, var, shared, self.scale[..., index : index + 1])

    def map_layers(self, fn: Callable[[Stats], Stats], columns: Sequence[slice]) -> Stats:
        """Apply ``fn`` to one layer after the other, in full: memory for one is enough."""
        layers = [fn(self.layer(place, index).in_full()) for index, place in enumerate(columns)]
        return Stats(*(torch.cat(parts, -1) for parts in zip(*layers, strict=True)))

    def in_full(self) -> Stats:
        """Return the statistics of one layer in full, (R, K, c). A variance that rounding made negative is 0."""
        mean, var, unit = self.shared.unsqueeze(2).unbind(1)  # (R, 1, c) each
        by_mean, by_var, _ = self.scale.chunk(3, 1)  # (R, K, 1) each
        means = torch.addcmul(mean, _decode(self.mean, unit), by_mean)
        return Stats(means, torch.addcmul(var, _decode(self.var, unit * unit), by_var).clamp_min_(0))

    def updated(self, past: Stats, kept: Stats, code: Tensor, present: Tensor, shrink: Tensor) -> "PackedStats":
        """Pack the statistics to keep of one layer; ``past`` are these statistics in full.

        ``code`` (R, B), ``present`` (R, K) and ``shrink`` (R, 1, 1) are those of `tribe.norms.balanced.Groups`. Kept of
        absent classes is past.mean + a and past.var * (1 - shrink) + b, with the same a and b (R, 1, c) for all.
        """
        by_mean, by_var, counts = self.scale.chunk(3, 1)  # (R, K, 1) each
        by_var = by_var * (1 - shrink)
        mean, var, unit = self.shared.unsqueeze(2).unbind(1)
        # An absent class says how far the shared part moves. If none is absent any will do: all are stored again.
        absent = present.byte().argmin(1).view(-1, 1, 1).expand_as(mean)  # (R, 1, c)
        mean = mean + (kept.mean.gather(1, absent) - past.mean.gather(1, absent))
        before = past.var.gather(1, absent)
        var = var + (kept.var.gather(1, absent) - before) + (before - var) * shrink

        label = code.clamp_min(0).unsqueeze(2)  # (R, B, 1)
        index = label.expand(*code.shape, mean.shape[2])
        key = Key(label.flatten(), counts.gather(1, label).flatten().long())
        draws = random_numbers.uniform(key, ROUNDING, (2, mean.shape[2])).view(*code.shape, 2, -1)  # (R, B, 2, c)
        means, mean_scale = _encode((kept.mean.gather(1, index) - mean) / unit, draws[:, :, 0])
        vars, var_scale = _encode((kept.var.gather(1, index) - var) / (unit * unit), draws[:, :, 1])
        place = (code + 1).unsqueeze(2)  # samples that do not count write into a row of their own, which is dropped
        scales = _put(by_mean, place, mean_scale), _put(by_var, place, var_scale)
        return PackedStats(
            _put(self.mean, place, means),
            _put(self.var, place, vars),
            torch.cat((mean, var, unit), 1),
            torch.cat((*scales, counts + present.unsqueeze(2)), 1),
        )


def pack(source: Stats, eps: Tensor, classes: int, layers: int) -> PackedStats:
    """Give every class the same statistics: (R, 1, C) and the eps of each channel (C,)."""
    rows, _, channels = source.mean.shape
    means, vars = (torch.zeros(rows, classes, channels, dtype=torch.int8, device=source.mean.device) for _ in range(2))
    shared = torch.cat((*source, (source.var + eps).sqrt()), 1)
    return PackedStats(means, vars, shared, shared.new_zeros(rows, 3 * classes, layers))


ClassStats = Stats | PackedStats  # statistics of every class, in full or packed


def _decode(code: Tensor, unit: Tensor) -> Tensor:
    wide = code.to(unit.dtype)
    return wide.mul_(wide.abs()).mul_(unit)


def _encode(offset: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of offsets (R, B, c) in units, and their scale (R, B, 1); draws choose how to round."""
    size = offset.abs()
    scale = size.amax(2, keepdim=True) / MOST**2
    square = size / scale.clamp_min(torch.finfo(scale.dtype).tiny)  # at most 127 ** 2
    below = square.sqrt().floor_().clamp_max_(MOST - 1)
    share = (square - below * below) / (2 * below + 1)  # of the way to the next code
    return (below.add_(draw < share) * offset.sign()).to(torch.int8), scale


def _put(t: Tensor, place: Tensor, values: Tensor) -> Tensor:
    """Write values (R, B, c) of classes into (R, K, c); place is the class + 1, 0 for none."""
    rows, classes, channels = t.shape
    padded = t.new_empty(rows, classes + 1, channels)
    padded[:, 1:] = t
    return padded.scatter_(1, place.expand(values.shape), values)[:, 1:]
