"""The checked time filter: a plain loop says what it does, and a network that is stuck on a class does not fool it."""

import math

import pytest
import torch

from tribe import filters
from tribe.filters.checked import LATELY, LONG, Checked
from tribe.filters.markov import Markov
from tribe.testing import labels_in_bursts, predictions

CLASSES = 10


def play(rule, logits, valid, batch):
    state, used, answers = rule.init(len(logits), CLASSES, logits.new_empty(0)), [], []
    for z, real in zip(logits.split(batch, 1), valid.split(batch, 1), strict=True):
        found = rule.step(state, z, real)
        used.append(found.used)
        answers.append(torch.where(found.used, found.logits.argmax(-1), z.argmax(-1)))
        state = found.state
    return torch.cat(used, 1), torch.cat(answers, 1), state


def in_bursts(rule, logits, valid):
    """Image by image, in plain Python."""
    kept = []
    for row, real in zip(logits, valid, strict=True):
        last, alike, shares, here = None, 0.0, [1 / CLASSES] * CLASSES, []
        for z, counts in zip(row, real.tolist(), strict=True):
            if counts:
                own = int(z.argmax())
                keep, long = math.exp(-1 / LATELY), math.exp(-1 / LONG)
                alike = keep * alike + (1 - keep) * (own == last)
                shares = [long * s + (1 - long) * (k == own) for k, s in enumerate(shares)]
                last = own
            chance = sum(s * s for s in shares)
            here.append(alike - chance > rule.least_beyond_chance * (1 - chance))
        kept.append(here)
    return torch.tensor(kept)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_it_equals_a_plain_loop(batch):
    rule = Checked()
    labels = labels_in_bursts(3, 400, CLASSES, 0.9)
    labels[1] = labels[1, torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    logits = predictions(labels, CLASSES)
    valid = torch.rand(3, 400, generator=torch.Generator().manual_seed(2)) > 0.2
    used, _, _ = play(rule, logits, valid, batch)
    alone, _, _ = play(Markov(), logits, valid, batch)
    assert torch.equal(used, alone & in_bursts(rule, logits, valid))
    assert used[0].double().mean() > 0.5
    assert not used[1].any()


def test_a_filter_that_is_stuck_on_a_class_is_off_soon():
    """After hundreds of images that were predicted as class 0: random order, with class 0 second best in all images."""
    labels = torch.randint(1, CLASSES, (200,), generator=torch.Generator().manual_seed(0))
    logits = 2.0 + torch.zeros(1, 200, CLASSES, dtype=torch.float64)
    logits[..., 0] += 2.0
    logits = logits + 2.3 * torch.nn.functional.one_hot(labels, CLASSES)
    rule, valid, zero = Checked(temperatures=4.0), torch.ones(1, 200, dtype=torch.bool), torch.zeros(1, 1)
    stuck = rule.init(1, CLASSES, logits.new_empty(0))
    sure = torch.nn.functional.one_hot(torch.zeros(1, dtype=torch.int64), CLASSES).double()
    inner = stuck.filter._replace(
        belief=sure[None], rate=zero.double() + 0.005, evidence=zero.double() + 60, images=torch.tensor([2000])
    )
    stuck = stuck._replace(filter=inner, last=sure, alike=torch.ones(1).double(), shares=sure)
    alone = Markov.step(rule, inner, logits, valid)
    found = rule.step(stuck, logits, valid)
    assert alone.used.double().mean() > 0.5
    assert not found.used[:, 30:].any()


def test_its_report_says_when_it_is_off():
    rule = filters.create("time-checked")
    labels = labels_in_bursts(1, 300, CLASSES, 0.95)
    _, _, state = play(rule, predictions(labels, CLASSES), torch.ones(1, 300, dtype=torch.bool), 50)
    assert rule.info(state)[0].on
    assert not rule.info(rule.init(1, CLASSES, torch.empty(0)))[0].on
    with pytest.raises(ValueError, match="least_beyond_chance"):
        Checked(least_beyond_chance=2)
