"""The contract of scenarios. A check is named for the property it asserts; its docstring names the bug it catches."""

import copy
import dataclasses

import torch
from torch import Tensor

from tribe.core.state import digest
from tribe.data.scenarios import LongTail, Natural, Scenario, Schedule, class_counts
from tribe.testing import shared
from tribe.testing.shared import CLASSES, PER_CLASS, label_sets


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
        assert torch.equal(counts, _times_visited(variant)[:, None] * expected), f"classes have {counts.tolist()}"


def same_seed_same_schedule(scenario: Scenario) -> None:
    """Catches draws from global random generators, state kept on the object, and a seed without effect."""
    for variant, schedule in _draws(scenario):
        with shared.generators_stay():
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


SCENARIO_CHECKS = shared.checks_of(globals())
