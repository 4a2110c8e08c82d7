"""Steps and predictions of a group of streams."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.methods import AnyMethod, Deployed, Pipeline, finite, mask_logits, predict_and_advance, screen
from tribe.streams.batching import Group, gather, gather_deployed, scatter

RECORDINGS = 16  # shapes of groups whose CUDA graphs are kept
OWN_WEIGHTS = "each stream has weights of its own, which cannot be batched"
EXACT = "exact=True: each stream gets the bits that it gets alone"


class Runner:
    """Takes steps and predictions of groups of streams.

    Args:
        method: what adapts.
        net: the network.
        graphs: as for `Steps`.
        deterministic: as for `Steps`.
        exact: streams go through the network one by one.
    """

    def __init__(self, method: AnyMethod, net: Backbone, graphs: Switch, deterministic: bool, exact: bool) -> None:
        self.method, self.net = method, net
        self.padded = not exact and net.device.type != "cpu"  # each shape of a group may cost a recording
        self.alone: str | None = EXACT if exact else None  # why streams go through the network one by one
        self._graphs, self._deterministic = graphs, deterministic
        self._steps: OrderedDict[Any, Steps] = OrderedDict({None: self._new_steps()})  # refuses bad arguments now

    def step(self, group: Group, states: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """Predict, then adapt; return logits (S, B, K) and a state for each stream."""
        rows, steps = len(group.x), self._steps_of(group)
        logits, state = steps(gather(states, rows), group.x, group.valid)
        return logits, scatter(state, rows, len(states), copy=steps.capture_disabled_reason is None)

    def follow(self, group: Group, states: Sequence[Any]) -> tuple[Tensor, list[Any] | None]:
        """Predict without adapting, in the order of the streams; states only if a time filter goes on."""
        rows = len(group.x)
        logits, state = predict_and_advance(self.method, self.net, gather(states, rows), group.x, group.valid)
        filtered = isinstance(self.method, Pipeline) and self.method.filter is not None
        return logits, scatter(state, rows, len(states), copy=False) if filtered else None

    def predict(self, group: Group, states: Sequence[Any], networks: Sequence[Deployed]) -> Tensor:
        """Predict without adapting, with what `Method.deployed` made of each state."""
        rows = len(group.x)
        filled = [*networks, *[networks[0]] * (rows - len(networks))]
        return predict(self.method, self.net, states, gather_deployed(filled), group.x, group.valid)

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
    method: AnyMethod, net: Backbone, states: Sequence[Any], deployed: Deployed, x: Tensor, valid: Tensor | None
) -> Tensor:
    """As `Method.predict`, with the network that `Method.deployed` made: it is not made again at every call."""
    rows = len(x)
    if isinstance(method, Pipeline) and method.filter is not None:
        inner = states if method.guard is not None else [state.method for state in states]
        output = predict(method.unfiltered, net, inner, deployed, x, valid)
        return method.filter_output(net, gather([state.filter for state in states], rows), output, valid)[0]
    if method.not_exportable_because is not None:
        return method.predict(net, gather(states, rows), x, valid)
    x, seen, _ = screen(x, valid)
    logits = deployed.logits(net, x, seen)
    return mask_logits(logits, seen & finite(logits))
