"""The source model as it is: what adaptation is measured against (TEST in the paper's tables)."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tribe.methods import Backbone, Deployed, Frozen, Info, Key, Method, commit_step, register, screen


class SourceState(NamedTuple):
    """Only what every state has."""

    key: Key
    info: Info


@register("source")
@dataclass(frozen=True)
class Source(Method):
    """Predict with the source model's own statistics and parameters."""

    paper = "the trained network itself"
    does_not_adapt = "it is the unadapted network"
    dense = True

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SourceState:
        """Clocks only."""
        return SourceState(*self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: SourceState) -> Deployed:
        """The source's parameters and statistics for every stream."""
        return Deployed(*net.source(len(state.key.seed)), Frozen())

    def step(
        self, net: Backbone, state: SourceState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, SourceState]:
        """Predict."""
        x, valid, rejected = screen(x, valid)
        logits, seen = self.pass_deployed(net, state, x, valid)
        return commit_step(net, state, state, logits, seen, rejected + (valid & ~seen).sum(1))
