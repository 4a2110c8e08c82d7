"""The score of estimates over whole streams, by hand."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks.health_long import score

from tribe.lab.outputs import Outputs
from tribe.lab.record import Record
from tribe.lab.watched import Watched


def record(**parts):
    """1,100 images, of which the last 100 fill no window: 90 and 50 % right, estimated 80 and 60."""
    right = torch.cat((torch.arange(500) < 450, torch.arange(500) < 250, torch.zeros(100)))
    estimate = torch.where(torch.arange(1100) < 500, 0.8, 0.6)
    logits = torch.tensor([[2.0, 0.0], [0.1, 0.0]]).repeat(550, 1)  # every other one is above the threshold
    outputs = Outputs(logits, torch.ones(1100, dtype=torch.bool), torch.tensor([1100]), torch.tensor([True]), "logits")
    watched = Watched(estimate, estimate - 0.05, estimate + 0.15, torch.zeros(1100, dtype=torch.int64), ())
    spec = {"model": {"name": "compact"}, "scenario": {"name": "ptta"}}
    blank = torch.zeros(1100)
    made = Record(blank.long(), 1 - right.long(), blank.long(), blank, blank, ("fog@5",), 2, spec, outputs, watched)
    return made._replace(**parts)


CALIBRATION = SimpleNamespace(estimator=SimpleNamespace(temperature=1.0), threshold=0.7)


def test_errors_bias_and_intervals_by_hand():
    tempered = (1 / (1 + torch.exp(torch.tensor([-2.0, -0.1])))).mean()
    off = 100 * ((0.9 - tempered).abs() + (tempered - 0.5).abs()) / 2
    row = score(record(), CALIBRATION)
    assert row == ["compact", "ptta", "1,100", "10.0", "0.0", f"{off:.1f}", "20.0", "50", "10.0"]


@pytest.mark.parametrize("part", ["watched", "outputs"])
def test_a_record_without_estimates_or_logits_is_refused_in_words(part):
    with pytest.raises(SystemExit, match="lacks estimates or logits"):
        score(record(**{part: None}), CALIBRATION)
