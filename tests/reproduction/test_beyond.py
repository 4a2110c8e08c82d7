"""Rows beyond the paper: they are marked, run like the others, and change nothing that is said about the paper."""

import csv
import dataclasses
import io
import json
import re

import pytest

from commands import message
from reproduce_helpers import EMBEDDED, SMALL, call, fabricate, lines_of, page_of
from reproduction import gather, tables
from reproduction.beyond import LATER, MARK, OF_ALL_METHODS, ROWS, TABLES, extend
from reproduction.chart import draw_chart
from reproduction.compare import compare_plan
from reproduction.document import make_document
from reproduction.plan import Choices, Costs, make_plan
from tribe import methods
from tribe.experiments.store import finished
from tribe.experiments.workbench import Workbench

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]

KEYS = ["TRIBE + time", "TRIBE + time within the batch", "RoTTA + time", "TEST + time", "COFA"]
PAPERS = {
    "source": 42.0,
    "bn": 70.0,
    "tent": 77.0,
    "cotta": 76.0,
    "rotta": 30.0,
    "tribe": 17.0,
}  # errors of the paper's methods
BEYOND = {"tribe+time": 5.5, "rotta+time": 11.0, "source+time": 20.0, "tribe+cofa": 12.0}


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tables.names())
def test_the_papers_rows_come_first_and_stay_as_they_are(name):
    table, extended = tables.get(name), extend(tables.get(name))
    count = len(table.rows)
    assert [*extended.rows[:count]] == [*table.rows]
    assert [*extended.values[:count]] == [*table.values]
    assert table.beyond == {}
    assert extended.row_keys[count:] == [*extended.beyond]
    assert all(value is None for row in extended.values[count:] for value in row)
    assert bool(extended.beyond) == (name in TABLES)


def test_tables_that_sweep_or_ablate_and_tables_of_words_have_none():
    swept = {"eta", "gamma", "h0", "lambda", "learning-rate"}
    others = {"ablation", "components", "norms", "wall-clock", "protocols", "classes-cifar10", "classes-cifar100"}
    assert {*tables.names()} - {*TABLES} == swept | others
    assert {*TABLES} <= {*tables.names()}
    assert extend(tables.released().table) is tables.released().table


@pytest.mark.parametrize("name", TABLES)
def test_a_cell_is_that_of_the_method_alone_with_another_method(name):
    table, rows = extend(tables.get(name)), {row.key: row for row in ROWS}
    alone_of = {"tribe": "TRIBE", "rotta": "RoTTA", "source": "TEST"}
    for key in table.beyond:
        group = next((f"{g} " for row in table.rows if (g := row.get("group")) and key.startswith(f"{g} ")), "")
        row = rows[key.removeprefix(group)]
        for column in table.column_keys:
            alone = table.cell(group + alone_of[methods.parse(row.method).unfiltered], column)
            cell = table.cell(key, column)
            assert cell == dataclasses.replace(alone, method=row.method, fields={**alone.fields, **row.fields})


def test_rows_by_hand():
    assert list(extend(tables.get("cifar10")).beyond) == KEYS
    fixed = extend(tables.get("cifar10-fixed"))
    assert list(fixed.beyond) == [f"{n} {key}" for n in (10, 100, 200) for key in KEYS]
    cell = fixed.cell("100 TRIBE + time within the batch", "fog")
    assert (cell.method, cell.fields, cell.scenario) == ("tribe+time", {"within": "batch"}, "gli-f")
    assert (cell.scenario_fields, cell.metric, cell.domain) == ({"imbalance": 100}, "domain_error", "fog")
    assert list(extend(tables.get("imbalance")).beyond) == [KEYS[0], KEYS[1], KEYS[4]], "it has TRIBE alone"
    assert "ImageNet-C RoTTA + time" in extend(tables.get("local-imbalance")).beyond


@pytest.mark.parametrize("name", tables.names())
def test_methods_later_than_the_paper_have_rows_beside_the_source_model(name):
    plain, table = extend(tables.get(name)), extend(tables.get(name), later=True)
    added = {key: note for key, note in table.beyond.items() if key not in plain.beyond}
    groups = [f"{row['group']} " if row.get("group") else "" for row in plain.rows if row.get("method") == "source"]
    wanted = [f"{group}{row.key}" for group in groups for row in LATER] if name in OF_ALL_METHODS else []
    assert list(added) == wanted
    assert {*OF_ALL_METHODS} < {*TABLES}
    for key in added:
        row = next(row for row in LATER if key.endswith(row.key))
        alone = table.cell(key.replace(row.key, "TEST"), table.column_keys[0])
        assert table.cell(key, table.column_keys[0]) == dataclasses.replace(alone, method=row.method)
        assert "later than the paper" in added[key]
    assert {row.method for row in LATER} <= {*methods.names()}


def test_later_rows_are_planned_if_they_are_wanted_or_named():
    later = {row.method for row in LATER}
    table = call("mnist", *EMBEDDED, "--columns", "F 100 *", "--dry-run", "--format", "json")
    assert table.exit_code == 0, table.output
    assert later.isdisjoint({row["method"] for row in json.loads(table.stdout)["runs"]})
    for options, wanted in (("--later",), later), (("--methods", "DeYO,bdn"), {"deyo", "bdn"}):
        result = call("mnist", *EMBEDDED, "--columns", "F 100 *", *options, "--dry-run", "--format", "json")
        assert result.exit_code == 0, result.output
        runs = {row["method"]: row["beyond_paper"] for row in json.loads(result.stdout)["runs"]}
        assert {method for method, beyond in runs.items() if beyond and method in later} == wanted
    assert "--later is for one table" in message(call("claims", "--runs", ".", "--later"))


def test_the_document_marks_later_methods_and_says_where_to_read_of_them():
    results({"source": 42.0, "tribe": 17.0, "deyo": 33.0})
    page = "\n".join(lines_of(page_of("results"), "CIFAR10-C: fixed (F) and varying (V)"))
    assert f"| DeYO {MARK} | 33.00 | 33.00 |" in page
    assert "PeTTA" not in page
    assert "“DeYO” (ICLR 2024) is later than the paper: docs/methods.md." in page
    assert "See docs/time.md." not in page


# -- plans ------------------------------------------------------------------------------------------------------------


def planned(*options):
    result = call("gradual", *EMBEDDED, "--dry-run", "--format", "json", *options)
    assert result.exit_code == 0, result.output
    return {row["method"]: row for row in json.loads(result.stdout)["runs"]}


def test_they_are_planned_unless_only_the_paper_is_wanted():
    papers = {"source", "bn", "tent", "cotta", "rotta", "tribe"}
    runs = planned()
    assert runs.keys() == papers | BEYOND.keys()
    assert {name for name, row in runs.items() if row["beyond_paper"]} == BEYOND.keys()
    assert planned("--paper-only").keys() == papers
    assert planned("--methods", "TRIBE").keys() == {"tribe"}
    assert planned("--methods", "TRIBE + time,tribe+cofa").keys() == {"tribe+time", "tribe+cofa"}
    assert planned("--rows", "* + time*").keys() == {"tribe+time", "rotta+time", "source+time"}
    assert f"tribe+cofa {MARK}" in call("gradual", *EMBEDDED, "--dry-run").stdout
    assert "no row 'COFA'" in message(call("gradual", "--paper-only", "--methods", "COFA"))
    assert "--paper-only is for one table" in message(call("claims", "--runs", ".", "--paper-only"))


def test_added_methods_stand_above_them_one_in_each_group():
    choices = Choices("live-mnist-c", "compact", added=("sar",), rows=("10 TRIBE*", "100 COFA"))
    table = make_plan(extend(tables.get("cifar10-fixed")), choices, Workbench(device="cpu")).table
    assert table.row_keys[:3] == ["10 TRIBE", "10 sar", "100 sar"]
    assert table.row_keys[3:] == ["10 TRIBE + time", "10 TRIBE + time within the batch", "100 COFA"]


def test_fields_of_a_method_hold_with_a_filter_too():
    overrides = {"tribe": {"h0": 0.1}, "tribe+time": {"rate_step": 0.01, "within": "past"}}
    choices = Choices("live-mnist-c", "compact", only=("tribe+time", "COFA"), overrides=overrides)
    plan = make_plan(extend(tables.get("gradual")), choices, Workbench(device="cpu"))
    fields = {row: planned.experiment.method.fields for (row, _), planned in plan.cells.items()}
    assert [f["h0"] for f in fields.values()] == [0.1, 0.1, 0.1]
    assert [f.get("rate_step") for f in fields.values()] == [0.01, 0.01, None]
    assert [f.get("within") for f in fields.values()] == ["past", "batch", None], "the row's own field wins"


def test_a_filter_costs_as_much_as_the_method_alone_until_it_is_measured():
    choices = Choices("live-mnist-c", "compact", only=("TEST", "source+time", "TRIBE", "tribe+time", "rotta+time"))
    plan = make_plan(extend(tables.get("gradual")), choices, Workbench(device="cpu"))
    experiments = {row: planned.experiment for (row, _), planned in plan.cells.items()}
    guess = {row: Costs({}).estimate(e, 1000) for row, e in experiments.items()}
    assert guess["TRIBE + time"] == guess["TRIBE"] == (pytest.approx(1.5 * guess["RoTTA + time"][0]), False)
    assert guess["TEST + time"] == guess["TEST"]
    costs = Costs({("tribe", "compact", "cpu", "float32"): 0.5, ("source+time", "compact", "cpu", "float32"): 0.25})
    assert costs.estimate(experiments["TRIBE + time"], 10) == (5.0, False)
    assert costs.estimate(experiments["TEST + time"], 10) == (2.5, True)


def test_they_are_run_and_compared_with_the_method_alone():
    options = (*SMALL, "--set", "scenario.imbalance=1000000", "--methods", "TEST,BN,TEST + time", "--format", "json")
    result = call("domains", *options)
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)
    (cell,) = (c for c in parsed["cells"] if c["row"] == "TEST + time")
    errors = {r.experiment.method.name: r.values("domain_error", "impulse_noise") for r in finished("runs")}
    assert (cell["ours"], cell["paper"]) == (pytest.approx(100 * errors["source+time"][0]), None)
    assert cell["beyond_paper"] is True
    duels = re.findall(r"sigma 0.1\): (\S+(?: \+ time)? against \S+(?: \+ time)?):", "\n".join(parsed["notes"]))
    assert sorted(duels[0].split(" against ")) == ["BN", "TEST"], "the best two of the paper's"
    assert duels[1:] == ["TEST + time against TEST"]
    alone = json.loads(call("domains", *options, "--methods", "TEST + time").stdout)
    assert [c["row"] for c in alone["cells"]] == ["TEST + time"]


# -- what is said about the paper -------------------------------------------------------------------------------------


def results(errors, root="results"):
    """Results on five streams, with the same error of a method on all of them."""
    streams = [("ptta", None, {}), ("gli-f", 100, {}), ("gli-f", 10, {}), ("gli-v", 100, {})]
    streams.append(("gradual", 100, {"severities": (1, 2, 3, 4, 5)}))
    for method, error in errors.items():
        for fields in ({}, {"within": "batch"}) if method == "tribe+time" else ({},):
            for scenario, imbalance, data in streams:
                stream = {"scenario": scenario, "imbalance": imbalance, **data}
                fabricate((error, error), root, method=method, fields=fields, **stream)


def test_claims_and_findings_do_not_change_when_they_have_results():
    results(PAPERS)
    page = page_of("results")
    judged = lines_of(page, "What the paper claims")
    both = [line for line in judged if line.startswith("- **holds**") and line.endswith("The paper's: holds.")]
    assert both, "TRIBE is the best of the table gradual"
    assert any(line.startswith("- **fails**: ") for line in judged)
    results(BEYOND)
    after = page_of("results")
    for heading in (
        *("In short", "TRIBE's instance error in every cell", "Next to the released code"),
        *("What does not agree", "How sure", "What the paper claims", "Incomplete tables"),
    ):
        assert lines_of(after, heading) == lines_of(page, heading), heading
    assert "lowest of all methods that were run in 4" in "\n".join(lines_of(after, "In short"))
    kept, added = page.splitlines(), after.splitlines()
    new = [line for line in added if line not in kept]
    assert [line for line in kept if line not in added] == [
        line for line in kept if line.startswith("| a GPU, tf32, seed 425, batch 64 |")
    ], "but for the number of experiments"
    assert all(MARK in line or line.startswith("| a GPU, tf32") for line in new)
    papers = ["TEST", "BN", "TENT", "CoTTA", "RoTTA", "TRIBE"]
    table = "\n".join(lines_of(after, "CIFAR10-C: fixed (F) and varying (V)"))
    assert re.findall(r"^\| ([^|]*?) \|", table, re.M)[2:] == [*papers, *(f"{key} †" for key in KEYS)]
    assert f"| TRIBE + time {MARK} | 5.50 | 5.50 |" in table, "neither bold nor next to a number of the paper"
    assert "| TRIBE | **17.00** (16.14, +0.86) |" in table
    assert table.count("- † Beyond the paper") == 1
    assert "none of these tables" not in after


def test_rows_without_results_are_not_in_the_document():
    results(PAPERS)
    fabricate((5.5, 5.5), "results", method="tribe+time", scenario="gli-v")
    files = make_document("results").files
    assert "100 TRIBE + time †,ours,5.50," in files["cifar10-varying.csv"]
    assert files["cifar10-varying.csv"].count(MARK) == 2, "its errors and their seeds; no other row"
    assert MARK not in files["cifar10-fixed.csv"]


# -- renderings -------------------------------------------------------------------------------------------------------


def test_every_format_marks_them():
    results({"tribe": 17.0, "tribe+time": 5.5})
    options = ("imbalance", "--no-run", "--runs", "results", "--columns", "100")
    rows = {row["row"]: row for row in csv.DictReader(io.StringIO(call(*options, "--format", "csv").stdout))}
    assert {row: cells["beyond_paper"] for row, cells in rows.items()} == {
        **{"TRIBE": "no"},
        **dict.fromkeys(("TRIBE + time", "TRIBE + time within the batch", "COFA"), "yes"),
    }
    assert (rows["TRIBE + time"]["ours"], rows["TRIBE + time"]["paper"], rows["COFA"]["ours"]) == ("5.5", "", "")
    parsed = json.loads(call(*options, "--format", "json").stdout)
    assert [cell["beyond_paper"] for cell in parsed["cells"]] == [False, True, True, True]
    footnote = parsed["notes"][-1]
    assert footnote.startswith(f"{MARK} Beyond the paper")
    assert "See docs/time.md." in footnote
    for style in ("markdown", "table", "latex"):
        text = call(*options, "--format", style).stdout
        mark = r"$^\dagger$" if style == "latex" else MARK
        assert f"TRIBE + time {mark}" in text
        assert f"TRIBE {mark}" not in text
        assert footnote in text
    for style in ("markdown", "table", "csv", "json", "latex"):
        text = call(*options, "--format", style, "--paper-only").stdout
        assert not re.search(rf"{MARK}|dagger|time|COFA", text)


@pytest.mark.parametrize("column", ["*", "100"])
def test_a_chart_marks_them_and_leaves_out_those_without_numbers(column):
    pytest.importorskip("matplotlib")
    results({"tribe": 17.0, "tribe+time": 5.5})
    choices = Choices(columns=(column,))
    plan = gather.plan_from_results(extend(tables.get("imbalance")), choices, "results", Workbench(device="cpu"))
    comparison = compare_plan(plan, gather.results_of(plan, "results"))
    figure = draw_chart(comparison)
    (axes,) = figure.axes
    names = ["TRIBE", f"TRIBE + time {MARK}", f"TRIBE + time within the batch {MARK}"]
    if column == "*":
        assert axes.get_legend_handles_labels()[1] == names
        assert [line.get_linestyle() for line in axes.lines[::2]] == ["-", "--", "--"]
    else:
        assert [label.get_text() for label in axes.get_xticklabels()] == names
        assert [bar.get_hatch() or "" for bar in axes.patches] == ["", "//", "//"]
    assert "docs/time.md" in figure.get_supxlabel()
    papers = dataclasses.replace(comparison, rows=["TRIBE"])
    assert not draw_chart(papers).get_supxlabel()
