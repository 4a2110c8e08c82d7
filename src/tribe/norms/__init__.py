"""Norm rules: what a normalisation layer does with the moments of a batch. A rule, not a layer; configuration only.

To add one, put a file beside this one: a frozen dataclass with `@register("name")`. See CONTRIBUTING.
"""

from typing import ClassVar, Protocol

from torch import Tensor

from tribe.registry import Registry
from tribe.state import Stats


class Norm(Protocol):
    """A function from the per-sample moments of a batch to the statistics that normalise it.

    A rule may also have ``group(labels, valid, dtype)``: what that makes of the labels, once a pass, is then handed to
    every call in their place. It spares the layers of a network doing the same work each.
    """

    @property
    def classes(self) -> int:
        """K, the statistics kept per channel."""
        ...

    observes: ClassVar[bool]  # False: mean and var are not looked at (and not computed)

    def __call__(
        self,
        mean: Tensor,  # (R, B, C) over the `count` pixels of each sample
        var: Tensor,  # (R, B, C) biased
        count: int,
        stats: Stats,  # (R, K, C) as they stood before this batch
        labels: Tensor | None,  # (R, B) pseudo labels; None: none are known
        valid: Tensor,  # (R, B) False: padding or a poisoned image, which weighs nothing
        eps: float,
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the mean and var to normalise with, (R, 1|B, C), and the statistics to keep."""
        ...


registry: Registry[Norm] = Registry("norm")
register, create, names, get = registry.register, registry.create, registry.names, registry.get
registry.load(__name__, __path__)
