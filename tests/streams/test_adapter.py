"""The shell: what an engineer's inference loop relies on."""

import copy
import dataclasses
import gc
import io
import json
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

import tribe
from networks import at_once, batch, refused
from tribe.core.rules import PerBatch
from tribe.core.state import digest, leaves, stream
from tribe.methods import get_fields, with_fields
from tribe.methods.tent import Tent
from tribe.testing import CLASSES, images, ready, small_network

METHODS = tribe.methods.names()


def played(method="tribe", steps=3, **kwargs):
    adapter = tribe.adapt(small_network(), ready(method) if isinstance(method, str) else method, **kwargs)
    for seed in range(steps):
        adapter(images(kwargs.get("streams", 1), 6, seed) if kwargs.get("streams", 1) > 1 else batch(seed))
    return adapter


def test_three_lines():
    net = small_network().train()
    before = copy.deepcopy(net.state_dict())
    model = tribe.adapt(net)
    logits = model(batch())
    assert logits.shape == (6, CLASSES)
    assert torch.allclose(logits, small_network()(batch()), atol=1e-5), "the first prediction is the source model's"
    assert not torch.equal(model.predict(batch()), logits), "and then it has adapted"
    assert net.training
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_predict_never_adapts_and_agrees_with_the_next_call_which_adapts_as_learn_does():
    adapter, learned = played(), played()
    before = adapter.digest()
    prediction = adapter.predict(batch(9))
    assert adapter.digest() == before
    assert torch.equal(prediction, adapter(batch(9)))
    assert learned.learn(batch(9)) is None
    assert adapter.digest() == learned.digest() != before


def test_frozen_predicts_and_learns_nothing():
    adapter = played()
    free, frozen = adapter.snapshot(), adapter.freeze().snapshot()
    before = adapter.digest()
    adapter(batch(5))
    adapter.learn(batch(5))
    assert adapter.digest() == before
    assert adapter.info[0].frozen
    assert not adapter.restore(free).info[0].frozen, "a snapshot knows it"
    assert adapter.restore(frozen).info[0].frozen
    adapter(batch(5))
    assert adapter.digest() == before
    adapter.unfreeze()(batch(5))
    assert adapter.digest() != before


@pytest.mark.parametrize("time", [None, "auto"])
def test_reset_goes_back_to_the_source_all_or_one(time):
    adapter, fresh = (played(streams=3, steps=steps, seed=11, time=time) for steps in (3, 0))
    kept = leaves(stream(adapter.state, 0, 3))
    adapter.reset(stream=1)
    assert digest(stream(adapter.state, 1, 3)) == digest(stream(fresh.state, 1, 3))
    assert all(torch.equal(kept[k], v) for k, v in leaves(stream(adapter.state, 0, 3)).items())
    assert adapter.reset().digest() == fresh.digest()


def test_snapshot_is_a_copy_and_restore_rolls_back():
    adapter = played()
    snapshot, before = adapter.snapshot(), adapter.digest()
    later = adapter(batch(8))
    assert adapter.digest() != before
    assert adapter.restore(snapshot).digest() == before
    assert torch.equal(adapter(batch(8)), later)


def test_a_snapshot_is_restored_on_the_same_weights_only():
    adapter, twin = played(), played(steps=0)
    other = tribe.adapt(small_network(seed=1))
    with refused(other, ValueError, "taken on another network: its weights differ"):
        other.restore(adapter.snapshot())
    assert twin.restore(adapter.snapshot()).digest() == adapter.digest(), "another object with equal weights will do"
    assert copy.deepcopy(adapter).reset().restore(adapter.snapshot()).digest() == adapter.digest()


@pytest.mark.parametrize("method", ["tribe", "rotta", "cotta"])
@pytest.mark.parametrize(("first", "then"), [("float", "double"), ("double", "float"), ("float", "bfloat16")])
def test_a_snapshot_is_restored_in_the_precision_the_adapter_has_now(method, first, then):
    adapter = getattr(played(method), first)()
    snapshot, before = adapter.snapshot(), adapter.predict(batch(8))
    getattr(adapter, then)()
    kinds = {name: t.dtype for name, t in leaves(adapter.state).items()}
    adapter(batch(7))
    adapter.restore(snapshot)
    assert {name: t.dtype for name, t in leaves(adapter.state).items()} == kinds
    assert (adapter.predict(batch(8)).double() - before.double()).abs().max() < (0.1 if then == "bfloat16" else 1e-4)
    adapter(batch(8))


def test_a_state_dict_stays_what_it_was():
    adapter = nn.ModuleDict({"camera": played()})
    kept, before = adapter.state_dict(), adapter["camera"].digest()
    names = [name for name in kept if name.startswith("camera.adapted.")]
    first = {name: kept[name].clone() for name in names}
    for seed in range(5):
        adapter["camera"](batch(seed))
    assert names
    assert all(torch.equal(kept[name], first[name]) for name in names)
    assert kept["camera.net.model.0.weight"].data_ptr() == adapter["camera"].net.model[0].weight.data_ptr()
    adapter.load_state_dict(kept)
    assert adapter["camera"].digest() == before
    other = nn.ModuleDict({"camera": tribe.adapt(small_network(seed=1), seed=4)})
    assert other.load_state_dict(kept) == ([], [])
    assert torch.equal(other["camera"](batch(9)), adapter["camera"](batch(9)))


def test_layouts_of_one_stream_and_of_many():
    one, many = played(steps=0), played(steps=0, streams=2)
    assert one(batch()).shape == (6, CLASSES)
    assert one(batch().unsqueeze(0)).shape == (1, 6, CLASSES)
    assert many(images(2, 6)).shape == (2, 6, CLASSES)


MORE, OTHER = "more than a pass of a network", "no ordinary layer does: Instance"
NOT_EXPORTED = dict.fromkeys(("bdn", "cmf", "cotta", "lame", "petal", "roid"), MORE)
NOT_EXPORTED |= dict.fromkeys(("note", "selftrain/iabn"), OTHER) | {"source+time": "filters its predictions over time"}
NOT_EXPORTED |= {"snap": "normalises as no ordinary layer does: Corrected"}


@pytest.mark.parametrize(("method", "why"), NOT_EXPORTED.items())
def test_what_no_ordinary_network_predicts_is_not_exported(method, why):
    with pytest.raises(ValueError, match=rf"cannot be exported.* {why}.*freeze\(\).*save\(\)"):
        played(method).export()


class Halved(PerBatch):
    """A rule made from an ordinary one."""

    def __call__(self, *args):
        mean, var, stats = super().__call__(*args)
        return mean / 2, var, stats


class HalvedMeans(Tent):
    """TENT with that rule."""

    def deployed(self, net, state):
        return dataclasses.replace(super().deployed(net, state), norm=Halved())


def test_a_rule_that_is_made_from_an_ordinary_one_is_not_exported_as_that():
    with pytest.raises(ValueError, match="normalises as no ordinary layer does: Halved"):
        played(HalvedMeans()).export()


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NOT_EXPORTED])
@pytest.mark.parametrize("streams", [1, 2])
def test_export_equals_predict_with_ordinary_layers(method, streams):
    adapter = played(method, streams=streams)
    x = images(streams, 6, 9) if streams > 1 else batch(9)
    for i in range(streams):
        plain = adapter.export(stream=i if streams > 1 else None)
        assert type(plain) is nn.Sequential
        assert type(plain[1]) is nn.BatchNorm2d
        assert not any("tribe" in type(m).__module__ for m in plain.modules())
        rows, expected = x.view(streams, 6, *x.shape[-3:]), adapter.predict(x).view(streams, 6, CLASSES)
        assert (plain(rows[i]) - expected[i]).abs().max() <= 1e-5


def test_export_does_not_share_memory_with_the_adapter():
    adapter = played()
    plain, before = adapter.export(), adapter.predict(batch(9))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    assert torch.equal(adapter.predict(batch(9)), before)


def test_a_state_dict_that_is_assigned_stays_the_callers():
    given = played().double().state_dict()
    kept = {name: t.clone() for name, t in given.items()}
    with torch.inference_mode():
        other = tribe.adapt(small_network(seed=1).double())
        other.load_state_dict(given, assign=True)
    assert other.digest() == played().double().digest()
    assert other.net.model[0].weight.data_ptr() == given["net.model.0.weight"].data_ptr(), "the network's are assigned"
    for seed in range(5):
        other(batch(seed))
    assert all(torch.equal(kept[name], t) for name, t in given.items())


def test_an_assigned_state_takes_the_precision_of_the_adapter():
    adapter = tribe.adapt(small_network())
    state = {k: t.double() if t.is_floating_point() else t for k, t in played().state_dict().items() if "adapted" in k}
    adapter.load_state_dict(state, strict=False, assign=True)
    assert adapter.digest() == played().digest()


def test_moving_the_adapter_moves_everything_and_keeps_statistics_precise():
    adapter = played().to(torch.bfloat16)
    assert adapter.net.dtype == torch.bfloat16
    assert all(t.dtype in (torch.float32, torch.int64) for t in leaves(adapter.state).values())
    assert adapter(batch(3)).isfinite().all()
    meta = played().to("meta")
    assert all(t.device.type == "meta" for t in leaves(meta.state).values())
    assert meta.net.device.type == "meta"


def test_train_and_eval_mean_nothing_here():
    a, b = played(), played().train()
    assert torch.equal(a.eval()(batch(4)), b(batch(4)))


def test_adapts_inside_inference_mode_as_outside():
    inside, outside = tribe.adapt(small_network()), tribe.adapt(small_network())
    with torch.inference_mode():
        made_inside = tribe.adapt(small_network())
        for seed in range(3):
            x = batch(seed) + 0
            inside(x)
            made_inside(x)
    for seed in range(3):
        outside(batch(seed))
    assert inside.digest() == outside.digest() == made_inside.digest()
    inside(batch(4))
    made_inside.reset()(batch(4))


def test_runs_under_autocast():
    adapter, plain = tribe.adapt(small_network()), tribe.adapt(small_network())
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(3):
            adapter(batch(seed))
            y = adapter.predict(batch(9))
    for seed in range(3):
        plain(batch(seed))
    assert (y.float() - plain.predict(batch(9))).abs().max() < 0.5
    assert all(t.dtype in (torch.float32, torch.int64) for t in leaves(adapter.state).values())


def test_threads_share_one_adapter_and_lose_nothing():
    together, alone = played(steps=0), played(steps=0)
    kept = []

    def drive():
        for _ in range(15):
            together(batch())
            together.predict(batch(1))
            kept.append(together.snapshot())

    at_once(*[drive] * 4)
    known = set()
    for _ in range(60):
        alone(batch())
        known.add(alone.digest())
    assert together.info[0].images == alone.info[0].images == 360
    assert together.digest() == alone.digest(), "equal batches in whatever order are one stream"
    assert all(digest(snapshot.state) in known for snapshot in kept), "half a step was seen"


@pytest.mark.parametrize("method", ["tribe", "tribe+watch", "tribe+guard", "rotta+time", "tent+guard+time"])
def test_copies_of_an_adapter_adapt_on_their_own(method):
    adapter = played(method)
    file = io.BytesIO()
    torch.save(adapter, file)
    file.seek(0)
    copies = copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter)), torch.load(file, weights_only=False)
    adapter(batch(8))
    for other in copies:
        with adapter._core.lock:  # a copy has a lock of its own: it does not wait for this one's
            done = threading.Thread(target=other, args=(batch(8),), daemon=True)
            done.start()
            done.join(60)
            assert not done.is_alive()
        assert (other.digest(), other.method) == (adapter.digest(), adapter.method)
    assert torch.equal(adapter.to("cpu")(batch(9)), copies[0](batch(9)))


def test_info_tells_what_happened():
    adapter = tribe.adapt(small_network(), streams=2, h0=0.9)
    x = images(2, 6)
    x[1, 3, 0, 0, 0] = float("nan")
    adapter(x)
    healthy, poisoned = adapter.info
    assert (healthy.images, healthy.skipped, healthy.poisoned, healthy.steps) == (6, 0, (), 1)
    assert (poisoned.images, poisoned.skipped, poisoned.poisoned, poisoned.steps) == (5, 1, (3,), 1)
    assert 0 <= healthy.trusted <= 1
    assert 0 < healthy.entropy <= 1
    for seed in range(8):
        adapter(images(2, 6, seed))
    assert adapter.info[0].distance > 0
    assert adapter.info[1].poisoned == ()


def test_info_locates_bad_images_in_the_last_batch_whether_it_was_learned_from_or_not():
    adapter, bad = played(), batch()
    bad[[2, 4]] = torch.inf
    for call in (adapter.predict, adapter.freeze(), adapter.learn):
        call(bad)
        assert adapter.info[0].poisoned == (2, 4)
        call(batch())
        assert adapter.info[0].poisoned == ()
    assert (adapter.info[0].skipped, adapter.digest()) == (0, played().digest()), "nothing was to be learned"
    adapter.unfreeze()(bad)
    assert (adapter.info[0].skipped, adapter.info[0].poisoned) == (2, (2, 4))
    assert adapter.predict(bad[:0]).shape == (0, CLASSES)
    assert adapter.info[0].poisoned == ()


def test_clean_images_are_predicted_as_if_alone_with_each_other():
    for method in METHODS:
        own = {"augment": torch.clone} if method in ("cotta", "petal") else {}  # else noise depends on the place
        mixed, clean = (played(ready(method, **own)) for _ in range(2))
        x = batch(9, 8)
        keep = torch.tensor([0, 3, 4, 6])
        x[[2, 5, 7]] = torch.tensor([float("nan"), float("inf"), -float("inf")]).view(3, 1, 1, 1)
        x[1, 0, 2, 3] = -3e19  # finite; its square is not
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the others are in range: nothing to say about scaling
            y, expected = mixed(x), clean(x[keep])
        assert torch.allclose(y[keep], expected, atol=1e-5), method
        assert (y[[1, 2, 5, 7]] == y[[1, 2, 5, 7]].mean()).all(), "a poisoned image gets the uniform prediction"
        assert mixed.info[0].poisoned == (1, 2, 5, 7)
        assert (mixed.predict(x)[1] == mixed.predict(x)[2]).all(), method
        assert all(t.isfinite().all() for t in leaves(mixed.state).values()), method


def test_no_object_and_no_memory_of_a_tensor_is_left_behind_by_a_step():
    def held():
        gc.collect()
        objects = gc.get_objects()
        ours = [o for o in objects if str(type(o).__module__).startswith("tribe.")]
        tensors = [o for o in objects if issubclass(type(o), torch.Tensor) and not nn.parameter.is_lazy(o)]
        return len(ours), len(tensors), sum(t.untyped_storage().nbytes() for t in tensors)

    adapter = tribe.adapt(small_network())
    for seed in range(4):
        adapter(batch(seed, 4))
    before = held()
    for seed in range(120):
        adapter(batch(seed, 4))
    assert all(now <= earlier for now, earlier in zip(held(), before, strict=True))


@pytest.mark.parametrize("classes", [2, 7, 20, 21, 300, 301])
def test_defaults_follow_the_number_of_classes(classes):
    method = tribe.methods.create("tribe", classes=classes)
    assert method.eta == max(0.0005 * classes, 0.01)
    assert (method.h0, method.gamma) == ((0.05, 0.0) if classes <= 20 else (0.2, 0.1) if classes <= 300 else (0.4, 0.5))
    paper = tribe.methods.create("tribe", classes=classes, convention="paper")
    assert paper.eta == 0.0005 * classes
    assert (paper.anchor_on, paper.pooled_ddof, paper.rate_cap, paper.gamma_over) == ("posteriors", 0, False, "all")
    mixed = tribe.methods.create("tribe", classes=classes, convention="paper", pooled_ddof=1)
    assert (mixed.pooled_ddof, mixed.rate_cap) == (1, False)
    assert mixed.norm.pooled_ddof == 1


@pytest.mark.parametrize("name", ["tribe", "selftrain/fixmatch", "tribe+time"])
@pytest.mark.parametrize(("old", "new"), [(10, 100), (1000, 10), (100, 1000)])
def test_a_copy_with_other_classes_has_their_defaults(name, old, new):
    """Catches thresholds of 10 classes in a method for 1000: dataclasses.replace passes on what defaults were."""
    copy = with_fields(tribe.methods.create(name, classes=old), classes=new)
    assert copy == tribe.methods.create(name, classes=new)
    eta = get_fields(copy)["eta"]
    assert json.dumps(eta) == repr(eta) == str(max(0.0005 * new, 0.01))
    assert with_fields(copy, classes=old) == tribe.methods.create(name, classes=old)
    given = tribe.methods.create(name, classes=old, eta=0.3, h0=0.25)
    kept = get_fields(with_fields(given, classes=new))
    assert (kept["eta"], kept["h0"], kept["gamma"]) == (0.3, 0.25, get_fields(copy)["gamma"])  # what was given stays


def test_presets_are_the_published_numbers():
    preset = tribe.methods.get("tribe").preset
    assert [
        (p.classes, p.eta, p.gamma, p.h0, p.lr) for p in map(preset, ("mnist", "cifar10", "cifar100", "imagenet"))
    ] == [
        (10, 0.01, 0.0, 0.05, 1e-3),
        (10, 0.01, 0.0, 0.05, 1e-3),
        (100, 0.05, 0.1, 0.2, 1e-3),
        (1000, 0.5, 0.5, 0.4, 5e-4),
    ]
    assert preset("cifar10", lr=1e-4).lr == 1e-4


def test_conventions_give_different_numbers():
    """A convention that changed nothing would be a field that is not wired."""
    x = [batch(seed, 12) for seed in range(4)]
    digests = set()
    names = {"convention": "paper", "anchor_on": "posteriors", "pooled_ddof": 0, "rate_cap": False, "gamma_over": "all"}
    variants = [{}, *({name: value} for name, value in names.items())]
    for fields in variants:
        adapter = tribe.adapt(small_network(), eta=0.3, gamma=0.3, h0=0.9, **fields)
        for own in x:
            adapter(own)
        digests.add(adapter.digest())
    assert len(digests) == len(variants)


def test_a_custom_augmentation_is_called_once_per_stream_on_its_batch():
    shapes = []

    def flip(x):
        shapes.append(tuple(x.shape))
        return x.flip(-1)

    tribe.adapt(small_network(), streams=3, augment=flip)(images(3, 5))
    assert shapes == [(5, 3, 8, 8)] * 3


def test_networks_without_batchnorm_run_the_trinet_on_their_affine_parameters():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        net[-1].weight.mul_(20)
    adapter = tribe.adapt(net, h0=0.9, augment=lambda x: x.flip(-1))
    before = adapter.predict(batch(9))
    for seed in range(4):
        adapter(batch(seed))
    assert adapter.state.pair.mean.shape == (2, 4, 0)
    assert not torch.equal(before, adapter.predict(batch(9)))
    assert (adapter.export()(batch(9)) - adapter.predict(batch(9))).abs().max() <= 1e-5
