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


def play(rule, logits, valid, batch, answer):
    """Compare a stream with ``answer(row, logits, valid)`` of a slow loop; where it is filtered, and the last state."""
    state, used = rule.init(len(logits), logits.shape[-1], logits.new_empty(0)), []
    for z, real in zip(logits.split(batch, 1), valid.split(batch, 1), strict=True):
        filtered = rule.step(state, z, real)
        state = filtered.state
        used.append(filtered.used)
        for row in range(len(logits)):
            for i, wanted in enumerate(answer(row, z[row].tolist(), real[row].tolist())):
                assert bool(filtered.used[row, i]) == (wanted is not None)
                if wanted is not None:
                    gap = filtered.logits[row, i].exp() - torch.tensor(wanted, dtype=torch.float64)
                    assert gap.abs().max() <= 1e-9
    return torch.cat(used, 1), state


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
    on, state = play(rule, logits, valid, 23, lambda row, z, real: slow[row].add(z, real))
    for row, one in enumerate(slow):
        for i, chain in enumerate(one.chains):
            for name in ("belief", "marginal", "rate", "recent", "evidence", "confidence"):
                expected = torch.tensor(getattr(chain, name), dtype=torch.float64)
                assert (getattr(state, name)[row, i] - expected).abs().max() <= 1e-9, name
            assert int(state.images[row]) == chain.images
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
    on, _ = play(rule, logits, valid.expand(2, -1), 48, lambda row, z, real: slow[row].add(z, real))
    assert on[:, -10:].any(1).all()
    assert not on[:, :50].any()


def test_cofa_equals_the_slow_loop():
    rule, (logits, valid) = Cofa(), stream()
    slow = [CofaFilter() for _ in range(STREAMS)]
    _, state = play(rule, logits, valid, 23, lambda row, z, real: list(map(slow[row].add, z, real)))
    assert state.logits.tolist() == [one.last for one in slow]
