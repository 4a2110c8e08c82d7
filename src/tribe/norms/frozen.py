"""Normalise with the stored statistics, and leave them: ordinary inference."""

from tribe.core.rules import Frozen
from tribe.norms import register

register("frozen")(Frozen)

__all__ = ["Frozen"]
