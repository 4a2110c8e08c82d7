"""Predict without learning: the source model as it is, or with the statistics of each batch."""

from dataclasses import dataclass
from typing import NamedTuple

from tribe.methods import Backbone, Deployed, Frozen, Info, Key, Method, PerBatch, ScreenedBatch, Update, register
from tribe.methods.stepping import finite


class SourceState(NamedTuple):
    """Clocks and report, as in every state."""

    key: Key
    info: Info


@register("source")
@dataclass(frozen=True)
class Source(Method):
    """The source model as it is: what adaptation is measured against (TEST in the paper's tables)."""

    paper = "the trained network itself"
    does_not_adapt = "it is the unadapted network"
    dense = True

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SourceState:
        """Return the clocks only."""
        return SourceState(*self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: SourceState) -> Deployed:
        """Return the source's parameters and statistics for every stream."""
        return Deployed(*net.source(len(state.key.seed)), Frozen())

    def adapt(self, net: Backbone, state: SourceState, batch: ScreenedBatch) -> Update:
        """Predict."""
        logits = self.logits(net, state, batch)
        return Update(logits, state, seen=batch.valid & finite(logits))


@register("bn")
@dataclass(frozen=True)
class BN(Source):
    """Normalise every batch with its own statistics (BN; Schneider et al., NeurIPS 2020; Nado et al., 2020)."""

    paper = "Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, 2020"
    works_on = ("statistics",)
    does_not_adapt = "it keeps nothing from one batch to the next"

    def deployed(self, net: Backbone, state: SourceState) -> Deployed:
        """Return the source's parameters, the batch's statistics."""
        return Deployed(*net.source(len(state.key.seed)), PerBatch())
