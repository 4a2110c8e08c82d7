"""All weights in a row: layout, passes, gradients, random masks and quantiles."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tribe.core import all_weights as weights
from tribe.core.all_weights import WeightLayout
from tribe.core.backbone import Backbone
from tribe.core.losses import cross_entropy
from tribe.core.optim import adam_init, adam_step
from tribe.core.rng import Key
from tribe.core.rules import Frozen, PerBatch
from tribe.core.state import leaves, tree_map
from tribe.testing import images, small_network


def key(*seeds, clock=3):
    return Key(torch.tensor(seeds), torch.full((len(seeds),), clock))


def everything(batch):
    return torch.ones(1, batch, dtype=torch.bool)


def biased_network():
    """Biases, a layer without affine parameters, and four, three and two axes."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6, affine=False),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.Flatten(2),
        nn.Conv1d(4, 2, 5),
        nn.Flatten(),
        nn.Linear(24, 5),
    ).eval()


@pytest.mark.parametrize("build", [small_network, biased_network])
def test_views_are_the_networks_own_weights_in_its_own_layout(build):
    net = Backbone(build())
    layout = WeightLayout(net)
    row = layout.source(2).weights[1]
    views = layout.views(row)
    own = dict(net.model.named_parameters())
    assert views.keys() == own.keys()
    for name, view in views.items():
        assert torch.equal(view, own[name])
        assert view.stride() == own[name].stride()
        assert row.data_ptr() <= view.data_ptr() < row.data_ptr() + row.nbytes, "a copy, not a view"
    assert len(row) == sum(p.numel() for p in own.values())


def test_layers_can_be_left_out():
    net = Backbone(biased_network())
    layout = WeightLayout(net, without=nn.Linear)
    assert not {"8.weight", "8.bias"} & set(layout.pieces)
    assert {"8.weight", "8.bias"} < set(WeightLayout(net).pieces)
    x = images(1, 5)
    assert torch.equal(
        weights.forward(layout, layout.source(), x, Frozen(), everything(5)).logits,
        net(x, *net.source(), Frozen()).logits,
    )


def test_weights_of_convolutions_are_aligned_in_memory():
    """For all sizes of earlier weights and any number of streams: on unaligned weights a GPU takes slower kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 1), nn.Conv2d(5, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 7, 1), nn.Conv2d(7, 16, 1)
    )
    net = Backbone(nn.Sequential(*model, nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    layout, seen = WeightLayout(net), {}
    assert layout.source().weights.shape[1] % 2 == 1
    for i in (1, 3, 4):
        net.model[i].register_forward_pre_hook(lambda m, _, i=i: seen.update({i: m.weight.data_ptr() % 64}))
    expected = net(images(1, 2), *net.source(), PerBatch()).logits
    for index in range(3):
        seen.clear()
        params = layout.source(3).stream(index)
        assert torch.equal(weights.forward(layout, params, images(1, 2), PerBatch(), everything(2)).logits, expected)
        assert seen == {1: 0, 3: 0, 4: 0}


def test_training_all_weights_equals_torch():
    """Forward, gradients and Adam on rows against an ordinary module, its layers in training mode and torch's Adam."""
    model = small_network(dtype=torch.float64)
    net = Backbone(model)
    layout = WeightLayout(net)
    params = layout.source()
    moments = adam_init(params)
    plain = copy.deepcopy(model).train()
    optimiser = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(4):
        x = images(1, 6, step, torch.float64)
        y = torch.arange(6) % 4
        start = weights.leaf(params)
        loss = cross_entropy(weights.forward(layout, start, x, PerBatch(), everything(6)).logits[0], y).mean()
        params, moments = adam_step(params, weights.gradients(loss, start), moments, 1e-2)
        optimiser.zero_grad()
        nn.functional.cross_entropy(plain(x[0]), y).backward()
        optimiser.step()
    named = layout.unpack(params)
    assert named.keys() == dict(plain.named_parameters()).keys()
    for name, expected in plain.named_parameters():
        assert torch.allclose(named[name], expected, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_rows_are_float32_at_least(dtype, kept):
    net = Backbone(small_network(dtype=dtype))
    layout = WeightLayout(net)
    start = weights.leaf(layout.source())
    assert start.weights.dtype == kept
    assert all(view.dtype == dtype for view in layout.views(start.weights[0]).values())
    output = weights.forward(layout, start, images(1, 6, dtype=dtype), PerBatch(), everything(6))
    assert torch.equal(output.logits, net(images(1, 6, dtype=dtype), *net.source(), PerBatch()).logits)
    slope = weights.gradients(output.logits.float().square().sum(), start)
    assert slope.weights.dtype == kept
    assert slope.weights.abs().max() > 0


@pytest.mark.parametrize("build", [small_network, biased_network])
def test_names_of_the_state_dict_and_back(build):
    model = build()
    net = Backbone(model)
    layout = WeightLayout(net)
    names = dict(model.named_parameters())
    packed = layout.pack(model.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(leaves(packed).values(), leaves(layout.source()).values(), strict=True)
    )
    unpacked = layout.unpack(packed)
    assert unpacked.keys() == names.keys()
    assert all(torch.equal(unpacked[name], names[name]) for name in names)


def test_tensors_of_another_network_are_refused():
    layout = WeightLayout(Backbone(small_network()))
    state = small_network().state_dict()
    with pytest.raises(ValueError, match="missing"):
        layout.pack(small_network(classes=7).state_dict())
    del state["1.bias"]
    with pytest.raises(ValueError, match=r"1.bias missing"):
        layout.pack(state)


def test_restoring_puts_back_what_is_chosen_and_nothing_else():
    layout = WeightLayout(Backbone(small_network()))
    source = layout.source()
    moved = tree_map(lambda t: torch.cat((t, t)) + 1, source)
    chosen = weights.bernoulli_mask(key(1, 2), 0, 0.3, weights.flat(moved).shape[1])
    after = weights.flat(weights.restore(chosen, moved, source))
    assert torch.equal(after, torch.where(chosen, weights.flat(source), weights.flat(moved)))
    assert 0 < chosen.sum() < chosen.numel()


@pytest.mark.parametrize("p", [0.5, 0.01, 1e-3, 2e-5])
def test_the_share_chosen_is_p(p):
    """The last p is so small that most draws exceed the reach and choose nothing."""
    n = 4_000_000
    chosen = weights.bernoulli_mask(key(425), 1, p, n)
    assert chosen.shape == (1, n)
    assert abs(chosen.sum().item() - p * n) < 5 * (p * (1 - p) * n) ** 0.5
    halves = chosen.view(2, -1).sum(1).double()
    assert (halves - p * n / 2).abs().max() < 5 * (p * n / 2) ** 0.5, "not the same everywhere"


def test_places_are_chosen_independently():
    """Pairs at any distance are chosen as often as independent draws would be, and the gaps are geometric."""
    p, n = 0.05, 2_000_000
    chosen = weights.bernoulli_mask(key(7), 1, p, n)[0]
    for distance in (1, 2, 3, 17, 1000):
        pairs = (chosen[distance:] & chosen[:-distance]).sum().item()
        assert abs(pairs - p * p * n) < 5 * (p * p * n) ** 0.5
    gaps = chosen.nonzero()[:, 0].diff()
    for k in (1, 2, 10, 60):
        expected = len(gaps) * p * (1 - p) ** (k - 1)
        assert abs((gaps == k).sum().item() - expected) < 5 * expected**0.5


def test_all_or_nothing():
    assert not weights.bernoulli_mask(key(1), 1, 0.0, 1000).any()
    assert weights.bernoulli_mask(key(1), 1, 1.0, 5000).all()
    assert weights.bernoulli_mask(key(1), 1, 0.5, 0).shape == (1, 0)


def test_streams_seeds_clocks_and_purposes_draw_apart_and_together_equals_alone():
    n, p = 20_000, 0.1
    both = weights.bernoulli_mask(key(3, 4), 1, p, n)
    assert torch.equal(both[1:], weights.bernoulli_mask(key(4), 1, p, n))
    others = [both[1], weights.bernoulli_mask(key(3, clock=4), 1, p, n)[0], weights.bernoulli_mask(key(3), 2, p, n)[0]]
    for other in others:
        meet = (both[0] & other).sum().item()
        assert abs(meet - p * p * n) < 5 * (p * p * n) ** 0.5


def test_quantile_of_more_values_than_torch_takes():
    values = torch.rand(1, 2**24 + 12_345, generator=torch.Generator().manual_seed(0)).square()
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(torch.zeros_like(values), 0.03, dim=1)  # which is sorted already
    row = values[0].numpy()
    got = weights.quantile(values, 0.03).item()
    assert got == pytest.approx(np.quantile(row, 0.03), rel=1e-6)
    assert (values < got).sum() == int(0.03 * (row.size - 1)) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q", [0.0, 0.03, 0.25, 0.5, 0.999, 1.0])
def test_quantile_equals_torch_row_by_row(dtype, q):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5, 1001, generator=generator, dtype=dtype).square()
    values[1] = 0  # all alike
    values[2, :500] = 0  # ties at the bottom
    values[3] = values[3].round()  # ties everywhere
    values[4, 0] = 1e-40  # subnormal in float32
    assert torch.allclose(weights.quantile(values, q), torch.quantile(values, q, dim=1), rtol=1e-6, atol=0)
    for n in (1, 2, 3):
        few = values[:, :n].contiguous()
        assert torch.allclose(weights.quantile(few, q), torch.quantile(few, q, dim=1), rtol=1e-6, atol=0)
