"""The history of streams: snapshots while they learn, and rollbacks to them."""

import copy
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import tribe
from networks import batch, learner, refused
from tribe.core.backbone import Backbone
from tribe.core.state import digest
from tribe.testing import images, ready, small_network

MINUTE = timedelta(minutes=1)


class Clock(SimpleNamespace):
    """A clock that a test advances."""

    def __call__(self):
        return self.now


def recorded(batches=0, every=6, seconds=None, streams=1):
    """An adapter with a history of every batch of 6, which has learned from some batches, and its clock."""
    clock = Clock(now=1000.0)
    history = tribe.History(every=every, seconds=seconds, clock=clock)
    adapter = learner(small_network(), streams=streams, history=history)
    play(adapter, clock, batches)
    return adapter, clock


def play(adapter, clock, batches, seconds=60.0, first=0):
    """Learn from batches; the digests before each."""
    digests = []
    for seed in range(first, first + batches):
        digests.append(adapter.digest())
        adapter(images(adapter.streams, 6, seed) if adapter.streams > 1 else batch(seed))
        clock.now += seconds
    return digests


def learned(adapter):
    return [kept.learned for kept in adapter.history]


def test_without_a_history_the_error_says_how_to_get_one():
    adapter = learner(small_network())
    adapter(batch())
    assert adapter.history is None
    for call in (lambda: adapter.rollback(MINUTE), lambda: adapter.rollback(images=5), lambda: adapter.compare(MINUTE)):
        with pytest.raises(ValueError, match="history=True"):
            call()


@pytest.mark.parametrize(("every", "seconds"), [(12, None), (None, 100.0)])
def test_a_snapshot_is_taken_before_the_first_batch_and_whenever_one_is_due(every, seconds):
    adapter, clock = recorded(every=every, seconds=seconds)
    assert adapter.history == []
    play(adapter, clock, 6)
    assert learned(adapter) == [(24,), (12,), (0,)]
    assert [kept.images for kept in adapter.history] == [(12,), (24,), (36,)]
    assert [kept.seconds for kept in adapter.history] == [120, 240, 360]
    assert repr(adapter.history[0]) == "Kept(0:02:00 and 12 images ago, learned from 24)"


def test_predictions_and_frozen_adapters_take_no_snapshots():
    adapter, clock = recorded()
    adapter.predict(batch())
    assert adapter.history == []
    play(adapter, clock, 1)
    adapter.freeze()
    play(adapter, clock, 3)
    assert len(adapter.history) == 1
    assert adapter.rollback(4 * MINUTE).learned == (0,)
    assert adapter.info[0].frozen, "it stays frozen"


WAYS = {
    "time": lambda a: a.rollback(2 * MINUTE),
    "seconds": lambda a: a.rollback(seconds=100),
    "images": lambda a: a.rollback(images=7),
    "an entry": lambda a: a.rollback(a.history[1]),
    "its snapshot": lambda a: a.rollback(a.history[1].snapshot),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rollback_returns_to_the_newest_snapshot_that_is_old_enough(way):
    adapter, clock = recorded()
    digests = play(adapter, clock, 5)
    went = WAYS[way](adapter)
    assert adapter.digest() == digests[3]
    assert went == ((0,), 120.0, (12,), (18,), (30,))
    assert learned(adapter) == [(18,), (12,), (6,), (0,)], "later ones are dropped"


def test_the_same_rollback_twice_goes_back_once_and_ages_go_on():
    adapter, clock = recorded(5)
    first = adapter.rollback(2 * MINUTE)
    assert adapter.rollback(2 * MINUTE) == first._replace(before=first.learned)
    play(adapter, clock, 2)
    assert [kept.images for kept in adapter.history][:2] == [(6,), (12,)]
    assert adapter.rollback(images=13).images == (24,)


def test_a_rollback_reaches_over_a_reset():
    adapter, clock = recorded()
    digests = play(adapter, clock, 3)
    adapter.reset()
    play(adapter, clock, 1)
    assert adapter.rollback(images=7).learned == (12,)
    assert play(adapter, clock, 1, first=2) == [digests[2]], "and the same images lead to the same state"
    assert adapter.rollback(images=19).learned == (6,)
    assert play(adapter, clock, 2, first=1) == digests[1:]


def test_a_snapshot_from_elsewhere_leaves_the_history():
    adapter, clock = recorded(1)
    mine, before = adapter.snapshot(), adapter.digest()
    play(adapter, clock, 2)
    assert adapter.rollback(mine) == ((0,), None, None, (6,), (18,))
    assert adapter.digest() == before
    assert len(adapter.history) == 3


def test_one_stream_goes_back_and_the_others_stay():
    adapter, _ = recorded(4, streams=3)
    alone, now = adapter.history[2].snapshot, adapter.snapshot()
    assert adapter.rollback(images=18, stream=1) == ((1,), 180.0, (18,), (6,), (24,))
    assert [info.images for info in adapter.info] == [24, 6, 24]
    weights = adapter.state.affine.weight
    assert torch.equal(weights[1], alone.state.affine.weight[1])
    assert torch.equal(weights[[0, 2]], now.state.affine.weight[[0, 2]])
    # Later snapshots stay for the others, and hold the older state of this stream.
    assert learned(adapter) == [(18, 6, 18), (12, 6, 12), (6, 6, 6), (0, 0, 0)]
    adapter.rollback(images=6)
    assert [info.images for info in adapter.info] == [18, 6, 18]


def test_ages_in_images_do_not_count_padding():
    adapter, _ = recorded(streams=2)
    valid = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    for seed in range(4):
        adapter(images(2, 6, seed), valid=valid)
    assert [kept.images for kept in adapter.history] == [(6, 2), (12, 4), (18, 6), (24, 8)]
    assert adapter.rollback(images=4, stream=1).learned == (4,)
    assert adapter.rollback(images=4).learned == (18, 4), "without a stream, the one with most images counts"


REFUSED = {
    "too old": (lambda a: a.rollback(seconds=7200), ValueError, "60, 120, 180"),
    "too many images": (lambda a: a.rollback(images=500), ValueError, "6, 12, 18"),
    "a text": (lambda a: a.rollback("2h"), TypeError, "timedelta"),
    "nothing": (lambda a: a.rollback(), TypeError, "0 of them"),
    "two ages": (lambda a: a.rollback(MINUTE, images=3), TypeError, "2 of them"),
    "a negative age": (lambda a: a.rollback(seconds=-1), ValueError, "seconds"),
    "a fraction of an image": (lambda a: a.rollback(images=0.5), ValueError, "images"),
    "another stream": (lambda a: a.rollback(MINUTE, stream=1), IndexError, "stream 1"),
    "another method": (lambda a: a.rollback(tribe.adapt(small_network(), "tent").snapshot()), ValueError, "taken with"),
    "another network": (lambda a: a.compare(learner(small_network(seed=1)).snapshot()), ValueError, "network"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_rollback_is_refused_and_changes_nothing(case):
    call, kind, word = REFUSED[case]
    adapter, _ = recorded(3)
    kept = learned(adapter)
    with refused(adapter, kind, word):
        call(adapter)
    assert learned(adapter) == kept


def test_wrong_histories_are_refused():
    with pytest.raises(ValueError, match="empty"):
        recorded()[0].rollback(images=0)
    with pytest.raises(TypeError, match="History"):
        tribe.adapt(small_network(), history=16)
    with pytest.raises(ValueError, match="1000000"):
        tribe.adapt(small_network(), history=tribe.History(keep=10**6, megabytes=64))
    assert tribe.adapt(small_network(), history=False).history is None
    assert tribe.adapt(small_network(), history=True).history == []


@pytest.mark.parametrize("method", tribe.methods.names())
def test_every_method_rolls_back(method):
    clock = Clock(now=1000.0)
    adapter = tribe.adapt(small_network(), ready(method), streams=2, history=tribe.History(every=6, clock=clock))
    digests = play(adapter, clock, 3)
    adapter.rollback(MINUTE, stream=1)
    assert [info.images for info in adapter.info] == [18, 12]
    adapter.rollback(3 * MINUTE)
    assert adapter.digest() == digests[0]


def test_a_batch_that_fails_changes_no_age():
    adapter, _ = recorded(1)
    with pytest.raises(ValueError, match="shape"):
        adapter(torch.rand(2, 5, 8, 8))
    assert [kept.images for kept in adapter.history][-1] == (6,)


def test_snapshots_of_an_adapter_that_was_cast_since_are_cast():
    adapter, _ = recorded(2)
    adapter.double()
    adapter(batch(2).double())
    assert adapter.rollback(images=12).learned == (6,)
    assert adapter.state.affine.weight.dtype == torch.float64
    assert adapter.compare(seconds=0).streams[0].affine == 0


def test_a_copy_has_its_own_history_and_a_pickle_none():
    adapter, _ = recorded(2)
    other = copy.deepcopy(adapter)
    adapter.rollback(images=12)
    assert learned(other) == [(6,), (0,)]
    assert other.history[0].snapshot.net is other.net
    assert other.rollback(images=6).learned == (6,)
    assert pickle.loads(pickle.dumps(learner(small_network(), history=True))).history == []


def test_a_file_holds_no_history_and_load_begins_a_new_one(tmp_path):
    adapter, clock = recorded(2)
    adapter.save(tmp_path / "a")
    loaded = tribe.load(tmp_path / "a", small_network(), history=tribe.History(clock=clock))
    loaded(batch(5))
    loaded.rollback(seconds=0)
    assert loaded.digest() == adapter.digest(), "the first snapshot is the state that was loaded"


def test_another_network_empties_the_history():
    adapter, _ = recorded(2)
    adapter.load_state_dict(learner(small_network(seed=1)).state_dict())
    assert adapter.history == []


def test_snapshots_change_nothing_that_is_learned_and_are_not_reached_by_later_steps():
    adapter, clock = recorded()
    digests = play(adapter, clock, 8)
    assert digests == play(learner(small_network()), clock, 8)
    for kept, expected in zip(adapter.history, reversed(digests), strict=True):
        assert digest(kept.snapshot.state) == expected


def test_a_stream_of_a_fleet_goes_back_alone():
    fleet = tribe.fleet(Backbone(small_network()), history=tribe.History(every=1, seconds=None, keep=3))
    digests = []
    for seed in range(4):
        fleet({"a": batch(seed), "b": batch(seed + 9)})
        digests.append(fleet.digest("a"))
    assert [kept.learned for kept in fleet.history("a")] == [(18,), (12,), (0,)]
    other = fleet.digest("b")
    fleet.rollback("a", fleet.history("a")[1])
    assert fleet.digest("a") == digests[1]
    assert fleet.digest("b") == other
    with pytest.raises(ValueError, match="history=True"):
        tribe.fleet(Backbone(small_network())).add("a").rollback("a", images=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_snapshots_of_a_gpu_go_to_the_host():
    adapter = learner(small_network().cuda(), history=tribe.History(every=6))
    for seed in range(3):
        adapter(batch(seed).cuda())
    assert adapter.history[0].snapshot.state.affine.weight.device.type == "cpu"
    assert adapter.rollback(images=12).learned == (6,)
    assert adapter.state.affine.weight.device.type == "cuda"
    assert adapter.compare().streams[0].affine > 0
