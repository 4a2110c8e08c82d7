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


def test_a_class_that_was_predicted_for_long_is_not_answered_for_long():
    """Fog, in which the network says class 0; then random order, in which class 0 is the second best of all images."""
    draw = torch.Generator().manual_seed(0)
    fog, labels = torch.zeros(400, dtype=torch.int64), torch.randint(1, CLASSES, (400,), generator=draw)
    kinds = torch.cat((fog, labels))
    one_hot = torch.nn.functional.one_hot(torch.stack((fog.repeat(2), kinds)), CLASSES).double()
    logits = (2.0 * one_hot[0] + 2.4 * one_hot[1])[None]
    valid = torch.ones(1, 800, dtype=torch.bool)
    wrong = {}
    for rule in (Markov(), Checked()):
        _, answers, _ = play(rule, logits, valid, 50)
        wrong[rule.name] = (answers[0, 400:] != labels).double().mean().item()
    assert wrong["time"] > 0.5  # the network alone is right on all of them
    assert wrong["time-checked"] < 0.05


def test_its_report_says_when_it_is_off():
    rule = filters.create("time-checked")
    labels = labels_in_bursts(1, 300, CLASSES, 0.95)
    _, _, state = play(rule, predictions(labels, CLASSES), torch.ones(1, 300, dtype=torch.bool), 50)
    assert rule.info(state)[0].on
    assert not rule.info(rule.init(1, CLASSES, torch.empty(0)))[0].on
    with pytest.raises(ValueError, match="least_beyond_chance"):
        Checked(least_beyond_chance=2)
