"""The backbone: the caller's network with normalisation as an argument, its features, weights and fingerprint."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import tribe
from places import ROOT
from tribe import norms
from tribe.core.backbone import Backbone
from tribe.core.moments import scale_and_shift
from tribe.core.rules import Recorded
from tribe.core.state import Affine
from tribe.norms import Norm
from zoo import BALANCED, BATCH, FROZEN, Doubled, build, different_rows, each_model, gap, images, logits, small


@each_model
def test_frozen_rule_equals_the_model_in_eval_mode(name: str) -> None:
    model, x = build(name), images(name)
    net = Backbone(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert gap(net(x, *net.source(), FROZEN).logits[0], logits(model(x[0]))) <= 1e-5


@pytest.mark.parametrize("shape", [(3, 8, 8), (40, 32, 32)])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("rows", "batch", "every"), [(1, 1, 1), (1, 3, 1), (1, 3, 2), (2, 3, 2)])
def test_a_pass_records_the_moments_of_images(
    rows: int, batch: int, every: int, last: bool, shape: tuple[int, int, int]
) -> None:
    """Catches moments of another layout of memory, and of other images than the first of ``every`` so many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(shape[0]), nn.Flatten(), nn.Linear(math.prod(shape), 4))
    x, net = torch.rand(rows * batch, *shape), Backbone(model)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    with torch.no_grad():
        _, _, moments = net(x.unflatten(0, (rows, batch)), *net.source(rows), Recorded(every=every))
    pixels = x.double().unflatten(0, (rows, batch))[:, ::every]
    assert moments.mean.shape == pixels.shape[:3]
    assert gap(moments.mean, pixels.mean((3, 4))) < 1e-6
    assert gap(moments.var, pixels.var((3, 4), correction=0)) < 1e-6


def test_a_pass_of_the_source_has_the_bits_of_the_network() -> None:
    """Catches rounding that the network does not have: adapting at speed 0 must change no prediction."""
    model = build("BatchNorm2d").to(memory_format=torch.channels_last)
    x, net = images("BatchNorm2d"), Backbone(model)
    with torch.no_grad():
        expected = model(x[0].contiguous(memory_format=torch.channels_last))
        assert torch.equal(net(x, *net.source(), FROZEN).logits[0], expected)
        assert torch.equal(net(x, *net.source(), Recorded(1, 2)).logits[0], expected)


@each_model
def test_batch_rule_equals_the_model_with_its_batch_norms_in_train_mode(name: str) -> None:
    model, x = build(name), images(name)
    net = Backbone(model)
    ours, before = net(x, *net.source(), BATCH), net.source()[1]
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    assert gap(ours.logits[0], logits(model(x[0]))) <= 1e-5
    assert gap(ours.stats.mean, before.mean) == gap(ours.stats.var, before.var) == 0


@pytest.mark.parametrize("norm", [FROZEN, BATCH, norms.create("robust", alpha=0.3), BALANCED], ids=str)
@each_model
def test_rows_together_equal_each_alone(name: str, norm: Norm) -> None:
    """Catches rows that fold into the batch and unfold in another order."""
    net = Backbone(build(name).double())
    for batch in (5, 1):
        x, arguments = images(name, 3, batch, dtype=torch.float64), different_rows(net, norm, 3, batch)
        together = net(x, *arguments)
        assert gap(together.logits[0], together.logits[1]) > 1e-4
        for r in range(3):
            alone = net(x[r : r + 1], *arguments.row(r))
            assert gap(together.logits[r], alone.logits[0]) < 1e-10
            assert max(gap(a[r], b[0]) for a, b in zip(together.stats, alone.stats, strict=True)) < 1e-10
            if alone.features is not None:
                assert together.features is not None
                assert gap(together.features[r], alone.features[0]) < 1e-10


@each_model
def test_gradients_reach_the_affine_parameters_of_every_layer(name: str) -> None:
    """And are zero where a layer has no such parameter."""
    net = Backbone(build(name).double())
    affine, stats = net.source(2)
    affine = Affine(*(t.requires_grad_() for t in affine))
    x = images(name, 2, dtype=torch.float64)
    if not net.has_affine:
        with pytest.raises(ValueError, match="normalisation"):
            net(x, affine, stats, BATCH)
        return
    y = net(x, affine, stats, BATCH).logits
    grads = torch.autograd.grad(y.log_softmax(-1).square().sum(), affine)
    for slot in net.slots:
        columns = slice(start := sum(s.channels for s in net.slots[: slot.index]), start + slot.channels)
        for grad, parameter in zip(grads, (slot.layer.weight, slot.layer.bias), strict=True):
            part = grad[:, columns]
            assert (part == 0).all() if parameter is None else (part.abs().amax(1) > 1e-9).all(), slot.name


@each_model
def test_the_callers_model_is_never_changed(name: str) -> None:
    """Values, gradients, requires_grad, training flags and hooks, before and after a forward and a backward."""
    model = build(name).train()
    model.register_forward_hook(lambda *_: None)
    first = next(model.parameters())
    first.requires_grad_(False)

    def everything() -> list[Any]:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
        kept = {k: (v.clone(), v._version, v.stride()) for k, v in model.state_dict().items()}
        flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
        return [kept, hooks, flags, [(type(m), m.training) for m in model.modules()]]

    before = everything()
    net = Backbone(model)
    arguments = different_rows(net, BALANCED, 2)
    y = net(images(name, 2).requires_grad_(), *arguments).logits
    y.square().sum().backward()
    net.plain(*net.source()).double()
    after = everything()
    for (a, *rest), (b, *others) in zip(before[0].values(), after[0].values(), strict=True):
        assert torch.equal(a, b)
        assert rest == others
    assert before[1:] == after[1:]


@each_model
def test_plain_round_trip_is_an_ordinary_model(name: str) -> None:
    """With the source's rows it computes what the source does; with other rows, what the backbone does with them."""
    model, x = build(name), images(name)
    net = Backbone(model)
    plain = net.plain(*net.source())
    assert gap(logits(plain(x[0])), logits(model(x[0]))) <= 1e-5
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
    assert list(plain.state_dict()) == list(model.state_dict())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in plain.modules())
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    assert gap(logits(net.plain(affine, stats)(x[0])), net(x, affine, stats, FROZEN).logits[0]) <= 1e-5
    assert gap(logits(net.plain(affine, None)(x[0])), net(x, affine, stats, BATCH).logits[0]) <= 1e-5
    assert gap(logits(plain(x[0])), logits(model(x[0]))) <= 1e-5  # the first one stayed as it was


def test_exported_layers_have_parameters_of_their_own() -> None:
    """Catches a copy into a tensor that another layer shares."""
    torch.manual_seed(0)
    model, x = small(lambda _: nn.BatchNorm2d(6)), images("BatchNorm2d")
    model[3], model[8] = nn.Conv2d(6, 6, 3), nn.Linear(6, 4)
    model.eval()
    model[1].weight, model[1].running_var = model[4].weight, model[4].running_var
    net = Backbone(model)
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5
    affine, stats, *_ = different_rows(net, FROZEN, 1)
    for _ in range(2):
        for kept, norm in ((stats, FROZEN), (None, BATCH)):
            assert gap(net.plain(affine, kept)(x[0]), net(x, affine, stats, norm).logits[0]) <= 1e-5
    assert gap(net(x, *net.source(), FROZEN).logits[0], model(x[0])) <= 1e-5  # nothing was taken from the caller's


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@each_model
def test_precision_of_the_model_is_kept(name: str, dtype: torch.dtype) -> None:
    """For every precision of the images; statistics and affine parameters are float32 at least."""
    model, x = build(name).to(dtype), images(name)
    net = Backbone(model)
    affine, stats = net.source(1, 4)
    y, _, stats = net(x, affine, stats, BALANCED, torch.zeros(1, 6, dtype=torch.int64))
    assert y.dtype == net.dtype == dtype
    exact = dtype == torch.float64
    if any(slot.layer.weight is not None for slot in net.slots):
        assert affine.weight.dtype == affine.bias.dtype == (torch.float64 if exact else torch.float32)
    if stats.mean.numel():
        assert stats.mean.dtype == stats.var.dtype == (torch.float64 if exact else torch.float32)
    theirs = logits(model(x[0].to(dtype)))
    assert gap(net(x, *net.source(), FROZEN).logits[0], theirs) <= (1e-12 if exact else 5e-2)


def test_dropout_stays_off_after_train() -> None:
    net, x = Backbone(build("dropout").train()), images("dropout")
    assert net.train() is net
    assert not any(m.training for m in net.modules())
    assert torch.equal(net(x, *net.source(), FROZEN).logits, net(x, *net.source(), FROZEN).logits)


def input_of(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    seen = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    handle.remove()
    return seen[-1]


@pytest.mark.parametrize(
    ("name", "found"), [("BatchNorm2d", "8"), ("nested", "head"), ("TransformerEncoder", "head"), ("video", "head")]
)
def test_features_are_the_classifiers_input_found_automatically(name: str, found: str) -> None:
    model, x = build(name), images(name, 2)
    net = Backbone(model)
    assert (net.classifier, net.classes) == (found, 4)
    features = net(x, *net.source(2), FROZEN).features
    assert features is not None
    for r in range(2):
        assert gap(features[r], input_of(model, model.get_submodule(found), x[r])) <= 1e-5


def test_features_are_the_input_of_the_layer_named_or_of_a_convolution_of_one_pixel() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*small()[:7], nn.Conv2d(8, 4, 1), nn.Flatten()).eval(), images("BatchNorm2d")
    for named, index in ((None, 7), ("6", 6)):  # the input of the pooling has pixels, which are averaged
        net = Backbone(model, classifier=named)
        features = net(x, *net.source(), FROZEN).features
        assert net.classes == (4 if named is None else None)
        assert features is not None
        assert gap(features[0], input_of(model, model[index], x[0]).mean((2, 3))) <= 1e-5


def test_there_are_no_features_where_frames_are_classified_one_by_one() -> None:
    """Catches features of B T frames that are returned as those of B images."""
    net, x = Backbone(build("video by frame")), images("video by frame")
    assert net(x, *net.source(), FROZEN).features is None


def test_an_unknown_classifier_is_refused_with_the_known_layers() -> None:
    with pytest.raises(ValueError, match="features"):
        Backbone(small(), classifier="fc")


def test_fingerprint_tells_models_apart_and_nothing_else() -> None:
    model = build("BatchNorm2d")
    mark = Backbone(model).fingerprint()
    assert (
        mark
        == Backbone(copy.deepcopy(model)).fingerprint()
        == Backbone(nn.DataParallel(copy.deepcopy(model))).fingerprint()
    )
    assert mark == Backbone(copy.deepcopy(model).to(memory_format=torch.channels_last).train()).fingerprint()
    net = Backbone(model)
    net(images("BatchNorm2d"), *net.source(1, 4), BALANCED, torch.zeros(1, 6, dtype=torch.int64))
    assert mark == net.fingerprint()
    for key in ("0.weight", "1.weight", "4.bias", "1.running_mean", "4.running_var", "8.bias"):
        other = copy.deepcopy(model)
        other.state_dict()[key].view(-1)[0] += 1e-3
        assert Backbone(other).fingerprint() != mark, key


def test_fingerprint_tells_eps_apart() -> None:
    """The usual eps is not hashed: fingerprints from before eps was hashed must not change."""
    model = build("BatchNorm2d")
    model[4] = Doubled(8)  # left alone; it counts all the same
    mark = Backbone(model).fingerprint()
    for index, eps in ((1, 1e-3), (4, 1e-3), (1, 1e-6)):
        other = copy.deepcopy(model)
        other[index].eps = eps
        assert Backbone(other).fingerprint() != mark
        assert Backbone(other).fingerprint(exact=False) != Backbone(model).fingerprint(exact=False)


def test_the_fingerprint_of_the_committed_network_is_the_one_in_the_results() -> None:
    place = tribe.models.find("compact", "mnist", ROOT)
    if place is None:
        pytest.skip("its weights are not here")
    net = Backbone(tribe.models.load("compact", place))
    assert net.fingerprint() == "939b0640950ccd5ac9bba7820258a128"


def test_source_hands_out_copies() -> None:
    """Catches an adaptation that changes the stored source."""
    net = Backbone(build("BatchNorm2d"))
    affine, stats = net.source(2, 3)
    assert affine.weight.shape == (2, 14)
    assert stats.mean.shape == (2, 3, 14)
    for t in (*affine, *stats):
        t.add_(1)
    assert gap(net.source(2, 3)[0].weight + 1, affine.weight) == 0
    assert gap(net.source(2, 3)[1].var + 1, stats.var) == 0


def test_one_image_with_another_stride_has_the_same_gradients() -> None:
    """Catches torch's batch norm, which mistakes the order of memory of a single image from a view."""
    pixels = torch.rand(3 * 4 * 9, generator=torch.Generator().manual_seed(0))
    x = pixels.as_strided((3, 1, 4, 3, 3), (36, 4, 1, 12, 4))
    scale, shift = (torch.rand(3, 1, 4).requires_grad_() for _ in range(2))
    cotangent = torch.rand(3, 1, 4, 3, 3)
    found = torch.autograd.grad(scale_and_shift(x, scale, shift), (scale, shift), cotangent)
    assert gap(found[0], (cotangent * x).sum((3, 4))) < 1e-5
    assert gap(found[1], cotangent.sum((3, 4))) < 1e-5
