"""PL, LAME, EATA, SAR and ROID against slow loops over ordinary layers, and at their edges."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from method_runs import DOUBLE, assert_affine, batches, network, play
from plain_methods import entropy_of, ordinary
from recordings import GOLDENS, Net, fisher, part
from tribe import methods
from tribe.core.augment import Augment
from tribe.core.backbone import Backbone
from tribe.core.rules import Frozen, PerBatch
from tribe.core.state import digest, stream
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.methods.lame import nearest
from tribe.methods.sar import adapted_channels
from tribe.testing import images


def entropies(logits):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


# -- PL ---------------------------------------------------------------------------------------------------------------


def test_pl_is_adam_on_the_cross_entropy_with_its_own_argmax():
    net, xs = network(), batches()
    outputs, state = play(methods.create("pl"), net, xs)
    module, weights, biases = ordinary(net)
    optimiser = torch.optim.Adam([*weights, *biases], lr=1e-3)
    for x, y in zip(xs, outputs, strict=True):
        logits = module(x[0])
        torch.testing.assert_close(y[0], logits.detach(), rtol=0, atol=1e-10)
        optimiser.zero_grad()
        nn.functional.cross_entropy(logits, logits.argmax(1)).backward()
        optimiser.step()
    assert_affine(state.affine, weights, biases)


# -- LAME -------------------------------------------------------------------------------------------------------------


def lame_by_hand(logits, features, neighbours=5, rounds=100, settled=1e-8):
    """Straight from the equations, an image and a class at a time."""
    count, classes = logits.shape
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    unary = -np.log(p + 1e-10)
    f = features / np.linalg.norm(features, axis=1, keepdims=True)
    near = []
    for i in range(count):
        distances = sorted((float(np.sqrt(((f[i] - f[j]) ** 2).sum())), j) for j in range(count) if j != i)
        near.append([j for _, j in distances[:neighbours]])

    def softmax(z):
        e = np.exp(z - z.max())
        return e / e.sum()

    y, old = np.stack([softmax(-u) for u in unary]), math.inf
    for step in range(rounds):
        pull = np.stack([sum((y[j] for j in near[i]), np.zeros(classes)) for i in range(count)])
        y = np.stack([softmax(pull[i] - unary[i]) for i in range(count)])
        energy = (unary * y - pull * y + y * np.log(np.maximum(y, 1e-20))).sum()
        if step >= 2 and abs(energy - old) <= settled * abs(old):
            break
        old = energy
    return y


def source_outputs(net, x):
    logits, features, _ = net(x, *net.source(len(x)), Frozen())
    return logits[0].numpy(), features[0].numpy()


@pytest.mark.parametrize("batch", [1, 2, 3, 6, 7, 24])
@pytest.mark.parametrize("classes", [2, 4])
def test_lame_equals_a_slow_loop(batch, classes):
    net = network(classes)
    x = images(1, batch, 3, DOUBLE)
    (y,), _ = play(methods.create("lame"), net, [x])
    np.testing.assert_allclose(y[0].numpy(), lame_by_hand(*source_outputs(net, x)), atol=1e-9)


@pytest.mark.parametrize(
    "fields", [{"neighbours": 2}, {"rounds": 1}, {"rounds": 5}, {"settled": 1e-2}, {"settled": 9.0}]
)
def test_every_field_of_lame_does_what_it_says(fields):
    net, x = network(sure=0.1), images(1, 12, 1, DOUBLE)  # unsure: neighbours need many rounds to agree
    (y,), _ = play(methods.create("lame", **fields), net, [x])
    np.testing.assert_allclose(y[0].numpy(), lame_by_hand(*source_outputs(net, x), **fields), atol=1e-9)
    (plain,), _ = play(methods.create("lame"), net, [x])
    assert not torch.allclose(y, plain, atol=1e-7), "the field changed nothing: the comparison says nothing"


def test_a_stream_that_has_settled_stays_while_another_goes_on():
    """One stream settles in three rounds (nobody to pull at it), the other takes many."""
    net = network(sure=0.1)
    x = images(2, 12, 1, DOUBLE)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, 1:] = False
    method = methods.create("lame")
    y, _ = method.step(net, method.init(net, 2), x, valid)
    np.testing.assert_allclose(y[0, :1].numpy(), lame_by_hand(*source_outputs(net, x[:1, :1])), atol=1e-12)
    np.testing.assert_allclose(y[1].numpy(), lame_by_hand(*source_outputs(net, x[1:])), atol=1e-9)


def test_copies_of_one_image_are_each_others_neighbours_and_stay_copies():
    net = network()
    x = torch.cat((images(1, 1, 5, DOUBLE).expand(1, 7, 3, 8, 8), images(1, 5, 6, DOUBLE)), 1)
    near = nearest(torch.from_numpy(source_outputs(net, x)[1])[None], torch.ones(1, 12, dtype=torch.bool), 5)
    assert near.ids[0, :7].lt(7).all(), "a copy has other neighbours than copies"
    assert not near.ids[0].eq(torch.arange(12)[:, None]).any(), "an image is its own neighbour"
    (y,), _ = play(methods.create("lame"), net, [x])
    torch.testing.assert_close(y[0, :7], y[0, :1].expand(7, -1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(y[0].numpy(), lame_by_hand(*source_outputs(net, x)), atol=1e-9)


def test_lame_refuses_features_that_are_not_one_an_image():
    class Crops(nn.Module):
        """Classifies two halves of each image and takes the mean."""

        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm2d(3), nn.Linear(96, 4)

        def forward(self, x):
            halves = torch.cat(self.norm(x).chunk(2, 2))
            return self.fc(halves.flatten(1)).unflatten(0, (2, -1)).mean(0)

    net, method = Backbone(Crops()), methods.create("lame")
    with pytest.raises(ValueError, match="sees each image once"):
        method.step(net, method.init(net), images(1, 4))


# -- EATA -------------------------------------------------------------------------------------------------------------


def eata_by_hand(net, xs, fisher, e0=0.4, d=0.05, alpha=2000.0, lr=1e-3):
    module, weights, biases = ordinary(net)
    start = [p.detach().clone() for p in (*weights, *biases)]
    optimiser, mean, steps = torch.optim.Adam([*weights, *biases], lr=lr), None, 0
    for x in xs:
        logits = module(x[0])
        classes = logits.shape[1]
        kept = []
        for i, p in enumerate(logits.detach().softmax(1)):
            alike = 0.0 if mean is None else float(mean @ p / mean.norm() / p.norm())
            if float(entropy_of(logits[i].detach())) < e0 * math.log(classes) and (mean is None or abs(alike) < d):
                kept.append(i)
        if not kept:
            continue
        loss = 0
        for i in kept:
            doubt = entropy_of(logits[i])
            loss = loss + math.exp(e0 * math.log(classes) - float(doubt.detach())) * doubt / len(kept)
        for p, p0, f in zip((*weights, *biases), start, fisher, strict=True):
            loss = loss + alpha * (f * (p - p0) ** 2).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seen = logits.detach()[kept].softmax(1).mean(0)
        mean = seen if mean is None else 0.9 * mean + 0.1 * seen
        steps += 1
    return weights, biases, mean, steps


@pytest.mark.parametrize(("classes", "d"), [(4, 0.6), (4, 0.05), (2, 0.9)])
def test_eata_equals_a_slow_loop(classes, d):
    net, xs = network(classes, sure=3.0), batches(8)
    pieces = [torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=DOUBLE) for n in (6, 8, 6, 8)]
    tensors = {"weight": torch.cat(pieces[:2]), "bias": torch.cat(pieces[2:])}
    knowledge = Knowledge("eata", tensors, net.fingerprint(exact=False), {"batches": 4})
    method = methods.create("eata", classes=classes, d=d, alpha=20.0, knowledge=knowledge)
    _, state = play(method, net, xs)
    weights, biases, mean, steps = eata_by_hand(net, xs, pieces, d=d, alpha=5.0)
    assert 0 < steps < len(xs) or d > 0.5, "every batch was learned from: the choice was not tested"
    assert int(state.adam.steps) == steps
    torch.testing.assert_close(state.mean[0], mean, rtol=0, atol=1e-10)
    assert_affine(state.affine, weights, biases)


def test_some_streams_step_and_others_stay_bit_for_bit():
    """The first stream's moving mean is like every prediction, so that nothing is new to it."""
    net, x = network(dtype=torch.float32, sure=3.0), images(2, 8)
    method = methods.create("eata", classes=4, alpha=0.0)
    _, state = play(method, net, [images(2, 8, 1)])
    state = state._replace(mean=torch.stack((torch.full((4,), 0.25), torch.zeros(4))))
    _, after = method.step(net, state, x)
    for field in ("affine", "adam"):
        old, new = (getattr(stream(s, 0, 2), field) for s in (state, after))
        assert digest(new) == digest(old), f"{field} moved although nothing was kept"
    assert torch.equal(after.mean[0], state.mean[0])
    assert int(after.key.clock[0]) == int(state.key.clock[0]) + 1
    assert int(after.adam.steps[1]) == int(state.adam.steps[1]) + 1
    assert not torch.equal(after.affine.weight[1], state.affine.weight[1])
    assert float(after.info.trusted[0]) == 0 < float(after.info.trusted[1])


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize("fisher", ["mean", "sum"])
def test_eata_studied_and_played_equals_plain_pytorch(fisher, dtype):
    """From source images to adapted parameters, with an ordinary module, backward() and torch.optim alone."""
    net, xs, source = network(dtype=dtype, sure=3.0), batches(6, dtype=dtype), batches(9, dtype=dtype)[6:]
    module, weights, biases = ordinary(net)
    total = [torch.zeros_like(p) for p in (*weights, *biases)]
    for x in source:
        module.zero_grad()
        logits = module(x[0])
        nn.functional.cross_entropy(logits, logits.argmax(1)).backward()
        for squares, p in zip(total, (*weights, *biases), strict=True):
            squares += p.grad**2
    wanted = [squares / len(source) if fisher == "mean" else squares for squares in total]

    fields = {"classes": 4, "d": 2.0, "alpha": 20.0}
    method = methods.create("eata", **fields, fisher=fisher)
    method = dataclasses.replace(method, knowledge=method.study(net, [(x[0], None) for x in source]))
    _, state = play(method, net, xs)
    weights, biases, _, steps = eata_by_hand(net, xs, wanted, d=2.0, alpha=20.0)
    assert int(state.adam.steps) == steps == len(xs)
    assert method.knowledge.spec == {"images": 21, "batches": 3}
    assert_affine(state.affine, weights, biases, atol=1e-6)
    other = dataclasses.replace(method, fisher="sum" if fisher == "mean" else "mean")
    assert (play(other, net, xs)[1].affine.weight - state.affine.weight).abs().max() > 1e-5, "the penalty did nothing"


@pytest.mark.parametrize("batches_", [None, 0, -1, 2.5, "31", True])
def test_a_mean_over_unknown_batches_is_refused(batches_):
    net = network()
    zeros = {name: torch.zeros(net.channels, dtype=DOUBLE) for name in ("weight", "bias")}
    knowledge = Knowledge(
        "eata", zeros, net.fingerprint(exact=False), {} if batches_ is None else {"batches": batches_}
    )
    with pytest.raises(
        KnowledgeError, match=rf"these are {batches_!r}, expected .*tribe source eata, or set fisher='sum'"
    ):
        methods.create("eata", classes=4, knowledge=knowledge).init(net)
    methods.create("eata", classes=4, knowledge=knowledge, fisher="sum").init(net)
    methods.create("eata", classes=4, knowledge=knowledge, alpha=0.0).init(net)


def test_study_reproduces_the_recorded_fisher_information():
    """The recording took batches of 32 source images and left out the first."""
    if not GOLDENS.is_dir():
        pytest.skip("the full recordings are not beside this clone")
    for file in ("methods", "methods_k100"):
        with np.load(GOLDENS / f"{file}_open.npz") as recording:
            data = dict(recording)
        net = Backbone(Net(part(data, "net")))
        source = torch.from_numpy(data["source_x"]).split(32)[1:]
        studied = methods.create("eata", classes=10).study(net, [(x, None) for x in source]).tensors
        recorded = fisher(data, net)["knowledge"].tensors
        for name in ("weight", "bias"):
            torch.testing.assert_close(
                studied[name], recorded[name], rtol=1e-4, atol=1e-5 * float(recorded[name].max())
            )


# -- SAR --------------------------------------------------------------------------------------------------------------


def sar_by_hand(net, xs, adapted, e0=0.4, rho=0.05, lr=0.00025, momentum=0.9):
    """Both passes with ordinary layers; `adapted` says which layers move."""
    module, weights, biases = ordinary(net)
    parameters = [p for i in adapted for p in (weights[i], biases[i])]
    optimiser, mean = torch.optim.SGD(parameters, lr=lr, momentum=momentum), None
    for x in xs:
        here = [p.detach().clone() for p in parameters]
        doubt = entropies(module(x[0]))
        reliable = doubt < e0 * math.log(4)
        if reliable.any():
            slope = torch.autograd.grad(doubt[reliable].mean(), parameters)
            length = math.sqrt(sum(float((g.detach() ** 2).sum()) for g in slope))
            with torch.no_grad():
                for p, g in zip(parameters, slope, strict=True):
                    p += rho * g / length
        doubt = entropies(module(x[0]))
        still = reliable & (doubt < e0 * math.log(4))
        slope = torch.autograd.grad(doubt[still].mean() if still.any() else 0 * doubt.sum(), parameters)
        with torch.no_grad():
            for p, p0, g in zip(parameters, here, slope, strict=True):
                p.copy_(p0)
                p.grad = g
        optimiser.step()
        if still.any():
            loss = float(doubt[still].detach().mean())
            mean = loss if mean is None else 0.9 * mean + 0.1 * loss
    return weights, biases, mean


@pytest.mark.parametrize(("tail", "adapted"), [(0.0, (0, 1)), (0.5, (0,)), (("1",), (1,))])
def test_sar_steps_from_here_along_the_slope_of_the_worst_place_nearby(tail, adapted):
    net, xs = network(sure=2.0), batches(6)
    method = methods.create("sar", classes=4, lr=0.05, rho=0.3, e_m=0.0, frozen_tail=tail)
    outputs, state = play(method, net, xs)
    weights, biases, mean = sar_by_hand(net, xs, adapted, lr=0.05, rho=0.3)
    assert_affine(state.affine, weights, biases)
    assert float(state.mean) == pytest.approx(mean, abs=1e-10)
    origin = net.source()[0].weight
    for i, columns in enumerate((slice(0, 6), slice(6, 14))):
        assert torch.equal(state.affine.weight[:, columns], origin[:, columns]) == (i not in adapted)
    flat, _ = play(dataclasses.replace(method, rho=0.0), net, xs)
    assert not torch.allclose(flat[-1], outputs[-1], atol=1e-6), "the ball changed nothing"


def test_a_collapsed_stream_goes_back_to_the_source_and_the_others_go_on():
    net, x = network(dtype=torch.float32, sure=3.0), images(2, 8)
    method = methods.create("sar", classes=4, lr=0.01)
    _, state = play(dataclasses.replace(method, e_m=0.0), net, [images(2, 8, seed) for seed in (1, 2)])
    assert state.velocity.weight.any(1).all(), "nothing was reliable: there is nothing to recover from"
    state = state._replace(mean=torch.tensor([0.0, 5.0]))
    _, after = method.step(net, state, x)
    source = net.source()[0]
    assert torch.equal(after.affine.weight[:1], source.weight)
    assert torch.equal(after.affine.bias[:1], source.bias)
    assert not after.velocity.weight[0].any()
    assert float(after.mean[0]) == -1
    assert not torch.equal(after.affine.weight[1:], source.weight)
    assert float(after.mean[1]) > 4
    assert float(after.info.distance[0]) == 0 < float(after.info.distance[1])


def test_where_nothing_is_reliable_only_momentum_moves_sar():
    net, xs = network(sure=3.0), batches(2)
    method = methods.create("sar", classes=4, lr=0.01, e_m=0.0)
    _, state = play(method, net, xs)
    assert state.velocity.weight.any()
    unsure = dataclasses.replace(method, e0=0.0)
    _, after = unsure.step(net, state, images(1, 6, 8, DOUBLE))
    torch.testing.assert_close(after.velocity.weight, 0.9 * state.velocity.weight)
    torch.testing.assert_close(after.affine.weight, state.affine.weight - 0.01 * 0.9 * state.velocity.weight)
    assert torch.equal(after.mean, state.mean)


def test_the_frozen_tail_is_named_or_counted():
    net = network()
    for names, words in ((("layer4",), "the network has 1, 4"), (("1", "4"), "none can adapt")):
        with pytest.raises(ValueError, match=words):
            methods.create("sar", frozen_tail=names).init(net)
    stages = nn.ModuleDict(
        {f"layer{i}": nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for i in (1, 2, 3, 4, 41)}
    )

    class Staged(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = stages

        def forward(self, x):
            for stage in self.stages.values():
                x = stage(x)
            return x.mean((2, 3))

    adapted = adapted_channels(Backbone(Staged()), ("stages.layer4",))
    assert adapted.tolist() == [1] * 9 + [0] * 3 + [1] * 3, "a stage of a longer name was taken for it"
    assert adapted_channels(Backbone(Staged()), 0.25).tolist() == [1] * 12 + [0] * 3


# -- ROID -------------------------------------------------------------------------------------------------------------


def view(x):
    return 0.9 * x.flip(-1) + 0.05


def roid_by_hand(net, xs, lr=1e-3, sgd=False, alpha=0.99, beta=0.9, tau=1 / 3):
    module, weights, biases = ordinary(net)
    parameters = [*weights, *biases]
    start = [p.detach().clone() for p in parameters]
    if sgd:
        optimiser = torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)
    else:
        optimiser = torch.optim.Adam(parameters, lr=lr)
    mean, outputs = None, []
    for x in xs:
        logits = module(x[0])
        count, classes = logits.shape
        p = logits.detach().softmax(1)
        mean = torch.full((classes,), 1 / classes, dtype=DOUBLE) if mean is None else mean
        diversity = torch.stack([1 - mean @ q / mean.norm() / q.norm() for q in p])
        diversity = (diversity - diversity.min()) / (diversity.max() - diversity.min())
        certainty = torch.stack([-entropy_of(z) for z in logits.detach()])
        certainty = (certainty - certainty.min()) / (certainty.max() - certainty.min())
        kept = [i for i in range(count) if diversity[i] >= diversity.mean()]
        other = module(view(x[0])[kept])
        loss = 0
        for row, i in enumerate(kept):
            q = logits[i].softmax(0).clamp(max=0.99)
            ratio = -sum(v * torch.log(v / (1 - v) + 1e-5) for v in q)
            a, b = logits[i], other[row]
            agree = -0.5 * (a.softmax(0) * b.log_softmax(0)).sum() - 0.5 * (b.softmax(0) * a.log_softmax(0)).sum()
            loss = loss + math.exp(float(diversity[i] * certainty[i]) / tau) * (ratio + agree) / count
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for now, then in zip(parameters, start, strict=True):
                now.copy_(alpha * now + (1 - alpha) * then)
        mean = beta * mean + (1 - beta) * p.mean(0)
        outputs.append(logits.detach())
    return weights, biases, mean, outputs


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("classes", [2, 4])
def test_roid_equals_a_slow_loop(classes, optimizer):
    net, xs = network(classes), batches(5)
    lr = 1e-3 if optimizer == "adam" else 0.005
    method = methods.create("roid", classes=classes, lr=lr, optimizer=optimizer, prior="none", augment=view)
    outputs, state = play(method, net, xs)
    weights, biases, mean, expected = roid_by_hand(net, xs, lr, optimizer == "sgd")
    for y, logits in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y[0], logits.softmax(-1), rtol=0, atol=1e-10)
    assert_affine(state.affine, weights, biases)
    torch.testing.assert_close(state.mean[0], mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["logits", "posteriors"])
@pytest.mark.parametrize("batch", [1, 2, 7, 24])
def test_the_prior_of_the_batch_reweights_the_outputs(kind, batch):
    net, x = network(), images(1, batch, 2, DOUBLE)
    plain, corrected = (methods.create("roid", classes=4, prior=prior) for prior in ("none", kind))
    p = plain.predict(net, plain.init(net), x)[0]
    logits = net(x, *net.source(), PerBatch()).logits[0]
    prior = [sum(float(q[k]) for q in p) / batch for k in range(4)]
    gamma = max(1 / batch, 1 / 4) / max(prior)
    smooth = torch.tensor([(v + gamma) / (1 + 4 * gamma) for v in prior], dtype=DOUBLE)
    expected = (logits * smooth).softmax(-1) if kind == "logits" else (p * smooth) / (p * smooth).sum(-1, keepdim=True)
    torch.testing.assert_close(corrected.predict(net, corrected.init(net), x)[0], expected)


def test_images_all_alike_all_count():
    """Diversity and certainty have no spread then: a division by zero in plain code."""
    net = network()
    x = images(1, 1, 0, DOUBLE).expand(1, 6, 3, 8, 8)
    outputs, state = play(methods.create("roid", classes=4), net, [x, x])
    assert float(state.info.trusted) == 1
    assert all(y.isfinite().all() for y in outputs)
    assert not torch.equal(state.affine.weight, net.source()[0].weight)


def test_the_view_is_drawn_from_the_clock_of_the_stream():
    """The same seed plays the same views, another seed others; without consistency no seed matters."""
    net, xs = network(), batches(3)
    assert isinstance(methods.create("roid", classes=4).augment, Augment)
    for consistency in (True, False):
        method = methods.create("roid", classes=4, consistency=consistency)
        ends = [play(method, net, xs, method.init(net, seed=seed))[1].affine for seed in (1, 1, 2)]
        assert digest(ends[0]) == digest(ends[1])
        assert (digest(ends[0]) == digest(ends[2])) is not consistency
