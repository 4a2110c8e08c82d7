"""Pipelines and their names: the answers are the filter's, and what the method learns stays the same."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import digest
from tribe.filters.cofa import Cofa
from tribe.filters.markov import Markov
from tribe.health.guard import Guard
from tribe.methods import Pipeline, with_fields
from tribe.methods.lame import Lame
from tribe.methods.source import Source
from tribe.testing import CLASSES, images, ready, small, small_network

EAGER = Markov(evidence_on=0, evidence_drift=0)  # on from the first images, so that something is filtered


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
        both, used = Pipeline(alone, filter=rule), False
        after, time = both.init(net, 2, seed=3), rule.init(2, CLASSES, torch.empty(0))
        for x, valid, output, own in played:
            answer, after = both.step(net, after, x, valid)
            assert digest(after.method) == own
            filtered = rule.step(time, output, valid)
            time, used = filtered.state, used | filtered.used.any()
            assert torch.allclose(answer[filtered.used], filtered.logits[filtered.used], rtol=0, atol=1e-6)
            assert torch.equal(answer[~filtered.used], output[~filtered.used])
        assert used


def test_a_name_builds_the_parts_and_routes_the_fields():
    made = methods.create("tribe+guard+time", classes=CLASSES, eta=0.01, speed=0.01, within="batch")
    assert made == Pipeline(
        methods.create("tribe", classes=CLASSES, eta=0.01), Guard(speed=0.01), Markov(within="batch")
    )
    assert made.name == "tribe+guard+time"
    assert with_fields(made, within="past", eta=0.02).filter == Markov()
    assert methods.get("tribe+guard+time") is methods.get("tribe")
    assert methods.create("selftrain/fixmatch+cofa", classes=CLASSES).method == methods.create(
        "selftrain/fixmatch", classes=CLASSES
    )
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tribe", ("tribe", None, None, None)),
        ("tribe+time", ("tribe", None, None, "time")),
        ("tribe+watch", ("tribe", None, "watch", None)),
        ("tribe+guard+cofa", ("tribe", None, "guard", "cofa")),
        ("selftrain/bn+st", ("selftrain", "bn+st", None, None)),
        ("selftrain/bn+st+anchor+guard+time", ("selftrain", "bn+st+anchor", "guard", "time")),
        ("file.py:Mine+time", ("file.py:Mine", None, None, "time")),
    ],
)
def test_names_are_split_into_their_parts(name, parts):
    parsed = methods.parse(name)
    assert parsed == (*parts, None)
    assert parsed.alone + parsed.suffix == name


@pytest.mark.parametrize(
    ("name", "fields", "error", "word"),
    [
        ("tribe+tiem", {}, ValueError, "'time'"),
        ("tribe+gaurd", {}, ValueError, "'guard'"),
        ("trbe+time", {}, ValueError, "'trbe'"),
        ("tribe+time+guard", {}, ValueError, "comes last"),
        ("tribe+guard+rare", {}, ValueError, "comes last"),
        ("selftrain/fixmatch+time+guard", {}, ValueError, "comes last"),
        ("selftrain/fixmach+time", {}, ValueError, "did you mean 'fixmatch'"),
        ("tent/slow", {}, ValueError, "tent has no variant 'slow'"),
        ("tribe+time", {"withn": "batch"}, TypeError, "within"),
        ("source+time", {"within": "future"}, ValueError, "within"),
        ("selftrain", {"rule": "layer", "classes": 4}, ValueError, "unknown norm 'layer'"),
    ],
)
def test_wrong_names_and_fields_are_refused(name, fields, error, word):
    with pytest.raises(error, match=word):
        methods.create(name, **fields)


def test_a_pipeline_in_a_pipeline_is_refused():
    with pytest.raises(ValueError, match="pipeline already"):
        Pipeline(methods.create("source+time"), filter=Cofa())


def test_fields_that_clash_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Clash(Source):
        """A custom method with a field of the filter."""

        within: int = 3

    with pytest.raises(TypeError, match="'within'"):
        Pipeline(Clash(), filter=Markov())
    assert Pipeline(ready("selftrain"), filter=Markov()).method.rule == "balanced"


def test_a_network_whose_classes_are_unknown_is_refused():
    headless = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="a time filter needs the number of classes"):
        Pipeline(Source(), filter=Cofa()).init(Backbone(headless))


def test_predictions_come_from_the_current_belief():
    """`predict` is what the next step answers; `follow` is what a frozen adapter does: only the filter goes on."""
    net, method = Backbone(small_network()), Pipeline(small(ready("tent")), filter=EAGER)
    state = method.init(net)
    for x, _ in batches():
        _, state = method.step(net, state, x[:1])
    before, x = digest(state), images(1, 6, 9)
    predicted = method.predict(net, state, x)
    answer, after = method.predict_and_advance(net, state, x)
    assert torch.equal(answer, predicted)
    assert digest(state) == before
    assert digest(after.method) == digest(state.method)
    assert int(after.filter.images) == int(state.filter.images) + 6
    assert torch.allclose(method.step(net, state, x)[0], predicted, rtol=0, atol=1e-5)


def test_half_precision_is_filtered_in_float32():
    net, method = Backbone(small_network(dtype=torch.bfloat16)), Pipeline(Source(classes=CLASSES), filter=EAGER)
    state = method.init(net)
    assert state.filter.belief.dtype == torch.float32
    y, state = method.step(net, state, images(1, 6).bfloat16())
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()
    assert state.filter.belief.dtype == torch.float32


def test_certain_predictions_are_filtered():
    """Catches log 0: LAME's log-probabilities may be so low that their exponential is 0."""
    method = Pipeline(Lame(classes=CLASSES), filter=EAGER)
    time = method.filter.init(1, CLASSES, torch.empty(0))
    certain = 300 * (torch.eye(CLASSES) - 1)[torch.tensor([[0, 0, 0, 1, 1, 0]])]
    answer, time = method.filter_output(Backbone(small_network()), time, certain, None)
    assert answer.isfinite().all()
    assert torch.allclose(answer.logsumexp(-1), torch.zeros(()), atol=1e-5)
