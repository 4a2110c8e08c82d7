"""The contract of data sets. A check is named for the property it asserts; its docstring names the bug it catches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tribe.data.datasets import Dataset
from tribe.testing import shared

SAMPLES = 7  # images of a domain that the checks read


def _some(dataset: Dataset, domain: str) -> Tensor:
    """Return some positions, from the first image of a domain to the last."""
    count = len(dataset.labels(domain))
    return torch.linspace(0, count - 1, min(count, SAMPLES)).long()


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether images are equal; NaN equals NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def names_are_different(dataset: Dataset) -> None:
    """Catches a data set without domains, and two classes or domains with the same name."""
    assert len(dataset.domains), "there are no domains"
    for what, names in (("class", dataset.classes), ("domain", dataset.domains)):
        assert all(isinstance(name, str) and name for name in names), f"a {what} has no name"
        assert len(set(names)) == len(names), f"a {what} is named twice"


def labels_fit_the_classes(dataset: Dataset) -> None:
    """Catches labels of another type or shape, labels out of range, and labels that change between two calls."""
    for domain in dataset.domains:
        y = dataset.labels(domain)
        assert (y.dtype, y.ndim) == (torch.int64, 1), f"labels of {domain} are {y.dtype} of shape {tuple(y.shape)}"
        assert len(y), f"{domain} has no images"
        assert -1 <= int(y.min()) <= int(y.max()) < len(dataset.classes), (
            f"labels of {domain} are {int(y.min())} to {int(y.max())}; there are {len(dataset.classes)} classes"
        )
        assert torch.equal(y, dataset.labels(domain)), f"labels of {domain} change"


def images_are_in_range(dataset: Dataset) -> None:
    """Catches bytes, 0 to 255, channels last, a wrong number of images, domains of different sizes, a NaN pixel."""
    shapes = set()
    for domain in dataset.domains:
        index = _some(dataset, domain)
        x = dataset.images(domain, index)
        assert x.dtype == torch.float32, f"images of {domain} are {x.dtype}"
        shape = tuple(x.shape)
        assert shape[0] == len(index), f"{domain} returned {shape[0]} images; expected {len(index)}"
        assert shape[1:2] in ((1,), (3,)), f"images of {domain} have shape {shape}; expected 1 or 3 channels first"
        assert len(shape) == 4, f"images of {domain} have shape {shape}; expected (n, C, H, W)"
        unreadable = x.isnan().flatten(1).all(1)
        assert bool(((x >= 0) & (x <= 1)).flatten(1).all(1).logical_or(unreadable).all()), (
            f"images of {domain} have values outside 0 to 1"
        )
        shapes.add(x.shape[1:])
    assert len(shapes) == 1, f"images have different shapes: {sorted(shapes)}"


def order_of_reading_does_not_matter(dataset: Dataset) -> None:
    """Catches an image that depends on its neighbours, its place in the batch, or earlier reads."""
    for domain in dataset.domains:
        index = _some(dataset, domain)
        together = dataset.images(domain, index)
        backwards = torch.cat([dataset.images(domain, index[i : i + 1]) for i in reversed(range(len(index)))])
        assert _same(together, backwards.flip(0)), f"an image of {domain} differs when it is read alone"
        mixed = torch.arange(len(index)).roll(1).repeat(2)
        assert _same(together[mixed], dataset.images(domain, index[mixed])), (
            f"images of {domain} differ in another order, or twice in one batch"
        )


def reading_again_gives_the_same(dataset: Dataset) -> None:
    """Catches draws from global random generators, a cache that the caller can overwrite, and a changed index."""
    for domain in dataset.domains:
        index = _some(dataset, domain)
        old_index, copies = index.clone(), []
        for seed in (1, 2):
            shared.seed_generators(seed)
            with shared.generators_stay():
                x = dataset.images(domain, index)
            assert torch.equal(index, old_index), "the index was changed"
            copies.append(x.clone())
            x.fill_(0.5)  # a caller may write into the images
        assert _same(*copies), f"images of {domain} differ when they are read again"


def what_is_not_there_is_refused(dataset: Dataset) -> None:
    """Catches an unknown domain that is read as another, and positions past the end or counted from it."""
    for read in (dataset.labels, lambda domain: dataset.images(domain, torch.tensor([0]))):
        assert _refused(read, "no such domain"), "a domain that does not exist was read"
    for domain in dataset.domains:
        for beyond in (len(dataset.labels(domain)), -1):
            assert _refused(dataset.images, domain, torch.tensor([0, beyond])), f"{domain} has an image {beyond}"


def _refused(read: Callable[..., Any], *args: Any) -> bool:
    try:
        read(*args)
    except (ValueError, LookupError):
        return True
    return False


DATASET_CHECKS = shared.checks_of(globals())
