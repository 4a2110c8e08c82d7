"""Adapters with a time filter: what an engineer with a camera calls."""

import pytest
import torch
from torch import nn

import tribe
from networks import refused
from tribe.core.state import digest
from tribe.filters.markov import Markov
from tribe.testing import labels_in_bursts, predictions

CLASSES = 4


def reader():
    """A network that reads its logits from its images: the mean of channel k says how likely class k is."""
    model = nn.Sequential(nn.BatchNorm2d(CLASSES), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CLASSES, CLASSES))
    with torch.no_grad():
        model[-1].weight.copy_(40 * torch.eye(CLASSES))
        model[-1].bias.fill_(-20)
    return model.eval()


def camera(streams=1, images=200, stay=0.95, seed=0):
    """Images (S, N, 4, 2, 2) in [0, 1] for that network, in bursts, and their labels (S, N)."""
    labels = labels_in_bursts(streams, images, CLASSES, stay, seed=seed)
    logits = predictions(labels, CLASSES, margin=2, seed=seed).clamp(-19, 19)
    pixels = (logits.float() / 40 + 0.5)[..., None, None].expand(-1, -1, -1, 2, 2)
    return pixels + 0.005 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), labels


def answer(adapter, images, batch=20, **given):
    """Call the adapter batch by batch, over the last axis but the image's."""
    axis = images.dim() - 4
    return torch.cat([adapter(x, **given) for x in images.split(batch, axis)], axis)


def errors(logits, labels):
    return (logits.argmax(-1) != labels).float().mean().item()


# -- making one --------------------------------------------------------------------------------------------------------


def test_it_helps_in_bursts_and_says_so():
    (x,), (labels,) = camera(images=400)
    plain, timed = tribe.adapt(reader(), "source"), tribe.adapt(reader(), "source", time="auto")
    assert timed.method.name == "source+time"
    assert timed.time[0].on is False
    without, with_it = answer(plain, x), answer(timed, x)
    assert errors(with_it[100:], labels[100:]) < 0.5 * errors(without[100:], labels[100:])
    assert plain.time is None
    (info,) = timed.time
    assert info.on
    assert info.burst > 3  # it starts at 2
    assert info.evidence > 10
    assert tribe.adapt(reader(), "source", time="cofa").time is None  # it has nothing to report


def test_a_name_an_object_and_a_method_give_the_same_filter():
    made = [
        tribe.adapt(reader(), "tent", time="auto"),
        tribe.adapt(reader(), "tent", time="time"),
        tribe.adapt(reader(), "tent", time=Markov()),
        tribe.adapt(reader(), "tent+time"),
        tribe.adapt(reader(), tribe.methods.create("tent+time", classes=CLASSES)),
        tribe.adapt(reader(), tribe.methods.create("tent", classes=CLASSES), time="auto"),
    ]
    assert all(adapter.method == made[0].method for adapter in made)
    whole = tribe.adapt(reader(), "tent", time=Markov(within="batch"))
    assert whole.method == tribe.adapt(reader(), "tent+time", within="batch").method


@pytest.mark.parametrize("given", [{"time": "auto"}, {"guard": True}, {"health": True, "time": "cofa"}], ids=str)
@pytest.mark.parametrize("make", [tribe.adapt, tribe.fleet])
def test_a_method_that_is_built_is_told_the_number_of_classes(make, given):
    """For a network that does not tell it."""
    headless = nn.Sequential(nn.Conv2d(3, CLASSES, 3), nn.BatchNorm2d(CLASSES), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    made = make(headless, tribe.methods.create("source"), classes=CLASSES, **given)
    assert made.method == make(headless, "source", classes=CLASSES, **given).method
    with pytest.raises(ValueError, match="the method was built for 5 classes; the network has 4"):
        make(headless, tribe.methods.create("source", classes=5), classes=CLASSES, **given)


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("tent", {"time": "tiem"}, r"time filter 'tiem'.*'time'"),
        ("tent+tiem", {}, r"time filter 'tiem'.*'time'"),
        ("tent+time", {"time": "auto"}, r"tent\+time has a time filter already"),
        ("source", {"time": Markov(training_shares=(1, 1))}, "training_shares has 2 shares; the network has 4 classes"),
    ],
    ids=str,
)
def test_a_wrong_filter_is_refused_in_words(method, given, words):
    with pytest.raises(ValueError, match=words):
        tribe.adapt(reader(), method, **given)


class TwoHeads(nn.Module):
    """The last Linear layer, with 7 outputs, does not classify; the one before, with 4, does."""

    def __init__(self):
        super().__init__()
        self.norm, self.head, self.other = nn.BatchNorm2d(CLASSES), nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, 7)

    def forward(self, x):
        return self.head(self.norm(x).mean((2, 3)))


@pytest.mark.parametrize("rule", ["auto", "cofa"])
def test_a_layer_that_was_wrongly_taken_to_classify_is_named(rule):
    """Before the filter fails with the sizes of its tensors."""
    (x,), _ = camera(images=6)
    words = "the network gives 4 classes; the adapter was made for 7, the outputs of its layer 'other'"
    adapter, fleet = tribe.adapt(TwoHeads(), "tent", time=rule), tribe.fleet(TwoHeads(), "tent", time=rule)
    fleet.add("door")
    for call in (adapter, adapter.predict):
        with pytest.raises(ValueError, match=words):
            call(x)
    for call in (fleet, fleet.predict):
        with pytest.raises(ValueError, match=words):
            call({"door": x})
    named = tribe.Backbone(TwoHeads(), classifier="head")
    assert tribe.adapt(named, "tent", time=rule)(x).shape == (6, CLASSES)


# -- life cycle --------------------------------------------------------------------------------------------------------


def test_a_frozen_adapter_goes_on_filtering():
    (x,), (labels,) = camera(images=240)
    adapter = tribe.adapt(reader(), "tribe", time="auto")
    answer(adapter, x[:100])
    before = digest(adapter.state.method)
    images = int(adapter.state.filter.images)
    adapter.freeze()
    frozen = answer(adapter, x[100:])
    assert digest(adapter.state.method) == before
    assert int(adapter.state.filter.images) == images + 140
    assert adapter.time[0].on
    plain = tribe.adapt(reader(), "source").predict(x[100:])
    assert errors(frozen, labels[100:]) < errors(plain, labels[100:])
    adapter.unfreeze()
    answer(adapter, x[:20])
    assert digest(adapter.state.method) != before


@pytest.mark.parametrize("frozen", [False, True])
def test_predict_answers_as_the_next_call_and_changes_nothing(frozen):
    (x,), _ = camera(images=140)
    adapter = tribe.adapt(reader(), "source", time="auto")
    answer(adapter, x[:100])
    if frozen:
        adapter.freeze()
    before, report = adapter.digest(), adapter.time
    predicted = adapter.predict(x[100:])
    assert torch.equal(adapter.predict(x[100:]), predicted)
    assert adapter.digest() == before
    assert adapter.time == report
    assert torch.equal(adapter(x[100:]), predicted)
    assert adapter.digest() != before


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["source", "tribe"])
def test_order_gives_the_order_in_time(method):
    """Answers come back in the order of the images, and are those of the sorted batch."""
    x, _ = camera(streams=2, images=120)
    sorted_, mixed = (tribe.adapt(reader(), method, time="auto", streams=2) for _ in range(2))
    for i, batch in enumerate(x.split(30, 1)):
        wanted = sorted_(batch)
        shuffle = torch.stack([torch.randperm(30, generator=torch.Generator().manual_seed(i + s)) for s in range(2)])
        scrambled = torch.stack([batch[s, shuffle[s]] for s in range(2)])
        times = 100 * i + shuffle * 0.5  # the image at place p is number shuffle[p] in time
        assert torch.equal(mixed(scrambled, order=times), torch.stack([wanted[s, shuffle[s]] for s in range(2)]))
    assert mixed.digest() == sorted_.digest()


def test_order_carries_the_mask_and_bad_images_along():
    (x,), _ = camera(images=90)
    adapter, mixed = (tribe.adapt(reader(), "source", time="auto") for _ in range(2))
    x[40] = torch.nan
    valid = torch.arange(90) % 7 != 3
    back = torch.arange(90).flip(0)
    wanted = adapter(x, valid)
    answers = mixed(x.flip(0), valid.flip(0), order=back)
    assert torch.equal(answers, wanted.flip(0))
    assert (adapter.info[0].poisoned, mixed.info[0].poisoned) == ((40,), (49,))
    assert mixed.info[0].skipped == 1
    ties = tribe.adapt(reader(), "source", time="auto")
    assert torch.equal(ties(x, valid, order=torch.zeros(90, dtype=torch.int64)), wanted)  # ties keep their order


@pytest.mark.parametrize("method", ["source", "tribe"])
def test_padding_has_no_time(method):
    """Whatever ``order`` says of it, NaN too."""
    (x,), _ = camera(images=60)
    valid = torch.arange(60) % 7 != 3
    times = torch.arange(60.0).flip(0)
    answers = []
    for none in (torch.nan, 0.0, torch.inf):
        adapter = tribe.adapt(reader(), method, time="auto")
        answers.append((adapter(x, valid, order=times.where(valid, none)), adapter.digest()))
    for logits, digest_ in answers[1:]:
        assert torch.equal(logits, answers[0][0])
        assert digest_ == answers[0][1]
    with pytest.raises(ValueError, match="order holds NaN"):
        adapter(x, valid, order=times.where(~valid, torch.nan))


def test_predict_and_learn_take_an_order():
    (x,), _ = camera(images=240)
    one, other = (tribe.adapt(reader(), "source", time="auto") for _ in range(2))
    back = torch.arange(120).flip(0)
    one.learn(x[:120])
    other.learn(x[:120].flip(0), order=back)
    assert other.digest() == one.digest()
    assert one.time[0].on
    assert torch.equal(other.predict(x[120:].flip(0), order=back), one.predict(x[120:]).flip(0))
    assert not torch.equal(other.predict(x[120:].flip(0)), one.predict(x[120:]).flip(0))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (torch.arange(5), r"one for each image, of shape \(6,\); got torch.int64 of shape \(5,\)"),
        (torch.arange(6).view(1, 6), r"of shape \(6,\)"),
        (torch.tensor([0, 1, 2, 3, float("nan"), 5]), "order holds NaN"),
        (torch.ones(6, dtype=torch.bool), "order is a tensor of numbers.*got torch.bool"),
        (torch.ones(6, dtype=torch.complex64), "order is a tensor of numbers.*got torch.complex64"),
        (torch.ones(6).to(torch.float8_e4m3fn), "order is a tensor of numbers.*got torch.float8_e4m3fn"),
        ([0, 1, 2, 3, 4, 5], r"order is a tensor of numbers.*got \[0, 1, 2, 3, 4, 5\]"),
    ],
    ids=["too few", "a row too many", "nan", "bool", "complex", "float8", "list"],
)
def test_a_wrong_order_is_refused_in_words_and_changes_nothing(order, words):
    (x,), _ = camera(images=6)
    adapter = tribe.adapt(reader(), "tent", time="auto")
    with refused(adapter, ValueError, words):
        adapter(x, order=order)
