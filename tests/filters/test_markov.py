"""The Markov filter: its settings, and how it follows bursts, changes of class and streams that change their nature."""

import math

import numpy as np
import pytest
import torch

from tribe import filters, methods
from tribe.filters import markov
from tribe.filters.markov import Markov
from tribe.testing import labels_in_bursts, predictions

CLASSES = 10


def play(rule, logits, state=None, batch=50):
    """The answers (S, N, K), where they are used (S, N), and the state at the end."""
    streams, _, classes = logits.shape
    state = rule.init(streams, classes, logits.new_empty(0)) if state is None else state
    answers, used = [], []
    for z in logits.split(batch, 1):
        filtered = rule.step(state, z, torch.ones(z.shape[:2], dtype=torch.bool))
        answers.append(torch.where(filtered.used.unsqueeze(-1), filtered.logits, z))
        used.append(filtered.used)
        state = filtered.state
    return torch.cat(answers, 1), torch.cat(used, 1), state


def errors(answers, labels):
    return (answers.argmax(-1) != labels).double().mean().item()


# -- settings ----------------------------------------------------------------------------------------------------------


BELOW_ONE = "temperature_margin", "rate_step", "least_rate", "marginal_step", "recent_memory", "likelihood_floor"
NOT_RISING = (), (1.0, 0.0), -2.0, True, (2.0, 1.0), "1", (1.0, math.nan)
NOT_SHARES = (), 0.5, torch.ones(2, 2), torch.ones(()), (0.5, -0.5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"within": "future"}, "within"),
        *[({"temperatures": wrong}, "temperatures is a sequence") for wrong in NOT_RISING],
        *[({"training_shares": wrong}, "training_shares is a sequence") for wrong in NOT_SHARES],
        *[({name: wrong}, f"{name} of time") for name in BELOW_ONE for wrong in (-0.1, 1)],
        ({"marginal_step": math.nan}, "marginal_step of time is a finite number"),
        ({"recent_memory": True}, "recent_memory of time is a finite number"),
        *[
            ({name: -1}, f"{name} of time is not negative")
            for name in ("evidence_on", "evidence_most", "evidence_drift")
        ],
        ({"evidence_most": 10}, "evidence_most is above evidence_on, 10"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_in_words(fields, words):
    with pytest.raises(ValueError, match=words):
        Markov(**fields)


def test_an_unknown_setting_or_filter_is_refused_in_words():
    with pytest.raises(TypeError, match="patience"):
        filters.create("time", patience=3)
    with pytest.raises(ValueError, match=r"time filter.*'tiem'.*time"):
        filters.create("tiem")
    assert filters.resolve("auto") == Markov()
    assert filters.resolve(rule := Markov(within="batch")) is rule


def test_numbers_come_as_arrays_and_tensors_and_a_temperature_alone():
    assert Markov(temperatures=1) == Markov(temperatures=(1.0,))
    counts = [30, 10, 5]
    expected = filters.create("time", training_shares=counts)
    for given in (np.array(counts), torch.tensor(counts), torch.tensor(counts, dtype=torch.bfloat16)):
        assert filters.create("time", training_shares=given) == expected
        assert methods.create("source+time", training_shares=given).filter == expected


def test_training_shares_are_one_for_each_class():
    with pytest.raises(ValueError, match="training_shares"):
        Markov(training_shares=(1, 1, 2)).init(1, 4, torch.empty(0))
    assert Markov(training_shares=[1, 3]) == Markov(training_shares=(1.0, 3.0))


def test_training_shares_are_divided_out():
    """By hand: the network says 3 : 1, and saw the first class 3 times as often, so the image itself says 1 : 1."""
    rule = Markov(training_shares=(0.75, 0.25), temperatures=(1,), likelihood_floor=0)
    logits = torch.tensor([[[math.log(3), 0], [0, 0], [math.log(9), 0]]], dtype=torch.float64)
    filtered = rule.step(rule.init(1, 2, logits.new_empty(0)), logits, torch.ones(1, 3, dtype=torch.bool))
    first, second, third = filtered.logits[0].exp().tolist()
    assert first == pytest.approx([0.5, 0.5])
    assert second == pytest.approx([0.5, 0.5])  # equal logits are those of a bad image: they change nothing
    assert third == pytest.approx([0.75, 0.25])  # 9 : 1 of the network is 3 : 1 of the image; the prior is even
    assert filtered.state.images.tolist() == [2]
    scaled = Markov(training_shares=(3, 1), temperatures=(1,), likelihood_floor=0)  # shares need not sum to 1
    again = scaled.step(scaled.init(1, 2, logits.new_empty(0)), logits, torch.ones(1, 3, dtype=torch.bool))
    assert torch.allclose(again.logits, filtered.logits, rtol=0, atol=1e-12)


# -- changes of class --------------------------------------------------------------------------------------------------


def images_until_the_answer_follows(classes, gap, rule):
    """The filter is certain of class 0 after a long burst; each image says class 1, ``gap`` above all others."""
    bank = len(rule.temperatures)
    state = rule.init(1, classes, torch.empty(0, dtype=torch.float64))
    certain = torch.zeros(1, bank, classes, dtype=torch.float64)
    certain[..., 0] = 1
    state = state._replace(
        belief=certain, rate=state.rate * 0 + rule.least_rate, evidence=state.evidence * 0 + rule.evidence_most
    )
    logits = torch.zeros(1, 60, classes, dtype=torch.float64)
    logits[..., 1] = gap
    answers, _, _ = play(rule, logits, state)
    followed = answers[0].argmax(-1) == 1
    assert followed[int(followed.double().argmax()) :].all()  # once it follows it stays
    return int(followed.double().argmax()) + 1


def bound(classes, rate, ratio):
    """After n images the odds of the true class are at least ratio^n (rate / K) / (1 - rate + rate / K)."""
    return math.floor(math.log(1 + classes * (1 - rate) / rate) / math.log(ratio)) + 1


def ratio(gap, temperature, classes, floor):
    """How many times more likely the true class makes an image than another, with the floor of the likelihood."""
    largest, other = (math.exp(v) / (math.exp(gap / temperature) + classes - 1) for v in (gap / temperature, 0))
    return ((1 - floor) * largest + floor / classes) / ((1 - floor) * other + floor / classes)


@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("gap", [0.7, 2.0, 6.0, 30.0])
def test_a_wrong_class_is_left_within_the_bound(classes, gap, monkeypatch):
    """A class that is believed with certainty: how long it takes depends on K, the least rate and the likelihoods."""
    monkeypatch.setattr(markov, "LEAST_CONFIDENCE", 0.0)  # a temperature that starts again leaves it sooner
    for temperature in (1.0, 4.0):
        # It neither turns off, nor learns a faster rate: both would only shorten the time.
        rule = Markov(temperatures=(temperature,), evidence_most=1e6, rate_step=0)
        most = bound(classes, rule.least_rate, ratio(gap, temperature, classes, rule.likelihood_floor))
        needed = images_until_the_answer_follows(classes, gap, rule)
        assert needed <= most
        if gap >= 2 * temperature:  # the bound is sharp where each image says more than the prior
            assert needed >= most - 1


def test_a_class_that_was_never_seen_can_come():
    """Catches a marginal or a belief that excludes a class for good."""
    known = labels_in_bursts(2, 600, 3, 0.95)  # classes 0 to 2 of 10
    labels = torch.cat((known, torch.full((2, 40), 8), known[:, :60]), 1)
    logits = predictions(labels, CLASSES, margin=3)
    answers, used, state = play(Markov(), logits)
    assert used[:, 600:].all()
    assert errors(answers[:, 604:640], labels[:, 604:640]) <= 1 / 72  # of two streams, 36 images each
    assert errors(answers[:, 644:], labels[:, 644:]) < errors(logits[:, 644:], labels[:, 644:])
    assert state.marginal.amin() > 0


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_long_burst_stays_filtered_until_it_is_the_marginal():
    """The null model learns the class of a burst of thousands, and then the evidence falls: by the drift, and by what
    rho still says of a new class. A change of class turns the filter on again. See docs/time.md."""
    start, end = 1200, 4200
    labels = torch.cat(
        (labels_in_bursts(1, start, CLASSES, 0.95), torch.zeros(1, end - start), torch.full((1, 60), 3)), 1
    )
    labels = labels.long()
    logits = predictions(labels, CLASSES)
    answers, used, _ = play(Markov(), logits, batch=64)
    assert used[0, start : start + 1000].all()
    assert errors(answers[:, start : start + 1000], labels[:, start : start + 1000]) < 0.02
    assert not used[0, end - 100 : end].any()
    assert used[0, end + 30 :].all()
    assert errors(answers[:, end + 30 :], labels[:, end + 30 :]) < 0.1


@pytest.mark.parametrize("within", ["past", "batch"])
def test_a_stream_that_loses_its_bursts_and_finds_them_again(within):
    parts = ((400, 0.95), (800, 0), (400, 0.95))
    labels = torch.cat([labels_in_bursts(3, n, CLASSES, stay, seed=i) for i, (n, stay) in enumerate(parts)], 1)
    logits = predictions(labels, CLASSES)
    answers, used, _ = play(Markov(within=within), logits)
    assert used[:, 150:400].all()
    assert not used[:, 900:1200].any()
    assert used[:, 1400:].all()
    for first, last in ((150, 400), (1400, 1600)):
        assert errors(answers[:, first:last], labels[:, first:last]) < 0.5 * errors(
            logits[:, first:last], labels[:, first:last]
        )
    assert torch.equal(answers[:, 900:1200], logits[:, 900:1200])


def biased_predictions(images=1024, classes=1000):
    """Independent images of many classes; the network prefers some classes, and is wrong on four of five images."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (1, images), generator=draw)
    logits = 2 * torch.randn(classes, generator=draw) + 1.5 * torch.randn(1, images, classes, generator=draw)
    return labels, logits.scatter_add(2, labels.unsqueeze(-1), torch.full((1, images, 1), 6.0))


@pytest.mark.parametrize("within", ["past", "batch"])
def test_a_bias_among_many_classes_is_no_burst(within, monkeypatch):
    labels, logits = biased_predictions()
    _, used, _ = play(Markov(within=within), logits, batch=64)
    assert not used.any()
    monkeypatch.setattr(markov, "LEAST_CONFIDENCE", 0.0)  # the highest temperatures, nearly even, take it for one
    answers, used, _ = play(Markov(within=within), logits, batch=64)
    assert used.any()
    assert errors(answers, labels) > errors(logits, labels)


@pytest.mark.parametrize(
    "rule", [Markov(), Markov(within="batch"), filters.create("cofa")], ids=["past", "batch", "cofa"]
)
def test_huge_logits_mean_what_smaller_ones_with_the_same_differences_mean(rule):
    """In float64, where a shift by 2^40 leaves the differences nearly as they are."""
    logits = predictions(labels_in_bursts(2, 200, CLASSES, 0.95), CLASSES)
    answers, used, _ = play(rule, logits)
    far, far_used, _ = play(rule, logits + 2.0**40)
    assert used.any()
    assert torch.equal(used, far_used)
    assert torch.allclose(answers[used], far[used], rtol=0, atol=1e-2)


def test_what_the_filter_reports():
    labels = labels_in_bursts(1, 1600, CLASSES, 0.95)  # rho starts at bursts of two and needs that long
    rule, logits = Markov(), predictions(labels, CLASSES)
    (before,) = rule.info(rule.init(1, CLASSES, logits.new_empty(0)))
    assert (before.on, before.burst, before.evidence) == (False, 2, -10)
    _, used, state = play(rule, logits)
    (info,) = rule.info(state)
    assert info.on
    assert used[0, -1]
    assert 5 < info.burst < 40  # bursts of 20 images; a sharp temperature takes an error for a new class
    assert info.temperature in (1.5, 2.4)  # the logits are twice too large
    assert 10 < info.evidence <= 60


@pytest.mark.parametrize("within", ["past", "batch"])
def test_classes_that_a_network_excludes_do_not_stop_the_filter(within):
    rule, draw = Markov(within), torch.Generator().manual_seed(0)
    state, wrong, raw = rule.init(1, 10, torch.zeros(0)), 0, 0
    for batch in range(40):
        right = torch.full((1, 8), batch // 4 % 5)
        seen = torch.where(torch.rand(1, 8, generator=draw) < 0.3, torch.randint(5, (1, 8), generator=draw), right)
        logits = torch.randn(1, 8, 10, generator=draw) + 4 * torch.eye(10)[seen]
        logits[..., 7:] = -torch.inf
        filtered = rule.step(state, logits, torch.ones(1, 8, dtype=torch.bool))
        state = filtered.state
        answer = torch.where(filtered.used.unsqueeze(-1), filtered.logits, logits).argmax(-1)
        wrong, raw = wrong + int((answer != right).sum()), raw + int((logits.argmax(-1) != right).sum())
    assert state.belief.isfinite().all()
    assert wrong < 0.7 * raw
