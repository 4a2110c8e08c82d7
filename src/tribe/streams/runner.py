"""Steps and predictions of a group of entries."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.methods import AnyMethod, Deployed, Pipeline, finite, mask_logits, predict_and_advance, screen
from tribe.streams.batching import EntryGroup, gather, scatter

RECORDINGS = 16  # shapes of groups whose CUDA graphs are kept


class Runner:
    """Take steps and predictions of groups of entries.

    Args:
        method: what adapts.
        net: the network.
        graphs: as for `Steps`.
        deterministic: as for `Steps`.
        padded: groups are padded to a few shapes, each of which is recorded.
        copies: results share no memory with the recordings.
    """

    def __init__(
        self, method: AnyMethod, net: Backbone, graphs: Switch, deterministic: bool, padded: bool, copies: bool
    ) -> None:
        self.method, self.net, self.padded = method, net, padded
        self._options, self._copies = (graphs, deterministic), copies
        self._unpadded = self._new_steps()  # refuses bad arguments now
        self._padded: OrderedDict[tuple[int, ...], Steps] = OrderedDict()  # by shape, the least recently used first

    def step(self, group: EntryGroup, states: Sequence[Any], retired: Any = None) -> tuple[Tensor, list[Any]]:
        """Predict, then adapt; return logits (R, B, K) and a state for each entry.

        A single state may be written into the memory of ``retired``.
        """
        steps = self._steps_of(group.shape) if self.padded else self._unpadded
        if group.entries == 1 and not self._copies:
            logits, state = steps(states[0], group.x, group.valid, retired)
            return logits, [state]
        logits, state = steps(gather(states, group.entries), group.x, group.valid, retired)
        copy = self._copies and steps.capture_disabled_reason is None
        return logits, scatter(state, group.entries, len(states), copy)

    def advance(self, group: EntryGroup, states: Sequence[Any]) -> tuple[Tensor, list[Any] | None]:
        """Predict without adapting, in the order of the streams; return states only if a time filter moves on."""
        logits, state = predict_and_advance(self.method, self.net, gather(states, group.entries), group.x, group.valid)
        filtered = Pipeline.of(self.method).filter is not None
        return logits, scatter(state, group.entries, len(states), copy=False) if filtered else None

    @property
    def capture_disabled_reason(self) -> str | None:
        """Why steps are not captured in CUDA graphs; None if they are."""
        return self._unpadded.capture_disabled_reason

    def use(self, net: Backbone) -> None:
        """Go on with this network; recordings of another, or of this one before it moved, are dropped."""
        self.net = net
        self._unpadded.use(net)
        self._padded.clear()

    def _new_steps(self) -> Steps:
        return Steps(self.method, self.net, *self._options)

    def _steps_of(self, shape: tuple[int, ...]) -> Steps:
        """The steps for groups of this shape: each shape is recorded once."""
        if shape not in self._padded:
            self._padded[shape] = self._new_steps()
        self._padded.move_to_end(shape)
        if len(self._padded) > RECORDINGS:
            self._padded.popitem(last=False)
        return self._padded[shape]


def predict(
    method: AnyMethod, net: Backbone, group: EntryGroup, states: Sequence[Any], deployed: Callable[[], Deployed]
) -> Tensor:
    """Predict as `Method.predict` does, with the network of these states, which may have been made before."""
    if isinstance(method, Pipeline) and method.filter is not None:
        inner = states if method.guard is not None else [state.method for state in states]
        output = predict(method.unfiltered, net, group, inner, deployed)
        beliefs = gather([state.filter for state in states], group.entries)
        return method.filter_output(net, beliefs, output, group.valid)[0]
    if method.not_exportable_because is not None:
        return method.predict(net, gather(states, group.entries), group.x, group.valid)
    x, seen, _ = screen(group.x, group.valid)
    logits = deployed().logits(net, x, seen)
    return mask_logits(logits, seen & finite(logits))
