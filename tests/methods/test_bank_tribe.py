"""A bank of speeds that learns: its plain loop notices bugs, streams learn apart, and a new place forgets."""

import copy
import dataclasses

import pytest
import torch
from test_bank import EVENTS, HOME, STREAM
from test_equations import BANK_TRIBE, STREAM_OF_MANY, assert_equals_plain_loop

import plain_methods as plain
from method_runs import DOUBLE, even_network, network, play
from mutants import mutant
from tribe import methods
from tribe.core.state import leaves, stream, tree_map
from tribe.methods.bank_tribe import BankTribe
from tribe.testing import images


def learner(**fields):
    return methods.create("bank-tribe", **{"classes": 4, **BANK_TRIBE, "learn_every": 1, "h0": 0.5, **fields})


def traveller(**fields):
    """It sees the worlds of `EVENTS` in batches of 40, and arrives between two learning steps."""
    return learner(speeds=(0.05,), horizon=300.0, memory=2, **{"learn_every": 5, "h0": 0.9, **fields})


def anchored_to_itself(self, net, state, rows, *rest):
    """Its anchor has the adapted parameters."""
    moved = copy.copy(net)
    moved.source = lambda streams: (tree_map(lambda t: t[rows], state.affine), None)
    return BankTribe._learn(self, moved, state, rows, *rest)


def trusts_all(self, *args):
    """It learns from images that it does not trust."""
    return BankTribe._learn(dataclasses.replace(self, h0=9.0), *args)


def learns_from_the_first(self, net, state, rows, x, teacher, seen):
    """It learns from half of the images."""
    return BankTribe._learn(self, net, state, rows, *(t[:, : x.shape[1] // 2] for t in (x, teacher, seen)))


@pytest.mark.parametrize("wrong", [anchored_to_itself, trusts_all, learns_from_the_first])
def test_the_plain_loop_notices_a_bug_of_learning(wrong):
    bug = mutant(wrong.__doc__, learner(), _learn=wrong)
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_plain_loop(bug, even_network(STREAM_OF_MANY), STREAM_OF_MANY, 1e-9)


def test_streams_of_which_one_learns_at_a_time_equal_each_alone():
    """Catches a learning step that reads, moves or draws for another row than its own."""
    net, method, inputs, states = (
        network(sure=3.0),
        learner(learn_every=3, augment=methods.get("tribe").augment),
        [],
        [],
    )
    for begun in range(3):  # the streams have taken 0, 1 and 2 steps
        xs = [images(1, 40, 10 * begun + i, DOUBLE) for i in range(begun + 4)]
        _, state = play(method, net, xs[:begun], method.init(net, 1, 7 + begun))
        states.append(state)
        inputs.append(xs[begun:])
    together = tree_map(lambda *rows: torch.cat(rows), *states)
    for xs in zip(*inputs, strict=True):
        y, new = method.step(net, together, torch.cat(xs))
        moved = (new.affine.weight != together.affine.weight).any(1)
        assert moved.tolist() == (together.key.clock % 3 == 0).tolist()
        together = new
        for i, x in enumerate(xs):
            own, states[i] = method.step(net, states[i], x)
            torch.testing.assert_close(y[i], own[0], rtol=0, atol=1e-9)
            alone = leaves(states[i])
            for name, t in leaves(stream(together, i, 3)).items():
                torch.testing.assert_close(t, alone[name], rtol=0, atol=1e-6 if t.dtype == torch.float32 else 1e-9)


def test_a_stream_through_several_worlds_learns_as_the_plain_loop():
    net, method, events = even_network([STREAM], home=HOME), traveller(learn_every=1, h0=0.5), []
    outputs, state = play(method, net, STREAM.split(40, 1))
    expected, named = plain.bank_tribe(net, STREAM[0].split(40), method, events)
    assert events == EVENTS[40, 2]
    torch.testing.assert_close(torch.cat(outputs, 1)[0], torch.cat(expected), rtol=0, atol=1e-9)
    for name, wanted in named.items():
        torch.testing.assert_close(leaves(state)[name][0], wanted, rtol=0, atol=1e-9)


def test_where_the_bank_begins_again_the_parameters_are_those_of_the_source():
    net, method = even_network([STREAM], home=HOME), traveller()
    state, begun, forgot = method.init(net), leaves(method.init(net)), []
    for x in STREAM.split(40, 1):
        _, new = method.step(net, state, x)
        if new.world.age < state.world.age:  # it has arrived
            assert int(state.adam.steps), "nothing was learned there: nothing was tested"
            learned = {name: t for name, t in leaves(new).items() if name.startswith(("affine.", "adam."))}
            same = {torch.equal(t, begun[name]) for name, t in learned.items()}
            assert len(same) == 1
            forgot += same
        state = new
    assert forgot == [event != "stay" for event in EVENTS[40, 2]]


def test_a_bank_that_trusts_nothing_is_the_bank():
    net, own = even_network(STREAM_OF_MANY), learner(h0=0.0)
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(methods.get("bank"))}
    plain_outputs, _ = play(methods.create("bank", **fields), net, STREAM_OF_MANY)
    outputs, state = play(own, net, STREAM_OF_MANY)
    assert int(state.adam.steps) == 0
    for y, wanted in zip(outputs, plain_outputs, strict=True):
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
