"""The same numbers on a GPU: conformance, streams, saving and resuming across devices."""

import numpy as np
import pytest
import torch

import tribe
from places import DATA
from recordings import CASES, GOLDENS, RECORDED, TOLERANCE, replay
from tribe.core import kernels
from tribe.core.precision import float32_precision
from tribe.core.state import leaves
from tribe.testing import CLASSES, images, ready, small_network
from watching import pictures

GUARDED = [("tribe+guard", {"skip": False}), ("tribe+guard", {}), ("tent+guard", {"skip": False}), ("tribe+watch", {})]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def ieee_float32():
    """cuDNN uses TF32 for float32 by default; conformance is about float32."""
    with float32_precision("float32"), kernels.using(False):
        yield


@pytest.mark.parametrize("mode", [False, "auto"])
@pytest.mark.parametrize(("file", "name"), CASES)
def test_the_recording_holds_on_the_gpu(file, name, mode):
    path = GOLDENS / f"{file}_open.npz" if GOLDENS.is_dir() else DATA / f"{file}.npz"
    with np.load(path) as data, kernels.using(mode):
        logits, _ = replay(dict(data), name, *RECORDED[file][name], device="cuda")
        golden = torch.from_numpy(data[f"logits/{name}"])
    assert (logits[0].cpu() - golden).abs().max() <= TOLERANCE.get(name, 5e-5)
    assert torch.equal(logits[0].cpu().argmax(-1), golden.argmax(-1))


@pytest.mark.parametrize(("method", "fields"), [*((name, {}) for name in tribe.methods.names()), *GUARDED], ids=str)
def test_cpu_and_gpu_agree_with_the_default_augmentation(method, fields):
    here, there = (
        tribe.adapt(small_network(), ready(method, **fields), streams=3),
        tribe.adapt(small_network().cuda(), ready(method, **fields), streams=3),
    )
    for seed in range(5):
        x = images(3, 6, seed)
        assert (here(x) - there(x.cuda()).cpu()).abs().max() <= 1e-3  # of logits up to about 10
    for name, t in leaves(here.state).items():
        assert torch.allclose(t.double(), leaves(there.state)[name].cpu().double(), atol=1e-3), name


def test_adapters_move_and_files_cross_devices(tmp_path):
    adapter = tribe.adapt(small_network())
    adapter(images(1, 6)[0])
    adapter.save(tmp_path / "a")
    moved = tribe.load(tmp_path / "a", small_network().cuda())
    assert moved.state.affine.weight.is_cuda
    x = images(1, 6, 1)[0]
    assert (moved(x.cuda()).cpu() - adapter(x)).abs().max() <= 1e-4
    back = moved.to("cpu")
    assert not back.state.affine.weight.is_cuda
    assert back(x).shape == (6, CLASSES)
    exported = adapter.to("cuda").export()
    assert (exported(x.cuda()) - adapter.predict(x.cuda())).abs().max() <= 1e-5


@pytest.mark.parametrize(("file", "name"), [case for case in CASES if case[1].startswith("tribe")])
def test_tf32_stays_near_the_recording(file, name):
    with np.load(DATA / f"{file}.npz") as data, kernels.using("auto"), float32_precision("tf32"):
        logits, _ = replay(dict(data), name, *RECORDED[file][name], device="cuda")
        golden = torch.from_numpy(data[f"logits/{name}"])[:8]
    logits = logits[0, :8].cpu()
    assert (logits - golden).abs().max() <= 2e-2
    assert (logits.argmax(-1) == golden.argmax(-1)).float().mean() >= 0.99


@pytest.mark.parametrize("mode", [False, "auto"])
def test_class_statistics_do_not_drift_in_five_thousand_steps(mode):
    """Against float64, at the settings of ImageNet."""
    norm = tribe.norms.create("balanced", classes=1000, eta=0.5, gamma=0.5)
    generator = torch.Generator("cuda").manual_seed(0)
    exact = tribe.Stats(*(torch.ones(1, 1000, 16, dtype=torch.float64, device="cuda") for _ in range(2)))
    kept, valid = tribe.Stats(*(t.float() for t in exact)), torch.ones(1, 64, dtype=torch.bool, device="cuda")
    with kernels.using(mode):
        for _ in range(5000):
            mean, var = torch.rand(2, 1, 64, 16, generator=generator, device="cuda")
            labels = torch.randint(1000, (1, 64), generator=generator, device="cuda")
            *_, kept = norm(mean, var, 9, kept, labels, valid, 1e-5)
            *_, exact = norm(mean.double(), var.double(), 9, exact, labels, valid, 1e-5)
    for a, b in zip(kept, exact, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("mode", [False, "auto"])
def test_class_sums_do_not_pass_through_tf32(mode):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    norm = tribe.norms.create("balanced", classes=3, eta=0.5)
    generator = torch.Generator().manual_seed(0)
    mean, var = (torch.rand(1, 64, 8, generator=generator) + 100 for _ in range(2))
    stats = tribe.Stats(torch.full((1, 3, 8), 98.0), torch.ones(1, 3, 8))
    labels, valid = torch.randint(3, (1, 64), generator=generator), torch.ones(1, 64, dtype=torch.bool)
    here = norm(mean, var, 9, stats, labels, valid, 1e-5)
    given = mean.cuda(), var.cuda(), 9, tribe.Stats(*(t.cuda() for t in stats)), labels.cuda(), valid.cuda(), 1e-5
    with kernels.using(mode):
        there = norm(*given)
    for a, b in zip((*here[:2], *here[2]), (*there[:2], *there[2]), strict=True):
        assert torch.allclose(a, b.cpu(), rtol=1e-6)


@pytest.mark.filterwarnings("error:.*deterministic implementation")
@pytest.mark.parametrize("mode", [False, "auto"])
@pytest.mark.parametrize(("method", "fields"), [*((name, {}) for name in tribe.methods.names()), *GUARDED], ids=str)
def test_deterministic_steps_give_the_same_bits(method, fields, mode):
    """For every method, captured where it can be: all its operations have a deterministic algorithm."""
    net = small_network().cuda()
    first, second = (tribe.adapt(net, ready(method, **fields), streams=2, deterministic=True) for _ in range(2))
    with kernels.using(mode):
        for seed in range(12):  # RoTTA learns at the 64th image
            x = images(2, 6, seed).cuda()
            assert torch.equal(first(x), second(x))
    assert first.digest() == second.digest()


@pytest.mark.parametrize("name", ["tribe+guard", "tent+guard"])
def test_a_guarded_stream_tells_its_health_from_the_gpu(name):
    """With graphs: a black camera holds the stream, its events arrive, and the other stream goes on."""
    adapter = tribe.adapt(small_network().cuda(), name, streams=2)
    for seed in range(4):
        x = pictures(2, 16, seed)
        x[0] = 0 if seed else x[0]
        adapter(x.cuda())
    assert adapter.capture_disabled_reason is None
    black, normal = adapter.health
    assert (black.held, normal.held) == (48, 0)
    assert black.images == normal.images == 64
    assert "black" in black.alarms
    assert [event.stream for event in adapter.events if event.kind == "black"] == [0]
