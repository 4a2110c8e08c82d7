"""The contracts of data sets and scenarios. A check is named for its property; its docstring names the bug."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tribe.core.state import digest
from tribe.data.datasets import Dataset
from tribe.data.scenarios import LongTail, Natural, Scenario, Schedule, class_counts
from tribe.testing.samples import CLASSES
from tribe.testing.shared import generators_stay, seed_generators

SAMPLES = 7  # images of a domain that the checks read
PER_CLASS = 120  # images of each of the 4 classes in each domain: a long tail of 100 leaves none empty


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
            seed_generators(seed)
            with generators_stay():
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


DATASET_CHECKS: tuple[Callable[[Dataset], None], ...] = (
    names_are_different,
    labels_fit_the_classes,
    images_are_in_range,
    order_of_reading_does_not_matter,
    reading_again_gives_the_same,
    what_is_not_there_is_refused,
)


# -- scenarios -------------------------------------------------------------------------------------------------------


def label_sets(scenario: Scenario) -> list[Tensor]:
    """Return labels of every base domain, each in another order."""
    count = 3 if scenario.domains is None else len(scenario.domains)
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(CLASSES * PER_CLASS, generator=generator) % CLASSES for _ in range(count)]


def _draws(scenario: Scenario) -> list[tuple[Scenario, Schedule]]:
    """Return the scenario with the released sampler and with the paper's draw, each with a schedule."""
    variants = [dataclasses.replace(scenario, draw=draw) for draw in ("released", "paper")]
    return [(variant, variant.schedule(label_sets(variant), seed=5)) for variant in variants]


def _times_visited(scenario: Scenario) -> Tensor:
    """Return how often the scenario visits each domain number."""
    bases = label_sets(scenario)
    visits = torch.tensor(scenario.visits(range(len(bases))))
    return torch.bincount(visits, minlength=len(scenario.expand(bases)))


def is_plain_data(scenario: Scenario) -> None:
    """Catches a schedule of other types, with columns of different lengths, or without images."""
    for _, schedule in _draws(scenario):
        types = [t.dtype for t in schedule]
        assert types == [torch.int64, torch.int64, torch.bool], f"the columns are {types}"
        assert len({t.shape for t in schedule}) == 1, "the columns have different lengths"
        assert schedule.index.ndim == 1, "the columns have more than one axis"
        assert len(schedule.index), "the stream is empty"


def indices_are_valid(scenario: Scenario) -> None:
    """Catches a domain or an image that does not exist, and an image played twice in one visit."""
    for variant, schedule in _draws(scenario):
        labels = variant.expand(label_sets(variant))
        assert 0 <= int(schedule.domain.min()) <= int(schedule.domain.max()) < len(labels), "a domain does not exist"
        sizes = torch.tensor([len(y) for y in labels])
        assert bool(((schedule.index >= 0) & (schedule.index < sizes[schedule.domain])).all()), "no such image"
        most = int(sizes.max())
        played = torch.bincount(schedule.domain * most + schedule.index, minlength=len(labels) * most)
        often = played.reshape(len(labels), -1).amax(1)
        assert bool((often <= _times_visited(variant)).all()), "an image plays twice in one visit"


def counts_match_the_profile(scenario: Scenario) -> None:
    """Catches a stream with more or fewer images of a class than the profile says."""
    for variant, schedule in _draws(scenario):
        if isinstance(variant.profile, Natural):
            expected = torch.full((CLASSES,), PER_CLASS)
        elif isinstance(variant.profile, LongTail):
            expected = torch.from_numpy(variant.profile.counts(CLASSES, CLASSES * PER_CLASS, variant.draw))
        else:
            continue  # a custom profile: its counts are not known
        counts = class_counts(schedule, variant.expand(label_sets(variant)), CLASSES)
        if getattr(variant.profile, "varying", False):
            counts = counts.sort(1, descending=True).values
        assert torch.equal(counts, _times_visited(variant)[:, None] * expected), (
            f"the classes have {counts.tolist()} samples"
        )


def same_seed_same_schedule(scenario: Scenario) -> None:
    """Catches draws from global random generators, state kept on the object, and a seed without effect."""
    for variant, schedule in _draws(scenario):
        with generators_stay():
            again = copy.deepcopy(variant).schedule(label_sets(variant), seed=5)
            another = digest(variant.schedule(label_sets(variant), seed=6))
        assert digest(schedule) == digest(again), "equal seeds make different streams"
        if variant.same_for_all_seeds is None:
            assert digest(schedule) != another, "the seed changes nothing"
        else:
            assert digest(schedule) == another, (
                f"same_for_all_seeds is {variant.same_for_all_seeds!r}, but the seed changes the stream"
            )


def leaves_labels_alone(scenario: Scenario) -> None:
    """Catches a sampler that shuffles the labels it is given in place."""
    labels = label_sets(scenario)
    scenario.schedule(labels, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(labels, label_sets(scenario), strict=True)), "labels changed"


SCENARIO_CHECKS: tuple[Callable[[Scenario], None], ...] = (
    is_plain_data,
    indices_are_valid,
    counts_match_the_profile,
    same_seed_same_schedule,
    leaves_labels_alone,
)
