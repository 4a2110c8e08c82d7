"""Steps of a fleet on a GPU: padded groups, captured once for each shape, whose results lie in static memory."""

import pytest
import torch

import tribe
from tribe.core import graphs
from tribe.core.state import leaves
from tribe.streams import stream_seed
from tribe.streams.batching import MAX_ENTRIES, RECORDINGS, Arrived, Runner, gather_deployed, group_entries
from tribe.testing import images
from tribe.testing.shared import small_backbone

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROUNDS = ({"a": 1, "b": 3, "c": 1}, {"a": 2, "b": 1}, {"c": 1, "a": 1, "b": 1}, {"b": 3})


def groups(sizes, seed, **options):
    arrived = {
        name: Arrived(images(1, n, 10 * seed + i, torch.float64), True) for i, (name, n) in enumerate(sizes.items())
    }
    return list(group_entries(arrived, dict.fromkeys(sizes, False), 1, padded=True, **options))


def runner_of(name, **fields):
    """A runner of padded groups, its method and its network."""
    net, method = small_backbone(torch.float64), tribe.methods.create(name, classes=4, **fields)
    return Runner(method, net, 4, "auto", False, padded=True, copies=True), method, net


def close(state, other):
    return all(torch.allclose(a.double(), b.double(), atol=1e-9) for a, b in zip(state, other, strict=True))


@pytest.fixture
def recorded(monkeypatch):
    """Record steps on the CPU, as CUDA graphs do on a GPU: on static memory, which a replay overwrites."""
    made = []

    def record(work):
        made.append(work)
        return work

    monkeypatch.setattr(graphs, "capture_refusal", lambda method, device: None)
    monkeypatch.setattr(graphs, "cuda_graphs", lambda device: record)
    return made


def test_states_stay_as_they_are_when_the_recording_of_their_shape_is_replayed(recorded):
    runner, method, net = runner_of("tribe", h0=2.0)
    states = {name: method.init(net, 1, i) for i, name in enumerate("abc")}
    alone = dict(states)
    for seed, sizes in enumerate(ROUNDS):
        for group in groups(sizes, seed):
            logits, after = runner.step(group, [states[name] for name in group.names])
            states |= dict(zip(group.names, after, strict=True))
            for i, (name, n) in enumerate(zip(group.names, group.sizes, strict=True)):
                own, alone[name] = method.step(net, alone[name], group.x[i : i + 1, :n])
                assert torch.allclose(logits[i, :n], own[0], atol=1e-9)
        for name in "abc":
            assert close(leaves(states[name]).values(), leaves(alone[name]).values())
    shapes = {group.x.shape for i, sizes in enumerate(ROUNDS) for group in groups(sizes, i)}
    assert len(recorded) == 2 * len(shapes), "each shape once, in two directions"


def test_padded_groups_predict_as_single_streams():
    runner, method, net = runner_of("tribe")
    two, one, three = *groups({"a": 3, "b": 4, "c": 1}, 0), *groups(dict.fromkeys("abc", 3), 1)
    assert [(group.names, tuple(group.x.shape[:2])) for group in (two, one)] == [(("a", "b"), (2, 4)), (("c",), (1, 1))]
    assert three.x.shape[:2] == (4, 4)
    assert three.valid.sum(1).tolist() == [3, 3, 3, 0]
    for group in (two, one, three):
        states = [method.init(net, 1, i) for i in range(len(group.names))]
        filled = [states[0]] * (group.entries - len(states))
        networks = gather_deployed([method.deployed(net, state) for state in [*states, *filled]])
        predicted = runner.predict(group, states, lambda networks=networks: networks)
        for i, n in enumerate(group.sizes):
            assert torch.allclose(
                predicted[i, :n], method.predict(net, states[i], group.x[i : i + 1, :n])[0], atol=1e-9
            )


def test_shapes_are_few_and_the_oldest_recordings_go(recorded):
    runner, method, net = runner_of("bn")
    (group,) = groups({"a": 1}, 0)
    for size in range(1, RECORDINGS + 3):
        wide = group._replace(x=images(1, 1, 0, torch.float64)[..., :1].repeat(1, 1, 1, 1, 4 + size))
        runner.step(wide, [method.init(net)])
    assert len(runner._padded) == RECORDINGS
    many = groups({f"cam{i}": 1 + i % 3 for i in range(3 * MAX_ENTRIES)}, 0)
    assert {len(group.x) for group in many} <= {2**k for k in range(8)}
    assert sum(len(group.names) for group in many) == 3 * MAX_ENTRIES
    assert all(len(group.names) == 1 for group in groups({"a": 1, "b": 1}, 0, together=False))


def test_what_cannot_be_captured_is_tried_once_for_all_shapes(recorded, monkeypatch):
    tried = []

    def refused(device):
        tried.append(device)
        raise RuntimeError("no copy from the host")

    monkeypatch.setattr(graphs, "cuda_graphs", refused)
    runner, method, net = runner_of("bn")
    first, *others = (*groups({"a": 1, "b": 3}, 0), *groups({"a": 2}, 1))
    with pytest.warns(RuntimeWarning, match="no copy"):
        runner.step(first, [method.init(net)])
    for group in others:
        runner.step(group, [method.init(net)])
    assert len(tried) == 1
    assert "no copy" in runner.unpadded.capture_disabled_reason


@gpu
def test_on_a_gpu_streams_agree_with_adapters(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding depends on the size of the batch
    net = small_backbone().cuda()
    fleet = tribe.fleet(net, h0=2.0)
    adapters = {name: tribe.adapt(net, h0=2.0, seed=stream_seed(name)) for name in "abc"}
    for seed, sizes in enumerate((*ROUNDS, *ROUNDS)):
        batch = {name: images(1, n, 10 * seed + i)[0].cuda() for i, (name, n) in enumerate(sizes.items())}
        answers = fleet(batch)
        for name, x in batch.items():
            # Adam turns rounding of small gradients into steps of full size: a few of lr = 1e-3 by the last round.
            assert torch.allclose(answers[name], adapters[name](x), atol=5e-3)
    for name, adapter in adapters.items():
        x = images(1, 2)[0].cuda()
        assert torch.allclose(fleet.predict({name: x})[name], adapter.predict(x), atol=5e-3)
        assert fleet.info(name).images == adapter.info[0].images


def test_the_pass_of_the_source_leaves_captured_steps_as_they_are(recorded):
    """In shadow each call passes the source beside a replay, whose static memory holds the states."""
    net = small_backbone()
    shadow, open_, source = (
        tribe.adapt(net, **options)
        for options in (
            {"h0": 2.0, "streams": 2, "shadow": True},
            {"h0": 2.0, "streams": 2},
            {"method": "source", "streams": 2},
        )
    )
    for seed in range(4):
        x = images(2, 6, seed)
        answers, adapted, plain = shadow(x), open_(x), source(x)
        assert torch.equal(answers, plain)
        assert shadow.digest() == open_.digest()
    assert shadow.capture_disabled_reason is None
    shadow.promote(0)
    for seed in range(4, 7):
        x = images(2, 6, seed)
        answers, adapted, plain = shadow(x), open_(x), source(x[:, :])
        assert torch.equal(answers[0], adapted[0])
        assert torch.allclose(answers[1], plain[1], atol=1e-5)
        assert not torch.equal(adapted, plain)
        assert shadow.digest() == open_.digest()


@gpu
def test_on_a_gpu_streams_in_shadow_learn_as_others_do():
    net = small_backbone().cuda()
    shadow, open_ = (tribe.adapt(net, h0=2.0, shadow=shadow) for shadow in (True, False))
    source = tribe.adapt(net, "source", graphs=False)
    for seed in range(6):
        x = images(1, 6, seed)[0].cuda()
        open_(x)
        assert torch.allclose(shadow(x), source(x), atol=1e-5)
    x = images(1, 6, 9)[0].cuda()
    assert torch.allclose(shadow.promote()(x), open_(x), atol=5e-3)
