"""The estimator of accuracy: features by hand, rings as if all images were kept, rows alone as together."""

import math

import pytest
import torch

from tribe.engine.state import leaves, stream
from tribe.health.estimate import Estimator, Features, Images, Term, window_features
from tribe.health.probe import Answers

CLASSES = 3
ESTIMATOR = Estimator(
    CLASSES,
    2.0,
    0.4,
    (
        *(Term(0.8, 1.0, -3, 3), Term(0.3, 1.0, -3, 5)),
        *(Term(-0.5, -1.0, -3, 1), Term(-0.6, -1.1, -3, 1), Term(-0.7, -1.2, -3, 1)),
    ),
    sigma=0.03,
    spread=0.2,
    window=7,
)


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
    images = Images(torch.tensor([[0.6, 0.7, 0.9, 1.0]]), torch.full((1, 4), 0.5), *far, torch.zeros(1, 4))
    features = window_features(images, torch.ones(1, 4, dtype=torch.bool))
    assert features.confidence.item() == pytest.approx(log_odds(0.8))
    assert features.agreement.item() == pytest.approx(0, abs=1e-6)
    assert features.near.item() == pytest.approx(math.log(0.2))  # unknown for the first image
    assert features.middle.item() == pytest.approx(math.log(0.4))
    assert math.isnan(features.deep.item())
    first = window_features(images, torch.tensor([[True, True, False, False]]))
    assert first.confidence.item() == pytest.approx(log_odds(0.65))


def test_the_model_is_linear_in_log_odds_and_does_not_extrapolate():
    inside = Features(*(torch.tensor(term.mean) for term in ESTIMATOR.terms))
    assert ESTIMATOR.accuracy(inside).item() == pytest.approx(1 / (1 + math.exp(-0.4)))
    above = ESTIMATOR.accuracy(inside._replace(confidence=torch.tensor(3.0)))
    assert above.item() == pytest.approx(1 / (1 + math.exp(-(0.4 + 0.8 * 2))))
    assert torch.equal(ESTIMATOR.accuracy(inside._replace(confidence=torch.tensor(9.0))), above)
    unknown = inside._replace(near=torch.tensor(math.nan))
    assert torch.equal(ESTIMATOR.accuracy(unknown), ESTIMATOR.accuracy(inside))


@pytest.mark.parametrize("batch", [1, 3, 7, 20])
def test_a_ring_of_the_last_images_equals_keeping_all(batch):
    state, kept, shares, shifts, ended = ESTIMATOR.init(), [], [], [], 0.0
    for step in range(12):
        x, share = logits(1, batch, step), 0.5 + step / 40
        said = answers(1, batch, step)
        state = ESTIMATOR.observe(state, x, torch.ones(1, batch, dtype=torch.bool), torch.tensor([share]), said)
        kept += list(x[0])
        shifts += [said.shift[0]] * batch
        shares += [share] * batch
        last = slice(max(len(kept) - 7, 0), None)
        confidence = (torch.stack(kept) / 2.0).softmax(-1).amax(-1)
        far = torch.stack(shifts)[last].unbind(1)
        predicted = torch.stack(kept)[last].argmax(-1)
        images = Images(confidence[last], torch.tensor(shares)[last], *far, predicted)
        features = window_features(images, torch.ones_like(images.confidence, dtype=torch.bool))
        now, read = ESTIMATOR.accuracy(features).item(), ESTIMATOR.read(state)
        ended += 7 * now * (len(kept) // 7 - (len(kept) - batch) // 7)
        assert read.accuracy.item() == pytest.approx(now, abs=1e-6)
        assert read.overall.item() == pytest.approx((ended + now * (len(kept) % 7)) / len(kept), abs=1e-5)
        assert read.images.item() == len(kept)
        uneven = sum((predicted.tolist().count(k) / len(predicted)) ** 2 for k in range(CLASSES)) - 1 / CLASSES
        half = ESTIMATOR.half_width(torch.tensor(now), torch.tensor(len(predicted)), torch.tensor(max(uneven, 0)))
        assert read.high.item() == pytest.approx(min(now + half.item(), 1), abs=1e-5)


def test_padding_changes_nothing():
    padded, plain = ESTIMATOR.init(), ESTIMATOR.init()
    for step in range(5):
        x = logits(1, 4, step)
        valid = torch.tensor([[True, False, True, False]])
        padded = ESTIMATOR.observe(padded, x, valid)
        plain = ESTIMATOR.observe(plain, x[:, ::2], torch.ones(1, 2, dtype=torch.bool))
        padded = ESTIMATOR.observe(padded, x, torch.zeros(1, 4, dtype=torch.bool))
    assert ESTIMATOR.read(padded) == ESTIMATOR.read(plain)


def test_streams_together_equal_streams_alone():
    together, alone = ESTIMATOR.init(3), [ESTIMATOR.init() for _ in range(3)]
    for step in range(6):
        x, valid = logits(3, 4, step), torch.rand(3, 4, generator=torch.Generator().manual_seed(step)) > 0.3
        share = torch.rand(3, generator=torch.Generator().manual_seed(step))
        said = answers(3, 4, step)
        together = ESTIMATOR.observe(together, x, valid, share, said)
        for i, s in enumerate(alone):
            one = Answers(*(t[[i]] for t in said))
            alone[i] = ESTIMATOR.observe(s, x[[i]], valid[[i]], share[[i]], one)
    for i, state in enumerate(alone):
        for name, t in leaves(stream(together, i, 3)).items():
            assert torch.equal(t, leaves(state)[name]), name


def test_before_the_first_image_nothing_is_known():
    read = ESTIMATOR.read(ESTIMATOR.init(2))
    assert read.low.tolist() == [0, 0]
    assert read.high.tolist() == [1, 1]
    assert all(bool(t.isfinite().all()) for t in read)


def test_the_interval_holds_the_models_error_and_the_luck_of_the_draw():
    half = ESTIMATOR.half_width(torch.tensor(0.5), torch.tensor(100), torch.tensor(0.0))
    assert half.item() == pytest.approx(1.6449 * math.sqrt(0.25 / 100 + 0.03**2))
    half = ESTIMATOR.half_width(torch.tensor(0.5), torch.tensor(100), torch.tensor(2 / 3))  # a single class of three
    assert half.item() == pytest.approx(1.6449 * math.sqrt(0.25 / 100 + 0.03**2 + 0.2**2 * 2 / 3))
