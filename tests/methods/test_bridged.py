"""The bridge: classes of other code bases, whose forward adapts in place, in our streams, and each refusal."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import tribe
from networks import batch
from others import OthersTent
from tribe.methods.bridged import bridge_class
from tribe.testing import CLASSES, images, small_network


def tent(net, lr=1e-3):
    return OthersTent(net, lr)


class Does(nn.Module):
    """Adapts with any function of the module, the images and the logits, which returns the output."""

    def __init__(self, model, work):
        super().__init__()
        self.model, self.work, self.seen = model, work, []

    def forward(self, x):
        return self.work(self, x, self.model(x))


def does(work):
    def factory(net):
        return Does(net, work)

    return tribe.bridge(factory)


@pytest.fixture
def digits(few_digits):
    data = tribe.datasets.create("live-mnist-c", data=few_digits, corruptions=("stripe",))
    return tribe.Stream(data, tribe.scenarios.create("gli-f", imbalance=1000), (5, 6))


def network():
    return tribe.models.load("compact", tribe.models.find("compact", "mnist"))


def test_a_tent_of_others_is_ours(digits):
    net, stream = tribe.Backbone(network().double()), digits
    ours = tribe.run(net, tribe.methods.create("tent", classes=10), stream, keep_outputs=True)
    theirs = tribe.run(net, tribe.bridge(tent), stream, keep_outputs=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.outputs.values, other.outputs.values, rtol=0, atol=1e-5)
    assert theirs[0].spec["method"]["name"] == "bridged-tent"
    source = tribe.run(net, tribe.methods.create("source"), stream, keep_outputs=True)
    assert (source[0].outputs.values - theirs[0].outputs.values).abs().max() > 0.1


def test_a_step_is_pure_and_streams_do_not_meet():
    net, method = tribe.Backbone(network().double()), tribe.bridge(OthersTent, lr=0.01)
    x = torch.rand(2, 8, 1, 28, 28, generator=torch.Generator().manual_seed(0)).double()
    state = method.init(net, 2)
    _, after = method.step(net, state, x)
    both, last = method.step(net, after, x)
    again = method.step(net, after, x)[0]
    assert torch.equal(both, again)
    assert torch.equal(method.predict(net, after, x), both)
    for i in range(2):
        alone = method.init(net, 1, i)
        for _ in range(2):
            logits, alone = method.step(net, alone, x[i : i + 1])
        torch.testing.assert_close(logits[0], both[i], rtol=0, atol=1e-12)
    valid = torch.tensor([[True] * 8, [False] * 8])
    logits, partly = method.step(net, after, x, valid)
    assert not logits[1].any()
    assert partly.modules[1] == after.modules[1] != last.modules[1]


def test_an_adapter_plays_it_with_snapshots_resets_copies_and_a_time_filter():
    adapter = tribe.adapt(small_network(), tribe.bridge(tent, lr=0.1), streams=2, time="auto")
    x = images(2, 6)
    first, snapshot = adapter(x), adapter.snapshot()
    second = adapter(x)
    assert not torch.equal(first, second)
    assert torch.equal(adapter.restore(snapshot)(x), second)
    assert adapter.info[0].images == 12
    assert torch.equal(adapter.reset()(x), first)
    assert len(adapter.info) == 2


def test_modules_that_no_state_names_are_freed():
    made = []

    def work(self, x, logits):
        made.append(weakref.ref(self))
        return logits

    adapter = tribe.adapt(small_network(), does(work), streams=2)
    valid = torch.tensor([[True] * 6, [False] * 6])
    for i in range(6):
        adapter(images(2, 6), valid if i % 2 else None)
    gc.collect()
    assert sum(ref() is not None for ref in made) <= 4, "the modules of this state and of the one before it"


def test_the_network_is_ordinary_and_keeps_its_relu_where_norm_layers_are_replaced():
    seen = []

    def others(net):
        assert not net.training
        assert all(p.requires_grad for p in net.parameters())
        for module in list(net.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.BatchNorm2d):
                    new = nn.BatchNorm2d(layer.num_features).eval()
                    new.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("act")})
                    setattr(module, name, new)
        seen.append(net)
        return net

    backbone, x = tribe.Backbone(network()), torch.rand(4, 1, 28, 28)
    answer = tribe.adapt(backbone, tribe.bridge(others))(x)
    torch.testing.assert_close(answer, network()(x), rtol=0, atol=1e-4)
    few = tribe.adapt(backbone.restricted_to([3, 1]), tribe.bridge(others))(x)
    torch.testing.assert_close(few, network()(x)[:, [3, 1]], rtol=0, atol=1e-4)


def test_random_numbers_follow_the_seed_and_leave_those_of_the_program_alone():
    def work(self, x, logits):
        return logits + torch.rand(1) + random.random() + np.random.rand()

    def run(seed):
        adapter = tribe.adapt(small_network(), does(work), seed=seed)
        return torch.stack([adapter(batch()), adapter(batch())])

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    one, two, other = run(3), run(3), run(4)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


def test_outputs_and_weights_that_are_not_finite_are_masked_and_change_nothing():
    def one_bad(self, x, logits):
        self.model[-1].bias.data.add_(1)
        return torch.where(torch.arange(len(x)).view(-1, 1) == 2, float("nan"), logits)

    adapter = tribe.adapt(small_network(), does(one_bad))
    before = adapter.state.modules.clone()
    logits = adapter(batch())
    assert not logits[2].any()
    assert logits[3].any()
    assert torch.equal(adapter.state.modules, before)
    assert adapter.info[0].skipped == 6

    def destroys(self, x, logits):
        next(self.parameters()).data.fill_(float("nan"))
        return logits

    adapter = tribe.adapt(small_network(), does(destroys))
    assert torch.equal(adapter(batch()), adapter(batch()))
    assert adapter.info[0].skipped == 12


def changes_its_input(self, x, logits):
    x.mul_(0.5)
    return logits


def keeps_a_graph(self, x, logits):
    self.loss = logits.sum()
    return logits


BAD = {
    "changes its input": (changes_its_input, "changes its input"),
    "keeps a graph": (keeps_a_graph, "cannot be copied"),
    "too few rows": (lambda self, x, logits: logits[1:], rf"expected logits.*6, {CLASSES}"),
    "too few classes": (lambda self, x, logits: logits[:, 1:], "expected logits"),
    "classes alone": (lambda self, x, logits: logits.argmax(1), "expected logits"),
    "a tuple": (lambda self, x, logits: (logits, x), "tuple"),
    "nothing": (lambda self, x, logits: None, "NoneType"),
    "whole numbers": (lambda self, x, logits: logits.long(), "expected logits"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_class_is_refused_in_words_and_nothing_is_lost(case):
    work, words = BAD[case]
    adapter = tribe.adapt(small_network(), does(work))
    if case == "keeps a graph":  # it cannot be copied for the second step
        adapter(batch())
    before = adapter.digest()
    with pytest.raises(ValueError, match=rf"bridged-factory.*{words}"):
        adapter(batch())
    assert adapter.digest() == before


def test_a_copy_that_reaches_the_original_is_refused():
    def hooked(net):
        def hook(*_):
            with torch.no_grad():
                net[-1].bias.add_(1)

        net.register_forward_hook(hook)
        return net

    with pytest.raises(ValueError, match="original"):
        tribe.adapt(small_network(), tribe.bridge(hooked))(batch())


class Twice(torch.optim.Optimizer):
    """An optimiser around another, as sharpness-aware ones are; both have the same groups."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self):
        self.base.step()
        self.base.step()


def test_an_optimiser_around_another_is_copied_whole():
    class Sharp(OthersTent):
        def __init__(self, model):
            super().__init__(model)
            self.optimizer = Twice(self.optimizer.param_groups[0]["params"])

    net, x = tribe.Backbone(small_network()), images(1, 6)
    method = tribe.bridge(Sharp)
    state = method.init(net)
    first, after = method.step(net, state, x)
    second, _ = method.step(net, after, x)
    assert not torch.equal(first, second)
    assert torch.equal(method.step(net, state, x)[0], first)
    copied = after.modules.held[int(after.modules)]
    assert copied.optimizer.param_groups is copied.optimizer.base.param_groups
    assert any(copied.optimizer.base.param_groups[0]["params"][0] is p for p in copied.parameters())


def test_bad_factories_are_refused():
    def nothing(net):
        return None

    def needs(net, cfg):
        return net

    def named(net, step=1):
        return net

    with pytest.raises(TypeError, match="NoneType"):
        tribe.adapt(small_network(), tribe.bridge(nothing))
    with pytest.raises(TypeError, match="needs a default"):
        tribe.bridge(needs)
    with pytest.raises(TypeError, match="step"):
        tribe.bridge(named)
    with pytest.raises(TypeError, match="rate"):
        tribe.bridge(tent, rate=1)


def test_an_argument_classes_is_their_number():
    def counted(net, classes=None):
        assert classes == CLASSES
        return net

    tribe.adapt(small_network(), bridge_class(counted)(classes=CLASSES))(batch())


def test_what_cannot_be_done_with_it_is_said(tmp_path, digits):
    net, method = tribe.Backbone(network()), tribe.bridge(tent)
    adapter = tribe.adapt(net, method)
    for words, call in (
        ("no file", lambda: adapter.save(tmp_path / "state.safetensors")),
        ("no file", lambda: tribe.fleet(net, method)),
        ("no file", lambda: tribe.run(net, method, digits, checkpoint=tmp_path / "checkpoint")),
        ("a way of its own", lambda: adapter.export()),
        ("no guard", lambda: tribe.adapt(net, method, guard=True)(torch.rand(8, 1, 28, 28))),
        ("no guard", lambda: adapter.compare()),
    ):
        with pytest.raises(ValueError, match=rf"bridged-tent.*{words}"):
            call()
    with pytest.raises(TypeError, match="no file"):
        torch.save(adapter.state_dict(), tmp_path / "state.pt")
    assert not (tmp_path / "state.safetensors").exists()
