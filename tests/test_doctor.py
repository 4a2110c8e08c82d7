"""The doctor: what is wrong with a network or with its images is named before anything adapts."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tribe
from tribe.testing import CLASSES, images, small_network

X = images(1, 6, 0)[0]


def problems(model: nn.Module, x: Any = X) -> str:
    return "\n".join(tribe.doctor(model, x).problems)


class Around(nn.Module):
    """Runs a network in some way of its own."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.run = small_network(), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner, x)


def test_a_sound_network_has_no_problems() -> None:
    assert problems(small_network()) == ""
    assert problems(Around(lambda inner, x: inner(x))) == ""


@pytest.mark.parametrize("name", ["0.weight", "1.running_mean", "1.weight", "4.running_var", "8.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(name: str, value: float) -> None:
    net = small_network()
    net.state_dict()[name].view(-1)[0] = value
    for x in (None, X):
        report = tribe.doctor(net, x)
        assert f"not finite: {name}" in "\n".join(report.problems)
        json.dumps(report.as_dict(), allow_nan=False)  # a number that is none is not told as one


def test_many_numbers_that_are_not_finite_are_counted() -> None:
    net = small_network()
    for t in net.state_dict().values():
        t.mul_(float("nan")) if t.is_floating_point() else None
    assert "0.weight, 1.weight, 1.bias, 1.running_mean and 8 more" in problems(net, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_probabilities_in_place_of_logits_are_named(dtype: torch.dtype) -> None:
    net = small_network()
    report = tribe.doctor(nn.Sequential(net, nn.Softmax(-1)).to(dtype), X)
    assert len(report.problems) == 1
    assert "gives probabilities" in report.problems[0]
    assert "Take off its Softmax" in report.problems[0]
    assert report.confidence == pytest.approx(tribe.doctor(net, X).confidence, abs=1e-5 if dtype.itemsize > 2 else 1e-1)
    assert problems(nn.Sequential(net, nn.LogSoftmax(-1))) == ""  # logits as good as any


def test_one_output_is_named() -> None:
    assert "one number an image" in problems(small_network(classes=1))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X.numpy(), "images are ndarray; expected a tensor. For an array: torch.from_numpy(x)"),
        ([X], "images are list; expected a tensor"),
        (X[:0], "no images in x, of shape (0, 3, 8, 8)"),
        (X[0, 0, 0, 0], "no images in x, of shape ()"),
    ],
)
def test_what_are_no_images_is_said(x: Any, words: str) -> None:
    report = tribe.doctor(small_network(), x)
    assert report.adaptable
    assert words in "\n".join(report.problems)


def without_gradients(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return inner(x)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (without_gradients, "gives logits without a gradient"),
        (lambda inner, x: inner[8:](inner[:8](x).detach()), "gives logits without a gradient"),
        (lambda inner, x: checkpoint(inner, x, use_reentrant=False), "(turn checkpointing off)"),
        (lambda inner, x: inner(x) + inner[1].weight.sum(), "reads 'weight' of its normalisation layer 'inner.1'"),
    ],
    ids=["no_grad", "detach", "checkpoint", "weight"],
)
def test_networks_that_no_method_could_move_are_found(run: Callable[[Any, Tensor], Tensor], words: str) -> None:
    assert words in problems(Around(run))
    with torch.inference_mode():
        assert words in problems(Around(run))


def test_a_network_that_needs_no_gradient_needs_none() -> None:
    norm = nn.BatchNorm2d(4, affine=False)
    model = Around(without_gradients)
    model.inner = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(144, 3))
    assert "gradient" not in problems(model)


def test_layers_that_are_not_called_are_listed() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.aux = small_network(), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.aux(x) if self.training else x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the report says it
        report = tribe.doctor(Auxiliary(), X)
    assert report.left_alone == {"aux": "the network did not call it on these images"}
    assert report.problems == []
    assert "left as it is: aux (the network did not call it" in str(report)


def test_a_network_whose_layers_are_never_called_is_a_problem() -> None:
    other = small_network()
    assert "called none of its normalisation layers" in problems(Around(lambda inner, x: other(x)))


def test_a_backbone_is_examined_as_its_model_is() -> None:
    net = tribe.Backbone(small_network())
    assert tribe.doctor(net, X) == tribe.doctor(small_network(), X)
    assert not any(slot._forward_pre_hooks for slot in net.slots)


def test_an_adapter_is_told_what_to_give() -> None:
    report = tribe.doctor(tribe.adapt(small_network()), X)
    assert not report.adaptable
    assert "of an adapter give its .net" in report.problems[0]
    assert tribe.doctor(tribe.adapt(small_network()).export(), X).classes == CLASSES


def test_a_compiled_model_is_told_what_to_give() -> None:
    report = tribe.doctor(torch.jit.script(small_network()), X)
    assert not report.adaptable
    assert "give the eager module" in report.problems[0]
