"""Methods that learn rarely: own steps when they are due, predictions of the last state between them."""

from dataclasses import dataclass

import pytest
import torch

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import digest, leaves, stream, tree_map
from tribe.methods import Pipeline, with_fields
from tribe.methods.bank import Bank
from tribe.methods.rare import Rare
from tribe.testing import CLASSES, images, ready, small, small_network

RARE = [name for name in methods.names() if methods.get(name).does_not_adapt is None]
RARE = [name for name in RARE if methods.get(name).rare_field is None]


def learned(state):
    """The tensors that decide predictions: the clock and the report aside."""
    return {name: t for name, t in leaves(state).items() if not {"key", "info"} & set(name.split("."))}


def same(one, other):
    return all(torch.equal(t, learned(other)[name]) for name, t in learned(one).items())


@pytest.mark.parametrize("name", RARE)
def test_it_learns_from_every_nth_batch_and_predicts_between(name):
    net, alone = Backbone(small_network()), small(ready(name))
    rare = Pipeline(alone, rare=Rare(learn_every=3))
    assert rare.name == f"{name}+rare"
    assert rare.capture == "never"
    state, plain = rare.init(net, 2, seed=3), alone.init(net, 2, seed=3)
    for number in range(7):
        x, before = images(2, 6, number), state
        y, state = rare.step(net, state, x)
        assert state.key.clock.tolist() == [number + 1] * 2
        assert state.info.images.tolist() == [6 * number + 6] * 2
        if number % 3:
            assert same(state.method, before.method)
            assert torch.equal(y, alone.predict(net, before.method, x))
        else:  # the method's own step, with the clock of the stream
            wanted, plain = alone.step(net, before.method, x)
            assert torch.equal(y, wanted)
            assert digest(state.method) == digest(plain)


@pytest.mark.parametrize("name", RARE)
def test_streams_at_different_places_equal_each_alone(name):
    net = Backbone(small_network(dtype=torch.float64))
    rare = Pipeline(small(ready(name)), rare=Rare(learn_every=3))
    first = [images(1, 6, seed, torch.float64) for seed in range(3)]
    states, inputs = [], []
    for begun in range(3):  # the streams have taken 0, 1 and 2 steps
        state = rare.init(net, 1, seed=7 + begun)
        for x in first[:begun]:
            _, state = rare.step(net, state, x)
        states.append(state)
        inputs.append([images(1, 6, 10 * begun + i, torch.float64) for i in range(4)])
    together = tree_map(lambda *rows: torch.cat(rows), *states)
    for batch in range(4):
        y, together = rare.step(net, together, torch.cat([own[batch] for own in inputs]))
        for i, own in enumerate(inputs):
            answer, states[i] = rare.step(net, states[i], own[batch])
            assert torch.allclose(y[i], answer[0], rtol=0, atol=1e-9)
            alone = stream(together, i, 3)
            for key, t in leaves(states[i]).items():
                assert torch.allclose(leaves(alone)[key].double(), t.double(), rtol=0, atol=1e-6), key


def test_every_batch_is_the_method_itself():
    net, alone = Backbone(small_network()), small(ready("tribe"))
    rare = Pipeline(alone, rare=Rare(learn_every=1))
    one, other = alone.init(net), rare.init(net)
    for seed in range(3):
        _, one = alone.step(net, one, images(1, 6, seed))
        _, other = rare.step(net, other, images(1, 6, seed))
    assert digest(one) == digest(other.method)


def test_a_memory_is_not_fed_between():
    net, rare = Backbone(small_network()), small(ready("rotta+rare", learn_every=4, every=6))
    rare = with_fields(rare, learn_every=4)
    state = rare.init(net)
    for seed in range(4):
        _, state = rare.step(net, state, images(1, 6, seed))
    assert state.method.memory.arrivals.tolist() == [6]
    assert state.info.images.tolist() == [24]


def test_a_guard_watches_every_batch_and_holds_back_learning_alone():
    net, rare = Backbone(small_network()), small(ready("tent+rare+guard+time", learn_every=2, good_every=None))
    state = rare.init(net)
    for seed in range(5):
        before = state
        _, state = rare.step(net, state, images(1, 6, seed))
        assert same(state.method, before.method) == bool(seed % 2)  # nor is it pulled back to the source between
    assert state.guard.watch.alarms.images.tolist() == [30]
    guarded = with_fields(rare, skip=True)
    _, dark = guarded.step(net, state, torch.zeros(1, 6, 3, 8, 8))
    assert dark.guard.held.tolist() == [0]
    assert dark.key.clock.tolist() == [6]
    _, held = guarded.step(net, dark, torch.zeros(1, 6, 3, 8, 8))
    assert held.guard.held.tolist() == [6]
    assert held.key.clock.tolist() == [6]


def test_the_name_and_its_field_make_a_pipeline():
    made = methods.create("tribe+rare+guard+time", classes=CLASSES, learn_every=5)
    assert made.rare == Rare(learn_every=5)
    assert made.name == "tribe+rare+guard+time"
    assert with_fields(made, learn_every=6).rare == Rare(learn_every=6)
    assert made.unfiltered.name == "tribe+rare+guard" == methods.parse(made.name).unfiltered
    assert methods.parse("selftrain/bn+st+rare").alone == "selftrain/bn+st"
    assert "learn_every" in methods.field_names("tent+rare")


@dataclass(frozen=True)
class OwnWay(Bank):
    """A method with a field of its own."""

    learn_every: int | None = None

    name = "ownway"
    rare_field = "learn_every"


@pytest.mark.parametrize(
    ("method", "word"), [(OwnWay(classes=CLASSES), "learn_every"), (ready("source"), "never"), (ready("lame"), "never")]
)
def test_methods_that_cannot_be_stepped_rarely_are_refused(method, word):
    with pytest.raises(ValueError, match=word):
        Pipeline(method, rare=Rare())


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_number_of_batches_is_whole(number):
    with pytest.raises(ValueError, match="learn_every"):
        methods.create("tent+rare", learn_every=number)
