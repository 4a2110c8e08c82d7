"""Captured steps: what may be captured, and that a step from static memory is the step itself."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from benchmarks.operations import count
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import tribe
from captured_methods import CAPTURABLE, IN_SEGMENTS, METHODS
from method_runs import repeated
from places import DATA
from recordings import CASES, GOLDENS, RECORDED, TOLERANCE, replay
from simulated_gpu import WAITS
from tribe.core import graphs, kernels
from tribe.core.backbone import Backbone
from tribe.core.graphs import Captured, CapturedSegments, Steps, run_segments_with
from tribe.core.precision import float32_precision
from tribe.core.state import clone, digest, leaves, select, tree_map
from tribe.testing import CLASSES, images, ready, small, small_network

FAST = {name for name, _ in CAPTURABLE + IN_SEGMENTS}
DRIFTING = ("methods_k100", "rotta")  # the recorded teacher's drift is worked out on the host


# -- no step that claims to be capturable reads a value ----------------------------------------------------------------


class Device(TorchDispatchMode):
    """Refuses operations that synchronise the host and the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for a value"
        assert name != "lift_fresh", "a constant is made on the host and copied"
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            scalar = isinstance(t, torch.Tensor) and t.dim() == 0  # a Python number on its way into a launch
            assert not isinstance(t, torch.Tensor) or scalar or t.device.type == "meta", f"{name} is on the host"
        return result


class NoLists(TorchFunctionMode):
    """Refuses places given as a list or an array, which torch copies to the device without a word."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(place, (list, np.ndarray)) for place in places), "a list of places is copied"
        return func(*args, **(kwargs or {}))


def step_without_values(method, streams=2):
    """On torch's meta device tensors have no values: a step that reads one fails."""
    home = Backbone(small_network())
    state = tree_map(lambda t: t.to("meta"), method.init(home, streams))
    net, x = home.to("meta"), images(streams, 6).to("meta")
    if isinstance(known := getattr(method, "knowledge", None), tribe.knowledge.Knowledge):
        known.on(net)  # moved once, not in every step
    with Device(), NoLists():
        return method.step(net, state, x, retired=clone(state))


@pytest.mark.parametrize(("name", "fields"), CAPTURABLE, ids=str)
def test_a_step_that_may_be_captured_reads_no_value(name, fields):
    logits, state = step_without_values(ready(name, **fields))
    assert logits.shape == (2, 6, CLASSES)
    assert all(t.device.type == "meta" for t in leaves(state).values())


@pytest.mark.parametrize(("name", "fields"), [m for m in METHODS if m not in CAPTURABLE], ids=str)
def test_a_method_that_is_exempt_reads_values(name, fields):
    """Catches an exemption that is not needed any more."""
    method = ready(name, **fields)
    assert method.capture in ("segments", "never")
    with pytest.raises((NotImplementedError, RuntimeError, AssertionError, ValueError)):
        step_without_values(method)


def test_the_paper_s_method_and_its_simplest_rivals_can_be_captured():
    assert {"tribe", "tent", "bn", "source", "eata", "pl"} <= {name for name, _ in CAPTURABLE}
    assert {"rotta", "note", "lame"} <= {name for name, _ in IN_SEGMENTS}
    assert {"tribe+time", "source+time", "tent+cofa"} <= {name for name, _ in CAPTURABLE}
    assert "rotta+time" in {name for name, _ in IN_SEGMENTS}


@pytest.mark.parametrize(("name", "fields"), IN_SEGMENTS, ids=str)
def test_a_segment_reads_no_value(name, fields):
    """Each segment runs without values first, once for all tensors of the same shapes, then with values."""
    method, net, done, seen = small(ready(name, **fields)), Backbone(small_network()), set(), set()
    twin = Backbone(small_network()).to("meta")

    def perform(work, args):
        abroad = tuple(
            twin if value is net else tree_map_only(torch.Tensor, lambda t: t.to("meta"), value) for value in args
        )
        case = work.__name__, *(str(value) for value in abroad)  # of a tensor: its shape and type
        if case not in seen:
            seen.add(case)
            with Device(), NoLists():
                work(*abroad)
        done.add(work.__name__)
        return work(*args)

    state = method.init(net, 2)
    with run_segments_with(perform):
        for seed in range(4):  # with small fields they learn after a few images
            _, state = method.step(net, state, images(2, 6, seed))
    assert len(done) >= 2


@pytest.mark.parametrize(("method", "most"), [("source", 106), ("tent", 492), ("tribe", 2002)])
def test_a_step_launches_no_more_than_it_did(method, most):
    """A GPU waits for launches, so a change that adds some should show. Raise the number if they are worth it."""
    assert count("resnet8", method, classes=10, batch=8).total() <= most


def test_the_harness_catches_operations_that_synchronise():
    """Each of these would stall a GPU, or break a recording."""
    with Device(), pytest.raises(AssertionError, match="copied"):
        torch.ones(2, device="meta") + torch.tensor([1.0, 2.0])
    with Device(), pytest.raises(AssertionError, match="host"):
        torch.zeros(3)
    with Device(), pytest.raises(AssertionError, match="waits"):
        torch.ones(2, device="meta").nonzero()
    with Device(), pytest.raises((AssertionError, RuntimeError)):
        bool(torch.ones(2, device="meta").any())
    with Device(), NoLists(), pytest.raises(AssertionError, match="places"):
        torch.ones(4, device="meta")[[0, 1]]


# -- static memory, ping-pong and padding, with work repeated instead of recorded --------------------------------------


def pair(name="tribe", streams=2, **fields):
    method, net = ready(name, **fields), Backbone(small_network())
    return method, net, Captured(method, net, repeated), method.init(net, streams)


@pytest.fixture
def repeating(monkeypatch):
    monkeypatch.setattr(graphs, "cuda_graphs", repeated)
    monkeypatch.setattr(graphs, "capture_refusal", lambda method, device: None)


@pytest.mark.usefixtures("repeating")
def test_too_many_shapes_of_images_end_the_recordings():
    method, net, _, state = pair("tent")
    steps = Steps(method, net)
    for size in range(1, graphs.SHAPES + 3):
        x = images(2, 6).repeat(1, 1, 1, 1, 2)[..., : 6 + size]
        assert torch.equal(steps(state, x)[0], method.step(net, state, x)[0])
        assert (steps.capture_disabled_reason is None) == (size <= graphs.SHAPES)
    assert "shapes" in steps.capture_disabled_reason


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize("name", ["tent", "rotta"])
def test_a_handful_of_recordings_serves_all_sizes_of_batches(name):
    method, net, _, state = pair(name)
    steps = Steps(method, net)
    for batch in range(5, 40):
        logits, _ = steps(state, images(2, batch))
        assert (logits - method.step(net, state, images(2, batch))[0]).abs().max() <= 1e-5
    assert steps.capture_disabled_reason is None
    assert steps._captured.recorded == 5  # 5, and 8 to 64


def test_two_static_states_take_turns_and_nothing_else_is_copied(monkeypatch):
    _, _, captured, state = pair()
    copies = []
    copy = graphs.copy_missing
    monkeypatch.setattr(graphs, "copy_missing", lambda s, t: (copies.append(s is state), copy(s, t))[1])
    places, now = [], state
    for seed in range(4):
        _, now = captured.step(now, images(2, 6, seed))
        places.append(now.pair.mean.data_ptr())
    assert places[0] == places[2] != places[1] == places[3]
    assert copies.count(True) == 1


@pytest.mark.parametrize(
    ("name", "kind", "batches", "recorded"),
    [("tribe", Captured, (6, 4, 1, 6, 9, 9, 2), 2), ("rotta", CapturedSegments, (60, 40, 1, 64, 70, 2), 3)],
    ids=["whole", "segments"],
)
def test_a_smaller_batch_is_padded_and_a_larger_one_is_recorded_again(name, kind, batches, recorded):
    method, net, _, state = pair(name)
    captured, here, there = kind(method, net, repeated), state, state
    for seed, batch in enumerate(batches):
        x = images(2, batch, seed)
        wanted, here = method.step(net, here, x)
        logits, there = captured.step(there, x)
        assert logits.shape == wanted.shape
        assert (logits - wanted).abs().max() <= 1e-5
    for leaf, t in leaves(here).items():
        assert torch.allclose(t.double(), leaves(there)[leaf].double(), atol=1e-5), leaf
    assert torch.equal(here.info.images, there.info.images)
    assert torch.equal(here.info.skipped, there.info.skipped)  # padding is not a broken image
    assert captured.recorded == recorded


def test_a_state_from_elsewhere_is_copied_in_and_stays_whole():
    method, net, captured, state = pair()
    _, after = captured.step(state, images(2, 6, 0))
    kept = clone(after)
    _, later = captured.step(after, images(2, 6, 1))
    back = select(torch.tensor([True, False]), clone(kept), later)  # one stream returns to where it was
    whole = digest(back)
    wanted, _ = method.step(net, back, images(2, 6, 2))
    logits, _ = captured.step(back, images(2, 6, 2))
    assert torch.equal(logits, wanted)
    assert digest(back) == whole


def test_another_shape_of_image_or_precision_is_recorded_again():
    method, net, captured, state = pair()
    here = there = state
    for x in (images(2, 6, 0), images(2, 6, 1)[..., :6], images(2, 6, 2)):
        wanted, here = method.step(net, here, x)
        logits, there = captured.step(there, x)
        assert torch.equal(logits, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, _ = method.step(net, here, x)
        logits, _ = captured.step(there, x)
    assert torch.equal(logits, wanted)


def test_logits_are_the_caller_s_own():
    _, _, captured, state = pair()
    first, state = captured.step(state, images(2, 6, 0))
    kept = first.clone()
    captured.step(state, images(2, 6, 1))
    assert torch.equal(first, kept)


def test_a_recording_that_failed_is_not_used():
    method, net, _, state = pair()

    def broken(device):
        raise RuntimeError("no recording today")

    captured = Captured(method, net, broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="recording"):
            captured.step(state, images(2, 6))


# -- the switch --------------------------------------------------------------------------------------------------------


def test_without_a_gpu_auto_is_eager_and_true_says_why():
    adapter = tribe.adapt(small_network(), graphs="auto")
    plain = tribe.adapt(small_network(), graphs=False)
    assert "cpu" in adapter.capture_disabled_reason
    assert "cpu" in tribe.adapt(small_network()).capture_disabled_reason
    assert plain.capture_disabled_reason == "graphs=False"
    x = images(1, 6)[0]
    assert torch.equal(adapter(x), plain(x))
    with pytest.raises(ValueError, match="device"):
        tribe.adapt(small_network(), graphs=True)
    with pytest.raises(ValueError, match="False"):
        tribe.adapt(small_network(), graphs="yes")


def test_methods_that_cannot_be_captured_say_why():
    cuda = torch.device("cuda")
    for name in ("ttac", "cotta"):
        assert "reads values" in graphs.capture_refusal(ready(name), cuda)
    assert "augment=" in graphs.capture_refusal(ready("tribe", augment=lambda x: x), cuda)
    for method in (ready("tribe"), ready("tent"), ready("rotta"), ready("selftrain", memory=8)):
        assert graphs.capture_refusal(method, cuda) is None


def test_deterministic_is_a_scope_and_adapts_as_before():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    careful, plain = tribe.adapt(small_network(), deterministic=True), tribe.adapt(small_network())
    for seed in range(3):
        x = images(1, 6, seed)[0]
        assert torch.equal(careful(x), plain(x))
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before


class Unpooling(nn.Module):
    """With an operation for which torch has no deterministic algorithm on any device."""

    def __init__(self):
        super().__init__()
        self.norm, self.pool, self.unpool = nn.BatchNorm2d(3), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.fc = nn.Linear(192, CLASSES)

    def forward(self, x):
        return self.fc(self.unpool(*self.pool(self.norm(x))).flatten(1))


def test_deterministic_warns_of_an_operation_that_cannot_be():
    adapter = tribe.adapt(Unpooling(), "tent", deterministic=True)
    with pytest.warns(UserWarning, match="implementation"):
        assert adapter(torch.rand(6, 3, 8, 8)).shape == (6, CLASSES)


def test_an_adapter_with_the_switch_can_be_copied():
    adapter = tribe.adapt(small_network(), graphs="auto")
    adapter(images(1, 6)[0])
    twin = copy.deepcopy(adapter)
    assert torch.equal(twin(images(1, 6, 1)[0]), adapter(images(1, 6, 1)[0]))
    assert twin._core.net is twin.net


# -- real graphs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ieee_float32():
    """Conformance is about float32; TF32 has its own tolerance."""
    with float32_precision("float32"):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("ieee_float32")
@pytest.mark.parametrize("mode", [False, "auto"])
@pytest.mark.parametrize(("name", "fields"), CAPTURABLE + IN_SEGMENTS, ids=str)
def test_graphs_equal_eager_steps(name, fields, mode):
    net, method = Backbone(small_network().cuda()), ready(name, **fields)
    with kernels.using(mode):
        steps = Steps(method, net, graphs=True)
        here = there = method.init(net, 3)
        for seed, batch in enumerate((6, 6, 6, 4, 6)):
            x = images(3, batch, seed).cuda()
            if seed == 2:
                x[1, 3] = torch.nan
            wanted, here = method.step(net, here, x)
            logits, there = steps(there, x)
            assert (logits - wanted).abs().max() <= 2e-4
        for leaf, t in leaves(here).items():
            assert torch.allclose(t.double(), leaves(there)[leaf].double(), atol=1e-3), leaf
        assert steps.capture_disabled_reason is None


@pytest.mark.gpu
@pytest.mark.usefixtures("ieee_float32")
@pytest.mark.parametrize(
    ("file", "name"), [case for case in CASES if RECORDED[case[0]][case[1]][0] in FAST and case != DRIFTING]
)
def test_the_recording_holds_with_graphs_and_kernels(file, name):
    """Without `Steps`, which captures tribe's augmentation only: that of the recording reads no values either."""

    def stepping(method, net):
        return (CapturedSegments if method.capture == "segments" else Captured)(method, net).step

    path = GOLDENS / f"{file}_open.npz" if GOLDENS.is_dir() else DATA / f"{file}.npz"
    with np.load(path) as data, kernels.using("auto"):
        logits, _ = replay(dict(data), name, *RECORDED[file][name], device="cuda", stepping=stepping)
        golden = torch.from_numpy(data[f"logits/{name}"])
    assert (logits[0].cpu() - golden).abs().max() <= TOLERANCE.get(name, 5e-5)
    assert torch.equal(logits[0].cpu().argmax(-1), golden.argmax(-1))


@pytest.mark.gpu
def test_adapters_behave_the_same_with_graphs(tmp_path):
    """Reset, snapshot, restore, freeze, save, load and move, between captured steps."""
    net = small_network().cuda()
    fast, slow = (tribe.adapt(net, streams=2, graphs=g) for g in (True, False))

    def both(act):
        a, b = act(fast), act(slow)
        return (a - b).abs().max().item() if isinstance(a, torch.Tensor) else (a, b)

    x = [images(2, 6, seed).cuda() for seed in range(8)]
    assert both(lambda m: m(x[0])) <= 2e-4
    kept = both(lambda m: m.snapshot())
    before = [digest(s.state) for s in kept]
    assert both(lambda m: m(x[1])) <= 2e-4
    assert both(lambda m: m.predict(x[2])) <= 2e-4
    both(lambda m: m.reset(stream=1))
    assert both(lambda m: m(x[3])) <= 2e-4
    fast.restore(kept[0])
    slow.restore(kept[1])
    assert [digest(s.state) for s in kept] == before
    assert both(lambda m: m(x[1])) <= 2e-4
    both(lambda m: m.freeze())
    frozen = digest(fast.state)
    assert both(lambda m: m(x[4])) <= 2e-4
    assert digest(fast.state) == frozen
    both(lambda m: m.unfreeze())
    fast.save(tmp_path / "fast")
    resumed = tribe.load(tmp_path / "fast", net, graphs=True)
    assert torch.allclose(resumed(x[5]), fast(x[5]), atol=1e-5)
    assert fast.info[0].steps == resumed.info[0].steps
    moved = fast.to("cpu")
    with pytest.raises(ValueError, match="cuda"):
        moved(x[6])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [False, "auto"])
@pytest.mark.parametrize("switch", [False, True])
def test_deterministic_steps_repeat_and_resume_bit_for_bit(switch, mode, tmp_path):
    net = small_network().cuda()

    def play(steps, adapter):
        return torch.stack([adapter(images(2, 6, seed).cuda()) for seed in steps])

    with kernels.using(mode):
        whole, again, first = (tribe.adapt(net, streams=2, graphs=switch, deterministic=True) for _ in range(3))
        wanted = play(range(6), whole)
        assert torch.equal(play(range(6), again), wanted)
        assert whole.digest() == again.digest()
        assert torch.equal(play(range(3), first), wanted[:3])
        first.save(tmp_path / "half")
        resumed = tribe.load(tmp_path / "half", net, graphs=switch, deterministic=True)
        assert torch.equal(play(range(3, 6), resumed), wanted[3:])
        assert resumed.digest() == whole.digest()


@pytest.mark.gpu
def test_memory_stays_flat_over_captured_steps():
    adapter = tribe.adapt(small_network().cuda(), graphs=True)
    for seed in range(3):
        adapter(images(1, 6, seed)[0].cuda())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(50):
        adapter(images(1, 6, seed)[0].cuda())
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**16


@pytest.mark.gpu
def test_autocast_is_captured_with_the_rest():
    adapter, plain = (tribe.adapt(small_network().cuda(), graphs=g) for g in (True, False))
    for seed in range(4):
        x = images(1, 6, seed)[0].cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=seed != 1):
            assert (adapter(x).float() - plain(x).float()).abs().max() <= 0.2
    assert all(t.dtype in (torch.float32, torch.int64) for t in leaves(adapter.state).values())


@dataclasses.dataclass(frozen=True)
class Looking(tribe.methods.get("tent")):
    """A custom method that reads a value and does not declare it."""

    def step(self, net, state, x, valid=None, retired=None):
        return super().step(net, state, x if x.sum() > 0 else x + 1, valid)


@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_is_taken_eagerly():
    net = small_network().cuda()
    adapter, plain = tribe.adapt(net, Looking()), tribe.adapt(net, Looking(), graphs=False)
    with pytest.warns(RuntimeWarning, match="captured"):
        first = adapter(images(1, 6)[0].cuda())
    assert (first - plain(images(1, 6)[0].cuda())).abs().max() <= 1e-4
    for seed in range(1, 4):  # the device has come to no harm
        x = images(1, 6, seed)[0].cuda()
        assert (adapter(x) - plain(x)).abs().max() <= 1e-4
    assert "could not be captured" in adapter.capture_disabled_reason
    with pytest.raises(RuntimeError):
        tribe.adapt(net, Looking(), graphs=True)(x)
    assert tribe.adapt(net, "tent", graphs=True)(x).shape == (6, CLASSES)
