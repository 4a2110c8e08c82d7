"""Experiments that differ only in the time filter: one play of the method gives the results of separate runs."""

from dataclasses import dataclass

import pytest
import torch

from tribe import scenarios
from tribe.data.scenarios import Scenario, Schedule
from tribe.experiments import execution, shared
from tribe.experiments.execution import run_experiment
from tribe.experiments.experiment import Experiment
from tribe.experiments.ray import run_all
from tribe.experiments.shared import SharedPlays, in_groups, without_filter
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import find
from tribe.experiments.workbench import Workbench

DATA = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})
ALWAYS = {"evidence_on": 0.0, "evidence_drift": 0.0}  # short streams give little evidence
METHODS = (
    "bn",
    ComponentSpec("bn+time", ALWAYS),
    ComponentSpec("bn+time", {"within": "batch", **ALWAYS}),
    "bn+cofa",
)


@dataclass(frozen=True)
class Short(Scenario):
    """Bursts of nine digits; the stream goes back to the source once."""

    def schedule(self, labels, seed):
        images = [(labels[0] == c).nonzero().flatten()[seed : seed + 9] for c in range(10)]
        index = torch.cat(images)
        return Schedule(torch.zeros_like(index), index, torch.arange(90) == 50)


@pytest.fixture(scope="module")
def workbench():
    scenarios.registry.register("short")(Short)
    yield Workbench(device="cpu")
    scenarios.registry._classes.pop("short")


@pytest.fixture(scope="module")
def experiments(workbench):
    options = {"seeds": (0, 1), "batch": 16, "workbench": workbench}
    return [Experiment.of(DATA, "compact", "short", method, **options) for method in METHODS]


@pytest.fixture(scope="module")
def separate(workbench, experiments, tmp_path_factory):
    root = tmp_path_factory.mktemp("separate")
    return [run_experiment(e, root, workbench=workbench) for e in experiments]


@pytest.fixture
def played(monkeypatch):
    """The names of the methods that were played to the end."""
    names, run = [], execution.run

    def counting(net, method, *rest, **options):
        records = run(net, method, *rest, **options)
        names.append(method.name)
        return records

    monkeypatch.setattr(execution, "run", counting)
    return names


def check_equal(results, expected):
    assert [r.experiment.id for r in results] == [r.experiment.id for r in expected]
    assert [r.metrics for r in results] == [r.metrics for r in expected]
    for found, alone in zip(results, expected, strict=True):
        for one, other in zip(found.records(), alone.records(), strict=True):
            assert one.spec == other.spec
            assert torch.equal(one.prediction, other.prediction)
            assert torch.equal(one.confidence, other.confidence)


def test_one_play_gives_the_results_of_separate_runs(workbench, experiments, separate, played, tmp_path):
    check_equal(run_all(experiments, tmp_path, workbench=workbench), separate)
    assert played == ["bn"]
    assert len({str(r.records()[0].confidence.tolist()) for r in separate}) == len(METHODS), (
        "every filter changes something"
    )
    assert not list(tmp_path.glob("*/checkpoint*"))


def test_the_method_alone_need_not_be_requested(workbench, experiments, separate, played, tmp_path):
    check_equal(run_all(experiments[1:3], tmp_path, workbench=workbench), separate[1:3])
    assert played == ["bn"]
    check_equal([find(experiments[0], tmp_path, verified=True)], separate[:1])
    check_equal(run_all(experiments, tmp_path, workbench=workbench), separate)
    assert played == ["bn", "bn+cofa"], "one that is missing is played by itself"


def test_a_shared_play_that_was_stopped_goes_on(workbench, experiments, separate, played, tmp_path):
    def stop(done, of, wrong):
        if done == 4:
            raise KeyboardInterrupt

    wanted = experiments[1:3]
    with pytest.raises(KeyboardInterrupt):
        run_experiment(wanted[0], tmp_path, workbench=workbench, progress=stop, plays=SharedPlays(wanted))
    steps, plays = [], SharedPlays(wanted)
    first = run_experiment(
        wanted[0], tmp_path, workbench=workbench, progress=lambda done, *_: steps.append(done), plays=plays
    )
    assert steps[0] == 4, "from the checkpoint on"
    check_equal([first, run_experiment(wanted[1], tmp_path, workbench=workbench, plays=plays)], separate[1:3])
    assert played == ["bn"]


def test_too_many_outputs_are_not_kept(workbench, experiments, played, tmp_path, monkeypatch):
    images = experiments[0].length(workbench)
    monkeypatch.setattr(shared, "MOST_NUMBERS", 10 * images - 1)
    run_all(experiments[1:3], tmp_path, workbench=workbench)
    assert played == ["bn+time", "bn+time"]


def test_force_computes_all_anew_in_one_play(workbench, experiments, separate, played, tmp_path):
    for folder in (r.folder for r in separate[:2]):
        (tmp_path / folder.name).mkdir()
        for path in folder.iterdir():
            (tmp_path / folder.name / path.name).write_bytes(path.read_bytes())
    plays = SharedPlays(experiments[:2])
    results = [run_experiment(e, tmp_path, workbench=workbench, force=True, plays=plays) for e in experiments[:2]]
    check_equal(results, separate[:2])
    assert played == ["bn"]


def test_groups_stand_together_with_the_method_alone_first(workbench, experiments):
    bn, timed, _, cofa = experiments
    other = Experiment.of(DATA, "compact", "short", "source", workbench=workbench)
    assert in_groups([timed, other, cofa, bn]) == [bn, timed, cofa, other]
    assert without_filter(cofa) == without_filter(timed) == bn == without_filter(bn)
