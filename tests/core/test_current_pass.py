"""Slots read the current pass: threads, copies and errors do not mix passes up."""

import copy
import pickle
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from networks import Around
from tribe import norms
from tribe.core.all_weights import WeightLayout
from tribe.core.backbone import Backbone
from tribe.core.state import Affine
from zoo import BALANCED, BATCH, FROZEN, IMAGE, Arguments, build, different_rows, gap, images, run, small, wrapped


def test_a_slot_outside_a_pass_raises() -> None:
    with pytest.raises(RuntimeError, match="Backbone"):
        Backbone(small()).model(torch.rand(2, *IMAGE))


def in_a_thread(inner: nn.Module, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inner, x).result()


@pytest.mark.parametrize("run", [in_a_thread, partial(checkpoint, use_reentrant=False)])
def test_layers_that_run_outside_the_pass_raise_with_the_reason(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    net = Backbone(Around(run, small()))
    affine, stats = net.source()
    affine = Affine(*(t.requires_grad_() for t in affine))
    message = r"torch.utils.checkpoint,.* \(turn checkpointing off\), .* in another thread"
    with pytest.raises((ValueError, RuntimeError), match=message):
        net(images("BatchNorm2d"), affine, stats, BATCH).logits.sum().backward()


class Listed(nn.Module):
    """Calls its layers by references outside its modules."""

    def __init__(self, through: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.conv, self.norm, self.second, self.head = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), None, nn.Linear(5, 4)
        self.steps = [self.conv, through(self.norm)]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.head((x if self.second is None else self.second(x)).mean((2, 3)))


def test_layers_in_a_list_are_adapted_and_exported() -> None:
    """Catches a layer that is called directly and not through its slot."""
    torch.manual_seed(0)
    model, x = Listed(lambda norm: norm).eval(), images("BatchNorm2d")
    net = Backbone(model)
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    for other in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert gap(other(x, *other.source(), FROZEN).logits[0], model(x[0])) <= 1e-5
        y = other(x, affine, stats, FROZEN).logits
        assert gap(y[0], model(x[0])) > 1e-3
        assert gap(other.plain(affine, stats)(x[0]), y[0]) <= 1e-5
        weights = {name: 1.1 * p for name, p in other.model.named_parameters()}
        y = other(x, affine, stats, FROZEN, weights=weights).logits
        assert gap(other.plain(affine, stats, weights)(x[0]), y[0]) <= 1e-5


def test_layers_that_no_pass_calls_are_named_once() -> None:
    model, x = Listed(lambda norm: norm.forward), images("BatchNorm2d")
    with pytest.raises(ValueError, match="normalisation"):
        run(model)
    model.second = nn.BatchNorm2d(5)
    net = Backbone(model)
    with pytest.warns(UserWarning, match="auxiliary"):
        net(x, *net.source(), FROZEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x, *net.source(), FROZEN)


@pytest.mark.parametrize("error", [RuntimeError("late"), KeyError("late"), KeyboardInterrupt()])
def test_the_current_pass_is_cleared_after_an_error(error: BaseException) -> None:
    """Catches a pass that stays current after its forward, so that a later use of a slot gets its arguments."""

    def fail(y: Tensor) -> Tensor:
        raise error

    net, x = Backbone(wrapped(fail)), images("BatchNorm2d")
    with pytest.raises((type(error), ValueError)):
        net(x, *net.source(), FROZEN)
    with pytest.raises(RuntimeError, match="outside"):
        net.model(x[0])


def test_threads_with_one_backbone_do_not_meet() -> None:
    """Catches a current pass that all threads share: a thread gets the rows, rules and labels of another."""
    net = Backbone(build("nested"))
    rules = [FROZEN, BATCH, norms.create("robust", alpha=0.3), BALANCED]
    work = [
        (images("nested", 1 + i % 2, 4 + i, i), different_rows(net, r, 1 + i % 2, 4 + i, i))
        for i, r in enumerate(rules)
    ]

    def once(x: Tensor, arguments: Arguments) -> list[Tensor]:
        leaves = Affine(*(t.clone().requires_grad_() for t in arguments.affine))
        out = net(x, leaves, *arguments[1:])
        return [out.logits, *out.stats, *torch.autograd.grad(out.logits.square().sum(), leaves)]

    alone = [once(*w) for w in work]

    def often(i: int) -> float:
        return max(gap(a, b) for _ in range(40) for a, b in zip(once(*work[i]), alone[i], strict=True))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(work)) as pool:
            assert max(pool.map(often, range(len(work)))) < 1e-5
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("replaced", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_passes_with_other_weights_do_not_affect_each_other(replaced: tuple[bool, bool]) -> None:
    """One thread waits in the middle of its pass while another makes a whole pass and reads the weights."""
    meet: list[Callable[[], None]] = []

    class Halfway(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if meet:
                meet.pop()()
            return x

    torch.manual_seed(0)
    net, x = Backbone(nn.Sequential(small()[:3], Halfway(), small()[3:])), images("BatchNorm2d")
    mark, source = net.fingerprint(), WeightLayout(net).source().weights
    weights = [
        {name: factor * p for name, p in net.model.named_parameters()} if its else None
        for its, factor in zip(replaced, (2, 3), strict=True)
    ]

    def go(i: int) -> Tensor:
        return net(x, *net.source(), FROZEN, weights=weights[i]).logits

    alone = go(0), go(1)
    assert (gap(*alone) > 1e-3) == any(replaced)
    found: list[Any] = []

    def visit() -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(go, 1).result(60))
            found.append(pool.submit(net.fingerprint).result(60))
            found.append(pool.submit(lambda: WeightLayout(net).source().weights).result(60))

    meet.append(visit)
    assert torch.equal(go(0), alone[0])
    assert torch.equal(found[0], alone[1])
    assert found[1] == mark
    assert torch.equal(found[2], source)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_has_weights_of_its_own(again: Callable[[Backbone], Backbone]) -> None:
    """Catches a thread's copy that is still used after the network was cast or loaded."""
    net, x = Backbone(build("BatchNorm2d")), images("BatchNorm2d")
    some = {"0.weight": 2 * net.model[0].weight}
    before = net(x, *net.source(), FROZEN, weights=some).logits
    other = again(net)
    with torch.no_grad():
        net.model[8].weight.zero_()
    assert torch.equal(other(x, *other.source(), FROZEN, weights=some).logits, before)
    assert not torch.equal(net(x, *net.source(), FROZEN, weights=some).logits, before)
    net.double()
    y = net(x, *net.source(), FROZEN, weights={name: t.double() for name, t in some.items()}).logits
    assert y.dtype == torch.float64
