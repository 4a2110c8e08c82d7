"""Methods with a time filter wherever a command takes the name of a method."""

import json

import pytest

from commands import tribe_command, write_method
from tribe.cli.options import method_names
from tribe.experiments.bench import contenders
from tribe.experiments.experiment import Experiment
from tribe.experiments.parallel import custom_code
from tribe.experiments.provenance import code_at, from_file
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.workbench import MissingKnowledge, Workbench

DATA = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]})


@pytest.fixture(scope="module")
def workbench():
    return Workbench(device="cpu")


@pytest.fixture
def mine(tmp_path, registries):
    write_method("Mine", fields="rate: float = 0.1", folder=tmp_path)
    return tmp_path / "mine.py"


def planned(workbench, method, **fields):
    return Experiment.of(DATA, "compact", "iid", ComponentSpec(method, fields), workbench=workbench)


def test_a_custom_method_takes_a_filter_and_its_file_counts(mine, workbench):
    assert method_names(f"{mine}:Mine,{mine}:Mine+time,+tribe+cofa") == ["mine", "mine+time", "tribe+cofa"]
    experiment = planned(workbench, "mine+time", within="batch", rate=0.2)
    assert experiment.method.code == code_at(str(mine))
    (sent,) = custom_code(experiment)
    assert (sent.name, sent.attribute, sent.content) == ("mine", "Mine", mine.read_bytes())
    with pytest.raises(ValueError, match="did you mean 'time'"):
        method_names(f"{mine}:Mine+tiem")


def test_a_filter_from_a_file_counts_too(tmp_path, workbench, registries):
    file = tmp_path / "filters.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom tribe.filters import register\nfrom tribe.filters.cofa import Cofa\n\n"
        '@register("other")\n@dataclass(frozen=True)\nclass Other(Cofa):\n    """Another."""\n'
    )
    from_file(file, "custom_filters")
    assert planned(workbench, "bn+other").method.code == code_at(str(file))


@pytest.mark.parametrize("command", [("run", "--methods"), ("bench", "--model", "compact", "--methods")])
def test_a_misspelt_filter_is_named(command):
    result = tribe_command(*command, "tribe+tiem")
    assert result.exit_code == 2
    assert "time filter 'tiem': did you mean 'time'?" in result.stderr


def test_a_filter_is_measured_like_a_method():
    contenders.check_names(["tribe+time", "selftrain/robust-bn+cofa", "plain"])
    with pytest.raises(ValueError, match="unknown method 'plain\\+time'"):
        contenders.check_names(["plain+time"])


def test_source_knowledge_is_that_of_the_method_alone(workbench):
    fields = {name: planned(workbench, name).method.fields for name in ("eata", "eata+time")}
    assert fields["eata+time"]["knowledge"] == fields["eata"]["knowledge"]
    with pytest.raises(MissingKnowledge, match=r"tribe source ttac .*--set ttac\.statistics=frozen$"):
        planned(workbench, "ttac+time", statistics="frozen", within="batch")
    error = MissingKnowledge("why", "tribe source eata")
    assert str(MissingKnowledge.of_all([error, error])) == str(error)


def test_source_takes_the_name_with_a_filter(tmp_path):
    options = {"model": "compact", "dataset": "mnist", "images": 64, "out": tmp_path / "known.safetensors"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    made = tribe_command("source", "eata+time", *words, "--set", "dataset.split=test", "--json")
    assert json.loads(made.stdout)["method"] == "eata", made.output
