"""A copy of an adapter's state, and what a state says of each stream."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import tree_map
from tribe.fields import document
from tribe.methods import AnyMethod


class StreamInfo(NamedTuple):
    """What one stream does, in plain numbers."""

    images: int
    skipped: int
    poisoned: tuple[int, ...]
    trusted: float
    entropy: float
    distance: float
    steps: int
    frozen: bool
    student_agreement: float
    anchor_agreement: float


document(
    StreamInfo,
    images="Images learned from so far.",
    skipped="Images that were bad or whose output was not finite, while learning; they changed nothing.",
    poisoned="Positions of bad images in the last batch, learned from or only predicted.",
    trusted="Share of the last batch that was trusted; 1 for methods that do not choose or do not learn.",
    entropy="Mean entropy of the last predictions, as a share of log K: 0 is certain, 1 is uniform.",
    distance="How far the affine parameters that predict have moved, relative to the norm of the source's. "
    "Adapter.compare() also gives the distance of the statistics.",
    steps="Batches learned from.",
    frozen="Whether the adapter only predicts.",
    student_agreement="Share of the images last learned from that teacher and student put in the same class; 1 for "
    "methods without a student.",
    anchor_agreement="The same of the teacher and the anchor, which keeps the source's parameters; 1 for methods "
    "without an anchor.",
)


class Snapshot(NamedTuple):
    """A copy of an adapter's state for `Adapter.restore`, with the method and the network that it belongs to."""

    method: AnyMethod
    state: Any
    net: Backbone  # not a copy, and no fingerprint: hashing its weights costs more than copying the state
    frozen: bool


document(
    Snapshot,
    method="The method that the adapter ran.",
    state="A copy of its state, a named tuple of tensors.",
    net="The network, not a copy.",
    frozen="Whether the adapter was frozen.",
)


def describe_streams(state: Any, poisoned: Tensor | None, frozen: bool) -> list[StreamInfo]:
    """What each stream of a state does; ``poisoned`` (S, B) are the bad images of the last batch, None: none."""
    columns = [t.tolist() for t in state.info]
    steps = state.key.clock.tolist()
    rows = [()] * len(steps) if poisoned is None else [tuple(torch.where(row)[0].tolist()) for row in poisoned]
    return [
        StreamInfo(images, skipped, rows[i], trusted, entropy, distance, steps[i], frozen, *agreement)
        for i, (images, skipped, trusted, entropy, distance, *agreement) in enumerate(zip(*columns, strict=True))
    ]


def check_snapshot(snapshot: Snapshot, method: AnyMethod, net: Backbone, streams: int) -> None:
    """Refuse a snapshot of another method, network or number of streams."""
    if snapshot.method != method:
        raise ValueError(f"the snapshot was taken with {snapshot.method}; this adapter runs {method}")
    if (count := len(snapshot.state.key.seed)) != streams:
        raise ValueError(f"the snapshot is of another number of streams: {count}; this adapter has {streams}")
    if snapshot.net is not net and snapshot.net.fingerprint() != net.fingerprint():
        raise ValueError(
            "the snapshot was taken on another network: its weights differ from this one's. Restore it to an "
            "adapter of the network it was taken on, with the same weights and precision"
        )


def copy_like(state: Any, other: Any) -> Any:
    """A copy of a state with the precision and device of another: an adapter may have changed them since."""
    return tree_map(lambda t, o: t.detach().to(o, copy=True), state, other)
