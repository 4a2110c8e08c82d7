"""Gaussian process regression against its textbook equations, and what it says of points far away."""

import math

import pytest
import torch

from tribe.health.regression import AMPLITUDE, BEYOND, JITTER, NOISE, REACH, GaussianProcess


def points(count, features=2, seed=0):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_equals_the_equations_point_by_point():
    """Equations 2.25 and 2.26 of Rasmussen and Williams, with loops."""
    x, new = 3 * points(12) + 5, 3 * points(4, seed=1) + 5
    y, noise = x[:, 0].sin(), torch.linspace(0.1, 0.5, 12, dtype=torch.float64)
    model = GaussianProcess.fit(x, y, noise)
    mean, scale = x.mean(0), x.std(0)

    def covariance(a, b):
        a, b = ((p - mean) / scale for p in (a, b))
        far = sum(float(u - v) ** 2 for u, v in zip(a, b, strict=True)) / len(a)
        return AMPLITUDE**2 * math.exp(-far / (2 * REACH**2)) + sum(float(u * v) for u, v in zip(a, b, strict=True))

    matrix = torch.tensor([[covariance(a, b) for b in x] for a in x], dtype=torch.float64)
    matrix += torch.diag(noise + NOISE + JITTER)
    for point in new:
        beside = torch.tensor([covariance(point, a) for a in x], dtype=torch.float64)
        value = beside @ torch.linalg.solve(matrix, y - y.mean()) + y.mean()
        variance = covariance(point, point) - beside @ torch.linalg.solve(matrix, beside) + NOISE
        assert model.value(point).item() == pytest.approx(float(value), abs=1e-4)
        assert model.variance(point).item() == pytest.approx(float(variance), abs=1e-3)


def test_the_curve_follows_what_no_line_can():
    x = torch.linspace(-3, 3, 60).unsqueeze(1)
    y = (2 * x[:, 0]).square() / 9
    errors = [
        (GaussianProcess.fit(x, y, torch.zeros(60), amplitude).value(x) - y).abs().mean() for amplitude in (2.0, 0.0)
    ]
    assert errors[0] < 0.25 * errors[1]


def test_the_variance_grows_away_from_the_points():
    model = GaussianProcess.fit(points(30), points(30)[:, 0], torch.full((30,), 0.1))
    near, far = model.variance(torch.zeros(2)), model.variance(torch.full((2,), 3.0))
    assert NOISE < near < far


def test_beyond_the_points_it_stops():
    x = torch.linspace(0, 1, 20).unsqueeze(1)
    model = GaussianProcess.fit(x, 4 * x[:, 0], torch.zeros(20))
    end, beyond = model.value(torch.tensor([1 + BEYOND])), model.value(torch.tensor([9.0]))
    torch.testing.assert_close(end, beyond)
    assert end > model.value(torch.ones(1))


def test_what_is_unknown_or_constant_says_nothing():
    x = points(20, 3)
    x[:, 2] = 7.0
    model = GaussianProcess.fit(x, x[:, 0], torch.zeros(20))
    usual = torch.tensor([0.5, float(x[:, 1].mean()), 7.0])
    for other in (torch.tensor([0.5, math.nan, 7.0]), torch.tensor([0.5, float(x[:, 1].mean()), 99.0])):
        torch.testing.assert_close(model.value(other), model.value(usual))
        torch.testing.assert_close(model.variance(other), model.variance(usual))


def test_a_row_alone_equals_the_row_among_others():
    model, new = GaussianProcess.fit(points(50), points(50)[:, 1], torch.zeros(50)), points(9, seed=2).float()
    together = model.value(new)
    assert all(torch.equal(model.value(row), value) for row, value in zip(new, together, strict=True))


def test_a_fit_to_nothing_is_flat():
    model = GaussianProcess.flat(3)
    assert model.value(torch.ones(4, 3)).tolist() == [0] * 4
