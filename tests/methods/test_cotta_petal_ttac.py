"""The methods that adapt all weights, against slow loops over ordinary modules written from the papers."""

import copy
import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import method_runs
import tribe
from method_runs import play
from tribe import methods
from tribe.core import all_weights as weights
from tribe.core.all_weights import WeightLayout
from tribe.core.backbone import Backbone
from tribe.core.rng import Key
from tribe.core.state import leaves, stream, tree_map
from tribe.knowledge import KnowledgeError
from tribe.methods import ttac
from tribe.testing import CLASSES, images, informed, small_network

ALL = ("cotta", "petal", "ttac")
ALWAYS, NEVER = 1.5, 0.0  # p_th: a confidence is never above one, nor below zero
batches = partial(method_runs.batches, batch=6, dtype=torch.float32)


def create(name, **fields):
    return informed(methods.create(name, classes=CLASSES, **fields))


def training(model):
    """A copy that normalises each batch with its own statistics."""
    return copy.deepcopy(model).train()


# -- CoTTA ----------------------------------------------------------------------------------------------------------


def test_the_branch_is_each_streams_own():
    """One stream that the source is sure about beside one that it is not, the threshold between them."""
    model = small_network()
    xs = torch.cat((images(1, 6, 0), images(1, 6, 3)))
    sure = [training(model)(x).softmax(1).amax(1).mean().item() for x in xs]
    assert abs(sure[0] - sure[1]) > 1e-3
    method = create("cotta", p_th=sum(sure) / 2, n=4)
    net = Backbone(model)
    state = method.init(net, 2, seed=3)
    logits, _ = method.step(net, state, xs)
    for i in range(2):
        branch = dataclasses.replace(method, p_th=ALWAYS if sure[i] < method.p_th else NEVER)
        other = dataclasses.replace(method, p_th=NEVER if sure[i] < method.p_th else ALWAYS)
        alone = branch.init(net, 1, seed=3 + i)
        assert torch.allclose(logits[i], branch.step(net, alone, xs[i : i + 1])[0][0], atol=1e-5)
        assert not torch.allclose(logits[i], other.step(net, alone, xs[i : i + 1])[0][0], atol=1e-3)


def test_confidence_is_measured_on_valid_images_only():
    """Padding that the source is surer, or less sure, about must not choose the branch."""
    net, x = Backbone(small_network()), images(1, 6)
    method = create("cotta", n=3)
    state = method.init(net)
    valid = torch.ones(1, 12, dtype=torch.bool)
    valid[:, 6:] = False
    padded = torch.cat((x, torch.rand(1, 6, 3, 8, 8)), 1)
    source = net(x, *net.source(), method.deployed(net, state).norm).logits.softmax(-1).amax(-1).mean().item()
    for p_th in (source - 1e-4, source + 1e-4):
        near = dataclasses.replace(method, p_th=p_th)
        assert torch.allclose(near.predict(net, state, padded, valid)[:, :6], near.predict(net, state, x), atol=1e-5)


def test_no_two_views_are_alike():
    method = create("cotta", n=6, chunk=4)
    x, key = images(1, 3), Key(torch.tensor([1]), torch.tensor([2]))
    views = torch.cat([method.views(x, key, 0, some) for some in (range(4), range(4, 6))])
    assert views.shape == (6, 3, 3, 8, 8)
    later = torch.cat([method.views(x, key._replace(clock=key.clock + 1), 0, some) for some in (range(4), range(4, 6))])
    everything = torch.cat((views, later)).flatten(1)
    assert (torch.cdist(everything, everything) + 99 * torch.eye(12)).min() > 0.01


def test_random_restore_has_its_rate_keeps_adams_moments_and_can_be_replayed():
    model = small_network()
    net = Backbone(model)
    kept, forgetful = create("cotta", p=0.0, p_th=NEVER), create("cotta", p=0.2, p_th=NEVER)
    x = torch.cat((images(1, 6, 1), images(1, 6, 2)))
    start = kept.init(net, 2, seed=4)
    _, without = kept.step(net, start, x)
    _, state = forgetful.step(net, start, x)
    after, before, source = (weights.flat(p) for p in (state.student, without.student, WeightLayout(net).source(2)))
    back = after != before
    assert torch.equal(after[back], source[back]), "a weight went somewhere else than to the source"
    assert torch.equal(weights.flat(state.teacher), weights.flat(without.teacher)), "the teacher follows first"
    touched = before != source  # a weight without a gradient is at the source whatever happens
    share = (back.sum(1) / touched.sum(1)).tolist()
    assert all(abs(s - 0.2) < 5 * math.sqrt(0.16 / touched[0].sum().item()) for s in share)
    assert not torch.equal(back[0], back[1]), "two streams forget the same weights"
    for name, t in leaves(state.adam).items():
        assert torch.equal(t, leaves(without.adam)[name])
    _, again = forgetful.step(net, start, x)
    assert torch.equal(weights.flat(again.student), after)
    alone = forgetful.init(net, 1, seed=5)
    _, alone = forgetful.step(net, alone, x[1:])
    assert torch.equal(weights.flat(alone.student) == source[:1], (after == source)[1:])
    _, later = forgetful.step(net, start._replace(key=start.key._replace(clock=start.key.clock + 1)), x)
    assert not torch.equal(weights.flat(later.student), after), "the same weights are forgotten in every step"


def test_affine_parameters_are_restored_too():
    net = Backbone(small_network())
    _, state = create("cotta", p=1.0, p_th=NEVER).step(net, create("cotta").init(net), images(1, 6))
    assert torch.equal(weights.flat(state.student), weights.flat(WeightLayout(net).source()))
    assert state.adam.first.weights.abs().max() > 0
    assert not torch.equal(weights.flat(state.teacher), weights.flat(WeightLayout(net).source()))


# -- PETAL ----------------------------------------------------------------------------------------------------------


def test_petal_forgets_the_weights_below_each_streams_quantile():
    """It is over weights that exist: columns for the scale and shift a BatchNorm does not have get no gradient."""
    bare = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, affine=False), nn.Conv2d(8, 6, 1), nn.GroupNorm(2, 6))
    net = Backbone(nn.Sequential(*bare, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)))
    method = informed(methods.create("petal", classes=CLASSES, p_th=NEVER, spw=1e-3, delta=0.1), net)
    _, state = method.step(net, method.init(net, 2), images(2, 6))
    layout = WeightLayout(net)
    for i in range(2):
        squared, after, origin = (
            torch.cat([t.flatten() for t in layout.unpack(stream(p, i, 2)).values()]).double()
            for p in (tree_map(torch.square, state.adam.first), state.student, layout.source(2))
        )
        assert len(squared) == 24 + 8 + 48 + 6 + 12 + 6 * CLASSES + CLASSES
        assert np.array_equal(after == origin, squared < np.quantile(squared, 0.1))


def test_petals_loss_holds_the_student_to_the_posterior():
    """The gradient that Adam saw against autograd through the whole loss, on an ordinary module."""
    model = small_network(dtype=torch.float64)
    net = Backbone(model)
    generator = torch.Generator().manual_seed(0)
    mean, var = (
        {n: make(p.shape, generator=generator, dtype=torch.float64) for n, p in model.named_parameters()}
        for make in (torch.randn, torch.rand)
    )
    tensors = {f"mean/{n}": t for n, t in mean.items()} | {f"var/{n}": t for n, t in var.items()}
    known = tribe.knowledge.Knowledge("petal", tensors, net.fingerprint(exact=False))
    method = methods.create("petal", classes=CLASSES, spw=0.01, p_th=NEVER, knowledge=known)
    x = images(1, 6, dtype=torch.float64)
    _, state = method.step(net, method.init(net), x)
    student, target = training(model), training(model)(x[0]).detach()
    loss = -(target.softmax(1) * student(x[0]).log_softmax(1)).sum(1).mean()
    for name, p in student.named_parameters():
        loss = loss + 0.01 * 0.5 * ((p - mean[name]) ** 2 / (var[name] + 1e-6)).sum()
    loss.backward()
    seen = WeightLayout(net).unpack(state.adam.first)
    for name, p in student.named_parameters():
        assert torch.allclose(seen[name] / 0.1, p.grad, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("every", [1, 2])
def test_the_posterior_is_where_sgd_goes(every):
    model = small_network(dtype=torch.float64)
    net = Backbone(model)
    source = [(images(1, 8, seed, torch.float64)[0], torch.arange(8) % CLASSES) for seed in range(6)]
    method = methods.create("petal", classes=CLASSES, swag_lr=0.05, swag_momentum=0.8, swag_every=every)
    known = method.study(net, iter(source))
    plain = training(model)
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.8)
    snapshots = []
    for count, (x, y) in enumerate(source, 1):
        optimiser.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimiser.step()
        if count % every == 0:
            snapshots.append({name: p.detach().clone() for name, p in plain.named_parameters()})
    for name, _ in plain.named_parameters():
        path = torch.stack([s[name] for s in snapshots])
        assert torch.allclose(known.tensors[f"mean/{name}"], path.mean(0), rtol=0, atol=1e-10)
        assert torch.allclose(known.tensors[f"var/{name}"], path.var(0, correction=0), rtol=1e-6, atol=1e-12)
    assert known.spec == {
        **{"images": 48, "snapshots": 6 // every, "swag_lr": 0.05, "swag_momentum": 0.8, "swag_every": every},
    }


def test_a_posterior_needs_two_snapshots():
    net = Backbone(small_network())
    with pytest.raises(ValueError, match="two snapshots"):
        methods.create("petal", classes=CLASSES).study(net, [(images(1, 4)[0], torch.zeros(4, dtype=torch.int64))])


@pytest.mark.parametrize("name", ["petal", "ttac"])
def test_source_knowledge_travels_in_a_file(name, tmp_path):
    net = Backbone(small_network())
    method = create(name)
    method.knowledge.save(tmp_path / "known.safetensors")
    loaded = methods.create(name, classes=CLASSES, knowledge=tmp_path / "known.safetensors")
    assert loaded == method
    (y, _), (again, _) = (m.step(net, m.init(net), images(1, 6)) for m in (method, loaded))
    assert torch.equal(y, again)


# -- TTAC -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", ["batch", "frozen"])
def test_the_source_gaussians_are_those_of_the_features(statistics):
    model = small_network()
    net = Backbone(model)
    xs = [x[0] for x in batches(4, batch=16)]
    method = methods.create("ttac", classes=CLASSES, statistics=statistics)
    known = method.study(net, [(x, None) for x in xs]).tensors
    module = training(model) if statistics == "batch" else copy.deepcopy(model).eval()
    with torch.no_grad():
        features = [module[:-1](x) for x in xs]
        label = torch.cat([module[-1](f).argmax(1) for f in features]).numpy()
    features = torch.cat(features).double().numpy()
    assert np.allclose(known["mean"], features.mean(0), atol=1e-5)
    assert np.allclose(known["cov"], np.cov(features.T, bias=True), atol=1e-5)
    for k in range(CLASSES):
        rows = features[label == k]
        mean, cov = (rows.mean(0), np.cov(rows.T, bias=True)) if len(rows) else (known["mean"], known["cov"])
        assert np.allclose(known["class_mean"][k], mean, atol=1e-5)
        assert np.allclose(known["class_cov"][k], cov, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "clusters"), [({"statistics": "frozen"}, CLASSES), ({"class_aware": False, "lr": 1e-3}, 0)]
)
def test_ttac_learns_with_frozen_statistics_or_without_classes(fields, clusters):
    """Without classes it aligns all features; with frozen statistics it predicts as the source does first."""
    model = small_network()
    net, method, x = Backbone(model), create("ttac", **fields), images(1, 6)
    y, state = method.step(net, method.init(net), x)
    assert torch.allclose(y[0], model(x[0]), atol=1e-5) is ("statistics" in fields)
    assert state.clusters.mean.shape[1] == clusters
    assert not torch.equal(state.weights, method.init(net).weights)


@pytest.mark.parametrize(
    ("studied", "played", "words"),
    [
        ({"statistics": "frozen"}, {"statistics": "batch"}, "features under frozen statistics; this TTAC uses batch"),
        ({"class_aware": False}, {"class_aware": True}, "describes 0 classes; this TTAC aligns 4"),
    ],
)
def test_knowledge_of_other_features_is_refused(studied, played, words):
    with pytest.raises(KnowledgeError, match=words):
        dataclasses.replace(create("ttac", **studied), **played).init(Backbone(small_network()))


def test_more_members_in_a_batch_than_a_cluster_remembers_leave_a_covariance():
    """The published rate would make it negative."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    old = ttac.Gaussians(torch.zeros(1, 3).double(), torch.eye(3).double()[None], torch.zeros(1, dtype=torch.int64))
    members = torch.ones(1, 50, dtype=torch.bool)
    mean, cov, new = ttac.follow(old, torch.tensor([0]), features, members, memory=8)
    assert torch.allclose(mean[0], features.mean(0))
    assert torch.allclose(cov[0], features.T.cov(correction=0))
    assert int(new.seen) == 50


def test_covariances_too_large_to_keep_are_refused():
    net = Backbone(nn.Sequential(nn.BatchNorm1d(2048), nn.Linear(2048, 1000)))
    source = [(torch.rand(4, 2048), None)] * 2
    with pytest.raises(ValueError, match=r"2048 x 2048 features for each of 1000 classes.*class_aware=False"):
        methods.create("ttac", classes=1000).study(net, source)
    known = methods.create("ttac", classes=1000, class_aware=False).study(net, source).tensors
    assert known["cov"].shape == (2048, 2048)


def test_ttac_leaves_every_linear_layer_as_it_is():
    """Hidden ones too, not the classifier alone."""
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    net = Backbone(nn.Sequential(*layers))
    method = informed(methods.create("ttac", classes=CLASSES, lr=1e-2), net)
    _, state = play(method, net, batches(2))
    (mine,) = method.deployed(net, state).weights
    assert mine.keys() == {"0.weight", "0.bias"}
    assert not torch.equal(mine["0.weight"], net.model[0].weight)


# -- all three ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("streams", "rows"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ALL)
def test_as_many_rows_of_images_as_streams_are_asked_for(name, streams, rows):
    net, method = Backbone(small_network()), create(name)
    state, words = method.init(net, streams), f"x has {rows} rows and the state {streams} streams; expected a row"
    with pytest.raises(ValueError, match=words):
        method.step(net, state, images(rows, 6))
    if name != "ttac":  # whose prediction is a plain pass
        with pytest.raises(ValueError, match=words):
            method.predict(net, state, images(rows, 6))


@pytest.mark.parametrize("name", ALL)
def test_what_is_exported_predicts_as_the_plain_pass_does(name):
    model = small_network()
    method = dataclasses.replace(create(name), lr=1e-2, **({} if name == "ttac" else {"p_th": NEVER, "alpha": 0.5}))
    adapter = tribe.adapt(model, method, streams=2)
    for seed in range(4):
        adapter(images(2, 6, seed))
    x = images(2, 6, 9)
    predicted = adapter.predict(x)
    for i in range(2):
        plain = adapter.export(stream=i)
        assert torch.allclose(plain(x[i]), predicted[i], atol=1e-5)
        assert not torch.allclose(plain(x[i]), training(model)(x[i]), atol=1e-3), "the source was exported"
        assert not any("slots" in type(m).__module__ for m in plain.modules())


@pytest.mark.parametrize("name", ALL)
def test_autocast_is_taken(name):
    net = Backbone(small_network())
    method = create(name)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, state = play(method, net, batches(2))
    assert all(y.isfinite().all() for y in outputs)
    assert all(t.isfinite().all() for t in leaves(stream(state, 0, 1)).values())
