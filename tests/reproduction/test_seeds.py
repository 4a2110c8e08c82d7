"""All seeds that a study has played count, pages agree with them, and each method says what it was checked against."""

import csv
import statistics

import pytest

import tribe
from places import ROOT
from recordings import RECORDED
from reproduction import checked
from reproduction.seeds import studied, studied_runs

README, PAGE = ((ROOT / name).read_text() for name in ("README.md", "docs/reproduction.md"))
TABLES = {"cifar10-c": "cifar10", "cifar100-c": "cifar100", "mnist-c": "mnist"}


def lines(name):
    with (ROOT / f"docs/reproduction/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def gaps(table):
    """TRIBE's instance error minus the paper's, of streams with several seeds."""
    several = [line for line in lines(table) if line["row"] == "TRIBE" and line["deviation"]]
    return [
        float(line["difference"])
        for line in several
        if line["column"].endswith("inst") and "V 1 " not in line["column"]
    ]


def test_two_studies_of_one_stream_have_the_same_error():
    first = {}
    for place, seed, run in studied_runs():
        known = first.setdefault((place, seed, run.precision), run)
        assert known == run, (place, seed)


def test_every_seed_of_a_study_counts_and_names_its_precision():
    counted = {}
    for line in lines("seeds"):
        key = line["artifact"], line["row"].removesuffix(" †"), line["column"]
        counted.setdefault(key, {})[int(line["seed"])] = line
    played = {(line["artifact"], line["row"]) for table in TABLES.values() for line in lines(table)}
    for (dataset, _, row, stream), runs in studied().items():
        if not {(TABLES[dataset], row), (TABLES[dataset], f"{row} †")} & played:
            continue  # no result of the table has it
        found = counted[TABLES[dataset], row, f"{stream[0]} {stream[1:]} inst"]
        assert runs.keys() <= found.keys()
        for seed, line in found.items():
            assert line["precision"]
            assert line["precision"] != runs[seed].precision or float(line["error"]) == runs[seed].inst
    assert len(counted) > 11


@pytest.mark.parametrize("table", TABLES.values())
def test_means_of_pages_are_those_of_all_seeds(table):
    errors = {}
    for line in lines("seeds"):
        if line["artifact"] == table and line["row"] == "TRIBE" and line["column"].endswith(" inst"):
            errors.setdefault(line["column"], []).append(float(line["error"]))
    for column, values in errors.items():
        shown = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
        stream = "F 1" if column == "V 1 inst" else column.removesuffix(" inst")
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {table}, {stream} |")]
        assert shown in line


@pytest.mark.parametrize("page", [README, PAGE], ids=["README", "reproduction"])
def test_no_page_shows_one_seed_where_there_are_several(page):
    assert "not measured" not in page
    paper = {
        (line["artifact"], line["row"], line["column"]): line["paper"] for t in TABLES.values() for line in lines(t)
    }
    for line in lines("seeds"):
        published = paper[line["artifact"], line["row"], line["column"]]
        assert not published or f"{float(line['error']):.2f} ({float(published):.2f})" not in page


@pytest.mark.parametrize("page", [README, PAGE], ids=["README", "reproduction"])
def test_sentences_about_seeds_are_those_of_the_numbers(page):
    text = " ".join(page.split())
    assert len(gaps("cifar10")) == 7
    low, high = -max(gaps("cifar10")), -min(gaps("cifar10"))
    assert f"over five seeds is below the paper's number in all seven, by {low:.1f} to {high:.1f} points" in text
    low, high = min(gaps("cifar100")), max(gaps("cifar100"))
    (mnist,) = gaps("mnist")
    assert f"{low:.1f} to {high:.1f} points above the paper's number on CIFAR" in text
    assert f"and {mnist:.1f} on MNIST" in text


def test_the_table_of_the_readme_is_that_of_the_released_code():
    found = {(line["row"], line["column"]): line for line in lines("released")}
    for row, name in (("source", "TEST"), ("BN", "BN"), ("TRIBE", "TRIBE")):
        for dataset in ("CIFAR10-C", "CIFAR100-C"):
            inst, cat = (found[name, f"{dataset} {kind}"] for kind in ("inst", "cat"))
            ours = f"{float(inst['ours']):.2f}", f"{float(cat['ours']):.2f}"
            theirs = f"({float(inst['paper']):.2f} / {float(cat['paper']):.2f})"
            (line,) = [line for line in README.splitlines() if line.startswith(f"| {row} (released)")]
            assert f"{ours[0]} / {ours[1]} {theirs}" in line.replace("**", "")


def test_every_method_says_what_it_was_checked_against():
    """The page is generated from the tests' data; a method that is registered without a row fails here."""
    table = PAGE.partition("<!-- begin checked -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == tribe.methods.names(), "make pages"
    recorded = {method for cases in RECORDED.values() for method, _ in cases.values()}
    assert checked.recorded() == recorded
    for name, recording, loop, _, published in rows:
        method = name.strip("`")
        assert (recording == "yes") == (method in recorded)
        assert (loop == "yes") == (method in checked.looped())
        assert recording == "yes" or loop != "–", f"{method} was checked against nothing"
        assert published
