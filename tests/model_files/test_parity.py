"""A model file predicts and adapts as the library does: logits, predictions and states over many batches."""

import math

import numpy as np
import pytest
import torch

from exported import digits, digits_network, marked

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import tribe
import tribe.onnx
from places import SHARED
from tribe import models
from tribe.core.state import leaves
from tribe.onnx.graph import ModelGraph, Options
from tribe.testing import images

SIZES = (1, 7, 64)  # of batches
CLOSE = 1e-3


def batches(x, sizes=SIZES):
    """Images in batches of sizes that take turns."""
    start = 0
    for i in range(len(x)):
        yield x[start : start + sizes[i % len(sizes)]]
        start += sizes[i % len(sizes)]
        if start >= len(x):
            return


def assert_same_state(session, adapter, stream="default"):
    """Each number of the states differs by a thousandth of the largest in its tensor at most; counts are equal."""
    state = session.state(stream)
    for name, t in leaves(adapter.state).items():
        ours, theirs = state[name], t.numpy()
        assert ours.shape == theirs.shape, name
        if not ours.size:
            continue
        if ours.dtype.kind == "f":
            assert np.abs(ours - theirs).max() <= CLOSE * max(1.0, np.abs(theirs).max()), name
        else:
            assert np.array_equal(ours, theirs), name


def assert_parity(session, adapter, given, least=0.999):
    """Play images to both, and compare all that comes out; the logits."""
    same = count = 0
    outputs = []
    for x in given:
        ours, theirs = session(x.numpy()), adapter(x).numpy()
        assert np.abs(ours - theirs).max() <= CLOSE * max(1.0, np.abs(theirs).max())
        same, count = same + int((ours.argmax(1) == theirs.argmax(1)).sum()), count + len(ours)
        outputs.append(ours)
    assert same >= least * count
    assert_same_state(session, adapter)
    return np.concatenate(outputs)


def test_the_digits_network_adapts_as_in_torch(session):
    x, y = digits()
    adapter = tribe.adapt(digits_network(), "bank", compare=0)
    logits = assert_parity(session("digits"), adapter, batches(x))
    source = tribe.adapt(digits_network(), "source")(x).argmax(1)
    assert (logits.argmax(1) == y.numpy()).mean() > (source == y).float().mean() + 0.02, "it did not adapt"


@pytest.mark.parametrize("name", ["digits", "marked"])
def test_a_tuned_session_computes_the_same(name, model_file, session):
    """Batches of one take one network or the other, larger ones both; statistics move, and are put back."""
    pytest.importorskip("onnx")
    ours, tuned = session(name), tribe.onnx.Session(model_file(name), threads=1, tune=True)
    x = digits()[0] if name == "digits" else images(1, 500)[0]
    begun = tuned.snapshot()
    for batch in [*batches(x[:300]), *x[300:320].split(1)]:
        expected = ours(batch.numpy())
        logits = tuned(batch.numpy())
        assert np.abs(logits - expected).max() <= CLOSE * max(1.0, np.abs(expected).max())
        assert np.array_equal(tuned.predict(batch.numpy()), tuned.predict(batch.numpy()))
    for tensor, t in ours.state().items():
        assert np.allclose(tuned.state()[tensor].astype(float), t.astype(float), rtol=CLOSE, atol=CLOSE), tensor
    assert np.abs(tuned.predict(x[:9].numpy()) - ours.predict(x[:9].numpy())).max() < 0.01
    fresh = session(name).predict(x[:9].numpy())
    assert np.abs(tuned.restore(begun).predict(x[:9].numpy()) - fresh).max() < 0.01


def test_marks_bad_images_and_a_time_filter_agree_with_torch(session):
    """From the state of an adapter on; bursts of equal images turn the filter on, some are NaN, some padding."""
    ours, adapter, on = session("marked"), marked(), 0
    assert ours.info().images == 20
    generator = torch.Generator().manual_seed(0)
    kinds = images(1, 40, 3)[0]
    for i in range(36):
        x = torch.cat([kinds[int(k)].expand(12, -1, -1, -1) for k in torch.randint(40, (2,), generator=generator)])
        x = (x + 0.05 * torch.rand(x.shape, generator=generator)).clamp(0, 1)[: SIZES[i % 3]]
        valid = torch.rand(len(x), generator=generator) < 0.9
        if len(x) > 3:
            x[2] = math.nan
        logits, expected = ours(x.numpy(), valid.numpy()), adapter(x, valid).numpy()
        assert np.abs(logits - expected).max() < CLOSE
        on += adapter.time[0].on
    assert_same_state(ours, adapter)
    assert ours.info().skipped == adapter.info[0].skipped > 0
    assert on, "the filter was never on"


def test_the_graph_holds_the_plain_time_filter_too():
    """The graph of a file, run by torch: files of tests hold the filter that is checked."""
    adapter = tribe.adapt(digits_network(), "bank", compare=0, time="auto")
    x, y = digits(200)
    x, state = x[y.argsort()], leaves(adapter.state)
    graph = ModelGraph(adapter.net, adapter.method.method, adapter.method.filter, Options()).eval()
    for batch in x.split(100):
        logits, *after = graph(batch, *(state[name] for name in graph.names))
        state |= dict(zip(graph.names, after, strict=False))
        assert torch.allclose(logits, adapter(batch), atol=1e-3)
    assert adapter.time[0].on


def test_the_adaptation_of_many_classes_agrees_with_torch(tmp_path):
    """Catches sums over classes that several images share, and classes that none has."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 12, 3, 2, bias=False), torch.nn.BatchNorm2d(12), torch.nn.ReLU()),
        *(torch.nn.Flatten(), torch.nn.Linear(12 * 9, 100)),
    )
    net.eval()[1].running_mean.normal_()
    given = torch.rand(800, 3, 8, 8) * torch.rand(800, 3, 1, 1)
    with torch.no_grad():
        net[-1].bias.sub_(net(given).mean(0))  # so that many classes are predicted
    tribe.onnx.export(net, tmp_path / "net.onnx", (3, 8, 8), observe=2)
    ours, adapter = tribe.onnx.Session(tmp_path / "net.onnx", threads=1), tribe.adapt(net, "bank", compare=0, observe=2)
    logits = assert_parity(ours, adapter, batches(given), least=0.99)
    assert len(np.unique(logits.argmax(1))) > 20


NETWORKS = {
    "resnet20": lambda: models.load("resnet20", SHARED / "weights" / "resnet20_cifar10.safetensors"),
    "digits": digits_network,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_three_hundred_batches_agree_with_torch(name, tmp_path):
    if name == "resnet20" and not (SHARED / "weights").is_dir():
        pytest.skip("the published weights are not here")
    net = NETWORKS[name]()
    x = digits(8000)[0]
    if name == "resnet20":  # textures of digits, coloured: images of a world that the network does not know
        x = torch.nn.functional.interpolate(x, 32).repeat(1, 3, 1, 1) * torch.rand(len(x), 3, 1, 1)
    x = x[torch.arange(300 * 24) % len(x)]
    tribe.onnx.export(net, tmp_path / "net.onnx", x.shape[1:])
    ours, adapter = tribe.onnx.Session(tmp_path / "net.onnx", threads=1), tribe.adapt(net, "bank", compare=0)
    given = list(batches(x))
    assert len(given) == 300
    assert_parity(ours, adapter, given)


@pytest.mark.slow
def test_three_hundred_batches_of_efficientnet_lite0_agree_with_torch(tmp_path):
    """At 224 pixels, with random weights: no trained ones are here. Its logits hardly differ, so they are scaled."""
    from data.models.test_libraries import library, shaken

    timm = library("timm")
    torch.manual_seed(0)
    net = shaken(timm.create_model("efficientnet_lite0", num_classes=10))
    with torch.no_grad():
        net.classifier.weight.mul_(20)
    tribe.onnx.export(net, tmp_path / "net.onnx", (3, 224, 224))
    ours, adapter = tribe.onnx.Session(tmp_path / "net.onnx", threads=1), tribe.adapt(net, "bank", compare=0)
    assert_parity(ours, adapter, textures(300, torch.Generator().manual_seed(0)))


def textures(count, generator):
    """Batches of smooth images in many colours, made one after the other: all are four gigabytes."""
    for i in range(count):
        size = SIZES[i % len(SIZES)], 3
        x = torch.rand(*size, 56, 56, generator=generator) * torch.rand(*size, 1, 1, generator=generator)
        yield torch.nn.functional.interpolate(x, 224)
