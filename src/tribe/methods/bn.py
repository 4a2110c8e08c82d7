"""Normalise every batch with its own statistics (BN; Schneider et al., NeurIPS 2020; Nado et al., 2020)."""

from dataclasses import dataclass

from tribe.methods import Backbone, Deployed, PerBatch, register
from tribe.methods.source import Source, SourceState


@register("bn")
@dataclass(frozen=True)
class BN(Source):
    """The source's parameters with each batch's own statistics."""

    paper = "Schneider et al., Improving robustness against common corruptions by covariate shift adaptation, 2020"
    works_on = ("statistics",)
    does_not_adapt = "it keeps nothing from one batch to the next"

    def deployed(self, net: Backbone, state: SourceState) -> Deployed:
        """Return the source's parameters, the batch's statistics."""
        return Deployed(*net.source(len(state.key.seed)), PerBatch())
