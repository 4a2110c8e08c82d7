"""The confidence sequence: equal to a slow loop, a fair game, and right as often as it says."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from tribe.trial.betting import BETS, excludes_below, log_capital, sum_interval
from tribe.trial.verdict import ERROR


def plain_capital(values, population, total):
    """The capital after each draw, in fractions, straight from the definition; None: the sum is impossible."""
    players = [Fraction(1, BETS)] * BETS
    left, count, found = total + population, population, []  # of values + 1, which are 0, 1 or 2
    for value in values:
        given = value + 1
        if given > left:
            found.append(None)
            break
        expected = Fraction(left, count)
        for i in range(BETS):
            share = Fraction(2 * i + 1, 2 * BETS)
            gain = given / expected if left else Fraction(1)
            players[i] *= 1 - share + share * gain
        left, count = left - given, count - 1
        found.append(sum(players))
    return found + [None] * (len(values) - len(found))


def plain_interval(values, population, error):
    """All sums that no bettor of either side has ever excluded."""
    drawn, rest = sum(values), population - len(values)

    def excluded(signed, total):
        return any(
            capital is None or capital >= 2 / Fraction(error) for capital in plain_capital(signed, population, total)
        )

    possible = range(drawn - rest, drawn + rest + 1)
    fits = [s for s in possible if not excluded(values, s) and not excluded([-v for v in values], -s)]
    return min(fits), max(fits)


CASES = [
    (seed, population, drawn, shares)
    for seed, (population, drawn) in enumerate([(1, 1), (4, 2), (9, 9), (12, 8), (15, 6), (20, 14)])
    for shares in ((1 / 3, 1 / 3, 1 / 3), (0.05, 0.15, 0.8), (0.9, 0.1, 0))
]


@pytest.mark.parametrize(("seed", "population", "drawn", "shares"), CASES)
def test_it_equals_the_slow_loop(seed, population, drawn, shares):
    values = np.random.default_rng(seed).choice([-1, 0, 1], drawn, p=shares)
    for total in range(-population, population + 1):
        expected = plain_capital(values.tolist(), population, total)
        found = np.exp(log_capital(values, population, total))
        known = [i for i, capital in enumerate(expected) if capital is not None]
        np.testing.assert_allclose(found[known], [float(expected[i]) for i in known], rtol=1e-9)
        assert np.isinf(found[len(known) :]).all()
    for error in ("0.5", "0.05"):
        assert sum_interval(values, population, float(error)) == plain_interval(values.tolist(), population, error)


@pytest.mark.parametrize("population", [[1, 1, 0, -1, 0, -1, 1], [-1, -1, -1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1, -1]])
def test_the_game_is_fair_and_rarely_excludes_the_truth(population):
    """Over all orders in which a population can be drawn: exact, without chance."""
    orders = np.array(list(itertools.permutations(population)))
    total, size = sum(population), len(population)
    for values, truth in ((orders, total), (-orders, -total)):
        np.testing.assert_allclose(np.exp(log_capital(values, size, truth)).mean(0), 1, rtol=1e-9)
        for error in (0.9, 0.5, 0.1):
            assert excludes_below(values, size, truth, error)[:, -1].mean() <= error / 2


def test_nothing_is_known_before_the_first_draw_and_everything_after_the_last():
    assert sum_interval(np.array([], np.int64), 7, 0.01) == (-7, 7)
    assert sum_interval(np.array([], np.int64), 0, 0.01) == (0, 0)
    values = np.array([1, -1, 0, 1, 1])
    assert sum_interval(values, 5, 0.01) == (2, 2)
    assert sum_interval(values[:4], 5, 0.01) == (0, 2)  # one is left


def test_intervals_only_shrink():
    values = np.random.default_rng(3).choice([-1, 0, 1], 120, p=(0.2, 0.2, 0.6))
    found = [sum_interval(values[:t], 400, 0.05) for t in range(121)]
    assert all(a <= c and d <= b for (a, b), (c, d) in itertools.pairwise(found))
    assert found[-1][0] > 0


POPULATIONS = [(0.1, 0.2, 0.7), (0.4, 0.2, 0.4), (0.05, 0.9, 0.05), (0.7, 0.0, 0.3), (0.0, 0.98, 0.02)]


@pytest.mark.parametrize("shares", POPULATIONS)
def test_the_sequence_holds_the_truth_at_all_times(shares):
    truth, draws = shuffled(shares, 300, 1000, 7)
    low = excludes_below(draws, 300, truth, 0.01)[:, -1]
    high = excludes_below(-draws, 300, -truth, 0.01)[:, -1]
    assert (low | high).mean() <= 0.01


def shuffled(shares, size, runs, seed):
    """A population, and many orders in which it may be drawn."""
    population = np.repeat([-1, 0, 1], [round(size * share) for share in shares])
    chance = np.random.default_rng(seed)
    return int(population.sum()), np.array([chance.permutation(population) for _ in range(runs)])


@pytest.mark.parametrize("shares", [(0.5, 0.2, 0.3), (0.3, 0.5, 0.2), (0.07, 0.9, 0.03), (0.45, 0.15, 0.4)])
def test_a_loss_is_never_called_help_at_any_time(shares):
    total, draws = shuffled(shares, 500, 300, 11)
    assert total < 0
    assert not excludes_below(draws, 500, 0, ERROR)[:, -1].any()


@pytest.mark.parametrize("shares", [(0.5, 0.0, 0.5), (0.35, 0.3, 0.35), (0.1, 0.8, 0.1), (0.05, 0.9, 0.05)])
def test_a_gain_of_nothing_is_never_called_help_after_any_of_a_hundred_labels(shares):
    total, draws = shuffled(shares, 500, 300, 11)
    assert total == 0
    assert not excludes_below(draws[:, :100], 500, 0, ERROR)[:, -1].any()


def test_a_clear_gain_is_found_within_a_hundred_labels():
    _, draws = shuffled((0.2, 0.2, 0.6), 1000, 200, 5)
    assert excludes_below(draws[:, :100], 1000, 0, ERROR)[:, -1].mean() > 0.8
