"""Adapters in several threads, in inference mode and in forked processes."""

import copy
import os
import threading

import pytest
import torch

import tribe
from networks import Around, Viewed, at_once, batch, learner
from tribe.core.backbone import Backbone
from tribe.testing import small_network


@pytest.mark.parametrize("trial", range(4))
def test_threads_that_find_out_at_once_that_a_network_flattens_with_view_all_go_on(trial):
    shared = Backbone(Viewed())
    adapters = [learner(shared) for _ in range(4)]
    at_once(*(lambda own=own: own(batch(trial)) for own in adapters))
    assert shared.moves == 1


def test_a_copy_that_is_made_during_a_step_waits_for_its_end():
    inside, copying, copies = threading.Event(), threading.Event(), []

    def pause(inner, x):
        if threading.current_thread() is step:
            inside.set()
            copying.wait()
        return inner(x)

    adapter = learner(Around(pause))
    before = adapter.digest()
    step = threading.Thread(target=lambda: adapter(batch()))
    step.start()
    inside.wait()  # the step holds the lock
    copying.set()
    copies.append(copy.deepcopy(adapter).digest())
    step.join()
    assert copies == [adapter.digest()] != [before]


def test_the_doctor_does_not_disturb_adapters_that_share_the_network():
    shared = Backbone(small_network())
    adapter = learner(shared)

    def learn():
        for seed in range(60):
            adapter(batch(seed))

    def look():
        for _ in range(20):
            assert not tribe.doctor(shared, batch(0, 5)).problems

    at_once(learn, look)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_during_a_step_can_predict():
    inside, go_on = threading.Event(), threading.Event()

    def wait(inner, x):
        if threading.current_thread() is thread:
            inside.set()
            go_on.wait()
        return inner(x)

    adapter = learner(Around(wait))
    adapter.net.model.run = wait
    expected = None
    thread = threading.Thread(target=lambda: adapter(batch()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child has no thread pool
    try:
        expected = adapter.predict(batch(1))
        thread.start()
        inside.wait()
        if not (child := os.fork()):
            os._exit(0 if torch.equal(adapter.predict(batch(1)), expected) else 1)
        deadline = threading.Timer(30, lambda: os.kill(child, 9))
        deadline.start()
        status = os.waitpid(child, 0)[1]
        deadline.cancel()
        assert status == 0
    finally:
        go_on.set()
        thread.join()
        torch.set_num_threads(threads)


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
    adapter(batch())
    with torch.inference_mode():
        adapter = change(adapter)
    before = adapter.digest()
    assert adapter(batch(1)).isfinite().all()
    assert adapter.digest() != before


def test_what_is_exported_in_inference_mode_can_be_trained():
    adapter = learner(small_network())
    with torch.inference_mode():
        plain = adapter.export()
    plain.requires_grad_()(batch()).sum().backward()
    assert all(p.grad is not None for p in plain.parameters())
