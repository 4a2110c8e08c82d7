"""Teacher and student of TRIBE give the same numbers in one pass and one after the other."""

import pytest

import tribe
from tribe.core.state import digest, leaves, tree_map
from tribe.methods import tribe as module
from tribe.testing import CLASSES, images, small_network


def played(method, net, apart, monkeypatch):
    """The logits of the last of four steps, and the state; memory of old states is used again, as an adapter does."""
    monkeypatch.setattr(module, "APART", apart)
    state, retired = method.init(net, 3), None
    for seed in range(4):
        x = images(3, 6, seed).double()
        x[0, 1] = float("nan")
        old, (logits, state) = state, method.step(net, state, x, None, retired)
        retired = old
    return logits, state


IMAGENET = {"eta": 0.5, "gamma": 0.5, "lr": 5e-4}  # half of each update is shared, and two images fill a class


@pytest.mark.parametrize(
    "fields",
    [{}, {"class_stats": "packed"}, {"lambda_anc": 0.0}, IMAGENET, {**IMAGENET, "class_stats": "packed"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["tribe", "selftrain/fixmatch"])
def test_branches_apart_are_the_branches_together(name, fields, monkeypatch):
    method = tribe.methods.create(name, classes=CLASSES, h0=0.9, **fields)
    net = tribe.Backbone(small_network().double())
    together, apart = (played(method, net, pixels, monkeypatch) for pixels in (2**20, 0))
    assert (together[0] - apart[0]).abs().max() <= 1e-9
    assert together[1].info.trusted.max() > 0  # else there is no gradient to compare
    for name, t in leaves(together[1]).items():
        assert (t.double() - leaves(apart[1])[name].double()).abs().max() <= 1e-9, name


@pytest.mark.parametrize("apart", [2**20, 0])
def test_a_retired_state_that_shares_memory_with_the_state_is_not_written_to(apart, monkeypatch):
    """Catches a comparison of tuples: a store makes new ones of the same tensors whenever it is read."""
    monkeypatch.setattr(module, "APART", apart)
    method, net = tribe.methods.create("tribe", classes=CLASSES), tribe.Backbone(small_network())
    state = method.init(net, 2)
    before = digest(state)
    method.step(net, state, images(2, 6), None, tree_map(lambda t: t, state))
    assert digest(state) == before


def test_large_batches_take_half_the_memory(monkeypatch):
    """Only one branch at a time has rows in the network."""
    monkeypatch.setattr(module, "APART", 0)
    net, rows = tribe.Backbone(small_network()), []
    net.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    method = tribe.methods.create("tribe", classes=CLASSES)
    method.step(net, method.init(net, 2), images(2, 6))
    assert rows == [2, 2, 2, 2]  # prediction, anchor, teacher, student
