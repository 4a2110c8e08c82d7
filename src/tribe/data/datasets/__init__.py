"""Data sets: labelled images in named domains, read from the disk. Each is one file.

To add one, put a file beside this one: a frozen dataclass with `@register("name")`. See CONTRIBUTING.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tribe.registry import Registry

NOT_IN_SPECS = ("data", "root", "workers")  # fields that do not change results: paths and threads


class Dataset(Protocol):
    """Images by domain and position. A domain is a name such as "fog@3".

    These four members are all that a data set needs. `Defaults` lists the optional ones. If it is a dataclass, the
    commands set these fields where it has them: ``data`` (the root folder of all data sets) or ``root`` (its own
    folder), ``corruptions`` and ``severities``, ``split`` ("train" or "test"). The spec of an experiment holds all
    fields except `NOT_IN_SPECS`.
    """

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
        """(len(index), C, H, W) float images in [0, 1]; an image of NaN is played as not valid.

        A stream calls this from another thread, and two iterations may call it at the same time.
        """
        ...


class Defaults:
    """The optional members of a data set, with their defaults: inherit from this class, or define those you need."""

    name: ClassVar[str | None] = None  # set by @register; None: the name of the class
    clean_name: ClassVar[str | None] = None  # the clean data set that was corrupted; None: these images are clean
    folder: ClassVar[str | None] = None  # the published folder under the root of all data sets
    outputs: Sequence[int] | None = None  # of a network that tells more classes apart: those that are its classes
    clean: Dataset | None = None  # the data set whose images are corrupted while they are read
    functions: Sequence[Callable[..., Any]] = ()  # code outside the class that the images depend on

    def digest(self, domain: str) -> str | None:
        """A hash of a domain's images; None: `tribe.datasets.fingerprint` reads a few of them."""
        return None


def optional(dataset: Any, member: str) -> Any:
    """Read an optional member of a data set or of its class; the default if it has none.

    >>> optional(get("cifar10-c"), "clean_name"), optional(object(), "clean_name")
    ('cifar10', None)
    """
    return getattr(dataset, member, getattr(Defaults(), member))


registry: Registry[Dataset] = Registry("data set")
register, create, names, get = registry.register, registry.create, registry.names, registry.get
registry.load(__name__, __path__)
