"""Slots replace normalisation layers of every kind that they can, and no others."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import reference
import tribe
from tribe import norms
from tribe.core.backbone import Backbone
from tribe.core.state import leaves
from zoo import BALANCED, FROZEN, ZOO, BatchNormAct2d, Doubled, build, different_rows, gap, images, small


def test_a_norm_under_two_names_is_one_slot() -> None:
    net = Backbone(build("shared"))
    assert len(net.slots) == 1
    assert net.channels == 5


class Twice(nn.Module):
    """Calls its one BatchNorm twice in a pass, and returns the result of the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.precision = nn.BatchNorm1d(3, 1e-3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(2 * self.norm(x) + 1).flatten(1)


@pytest.mark.parametrize("norm", [norms.create("robust", alpha=0.3), BALANCED], ids=str)
def test_a_layer_called_twice_goes_on_from_its_first_call(norm: Any) -> None:
    """Catches a second call that starts from the old statistics, or overwrites the first: two slow loops in turn."""
    net = Backbone(Twice().double())
    x = images("BatchNorm1d (N, C, L)", dtype=torch.float64)
    affine, stats, _, labels, valid = arguments = different_rows(net, norm, 1)
    out = net(x, *arguments)

    names = ("alpha",) if norm.name == "robust" else ("eta", "gamma", "pooled_ddof", "rate_cap", "gamma_over")
    rule = partial(reference.RULES[norm.name], **{name: getattr(norm, name) for name in names})
    weight, bias = (t[0].numpy() for t in affine)
    y, kept = x[0].numpy(), tuple(t[0].numpy() for t in stats)
    for call in range(2):
        used = rule(y if call == 0 else 2 * y + 1, labels[0].tolist(), valid[0].tolist(), *kept)
        y = reference.normalise(y if call == 0 else 2 * y + 1, used.mean, used.var, weight, bias, 1e-3)
        kept = used[2:]
    assert gap(out.logits[0], torch.from_numpy(y).flatten(1)) < 1e-10
    for ours, theirs in zip(out.stats, kept, strict=True):
        np.testing.assert_allclose(ours[0].numpy(), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("classifier", [None, "head"])  # named, no other layer has a hook, which would stop torch too
@pytest.mark.parametrize("name", [name for name in ZOO if name.startswith("Transformer")])
def test_fused_transformer_layers_do_not_bypass_the_slots(name: str, classifier: str | None, grad: bool) -> None:
    """Catches torch's fast path, which reads the parameters of the norm layers and never calls them."""
    model, x = build(name), images(name)
    net = Backbone(model, classifier)
    assert len(net.slots) == 5
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    norm_layers = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    with torch.no_grad():
        for layer, weight, bias in zip(norm_layers, *(t[0].split(8) for t in affine), strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    with torch.set_grad_enabled(grad):
        changed = net(x, affine, stats, FROZEN).logits[0]
        assert gap(changed, net(x, *net.source(), FROZEN).logits[0]) > 1e-2
        assert gap(changed, model(x[0])) <= 1e-5


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_tokens_before_samples_are_told_apart(batch: int) -> None:
    """Catches rows cut out of the token axis, (T, N, C), above all where T is a multiple of N."""
    net = Backbone(build("TransformerEncoder, tokens first").double())
    x, arguments = torch.rand(2, batch, 4, 6, dtype=torch.float64), different_rows(net, FROZEN, 2, batch)
    together = net(x, *arguments).logits
    for r in range(2):
        assert gap(together[r], net(x[r : r + 1], *arguments.row(r)).logits[0]) < 1e-10


def test_as_many_tokens_as_samples_are_refused_where_either_may_come_first() -> None:
    net = Backbone(build("TransformerEncoder, tokens first"))
    with pytest.raises(ValueError, match="batch_first"):
        net(torch.rand(2, 2, 4, 6), *different_rows(net, FROZEN, 2, 2))
    alone = net(torch.rand(1, 4, 4, 6), *different_rows(net, FROZEN, 1, 4))  # one row: nothing to tell apart
    assert alone.logits.shape == (1, 4, 4)


class Gated(nn.BatchNorm2d):
    """Has an activation, and uses it in another way."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.act(y)


class ActivatedFirst(Gated):
    """With the parameters of a new layer it equals activating afterwards."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, self.act(x))


class Noisy(Gated):
    """Draws from the global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(F.dropout(nn.BatchNorm2d.forward(self, x)))


class Counting(BatchNormAct2d):
    """Counts its calls."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [Doubled, Gated, ActivatedFirst, Noisy])
def test_a_layer_that_does_something_else_is_left_alone_and_listed(kind: type[nn.Module]) -> None:
    """Catches a slot that guesses what a forward does from the attributes of the layer."""
    torch.manual_seed(0)
    model = small()
    model[4] = kind(8)
    before = torch.get_rng_state()
    net, x = Backbone(model.eval()), images("BatchNorm2d")
    assert torch.equal(torch.get_rng_state(), before)
    assert net.left_alone == {"4": f"{kind.__name__} has a custom forward"}
    assert [slot.name for slot in net.slots] == ["1"]
    if kind is not Noisy:
        assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


def test_a_layer_that_is_tried_is_not_changed() -> None:
    net = Backbone(small(Counting))
    assert len(net.slots) == 2
    assert [int(slot.layer.calls) for slot in net.slots] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_is_tried_in_every_precision(dtype: torch.dtype) -> None:
    assert Backbone(small(BatchNormAct2d).to(dtype)).left_alone == {}
    assert set(Backbone(nn.Sequential(small(), Gated(4)).to(dtype)).left_alone) == {"1"}


class Exp(nn.Module):
    """A parametrization: a scale that stays positive."""

    def forward(self, w: Tensor) -> Tensor:
        return w.exp()


def replace_forward(layer: Any) -> None:
    layer.forward = lambda x: 3 * F.batch_norm(x, layer.running_mean, layer.running_var)


def remake_weight(layer: Any) -> None:
    """A hook makes the weight from something else at each call, as torch.nn.utils.prune does."""
    half = 0.5 * layer.weight.detach()
    del layer.weight
    layer.weight = 2 * half
    layer.register_forward_pre_hook(lambda layer, args: setattr(layer, "weight", 2 * half.to(layer.bias)))


CHANGES = {  # of a layer, and the reason why it is left alone
    "a forward": (replace_forward, "BatchNorm2d has a custom forward"),
    "a weight from a hook": (remake_weight, "its parameters are computed, by a parametrization or a hook"),
    "a weight from a parametrization": (
        lambda layer: parametrize.register_parametrization(layer, "weight", Exp()),
        "its parameters are computed, by a parametrization or a hook",
    ),
    "a hook on the input": (
        lambda layer: layer.register_forward_pre_hook(lambda layer, args: (args[0] ** 2,)),
        "its hooks change its output",
    ),
    "a hook on the output": (
        lambda layer: layer.register_forward_hook(lambda layer, args, y: 3 * y),
        "its hooks change its output",
    ),
    "a hook on the gradient": (
        lambda layer: layer.register_full_backward_hook(lambda layer, into, out: (into[0] * 0,)),
        "it has hooks on its gradient",
    ),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("BatchNorm2d", case) for case in CHANGES),
        *((name, f"a hook on the {side}") for name in ("GroupNorm", "SyncBatchNorm") for side in ("input", "output")),
    ],
)
def test_a_layer_that_was_changed_is_left_alone(name: str, case: str) -> None:
    change, reason = CHANGES[case]
    model, x = build(name), images(name)
    change(model[1])
    net = Backbone(model)
    assert set(net.left_alone.values()) == {reason}
    assert len(net.slots) == 1
    with torch.no_grad():
        assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


@pytest.mark.parametrize("name", ["BatchNorm2d", "BatchNorm1d (N, C)", "BatchNorm3d", "LayerNorm (C, H, W)"])
def test_a_layer_whose_hooks_only_look_is_adapted(name: str) -> None:
    model, x, seen = build(name), images(name), []
    model[1].register_forward_hook(lambda layer, args, y: seen.append(y))
    net = Backbone(model)
    assert net.left_alone == {}
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda m: torch.compile(nn.DataParallel(m))])
def test_wrappers_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, x = build("BatchNorm2d"), images("BatchNorm2d")
    net = Backbone(wrap(model))
    assert type(net.model) is nn.Sequential
    x = x.to(net.device)  # DataParallel moves a model to the GPU where there is one
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5


def test_source_lies_where_the_model_lies() -> None:
    """Catches defaults for missing parameters or statistics that are made on another device."""
    for name in ("affine=False", "neither", "LayerNorm", "LayerNorms beside BatchNorm"):
        affine, stats = Backbone(build(name).to("meta")).source()
        assert {t.device.type for t in (*affine, *stats)} == {"meta"}


def test_casting_the_network_leaves_the_source_exact() -> None:
    """Catches statistics that were rounded to half precision."""
    net = Backbone(build("BatchNorm2d"))
    before = net.source()
    assert net.half().dtype == torch.float16
    assert all(
        torch.equal(a, b) for old, new in zip(before, net.source(), strict=True) for a, b in zip(old, new, strict=True)
    )


@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("then", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["tribe", "rotta"])
def test_an_adapter_goes_on_in_another_precision(method: str, first: torch.dtype, then: torch.dtype) -> None:
    """Catches statistics in another precision than the moments they meet, and layers exported in an old one."""
    model, x = build("BatchNorm2d").to(first), images("BatchNorm2d")[0]
    adapter = tribe.adapt(model, method)
    adapter(x)
    before = adapter.predict(x).float()
    adapter.to(then)
    assert gap(adapter.predict(x).float(), before) < 5e-2
    adapter(x)
    wide = torch.promote_types(then, torch.float32)
    assert {t.dtype for t in (*adapter.net.source()[0], *adapter.net.source()[1])} == {wide}
    kept = {name: t.dtype for name, t in leaves(adapter.state).items() if t.is_floating_point()}
    fresh = leaves(tribe.adapt(copy.deepcopy(model).to(then), method).state)
    for name, dtype in kept.items():  # an image that was remembered may stay in half
        assert dtype in (fresh[name].dtype, torch.promote_types(fresh[name].dtype, torch.float32)), name
    exported = adapter.export()
    assert {p.dtype for p in exported.parameters()} == {then}
    assert gap(exported(x.to(then)).float(), adapter.predict(x).float()) < (1e-5 if then == wide else 1e-2)
