"""`tribe diff` as people call it: results by id, folder and file."""

import json
import shutil

import pytest

from commands import assert_refused, message, succeeded, tribe_command
from reproduction.keep import keep
from tribe.experiments.store import finished

TINY = ("--set", "dataset.corruptions=('impulse_noise','motion_blur')", "--set", "scenario.imbalance=1000000")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, few_digits):
    folder = tmp_path_factory.mktemp("runs")
    for methods, seed in (("source,bn", 0), ("tent", 1)):
        played = ("--methods", methods, "--data", few_digits, "--out", folder, "--seeds", f"{seed},")
        succeeded(tribe_command("run", *TINY, *played))
    return folder


@pytest.fixture(scope="module")
def ids(runs):
    """The ids by method and seed."""
    return {(r.experiment.method.name, r.experiment.seeds[0]): r.experiment.id for r in finished(runs)}


def test_two_results_by_id(runs, ids):
    result = succeeded(tribe_command("diff", ids["source", 0][:8], ids["bn", 0], "--runs", runs, "--json"))
    found = json.loads(result.stdout)
    errors = {r.experiment.id: r.metrics[0] for r in finished(runs) if r.experiment.seeds == (0,)}
    source, bn = errors[ids["source", 0]], errors[ids["bn", 0]]
    assert {"field": "method.name", "a": "source", "b": "bn"} in found["spec"]
    assert found["instance_error"]["gap"] == pytest.approx(source["instance_error"] - bn["instance_error"])
    assert found["domains"].keys() == {"impulse_noise@5", "motion_blur@5"}
    (stream,) = found["streams"]
    assert stream["images"] == source["images"]
    assert stream["first"]["predictions"][0] != stream["first"]["predictions"][1]
    assert stream["first"]["domain"] == "impulse_noise@5"
    assert "on this stream" in found["verdict"]["words"]


def test_a_folder_and_a_file(runs, ids):
    result = succeeded(tribe_command("diff", runs / ids["source", 0], runs / ids["bn", 0] / "record-0.npz"))
    columns = ("method.name", "impulse_noise@5", "first: image", "A - B")
    for words in (*columns, "negative where A is better", "A against B: "):
        assert words in result.stdout


def test_results_without_records(runs, ids, tmp_path):
    keep(runs, tmp_path)
    result = succeeded(tribe_command("diff", ids["source", 0], tmp_path / ids["bn", 0], "--runs", tmp_path))
    assert "it is not known which images are predicted differently" in result.stdout
    assert "motion_blur@5" in result.stdout


def test_a_lost_record_is_named(runs, tmp_path, few_digits):
    for method in ("source", "bn"):
        played = ("--methods", method, "--data", few_digits, "--out", tmp_path / "two", "--seeds", 2)
        succeeded(tribe_command("run", *TINY, *played))
    one, other = finished(tmp_path / "two")
    (one.folder / "record-1.npz").unlink()
    result = tribe_command("diff", one.folder, other.folder)
    assert result.exit_code == 2
    assert f"no record at {one.folder / 'record-1.npz'}" in message(result).replace("- ", "-")
    assert "no result" not in message(result)


def test_what_cannot_be_compared(runs, ids, tmp_path):
    unfinished = tmp_path / ids["bn", 0]
    shutil.copytree(runs / ids["bn", 0], unfinished)
    (tmp_path / "broken.npz").write_bytes(b"not a record")
    one = ids["source", 0]
    for other, words in (
        (ids["tent", 1], "of seed 1. Compare results that share a seed"),
        ("nothing", "no result 'nothing'; expected an id"),
        ("ffff0000", f"no finished result ffff0000 in {runs}"),
        (runs, "holds 3 finished results; expected an id"),
        (unfinished, "no finished result"),
        (tmp_path / "broken.npz", "broken.npz is not a record, or it is damaged"),
    ):
        assert_refused(tribe_command("diff", one, other, "--runs", runs), words)
    result = tribe_command("diff", "abcd", "abcd", "--runs", tmp_path / "none")
    assert "to find the result abcd in: --runs names it" in message(result)
