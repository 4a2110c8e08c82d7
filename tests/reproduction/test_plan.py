"""Every cell of a table has its experiment, or a reason why it has none."""

import dataclasses
import json

import pytest

from commands import message
from reproduce_helpers import EMBEDDED, SMALL, call, compared
from reproduction import gather, tables
from reproduction.plan import Choices, make_plan
from tribe.experiments.store import finished
from tribe.experiments.workbench import Workbench

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]


def test_columns_of_domains_are_those_of_the_replaced_data_set(played):
    _, runs, _ = played
    options = ("domains", *SMALL, "--seeds", 2, "--runs", runs, "--methods", "TEST,bn", "--format", "json")
    parsed = json.loads(call(*options).stdout)
    assert {cell["column"] for cell in parsed["cells"]} == {"impulse_noise"}
    errors = {r.experiment.method.name: r.values("domain_error", "impulse_noise") for r in finished(runs)}
    assert parsed["cells"][1]["ours"] == pytest.approx(100 * sum(errors["bn"]) / 2)
    assert parsed["cells"][1]["paper"] is None
    assert len(list(finished(runs))) == 3, "all of it was there"


def test_swept_fields_and_means_over_data_sets():
    workbench = Workbench(device="cpu")
    corruption = {"dataset": {"corruptions": ["impulse_noise"]}}
    choices = Choices("live-mnist-c", "compact", overrides=corruption)
    plan = make_plan(tables.get("eta"), choices, workbench)
    fields = [plan.cells["CIFAR10-C", column].experiment.method.fields["eta"] for column in plan.table.column_keys]
    assert fields == pytest.approx([5e-4, 0.01, 5e-2, 0.1]), "times 10 classes; the second is the release's"
    plan = make_plan(tables.get("learning-rate"), choices, workbench)
    rates = [plan.cells["NOTE x 0.1", column].experiment.method.fields["lr"] for column in plan.table.column_keys]
    assert rates == pytest.approx([5e-4, 1e-4, 5e-5, 1e-5, 1e-6])
    ablation = dataclasses.replace(choices, only=("TEST",))
    plan = gather.run(make_plan(tables.get("ablation"), ablation, workbench), "runs")
    entries = compared(plan).entries
    mean = (entries["TEST", "CIFAR10-C cat"].ours + entries["TEST", "CIFAR100-C cat"].ours) / 2
    assert entries["TEST", "Avg. cat"].ours == pytest.approx(mean)
    assert entries["TEST", "Avg. cat"].paper == 44.77


def test_an_added_method_is_a_row_of_every_group():
    plan = make_plan(tables.get("cifar10-fixed"), Choices("live-mnist-c", "compact", ("TENT",), ("sar",)), Workbench())
    assert plan.table.row_keys == ["10 TENT", "100 TENT", "200 TENT", "10 sar", "100 sar", "200 sar"]
    cell = plan.cells["200 sar", "Inst.Avg."]
    assert cell.experiment.method.name == "sar"
    assert cell.experiment.scenario.fields["imbalance"] == 200


def test_patterns_choose_rows_and_columns():
    def keys(name, **choices):
        table = make_plan(tables.get(name), Choices("live-mnist-c", "compact", **choices), workbench).table
        return table.row_keys, table.column_keys, table

    workbench = Workbench(device="cpu")
    rows, columns, table = keys("cifar10", only=("cotta", "PETAL"), columns=("F 100 *", "V 100 inst"))
    assert rows == ["CoTTA", "PETAL"]
    assert columns == ["F 100 inst", "F 100 cat", "V 100 inst"]
    assert table.values == [[71.32, 56.44, 73.83], [71.14, 56.11, 72.71]]
    assert keys("gamma", rows=("CIFAR10-C *",))[0] == ["CIFAR10-C inst", "CIFAR10-C cat"]
    assert keys("ablation", columns=("CIFAR10-C *", "Avg.*"))[1] == ["CIFAR10-C inst", "CIFAR10-C cat"], "a mean of two"
    assert keys("cifar10-fixed", rows=("100 *",), added=("sar",))[0][-1] == "100 sar"


def test_dry_run_lists_runs_with_their_state_and_time(played):
    options, runs, _ = played
    before = sorted(runs.rglob("*"))
    extended = [word if word != "source,BN,+pl" else "source,BN,TENT,+pl" for word in options]
    result = call(*extended, "--dry-run", "--format", "json")
    parsed = json.loads(result.stdout)
    rows = {row["method"]: row for row in parsed["runs"]}
    assert {name: row["done"] for name, row in rows.items()} == {"source": True, "bn": True, "tent": False, "pl": True}
    assert {name for name, row in rows.items() if row["measured"]} == {"source", "bn", "pl"}
    images, seconds = rows["bn"]["images"], [r for r in finished(runs) if r.experiment.method.name == "bn"]
    assert rows["bn"]["minutes"] == pytest.approx(images * sum(seconds[0].values("seconds_per_image")) / 2 / 60)
    assert parsed["minutes_left"] == rows["tent"]["minutes"] > 0
    assert sorted(runs.rglob("*")) == before, "nothing was run"
    text = call(*extended, "--dry-run").stdout
    assert "4 runs, 3 done" in text
    assert "done" in text


@pytest.mark.parametrize("name", tables.names())
def test_every_table_can_be_planned_offline(name):
    result = call(name, *EMBEDDED, "--dry-run", "--format", "json")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)
    assert parsed["missing"] == []
    assert bool(parsed["runs"]) == (name not in ("protocols", "classes-cifar10", "classes-cifar100"))


def test_missing_weights_and_data_are_named_with_their_cells():
    result = call("norms")
    assert result.exit_code == 1
    assert "missing: TEST, 1; TEST, 10; TEST, 100 and 17 more: no weights of wrn28_10 for cifar10" in message(result)
    assert "43.51" in result.stdout, "the paper's numbers are shown all the same"
    parsed = json.loads(call("norms", "--format", "json").stdout)
    assert len(parsed["missing"][0]["cells"]) == 20
    assert "- Missing: 20 cells, the first is TEST, 1: no weights" in call("norms", "--format", "markdown").stdout
    dry = json.loads(call("norms", "--model", "compact", "--dry-run", "--format", "json").stdout)
    assert dry["runs"] == []
    assert len(dry["missing"][0]["cells"]) == 20
