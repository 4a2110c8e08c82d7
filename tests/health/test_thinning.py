"""Which snapshots a history keeps, and what it may cost."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tribe
from tribe.core.rng import Key
from tribe.core.state import count_bytes
from tribe.health.history import Snapshot, TimedSnapshot, thin


class State(NamedTuple):
    numbers: Tensor
    key: Key


def state(size=1):
    return State(torch.zeros(1, size), Key(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))


def histories(steps, policy, images=lambda step: step, seconds=lambda step: step):
    """The entries after each of so many snapshots."""
    kept, snapshot = (), Snapshot(None, state(), None, False)
    for step in range(steps):
        kept = thin((*kept, TimedSnapshot(snapshot, float(seconds(step)), (images(step),))), policy)
        yield kept


def worst(ages, least=1):
    """How many times older than asked a snapshot is, at most: for an age just above that of a snapshot."""
    ages = sorted(ages)
    return max(older / max(newer, least) for newer, older in pairwise(ages) if older > least)


@pytest.mark.parametrize(("keep", "most"), [(8, 12), (16, 4), (32, 2)])
def test_every_age_finds_a_snapshot_that_is_not_much_older(keep, most):
    for kept in histories(2000, tribe.History(every=1, seconds=1.0, keep=keep)):
        assert len(kept) <= keep
        assert kept[0].taken == 0, "the oldest stays"
        ages = [kept[-1].taken - record.taken for record in kept]
        assert len(ages) < 3 or worst(ages) <= most


def test_both_kinds_of_ages_are_covered_where_images_come_at_a_changing_rate():
    """A thousand quick batches, a thousand slow ones: the images are in the first, the time in the second."""
    images = lambda step: min(step, 1000) * 1000 + max(step - 1000, 0)  # noqa: E731
    seconds = lambda step: min(step, 1000) + max(step - 1000, 0) * 1000  # noqa: E731
    *_, kept = histories(2000, tribe.History(every=1, seconds=1.0, keep=32), images, seconds)
    newest = kept[-1]
    assert worst([newest.taken - record.taken for record in kept], 1000) <= 4
    assert worst([newest.came[0] - record.came[0] for record in kept], 1000) <= 4


def test_a_state_that_grew_leaves_room_for_fewer():
    policy = tribe.History(keep=4, megabytes=1)
    size = 2**20 // 4 // 3  # three of them fit
    made = [TimedSnapshot(Snapshot(None, state(size), None, False), float(i), (i,)) for i in range(4)]
    assert count_bytes(made[0].snapshot.state) < 2**20 / 3 + 20
    assert [record.taken for record in thin(tuple(made), policy)] in ([0, 3], [0, 1, 3], [0, 2, 3])
    huge = [TimedSnapshot(Snapshot(None, state(2**20), None, False), float(i), (i,)) for i in range(2)]
    assert [record.taken for record in thin(tuple(huge), policy)] == [1.0], "one always stays, the newest"


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        ({"keep": 8, "megabytes": 4}, r"limit.*keep=3.*megabytes=9"),
        ({"keep": 2, "megabytes": 0.5}, r"limit.*Choose tribe.History\(megabytes=3\)"),
    ],
)
def test_a_history_larger_than_its_limit_is_refused_with_one_that_fits(policy, advice):
    with pytest.raises(ValueError, match=advice):
        tribe.History(**policy).check_memory(state(2**18))
    tribe.History(keep=3, megabytes=4).check_memory(state(2**18))
    tribe.History(keep=8, megabytes=9).check_memory(state(2**18))


@pytest.mark.parametrize(
    ("name", "value"), [("every", 0), ("seconds", "1h"), ("keep", 1), ("keep", None), ("megabytes", 0), ("clock", 3)]
)
def test_a_policy_says_what_its_fields_are(name, value):
    with pytest.raises(ValueError, match=name):
        tribe.History(**{name: value})
