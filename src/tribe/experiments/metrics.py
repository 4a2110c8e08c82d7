"""Metrics: functions of a record. Nothing to accumulate, nothing to reset."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tribe.experiments.record import Record

Metric = Callable[[Record], Tensor]


def scored(record: Record) -> Tensor:
    """Return which images have a label, (T,); a record without any is refused."""
    labelled = record.label >= 0
    if not labelled.any():
        raise ValueError("the record holds no labels: errors cannot be computed")
    return labelled


def wrong(record: Record) -> Tensor:
    """Return 1 where the prediction is not the label, else 0, (T,); only for images that are `scored`."""
    return (record.prediction != record.label).double()


def instance_error(record: Record) -> Tensor:
    """Return the share of images that were misclassified."""
    return wrong(record)[scored(record)].mean()


def domain_error(record: Record) -> Tensor:
    """Return the instance error per domain, (D,); NaN for domains the stream never visits."""
    labelled, domains = scored(record), len(record.domains)
    domain, missed = record.domain[labelled], wrong(record)[labelled]
    return torch.bincount(domain, missed, domains) / torch.bincount(domain, minlength=domains)


def class_error(record: Record) -> Tensor:
    """Return the error per domain and class, (D, K); NaN where a class is absent."""
    labelled, count = scored(record), class_counts(record)
    cell = (record.domain * record.classes + record.label)[labelled]
    missed = torch.zeros(count.numel(), dtype=torch.float64).index_add_(0, cell, wrong(record)[labelled])
    return missed.view_as(count) / count


def class_counts(record: Record) -> Tensor:
    """Return how many images of each class each domain played, (D, K)."""
    labelled = scored(record)
    cell = (record.domain * record.classes + record.label)[labelled]
    return torch.bincount(cell, minlength=len(record.domains) * record.classes).view(-1, record.classes)


def category_error(record: Record, absent: Literal["skip", "correct"] = "skip") -> Tensor:
    """Return the mean over domains of the mean over classes of the error.

    A class that is absent from a domain is skipped. The paper's tables count it as correct: ``absent="correct"``.
    """
    if absent not in ("skip", "correct"):
        raise ValueError(f"absent is 'skip' or 'correct'; got {absent!r}")
    error = class_error(record)
    error = error[~error.isnan().all(1)]  # domains the stream visits
    return (error.nan_to_num(0.0).mean(1) if absent == "correct" else error.nanmean(1)).mean()


def online_error(record: Record, window: int = 500) -> Tensor:
    """Return the prequential curve, (T,): error over the last ``window`` images with a label."""
    if window < 1:
        raise ValueError(f"window is a number of images, at least 1; got {window}")
    missed = wrong(record)[scored(record)]
    total = torch.cat((torch.zeros(1, dtype=torch.float64), missed.cumsum(0)))
    end = torch.arange(1, len(missed) + 1)
    start = (end - window).clamp_min(0)
    return (total[end] - total[start]) / (end - start)


def calibration_error(record: Record, bins: int = 15) -> Tensor:
    """Return the expected calibration error: the mean gap between confidence and accuracy over bins of confidence."""
    if bins < 1:
        raise ValueError(f"bins is a number of bins, at least 1; got {bins}")
    labelled = scored(record)
    right, confidence = 1 - wrong(record)[labelled], record.confidence[labelled].double()
    bucket = (confidence * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, bucket, right - confidence)
    return gap.abs().sum() / len(right)


def seconds_per_image(record: Record) -> Tensor:
    """Return the mean time of an image."""
    return record.seconds.double().mean()


def scores(record: Record) -> dict[str, Any]:
    """Return the numbers of a result, by name; errors are shares, and None where the images have no labels."""
    judged: dict[str, Metric] = {
        "instance_error": instance_error,
        "category_error": category_error,
        "category_error_absent_correct": partial(category_error, absent="correct"),
        "calibration_error": calibration_error,
    }
    labelled = bool((record.label >= 0).any())
    numbers: dict[str, Any] = {"images": len(record.label)}
    numbers |= {name: _finite(metric(record).item()) if labelled else None for name, metric in judged.items()}
    errors = map(_finite, domain_error(record).tolist()) if labelled else ()
    counts = class_counts(record).tolist() if labelled else ()
    domains = record.domains if labelled else ()
    return numbers | {
        "domain_error": dict(zip(domains, errors, strict=True)),
        "class_counts": dict(zip(domains, counts, strict=True)),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
