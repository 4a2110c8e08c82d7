"""Experiments within a budget: the field that it sets is plain data of the experiment, from costs measured once."""

import json

import pytest

from commands import assert_refused, succeeded, tribe_command
from tribe.experiments.bench import budgets, costs
from tribe.experiments.bench.contenders import steps_period
from tribe.experiments.experiment import Experiment
from tribe.experiments.store import finished
from tribe.streams.budget import Budget
from tribe.testing import ready

TINY = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=1000000")
pytestmark = pytest.mark.usefixtures("few")


def planned(*names):
    return [Experiment.of("live-mnist-c", "compact", "gli-f", name) for name in names]


def test_methods_that_learn_get_the_field_and_the_others_stay(monkeypatch, tmp_path):
    asked = []

    def given(experiments, *_):
        asked.extend((each.method.name, each.method.fields["learn_every"]) for each in experiments)
        return [7.25, 1.05, 2.5, 1.0]

    monkeypatch.setattr(budgets, "measured_costs", given)
    before = planned("source", "tribe+time", "tent")
    found = budgets.within_budget(before, Budget(1.5), tmp_path)
    assert asked == [("tribe+rare+time", 1), ("tribe+rare+time", 1000), ("tent+rare", 1), ("tent+rare", 1000)]
    assert found[0] is before[0]
    assert [each.method.name for each in found[1:]] == ["tribe+rare+time", "tent+rare"]
    assert [each.method.fields["learn_every"] for each in found[1:]] == [14, 3]
    assert Experiment.from_json(found[1].json()).id == found[1].id
    assert found[1].parts.method.rare.learn_every == 14
    assert Experiment.of("live-mnist-c", "compact", "gli-f", found[2].method).id == found[2].id


def test_the_command_measures_once_and_plays_the_same_again(tmp_path):
    def play(*arguments):
        options = ("--methods", "source,tent", "--out", tmp_path, "--json", "-")
        return json.loads(succeeded(tribe_command("run", *TINY, *options, *arguments)).stdout)

    ids = {row["method"]: row["id"] for row in play("--budget", "1000")["results"]}
    assert ids.keys() == {"source", "tent+rare"}
    measured = (tmp_path / costs.FILE).read_bytes()
    assert {row["method"]: row["id"] for row in play("--budget", "1000")["results"]} == ids
    assert (tmp_path / costs.FILE).read_bytes() == measured
    fields = {result.experiment.method.name: result.experiment.method.fields for result in finished(tmp_path)}
    assert fields["tent+rare"]["learn_every"] == 1


def test_a_budget_below_one_is_refused_before_the_work(tmp_path):
    assert_refused(tribe_command("run", "--budget", "0.5", "--out", tmp_path), "budget", "at least 1")


def test_the_cost_of_a_step_repeats_after_all_that_a_method_counts():
    assert steps_period(ready("tent"), 64) == 1
    assert steps_period(ready("rotta+rare", every=64, learn_every=3), 48) == 12
    assert steps_period(ready("tent+rare", learn_every=1000), 64) == 1
