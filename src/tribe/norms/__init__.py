"""Norm rules: how a normalisation layer turns the moments of a batch into statistics. A rule, not a layer.

To add one, put a file beside this one: a `NormRule`, a frozen dataclass with `@register("name")` that holds
configuration only. It imports what it needs from here. See CONTRIBUTING.
"""

from typing import ClassVar

from tribe.core.rules import Frozen, Norm, PerBatch, pool_batch
from tribe.core.state import Stats
from tribe.fields import check_fields
from tribe.registry import Registry, build

__all__ = ["Norm", "NormRule", "Stats", "build", "create", "get", "names", "pool_batch", "register"]


class NormRule:
    """A base of rules that observe the batch, and whose fields are checked by their types."""

    observes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)


registry: Registry[Norm] = Registry("norm")
register, create, names, get = registry.register, registry.create, registry.names, registry.get
register("frozen")(Frozen)
register("batch")(PerBatch)
registry.load(__name__, __path__)
