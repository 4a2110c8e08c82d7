"""Normalise each batch with its own mean and variance, and keep nothing (Schneider et al., NeurIPS 2020)."""

from tribe.engine.rules import PerBatch, pool_batch
from tribe.norms import register

register("batch")(PerBatch)

__all__ = ["PerBatch", "pool_batch"]
