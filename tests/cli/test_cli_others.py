"""A way in for researchers: the classes, checkpoints and arrays of other code bases, each with one command."""

import hashlib
import inspect
import json
from pathlib import Path

import pytest
import torch

import layouts
from commands import assert_refused, message, succeeded, tribe_command
from others import OthersTent
from tribe import models
from tribe.experiments.store import finished

pytestmark = pytest.mark.usefixtures("few")
TINY = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=1000000")
OTHERS = f"import torch\nfrom torch import nn\n\n{inspect.getsource(OthersTent)}"
FACTORY = "\ndef tent(net, lr=1e-3):\n    return OthersTent(net, lr)\n"
BAD = "\ndef bad(net):\n    return nn.Sequential(nn.Threshold(0.5, 0, inplace=True), net)\n"


@pytest.fixture
def mine():
    Path("mine.py").write_text(OTHERS + FACTORY + BAD)
    return "mine.py"


def rows(result):
    return {row["method"]: row for row in json.loads(succeeded(result).stdout)["results"]}


def test_a_class_of_others_has_results_ids_and_rows_that_say_so(mine):
    options = ("--methods", f"tent,{mine}:tent,{mine}:OthersTent+time", "--out", "out")
    played = rows(tribe_command("run", *TINY, *options, "--json", "-"))
    assert played.keys() == {"tent", "bridged-tent", "bridged-OthersTent+time"}
    assert played["bridged-tent"]["instance_error"] == pytest.approx(played["tent"]["instance_error"], abs=0.01)
    spec = {result.experiment.method.name: result.experiment.method for result in finished("out")}["bridged-tent"]
    assert spec.code == hashlib.sha256(Path(mine).read_bytes()).hexdigest()
    assert spec.fields["lr"] == 1e-3
    again = succeeded(tribe_command("run", *TINY, *options))
    assert "not computed again" in message(again)
    assert "not checked by the contract" in " ".join(again.stdout.split())
    other = rows(
        tribe_command(
            "run", *TINY, *options[2:], "--methods", f"{mine}:tent", "--set", "bridged-tent.lr=0.1", "--json", "-"
        )
    )
    assert other["bridged-tent"]["id"] != played["bridged-tent"]["id"]
    pytest.importorskip("jinja2")
    succeeded(tribe_command("report", "out", "--out", "report.html"))
    page = Path("report.html").read_text()
    assert "bridged-OthersTent+time, bridged-tent: played through the bridge" in page


def test_a_bad_class_is_named_and_the_others_are_played(mine):
    result = tribe_command("run", *TINY, "--methods", f"source,{mine}:bad", "--out", "out", "--json", "-")
    assert_refused(result, "bridged-bad", "changes its input")
    assert [row["method"] for row in json.loads(result.stdout)["results"]] == ["source"]


def test_what_is_no_factory_is_refused(mine):
    Path("mine.py").write_text("class Other:\n    pass\n\ndef needs(net, cfg):\n    return net\n")
    assert_refused(tribe_command("run", "--methods", f"{mine}:Other"), "not a method", "nn.Module")


@pytest.mark.slow
def test_workers_get_the_code_of_a_factory(mine):
    grid = ("--method", f"{mine}:tent", "--grid", "bridged-tent.lr=1e-3,1e-2", "--workers", "2", "--out", "out")
    succeeded(tribe_command("sweep", *TINY, *grid))
    assert len(list(finished("out"))) == 2


@pytest.mark.parametrize("folder", ["models", "ckpt"])
def test_published_checkpoints_and_arrays_are_found_by_name(folder, tmp_path):
    root = layouts.write(tmp_path)
    place = root / folder / "cifar10/corruptions/Hendrycks2020AugMix_WRN.pt"
    place.parent.mkdir(parents=True)
    names = models.create("wrn40_2_augmix").state_dict()
    torch.save({"state_dict": {f"module.{name}": t for name, t in names.items()}}, place)
    assert models.find("wrn40_2_augmix", "cifar10", root) == place
    given = ("--dataset", "cifar10-c", "--model", "wrn40_2_augmix", "--data", root, "--out", "out")
    options = (*given, "--scenario", "fully", "--methods", "source,bn", "--set", "dataset.corruptions=('fog',)")
    assert rows(tribe_command("run", *options, "--json", "-")).keys() == {"source", "bn"}
    torch.save(models.create("resnet20").state_dict(), place)
    assert_refused(tribe_command("run", *options), place.name, "do not fit")
    place.unlink()
    assert_refused(tribe_command("run", *options), f"{folder}/cifar10/corruptions", "Place them there")
