"""The structure of the released code, which benchmarks compare with, computes the same as the library."""

import pytest
import torch
from benchmarks.released import Released

import tribe
from tribe.experiments.bench import contenders
from tribe.testing import CLASSES, images, small_network


@pytest.mark.parametrize(
    "fields",
    [{}, {"h0": 0.9}, {"h0": 0.0}, {"gamma": 0.3, "eta": 0.5, "h0": 0.9}, {"lambda_anc": 0.0, "h0": 0.9}],
    ids=str,
)
def test_three_networks_and_the_rows_of_one_give_the_same_logits(fields):
    model, method = small_network(), tribe.methods.create("tribe", classes=CLASSES, **fields)
    adapter, reference = tribe.adapt(model, method, seed=3), Released(model, method, seed=3)
    for seed in range(5):
        x = images(1, 12, seed)[0]
        assert (adapter(x) - reference(x)).abs().max() <= 5e-5
    moved = torch.cat([p.flatten() for p in reference.adam.param_groups[0]["params"][::2]])
    assert torch.allclose(adapter.state.affine.weight[0], moved, atol=1e-5)


def test_a_network_of_the_package_gives_the_same_logits():
    """Some of their layers normalise and activate at once."""
    model, method = contenders.build("resnet8"), tribe.methods.create("tribe", classes=10, h0=0.9)
    adapter, reference = tribe.adapt(model, method), Released(model, method)
    for seed in range(3):
        x = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        expected = reference(x)
        assert (adapter(x) - expected).abs().max() <= 1e-4 * expected.abs().max().clamp_min(1)


def test_the_caller_s_model_stays():
    model = small_network()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    Released(model, tribe.methods.create("tribe", classes=CLASSES))(images(1, 6)[0])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
