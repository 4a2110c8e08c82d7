"""Watching: health, events and the last good state, through a real adapter."""

import math

import pytest
import torch

import tribe
from tribe.core.state import leaves
from tribe.health import Guard, Watch
from tribe.methods import EmptyState
from tribe.testing import images, ready, small_network
from tribe.testing.samples import small_backbone
from watching import pictures


def test_without_health_there_is_none_and_with_it_every_stream_has_one():
    assert tribe.adapt(small_network()).health is None
    assert tribe.adapt(small_network()).events == []
    adapter = tribe.adapt(small_network(), health=True, streams=2)
    assert adapter.method.name == "tribe+watch"
    for seed in range(3):
        adapter(pictures(2, 8, seed))
    first, second = adapter.health
    assert (first.images, second.images) == (24, 24)
    assert first.accuracy is first.low is first.high is first.overall is None
    assert first.calibrated is False
    assert sum(first.predicted) == 24
    assert first.followed == 1
    assert first.statistics > 0
    assert 0 <= first.source_agreement <= 1


def test_watching_changes_no_prediction_and_no_state_of_the_method():
    net, alone, watched = small_backbone(), ready("tribe"), ready("tribe+watch")
    state, seen = alone.init(net, 2), watched.init(net, 2)
    for seed in range(3):
        x = images(2, 6, seed)
        answer, state = alone.step(net, state, x)
        same, seen = watched.step(net, seen, x)
        assert torch.equal(answer, same)
    assert all(torch.equal(t, leaves(seen.method)[name]) for name, t in leaves(state).items())
    assert seen.guard.good == EmptyState()


def test_entropy_and_trusted_are_of_the_last_images_not_of_the_last_batch():
    strict = tribe.methods.create("tribe", classes=4, h0=0.005)  # trusts some images of these, not all
    adapter = tribe.adapt(small_network(), strict, streams=2, health=True)
    sums = torch.zeros(2, 3, dtype=torch.float64)
    for step in range(12):
        x = images(2, 1, step)
        valid = torch.tensor([[True], [step % 3 > 0]])
        adapter(x, valid=valid)
        for s, info in enumerate(adapter.info):
            if valid[s]:
                sums[s] = sums[s] * math.exp(-1 / 500) + torch.tensor([info.entropy, info.trusted, 1.0])
    for row, health in zip(sums, adapter.health, strict=True):
        assert health.entropy == pytest.approx(float(row[0] / row[2]), abs=1e-6)
        assert health.trusted == pytest.approx(float(row[1] / row[2]), abs=1e-6)
    assert 0 < adapter.health[0].trusted < 1  # in batches of one a report is 0 or 1


def test_an_alarm_after_a_reset_is_new_and_one_of_a_snapshot_is_not():
    heard = []
    adapter = tribe.adapt(small_network(), health=True, history=True, on_event=lambda event: heard.append(event.kind))
    black, clean = torch.zeros(64, 3, 8, 8), pictures(1, 64)[0]
    adapter(black)
    assert "black" in heard
    snapshot, heard[:] = adapter.snapshot(), []
    adapter.reset()
    adapter(black)
    assert "black" in heard
    for go_back in (adapter.restore, adapter.rollback):
        for _ in range(4):
            adapter(clean)
        adapter(black)
        heard.clear()
        go_back(snapshot)
        adapter(clean)
        assert "black" not in heard
    weights = adapter.state_dict()
    adapter.reset()
    adapter.load_state_dict(weights)
    adapter(clean)
    assert "black" not in heard


def test_a_stream_that_goes_wrong_returns_to_its_last_good_state():
    net, guarded = small_backbone(), ready("tent+guard", lr=0.3, speed=None, pull=0.0, good_every=40, probe=0)
    state = guarded.init(net, 2)
    source = torch.cat(net.source()[0], 1)
    returned = []
    for seed in range(30):
        _, state = guarded.step(net, state, pictures(2, 8, seed))
        returned.append(state.guard.returned.clone())
        if bool((returned[-1] > (returned[-2] if seed else 0)).all()):
            break
    assert bool((returned[-1] > 0).all()), "parameters that run away raise the alarm drift"
    moved = torch.cat(state.method.affine, 1)
    good = torch.cat(state.guard.good.affine, 1)
    assert torch.equal(moved, good)
    assert float((moved - source).norm() / source.norm()) < 0.2
    before = clone_of(state.guard.good)
    _, after = guarded.step(net, state, pictures(2, 8, 99))
    assert all(torch.equal(t, before[name]) for name, t in leaves(state.guard.good).items()), "a copy, not a view"
    assert after.method.key.clock.tolist() == [int(t) + 1 for t in state.method.key.clock]


def clone_of(state):
    return {name: t.clone() for name, t in leaves(state).items()}


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"probe": -1}, ValueError, "probe"),
        ({"calibration": 3}, Exception, "tribe.calibrate"),
        ({"calibration": "nowhere.safetensors"}, Exception, "no source knowledge"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(fields, error, words):
    with pytest.raises(error, match=words):
        Watch(**fields)
    with pytest.raises(error, match=words):
        Guard(**fields)
