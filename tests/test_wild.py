"""Networks, and ways of using them, as people have them: what is common elsewhere must not go wrong here in silence."""

import copy
import os
import threading

import pytest
import torch
from torch import Tensor, nn

import tribe
from tribe.engine.backbone import Backbone
from tribe.engine.graphs import Captured, CapturedSegments
from tribe.engine.state import leaves
from tribe.testing import CLASSES, images, informed, ready, small_network

METHODS = tribe.methods.names()
PLAIN = [name for name in METHODS if tribe.methods.get(name).needs is None]


class Around(nn.Module):
    """Runs a network in some way of its own."""

    def __init__(self, run, inner=None):
        super().__init__()
        self.inner, self.run = inner or small_network(), run

    def forward(self, x):
        return self.run(self.inner, x)


def batch(seed=0, size=6):
    return images(1, size, seed)[0]


def learner(net, method="tribe", **given):
    """An adapter that learns something of networks that were never trained."""
    fields = {"h0": 2.0} if method == "tribe" else {}
    return tribe.adapt(net, ready(method) if method != "tribe" else method, **given, **fields)


def after(net, method="tribe", steps=3, change=lambda x: x):
    adapter = learner(net, method)
    for seed in range(steps):
        adapter(change(batch(seed)))
    return adapter.predict(change(batch(9)))


# -- what a network does to its images --------------------------------------------------------------------------------


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


class Viewed(nn.Module):
    """Flattens feature maps with view, which needs them laid out as images are."""

    def __init__(self, flat=lambda x: x.view(x.size(0), -1)):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6 * 36, CLASSES)
        self.flat = flat

    def forward(self, x):
        return self.fc(self.flat(self.norm(self.conv(x)).relu()))


@pytest.mark.parametrize("method", PLAIN)
def test_a_network_may_flatten_with_view(method):
    expected = after(Viewed(lambda x: x.flatten(1)), method)
    assert torch.allclose(after(Viewed(), method), expected, atol=1e-4)


@pytest.mark.parametrize("trial", range(4))
def test_threads_that_find_out_at_once_that_a_network_flattens_with_view_all_go_on(trial):
    shared, wrong, start = Backbone(Viewed()), [], threading.Barrier(4)

    def learn(adapter):
        start.wait()
        try:
            adapter(batch(trial))
        except Exception as error:  # whatever it is, it is wrong
            wrong.append(error)

    threads = [threading.Thread(target=learn, args=(learner(shared),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert shared.moves == 1


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
    steps, state = kind(ready(method), net, record=lambda: lambda work: work), ready(method).init(net)
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


# -- several views of an image ----------------------------------------------------------------------------------------


def apart(inner, x):
    a, b = inner(torch.cat((x, x.flip(-1)))).chunk(2)
    return (a + b) / 2


def side_by_side(inner, x):
    return inner(torch.stack((x, x.flip(-1)), 1).flatten(0, 1)).unflatten(0, (-1, 2)).mean(1)


class Normed(nn.Module):
    """As `small_network`, with other normalisation."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc = nn.Conv2d(3, 6, 3), norm, nn.Linear(6, CLASSES)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.parametrize("method", ["bn", "tent", "tribe", "rotta", "cotta"])
@pytest.mark.parametrize("inner", [small_network, lambda: Normed(nn.GroupNorm(2, 6))], ids=["batch", "group"])
def test_views_that_lie_a_batch_apart_are_told_apart(inner, method):
    outcomes = []
    for run in (apart, side_by_side):
        adapter = learner(Around(run, inner()), method, streams=2)
        told = [adapter(images(2, 6, seed)) for seed in range(3)]
        outcomes.append(torch.stack(told))
    assert torch.allclose(*outcomes, atol=1e-4)


@pytest.mark.parametrize("run", [apart, side_by_side])
@pytest.mark.parametrize("method", ["bn", "tent", "tribe"])
def test_cameras_do_not_meet_in_a_network_that_looks_twice(run, method):
    adapter = learner(Around(run), method, streams=2)
    x = images(2, 6, 0)
    other = x.clone()
    other[1] = 1 - other[1]
    assert torch.equal(adapter.predict(x)[0], adapter.predict(other)[0])


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

    with pytest.raises(ValueError, match="which image they belong to cannot be determined"):
        learner(Around(shuffled))(batch())


# -- states that are kept ---------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its passes in a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = small_network()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.inner(x)


def test_a_network_that_counts_is_known_again(tmp_path):
    net = Counting()
    adapter = learner(net)
    adapter(batch())
    adapter.save(tmp_path / "a")
    assert tribe.load(tmp_path / "a", net).digest() == adapter.digest()
    other = Counting()
    other.passes += 1
    with pytest.raises(tribe.StateFileError, match="another model"):
        tribe.load(tmp_path / "a", other)


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_that_was_cast_keeps_what_one_of_a_cast_network_keeps(method):
    cast = tribe.adapt(small_network(), ready(method)).to(torch.bfloat16)
    net = Backbone(small_network()).to(torch.bfloat16)
    made = tribe.adapt(net, informed(cast.method, net))
    assert {n: t.dtype for n, t in leaves(cast.state).items()} == {n: t.dtype for n, t in leaves(made.state).items()}


@pytest.mark.parametrize("method", PLAIN)
def test_an_adapter_that_was_cast_can_be_loaded(tmp_path, method):
    adapter = tribe.adapt(small_network(), ready(method)).to(torch.bfloat16)
    adapter(batch())
    adapter.save(tmp_path / "a")
    with pytest.raises(tribe.StateFileError, match=r"tribe\.Backbone\(net\)\.to\(torch\.bfloat16\)"):
        tribe.load(tmp_path / "a", small_network())
    resumed = tribe.load(tmp_path / "a", Backbone(small_network()).to(torch.bfloat16))
    for seed in range(1, 3):
        assert torch.equal(resumed(batch(seed)), adapter(batch(seed)))
    assert resumed.digest() == adapter.digest()


def test_other_weights_of_a_state_dict_do_not_reach_adapters_that_share_the_network():
    shared = Backbone(small_network())
    one, two = learner(shared), learner(shared)
    before, kept = two.predict(batch()), two.snapshot()
    other = learner(small_network(seed=1))
    other(batch())
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.predict(batch(9)), other.predict(batch(9)))
    assert torch.equal(two.predict(batch()), before)
    assert torch.equal(two.restore(kept).predict(batch()), before)
    assert one.net.fingerprint() == other.net.fingerprint()
    with pytest.raises(ValueError, match="another network"):
        one.restore(kept)


def test_equal_weights_of_a_state_dict_are_not_written():
    shared = Backbone(small_network())
    one, two = learner(shared), learner(shared)
    versions = [t._version for t in (*shared.parameters(), *shared.buffers())]
    one.load_state_dict(two.state_dict())
    assert one.net is shared
    assert [t._version for t in (*shared.parameters(), *shared.buffers())] == versions


def test_a_state_dict_of_another_network_is_refused_where_source_knowledge_belongs_to_this_one():
    adapter = tribe.adapt(small_network(), ready("ttac"))
    before, net = adapter.digest(), adapter.net
    given = {k: t + 0.1 if k.startswith("net.model") else t for k, t in adapter.state_dict().items()}
    with pytest.raises(tribe.knowledge.KnowledgeError, match="belongs to another network"):
        adapter.load_state_dict(given)
    assert adapter.digest() == before
    assert adapter.net is net


# -- inside inference mode, threads, forks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda adapter: adapter.double(),
        lambda adapter: adapter.to(torch.bfloat16),
        copy.deepcopy,
        lambda adapter: learner(Backbone(small_network())),
        lambda adapter: learner(copy.deepcopy(adapter.net)),
    ],
    ids=["double", "bfloat16", "copy", "backbone", "copied network"],
)
def test_what_is_changed_in_inference_mode_still_learns(change):
    adapter = learner(small_network())
    adapter(batch())
    with torch.inference_mode():
        adapter = change(adapter)
    before = adapter.digest()
    assert adapter(batch(1)).isfinite().all()
    assert adapter.digest() != before


def test_what_is_exported_in_inference_mode_can_be_trained():
    adapter = learner(small_network())
    with torch.inference_mode():
        plain = adapter.export()
    plain.requires_grad_()(batch()).sum().backward()
    assert all(p.grad is not None for p in plain.parameters())


def test_a_copy_beside_a_learning_thread_is_a_state_that_was():
    adapter = learner(small_network())
    known, done = {adapter.digest()}, threading.Event()

    def learn():
        for seed in range(60):
            adapter(batch(seed))
            known.add(adapter.digest())
        done.set()

    thread = threading.Thread(target=learn)
    thread.start()
    copies = set()
    while not done.is_set():
        copies.add(copy.deepcopy(adapter).digest())
    thread.join()
    assert copies <= known
    assert len(copies) > 1


def test_the_doctor_does_not_disturb_adapters_that_share_the_network():
    shared = Backbone(small_network())
    adapter, wrong, done = learner(shared), [], threading.Event()

    def learn():
        try:
            for seed in range(60):
                adapter(batch(seed))
        except Exception as error:  # whatever it is, it is wrong
            wrong.append(error)
        done.set()

    thread = threading.Thread(target=learn)
    thread.start()
    while not done.is_set():
        assert not tribe.doctor(shared, batch(0, 5)).problems
    thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_during_a_step_can_predict():
    inside, go_on = threading.Event(), threading.Event()

    def wait(inner, x):
        if threading.current_thread() is thread:
            inside.set()
            go_on.wait()
        return inner(x)

    adapter = learner(Around(wait))
    adapter.net.model.run = wait
    expected = None
    thread = threading.Thread(target=lambda: adapter(batch()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child has no thread pool
    try:
        expected = adapter.predict(batch(1))
        thread.start()
        inside.wait()
        if not (child := os.fork()):
            os._exit(0 if torch.equal(adapter.predict(batch(1)), expected) else 1)
        deadline = threading.Timer(30, lambda: os.kill(child, 9))
        deadline.start()
        status = os.waitpid(child, 0)[1]
        deadline.cancel()
        assert status == 0
    finally:
        go_on.set()
        thread.join()
        torch.set_num_threads(threads)


def test_an_adapter_whose_network_was_cast_by_another_says_so():
    shared = Backbone(small_network())
    one, two = learner(shared), learner(shared)
    one(batch()), two(batch())
    before = two.digest()
    one.double()
    with pytest.raises(RuntimeError, match=r"was moved or cast. Call \.to\(\) on this one, too"):
        two(batch())
    assert two.digest() == before
    two.double()
    assert torch.equal(one(batch(1)), two(batch(1)))


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_network_that_gives_probabilities_is_told_of_once(recwarn):
    adapter = learner(nn.Sequential(small_network(), nn.Softmax(-1)))
    adapter.predict(torch.full((2, 3, 8, 8), torch.nan))
    assert not recwarn
    for seed in range(3):
        adapter(batch(seed))
    (told,) = recwarn
    assert "Remove its Softmax" in str(told.message)
    assert told.filename == __file__


def test_numbers_that_are_not_finite_are_refused_before_anything_learns():
    net = Counting()
    net.aux = nn.BatchNorm2d(4)
    net.aux.running_var.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"not finite \(aux\.running_var\)"):
        learner(net)
    adapter = learner(small_network())
    given = {k: t / 0 if k.startswith("net.origin.affine") else t for k, t in adapter.state_dict().items()}
    with pytest.raises(ValueError, match=r"not finite \(1\.weight, 4\.weight"):
        adapter.load_state_dict(given)


def test_another_default_precision_changes_nothing():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(
                nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
            )
            self.fc = nn.Linear(6, CLASSES)

        def forward(self, x):
            return self.fc(self.body(x).relu().mean((2, 3)))

    net, expected = Mixed(), after(Mixed())
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


class Tagged(Tensor):
    """A tensor with a type of its own, as image libraries have."""


def test_a_subclass_of_tensor_leaves_no_trace():
    adapter, plain = learner(small_network()), learner(small_network())
    assert type(adapter(batch().as_subclass(Tagged))) is Tensor
    plain(batch())
    assert {type(t) for t in leaves(adapter.state).values()} == {Tensor}
    assert adapter.digest() == plain.digest()


@pytest.mark.parametrize("method", METHODS)
def test_padding_that_is_marked_touches_nothing_and_is_not_counted(method):
    adapter, alone = (tribe.adapt(small_network(), ready(method), streams=2) for _ in range(2))
    x = images(2, 6, 0)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1] = False  # this camera has no frames now
    padded = x.clone()
    padded[1] = torch.nan
    told = adapter(padded, valid)
    alone(padded)
    assert [info.images for info in adapter.info] == [6, 0]
    assert [info.skipped for info in adapter.info] == [0, 0]
    assert [info.poisoned for info in adapter.info] == [(), ()]
    assert [info.skipped for info in alone.info] == [0, 6]
    assert torch.equal(told[1], told[1, :1, :1].expand_as(told[1])), "all classes alike"
    assert torch.equal(adapter.predict(x, valid)[0], alone.predict(x)[0])
    assert torch.equal(adapter.predict(x, valid)[1], told[1])


@pytest.mark.parametrize(
    "valid", [torch.ones(6), torch.ones(5, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool), [True] * 6]
)
def test_a_mask_that_does_not_fit_is_refused(valid):
    adapter = learner(small_network())
    before = adapter.digest()
    with pytest.raises(ValueError, match=r"valid is a tensor of booleans, one for each image, of shape \(6,\)"):
        adapter(batch(), valid)
    assert adapter.digest() == before


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
