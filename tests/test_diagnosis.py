"""The doctor: what is wrong with a network or with its images is named before anything adapts."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tribe
from networks import Around, Frames
from simulated_gpu import on_gpu, simulate
from tribe import methods
from tribe.core import fusion, kernels
from tribe.core.state import count_bytes
from tribe.testing import CLASSES, images, small_network

X = images(1, 6, 0)[0]


def problems(model, x=X, **options):
    return "\n".join(tribe.doctor(model, x, **options).problems)


def test_a_sound_network_has_no_problems():
    report = tribe.doctor(small_network(), X)
    assert report.adaptable
    assert [layer.name for layer in report.layers] == ["1", "4"]
    assert (report.classes, report.features) == (CLASSES, 8)
    assert not any(report.methods.values())
    assert report.problems == []
    assert problems(Around(lambda inner, x: inner(x))) == ""


@pytest.mark.parametrize("name", ["0.weight", "1.running_mean", "1.weight", "4.running_var", "8.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(name, value):
    net = small_network()
    net.state_dict()[name].view(-1)[0] = value
    for x in (None, X):
        report = tribe.doctor(net, x)
        assert f"not finite: {name}" in "\n".join(report.problems)
        json.dumps(dataclasses.asdict(report), allow_nan=False)  # a number that is none is not told as one


MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@pytest.mark.parametrize(
    ("trained_on", "words"),
    [(lambda x: x, "divided by 255"), (lambda x: (x - MEAN) / STD, "normalised with ImageNet's mean and std")],
)
def test_images_in_another_scale_than_those_of_the_training_are_named(trained_on, words):
    net, given = small_network().train(), 255 if "255" in words else 1
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
    for seed in range(60):
        net(trained_on(images(16, 4, seed).flatten(0, 1)))
    assert words in problems(net.eval(), given * images(16, 4, 99).flatten(0, 1))


def test_many_numbers_that_are_not_finite_are_counted():
    net = small_network()
    for t in net.state_dict().values():
        t.mul_(float("nan")) if t.is_floating_point() else None
    assert "0.weight, 1.weight, 1.bias, 1.running_mean and 8 more" in problems(net, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_probabilities_in_place_of_logits_are_named(dtype):
    net = small_network()
    report = tribe.doctor(nn.Sequential(net, nn.Softmax(-1)).to(dtype), X)
    assert len(report.problems) == 1
    assert "returns probabilities" in report.problems[0]
    assert "Remove its Softmax" in report.problems[0]
    assert report.confidence == pytest.approx(tribe.doctor(net, X).confidence, abs=1e-5 if dtype.itemsize > 2 else 1e-1)
    assert problems(nn.Sequential(net, nn.LogSoftmax(-1))) == ""  # logits as good as any
    assert "one number an image" in problems(small_network(classes=1))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X > 0.5, "torch.bool: convert them: images.float()"),
        ((X * 255).byte(), "torch.uint8: divide by 255"),
        (X.index_fill(0, torch.tensor(0), torch.nan), "1 of 6 images are not finite"),
        (X.numpy(), "images are ndarray; expected a tensor. For an array: torch.from_numpy(x)"),
        ([X], "images are list; expected a tensor"),
        (X[:0], "no images in x, of shape (0, 3, 8, 8)"),
        (X[0, 0, 0, 0], "no images in x, of shape ()"),
    ],
)
def test_what_are_no_images_is_said(x, words):
    report = tribe.doctor(small_network(), x)
    assert report.adaptable
    assert words in "\n".join(report.problems)


def without_gradients(inner, x):
    with torch.no_grad():
        return inner(x)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (without_gradients, "returns logits without a gradient"),
        (lambda inner, x: inner[8:](inner[:8](x).detach()), "returns logits without a gradient"),
        (lambda inner, x: checkpoint(inner, x, use_reentrant=False), "(turn checkpointing off)"),
        (lambda inner, x: inner(x) + inner[1].weight.sum(), "reads 'weight' of its normalisation layer 'inner.1'"),
    ],
    ids=["no_grad", "detach", "checkpoint", "weight"],
)
def test_networks_that_no_method_could_move_are_found(run, words):
    assert words in problems(Around(run))
    with torch.inference_mode():
        assert words in problems(Around(run))


def test_a_network_that_needs_no_gradient_needs_none():
    norm = nn.BatchNorm2d(4, affine=False)
    model = Around(without_gradients)
    model.inner = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(144, 3))
    assert "gradient" not in problems(model)


def test_layers_that_are_not_called_are_listed():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.aux = small_network(), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.inner(self.aux(x) if self.training else x)

    net = tribe.Backbone(Auxiliary())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the report says it
        report = tribe.doctor(net, X)
    with pytest.warns(UserWarning, match="adapt"):
        tribe.adapt(net)(X)
    assert report.left_alone == {"aux": "the network did not call it on these images"}
    assert report.problems == []
    assert "left as they are: aux: the network did not call it" in str(report)


def test_a_network_whose_layers_are_never_called_is_a_problem():
    other = small_network()
    assert "called none of its normalisation layers" in problems(Around(lambda inner, x: other(x)))


def test_a_backbone_is_examined_as_its_model_is():
    net = tribe.Backbone(small_network())
    assert tribe.doctor(net, X) == tribe.doctor(small_network(), X)
    assert not any(slot._forward_pre_hooks for slot in net.slots)


@pytest.mark.parametrize(
    ("made", "words"), [(tribe.adapt, "of an adapter give its .net"), (torch.jit.script, "give the eager module")]
)
def test_adapters_and_compiled_models_are_told_what_to_give(made, words):
    report = tribe.doctor(made(small_network()), X)
    assert not report.adaptable
    assert words in report.problems[0]
    assert tribe.doctor(tribe.adapt(small_network()).export(), X).classes == CLASSES


# -- which methods fit ------------------------------------------------------------------------------------------------


def network(norm, *head):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), *head, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


NETWORKS = {
    "all there": lambda: small_network(),
    "no affine parameters": lambda: network(nn.BatchNorm2d(6, affine=False), nn.Conv2d(6, CLASSES, 1)),
    "no classifier": lambda: network(nn.BatchNorm2d(6), nn.Conv2d(6, CLASSES, 3)),
    "a classifier of parts": Frames,
    "no statistics": lambda: network(nn.GroupNorm(2, 6), nn.Conv2d(6, CLASSES, 1)),
}


def learns(net, name):
    """Whether a method with all it must know takes a few batches, and is another than the source model then."""
    trusting = {"c_0": 0.0} if name == "sotta" else {}  # it learns from confident images, and noise makes none
    method, x = methods.create(name, classes=CLASSES, **trusting), images(1, 64, 0)[0]
    try:
        if method.needs:
            method = dataclasses.replace(method, knowledge=method.study(net, [(x, torch.arange(64) % CLASSES)] * 2))
        adapter = tribe.adapt(net, method)
        adapter(x)
        return name == "source" or not torch.equal(adapter(x), tribe.adapt(net, "source", classes=CLASSES)(x))
    except ValueError:
        return False


@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("kind", NETWORKS)
def test_the_doctor_is_right_about_every_method(kind, name):
    net = tribe.Backbone(NETWORKS[kind]())
    report = tribe.doctor(net, X)
    if kind == "no statistics" and name not in ("bn", "bdn", "bank", "bank-tribe"):
        assert report.methods[name] == ""  # though it moves little in two batches of which nothing is sure
    else:
        assert (report.methods[name] == "") == learns(net, name), report.methods[name]
    if kind != "a classifier of parts":  # which a pass alone can tell
        assert tribe.doctor(net).methods == report.methods


def test_methods_that_must_know_the_source_data_are_told():
    report = tribe.doctor(small_network())
    assert report.needs == {name: methods.get(name).needs for name in ("eata", "petal", "petta", "ttac")}
    assert "fit once they know the source data (tribe source): eata, petal, petta, ttac" in str(report)
    assert "eata" not in next(line for line in str(report).splitlines() if "methods that fit:" in line)
    assert "eata" not in tribe.doctor(NETWORKS["no affine parameters"]()).needs


def test_the_size_of_a_state_is_what_a_stream_keeps():
    net = tribe.Backbone(small_network(7))
    packed = methods.create("tribe", classes=7, class_stats="packed")
    others = {name: methods.create(name, classes=7) for name in ("tribe", "tent", "bn")}
    expected = {"tribe with class_stats='packed'": packed, **others}
    assert tribe.doctor(net).state_bytes == {name: count_bytes(m.init(net)) for name, m in expected.items()}
    assert re.search(r"state of a stream: tribe \d+(\.\d+)? kB\n", str(tribe.doctor(net)))
    large = nn.Sequential(nn.Conv2d(3, 500, 1), nn.BatchNorm2d(500), nn.Flatten(), nn.Linear(500, 5000))
    words = r"tribe 60 MB; leaner: tribe with class_stats='packed' 15\.\d MB, tent .* kB"
    assert re.search(words, str(tribe.doctor(large)))
    without = tribe.doctor(NETWORKS["no affine parameters"]())
    assert "tribe" not in without.state_bytes
    assert "state of a stream" not in str(without)


def test_what_kernels_compute_together_is_told_where_they_run():
    with fusion.using(True):
        report = tribe.doctor(small_network(), X)
        held = tribe.doctor(Around(lambda inner, x: inner(x) if len(x) == 2 else inner(x + 0)), X[:1])
    assert report.fusion == "computed together with normalisation: 2 ReLU"
    assert "\n  fusion: computed together with normalisation: 2 ReLU\n" in str(report)
    assert held.fusion.startswith("nothing is fused: a pass differed from the trial")


def test_without_a_gpu_one_line_says_what_is_off():
    report = tribe.doctor(small_network(), X)
    assert report.graphs == report.kernels == report.fusion
    assert "\n  CUDA graphs, kernels, fusion: off: the network is on cpu" in str(report)


def test_on_a_gpu_the_state_of_graphs_and_kernels_is_told(monkeypatch):
    simulate(monkeypatch)
    constant = Around(lambda inner, x: inner(x - torch.tensor([0.5], device=x.device)))
    with on_gpu(1):
        net = small_network()
        report, bare, refused = (tribe.doctor(net, x) for net, x in ((net, X), (net, None), (constant, X)))
    assert (report.graphs, bare.graphs) == ("available", "available")
    assert "captured (RuntimeError: cannot copy" in refused.graphs
    assert report.kernels == kernels.state()
    assert report.fusion == "off: it needs kernels"
    assert "\n  CUDA graphs: available\n  kernels: off: " in str(report)


def test_layers_of_one_kind_that_adapt_in_other_ways_are_told_apart():
    net = network(nn.BatchNorm2d(6), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5, affine=False), nn.Conv2d(5, 4, 1))
    report = str(tribe.doctor(net))
    assert "1 x BatchNorm2d, 6 channels: statistics and affine parameters" in report
    assert "1 x BatchNorm2d, 5 channels: statistics\n" in report


# -- made-up and odd images -------------------------------------------------------------------------------------------


def test_noise_is_not_judged_but_what_the_network_does_with_it_is():
    net = small_network()
    net[1].running_mean += 100
    net[8].weight.detach().zero_()
    assert "deviations off" in problems(net)
    assert "close to uniform" in problems(net)
    assert problems(net, noise=True) == ""
    assert "could not take images" in problems(net, X[:, :1], noise=True)
    assert "returns probabilities" in problems(nn.Sequential(net, nn.Softmax(-1)), noise=True)


@pytest.mark.usefixtures("nowhere")
def test_the_command_does_not_judge_the_images_it_makes_up():
    from commands import assert_refused, succeeded, tribe_command  # skips without the command's extra

    code = "import tribe\nnet = tribe.models.create('resnet8')\nnet.bn1.running_mean += 100\n"
    Path("far.py").write_text(code)
    succeeded(tribe_command("doctor", "far.py:net", "--shape", "3,32,32"))
    for shape in ("3,1000000,1000000", f"3,8,{10**30}", f"1,{2**26 + 1}"):
        result = tribe_command("doctor", "far.py:net", "--shape", shape)
        assert_refused(result, "numbers; expected 67,108,864 at most")


def diagnosed(labels, x):
    """The accuracy, and the problems that labels show."""
    report = tribe.doctor(small_network(), x, labels)
    return report.accuracy, "\n".join(problem for problem in report.problems if "label" in problem)


def test_a_network_whose_classes_are_in_another_order_is_recognised():
    x = images(1, 64, 0)[0]
    right = small_network()(x).argmax(1)
    wrong = (right + 1) % CLASSES
    assert diagnosed(right, x) == (1.0, "")
    assert "accuracy on these images: 100%" in str(tribe.doctor(small_network(), x, right))
    accuracy, words = diagnosed(wrong, x)
    assert accuracy == 0
    assert "0 of 64 labelled images are predicted right, which is not better than chance" in words
    assert "classes in the order of the labels?" in words
    assert diagnosed(torch.where(torch.arange(64) < 48, right, wrong), x) == (0.75, "")
    assert diagnosed(wrong[:8], x[:8]) == (0, ""), "eight may all be hard"
    assert diagnosed(torch.full((64,), -1), x) == (None, "")
    assert "labels reach 4" in diagnosed(torch.full((64,), CLASSES), x)[1]
    assert "expected 64 integers" in diagnosed(right[:3], x)[1]
    x[:48] = torch.nan
    assert diagnosed(right, x) == (1.0, ""), "labels of images that cannot be used are left out"
