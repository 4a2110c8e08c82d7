"""Probes of the source: its answers, and how far the statistics of images are from the source's."""

import pytest
import torch

import tribe
from tribe.core.backbone import Backbone
from tribe.health.probe import SPAN, ask, start_shift
from tribe.testing import small_network


@pytest.fixture(scope="module")
def net():
    return Backbone(small_network())


def images(streams, batch, seed=0):
    return torch.rand(streams, batch, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def every(x):
    return torch.ones(x.shape[:2], dtype=torch.bool)


def test_answers_are_the_sources_own(net):
    x = images(2, 10)
    answers, _ = ask(net, start_shift(net, 2), x, every(x), 4)
    assert answers.known[0].tolist() == [i % 4 == 0 for i in range(10)]
    source = tribe.methods.create("source", classes=net.classes)
    expected = source.predict(net, source.init(net, 2), x)
    assert torch.allclose(answers.logits[:, ::4], expected[:, ::4], atol=1e-5)
    assert not answers.logits[~answers.known].any()


def test_shift_grows_with_the_change_of_the_images(net):
    x = images(1, 64)
    found = []
    for change in (lambda t: t, lambda t: 0.7 * t, lambda t: 0.3 * t):
        found.append(ask(net, start_shift(net, 1), change(x), every(x), 4)[0].shift[0])
    assert bool((found[0] < found[2]).all())
    assert bool((found[1] < found[2]).all())


def test_statistics_do_not_depend_on_how_images_are_cut_into_batches(net):
    x = images(1, 4 * SPAN)
    whole, _ = ask(net, start_shift(net, 1), x, every(x), 1)
    state = start_shift(net, 1)
    for part in x.split(1, 1):
        single, state = ask(net, state, part, every(part), 1)
    assert torch.allclose(single.shift, whole.shift, rtol=0.35)


def test_nothing_is_known_before_the_first_probe_and_padding_is_none(net):
    x = images(1, 4)
    none, state = ask(net, start_shift(net, 1), x, torch.zeros(1, 4, dtype=torch.bool), 1)
    assert none.shift.tolist() == [[0, 0, 0]]
    assert not none.known.any()
    padded, _ = ask(net, state, torch.cat((x, torch.zeros_like(x)), 1), torch.tensor([[True] * 4 + [False] * 4]), 1)
    plain, _ = ask(net, start_shift(net, 1), x, every(x), 1)
    assert torch.allclose(padded.shift, plain.shift, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_an_image_that_does_not_count_leaves_no_trace_wherever_it_stands(net, value):
    x = images(2, 8)
    bad = torch.full_like(x[:, :1], value)
    plain, left = ask(net, start_shift(net, 2), x, every(x), 4)
    for place in (0, 3, 4, 8):
        with_bad = torch.cat((x[:, :place], bad, x[:, place:]), 1)
        valid = every(with_bad)
        valid[:, place] = False
        answers, state = ask(net, start_shift(net, 2), with_bad, valid, 4)
        assert torch.equal(answers.shift, plain.shift)
        assert all(map(torch.equal, state, left))
        kept = [i for i in range(9) if i != place]
        assert torch.equal(answers.known[:, kept], plain.known)
        assert torch.allclose(answers.logits[:, kept], plain.logits, atol=1e-6)
        assert not answers.known[:, place].any()


def test_a_stream_that_may_have_changed_is_probed_more_often_and_the_others_are_not(net):
    x, often = images(2, 32), torch.tensor([True, False])
    answers, left = ask(net, start_shift(net, 2), x, every(x), 16, often=often)
    assert answers.known.sum(1).tolist() == [8, 2]
    assert answers.weight.tolist() == [0.25, 1]
    for i, rate in enumerate((4, 16)):
        alone, state = ask(net, start_shift(net, 1), x[[i]], every(x[[i]]), rate)
        assert torch.equal(alone.known[0], answers.known[i])
        assert torch.allclose(alone.shift[0], answers.shift[i], atol=1e-6)
        assert torch.allclose(state.mean[0], left.mean[i], atol=1e-6)
