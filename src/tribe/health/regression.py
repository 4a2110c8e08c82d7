"""Gaussian process regression (Rasmussen and Williams, 2006): a straight line, and a smooth curve around it.

Near the points that were seen the curve follows them, and the variance is small. Far from them only the line is left,
and the variance is large. So the regression itself tells how much it knows of a new point.
"""

from typing import NamedTuple

import torch
from torch import Tensor

AMPLITUDE = 2.0  # of the curve, in units of the values
REACH = 1.5  # how far the curve remembers a point, in standard deviations of every feature
NOISE = 0.2  # variance of the values around line and curve
BEYOND = 0.3  # how far beyond the points of the fit the regression goes on, as a share of their range
LEAST_SPREAD = 1e-3  # a feature that varies less is constant, and is left out
ROWS = 64  # of a matrix as large as the points squared that a variance multiplies at once
JITTER = 1e-6  # on the diagonal of the covariance, for its decomposition


class GaussianProcess(NamedTuple):
    """A fit to M points of F features. Features are standardised; one that is NaN counts as the mean."""

    offset: Tensor  # () the mean of the values
    mean: Tensor  # (F,) of the features
    factor: Tensor  # (F,) 1 / their standard deviation; 0: constant
    low: Tensor  # (F,) the range in which the regression is used, standardised; beyond it, its ends count
    high: Tensor  # (F,)
    points: Tensor  # (M, F) standardised
    weights: Tensor  # (M,) of the points in the prediction
    root: Tensor  # (M, M) the inverse of the Cholesky factor of the points' covariance
    amplitude: Tensor  # () of the curve; 0: a line

    @staticmethod
    def fit(features: Tensor, values: Tensor, noise: Tensor, amplitude: float = AMPLITUDE) -> "GaussianProcess":
        """Fit to features (M, F) and values (M,); ``noise`` (M,): the variance of each, beside NOISE."""
        x, y = features.double(), values.double()
        mean = x.nanmean(0).nan_to_num(0)
        x = torch.where(x.isnan(), mean, x)
        spread = x.std(0)
        factor = torch.where(spread > LEAST_SPREAD, 1 / spread, 0)
        points = (x - mean) * factor
        low, high = points.amin(0), points.amax(0)
        margin = BEYOND * (high - low)
        height = torch.tensor(amplitude, dtype=x.dtype)
        covariance = _kernel(points, points, height) + torch.diag(noise.double() + NOISE + JITTER)
        factored = torch.linalg.cholesky(covariance)
        root = torch.linalg.solve_triangular(factored, torch.eye(len(y), dtype=x.dtype), upper=False)
        weights = root.T @ (root @ (y - y.mean()))
        made = (y.mean(), mean, factor, low - margin, high + margin, points, weights, root, height)
        return GaussianProcess(*(t.float() for t in made))

    @staticmethod
    def flat(features: int, device: torch.device | str = "cpu") -> "GaussianProcess":
        """A fit to nothing: 0 everywhere."""
        none = torch.zeros(features, device=device)
        zero = none.new_zeros(())
        empty = none.new_zeros(0, features), none.new_zeros(0), none.new_zeros(0, 0)
        return GaussianProcess(zero, none, none, none, none, *empty, zero)

    def value(self, features: Tensor) -> Tensor:
        """Predict the values of features (..., F)."""
        # A sum instead of a product of matrices: rows alone round as rows together.
        return (_kernel(self._standard(features), self.points, self.amplitude) * self.weights).sum(-1) + self.offset

    def variance(self, features: Tensor) -> Tensor:
        """Return the variance of the values of features (..., F), with NOISE."""
        x = self._standard(features)
        near = _kernel(x, self.points, self.amplitude).unsqueeze(-2)
        # Sums, as above, of some rows at a time: all of them would be M times as large as the features' kernel.
        known = torch.stack([(near * rows).sum(-1).square().sum(-1) for rows in self.root.split(ROWS)]).sum(0)
        prior = self.amplitude.square() + x.square().sum(-1)
        return (prior - known).clamp_min(0) + NOISE

    def distance(self, features: Tensor) -> Tensor:
        """Return how far features (..., F) are from the nearest point: standard deviations, root mean square."""
        x = self._scaled(features)
        if not len(self.points):
            return x.new_zeros(x.shape[:-1])
        return (x.unsqueeze(-2) - self.points).square().mean(-1).amin(-1).sqrt()

    def _standard(self, features: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(self._scaled(features), self.low), self.high)

    def _scaled(self, features: Tensor) -> Tensor:
        return (torch.where(features.isnan(), self.mean, features.to(self.mean.dtype)) - self.mean) * self.factor


def _kernel(a: Tensor, b: Tensor, amplitude: Tensor) -> Tensor:
    """The covariance of points (..., F) and (M, F): of line and curve."""
    one = a.unsqueeze(-2)
    squares = (one - b).square().mean(-1)  # the mean: more features do not make points more different
    return amplitude.square() * torch.exp(squares / (-2 * REACH**2)) + (one * b).sum(-1)
