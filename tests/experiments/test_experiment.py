"""Experiments: an id for all that matters, and components that are built once."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

import tribe
from commands import succeeded, tribe_command
from grid import DATA, STREAM, run_experiment, small
from places import ROOT
from tribe.experiments.experiment import Experiment, difference
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import finished
from tribe.experiments.workbench import Workbench

pytestmark = [pytest.mark.usefixtures("few"), pytest.mark.filterwarnings("ignore:an imbalance of")]


@pytest.fixture(scope="module")
def workbench(few_digits):
    return Workbench(few_digits, device="cpu")


def test_the_id_is_a_hash_of_all_that_matters(workbench):
    one = small(workbench, "tribe")
    assert one == small(workbench, ComponentSpec("tribe", {"lr": 1e-3})), "a default that is given is the same"
    assert len({one, small(workbench, "tribe")}) == 1
    others = [
        small(workbench, ComponentSpec("tribe", {"lr": 2e-3})),
        small(workbench, "selftrain/tribe"),
        small(workbench, "tribe", batch=32),
        Experiment.of(
            ComponentSpec(DATA.name, {**DATA.fields, "seed": 1}), "compact", STREAM, "tribe", workbench=workbench
        ),
        Experiment.of(DATA, "compact", ComponentSpec("gli-v", STREAM.fields), "tribe", workbench=workbench),
    ]
    assert len({one.id, *(other.id for other in others)}) == 6
    assert len(one.id) == 16


def test_seeds_are_streams_of_one_experiment(workbench):
    one, other = small(workbench, seeds=(0, 1)), small(workbench, seeds=(2,))
    assert one.id == other.id
    assert one != other
    assert dataclasses.replace(one, seeds=(2,)) == other


def test_it_goes_through_json(workbench):
    one = small(workbench, "ttac", seeds=(3, 4))
    text = json.dumps(one.json())
    assert Experiment.from_json(json.loads(text), (3, 4)) == one
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
    more = small(Workbench(device="cpu", threads=torch.get_num_threads() + 1))
    assert [text.partition(" ")[0] for text in difference(small(workbench), more)] == ["threads"]
    with pytest.raises(ValueError, match="threads"):
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
    succeeded(tribe_command(*command))
    return Workbench(root, device="cpu")


def test_the_images_are_part_of_it(tmp_path):
    """Files of one name may hold other images; results of one are never taken for the other's."""
    data = ComponentSpec("mnist-c", {"corruptions": ["impulse_noise"]})
    one, other = (
        Experiment.of(data, "compact", STREAM, "source", workbench=made(tmp_path / str(seed), seed)) for seed in (0, 1)
    )
    (text,) = difference(one, other)
    assert text.startswith("images is ")
    errors = [run_experiment(e, tmp_path / "runs").error() for e in (one, other)]
    assert errors[0] != errors[1]
    read = Experiment.from_json(one.json())
    with pytest.raises(ValueError, match="cannot be computed here"):
        run_experiment(read, tmp_path / "elsewhere", workbench=Workbench(tmp_path / "1", "cpu"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sedes": [0]}, ["'sedes'"]),
        ({"precision": "half"}, ["precision is float32, tf32 or bf16"]),
        ({"method": {"nom": "tribe"}}, ["method.name is missing"]),
        ({"method": {"name": "tribe", "nom": 1}}, ["nom"]),
        ({"batch": "64"}, ["batch is '64'"]),
        ({"scenario": ["gli-f"]}, ["scenario is a list"]),
        ({"threads": 1.5}, ["threads is 1.5"]),
    ],
)
def test_a_wrong_spec_is_refused(workbench, change, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Experiment.from_json(small(workbench).json() | change)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("seeds", [(), (2, 0, 2), (0.5,)])
def test_wrong_seeds_are_refused(workbench, seeds):
    with pytest.raises(ValueError, match="seeds"):
        dataclasses.replace(small(workbench), seeds=seeds)


def test_a_component_with_an_unknown_field_is_refused(workbench):
    with pytest.raises(ValueError, match=r"'gama'.*gamma"):
        small(workbench, ComponentSpec("tribe", {"gama": 1}))
    with pytest.raises(ValueError, match="sewerity"):
        Experiment.of(ComponentSpec("live-mnist-c", {"sewerity": 1}), "compact", STREAM, "bn", workbench=workbench)


def test_components_are_built_once(workbench):
    """To read and check what a method knows of the source takes seconds with a large network."""
    streams = [ComponentSpec("gli-f", {"imbalance": factor}) for factor in (10, 100)]
    first, second = (
        workbench.build(DATA, ComponentSpec("compact"), stream, ComponentSpec("petal")) for stream in streams
    )
    assert first.method is second.method
    assert first.net is second.net
    assert first.stream is not second.stream
    other = workbench.build(DATA, ComponentSpec("compact"), streams[0], ComponentSpec("petal", {"spw": 0.0}))
    assert other.method != first.method
    assert other.stream is first.stream


def test_source_knowledge_of_two_files_makes_two_methods(workbench, tmp_path):
    """Specs name knowledge by its digest, so a sweep over files must not play the first for all."""
    knowledge = small(workbench, "petal").parts.method.knowledge
    experiments = []
    for scale in (1.0, 2.0):
        tensors = {name: scale * t for name, t in knowledge.tensors.items()}
        dataclasses.replace(knowledge, tensors=tensors, path=None).save(tmp_path / f"{scale}.safetensors")
        method = ComponentSpec("petal", {"knowledge": str(tmp_path / f"{scale}.safetensors")})
        experiments.append(small(workbench, method))
    assert experiments[0].id != experiments[1].id
    for e in experiments:
        assert e.parts.method.knowledge.digest == e.method.fields["knowledge"]["knowledge"]


def test_the_committed_results_have_the_ids_of_their_specs():
    packs = sorted((ROOT / "results").glob("*.jsonl"))
    lines = [json.loads(line) for pack in packs for line in pack.read_text().splitlines()]
    assert len(lines) >= 362  # none is lost
    for line in lines:
        assert Experiment.from_json(line["spec"]).id == line["id"]
    results = list(finished(ROOT / "results"))
    assert [result.experiment.id for result in results] == sorted({line["id"] for line in lines})
    assert sum(len(result.streams) for result in results) == len(lines)
