"""Images of streams as batches: groups of entries that go through the network together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import Affine, Stats, leaves, per_stream, rebuild, tree_map
from tribe.core.validation import as_mask, as_order, as_streams, in_order
from tribe.methods import Deployed

MAX_ENTRIES = 128  # of a group: more save little time
MAX_IMAGES = 256  # of a group of several entries: activations take memory
MAX_STATE_BYTES = 2**30  # of the states of a group of several entries


class Arrived(NamedTuple):
    """The images of one entry, checked and in the order of time."""

    x: Tensor  # (S, B, ...)
    added: bool  # whether the axis of streams was added
    valid: Tensor | None = None  # (S, B), False for padding; None: all are real
    ranks: Tensor | None = None  # (S, B), the positions that sorted them; None: they came in the order of time

    @classmethod
    def of(
        cls, x: Tensor, net: Backbone, streams: int, valid: Tensor | None = None, order: Tensor | None = None
    ) -> "Arrived":
        """Check images (B, ...) or (S, B, ...), their mask and their order, as `tribe.Adapter` takes them."""
        images, added = as_streams(x, net, streams)
        mask = None if valid is None else as_mask(valid, images, added)
        if order is None:
            return cls(images, added, mask)
        ranks = as_order(order, images, added, mask)
        return cls(in_order(images, ranks), added, None if mask is None else in_order(mask, ranks), ranks)


class EntryGroup(NamedTuple):
    """Entries that go through the network together."""

    names: tuple[str, ...]
    entries: int  # their number, padding included
    x: Tensor  # (R, B, ...), padded; R / entries rows are those of one
    valid: Tensor | None  # (R, B), False for padding; None: there is none
    sizes: tuple[int, ...]  # images of each stream of an entry, without the padding of the group
    frozen: bool  # whether the entries only predict

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, of images of a row, and the shape of an image."""
        return tuple(self.x.shape)

    def unused(self, bad: Tensor | None) -> Tensor | None:
        """Return the images whose logits are not checked: bad ones and padding."""
        return bad if self.valid is None else ~self.valid if bad is None else bad | ~self.valid

    def real(self, bad: Tensor) -> Tensor:
        """Return the bad images that are not padding."""
        return bad if self.valid is None else bad & self.valid

    def split(self, values: Tensor, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
        """Return the values of the images of each entry, without padding, in the order in which they were given."""
        rows = zip(self.names, values.split(len(values) // self.entries), self.sizes, strict=False)
        own = {name: part[:, :size] for name, part, size in rows}
        ranks = {name: arrived[name].ranks for name in own}
        return {n: t if (r := ranks[n]) is None else in_order(t, r.argsort(1)) for n, t in own.items()}


def group_entries(
    arrived: Mapping[str, Arrived], frozen: Mapping[str, bool], size: int, padded: bool, together: bool = True
) -> Iterator[EntryGroup]:
    """EntryGroup entries whose images have the same shape; frozen ones apart.

    Args:
        arrived: the images of each entry.
        frozen: which entries only predict.
        size: the bytes of a state, which bound the size of a group.
        padded: pad the number of entries and of images to a power of 2, where each shape costs a recording; otherwise
            a group has entries with the same number of images only.
        together: group entries at all.
    """
    sorts: dict[Any, list[str]] = {}
    for name, (x, *_) in arrived.items():
        batch = x.shape[1] if not padded else bucket(x.shape[1])
        sorts.setdefault((frozen[name], batch, x.shape[2:], x.dtype), []).append(name)
    for (kind, batch, *_), names in sorts.items():
        most = max(1, min(MAX_ENTRIES, MAX_IMAGES // max(batch, 1), MAX_STATE_BYTES // max(size, 1))) if together else 1
        most = 2 ** (most.bit_length() - 1)
        for start in range(0, len(names), most):
            chosen = tuple(names[start : start + most])
            yield _group(chosen, [arrived[name] for name in chosen], batch, padded, kind)


def bucket(n: int) -> int:
    """Return the smallest power of 2 that is at least n.

    >>> [bucket(n) for n in (0, 1, 3, 64)]
    [0, 1, 4, 64]
    """
    return 2 ** (n - 1).bit_length() if n else 0


def _group(names: tuple[str, ...], arrived: list[Arrived], batch: int, padded: bool, frozen: bool) -> EntryGroup:
    first, sizes = arrived[0].x, tuple(own.x.shape[1] for own in arrived)
    count = bucket(len(arrived)) if padded else len(arrived)
    if count == len(arrived) and set(sizes) == {batch}:
        if count == 1:
            return EntryGroup(names, 1, first, arrived[0].valid, sizes, frozen)
        if all(own.valid is None for own in arrived):
            return EntryGroup(names, count, torch.cat([own.x for own in arrived]), None, sizes, frozen)
    rows = len(first)
    x = first.new_zeros(count * rows, batch, *first.shape[2:])
    valid = torch.zeros(count * rows, batch, dtype=torch.bool)
    for i, (own, size) in enumerate(zip(arrived, sizes, strict=True)):
        here = slice(i * rows, (i + 1) * rows)
        x[here, :size] = own.x
        valid[here, :size] = True if own.valid is None else own.valid
    return EntryGroup(names, count, x, valid.to(x.device), sizes, frozen)


def gather(states: Sequence[Any], count: int | None = None) -> Any:
    """Join states into one; the first fills up to ``count`` of them."""
    filled = [*states, *[states[0]] * ((count or 0) - len(states))]
    return filled[0] if len(filled) == 1 else tree_map(lambda *rows: torch.cat(rows), *filled)


def scatter(state: Any, count: int, wanted: int, copy: bool) -> list[Any]:
    """Split a state into ``count`` states that share no memory, and return the first. ``copy``: copy a single one."""
    if count == 1 and not copy:
        return [state]
    rows = {name: _copy_rows(t, count, wanted) for name, t in leaves(state).items()}
    return [rebuild(state, {name: own[i] for name, own in rows.items()}) for i in range(wanted)]


def _copy_rows(t: Tensor, count: int, wanted: int) -> list[Tensor]:
    """A copy for each of the first entries: on a GPU all of them take few launches."""
    rows = list(per_stream(t, count).unbind()[:wanted])
    copies = [torch.empty_like(row) for row in rows]
    torch._foreach_copy_(copies, rows)
    return copies


def gather_deployed(networks: Sequence[Deployed]) -> Deployed:
    """Join networks into one."""
    if len(networks) == 1:
        return networks[0]
    affine = Affine(*(torch.cat(rows) for rows in zip(*(n.affine for n in networks), strict=True)))
    stats = Stats(*(torch.cat(rows) for rows in zip(*(n.stats for n in networks), strict=True)))
    weights = None if networks[0].weights is None else [own for n in networks for own in n.weights or ()]
    return Deployed(affine, stats, networks[0].norm, weights)
