"""Models that cannot be adapted, and images that do not fit, are refused with the reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tribe
from networks import Around
from tribe.core.backbone import Backbone
from zoo import BALANCED, FROZEN, Doubled, build, gap, images, run, small, wrapped


def lazy() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.Linear(144, 4))


def test_lazy_layers_work_once_their_size_is_known() -> None:
    model, x = lazy(), images("BatchNorm2d")
    model(x[0])
    net = Backbone(model)
    assert gap(net(x, *net.source(), FROZEN).logits[0], model.eval()(x[0])) <= 1e-5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4)), "none of .* can be adapted .*1: Doubled has a custom"),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU()), "no normalisation layers.*folded into the convolutions"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)), "neither statistics nor affine"),
        (lazy(), "size of layer '1' is not known yet: run the model once"),
        (nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4)), "size of layer '0' is not known yet"),
        (torch.jit.script(small()), "the model was compiled by torch.jit .*: give the eager module"),
        (torch.jit.trace(small(), torch.rand(2, 3, 8, 8), check_trace=False), "compiled by torch.jit .*: give the"),
        (Backbone(small()), "Backbone is or holds a tribe.Backbone.* tribe.adapt takes a Backbone as it is"),
        (tribe.adapt(small()), r"Adapter is or holds a tribe.Backbone.* its .net .* its .export\(\)"),
    ],
)
def test_a_model_that_cannot_be_adapted_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Backbone(model)


def test_a_compiled_part_that_learned_nothing_does_no_harm() -> None:
    with pytest.raises(ValueError, match="compiled"):
        Backbone(nn.Sequential(torch.jit.script(small()[:3]), small()[3:]))
    model, x = nn.Sequential(torch.jit.script(nn.Softsign()), build("BatchNorm2d")).eval(), images("BatchNorm2d")
    assert gap(run(model).logits[0], model(x[0])) <= 1e-5


CUTS = {  # ways to return logits without a gradient, as networks for inference do
    "detach": lambda inner, x: inner[8:](inner[:8](x).detach()),
    "no_grad": lambda inner, x: torch.no_grad()(inner)(x),
    "inference_mode": lambda inner, x: torch.inference_mode()(inner)(x),
}


@pytest.mark.parametrize("how", CUTS)
def test_a_network_that_cuts_gradients_is_refused_in_words_where_one_is_needed(how: str) -> None:
    adapter, x = tribe.adapt(Around(CUTS[how], small()), "tent"), images("BatchNorm2d")[0]
    before = adapter.digest()
    with pytest.raises(ValueError, match="gradient"):
        adapter(x)
    assert adapter.digest() == before
    assert tribe.adapt(Around(CUTS[how], small()), "bn")(x).shape == (6, 4)


@pytest.mark.parametrize("method", [name for name in tribe.methods.names() if tribe.methods.get(name).needs is None])
def test_without_affine_parameters_methods_that_learn_nothing_else_are_refused(method: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(144, 4))
    net, x = Backbone(model), torch.rand(1, 64, 3, 8, 8)
    if method in ("source", "bn", "bdn", "bank", "lame", "cotta"):
        assert tribe.adapt(net, method)(x).shape == (1, 64, 4)
        return
    message = r"no normalisation layer .* has affine parameters .*Choose one that needs none: bn, lame, cotta, petal"
    with pytest.raises(ValueError, match=message):
        tribe.adapt(net, method)
    rule = tribe.methods.create(method, classes=4)
    with pytest.raises(ValueError, match=message):  # a pass without an adapter raises it, too
        rule.step(net, rule.init(net), x)


def reading(ask: Callable[[Any], Tensor]) -> nn.Module:
    """A network that reads an attribute of a normalisation layer."""
    return Around(lambda inner, x: inner(x) + ask(inner[1]), small())


@pytest.mark.parametrize("what", ["weight", "running_mean", "_check_input_dim"])
def test_reading_a_layer_past_its_call_is_refused(what: str) -> None:
    with pytest.raises(AttributeError, match=rf"reads '{what}' of .* layer 'inner.1' .* call the layer"):
        run(reading(lambda layer: 0 * getattr(layer, what).sum()))


def test_settings_of_a_layer_may_be_read() -> None:
    model = reading(lambda layer: torch.full((), layer.num_features * layer.momentum))
    model.inner.eval()
    x = images("BatchNorm2d")
    assert gap(run(model, x).logits[0], model(x[0])) <= 1e-5
    with pytest.raises(AttributeError, match="attribute"):
        run(reading(lambda layer: layer.nonsense))


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="function"):
        Backbone(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [lambda y: y[:, :, None], lambda y: y[:3], lambda y: y.sum()])
def test_logits_of_another_shape_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="classes"):
        run(wrapped(change))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, partial(nn.GroupNorm, 2)])
def test_a_model_that_mixes_images_is_refused(norm: Callable[[int], nn.Module]) -> None:
    """Catches rows and samples that are separated by position although the network has moved them."""
    with pytest.raises(ValueError, match="received"):
        run(Around(lambda inner, x: inner(x[: len(x) // 2 + 1]), small(norm)), images("BatchNorm2d", 2))


@pytest.mark.parametrize(("shape", "message"), [((5, 8, 8), "takes 3 channels"), ((8, 8), "3 axes")])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(small(), torch.rand(1, 6, *shape))


def test_arguments_of_another_shape_are_refused() -> None:
    """Catches class statistics with a rule for one class: with as many samples as classes they would broadcast."""
    net, x = Backbone(small()), images("BatchNorm2d", 2)
    affine, stats = net.source(2)
    with pytest.raises(ValueError, match="channels"):
        net(x, net.source(3)[0], stats, FROZEN)
    with pytest.raises(ValueError, match="statistics"):
        net(x, affine, net.source(2, classes=6)[1], FROZEN)
    with pytest.raises(ValueError, match="statistics"):
        net(x, affine, stats, BALANCED)
