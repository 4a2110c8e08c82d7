"""Single methods at their edges; test_equations.py compares them with plain loops."""

import dataclasses
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import plain_methods
import tribe
from method_runs import DOUBLE, batches, darker, even_network, network, play, varied
from networks import Frames, refused
from recordings import GOLDENS, Net, fisher, part
from tribe import methods, models
from tribe.core import memory, rng
from tribe.core.augment import Augment
from tribe.core.backbone import Backbone
from tribe.core.rules import Frozen, PerBatch
from tribe.core.state import digest, leaves, stream
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.methods.deyo import shuffled
from tribe.methods.lame import nearest
from tribe.methods.sar import adapted_channels
from tribe.testing import images, informed, small_network

# -- LAME -------------------------------------------------------------------------------------------------------------


def test_a_stream_that_has_settled_stays_while_another_goes_on():
    """One stream settles in three rounds (nobody to pull at it), the other takes many."""
    net = network(sure=0.1)
    x = images(2, 12, 1, DOUBLE)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, 1:] = False
    method = methods.create("lame")
    y, _ = method.step(net, method.init(net, 2), x, valid)
    for row, images_ in ((y[0, :1], x[0, :1]), (y[1], x[1])):
        (wanted,), _ = plain_methods.lame(net, [images_], method)
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)


def test_copies_of_one_image_are_each_others_neighbours_and_stay_copies():
    net = network()
    x = torch.cat((images(1, 1, 5, DOUBLE).expand(1, 7, 3, 8, 8), images(1, 5, 6, DOUBLE)), 1)
    near = nearest(net(x, *net.source(), Frozen()).features, torch.ones(1, 12, dtype=torch.bool), 5)
    assert near.ids[0, :7].lt(7).all(), "a copy has other neighbours than copies"
    assert not near.ids[0].eq(torch.arange(12)[:, None]).any(), "an image is its own neighbour"
    (y,), _ = play(methods.create("lame"), net, [x])
    torch.testing.assert_close(y[0, :7], y[0, :1].expand(7, -1), rtol=0, atol=1e-12)


COLUMNS = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("name", "model", "x", "words"),
    [
        ("lame", Frames(), images(1, 4), "sees each image once"),
        ("deyo", COLUMNS, torch.rand(1, 4, 6), r"patches of images.*shape \(1, 4, 6\)"),
    ],
)
def test_images_without_the_features_or_the_patches_of_a_method_are_refused(name, model, x, words):
    net, method = Backbone(model), methods.create(name)
    with pytest.raises(ValueError, match=words):
        method.step(net, method.init(net), x)


# -- EATA -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("after", "mean"), [("new", -1.0), ("kept", 0.0)])
def test_the_moving_mean_after_a_reset_is_a_field(after, mean):
    net, x = network(dtype=torch.float32, sure=3.0), images(1, 8)
    method = methods.create("sar", classes=4, e0=0.0, mean_after_reset=after)  # nothing is reliable: the mean stays
    state = method.init(net)._replace(mean=torch.zeros(1))
    _, reset = method.step(net, state, x)
    assert float(reset.mean) == mean
    assert torch.equal(reset.affine.weight, net.source()[0].weight)


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
    for names, words in ((("layer4",), "1, 4"), (("1", "4"), "none can adapt")):
        with pytest.raises(ValueError, match=words):
            methods.create("sar", frozen_tail=names).init(net)
    stages = {f"layer{i}": nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for i in (1, 2, 3, 4, 41)}
    staged = Backbone(nn.Sequential(OrderedDict(stages=nn.Sequential(OrderedDict(stages)), flat=nn.Flatten())))
    adapted = adapted_channels(staged, ("stages.layer4",))
    assert adapted.tolist() == [1] * 9 + [0] * 3 + [1] * 3, "a stage of a longer name was taken for it"
    assert adapted_channels(staged, 0.25).tolist() == [1] * 12 + [0] * 3


def frozen_of(model, tail):
    """The frozen layers of a network, by name."""
    net = Backbone(model)
    adapted = adapted_channels(net, tail).split([slot.channels for slot in net.slots])
    return [slot.name for slot, share in zip(net.slots, adapted, strict=True) if not share.any()]


@pytest.mark.parametrize("name", ["sar", "deyo", "sotta"])
def test_imagenets_preset_freezes_what_the_authors_freeze(name):
    tail = methods.get(name).preset("imagenet").frozen_tail
    frozen = frozen_of(models.create("resnet50", classes=1000), tail)
    assert len(frozen) == 10
    assert all(layer.startswith("layer4.") for layer in frozen)


def test_published_layers_are_those_of_the_authors_networks_or_the_last_quarter():
    blocks = nn.Sequential(*(nn.Sequential(OrderedDict(norm1=nn.LayerNorm(4))) for _ in range(12)))
    vit = nn.Sequential(
        OrderedDict(vit=nn.Sequential(OrderedDict(blocks=blocks, norm=nn.LayerNorm(4), head=nn.Linear(4, 4))))
    )
    last = [f"vit.blocks.{i}.norm1" for i in (9, 10, 11)]
    assert frozen_of(vit, "published") == [*last, "vit.norm"]
    other = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(7)), nn.Sequential(OrderedDict(norm=nn.BatchNorm2d(3))))
    assert frozen_of(other, "published") == frozen_of(other, 0.25) == ["6", "7.norm"]


@pytest.mark.parametrize("dataset", ["mnist", "cifar10", "cifar100"])
def test_the_comparison_that_cifars_presets_are_from_freezes_nothing(dataset):
    assert not frozen_of(models.create("wrn16_4", classes=10), methods.get("sar").preset(dataset).frozen_tail)


@pytest.mark.parametrize("name", ["tent", "pl", "eata"])
def test_the_authors_settings_of_imagenet_are_a_preset(name):
    method = methods.get(name).preset("imagenet-authors")
    assert (method.classes, method.optimizer, method.momentum, method.lr) == (1000, "sgd", 0.9, 0.00025)
    assert methods.get(name).preset("imagenet").optimizer == "adam", "the paper's rows"


# -- ROID -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["logits", "posteriors"])
@pytest.mark.parametrize("batch", [1, 2, 7, 24])
def test_the_prior_of_the_batch_reweights_the_outputs(kind, batch):
    net, x = network(), images(1, batch, 2, DOUBLE)
    plain, corrected = (methods.create("roid", classes=4, prior=prior) for prior in ("none", kind))
    p = plain.predict(net, plain.init(net), x)[0].exp()
    logits = net(x, *net.source(), PerBatch()).logits[0]
    prior = [sum(float(q[k]) for q in p) / batch for k in range(4)]
    gamma = max(1 / batch, 1 / 4) / max(prior)
    smooth = torch.tensor([(v + gamma) / (1 + 4 * gamma) for v in prior], dtype=DOUBLE)
    expected = (logits * smooth).softmax(-1) if kind == "logits" else (p * smooth) / (p * smooth).sum(-1, keepdim=True)
    torch.testing.assert_close(corrected.predict(net, corrected.init(net), x)[0].exp(), expected)


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


# -- DeYO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "sure"),
    [("deyo", {"tau_ent": 0.0}, 1.0), ("deyo", {"tau_plpd": 1.0}, 1.0), ("sotta", {"every": 4}, 0.01)],
)
def test_a_method_stays_where_it_has_nothing_to_learn_from(name, fields, sure):
    net = network(sure=sure)
    start = (method := methods.create(name, classes=4, **fields)).init(net)
    _, state = play(method, net, batches(3, batch=9))
    moved = {leaf for leaf, t in leaves(state).items() if not torch.equal(t, leaves(start)[leaf])}
    assert not {
        leaf for leaf in moved if not leaf.startswith(("key.", "info.", "seen", "memory.arrivals", "memory.shape"))
    }
    assert float(state.info.trusted) == 0
    assert int(state.key.clock) == 3


def test_patches_are_shuffled_whole_and_each_image_has_its_own_order():
    x = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).view(1, 2, 3, 8, 8)
    key = rng.Key(torch.tensor([3]), torch.tensor([5]))
    mixed = shuffled(x, 4, key)
    places = plain_methods.orders(6, 2, 4, seed=3)[5]
    for image, pieces, order in zip(x[0], mixed[0], places, strict=True):
        assert torch.equal(pieces, plain_methods.in_pieces(image, 4, order))
    assert places[0] != places[1]
    assert torch.equal(shuffled(x, 8, key).flatten(3).sort(-1).values, x.flatten(3)), "pixels were lost"


def test_sizes_that_patches_do_not_divide_are_resized_and_back():
    key = rng.Key(torch.tensor([0]), torch.tensor([0]))
    for dtype in (torch.float32, torch.float16):
        for size in ((9, 10), (3, 2), (7, 28)):
            x = torch.full((1, 2, 3, *size), 0.25, dtype=dtype)
            mixed = shuffled(x, 4, key)
            assert mixed.shape == x.shape
            assert mixed.dtype == dtype
            torch.testing.assert_close(mixed, x)


# -- PeTTA ------------------------------------------------------------------------------------------------------------


def test_petta_follows_the_student_less_where_features_diverge():
    net, x = network(), images(2, 9, 3, DOUBLE)
    method = informed(methods.create("petta", classes=4, augment=darker, alpha_0=0.5), net)
    state = method.init(net, 2)
    far = state.mean[1] + 3 * method.knowledge.tensors["var"].double().sqrt()
    state = state._replace(mean=torch.stack((state.mean[0], far)))
    _, after = method.step(net, state, x)
    moved = [(after.teacher.affine.weight - state.teacher.affine.weight)[i].abs().max() for i in (0, 1)]
    assert float(moved[1]) < 0.01 * float(moved[0])
    assert (after.student.affine.weight - state.student.affine.weight)[1].abs().max() > 1e-4, "the student learns"


def test_a_class_without_source_images_has_the_features_of_all():
    net = network()
    x = images(1, 12, 5, DOUBLE)[0]
    labels = net(x[None], *net.source(), methods.Frozen()).logits[0].argmax(-1)
    x = x[labels == labels[0]]  # one class only
    method = methods.create("petta", classes=4)
    known = method.study(net, [(x, None)]).tensors
    assert len(x) > 2
    for tensor in known.values():
        torch.testing.assert_close(tensor, tensor[:1].expand_as(tensor))
        assert tensor.isfinite().all()


# -- BDN --------------------------------------------------------------------------------------------------------------


def test_bdn_tells_domains_apart_at_the_published_layer_a_third_of_the_way_or_by_name():
    net = network()
    for model, name in (("resnext29", "stage_2.0.bn"), ("resnet20", "layer1.2.bn2"), ("resnet18", "layer3.0.bn1")):
        assert methods.create("bdn", classes=10)._slot(Backbone(models.create(model, classes=10))).name == name
    assert methods.create("bdn", classes=4)._slot(net).name == "1"
    assert methods.create("bdn", classes=4, layer="4")._slot(net).name == "4"
    with pytest.raises(ValueError, match=r"layer of bdn is '3'; the network's BatchNorm layers are 1, 4"):
        methods.create("bdn", classes=4, layer="3").init(net)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    with pytest.raises(ValueError, match=r"by the statistics of a BatchNorm layer, and the network has none"):
        methods.create("bdn", classes=4).init(Backbone(model))


# -- RoTTA and NOTE --------------------------------------------------------------------------------------------------


def rotta(**fields):
    return methods.create("rotta", **{"classes": 4, "size": 10, "every": 10, "room": 192, "augment": darker, **fields})


def note(**fields):
    return methods.create("note", **{"classes": 4, "size": 10, "room": 192, "lr": 1e-2, **fields})


def shots(count, streams=1):
    """Images of very different colours."""
    return torch.cat([torch.cat(varied(1, batch=count, first=seed), 1) for seed in range(streams)])


def gap(a, b):
    """The largest difference between two states, reports aside, which are in float32."""
    mine, other = ({k: t.double() for k, t in leaves(s).items() if not k.startswith("info.")} for s in (a, b))
    return max(float((mine[k] - other[k]).abs().max()) for k in mine)


def test_rotta_plays_one_image_at_a_time_as_it_plays_batches():
    """With a teacher that stands still batches cannot matter, the random views included, which count updates."""
    x = shots(64)
    net = even_network([x])
    method = rotta(alpha=0.0, nu=0.0, augment=tribe.core.augment.Augment())
    states = [play(method, net, x.split(batch, 1))[1] for batch in (1, 7, 64)]
    assert int(states[0].adam.steps) == 6
    for state in states[1:]:
        assert gap(state.student, states[0].student) < 1e-9
        assert gap(state.memory, states[0].memory) < 1e-9
        assert gap(state.adam, states[0].adam) < 1e-9


@pytest.mark.parametrize("make", [partial(rotta, nu=0.1), partial(note, every=5)])
def test_streams_out_of_phase_are_each_as_if_alone(make):
    """Catches an update of one stream that touches another: they reach their updates at different times."""
    x, method = shots(40, streams=3), make()
    net = even_network([x])
    valid = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < torch.tensor([[1.0], [0.6], [0.3]])
    y, state = play(method, net, x.split(8, 1), seed=4, valid=valid.split(8, 1))
    assert len(set(state.adam.steps.tolist())) == 3
    for i in range(3):
        row = slice(i, i + 1)
        z, alone = play(method, net, x[row].split(8, 1), seed=4 + i, valid=valid[row].split(8, 1))
        assert all(torch.allclose(a[row], b, rtol=0, atol=1e-9) for a, b in zip(y, z, strict=True))
        assert gap(stream(state, i, 3), alone) < 1e-9


@pytest.mark.parametrize("make", [rotta, note])
def test_padding_anywhere_in_a_batch_changes_nothing(make):
    """Catches invalid images in the memory, in ages, in draws or in the count towards an update."""
    x = shots(60)
    net = even_network([x])
    valid = torch.rand(1, 60, generator=torch.Generator().manual_seed(2)) < 0.6
    method = make()
    state, without = method.init(net), method.init(net)
    for i in range(0, 60, 12):
        part = slice(i, i + 12)
        keep = valid[0, part]
        y, state = method.step(net, state, x[:, part], valid[:, part])
        z, without = method.step(net, without, x[:, part][:, keep])
        assert float((y[:, keep] - z).abs().max()) < 1e-9
    assert int(state.adam.steps) > 1
    assert gap(state, without) < 1e-9


def test_rotta_tells_how_far_the_network_it_predicts_with_has_moved():
    net, method = even_network([shots(40)]), rotta(nu=0.25)
    _, state = play(method, net, shots(40).split(20, 1))
    origin, deployed = (torch.cat(affine, 1) for affine in (net.source()[0], method.deployed(net, state).affine))
    expected = (deployed - origin).norm() / origin.norm()
    assert expected > 1e-4
    assert float(state.info.distance) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("make", [rotta, note])
def test_a_stream_whose_images_change_their_shape_goes_on(make):
    """Catches a memory that reads images of one shape as another."""
    net, method = even_network([shots(25)]), make()
    _, state = play(method, net, shots(25).split(5, 1))
    small = shots(25)[..., :6]
    _, state = play(method, net, small.split(5, 1), state)
    assert int(state.memory.arrivals) == 50
    kept = memory.images(state.memory, (3, 8, 6))[0, : int(state.memory.held)]
    offered = small[0].flatten(1)
    assert all(bool((offered == image.flatten()).all(1).any()) for image in kept)


@pytest.mark.parametrize("name", ["rotta", "note"])
def test_images_without_room_are_refused_and_nothing_is_lost(name):
    adapter = tribe.adapt(small_network(), name, room=192)
    adapter(torch.rand(4, 3, 8, 8))
    with refused(adapter, ValueError, "243 values.*room=243"):
        adapter(torch.rand(4, 3, 9, 9))
    adapter(torch.rand(4, 3, 8, 8))


def test_an_augmentation_that_is_none_is_refused():
    with pytest.raises(TypeError, match="augment is an Augment or a callable"):
        rotta(augment=3)
    with pytest.raises(ValueError, match=r"augment turned images of shape \(10, 3, 8, 8\) into \(10, 3, 8, 4\)"):
        play(rotta(augment=lambda x: x[..., :4]), network(), [shots(10)])
