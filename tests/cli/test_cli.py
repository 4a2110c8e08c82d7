import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tribe
from commands import app, refused, succeeded, tribe_command
from processes import ended
from tribe.cli import MISSING
from tribe.cli.commands.list import REGISTRIES
from tribe.cli.custom import find_custom

MODELS = """
import torch
from torch import nn

print("loading")  # must not reach stdout, which is for the report

def make(bn=True):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4) if bn else nn.Identity()
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

net = make()
with torch.no_grad():  # statistics of images uniform on [0, 1], and a confident classifier
    net[1].train().momentum = None
    net[1](net[0](torch.rand(64, 3, 16, 16)))
    net[5].weight.mul_(50)

bare = make(bn=False)
number = 3

class Holder:
    inner = net

class Needy(nn.Module):
    def __init__(self, width): super().__init__()

class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
    def forward(self, x): raise KeyError("mood")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "models_here.py").write_text(MODELS)
    (folder / "broken_here.py").write_text("1 / 0")
    (folder / "leaves_here.py").write_text("raise SystemExit(0)")
    return folder


@pytest.fixture
def call(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tribe_command


def test_version():
    assert ended("-m", "tribe", "--version") == (0, f"tribe {tribe.__version__}\n", "")


def test_every_option_has_help():
    from typer.main import get_command

    commands = get_command(app).commands
    lacking = {
        f"{name} {p.opts[0]}" for name, found in commands.items() for p in found.params if not getattr(p, "help", "")
    }
    assert not lacking


def test_no_arguments_print_the_help(call):
    explicit, default = call("--help"), call()
    assert explicit.exit_code == default.exit_code == 0
    assert "doctor" in default.stdout
    assert "list" in default.stdout
    assert explicit.stdout.split() == default.stdout.split()


def test_unknown_command_is_a_usage_error(call):
    assert call("lsit").exit_code == 2


def test_the_library_never_loads_the_command_line_which_names_the_missing_extra():
    """In one process: without rich first, which typer can be imported without; then without typer."""
    code = """
import sys
import tribe
tribe.adapt
print([name for name in ("typer", "rich", "tribe.cli") if sys.modules.get(name)])
from tribe.cli import main
for missing in ("rich", "typer"):
    sys.modules[missing] = None
    for name in [name for name in sys.modules if name.startswith("tribe.cli.commands")]:
        del sys.modules[name]
    try:
        main()
    except SystemExit as end:
        print(end.code)
    del sys.modules[missing]
sys.modules["typer"] = None
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"[]\n{MISSING}\n{MISSING}\n", MISSING + "\n")


KINDS = ["datasets", "filters", "methods", "models", "norms", "scenarios"]


def test_kinds_are_all_that_can_be_listed():
    assert sorted(REGISTRIES) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_listed_as_json_is_what_is_registered(call, kind):
    result = call("list", kind, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    registry = REGISTRIES[kind]
    listed = {c["name"]: c for c in json.loads(result.stdout)}
    assert list(listed) == registry.names()
    for name, component in listed.items():
        cls = registry.get(name)
        assert component["summary"]
        assert list(component["fields"]) == [f.name for f in dataclasses.fields(cls) if f.init]
        assert component["paper"] == getattr(cls, "paper", None)
        assert component["presets"] == json.loads(json.dumps(getattr(cls, "presets", {})))  # JSON has no tuples
        assert component["needs"] == getattr(cls, "needs", None)
        assert component["variants"] == (cls.variants if kind == "methods" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_listed_in_a_table(call, kind):
    result = succeeded(call("list", kind))
    first = [line.split("│")[1].strip() for line in result.stdout.splitlines() if line.startswith("│")]
    assert "".join(first) == "".join(REGISTRIES[kind].names())  # a narrow column breaks words


def test_fields_carry_defaults_and_types(call):
    (fields,) = (c["fields"] for c in json.loads(call("list", "methods", "--json").stdout) if c["name"] == "tribe")
    assert fields["lambda_anc"] == {"default": 0.5, "type": "float"}
    assert fields["eta"] == {"default": None, "type": "float | None"}
    assert fields["augment"]["default"]["flip"] == 0.5


def test_the_table_shows_defaults_needs_and_variants(call):
    result = succeeded(call("list", "methods"))
    for name in tribe.methods.names():
        assert name in result.stdout
    assert "lambda_anc = 0.5" in result.stdout
    cells = [[cell.strip() for cell in line.split("│")] for line in result.stdout.splitlines()]
    ideas = "".join(cell[2] for cell in cells if len(cell) > 2)  # a narrow column breaks words anywhere
    squeezed = "".join(ideas.split())
    assert "needsthemeanandcovarianceofsourcefeatures" in squeezed
    assert "tribesourcettac" in squeezed
    assert "variants,asinselftrain/iabn:iabn,robust-bn,robust-bn-slow," in squeezed


def test_unknown_kind(call):
    assert refused(call("list", "method"), "unknown kind 'method'", "did you mean 'methods'", "norms", "corruptions")


def test_corruptions_are_listed(call):
    listed = json.loads(call("list", "corruptions", "--json").stdout)
    assert [c["name"] for c in listed] == tribe.corruptions.names()
    summaries = {c["name"]: c["summary"] for c in listed}
    assert summaries["common/glass_blur"] == "Blur, overwrite pixels with near ones, blur again."
    assert all(summaries.values())
    people = succeeded(call("list", "corruptions"))
    first = [line.split("│")[1].strip() for line in people.stdout.splitlines() if line.startswith("│")]
    assert "".join(first) == "".join(summaries)


@pytest.mark.parametrize("name", ["net", "make", "Holder.inner"])
@pytest.mark.parametrize("place", ["models_here.py", "models_here"])
def test_a_model_by_file_or_by_module(call, place, name):
    result = succeeded(call("doctor", f"{place}:{name}"))
    assert result.stdout.startswith("can be adapted")
    assert "5 classes" in result.stdout


def test_problems_are_exit_code_1(call):
    bare = call("doctor", "models_here.py:bare", "--json")
    assert bare.exit_code == 1
    assert "no normalisation layers" in json.loads(bare.stdout)["problems"][0]
    deep = call("doctor", "models_here.py:net", "--shape", "1,16,16")
    assert deep.exit_code == 1
    assert "problem: the network could not take images of shape (1, 16, 16)" in deep.stdout


DIGITS = """
import tribe

def right():
    return tribe.models.load("compact", tribe.models.find("compact", "mnist", "data"))

def turned():
    net = right()
    last = [layer for layer in net.modules() if hasattr(layer, "out_features")][-1]
    last.weight.data, last.bias.data = last.weight.data.roll(1, 0), last.bias.data.roll(1, 0)
    return net
"""


def test_doctor_asks_about_the_order_of_classes(call, tmp_path):
    (tmp_path / "digits.py").write_text(DIGITS)
    options = ("--dataset", "mnist", "--data", tmp_path, "--json")
    report = json.loads(call("doctor", tmp_path / "digits.py:right", *options).stdout)
    assert report["accuracy"] > 0.9
    assert report["problems"] == []
    result = call("doctor", tmp_path / "digits.py:turned", *options)
    assert result.exit_code == 1
    assert "not better than chance" in json.loads(result.stdout)["problems"][0]
    both = call("doctor", tmp_path / "digits.py:right", "--dataset", "mnist", "--shape", "1,28,28")
    assert both.exit_code == 2
    assert "choose one" in both.stderr


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
def test_images_from_a_file(call, tmp_path, suffix, dtype):
    images = np.random.default_rng(0).random((200, 3, 16, 16))
    images = (images * 255).astype(dtype) if dtype is np.uint8 else images.astype(dtype)
    path = tmp_path / f"images.{suffix}"
    (np.save if suffix == "npy" else np.savez)(path, images)
    result = succeeded(call("doctor", "models_here.py:net", "--input", path, "--json"))
    report = json.loads(result.stdout)
    assert report["shift"] < 0.3
    assert all(report[name].startswith("off: the network is on cpu") for name in ("graphs", "kernels", "fusion"))


def test_images_scaled_wrongly_are_a_problem(call, tmp_path):
    np.save(tmp_path / "x.npy", 255 * np.random.default_rng(0).random((16, 3, 16, 16)))
    result = call("doctor", "models_here.py:net", "--input", tmp_path / "x.npy")
    assert result.exit_code == 1
    assert "divided by 255" in result.stdout


def test_weights_are_loaded(call, tmp_path):
    weights = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ).state_dict()
    weights["1.running_mean"] += 100  # a visible effect: all images are now far from the source statistics
    save_file(weights, tmp_path / "far.safetensors")
    result = call(
        "doctor", "models_here.py:make", "--shape", "3,16,16", "--weights", tmp_path / "far.safetensors", "--json"
    )
    assert json.loads(result.stdout)["shift"] > 50


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("models_here", ["does not name a model", "package.module:attribute"]),
        ("nowhere.py:net", ["no file at nowhere.py"]),
        ("no_such_module:net", ["importing no_such_module failed", "No module named"]),
        ("broken_here.py:net", ["importing broken_here.py failed", "ZeroDivisionError"]),
        ("leaves_here:net", ["importing leaves_here failed", "SystemExit"]),
        ("models_here.py:nett", ["no attribute 'nett'", "did you mean 'net'"]),
        ("models_here.py:number", ["is not a model", "<class 'int'>"]),
        ("models_here.py:Needy", ["could not be called without arguments", "width"]),
        ("models_here.py:Moody", ["failed on these images", "KeyError"]),
    ],
)
def test_a_bad_target_is_explained(call, target, words):
    assert refused(call("doctor", target, "--shape", "3,8,8"), *words)


def test_bad_images_are_explained(call, tmp_path):
    def refuses(*words, **arrays):
        path = tmp_path / "images.npz"
        np.savez(path, **arrays)
        return refused(call("doctor", "models_here.py:net", "--input", path), str(path), *words)

    assert refuses("(4, 16, 16)", "(N, C, H, W)", x=np.zeros((4, 16, 16), np.float32))
    assert refuses("(0, 3, 16, 16)", x=np.zeros((0, 3, 16, 16), np.float32))
    assert refuses("transpose(0, 3, 1, 2)", x=np.zeros((4, 16, 16, 3), np.float32))
    assert refuses("int64", x=np.zeros((4, 3, 16, 16), np.int64))
    assert refuses("without pickle", x=np.array([None, "code"], dtype=object))
    assert refuses("2 arrays", "x, y", x=np.zeros(1), y=np.zeros(1))

    missing = tmp_path / "missing.npy"
    assert refused(call("doctor", "models_here.py:net", "--input", missing), "no images at")
    text = tmp_path / "text.npy"
    text.write_text("no array")
    assert refused(call("doctor", "models_here.py:net", "--input", text), "without pickle")
    assert refused(call("doctor", "models_here.py:net", "--shape", "3,x"), "such as 3,32,32")
    assert refused(call("doctor", "models_here.py:net", "--shape", "3,0,8"), "such as 3,32,32")
    assert refused(call("doctor", "models_here.py:net", "--shape", "3,8,8", "--input", text), "choose one")


def test_weights_that_do_not_fit(call, tmp_path):
    def refuses(path, *words):
        return refused(call("doctor", "models_here.py:net", "--weights", path), str(path), *words)

    path = tmp_path / "weights.safetensors"
    assert refuses(path, "no weights")
    path.write_bytes(b"not safetensors")
    assert refuses(path, "safetensors")
    save_file({"head.weight": torch.zeros(2)}, path)
    assert refuses(path, "0.bias", "head.weight")
    path.with_suffix(".pt").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    assert refuses(path.with_suffix(".pt"))
    assert not Path("executed").exists()


def test_two_files_are_two_modules(folder):
    """Otherwise Python would look up a class of the first file in the second."""
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(f"class Mine:\n    word = '{name}'\n")
    one, two = (find_custom(f"{folder / name}.py:Mine", "class", callable) for name in ("one", "two"))
    assert (one.word, two.word) == ("one", "two")
    assert inspect.getfile(one) == str(folder / "one.py")
