"""Comparisons of states: what moved is found, by its name and with the right number."""

import math

import pytest
import torch
from torch import nn

import tribe
from networks import batch, learner
from tribe.health.changes import compare_states
from tribe.testing import images, ready, small_network


def test_nothing_moved_before_the_first_image():
    found = learner(small_network()).compare()
    assert found.since == "the source"
    assert {change for layer in found.layers for change in layer[1:]} == {0.0, None}
    assert {change.statistics for change in found.classes} == {0.0}


def moved(adapter, change, **where):
    """Compare the state with itself after a change."""
    state = adapter.snapshot().state
    return compare_states(adapter.net, adapter.method, state, change(state), "before", **where)


def test_the_layer_whose_parameters_moved_is_named_with_the_relative_change():
    adapter = learner(small_network())

    def change(state):
        weight = state.affine.weight.clone()
        weight[:, 6:] *= 1.5  # the second layer, "4", has columns 6 to 13
        return state._replace(affine=state.affine._replace(weight=weight))

    found = moved(adapter, change)
    old = adapter.state.affine
    norm = torch.cat((old.weight[0, 6:], old.bias[0, 6:])).norm()
    assert [layer.name for layer in found.layers] == ["4", "1"]
    assert found.layers[0].affine == pytest.approx(float(0.5 * old.weight[0, 6:].norm() / norm))
    assert found.layers[0].statistics == found.layers[1].affine == 0
    assert found.layers[0].weights is None


def test_the_class_whose_statistics_moved_is_named_with_the_distance_in_standard_deviations():
    adapter = learner(small_network())
    eps = 1e-5

    def change(state):
        mean, var = (t.clone() for t in state.pair)
        mean[:, 2] += 3 * (var[:, 2] + eps).sqrt()
        var[:, 2] = (var[:, 2] + eps) * 25 - eps  # the standard deviation is 5 times as large: 4 more
        return state._replace(pair=type(state.pair)(mean, var))

    found = moved(adapter, change)
    assert found.classes[0].number == 2
    # Teacher and student moved by sqrt(9 + 16) = 5, the anchor stayed.
    assert found.classes[0].statistics == pytest.approx(math.sqrt(2 / 3) * 5, rel=1e-4)
    assert [change.statistics for change in found.classes[1:]] == [0, 0, 0]
    assert all(layer.statistics > 0 for layer in found.layers)


def test_a_move_of_one_standard_deviation_in_every_class_is_one():
    adapter = learner(small_network())

    def change(state):
        mean, var = state.pair
        return state._replace(pair=state.pair._replace(mean=mean + (var + 1e-5).sqrt()))

    found = moved(adapter, change)
    assert [layer.statistics for layer in found.layers] == pytest.approx([1, 1], rel=1e-4)
    assert found.streams[0].statistics == pytest.approx(1, rel=1e-4)


def test_streams_are_compared_alone_and_together():
    adapter = learner(small_network(), streams=2)
    adapter(images(2, 6), valid=torch.tensor([[True] * 6, [False] * 6]))
    together, first, second = adapter.compare(), adapter.compare(stream=0), adapter.compare(stream=1)
    assert [change.stream for change in together.streams] == [0, 1]
    assert [change.learned for change in together.streams] == [(0, 6), (0, 0)]
    assert second.streams[0].affine == second.streams[0].statistics == 0
    by_name = {layer.name: layer for layer in first.layers}
    for layer in together.layers:  # root mean square with a stream that stayed
        assert layer.statistics == pytest.approx(by_name[layer.name].statistics / math.sqrt(2))
    assert first.streams[0] == together.streams[0]


@pytest.mark.parametrize("method", [*tribe.methods.names(), "tribe+time"])
def test_every_method_is_compared(method):
    adapter = tribe.adapt(small_network(), ready(method))
    snapshot = adapter.snapshot()
    for seed in range(2):
        adapter(batch(seed, 16))
    found = adapter.compare(snapshot)
    assert found.since == "a snapshot"
    assert found.streams[0].affine == pytest.approx(adapter.info[0].distance, rel=1e-4, abs=1e-7)
    names = [layer.name for layer in found.layers]
    assert {"1", "4"} <= set(names) <= {name for name, _ in small_network().named_modules()}
    if method in ("cotta", "petal", "ttac"):
        assert found.streams[0].weights > 0
        assert "0" in names
    if method == "tribe+time":
        assert found.classes[0].statistics > 0
    if method in ("tribe", "rotta", "note"):
        assert found.streams[0].statistics is not None
    if method in ("bn", "tent"):
        assert found.streams[0].statistics is None


def test_long_tables_are_cut():
    layers = [m for _ in range(12) for m in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 4))
    adapter = tribe.adapt(net, "tent")
    assert "... and 2 more" in str(adapter.compare())
    assert len(adapter.compare().layers) == 12
    assert "statistics" not in str(adapter.compare())


def test_a_network_without_statistics_or_with_layers_without_parameters_is_compared():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(144, 4)
    )
    adapter = tribe.adapt(net, h0=2.0)
    adapter(batch())
    found = {layer.name: layer for layer in adapter.compare().layers}
    assert found["1"].statistics is None
    assert found["1"].affine > 0
    assert found["2"].affine is None
    assert found["2"].statistics > 0
