"""A group of streams through the network: a step, or a prediction, with the bits that each stream would get alone."""

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tribe.core.apart import Apart
from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.core.state import digest
from tribe.methods import Deployed, Method, Timed, finite, quiet, screen
from tribe.streams.batching import Group, gather, gather_deployed, scatter

RECORDINGS = 16  # shapes of groups whose CUDA graphs are kept
OWN_WEIGHTS = "each stream has weights of its own, which cannot be batched"
OTHER_BITS = (
    "a step of several streams gave other last bits than a step of one: the network or the method has an operation "
    "that depends on the size of a batch and is not in tribe.core.apart"
)


class Runner:
    """Takes steps and predictions of groups of streams.

    Args:
        method: what adapts.
        net: the network.
        graphs: as for `Steps`.
        deterministic: as for `Steps`.
        exact: every stream gets the bits that it would get alone, see `tribe.core.apart`.
    """

    def __init__(self, method: Method, net: Backbone, graphs: Switch, deterministic: bool, exact: bool) -> None:
        self.method, self.net, self.exact = method, net, exact
        self.padded = not exact and net.device.type != "cpu"  # each shape of a group may cost a recording
        self.alone: str | None = None  # why streams go through the network one by one
        self._graphs, self._deterministic = graphs, deterministic
        self._steps: OrderedDict[Any, Steps] = OrderedDict({None: self._new_steps()})  # refuses bad arguments now
        self._same_bits: set[Any] = set()  # kinds of groups that were compared with single streams

    def step(self, group: Group, states: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """Predict, then adapt: logits (S, B, K), and a state for each stream."""
        rows = len(group.x)
        if rows == 1 or not self.exact:
            steps = self._steps_of(group)
            logits, state = steps(gather(states, rows), group.x, group.valid)
            return logits, scatter(state, rows, len(states), copy=steps.capture_disabled_reason is None)
        if self.alone is None:
            steps = self._steps_of(group)
            with self._apart(rows):
                logits, state = steps(gather(states), group.x)
            after = scatter(state, rows, rows, copy=False)
            if self._has_same_bits(group, states, logits, after):
                return logits, after
            self.alone = OTHER_BITS
        results = [self._step_alone(group, states, i) for i in range(rows)]
        return torch.cat([logits for logits, _ in results]), [state for _, state in results]

    def _step_alone(self, group: Group, states: Sequence[Any], i: int) -> tuple[Tensor, Any]:
        steps = self._steps_of(group)
        logits, state = steps(states[i], group.x[i : i + 1].clone())
        return logits, scatter(state, 1, 1, copy=steps.capture_disabled_reason is None)[0]

    def _has_same_bits(self, group: Group, states: Sequence[Any], logits: Tensor, after: Sequence[Any]) -> bool:
        """Compare the first and the last stream with a step alone, at the first group of about this size and shape."""
        kind = (*group.kind, len(states).bit_length())
        if kind in self._same_bits:
            return True
        for i in (0, len(states) - 1):
            own, state = self._step_alone(group, states, i)
            if not _same(own[0], logits[i]) or digest(state) != digest(after[i]):
                return False
        self._same_bits.add(kind)
        return True

    def follow(self, group: Group, states: Sequence[Any]) -> tuple[Tensor, list[Any] | None]:
        """Predict without adapting, in the order of the streams; states only if a time filter goes on."""
        rows = len(group.x)
        with self._apart(rows):
            logits, state = self.method.follow(self.net, gather(states, rows), group.x, group.valid)
        timed = isinstance(self.method, Timed)
        return logits, scatter(state, rows, len(states), copy=False) if timed else None

    def predict(self, group: Group, states: Sequence[Any], networks: Sequence[Deployed]) -> Tensor:
        """Predict without adapting, with what `Method.deployed` made of each state."""
        rows = len(group.x)
        filled = [*networks, *[networks[0]] * (rows - len(networks))]
        with self._apart(rows):
            return predict(self.method, self.net, states, gather_deployed(filled), group.x, group.valid)

    def _apart(self, rows: int) -> contextlib.AbstractContextManager[Any]:
        if not self.exact or rows == 1:
            return contextlib.nullcontext()
        mode: contextlib.AbstractContextManager[Any] = Apart(rows)
        return mode

    def _new_steps(self) -> Steps:
        return Steps(self.method, self.net, self._graphs, self._deterministic)

    def _steps_of(self, group: Group) -> Steps:
        """The steps for groups of this shape: each shape is recorded once."""
        key = (len(group.x), *group.kind) if self.padded else None
        if key not in self._steps:
            self._steps[key] = self._new_steps()
        self._steps.move_to_end(key)
        if len(self._steps) > RECORDINGS:
            self._steps.popitem(last=False)
        return self._steps[key]


def predict(
    method: Method, net: Backbone, states: Sequence[Any], deployed: Deployed, x: Tensor, valid: Tensor | None
) -> Tensor:
    """As `Method.predict`, with the network that `Method.deployed` made: it is not made again at every call."""
    rows = len(x)
    if isinstance(method, Timed):
        output = predict(method.inner, net, [state.inner for state in states], deployed, x, valid)
        return method.filter_after(net, gather([state.time for state in states], rows), output, valid)[0]
    if method.more_than_a_pass is not None:
        return method.predict(net, gather(states, rows), x, valid)
    x, seen, _ = screen(x, valid)
    logits = deployed.logits(net, x, seen)
    return quiet(logits, seen & finite(logits))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)
