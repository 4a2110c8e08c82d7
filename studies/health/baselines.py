"""Estimators of accuracy from the literature, as functions of the same records: what `tribe.health.estimate` is up to.

Each returns a value for every image of `Signals`; the mean over a window is the estimate for the window.
"""

import math

import torch
from torch import Tensor

from studies.health.records import Signals

SMOOTHING = 0.4  # the newest batch's share in AETTA's estimate
POWER = 3  # of the entropy in AETTA's estimate


def mean_confidence(signals: Signals) -> Tensor:
    """The probability of the predicted class (Hendrycks & Gimpel, ICLR 2017)."""
    return signals.confidence


def tempered_confidence(signals: Signals) -> Tensor:
    """The same after a temperature (Guo et al., ICML 2017)."""
    return signals.tempered


def atc(signals: Signals, threshold: float) -> Tensor:
    """Average thresholded confidence: 1 where the confidence reaches the threshold (Garg et al., ICLR 2022).

    On clean source images as large a share reaches the threshold as is right.
    """
    return (signals.tempered >= threshold).to(signals.tempered.dtype)


def doc(signals: Signals, accuracy: float, confidence: float) -> Tensor:
    """Difference of confidences: the source's accuracy less the fall of the confidence (Guillory et al., ICCV 2021).

    ``accuracy`` and ``confidence`` are those of the source network on clean source images.
    """
    return accuracy + signals.tempered - confidence


def gde(signals: Signals) -> Tensor | None:
    """The agreement of two networks (Jiang et al., ICLR 2022): teacher and student, else adapted network and source.

    None if there is only one network.
    """
    return signals.source if signals.student is None else signals.student


def aetta(signals: Signals, classes: int) -> Tensor | None:
    """Disagreement under dropout, raised where predictions concentrate on few classes (Lee et al., CVPR 2024).

    The error of a batch is d / (E / log K)^3, kept within [0, 1 - 1/K]: d is the share of passes with dropout that
    differ from the prediction, E the entropy of the batch's mean prediction. Errors are smoothed over batches. None
    without passes with dropout.
    """
    if signals.dropout is None or signals.spread is None:
        return None
    _, number, counts = signals.batch.unique_consecutive(return_inverse=True, return_counts=True)
    disagreement = (
        torch.zeros(len(counts), dtype=torch.float64).index_add_(0, number, signals.dropout.double()) / counts
    )
    first = counts.cumsum(0) - counts
    error = disagreement / (signals.spread.double()[first] / math.log(classes)).pow(POWER)
    smoothed = disagreement[0]
    estimates = []
    for value in error.nan_to_num(posinf=1.0).clamp(0, 1 - 1 / classes):
        smoothed = (1 - SMOOTHING) * smoothed + SMOOTHING * value
        estimates.append(1 - smoothed)
    return torch.stack(estimates)[number]
