"""The filters against slow loops straight from the equations, in float64."""

import pytest
import torch

from reference import Chain, CofaFilter, MarkovFilter
from tribe.filters import markov
from tribe.filters.cofa import Cofa
from tribe.filters.markov import Markov
from tribe.testing import labels_in_bursts, predictions

STREAMS, IMAGES, CLASSES = 2, 300, 5


def stream():
    """Bursts, then independent images, then bursts; padding and bad images in between."""
    parts = [labels_in_bursts(STREAMS, n, CLASSES, stay, seed=n) for n, stay in ((110, 0.95), (80, 0), (110, 0.9))]
    logits = predictions(torch.cat(parts, 1), CLASSES)
    valid = labels_in_bursts(STREAMS, IMAGES, 8, 0, seed=5) > 0  # an eighth is padding
    bad = labels_in_bursts(STREAMS, IMAGES, 12, 0, seed=6) == 0
    return torch.where(bad.unsqueeze(-1), 2.5, logits), valid


def check(answers, filtered, row):
    for i, answer in enumerate(answers):
        assert bool(filtered.used[row, i]) == (answer is not None)
        if answer is not None:
            assert (filtered.logits[row, i].exp() - torch.tensor(answer, dtype=torch.float64)).abs().max() <= 1e-9


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"within": "batch"},
        {"training_shares": (5, 1, 1, 2, 0.5), "temperatures": (2,)},
        {
            "within": "batch",
            "temperatures": (0.5, 1, 3),
            "temperature_margin": 0.2,
            "rate_step": 0.02,
            "least_rate": 0.03,
            "marginal_step": 0.05,
            "recent_memory": 0.9,
            "evidence_on": 4,
            "evidence_most": 20,
            "evidence_drift": 0.05,
            "likelihood_floor": 0.01,
        },
    ],
    ids=["past", "batch", "shares", "other settings"],
)
@pytest.mark.parametrize("least", [0.1, 0.55], ids=["all temperatures", "some temperatures"])
def test_markov_equals_the_slow_loop(fields, least, monkeypatch):
    monkeypatch.setattr(markov, "LEAST_CONFIDENCE", least)
    monkeypatch.setattr(Chain, "least_confidence", least)
    rule, (logits, valid) = Markov(**fields), stream()
    slow = [MarkovFilter(CLASSES, rule) for _ in range(STREAMS)]
    state, used = rule.init(STREAMS, CLASSES, logits.new_empty(0)), []
    for z, real in zip(logits.split(23, 1), valid.split(23, 1), strict=True):
        filtered = rule.step(state, z, real)
        state = filtered.state
        used.append(filtered.used)
        for row, one in enumerate(slow):
            check(one.add(z[row].tolist(), real[row].tolist()), filtered, row)
    for row, one in enumerate(slow):
        for i, chain in enumerate(one.chains):
            for name in ("belief", "marginal", "rate", "recent", "evidence", "confidence"):
                expected = torch.tensor(getattr(chain, name), dtype=torch.float64)
                assert (getattr(state, name)[row, i] - expected).abs().max() <= 1e-9, name
            assert int(state.images[row]) == chain.images
    on = torch.cat(used, 1)
    assert on.any()
    assert not on.all()


@pytest.mark.parametrize("within", ["past", "batch"])
def test_markov_equals_the_slow_loop_where_a_temperature_gets_its_say_within_a_batch(within):
    """The network is unsure of single images, then sure of bursts: in the second stream later."""
    images, classes = 96, 100
    bursts = torch.arange(3).repeat_interleave(11)[:32].expand(2, -1)
    labels = torch.cat((labels_in_bursts(2, 64, classes, 0), bursts), 1)
    unsure = torch.arange(images) < torch.tensor([[64], [70]])
    logits = torch.where(unsure, 1.5, 12.0).double().unsqueeze(-1) * torch.nn.functional.one_hot(labels, classes)
    logits += 0.1 * predictions(labels, classes, margin=0)
    valid = torch.arange(images) % 5 != 3
    rule, slow = Markov(within=within), [MarkovFilter(classes, Markov(within=within)) for _ in range(2)]
    state, used = rule.init(2, classes, logits.new_empty(0)), []
    for z, real in zip(logits.split(48, 1), valid.expand(2, -1).split(48, 1), strict=True):
        filtered = rule.step(state, z, real)
        state = filtered.state
        used.append(filtered.used)
        for row, one in enumerate(slow):
            check(one.add(z[row].tolist(), real[row].tolist()), filtered, row)
    on = torch.cat(used, 1)
    assert on[:, -10:].any(1).all()
    assert not on[:, :50].any()


def test_cofa_equals_the_slow_loop():
    rule, (logits, valid) = Cofa(), stream()
    slow = [CofaFilter() for _ in range(STREAMS)]
    state = rule.init(STREAMS, CLASSES, logits.new_empty(0))
    for z, real in zip(logits.split(23, 1), valid.split(23, 1), strict=True):
        filtered = rule.step(state, z, real)
        state = filtered.state
        for row, one in enumerate(slow):
            check([one.add(*image) for image in zip(z[row].tolist(), real[row].tolist(), strict=True)], filtered, row)
    assert state.logits.tolist() == [one.last for one in slow]
