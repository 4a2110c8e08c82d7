"""One thread takes steps, others predict meanwhile; inference mode and forks; a step that fails changes nothing."""

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tribe
from networks import Around, Viewed, at_once, learner
from tribe.core.backbone import Backbone
from tribe.core.state import digest
from tribe.methods import names
from tribe.methods.tribe import Tribe
from tribe.testing import images, ready, small_network
from tribe.testing.shared import small, small_backbone

NET = small_backbone()
WAIT = 60  # seconds until a test gives up; none waits for a time to pass
POOL = ThreadPoolExecutor(8)


def x(seed=0, size=2):
    return images(1, size, seed)[0]


@dataclass(frozen=True)
class Gated(Tribe):
    """Waits inside a step until the gate opens; fails on images that are all black."""

    gate: Any = None  # called inside each step

    def step(self, net, state, x, valid=None, retired=None):
        self.gate()
        if bool((x == 0).all()):
            raise RuntimeError("black")
        return super().step(net, state, x, valid)


def gated(make=tribe.fleet):
    """Two events, a step has begun and a step may end, and a fleet or an adapter whose steps wait."""
    begun, may_end = threading.Event(), threading.Event()

    def gate():
        begun.set()
        assert may_end.wait(WAIT)

    return begun, may_end, make(NET, Gated(classes=4, h0=2.0, gate=gate))


def test_predicting_does_not_wait_for_a_step():
    begun, may_end, fleet = gated()
    may_end.set()
    fleet({"a": x(0), "b": x(1)})
    expected, digest = fleet.predict({"a": x(5), "b": x(6)}), fleet.digest("a")
    begun.clear(), may_end.clear()
    step = POOL.submit(fleet, {"a": x(2), "b": x(3), "new": x(4)})
    assert begun.wait(WAIT)
    # The step is running. Whatever only reads is answered from the states before it.
    during = fleet.predict({"a": x(5), "b": x(6)})
    assert all(torch.equal(during[name], expected[name]) for name in "ab")
    assert fleet.digest("a") == digest
    assert fleet.clock("a") == 1
    assert fleet.names == ["a", "b"]
    assert fleet.info("b").steps == 1
    assert fleet.snapshot("a").state.key.clock.item() == fleet.state("b").key.clock.item() == 1
    assert len(fleet.to_bytes("a")) > 0
    assert fleet.predict_source(x(5)).shape == (2, 4)
    fleet.freeze("b")
    assert not step.done()
    may_end.set()
    assert step.result(WAIT).keys() == {"a", "b", "new"}
    assert fleet.clock("a") == fleet.clock("b") == 2
    assert fleet.info("b").frozen, "frozen while the step ran"
    assert not torch.equal(fleet.predict({"a": x(5)})["a"], expected["a"])


def test_steps_of_two_threads_come_one_after_the_other():
    begun, may_end, fleet = gated()
    first = POOL.submit(fleet, {"a": x(0)})
    assert begun.wait(WAIT)
    second, dropped = POOL.submit(fleet, {"a": x(1)}), POOL.submit(fleet.drop, "a")
    may_end.set()
    assert set(first.result(WAIT)) == set(second.result(WAIT)) == {"a"}
    assert dropped.result(WAIT) is fleet
    assert "a" not in fleet or fleet.clock("a") == 1, "dropped between the steps, or after them"


def test_threads_that_step_and_predict_at_once_agree_with_one_thread():
    fleet, alone = tribe.fleet(NET, rows=2, exact=True), tribe.fleet(NET, exact=True)
    rounds = [{name: x(10 * i + j, 1) for j, name in enumerate("abcd")} for i in range(4)]
    fleet(rounds[0])
    stop = threading.Event()

    def predict():
        while not stop.is_set():
            assert fleet.predict({name: x(1, 1) for name in "abcd"}).keys() == set("abcd")
            for name in "abcd":
                assert fleet.clock(name) <= len(rounds)
                assert fleet.digest(name)

    readers = [POOL.submit(predict) for _ in range(2)]
    workers = [POOL.submit(lambda n=name: [fleet({n: batch[n]}) for batch in rounds[1:]]) for name in "abcd"]
    try:
        for worker in workers:
            worker.result(WAIT)
    finally:
        stop.set()
    for reader in readers:
        reader.result(WAIT)
    for batch in rounds:
        alone(batch)
    assert all(fleet.digest(name) == alone.digest(name) for name in "abcd")


def test_a_step_that_fails_leaves_every_stream_as_it_was():
    _, may_end, fleet = gated()
    may_end.set()
    fleet({"a": x(0), "b": x(1)})
    before = {name: (fleet.digest(name), fleet.info(name)) for name in fleet.names}
    # "a" has another number of images, so it is stepped on its own, before the step that fails.
    with pytest.raises(RuntimeError, match="black"):
        fleet({"a": x(2, 3), "b": torch.zeros(1, 3, 8, 8), "new": torch.zeros(1, 3, 8, 8)})
    assert {name: (fleet.digest(name), fleet.info(name)) for name in fleet.names} == before
    fleet({"a": x(2, 3)})
    assert fleet.clock("a") == 2


@pytest.mark.parametrize("name", [*names(), "tribe+time", "lame+time", "cotta+time"])
def test_predictions_are_those_of_an_adapter(name):
    method = small(ready(name))
    fleet, adapters = tribe.fleet(NET, method), {}
    for i, stream in enumerate("abc"):
        adapters[stream] = tribe.adapt(NET, method, seed=i)
        adapters[stream](x(i, 3))
        fleet.restore(stream, adapters[stream].snapshot())
    for _ in range(2):  # made anew after a step, then kept
        batch = {"a": x(20), "b": x(21), "c": x(22, 5)}
        answers = fleet.predict(batch)
        assert all(torch.equal(answers[stream], adapter.predict(batch[stream])) for stream, adapter in adapters.items())


def test_what_a_state_predicts_with_is_made_once():
    made = []

    @dataclass(frozen=True)
    class Counting(Tribe):
        """Counts how often class statistics are pooled for a prediction."""

        def deployed(self, net, state):
            made.append(len(state.key.seed))
            return super().deployed(net, state)

    fleet = tribe.fleet(NET, Counting(classes=4))
    fleet({"a": x(0), "b": x(1)})
    made.clear()
    for _ in range(3):
        fleet.predict({"a": x(2), "b": x(3)})
    assert made == [1, 1]
    fleet({"a": x(4)})
    made.clear()
    for _ in range(3):
        fleet.predict({"a": x(2), "b": x(3)})
    assert made == [1], "of the stream that learned"


def test_an_adapter_predicts_during_a_step_and_its_memory_is_not_reused_under_a_reader():
    begun, may_end, adapter = gated(tribe.adapt)
    may_end.set()
    adapter(x(0)), adapter(x(1))
    expected = adapter.predict(x(5))
    begun.clear(), may_end.clear()
    step = POOL.submit(adapter, x(2))
    assert begun.wait(WAIT)
    assert torch.equal(adapter.predict(x(5)), expected)
    may_end.set()
    step.result(WAIT)
    assert not torch.equal(adapter.predict(x(5)), expected)
    with adapter._core.reading("adapter") as entries:
        state = entries["adapter"].state
        before = digest(state)
        adapter(x(3))  # the state that is read is the current one: the step need not wait
        begun.clear()
        step = POOL.submit(adapter, x(4))  # this one would write into the memory of the state that is read
        assert digest(state) == before
        assert not step.done()
        assert not begun.is_set()
    step.result(WAIT)
    assert adapter.info[0].steps == 5


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trial", range(4))
def test_threads_that_find_out_at_once_that_a_network_flattens_with_view_all_go_on(trial):
    shared = Backbone(Viewed())
    adapters = [learner(shared) for _ in range(4)]
    at_once(*(lambda own=own: own(x(trial)) for own in adapters))
    assert shared.moves == 1


def during_a_step():
    """An adapter, a thread that is in the middle of a step of it, and an event that lets the step go on."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(inner, x):
        if threading.current_thread() is thread:
            inside.set()
            go_on.wait(WAIT)
        return inner(x)

    adapter = learner(Around(wait))
    thread = threading.Thread(target=lambda: adapter(x()))
    thread.start()
    assert inside.wait(WAIT)
    return adapter, thread, go_on


def test_a_copy_that_is_made_during_a_step_waits_for_its_end():
    adapter, thread, go_on = during_a_step()
    before = adapter.digest()
    go_on.set()
    copied = copy.deepcopy(adapter).digest()
    thread.join()
    assert copied == adapter.digest() != before


def test_the_doctor_does_not_disturb_adapters_that_share_the_network():
    shared = Backbone(small_network())
    adapter = learner(shared)

    def learn():
        for seed in range(60):
            adapter(x(seed))

    def look():
        for _ in range(20):
            assert not tribe.doctor(shared, x(0, 5)).problems

    at_once(learn, look)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_during_a_step_can_predict():
    adapter, thread, go_on = during_a_step()
    try:
        expected = adapter.predict(x(1))
        if not (child := os.fork()):
            os._exit(0 if torch.equal(adapter.predict(x(1)), expected) else 1)
        deadline = threading.Timer(WAIT, lambda: os.kill(child, 9))
        deadline.start()
        status = os.waitpid(child, 0)[1]
        deadline.cancel()
        assert status == 0
    finally:
        go_on.set()
        thread.join()


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
    adapter(x())
    with torch.inference_mode():
        adapter = change(adapter)
    before = adapter.digest()
    assert adapter(x(1)).isfinite().all()
    assert adapter.digest() != before


def test_what_is_exported_in_inference_mode_can_be_trained():
    adapter = learner(small_network())
    with torch.inference_mode():
        plain = adapter.export()
    plain.requires_grad_()(x()).sum().backward()
    assert all(p.grad is not None for p in plain.parameters())
