"""Groups of entries that go through the network together: their images, their steps and their predictions."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.core.state import leaves, per_stream, rebuild, tree_map
from tribe.core.validation import as_mask, as_order, in_order
from tribe.methods import AnyMethod, Deployed, Frozen, Pipeline, finite, mask_logits, screen
from tribe.streams.inputs import Images, arrange, as_floats

MAX_ENTRIES = 128  # of a group: more save little time
MAX_IMAGES = 256  # of a group of several entries: activations take memory
MAX_STATE_BYTES = 2**30  # of the states of a group of several entries
RECORDINGS = 16  # shapes of groups whose CUDA graphs are kept


class Arrived(NamedTuple):
    """The images of one entry, checked and in the order of time."""

    x: Tensor  # (S, B, ...)
    added: bool  # whether the axis of streams was added
    valid: Tensor | None = None  # (S, B), False for padding; None: all are real
    ranks: Tensor | None = None  # (S, B), the positions that sorted them; None: they came in the order of time
    single: bool = False  # whether the axis of batches was added

    @classmethod
    def of(
        cls, x: Images, net: Backbone, streams: int, valid: Tensor | None = None, order: Tensor | None = None
    ) -> "Arrived":
        """Check images (B, ...) or (S, B, ...), their mask and their order, as `tribe.Adapter` takes them.

        Without the axis B it is one image, or one image of each stream: see `tribe.streams.inputs`.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            x = as_floats(x, net)
        x = x.detach().as_subclass(Tensor).to(net.dtype)  # a plain tensor: a subclass may redefine operations
        if x.is_inference():
            x = x.clone()
        rank, single = net.rank, False
        added = streams == 1 and not (rank and x.dim() == rank + 1 and x.shape[0] == 1)
        if rank and (x.dim() - rank != (not added) or x.shape[1 - rank] != net.image_channels):
            x, single = arrange(x, net, 1 if added else streams)
        if added:
            x = x.unsqueeze(0)
        if x.dim() < 3 or x.shape[0] != streams:
            layout = "(B, ...)" if streams == 1 else f"({streams}, B, ...): one row of images a stream"
            raise ValueError(f"expected images {layout}; got {tuple(x.shape[1:] if added else x.shape)}")
        if x.device != net.device:
            raise ValueError(f"images are on {x.device}, the network on {net.device}: move one with .to()")
        if single:  # also of these
            valid, order = (t.unsqueeze(-1) if isinstance(t, Tensor) else t for t in (valid, order))
        mask = None if valid is None else as_mask(valid, x, added)
        if order is None:
            return cls(x, added, mask, single=single)
        ranks = as_order(order, x, added, mask)
        return cls(in_order(x, ranks), added, None if mask is None else in_order(mask, ranks), ranks, single)

    def as_given(self, logits: Tensor) -> Tensor:
        """Return the logits (S, B, K) in the layout in which the images came."""
        if self.single:
            logits = logits[:, 0]
        return logits[0] if self.added else logits


class EntryGroup(NamedTuple):
    """Entries that go through the network together."""

    names: tuple[str, ...]
    entries: int  # their number, padding included
    x: Tensor  # (R, B, ...), padded; R / entries rows are those of one
    valid: Tensor | None  # (R, B), False for padding; None: there is none
    sizes: tuple[int, ...]  # images of each stream of an entry, without the padding of the group
    frozen: bool  # whether the entries only predict

    def rows(self, rows: list[int]) -> "EntryGroup":
        """Return the group with some of its rows of images; names and sizes stay those of the whole."""
        return self._replace(x=self.x[rows], valid=None if self.valid is None else self.valid[rows])

    def unused(self, bad: Tensor | None) -> Tensor | None:
        """Return the images whose logits are not checked: bad ones and padding."""
        return bad if self.valid is None else ~self.valid if bad is None else bad | ~self.valid

    def split(self, values: Tensor, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
        """Return the values of the images of each entry, without padding, in the order in which they were given."""
        own = {}
        for name, part, size in zip(self.names, values.split(len(values) // self.entries), self.sizes, strict=False):
            ranks = arrived[name].ranks
            own[name] = part[:, :size] if ranks is None else in_order(part[:, :size], ranks.argsort(1))
        return own

    def split_bad(self, bad: Tensor | None, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
        """Return the bad images of each entry that are not padding; empty if there are none."""
        return {} if bad is None else self.split(bad if self.valid is None else bad & self.valid, arrived)


def group_entries(
    arrived: Mapping[str, Arrived], frozen: Mapping[str, bool], size: int, padded: bool, together: bool = True
) -> Iterator[EntryGroup]:
    """Group entries whose images have the same shape; frozen ones, which only predict, apart.

    Groups are ``padded`` to powers of 2 of entries and of images where each shape costs a recording; otherwise a group
    has entries with the same number of images only. The ``size`` of a state in bytes bounds a group. Unless
    ``together``, each entry is a group.
    """
    kinds: dict[Any, list[str]] = {}
    for name, (x, *_) in arrived.items():
        batch = bucket(x.shape[1]) if padded else x.shape[1]
        kinds.setdefault((frozen[name], batch, x.shape[2:], x.dtype), []).append(name)
    for (only_predicts, batch, *_), names in kinds.items():
        most = min(MAX_ENTRIES, MAX_IMAGES // max(batch, 1), MAX_STATE_BYTES // max(size, 1)) if together else 1
        most = 2 ** (max(1, most).bit_length() - 1)
        for start in range(0, len(names), most):
            chosen = tuple(names[start : start + most])
            own = [arrived[name] for name in chosen]
            sizes = tuple(one.x.shape[1] for one in own)
            count = bucket(len(own)) if padded else len(own)
            full = count == len(own) and set(sizes) == {batch}
            if full and count == 1:
                x, valid = own[0].x, own[0].valid
            elif full and all(one.valid is None for one in own):
                x, valid = torch.cat([one.x for one in own]), None
            else:
                x, valid = _pad(own, count, batch)
            yield EntryGroup(chosen, count, x, valid, sizes, only_predicts)


def bucket(n: int) -> int:
    """Return the smallest power of 2 that is at least n.

    >>> [bucket(n) for n in (0, 1, 3, 64)]
    [0, 1, 4, 64]
    """
    return 2 ** (n - 1).bit_length() if n else 0


def _pad(arrived: list[Arrived], count: int, batch: int) -> tuple[Tensor, Tensor]:
    """The images of ``count`` entries with ``batch`` images a stream, and which of them are real."""
    first, rows = arrived[0].x, len(arrived[0].x)
    x = first.new_zeros(count * rows, batch, *first.shape[2:])
    valid = torch.zeros(count * rows, batch, dtype=torch.bool)
    for i, own in enumerate(arrived):
        here = slice(i * rows, (i + 1) * rows), slice(own.x.shape[1])
        x[here] = own.x
        valid[here] = True if own.valid is None else own.valid
    return x, valid.to(x.device)


class Runner:
    """Take steps and predictions of groups of entries, which may be ``padded`` to a few shapes that are recorded.

    With ``copies``, results share no memory with the recordings. The logits of no images have ``classes`` columns.
    """

    def __init__(
        self,
        method: AnyMethod,
        net: Backbone,
        classes: int,
        graphs: Switch,
        deterministic: bool,
        padded: bool,
        copies: bool,
    ) -> None:
        self.method, self.net, self.classes, self.padded = method, net, classes, padded
        self._options, self._copies = (graphs, deterministic), copies
        self.unpadded = Steps(method, net, graphs, deterministic)  # refuses bad arguments now
        self._padded: OrderedDict[torch.Size, Steps] = OrderedDict()  # by shape, the least recently used first

    def step(self, group: EntryGroup, states: Sequence[Any], retired: Any = None) -> tuple[Tensor, list[Any] | None]:
        """Predict, then adapt; return logits (R, B, K) and the next state of each entry, or None if they stay.

        A frozen group only predicts, and a time filter moves on. A single state may be written into the memory of
        ``retired``.
        """
        if not group.x.shape[1]:
            return group.x.new_zeros(len(group.x), 0, self.classes), None
        if group.frozen:
            state = gather(states, group.entries)
            logits, state = self.method.predict_and_advance(self.net, state, group.x, group.valid)
            filtered = Pipeline.of(self.method).filter is not None
            return logits, scatter(state, group.entries, len(states), copy=False) if filtered else None
        steps = self._steps_of(group.x.shape)
        if group.entries == 1 and not self._copies:
            logits, state = steps(states[0], group.x, group.valid, retired)
            return logits, [state]
        logits, state = steps(gather(states, group.entries), group.x, group.valid, retired)
        if self.padded and steps.capture_disabled_reason is not None:  # the other shapes need not try
            self.unpadded.capture_disabled_reason = steps.capture_disabled_reason
            self._padded.clear()
        copy = self._copies and steps.capture_disabled_reason is None
        return logits, scatter(state, group.entries, len(states), copy)

    def predict(
        self,
        group: EntryGroup,
        states: Sequence[Any],
        deployed: Callable[[], Deployed],
        method: AnyMethod | None = None,
    ) -> Tensor:
        """Predict as `Method.predict` does, with the network of these states, which may have been made before."""
        method = method or self.method
        if not group.x.shape[1]:
            return group.x.new_zeros(len(group.x), 0, self.classes)
        if isinstance(method, Pipeline) and method.filter is not None:
            inner = states if isinstance(method.unfiltered, Pipeline) else [state.method for state in states]
            output = self.predict(group, inner, deployed, method.unfiltered)
            beliefs = gather([state.filter for state in states], group.entries)
            return method.filter_output(self.net, beliefs, output, group.valid)[0]
        if method.not_exportable_because is not None:
            return method.predict(self.net, gather(states, group.entries), group.x, group.valid)
        x, seen, _ = screen(group.x, group.valid)
        logits = deployed().logits(self.net, x, seen)
        return mask_logits(logits, seen & finite(logits))

    def predict_source(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict images (R, B, ...) with the source model."""
        if not x.shape[1]:
            return x.new_zeros(len(x), 0, self.classes)
        x, seen, _ = screen(x, valid)
        logits = Deployed(*self.net.source(len(x)), Frozen()).logits(self.net, x, seen)
        return mask_logits(logits, seen & finite(logits))

    def use(self, net: Backbone, method: AnyMethod | None = None) -> None:
        """Go on with this network, and a method; recordings of another, or before the network moved, are dropped."""
        self.net, self.method = net, method or self.method
        self.unpadded.method = self.method
        self.unpadded.use(net)
        self._padded.clear()

    def _steps_of(self, shape: torch.Size) -> Steps:
        """The steps for groups of this shape: each shape is recorded once, if steps are captured at all."""
        if not self.padded or self.unpadded.capture_disabled_reason is not None:
            return self.unpadded
        if shape not in self._padded:
            self._padded[shape] = Steps(self.method, self.net, *self._options)
        self._padded.move_to_end(shape)
        if len(self._padded) > RECORDINGS:
            self._padded.popitem(last=False)
        return self._padded[shape]


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
    weights = None if networks[0].weights is None else [own for n in networks for own in n.weights or ()]
    return Deployed(
        gather([n.affine for n in networks]), gather([n.stats for n in networks]), networks[0].norm, weights
    )
