"""Baselines against numbers computed by hand."""

import math

import pytest
import torch

from studies.health import baselines
from studies.health.records import Signals

# Two classes: probabilities 3/4, 9/10 and 1/2 of the predicted class; at temperature 2 the odds are the square roots.
CONFIDENCE = torch.tensor([0.75, 0.9, 0.5], dtype=torch.float64)
TEMPERED = torch.tensor([math.sqrt(3) / (1 + math.sqrt(3)), 0.75, 0.5], dtype=torch.float64)
SIGNALS = Signals(torch.tensor([1, 0, 0]), CONFIDENCE, TEMPERED, torch.tensor([0, 0, 1]))


def test_mean_confidence():
    assert baselines.mean_confidence(SIGNALS).tolist() == [0.75, 0.9, 0.5]
    assert baselines.tempered_confidence(SIGNALS).tolist() == pytest.approx([0.634, 0.75, 0.5], abs=1e-3)


def test_atc_counts_images_that_reach_the_threshold():
    assert baselines.atc(SIGNALS, 0.75).tolist() == [0, 1, 0]
    assert baselines.atc(SIGNALS, 0.6).tolist() == [1, 1, 0]


def test_doc_takes_the_fall_of_confidence_from_the_accuracy():
    found = baselines.doc(SIGNALS, accuracy=0.9, confidence=0.95)
    assert found.tolist()[1:] == pytest.approx([0.7, 0.45])


def test_gde_is_agreement_with_the_student_else_with_the_source():
    source, student = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, 1.0])
    assert baselines.gde(SIGNALS) is None
    assert baselines.gde(SIGNALS._replace(source=source)) is source
    assert baselines.gde(SIGNALS._replace(source=source, student=student)) is student


def test_aetta():
    # Batch 0: d = 0.2, E = log 2: error 0.2; with the start at d, the smoothed error is 0.6 * 0.2 + 0.4 * 0.2 = 0.2.
    # Batch 1: d = 0.1, E = log 2 / 2: 0.1 / (1/2)^3 = 0.8, clipped to 0.5; 0.6 * 0.2 + 0.4 * 0.5 = 0.32.
    spread = torch.tensor([math.log(2), math.log(2), math.log(2) / 2])
    found = baselines.aetta(SIGNALS._replace(dropout=torch.tensor([0.1, 0.3, 0.1]), spread=spread), 2)
    assert found.tolist() == pytest.approx([0.8, 0.8, 0.68])
    assert baselines.aetta(SIGNALS, 2) is None


def test_aetta_calls_a_batch_of_one_class_wrong_however_certain_it_is():
    dropout, spread = torch.full((3,), 0.01), torch.full((3,), 0.01)
    estimates = baselines.aetta(SIGNALS._replace(dropout=dropout, spread=spread), 2)
    assert estimates[-1].item() == pytest.approx(1 - (0.6 * (0.6 * 0.01 + 0.4 * 0.5) + 0.4 * 0.5))
