"""Normalise with the statistics as they stand, and keep them: ordinary inference."""

from tribe.engine.rules import Frozen
from tribe.norms import register

register("frozen")(Frozen)

__all__ = ["Frozen"]
