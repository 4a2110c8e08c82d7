"""Time filters: use the order of images, whose neighbours often share a class. Each is one file, a frozen dataclass.

The next image of a camera is probably of the same class. A filter turns the predictions of any method into predictions
that use this: ``tribe.adapt(net, "tribe", time="auto")``. To add one, put a file beside this one, with
`@register("name")`; it imports what it needs from here. See docs/time.md.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.registry import Registry

registry: Registry["TimeFilter"] = Registry("time filter")
register, create, names, get = registry.register, registry.create, registry.names, registry.get

LARGE = 1e4  # a largest logit beyond which logits are shifted: smaller ones keep their bits
LEAST = -1e30  # a logit below it is as good as this: sums of two, and quotients, stay finite


class Filtered(NamedTuple):
    """The result of filtering a batch."""

    logits: Tensor  # (S, B, K), the log of the filtered probabilities
    used: Tensor  # (S, B), where they replace the method's own prediction
    state: Any  # of the filter, after the batch


class FilterInfo(NamedTuple):
    """A report on the filter of one stream, in plain numbers."""

    on: bool  # whether the last image was filtered
    burst: float  # how many images in a row share their class, as the filter estimates it
    temperature: float  # that the filter divides the logits by
    evidence: float  # that neighbours share their class, in nats; the filter is on above its threshold


@dataclass(frozen=True)
class TimeFilter(ABC):
    """A way to use the order of images. Its fields are its settings; everything that changes is in the state.

    The order of images in a batch is their order in time, and batches follow one another. A filter sees predictions
    only: no image, no label. `step` is pure, and streams are independent, as for a method.
    """

    name: ClassVar[str]  # set by @register; "tribe+NAME" is TRIBE with this filter
    paper: ClassVar[str]  # where the filter comes from
    always_on: ClassVar[str | None] = None  # why it filters also where neighbours share nothing; None: it does not

    @property
    def uses_batch(self) -> bool:
        """Return whether an answer also depends on later images of its batch."""
        return False

    @abstractmethod
    def init(self, streams: int, classes: int, like: Tensor) -> Any:
        """Return the state before the first image, on the device and in the precision of ``like``."""

    @abstractmethod
    def step(self, state: Any, logits: Tensor, valid: Tensor) -> Filtered:
        """Filter the logits (S, B, K) of the images that are ``valid`` (S, B); the others change nothing.

        `informative` says which images count, and `bounded` makes their logits safe.
        """

    def info(self, state: Any) -> list[FilterInfo] | None:
        """Report on each stream; None if there is nothing to report."""
        return None


def informative(logits: Tensor, valid: Tensor) -> Tensor:
    """Return which images (S, B) count: valid ones whose logits are not NaN and not all equal, as a bad image's are.

    A logit of minus infinity is a class that is excluded; an image with one of plus infinity does not count.
    """
    high, low = logits.amax(-1), logits.amin(-1)  # NaN if one is
    counted: Tensor = valid & (high > low) & (high < torch.inf)
    return counted


def bounded(logits: Tensor, counted: Tensor) -> Tensor:
    """Return logits (S, B, K) of the same probabilities that do not overflow; images that do not count get 0.

    What does not count must not be NaN either: a product with 0 would still be NaN.
    """
    safe = logits.masked_fill(~counted.unsqueeze(-1), 0)
    high = safe.amax(-1, keepdim=True)
    return (safe - torch.where(high.abs() > LARGE, high, 0)).clamp_min(LEAST)


def resolve(given: str | TimeFilter) -> TimeFilter:
    """Return a filter as it is; a name stands for the filter with default settings, "auto" for the Markov filter."""
    if isinstance(given, TimeFilter):
        return given
    return create("time" if given == "auto" else given)


registry.load(__name__, __path__)  # last: filter files import the names above from here
