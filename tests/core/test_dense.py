"""Networks that return something else than logits: methods that never look at the output adapt them, others refuse."""

import pytest
import torch
from torch import Tensor, nn

import tribe
from networks import Around
from tribe.core.backbone import Backbone
from tribe.experiments.runner import run
from tribe.experiments.stream import Stream
from tribe.testing import images
from zoo import gap

X = images(1, 6, 0)[0]


def segmenter(classes: int = 4) -> nn.Module:
    """A head that classifies every pixel."""
    torch.manual_seed(0)
    body = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, classes, 1)
    return nn.Sequential(*body).eval()


def features() -> nn.Module:
    """A backbone without a classifier, whose last pointwise convolution is not the output."""
    torch.manual_seed(0)
    body = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten()).eval()


NETWORKS = {
    "segmentation": segmenter,
    "one class": lambda: segmenter(1),
    "feature maps": lambda: features()[:4],
    "features": features,
    "no classifier": lambda: segmenter()[:3],
}


def in_train_mode(model: nn.Module, x: Tensor) -> Tensor:
    """What BatchNorm with each batch's statistics gives; the variance that normalises is biased."""
    with torch.no_grad():
        return model.train()(x)


@pytest.mark.parametrize("name", NETWORKS)
def test_bn_adapts_a_network_with_any_output(name: str) -> None:
    model = tribe.adapt(NETWORKS[name](), "bn")
    y = model(X)
    assert gap(y, in_train_mode(NETWORKS[name](), X)) < 1e-5
    assert gap(model.export()(X), y) < 1e-5
    assert gap(tribe.adapt(NETWORKS[name](), "source")(X), NETWORKS[name]()(X)) < 1e-5
    assert model.info[0].images == 6
    assert 0 <= model.info[0].entropy <= 1


def test_streams_and_bad_images_are_kept_apart() -> None:
    two = torch.stack((X, 1 - X))
    model = tribe.adapt(segmenter(), "bn", streams=2)
    alone = tribe.adapt(segmenter(), "bn")
    assert gap(model(two)[1], alone(1 - X)) < 1e-5
    bad = X.clone()
    bad[2, 0, 0, 0] = torch.nan
    y = alone(bad)
    rest = [0, 1, 3, 4, 5]
    assert not y[2].any()
    assert gap(y[rest], alone(X[rest])) < 1e-5
    assert alone.info[0].skipped == 1
    assert gap(alone(X, order=torch.arange(6).flip(0)), alone(X)) < 1e-5


def test_a_dense_network_is_saved_and_resumed(tmp_path) -> None:
    model = tribe.adapt(segmenter(), "bn")
    model(X)
    model.save(tmp_path / "s.safetensors")
    again = tribe.load(tmp_path / "s.safetensors", segmenter())
    assert torch.equal(again(X), model(X))


@pytest.mark.parametrize("method", ["tent", "tribe"])
def test_methods_that_need_logits_say_so(method: str) -> None:
    model = tribe.adapt(segmenter(), method)
    before = model.digest()
    with pytest.raises(ValueError, match="returned"):
        model(X)
    assert model.digest() == before


@pytest.mark.parametrize("wrapped", [{"time": "auto"}, {"guard": True}, {"health": True}])
def test_what_stands_around_a_method_needs_logits(wrapped) -> None:
    with pytest.raises(ValueError, match="logits"):
        tribe.adapt(segmenter(), "bn", **wrapped)(X)
    with pytest.raises(ValueError, match="something"):
        tribe.adapt(Backbone(segmenter(), dense=True), "bn", **wrapped)


def test_fleets_runs_and_restrictions_refuse_what_may_be_no_logits(few_digits) -> None:
    net = Backbone(segmenter(), dense=True)
    with pytest.raises(ValueError, match="returns"):
        tribe.fleet(net, "bn")
    with pytest.raises(ValueError, match="outputs"):
        net.restricted_to([0, 1])
    stream = Stream(tribe.datasets.create("mnist", data=few_digits), tribe.scenarios.create("iid"))
    with pytest.raises(ValueError, match="predictions"):
        run(net, tribe.methods.create("bn"), stream)


def test_an_output_without_a_row_for_each_image_is_refused() -> None:
    for odd in (lambda y: y.mean(), lambda y: y[:, 0, 0, 0], lambda y: y[1:]):
        model = tribe.adapt(Around(lambda inner, x, odd=odd: odd(inner(x)), segmenter()), "bn")
        with pytest.raises(ValueError, match="expected"):
            model(X)


def test_the_doctor_names_the_methods_that_take_it() -> None:
    report = tribe.doctor(segmenter(), X)
    assert "take any tensor with a row for each image" in "\n".join(report.problems)
