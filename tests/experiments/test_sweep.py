"""Points of a sweep, scores without labels, and the best point, on records that are written by hand."""

import math

import pytest
import torch

from tribe.experiments.record import Record, Trace, Watched
from tribe.experiments.sweep import (
    SCORES,
    SweepRow,
    best_by_score,
    default_score,
    lowest,
    make_axes,
    points_of,
    predicted_classes,
)


def test_a_grid_is_all_combinations_and_a_list_varies_together():
    axes = make_axes({"tribe.lr": [1, 2], "batch": [8, 16, 8]}, {"tribe.eta": [0.1, 0.2], "tribe.h0": [3, 4]})
    points = list(points_of(axes))
    assert [axis.name for axis in axes] == ["tribe.lr", "batch", "tribe.eta, tribe.h0"]
    assert len(points) == 2 * 2 * 2, "a value that is repeated counts once"
    assert points[0] == {"tribe.lr": 1, "batch": 8, "tribe.eta": 0.1, "tribe.h0": 3}
    assert points[1] == {"tribe.lr": 1, "batch": 8, "tribe.eta": 0.2, "tribe.h0": 4}, "the last axis changes fastest"
    assert len({tuple(point.values()) for point in points}) == 8


@pytest.mark.parametrize(
    ("grid", "listed", "words"),
    [
        ({}, {}, "the sweep is empty: name a field and its values"),
        ({"tribe.lr": []}, {}, "tribe.lr has no value; expected some"),
        ({"tribe.lr": [1]}, {"tribe.lr": [2]}, "tribe.lr is in a grid and in a list"),
        ({}, {"a.x": [1, 2], "a.y": [1]}, "need as many values each: a.x has 2, a.y has 1"),
        ({"a.x": range(101), "a.y": range(100)}, {}, "10,100 points; expected at most 10,000"),
    ],
)
def test_what_is_no_sweep(grid, listed, words):
    with pytest.raises(ValueError, match=words):
        make_axes(grid, listed)


def record(**parts):
    whole, real = torch.zeros(4, dtype=torch.int64), torch.tensor([0.5, 0.7, 0.9, 0.9])
    return Record(whole, whole, whole, real, real, ("fog",), 2, {}, **parts)


def test_scores_by_hand():
    ones = torch.ones(4)
    trace = Trace(ones.long(), torch.tensor([0.1, 0.1, math.nan, 0.4]), ones, ones, ones * 0.75, ones)
    watched = Watched(torch.tensor([0.8, 0.8, 0.6, 0.6]), ones, ones, ones.long(), ())
    full = record(trace=trace, watched=watched)
    found = {name: score.of(full) for name, score in SCORES.items()}
    assert found == pytest.approx({"estimate": 0.7, "agreement": 0.75, "entropy": 0.2, "confidence": 0.75})
    bare = {name: score.of(record()) for name, score in SCORES.items()}
    missing = dict.fromkeys(("estimate", "agreement", "entropy"), math.nan)
    assert bare == pytest.approx(missing | {"confidence": 0.75}, nan_ok=True)
    blind = record(watched=watched._replace(accuracy=ones * math.nan))
    assert math.isnan(SCORES["estimate"].of(blind)), "without a calibration"


class Played:
    """A result of which only the error is read."""

    def __init__(self, error):
        self.error = lambda: error


def row(error, **scores):
    return SweepRow({}, Played(error), {**dict.fromkeys(SCORES, math.nan), **scores})


def test_the_best_point_with_labels_and_without():
    rows = [
        row(0.3, entropy=0.2, confidence=0.9),
        row(0.2, entropy=0.4, confidence=0.8),
        SweepRow({}, None, dict.fromkeys(SCORES, math.nan)),
    ]
    assert lowest(rows, lambda row: row.error) is rows[1]
    assert best_by_score(rows, "entropy") is rows[0], "lower is better"
    assert best_by_score(rows, "confidence") is rows[0], "higher is better"
    assert best_by_score(rows, "estimate") is None
    assert lowest([row(math.nan)], lambda row: row.error) is None, "without labels"


def test_the_score_is_the_first_that_all_have_and_that_tells_points_apart():
    assert default_score([row(0, estimate=0.7, entropy=0.2), row(0, estimate=0.8, entropy=0.3)]) == "estimate"
    assert default_score([row(0, estimate=0.7, entropy=0.2), row(0, entropy=0.3)]) == "entropy"
    assert default_score([row(0, entropy=0.2, confidence=0.6), row(0, entropy=0.2, confidence=0.7)]) == "confidence"
    assert default_score([row(0, confidence=0.5)]) == "confidence"


def test_the_number_of_predicted_classes_shows_a_collapse():
    assert predicted_classes(record()) == pytest.approx(1), "one class alone"
    half = record()._replace(prediction=torch.tensor([0, 2, 2, 0]))
    assert predicted_classes(half) == pytest.approx(2)
