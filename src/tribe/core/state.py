"""The state of a method as plain data: named tuples of tensors with a leading row axis.

The whole library uses one vocabulary of shapes:

    R  rows = streams x branches (teacher, student, ...); the rows of one stream are adjacent
    S  streams         B  batch               K  classes, or statistics kept per channel
    L  pixels          C  normalised channels of the whole network, concatenated; for statistics those of BatchNorm only

A method's state is a (nested) named tuple, and each of its tensors has a leading axis of S or a multiple of S. So the
few functions below clone, save, slice by stream, compare and hash the state of any method.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tribe.core.bounds import COUNT

T = TypeVar("T", bound=tuple[Any, ...])  # a (nested) named tuple of tensors


class Affine(NamedTuple):
    """Scale and shift after normalisation, moved by gradients."""

    weight: Tensor  # (R, C)
    bias: Tensor  # (R, C)

    def leaf(self) -> "Affine":
        """Return the same values as the start of a graph."""
        return Affine(*(t.detach().requires_grad_() for t in self))

    def gradient(self, losses: Tensor) -> "Affine":
        """Return the gradient of the losses (S,) with respect to these parameters, which `leaf` made."""
        return Affine(*torch.autograd.grad(losses.sum(), self))


class Stats(NamedTuple):
    """Normalisation statistics, moved by observation; K = 1, or one pair per class."""

    mean: Tensor  # (R, K, C)
    var: Tensor  # (R, K, C)

    def detach(self) -> "Stats":
        """Return the same values without their graph."""
        return Stats(self.mean.detach(), self.var.detach())

    def layer(self, columns: slice, index: int) -> "Stats":
        """Return the statistics of one layer."""
        return Stats(self.mean[..., columns], self.var[..., columns])

    def in_full(self) -> "Stats":
        """Return these statistics; see `tribe.core.packed.PackedStats`, which has the same methods."""
        return self

    def map_layers(self, fn: Callable[["Stats"], "Stats"], columns: Sequence[slice]) -> "Stats":
        """Apply ``fn``, which treats every channel alike, to all layers at once."""
        return fn(self)


class Info(NamedTuple):
    """Report on a stream's last step. It is part of the state, so that monitoring needs no second pass."""

    images: Annotated[Tensor, COUNT]  # (S,) int64, images learned from so far
    skipped: Annotated[Tensor, COUNT]  # (S,) int64, images that were bad, or whose output was not finite: no change
    trusted: Tensor  # (S,) share of the last batch that was trusted; 1 if the method does not choose or learn
    entropy: Tensor  # (S,) mean entropy of the last batch's predictions, as a share of log K
    distance: Tensor  # (S,) how far the affine parameters have moved, relative to the norm of the source's
    student_agreement: Tensor  # (S,) share of the images last learned from that teacher and student classify the same
    anchor_agreement: Tensor  # (S,) the same of teacher and anchor; both are 1 for methods without these branches


def tree_map(fn: Callable[..., Tensor], state: T, *others: T) -> T:
    """Apply ``fn`` to every tensor of a state (and to those at the same place in ``others``).

    >>> tree_map(lambda t: t + 1, Affine(torch.zeros(1), torch.ones(1))).bias
    tensor([2.])
    """
    mapped = []
    for values in zip(state, *others, strict=True):
        mapped.append(fn(*values) if isinstance(values[0], Tensor) else tree_map(fn, *values))
    return type(state)(*mapped)


def flatten(value: Any) -> Iterator[Any]:
    """Yield the tensors and plain values in nested tuples, lists and dicts, in order."""
    if isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from flatten(item)
    else:
        yield value


def leaves(state: tuple[Any, ...], prefix: str = "") -> dict[str, Tensor]:
    """Name every tensor of a state.

    >>> list(leaves(Affine(torch.zeros(1), torch.ones(1)), "affine."))
    ['affine.weight', 'affine.bias']
    """
    named: dict[str, Tensor] = {}
    for name, value in zip(state._fields, state, strict=True):  # type: ignore[attr-defined]
        named.update({prefix + name: value} if isinstance(value, Tensor) else leaves(value, f"{prefix}{name}."))
    return named


def rebuild(like: T, named: Mapping[str, Tensor]) -> T:
    """Turn named tensors back into a state; the inverse of `leaves`."""
    names = iter(leaves(like))
    return tree_map(lambda _: named[next(names)], like)


def clone(state: T) -> T:
    """Copy a state; the copy shares no memory with it."""
    return tree_map(Tensor.clone, state)


def copy_like(state: T, other: T) -> T:
    """Copy a state to the device and precision of another of the same kind."""
    return tree_map(lambda t, o: t.detach().to(o, copy=True), state, other)


def count_bytes(state: tuple[Any, ...]) -> int:
    """Return the memory of a state's tensors."""
    return sum(t.numel() * t.element_size() for t in leaves(state).values())


def rows_of(state: T, rows: slice) -> T:
    """Return some rows of every tensor of a state, without a copy."""
    return tree_map(lambda t: t[rows], state)


def room_for(past: T, spare: Any) -> T:
    """Return memory for the statistics after ``past``: the spare one if it fits and is not that of the past."""
    fits = type(spare) is type(past) and all(s.shape == t.shape for s, t in zip(spare, past, strict=True))
    overlap = fits and any(s.data_ptr() == t.data_ptr() for s in spare for t in past)
    return spare if fits and not overlap else tree_map(torch.empty_like, past)


def copy_missing(state: tuple[Any, ...], target: tuple[Any, ...]) -> None:
    """Copy every tensor of a state that is not in the target's memory already."""
    for s, t in zip(leaves(state).values(), leaves(target).values(), strict=True):
        if s.data_ptr() != t.data_ptr():
            t.copy_(s)


def per_stream(t: Tensor, streams: int) -> Tensor:
    """Group rows by stream: (S * n, ...) -> (S, n, ...)."""
    rows: Tensor = t.unflatten(0, (streams, -1))
    return rows


def streams_of(x: Tensor, streams: int) -> range:
    """Return the indices of the streams of images (S, B, ...); raise if x does not have this number of streams."""
    if len(x) != streams:
        raise ValueError(f"x has {len(x)} rows and the state {streams} streams; expected a row for each stream")
    return range(streams)


def stream(state: T, index: int, streams: int) -> T:
    """Copy one stream out of a state: a state of one stream."""
    return tree_map(lambda t: per_stream(t, streams)[index].clone(), state)


def replace_stream(state: T, index: int, new: T) -> T:
    """Return a state with one stream of ``new``, a state of as many streams; neither is changed."""
    streams = torch.arange(len(new.key.seed), device=new.key.seed.device)  # type: ignore[attr-defined]
    return select(streams == index, new, state)


def select(chosen: Tensor, new: T, old: T, *, in_place: bool = False) -> T:
    """Keep ``new`` for the chosen streams (S,) and ``old`` for the rest; ``in_place``: in the memory of ``new``."""
    streams = len(chosen)
    if chosen.device.type == "cpu" and chosen.all():  # on other devices this would synchronise
        return new

    def pick(a: Tensor, b: Tensor) -> Tensor:
        if a is b:
            return a
        mask = chosen.view(-1, *[1] * a.dim())  # (S, 1, ...) against (S, n, ...)
        rows, others = per_stream(a.detach() if in_place else a, streams), per_stream(b, streams)
        if in_place:
            torch.where(mask, rows, others, out=rows)
            return a
        return torch.where(mask, rows, others).flatten(0, 1)

    return tree_map(pick, new, old)


JOINED = 2**20  # numbers of a tensor above which a launch of its own costs little


def select_joined(chosen: Tensor, new: T, old: T) -> T:
    """Select as `select` does, in few launches: for one stream, small tensors of a type are joined first.

    On a CPU, or with several streams, it is `select`.
    """
    if len(chosen) > 1 or chosen.device.type == "cpu":
        return select(chosen, new, old)
    return _select_joined(chosen, new, old)


def _select_joined(chosen: Tensor, new: T, old: T) -> T:
    pairs = [(a, b) for a, b in zip(leaves(new).values(), leaves(old).values(), strict=True) if a is not b]
    picked: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(a.dtype for a, _ in pairs):
        small = [(a, b) for a, b in pairs if a.dtype == dtype and a.numel() <= JOINED]
        if small:
            ours, theirs = (torch.cat([t.flatten() for t in column]) for column in zip(*small, strict=True))
            parts = torch.where(chosen, ours, theirs).split([a.numel() for a, _ in small])
            picked |= {id(a): part.view_as(a) for (a, _), part in zip(small, parts, strict=True)}
    return tree_map(
        lambda a, b: a if a is b else picked[id(a)] if id(a) in picked else torch.where(chosen, a, b), new, old
    )


def digest(state: tuple[Any, ...]) -> str:
    """Hash every bit of a state: equal digests, equal states.

    >>> a = Affine(torch.zeros(2), torch.ones(2))
    >>> digest(a) == digest(clone(a)), digest(a) == digest(a._replace(bias=torch.zeros(2)))
    (True, False)
    """
    return hash_tensors(leaves(state))


def hash_tensors(named: Mapping[str, Tensor]) -> str:
    """Hash names, shapes, types and values of tensors, in order."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in named.items():
        values = tensor.detach().cpu().contiguous()
        hasher.update(f"{name} {tuple(values.shape)} {values.dtype}\n".encode())
        flat = values.as_strided((values.numel(),), (1,))  # a single value may be "contiguous" with any stride
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class StateModule(nn.Module):
    """Hold a state as a child of a module, so that ``.to(device)`` and ``state_dict()`` include it.

    A state follows its network to another precision, as the moments of the network's activations do, but never below
    float32: casting a network to half must not round its statistics. A tensor named ``image`` holds images for the
    network, in the network's precision.
    """

    def __init__(self, state: tuple[Any, ...]) -> None:
        super().__init__()
        self.state: Any = state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StateModule":
        self.state = _apply_to_state(fn, self.state)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: t.clone() for name, t in leaves(self.state).items()})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *reports: list[str]
    ) -> None:
        missing_keys, unexpected_keys, error_msgs = reports
        own = leaves(self.state)
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        if strict:
            missing_keys.extend(prefix + name for name in own if name not in given)
            unexpected_keys.extend(prefix + name for name in given if name not in own)
        fitting = {name: t for name, t in given.items() if name in own and t.shape == own[name].shape}
        error_msgs.extend(f"{prefix}{n} has another shape" for n in given if n in own and n not in fitting)
        copies = {name: t.detach().to(own[name], copy=True) for name, t in fitting.items()}
        self.state = rebuild(self.state, own | copies)


def _apply_to_state(fn: Callable[[Tensor], Tensor], state: T) -> T:
    """Apply what `Module.to` applies to each tensor, except that statistics keep at least float32."""

    def moved(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _apply_to_state(fn, value)
        new = fn(value)
        if new.dtype == value.dtype or name == "image":
            return new
        if isinstance(state, Info):  # for people: float32 for every network
            return value.to(new.device)
        return value.to(new.device, torch.promote_types(new.dtype, torch.float32))  # from value: new may be rounded

    return type(state)(*(moved(n, v) for n, v in zip(state._fields, state, strict=True)))  # type: ignore[attr-defined]
