"""Images that are refused, bad, padded or out of range: the error helps, and the state survives."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import tribe
from networks import Around, batch, learner, refused, started
from tribe.core.state import leaves
from tribe.core.validation import good_images
from tribe.testing import CLASSES, images, ready, small_network

IMAGES = {
    "a list of numbers": ([1.0], TypeError, "expected images"),
    "integers": (torch.zeros(2, 3, 8, 8, dtype=torch.int64), TypeError, "int64"),
    "booleans": (torch.zeros(2, 3, 8, 8, dtype=torch.bool), TypeError, "bool"),
    "complex numbers": (torch.zeros(2, 3, 8, 8, dtype=torch.complex64), TypeError, "complex64"),
    "a scalar": (torch.tensor(0.5), ValueError, r"expected images \(B, ...\)"),
    "one axis": (torch.rand(3), ValueError, r"expected images \(B, ...\); got \(3,\)"),
    "grey images for a colour network": (torch.rand(2, 1, 8, 8), ValueError, "takes 3 channels"),
    "video for an image network": (torch.rand(2, 4, 3, 8, 8), ValueError, "3 axes"),
    "images without pixels": (torch.rand(2, 3, 0, 8), ValueError, "without pixels"),
    "images on another device": (torch.rand(2, 3, 8, 8, device="meta"), ValueError, "on meta, the network on cpu"),
}
STREAMS = {  # for an adapter with two streams
    "a batch for one stream": (torch.rand(6, 3, 8, 8), ValueError, r"images \(2, B, ...\): one row of images a stream"),
    "too many streams": (torch.rand(3, 6, 3, 8, 8), ValueError, r"got \(3, 6, 3, 8, 8\)"),
}


@pytest.mark.parametrize("call", ["__call__", "predict", "learn"])
@pytest.mark.parametrize("case", [*IMAGES, *STREAMS])
def test_images(case, call):
    x, error, message = {**IMAGES, **STREAMS}[case]
    streams = 2 if case in STREAMS else 1
    model = started(streams)
    with refused(model, error, message):
        getattr(model, call)(x)
    assert model(images(streams, 6)).isfinite().all(), "and it goes on"


def _failing(x):
    raise RuntimeError("no such image")


AUGMENTATIONS = {
    "it changes the shape": (lambda x: x[:, :, ::2], ValueError, r"augment turned images of shape \(6, 3, 8, 8\)"),
    "it fails": (_failing, RuntimeError, "no such image"),
    "it returns no tensor": (lambda x: None, ValueError, r"augment turned .* into NoneType; expected the same"),
}


@pytest.mark.parametrize("case", AUGMENTATIONS)
def test_augmentations(case):
    augment, error, message = AUGMENTATIONS[case]
    model = tribe.adapt(small_network(), augment=augment)
    with refused(model, error, message):
        model(batch())


def test_the_default_augmentation_wants_images():
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = tribe.adapt(net)
    with refused(model, ValueError, "augment="):
        model(torch.rand(4, 5))


def test_outputs_that_are_no_logits():
    with pytest.raises(TypeError, match="returned tuple; expected logits"):
        tribe.adapt(Around(lambda inner, x: (inner(x), None)))(batch())


def test_an_empty_batch_returns_empty_logits():
    model, many = started(), started(streams=2)
    before = model.digest()
    assert model(torch.rand(0, 3, 8, 8)).shape == (0, CLASSES)
    assert model.predict(torch.rand(0, 3, 8, 8)).shape == (0, CLASSES)
    assert many(torch.rand(2, 0, 3, 8, 8)).shape == (2, 0, CLASSES)
    assert model.digest() == before


def test_other_floating_precisions_are_converted():
    model, other = started(), started()
    assert torch.equal(model(batch(1).double()), other(batch(1)))


@pytest.mark.parametrize(
    ("scale", "shift", "cause"),
    [(4, -2, "normalised already.*Normalize"), (1.5, 0, "scaled")],
)
def test_values_outside_the_range_are_told_once(scale, shift, cause):
    model = started()
    with pytest.warns(UserWarning, match=cause) as caught:
        model(batch() / batch().max() * scale + shift)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch() * scale + shift)


def test_a_network_that_gives_probabilities_is_told_of_once(recwarn):
    adapter = learner(nn.Sequential(small_network(), nn.Softmax(-1)))
    adapter.predict(torch.full((2, 3, 8, 8), torch.nan))
    assert not recwarn
    adapter(batch(), valid=torch.arange(len(batch())) > 0)
    adapter(batch(1))
    (told,) = recwarn
    assert "Remove its Softmax" in str(told.message)
    assert told.filename == __file__


@pytest.mark.filterwarnings("ignore:images reach")
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e6), (torch.bfloat16, 1e6), (torch.float16, 255.0)])
@pytest.mark.parametrize("method", ["tribe", "selftrain", "note", "tent", "rotta"])
def test_a_large_image_that_counts_leaves_the_state_finite(method, dtype, largest):
    model = tribe.adapt(small_network(dtype=dtype), ready(method))
    x = batch().to(dtype)
    x[0], x[1] = largest, -largest
    x[2] = 1.02 * largest
    for _ in range(3):
        assert model(x).isfinite().all()
    assert model.info[0].poisoned == (2,)
    assert model(batch().to(dtype)).isfinite().all()
    assert all(t.isfinite().all() for t in tribe.core.state.leaves(model.state).values())


def test_the_limit_follows_the_precision_of_autocast():
    x = torch.full((1, 1, 3, 8, 8), 1000.0)
    assert good_images(x).all()
    with torch.autocast("cpu", torch.float16):
        assert not good_images(x).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert good_images(x).all()


METHODS = tribe.methods.names()


class Tagged(Tensor):
    """A tensor with a type of its own, as image libraries have."""


def test_a_subclass_of_tensor_leaves_no_trace():
    adapter, plain = learner(small_network()), learner(small_network())
    assert type(adapter(batch().as_subclass(Tagged))) is Tensor
    plain(batch())
    assert {type(t) for t in leaves(adapter.state).values()} == {Tensor}
    assert adapter.digest() == plain.digest()


@pytest.mark.parametrize("method", METHODS)
def test_padding_that_is_marked_touches_nothing_and_is_not_counted(method):
    adapter, alone = (tribe.adapt(small_network(), ready(method), streams=2) for _ in range(2))
    x = images(2, 6, 0)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1] = False  # this camera has no frames now
    padded = x.clone()
    padded[1] = torch.nan
    told = adapter(padded, valid)
    alone(padded)
    assert [info.images for info in adapter.info] == [6, 0]
    assert [info.skipped for info in adapter.info] == [0, 0]
    assert [info.poisoned for info in adapter.info] == [(), ()]
    assert [info.skipped for info in alone.info] == [0, 6]
    assert torch.equal(told[1], told[1, :1, :1].expand_as(told[1])), "all classes alike"
    assert torch.equal(adapter.predict(x, valid)[0], alone.predict(x)[0])
    assert torch.equal(adapter.predict(x, valid)[1], told[1])


@pytest.mark.parametrize(
    "valid", [torch.ones(6), torch.ones(5, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool), [True] * 6]
)
def test_a_mask_that_does_not_fit_is_refused(valid):
    adapter = learner(small_network())
    with refused(adapter, ValueError, r"valid is a tensor of booleans, one for each image, of shape \(6,\)"):
        adapter(batch(), valid)
