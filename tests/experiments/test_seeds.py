"""Seeds add up: results that differ in their seeds only are one result, however the seeds were played."""

import pytest
import torch

from reproduce_helpers import outdate
from tribe.experiments.execution import run_experiment
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import combine, find, finished, keep, missing_seeds, stale
from tribe.experiments.sweep import make_row
from tribe.experiments.workbench import Workbench

DATA = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})
STREAM = ComponentSpec("gli-v", {"imbalance": 1_000_000})  # streams of different lengths

pytestmark = pytest.mark.filterwarnings("ignore:an imbalance of")


@pytest.fixture(scope="module")
def workbench(few_digits):
    return Workbench(few_digits, device="cpu")


@pytest.fixture(scope="module")
def played(workbench, tmp_path_factory):
    """TRIBE on three streams with seeds in no order, and then on a fourth."""
    root = tmp_path_factory.mktemp("runs")
    together = Experiment.of(DATA, "compact", STREAM, "tribe", seeds=(7, 3, 4), batch=16, workbench=workbench)
    run_experiment(together, root, workbench=workbench)
    run_experiment(together.with_seeds([9]), root, workbench=workbench)
    return together, root


def test_seeds_side_by_side_are_each_seed_alone(played, workbench, tmp_path):
    """Images, predictions and confidences of a stream do not depend on what is played beside it."""
    together, root = played
    beside = find(together, root)
    for seed, record in zip(together.seeds, beside.records(), strict=True):
        (alone,) = run_experiment(together.with_seeds([seed]), tmp_path, workbench=workbench).records()
        assert all(torch.equal(getattr(record, name), getattr(alone, name)) for name in ("label", "prediction"))
        assert torch.allclose(record.confidence, alone.confidence, atol=1e-5)


def test_a_result_is_put_together_from_others(played):
    """A seed alone, some seeds in another order, and seeds of two results; never one that was not played."""
    experiment, root = played
    for seeds in ((3,), (4, 7), (9, 7, 3, 4)):
        result = find(experiment.with_seeds(seeds), root, verified=True)
        assert result.experiment.seeds == seeds
        assert [record.spec["seed"] for record in result.records()] == list(seeds)
        assert len(result.values("instance_error")) == len(result.values("seconds_per_image")) == len(seeds)
        assert result.values("instance_error")[0] == result.metrics[str(seeds[0])]["instance_error"]
    assert find(experiment.with_seeds([3, 5]), root) is None
    assert missing_seeds(experiment.with_seeds([5, 3, 9, 6]), root) == (5, 6)
    assert missing_seeds(experiment, root) == ()


def test_only_seeds_that_are_missing_are_played(played, workbench, tmp_path):
    experiment, root = played
    keep(root, tmp_path)
    more = experiment.with_seeds([4, 5, 9])
    result = run_experiment(more, tmp_path, workbench=workbench)
    assert result.experiment == more
    assert [path.parent.name for path in tmp_path.glob("*/metrics.json")] == [experiment.with_seeds([5]).id]
    assert run_experiment(more, tmp_path, workbench=workbench).metrics == result.metrics
    assert not result.has_records, "a packed result has none"
    assert result.part_of(5).has_records
    assert make_row({}, result).scores["entropy"] is None


def test_packed_results_add_up_and_keep_their_ids(played, tmp_path):
    experiment, root = played
    kept = keep(root, tmp_path)
    assert {r.experiment.id for r in kept} == {r.experiment.id for r in finished(root)}
    whole = find(experiment.with_seeds([3, 4, 7, 9]), tmp_path)
    assert whole.metrics == combine(kept).metrics
    assert not whole.has_records


def test_a_damaged_record_costs_its_result_only(played, tmp_path):
    experiment, root = played
    for result in finished(root):
        place = tmp_path / result.folder.name
        place.mkdir()
        for path in result.folder.iterdir():
            (place / path.name).write_bytes(path.read_bytes())
    (tmp_path / experiment.id / "record-3.npz").write_bytes(b"torn")
    assert missing_seeds(experiment.with_seeds([3, 9]), tmp_path) == (3,)


def test_a_stale_result_counts_last_however_many_seeds_it_has(played, workbench, tmp_path):
    """Else its numbers would be shown for ever: fresh ones are computed seed by seed, and never found."""
    experiment, root = played
    keep(root, tmp_path / "fresh")
    run_experiment(experiment, tmp_path / "runs", workbench=workbench)
    outdate(tmp_path / "runs" / experiment.id)
    old = find(experiment, tmp_path / "runs")
    assert (stale(old), old.error()) == (["method"], pytest.approx(0.99))
    for seeds in ((7, 3), (4,)):
        run_experiment(experiment.with_seeds(seeds), tmp_path / "runs", workbench=workbench)
    expected = find(experiment, tmp_path / "fresh").metrics
    for found in (
        find(experiment, tmp_path / "runs", verified=True),
        combine([*finished(tmp_path / "runs")], experiment.seeds),
        combine([*finished(tmp_path / "runs")][::-1], experiment.seeds),
    ):
        assert found.metrics == expected
        assert not stale(found)
    outdate(tmp_path / "runs" / experiment.with_seeds([4]).id)
    mixed = find(experiment, tmp_path / "runs")
    assert [mixed.metrics[str(seed)]["instance_error"] == 0.99 for seed in (7, 3, 4)] == [False, False, True]
    assert stale(mixed) == ["method"], "one of its parts is"


def test_kept_results_that_are_stale_count_last(played, workbench, tmp_path):
    experiment, root = played
    run_experiment(experiment, tmp_path / "runs", workbench=workbench)
    outdate(tmp_path / "runs" / experiment.id)
    keep(tmp_path / "runs", tmp_path / "kept")
    run_experiment(experiment.with_seeds([3]), tmp_path / "runs", workbench=workbench)
    keep(tmp_path / "runs", tmp_path / "kept")
    found = find(experiment.with_seeds([3]), tmp_path / "kept")
    assert found.metrics == {"3": find(experiment, root).metrics["3"]}
    assert find(experiment, tmp_path / "kept").metrics["3"] == found.metrics["3"]


def test_a_result_that_is_put_together_twice_still_finds_its_records(played):
    _, root = played
    whole = combine([*finished(root)])
    one = combine([whole], (9, 3))
    assert [record.spec["seed"] for record in one.records()] == [9, 3]


def test_whole_numbers_and_floats_are_one_family_with_two_ids(played, workbench, tmp_path):
    """`tribe run` writes an imbalance of 100.0, `tribe reproduce` one of 100."""
    experiment, root = played
    stream = ComponentSpec("gli-v", {"imbalance": 1e6})
    same = Experiment.of(DATA, "compact", stream, "tribe", seeds=(7, 3), batch=16, workbench=workbench)
    assert same.family == experiment.family
    assert same.id != experiment.with_seeds([7, 3]).id, "results that are on disk keep their ids"
    assert find(same, root).metrics == find(experiment.with_seeds([7, 3]), root).metrics
    assert missing_seeds(same.with_seeds([3, 5]), root) == (5,)


def test_the_id_of_one_seed_does_not_depend_on_the_others(played):
    """Else committed results would lose their ids."""
    experiment, _ = played
    assert len({experiment.id, experiment.with_seeds([7]).id, experiment.with_seeds([3, 4, 7]).id}) == 3
    assert len({experiment.family, experiment.with_seeds([7]).family}) == 1
