"""All trainable parameters of a network as two matrices with a row a stream, for methods that adapt every weight.

One matrix holds the affine parameters of normalisation (`Affine`), the other the weights of all other layers, (S, P).
So Adam, moving averages and restoring are elementwise for any network, and a state is a few tensors. A pass takes views
of a row by name. Weights cannot be batched over streams as affine parameters can: `forward` takes one stream, and rows
are its branches or repeated passes.
"""

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tribe.core import rng
from tribe.core.backbone import Backbone, Output
from tribe.core.moments import accumulation_dtype
from tribe.core.rng import Key
from tribe.core.rules import Norm
from tribe.core.state import Affine, rows_of, streams_of, tree_map

ALIGNED = 64  # bytes: an alignment of memory that suits every kernel
REACH = 1024  # the longest gap that one random number of `bernoulli_mask` can describe


class Parameters(NamedTuple):
    """All parameters that gradients move."""

    affine: Affine  # (S, C), of normalisation
    weights: Tensor  # (S, P), of all other layers

    def stream(self, index: int) -> "Parameters":
        """Return the row of one stream in each, (1, C) and (1, P): views."""
        return rows_of(self, slice(index, index + 1))

    def streams(self, x: Tensor) -> range:
        """Return the indices of the streams of images (S, B, ...); see `streams_of`."""
        return streams_of(x, len(self.weights))


class WeightLayout:
    """The position of each parameter, except those of slots and of layers ``without``, in a row of P weights.

    >>> net = Backbone(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)))
    >>> layout = WeightLayout(net, without=nn.Linear)
    >>> list(layout.pieces), layout.source(streams=2).weights.shape
    (['0.weight', '0.bias'], torch.Size([2, 112]))
    """

    def __init__(self, net: Backbone, without: type[nn.Module] | tuple[()] = ()) -> None:
        frozen = {id(p) for m in net.model.modules() if isinstance(m, without) for p in m.parameters(recurse=False)}
        self.net = net
        chosen = [(n, p) for n, p in net.model.named_parameters() if p.is_floating_point() and id(p) not in frozen]
        # Odd sizes last: convolutions are slow on weights that are not aligned in memory.
        self.pieces = dict(sorted(chosen, key=lambda named: named[1].numel() * 4 % ALIGNED != 0))

    def source(self, streams: int = 1) -> Parameters:
        """Return the parameters of the source network, a copy for each stream."""
        return Parameters(self.net.source(streams)[0], self._row(self.pieces).expand(streams, -1).clone())

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return the weights (P,) of one stream by name, as views; gradients flow back to the row."""
        return {name: weight.to(self.pieces[name].dtype) for name, weight in self._split(row).items()}

    def _split(self, row: Tensor) -> dict[str, Tensor]:
        # One split, not a slice for each piece: the backward of a split writes the row once, that of a slice each time.
        columns = row.split([piece.numel() for piece in self.pieces.values()])
        named = zip(self.pieces.items(), columns, strict=True)
        return {name: _unflatten(t, piece.shape) for (name, piece), t in named}

    def pack(self, named: Mapping[str, Tensor]) -> Parameters:
        """Return parameters (1, ...) from the tensors of a model's state dict."""
        like = self.net.origin.state.affine.weight
        wrong = [name for name, shape in self.names().items() if name not in named or named[name].shape != shape]
        if wrong:
            raise ValueError(f"the tensors are not of this network: {', '.join(wrong[:4])} missing or of another shape")

        def affine(field: str, default: float) -> Tensor:
            columns = [
                named[f"{slot.name}.{field}"].flatten().to(like)
                if getattr(slot.layer, field) is not None
                else like.new_full((slot.channels,), default)
                for slot in self.net.slots
            ]
            return torch.cat(columns)[None]

        return Parameters(Affine(affine("weight", 1.0), affine("bias", 0.0)), self._row(named))

    def unpack(self, params: Parameters) -> dict[str, Tensor]:
        """Return one stream's parameters (1, ...) by their names in the model's state dict; the inverse of `pack`."""
        widths = [slot.channels for slot in self.net.slots]
        named = self._split(params.weights[0])
        for field, row in params.affine._asdict().items():
            for slot, columns in zip(self.net.slots, row[0].split(widths), strict=True):
                if getattr(slot.layer, field) is not None:
                    named[f"{slot.name}.{field}"] = columns.view(getattr(slot.layer, field).shape)
        return named

    def existing_columns(self, row: Tensor) -> Tensor:
        """Return the columns (S, n) of a `flat` row without those of scales and shifts that the network lacks."""
        exists = [getattr(slot.layer, field) is not None for field in Affine._fields for slot in self.net.slots]
        if all(exists):
            return row
        widths = [slot.channels for _ in Affine._fields for slot in self.net.slots]
        *affine, weights = row.split([*widths, row.shape[1] - 2 * self.net.channels], 1)
        return torch.cat([*itertools.compress(affine, exists), weights], 1)

    def names(self) -> dict[str, torch.Size]:
        """Return the shapes of all parameters, by their names in the model's state dict."""
        fields = ((slot, field) for slot in self.net.slots for field in ("weight", "bias"))
        norms = {f"{s.name}.{f}": getattr(s.layer, f).shape for s, f in fields if getattr(s.layer, f) is not None}
        return {name: piece.shape for name, piece in self.pieces.items()} | norms

    def _row(self, named: Mapping[str, Tensor]) -> Tensor:
        dtype = accumulation_dtype(self.net.dtype)
        given = (named[name].detach() for name in self.pieces)
        channels_last = ((t.movedim(1, -1) if t.dim() == 4 else t).reshape(-1) for t in given)  # as the network's are
        columns = [t.to(self.net.device, dtype) for t in channels_last]
        return torch.cat(columns or [torch.empty(0, device=self.net.device, dtype=dtype)])[None]


def _unflatten(t: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 4:
        return t.view(shape)
    out, into, height, width = shape
    return t.view(out, height, width, into).movedim(-1, 1)


def forward(layout: WeightLayout, params: Parameters, x: Tensor, norm: Norm, valid: Tensor) -> Output:
    """Pass (R, B, ...) images through the network with one stream's parameters (1, ...); valid is (1, B)."""
    rows, net = len(x), layout.net
    affine = Affine(*(t.expand(rows, -1) for t in params.affine))
    row = params.weights[0]
    if row.data_ptr() % ALIGNED:  # if P is odd, the rows after the first are not aligned
        row = row.clone()
    weights = layout.views(row)
    return net(x, affine, net.source(rows)[1], norm, valid=valid.expand(rows, -1), weights=weights)  # type: ignore[no-any-return]


def leaf(params: Parameters) -> Parameters:
    """Return the same values as the start of a graph."""
    return tree_map(lambda t: t.detach().requires_grad_(), params)


def gradients(loss: Tensor, params: Parameters) -> Parameters:
    """Return the gradient of a loss with respect to the result of `leaf`; zero where the loss does not depend on it."""
    *affine, weights = torch.autograd.grad(loss, _columns(params), allow_unused=True, materialize_grads=True)
    return Parameters(Affine(*affine), weights)


def stack_streams(streams: list[Parameters]) -> Parameters:
    """Concatenate the rows of single streams."""
    return streams[0] if len(streams) == 1 else tree_map(lambda *rows: torch.cat(rows), *streams)


def flat(params: Parameters) -> Tensor:
    """Return all parameters of a stream in one row: (S, 2 C + P)."""
    return torch.cat(_columns(params), 1)


def restore(chosen: Tensor, params: Parameters, source: Parameters) -> Parameters:
    """Take the source's values where ``chosen`` (S, 2 C + P), in the order of `flat`."""
    weight, bias, weights = chosen.split([t.shape[1] for t in _columns(params)], 1)
    return tree_map(torch.where, Parameters(Affine(weight, bias), weights), source, params)


def _columns(params: Parameters) -> list[Tensor]:
    return [*params.affine, params.weights]


def bernoulli_mask(key: Key, purpose: int, p: float, n: int) -> Tensor:
    """Choose each of n places with probability p, independently: (S, n) bool.

    A draw is the number of places to the next chosen one (the geometric distribution). So about p n random numbers
    suffice for n places, and they are compared as integers: the choice is the same on every device. A draw beyond
    `REACH` advances by `REACH` and chooses nothing, which is exact because the distribution has no memory.

    >>> key = Key(seed=torch.tensor([425]), clock=torch.tensor([0]))
    >>> bernoulli_mask(key, 1, 0.25, 100_000).float().mean().round(decimals=2)
    tensor(0.2500)
    """
    streams, device = len(key.seed), key.seed.device
    if p <= 0 or n == 0:
        return torch.zeros(streams, n, dtype=torch.bool, device=device)
    stride = sum((1 - p) ** k for k in range(REACH))  # the mean advance of a draw
    draws = n / stride
    enough = int(draws + 10 * draws**0.5) + 16  # 10 standard deviations more than expected
    words = rng.bits(key, purpose, enough).contiguous()
    skipped = torch.bucketize(words, _within(p, device), right=True)  # places before the chosen one: 0 to REACH
    at = (skipped + 1).clamp_max_(REACH).cumsum(1) - 1
    at = torch.where((skipped < REACH) & (at < n), at, n)  # column n collects the draws that choose nothing
    return torch.zeros(streams, n + 1, dtype=torch.bool, device=device).scatter_(1, at, True)[:, :n]


@lru_cache  # copying it to a device synchronises
def _within(p: float, device: torch.device) -> Tensor:
    """Return the chance that the next chosen place is at most 1, 2, ... `REACH` places away, in 2**32nds."""
    return torch.tensor([round((1 - (1 - p) ** k) * 2**32) for k in range(1, REACH + 1)], device=device)


def quantile(values: Tensor, q: float) -> Tensor:
    """Return the q-quantile (S,) of each row (S, n), interpolated. `torch.quantile` refuses n > 2**24.

    >>> quantile(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), 0.5)
    tensor([1.5000])
    """
    place = q * (values.shape[1] - 1)
    k = int(place)
    ranks = range(k, min(k + 2, values.shape[1]))
    if values.device.type == "cpu":  # selecting is faster on a CPU, sorting on a GPU
        near = [values.kthvalue(rank + 1, 1).values for rank in ranks]
    else:
        near = list(values.sort(1).values[:, k : k + 2].unbind(1))
    return torch.lerp(near[0], near[-1], place - k)
