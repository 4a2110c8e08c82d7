"""Class statistics in 8 bits: the slow loop, what is exact, what is unbiased, and TRIBE with them."""

import numpy as np
import pytest
import torch

import reference
import tribe
from tribe.core import kernels, packed
from tribe.core.backbone import Backbone
from tribe.core.kernels import random_numbers
from tribe.core.packed import PackedStats, pack
from tribe.core.rng import Key, uniform
from tribe.core.state import Stats, count_bytes, digest, leaves
from tribe.health.changes import compare_states
from tribe.methods import create
from tribe.norms.balanced import Balanced
from tribe.testing import images, small_network

EPS = 1e-5


def first(rows=2, classes=6):
    """The statistics of one layer, full and packed, the same for all classes."""
    generator = torch.Generator().manual_seed(1)
    var = torch.tensor([1e-3, 0.1, 1, 2, 50], dtype=torch.float64)
    source = Stats(torch.randn(rows, 1, 5, generator=generator, dtype=var.dtype), var.expand(rows, 1, 5).clone())
    full = Stats(*(t.expand(-1, classes, -1).clone() for t in source))
    return full, pack(source, torch.full_like(var, EPS), classes, 1)


def batches(steps, stats, classes, batch=8, seed=0):
    """Per-sample moments around those of a layer, with labels and valid marks."""
    generator = torch.Generator().manual_seed(seed)
    mean, var = (t[:, :1] for t in stats)
    rows, _, channels = mean.shape
    for _ in range(steps):
        labels = torch.randint(0, classes, (rows, batch), generator=generator)
        valid = torch.rand(rows, batch, generator=generator) > 0.2
        noise = torch.randn(rows, batch, channels, generator=generator).to(mean)
        shift = 0.5 * torch.sin(labels.unsqueeze(2) + torch.arange(channels)).to(mean)
        size = torch.rand(rows, batch, channels, generator=generator).to(mean)
        yield mean + (shift + 0.3 * noise) * var.sqrt(), 2 * var * size, labels, valid


def play(norm, stats, steps, classes):
    """Pooled statistics of the last batch, and what is kept."""
    pooled = None
    for mean, var, labels, valid in batches(steps, first()[0], classes):
        *pooled, stats = norm(mean, var, 9, stats, labels, valid, EPS)
    return pooled, stats


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_an_update_equals_the_slow_loop(gamma):
    norm = Balanced(6, 0.3, gamma)
    full, small = first()
    _, small = play(norm, small, 3, 6)
    mean, var, labels, valid = next(batches(1, full, 4, seed=7))  # classes 4 and 5 are absent
    valid[1] = False  # a row with nothing to count
    past, groups = small.in_full(), norm.group(labels, valid, mean.dtype)
    *_, after = norm(mean, var, 9, small, labels, valid, EPS)
    *_, wanted = norm(mean, var, 9, past, labels, valid, EPS)
    units = (after.shared[:, 2], after.shared[:, 2] ** 2)
    for r in range(2):
        seen = set(labels[r][valid[r]].tolist())
        for k in range(6):
            visits = int(small.scale[r, 12 + k])
            assert int(after.scale[r, 12 + k]) == visits + (k in seen)
            draws = uniform(Key(torch.tensor([k]), torch.tensor([visits])), packed.ROUNDING, (2, 5))[0].tolist()
            for i, shrink in ((0, 0.0), (1, float(groups.shrink[r]))):
                codes, scale = after[i][r, k].tolist(), float(after.scale[r, 6 * i + k])
                if k in seen:
                    offsets = ((wanted[i][r, k] - after.shared[r, i]) / units[i][r]).tolist()
                    expected, size = reference.pack(offsets, draws[i])
                    assert codes == expected
                else:
                    assert codes == small[i][r, k].tolist(), "an absent class is not rounded again"
                    size = float(small.scale[r, 6 * i + k]) * (1 - shrink)
                    own = torch.tensor(reference.unpack(codes, size), dtype=torch.float64)
                    restored = after.shared[r, i] + units[i][r] * own
                    torch.testing.assert_close(restored, wanted[i][r, k], rtol=0, atol=1e-12)
                assert scale == pytest.approx(size, rel=1e-12)
    assert digest(after.layer(slice(None), 0)) == digest(after)


def test_codes_are_at_most_127_and_zero_stays_zero():
    offset = torch.tensor([[[0.0, 0.0, 0.0], [1e-30, -5.0, 1e-9], [3e30, -3e30, 1.0]]])
    codes, scale = packed._encode(offset, torch.full((1, 3, 3), 0.5))
    assert codes.tolist() == [[[0, 0, 0], [0, -127, 0], [127, -127, 0]]]
    assert scale[0, 0].item() == 0
    _, scale = packed._encode(torch.tensor([[[float("nan"), 1.0]], [[float("inf"), 1.0]]]), torch.zeros(2, 1, 2))
    assert not scale.isfinite().any(), "a step with such a number is undone, see finish"


def errors(gamma, steps=150, classes=6):
    """Root mean square errors of class statistics and of pooled ones, in deviations of the channel."""
    norm, (full, small) = Balanced(classes, 0.1, gamma), first()
    unit = small.shared[:, 2:]
    pooled, kept = play(norm, full, steps, classes)
    packed_pooled, packed_kept = play(norm, small, steps, classes)

    def rms(a, b):
        apart = torch.cat(((a[0] - b[0]) / unit, (a[1] - b[1]) / unit**2))
        return apart.square().mean().sqrt().item()

    return rms(kept, packed_kept.in_full()), rms(pooled, packed_pooled)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 1.0])
def test_errors_stay_small_and_pooled_ones_are_smaller(gamma):
    own, pooled = errors(gamma)
    assert own < 0.01
    assert pooled < 0.005


def follows():
    """The mean of 200 channels that move by far less than a code in every step, beside one with a large offset."""
    small = pack(Stats(torch.zeros(1, 1, 201), torch.ones(1, 1, 201)), torch.zeros(201), 2, 1)
    labels, valid, mean = torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, 201)
    mean[..., 0] = 100
    for eta in (1.0, *[1e-3] * 400):
        *_, small = Balanced(2, eta)(mean, torch.zeros_like(mean), 9, small, labels, valid, EPS)
        mean[..., 1:] = 1
    large, *little = small.in_full().mean[0, 0].tolist()
    assert large == pytest.approx(100, rel=1e-3)
    return sum(little) / len(little)


def test_a_move_of_less_than_a_code_is_not_lost(monkeypatch):
    """Codes are rounded up or down at random; the two mutants round to the nearest, and draw the same numbers again."""
    expected = 1 - (1 - 1e-3) ** 400
    assert follows() == pytest.approx(expected, rel=0.1)
    monkeypatch.setattr(random_numbers, "uniform", lambda key, purpose, shape: torch.full((len(key.seed), *shape), 0.5))
    assert follows() == 0
    monkeypatch.setattr(
        random_numbers, "uniform", lambda key, purpose, shape: uniform(key._replace(clock=key.clock * 0), 1, shape)
    )
    assert follows() != pytest.approx(expected, rel=0.5)


def pair(classes=50, **fields):
    net = Backbone(small_network(classes))
    return net, [create("tribe", classes=classes, class_stats=kind, **fields) for kind in ("full", "packed")]


def test_predictions_are_those_of_full_statistics():
    net, (full, small) = pair()
    states, spread = [method.init(net) for method in (full, small)], []
    for seed in range(20):
        x = images(1, 8, seed) * 0.6
        (a, states[0]), (b, states[1]) = (m.step(net, s, x) for m, s in zip((full, small), states, strict=True))
        spread.append(((a - b).abs().max() / a.std()).item())
        assert torch.equal(a.argmax(-1), b.argmax(-1))
    assert 0 < max(spread) < 0.01
    moved = [compare_states(net, m, m.init(net), s, "start") for m, s in zip((full, small), states, strict=True)]
    for one, other in zip(*(comparison.classes for comparison in moved), strict=True):
        assert one.number == other.number
        assert one.statistics == pytest.approx(other.statistics, rel=0.05, abs=1e-6)


def test_they_take_a_quarter():
    wide = torch.nn.Sequential(
        torch.nn.Conv2d(3, 400, 1), torch.nn.BatchNorm2d(400), torch.nn.Flatten(), torch.nn.Linear(400, 60)
    )
    net = Backbone(wide)
    full, small = (count_bytes(create("tribe", classes=60, class_stats=kind).init(net)) for kind in ("full", "packed"))
    assert 0.25 < small / full < 0.32


def test_an_adapter_keeps_its_codes_through_a_file_and_in_another_precision(tmp_path):
    adapter = tribe.adapt(small_network(), class_stats="packed")
    adapter(images(1, 6)[0])
    assert isinstance(adapter.state.pair, PackedStats)
    adapter.save(tmp_path / "state")
    assert tribe.load(tmp_path / "state", small_network()).digest() == adapter.digest()
    assert {t.dtype for t in leaves(adapter.double().state.pair).values()} == {torch.int8, torch.float64}


def test_rules_without_classes_have_none_to_pack():
    with pytest.raises(ValueError, match="class_stats"):
        create("selftrain/robust-bn", classes=4, class_stats="packed")
    with pytest.raises(ValueError, match="class_stats"):
        create("tribe", classes=4, class_stats="int8")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [False, "auto"])
def test_cpu_and_gpu_agree(mode):
    """The kernel of the update gets unpacked statistics, and the same random numbers choose the codes."""
    _, (_, method) = pair()
    nets = [Backbone(small_network(50)), Backbone(small_network(50).cuda())]
    states = [method.init(net, 2) for net in nets]
    with kernels.using(mode):
        for seed in range(10):
            x = images(2, 8, seed)
            (a, states[0]), (b, states[1]) = (
                method.step(net, state, x.to(net.device)) for net, state in zip(nets, states, strict=True)
            )
            assert (a - b.cpu()).abs().max() <= 2e-3 * a.std()
    codes, others = ([s.pair.mean, s.pair.var, s.anchor.mean, s.anchor.var] for s in states)
    apart = torch.cat([(c.int() - o.cpu().int()).abs().flatten() for c, o in zip(codes, others, strict=True)])
    assert apart.max() <= 2
    assert np.mean((apart > 0).numpy()) < 0.02
