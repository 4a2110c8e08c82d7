"""What is not tribe's is known by its code: a result of one version is never taken for another's."""

import hashlib
import sys

import pytest

import tribe
from commands import succeeded, tribe_command
from processes import ended
from tribe.experiments.provenance import code_at, code_of

MINE = """
from dataclasses import dataclass
import numpy
import torch
from torch import nn
import tribe
from neighbour import AMOUNT
from tribe.data.corruptions import corruption
from tribe.data.datasets.corrupted import LiveMnistC
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.workbench import Workbench
from tribe.methods.tent import Tent
from tribe.data.models.architectures import Architecture

@tribe.methods.register("mine")
@dataclass(frozen=True)
class Mine(Tent):
    amount: float = AMOUNT

@tribe.scenarios.register("my-stream")
@dataclass(frozen=True)
class MyStream(tribe.scenarios.get("iid")):
    pass

@tribe.datasets.register("my-data")
@dataclass(frozen=True)
class MyData(LiveMnistC):
    pass

@corruption("mine", family="mnist")
def mine(x, params, draw):
    return x * AMOUNT

@tribe.models.register("my-net")
@dataclass(frozen=True)
class MyNet(Architecture):
    channels: int = 1

    def network(self):
        body = nn.Conv2d(self.channels, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*body, nn.Linear(4, self.classes))
"""
ASK = """
from mine import *
from safetensors.torch import save_file
torch.manual_seed(0)
save_file(tribe.models.create("my-net").state_dict(), "net.safetensors")
workbench = Workbench(device="cpu", weights={"my-net": "net.safetensors"})
few = {"corruptions": ("stripe",)}
usual = ComponentSpec("live-mnist-c", few), "compact", "iid", "source"
asked = {
    "nothing": usual,
    "method": (*usual[:3], "mine"),
    "scenario": (*usual[:2], "my-stream", "source"),
    "dataset": (ComponentSpec("my-data", few), *usual[1:]),
    "model": (usual[0], "my-net", *usual[2:]),
    "corruption": (ComponentSpec("live-mnist-c", {"corruptions": ("mine",)}), *usual[1:]),
}
for name, parts in asked.items():
    print(name, Experiment.of(*parts, workbench=workbench).id)
"""
OWN = ["method", "scenario", "dataset", "model", "corruption"]


def ids(folder):
    environment = {"TRIBE_DATA": str(folder / "nothing"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = ended("-c", ASK, cwd=folder, env=environment)
    assert done.code == 0, done.err
    return dict(line.split() for line in done.out.splitlines())


def test_other_code_is_another_experiment(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("def late():\n    import further\n\nAMOUNT = 0.5\n")
    for name in ("further", "unrelated"):
        (tmp_path / f"{name}.py").write_text("")
    ids_after = {"": ids(tmp_path)}
    for name in ("unrelated", "mine", "further"):
        (tmp_path / f"{name}.py").write_text((tmp_path / f"{name}.py").read_text() + "# changed\n")
        ids_after[name] = ids(tmp_path)
    assert ids_after[""] == ids_after["unrelated"]
    for component in OWN:
        assert ids_after["mine"][component] != ids_after["unrelated"][component], "its own file changed"
        assert ids_after["further"][component] != ids_after["mine"][component], (
            "a file changed that its file's neighbour imports"
        )
    assert len({found["nothing"] for found in ids_after.values()}) == 1


def test_libraries_do_not_count(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "alone_here.py").write_text("import json, numpy, torch, tribe\nfrom torch import nn\n\ndef f(): ...\n")
    import alone_here

    expected = hashlib.sha256((tmp_path / "alone_here.py").read_bytes()).hexdigest()
    assert code_of(alone_here.f) == code_at("alone_here") == code_at(str(tmp_path / "alone_here.py")) == expected
    assert code_of(tribe.adapt) is code_at("tribe.adapter") is None
    elsewhere = tmp_path / "lib" / "site-packages"
    elsewhere.mkdir(parents=True)
    (elsewhere / "library_there.py").write_text("")
    (tmp_path / "user_of_it.py").write_text("import library_there\n\ndef f(): ...\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    import user_of_it

    before = code_of(user_of_it.f)
    (elsewhere / "library_there.py").write_text("# updated\n")
    assert code_of(user_of_it.f) == before
    assert code_at("library_there") is None


def test_records_of_python_say_how_they_were_made(tmp_path, few_digits):
    data = tribe.datasets.create("live-mnist-c", corruptions=("stripe",), data=few_digits)
    net = tribe.Backbone(tribe.models.load("compact", tribe.models.find("compact", "mnist", tmp_path)))
    specs = []
    for name, lr in (("gli-f", 1e-3), ("gli-f", 1e-2), ("gli-v", 1e-3)):
        stream = tribe.Stream(data, tribe.scenarios.create(name, imbalance=1e6), seeds=(3,), batch=500)
        (record,) = tribe.run(net, tribe.methods.create("tent", lr=lr), stream)
        record.save(tmp_path / f"{len(specs)}.npz")
        specs.append(tribe.Record.load(tmp_path / f"{len(specs)}.npz").spec)
    assert [spec["method"]["fields"]["lr"] for spec in specs] == [1e-3, 1e-2, 1e-3]
    assert [spec["scenario"]["name"] for spec in specs] == ["gli-f", "gli-f", "gli-v"]
    first = specs[0]
    assert (first["method"]["name"], first["seed"], first["batch"]) == ("tent", 3, 500)
    assert first["dataset"]["name"] == "live-mnist-c"
    assert first["dataset"]["fields"]["corruptions"] == ["stripe"]
    assert first["weights"] == net.fingerprint()
    assert "code" not in first["method"]
    report = succeeded(tribe_command("report", tmp_path, "-o", tmp_path / "report.html", "--json"))
    assert "OTHERWISE" not in report.output


LATE = """
from dataclasses import dataclass
from tribe.methods.source import Source

@dataclass(frozen=True)
class Late(Source):
    def step(self, *args, **more):
        from late_package import helper
        return super().step(*args, **more)
"""


def test_what_is_imported_late_counts_before_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "late_method.py").write_text(LATE)
    (tmp_path / "late_package").mkdir()
    for name in ("__init__", "helper", "further"):
        (tmp_path / "late_package" / f"{name}.py").write_text("")
    (tmp_path / "late_package" / "helper.py").write_text("from . import further\n")
    import late_method

    before = code_of(late_method.Late)
    assert "late_package" not in sys.modules
    from late_package import helper  # noqa: F401

    assert code_of(late_method.Late) == before
    for name in ("__init__", "helper", "further"):
        (tmp_path / "late_package" / f"{name}.py").write_text("from . import further\n# changed\n")
        assert code_of(late_method.Late) != before, name
        before = code_of(late_method.Late)


def test_a_method_of_a_notebook_can_be_run():
    namespace = {"__name__": "typed_in", "Source": type(tribe.methods.create("source"))}
    exec("class Typed(Source):\n    name = 'typed'", namespace)
    data = tribe.datasets.create("live-mnist-c", corruptions=("stripe",))
    net = tribe.Backbone(tribe.models.load("compact", tribe.models.find("compact", "mnist", "nowhere")))
    stream = tribe.Stream(data, tribe.scenarios.create("gli-f", imbalance=1e6), batch=500)
    (record,) = tribe.run(net, namespace["Typed"](), stream)
    assert record.spec["method"]["name"] == "typed"
    assert "code" not in record.spec["method"]


def test_code_in_no_file_is_refused():
    namespace = {"__name__": "typed_in"}
    exec("class Typed: pass", namespace)
    with pytest.raises(ValueError, match="Typed is in no file"):
        code_of(namespace["Typed"])


def test_a_corruption_does_not_take_the_name_of_another():
    with pytest.raises(ValueError, match="mnist/fog"):
        tribe.corruptions.corruption("fog", family="mnist")(lambda x, params, draw: x)
