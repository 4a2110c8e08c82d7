"""Each study plays a little, its results become tables, and its README shows the tables of its results."""

import json

import pytest
import torch

from places import ROOT
from studies import pages
from studies.guard import cost as guard_cost
from studies.guard import run as guard
from studies.health import pack, tables
from studies.health import run as health
from studies.networks import run as networks
from studies.time import cost, learning
from studies.time import run as time
from studies.time import tables as time_tables
from tribe.experiments.record import Record
from tribe.health import calibration

BLOCKS = {"time": time_tables.BLOCKS, "health": tables.BLOCKS, "guard": guard.BLOCKS, "networks": networks.BLOCKS}


@pytest.mark.parametrize("study", BLOCKS)
def test_a_readme_shows_the_tables_of_the_results(study):
    text = (ROOT / "studies" / study / "README.md").read_text()
    assert all(f"<!-- begin {name} -->" in text for name in BLOCKS[study])
    rendered = pages.rendered(text, BLOCKS[study], ROOT / "studies" / study / "results")
    assert rendered == text, f"run: python -m studies.{study}.run --render"


def test_time(tmp_path):
    where = f"--dataset live-mnist-c --model compact --device cpu --out {tmp_path} --cells F100"
    time.main(f"{where} --methods source --seeds 1 2 --limit 128 --parts a,e,f".split())
    learning.main(f"{where} --limit 64 --seeds 1 --variants 0 4".split())
    cost.main(f"--model resnet8 --classes 3 --batch 2 --rounds 2 --device cpu --out {tmp_path}".split())
    text = time_tables.study(tmp_path)
    assert all(title in text for title in ("The streams of the paper", "Delay after a change", "Rare classes"))
    assert "| trust only where both agree | " in time_tables.learning(tmp_path)
    assert time_tables.cost(tmp_path).count("resnet8, batch 2") == 2


def test_a_delay_is_counted_from_the_first_image_of_a_burst():
    label, prediction = torch.tensor([0, 0, 1, 1, 1, 2, 0, 0]), torch.tensor([0, 0, 0, 1, 1, 1, 0, 0])
    rows = torch.zeros(8)
    record = Record(rows.long(), label, prediction, rows, rows, ("fog",), 10, {})
    length, delay, sure = time.bursts(record, torch.arange(8.0) / 10)
    assert (length.tolist(), delay.tolist()) == ([3, 1, 2], [1, 1, 0])
    assert sure.tolist() == pytest.approx([0.2, 0.5, 0.6])


def test_health(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "HELD_OUT", 200)
    monkeypatch.setattr(pack, "LONG_TAIL", 1)
    monkeypatch.setattr(calibration, "MIXED", 34)
    monkeypatch.setattr(calibration, "STRETCH", 40)
    where = ["--dataset", "live-mnist-c", "--model", "compact", "--device", "cpu", "--out", str(tmp_path)]
    what = ["--methods", "source", "--streams", "iid", "--seeds", "1", "--per", "35", "--records", str(tmp_path / "r")]
    health.main([*where, *what])
    (row,) = json.loads((tmp_path / "health_live-mnist-c_compact.json").read_text())["rows"]
    assert (row["method"], row["stream"], row["images"], len(row["true"])) == ("source", "iid", 525, 1)
    assert "| iid | source |" in tables.errors(tmp_path)
    by_hand = {"true": [80.0, 60.0], "low": [70.0, 61.0], "high": [85.0, 70.0]}
    by_hand["estimates"] = {"ours": [75.0, 65.0], "atc": [90.0, 61.0]}
    assert tables.mean_errors([by_hand]) == {"ours": 5.0, "atc": 5.5}
    assert (tables.covered([by_hand]), tables.half_width([by_hand])) == (50, 6)


def test_guard(tmp_path):
    where = f"--dataset mnist --shifted live-mnist-c --model compact --device cpu --seeds 1 2 --out {tmp_path}"
    what = "--parts recurring,collapse --visit 30 --visits 2 --methods tribe+guard --collapsing tent"
    guard.main(f"{where} {what}".split())
    guard_cost.main(f"--model resnet8 --device cpu --batches 4 --rounds 2 --out {tmp_path}".split())
    page = guard.tables(tmp_path)
    for line in ("| tribe+guard | 2 | 30 | ", "| tent, 30 images | ", "| resnet8 | "):
        assert line in page


def test_networks(few_digits, tmp_path):
    options = ["--model", "compact", "--dataset", "live-mnist-c", "--data", str(few_digits), "--out", str(tmp_path)]
    options += ["--corruptions", "fog,stripe", "--every", "40", "--methods", "source,bn", "--device", "cpu"]
    networks.main(options)
    text = networks.errors(tmp_path)
    assert "|  | clean | fog | stripe | mean of 2 corruptions |" in text
    assert [line.split(" | ")[0] for line in text.splitlines()[4:]] == ["| TEST", "| BN"]
