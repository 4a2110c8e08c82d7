"""Ours next to the paper's: cells, claims, and which methods are compared."""

import dataclasses
import json
from pathlib import Path

import pytest

from commands import message
from reproduce_helpers import EMBEDDED, SMALL, call, compared, elsewhere, fabricate, measure, page_of
from reproduction import gather, tables
from reproduction.claims import claims
from reproduction.compare import Comparison, Entry, judge_claims
from reproduction.plan import Choices, make_plan
from tribe.experiments.experiment import MixedResults
from tribe.experiments.store import finished
from tribe.experiments.workbench import Workbench

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]


def test_the_best_method_is_the_best_of_its_stream():
    """Of the methods at one imbalance, not of all rows; and rows that are not methods do not compete."""
    for name, winners in (("cifar10-fixed", ["10 TRIBE", "100 TRIBE", "200 TRIBE"]), ("gamma", [])):
        table = tables.get(name)
        entries = {
            (row, column): Entry(table.value(row, column), None, None, "%")
            for row in table.row_keys
            for column in table.column_keys
        }
        groups = {row["key"]: str(row.get("group")) for row in table.rows if row.get("method")}
        parsed = Comparison(name, "", "", table.row_keys, table.column_keys, entries, (), {}, groups)
        column = table.column_keys[-2]
        assert [row for row in table.row_keys if parsed.is_best(row, column)] == winners


def test_protocols_are_as_the_paper_says():
    parsed = json.loads(call("protocols", "--format", "json").stdout)
    assert len(parsed["cells"]) == 18
    for cell in parsed["cells"]:
        assert cell["ours"] == cell["paper"]


def test_class_distributions_need_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path / "nothing"))  # all digits that the package brings
    parsed = json.loads(call("classes-cifar10", *EMBEDDED, "--format", "json").stdout)
    by_column = [[c["ours"] for c in parsed["cells"] if c["column"] == column] for column in ("1", "10", "100", "200")]
    assert by_column[2] == [980.0, 599.0, 359.0, 215.0, 129.0, 77.0, 46.0, 27.0, 16.0, 10.0]
    assert not list(tmp_path.glob("runs/*"))
    missing = call("fig:ClassDistCurve_C100")
    assert missing.exit_code == 1
    assert "CIFAR-100-C" in message(missing)


def test_claims_are_judged_on_finished_runs(played):
    _, runs, _ = played
    parsed = {c["name"]: c for c in json.loads(call("claims", *EMBEDDED, "--runs", runs, "--format", "json").stdout)}
    assert parsed["few-beat-test"]["paper"]["holds"] is False
    assert parsed["few-beat-test"]["ours"]["holds"] is None
    assert len(parsed) == len(claims())
    Path("runs").mkdir()
    markdown = call("claims", "--format", "markdown").stdout
    assert "F 100 inst: TTAC 43.4, TEST 41.71" in markdown
    assert "on its own" in call("claims").stdout
    assert call("claims", "--format", "latex").exit_code == 2
    written = call("claims", "--format", "markdown", "--out", "claims.md")
    assert (written.stdout, Path("claims.md").read_text()) == ("", markdown)
    call("claims", "--format", "json", "--out", "claims.json")
    assert json.loads(Path("claims.json").read_text())[0].keys() == next(iter(parsed.values())).keys()
    call("claims", "--out", "claims.txt")
    assert "on its own" in Path("claims.txt").read_text()


def test_claims_need_no_weights():
    """`claims` runs nothing, so it needs no weights: with and without --no-run."""
    small = ("--dataset", "live-mnist-c", "--set", "dataset.corruptions=('impulse_noise',)")
    small += ("--set", "scenario.imbalance=1000000")
    rows = ("--methods", "Robust BN,Balanced BN", "--runs", "here", "--device", "cpu", "--model", "compact")
    made = call("ablation", *small, *rows, "--seed", 3, "--format", "json")
    assert made.exit_code == 0, made.output
    wanted = next(c["ours"]["holds"] for c in json.loads(made.stdout)["claims"] if c["name"] == "balanced-beats-robust")
    assert wanted is not None
    for result in finished("here"):
        elsewhere(result, Path("runs"))
    parsed = {}
    for options in ((), ("--no-run",), ("--seed", 3, "--precision", "tf32"), ("--seed", 4)):
        judged = call("claims", *small, "--model", "wrn28_10", "--format", "json", *options)
        assert judged.exit_code == 0, judged.output
        parsed[options] = {c["name"]: c["ours"]["holds"] for c in json.loads(judged.stdout)}
    assert [t["balanced-beats-robust"] for t in parsed.values()] == [wanted, wanted, wanted, None]
    for result in finished("here"):
        elsewhere(result, Path("runs"), seeds=[4])
    both = call("claims", *small, "--model", "wrn28_10", "--format", "json")
    assert both.exit_code == 0, both.output
    chosen = call("claims", *small, "--model", "wrn28_10", "--format", "json", "--seed", 4)
    assert {c["name"]: c["ours"]["holds"] for c in json.loads(chosen.stdout)} == parsed[()]


def test_a_claim_is_judged_on_our_numbers():
    """Balanced BN against Robust BN, both run here."""
    workbench = Workbench(device="cpu")
    small = {"dataset": {"corruptions": ["impulse_noise"]}, "scenario": {"imbalance": 1_000_000}}
    choices = Choices("live-mnist-c", "compact", overrides=small)
    rows = ("Robust BN", "Balanced BN")
    plan = make_plan(tables.get("ablation"), dataclasses.replace(choices, only=rows), workbench)
    comparison = compared(gather.run(plan, "runs"))
    columns = [c for c in comparison.columns if not c.startswith("Avg.")]
    gaps = [comparison.entries[rows[0], c].ours - comparison.entries[rows[1], c].ours for c in columns]
    better = min(gaps) > 5  # as "substantially" is read
    for known in ([comparison], []):  # once more from the files alone, with all rows planned
        judged = judge_claims(lambda table: compared(make_plan(table, choices, workbench)), "runs", known, "ablation")
        verdicts = {claim.name: ours.holds for claim, _, ours in judged}
        assert verdicts.pop("balanced-beats-robust") is better
        assert set(verdicts.values()) == {None}, "nothing else was run"


def test_an_added_method_is_compared_with_tribe(played, mine):
    """Else one who adds a method that is not among the best two never learns whether it beats TRIBE."""
    _, runs, _ = played
    options = (*SMALL, "--seeds", 2, "--runs", runs, "--format", "json")
    result = call("wall-clock", *options, "--methods", f"TEST,BN,TRIBE,+pl,+tribe,{mine}")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)
    errors = {c["row"]: c["ours"] for c in parsed["cells"] if c["column"] == "error"}
    start = "gli-f (imbalance 100, sigma 0.1): "
    duels = dict(note.removeprefix(start).split(": ", 1) for note in parsed["notes"] if note.startswith(start))
    best, second = sorted((row for row in errors if row != "tribe"), key=errors.get)[:2]
    others = [pair for row in ("pl", "mine") if {row, "TRIBE"} != {best, second} for pair in [f"{row} against TRIBE"]]
    assert list(duels) == [f"{best} against {second}", *others], "TRIBE does not meet itself"
    for pair in others:
        gap = errors[pair.partition(" ")[0]] - errors["TRIBE"]
        assert duels[pair].startswith(f"{abs(gap):.2f} points {'worse' if gap > 0 else 'better'}")


def test_experiments_with_different_batches_are_refused(played):
    """A plan whose experiments differ in more than the table is about, as only a mistake could make one."""
    workbench = Workbench(device="cpu")
    choices = Choices("live-mnist-c", "compact", ("source", "BN"), overrides={"dataset": {"corruptions": ["fog"]}})
    one = make_plan(tables.get("wall-clock"), choices, workbench)
    other = make_plan(tables.get("wall-clock"), dataclasses.replace(choices, batch=32), workbench)
    mixed = dataclasses.replace(one, cells={**one.cells, ("BN", "error"): other.cells["BN", "error"]})
    with pytest.raises(MixedResults, match="batch is 64 and 32"):
        compared(mixed)


def test_claims_about_time_are_judged_on_times_of_bench():
    """The seconds of experiments that shared a device are those of their neighbours, too."""
    for method, seconds in (("rotta", 0.001), ("tribe", 0.009)):
        fabricate((20.0, 20.0), "results", method=method, seconds=seconds)

    def verdict():
        parsed = json.loads(call("claims", "--runs", "results", "--format", "json").stdout)
        (ours,) = (claim["ours"] for claim in parsed if claim["name"] == "wall-clock-1ms")
        assert ours["why"] in page_of("results") or ours["holds"] is None
        return ours["holds"], ours["why"]

    assert verdict() == (
        None,
        "wall-clock, RoTTA, seconds and 1 more are missing "
        "(seconds are those of `tribe bench` with nothing else running)",
    )
    measure({"rotta": 0.33, "tribe": 0.32})
    assert verdict()[0] is True
    measure({"rotta": 0.33, "tribe": 1.42})
    assert verdict()[0] is False
