"""Every command finds output that it cannot write before its work."""

import sys

import pytest

from commands import assert_refused, tribe_command
from reproduction import command as reproduce
from reproduction import train
from tribe.cli import options
from tribe.cli.commands import bench, corrupt, results, schedule, source

pytestmark = [
    pytest.mark.usefixtures("nowhere"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is a folder without new files on Linux"),
]

SOURCE = ("source", "eata", "--model", "compact", "--dataset", "mnist")
REPRODUCE = ("reproduce", "norms", "--set", "dataset=live-mnist-c", "--set", "model=compact", "--rows", "source")
CASES = {  # the work, which must not begin, and a command
    "run --out": ((options, "plan_experiments"), ("run", "--out", "/proc/runs")),
    "run --json": ((options, "plan_experiments"), ("run", "--json", "/proc/x.json")),
    "sweep --out": ((options, "plan_experiments"), ("sweep", "--grid", "tribe.lr=1", "--out", "/proc/runs")),
    "sweep --json": ((options, "plan_experiments"), ("sweep", "--grid", "tribe.lr=1", "--json", "/proc/x.json")),
    "train --out": ((train, "_open_data"), ("train", "mnist", "--out", "/proc/x.safetensors")),
    "reproduce --runs": ((reproduce, "run_all"), (*REPRODUCE, "--runs", "/proc/runs")),
    "reproduce --out": ((reproduce.planning, "build"), ("reproduce", "cifar10", "--out", "/proc/x.txt")),
    "reproduce --out chart": ((reproduce.planning, "build"), ("reproduce", "cifar10", "--out", "/proc/x.svg")),
    "reproduce keep": ((reproduce, "keep"), ("reproduce", "keep", "--runs", ".", "--out", "/proc/kept")),
    "source --out": ((source, "_study"), (*SOURCE, "--out", "/proc/x.safetensors")),
    "source --data": ((source, "_study"), (*SOURCE, "--data", "/proc/data")),
    "corrupt --out": ((corrupt, "generate"), ("corrupt", "mnist", "--out", "/proc/data")),
    "corrupt --data": ((corrupt, "generate"), ("corrupt", "mnist", "--data", "/proc/data")),
    "bench --json": ((bench, "_network"), ("bench", "--json", "/proc/x.json")),
    "report -o": ((results.pages, "collect"), ("report", ".", "-o", "/proc/x.html")),
    "schedule --out": ((schedule, "build_dataset"), ("schedule", "gli-f", "--out", "/proc/x.npz")),
    "schedule --plot": ((schedule, "build_dataset"), ("schedule", "gli-f", "--plot", "/proc/x.svg")),
}


@pytest.mark.parametrize("case", CASES)
def test_unwritable_output_is_found_before_the_work(case, monkeypatch):
    (owner, name), arguments = CASES[case]
    monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("the work began"))
    assert_refused(tribe_command(*arguments), "a file in /proc could not be written: ")


def test_the_ending_of_a_chart_is_checked_before_the_work(monkeypatch):
    monkeypatch.setattr(schedule, "build_dataset", lambda *_: pytest.fail("the work began"))
    result = tribe_command("schedule", "gli-f", "--plot", "chart.txt")
    assert_refused(result, "a chart ends in .svg, .png, .pdf; got chart.txt")
