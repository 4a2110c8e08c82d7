"""Networks that treat their images, their layers or their output in unusual ways adapt correctly, or are refused."""

import pytest
import torch
from torch import nn

import tribe
from method_runs import repeated
from networks import Around, Viewed, apart, batch, learner, side_by_side
from tribe.core.backbone import Backbone
from tribe.core.graphs import Captured, CapturedSegments
from tribe.testing import CLASSES, images, ready, small_network

PLAIN = [name for name in tribe.methods.names() if tribe.methods.get(name).needs is None]


def after(net, method="tribe", steps=3, change=lambda x: x):
    adapter = learner(net, method)
    for seed in range(steps):
        adapter(change(batch(seed)))
    return adapter.predict(change(batch(9)))


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("method", PLAIN)
def test_a_network_that_writes_into_its_images_adapts_as_one_that_does_not(method):
    within, beside = Around(lambda inner, x: inner(x.sub_(0.5))), Around(lambda inner, x: inner(x - 0.5))
    assert torch.equal(after(within, method, change=channels_last), after(beside, method, change=channels_last))


@pytest.mark.parametrize("look", [lambda net, x: tribe.doctor(net, x), lambda net, x: learner(net)(x)])
def test_the_callers_images_are_never_written_into(look):
    x = channels_last(batch())
    before = x.clone()
    look(Around(lambda inner, x: inner(x.mul_(2).sub_(1))), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("method", PLAIN)
def test_a_network_may_flatten_with_view(method):
    expected = after(Viewed(lambda x: x.flatten(1)), method)
    assert torch.allclose(after(Viewed(), method), expected, atol=1e-4)


@pytest.mark.parametrize(("kind", "method"), [(Captured, "tribe"), (CapturedSegments, "rotta")])
def test_what_was_recorded_is_recorded_anew_where_the_weights_have_moved(kind, method):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, CLASSES)

        def forward(self, x):
            x = self.norm(self.conv(x)).relu()
            return self.fc(x.view(len(x), -1).unflatten(1, (6, -1)).mean(2))

    net = Backbone(Small())
    steps, state = kind(ready(method), net, repeated), ready(method).init(net)
    small, large = torch.rand(1, 4, 3, 3, 3), torch.rand(1, 4, 3, 8, 8)
    _, state = steps.step(state, small)
    assert (steps.recorded, net.moves) == (1, 0)
    ready("source").predict(net, ready("source").init(net), large)
    assert net.moves == 1
    _, state = steps.step(state, small)
    assert steps.recorded == 2
    steps.step(state, small)
    assert steps.recorded == 2


def test_what_is_exported_lies_in_memory_as_what_was_given():
    adapter = learner(Viewed())
    for seed in range(3):
        adapter(batch(seed))
    plain = adapter.export()
    assert torch.allclose(plain(batch(9)), adapter.predict(batch(9)), atol=1e-5)
    assert plain.conv.weight.is_contiguous()
    last = learner(small_network().to(memory_format=torch.channels_last)).export()
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not last[0].weight.is_contiguous()
    assert learner(small_network()).export()[0].weight.is_contiguous()


def group_normed():
    """As `small_network`, with GroupNorm."""
    torch.manual_seed(0)
    norm, pool = nn.GroupNorm(2, 6), nn.AdaptiveAvgPool2d(1)
    nn.init.normal_(norm.weight)
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), pool, nn.Flatten(), nn.Linear(6, CLASSES))


@pytest.mark.parametrize("method", ["bn", "tent", "tribe", "rotta", "cotta"])
@pytest.mark.parametrize("inner", [small_network, group_normed], ids=["batch", "group"])
def test_views_that_lie_a_batch_apart_are_told_apart(inner, method):
    outcomes = []
    for run in (apart, side_by_side):
        adapter = learner(Around(run, inner()), method, streams=2)
        told = [adapter(images(2, 6, seed)) for seed in range(3)]
        outcomes.append(torch.stack(told))
    assert torch.allclose(*outcomes, atol=1e-4)


class Frames(nn.Module):
    """Folds two frames of each image into the batch, behind or before layers that need more than one image."""

    def __init__(self, first, flat):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.first, self.norm, self.flat = nn.Conv2d(3, 6, 3), first, nn.BatchNorm2d(6), flat
        self.last, self.fc = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = torch.stack((x, x.flip(-1)), 1).flatten(0, 1)
        x = self.norm(self.first(self.conv(x))).relu().mean((2, 3), keepdim=True).unflatten(0, (-1, 2)).mean(1)
        return self.fc(self.last(self.flat(x)))


@pytest.mark.parametrize("first", [nn.Identity(), nn.BatchNorm2d(6, track_running_stats=False)], ids=["plain", "batch"])
@pytest.mark.parametrize("flat", [lambda x: x.flatten(1), torch.squeeze], ids=["flatten", "squeeze"])
def test_frames_are_told_apart_whatever_the_other_layers_are(first, flat):
    net = Frames(first, flat).eval()
    adapter = learner(net, "bn")
    assert adapter(batch()).shape == (6, CLASSES)
    assert torch.allclose(learner(net, "source")(batch()), net(batch()), atol=1e-5)


def test_views_in_an_order_that_cannot_be_told_are_refused():
    def shuffled(inner, x):
        both = torch.cat((x, x.flip(-1)))
        return inner(both[torch.randperm(len(both))])[: len(x)]

    with pytest.raises(ValueError, match="determined"):
        learner(Around(shuffled))(batch())


def test_another_default_precision_changes_nothing():
    def mixed():
        torch.manual_seed(0)
        norms = nn.BatchNorm2d(6, affine=False), nn.BatchNorm2d(6)
        body = nn.Conv2d(3, 6, 3), norms[0], nn.Conv2d(6, 6, 3), norms[1], nn.ReLU()
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))

    net, expected = mixed(), after(mixed())
    torch.set_default_dtype(torch.float64)
    try:
        told = after(net)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(told, expected)


def test_a_gate_over_channels_is_no_sign_of_other_images():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.inner = nn.Conv1d(1, 1, 3, padding=1), small_network()

        def forward(self, x):
            return self.inner(x * self.gate(x.mean((2, 3)).unsqueeze(1)).sigmoid().squeeze(1)[..., None, None])

    adapter = learner(Gated())
    assert adapter(batch(size=1)).shape == (1, CLASSES)
    assert adapter(images(1, 3)).shape == (1, 3, CLASSES)


def test_the_doctor_takes_networks_that_fold_frames_into_the_batch():
    assert not tribe.doctor(Around(side_by_side), batch()).problems
    assert not tribe.doctor(Around(apart), batch()).problems


class Head(nn.Module):
    """Has a layer of training only, registered last."""

    def __init__(self):
        super().__init__()
        self.inner, self.projection = small_network(), nn.Linear(CLASSES, 128)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Around(lambda inner, x: (inner(x), x)), "picks them out"),
        (Head(), r"tribe\.Backbone\(model, classifier=\.\.\.\)"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Linear(4, 5)), "only InstanceNorm2d"),
    ],
    ids=["tuple", "projection", "instance"],
)
def test_errors_say_what_to_do(net, words):
    with pytest.raises((TypeError, ValueError), match=words):
        learner(net)(batch())
