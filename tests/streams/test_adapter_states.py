"""States that are kept: saved, cast, loaded into adapters that share a network, snapshots that do not fit."""

from itertools import product

import pytest
import torch
from torch import nn

import tribe
from networks import Counting, batch, learner, refused, started
from tribe.core.backbone import Backbone
from tribe.core.state import leaves
from tribe.testing import informed, ready, small_network

METHODS = tribe.methods.names()

COMPOSED = ["tribe+watch", "tribe+guard", "rotta+time", "tent+guard+time"]


PLAIN = [name for name in METHODS if tribe.methods.get(name).needs is None]
CAST = [*((name, torch.bfloat16) for name in PLAIN), *product(COMPOSED, (torch.float32, torch.bfloat16, torch.float64))]


@pytest.mark.parametrize(("method", "dtype"), CAST, ids=str)
def test_an_adapter_that_was_cast_can_be_loaded(tmp_path, method, dtype):
    """What watches keeps sums in float64 and numbers in float32, whatever the network's precision is."""
    adapter = tribe.adapt(small_network(), ready(method))
    adapter(batch())
    adapter.to(dtype)
    adapter(batch(1))
    adapter.save(tmp_path / "a")
    if dtype is torch.bfloat16:
        with pytest.raises(tribe.StateFileError, match=r"tribe\.Backbone\(net\)\.to\(torch\.bfloat16\)"):
            tribe.load(tmp_path / "a", small_network())
    resumed = tribe.load(tmp_path / "a", Backbone(small_network()).to(dtype))
    assert resumed.digest() == adapter.digest()
    fleet = tribe.fleet(resumed.net, adapter.method).load("camera", tmp_path / "a")
    assert torch.equal(fleet({"camera": batch(2)})["camera"], resumed(batch(2)))
    adapter(batch(2))
    assert resumed.digest() == adapter.digest()


def test_a_network_that_counts_is_known_again(tmp_path):
    net = Counting()
    adapter = learner(net)
    adapter(batch())
    adapter.save(tmp_path / "a")
    assert tribe.load(tmp_path / "a", net).digest() == adapter.digest()
    other = Counting()
    other.passes += 1
    with pytest.raises(tribe.StateFileError, match="another model"):
        tribe.load(tmp_path / "a", other)


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_that_was_cast_keeps_what_one_of_a_cast_network_keeps(method):
    cast = tribe.adapt(small_network(), ready(method)).to(torch.bfloat16)
    net = Backbone(small_network()).to(torch.bfloat16)
    made = tribe.adapt(net, informed(cast.method, net))
    assert {n: t.dtype for n, t in leaves(cast.state).items()} == {n: t.dtype for n, t in leaves(made.state).items()}


def test_other_weights_of_a_state_dict_do_not_reach_adapters_that_share_the_network():
    shared = Backbone(small_network())
    one, two = learner(shared), learner(shared)
    before, kept = two.predict(batch()), two.snapshot()
    other = learner(small_network(seed=1))
    other(batch())
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.predict(batch(9)), other.predict(batch(9)))
    assert torch.equal(two.predict(batch()), before)
    assert torch.equal(two.restore(kept).predict(batch()), before)
    assert one.net.fingerprint() == other.net.fingerprint()
    with pytest.raises(ValueError, match="another network"):
        one.restore(kept)


def test_equal_weights_of_a_state_dict_are_not_written():
    shared = Backbone(small_network())
    one, two = learner(shared), learner(shared)
    versions = [t._version for t in (*shared.parameters(), *shared.buffers())]
    one.load_state_dict(two.state_dict())
    assert one.net is shared
    assert [t._version for t in (*shared.parameters(), *shared.buffers())] == versions


def test_a_state_dict_of_another_network_is_refused_where_source_knowledge_belongs_to_this_one():
    adapter = tribe.adapt(small_network(), ready("ttac"))
    net = adapter.net
    given = {k: t + 0.1 if k.startswith("net.model") else t for k, t in adapter.state_dict().items()}
    with refused(adapter, tribe.knowledge.KnowledgeError, "belongs to another network"):
        adapter.load_state_dict(given)
    assert adapter.net is net


def test_an_adapter_whose_network_was_cast_by_another_says_so():
    shared = Backbone(small_network())
    one, two = learner(shared), learner(shared)
    one(batch()), two(batch())
    one.double()
    with refused(two, RuntimeError, "moved"):
        two(batch())
    two.double()
    assert torch.equal(one(batch(1)), two(batch(1)))


def test_numbers_that_are_not_finite_are_refused_before_anything_learns():
    net = Counting()
    net.aux = nn.BatchNorm2d(4)
    net.aux.running_var.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"not finite \(aux\.running_var\)"):
        learner(net)
    adapter = learner(small_network())
    given = {k: t / 0 if k.startswith("net.origin.affine") else t for k, t in adapter.state_dict().items()}
    with pytest.raises(ValueError, match=r"not finite \(1\.weight, 4\.weight"):
        adapter.load_state_dict(given)


LIFE = {
    "reset a stream that is not there": (lambda a: a.reset(stream=2), IndexError, "streams 0 to 1"),
    "reset a fraction of a stream": (lambda a: a.reset(stream=0.5), IndexError, "stream 0.5"),
    "reset a stream below zero": (lambda a: a.reset(stream=-3), IndexError, "stream -3"),
    "export a stream that is not there": (lambda a: a.export(stream=9), IndexError, "stream 9"),
    "export without saying which": (lambda a: a.export(), ValueError, "export"),
    "restore what is no snapshot": (lambda a: a.restore({}), TypeError, "dict"),
    "restore another method's": (lambda a: a.restore(started(2, lr=0.5).snapshot()), ValueError, "taken with"),
    "restore other streams": (lambda a: a.restore(started(3).snapshot()), ValueError, "number of streams"),
    "restore another network's": (
        lambda a: a.restore(tribe.adapt(small_network(seed=1), streams=2).snapshot()),
        ValueError,
        "another network",
    ),
    "load other streams": (lambda a: a.load_state_dict(started(3).state_dict()), RuntimeError, "number of streams"),
    "load a state dict of lists": (
        lambda a: a.load_state_dict({k: t.tolist() for k, t in a.state_dict().items()}, assign=True),
        RuntimeError,
        "no tensor. Nothing was loaded",
    ),
    "load a state dict that is not finite": (
        lambda a: a.load_state_dict({k: t / 0 if "affine" in k else t for k, t in a.state_dict().items()}),
        RuntimeError,
        r"not finite \(affine.bias, affine.weight",
    ),
    "load another method's": (
        lambda a: a.load_state_dict(tribe.adapt(small_network(), "tent", streams=2).state_dict()),
        RuntimeError,
        "Nothing was loaded",
    ),
}


@pytest.mark.parametrize("case", LIFE)
def test_life_cycle(case):
    act, error, message = LIFE[case]
    model = started(streams=2)
    with refused(model, error, message):
        act(model)
