"""The kernels give the numbers of the tensor operations: on a GPU, or through Triton's interpreter."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import reference
import tribe
from kernel_runs import DEVICE, HERE, channels_last, drawn, near, runs, without_and_with_kernels
from method_runs import repeated
from places import DATA
from recordings import RECORDED, replay
from tribe import norms
from tribe.core import kernels, moments, rng
from tribe.core.augment import Augment
from tribe.core.backbone import Backbone
from tribe.core.graphs import Captured
from tribe.core.kernels import activations, random_numbers, statistics
from tribe.core.precision import float32_precision
from tribe.core.state import Affine, Stats, leaves, rows_of
from tribe.data.models.architectures import BatchNormReLU
from tribe.filters.markov import FilterInput, Markov
from tribe.methods import tribe as tribe_method
from tribe.norms import pool_batch
from tribe.norms.balanced import Balanced
from tribe.testing import CLASSES, images, labels_in_bursts, predictions, small_network
from zoo import Bare

SHAPES = [
    (1, 2, 5, 3, 3),
    (2, 3, 16, 4, 4),
    (3, 1, 7),
    (2, 4, 33, 1, 1),
    (1, 1, 1, 9, 5),
    (2, 2, 3, 130),
    (1, 2, 70, 2, 3, 4),
]
RULES = [
    Balanced(4, 0.1),
    Balanced(4, 0.3, 0.3),
    Balanced(4, 0.05, 0.3, "paper"),
    Balanced(70, 0.3, 1.0),
    norms.create("frozen"),
    norms.create("batch"),
    norms.create("robust"),
    norms.create("instance", k=0.5, observing=True),
]


# -- without Triton, or without a GPU ----------------------------------------------------------------------------------


def test_nothing_is_launched_on_a_cpu_or_when_switched_off():
    x = torch.rand(1, 2, 3, 4)
    assert kernels.can_run(x) == kernels.INTERPRETED
    assert not kernels.can_run(x.double())
    assert not kernels.can_run(x[:, :0])
    with kernels.using(False):
        assert not kernels.can_run(x)
    assert kernels.mode() == "auto"


@runs
def test_what_the_kernels_cannot_do_is_left_to_the_tensor_operations():
    """Layouts that form no run, batches too large for the class sums, filters in float64 or of too many classes."""
    x, likelihood = drawn(2, 3, 4, 6, 6).to(DEVICE), torch.rand(1, 2, 3, 4, device=DEVICE)
    with kernels.using("auto"):
        assert kernels.can_normalise(x)
        assert not kernels.can_normalise(x[..., :4])
        assert not kernels.can_normalise(x[:, :2].expand(2, 2, 4, 6, 6))
        assert kernels.can_update(torch.zeros(1, kernels.SAMPLES, 4, device=DEVICE))
        assert not kernels.can_update(torch.zeros(1, kernels.SAMPLES + 1, 4, device=DEVICE))
        assert kernels.can_filter(likelihood)
        assert not kernels.can_filter(likelihood.double())
        assert not kernels.can_filter(torch.rand(1, kernels.CLASSES + 1, device=DEVICE))


# -- each kernel -----------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_passes_over_activations(shape, last, dtype):
    """Against float64; the mean is a hundred times the spread, where E[x^2] - E[x]^2 would be lost."""
    x = (drawn(*shape) + (100 if dtype is torch.float32 else 2)).to(dtype)
    x, g = (channels_last(t) if last else t for t in (x, drawn(*shape, seed=1).to(dtype)))
    scale, dmean, dvar = (drawn(*shape[:3], seed=seed) for seed in (2, 3, 4))
    rounding = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    wide_x, wide_g = x.double(), g.double()
    mean, var = moments.observe(wide_x)

    with kernels.using("auto"):
        x, g = x.to(DEVICE), g.to(DEVICE)
        assert kernels.can_normalise(x)
        seen = activations.observe(x)
        assert near(seen[0], mean, 1e-6)
        assert near(seen[1], var, 2e-5)
        for s in (scale, scale[:, :1]):
            over, on = moments._over_pixels(s.double(), wide_x), s.to(DEVICE)
            y = activations.apply(x, on, 2 * on)
            assert y.stride() == x.stride()
            assert near(y, wide_x * over + 2 * over, rounding)
            assert torch.equal(activations.apply(x, on, 2 * on, relu=True), y.relu())
            by_scale, by_shift = activations.apply_backward(g, x, on, on)[:2]
            pixels = tuple(range(3, x.dim()))
            wanted = [t.sum(pixels) if pixels else t for t in (wide_g * wide_x, wide_g)]
            wanted = [t if s.shape == scale.shape else t.sum(1, keepdim=True) for t in wanted]
            assert near(by_scale, wanted[0])
            assert near(by_shift, wanted[1])
            count = x[0, 0, 0].numel()
            a = 2 * dvar.double() / count
            b = dmean.double() / count - a * mean
            a, b = (moments._over_pixels(t, wide_x) for t in (a, b))
            given = tuple(t.float().to(DEVICE) for t in (mean, dmean, dvar))
            dx = activations.joint_backward(g, x, on, on, given)
            assert (dx.double().cpu() - (wide_g * over + wide_x * a + b)).abs().max() <= max(rounding, 5e-5) * (
                1 + float((wide_x * a).abs().max() if dtype is torch.float32 else (wide_g * over).abs().max())
            )


@runs
def test_a_gradient_of_another_layout_gets_that_of_the_activations():
    x, g = channels_last(drawn(2, 3, 4, 5, 5)).to(DEVICE), drawn(2, 3, 4, 1, 1).to(DEVICE).expand(2, 3, 4, 5, 5)
    brought = activations.match_layout(g, x)
    assert brought.stride() == x.stride()
    assert torch.equal(brought, g)
    assert activations.match_layout(brought, x) is brought


@pytest.mark.skipif(not (HERE and kernels.INTERPRETED), reason="too large for a GPU test: make test-kernels")
def test_rows_may_hold_more_than_32_bits_can_count_but_a_sample_may_not(tmp_path):
    """Catches offsets in int32: the second sample lies behind 2 ** 31 numbers, in a file without content before it."""
    wide = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**31 + 6)
    (tmp_path / "sparse").unlink()  # it stays mapped
    assert not kernels.can_normalise(wide[: 2**31].view(1, 1, 2, 2**30))
    assert kernels.can_normalise(wide[: 2**31].view(1, 2, 1, 2**30))
    x = wide.as_strided((2, 2, 3), (2**31, 3, 1))  # samples, pixels, channels
    x.copy_(drawn(2, 2, 3))
    mean, var = torch.empty(2, 3), torch.empty(2, 3)
    activations._moments[2,](x, x, mean, var, 3, 2, 2**31, 1, 3, 1, 1, 1, 2, False, 2, 4)
    assert near(mean, x.mean(1))
    assert near(var, x.var(1, correction=0))


@runs
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("shape", [(2, 2, 24, 3, 3), (1, 3, 20, 1, 1), (2, 2, 8, 40, 2), (1, 2, 24, 14, 14)], ids=str)
def test_widths_that_are_no_multiples_of_16(shape, last):
    """Sizes and strides are divided by what they share, and multiplied again in the kernel."""
    x, g = (channels_last(t) if last else t for t in (drawn(*shape), drawn(*shape, seed=1)))
    affine = drawn(2, shape[0], 1, shape[2] + 3, seed=2)[..., 3:]  # rows that lie a multiple of nothing apart

    def outcome():
        given = [t.to(DEVICE).detach().requires_grad_() for t in (x, *affine)]
        moved = given[0].detach().clone(memory_format=torch.preserve_format)
        y = moments.scale_and_shift(*given, moments.Epilogue(True, None, moved))
        return y, *moments.observe(given[0].detach()), *torch.autograd.grad(y, given, g.to(DEVICE))

    for a, b in zip(*without_and_with_kernels(outcome), strict=True):
        assert near(b, a)


@runs
@pytest.mark.parametrize("layout", ["column", "expanded"])
def test_a_bias_need_not_be_adjacent_in_memory(layout):
    """Catches kernels that read a convolution's bias, or affine parameters, number after number."""
    x, spread = channels_last(drawn(2, 3, 5, 4, 4)).to(DEVICE), drawn(5, 3, seed=1).to(DEVICE)
    offset = spread[:, 1] if layout == "column" else spread[:1, 1].expand(5)
    affine = drawn(2, 5, 2).to(DEVICE).mT  # two of (R, C), by column
    affine = affine if layout == "column" else affine[..., :1].expand(2, 2, 5)

    def outcome():
        given = [t.detach().requires_grad_() for t in (x, *affine)]
        epilogue = moments.Epilogue(True, offset)
        y = moments.normalise(given[0], lambda mean, var: moments.fold(mean, var, *given[1:], 1e-5), epilogue)
        return y, *torch.autograd.grad(y.sin().sum(), given)

    for a, b in zip(*without_and_with_kernels(outcome), strict=True):
        assert near(b, a)


@runs
@pytest.mark.parametrize("batch", [1, 64])
def test_statistics_and_parameters_fold_into_scale_and_shift(batch):
    mean, var = drawn(3, batch, 5), drawn(3, batch, 5, seed=1).abs()
    affine = drawn(2, 3, 9, seed=2)[:, :, 2:7]  # a slice, as a layer has

    def outcome():
        inputs = [t.to(DEVICE).detach().requires_grad_() for t in (mean, var, *affine)]
        scale, shift = moments.fold(*inputs, 1e-5)
        return scale, shift, *torch.autograd.grad((scale * shift.sin()).sum(), inputs)

    for a, b in zip(*without_and_with_kernels(outcome), strict=True):
        assert near(b, a)


@runs
@pytest.mark.parametrize("batch", [1, 5, 64, 150])
def test_moments_pool_over_valid_samples(batch):
    """The means lie far from zero, and rows have all, some and no valid samples."""
    mean, var = drawn(3, batch, 21) + 100, drawn(3, batch, 21, seed=1).abs()
    valid = torch.stack((torch.ones(batch).bool(), torch.arange(batch) % 3 == 0, torch.zeros(batch).bool()))
    by = drawn(3, 1, 21, seed=2).to(DEVICE)

    def outcome():
        given = [t.to(DEVICE).requires_grad_() for t in (mean.clone(), var.clone())]
        pooled = pool_batch(*given, valid.to(DEVICE))
        return *pooled, *torch.autograd.grad((pooled[0] * by + pooled[1] * by.sin()).sum(), given)

    wanted, found = without_and_with_kernels(outcome)
    for a, b in zip(wanted, found, strict=True):
        assert near(b, a)
    assert (found[0][2] == 0).all()


# -- whole layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", RULES, ids=str)
def test_a_built_in_relu_is_a_relu(norm):
    """It is fused, and computed again for the gradient: the numbers of a separate ReLU."""
    x, valid = drawn(2, 5, 7, 3, 3).double(), torch.ones(2, 5, dtype=torch.bool)
    stats = Stats(drawn(2, norm.classes, 7, seed=1).double(), drawn(2, norm.classes, 7, seed=2).abs().double() + 0.5)
    results = []
    for layer in (BatchNormReLU, nn.BatchNorm2d):
        net = Backbone(Bare(layer(7)).double())
        given = [t.double().requires_grad_() for t in (x.clone(), drawn(2, 7, seed=4), drawn(2, 7, seed=5))]
        y = net(given[0], Affine(*given[1:]), stats, norm, torch.zeros(2, 5, dtype=torch.int64), valid).logits
        y = y if layer is BatchNormReLU else y.relu()
        results.append((y, *torch.autograd.grad(y.square().sum(), given)))
    assert (results[0][0] == 0).any()
    for a, b in zip(*results, strict=True):
        assert near(a, b, 1e-12)


# Layers, batches and pixels in pairs: on a GPU all together, in the slow interpreter so that each pair occurs.
LAYERS = [
    *((nn.BatchNorm2d, 1, 1), (nn.BatchNorm2d, 6, 3), (nn.BatchNorm2d, 17, 1)),
    *((BatchNormReLU, 1, 3), (BatchNormReLU, 6, 1), (BatchNormReLU, 17, 3)),
]
if not kernels.INTERPRETED:
    LAYERS = list(itertools.product([nn.BatchNorm2d, BatchNormReLU], [1, 6, 17], [1, 3]))


@runs
@pytest.mark.parametrize(("layer", "batch", "pixels"), LAYERS)
@pytest.mark.parametrize("norm", RULES, ids=str)
def test_a_layer_gives_the_same_numbers_and_gradients(norm, layer, batch, pixels):
    """Rows with invalid samples, and one in which nothing is valid: its statistics stay bit for bit."""
    rows, channels = 3, 21
    generator = torch.Generator().manual_seed(batch)
    x = drawn(rows, batch, channels, pixels, pixels) + 1
    stats = Stats(drawn(rows, norm.classes, channels, seed=1), drawn(rows, norm.classes, channels, seed=2).abs() + 0.5)
    labels = torch.randint(norm.classes, (rows, batch), generator=generator)
    valid = torch.rand(rows, batch, generator=generator) > 0.25
    valid[2] = False
    net = Backbone(Bare(layer(channels))).to(DEVICE)
    cotangent = drawn(rows, batch, channels * pixels * pixels, seed=3).to(DEVICE)

    def outcome():
        given = [t.to(DEVICE).requires_grad_() for t in (x.clone(), *(drawn(rows, channels, seed=s) for s in (4, 5)))]
        here = Stats(*(t.to(DEVICE) for t in stats))
        arguments = given[0], Affine(*given[1:]), here, norm, labels.to(DEVICE), valid.to(DEVICE)
        out = net(*arguments)
        with torch.no_grad():
            assert near(net(*arguments).logits, out.logits)
        return out.logits, *out.stats, *torch.autograd.grad(out.logits, given, cotangent)

    wanted, found = without_and_with_kernels(outcome)
    for name, a, b in zip(("y", "mean", "var", "dx", "dweight", "dbias"), wanted, found, strict=True):
        assert near(b, a, 3e-5), name
    if norm.observes and norm.name != "instance":
        assert torch.equal(found[1][2].cpu(), stats.mean[2])
        assert torch.equal(found[2][2].cpu(), stats.var[2])


@pytest.mark.skipif(not (HERE and kernels.INTERPRETED), reason="too large for a GPU test: make test-kernels")
@pytest.mark.parametrize("labels", [[3, 0, 3, 2, 3], [1, 0, 1, 0, 1]], ids=["present", "absent"])
def test_class_statistics_may_be_larger_than_32_bits_can_count(labels, tmp_path):
    """Catches offsets in int32: the fourth class lies behind 2 ** 31 numbers, in a file without content before it.

    So does the memory for what is kept of it, whether the class is in the batch or not.
    """
    apart, norm = 2**30, Balanced(4, 0.2, 0.3)
    wide = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * apart + 32)
    (tmp_path / "sparse").unlink()  # it stays mapped
    parts = [wide[i : i + 3 * apart + 3].as_strided((1, 4, 3), (4 * apart, apart, 1)) for i in (0, 8, 16, 24)]
    past, room = Stats(*parts[:2]), Stats(*parts[2:])
    past.mean.copy_(drawn(1, 4, 3))
    past.var.copy_(drawn(1, 4, 3, seed=1).abs())
    mean, var, valid = drawn(1, 5, 3, seed=2), drawn(1, 5, 3, seed=3).abs(), torch.ones(1, 5, dtype=torch.bool)
    groups = norm.group(torch.tensor([labels]), valid, mean.dtype)
    prepare = norm.prepare(groups, past, room)
    assert prepare is not None
    results = []
    for mode, given in ((False, groups), ("auto", groups), ("auto", prepare(slice(None)))):
        with kernels.using(mode):
            *pooled, kept = norm(mean, var, 9, past, given, valid, 1e-5)
        results.append((*pooled, *kept))
    assert kept.mean.data_ptr() == room.mean.data_ptr()
    for wanted, *found in zip(*results, strict=True):
        for t in found:
            assert near(t, wanted)


@runs
@pytest.mark.parametrize("classes", [1, 63, 1000, 1031])
@pytest.mark.parametrize("channels", [1, 21])
def test_many_classes_are_pooled_in_parts(classes, channels):
    """Against float64; the classes stand where pixels do. The mean is a thousand times the spread."""
    norm, past = Balanced(classes), Stats(1000 + drawn(2, classes, channels), drawn(2, classes, channels, seed=1).abs())
    wanted, found = norm.pool(Stats(*(t.double() for t in past))), norm.pool(Stats(*(t.to(DEVICE) for t in past)))
    assert near(found.mean, wanted.mean, 1e-6)
    assert near(found.var, wanted.var, 1e-5)


def equations(norm: Balanced, x: torch.Tensor, past: Stats, labels: torch.Tensor, valid: torch.Tensor) -> list:
    """Pooled mean and variance (R, 1, C) and what is kept (R, K, C), of images (R, B, C, L), by the slow loop."""
    fields = {name: getattr(norm, name) for name in ("eta", "gamma", "pooled_ddof", "rate_cap", "gamma_over")}
    given = [t.double().numpy() if t.is_floating_point() else t.numpy() for t in (x, labels, valid, *past)]
    rows = [reference.balanced(*row, **fields) for row in zip(*given, strict=True)]
    mean, var, *kept = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
    return [mean.unsqueeze(1), var.unsqueeze(1), *kept]


@runs
@pytest.mark.parametrize("programs", [1, 14, 512])
@pytest.mark.parametrize(
    ("norm", "channels"),
    [
        (Balanced(1000, 0.5, 0.5), 19),
        (Balanced(1000, 0.5, 0.5, rate_cap=False), 3),
        (Balanced(130, 0.05), 19),
        (Balanced(130, 0.065, 0.5, "paper"), 3),
    ],
    ids=str,
)
def test_many_classes_are_updated_as_the_equations_say(norm, channels, programs, monkeypatch):
    """ImageNet's settings: few of many classes are present, some with more images than fill a class.

    One program copies all other classes, or several copy an uneven part, or each copies a tile. Rows hold invalid
    images, and one holds no other.
    """
    monkeypatch.setattr(statistics, "PROGRAMS", programs)
    rows, batch = 3, 11
    x, classes = drawn(rows, batch, channels, 2), norm.classes
    past = Stats(drawn(rows, classes, channels, seed=1), drawn(rows, classes, channels, seed=2).abs() + 0.5)
    labels = torch.tensor([0, classes - 1, 64, 64, 63, 7, 7, 7, 7, 127, 128]).expand(rows, batch)
    valid = torch.ones(rows, batch, dtype=torch.bool)
    valid[1, [0, 3, 5]], valid[2] = False, False
    mean, var = (t.to(DEVICE) for t in moments.observe(x))
    *pooled, kept = norm(mean, var, 2, Stats(*(t.to(DEVICE) for t in past)), labels.to(DEVICE), valid.to(DEVICE), 1e-5)
    for a, b in zip(equations(norm, x, past, labels, valid), (*pooled, *kept), strict=True):
        assert near(b, a)
    assert torch.equal(kept.mean[2].cpu(), past.mean[2])
    assert torch.equal(kept.var[2].cpu(), past.var[2])


@runs
def test_labels_may_lie_in_memory_in_any_order():
    """Catches kernels that read the classes of samples row by row, as they do not lie in a transposed tensor."""
    norm, past = Balanced(5, 0.3, 0.4), Stats(drawn(2, 5, 7).to(DEVICE), drawn(2, 5, 7, seed=1).abs().to(DEVICE) + 0.5)
    mean, var = drawn(2, 6, 7, seed=2).to(DEVICE), drawn(2, 6, 7, seed=3).abs().to(DEVICE)
    labels, valid = (torch.arange(12).view(6, 2) % 5).T.to(DEVICE), (torch.arange(12).view(6, 2) % 4 > 0).T.to(DEVICE)

    def outcome():
        *pooled, kept = norm(mean, var, 9, past, labels, valid, 1e-5)
        return *pooled, *kept

    for a, b in zip(*without_and_with_kernels(outcome), strict=True):
        assert near(b, a)


# -- time filters ------------------------------------------------------------------------------------------------------


def stream_of_logits(classes: int, images: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Three streams on the device, with padding and a bad image in the first and nothing valid in the last."""
    labels = labels_in_bursts(3, images, classes, 0.9)
    logits = predictions(labels, classes, margin=3).float()
    logits[0, 17] = 0
    valid = torch.arange(images) % 11 != 4
    valid = torch.stack((valid, torch.ones(images, dtype=torch.bool), torch.zeros(images, dtype=torch.bool)))
    return logits.to(DEVICE), valid.to(DEVICE)


@runs
@pytest.mark.parametrize("classes", [2, 16, 17, 1000])
def test_the_scan_and_the_smoothing_are_those_of_the_tensor_operations(classes):
    """Image by image, in the middle of a stream: with and without images that count."""
    rule, (logits, valid) = Markov(within="batch"), stream_of_logits(classes)
    likelihood = rule._likelihood(logits)
    with kernels.using(False):
        assert not kernels.can_filter(likelihood)
        state = rule.step(rule.init(3, classes, logits[..., :0]), logits[:, :40], valid[:, :40]).state
        seen = FilterInput(likelihood, valid, valid.all(0).tolist())
        wanted, end = rule._scan(state, seen)
        chosen = end.recent.argmax(-1)
        smoothed = rule._smooth(wanted, seen, chosen)
    with kernels.using("auto"):
        assert kernels.can_filter(likelihood)
        scanned, other = rule._scan(state, seen)
        again = rule._smooth(wanted, seen, chosen)
    for name in ("belief", "rate", "recent", "evidence", "confidence"):
        assert near(getattr(scanned, name), getattr(wanted, name), 5e-5), name
    for name in ("belief", "marginal", "rate", "recent", "evidence", "confidence"):
        assert near(getattr(other, name), getattr(end, name), 5e-5), name
        assert torch.equal(getattr(other, name)[2], getattr(state, name)[2]), name  # nothing counted: the same bits
    assert torch.equal(other.images, end.images)
    assert near(again, smoothed, 5e-5)
    assert near(again.sum(-1), torch.ones(3, 96), 1e-5)


@runs
@pytest.mark.parametrize(("batch", "within"), [(1, "past"), (7, "batch"), (96, "batch")])
def test_a_filter_gives_the_same_answers(batch, within):
    rule, (logits, valid) = Markov(within=within), stream_of_logits(10)
    answers, used = [], []
    for mode in (False, "auto"):
        state, parts = rule.init(3, 10, logits[..., :0]), []
        with kernels.using(mode):
            for z, real in zip(logits.split(batch, 1), valid.split(batch, 1), strict=True):
                filtered = rule.step(state, z, real)
                state = filtered.state
                parts.append((filtered.logits.exp(), filtered.used))
        answers.append(torch.cat([p for p, _ in parts], 1))
        used.append(torch.cat([u for _, u in parts], 1))
    both = used[0] & used[1]
    assert both[:2, 80:].any(1).all()
    assert (used[0] != used[1]).sum() <= 2  # evidence may pass the threshold an image earlier
    assert near(answers[1][both], answers[0][both], 1e-4)


# -- random numbers and whole steps ------------------------------------------------------------------------------------


@runs
def test_random_numbers_are_the_generators_own():
    key = rng.Key(torch.tensor([425, -3, 2**40 + 7]), torch.tensor([0, 2**33 + 5, -1]))
    there = rng.Key(*(t.to(DEVICE) for t in key))
    assert torch.equal(random_numbers.uniform(there, 0xABCDEF01, (5, 3)).cpu(), rng.uniform(key, 0xABCDEF01, (5, 3)))
    assert near(random_numbers.normal(there, 7, (3, 11)), rng.normal(key, 7, (3, 11)), 1e-5)


@runs
def test_another_default_dtype_changes_nothing():
    key = rng.Key(torch.tensor([425], device=DEVICE), torch.tensor([3], device=DEVICE))
    x = torch.rand(1, 2, 3, 6, 5).to(DEVICE)

    def outcome():
        return random_numbers.uniform(key, 7, (5,)), random_numbers.normal(key, 7, (5,)), Augment()(x, key)

    with kernels.using("auto"):
        wanted = outcome()
        torch.set_default_dtype(torch.float64)
        try:
            found = outcome()
        finally:
            torch.set_default_dtype(torch.float32)
    for a, b in zip(wanted, found, strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)


class Grids:
    """Stands in for a kernel, and notes its grids: more than a test can launch."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        self.seen.append(grid)
        return lambda *args, **options: None


@runs
def test_random_numbers_of_large_batches_fit_into_a_grid(monkeypatch):
    """All but the first of a grid's axes end at 65,535."""
    monkeypatch.setattr(random_numbers, "_philox", grids := Grids())
    key = rng.Key(*(torch.empty(2, dtype=torch.int64, device="meta") for _ in range(2)))
    assert random_numbers._draw(key, 7, (446, 3, 224, 224), normal=True).shape == (2, 446, 3, 224, 224)
    (grid,) = grids.seen
    assert grid[0] < 2**31
    assert max(grid[1:], default=0) <= 65535


@runs
@pytest.mark.parametrize("per", ["batch", "image"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(9, 7), (65, 64)], ids=str)
def test_augmentation_is_the_same(size, channels, per):
    """Images of more than 4,096 pixels are cut into tiles."""
    x = torch.rand(3, 4, channels, *size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    key = rng.Key(torch.arange(3, device=DEVICE), torch.arange(3, device=DEVICE))
    plain = Augment(per=per)(x, key)
    with kernels.using("auto"):
        assert (Augment(per=per)(x, key) - plain).abs().max() <= 2e-5


class OddWidths(torch.nn.Module):
    """Layers whose columns begin at odd places: one is called twice, one never, and two have no statistics to adapt."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = (torch.nn.BatchNorm2d(channels) for channels in (5, 19, 4))
        self.own, self.group = torch.nn.BatchNorm2d(19, track_running_stats=False), torch.nn.GroupNorm(1, 19)
        self.conv, self.c, self.fc = torch.nn.Conv2d(5, 19, 1), torch.nn.BatchNorm1d(19), torch.nn.Linear(19, 3)

    def forward(self, x):
        x = self.group(self.own(self.b(self.conv(self.a(self.a(x).relu()).relu()))))
        return self.fc(self.c(x.mean((2, 3))))


@runs
@pytest.mark.filterwarnings("ignore:normalisation layers that the network did not call")
@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_the_rows_of_one_branch_are_kept_between_those_of_the_other(dtype, rounding, gamma):
    """As teacher and student apart do: past and spare memory are every second row, and the other rows stay."""
    torch.manual_seed(0)
    net, norm, branch = Backbone(OddWidths()).to(DEVICE, dtype), Balanced(130, 0.5, gamma), slice(0, None, 2)
    pair = Stats(drawn(4, 130, 47).to(DEVICE), drawn(4, 130, 47, seed=1).abs().to(DEVICE) + 0.5)
    x, labels = drawn(2, 5, 5, 3, 3, seed=2).to(DEVICE), torch.tensor([[0, 129, 129, 64, 7], [3] * 5], device=DEVICE)
    valid = torch.tensor([[True] * 5, [True, False, True, True, False]], device=DEVICE)
    found = []
    for mode in (False, "auto"):
        affine, spare = net.source(2)[0].leaf(), Stats(*(torch.full_like(t, torch.nan) for t in pair))
        with kernels.using(mode), float32_precision("float32"):
            out = net(x, affine, rows_of(pair, branch), norm, labels, valid, spare=rows_of(spare, branch))
            found.append((out.logits, *out.stats, *affine.gradient(out.logits.square().sum())))
        for t, kept in zip(spare, out.stats, strict=True):
            assert t.data_ptr() == kept.data_ptr()
            assert t[1::2].isnan().all()
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= rounding * a.norm()


@runs
@pytest.mark.parametrize(
    ("name", "fields", "apart"),
    [
        ("tribe", {}, False),
        ("tribe", {"gamma": 0.3, "h0": 0.5}, False),
        ("tribe", {"convention": "paper"}, False),
        ("tribe", {"gamma": 0.5, "eta": 0.5, "h0": 0.9}, True),  # ImageNet's
        *[(name, tribe.methods.get(name).small, False) for name in ("tent", "rotta", "source")],
    ],
    ids=str,
)
def test_a_method_takes_the_same_steps(name, fields, apart, monkeypatch):
    """TRIBE's teacher and student in one pass, or ``apart`` as for large batches: then each keeps rows of one state."""
    monkeypatch.setattr(tribe_method, "APART", 0 if apart else 2**20)
    method = tribe.methods.create(name, classes=CLASSES, **fields)
    net = Backbone(small_network()).to(DEVICE)
    ends = []
    for mode in (False, "auto"):
        state, outputs = method.init(net, 2), []
        with kernels.using(mode):
            for seed in range(3):
                x = images(2, 6, seed).to(DEVICE)
                x[0, 1] = torch.nan
                logits, state = method.step(net, state, x)
                outputs.append(logits)
        ends.append((torch.stack(outputs), state))
    assert (ends[0][0] - ends[1][0]).abs().max() <= 1e-4
    for leaf, t in leaves(ends[0][1]).items():
        assert torch.allclose(t.double(), leaves(ends[1][1])[leaf].double(), atol=2e-4), leaf


@runs
def test_the_recording_holds():
    """Where rounding shows most: a hundred classes, half of every update shared. Catches a mean that is not exact."""
    with np.load(DATA / "methods_k100.npz") as file:
        data = {**file, "x": file["x"][:3]}
    with kernels.using("auto"), float32_precision("float32"):
        logits, _ = replay(data, "tribe_gamma5", *RECORDED["methods_k100"]["tribe_gamma5"], device=DEVICE)
    golden = torch.from_numpy(data["logits/tribe_gamma5"][:3])
    assert (logits[0].cpu() - golden).abs().max() <= 5e-5


@runs
def test_steps_from_static_memory_are_the_same_with_kernels():
    """Catches kernels that do not write into the memory of the state before last, where CUDA graphs read it."""
    method, net = tribe.methods.create("tribe", classes=CLASSES), Backbone(small_network()).to(DEVICE)
    with kernels.using("auto"):
        captured = Captured(method, net, repeated)
        here = there = method.init(net, 2)
        for seed, batch in enumerate((6, 6, 4, 6)):
            x = images(2, batch, seed).to(DEVICE)
            wanted, here = method.step(net, here, x)
            logits, there = captured.step(there, x)
            assert (logits - wanted).abs().max() <= 1e-4
    for name, t in leaves(here).items():
        assert torch.allclose(t.double(), leaves(there)[name].double(), atol=1e-4), name
