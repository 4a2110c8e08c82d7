"""A budget sets how rarely a method learns, once; a deadline leaves out learning that would be late."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import tribe
from tribe.methods.bank import Bank
from tribe.methods.rare import Rare
from tribe.streams import budget as module
from tribe.streams.budget import Budget, Deadline, StepCosts
from tribe.testing import CLASSES, images, small_network

COSTS = (7.25, 1.05)  # a batch that TRIBE learns from, and another, over plain inference


@dataclass(frozen=True)
class OwnWay(Bank):
    """A custom method with its own field of how rarely it learns."""

    learn_every: int | None = None

    rare_field = "learn_every"


def layer_norm_network():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))


def play(adapter, batches):
    return [adapter(images(1, 6, seed)[0]) for seed in batches]


# -- a budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "every"), [(8, 1), (7.25, 1), (4, 3), (1.5, 14), (1.1, 124)])
def test_the_mean_cost_is_within_the_budget_and_one_step_more_is_not(times, every):
    adapter = tribe.adapt(small_network(), "tribe", budget=Budget(times, COSTS))
    play(adapter, [0])
    assert adapter.method.rare == Rare(learn_every=every)
    learn, rest = COSTS
    assert rest + (learn - rest) / every <= times
    assert every == 1 or rest + (learn - rest) / (every - 1) > times


def test_it_plays_as_the_plain_field_does_and_a_file_is_not_measured_again(tmp_path):
    net = small_network()
    one = tribe.adapt(net, "tent", budget=Budget(4, COSTS), guard=True, time="auto")
    other = tribe.adapt(net, "tent+rare+guard+time", learn_every=3)
    for a, b in zip(play(one, range(4)), play(other, range(4)), strict=True):
        assert torch.equal(a, b)
    assert one.method == other.method
    assert one.digest() == other.digest()
    one.save(tmp_path / "state")
    resumed = tribe.load(tmp_path / "state", net)
    assert resumed.method == one.method
    for a, b in zip(play(resumed, range(4, 9)), play(other, range(4, 9)), strict=True):
        assert torch.equal(a, b)


def test_measuring_leaves_the_stream_where_it_is(monkeypatch):
    given = []
    monkeypatch.setattr(module, "time_in_turns", lambda calls, *_, **__: times_of(calls, given))
    adapter = tribe.adapt(small_network(), "rotta", size=8, every=8, budget=2.0, seed=3)
    play(adapter, range(5))
    assert given == ["learn", "rest", "plain"] * 3  # once
    other = tribe.adapt(small_network(), "rotta+rare", size=8, every=8, learn_every=5, seed=3)
    play(other, range(5))
    assert adapter.method == other.method
    assert adapter.digest() == other.digest()


def times_of(calls, called):
    """Call all contenders in turns, and return fixed times."""
    for _ in range(3):
        for name, call in calls.items():
            call()
            called.append(name)
    return {"learn": [9.0, 6.0, 0.6], "rest": [1.0, 1.0, 0.1], "plain": [1.0, 1.0, 0.1]}


def test_it_measures_this_machine():
    adapter = tribe.adapt(small_network(), "tribe", budget=1e6)
    play(adapter, [0])
    assert adapter.method.rare == Rare(learn_every=1)
    found = module.measure(tribe.Backbone(small_network()), Bank(classes=CLASSES), *first_batch(Bank(classes=CLASSES)))
    assert min(found) > 0


def first_batch(method):
    return method.init(tribe.Backbone(small_network())), images(1, 6), None


def test_a_batch_that_teaches_nothing_is_not_measured():
    adapter = tribe.adapt(small_network(), "tribe", budget=1e6)
    adapter(torch.full((6, 3, 8, 8), torch.nan))
    assert adapter._core.pace.budget is not None
    play(adapter, [0])
    assert adapter._core.pace.budget is None


def test_a_method_with_its_own_field_gets_it_set():
    method = OwnWay(classes=CLASSES)
    adapter = tribe.adapt(small_network(), method, budget=Budget(1.5, COSTS))
    play(adapter, [0])
    assert adapter.method == replace(method, learn_every=14)


@pytest.mark.parametrize(("times", "every", "steps"), [(1.5, 5, 2), (1.1, 0, 0)])
def test_a_bank_learns_as_often_as_the_budget_buys_and_its_file_says_so(times, every, steps, tmp_path):
    """Two steps in six batches: 1.1 + 1.9 / 5 is within 1.5, and 1.1 + 1.9 / 4 is not."""
    net = small_network()
    first = tribe.adapt(net, "bank-tribe", budget=Budget(times, costs=(3.0, 1.1)))
    play(first, range(6))
    assert first.method == tribe.methods.create("bank-tribe", classes=CLASSES, learn_every=every)
    assert first.state.adam.steps.tolist() == [steps]
    first.save(tmp_path / "state")
    second = tribe.fleet(net, "bank-tribe", budget=Budget(2, costs=(3.0, 1.1)))
    second.load("a", tmp_path / "state")
    assert second.method == first.method
    assert second.digest("a") == first.digest()


def test_a_fleet_resolves_once_and_a_file_of_another_decides(tmp_path):
    first = tribe.fleet(small_network(), "tribe", budget=Budget(4, COSTS))
    first({"a": images(1, 6)[0], "b": images(1, 6)[0]})
    assert first.method.rare == Rare(learn_every=3)
    first.save("a", tmp_path / "a")
    second = tribe.fleet(small_network(), "tribe", budget=Budget(2, COSTS))
    second.load("a", tmp_path / "a")
    assert second.method == first.method
    assert second.digest("a") == first.digest("a")
    second({"a": images(1, 6, 1)[0]})
    first({"a": images(1, 6, 1)[0]})
    assert second.digest("a") == first.digest("a")


def test_a_file_in_which_a_method_never_learns_does_not_fit():
    """Catches the error of a field, in place of one that names the file, where a budget is not resolved."""
    adapter = tribe.adapt(small_network(), "tribe", budget=Budget(4, COSTS))
    assert adapter._core.pace.adopt(adapter.method, "tribe+rare", {"learn_every": 0}) == adapter.method


def test_a_snapshot_from_before_the_first_batch_is_restored():
    adapter = tribe.adapt(small_network(), "tribe", budget=Budget(4, COSTS))
    start, digest = adapter.snapshot(), adapter.digest()
    play(adapter, [0, 1])
    assert adapter.restore(start).digest() == digest
    assert adapter.method.rare == Rare(learn_every=3)


def test_nothing_is_saved_before_the_budget_is_known(tmp_path):
    adapter = tribe.adapt(small_network(), "tribe", budget=Budget(4, COSTS))
    with pytest.raises(ValueError, match="first batch"):
        adapter.save(tmp_path / "state")
    play(adapter, [0])
    adapter.save(tmp_path / "state")


@pytest.mark.parametrize("budget", [0.99, 0, -1, float("nan"), float("inf"), "1.5", True])
def test_a_budget_that_makes_no_sense_is_refused(budget):
    with pytest.raises(ValueError, match="at least 1"):
        tribe.adapt(small_network(), budget=budget)


@pytest.mark.parametrize("costs", [(0, 1), (7, float("nan")), (-1, 1)])
def test_costs_that_make_no_sense_are_refused(costs):
    with pytest.raises(ValueError, match="costs"):
        Budget(1.5, costs)


@pytest.mark.parametrize("name", ["source", "bn", "lame"])
def test_methods_that_never_learn_are_refused(name):
    with pytest.raises(ValueError, match="never learns"):
        tribe.adapt(small_network(), name, budget=2)


def test_a_budget_and_its_field_are_not_given_together():
    with pytest.raises(ValueError, match="not both"):
        tribe.adapt(small_network(), "tent+rare", learn_every=2, budget=2)


def test_a_budget_in_which_it_would_never_learn_names_the_smallest_and_loses_nothing():
    adapter = tribe.adapt(small_network(), "tribe", budget=Budget(1.05, COSTS))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1\.06"):
            play(adapter, [0])
    assert adapter.info[0].images == 0
    enough = tribe.adapt(small_network(), "tribe", budget=Budget(1.06, COSTS))
    play(enough, [0])
    assert enough.method.rare.learn_every <= module.MOST


def test_without_batch_norm_it_says_what_can_be_done():
    with pytest.warns(UserWarning, match="no BatchNorm"):
        adapter = tribe.adapt(layer_norm_network(), "tent", budget=Budget(4, COSTS))
    play(adapter, [0])
    assert adapter.method.rare == Rare(learn_every=3)
    with pytest.raises(ValueError, match="tent"):
        tribe.adapt(layer_norm_network(), "bank", budget=1.1)


# -- a deadline -------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that a test moves: each batch takes ``seconds``."""

    def __init__(self, seconds):
        self.now, self.seconds, self.calls = 0.0, seconds, 0

    def __call__(self):
        self.calls += 1
        self.now += self.seconds if self.calls % 2 == 0 else 0  # it is read before and after a batch
        return self.now


FAST, SLOW = 0.010, 0.021  # seconds of a learning step in 20 ms


def deadline(learn, rest=0.004, ms=20, seconds=None):
    return Deadline(ms, costs=StepCosts(learn, rest), clock=Clock(seconds or learn))


def test_with_time_it_learns_from_everything():
    adapter = tribe.adapt(small_network(), deadline_ms=deadline(FAST))
    plain = tribe.adapt(small_network())
    for a, b in zip(play(adapter, range(4)), play(plain, range(4)), strict=True):
        assert torch.equal(a, b)
    assert adapter.digest() == plain.digest()
    assert adapter.info[0].unlearned == 0


def test_without_time_it_predicts_and_says_so():
    adapter = tribe.adapt(small_network(), deadline_ms=deadline(SLOW))
    before, plain = adapter.digest(), tribe.adapt(small_network())
    answers = play(adapter, range(3))
    assert torch.equal(answers[2], plain.predict(images(1, 6, 2)[0]))
    assert adapter.digest() == before
    assert (adapter.info[0].unlearned, adapter.info[0].images) == (18, 0)
    assert "learn=18" in repr(adapter)
    assert "deadline_ms=20" in repr(adapter)
    adapter(images(1, 6)[0], valid=torch.arange(6) < 4)
    assert adapter.info[0].unlearned == 22


def test_a_machine_that_gets_slower_stops_learning_and_one_that_gets_faster_begins_again():
    limit = deadline(FAST)
    adapter = tribe.adapt(small_network(), deadline_ms=limit)
    limit.clock.seconds = 3 * FAST
    play(adapter, range(10))
    learned = adapter.info[0].images
    assert 0 < learned < 60
    limit.clock.seconds = 0.004  # of a prediction: the machine is as fast as before
    play(adapter, range(40))
    assert adapter.info[0].images > learned


def test_batches_between_learning_steps_need_no_time_to_learn():
    adapter = tribe.adapt(small_network(), "tribe+rare", learn_every=2, deadline_ms=deadline(FAST))
    play(adapter, [0])
    adapter._core.pace.deadline._kinds.clear()
    adapter._core.pace.deadline._given = StepCosts(SLOW, 0.004)
    play(adapter, [1, 2, 3])  # the clock goes on at 1; from 2 on it waits for the time to learn
    assert adapter.info[0].unlearned == 12
    assert adapter.info[0].steps == 2


def test_the_first_batch_of_a_shape_is_measured(monkeypatch):
    monkeypatch.setattr(module, "time_in_turns", lambda calls, *_, **__: times_of(calls, []))
    adapter = tribe.adapt(small_network(), deadline_ms=7000)
    before = adapter.digest()
    play(adapter, [0])
    assert adapter.digest() != before
    hasty = tribe.adapt(small_network(), deadline_ms=5000)
    play(hasty, [0])
    assert hasty.digest() == before
    assert hasty.info[0].unlearned == 6


def test_a_frozen_adapter_has_no_deadline(tmp_path):
    adapter = tribe.adapt(small_network(), deadline_ms=deadline(SLOW)).freeze()
    play(adapter, [0])
    assert adapter.info[0].unlearned == 0
    adapter.save(tmp_path / "state")
    again = tribe.load(tmp_path / "state", small_network(), deadline_ms=deadline(SLOW)).unfreeze()
    play(again, [0])
    assert again.info[0].unlearned == 6


@pytest.mark.parametrize("ms", [0, -5, float("nan"), float("inf"), "20", False])
def test_a_deadline_that_makes_no_sense_is_refused(ms):
    with pytest.raises(ValueError, match="milliseconds above 0"):
        tribe.adapt(small_network(), deadline_ms=ms)


def test_without_a_method_a_budget_takes_the_one_that_follows_in_one_pass():
    """Catches a budget that is refused where statistics could still follow the images."""
    for times, every in ((1.5, 5), (1.1, 0)):
        adapter = tribe.adapt(small_network(), budget=tribe.Budget(times, (3.0, 1.1)))
        adapter(images(1, 6)[0])
        assert adapter.method.name == "bank-tribe"
        assert adapter.method.learn_every == every
    adapter = tribe.adapt(small_network(), budget=tribe.Budget(1.05, (3.0, 1.1)))
    with pytest.warns(UserWarning, match="1.10 x"):
        adapter(images(1, 6)[0])
    assert adapter.method.learn_every == 0


class StopWatch:
    """A clock for calls whose parts take these seconds, one after the other; it is read around each part."""

    def __init__(self, *parts):
        self.now, self.parts = 0.0, list(parts)

    def __call__(self):
        now, self.now = self.now, self.now + (self.parts.pop(0) if self.parts else 0.0)
        return now


def test_the_pass_of_the_source_is_part_of_a_call_with_a_deadline():
    """In shadow a call takes that pass, too: learning in 10 ms and the source in 15 ms do not fit in 20 ms."""
    watch = StopWatch()
    adapter = tribe.adapt(
        small_network(), deadline_ms=Deadline(20, costs=StepCosts(0.010, 0.004), clock=watch), shadow=True
    )
    for learn, unlearned in ((0.010, 0), (0.004, 6), (0.004, 12)):
        watch.parts = [learn, 0.015, 0.0, 0.0]  # a step, the source's pass, the rest
        play(adapter, [0])
        assert adapter.info[0].unlearned == unlearned
    adapter.promote()
    for learn, unlearned in ((0.004, 18), (0.010, 18), (0.010, 18)):  # the first one does not know it yet
        watch.parts = [learn, 0.0]
        play(adapter, [0])
        assert adapter.info[0].unlearned == unlearned


def test_a_budget_is_that_of_the_method_also_in_shadow():
    shadow, open_ = (tribe.adapt(small_network(), budget=Budget(4, COSTS), shadow=shadow) for shadow in (True, False))
    play(shadow, range(5)), play(open_, range(5))
    assert shadow.method == open_.method
    assert shadow.digest() == open_.digest()
