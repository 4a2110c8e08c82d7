"""Input normalisation is a layer that compilers and quantisers take, so that what was learned can be deployed."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import tribe
from tribe.testing import images
from zoo import gap, small

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
X = images(1, 6, 0)[0]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(tribe.Normalize(MEAN, STD), small()).eval()


def learned() -> tuple[nn.Module, Tensor]:
    """What an adapter exports, and what it predicts."""
    model = tribe.adapt(network(), h0=2.0)
    for seed in range(3):
        model(images(1, 6, seed)[0])
    return model.export(), model.predict(X)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 8, 6), (4, 3, 2, 5, 6)])
@pytest.mark.parametrize("last", [False, True])
def test_every_channel_is_normalised(shape: tuple[int, ...], last: bool) -> None:
    x = torch.rand(shape)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    y = tribe.Normalize(MEAN, STD)(x)
    assert y.stride() == x.stride()
    for c in range(3):
        assert gap(y[:, c], (x[:, c] - MEAN[c]) / STD[c]) < 1e-6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_network_is_scripted_and_traced() -> None:
    exported, expected = learned()
    for compiled in (torch.jit.script(exported), torch.fx.symbolic_trace(exported)):
        assert gap(compiled(X), expected) < 1e-5


def test_an_exported_network_is_quantised() -> None:
    """Catches an input layer that torch.fx cannot trace."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    engine = next(
        (e for e in ("x86", "fbgemm", "onednn", "qnnpack") if e in torch.backends.quantized.supported_engines), ""
    )
    if not engine:
        pytest.skip("this torch has no quantised operators")
    exported, expected = learned()
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, engine
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = prepare_fx(exported, get_default_qconfig_mapping(engine), (X,))
            prepared(X)
            quantised = convert_fx(prepared)
        y = quantised(X)
    finally:
        torch.backends.quantized.engine = before
    kinds = {type(m).__module__ for m in quantised.modules()}
    assert any("quantized" in kind for kind in kinds)
    assert gap(y, expected) < 0.1 * float(expected.std())
