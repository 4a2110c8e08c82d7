"""`tribe reproduce`: its options, its output, and what happens when something fails."""

import csv
import io
import json
from pathlib import Path

import pytest

from commands import assert_refused, message, succeeded, write_method
from places import ROOT
from processes import Touches, ended, interrupted
from reproduce_helpers import EMBEDDED, SMALL, call
from reproduction import tables
from reproduction.compare import Comparison, Entry
from reproduction.document import fill
from tribe.experiments.store import finished

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]


def cells_of(parsed):
    return {(cell["row"], cell["column"]): cell for cell in parsed["cells"]}


def test_ours_is_the_result_in_runs_next_to_the_papers_number(played):
    _, runs, parsed = played
    by_method = {result.experiment.method.name: result for result in finished(runs)}
    assert by_method.keys() == {"source", "bn", "pl"}
    cells = cells_of(parsed)
    for row, method, says in (("TEST", "source", 41.71), ("BN", "bn", 70.0), ("pl", "pl", None)):
        cell, values = cells[row, "error"], by_method[method].values("instance_error")
        assert cell["ours"] == pytest.approx(100 * sum(values) / 2)
        assert cell["deviation"] == pytest.approx(100 * abs(values[0] - values[1]) / 2**0.5)
        assert cell["paper"] == says
        assert cell["difference"] == (None if says is None else pytest.approx(cell["ours"] - says))
        assert cells[row, "seconds"]["ours"] > 0
    best, second, _ = sorted(("TEST", "BN", "pl"), key=lambda row: cells[row, "error"]["ours"])
    assert any(f"{best} against {second}" in note for note in parsed["notes"]), parsed["notes"]
    assert any("the paper uses cifar10-c, wrn28_10" in note for note in parsed["notes"])
    assert any("dataset.corruptions=" in note for note in parsed["notes"])
    verdicts = {claim["name"]: claim for claim in parsed["claims"]}
    assert verdicts["wall-clock-best-error"]["stand_in"] == "live-mnist-c, compact"
    assert verdicts["wall-clock-best-error"]["paper"]["verdict"] == "holds"
    assert verdicts["wall-clock-best-error"]["ours"]["verdict"] == "incomplete", "TRIBE was not run"


def test_a_second_call_runs_nothing_and_writes_nothing(played):
    options, runs, parsed = played
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    assert json.loads(call(*options, "--format", "json").stdout) == parsed
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_formats_hold_the_same_numbers(played):
    options, _, parsed = played
    cell = cells_of(parsed)["BN", "error"]
    beside = f"{cell['ours']:.2f} ± {cell['deviation']:.2f} (70.00, {cell['ours'] - 70:+.2f})"
    assert beside in call(*options, "--format", "markdown").stdout.replace("*", "")
    latex = call(*options, "--format", "latex").stdout
    assert beside.replace("±", r"$\pm$") in latex.replace(r"\textbf{", "").replace("}", "")
    rows = list(csv.DictReader(io.StringIO(call(*options, "--format", "csv").stdout)))
    assert [(row["row"], row["column"]) for row in rows] == list(cells_of(parsed))
    assert float(rows[2]["ours"]) == pytest.approx(cell["ours"], abs=1e-6)
    table = call(*options).stdout
    for word in ("TEST", f"{cell['ours']:.2f}", "70.00", "threshold", "tab:wall_clock"):
        assert word in table
    assert call(*options, "--out", "out.md").stdout == ""
    assert beside in Path("out.md").read_text().replace("*", "")


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_out_writes_a_chart(played, ending):
    pytest.importorskip("matplotlib")
    options, _, _ = played
    succeeded(call(*options, "--out", f"chart{ending}"))
    content = Path(f"chart{ending}").read_bytes()
    assert content.startswith(b"\x89PNG") if ending == ".png" else b"pl</text>" in content


def test_the_best_method_is_the_best_of_its_stream():
    """Of the methods at one imbalance, not of all rows; and rows that are not methods do not compete."""
    for name, winners in (("cifar10-fixed", ["10 TRIBE", "100 TRIBE", "200 TRIBE"]), ("gamma", [])):
        table = tables.get(name)
        entries = {place: Entry(table.value(*place), None, "%") for place in table.cells}
        groups = {row["key"]: str(row.get("group")) for row in table.rows if row.get("method")}
        comparison = Comparison(name, "", "", table.row_keys, table.column_keys, entries, groups=groups)
        assert [row for row in table.row_keys if comparison.is_best(row, table.column_keys[-2])] == winners


def test_rows_beyond_the_paper_are_marked_and_chosen():
    words = ("cifar10", "--no-run", "--runs", ROOT / "results", "--columns", "F 100 inst", "--seeds", "425,1")
    for beyond, there, absent in (
        ("none", [], "TRIBE + time"),
        ("time", ["TRIBE + time"], "SAR"),
        ("all", ["SAR"], "x"),
    ):
        cells = cells_of(json.loads(call(*words, "--beyond", beyond, "--format", "json").stdout))
        for row in there:
            assert cells[row, "F 100 inst"]["beyond_paper"]
            assert cells[row, "F 100 inst"]["paper"] is None
        assert (absent, "F 100 inst") not in cells
    assert "TRIBE + time †" in call(*words).stdout


def test_protocols_are_as_the_paper_says():
    for cell in json.loads(call("protocols", "--format", "json").stdout)["cells"]:
        assert cell["ours"] == cell["paper"]


def test_class_distributions_need_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path / "nothing"))  # all digits that the package brings
    parsed = json.loads(call("classes-cifar10", *EMBEDDED, "--format", "json").stdout)
    counts = [cell["ours"] for cell in parsed["cells"] if cell["column"] == "100"]
    assert counts == [980.0, 599.0, 359.0, 215.0, 129.0, 77.0, 46.0, 27.0, 16.0, 10.0]


def test_a_custom_method_becomes_a_row_and_a_failing_one_leaves_the_others(played, mine):
    _, runs, _ = played
    options = ("wall-clock", *SMALL, "--seeds", 2, "--runs", runs, "--format", "json", "--rows", f"BN,{mine}")
    result = succeeded(call(*options))
    cells = cells_of(json.loads(result.stdout))
    assert cells["mine", "error"]["ours"] == cells["BN", "error"]["ours"]
    failed = call(*options, "--set", "mine.broken=True")
    assert failed.exit_code == 1
    assert "mine is broken" in message(failed)
    assert cells_of(json.loads(failed.stdout))["BN", "error"]["ours"] > 0


def test_dry_run_lists_runs_with_their_state(played):
    options, runs, _ = played
    before = sorted(runs.rglob("*"))
    extended = [word if word != "source,BN,+pl" else "source,BN,TENT,+CoTTA" for word in options]
    rows = {row["method"]: row for row in json.loads(call(*extended, "--dry-run", "--format", "json").stdout)["runs"]}
    assert [name for name, row in rows.items() if row["done"]] == ["source", "bn"]
    assert rows.keys() == {"source", "bn", "tent", "cotta"}
    assert rows["bn"]["minutes"] > 0
    assert rows["tent"]["minutes"] is None
    assert sorted(runs.rglob("*")) == before, "nothing was run"
    assert "done" in call(*extended, "--dry-run").stdout


def test_missing_data_are_named_with_their_cells():
    result = call("norms")
    assert result.exit_code == 1
    assert "CIFAR-10-C not found" in message(result)
    assert "43.51" in result.stdout, "the paper's numbers are shown all the same"
    assert len(json.loads(call("norms", "--format", "json").stdout)["missing"][0]["cells"]) == 20


def test_without_a_table_all_are_listed():
    parsed = json.loads(call("--format", "json").stdout)
    assert sorted(table["name"] for table in parsed) == tables.names()
    assert "tab:component_ablation" in call().stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cifar11"], ["cifar10"]),
        (["norms", "--rows", "tribe"], ["no row 'tribe'", "+tribe"]),
        (["norms", "--rows", "+trbe"], ["tribe"]),
        (["norms", "--rows", "+absent.py:Mine"], ["absent.py"]),
        (["gamma", "--rows", "+tent"], ["not methods"]),
        (["learning-rate", "--rows", "+sar"], ["set lr"]),
        (["norms", "--columns", "300"], ["'300'", "100"]),
        (["gamma", "--rows", "CIFAR11*"], ["CIFAR10-C inst"]),
        (["norms", "--format", "html"], ["markdown"]),
        (["norms", "--beyond", "much"], ["time"]),
        (["norms", "--out", "absent/table.md"], ["absent"]),
        (["norms", "--out", "absent/chart.svg"], ["absent"]),
        (["norms", "--seeds", "0"], ["at least 1"]),
        (["norms", "--set", "precision=half"], ["bf16"]),
        (["norms", "--set", "batch=many"], ["whole"]),
        (["norms", "--set", "weights=a.pt"], ["model="]),
        (["norms", "--device", "cuda:x"], ["cuda"]),
        (["norms", "--set", "tent.lr=1"], ["takes no part"]),
        (["norms", *EMBEDDED, "--runs", "file"], ["file"]),
        (["norms", "--no-run"], ["no folder runs"]),
        (["claims"], ["no folder runs"]),
        (["document", "--runs", "."], ["--out"]),
    ],
)
def test_wrong_options_are_refused(arguments, words):
    Path("file").write_text("in the way")
    assert_refused(call(*arguments), *words)


@pytest.mark.parametrize("setting", ["dataset.corruptionz=fog", "scenario.sigmaa=1", "dataset=cifar10-d"])
def test_a_field_that_does_not_exist_is_named_with_the_cells(setting):
    result = call("norms", *EMBEDDED, "--set", setting, "--dry-run")
    assert setting.partition("=")[0].partition(".")[2] in message(result) or "cifar10-d" in message(result)


def test_ctrl_c_prints_how_to_resume(tmp_path):
    slow = write_method("Slow", "with open('steps', 'a') as file:\n    file.write('a step\\n')")
    words = ("norms", *SMALL, "--columns", "200", "--rows", f"TEST,+{slow}")
    command = ("-m", "tribe", "reproduce", *words)
    stopped = interrupted(*command, when=Touches("open", "steps", 3), cwd=tmp_path)
    assert stopped.code == 130, stopped.err
    assert "resumes" in stopped.err
    steps = tmp_path / "steps"
    steps.unlink()
    again = ended(*command, cwd=tmp_path)
    assert again.code == 0, again.err
    (slow,) = (r for r in finished("runs") if r.experiment.method.name == "slow")
    images = next(iter(slow.metrics.values()))["images"]
    assert len(steps.read_text().splitlines()) <= -(-images // 64) - 2, "it went on from its checkpoint"


def test_keep_copies_results_without_records(played):
    options, runs, _ = played
    succeeded(call("keep", "--runs", runs, "--out", "kept"))
    assert {r.experiment.id for r in finished("kept")} == {r.experiment.id for r in finished(runs)}
    assert not list(Path("kept").rglob("*.npz"))
    again = [Path("kept") if word == runs else word for word in options]
    cells = json.loads(call(*again, "--no-run", "--format", "json").stdout)["cells"]
    assert all(cell["ours"] is not None for cell in cells)


def test_claims_and_document_of_finished_runs(played):
    _, runs, _ = played
    parsed = json.loads(call("claims", "--runs", runs, "--format", "json").stdout)
    assert {claim["ours"]["verdict"] for claim in parsed} == {"incomplete"}, "another data set than the paper's"
    assert "too close" not in call("claims", "--runs", runs, "--format", "markdown").stdout
    Path("page.md").write_text("By hand.\n<!-- begin runs -->\nold\n<!-- end -->\n")
    succeeded(call("document", "--runs", runs, "--out", "page.md"))
    page = Path("page.md").read_text()
    assert page.startswith("By hand.")
    assert "cpu, " in page
    assert Path("page/claims.csv").is_file()


def test_an_unknown_block_of_a_page_is_an_error():
    with pytest.raises(KeyError, match="sum"):
        fill("<!-- begin sum -->\n<!-- end -->", {})
