"""Data sets: labelled images in named domains, read from where they lie. Each is one file.

To add one, put a file beside this one: a frozen dataclass with `@register("name")`. See CONTRIBUTING.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tribe.registry import Registry


class Dataset(Protocol):
    """Images by domain and position. A domain is a name such as "fog@3"."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes."""
        ...

    @property
    def domains(self) -> Sequence[str]:
        """The names of the domains."""
        ...

    def labels(self, domain: str) -> Tensor:
        """(n,) int64 labels of a domain, in file order; -1 where unknown."""
        ...

    def images(self, domain: str, index: Tensor) -> Tensor:
        """(len(index), C, H, W) float images in [0, 1].

        It is called from another thread than the one that iterates over a stream, and two iterations may call it at
        once.
        """
        ...


registry: Registry[Dataset] = Registry("data set")
register, create, names, get = registry.register, registry.create, registry.names, registry.get
registry.load(__name__, __path__)
