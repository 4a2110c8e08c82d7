"""The test of changed entropies: quiet while nothing changes in any order of classes, and soon loud when it does."""

import math

import pytest
import torch

from tribe.health.martingale import MIN_BET, Martingale, Reference, fit_reference, rank

CLASSES = 4


def source(count, shift=0.0, labels=None, seed=0):
    """Entropies, predictions and labels (count,): classes differ in entropy, and one image in ten is wrong."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw) if labels is None else labels
    wrong = torch.rand(count, generator=draw) < 0.1
    predicted = torch.where(wrong, (labels + 1) % CLASSES, labels)
    level = 0.1 * labels - 2 + wrong + shift + torch.randn(count, generator=draw)
    return level.sigmoid(), predicted, labels


REFERENCE = fit_reference(*source(4000), CLASSES)


def play(ranks, size=16, test=None, reference=REFERENCE):
    """Feed ranks (S, N) in batches: (stream, images so far, since) of every alarm, and the last state."""
    test = test or Martingale()
    state, images, alarms = test.init(len(ranks)), torch.zeros(len(ranks), dtype=torch.int64), []
    for u in ranks.split(size, 1):
        alarm, state = test.step(reference, state, u, torch.ones_like(u, dtype=torch.bool), images)
        images = images + u.shape[1]
        for i in alarm.nonzero()[:, 0].tolist():
            alarms.append((i, int(images[i]), int(state.since[i, 0]), int(state.since[i, 1])))
    return alarms, state


def ranks(*parts):
    """The ranks of stretches of images, one stream."""
    return torch.cat([rank(REFERENCE, *part[:2]) for part in parts])[None]


def test_ranks_are_uniform_on_the_images_they_were_learned_from():
    u = rank(REFERENCE, *source(4000)[:2])
    assert float(u.mean()) == pytest.approx(0.5, abs=0.002)
    assert float(u.var()) == pytest.approx(1 / 12, abs=0.003)


def test_a_tie_has_the_middle_rank():
    same = Reference(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor(0.0))
    u = rank(same, torch.tensor([[0.0, 0.5, 1.0, 2.0]]), torch.zeros(1, 4, dtype=torch.int64))
    assert u.tolist() == [[0.375, 0.75, 0.875, 1.0]]


@pytest.mark.parametrize("length", [1, 50, 2000])
@pytest.mark.parametrize("size", [1, 64])
def test_no_alarm_on_source_images_whatever_the_order_of_classes(length, size):
    count = 4000 if size == 1 else 40_000
    labels = torch.arange(count) // length % CLASSES
    alarms, _ = play(ranks(source(count, labels=labels, seed=1)), size=size)
    assert alarms == []


def test_alarms_are_as_rare_as_alpha_says():
    # Fair ranks and no tolerance: on average at least 1 / alpha images between two false alarms.
    fair = Reference(REFERENCE.quantiles, torch.tensor(0.0))
    u = torch.rand(100, 2000, generator=torch.Generator().manual_seed(0))
    alarms, _ = play(u, size=4, test=Martingale(alpha=1e-3), reference=fair)
    assert len(alarms) <= u.numel() * 1e-3


@pytest.mark.parametrize("shift", [1.5, -1.5])
@pytest.mark.parametrize("size", [1, 64])
def test_a_change_in_either_direction_is_found_with_its_beginning(shift, size):
    before, after = source(3200, seed=1), source(960, shift, seed=2)
    (alarm,), state = play(ranks(before, after), size=size)
    assert 3200 < alarm[1] <= 3200 + 320
    assert abs(alarm[2 if shift > 0 else 3] - 3200) <= 128
    assert bool(state.changed)
    changed = float(ranks(after).mean()) - 0.5
    assert float(state.level) == pytest.approx(changed, abs=0.15)
    assert math.copysign(1, float(state.level)) == math.copysign(1, shift)


def test_an_alarm_is_given_once_a_change_and_again_after_a_normal_time():
    parts = [source(2000, shift, seed=i) for i, shift in enumerate((0, 2, 0, 2))]
    alarms, _ = play(ranks(*parts))
    assert [images // 2000 for _, images, *_ in alarms] == [1, 3]


@pytest.mark.parametrize("shift", [0.8, 1.5, -1.5, 3.0])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_an_alarm_ends_soon_after_the_images_are_normal_again_and_not_before(shift, size):
    """125 ranks are 500 images of which the source predicts every fourth, and 40 are 640 of every sixteenth."""
    streams, test = 20, Martingale()
    changed = [ranks(source(2000, shift, seed=2 * i)) for i in range(streams)]
    normal = [ranks(source(800, seed=2 * i + 1)) for i in range(streams)]
    played = torch.cat((torch.cat(changed), torch.cat(normal)), 1)
    state, on = test.init(streams), []
    for u in played.split(size, 1):
        _, state = test.step(REFERENCE, state, u, torch.ones_like(u) > 0, torch.zeros(streams, dtype=torch.int64))
        on.append(state.changed)
    lasted = torch.stack(on, 1).repeat_interleave(size, 1)
    assert bool(lasted[:, 800:2000].all()), "no alarm ends while the change lasts"
    late = lasted[:, 2000:].sum(1)
    assert int(late.max()) <= 150
    assert float(late.float().mean()) <= (40 if abs(shift) > 1 else 125)
    assert not lasted[:, 2150:].any()


@pytest.mark.parametrize(("shift", "most"), [(1.5, 56), (3.0, 42)])
def test_an_alarm_needs_few_ranks_where_each_batch_has_four(shift, most):
    """Four of 64 images are what a guard asks the source; no bet on a mean rank needs fewer than 25."""
    parts = [(ranks(source(400, seed=2 * i)), ranks(source(400, shift, seed=2 * i + 1))) for i in range(40)]
    alarms, _ = play(torch.cat([torch.cat(part, 1) for part in parts]), size=4)
    assert [i for i, *_ in sorted(alarms)] == list(range(40)), "each stream alarms once"
    assert sum(images - 400 for _, images, *_ in alarms) / 40 <= most


@pytest.mark.parametrize("length", [1, 50, 500])
def test_a_change_that_lasts_is_one_alarm_whatever_the_order_of_classes(length):
    labels = torch.arange(20_000) // length % CLASSES
    alarms, state = play(ranks(source(20_000, 1.5, labels=labels, seed=3)), size=16)
    assert len(alarms) == 1
    assert bool(state.changed)


def test_a_change_into_the_other_direction_is_another_alarm():
    alarms, state = play(ranks(*(source(1000, shift, seed=i) for i, shift in enumerate((0, 2, -2)))))
    assert [images // 1000 for _, images, *_ in alarms] == [1, 2]
    assert float(state.level) < 0


def test_alarms_after_alarms_are_as_rare_as_alpha_says():
    """An end is found at once, and the test begins anew: it does not raise false alarms faster."""
    fair, quick = Reference(REFERENCE.quantiles, torch.tensor(0.0)), Martingale(alpha=1e-2, end=1.0)
    u = torch.rand(100, 2000, generator=torch.Generator().manual_seed(0))
    alarms, _ = play(u, size=4, test=quick, reference=fair)
    assert 0 < len(alarms) <= u.numel() * 1e-2


def test_a_batch_without_images_changes_nothing():
    state = Martingale().init(1)
    alarm, after = Martingale().step(REFERENCE, state, torch.ones(1, 3), torch.zeros(1, 3) > 0, torch.tensor([0]))
    assert not alarm.any()
    assert float(after.bet.max()) == pytest.approx(MIN_BET)
    assert float(after.log_wealth.max()) == 0


@pytest.mark.parametrize("lacked", [False, True])
def test_a_class_without_enough_images_uses_those_of_all_classes_and_one_that_is_lacked_says_nothing(lacked):
    entropy, predicted, labels = source(400)
    kept = (predicted != 2) & ~(lacked & (labels == 2))
    reference = fit_reference(entropy[kept], predicted[kept], labels[kept], CLASSES)
    assert reference.quantiles.isfinite().all()
    if lacked:
        assert rank(reference, torch.tensor([[0.0, 0.3, 1.0]]), torch.full((1, 3), 2)).tolist() == [[0.5, 0.5, 0.5]]
    else:
        assert torch.equal(reference.quantiles[2], torch.quantile(entropy[kept], (torch.arange(64) + 0.5) / 64))
        assert float(reference.tolerance) > float(REFERENCE.tolerance)
