"""Exports: options, refusals, smaller files, OpenVINO, Triton, the command, and networks as they come."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from exported import digits, digits_network, prepared

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import tribe
from tribe.core.state import leaves
from tribe.health.frames import FrameRules, judge, start_frames
from tribe.methods import create
from tribe.onnx import ModelFileError, Session, export, quantize, write_triton
from tribe.onnx.one_pass import MOVES
from tribe.testing import images, small_network

# -- options ----------------------------------------------------------------------------------------------------------


def faulty(generator):
    """Pictures, and faults of a camera between them: (N, 3, 16, 16) of 0 to 255."""
    pictures = torch.nn.functional.interpolate(torch.rand(40, 3, 4, 4, generator=generator), 16, mode="bicubic")
    noise = torch.rand(12, 3, 16, 16, generator=generator)
    still = pictures[:1].expand(14, -1, -1, -1)
    black, white = torch.zeros(5, 3, 16, 16), torch.ones(8, 3, 16, 16)
    parts = (pictures[1:20], black, pictures[20:25], noise, pictures[25:30], still, pictures[30:], white)
    return (255 * torch.cat(parts).clamp(0, 1)).to(torch.uint8)


def test_images_that_show_a_fault_are_not_learned_from(session):
    """Against the library's own judgement of each batch: what it refuses is predicted and not observed."""
    ours, net = session("watched"), tribe.Backbone(small_network())
    method = create("bank", classes=4, compare=0, observe=1)
    state, frames, held = method.init(net), start_frames(1), 0
    x = faulty(torch.Generator().manual_seed(0))
    for batch in x.split([1, 7, 1, 16, 30, len(x) - 55]):
        outputs = ours.run(batch.numpy())
        given = batch[None].float() / 255
        valid = torch.ones(given.shape[:2], dtype=torch.bool)
        verdict, frames = judge(FrameRules(), frames, given, valid)
        good = ~verdict.teaches_nothing
        logits = method.predict(net, state, given)
        assert np.abs(outputs["logits"] - logits[0].numpy()).max() < 1e-4
        source = net(given, *net.source(), tribe.methods.Frozen()).logits
        assert np.abs(outputs["source_logits"] - source[0].numpy()).max() < 1e-4
        if good.any():
            _, state = method.step(net, state, given[:, good[0]])
        held += int((~good).sum())
        for name in MOVES[:6]:  # the others count the images that are not learned from, too
            assert np.abs(ours.state()[name] - leaves(state)[name].numpy()).max() < 1e-4, name
    assert held > 20
    assert np.array_equal(ours.state()["frames.runs"], frames.runs.numpy())


def test_the_state_of_frame_checks_is_in_no_state_file(session, tmp_path):
    ours = session("watched")
    ours(np.zeros((3, 3, 16, 16), np.uint8))
    ours.save(tmp_path / "state")
    assert tribe.load(tmp_path / "state", small_network()).info[0].images == 3
    assert not ours.load(tmp_path / "state").state()["frames.runs"].any()


def test_a_file_says_what_it_holds(session):
    net = digits_network()
    header = session("digits").header
    assert header["fingerprint"] == tribe.Backbone(net).fingerprint()
    assert (header["method"], header["classes"], header["shape"]) == ("bank", 10, [1, 28, 28])
    assert header["fields"]["compare"] == 0
    assert session("watched").header["options"]["uint8"]


def test_files_are_small(model_file):
    """Catches notes of the exporter, twice the size of a graph, and a first state with every class."""
    weights = sum(p.nbytes for p in digits_network().parameters())
    assert model_file("digits").stat().st_size < weights + 120_000


# -- refusals ---------------------------------------------------------------------------------------------------------


class Decides(nn.Module):
    """Chooses by the values of its input."""

    def forward(self, x):
        return x * 2 if x.mean() > 0.5 else x


class Outside(nn.Module):
    """Computes something that ONNX has no operator for."""

    def forward(self, x):
        return torch.special.bessel_j0(x)


class Crops(nn.Module):
    """Normalises an image and its mirror image."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return self.norm(torch.cat((x, x.flip(3))))[: len(x)]


def around(layer):
    first, *rest = small_network()
    return nn.Sequential(first, nn.Sequential(layer), *rest)


@pytest.mark.parametrize("layer", [Decides, pytest.param(Outside, marks=pytest.mark.slow)])
def test_a_layer_that_cannot_be_written_is_named(layer, tmp_path):
    with pytest.raises(ModelFileError, match=rf"layer '1\.0', {layer.__name__}, cannot be written as ONNX: .+"):
        export(around(layer()), tmp_path / "net.onnx", (3, 8, 8))
    assert not list(tmp_path.iterdir())


def test_several_samples_of_an_image_are_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"layer '1\.0\.norm' receives several samples"):
        export(around(Crops()), tmp_path / "net.onnx", (3, 8, 8))


def adapter(method, **given):
    return lambda: tribe.adapt(small_network(), method, **given)


REFUSED = {
    "a backward pass": (adapter("tribe"), {}, "'tribe'.*bank"),
    "an entropy method": (adapter("tent"), {}, "'tent'.*bank"),
    "a method that keeps nothing": (adapter("bn"), {}, "'bn'"),
    "a bank that compares": (adapter("bank"), {}, "compare=32"),
    "a guard": (adapter("bank", compare=0, guard=True), {}, "frames=True"),
    "a bank that learns rarely": (adapter("tent+rare"), {}, "tent.rare"),
    "a filter that sees later images": (
        adapter("bank", compare=0, time=tribe.filters.create("time", within="batch")),
        {},
        "time filter",
    ),
    "several streams": (adapter("bank", compare=0, streams=2), {}, "2"),
    "no BatchNorm": (lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 4)), {}, "BatchNorm"),
    "half precision": (lambda: small_network().to(torch.bfloat16), {}, "float32"),
    "an opset of the future": (small_network, {"opset": 99}, "opset=99"),
    "an opset of the past": (small_network, {"opset": 9}, "opset=9"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_a_model_file_is_refused(what, tmp_path):
    make, options, words = REFUSED[what]
    with pytest.raises(ModelFileError, match=words):
        export(make(), tmp_path / "net.onnx", (3, 8, 8), **options)
    assert not list(tmp_path.iterdir())


def test_arguments_are_checked(tmp_path):
    path = tmp_path / "net.onnx"
    with pytest.raises(ValueError, match="shape"):
        export(small_network(), path, (3, 8))
    with pytest.raises(ValueError, match="3 channels"):
        export(small_network(), path, (1, 8, 8))
    with pytest.raises(TypeError, match="adapter"):
        export(adapter("bank", compare=0)(), path, (3, 8, 8), observe=2)
    with pytest.raises(TypeError, match="observ"):
        export(small_network(), path, (3, 8, 8), observ=2)
    with pytest.raises(OSError, match="folder"):
        export(small_network(), tmp_path / "missing" / "net.onnx", (3, 8, 8))


# -- smaller files ----------------------------------------------------------------------------------------------------


def error(session, x, y):
    wrong = [session(a.numpy()).argmax(1) != b.numpy() for a, b in zip(x.split(64), y.split(64), strict=True)]
    return np.concatenate(wrong).mean()


def test_smaller_files_predict_nearly_the_same(model_file, session, tmp_path):
    x, y = digits()
    full = error(session("digits"), x, y)
    for kind, given in (("float16", None), ("int8", x[::8].numpy())):
        path = tmp_path / f"{kind}.onnx"
        quantize(model_file("digits"), path, kind, given)
        small = Session(path, threads=1)
        assert abs(error(small, x, y) - full) < 0.02, kind
        assert small.header == session("digits").header
        assert path.stat().st_size < model_file("digits").stat().st_size
        if kind == "int8":
            with pytest.raises(ModelFileError, match="cannot be tuned"):
                Session(path, tune=True)
        small.save(tmp_path / "state")
        assert tribe.load(tmp_path / "state", digits_network()).info[0].images == len(x)


def test_quantize_checks_its_arguments(model_file, tmp_path):
    with pytest.raises(ValueError, match="images"):
        quantize(model_file("digits"), tmp_path / "a", "int8")
    with pytest.raises(ValueError, match="int4"):
        quantize(model_file("digits"), tmp_path / "a", "int4")


# -- other runtimes ---------------------------------------------------------------------------------------------------


def openvino_predictions(path, session, given):
    """Play images to OpenVINO: the classes that it predicts."""
    openvino = pytest.importorskip("openvino")
    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(path), "CPU", exact)
    state, predicted = session.state(), []
    for x in given:
        results = {
            key.any_name: value
            for key, value in compiled(session.given(x) | {n: state[n] for n in session.moving}).items()
        }
        state |= {name: results[f"next.{name}"].copy() for name in session.moving}
        predicted.append(results["logits"].argmax(1))
    return np.concatenate(predicted), state


@pytest.mark.parametrize("name", ["digits", "marked"])
def test_openvino_predicts_the_same(name, model_file, session):
    x = digits()[0][:500] if name == "digits" else images(1, 500)[0]
    given = [part.numpy() for part in x.split([1, 7, 64, 100, 328])]
    ours = session(name)
    expected = np.concatenate([ours(part).argmax(1) for part in given])
    predicted, state = openvino_predictions(model_file(name), session(name), given)
    assert np.array_equal(predicted, expected)
    for tensor, t in ours.state().items():
        assert np.allclose(state[tensor], t, rtol=1e-3, atol=1e-3), tensor


def test_a_repository_for_triton_is_of_its_schema(model_file, session, tmp_path):
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    place = write_triton(model_file("watched"), tmp_path, "cameras")
    config = text_format.Parse((place / "config.pbtxt").read_text(), schema.ModelConfig())
    ours = session("watched")
    assert (config.name, config.backend) == ("cameras", "onnxruntime")
    assert [list(t.dims) for t in config.input] == [[-1, 3, 16, 16]]
    assert [t.name for t in config.output] == ["logits", "source_logits"]
    first, kinds = ours.state(), {schema.TYPE_FP32: np.float32, schema.TYPE_INT64: np.int64}
    assert [state.input_name for state in config.sequence_batching.state] == ours.moving
    for state in config.sequence_batching.state:
        assert state.output_name == f"next.{state.input_name}"
        (begin,) = state.initial_state
        values = np.frombuffer((place / "initial_state" / begin.data_file).read_bytes(), kinds[state.data_type])
        assert np.array_equal(values.reshape(state.dims), first[state.input_name])
    assert (place / "1" / "model.onnx").read_bytes() == model_file("watched").read_bytes()


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_from_a_state(tmp_path, monkeypatch):
    from commands import succeeded, tribe_command

    monkeypatch.chdir(tmp_path)
    begun = tribe.adapt(digits_network(), "bank", compare=0)
    begun(digits()[0][:8])
    begun.save("begun.safetensors")
    out = ("--out", "net.onnx", "--triton", "models")
    options = ("--state", "begun.safetensors", "--kind", "float16", "--json", *out)
    report = json.loads(succeeded(tribe_command("export", "compact", *options)).stdout)
    assert report["bytes"] == (tmp_path / "net.onnx").stat().st_size
    assert Session("net.onnx").info().images == 8
    assert (tmp_path / report["triton"] / "1" / "model.onnx").is_file()


def test_the_command_writes_what_is_prepared_as_far_as_one_pass_goes(tmp_path, monkeypatch):
    """Against torch with the same settings, less what the command names; the file of a state goes on in torch."""
    from test_parity import assert_parity

    from commands import assert_refused, succeeded, tribe_command

    monkeypatch.chdir(tmp_path)
    prepared().save("net.tribe")
    said = " ".join(succeeded(tribe_command("export", "net.tribe", "net.onnx")).stdout.split())
    for words in ("learn_every=8", "compare=32", "checks of frames"):
        assert words in said
    ours, (x, y) = Session("net.onnx", threads=1), digits(256)
    assert len(ours.differs) == 3
    assert (ours.header["method"], ours.header["options"]["frames"]) == ("bank+time-checked", True)
    theirs = tribe.adapt(digits_network(), "bank", compare=0, time="time-checked")
    assert_parity(ours, theirs, x[y.argsort()].split([1, 7, 64, 184]))
    assert theirs.time[0].on
    ours.save("state")
    assert_parity(ours, tribe.load("state", digits_network()), [x[:20]])
    assert_refused(tribe_command("export", "net.tribe", "--time", "auto"), "--time")
    with pytest.raises(ValueError, match="another network"):
        export(small_network(), "other.onnx", prepared="net.tribe")


def test_the_command_refuses_in_words(tmp_path, monkeypatch):
    from commands import assert_refused, tribe_command

    monkeypatch.chdir(tmp_path)
    for arguments, words in {
        ("resnet20",): ("--weights",),
        ("mine.py:net",): ("--shape",),
        ("compact", "--kind", "int4"): ("int4",),
        ("compact", "--with", "sound"): ("sound",),
        ("compact", "--kind", "int8"): ("--images",),
        ("compact", "--set", "bank.compare=4"): ("compare=4",),
        ("compact", "--state", "nothing", "--time", "auto"): ("--state",),
        ("compact", "--state", "nothing"): ("nothing",),
    }.items():
        assert_refused(tribe_command("export", *arguments), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    from places import ROOT

    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "docs/onnx.md").read_text(), re.DOTALL)
    scope = {"net": small_network(), "images": np.random.default_rng(0).random((4, 3, 32, 32), np.float32)}
    exec(first + second, scope)
    assert scope["logits"].shape == (4, 4)
    assert tribe.load("camera.safetensors", scope["net"]).info[0].images == 4


# -- networks as they come --------------------------------------------------------------------------------------------

TIMM = ("resnet18", "mobilenetv3_small_100", "efficientnet_lite0", "regnetx_002")


def assert_exports(net, size, folder):
    """Export a network, and adapt to a few images as in torch; or accept a refusal that names a layer and a reason."""
    from test_parity import assert_same_state

    x = torch.rand(12, 3, size, size, generator=torch.Generator().manual_seed(0)) * torch.rand(12, 3, 1, 1)
    export(net, folder / "net.onnx", x.shape[1:])
    ours, theirs = Session(folder / "net.onnx", threads=1), tribe.adapt(net, "bank", compare=0)
    for part in x.split([1, 7, 4]):
        expected = theirs(part).numpy()
        assert np.abs(ours(part.numpy()) - expected).max() < 1e-3 * max(1.0, np.abs(expected).max())
    assert_same_state(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm_are_exported(name, tmp_path):
    from data.models.test_libraries import library, shaken

    torch.manual_seed(0)
    assert_exports(shaken(library("timm").create_model(name, num_classes=10)), 64, tmp_path)


@pytest.mark.slow
def test_a_network_of_hugging_face_is_exported(tmp_path):
    from data.models.test_libraries import HUGGING_FACE, library, shaken

    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(num_labels=4, **HUGGING_FACE["ResNet"])
    assert_exports(shaken(transformers.ResNetForImageClassification(config)), 32, tmp_path)


@pytest.mark.slow
def test_a_network_that_cannot_be_traced_is_refused_with_its_layer(tmp_path):
    """The same as above for a large network: one layer of many decides by values."""
    from data.models.test_libraries import library

    net = library("timm").create_model("resnet18", num_classes=10).eval()
    net.layer3[1].act2 = Decides()
    with pytest.raises(ModelFileError) as caught:
        export(net, tmp_path / "net.onnx", (3, 64, 64))
    assert re.search(r"layer 'layer3\.1\.act2', Decides, cannot be written as ONNX: .+", str(caught.value))
