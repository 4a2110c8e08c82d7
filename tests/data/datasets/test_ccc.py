"""Continuously changing corruptions: severities between the published ones, walks of a given accuracy, and images."""

import itertools
import math

import pytest
import torch

import layouts
from layouts import made
from tribe import corruptions, datasets, scenarios
from tribe.data.corruptions.between import NOTHING, apply_at, params_at
from tribe.data.datasets.ccc import LEVELS, accuracies, find_walk, names_for
from tribe.experiments.stream import Stream

COARSE = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
X = torch.nn.functional.interpolate(COARSE, 112, mode="bilinear")


@pytest.fixture
def root(tmp_path):
    layouts.write_imagenet(tmp_path)
    return tmp_path


# -- severities between the published ones -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOTHING)
def test_whole_severities_are_the_published_ones(name):
    assert torch.equal(apply_at(X, name, 2), corruptions.apply(X, name, 2))
    assert torch.equal(apply_at(X, name, 0), X)


@pytest.mark.parametrize("name", NOTHING)
def test_a_quarter_of_a_severity_changes_little(name):
    quarter, whole = (float((apply_at(X, name, s) - X).abs().mean()) for s in (0.25, 1))
    assert quarter <= whole + 1e-3
    assert quarter < 0.2
    assert torch.equal(apply_at(X[1:], name, 0.25, index=torch.tensor([1])), apply_at(X, name, 0.25)[1:])


def test_parameters_are_interpolated():
    assert params_at("contrast", 4.5) == (0.075,)
    assert params_at("shot_noise", 0.5) == (120.0,), "its inverse: between no noise and 1 / 60"
    assert params_at("glass_blur", 0.5) == (0.35, 1, 1)
    assert params_at("jpeg_compression", 0.25) == (70,)
    assert params_at("snow", 0.5) == (0.1, 0.3, 3, 0.75, 10, 4, 0.9)
    for severity in (-0.25, 5.25, math.nan):
        with pytest.raises(ValueError, match="a number from 0 to 5"):
            params_at("fog", severity)


# -- walks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("baseline", "within"), [(40, 0.5), (20, 0.5), (0, 3)])
def test_walks_have_the_accuracy_that_was_asked_for(baseline, within):
    for first, second in itertools.pairwise(names_for(baseline)):
        accuracy = accuracies(first, second)
        walk = find_walk(accuracy, baseline)
        assert walk[0][1] == walk[-1][0] == 0, "from one corruption alone to the other"
        moves = {(i - k, m - j) for (i, j), (k, m) in itertools.pairwise(walk)}
        assert moves == {(1, 0), (0, 1)}, "one of them changes by a quarter of a severity"
        assert sum(accuracy[i][j] for i, j in walk) / len(walk) == pytest.approx(baseline, abs=within)


def test_accuracy_falls_with_both_severities():
    table = torch.tensor(accuracies("fog", "gaussian_noise"))
    assert table.shape == (LEVELS, LEVELS)
    assert table[0, 0] == pytest.approx(76.13)
    assert table[-1, 0] == pytest.approx(100 - 75.88)
    assert table[0, -1] == pytest.approx(100 - 97.81)
    assert (table.diff(dim=0) < 0).all()
    assert (table.diff(dim=1) < 0).all()


def test_the_next_walk_begins_with_the_corruption_that_the_last_ended_with():
    data = datasets.create("ccc", baseline=40, steps=200)
    assert len(set(data.domains)) == len(data.walk) == 200
    steps = list(data.walk.values())
    borders = [(a, b) for a, b in itertools.pairwise(steps) if (a.first, a.second) != (b.first, b.second)]
    assert len(borders) >= 4
    for before, after in borders:
        assert (before.severity, after.second_severity) == (0, 0)
        assert before.second == after.first
    assert datasets.create("ccc", baseline=40, steps=200, seed=44).domains != data.domains
    assert datasets.create("ccc", baseline=40, steps=3).domains == data.domains[:3]


# -- images ------------------------------------------------------------------------------------------------------------


def test_images_are_corrupted_twice(root):
    data = made("ccc", root, crop=False, steps=8)
    domain = next(name for name, step in data.walk.items() if step.severity and step.second_severity)
    first, severity, second, other = data.walk[domain]
    index = torch.tensor([2, 0])
    drawn = data._drawn(domain)[index]
    number = data.domains.index(domain) * data.speed + index
    x = data.clean.images("clean", drawn)
    for name, s in ((first, severity), (second, other)):
        x = apply_at(x, name, s, seed=data.seed, index=number).mul(255).to(torch.uint8) / 255
    assert torch.equal(data.images(domain, index), x)
    assert torch.equal(data.labels(domain)[index], data.clean.labels("clean")[drawn])


def test_images_of_a_step_are_drawn_without_repetition_while_there_are_others(root):
    data = made("ccc", root, speed=9)
    first, second = (data._drawn(domain).tolist() for domain in data.domains)
    assert len(first) == 9
    assert sorted(first[:6]) == list(range(6)), "all six clean images, then some again"
    assert first != second


def test_a_part_of_each_image_is_cut_out(root):
    whole, cut = (made("ccc", root, crop=crop, baseline=100) for crop in (False, True))
    index = torch.arange(4)
    images = whole.images(whole.domains[0], index), cut.images(cut.domains[0], index)
    assert images[0].shape == images[1].shape
    assert ((images[0] - images[1]).abs().flatten(1).mean(1) > 0.01).all()


def test_the_walk_is_played_in_order(root):
    data = made("ccc", root)
    stream = Stream(data, scenarios.create("replay"), (0,), batch=4)
    assert [batch.domain.unique().tolist() for batch in stream] == [[0], [1]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"baseline": -1}, "an accuracy in percent"),
        ({"speed": 0}, "how many images each step has"),
        ({"steps": 4001}, "1 to 4000"),
    ],
)
def test_bad_fields(fields, words):
    with pytest.raises(ValueError, match=words):
        datasets.create("ccc", **fields)
