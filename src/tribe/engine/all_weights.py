"""All of a network's trainable parameters as two matrices with a row a stream, for methods that adapt every weight.

Normalisation has its matrix already (`Affine`); the weights of all other layers lie side by side in another, (S, P).
So Adam, moving averages and restoring are elementwise, whatever the network, and a state stays a few tensors. A pass
takes views of a row by name. Weights cannot be batched over streams as affine parameters can: `forward` takes one
stream, whose rows are then branches or repeated passes.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tribe.engine import rng
from tribe.engine.backbone import Backbone, Output
from tribe.engine.moments import wide
from tribe.engine.rng import Key
from tribe.engine.rules import Norm
from tribe.engine.state import Affine, streams_of

ALIGNED = 64  # bytes between two boundaries of memory that suit every kernel
REACH = 1024  # how far one random number of `bernoulli_mask` can see ahead


class Parameters(NamedTuple):
    """Every parameter that gradients move."""

    affine: Affine  # (S, C), of normalisation
    weights: Tensor  # (S, P), of all other layers

    def stream(self, index: int) -> "Parameters":
        """One stream's row of each, (1, C) and (1, P): views."""
        return Parameters(Affine(*(t[index : index + 1] for t in self.affine)), self.weights[index : index + 1])

    def streams(self, x: Tensor) -> range:
        """The numbers of the streams whose images (S, B, ...) these are; refused where others have come."""
        return streams_of(x, len(self.weights))


class Piece(NamedTuple):
    """One parameter's place in a row."""

    shape: torch.Size
    dtype: torch.dtype  # the network's; rows are kept in float32 at least


class WeightLayout:
    """Where each parameter lies in a row of P weights.

    Args:
        net: the network; all its parameters, those of normalisation layers in slots excepted.
        without: kinds of layer whose parameters stay frozen.

    >>> net = Backbone(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)))
    >>> layout = WeightLayout(net, without=nn.Linear)
    >>> list(layout.pieces), layout.source(streams=2).weights.shape
    (['0.weight', '0.bias'], torch.Size([2, 112]))
    """

    def __init__(self, net: Backbone, without: type[nn.Module] | tuple[()] = ()) -> None:
        frozen = {id(p) for m in net.model.modules() if isinstance(m, without) for p in m.parameters(recurse=False)}
        self.net = net
        chosen = [(n, p) for n, p in net.model.named_parameters() if p.is_floating_point() and id(p) not in frozen]
        # Odd sizes last: convolutions are slow on weights that begin between two boundaries of memory.
        self._parameters = dict(sorted(chosen, key=lambda named: named[1].numel() * 4 % ALIGNED != 0))
        self.pieces = {name: Piece(p.shape, p.dtype) for name, p in self._parameters.items()}

    def source(self, streams: int = 1) -> Parameters:
        """The source's own, a row each: fresh copies."""
        return Parameters(self.net.source(streams)[0], self._row(self._parameters).expand(streams, -1).clone())

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """The weights (P,) of one stream by name, as views; gradients flow back to the row."""
        return {name: part.to(self.pieces[name].dtype) for name, part in self._parts(row).items()}

    def _parts(self, row: Tensor) -> dict[str, Tensor]:
        # One split, not a slice each: its backward writes the row once, a slice's writes all of it every time.
        parts = row.split([piece.shape.numel() for piece in self.pieces.values()])
        named = zip(self.pieces.items(), parts, strict=True)
        return {name: _unflatten(part, piece.shape) for (name, piece), part in named}

    def pack(self, named: Mapping[str, Tensor]) -> Parameters:
        """Tensors under the names of the model's own state dict (1, ...), normalisation layers included."""
        place = self.net.origin.get().affine.weight
        missing = [name for name in self.names() if name not in named]
        wrong = [name for name, shape in self.names().items() if name in named and named[name].shape != shape]
        if missing or wrong:
            raise ValueError(
                f"the tensors are not of this network: {', '.join((missing + wrong)[:4])} missing or of another shape"
            )

        def affine(field: str, default: float) -> Tensor:
            parts = [
                named[f"{slot.name}.{field}"].flatten().to(place)
                if getattr(slot.layer, field) is not None
                else place.new_full((slot.channels,), default)
                for slot in self.net.slots
            ]
            return torch.cat(parts)[None]

        return Parameters(Affine(affine("weight", 1.0), affine("bias", 0.0)), self._row(named))

    def unpack(self, params: Parameters) -> dict[str, Tensor]:
        """One stream's parameters (1, ...) under the names of the model's own state dict; the inverse of `pack`."""
        widths = [slot.channels for slot in self.net.slots]
        named = self._parts(params.weights[0])
        for field, row in params.affine._asdict().items():
            for slot, part in zip(self.net.slots, row[0].split(widths), strict=True):
                if getattr(slot.layer, field) is not None:
                    named[f"{slot.name}.{field}"] = part.view(getattr(slot.layer, field).shape)
        return named

    def existing_columns(self, row: Tensor) -> Tensor:
        """Of a `flat` row those columns (S, n) that are weights: layers without a scale, or a shift, have others."""
        places = [
            (slot.channels, getattr(slot.layer, f) is not None) for f in Affine._fields for slot in self.net.slots
        ]
        if all(exists for _, exists in places):
            return row
        *parts, weights = row.split([*(width for width, _ in places), row.shape[1] - 2 * self.net.channels], 1)
        return torch.cat([*(part for part, (_, exists) in zip(parts, places, strict=True) if exists), weights], 1)

    def names(self) -> dict[str, torch.Size]:
        """Every parameter, those of normalisation included, by the name it has in the model's state dict."""
        fields = ((slot, field) for slot in self.net.slots for field in ("weight", "bias"))
        norms = {f"{s.name}.{f}": getattr(s.layer, f).shape for s, f in fields if getattr(s.layer, f) is not None}
        return {name: piece.shape for name, piece in self.pieces.items()} | norms

    def _row(self, named: Mapping[str, Tensor]) -> Tensor:
        dtype = wide(self.net.dtype)
        parts = [_flatten(named[name].detach()).to(self.net.device, dtype) for name in self.pieces]
        return torch.cat(parts or [torch.empty(0, device=self.net.device, dtype=dtype)])[None]


def _flatten(t: Tensor) -> Tensor:
    """Values in the order in which a view of four axes is channels-last, as the network's own weights are."""
    return (t.movedim(1, -1) if t.dim() == 4 else t).reshape(-1)


def _unflatten(t: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 4:
        return t.view(shape)
    out, into, height, width = shape
    return t.view(out, height, width, into).movedim(-1, 1)


def forward(layout: WeightLayout, params: Parameters, x: Tensor, norm: Norm, valid: Tensor) -> Output:
    """Pass (R, B, ...) images through the network that one stream's parameters (1, ...) make; valid is (1, B)."""
    rows, net = len(x), layout.net
    affine = Affine(*(t.expand(rows, -1) for t in params.affine))
    row = params.weights[0]
    if row.data_ptr() % ALIGNED:  # where P is odd all rows but the first begin anywhere
        row = row.clone()
    weights = layout.views(row)
    return net(x, affine, net.source(rows)[1], norm, valid=valid.expand(rows, -1), weights=weights)  # type: ignore[no-any-return]


def leaf(params: Parameters) -> Parameters:
    """The same values as the start of a graph."""
    return Parameters(params.affine.leaf(), params.weights.detach().requires_grad_())


def gradients(loss: Tensor, params: Parameters) -> Parameters:
    """The gradient of a loss with respect to what `leaf` gave; zero where it does not depend on it."""
    *affine, weights = torch.autograd.grad(
        loss, (*params.affine, params.weights), allow_unused=True, materialize_grads=True
    )
    return Parameters(Affine(*affine), weights)


def stack_streams(streams: list[Parameters]) -> Parameters:
    """Rows of single streams under each other."""
    if len(streams) == 1:
        return streams[0]
    affine = Affine(*(torch.cat(parts) for parts in zip(*(p.affine for p in streams), strict=True)))
    return Parameters(affine, torch.cat([p.weights for p in streams]))


def flat(params: Parameters) -> Tensor:
    """All numbers of a stream in one row: (S, 2 C + P)."""
    return torch.cat((*params.affine, params.weights), 1)


def restore(chosen: Tensor, params: Parameters, source: Parameters) -> Parameters:
    """The source's value where chosen (S, 2 C + P), in the order of `flat`."""
    widths = [t.shape[1] for t in (*params.affine, params.weights)]
    pairs = zip(
        chosen.split(widths, 1), (*params.affine, params.weights), (*source.affine, source.weights), strict=True
    )
    weight, bias, weights = (torch.where(mask, old, new) for mask, new, old in pairs)
    return Parameters(Affine(weight, bias), weights)


def bernoulli_mask(key: Key, purpose: int, p: float, n: int) -> Tensor:
    """Choose each of n places with probability p, independently: (S, n) bool.

    A draw says how many places to go to the next chosen one (the geometric distribution), so p n random numbers do
    for n places, and the choice is made among integers: it is the same on every device. A draw that would go farther
    than `REACH` goes that far and chooses nothing, which is exact as the distribution has no memory.

    >>> key = Key(seed=torch.tensor([425]), clock=torch.tensor([0]))
    >>> bernoulli_mask(key, 1, 0.25, 100_000).float().mean().round(decimals=2)
    tensor(0.2500)
    """
    streams, device = len(key.seed), key.seed.device
    if p <= 0 or n == 0:
        return torch.zeros(streams, n, dtype=torch.bool, device=device)
    stride = sum((1 - p) ** k for k in range(REACH))  # places a draw goes on average
    draws = n / stride
    enough = int(draws + 10 * draws**0.5) + 16  # to fall short of the end is a matter of 10 standard deviations
    words = rng.bits(key, purpose, enough).contiguous()
    places = torch.bucketize(words, _within(p, device), right=True)  # passed over: 0 to REACH
    at = (places + 1).clamp_max_(REACH).cumsum(1) - 1
    at = torch.where((places < REACH) & (at < n), at, n)  # the rest goes to a place of its own
    return torch.zeros(streams, n + 1, dtype=torch.bool, device=device).scatter_(1, at, True)[:, :n]


@lru_cache  # to copy it to a device every time would be to wait for the device every time
def _within(p: float, device: torch.device) -> Tensor:
    """The chance that the next chosen place is at most 1, 2, ... `REACH` places away, in 2**32nds."""
    return torch.tensor([round((1 - (1 - p) ** k) * 2**32) for k in range(1, REACH + 1)], device=device)


def quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile of each row (S, n) with linear interpolation, however many values there are: (S,).

    `torch.quantile` refuses more than 2**24.

    >>> quantile(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), 0.5)
    tensor([1.5000])
    """
    place = q * (values.shape[1] - 1)
    k = int(place)
    ranks = range(k, min(k + 2, values.shape[1]))
    if values.device.type == "cpu":  # selecting is the faster here, sorting elsewhere
        near = [values.kthvalue(rank + 1, 1).values for rank in ranks]
    else:
        near = list(values.sort(1).values[:, k : k + 2].unbind(1))
    return torch.lerp(near[0], near[-1], place - k)
