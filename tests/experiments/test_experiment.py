"""Experiments: a name for all that matters, results that are found again, and that survive kills and damage."""

import contextlib
import dataclasses
import fcntl
import json
import re
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import save_file

import tribe
from commands import tribe_command
from places import ROOT, TESTS
from processes import Process, ended
from tribe import metrics
from tribe.experiments.execution import run_experiment
from tribe.experiments.experiment import Experiment, MixedResults, difference, refuse_mixture
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import Damaged, NewerResults, find, finished, keep, load, survey, verify
from tribe.experiments.workbench import Workbench
from tribe.io.files import Busy
from tribe.methods.eata import Eata

GRID = TESTS / "grid.py"
DATA = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})
STREAM = ComponentSpec("gli-f", {"imbalance": 1_000_000})  # about 230 of 2,000 images

pytestmark = pytest.mark.filterwarnings("ignore:an imbalance of")


@pytest.fixture(scope="module")
def workbench(few_digits):
    return Workbench(few_digits, device="cpu")


@pytest.fixture(autouse=True)
def few(few_digits, monkeypatch):
    """No data but a few digits."""
    monkeypatch.setenv("TRIBE_DATA", few_digits)


def small(workbench, method="source", batch=16, **options):
    return Experiment.of(DATA, "compact", STREAM, method, workbench=workbench, batch=batch, **options)


@pytest.fixture(scope="module")
def result(workbench, tmp_path_factory):
    """TENT on two streams, never disturbed."""
    return run_experiment(small(workbench, "tent", seeds=(0, 1)), tmp_path_factory.mktemp("runs"), workbench=workbench)


def again(result, root):
    """The same results in another folder, to be harmed there."""
    folder = root / result.folder.name
    folder.mkdir()
    for path in result.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def never(*_):
    raise AssertionError("computed, although the results are there")


# -- what an experiment is --------------------------------------------------------------------------------------------


def test_the_id_is_a_hash_of_all_that_matters(workbench):
    one = small(workbench, "tribe")
    assert one == small(workbench, ComponentSpec("tribe", {"lr": 1e-3})), "a default that is said is the same"
    assert len({one, small(workbench, "tribe")}) == 1
    others = [
        small(workbench, ComponentSpec("tribe", {"lr": 2e-3})),
        small(workbench, "selftrain/tribe"),
        small(workbench, "tribe", seeds=(1,)),
        small(workbench, "tribe", batch=32),
        Experiment.of(
            ComponentSpec(DATA.name, {**DATA.fields, "seed": 1}), "compact", STREAM, "tribe", workbench=workbench
        ),
        Experiment.of(DATA, "compact", ComponentSpec("gli-v", STREAM.fields), "tribe", workbench=workbench),
    ]
    assert len({one.id, *(other.id for other in others)}) == 7
    assert len(one.id) == 16


def test_it_goes_through_json(workbench):
    one = small(workbench, "ttac", seeds=(3, 4))
    text = json.dumps(one.json())
    assert Experiment.from_json(json.loads(text)) == one
    assert "/" not in text.replace("://", ""), "no paths: where files lie is no part of it"
    assert one.json()["method"]["fields"]["knowledge"].keys() == {"knowledge"}


def test_weights_and_threads_are_part_of_it(workbench, tmp_path):
    net = tribe.models.load("compact", tribe.models.find("compact", "mnist", "nowhere"))
    next(net.parameters()).data.mul_(1.001)
    save_file(net.state_dict(), tmp_path / "other.safetensors")
    other = Workbench(device="cpu", weights={"compact": tmp_path / "other.safetensors"})
    texts = difference(small(workbench), small(other))
    assert len(texts) == 1
    assert texts[0].startswith("weights is ")
    assert small(workbench).threads == torch.get_num_threads()
    assert difference(small(workbench), small(Workbench(device="cpu", threads=2))) == ["threads is 1 and 2"]
    with pytest.raises(ValueError, match="threads is how many"):
        Workbench(threads=0)


def test_a_field_that_only_one_has_is_a_difference(workbench):
    """Even one that is None: it changes the id."""
    spec = small(workbench, "ttac").json()
    fields = spec["method"]["fields"]
    one, newer, other = (
        Experiment.from_json({**spec, "method": {"name": "ttac", "fields": {**fields, **change}}})
        for change in ({}, {"newer": None}, {"knowledge": None})
    )
    assert difference(one, one) == []
    assert difference(one, newer) == ["method.fields.newer is None and None"]
    assert difference(one, other) == [f"method.fields.knowledge is {fields['knowledge']} and None"]


def made(root, seed):
    """Corrupted digits on the disk: the same names for every seed."""
    command = ["corrupt", "mnist", "--corruptions", "impulse_noise", "--seed", str(seed), "--out", str(root)]
    assert tribe_command(*command).exit_code == 0
    return Workbench(root, device="cpu")


def test_the_images_are_part_of_it(tmp_path):
    """Files of one name may hold other images; results of one are never taken for the other's."""
    data = ComponentSpec("mnist-c", {"corruptions": ["impulse_noise"]})
    one, other = (
        Experiment.of(data, "compact", STREAM, "source", workbench=made(tmp_path / str(seed), seed)) for seed in (0, 1)
    )
    (text,) = difference(one, other)
    assert text.startswith("images is ")
    errors = [
        run_experiment(e, tmp_path / "runs", workbench=Workbench(tmp_path / str(i), "cpu")).error()
        for i, e in enumerate((one, other))
    ]
    assert errors[0] != errors[1]
    with pytest.raises(ValueError, match="cannot be computed here, where something differs: images is"):
        run_experiment(one, tmp_path / "elsewhere", workbench=Workbench(tmp_path / "1", "cpu"))
    (tmp_path / "0/mnist_c/made.json").unlink()  # as a published archive comes: looked at, not trusted by its name
    (tmp_path / "1/mnist_c/made.json").unlink()
    looked = [Workbench(tmp_path / str(seed), "cpu").fingerprint(data) for seed in (0, 1)]
    assert len({*looked, one.images, other.images}) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sedes": [0]}, ["no field 'sedes'", "seeds"]),
        ({"seeds": []}, ["seeds are different integers"]),
        ({"seeds": [2, 0, 2]}, ["seeds are different integers", "[2, 0, 2]"]),
        ({"precision": "half"}, ["precision is float32, tf32 or bf16"]),
        ({"method": {"nom": "tribe"}}, ["method.name is missing; expected text"]),
        ({"method": {"name": "tribe", "nom": 1}}, ["no experiment"]),
        ({"batch": "64"}, ["batch is '64'; expected an integer"]),
        ({"seeds": {"0": 1}}, ["seeds is an object of 1; expected a list"]),
        ({"scenario": ["gli-f"]}, ["scenario is a list of 1; expected an object"]),
        ({"threads": 1.5}, ["threads is 1.5; expected an integer or null"]),
    ],
)
def test_a_wrong_spec_is_refused(workbench, change, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Experiment.from_json(small(workbench).json() | change)
    for word in words:
        assert word in str(caught.value)


def test_a_component_with_an_unknown_field_is_refused(workbench):
    with pytest.raises(ValueError, match=r"no field 'gama'.*gamma"):
        small(workbench, ComponentSpec("tribe", {"gama": 1}))
    with pytest.raises(ValueError, match="no field 'sewerity'"):
        Experiment.of(ComponentSpec("live-mnist-c", {"sewerity": 1}), "compact", STREAM, "bn", workbench=workbench)


def test_what_differs_here_is_named(workbench, tmp_path):
    spec = small(workbench).json()
    elsewhere = Experiment.from_json(spec | {"weights": "0" * 32})
    with pytest.raises(ValueError, match=r"cannot be computed here.*weights is '0000"):
        run_experiment(elsewhere, tmp_path, workbench=workbench)


# -- what it leaves ---------------------------------------------------------------------------------------------------


def test_the_layout(result):
    names = {path.name for path in result.folder.iterdir()}
    assert names == {"spec.json", "record-0.npz", "record-1.npz", "metrics.json", "environment.json", ".lock"}
    assert result.folder.name == result.experiment.id
    content = json.loads((result.folder / "spec.json").read_text())
    assert Experiment.from_json(content["spec"]) == result.experiment
    for record in result.records():
        scores = result.metrics[str(record.spec["seed"])]
        assert record.spec["experiment"] == result.experiment.id
        assert scores["images"] == len(record.label)
        assert scores["instance_error"] == metrics.instance_error(record).item()
        assert scores["domain_error"] == {"impulse_noise@5": metrics.domain_error(record).item()}
        assert scores["class_counts"] == {"impulse_noise@5": metrics.class_counts(record)[0].tolist()}
    assert result.values("domain_error", "impulse_noise") == result.values("instance_error")
    assert result.error() == pytest.approx(sum(result.values("instance_error")) / 2)
    assert result.environment["machine"]["torch"] == torch.__version__
    assert result.environment["seconds"] > 0


def test_what_is_there_is_not_computed_again(result, workbench):
    found = run_experiment(result.experiment, result.folder.parent, workbench=workbench, progress=never)
    assert found.metrics == result.metrics
    assert [r.experiment.id for r in finished(result.folder.parent)] == [result.experiment.id]
    assert list(finished("nowhere")) == []


class Stopped(Exception):
    pass


def test_it_goes_on_in_the_middle_of_the_stream_and_ends_with_the_same_numbers(result, workbench, tmp_path):
    steps = []

    def stop(done, of, wrong):
        steps.append(done)
        if len(steps) == 11:
            raise Stopped

    with pytest.raises(Stopped):
        run_experiment(result.experiment, tmp_path, workbench=workbench, progress=stop, every=4)
    folder = tmp_path / result.experiment.id
    assert (folder / "checkpoint.safetensors").is_file()
    with pytest.raises(FileNotFoundError):
        load(folder)
    assert list(finished(tmp_path)) == []
    resumed = run_experiment(result.experiment, tmp_path, workbench=workbench, progress=stop, every=4)
    assert steps[11] == 9, "after the checkpoint of batch 8"
    assert (folder / "metrics.json").read_bytes() == (result.folder / "metrics.json").read_bytes()
    for one, other in zip(resumed.records(), result.records(), strict=True):
        assert torch.equal(one.prediction, other.prediction)
        assert torch.equal(one.confidence, other.confidence)
    assert not (folder / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("harm", ["cut short", "a flipped byte", "of another experiment"])
def test_a_damaged_record_is_named_set_aside_and_computed_again(result, workbench, tmp_path, harm):
    folder = again(result, tmp_path)
    path = folder / "record-1.npz"
    bad = bytearray(path.read_bytes())
    if harm == "of another experiment":
        bad = (folder / "record-0.npz").read_bytes()
    elif harm == "cut short":
        bad = bad[:-100]
    else:
        bad[len(bad) // 2] ^= 0xFF
    path.write_bytes(bad)
    with pytest.warns(UserWarning, match=r"record-1.npz.*set aside as record-1.npz.damaged-1"):
        repaired = run_experiment(result.experiment, tmp_path, workbench=workbench)
    assert (folder / "record-1.npz.damaged-1").read_bytes() == bad, "nothing is lost"
    assert repaired.metrics == result.metrics
    assert run_experiment(result.experiment, tmp_path, workbench=workbench, progress=never).metrics == result.metrics


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"seeds": {}}', "changed"])
def test_metrics_are_made_again_from_the_records(result, workbench, tmp_path, content):
    path = again(result, tmp_path) / "metrics.json"
    whole = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(whole.replace(b'"images": 2', b'"images": 1') if content == "changed" else content)
        assert path.read_bytes() != whole
    run_experiment(result.experiment, tmp_path, workbench=workbench, progress=never)
    assert path.read_bytes() == whole


def test_load_trusts_the_metrics_and_verify_computes_them_again(result, tmp_path):
    folder = again(result, tmp_path)
    path = folder / "metrics.json"
    verify(load(folder))
    path.write_bytes(path.read_bytes().replace(b'"images": 2', b'"images": 1'))
    changed = load(folder)
    assert changed.metrics != result.metrics
    assert find(result.experiment, tmp_path) is not None
    assert find(result.experiment, tmp_path, verified=True) is None
    with pytest.raises(ValueError, match=r"are not those that its metrics\.json is of"):
        verify(changed)


def test_the_json_files_alone_are_a_result(result, workbench, tmp_path):
    folder = again(result, tmp_path)
    for path in folder.glob("record-*"):
        path.unlink()
    found = run_experiment(result.experiment, tmp_path, workbench=workbench, progress=never)
    assert found.metrics == result.metrics
    assert not found.has_records
    with pytest.raises(FileNotFoundError, match="no record at"):
        found.records()


def test_one_record_of_two_is_not_whole(result, workbench, tmp_path):
    folder = again(result, tmp_path)
    (folder / "record-0.npz").unlink()
    assert find(result.experiment, tmp_path, verified=True) is None
    assert run_experiment(result.experiment, tmp_path, workbench=workbench).metrics == result.metrics
    assert (folder / "record-0.npz").is_file()


def test_a_kill_after_a_record_was_set_aside_does_not_lose_it(result, workbench, tmp_path):
    """Else the metrics, alone, would pass for a result that is kept without its records."""
    folder = again(result, tmp_path)
    for path in folder.glob("record-*"):
        path.write_bytes(b"torn")

    def stop(*_):
        raise Stopped

    with pytest.raises(Stopped), pytest.warns(UserWarning, match="set aside"):
        run_experiment(result.experiment, tmp_path, workbench=workbench, progress=stop)
    assert find(result.experiment, tmp_path, verified=True) is None
    assert run_experiment(result.experiment, tmp_path, workbench=workbench).metrics == result.metrics
    assert len(list(folder.glob("record-*.npz"))) == 2


def test_sums_may_round_otherwise_on_another_processor(result, workbench, tmp_path):
    path = again(result, tmp_path) / "metrics.json"
    content = json.loads(path.read_text())
    content["seeds"]["0"]["calibration_error"] *= 1 + 1e-12
    path.write_text(json.dumps(content))
    assert find(result.experiment, tmp_path, verified=True) is not None
    content["seeds"]["0"]["calibration_error"] *= 1 + 1e-6
    path.write_text(json.dumps(content))
    assert find(result.experiment, tmp_path, verified=True) is None


def test_a_record_with_any_damaged_byte_is_whole_or_refused(result, tmp_path):
    folder = again(result, tmp_path)
    path, whole = folder / "record-0.npz", (folder / "record-0.npz").read_bytes()
    sound = result.records()[0]
    refused = 0
    for place in range(0, len(whole), len(whole) // 300):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            record = load(folder).records()[0]
            assert torch.equal(record.prediction, sound.prediction)
        except ValueError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("content", [None, b"{"])
def test_a_lost_environment_is_no_reason_to_compute_again(result, workbench, tmp_path, content):
    path = again(result, tmp_path) / "environment.json"
    path.unlink() if content is None else path.write_bytes(content)
    with contextlib.nullcontext() if content is None else pytest.warns(UserWarning, match="environment.json.damaged-1"):
        found = run_experiment(result.experiment, tmp_path, workbench=workbench, progress=never)
    assert found.values("seconds_per_image") == result.values("seconds_per_image")
    assert found.environment["machine"] == {}


def test_records_that_cannot_be_written_do_not_cost_the_run(result, workbench, tmp_path):
    """A disk may be full at the last moment; here a folder is where a record belongs."""
    folder, first, second = tmp_path / result.experiment.id, [], []
    (folder / "record-1.npz").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        run_experiment(
            result.experiment, tmp_path, workbench=workbench, every=3, progress=lambda done, *_: first.append(done)
        )
    (folder / "record-1.npz").rmdir()
    written = run_experiment(
        result.experiment, tmp_path, workbench=workbench, every=3, progress=lambda done, *_: second.append(done)
    )
    assert second == first[len(first) // 3 * 3 :], "what came after the last checkpoint"
    assert written.metrics == result.metrics
    assert not (folder / "checkpoint.safetensors").exists()


def test_a_kill_after_the_records_were_written_leaves_no_checkpoint_behind(result, workbench, tmp_path):
    folder = again(result, tmp_path)
    (folder / "metrics.json").unlink()
    (folder / "checkpoint.safetensors").write_bytes(b"of the same run")
    assert run_experiment(result.experiment, tmp_path, workbench=workbench, progress=never).metrics == result.metrics
    assert not (folder / "checkpoint.safetensors").exists()


def test_a_flipped_bit_in_a_checkpoint_changes_no_number(result, workbench, tmp_path):
    def stop(done, of, wrong):
        if done == 9:
            raise Stopped

    with pytest.raises(Stopped):
        run_experiment(result.experiment, tmp_path, workbench=workbench, progress=stop, every=4)
    path = tmp_path / result.experiment.id / "checkpoint.safetensors"
    bad = bytearray(path.read_bytes())
    bad[-5] ^= 0x40
    path.write_bytes(bad)
    with pytest.warns(UserWarning, match=r"damaged.*set aside as checkpoint.safetensors.damaged-1"):
        computed = run_experiment(result.experiment, tmp_path, workbench=workbench)
    assert computed.metrics == result.metrics
    assert path.with_name(f"{path.name}.damaged-1").read_bytes() == bad, "nothing is lost"


def test_a_damaged_checkpoint_is_set_aside(workbench, tmp_path):
    experiment = small(workbench)
    folder = tmp_path / experiment.id
    folder.mkdir()
    (folder / "checkpoint.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="checkpoint.safetensors.damaged-1"):
        run_experiment(experiment, tmp_path, workbench=workbench)
    assert (folder / "checkpoint.safetensors.damaged-1").read_bytes() == b"torn"


def test_a_damaged_spec_is_set_aside(result, workbench, tmp_path):
    folder = again(result, tmp_path)
    (folder / "spec.json").write_text("{")
    with pytest.raises(ValueError, match=r"spec.json is damaged"):
        load(folder)
    with pytest.warns(UserWarning, match="spec.json.damaged-1"):
        assert (
            run_experiment(result.experiment, tmp_path, workbench=workbench, progress=never).metrics == result.metrics
        )


def test_results_of_a_newer_version_are_refused_and_left_alone(result, workbench, tmp_path):
    folder = again(result, tmp_path)
    content = json.loads((folder / "spec.json").read_text()) | {"schema": 3, "new": True}
    (folder / "spec.json").write_text(json.dumps(content))
    (folder / "record-0.npz").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for use in (lambda: run_experiment(result.experiment, tmp_path, workbench=workbench), lambda: load(folder)):
        with pytest.raises(NewerResults, match="newer version of tribe"):
            use()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_results_of_an_older_version_say_what_to_do(result, tmp_path):
    folder = again(result, tmp_path)
    content = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps(content | {"schema": 1}))
    with pytest.raises(ValueError, match=r"older version of tribe .* did not say on which images: move it"):
        load(folder)


def test_a_folder_under_another_name_is_refused(result, tmp_path):
    folder = again(result, tmp_path).rename(tmp_path / "mine")
    with pytest.raises(ValueError, match="give the folder its name back"):
        load(folder)


# -- in bfloat16 ------------------------------------------------------------------------------------------------------


def test_bf16_is_a_network_of_bfloat16_and_a_precision_of_its_own(workbench, tmp_path):
    experiment = small(workbench, "tent", precision="bf16")
    whole = small(workbench, "tent")
    assert difference(experiment, whole) == ["precision is 'bf16' and 'float32'"], "the weights are those of float32"
    (record,) = run_experiment(experiment, tmp_path, workbench=workbench).records()
    net = tribe.models.load("compact", tribe.models.find("compact", "mnist", "nowhere"))
    rounded, method = tribe.Backbone(net).to(torch.bfloat16), tribe.methods.create("tent", classes=10)
    (expected,) = tribe.run(rounded, method, experiment.stream(workbench))
    assert torch.equal(record.prediction, expected.prediction)
    assert torch.equal(record.confidence, expected.confidence)
    (plain,) = run_experiment(whole, tmp_path, workbench=workbench).records()
    assert not torch.equal(record.confidence, plain.confidence)
    assert metrics.instance_error(record).item() == pytest.approx(metrics.instance_error(plain).item(), abs=0.02)


def test_tf32_on_a_cpu_is_float32(workbench):
    assert small(workbench, precision="tf32") == small(workbench)


@pytest.mark.parametrize("method", ["eata", "ttac", "petal"])
def test_source_knowledge_of_a_network_serves_its_bf16_self(workbench, tmp_path, method):
    experiment = Experiment.of(
        DATA,
        "compact",
        ComponentSpec("gli-f", {"imbalance": 1e9, "sigma": 1.0}),
        method,
        precision="bf16",
        workbench=workbench,
    )
    calls = []

    def stop(done, of, wrong):
        calls.append(done)
        raise Stopped

    with pytest.raises(Stopped):  # after a step: all its parts were there
        run_experiment(experiment, tmp_path, workbench=workbench, progress=stop)
    assert calls == [1]


def test_a_bf16_run_goes_on_from_its_checkpoint(workbench, tmp_path):
    experiment = small(workbench, "tribe", precision="bf16")
    never_stopped = run_experiment(experiment, tmp_path / "whole", workbench=workbench)

    def stop(done, of, wrong):
        if done == 7:
            raise Stopped

    with pytest.raises(Stopped):
        run_experiment(experiment, tmp_path / "cut", workbench=workbench, progress=stop, every=3)
    resumed = run_experiment(experiment, tmp_path / "cut", workbench=workbench, every=3)
    (one,), (other,) = never_stopped.records(), resumed.records()
    assert torch.equal(one.confidence, other.confidence)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_kept_results_are_packed_and_read_as_folders_are(result, workbench, tmp_path):
    runs, target = tmp_path / "runs", tmp_path / "kept"
    runs.mkdir()
    again(result, runs)
    other = run_experiment(small(workbench), runs, workbench=workbench)
    (runs / "unfinished").mkdir()
    (runs / "unfinished" / "spec.json").write_text("{}")
    kept = {found.experiment: found for found in keep(runs, target)}
    assert kept.keys() == {result.experiment, other.experiment}
    pack = target / "live-mnist-c-cpu.jsonl"
    assert {path.name for path in target.iterdir()} == {".lock", pack.name}
    lines = pack.read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == sorted([result.experiment.id, other.experiment.id])
    for one in (result, other):
        found = load(target / one.experiment.id)
        assert not found.has_records
        assert (found.experiment, found.metrics) == (one.experiment, one.metrics)
        assert {"schema": 2, "id": one.experiment.id, **found.environment} == one.environment
        assert run_experiment(one.experiment, target, workbench=workbench, progress=never).metrics == one.metrics
    stamp = pack.stat().st_mtime_ns
    keep(runs, target)
    assert pack.stat().st_mtime_ns == stamp, "results do not change"


@pytest.mark.parametrize(
    "harm", [lambda line: line[:-40], lambda line: line.replace('"batch":16', '"batch":32'), lambda line: line[:15]]
)
def test_a_damaged_line_of_a_pack_is_named_and_replaced(result, workbench, tmp_path, harm):
    runs, target = tmp_path / "runs", tmp_path / "kept"
    runs.mkdir()
    again(result, runs)
    other = run_experiment(small(workbench), runs, workbench=workbench)
    keep(runs, target)
    pack = target / "live-mnist-c-cpu.jsonl"
    lines = pack.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if result.experiment.id in line)
    bad = harm(lines[number])
    pack.write_text("".join(f"{bad if i == number else line}\n" for i, line in enumerate(lines)))
    (damaged,) = [found for found in survey(target) if isinstance(found, Damaged)]
    assert f"{pack}, line {number + 1}" in str(damaged.error)
    assert find(result.experiment, target) is None
    assert find(other.experiment, target) is not None
    with pytest.raises(ValueError, match=re.escape(str(pack))):
        list(finished(target))
    assert len(keep(runs, target, damaged="skip")) == 2
    assert bad in pack.read_text().splitlines() or len(bad) > 40, "a line without an id is left as it is"
    assert find(result.experiment, target).metrics == result.metrics


def test_the_committed_results_have_the_ids_of_their_specs():
    packs = sorted((ROOT / "results").glob("*.jsonl"))
    lines = [json.loads(line) for pack in packs for line in pack.read_text().splitlines()]
    assert len(lines) >= 304  # none is lost
    for line in lines:
        assert Experiment.from_json(line["spec"]).id == line["id"]
    assert [found.experiment.id for found in finished(ROOT / "results")] == sorted(line["id"] for line in lines)


def test_the_committed_results_say_what_they_ran_before_a_field_was_added():
    found = [found.experiment for found in finished(ROOT / "results")]
    values = {
        name: {e.method.fields[field] for e in found if e.method.name == name}
        for name, field in (("eata", "fisher"), ("note", "every"))
    }
    assert values == {"eata": {"sum"}, "note": {None}}


@pytest.mark.parametrize("name", ["eata", "eata+time"])
def test_a_field_that_was_added_changes_the_id_only_where_it_changes_the_method(workbench, name):
    usual, before = small(workbench, name), small(workbench, ComponentSpec(name, {"fisher": "sum"}))
    assert difference(usual, before) == ["method.fields.fisher is 'mean' and 'sum'"]
    assert usual.id != before.id
    old = before.json()
    del old["method"]["fields"]["fisher"]  # as a version without the field wrote it
    assert Experiment.from_json(old).id == before.id
    assert Experiment.from_json(old).json() == before.json()
    assert Experiment.from_json(usual.json()).id == usual.id
    assert (
        tribe.methods.get_fields(
            workbench.prepare(before.dataset, before.model, before.scenario, before.method).method
        )["fisher"]
        == "sum"
    )


def test_the_id_of_a_custom_method_does_not_depend_on_what_is_imported(workbench):
    """Catches fields that are left out only where the class says so: a process that reads results may not have it."""
    spec = small(workbench, ComponentSpec("eata", {"fisher": "sum"})).json()
    spec["method"] |= {"name": "mine", "code": "c0de"}
    there = Experiment.from_json(spec).id

    @tribe.methods.register("mine")
    class Mine(Eata):
        pass

    try:
        assert Experiment.from_json(spec).id == there
        assert Experiment.from_json(spec).json() == spec
    finally:
        tribe.methods.registry._classes.pop("mine", None)


def test_an_older_result_is_found_and_computed_as_it_was(workbench, tmp_path):
    experiment = small(workbench, ComponentSpec("eata", {"fisher": "sum"}))
    result = run_experiment(experiment, tmp_path / "new", workbench=workbench)
    path = result.folder / "spec.json"
    older = json.loads(path.read_text())
    del older["spec"]["method"]["fields"]["fisher"]
    path.write_text(json.dumps(older))
    assert find(experiment, tmp_path / "new", verified=True) is not None
    assert find(small(workbench, "eata"), tmp_path / "new") is None
    again = run_experiment(Experiment.from_json(older["spec"]), tmp_path / "again", workbench=workbench)
    assert again.metrics == result.metrics


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in ("metrics", "environment", "spec") for content in ("{", "[]")),
        ("metrics", "{}"),
        ("spec", '{"format": "tribe-experiment", "schema": 2}'),
        ("spec", '{"format": "tribe-experiment", "schema": 99}'),
    ],
)
def test_damaged_results_are_reported_beside_sound_ones(result, workbench, tmp_path, name, content):
    runs = tmp_path / "runs"
    runs.mkdir()
    torn = again(result, runs)
    whole = run_experiment(small(workbench), runs, workbench=workbench)
    (torn / f"{name}.json").write_text(content)
    (damaged,) = [found for found in survey(runs) if isinstance(found, Damaged)]
    assert damaged.folder == torn
    assert damaged.experiment == (None if name == "spec" else result.experiment)
    assert str(torn) in str(damaged.error)
    assert [r.experiment for r in finished(runs, damaged="skip")] == [whole.experiment]
    for refused in (lambda: list(finished(runs)), lambda: keep(runs, tmp_path / "kept")):
        with pytest.raises(ValueError, match=re.escape(str(torn))):
            refused()
    assert [r.experiment for r in keep(runs, tmp_path / "kept", damaged="skip")] == [whole.experiment]


def test_a_method_is_built_once_for_all_streams(workbench):
    """To read and check what a method knows of the source takes seconds with a large network."""
    streams = [ComponentSpec("gli-f", {"imbalance": factor}) for factor in (10, 100)]
    first, second = (
        workbench.prepare(DATA, ComponentSpec("compact"), stream, ComponentSpec("petal")).method for stream in streams
    )
    assert first is second
    other = workbench.prepare(DATA, ComponentSpec("compact"), streams[0], ComponentSpec("petal", {"spw": 0.0})).method
    assert other != first


def test_source_knowledge_of_two_files_makes_two_methods(workbench, tmp_path):
    """Specs name knowledge by its digest, so a sweep over files must not play the first for all."""
    first = small(workbench, "petal")
    known = workbench.prepare(first.dataset, first.model, first.scenario, first.method).method.knowledge
    experiments = []
    for scale in (1.0, 2.0):
        tensors = {name: scale * t for name, t in known.tensors.items()}
        dataclasses.replace(known, tensors=tensors, path=None).save(tmp_path / f"{scale}.safetensors")
        method = ComponentSpec("petal", {"knowledge": str(tmp_path / f"{scale}.safetensors")})
        experiments.append(small(workbench, method))
    assert experiments[0].id != experiments[1].id
    for e in experiments:
        built = workbench.prepare(e.dataset, e.model, e.scenario, e.method).method
        assert built.knowledge.digest == e.method.fields["knowledge"]["knowledge"]


# -- one writer -------------------------------------------------------------------------------------------------------


def test_the_second_process_gets_busy_or_waits(workbench, tmp_path):
    experiment = small(workbench)
    folder = tmp_path / experiment.id
    folder.mkdir()
    hold = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'wb')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Busy, match="another process is computing"):
            run_experiment(experiment, tmp_path, workbench=workbench, wait=False)
        assert not (folder / "spec.json").exists(), "nothing was written"
        waiting = threading.Thread(target=run_experiment, args=(experiment, tmp_path), kwargs={"workbench": workbench})
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        other.stdin.close()
        waiting.join(60)
    assert find(experiment, tmp_path, verified=True) is not None
    with (folder / ".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go


def test_two_processes_that_race_compute_each_experiment_once(tmp_path):
    processes = [Process(GRID, tmp_path, 2) for _ in range(2)]
    assert [process.end().code for process in processes] == [0, 0]
    assert len(list(finished(tmp_path))) == 2
    assert not list(tmp_path.glob("*/*.damaged-*"))


def killed_grid(root, specs, points):
    for runs, kills in (("whole", ()), ("killed", points)):
        done = ended(GRID, root / runs, specs, *kills)
        assert done.code == 0, done.err
    whole, killed = (sorted(finished(root / runs), key=lambda r: r.experiment.id) for runs in ("whole", "killed"))
    assert [r.experiment for r in whole] == [r.experiment for r in killed]
    assert len(whole) == specs
    for one, other in zip(whole, killed, strict=True):
        assert (one.folder / "metrics.json").read_bytes() == (other.folder / "metrics.json").read_bytes()
        for a, b in zip(one.records(), other.records(), strict=True):
            assert torch.equal(a.prediction, b.prediction)
            assert torch.equal(a.confidence, b.confidence)
    assert not list(root.glob("killed/*/*.damaged-*"))
    assert not list(root.glob("killed/*/checkpoint.safetensors"))


def test_a_grid_that_is_killed_ends_with_the_same_numbers(tmp_path):
    killed_grid(tmp_path, 2, ("spec.json:1", "checkpoint:2", "record-:1", "metrics.json:1"))


@pytest.mark.slow
def test_a_grid_of_twelve_that_is_killed_twenty_times_ends_with_the_same_numbers(tmp_path):
    """A round of four kills ends two experiments, so five rounds fit: each second one, a method with a state that
    grows, is killed between checkpoints."""
    killed_grid(tmp_path, 12, ("spec.json:1", "metrics.json:1", "checkpoint:2", "record-:1") * 5)


# -- tables -----------------------------------------------------------------------------------------------------------


def test_results_of_different_specs_are_never_mixed(workbench):
    rows = {"TEST": small(workbench), "TRIBE": small(workbench, "tribe")}
    refuse_mixture(rows)
    with pytest.raises(MixedResults, match=r"TEST and BN do not belong .* seeds is \[0\] and \[1\]"):
        refuse_mixture({**rows, "BN": small(workbench, "bn", seeds=(1,))})
    tail = ComponentSpec("gli-f", {"imbalance": 10})
    other = Experiment.of(DATA, "compact", tail, "bn", batch=16, workbench=workbench)
    with pytest.raises(MixedResults, match=r"scenario.fields.imbalance is 1000000 and 10"):
        refuse_mixture({**rows, "BN": other})
    refuse_mixture({**rows, "BN": other}, varying=("method", "scenario.fields.imbalance"))
    with pytest.raises(MixedResults, match=r"method.fields.lr"):
        refuse_mixture(
            {"a": small(workbench, "tent"), "b": small(workbench, ComponentSpec("tent", {"lr": 1.0}))}, varying=()
        )


def test_the_code_of_a_custom_method_is_part_of_the_id(workbench, tmp_path):
    text = (
        "from tribe.methods.source import Source\nfrom tribe.methods import register\n"
        "@register('mine')\nclass Mine(Source):\n    pass\n"
    )
    path = tmp_path / "mine_method.py"
    path.write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        import mine_method  # noqa: F401

        first = small(workbench, "mine")
        path.write_text(text + "# changed\n")
        second = small(workbench, "mine")
    finally:
        sys.path.remove(str(tmp_path))
        tribe.methods.registry._classes.pop("mine", None)
    assert [text.partition(" ")[0] for text in difference(first, second)] == ["method.code"]
    assert Experiment.from_json(second.json()) == second
