"""Test a bank of speeds: its comparisons with the source, changes of the world, and places that it remembers."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_equations import assert_equals_plain_loop
from torch import nn

import plain_methods as plain
import tribe
from method_runs import DOUBLE, at_home, even_network, play, varied
from mutants import mutant
from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import Stats, leaves
from tribe.methods import bank as module
from tribe.methods import places, probing
from tribe.testing import images, small_network

WORLDS = ((1.0, 0.0), (0.3, 0.0)) * 2 + ((1.0, 0.0),)  # gain and shift: day and night
OTHERS = ((1.0, 0.0), (0.3, 0.7), (1.0, 0.0), (0.3, 0.0), (0.3, 0.7), (1.0, 0.0), (0.3, 0.0))  # and a bright world
CLASSES = 4
bounded = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def travel(stay=240, seed=0, worlds=WORLDS):
    """A stream that stays so many images in each world: (1, N, 3, 8, 8)."""
    generator = torch.Generator().manual_seed(seed)
    x, tint = (torch.rand(len(worlds), stay, 3, size, size, generator=generator, dtype=DOUBLE) for size in (8, 1))
    gain, shift = torch.tensor(worlds, dtype=DOUBLE).view(-1, 2, 1, 1, 1, 1).unbind(1)
    return (x * (0.5 + 0.5 * tint) * gain + shift).flatten(0, 1)[None]


STREAM = travel()
HOME = STREAM[0, :240]


def bank(**fields):
    return methods.create("bank", **{"classes": CLASSES, "speeds": (0.05,), "compare": 5, **fields})


def assert_close(state, other, without=("info", "key"), atol=1e-9):
    wanted = leaves(other)
    for name, t in leaves(state).items():
        if name.split(".")[0] not in without:
            torch.testing.assert_close(
                t, wanted[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


@functools.cache
def plain_journey(batch, memory):
    """The plain loop's outputs and state of the stream, and what it decided after each change."""
    events = []
    outputs, named = plain.bank(even_network([STREAM], home=HOME), STREAM[0].split(batch), bank(memory=memory), events)
    return torch.cat(outputs), named, events


def assert_travels_as_the_plain_loop(method, batch):
    outputs, state = play(method, even_network([STREAM], home=HOME), STREAM.split(batch, 1))
    expected, named, _ = plain_journey(batch, method.memory)
    torch.testing.assert_close(torch.cat(outputs, 1)[0], expected, rtol=0, atol=1e-9)
    for name, wanted in named.items():
        torch.testing.assert_close(leaves(state)[name][0], wanted, rtol=0, atol=1e-9)


# -- the plain loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare", [1, 5])
def test_observed_images_of_large_batches_stand_for_the_others(compare):
    xs = [torch.cat(varied(4, first=4 * i), 1) for i in range(3)] + varied(1, batch=50, first=20)
    method = bank(speeds=(0.3, 0.02), horizon=50.0, compare=compare, observe=2)
    assert_equals_plain_loop(method, even_network(xs), xs, 1e-9)


EVENTS = {  # by the size of batches and of the memory
    (1, 2): ["stay", "back", "recalled", "back"],
    (8, 0): ["stay", "back", "stay", "back"],
    (8, 1): ["stay", "back", "recalled", "back"],
    (40, 2): ["stay", "back", "recalled", "back"],
}


@pytest.mark.parametrize(("batch", "memory"), EVENTS)
def test_a_stream_through_several_worlds_equals_a_plain_loop(batch, memory):
    assert_travels_as_the_plain_loop(bank(memory=memory), batch)
    assert plain_journey(batch, memory)[2] == EVENTS[batch, memory]


@pytest.mark.parametrize("memory", [0, 1, 4])
def test_large_batches_through_other_worlds_equal_a_plain_loop(memory):
    """A place that is remembered twice is one; one that is too many takes the room of the nearest, here of all."""
    x, method, events = travel(worlds=OTHERS), bank(memory=memory), []
    net = even_network([x], home=x[0, :240])
    outputs, state = play(method, net, x.split(40, 1))
    expected, named = plain.bank(net, x[0].split(40), method, events)
    torch.testing.assert_close(torch.cat(outputs, 1)[0], torch.cat(expected), rtol=0, atol=1e-9)
    for name, wanted in named.items():
        torch.testing.assert_close(leaves(state)[name][0], wanted, rtol=0, atol=1e-9)
    assert "back" in events
    assert ("recalled" in events) == (memory > 1)


def probes_first(self, net, state, batch):
    bank = methods.get("bank")
    return bank.adapt(self, net, state._replace(probes=bank.adapt(self, net, state, batch).state.probes), batch)


def test_the_plain_loop_notices_probes_that_count_before_the_prediction():
    with pytest.raises(AssertionError):
        assert_travels_as_the_plain_loop(mutant("It probes first.", bank(memory=1), adapt=probes_first), 8)


def swapped(probes, distance):
    return probing.source_share(probes._replace(benefit=-probes.benefit), distance)


def recalled_anyway(arrived, world, places_, current, source, eps):
    far = Stats(source.mean + 1e3, source.var)
    without_source = places.arrive(arrived, world, places_, current, far, eps)
    return (
        without_source
        if without_source.recalled.any()
        else places.arrive(arrived, world, places_, current, source, eps)
    )


def endless(world, *rest):
    return places.record(world, *rest)._replace(look=world.look)


def keeps_the_worst(moments, stats, eps):
    surprise = places.measure_surprise(moments, stats, eps)
    return -surprise


def never_lost(moments, stats, source, eps):
    surprise, excess = places.measure_surprise_and_excess(moments, stats, source, eps).unbind(2)
    return torch.stack((surprise, excess.abs()), 2)


BUGS = [
    ("measure_surprise_and_excess", never_lost),
    ("measure_surprise", keeps_the_worst),
    ("source_share", swapped),
    ("arrive", recalled_anyway),
    ("record", endless),
]


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_the_plain_loop_notices_a_bug(name, bug, monkeypatch):
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        assert_travels_as_the_plain_loop(bank(memory=1), 40 if name == "arrive" else 8)


# -- streams, files, bad images ---------------------------------------------------------------------------------------


def arrivals(method, net, xs, state=None):
    """The state at the end, the outputs, and the batches after which each stream had arrived somewhere."""
    state, outputs, arrived = state or method.init(net, len(xs[0])), [], [[] for _ in xs[0]]
    for i, x in enumerate(xs):
        before = state.world.age
        y, state = method.step(net, state, x)
        outputs.append(y)
        for stream in (state.world.age < before).nonzero()[:, 0].tolist():
            arrived[stream].append(i)
    return state, torch.cat(outputs, 1), arrived


def test_streams_that_change_at_different_times_equal_each_alone():
    """Catches a look, an event or a place that one stream takes from another."""
    net, method = even_network([STREAM], home=HOME), bank(memory=2)
    streams = [travel(240), travel(300, 1, WORLDS[:4]), travel(200, 2, (*WORLDS, WORLDS[1]))]
    together, y, arrived = arrivals(method, net, torch.cat(streams).split(8, 1))
    assert all(arrived)
    assert len({i for each in arrived for i in each}) == sum(map(len, arrived)), "two streams arrived at once"
    for i, x in enumerate(streams):
        alone, one, own = arrivals(method, net, x.split(8, 1))
        assert own == [arrived[i]]
        torch.testing.assert_close(y[i : i + 1], one, rtol=0, atol=1e-9)
        for name, t in leaves(alone).items():
            rows = leaves(together)[name].unflatten(0, (3, -1))[i]
            torch.testing.assert_close(rows, t, rtol=0, atol=1e-9) if name != "key.seed" else None


def test_a_bank_resumes_in_the_middle_of_a_look(tmp_path):
    xs, model = STREAM[0].float().split(5), at_home(small_network(), HOME.float())
    adapter = tribe.adapt(model, bank(memory=2))
    rest = iter(xs)
    for x in rest:
        adapter(x)
        look, used = (int(t) for t in (adapter.state.world.look, adapter.state.places.used))
        if used and 0 < look < places.LOOK:
            break
    assert 0 < look < places.LOOK, "no look was under way"
    adapter.save(tmp_path / "state")
    resumed = tribe.load(tmp_path / "state", model)
    assert resumed.digest() == adapter.digest()
    for x in itertools.islice(rest, 50):
        assert torch.equal(adapter(x), resumed(x))
    assert resumed.digest() == adapter.digest()
    assert float(adapter.state.world.age) < 300, "the look did not end"


class Proportion(nn.Module):
    """Divides a black image by zero; leaves all other images as they are."""

    def forward(self, x):
        brightness = x.mean((1, 2, 3), keepdim=True)
        return x * (brightness / brightness)


@pytest.mark.parametrize("pixel", [math.nan, 0.0])
def test_a_bad_image_among_the_probes_changes_nothing(pixel):
    """Catches NaN that is multiplied by a weight of zero, and images that count although their output is NaN."""
    net, method = Backbone(nn.Sequential(Proportion(), *small_network(dtype=DOUBLE))), bank(observe=1, memory=1)
    xs, bad = STREAM.split(8, 1), torch.full((1, 1, 3, 8, 8), pixel, dtype=DOUBLE)
    at = [i % 9 for i in range(len(xs))]
    outputs, clean = play(method, net, xs)
    others, state = play(method, net, [torch.cat((x[:, :i], bad, x[:, i:]), 1) for i, x in zip(at, xs, strict=True)])
    assert int(clean.places.used) == 1
    assert int(state.info.skipped) == len(xs)
    assert_close(state, clean)
    for i, y, wanted in zip(at, others, outputs, strict=True):
        torch.testing.assert_close(torch.cat((y[:, :i], y[:, i + 1 :]), 1), wanted, rtol=0, atol=1e-9)


class Dim(nn.Module):
    """Returns NaN for images with a high activation."""

    def forward(self, x):
        return x.where(x.amax((1, 2, 3), keepdim=True) < 0, math.nan)


def test_an_image_that_only_the_source_cannot_predict_says_nothing():
    model = small_network(dtype=DOUBLE)
    net, method = Backbone(nn.Sequential(*model[:2], Dim(), *model[2:])), bank()
    state = method.init(net)
    far = Stats(state.pooled.mean + 100, state.pooled.var), torch.tensor([[0.0, -9.0]], dtype=DOUBLE)
    away = state.world._replace(distance=state.world.distance + 9)
    _, new = play(method, net, [images(1, 6, 0, DOUBLE)], state._replace(pooled=far[0], score=far[1], world=away))
    assert (int(new.info.images), int(new.probes.images), int(new.world.seen)) == (6, 0, 0)
    assert_close(new.probes, state.probes, atol=0)


def test_bad_images_are_not_the_ones_to_observe():
    """Catches a choice by place in the batch: all those images may be bad."""
    net, method = Backbone(small_network(dtype=DOUBLE)), bank(observe=2)
    _, state = play(method, net, STREAM[:, :120].split(40, 1))
    x = STREAM[:, 120:160].clone()
    x[:, ::2] = math.nan
    _, new = play(method, net, [x], state)
    _, wanted = play(method, net, [x[:, 1::2]], state)
    assert_close(new, wanted)


def test_a_camera_that_stood_still_does_not_see_changes_for_ever():
    net, method = Backbone(small_network()), bank()
    state, still = method.init(net), images(1, 1).expand(1, 1000, 3, 8, 8)
    _, state = play(method, net, [still] * 20, state)
    state, _, arrived = arrivals(method, net, [images(1, 20, seed) for seed in range(150)], state)
    assert len(arrived[0]) < 10


def test_a_bank_of_one_speed_is_warned_of():
    with pytest.warns(UserWarning, match="one speed"):
        bank(speeds=(0.1,))


# -- properties -------------------------------------------------------------------------------------------------------

number = st.floats(-30, 30)
logits = st.lists(number, min_size=CLASSES, max_size=CLASSES)


@st.composite
def probes(draw):
    posterior = torch.tensor([draw(logits), draw(logits)], dtype=DOUBLE).softmax(1)
    limits = (-probing.MOST, probing.MOST), (0, 50), (0, probing.MEMORY)
    return probing.Probes(posterior[None], *(torch.tensor([draw(st.floats(*ends))], dtype=DOUBLE) for ends in limits))


@bounded
@given(probes(), st.floats(0, 1), st.floats(0, 9))
def test_the_share_of_the_source_is_a_share_and_falls_with_benefit_and_distance(state, more, away):
    distance = torch.tensor([away], dtype=DOUBLE)
    share, less = (probing.source_share(p, distance) for p in (state, state._replace(benefit=state.benefit + more)))
    assert probing.source_share(state, distance + more) <= share
    assert 0 <= less <= share <= 1
    if more * state.images > 1e-3 and 1e-6 < share < 1 - 1e-6:
        assert less < share


@bounded
@given(probes(), logits, logits)
def test_probes_without_an_image_stay(state, source, adapted):
    source, adapted = (torch.tensor([[t]], dtype=DOUBLE) for t in (source, adapted))
    assert_close(probing.add_probes(state, source, adapted, torch.zeros(1, 1, dtype=DOUBLE)), state, (), 0)
    after = probing.add_probes(state, source, adapted, torch.ones(1, 1, dtype=DOUBLE))
    assert all(t.isfinite().all() for t in after)
    assert 0 <= probing.source_share(after, torch.zeros(1, dtype=DOUBLE)) <= 1
    assert (after.posterior.sum(2) - 1).abs().max() < 1e-9


@settings(bounded, max_examples=15)
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=3, max_size=6), st.integers(0, 16))
def test_a_bank_stays_finite_whichever_images_count(marks, look):
    """Also without one; a stream without a valid image stays as it is."""
    net, method, valid = (
        Backbone(small_network()),
        bank(compare=2),
        torch.tensor(marks).view(-1, 1, 6).expand(-1, 2, -1),
    )
    state = method.init(net, 2)
    state = state._replace(world=state.world._replace(look=torch.tensor([float(look), 0.0])))
    for i, mark in enumerate(valid):
        mark = torch.stack((mark[0], torch.zeros(6, dtype=torch.bool)))
        y, new = method.step(net, state, images(2, 6, i), mark)
        rows = {name: t.unflatten(0, (2, -1)) for name, t in leaves(new).items()}
        assert all(t.isfinite().all() for t in (y, *rows.values()))
        assert all(torch.equal(t[1], leaves(state)[name].unflatten(0, (2, -1))[1]) for name, t in rows.items())
        state = new
