"""The guard: what a method may learn from, how fast, and how far its predictions follow."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tribe
from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import Affine, Stats, clone, leaves, stream
from tribe.health.alarms import KINDS
from tribe.health.guard import Guard, limit, pull_back
from tribe.health.probe import distance_of_images, distance_of_statistics, shift_weight
from tribe.methods import Deployed, Frozen, PerBatch
from tribe.norms.batch import MixedBatch
from tribe.testing import check_method, ready, small_network
from tribe.testing.shared import small_backbone
from watching import pictures

OFF = {"lean_half": 0.0, "lean_most": 1.0, "lean_batch": 1.0, "pull": 0.0, "speed": None, "good_every": None}


@pytest.mark.parametrize("name", ["tribe", "tent", "source"])
def test_a_guarded_method_keeps_the_contract(name):
    """Its own statistics, those of each batch, and nothing that learns; the slow test has all methods."""
    check_method(ready(f"{name}+guard"))


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names())
def test_every_guarded_method_keeps_the_contract(name):
    # SAR and DeYO trust none of the small network's predictions with mixed statistics, so nothing could be tested.
    check_method(ready(f"{name}+guard", **({"lean_batch": 1.0} if name in ("sar", "deyo") else {})))


def test_an_adapter_takes_a_guard_between_method_and_filter():
    adapter = tribe.adapt(small_network(), guard=True, time="auto")
    assert adapter.method.name == "tribe+guard+time"
    assert tribe.adapt(small_network(), guard=Guard(skip=False)).method.guard.skip is False
    assert tribe.adapt(small_network(), guard=False).method.name == "tribe"
    assert tribe.adapt(small_network(), "tribe+time", guard=True).method == adapter.method
    with pytest.raises(ValueError, match="already"):
        tribe.adapt(small_network(), "tribe+guard", guard=True)
    with pytest.raises(TypeError, match="guard"):
        tribe.adapt(small_network(), guard="yes")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"probe": -1}, "probe"),
        ({"calibration": 3}, "tribe.calibrate"),
        ({"calibration": "nowhere.safetensors"}, "no source knowledge"),
        ({"lean_half": -1.0}, "lean_half"),
        ({"lean_half": 0.2, "lean_single": 0.1}, "lean_single"),
        ({"lean_single": 0.1}, "lean_single"),
        ({"lean_most": 1.5}, "lean_most"),
        ({"speed": 0}, "speed"),
        ({"skip": 1}, "skip"),
        ({**OFF, "skip": False}, "can never act"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(fields, words):
    with pytest.raises(ValueError, match=words):
        Guard(**fields)


@pytest.mark.parametrize(("name", "fields"), [("tribe+watch", {}), ("tribe+guard", OFF)], ids=["watch", "guard"])
def test_what_watches_and_a_guard_that_finds_nothing_change_no_bit(name, fields):
    net, method = small_backbone(), ready("tribe")
    guarded = ready(name, **fields)
    state, watched = method.init(net, 2), guarded.init(net, 2)
    for seed in range(3):
        x = pictures(2, 6, seed)
        answer, state = method.step(net, state, x)
        same, watched = guarded.step(net, watched, x)
        assert torch.equal(answer, same)
    assert leaves(state).keys() == leaves(watched.method).keys()
    assert all(torch.equal(t, leaves(watched.method)[name]) for name, t in leaves(state).items())


@pytest.mark.parametrize(
    ("fault", "x"),
    [
        ("black", torch.zeros(3, 8, 8)),
        ("flat", torch.full((3, 8, 8), 0.5)),
        ("0 to 255", 255 * pictures(1, 1)[0, 0]),
        ("normalised", (pictures(1, 1)[0, 0] - 0.5) / 0.2),
    ],
)
def test_a_batch_with_a_frame_that_teaches_nothing_is_predicted_and_not_learned(fault, x):
    net, guarded = small_backbone(), ready("tribe+guard")
    _, state = guarded.step(net, guarded.init(net, 2), pictures(2, 6))
    before = clone(state)
    batch = pictures(2, 6, 1)
    batch[0, 1:5] = x  # a single image may be flat
    answer, after = guarded.step(net, state, batch)
    assert torch.equal(answer, guarded.predict(net, before, batch)), fault
    first, second = (stream(after.method, i, 2) for i in range(2))
    held, moved = (stream(before.method, i, 2) for i in range(2))
    changed = {name for name, t in leaves(first).items() if not torch.equal(t, leaves(held)[name])}
    assert changed == {"info.skipped"}
    assert after.guard.held.tolist() == [6, 0]
    assert after.info.skipped.tolist() == [6, 0]
    assert not torch.equal(second.pair.mean, moved.pair.mean), "the other stream learns"


def test_the_limit_shortens_the_move_and_leaves_moments_and_slow_streams_alone():
    net, method = small_backbone(), ready("tent", lr=0.5)
    old = method.init(net, 2)
    _, new = method.step(net, old, pictures(2, 6))
    slow = new._replace(
        affine=Affine(*(torch.stack((n[0], o[1] + 1e-6)) for n, o in zip(new.affine, old.affine, strict=True)))
    )
    limited = limit(slow, old, 0.01)
    start, far, short = (torch.cat(pair, 1) for pair in (old.affine, slow.affine, limited.affine))
    norm = torch.linalg.vector_norm
    torch.testing.assert_close(norm(short[0] - start[0]), 0.01 * norm(start[0]))
    torch.testing.assert_close(
        (short[0] - start[0]) / norm(short[0] - start[0]), (far[0] - start[0]) / norm(far[0] - start[0])
    )
    assert torch.equal(short[1], far[1])
    assert limited.adam is slow.adam


def test_a_wrong_learning_rate_moves_no_further_than_the_limit():
    net, guarded = small_backbone(), ready("tribe+guard", lr=1.0, speed=0.002)
    state = guarded.init(net)
    for seed in range(5):
        before = torch.cat(state.method.affine, 1)
        _, state = guarded.step(net, state, pictures(1, 6, seed))
        after = torch.cat(state.method.affine, 1)
        assert float((after - before).norm() / before.norm()) <= 0.002 * 1.001


def deploys(network):
    """A method whose network this is, whatever its state."""
    return SimpleNamespace(
        deployed=lambda net, state: network, anchored=lambda net, state: None, followed=lambda state: None
    )


def test_the_share_of_adapted_statistics_by_hand():
    net = Backbone(nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2, eps=0.0), nn.Flatten(), nn.Linear(72, 4)).eval())
    source = net.source()[1]  # mean 0, variance 1
    stats = Stats(source.mean + torch.tensor([0.3, 0.0]), torch.tensor([[[1.0, 1.4**2]]]))
    distance = ((0.3**2 + 0.4**2) / 2) ** 0.5
    assert float(distance_of_statistics(net, stats)) == pytest.approx(distance)
    far = distance**4 / (distance**4 + 0.2**4)
    assert float(shift_weight(net, stats, 0.2**2)) == pytest.approx(far)
    share, affine = 0.8 * far, net.source()[0]
    moved = Affine(affine.weight + 1, affine.bias - 1)
    leaned = Guard(lean_half=0.2, lean_most=0.8).lean(net, deploys(Deployed(moved, stats, Frozen())), None)
    torch.testing.assert_close(leaned.affine, Affine(affine.weight + far**2, affine.bias - far**2))
    torch.testing.assert_close(leaned.stats.mean[0, 0], torch.tensor([share * 0.3, 0.0]))
    torch.testing.assert_close(leaned.stats.var[0, 0], torch.tensor([1.0, 1 + share * (1.4**2 - 1)]))
    assert float(shift_weight(net, source, 0.2**2)) == 0


def test_a_guard_is_fitted_to_the_distance_of_clean_images():
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2, eps=0.0), nn.Flatten(), nn.Linear(72, 4)).eval()
    x = pictures(1, 300)[0]
    values = net[0](x)  # the layer's statistics are mean 0, variance 1
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3), correction=0)
    far = float((mean.square() + (std - 1).square()).mean().sqrt())
    assert distance_of_images(Backbone(net), x) == pytest.approx(far, rel=1e-4)
    made = tribe.Guard.fitted(net, x, speed=0.01)
    assert made.lean_half == pytest.approx(1.4 * far, abs=1e-3)
    assert made.speed == 0.01


def test_the_noise_of_single_images_is_no_change_of_the_world():
    """Balanced BN with a class-agnostic share moves all classes by each image of a batch of one."""
    model, x = small_network().train(), pictures(1, 210)[0]
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # its statistics become those of the images
            layer.reset_running_stats()
    model(x)
    net = Backbone(model.eval())
    alike = tribe.Guard.fitted(net, x, ready("tribe", gamma=0.0))
    assert alike.lean_single is None
    made = tribe.Guard.fitted(net, x, ready("tribe", gamma=0.5, eta=0.5))
    assert made.lean_half == alike.lean_half
    assert made.lean_single > made.lean_half
    far = ready("tribe", gamma=0.5, eta=0.5)
    assert tribe.Guard.fitted(net, x, far, lean_half=0.9).lean_single == 0.9
    assert tribe.Guard.fitted(net, x, far, lean_half=None).lean_single is None
    guarded = ready("tribe+guard", lean_half=0.1, lean_single=0.3)
    for size in (1, 4):
        state = guarded.init(net)
        for images in pictures(1, 8).split(size, 1):
            _, state = guarded.step(net, state, images)
        assert float(guarded.guard.midpoint(state.method)) == pytest.approx(0.1**2 + (0.3**2 - 0.1**2) / size)
    assert 0 < guarded.guard.health(net, guarded.method, state)[0].followed < 1


def test_the_distance_of_clean_images_is_measured_in_batches_of_bounded_size():
    net, sizes = Backbone(small_network()), []
    net.model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    x = pictures(1, 610)[0]
    far = distance_of_images(net, x)
    assert sizes == [61] * 10
    assert far == pytest.approx(distance_of_images(net, x[:399]), rel=0.1)
    del sizes[:]
    tribe.Guard.fitted(net, x, ready("tribe", gamma=0.5))
    assert max(sizes) == 64


def test_the_order_of_clean_images_hardly_matters():
    """Images of a folder are sorted by class; batches of one class have statistics of their own."""
    net, x = Backbone(small_network()), pictures(1, 600)[0]
    x = x * torch.linspace(0.3, 1, len(x)).view(-1, 1, 1, 1)  # bright ones come last
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    assert distance_of_images(net, x) == pytest.approx(distance_of_images(net, shuffled), rel=0.01)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (torch.zeros(300, 3, 8, 8, dtype=torch.uint8), "floating point"),
        (torch.full((300, 3, 8, 8), torch.nan), "300 of 300"),
        (torch.tensor(0.5), "floating point"),
        (torch.rand(100, 3, 8, 8), "at least 200"),
        ([0.5] * 300, "list"),
    ],
)
def test_images_that_tell_no_distance_are_refused(images, reason):
    with pytest.raises(ValueError, match=reason):
        tribe.Guard.fitted(small_network(), images)


def test_what_parameters_do_to_statistics_is_no_change_of_the_world():
    """In batches of one image, parameters that were learned move statistics as far as fog does; the anchor's do not."""
    net, guarded = small_backbone(), ready("tribe+guard", lean_half=0.1)
    first = guarded.init(net)
    state = first.method
    moved = state._replace(
        affine=Affine(*(t + 0.2 for t in state.affine)), pair=Stats(state.pair.mean + 1, state.pair.var)
    )
    affine, stats = net.source()
    same = guarded.deployed(net, first._replace(method=moved))
    torch.testing.assert_close(same.affine, affine)
    torch.testing.assert_close(same.stats.mean, stats.mean)
    changed = moved._replace(anchor=Stats(state.anchor.mean + 10, state.anchor.var))
    followed = guarded.deployed(net, first._replace(method=changed))
    torch.testing.assert_close(followed.affine.weight, affine.weight + 0.2, atol=1e-3, rtol=0)
    health = guarded.guard.health(net, guarded.method, first._replace(method=changed))[0]
    assert health.followed == pytest.approx(1, abs=1e-3)
    alone = ready("selftrain/robust-bn+guard", lean_half=0.1)
    assert alone.method.anchored(net, alone.init(net).method) is None


def test_a_guard_that_is_not_fitted_does_not_lean():
    """How far statistics go where nothing has changed differs threefold between networks: no default is right."""
    net = small_backbone()
    affine, stats = net.source(2)
    adapted = Deployed(Affine(affine.weight + 1, affine.bias), Stats(stats.mean + 0.01, stats.var), Frozen())
    assert tribe.Guard().lean_half is None
    assert Guard().lean(net, deploys(adapted), None) is adapted


def test_no_guard_leans_on_the_source_for_a_bank_which_does_so_itself():
    net, guarded = small_backbone(), ready("bank+guard", lean_half=0.1, lean_single=0.3)
    state = guarded.init(net)
    for images in pictures(1, 40).split(8, 1):
        _, state = guarded.step(net, state, 0.3 * images)
    own, leaning = guarded.method.deployed(net, state.method), guarded.deployed(net, state)
    torch.testing.assert_close(leaning.stats.mean, own.stats.mean, atol=0, rtol=0)
    source = guarded.method.weights(state.method)[:, 0]
    (health,) = guarded.guard.health(net, guarded.method, state)
    assert health.followed == pytest.approx(1 - float(source))
    assert 0 < health.followed <= 1


def test_the_statistics_of_a_batch_are_mixed_with_the_sources():
    net = small_backbone()
    leaned = Guard(lean_batch=0.3).lean(net, deploys(Deployed(*net.source(), PerBatch())), None)
    assert leaned.norm == MixedBatch(0.3)
    two = torch.tensor([[[1.0], [3.0]]])  # two images of one pixel and one channel: mean 2, variance 1
    stored = Stats(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    # With a share of 0.5, half of the population is around 0, half around 2; an empty batch counts for nothing.
    for share, count, expected in ((0.0, 2, (0, 1)), (1.0, 2, (2, 1)), (0.5, 2, (1, 2)), (0.5, 0, (0, 1))):
        valid = torch.arange(2)[None] < count
        mean, var, kept = MixedBatch(share)(two, torch.zeros(1, 2, 1), 1, stored, None, valid, 0.0)
        assert (float(mean), float(var)) == expected
        assert kept is stored


def test_parameters_are_pulled_back_where_a_method_minimises_entropy_on_batch_statistics():
    net = small_backbone()
    source = torch.cat(net.source()[0], 1)
    far = {}
    for pull in (0.0, 0.5):
        guarded = ready("tent+guard", lr=1e-3, pull=pull, speed=None)
        state = guarded.init(net)
        for seed in range(4):
            _, state = guarded.step(net, state, pictures(1, 6, seed))
        far[pull] = float((torch.cat(state.method.affine, 1) - source).norm())
    assert far[0.5] < 0.7 * far[0.0]
    old = ready("tent").init(net)
    moved = old._replace(affine=Affine(*(t + 1 for t in old.affine)))
    back = pull_back(net, moved, torch.tensor([0.25]))
    torch.testing.assert_close(torch.cat(back.affine, 1), source + 0.75)
    assert back.adam is moved.adam


def test_a_guarded_adapter_exports_what_it_predicts():
    adapter = tribe.adapt(small_network(), guard=True, streams=2)
    for seed in range(3):
        adapter(pictures(2, 6, seed))
    x = pictures(2, 6, 9)
    torch.testing.assert_close(adapter.export(stream=1)(x[1]), adapter.predict(x)[1])


def test_a_good_state_is_kept_under_a_shift_and_not_while_scatter_is_suspected():
    net, guarded = small_backbone(), ready("tribe+guard", good_every=4, skip=False)
    _, state = guarded.step(net, guarded.init(net), pictures(1, 6))
    guard = state.guard

    def kept(**alarms):
        told = guard.watch._replace(alarms=guard.watch.alarms._replace(images=torch.tensor([60]), **alarms))
        return int(guarded.guard.go_back(state.method, guard._replace(watch=told), guard.watch)[1].kept)

    shifted, broken = torch.zeros_like(guard.watch.alarms.on), torch.zeros_like(guard.watch.alarms.on)
    shifted[0, KINDS.index("shift")], broken[0, KINDS.index("frozen")] = True, True
    assert kept(on=shifted) == 60
    assert kept(on=broken) == 6
    assert kept(on=shifted, collapse=guard.watch.alarms.collapse._replace(evidence=torch.tensor([1.0]))) == 6


def test_a_guard_that_leans_begins_again_at_the_source_when_a_shift_has_ended():
    net, guarded = small_backbone(), ready("tribe+guard", lean_half=0.02, skip=False)
    state = guarded.init(net, 2)
    for seed in range(3):
        _, state = guarded.step(net, state, pictures(2, 6, seed))
    watch, inner = state.guard.watch, state.method
    on = torch.zeros_like(watch.alarms.on)
    on[0, KINDS.index("shift")] = True
    before = watch._replace(alarms=watch.alarms._replace(on=on))
    first = guarded.method.init(net, 2)
    free = guarded.guard.let_go(net, guarded.method, inner, watch, before)
    for name, t in leaves(stream(free._replace(key=first.key, info=first.info), 0, 2)).items():
        assert torch.equal(t, leaves(stream(first, 0, 2))[name]), name
    for name, t in leaves(stream(free, 1, 2)).items():
        assert torch.equal(t, leaves(stream(inner, 1, 2))[name]), name
    assert guarded.guard.let_go(net, guarded.method, inner, before, before) is inner


def test_cotta_reports_how_far_the_network_that_predicts_has_moved():
    x = pictures(1, 24)[0]
    told = []
    for guard in (False, Guard(speed=None, skip=False, pull=0.0)):
        model = tribe.adapt(small_network(), "cotta", guard=guard, seed=3)
        for batch in x.split(8):
            model(batch)
        told.append(model.info[0].distance)
    assert told[0] == told[1]
