"""LayerNorms as networks write them adapt where a slot computes the same, and are left alone otherwise."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tribe
from tribe.core.backbone import Backbone
from tribe.core.slots import AffineSlot, ChannelSlot
from zoo import FROZEN, ChannelNorm, LayerNorm2d, different_rows, gap, images, small


class Again(nn.LayerNorm):
    """LayerNorm with a forward that computes the same."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class InFloat32(nn.LayerNorm):
    """Computes in float32, whatever the precision of the network."""

    def forward(self, x: Tensor) -> Tensor:
        parameters = self.weight.float(), self.bias.float()
        y = F.layer_norm(x.permute(0, 2, 3, 1).float(), self.normalized_shape, *parameters, self.eps)
        return y.to(x.dtype).permute(0, 3, 1, 2)


class EitherWay(nn.LayerNorm):
    """Channels first or last, as Hugging Face writes it."""

    def __init__(self, channels: int, data_format: str = "channels_first") -> None:
        super().__init__(channels, eps=1e-6)
        self.data_format = data_format

    def forward(self, features: Tensor) -> Tensor:
        if self.data_format == "channels_first":
            return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(features)


class AnyAxes(nn.LayerNorm):
    """The channels of (N, C, ...), by moving them last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class WideChannelNorm(ChannelNorm):
    """Its parameters have the shape of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.weight, self.bias = (nn.Parameter(t.view(-1, 1, 1)) for t in (self.weight.data, self.bias.data))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 1, keepdim=True, correction=0)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def last(norm: Callable[[int], nn.Module]) -> nn.Module:
    """A network that normalises the last axis."""
    return nn.Sequential(nn.Linear(8, 6), norm(6), nn.GELU(), nn.Flatten(), nn.Linear(6 * 24, 4))


NORMS = {
    "timm": (partial(small, LayerNorm2d), ChannelSlot),
    "timm, last": (partial(last, Again), AffineSlot),
    "float32": (partial(small, InFloat32), ChannelSlot),
    "Hugging Face": (partial(small, EitherWay), ChannelSlot),
    "Hugging Face, last": (partial(last, partial(EitherWay, data_format="channels_last")), AffineSlot),
    "authors": (partial(small, ChannelNorm), ChannelSlot),
    "any number of axes": (partial(small, AnyAxes), ChannelSlot),
    "wide parameters": (partial(small, WideChannelNorm), ChannelSlot),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NORMS[name][0]().eval()
    for layer in model.modules():
        if type(layer).__name__.endswith(("Norm", "Norm2d", "Again", "InFloat32", "EitherWay")):
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("name", NORMS)
def test_a_layer_norm_of_another_library_adapts(name: str) -> None:
    model, x = make(name), images("BatchNorm2d", rows=2)
    net = Backbone(model)
    assert net.left_alone == {}
    assert {type(slot) for slot in net.slots} == {NORMS[name][1]}
    assert gap(net(x, *net.source(2), FROZEN).logits[1], model(x[1])) <= 1e-5
    arguments = different_rows(net, FROZEN, 2)
    together = net(x, *arguments).logits
    assert gap(together[0], together[1]) > 1e-2
    for r in range(2):
        assert gap(together[r], net(x[r : r + 1], *arguments.row(r)).logits[0]) < 1e-5


@pytest.mark.parametrize("name", NORMS)
def test_what_it_learned_is_exported_in_its_own_class(name: str) -> None:
    model, x = make(name), images("BatchNorm2d")[0]
    adapter = tribe.adapt(model, "tent", lr=0.1)
    before = adapter.predict(x)
    adapter(x)
    exported = adapter.export()
    assert [type(m) for m in exported.modules()] == [type(m) for m in model.modules()]
    assert gap(exported(x), adapter.predict(x)) <= 1e-5
    assert gap(before, adapter.predict(x)) > 1e-4


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_few_channels_are_not_taken_for_pixels(channels: int) -> None:
    """Catches a trial in which another axis has as many entries as there are channels."""
    for norm, kind in ((LayerNorm2d, ChannelSlot), (Again, AffineSlot)):
        net = Backbone(nn.Sequential(norm(channels), nn.Flatten(), nn.Linear(8, 4)))
        assert type(net.slots[0]) is kind


def test_a_network_without_values_is_tried_too() -> None:
    assert {type(slot) for slot in Backbone(small(LayerNorm2d).to("meta")).slots} == {ChannelSlot}


class Scaled(LayerNorm2d):
    """Normalises and then does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Conditional(LayerNorm2d):
    """May be called with something else to normalise by."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return super().forward(x) if condition is None else x * condition


class RootMeanSquareNorm(ChannelNorm):
    """Has what a LayerNorm has and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(1, keepdim=True) + self.eps).rsqrt() * self.weight[:, None, None]


CUSTOM, OTHER_KIND = "has a custom forward", "is of a kind that tribe does not adapt"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, CUSTOM) for kind in (Scaled, Conditional, RootMeanSquareNorm)),
        *((kind, OTHER_KIND) for kind in (partial(nn.InstanceNorm2d, affine=True), nn.RMSNorm)),
    ],
)
def test_norms_that_do_something_else_are_left_alone(kind: Callable[[int], nn.Module], reason: str) -> None:
    model = small()
    model[4] = layer = kind(8)
    assert Backbone(model).left_alone == {"4": f"{type(layer).__name__} {reason}"}


def test_norms_of_weights_and_of_images_are_no_norm_layers() -> None:
    model = nn.Sequential(tribe.Normalize([0.5] * 3, [0.5] * 3), small())
    for layer in (model[1][0], model[1][3]):
        nn.utils.parametrizations.spectral_norm(layer)
    assert Backbone(model).left_alone == {}


def test_most_layers_left_alone_are_a_warning_that_groups_reasons() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(6, 6, 1), Scaled(6))]
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), *layers, nn.Flatten(), nn.Linear(216, 4))
    with pytest.warns(UserWarning, match="forward"):
        adapter = tribe.adapt(model, "bn")
    assert adapter(images("BatchNorm2d")[0]).shape == (6, 4)
    assert "left as they are: 3, 5 and 2 more: Scaled has a custom forward\n" in str(tribe.doctor(model))


def test_few_layers_left_alone_are_no_warning() -> None:
    model = nn.Sequential(small(), nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tribe.adapt(model)


def test_none_that_adapts_is_an_error_that_groups_reasons() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), *(Scaled(6) for _ in range(20)))
    with pytest.raises(ValueError, match="adapted"):
        tribe.adapt(model)
