"""What stands around normalisation layers is found in networks of any style, and fused without changing a number."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_runs import DEVICE, HERE, channels_last, drawn, near, runs
from tribe import norms
from tribe.core import fusion, kernels
from tribe.core.backbone import Backbone
from tribe.core.fusion import FusionPlan
from tribe.core.kernels import activations
from tribe.core.precision import float32_precision
from tribe.core.state import Affine, Stats
from tribe.norms.balanced import Balanced

RULES = [Balanced(4, 0.2, 0.3), norms.create("frozen"), norms.create("batch")]


class Stem(nn.Module):
    """Two convolutions with bias, a head, and whatever a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.short = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.na, self.nb, self.fc = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)
        if isinstance(self, Functional | InPlace | Identity | PreActivation):
            self.ns = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


class Functional(Stem):
    def body(self, x):
        x = torch.relu(self.na(self.a(x)))
        return F.relu(self.nb(self.b(x)) + self.ns(self.short(x)))


class InPlace(Stem):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def body(self, x):
        x = identity = self.act(self.na(self.a(x)))
        identity = self.ns(self.short(identity))
        out = self.nb(self.b(x))
        out += identity
        return self.act(out)


class Identity(Stem):
    def body(self, x):
        x = self.na(self.a(x)).relu()
        x = (x + self.nb(self.b(x))).relu_()
        return x + self.ns(self.short(x))  # without ReLU


class PreActivation(Stem):
    """The norm's result is used twice: once activated, once by the shortcut."""

    def body(self, x):
        y = self.na(self.a(x))
        return self.nb(self.b(torch.relu(y))) + self.ns(self.short(y))


class Kept(Stem):
    """It keeps a result, as for a picture of what a network looks at."""

    def body(self, x):
        self.seen = self.na(self.a(x))
        return torch.relu(self.nb(self.b(torch.relu(self.seen))))


class Doubled(Stem):
    def body(self, x):
        y = torch.relu(self.na(self.a(x)))
        return torch.relu(torch.add(self.nb(self.b(y)), y, alpha=2))


class Overwritten(Stem):
    """A part of the residual changes between the norm and the addition."""

    def body(self, x):
        y = torch.relu(self.na(self.a(x)))
        residual = self.short(y)
        z = self.nb(self.b(y))
        residual[:, :1].mul_(0.5)
        return torch.relu(z + residual)


class IntoResidual(Stem):
    def body(self, x):
        y = torch.relu(self.na(self.a(x)))
        residual = self.short(y)
        residual += self.nb(self.b(y))
        return residual


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()


class Hidden(Stem):
    """A compiled function uses the norm's result where no one sees it."""

    def body(self, x):
        y = self.na(self.a(x))
        return self.nb(self.b(torch.relu(y) + scripted(y)))


# biases, additions and ReLU that are fused
STYLES = {Functional: (3, 1, 2), InPlace: (3, 1, 2), Identity: (3, 2, 2), PreActivation: (3, 1, 0), Kept: (2, 0, 1)}
STYLES |= {Doubled: (2, 0, 1), Overwritten: (0, 0, 0), IntoResidual: (2, 0, 1)}


def counts(plan: FusionPlan | None) -> tuple[int, ...]:
    layers = () if plan is None else plan.layers.values()
    return tuple(sum(getattr(layer, name) is not None for layer in layers) for name in ("bias", "add", "relu"))


def passed(net: Backbone, norm, switch: kernels.Switch, rows: int = 2, batch: int = 5) -> list[torch.Tensor]:
    """Logits, statistics to keep and gradients; and logits without gradients."""
    channels, device, dtype = net.channels, net.device, net.dtype
    wide = torch.promote_types(dtype, torch.float32)
    affine = Affine(*(drawn(rows, channels, seed=s).to(device, wide).requires_grad_() for s in (1, 2)))
    stats = Stats(drawn(rows, norm.classes, channels, seed=3), drawn(rows, norm.classes, channels, seed=4).abs() + 0.5)
    stats = Stats(*(t.to(device, wide) for t in stats))
    labels = torch.arange(rows * batch, device=device).view(rows, batch) % 4
    x = drawn(rows, batch, 3, 9, 9, seed=5).to(device, dtype)
    with fusion.using(switch):
        out = net(x, affine, stats, norm, labels)
        grads = torch.autograd.grad(out.logits.square().sum(), affine)
        with torch.no_grad():
            again = net(x, affine, stats, norm, labels).logits
    return [out.logits, *out.stats, *grads, again]


@pytest.mark.parametrize("norm", RULES, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_a_fused_pass_gives_the_same_numbers_and_gradients(style, norm):
    torch.manual_seed(0)
    net = Backbone(style().double())
    wanted, found = (passed(net, norm, switch) for switch in (False, True))
    assert counts(net.fusion.plan) == STYLES[style]
    assert (net.fusion.plan is None) == (style is Overwritten) == ("it has changed" in str(net.fusion.reason))
    for a, b in zip(wanted, found, strict=True):
        assert (a - b).abs().max() <= 1e-10 * a.abs().max()


@runs
@pytest.mark.parametrize(
    ("norm", "dtype", "rounding"), [*((norm, torch.float32, 1e-4) for norm in RULES), (RULES[0], torch.bfloat16, 0.15)]
)
@pytest.mark.parametrize("style", STYLES)
def test_kernels_fuse_to_the_same_numbers(style, norm, dtype, rounding):
    """Where kernels run, fusion is the default: against tensor operations, call by call."""
    torch.manual_seed(0)
    net = Backbone(style()).to(DEVICE, dtype)
    with float32_precision("float32"):
        with kernels.using(False):
            wanted = passed(net, norm, False)
        found = passed(net, norm, "auto")
    assert net.fusion.plan is not None or style is Overwritten
    for a, b in zip(wanted, found, strict=True):
        assert (a - b).norm() <= rounding * a.norm()  # in bfloat16 a ReLU may be active in one and not in the other


class Table(Functional):
    """It reads biases from a table, with gaps in memory; ``same``: it has one for all channels."""

    same = False

    def body(self, x):
        table = self.fc.weight.flatten()
        x = torch.relu(self.na(F.conv2d(x, self.a.weight, table[:1].expand(8) if self.same else table[::4], 2, 1)))
        return F.relu(self.nb(self.b(x)) + self.ns(self.short(x)))


@runs
@pytest.mark.parametrize("same", [False, True])
def test_a_bias_with_gaps_in_memory_is_added_as_it_is(same, monkeypatch):
    monkeypatch.setattr(Table, "same", same)
    torch.manual_seed(0)
    net, norm = Backbone(Table()).to(DEVICE), norms.create("frozen")
    with float32_precision("float32"):
        with kernels.using(False):
            wanted = passed(net, norm, False)
        found = passed(net, norm, "auto")
    assert counts(net.fusion.plan) == (3, 1, 2)
    for a, b in zip(wanted, found, strict=True):
        assert (a - b).norm() <= 1e-4 * a.norm()


@runs
def test_kernels_that_are_wrong_forbid_fusion(monkeypatch):
    """No kernel runs in float64, so a trial in float64 would not notice."""
    torch.manual_seed(0)
    net, apply = Backbone(Functional()).to(DEVICE), activations.apply
    monkeypatch.setattr(activations, "apply", lambda *args: apply(*args) + 0.1)
    passed(net, norms.create("batch"), "auto")
    assert "changed logits" in net.fusion.describe()


class TwoViews(Functional):
    """Each image and its mirror image are two samples of the batch, adjacent or a batch apart."""

    first = False

    def forward(self, x):
        both = x, x.flip(-1)
        logits = super().forward(torch.cat(both) if self.first else torch.stack(both, 1).flatten(0, 1))
        return logits.unflatten(0, (2, -1) if self.first else (-1, 2)).mean(0 if self.first else 1)


@pytest.mark.parametrize("norm", RULES, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_two_views_of_an_image_are_fused_to_the_same_numbers(first, norm, monkeypatch):
    """By kernels where these run: those of adjacent views are one run of pixels, those a batch apart are not."""
    monkeypatch.setattr(TwoViews, "first", first)
    torch.manual_seed(0)
    dtype, rounding = (torch.float32, 1e-4) if HERE else (torch.float64, 1e-10)
    net = Backbone(TwoViews()).to(DEVICE if HERE else "cpu", dtype)
    with float32_precision("float32"):
        with kernels.using(False):
            wanted = passed(net, norm, False)
        found = passed(net, norm, True)
    assert counts(net.fusion.plan) == (3, 1, 2)
    for a, b in zip(wanted, found, strict=True):
        assert (a - b).norm() <= rounding * a.norm()


def test_compiled_code_is_not_fused():
    """It would see values that are not what the network believes."""
    torch.manual_seed(0)
    net = Backbone(Hidden())
    passed(net, norms.create("frozen"), True)
    assert "compiled code computes aten.sigmoid" in net.fusion.describe()


class ByBatch(Stem):
    """Control flow: it depends on the number of images."""

    def body(self, x):
        y = self.na(self.a(x))
        return self.nb(self.b(torch.relu(y) if len(x) == 2 else torch.sigmoid(y)))


class WithoutGradient(Stem):
    def body(self, x):
        y = self.na(self.a(x))
        with torch.no_grad():
            y = torch.relu(y)
        return self.nb(self.b(y))


@pytest.mark.parametrize(
    ("style", "reason"), [(ByBatch, "a pass differed from the trial"), (WithoutGradient, "without gradients")]
)
def test_a_pass_that_differs_from_the_trial_is_repeated_call_by_call(style, reason):
    torch.manual_seed(0)
    net, norm = Backbone(style().double()), Balanced(4, 0.2, 0.3)
    wanted, found = (passed(net, norm, switch) for switch in (False, True))
    assert reason in net.fusion.describe()
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tried", [False, True])
def test_inference_mode_is_computed_call_by_call(tried):
    """Its tensors have no version, so a residual that changes would not be noticed."""
    torch.manual_seed(0)
    net, norm, x = Backbone(Functional().double()), norms.create("batch"), drawn(1, 4, 3, 9, 9).double()
    affine, stats = net.source()
    with fusion.using(True), torch.no_grad():
        wanted = net(x, affine, stats, norm).logits if tried else None
        with torch.inference_mode():
            found = net(x, affine, stats, norm).logits
        again = net(x, affine, stats, norm).logits
    assert counts(net.fusion.plan) == (3, 1, 2)
    for logits in (again,) if wanted is None else (again, wanted):
        assert torch.allclose(found, logits, rtol=1e-10)


def test_what_is_fused_is_told():
    torch.manual_seed(0)
    net = Backbone(Functional())
    assert "no pass on a GPU" in net.fusion.describe()
    passed(net, norms.create("batch"), True)
    assert net.fusion.describe().endswith("3 biases of convolutions, 1 residual additions, 2 ReLU")


class Chaotic(Functional):
    """Small differences of activations become large ones of logits."""

    strength = 1.0

    def forward(self, x):
        return torch.sin(super().forward(x) * self.strength)


@pytest.mark.parametrize(("dtype", "strength"), [(torch.bfloat16, 1e4), (torch.float32, 1e7), (torch.bfloat16, 1e7)])
def test_rounding_does_not_forbid_fusion(dtype, strength, monkeypatch):
    """The trial compares logits in float32, or in float64 if that is too coarse."""
    monkeypatch.setattr(Chaotic, "strength", strength)
    torch.manual_seed(0)
    net = Backbone(Chaotic()).to(dtype)
    with torch.no_grad():
        images, (affine, stats) = drawn(1, 16, 3, 9, 9).to(dtype), net.source()
        with fusion.using(False):
            wanted = net(images, affine, stats, norms.create("frozen")).logits
        with fusion.using(True):
            found = net(images, affine, stats, norms.create("frozen")).logits
    assert (found - wanted).abs().max() > 0.05 * wanted.abs().max()
    assert counts(net.fusion.plan) == (3, 1, 2)


# -- kernels -----------------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 24, 7, 7), (1, 1, 16, 80, 60), (2, 3, 5, 3)], ids=str)
def test_one_pass_computes_bias_residual_and_relu(shape, dtype, last):
    """Against float64. The large picture is summed in parts."""
    x, residual, g = (drawn(*shape, seed=s).to(dtype) for s in range(3))
    x, residual, g = (channels_last(t) if last else t for t in (x, residual, g))
    offset = 50 + drawn(shape[2], seed=3)
    scale, shift = (drawn(shape[0], 1, shape[2], seed=seed) for seed in (4, 0))
    rounding = 1e-5 if dtype is torch.float32 else 8e-3
    wide, pixels = [t.double() for t in (x, residual, g)], tuple(range(3, len(shape)))
    over = (1, 1, -1, *[1] * len(pixels))
    moved = wide[0] + offset.double().view(over)
    exact = moved * scale.double().unflatten(2, (-1, *[1] * len(pixels))) + shift.double().unflatten(
        2, (-1, *[1] * len(pixels))
    )
    exact = exact + wide[1]
    x, residual, g, offset, scale, shift = (t.to(DEVICE) for t in (x, residual, g, offset, scale, shift))

    mean, var = activations.observe(x, offset)
    assert near(mean, moved.mean(pixels), 1e-6)
    assert near(var, moved.var(pixels, correction=0), 1e-5)
    active = torch.empty_like(x, dtype=torch.int8)
    y = activations.apply(x, scale, shift, True, offset, residual, active)
    assert near(y, exact.relu(), rounding)
    assert y.stride() == active.stride() == x.stride()
    assert torch.equal(active != 0, y > 0)
    by_scale, by_shift, masked = activations.apply_backward(g, x, scale, shift, True, offset, active)
    kept = wide[2] * active.cpu()
    assert torch.equal(masked.cpu(), g.cpu() * active.cpu())
    assert near(by_shift, kept.sum((1, *pixels)).unsqueeze(1), 1e-5)
    assert near(by_scale, (kept * moved).sum((1, *pixels)).unsqueeze(1), 1e-5)


# -- convolutions ------------------------------------------------------------------------------------------------------


class Backwards(TorchDispatchMode):
    """The strides of gradient and input in each backward of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.strides = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.strides.append((args[0].stride(), args[1].stride()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("last", [True, False])
def test_a_frozen_convolution_keeps_its_weights_only(last, size):
    form = torch.channels_last if last else torch.contiguous_format
    x = drawn(2, 6, 9, 9).double().contiguous(memory_format=form).requires_grad_()
    weight, bias = drawn(4, 3, size, size, seed=1).double(), drawn(4, seed=2).double()
    settings = (weight.contiguous(memory_format=form), bias, (2, 1), (1, 0), (1, 2), 2)
    wanted = torch.autograd.grad(F.conv2d(x, *settings).square().sum(), x)[0]
    between = x * 1
    y = fusion.convolve(F.conv2d, (between, *settings), {})
    gone = weakref.ref(between)
    del between
    assert gone() is None
    assert torch.equal(y, F.conv2d(x, *settings))
    with Backwards() as seen:
        found = torch.autograd.grad(y.square().sum(), x)[0]
    # cuDNN copies the gradient into the order of x, and back into that of the weights: one of the largest costs of a
    # step if they differ.
    assert seen.strides == [(y.stride(), x.stride())]
    assert found.stride() == wanted.stride()
    assert torch.allclose(found, wanted, rtol=1e-12)


def test_a_convolution_whose_weights_learn_is_left_to_torch():
    x, weight = drawn(1, 2, 5, 5).requires_grad_(), drawn(3, 2, 3, 3, seed=1).requires_grad_()
    y = fusion.convolve(F.conv2d, (x, weight), {"padding": "same"})
    assert [g.shape for g in torch.autograd.grad(y.sum(), (x, weight))] == [x.shape, weight.shape]
