"""Every cell has its experiment or its result, or a reason why it has none."""

import dataclasses
import json
import shutil

import pytest

from commands import succeeded
from places import ROOT
from reproduce_helpers import EMBEDDED, SMALL, call
from reproduction import plan as planning
from reproduction import tables
from reproduction.compare import compare
from reproduction.plan import Choices, MixedResults
from tribe.experiments.store import finished
from tribe.experiments.workbench import Workbench

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]
IMPULSE = {"dataset": {"corruptions": ["impulse_noise"]}}


def keys(name, **choices):
    plan = planning.build(tables.get(name), Choices("live-mnist-c", "compact", **choices), Workbench(device="cpu"))
    return plan.table.row_keys, plan.table.column_keys


@pytest.fixture(scope="module")
def committed():
    return finished(ROOT / "results")


def searched(name, committed, **choices):
    return compare(planning.search(tables.get(name), Choices(**choices), committed, Workbench(device="cpu")))


@pytest.mark.parametrize(
    ("name", "row", "column", "ours"),
    [
        ("cifar10", "TRIBE", "F 100 inst", 17.33),
        ("cifar10", "TRIBE", "V 200 inst", 24.20),
        ("norms", "Balanced BN", "200", 30.98),
        ("cifar100", "RoTTA", "F 100 cat", 37.91),
    ],
)
def test_committed_results_are_in_the_table(name, row, column, ours, committed):
    entry = searched(name, committed, seeds=(425,)).entries[row, column]
    assert round(entry.ours, 2) == ours
    assert list(entry.by_seed) == [425]


def test_results_of_different_settings_do_not_share_a_table(committed):
    choices = {"model": "resnet50.py:ResNet50", "columns": ("Avg.", "motion")}
    with pytest.raises(MixedResults, match="batch"):
        searched("imagenet", committed, **choices)
    for batch, error in ((48, 64.86), (64, 66.56)):
        entries = searched("imagenet", committed, device="cuda", batch=batch, **choices).entries
        assert round(entries["TRIBE", "motion"].ours, 2) != entries["TRIBE", "motion"].paper
        assert isinstance(error, float)


def test_results_need_no_weights_and_no_data(committed, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path / "nothing"))
    comparison = searched("gamma", committed)
    assert isinstance(comparison.entries["CIFAR10-C inst", "1.0"].ours, float)
    assert any("no result fits" in reason for reason in comparison.missing)
    nothing = searched("gamma", committed, seeds=(7,))
    assert nothing.without_empty() is None


def test_seeds_in_several_results_add_up(finished_runs, tmp_path):
    options, runs, table = finished_runs
    copy = shutil.copytree(runs, tmp_path / "copy")
    words = [copy if word == runs else word for word in options]
    words[words.index("--seeds") + 1] = "0,1,2"
    done = succeeded(call(*words, "--format", "json"))
    three = {(c["row"], c["column"]): c for c in json.loads(done.stdout)["cells"]}
    for cell in table["cells"]:
        if cell["column"] == "error":
            found = three[cell["row"], "error"]["by_seed"]
            assert len(found) == 3
            assert {seed: found[seed] for seed in cell["by_seed"]} == pytest.approx(cell["by_seed"])


def test_swept_fields_and_means_over_data_sets():
    workbench = Workbench(device="cpu")
    choices = Choices("live-mnist-c", "compact", overrides=IMPULSE)
    plan = planning.build(tables.get("eta"), choices, workbench)
    fields = [plan.cells["CIFAR10-C", column].experiment.method.fields["eta"] for column in plan.table.column_keys]
    assert fields == pytest.approx([5e-4, 0.01, 5e-2, 0.1]), "times 10 classes; the second is the release's"
    plan = planning.build(tables.get("learning-rate"), choices, workbench)
    rates = [plan.cells["NOTE x 0.1", column].experiment.method.fields["lr"] for column in plan.table.column_keys]
    assert rates == pytest.approx([5e-4, 1e-4, 5e-5, 1e-5, 1e-6])
    cells = json.loads(call("ablation", *SMALL, "--rows", "TEST", "--format", "json").stdout)["cells"]
    ours = {cell["column"]: cell["ours"] for cell in cells}
    assert ours["Avg. cat"] == pytest.approx((ours["CIFAR10-C cat"] + ours["CIFAR100-C cat"]) / 2)


def test_overrides_of_a_method_hold_for_it_with_a_filter():
    cell = dataclasses.replace(tables.get("cifar10").cell("TRIBE", "F 1 inst"), method="tribe+time")
    choices = Choices(overrides={"tribe": {"h0": 0.1}, "tribe+time": {"within": "batch"}})
    assert choices.specs(cell, lambda: 10)[3].fields == {"h0": 0.1, "within": "batch"}


@pytest.mark.parametrize(
    ("name", "choices", "rows", "columns"),
    [
        (
            "cifar10",
            {"rows": ("cotta", "PETAL"), "columns": ("F 100 *",)},
            ["CoTTA", "PETAL"],
            ["F 100 inst", "F 100 cat"],
        ),
        ("gamma", {"rows": ("CIFAR10-C *",), "columns": ("1.0",)}, ["CIFAR10-C inst", "CIFAR10-C cat"], ["1.0"]),
        (
            "ablation",
            {"rows": ("TEST",), "columns": ("CIFAR10-C *", "Avg.*")},
            ["TEST"],
            ["CIFAR10-C inst", "CIFAR10-C cat"],
        ),
        ("gradual", {"rows": ("TENT", "+sar")}, ["TENT", "sar"], ["Avg."]),
    ],
)
def test_patterns_choose_rows_and_columns(name, choices, rows, columns):
    assert keys(name, **choices) == (rows, columns)


def test_an_added_method_is_a_row_of_every_group():
    rows, _ = keys("cifar10-fixed", rows=("TENT", "+sar"), columns=("Inst.Avg.", "*"))
    assert rows == ["10 TENT", "100 TENT", "200 TENT", "10 sar", "100 sar", "200 sar"]


def test_columns_of_domains_are_those_of_the_replaced_data_set(played):
    _, runs, _ = played
    options = ("domains", *SMALL, "--seeds", 2, "--runs", runs, "--rows", "TEST,bn", "--format", "json")
    parsed = json.loads(call(*options).stdout)
    assert {cell["column"] for cell in parsed["cells"]} == {"impulse_noise"}
    assert len(list(finished(runs))) == 3, "all of it was there"


@pytest.mark.parametrize("name", tables.names())
def test_every_table_can_be_planned_offline(name):
    result = succeeded(call(name, *EMBEDDED, "--dry-run", "--format", "json"))
    parsed = json.loads(result.stdout)
    assert parsed["missing"] == []
    assert bool(parsed["runs"]) == (name not in ("protocols", "classes-cifar10", "classes-cifar100"))
