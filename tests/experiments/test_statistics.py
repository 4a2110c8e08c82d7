"""How sure numbers are, on streams whose truth is known."""

import re

import numpy as np
import pytest
import torch
from scipy import stats

from tribe import metrics
from tribe.experiments import statistics
from tribe.experiments.record import Record
from tribe.experiments.statistics import correlation_time, duel, paired, spread


def record(wrong, label=None, domains=("fog@5",)):
    """A stream on which a method errs where ``wrong`` says."""
    wrong = torch.as_tensor(wrong).long()
    label = torch.zeros_like(wrong) if label is None else label
    zeros = torch.zeros(len(wrong))
    return Record(torch.zeros_like(wrong), label, label + wrong, zeros, zeros, domains, 3, {})


def bursts(share, images, length, rng):
    """Errors that come in stretches, as on a stream whose classes do."""
    return np.repeat(rng.random(images // length) < share, length)


def test_mean_and_spread():
    assert spread([2.0]) == (2.0, None, 1)
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5), 2)
    assert str(spread([2.0])) == "2.00"
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_a_clear_winner_and_its_margin():
    rng = np.random.default_rng(0)
    hard = bursts(0.3, 4000, 20, rng)  # for both
    a, b = record(hard), record(hard | (rng.random(4000) < 0.1))
    outcome = duel([a], [b])
    truth = (hard.mean() - (b.prediction != b.label).double().mean()).item()
    assert outcome.difference == pytest.approx(truth)
    assert outcome.low < truth < outcome.high < 0
    assert outcome.p < 0.002
    back = duel([b], [a])
    assert back.difference == -outcome.difference
    assert back.p == outcome.p, "each for the side that it states"
    sure = r"95 %: (\d+\.\d\d to \d+\.\d\d), two-sided p < 0\.001, blocks of \d+ images"
    assert re.fullmatch(rf"(\d+\.\d\d points) better on this stream \({sure}\)", str(outcome))
    assert str(back) == str(outcome).replace("better", "worse")


def test_p_is_of_both_sides():
    """Catches a p of A's being better that is printed for the loser, and one of one side only."""
    rng = np.random.default_rng(5)
    a, b = record(rng.random(900) < 0.30), record(rng.random(900) < 0.34)
    for outcome in (duel([a], [b]), duel([b], [a])):
        assert 0.002 < outcome.p < 0.4
    assert duel([a], [b]).p == duel([b], [a]).p


def test_no_difference_is_called_so():
    a = record([1, 0, 0, 0] * 25)
    assert str(duel([a], [a])) == "no difference"
    assert duel([a], [a])[:4] == (0.0, 0.0, 0.0, 1.0)
    outcome = duel([a], [record([0, 1, 0, 0] * 20 + [1] * 5 + [0] * 15)])
    assert outcome.difference == 0
    assert outcome.p == 1
    assert re.fullmatch(r"no difference, not sure: -\d+\.\d\d to \+\d+\.\d\d", str(outcome))


def test_pairs_cancel_what_is_hard_for_both():
    """Unpaired, the bursts of errors that both share would hide a difference of two points."""
    rng = np.random.default_rng(1)
    hard = bursts(0.4, 5000, 100, rng)
    outcome = duel([record(hard)], [record(hard | (rng.random(5000) < 0.03))])
    assert outcome.high - outcome.low < 0.02
    assert outcome.high < 0


def test_blocks_are_honest_about_bursts_where_single_images_are_not(monkeypatch):
    """Two methods of the same true error whose mistakes come in bursts: the interval must hold 0 nearly always."""
    monkeypatch.setattr(statistics, "DRAWS", 300)
    rng = np.random.default_rng(2)
    held = {1: 0, None: 0}
    for _ in range(60):
        a, b = (record(bursts(0.3, 4000, 50, rng)) for _ in range(2))
        for block in held:
            outcome = duel([a], [b], block=block)
            held[block] += outcome.low <= 0 <= outcome.high
    assert held[None] >= 48
    assert held[1] <= 30


@pytest.mark.parametrize("length", [1, 10, 50, 200])
def test_blocks_are_as_long_as_the_correlation_asks_for(length):
    """Bursts of n images have a correlation time of n images; a fixed block is too short for some stream."""
    rng = np.random.default_rng(6)
    gap = bursts(0.3, 40_000, length, rng) - bursts(0.3, 40_000, length, rng).astype(float)
    assert correlation_time(gap) == pytest.approx(length, rel=0.35)
    a, b = (record(bursts(0.3, 40_000, length, rng)) for _ in range(2))
    assert duel([a], [b]).block == pytest.approx(5 * length, rel=0.4)


def test_a_short_stream_keeps_some_blocks():
    drift = record(np.arange(400) < 200)  # as long as the stream
    assert duel([drift], [record(np.zeros(400))]).block == 50


@pytest.mark.parametrize("seeds", [2, 3, 4, 5, 6, 9, 20])
def test_seeds_are_paired(seeds):
    """Against scipy's paired t test."""
    rng = np.random.default_rng(seeds)
    streams = rng.normal(20, 5, seeds)  # some are hard for both
    a, b = streams + rng.normal(0, 1, seeds), streams + rng.normal(1, 1, seeds)
    found, expected = paired(a.tolist(), b.tolist()), stats.ttest_rel(a, b)
    assert found.p == pytest.approx(expected.pvalue, abs=1e-12)
    assert found.difference == pytest.approx((a - b).mean())
    assert found.agree == (np.sign(a - b) == np.sign((a - b).mean())).sum()
    assert paired(b.tolist(), a.tolist()).p == found.p


def test_few_seeds_decide_little():
    assert str(paired([1.0], [2.0])) == "1.00 points better in one seed"
    unsure = str(paired([19.0, 22.0, 20.0], [20.0, 21.0, 20.5]))
    assert unsure.startswith("0.17 points better over 3 seeds (not sure: ± 1.04, 2 of 3 agree, paired t test, ")
    assert str(paired([1.0, 2.0], [1.0, 2.0])) == "no difference over 2 seeds"
    assert str(paired([1.0, 2.0], [2.0, 1.0])) == "no difference over 2 seeds (± 1.41)"
    assert "1 of 3 agree" in str(paired([1.0, 2.0, 4.0], [1.0, 2.0, 3.0])), "equal errors do not agree"
    with pytest.raises(ValueError, match="as many numbers of A as of B"):
        paired([1.0], [])


@pytest.mark.parametrize("hard", [(1.0, 2.0), (0.1, 0.7, 0.3)])
def test_differences_without_a_spread_prove_nothing(hard):
    """Else the same stream, played with several seeds, would make any difference certain."""
    found = paired(hard, [error + 0.2 for error in hard])  # equal but for rounding
    assert found.p is None
    why = "not sure: the same in all seeds, without a spread to test"
    assert str(found) == f"0.20 points better over {len(hard)} seeds ({why})"


def test_an_interval_that_touches_zero_is_not_sure():
    """One image of many: no drawn stream is worse, and a third of them have no difference."""
    wrong = np.zeros(100)
    wrong[50] = 1
    found = duel([record(wrong)], [record(np.zeros(100))], block=1)
    assert found.low == 0 < found.high
    assert found.p > 0.5
    assert str(found) == "1.00 points worse on this stream, not sure: +0.00 to +3.00"


def test_seeds_are_put_together():
    rng = np.random.default_rng(3)
    pairs = [(record(rng.random(1000) < 0.3), record(rng.random(1000) < 0.35)) for _ in range(8)]
    one, all_of_them = duel(*[[x] for x in pairs[0]]), duel([a for a, _ in pairs], [b for _, b in pairs])
    assert all_of_them.high - all_of_them.low < 0.6 * (one.high - one.low)
    gaps = [((a.prediction != a.label).double() - (b.prediction != b.label).double()).mean() for a, b in pairs]
    assert all_of_them.difference == pytest.approx(torch.stack(gaps).mean().item())


def test_images_without_a_label_do_not_count():
    label = torch.tensor([0, -1] * 50)
    wrong = torch.tensor([1, 0] * 50)
    outcome = duel([record(wrong, label)], [record(torch.zeros(100), label)])
    assert outcome.difference == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": []}, "as many records"),
        ({"b": [record(torch.zeros(99))]}, "different streams"),
        ({"b": [record(torch.zeros(100), domains=("snow@5",))]}, "different streams"),
        ({"b": [record(torch.zeros(100), torch.ones(100).long())]}, "different streams"),
        ({name: [record(torch.zeros(9), torch.full((9,), -1))] for name in "ab"}, "no labels"),
        ({"block": 0}, "from 1 to 100"),
        ({"block": 101}, "from 1 to 100"),
    ],
)
def test_what_cannot_be_compared(change, words):
    options = {"a": [record(torch.zeros(100))], "b": [record(torch.ones(100))], **change}
    with pytest.raises(ValueError, match=words):
        duel(options.pop("a"), options.pop("b"), **options)


def test_curves_and_bins_of_nothing_are_refused():
    with pytest.raises(ValueError, match="window is a number of images, at least 1; got 0"):
        metrics.online_error(record(torch.zeros(10)), window=0)
    with pytest.raises(ValueError, match="bins is a number of bins, at least 1; got 0"):
        metrics.calibration_error(record(torch.zeros(10)), bins=0)
