"""DeYO, PeTTA, SoTTA, CMF and BDN at their edges; test_equations.py compares most of them with plain loops."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

import method_runs
import plain_methods
from method_runs import DOUBLE, darker, even_network, network, play, varied
from tribe import methods, models
from tribe.core import memory, rng
from tribe.core.backbone import Backbone
from tribe.methods.deyo import shuffled
from tribe.testing import images

batches, assert_affine = partial(method_runs.batches, batch=9), partial(method_runs.assert_affine, atol=1e-6)


# -- DeYO -------------------------------------------------------------------------------------------------------------


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
    places = plain_methods.orders(6, 2, 4, seed=3)[5]
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


# -- PeTTA ------------------------------------------------------------------------------------------------------------


def studied(net, sources, **fields):
    method = methods.create("petta", classes=4, augment=darker, **fields)
    return dataclasses.replace(method, knowledge=method.study(net, [(x[0], None) for x in sources]))


def test_petta_follows_the_student_less_where_features_diverge():
    net, x = network(), images(2, 9, 3, DOUBLE)
    method = studied(net, batches(6), alpha_0=0.5)
    state = method.init(net, 2)
    far = state.mean[1] + 3 * method.knowledge.tensors["var"].double().sqrt()
    state = state._replace(mean=torch.stack((state.mean[0], far)))
    _, after = method.step(net, state, x)
    moved = [(after.teacher.affine.weight - state.teacher.affine.weight)[i].abs().max() for i in (0, 1)]
    assert float(moved[1]) < 0.01 * float(moved[0])
    assert (after.student.affine.weight - state.student.affine.weight)[1].abs().max() > 1e-4, "the student learns"


def test_a_class_without_source_images_has_the_features_of_all():
    net = network()
    x = images(1, 12, 5, DOUBLE)[0]
    labels = net(x[None], *net.source(), methods.Frozen()).logits[0].argmax(-1)
    x = x[labels == labels[0]]  # one class only
    method = methods.create("petta", classes=4)
    known = method.study(net, [(x, None)]).tensors
    assert len(x) > 2
    for tensor in known.values():
        torch.testing.assert_close(tensor, tensor[:1].expand_as(tensor))
        assert tensor.isfinite().all()


# -- DELTA ------------------------------------------------------------------------------------------------------------


# -- SoTTA ------------------------------------------------------------------------------------------------------------


def lots(count, seed=0):
    """The draws of the first arrivals in a memory."""
    keys = (rng.Key(torch.tensor([seed]), torch.tensor([number])) for number in range(count))
    return [float(rng.uniform(key, memory.DRAWS, (2,))[0, 1]) for key in keys]


@pytest.mark.parametrize(("batch", "tail"), [(9, 0.0), (23, 0.5)])
def test_sotta_equals_plain_pytorch(batch, tail):
    """Updates come after every eighth image, in the middle of batches too: it predicts with what it was before."""
    stream = torch.cat(varied(8), 1)[:, :69]
    net = even_network([stream], sure=1.5)
    fields = {"c_0": 0.5, "rho": 0.3, "momentum": 0.2, "lr": 0.01, "size": 10, "every": 23}
    method = methods.create("sotta", classes=4, frozen_tail=tail, **fields)
    outputs, state = play(method, net, stream.split(batch, 1))
    frozen = [1] if tail else []
    expected, layers, held = plain_methods.sotta(net, stream[0], lots=lots(69), frozen=frozen, **fields)
    if batch == fields["every"]:  # else a batch is predicted before its update, which comes in its middle
        torch.testing.assert_close(torch.cat(outputs, 1)[0], expected, rtol=0, atol=1e-6)
        assert_affine(state.affine, [layer.weight for layer in layers], [layer.bias for layer in layers])
        for name in ("mean", "var"):
            running = torch.cat([getattr(layer, f"running_{name}") for layer in layers])
            torch.testing.assert_close(getattr(state.stats, name)[0, 0], running, rtol=0, atol=1e-6)
        kept = state.memory.image[0, :, :192].reshape(-1, 3, 8, 8)
        torch.testing.assert_close(kept, stream[0, held])
    assert int(state.adam.steps) == 3
    assert int(state.seen) == 69
    assert 10 < int(state.memory.arrivals) < 69, "all images were confident, or none: the screening was not tested"
    moved = (state.affine.weight - net.source()[0].weight).abs()
    assert moved[0, :6].max() > 0.01
    assert bool(tail) == (float(moved[0, 6:].max()) == 0)


def test_sotta_learns_nothing_from_images_it_is_not_sure_of():
    net = network(sure=0.01)
    _, state = play(methods.create("sotta", classes=4, every=4), net, batches(3))
    assert int(state.memory.held) == int(state.adam.steps) == 0
    assert torch.equal(state.stats.mean, net.source()[1].mean)
    assert float(state.info.trusted) == 0


# -- CMF --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "beta_at_last"), [(0.005, 1.0), (500.0, 0.89), (50.0, None)])
def test_cmf_is_roid_with_a_filter(q, beta_at_last):
    """ROID without its ensemble takes the steps; the filter is computed here, a number at a time."""
    net, xs = network(), batches(6)
    method = methods.create("cmf", classes=4, lr=0.05, augment=darker, q=q, gamma=0.7, alpha=0.9)
    outputs, state = play(method, net, xs)
    roid = methods.create("roid", classes=4, lr=0.05, augment=darker, alpha=1.0)
    other = roid.init(net)
    source = torch.cat(net.source()[0], 1)[0].tolist()
    hidden, v, gain = list(source), 0.0, q * 28 / 38400  # 28 scales and shifts
    for x, y in zip(xs, outputs, strict=True):
        expected, other = roid.step(net, other, x)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-9)
        learned = torch.cat(other.affine, 1)[0].tolist()
        v = 0.9**2 * v + gain
        beta = max((1 - gain) / (v + 1 - gain), 0.89)
        beta = beta if beta < 0.9999 else 1.0
        v = beta * v
        for i in range(28):
            hidden[i] = beta * (0.9 * hidden[i] + 0.1 * source[i]) + (1 - beta) * learned[i]
            learned[i] = 0.7 * learned[i] + 0.3 * hidden[i]
        moved = torch.tensor([learned], dtype=DOUBLE)
        other = other._replace(affine=type(other.affine)(moved[:, :14], moved[:, 14:]))
    torch.testing.assert_close(torch.cat(state.affine, 1), moved, rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.cat(state.hidden, 1)[0], torch.tensor(hidden, dtype=DOUBLE), rtol=0, atol=1e-9)
    assert float(state.variance) == pytest.approx(v)
    assert beta == beta_at_last if beta_at_last is not None else 0.89 < beta < 0.99


# -- BDN --------------------------------------------------------------------------------------------------------------


def test_bdn_tells_domains_apart_at_the_published_layer_a_third_of_the_way_or_by_name():
    net = network()
    for model, name in (("resnext29", "stage_2.0.bn"), ("resnet20", "layer1.2.bn2"), ("resnet18", "layer3.0.bn1")):
        assert methods.create("bdn", classes=10)._slot(Backbone(models.create(model, classes=10))).name == name
    assert methods.create("bdn", classes=4)._slot(net).name == "1"
    assert methods.create("bdn", classes=4, layer="4")._slot(net).name == "4"
    with pytest.raises(ValueError, match=r"layer of bdn is '3'; the network's BatchNorm layers are 1, 4"):
        methods.create("bdn", classes=4, layer="3").init(net)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    with pytest.raises(ValueError, match=r"by the statistics of a BatchNorm layer, and the network has none"):
        methods.create("bdn", classes=4).init(Backbone(model))
