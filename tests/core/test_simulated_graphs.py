"""Graphs of a simulated GPU, which repeat operations without Python: their numbers, and what is done when they fail."""

import threading
import warnings
import weakref

import pytest
import torch

import tribe
from captured_methods import CAPTURABLE, IN_SEGMENTS, METHODS
from networks import Around
from simulated_gpu import Graph, on_gpu, simulate
from tribe.core import graphs, kernels
from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.state import digest, leaves
from tribe.testing import images, ready, small, small_network


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    simulate(monkeypatch)
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    with kernels.using(False):
        yield


@pytest.mark.parametrize(("name", "fields"), CAPTURABLE + IN_SEGMENTS, ids=str)
def test_recorded_steps_and_segments_give_the_numbers_of_eager_steps(name, fields):
    with on_gpu():
        method, net = small(ready(name, **fields)), Backbone(small_network())
        steps, state = Steps(method, net, graphs=True), method.init(net, 2)
        here, there, before = state, state, digest(state)
        for seed in range(4):
            x, valid = images(2, 6, seed), torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)) > 0.2
            wanted, here = method.step(net, here, x, valid)
            logits, there = steps(there, x, valid)
            assert torch.equal(logits, wanted)
            assert (kept := digest(there)) == digest(here)
        if method.capture == "segments":
            steps(there, images(2, 6, 100))  # no state is in static memory
            assert digest(there) == kept
        assert digest(state) == before
        assert steps._captured.recorded == 1


@pytest.mark.parametrize(("name", "fields"), METHODS, ids=str)
def test_the_branches_for_a_gpu_give_the_numbers_of_those_for_a_cpu(name, fields):
    method, net = small(ready(name, **fields)), Backbone(small_network())
    here = there = method.init(net, 2)
    for seed in range(3):
        x = images(2, 6, seed)
        x[1, 3] = torch.nan if seed == 1 else 0.5
        wanted, here = method.step(net, here, x)
        with on_gpu():
            logits, there = method.step(net, there, x)
        assert (logits - wanted).abs().max() <= 2e-4
    for leaf, t in leaves(here).items():
        assert torch.allclose(t.double(), leaves(there)[leaf].double(), atol=1e-3), leaf


def test_a_gpu_without_triton_is_named_once(monkeypatch):
    monkeypatch.setattr(kernels, "missing", "Triton cannot be imported (AttributeError: jit)")
    with on_gpu(), kernels.using("auto"):
        with pytest.warns(RuntimeWarning, match="AttributeError"):
            tribe.adapt(small_network(), "tent")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tribe.adapt(small_network(), "tent")


def test_a_replay_runs_no_python():
    passes = []
    with on_gpu():
        adapter = tribe.adapt(Around(lambda inner, x: passes.append(x) or inner(x)), "tent", graphs=True)
        adapter(images(1, 6)[0])
        recorded = len(passes)
        for seed in (1, 2, 3):
            adapter(images(1, 6, seed)[0])
    assert len(passes) == recorded


def standardised(inner, x):
    return inner(x - torch.tensor([0.4, 0.5, 0.6], device=x.device).view(3, 1, 1))


@pytest.mark.parametrize("method", ["tent", "rotta"])
def test_a_network_that_makes_a_constant_is_taken_eagerly_with_one_warning(method):
    with on_gpu():
        adapter = tribe.adapt(Around(standardised), method)
        plain = tribe.adapt(Around(standardised), method, graphs=False)
        with pytest.warns(RuntimeWarning, match="capturing"):
            first = adapter(images(1, 6)[0])
        assert torch.equal(first, plain(images(1, 6)[0]))
        assert "capturing" in adapter.capture_disabled_reason
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(adapter(images(1, 6, 1)[0]), plain(images(1, 6, 1)[0]))
        with pytest.raises(RuntimeError, match="capturing"):  # not: the network could not take the images
            tribe.adapt(Around(standardised), method, graphs=True)(images(1, 6)[0])


def test_images_that_the_network_cannot_take_do_not_end_the_capture():
    with on_gpu(), warnings.catch_warnings():
        warnings.simplefilter("error")
        method, net = ready("tent"), Backbone(small_network())
        steps, state = Steps(method, net), method.init(net, 2)
        for either in (steps, Steps(method, net, graphs=True)):
            with pytest.raises(ValueError, match="take images"):
                either(state, images(2, 6)[:, :, :2])
        assert torch.equal(steps(state, images(2, 6))[0], method.step(net, state, images(2, 6))[0])
        assert steps.capture_disabled_reason is None


def test_without_memory_for_a_recording_the_step_is_eager(monkeypatch):
    recordings, freed = [], []

    def greedy(inner, x):
        if torch.cuda.is_current_stream_capturing():
            recordings.append(weakref.ref(steps._captured))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(x)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append([ref() is None for ref in recordings]))
    with on_gpu():
        method, net = ready("tent"), Backbone(Around(greedy))
        steps, state = Steps(method, net), method.init(net, 2)
        with pytest.warns(RuntimeWarning, match="memory"):
            logits, _ = steps(state, images(2, 6))
        assert torch.equal(logits, method.step(net, state, images(2, 6))[0])
    assert freed[-1] == [True]  # the cache is emptied when nothing holds the recording


def test_two_gpus_record_on_their_own_streams():
    for index in (0, 1):
        with on_gpu(index):
            adapter, plain = (tribe.adapt(small_network(), "tent", graphs=graphs) for graphs in (True, False))
            for seed in range(3):
                assert torch.equal(adapter(images(1, 6, seed)[0]), plain(images(1, 6, seed)[0]))


def test_a_failed_capture_leaves_the_thread_where_it_was():
    def work():
        return torch.cuda.is_current_stream_capturing() and torch.ones(1).item()

    for index in (0, 1):
        before = [torch.cuda.current_stream(i) for i in (0, 1)]
        with on_gpu(index), pytest.raises(RuntimeError, match="_local_scalar_dense"):
            graphs.cuda_graphs(torch.device("cuda", index))(work)
        assert [torch.cuda.current_stream(i) for i in (0, 1)] == before
        assert (torch.cuda.current_device(), Graph.capturing) == (0, None)


def test_threads_record_one_after_the_other():
    """Torch allows one capture at a time: the second would fail."""
    inside, failed = threading.Event(), []

    def second():
        try:
            with on_gpu():
                graphs.cuda_graphs(torch.device("cuda", 0))(inside.set)
        except RuntimeError as error:
            failed.append(error)

    other = threading.Thread(target=second)

    def work():
        if torch.cuda.is_current_stream_capturing():
            other.start()
            assert not inside.wait(0.1)

    with on_gpu():
        graphs.cuda_graphs(torch.device("cuda", 0))(work)
    other.join()
    assert inside.is_set()
    assert not failed
