"""Requests of streams as batches: groups of streams that go through the network together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import Affine, Stats, leaves, per_stream, rebuild, tree_map
from tribe.core.validation import as_streams
from tribe.methods import Deployed

STREAMS = 128  # the most streams of a group: more save little time
IMAGES = 256  # the most images of a group of several streams: activations take memory
STEP_BYTES = 2**30  # the most bytes of the states of a group of several streams


class Arrived(NamedTuple):
    """The images of one stream, checked."""

    x: Tensor  # (1, B, ...)
    added: bool  # whether the axis of streams was added


class Group(NamedTuple):
    """Streams that go through the network together."""

    names: tuple[str, ...]
    x: Tensor  # (S, B, ...), padded
    valid: Tensor | None  # (S, B), False for padding; None: there is none
    sizes: tuple[int, ...]  # images of each stream, without padding

    @property
    def kind(self) -> tuple[int, ...]:
        """The number of images a stream and their shape."""
        return tuple(self.x.shape[1:])


def check_images(images: Mapping[str, Tensor], net: Backbone) -> dict[str, Arrived]:
    """Check the names of streams and their images."""
    if not isinstance(images, Mapping):
        raise TypeError(f"expected images by the name of their stream, as {{'cam1': x}}; got {type(images).__name__}")
    for name in images:
        check_name(name)
    arrived = {}
    for name, x in images.items():
        try:
            arrived[name] = Arrived(*as_streams(x, net, 1))
        except (TypeError, ValueError) as error:
            raise type(error)(f"stream {name!r}: {error}") from error
    return arrived


def check_name(name: Any) -> None:
    """Refuse a name of a stream that is no text, or empty."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a stream is a text; got {name!r}")
    if not name:
        raise ValueError("the name of a stream is empty; expected at least one character")


def group_streams(
    arrived: Mapping[str, Arrived], kinds: Mapping[str, Any], size: int, padded: bool, together: bool = True
) -> Iterator[tuple[Any, Group]]:
    """Group streams of the same kind whose images have the same shape; also return the kind.

    Args:
        arrived: the images of each stream.
        kinds: streams of different kinds are not grouped.
        size: the bytes of a stream's state, which bound the size of a group.
        padded: pad the number of streams and of images to a power of 2, where each shape costs a recording; otherwise
            a group has streams with the same number of images only.
        together: group streams at all.
    """
    sorts: dict[Any, list[str]] = {}
    for name, (x, _) in arrived.items():
        batch = x.shape[1] if not padded else bucket(x.shape[1])
        sorts.setdefault((kinds[name], batch, x.shape[2:], x.dtype), []).append(name)
    for (kind, batch, *_), names in sorts.items():
        most = max(1, min(STREAMS, IMAGES // max(batch, 1), STEP_BYTES // max(size, 1))) if together else 1
        most = 2 ** (most.bit_length() - 1)
        for start in range(0, len(names), most):
            chosen = tuple(names[start : start + most])
            yield kind, _group(chosen, [arrived[name].x for name in chosen], batch, padded)


def bucket(n: int) -> int:
    """The smallest power of 2 that is at least n.

    >>> [bucket(n) for n in (0, 1, 3, 64)]
    [0, 1, 4, 64]
    """
    return 2 ** (n - 1).bit_length() if n else 0


def _group(names: tuple[str, ...], images: list[Tensor], batch: int, padded: bool) -> Group:
    sizes = tuple(x.shape[1] for x in images)
    rows = bucket(len(images)) if padded else len(images)
    if rows == len(images) and set(sizes) == {batch}:
        return Group(names, images[0] if rows == 1 else torch.cat(images), None, sizes)
    x = images[0].new_zeros(rows, batch, *images[0].shape[2:])
    valid = torch.zeros(rows, batch, dtype=torch.bool)
    for i, (own, count) in enumerate(zip(images, sizes, strict=True)):
        x[i, :count] = own[0]
        valid[i, :count] = True
    return Group(names, x, valid.to(x.device), sizes)


def gather(states: Sequence[Any], rows: int | None = None) -> Any:
    """One state of several streams from states of one stream; the first fills up to ``rows`` streams."""
    filled = [*states, *[states[0]] * ((rows or 0) - len(states))]
    return filled[0] if len(filled) == 1 else tree_map(lambda *rows: torch.cat(rows), *filled)


def scatter(state: Any, streams: int, wanted: int, copy: bool) -> list[Any]:
    """States of one stream from a state of several; they share no memory. ``copy``: copy even a single one."""
    if streams == 1 and not copy:
        return [state]
    rows = {name: _copy_rows(t, streams, wanted) for name, t in leaves(state).items()}
    return [rebuild(state, {name: own[i] for name, own in rows.items()}) for i in range(wanted)]


def _copy_rows(t: Tensor, streams: int, wanted: int) -> list[Tensor]:
    """A copy for each of the first streams: on a GPU all of them take few launches."""
    rows = list(per_stream(t, streams).unbind()[:wanted])
    copies = [torch.empty_like(row) for row in rows]
    torch._foreach_copy_(copies, rows)
    return copies


def gather_deployed(networks: Sequence[Deployed]) -> Deployed:
    """One network of several streams from networks of one stream."""
    if len(networks) == 1:
        return networks[0]
    affine = Affine(*(torch.cat(rows) for rows in zip(*(n.affine for n in networks), strict=True)))
    stats = Stats(*(torch.cat(rows) for rows in zip(*(n.stats for n in networks), strict=True)))
    weights = None if networks[0].weights is None else [own for n in networks for own in n.weights or ()]
    return Deployed(affine, stats, networks[0].norm, weights)


def answers(group: Group, logits: Tensor, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
    """The logits of each stream, without padding, in the layout of its images."""
    own = (
        (name, logits[i : i + 1, :count]) for i, (name, count) in enumerate(zip(group.names, group.sizes, strict=True))
    )
    return {name: t[0] if arrived[name].added else t for name, t in own}


def marked_bad(group: Group, bad: Tensor | None) -> dict[str, Tensor | None]:
    """The bad images of each stream. They stay on the device: reading them would wait for it."""
    if bad is None:
        return dict.fromkeys(group.names)
    rows = zip(group.names, bad.unbind(), group.sizes, strict=False)
    return {name: row[:count] for name, row, count in rows}


def count_padding(bad: Tensor | None, group: Group) -> Tensor | None:
    """Padding counts as bad images, whose logits are not checked."""
    return bad if group.valid is None else ~group.valid if bad is None else bad | ~group.valid
