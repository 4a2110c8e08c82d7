"""Claims are judged by one number: on the paper's numbers, and on ours with their spread."""

import dataclasses

import pytest

from reproduction import tables
from reproduction.claims import MEASURES, Claim, claims, judge
from reproduction.compare import Comparison, Entry
from reproduction.render import claims_markdown


def compared(name, change=lambda row, column, value: (value,), seeds=(1,)):
    """A comparison in which ours are the paper's numbers, changed."""
    table = tables.get(name)
    entries = {}
    for row in table.row_keys:
        for column in table.column_keys:
            values = change(row, column, table.value(row, column))
            by_seed = dict(zip(seeds, values, strict=False)) if None not in values else {}
            ours = sum(by_seed.values()) / len(by_seed) if by_seed else None
            entries[row, column] = Entry(ours, table.value(row, column), "%", by_seed)
    readings = table.readings
    return {name: Comparison(name, "", "", table.row_keys, table.column_keys, entries, readings=readings)}


def claim(name):
    return next(claim for claim in claims() if claim.name == name)


def margin_claim(**threshold):
    return Claim("c", "", "", ["norms"], "margin", {"row": "Balanced BN", "columns": "200"}, **threshold)


@pytest.mark.parametrize("each", claims(), ids=lambda each: each.name)
def test_a_claim_names_rows_columns_and_a_measure_that_exist(each):
    assert each.measure in MEASURES
    assert (each.at_least is None) != (each.at_most is None)
    assert each.number
    assert judge(each, {}).ours.verdict == "incomplete"
    found = [tables.get(name) for name in each.tables]
    rows, columns = ([key for table in found for key in getattr(table, f"{kind}_keys")] for kind in ("row", "column"))
    for argument, patterns in each.arguments.items():
        known = rows if argument in ("row", "rows", "of", "over", "than", "but") else columns
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            assert argument == "measure" or tables.matching(pattern, known), (argument, pattern)


@pytest.mark.parametrize(
    ("name", "number", "verdict"),
    [
        ("tribe-beats-all", 0.84, "holds"),
        ("rotta-suffers-from-imbalance", 7.25, "holds"),
        ("seven-points-over-ttac", 6.87, "holds"),
        ("imagenet-11-of-15", 11, "holds"),
        ("imbalance-range", 4.88, "holds"),
        ("balanced-bn-margins", 1.78, "fails"),
        ("few-beat-test", -4.58, "fails"),
    ],
)
def test_the_papers_own_numbers_by_hand(name, number, verdict):
    paper = judge(claim(name), {}).paper
    assert (round(paper.number, 2), paper.verdict) == (number, verdict)


def test_ours_decides_with_the_papers_numbers_as_ours():
    for each in claims():
        if len(each.tables) == 1 and not tables.get(each.tables[0]).readings:
            verdict = judge(each, compared(each.tables[0]))
            assert verdict.ours == verdict.paper


def test_a_claim_says_what_was_played_in_place_of_the_data_it_names():
    on_paper, other = compared("cifar10"), compared("cifar10")
    other["cifar10"] = dataclasses.replace(other["cifar10"], stand_in="live-mnist-c, compact")
    margin = claim("seven-points-over-ttac")
    assert "live-mnist-c" not in claims_markdown([judge(margin, on_paper)])
    assert "live-mnist-c, compact" in claims_markdown([judge(margin, other)])


def test_a_margin_is_judged_against_the_spread_between_seeds():
    both = compared("norms", lambda row, _, value: (value, value + 4 * (row == "Balanced BN")), seeds=(1, 2))
    paper = judge(margin_claim(at_least=5), {}).paper
    assert judge(margin_claim(at_least=5), both).ours.number == pytest.approx(paper.number - 2)
    middle = paper.number - 2
    for threshold, verdict in ((middle - 1, "too close"), (middle + 1, "too close"), (middle + 4, "fails")):
        assert judge(margin_claim(at_least=threshold), both).ours.verdict == verdict
    assert judge(margin_claim(at_least=middle - 4), both).ours.verdict == "holds"
    assert judge(margin_claim(at_most=middle - 4), both).ours.verdict == "fails"


def test_one_counterexample_refutes_but_holding_takes_all_numbers():
    lacking = compared("norms", lambda row, _, value: (None if row == "TEST" else value,))
    assert judge(margin_claim(at_least=0), lacking).ours.verdict == "incomplete"
    assert judge(margin_claim(at_least=99), lacking).ours.verdict == "fails"


def test_a_row_that_is_our_reading_settles_nothing():
    """TRIBE against one such row is not judged; TRIBE against all rows is judged without it."""
    ours = compared("ablation", lambda row, _, value: (0.0 if row == "BN + ST" else value,))
    assert tables.get("ablation").readings["BN + ST"]
    assert judge(claim("self-training-helps"), ours).ours.verdict == "incomplete"
    best = dataclasses.replace(claim("ablation-tribe-best"), arguments={"row": "TRIBE", "columns": "CIFAR10-C inst"})
    assert judge(best, ours).ours.verdict == "holds"
