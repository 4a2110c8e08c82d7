"""Every method with a time filter: the answers are the filter's, and what the method learns stays the same."""

import dataclasses

import pytest
import torch

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import digest
from tribe.filters.cofa import Cofa
from tribe.filters.markov import Markov
from tribe.methods import Timed, timed, with_filter
from tribe.methods.lame import Lame
from tribe.methods.source import Source
from tribe.testing import CLASSES, images, ready, small, small_network

EAGER = Markov(evidence_on=0, evidence_drift=0)  # on from the first images, so that something is filtered
PROBABILITIES = {name for name in methods.names() if methods.get(name).output == "probabilities"}


def batches():
    """Two streams; the second batch has padding, the third a bad image."""
    for seed in range(3):
        x, valid = images(2, 6, seed), torch.ones(2, 6, dtype=torch.bool)
        valid[1, 4:] = seed != 1
        x[0, 2, 0, 3, 3] = float("nan") if seed == 2 else 0.5
        yield x, valid


@pytest.mark.parametrize("name", methods.names())
def test_answers_are_filtered_and_learning_is_not(name):
    net, alone = Backbone(small_network()), small(ready(name))
    state, played = alone.init(net, 2, seed=3), []
    for x, valid in batches():
        output, state = alone.step(net, state, x, valid)
        played.append((x, valid, output, digest(state)))
    for rule in (EAGER, Cofa()):
        both, used = with_filter(alone, rule), False
        after, time = both.init(net, 2, seed=3), rule.init(2, CLASSES, torch.empty(0))
        assert both.output == alone.output
        for x, valid, output, own in played:
            answer, after = both.step(net, after, x, valid)
            assert digest(after.inner) == own
            filtered = rule.step(time, output.clamp_min(1e-37).log() if name in PROBABILITIES else output, valid)
            time, used = filtered.state, used | filtered.used.any()
            wanted = filtered.logits.exp() if name in PROBABILITIES else filtered.logits
            assert torch.allclose(answer[filtered.used], wanted[filtered.used], rtol=0, atol=1e-6)
            assert torch.equal(answer[~filtered.used], output[~filtered.used])
            if name in PROBABILITIES:
                assert torch.allclose(answer[valid].sum(-1), torch.ones(()), rtol=0, atol=1e-5)
        assert used


def test_names_fields_and_classes():
    cls = methods.get("tribe+time")
    assert cls is methods.get("tribe+time") is timed(methods.get("tribe"), Markov)  # one class, so that objects compare
    made = methods.create("tribe+time", classes=CLASSES, within="batch", eta=0.01)
    assert isinstance(made, Timed)
    assert made.name == "tribe+time"
    assert (made.inner, made.time_filter) == (
        methods.create("tribe", classes=CLASSES, eta=0.01),
        Markov(within="batch"),
    )
    assert dataclasses.replace(made, within="past").time_filter == Markov()
    assert made == with_filter(methods.create("tribe", classes=CLASSES, eta=0.01), Markov(within="batch"))
    assert made != dataclasses.replace(made, evidence_on=11)
    assert "hidden Markov" in cls.__doc__
    assert methods.create("selftrain/fixmatch+cofa", classes=CLASSES).inner == methods.create(
        "selftrain/fixmatch", classes=CLASSES
    )


def test_wrong_names_and_fields_are_refused_in_words():
    with pytest.raises(ValueError, match=r"time filter 'tiem'.*'time'"):
        methods.get("tribe+tiem")
    with pytest.raises(ValueError, match="unknown method 'trbe'"):
        methods.get("trbe+time")
    with pytest.raises(
        TypeError, match=r"'tribe\+time' has no field 'withn': did you mean 'within'|has no field 'withn'"
    ):
        methods.create("tribe+time", withn="batch")
    with pytest.raises(ValueError, match="within is 'past' or 'batch'"):
        methods.create("source+time", within="future")
    with pytest.raises(ValueError, match=r"source\+time has a time filter already"):
        with_filter(methods.create("source+time"), Cofa())


def test_fields_that_clash_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Clash(Source):
        """A custom method with a field of the filter."""

        within: int = 3

    @dataclasses.dataclass(frozen=True)
    class Inner(Source):
        """A custom method with a field that a method with a filter has for itself."""

        inner: int = 3

    with pytest.raises(TypeError, match="source and 'time' both have a field 'within': rename"):
        with_filter(Clash(), Markov())
    with pytest.raises(TypeError, match=r"source\+time has a field 'inner': rename it"):
        with_filter(Inner(), Markov())
    assert with_filter(ready("selftrain"), Markov()).rule == "balanced"  # the method's own field


def test_a_network_whose_classes_are_unknown_is_refused():
    class Headless(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(x).mean((2, 3))

    with pytest.raises(ValueError, match="a time filter needs the number of classes"):
        with_filter(Source(), Cofa()).init(Backbone(Headless()))


def test_predictions_come_from_the_current_belief():
    """`predict` is what the next step answers; `follow` is what a frozen adapter does: only the filter goes on."""
    net, method = Backbone(small_network()), with_filter(small(ready("tent")), EAGER)
    state = method.init(net)
    for x, _ in batches():
        _, state = method.step(net, state, x[:1])
    before, x = digest(state), images(1, 6, 9)
    predicted = method.predict(net, state, x)
    answer, after = method.predict_and_advance(net, state, x)
    assert torch.equal(answer, predicted)
    assert digest(state) == before
    assert digest(after.inner) == digest(state.inner)
    assert int(after.time.images) == int(state.time.images) + 6
    assert torch.allclose(method.step(net, state, x)[0], predicted, rtol=0, atol=1e-5)


def test_half_precision_is_filtered_in_float32():
    net, method = Backbone(small_network(dtype=torch.bfloat16)), with_filter(Source(classes=CLASSES), EAGER)
    state = method.init(net)
    assert state.time.belief.dtype == torch.float32
    y, state = method.step(net, state, images(1, 6).bfloat16())
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()
    assert state.time.belief.dtype == torch.float32


def test_probabilities_of_zero_are_filtered():
    """Catches log 0: the probabilities that LAME returns may underflow."""
    method = with_filter(Lame(classes=CLASSES), EAGER)
    time = method.time_filter.init(1, CLASSES, torch.empty(0))
    certain = torch.eye(CLASSES)[torch.tensor([[0, 0, 0, 1, 1, 0]])]
    answer, time = method.filter_after(Backbone(small_network()), time, certain, None)
    assert answer.isfinite().all()
    assert torch.allclose(answer.sum(-1), torch.ones(()), atol=1e-5)
