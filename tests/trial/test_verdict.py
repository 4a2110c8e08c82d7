"""From gains to an answer in words."""

import numpy as np
import pytest

from tribe.trial.betting import excludes_below
from tribe.trial.verdict import ERROR, decide


def drawn(shares, population, count, seed=0):
    values = np.repeat([-1, 0, 1], [round(population * share) for share in shares])
    return np.random.default_rng(seed).permutation(values)[:count].tolist()


def test_each_answer_and_its_words():
    helps = decide(drawn((0.1, 0.1, 0.8), 200, 60), 200, 1000)
    assert helps.answer == "helps"
    assert 0 < helps.low <= 0.14 <= helps.high
    assert (
        helps.words
        == f"Adapting helps by {100 * helps.low:.1f} to {100 * helps.high:.1f} points on these 1,000 frames (60 labels)"
    )
    harms = decide([-g for g in drawn((0.1, 0.1, 0.8), 200, 60)], 200, 1000)
    assert (harms.answer, harms.low, harms.high) == ("harms", -helps.high, -helps.low)
    assert harms.headline == helps.headline.replace("helps", "harms")
    same = decide(drawn((0.3, 0.4, 0.3), 20, 14), 20, 1000)
    assert same.answer == "no difference that matters"
    assert max(-same.low, same.high) <= 0.01
    open_ = decide(drawn((0.3, 0.2, 0.5), 200, 10), 200, 1000)
    assert open_.answer == "undecided"
    assert open_.words.startswith("Not decided: about ")
    assert "labels more" in open_.words


def test_few_differences_cannot_matter_and_need_no_label():
    assert decide([], 10, 1000).answer == "no difference that matters"
    assert decide([], 11, 1000).answer == "undecided"
    assert decide([], 11, 1000, matters=0.02).answer == "no difference that matters"
    nothing = decide([], 0, 5)
    assert (nothing.low, nothing.high, nothing.estimate) == (0, 0, 0)


def test_the_gain_of_all_labels_is_exact():
    gains = drawn((0.25, 0.25, 0.5), 40, 40)
    whole = decide(gains, 40, 100)
    assert whole.low == whole.high == whole.estimate == pytest.approx(0.1)
    assert whole.headline == "Adapting helps by 10.0 points"
    assert (whole.better, whole.worse, whole.labels) == (20, 10, 40)
    assert whole.more is None


def test_the_estimate_of_missing_labels_is_honest():
    """Over 20 draws, the labels that it takes are about those that were foretold after 15."""
    foretold, needed = [], []
    for seed in range(20):
        gains = drawn((0.2, 0.2, 0.6), 1000, 400, seed)
        after = decide(gains[:15], 1000, 4000)
        foretold.append(15 if after.answer != "undecided" else 15 + after.more)
        helps = excludes_below(np.array(gains), 1000, 0, ERROR)
        needed.append(int(helps.argmax()) + 1 if helps[-1] else len(gains))
    assert 0.5 < np.median(foretold) / np.median(needed) < 2


def test_it_never_asks_for_more_labels_than_there_are_frames():
    for seed in range(10):
        gains = drawn((0.4, 0.2, 0.4), 60, 40, seed)
        after = decide(gains, 60, 600)
        assert after.answer != "undecided" or after.more <= after.most <= 20


def test_the_same_labels_give_the_same_verdict_and_plain_data():
    gains = drawn((0.3, 0.2, 0.5), 300, 20)
    assert decide(gains, 300, 1000) == decide(np.array(gains), 300, 1000)
    found = decide(gains, 300, 1000).json()
    assert {type(value) for value in found.values()} <= {int, float, str, type(None)}
    assert found["words"].startswith(found["headline"])


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (([2], 5, 10), "gains"),
        (([1] * 6, 5, 10), "differing"),
        (([], 11, 10), "differing"),
        (([], 0, 0), "frames"),
    ],
)
def test_impossible_numbers_are_refused(given, word):
    with pytest.raises(ValueError, match=word):
        decide(*given)


@pytest.mark.parametrize(
    ("options", "word"), [({"error": 0}, "error"), ({"error": 1}, "error"), ({"matters": -1}, "matters")]
)
def test_impossible_levels_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        decide([], 5, 10, **options)
