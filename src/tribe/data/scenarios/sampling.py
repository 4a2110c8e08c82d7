"""The class profile of a domain (how many of each class) and its local draw (in what order they come).

The paper's hierarchical model: alpha_k = sigma (1/IF)^(k/K) gives the classes their shares, q ~ Dir(alpha) is drawn for
each window of the stream, y ~ Cat(q). The samplers released with the paper differ: they cut classes to exact counts and
spread each class over a few slots. `draw` chooses between the two.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tribe.fields import Count, Positive, Range, check_fields

Draw = Literal["released", "paper"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Random = np.random.RandomState  # the legacy generator: its numbers are promised never to change


class ClassPool(NamedTuple):
    """The images that a domain plays, by class."""

    members: list[Ints]  # K arrays: the images of each class
    share: Floats  # (K,) relative weight of the classes in the prior: alpha = sigma * share


class Profile(Protocol):
    """The number of images of each class that a domain plays."""

    def select(self, members: list[Ints], draw: Draw, rng: Random) -> ClassPool:
        """Choose images of each of the K classes, which are given in file order."""


class Local(Protocol):
    """The order of the images of a domain."""

    def arrange(self, pool: ClassPool, draw: Draw, rng: Random) -> Ints:
        """Order all images of the pool."""


@dataclass(frozen=True)
class Natural:
    """All images of every class. NOTE: LongTail(1) differs: it gives all classes the same count and shuffles."""

    def select(self, members: list[Ints], draw: Draw, rng: Random) -> ClassPool:
        """Keep everything, in file order."""
        return ClassPool(members, np.ones(len(members)))


@dataclass(frozen=True)
class LongTail:
    """Class k keeps n_0 (1/IF)^(k/(K-1)) images, rounded down; fewer if it has fewer, so lengths may differ.

    A strong imbalance leaves the last classes without an image: CIFAR-100 at 200 loses 13, also in the paper's tables.
    That is a warning; fewer than two classes left are an error.
    """

    imbalance: Annotated[float, Range(low=1)] = 100.0  # IF, the largest class over the smallest
    varying: bool = False  # True: each domain assigns the counts to the classes at random (GLI-TTA-V)

    def __post_init__(self) -> None:
        check_fields(self)

    def share(self, classes: int, draw: Draw = "released") -> Floats:
        """(K,) the size of each class relative to the first; NOTE the paper has k/K where the release has k/(K-1)."""
        last = classes if draw == "paper" else max(classes - 1, 1)
        return np.array([(1 / self.imbalance) ** (k / last) for k in range(classes)])

    def counts(self, classes: int, images: int, draw: Draw = "released") -> Ints:
        """(K,) the number of images that classes 0 to K-1 keep, before a varying profile assigns them to classes."""
        return np.array([int(images // classes * share) for share in self.share(classes, draw)], dtype=np.int64)

    def select(self, members: list[Ints], draw: Draw, rng: Random) -> ClassPool:
        """Keep the first few of each class after a shuffle."""
        classes, images = len(members), sum(map(len, members))
        counts, share = self.counts(classes, images, draw), self.share(classes, draw)
        if lost := int((counts == 0).sum()):
            message = f"an imbalance of {self.imbalance:g} leaves {lost} of {classes} classes without an image"
            if classes - lost < 2:
                raise ValueError(f"{message}: the largest has {counts.max()}. Lower the imbalance, or use more images")
            warnings.warn(f"{message}, in every domain", stacklevel=2)
        if self.varying:
            order = np.arange(classes)
            rng.shuffle(order)
            counts, share = counts[order], share[order]
        kept = []
        for images_of_class, count in zip(members, counts, strict=True):
            shuffled = np.arange(len(images_of_class))
            rng.shuffle(shuffled)
            kept.append(images_of_class[shuffled[:count]])
        return ClassPool(kept, share)


@dataclass(frozen=True)
class Shuffled:
    """A random order: locally as balanced as the whole domain."""

    def arrange(self, pool: ClassPool, draw: Draw, rng: Random) -> Ints:
        """Put all images in random order."""
        return np.asarray(rng.permutation(np.concatenate(pool.members)))


@dataclass(frozen=True)
class Dirichlet:
    """Classes in bursts: for a while a few classes, then others."""

    sigma: Positive = 0.1  # concentration; smaller: fewer classes at a time
    window: Count = 64  # samples that share one q in the paper's draw, a batch

    def __post_init__(self) -> None:
        check_fields(self)

    def arrange(self, pool: ClassPool, draw: Draw, rng: Random) -> Ints:
        """Put the images in the order of the stream."""
        return self._windows(pool, rng) if draw == "paper" else self._slots(pool, rng)

    def _slots(self, pool: ClassPool, rng: Random) -> Ints:
        """Cut each class into one part per slot, sizes q_k ~ Dir(sigma); order the classes of a slot at random."""
        classes = len(pool.members)
        slots = min(classes, 100)
        q = rng.dirichlet([self.sigma] * slots, size=classes)  # (K, slots)
        if not np.isfinite(q).all():
            raise ValueError(f"sigma {self.sigma} is too small for the released sampler to compute; use draw='paper'")
        size = np.array([len(members) for members in pool.members])
        cuts = np.minimum((np.cumsum(q, axis=1)[:, :-1] * size[:, None]).astype(np.int64), size[:, None])
        parts = np.diff(cuts, axis=1, prepend=0, append=size[:, None])  # (K, slots) images of each class in each slot
        place = np.empty((slots, classes), dtype=np.int64)  # the position of each class in a slot
        for slot in range(slots):
            place[slot, rng.permutation(classes)] = np.arange(classes)
        when = (np.arange(slots)[:, None] * classes + place).T  # (K, slots)
        images = np.concatenate(pool.members)  # class by class, as `parts` counts them
        return images[np.argsort(np.repeat(when.ravel(), parts.ravel()), kind="stable")]

    def _windows(self, pool: ClassPool, rng: Random) -> Ints:
        """In each window q ~ Dir(sigma share), y ~ Cat(q) without replacement; a domain starts a window."""
        left = np.array([len(members) for members in pool.members])
        labels = []
        while total := int(left.sum()):
            drawn = drain(log_dirichlet(self.sigma * pool.share, rng), left, min(self.window, total), rng)
            left = left - np.bincount(drawn, minlength=len(left))
            labels.append(drawn)
        return deal([rng.permutation(members) for members in pool.members], np.concatenate(labels))


def log_dirichlet(alpha: Floats, rng: Random) -> Floats:
    """Log of a Dirichlet draw up to a constant, stable for small alpha: G(a) = G(a + 1) U^(1/a)."""
    uniform = 1.0 - rng.uniform(size=alpha.shape)  # (0, 1]
    return np.asarray(np.log(rng.standard_gamma(alpha + 1)) + np.log(uniform) / alpha)


def drain(log_q: Floats, left: Ints, size: int, rng: Random) -> Ints:
    """Draw from Cat(q) without replacement; an exhausted category drops out, and the others keep their proportions.

    Deleting the draws of exhausted categories from a sequence of independent draws does exactly that.
    """
    left, parts = left.copy(), [np.empty(0, dtype=np.int64)]
    while size:
        log_p = np.where(left > 0, log_q, -np.inf)
        p = np.exp(log_p - log_p.max())
        drawn = np.asarray(rng.choice(len(p), size=size, p=p / p.sum()))
        drawn = drawn[occurrence(drawn) < left[drawn]]
        left -= np.bincount(drawn, minlength=len(left))
        size -= len(drawn)
        parts.append(drawn)
    return np.concatenate(parts)


def occurrence(values: Ints) -> Ints:
    """Return how often each value occurs before its position."""
    order = np.argsort(values, kind="stable")
    counts = np.bincount(values)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    result = np.empty(len(values), dtype=np.int64)
    result[order] = np.arange(len(values)) - starts
    return result


def deal(piles: list[Ints], turns: Ints) -> Ints:
    """At each t take the next element of pile ``turns[t]``."""
    sizes = np.array([len(pile) for pile in piles])
    return np.asarray(np.concatenate(piles)[(np.cumsum(sizes) - sizes)[turns] + occurrence(turns)])
