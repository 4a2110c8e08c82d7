"""TRIBE taken apart: with every part in its place it is TRIBE; each part does what its name says."""

import dataclasses

import pytest
import torch

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import Stats, leaves
from tribe.testing import CLASSES, images, small_network

SELFTRAIN = methods.get("selftrain")


def play(method, steps=5, size=8, light=0.6):
    net = Backbone(small_network())
    state, outputs = method.init(net), []
    for seed in range(steps):
        y, state = method.step(net, state, light * images(1, size, seed))
        outputs.append(y)
    return torch.stack(outputs), state, net


def variant(name, **fields):
    return methods.create(f"selftrain/{name}", classes=CLASSES, h0=0.5, **fields)


@pytest.mark.parametrize("fields", [{}, {"gamma": 0.3, "h0": 0.4}, {"convention": "paper"}, {"lambda_anc": 0.0}])
def test_all_parts_together_are_tribe_bit_for_bit(fields):
    whole, end, _ = play(methods.create("tribe", classes=CLASSES, **fields))
    parts, other, _ = play(methods.create("selftrain", classes=CLASSES, **fields))
    assert torch.equal(whole, parts)
    for name, t in leaves(end).items():
        assert torch.equal(t, leaves(other)[name]), name


def test_fixmatch_is_tribe_without_its_anchor():
    assert dataclasses.asdict(variant("fixmatch")) == dataclasses.asdict(variant("tribe", lambda_anc=0.0))


@pytest.mark.parametrize(
    "name", [name for name, fields in SELFTRAIN.variants.items() if not fields.get("learning", True)]
)
def test_a_norm_rule_alone_moves_statistics_and_no_parameter(name):
    _, state, net = play(variant(name))
    affine, _ = net.source()
    assert torch.equal(state.affine.weight, affine.weight)
    assert torch.equal(state.teacher.bias, affine.bias)
    _, source = net.source(2, state.pair.mean.shape[1])
    assert not torch.equal(state.pair.mean[0], source.mean[0]), "the teacher's statistics follow the stream"
    assert torch.equal(state.pair.mean[1], source.mean[1]), "there is no student"


def test_robust_bn_alone_is_a_moving_average_of_batches():
    method = variant("robust-bn")
    net = Backbone(small_network())
    x = images(1, 8)
    _, state = method.step(net, method.init(net), x)
    first = net.model[0](x[0])  # the first layer's input does not depend on any statistic
    mean, var = first.mean((0, 2, 3)), first.var((0, 2, 3), unbiased=False)
    source = net.source()[1]
    width = len(mean)
    assert torch.allclose(state.pair.mean[0, 0, :width], 0.95 * source.mean[0, 0, :width] + 0.05 * mean, atol=1e-6)
    assert torch.allclose(state.pair.var[0, 0, :width], 0.95 * source.var[0, 0, :width] + 0.05 * var, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "part", "follows"),
    [
        *((name, "pair", False) for name in ("bn+st", "bn+st+anchor")),
        *(("robust+st+anchor", part, True) for part in ("pair", "anchor")),
        ("robust+st", "anchor", False),
    ],
)
def test_statistics_follow_the_stream_where_they_are_asked_and_else_stand(name, part, follows):
    _, state, net = play(variant(name))
    mean = getattr(state, part).mean
    assert torch.equal(mean, net.source(len(mean))[1].mean) is not follows
    assert not torch.equal(state.affine.weight, net.source()[0].weight), "it learns"


@pytest.mark.parametrize("name", ["mean-teacher", "robust+ema+st", "balanced+memory+ema+st"])
def test_a_moving_average_teacher_follows_its_student_slowly(name):
    _, state, net = play(variant(name, nu=0.25), steps=1)
    source, _ = net.source()
    assert not torch.equal(state.affine.weight, source.weight)
    assert torch.allclose(state.teacher.weight, 0.75 * source.weight + 0.25 * state.affine.weight, atol=1e-7)


def test_a_shared_teacher_is_its_student():
    _, state, _ = play(variant("robust+st+anchor"))
    assert torch.equal(state.teacher.weight, state.affine.weight)


def test_rows_with_a_memory_learn_from_it_in_place_of_the_batch():
    """The memory holds four images at most of the batch's six, and the teacher's statistics follow these."""
    method, net = variant("robust+memory+st", memory=4), Backbone(small_network())
    state = method.init(net)
    x = images(1, 6, 3)
    _, state = method.step(net, state, x)
    assert int(state.memory.held) <= 4
    held = state.memory.image[0, : int(state.memory.held), : x[0, 0].numel()].reshape(-1, *x.shape[2:])
    assert all(any(torch.equal(image, own) for own in x[0]) for image in held)
    first = net.model[0](held)
    mean = first.mean((0, 2, 3))
    expected = 0.95 * net.source()[1].mean[0, 0, : len(mean)] + 0.05 * mean
    assert torch.allclose(state.pair.mean[0, 0, : len(mean)], expected, atol=1e-6), "the teacher saw the memory"


def test_instance_aware_rows_predict_with_the_corrected_running_statistics():
    from tribe.norms.instance import Instance

    method, net = variant("iabn"), Backbone(small_network())
    x = images(1, 6)
    y, state = method.step(net, method.init(net), x)
    assert torch.allclose(y, net(x, *net.source(), Instance()).logits, atol=1e-6)
    assert isinstance(state.pair, Stats)


def test_every_row_of_the_papers_tables_has_a_name():
    """tab:BalancedBN_GLITTA, tab:component_ablation and tab:ComponentAnlysis: norm, learning, anchor, EMA, memory."""
    rows = {
        ("instance", False, False, False, False),
        ("robust", False, False, False, False),  # at two rates
        ("balanced", False, False, False, False),
        ("frozen", True, False, False, False),
        ("frozen", True, True, False, False),
        ("balanced", True, False, False, False),  # FixMatch*
        ("balanced", True, False, True, False),  # MT*
        ("balanced", True, True, False, False),  # TRIBE
        ("robust", True, False, False, True),
        ("robust", True, True, False, True),
        ("balanced", True, True, False, True),
        ("robust", True, False, False, False),
        ("robust", True, True, False, False),
        ("robust", True, False, True, False),
        ("balanced", True, False, True, True),
    }
    built = [methods.create(name, classes=10) for name in methods.variants() if name.startswith("selftrain/")]
    have = {(m.rule, m.learning, m.learning and m.lambda_anc > 0, m.teacher == "ema", m.memory > 0) for m in built}
    assert have == rows
    assert {m.alpha for m in built if m.rule == "robust" and not m.learning} == {0.05, 0.005}
