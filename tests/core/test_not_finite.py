"""Networks whose output is not finite for a sound image: they standardise each image, and a black frame gives 0 / 0.

Such an image changes nothing and is counted; of the other images only those of the same batch are affected.
"""

import pytest
import torch

import tribe
from networks import Around
from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import digest, leaves
from tribe.testing import images, informed

NAMES = [*methods.names(), "selftrain/iabn", "selftrain/robust+memory+st", "selftrain/mean-teacher"]


def standardised(inner, x):
    mean, spread = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
    return inner((x - mean) / spread * 0.3 + 0.5)


@pytest.fixture(scope="module")
def net():
    return Backbone(Around(standardised))


def built(name, net):
    quick = {"rotta": {"every": 8, "size": 8}, "note": {"size": 8}}.get(name, {})
    return informed(methods.create(name, classes=4, **quick), net)


def learned(state):
    """All tensors of a state but its info and key."""
    return {name: t for name, t in leaves(state).items() if not name.startswith(("info", "key"))}


@pytest.mark.parametrize("name", NAMES)
def test_a_black_frame_changes_nothing_and_is_counted(name, net):
    method = built(name, net)
    state = method.init(net)
    for seed in range(3):
        _, state = method.step(net, state, images(1, 6, seed))
    x = images(1, 6, 7).clone()
    x[0, 2] = 0
    prediction, after = method.step(net, state, x)
    assert prediction.isfinite().all()
    assert prediction[0, 2].unique().numel() == 1, "a black frame gets equal logits"
    assert all(t.isfinite().all() for t in leaves(after).values() if t.is_floating_point())
    assert after.info.skipped > state.info.skipped
    assert after.info.skipped + after.info.images == state.info.images + 6, "every image is learned from or skipped"
    if after.info.images == state.info.images:
        assert digest(after._replace(info=state.info, key=state.key)) == digest(state)
    for seed in range(10, 16):  # an update of every method is among them
        prediction, after = method.step(net, after, images(1, 6, seed))
        assert prediction.isfinite().all()
    assert after.info.images >= state.info.images + 36, "it learns on, even if the frame was in a memory"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_screened_out_is_finite_in_every_layer(name):
    """Catches zeros in place of padding, bad images and free places of a memory, which become NaN in such a network."""
    net = Backbone(Around(standardised).double())
    method = built(name, net)
    start, good = method.init(net), images(1, 6, 3, torch.float64)
    padded = torch.cat((good, torch.full_like(good[:, :2], torch.nan)), 1)
    alone, one = method.step(net, start, good)
    beside, other = method.step(net, start, padded)
    assert beside[:, :6].isfinite().all()
    torch.testing.assert_close(beside[:, :6], alone, rtol=1e-6, atol=1e-9)
    assert other.info.skipped.item() == 2
    assert other.info.images.item() == 6
    for part, t in learned(other).items():
        if t.is_floating_point():
            torch.testing.assert_close(t, learned(one)[part], rtol=1e-6, atol=1e-9, msg=part)


def test_a_black_frame_of_one_stream_does_not_affect_others(net):
    method = built("tribe", net)
    state, x = method.init(net, 2), images(2, 6, 1).clone()
    want, _ = method.step(net, state, x)
    x[0, 2] = 0
    got, after = method.step(net, state, x)
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-9)
    assert after.info.skipped.tolist() == [6, 0]
    assert after.info.images.tolist() == [0, 6]


def test_an_adapter_survives_an_overflow_in_float16():
    adapter = tribe.adapt(Around(lambda inner, x: inner(x * x * 20)).half(), "tent")
    good = images(1, 6, 0)[0].half()
    adapter(good)
    before = digest(adapter.state.affine)
    assert adapter((good - 0.5) * 500).isfinite().all()
    assert digest(adapter.state.affine) == before
    assert adapter.info[0].skipped == 6
    assert adapter(good).isfinite().all()


def test_a_batch_without_images_is_refused(net):
    method = methods.create("tent", classes=4)
    with pytest.raises(ValueError, match="stream"):
        method.step(net, method.init(net), torch.rand(1, 0, 3, 8, 8))
