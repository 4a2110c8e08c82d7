"""Data sets: labelled images in named domains, read from the disk. Each is one file.

To add one, put a file beside this one: a frozen dataclass with `@register("name")`. See CONTRIBUTING.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tribe.data.corruptions import require_severity
from tribe.registry import Registry, nearest

NOT_IN_SPECS = ("data", "root", "workers")  # fields that do not change results: paths and threads
SAMPLED = 16  # images per domain in a fingerprint; another draw of the noise, or another archive, changes all of them


class Dataset(Protocol):
    """Images by domain and position. A domain is a name such as "fog@3".

    A data set needs these four members; `Defaults` lists the optional ones. If it is a dataclass, the
    commands set these fields where it has them: ``data`` (the root folder of all data sets) or ``root`` (its own
    folder), ``corruptions`` and ``severities``, ``split`` ("train" or "test"). The spec of an experiment holds all
    fields except `NOT_IN_SPECS`.
    """

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes."""

    @property
    def domains(self) -> Sequence[str]:
        """The names of the domains."""

    def labels(self, domain: str) -> Tensor:
        """Return (n,) int64 labels of a domain, in file order; -1 where unknown."""

    def images(self, domain: str, index: Tensor) -> Tensor:
        """(len(index), C, H, W) float images in [0, 1]; an image of NaN is played as not valid.

        A stream calls this from another thread, and two iterations may call it at the same time.
        """


class Defaults:
    """The optional members of a data set, with their defaults: inherit from this class, or define those you need."""

    name: ClassVar[str | None] = None  # set by @register; None: the name of the class
    clean_name: ClassVar[str | None] = None  # the clean data set that was corrupted; None: these images are clean
    outputs: Sequence[int] | None = None  # of a network that tells more classes apart: those that are its classes
    clean: Dataset | None = None  # the data set whose images are corrupted while they are read
    functions: Sequence[Callable[..., Any]] = ()  # code outside the class that the images depend on

    def digest(self, domain: str) -> str | None:
        """Return a hash of a domain's images; None: `tribe.datasets.fingerprint` reads a few of them."""
        return None


class BySeverity:
    """A base class: every corruption at every severity is a domain, such as "fog@5"."""

    corruptions: Sequence[str]
    severities: Sequence[int]

    def __post_init__(self) -> None:
        for severity in self.severities:
            require_severity(severity)

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every chosen severity."""
        return tuple(f"{name}@{severity}" for name in self.corruptions for severity in self.severities)


def optional(dataset: Any, member: str) -> Any:
    """Read an optional member of a data set or of its class; the default if it has none."""
    return getattr(dataset, member, getattr(Defaults(), member))


def require_domain(domain: str, domains: Sequence[str]) -> None:
    """Raise if a data set has no domain of this name."""
    if domain not in domains:
        raise ValueError(f"unknown domain {domain!r}: {nearest(domain, domains)}")


def fingerprint(dataset: Dataset) -> str:
    """Return 32 hexadecimal digits that identify the labels and images of every domain on the disk.

    If the data set has a method ``digest(domain)`` and it returns a hash, that is used. Otherwise a few images are
    read, evenly spaced in the domain. A data set that corrupts images while they are read has the fingerprint of the
    clean images: its fields say the rest, and the last bit of a corrupted pixel may differ between machines.
    """
    clean = optional(dataset, "clean")
    if clean is not None:
        return fingerprint(clean)
    digest_of = optional(dataset, "digest")
    result = hashlib.sha256()
    for domain in dataset.domains:
        labels, digest = dataset.labels(domain), digest_of(domain)
        result.update(f"{domain} {len(labels)} {digest}".encode() + labels.numpy().tobytes())
        if digest is None and len(labels):
            sample = torch.linspace(0, len(labels) - 1, min(SAMPLED, len(labels))).long()
            levels = (255 * dataset.images(domain, sample)).round().nan_to_num(-1).to(torch.int16)  # unreadable: NaN
            result.update(f"{tuple(levels.shape)}".encode() + levels.numpy().tobytes())
    return result.hexdigest()[:32]


registry: Registry[Dataset] = Registry("data set")
register, create, names, get = registry.register, registry.create, registry.names, registry.get
registry.load(__name__, __path__)
