"""DeYO, PeTTA, DELTA, SoTTA, CMF and BDN, which are later than the paper: against plain loops, and at their edges."""

from functools import partial

import pytest
import torch
from torch import nn

import plain_methods
from tribe import methods
from tribe.engine import rng
from tribe.engine.backbone import Backbone
from tribe.methods.deyo import SHUFFLE, shuffled
from tribe.testing import images, informed, small_network

DOUBLE = torch.float64


def network(classes=4, dtype=DOUBLE, sure=1.0):
    """The contract's network; ``sure`` scales its logits."""
    model = small_network(classes, dtype=dtype)
    with torch.no_grad():
        model[-1].weight.mul_(sure)
        model[-1].bias.mul_(sure)
    return Backbone(model)


def batches(steps=4, streams=1, batch=9, dtype=DOUBLE):
    return [images(streams, batch, seed, dtype) for seed in range(steps)]


def play(method, net, xs, state=None):
    state = method.init(net, xs[0].shape[0]) if state is None else state
    outputs = []
    for x in xs:
        y, state = method.step(net, state, x)
        outputs.append(y)
    return outputs, state


def assert_affine(affine, weights, biases, atol=1e-6):
    torch.testing.assert_close(affine.weight[0], torch.cat([w.detach() for w in weights]), rtol=0, atol=atol)
    torch.testing.assert_close(affine.bias[0], torch.cat([b.detach() for b in biases]), rtol=0, atol=atol)


# -- DeYO -------------------------------------------------------------------------------------------------------------


def orders(steps, batch, patches, seed=0):
    """The places of the patches of every image of a stream, as the method draws them."""
    keys = [rng.Key(torch.tensor([seed]), torch.tensor([clock])) for clock in range(steps)]
    return [rng.uniform(key, SHUFFLE, (batch, patches**2))[0].argsort(dim=-1, stable=True).tolist() for key in keys]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize(
    ("fields", "optimiser"),
    [
        ({"optimizer": "adam", "lr": 1e-3, "frozen_tail": 0.0}, partial(torch.optim.Adam, lr=1e-3)),
        ({"lr": 0.01, "frozen_tail": 0.5, "patches": 2}, partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    ],
    ids=["adam", "sgd, half of the layers frozen"],
)
def test_deyo_equals_plain_pytorch(fields, optimiser, dtype):
    net, xs = network(dtype=dtype), batches(8, dtype=dtype)
    method = methods.create("deyo", classes=4, **fields)
    outputs, state = play(method, net, xs)
    expected, weights, biases, taught = plain_methods.deyo(
        net,
        [x[0] for x in xs],
        orders(len(xs), 9, method.patches),
        **{name: getattr(method, name) for name in ("tau_ent", "tau_plpd", "ent_0", "patches")},
        frozen=[1] if method.frozen_tail else [],
        optimiser=optimiser,
    )
    for y, logits in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y[0], logits, rtol=0, atol=1e-6 if dtype == DOUBLE else 1e-4)
    assert_affine(state.affine, weights, biases)
    assert int(state.adam.steps) == sum(count > 0 for count in taught) > 2
    assert any(0 < count < 9 for count in taught), "every image was chosen, or none: the choice was not tested"
    assert (state.affine.weight - net.source()[0].weight).abs().max() > 1e-3


@pytest.mark.parametrize("fields", [{"tau_ent": 0.0}, {"tau_plpd": 1.0}])
def test_deyo_stays_where_it_has_nothing_to_learn_from(fields):
    net = network()
    _, state = play(methods.create("deyo", **fields), net, batches(3))
    assert torch.equal(state.affine.weight, net.source()[0].weight)
    assert int(state.adam.steps) == 0
    assert float(state.info.trusted) == 0
    assert int(state.key.clock) == 3


def test_patches_are_shuffled_whole_and_each_image_has_its_own_order():
    x = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).view(1, 2, 3, 8, 8)
    key = rng.Key(torch.tensor([3]), torch.tensor([5]))
    mixed = shuffled(x, 4, key)
    places = orders(6, 2, 4, seed=3)[5]
    for image, pieces, order in zip(x[0], mixed[0], places, strict=True):
        assert torch.equal(pieces, plain_methods.in_pieces(image, 4, order))
    assert places[0] != places[1]
    assert torch.equal(shuffled(x, 8, key).flatten(3).sort(-1).values, x.flatten(3)), "pixels were lost"


def test_sizes_that_patches_do_not_divide_are_resized_and_back():
    key = rng.Key(torch.tensor([0]), torch.tensor([0]))
    for dtype in (torch.float32, torch.float16):
        for size in ((9, 10), (3, 2), (7, 28)):
            x = torch.full((1, 2, 3, *size), 0.25, dtype=dtype)
            mixed = shuffled(x, 4, key)
            assert mixed.shape == x.shape
            assert mixed.dtype == dtype
            torch.testing.assert_close(mixed, x)


def test_deyo_refuses_what_has_no_patches():
    net = Backbone(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    method = methods.create("deyo")
    with pytest.raises(ValueError, match=r"deyo shuffles the patches of images.*shape \(1, 4, 6\)"):
        method.step(net, method.init(net), torch.rand(1, 4, 6))


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deyo"])
def test_two_classes_in_half_precision(name):
    net = Backbone(small_network(2).to(torch.bfloat16))
    method = informed(methods.create(name, classes=2), net)
    outputs, state = play(method, net, batches(3, dtype=torch.bfloat16))
    assert all(y.shape == (1, 9, 2) and y.isfinite().all() for y in outputs)
    assert state.affine.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("deyo", {"tau_plpd": 1.5}, "tau_plpd of deyo is between -1 and 1"),
        ("deyo", {"tau_ent": -0.1}, "not negative"),
        ("deyo", {"patches": 0}, "at least 1"),
        ("deyo", {"optimizer": "lion"}, "'adam' or 'sgd'"),
        ("deyo", {"momentum": 1.0}, "below 1"),
        ("deyo", {"frozen_tail": 1.0}, "below 1"),
    ],
)
def test_fields_that_make_no_sense_are_refused(name, fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        methods.create(name, **{"classes": 4, **fields})
