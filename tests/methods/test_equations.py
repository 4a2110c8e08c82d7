"""Every method against a plain PyTorch loop, written from the equations of its paper: see `plain_methods`."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import plain_methods as plain
from method_runs import DOUBLE, batches, darker, even_network, network, play, varied
from mutants import mutant
from tribe import methods
from tribe.core.state import Stats, leaves
from tribe.knowledge import Knowledge
from tribe.testing import images
from tribe.testing.method_checks import prediction_comes_before_learning


class Setting(NamedTuple):
    """The stream and the network of a method and its plain loop."""

    xs: Callable[[], Any] = batches  # the batches of one stream
    net: Callable[..., Any] = network
    learn: Callable[..., Any] | None = None  # source knowledge, from the method and the network
    atol: float = 1e-9


def fisher(method, net):
    """Random Fisher information, a sum over four batches."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(14, generator=generator, dtype=DOUBLE) for name in ("weight", "bias")}
    return Knowledge("eata", tensors, net.fingerprint(exact=False), {"batches": 4})


def studied(sources, method, net):
    return method.study(net, [(x[0], None) for x in sources])


def two_worlds():
    """First dim images, which the first domain follows, then some of strong contrast, which are of another one."""
    dim = [x * 0.3 for x in varied(5, batch=6)]
    strong = [(x > x.mean()).to(DOUBLE) * 1.2 for x in varied(3, batch=6, first=9)]
    return [*dim[:4], *strong[:2], torch.cat((dim[4], strong[2]), 1)]


SOURCES = varied(7, first=50)
STREAM = torch.cat(varied(8), 1)[:, :69]
STREAM_OF_MANY = torch.cat(varied(19), 1)[:, :167].split((9, 36, 9, 70, 9, 34), 1)  # of 36, 70 and 34 a part learns
SETTINGS = {
    "pl": Setting(),
    "lame": Setting(
        lambda: [images(1, batch, batch, DOUBLE) for batch in (1, 2, 6, 7, 24)], partial(network, sure=0.1)
    ),
    "eata": Setting(partial(batches, 8), partial(network, sure=3.0), fisher),
    "sar": Setting(partial(batches, 6), partial(network, sure=2.0)),
    "roid": Setting(partial(batches, 5)),
    "cmf": Setting(partial(batches, 5)),
    "deyo": Setting(partial(batches, 8, batch=9)),
    "delta": Setting(partial(varied, 7), partial(even_network, varied(7), sure=0.3)),
    "petta": Setting(partial(varied, 7), partial(even_network, SOURCES), partial(studied, SOURCES), 1e-6),
    "rotta": Setting(lambda: STREAM.split((1, 4, 7, 10, 25, 22), 1), partial(even_network, varied(8))),
    "note": Setting(lambda: STREAM[:, :35].split((1, 3, 12, 19), 1), partial(even_network, varied(8))),
    "sotta": Setting(lambda: STREAM.split(23, 1), partial(even_network, varied(8), sure=1.5), atol=1e-6),
    "snap": Setting(lambda: STREAM.split(23, 1), partial(even_network, varied(8), sure=1.5)),
    "bank": Setting(partial(varied, 6), partial(even_network, varied(6))),
    "bank-tribe": Setting(lambda: STREAM_OF_MANY, partial(even_network, STREAM_OF_MANY)),
    "bdn": Setting(two_worlds, partial(even_network, varied(4))),
    # The least certain batches first: a student that equals its teacher has no gradient, Adam steps along rounding.
    "cotta": Setting(lambda: [batches(4, batch=6)[seed] for seed in (1, 0, 2, 3)], atol=1e-8),
    "ttac": Setting(
        partial(batches, 6, batch=12), learn=partial(studied, [0.8 * x for x in batches(5, batch=16)]), atol=1e-7
    ),
}
ROID = {"prior": "none", "augment": darker}
DELTA = {"alpha": 0.8, "lr": 0.01}
PETTA = {"augment": darker, "size": 12, "lr": 5e-3}
MEMORY = {"size": 10, "room": 192, "lr": 1e-2}
SOTTA = {**MEMORY, "c_0": 0.5, "rho": 0.3, "every": 23}
BDN = {"layer": "1", "domains": 8, "gamma": 0.0, "eta": 0.3}
BANK_TRIBE = {"horizon": 50.0, "compare": 5, "lr": 1e-2, "augment": darker}
COTTA = {"p": 0.0, "n": 7, "chunk": 3, "alpha": 0.9, "lr": 1e-2}
CASES = [
    ("pl", {}),
    ("lame", {}),
    ("lame", {"classes": 2, "neighbours": 2}),
    ("lame", {"rounds": 1}),
    ("lame", {"rounds": 5}),
    ("lame", {"settled": 1e-2}),
    ("lame", {"settled": 9.0}),
    ("eata", {"d": 0.6, "alpha": 20.0}),
    ("eata", {"d": 0.05, "alpha": 20.0, "fisher": "sum"}),
    ("eata", {"d": 0.9, "alpha": 20.0, "classes": 2}),
    ("eata", {"d": 0.6, "alpha": 20.0, "lr": 0.05, "optimizer": "sgd"}),
    ("pl", {"lr": 0.05, "optimizer": "sgd", "momentum": 0.5}),
    ("sar", {"lr": 0.05, "rho": 0.3, "e_m": 0.0, "frozen_tail": 0.0}),
    ("sar", {"lr": 0.05, "rho": 0.3, "e_m": 0.0, "frozen_tail": 0.5}),
    ("sar", {"lr": 0.05, "rho": 0.3, "e_m": 0.0, "frozen_tail": ("1",)}),
    ("roid", {**ROID}),
    ("roid", {**ROID, "lr": 0.005, "optimizer": "sgd", "classes": 2}),
    *(("cmf", {**ROID, "lr": 0.05, "q": q, "gamma": 0.7, "alpha": 0.9}) for q in (0.005, 50.0, 500.0)),
    ("deyo", {"optimizer": "adam", "lr": 1e-3, "frozen_tail": 0.0}),
    ("deyo", {"lr": 0.01, "frozen_tail": 0.5, "patches": 2}),
    ("delta", {**DELTA}),
    ("delta", {**DELTA, "loss": "entropy", "optimizer": "sgd"}),
    ("delta", {**DELTA, "loss": "pseudo labels"}),
    ("petta", {**PETTA}),
    ("petta", {**PETTA, "loss": "plain", "regularizer": "l2", "lambda_0": 3.0}),
    ("petta", {**PETTA, "sensing": "paper", "nu": 0.01, "alpha_0": 0.2, "anchor_weight": 0.3, "alpha_bn": 0.2}),
    ("rotta", {**MEMORY, "every": 10, "nu": 0.1, "alpha": 0.1, "augment": darker}),  # also in the middle of a batch
    *(("note", {**MEMORY, "every": every}) for every in (None, 4, 5, 30)),
    ("sotta", {**SOTTA, "frozen_tail": 0.0}),
    ("sotta", {**SOTTA, "frozen_tail": 0.5}),
    ("snap", {**MEMORY, "learn_every": 1}),
    ("snap", {**MEMORY, "learn_every": 2, "k": 4.0, "momentum": 0.5, "size": 7}),
    ("bank", {"bonus": 0.01, "horizon": 20.0, "compare": 0, "observe": 1}),
    ("bank", {"speeds": (0.3, 0.05), "gamma": 0.2, "temperature": 0.1, "compare": 0, "observe": 1}),
    *(("bank", {"horizon": 20.0, "compare": probe, "observe": 1}) for probe in (1, 2, 5)),
    *(
        ("bank-tribe", {**BANK_TRIBE, "learn_every": every, "lambda_anc": anchored, "h0": h0})
        for every, anchored, h0 in itertools.product((1, 3), (0.0, 0.5), (0.5, 0.9))
    ),
    ("bdn", {**BDN, "eta": 0.1, "gamma": 0.3}),
    ("bdn", {**BDN, "confident": False}),
    ("bdn", {**BDN, "domains": 3}),
    ("cotta", {**COTTA, "p_th": 1.5}),
    ("cotta", {**COTTA, "p_th": 0.88}),  # views are averaged for two of four batches
    ("ttac", {"tau_pp": 0.6, "lr": 1e-3, "n_clus": 20, "n_all": 40, "n_min": 10}),
]


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_a_method_equals_a_plain_loop(name, fields):
    make_images, make_network, learn, atol = SETTINGS[name]
    net, xs = make_network(*([fields["classes"]] if "classes" in fields else [])), make_images()
    method = methods.create(name, **{"classes": 4, **fields})
    if learn is not None:
        method = dataclasses.replace(method, knowledge=learn(method, net))
    assert_equals_plain_loop(method, net, xs, atol)


def assert_equals_plain_loop(method, net, xs, atol):
    outputs, state = play(method, net, xs)
    expected, named = getattr(plain, method.name.replace("-", "_"))(net, [x[0] for x in xs], method)
    for y, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y[0], wanted, rtol=0, atol=atol)
    ends, start = leaves(state), leaves(method.init(net))
    for leaf, wanted in named.items():
        torch.testing.assert_close(
            ends[leaf][0], wanted, rtol=0, atol=atol, msg=lambda text, leaf=leaf: f"{leaf}: {text}"
        )
        moved = not torch.equal(ends[leaf], start[leaf])
        assert moved or leaf.startswith("hidden."), f"{leaf} did not move: nothing was tested"  # CMF's may stay


def test_eata_studies_the_sum_of_squared_gradients():
    net, xs = network(), [x[0] for x in batches(3)]
    known = methods.create("eata", classes=4).study(net, [(x, None) for x in xs])
    module, weights, biases = plain.ordinary(net)
    expected = torch.zeros(28, dtype=DOUBLE)
    for x in xs:
        logits = module(x)
        grads = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, logits.argmax(1)), [*weights, *biases])
        expected += torch.cat(grads) ** 2
    got = torch.cat((known.tensors["weight"], known.tensors["bias"]))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert known.spec == {"images": 21, "batches": 3}


def test_petta_studies_the_features_of_each_class():
    net = even_network(SOURCES)
    known = studied(SOURCES, methods.create("petta", classes=4), net).tensors
    for name, wanted in zip(("mean", "var"), plain.features_by_class(net, [x[0] for x in SOURCES], 4), strict=True):
        torch.testing.assert_close(known[name].double(), wanted, rtol=1e-6, atol=1e-7)


def counts_twice(self, net, state, moments, labels, seen, *rest):
    twice = (torch.cat((t, t[:, :1]), 1) for t in (*moments, labels, seen))
    mean, var, labels, seen = twice
    return methods.get("bank")._follow(self, net, state, Stats(mean, var), labels, seen, *rest)


def scores_afterwards(self, net, state, moments, labels, seen, *rest):
    after = methods.get("bank")._follow(self, net, state, moments, labels, seen)
    return methods.get("bank")._follow(self, net, state._replace(pooled=after.pooled), moments, labels, seen, *rest)


@pytest.mark.parametrize("wrong", [counts_twice, scores_afterwards])
def test_the_plain_loop_of_the_bank_notices_a_bug(wrong):
    healthy = methods.create("bank", classes=4, bonus=0.01, horizon=20.0, compare=0, observe=1)
    with pytest.raises(AssertionError):
        assert_equals_plain_loop(
            mutant(wrong.__name__, healthy, _follow=wrong), even_network(varied(6)), varied(6), 1e-9
        )


def test_the_contract_notices_a_bank_that_looks_at_the_batch_first():
    def adapt(self, net, state, batch):
        after = methods.get("bank").adapt(self, net, state, batch)
        return after._replace(logits=self.logits(net, after.state, batch))

    wrong = mutant("It predicts with what it has just learned.", methods.create("bank", classes=4), adapt=adapt)
    with pytest.raises(AssertionError):
        prediction_comes_before_learning(wrong)
