"""Metrics on hand-computed cases."""

import pytest
import torch

from tribe import metrics
from tribe.experiments.record import Record


def record(domain, label, prediction, confidence=None, classes=3, domains=("fog@5", "snow@5")):
    confidence = [0.5] * len(label) if confidence is None else confidence
    columns = (torch.tensor(v, dtype=torch.int64) for v in (domain, label, prediction))
    seconds = torch.full((len(label),), 0.25)
    return Record(*columns, torch.tensor(confidence), seconds, domains, classes, {"method": "source"})


HAND = record(domain=[0, 0, 0, 0, 1, 1, 1, 1], label=[0, 0, 1, 1, 0, 0, 0, 2], prediction=[0, 1, 1, 1, 0, 0, 2, 1])


def test_errors_of_all_images_of_domains_and_of_classes_which_are_nan_where_a_class_is_absent():
    assert metrics.instance_error(HAND) == 3 / 8
    assert metrics.domain_error(HAND).tolist() == [1 / 4, 2 / 4]
    expected = torch.tensor([[1 / 2, 0, torch.nan], [1 / 3, torch.nan, 1]], dtype=torch.float64)
    assert torch.allclose(metrics.class_error(HAND), expected, equal_nan=True)


def test_category_error_skips_absent_classes_or_counts_them_as_the_tables_do():
    assert metrics.category_error(HAND) == pytest.approx(((1 / 2 + 0) / 2 + (1 / 3 + 1) / 2) / 2)
    assert metrics.category_error(HAND, absent="correct") == pytest.approx(((1 / 2) / 3 + (1 / 3 + 1) / 3) / 2)
    with pytest.raises(ValueError, match="'skip' or 'correct'"):
        metrics.category_error(HAND, absent="wrong")


def test_a_domain_that_is_never_visited_counts_nowhere():
    alone = record([0, 0], [0, 1], [0, 0])
    assert metrics.category_error(alone) == 0.5
    assert metrics.domain_error(alone)[1].isnan()


def test_online_error_looks_back_a_window():
    curve = metrics.online_error(HAND, window=2)
    assert curve.tolist() == [0, 1 / 2, 1 / 2, 0, 0, 0, 1 / 2, 1]


def test_calibration_error_of_a_hand_made_case():
    # Two bins: 0.9 confident and right half of the time, 0.2 confident and never right.
    made = record([0] * 4, [0, 0, 0, 0], [0, 1, 1, 1], confidence=[0.9, 0.9, 0.2, 0.2])
    assert metrics.calibration_error(made, bins=10) == pytest.approx(0.5 * abs(0.5 - 0.9) + 0.5 * 0.2)


def test_order_does_not_matter_except_online():
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    mixed = HAND._replace(**{n: getattr(HAND, n)[order] for n in ("domain", "label", "prediction", "confidence")})
    for metric in (metrics.instance_error, metrics.category_error, metrics.calibration_error):
        assert metric(HAND) == pytest.approx(metric(mixed))


def test_images_without_a_label_are_not_judged():
    assert metrics.instance_error(record([0, 0], [0, -1], [0, 1])) == 0
    with pytest.raises(ValueError, match="no labels"):
        metrics.instance_error(record([0], [-1], [1]))
