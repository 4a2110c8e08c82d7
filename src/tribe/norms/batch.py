"""Normalise each batch with its mean and variance, and leave the stored ones (Schneider et al., NeurIPS 2020)."""

from tribe.core.rules import PerBatch
from tribe.norms import register

register("batch")(PerBatch)

__all__ = ["PerBatch"]
