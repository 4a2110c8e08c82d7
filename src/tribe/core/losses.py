"""Losses over the last axis of logits, in float32 at least, and means over a choice of samples."""

import torch
from torch import Tensor

from tribe.core.moments import accumulation_dtype


def entropy(logits: Tensor) -> Tensor:
    """Return entropy of softmax(logits) in nats: (..., K) -> (...).

    >>> entropy(torch.zeros(4)).exp().round(decimals=4)
    tensor(4.)
    """
    log_p = _precise(logits).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def probabilities(logits: Tensor) -> Tensor:
    """Return softmax of logits, in float32 at least: (..., K) -> (..., K)."""
    return _precise(logits).softmax(-1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy with hard labels: (..., K), (...) -> (...)."""
    return -_precise(logits).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy with softmax(target): (..., K) twice -> (...)."""
    return -(_precise(target).softmax(-1) * _precise(logits).log_softmax(-1)).sum(-1)


def soft_likelihood_ratio(logits: Tensor, clip: float = 0.99, eps: float = 1e-5) -> Tensor:
    """Return minus the mean log odds of a prediction; unlike the entropy's, its gradient stays for confident ones.

    Probabilities are clipped (Marsden et al., WACV 2024): above ``clip`` a prediction is confident enough.
    """
    p = _precise(logits).softmax(-1).clamp_max(clip)
    return -(p * (p / (1 - p) + eps).log()).sum(-1)


def symmetric_cross_entropy(logits: Tensor, others: Tensor) -> Tensor:
    """Return the mean of the cross-entropies of two predictions (..., K), each with the other as its target: (...)."""
    log_p, log_q = _precise(logits).log_softmax(-1), _precise(others).log_softmax(-1)
    return -(log_q.exp() * log_p + log_p.exp() * log_q).sum(-1) / 2


def mean_over(values: Tensor, counts: Tensor) -> Tensor:
    """Return mean over the last axis of the values where ``counts`` is True; 0, not NaN, where there is none.

    >>> mean_over(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[True, True], [False, False]]))
    tensor([2., 0.])
    """
    return torch.where(counts, values, 0).sum(-1) / counts.sum(-1).clamp_min(1)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(accumulation_dtype(logits.dtype))
