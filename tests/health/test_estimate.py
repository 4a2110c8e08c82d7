"""The estimator of accuracy: features by hand, rings as if all images were kept, rows alone as together."""

import math
from dataclasses import replace

import pytest
import torch

from tribe.core.state import leaves, stream
from tribe.health.estimate import Estimator, Features, Images, repetition, window_features
from tribe.health.probe import Answers
from tribe.health.regression import NOISE, GaussianProcess

CLASSES = 3
F = len(Features._fields)


def fitted():
    """A model of windows whose accuracy rises with confidence and agreement, and falls with distances."""
    x = torch.randn(40, F, generator=torch.Generator().manual_seed(0))
    return GaussianProcess.fit(x, 0.4 + x[:, :3].sum(1) - x[:, 3:].sum(1) / 2, torch.full((40,), 0.1))


ESTIMATOR = Estimator(CLASSES, 2.0, fitted(), widening=0.8, spread=0.2, window=7)


def logits(streams, batch, seed):
    return 3 * torch.randn(streams, batch, CLASSES, generator=torch.Generator().manual_seed(seed))


def answers(streams, batch, seed):
    """Of a source that was asked for the first image."""
    known = torch.zeros(streams, batch, dtype=torch.bool)
    known[:, 0] = True
    shift = torch.rand(streams, 3, generator=torch.Generator().manual_seed(100 + seed))
    return Answers(logits(streams, batch, seed), known, shift)


def log_odds(p):
    return math.log(p / (1 - p))


def test_features_by_hand():
    far = [torch.tensor([[0.0, 0.1, 0.2, 0.3]]) * factor for factor in (1, 2, 0)]
    source = torch.tensor([[1.0, 0.0, -1.0, 1.0]])  # unknown for the second image
    predicted = torch.tensor([[0, 0, 2, 2]])
    images = Images(torch.tensor([[0.6, 0.7, 0.9, 1.0]]), torch.full((1, 4), 0.5), source, *far, predicted)
    features = window_features(images, torch.ones(1, 4, dtype=torch.bool), CLASSES)
    assert features.confidence.item() == pytest.approx(log_odds(0.8))
    assert features.agreement.item() == pytest.approx(0, abs=1e-6)
    assert features.source.item() == pytest.approx(log_odds(2 / 3))
    assert features.near.item() == pytest.approx(math.log(0.2))  # unknown for the first image
    assert features.middle.item() == pytest.approx(math.log(0.4))
    assert math.isnan(features.deep.item())
    assert features.concentration.item() == pytest.approx(math.log(1 / 2 - 1 / 3 + 0.02))
    assert features.repeated.item() == pytest.approx(0)  # two of four repeat; the first follows the last
    first = window_features(images, torch.tensor([[True, True, False, False]]), CLASSES)
    assert first.confidence.item() == pytest.approx(log_odds(0.65))
    assert first.repeated.item() == pytest.approx(log_odds(0.995))  # one pair, clipped
    unasked = window_features(images, torch.tensor([[False, True, False, False]]), CLASSES)
    assert math.isnan(unasked.source.item())  # the source was not asked
    assert math.isnan(unasked.repeated.item())  # no image was before it


@pytest.mark.parametrize("start", range(7))
def test_repetition_does_not_depend_on_where_a_ring_begins(start):
    predicted = torch.tensor([0, 0, 1, 2, 2, 2, 1])
    assert repetition(predicted.roll(start), torch.ones(7, dtype=torch.bool)).item() == pytest.approx(3 / 7)


@pytest.mark.parametrize("batch", [1, 3, 7, 20])
def test_a_ring_of_the_last_images_equals_keeping_all(batch):
    state, kept, shares, shifts, sources, ended = ESTIMATOR.init(), [], [], [], [], 0.0
    for step in range(12):
        x, share = logits(1, batch, step), 0.5 + step / 40
        said = answers(1, batch, step)
        state = ESTIMATOR.observe(state, x, torch.ones(1, batch, dtype=torch.bool), torch.tensor([share]), said)
        kept += list(x[0])
        shifts += [said.shift[0]] * batch
        shares += [share] * batch
        same = said.logits[0, 0].argmax() == x[0, 0].argmax()
        sources += [1.0 if same else -1.0] + [0.0] * (batch - 1)
        last = slice(max(len(kept) - 7, 0), None)
        confidence = (torch.stack(kept) / 2.0).softmax(-1).amax(-1)
        far = torch.stack(shifts)[last].unbind(1)
        predicted = torch.stack(kept)[last].argmax(-1)
        images = Images(confidence[last], torch.tensor(shares)[last], torch.tensor(sources)[last], *far, predicted)
        missing = 7 - len(predicted)
        window = Images(*(torch.nn.functional.pad(t, (0, missing)) for t in images))
        features = window_features(window, torch.arange(7) < len(predicted), CLASSES)
        now, read = ESTIMATOR.accuracy(features).item(), ESTIMATOR.read(state)
        ended += 7 * now * (len(kept) // 7 - (len(kept) - batch) // 7)
        assert read.accuracy.item() == pytest.approx(now, abs=1e-6)
        assert read.overall.item() == pytest.approx((ended + now * (len(kept) % 7)) / len(kept), abs=1e-5)
        assert state.images.item() == len(kept)
        half = ESTIMATOR.half_width(features, torch.tensor(len(predicted)))
        assert read.high.item() == pytest.approx(min(now + half.item(), 1), abs=1e-5)


def test_streams_together_equal_streams_alone_and_padding_changes_nothing():
    together, alone = ESTIMATOR.init(3), [ESTIMATOR.init() for _ in range(3)]
    for step in range(6):
        x, valid = logits(3, 4, step), torch.rand(3, 4, generator=torch.Generator().manual_seed(step)) > 0.3
        share = torch.rand(3, generator=torch.Generator().manual_seed(step))
        said = answers(3, 4, step)
        valid[step % 3] = step % 2 > 0  # padding only, or none
        together = ESTIMATOR.observe(together, x, valid, share, said)
        for i, s in enumerate(alone):
            own = valid[i]
            one = Answers(said.logits[[i]][:, own], said.known[[i]][:, own], said.shift[[i]])
            alone[i] = ESTIMATOR.observe(s, x[[i]][:, own], own[own][None], share[[i]], one)
    for i, state in enumerate(alone):
        for name, t in leaves(stream(together, i, 3)).items():
            assert torch.equal(t, leaves(state)[name]), name


def test_before_the_first_image_nothing_is_known():
    read = ESTIMATOR.read(ESTIMATOR.init(2))
    assert read.low.tolist() == [0, 0]
    assert read.high.tolist() == [1, 1]
    assert all(bool(t.isfinite().all()) for t in read)


def test_the_interval_holds_the_models_error_the_luck_of_the_draw_and_the_classes():
    features = Features(*torch.zeros(F, 1))
    for concentrated in (0.0, 2 / 3):  # the second is a single class of three
        features = features._replace(concentration=torch.tensor([concentrated + 0.02]).log())
        p = ESTIMATOR.accuracy(features).item()
        variance = ESTIMATOR.model.variance(torch.stack(features, -1)).item()
        assert variance > NOISE
        error = (0.8 * p * (1 - p)) ** 2 * variance
        half = ESTIMATOR.half_width(features, torch.tensor(100)).item()
        expected = 1.6449 * math.sqrt(p * (1 - p) / 100 + error + 0.2**2 * concentrated)
        assert half == pytest.approx(expected, rel=1e-4)


def test_windows_unlike_those_of_calibration_are_not_known():
    near, far = (Features(*torch.full((F, 1), value)) for value in (0.0, 8.0))
    assert ESTIMATOR.familiar(near).tolist() == [True]
    assert ESTIMATOR.familiar(far).tolist() == [False]
    _, low, high = ESTIMATOR.interval(far, torch.tensor([500]))
    assert (low.item(), high.item()) == (0, 1)


def test_an_interval_grows_with_the_distance_from_the_windows_of_calibration():
    wider = replace(ESTIMATOR, farther=0.3)
    features = Features(*torch.full((F, 1), 1.5))
    distance = ESTIMATOR.model.distance(torch.stack(features, -1)).item()
    assert 0 < distance < 1.5
    half = math.hypot(ESTIMATOR.half_width(features, torch.tensor([100])).item(), 0.3 * distance)
    accuracy, low, _ = wider.interval(features, torch.tensor([100]))
    assert low.item() == pytest.approx(max(accuracy.item() - half, 0), abs=1e-5)
