"""The benchmark of peak memory counts what a step holds at a time."""

import json

import torch
from benchmarks import peak

from places import ROOT
from processes import ended


def test_what_is_held_at_a_time_counts_and_what_was_freed_does_not():
    one = 4 * 1000

    def together():
        a, b = torch.zeros(1000), torch.zeros(1000)
        return a, b

    def one_after_the_other():
        a = torch.zeros(1000)
        del a
        return torch.zeros(1000)

    assert 2 * one <= peak.allocated(together) < 3 * one
    assert one <= peak.allocated(one_after_the_other) < 2 * one


def test_a_method_is_measured_in_a_process_of_its_own():
    words = ["--model", "resnet8", "--classes", "3", "--batch", "4", "--alone", "bank"]
    found = json.loads(ended("-m", "benchmarks.peak", *words, cwd=ROOT).out)
    assert found["allocated"] > found["state"] > 0
    first = {"allocated": 100, "resident": None, "state": 0}
    lines = peak.show({"plain": first, "bank": {"allocated": 105, "resident": 7, "state": 5}}).splitlines()
    assert lines[-1].split()[:6] == ["bank", "105", "B", "1.05", "unknown", "5"]
