"""Each study plays a little, its results become tables, and its README shows the tables of its results."""

import json

import pytest
import torch

from places import ROOT
from studies import pages
from studies.budget import costs
from studies.budget import run as budget
from studies.budget import tables as budget_tables
from studies.deploy import run as deploy
from studies.deploy import tables as deploy_tables
from studies.guard import cost as guard_cost
from studies.guard import run as guard
from studies.health import pack, tables
from studies.health import run as health
from studies.networks import run as networks
from studies.time import cost, learning
from studies.time import run as time
from studies.time import tables as time_tables
from tribe.experiments.record import Record
from tribe.health import playing
from tribe.streams.budget import StepCosts

BLOCKS = {
    "budget": budget_tables.BLOCKS,
    "time": time_tables.BLOCKS,
    "health": tables.BLOCKS,
    "guard": guard.BLOCKS,
    "networks": networks.BLOCKS,
    "deploy": deploy_tables.BLOCKS,
}


@pytest.mark.parametrize("study", BLOCKS)
def test_a_readme_shows_the_tables_of_the_results(study):
    text = (ROOT / "studies" / study / "README.md").read_text()
    assert all(f"<!-- begin {name} -->" in text for name in BLOCKS[study])
    rendered = pages.rendered(text, BLOCKS[study], ROOT / "studies" / study / "results")
    assert rendered == text, f"run: python -m studies.{study}.run --render"


@pytest.mark.slow  # ten seconds
def test_deploy(tmp_path, monkeypatch):
    monkeypatch.setattr("tribe.preparing.preparing.MOST_SECONDS", 1.0)
    monkeypatch.setattr(deploy, "DRAWS", 3)
    monkeypatch.setattr(deploy, "DAYS", ("clean", "night"))
    deploy.main(f"--each 300 --seeds 1 --method bank --out {tmp_path}/deploy_mnist_compact.json".split())
    for block in deploy_tables.BLOCKS.values():
        assert "compact" in block(tmp_path)


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
    monkeypatch.setattr(playing, "MIXED", 34)
    monkeypatch.setattr(playing, "STRETCH", 40)
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


COSTS = {"source": (1, 1), "tent": (3, 1.25), "rotta": (5, 1), "snap": (4, 1.2), "bank": (1.1, 1), "cotta": (40, 30)}


def test_budget(few_digits, tmp_path, monkeypatch):
    """The costs of a file are not measured: a budget sets what they allow, and the clock counts them."""
    monkeypatch.setattr(costs, "measure", lambda *_: StepCosts(8.0, 0.5, 2.0))
    rows = [{"method": name, "learn": learn, "rest": rest, "cost": learn} for name, (learn, rest) in COSTS.items()]
    (tmp_path / "costs_live-mnist-c_compact.json").write_text(json.dumps({"rows": rows}))
    options = ["--dataset", "live-mnist-c", "--model", "compact", "--data", str(few_digits), "--out", str(tmp_path)]
    options += ["--corruptions", "fog@5,stripe@5", "--most", "20", "--device", "cpu", "--seeds", "1,2"]
    names = "source,lame,tent@1.5,rotta@1.5,cotta@1.5,snap@3,snap:5,bank"
    budget.main([*options, "--cells", "iid,continual", "--name", "peers", "--methods", names])
    budget.main([*options, "--cells", "iid", "--realtime", "1,4", "--methods", "source,bank,rotta"])
    found = {row["method"]: row for row in budget_tables.read("peers_*.json", tmp_path)}
    assert {name: (row["every"], row["cost"]) for name, row in found.items() if "cell" in row} == {
        "source": (1, 1),
        "lame": (1, 4),  # measured
        "tent@1.5": (7, 1.5),
        "rotta@1.5": (8, 1.5),
        "snap@3": (2, 2.6),
        "snap:5": (5, 1.76),
        "bank": (1, 1.1),
    }
    assert json.loads((tmp_path / "costs_live-mnist-c_compact.json").read_text())["rows"][-1]["method"] == "lame"
    text = budget_tables.peers(tmp_path)
    assert "| 1.5 | cotta |  | more |" in text
    assert "| 1.5 | tent | 7 | 1.50 x |" in text
    assert "| method | cost | iid, 1 x | iid, 4 x |" in budget_tables.realtime(tmp_path)
    budget_tables.draw(tmp_path, tmp_path / "budget.svg")
    assert "continual" in (tmp_path / "budget.svg").read_text()


def test_the_tables_of_a_budget_mark_the_lowest_of_each_budget(tmp_path):
    shared = {"dataset": "d", "model": "m", "corruptions": ["fog"], "most": 9, "seeds": [1]}
    errors = {"source": 9.0, "tent@1.5": 8.0, "bank@1.5": 7.0, "tent@3": 6.0, "bank@3": 6.04}
    rows = [{"cell": "iid", "method": m, "every": 2, "cost": 1.5, "error": [e]} for m, e in errors.items()]
    (tmp_path / "peers_d_m_1.json").write_text(json.dumps({"settings": shared, "rows": rows}))
    lines = [line for line in budget_tables.peers(tmp_path).splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[-1].rstrip(" |") for line in lines] == ["9.0", "8.0", "**7.0**", "**6.0**", "**6.0**"]
