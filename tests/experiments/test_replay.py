"""A filter over kept outputs gives the records of the method with the filter, bit for bit."""

from dataclasses import dataclass

import pytest
import torch

from grid import Stopped, same, stop_at
from tribe import filters, methods
from tribe.core.backbone import Backbone
from tribe.data.scenarios import Scenario, Schedule, create
from tribe.experiments.record import Record
from tribe.experiments.replay import replay
from tribe.experiments.runner import CHECKPOINT, run
from tribe.experiments.stream import Stream
from tribe.io import tensors as tensor_file
from tribe.io.states import StateFileError
from tribe.testing import CLASSES, SIZE, ready, small_network


class Bursts:
    """Two domains of images in which every class comes in bursts of ten; one image cannot be read."""

    classes = tuple("abcd")
    domains = ("fog@5", "snow@5")

    def labels(self, domain):
        return torch.arange(60 if domain == "fog@5" else 50) // 10 % CLASSES

    def images(self, domain, index):
        generator = torch.Generator().manual_seed(len(domain))
        x = torch.rand(60, 3, SIZE, SIZE, generator=generator)
        x += self.labels("fog@5").view(-1, 1, 1, 1) / CLASSES
        x[23] = torch.nan
        return x[index]


@dataclass(frozen=True)
class Uneven(Scenario):
    """Streams of different length, which reset at different images."""

    def schedule(self, labels, seed):
        length = 50 - 21 * seed
        reset = torch.arange(length) == 20 + 4 * seed
        return Schedule(torch.zeros(length, dtype=torch.int64), torch.arange(length), reset)


PROTOCOLS = {"fully": create("fully"), "gli-f": create("gli-f", imbalance=4.0), "uneven": Uneven()}


def play(method, scenario="uneven", **options):
    stream = Stream(Bursts(), PROTOCOLS[scenario], (0, 1), batch=16)
    return run(Backbone(small_network()), method, stream, **options)


ALWAYS = {"evidence_on": 0.0, "evidence_drift": 0.0}  # short streams give little evidence
CASES = [
    ("tribe", filters.create("time", **ALWAYS), "fully"),
    ("tribe", filters.create("time", within="batch", **ALWAYS), "fully"),
    ("lame", filters.create("cofa"), "fully"),
    ("lame", filters.create("time", within="batch", **ALWAYS), "uneven"),
    ("tent", filters.create("time", **ALWAYS), "uneven"),
    ("bn", filters.create("cofa"), "gli-f"),
    ("source", filters.create("time"), "gli-f"),
]


@pytest.mark.parametrize(("name", "rule", "scenario"), CASES, ids=lambda part: getattr(part, "name", part))
def test_a_replay_gives_the_records_of_a_run_with_the_filter(name, rule, scenario):
    inner = ready(name)
    alone = play(inner, scenario, keep_outputs=True)
    expected, found = play(methods.Pipeline(inner, filter=rule), scenario), replay(alone, rule)
    assert same(expected, found)
    assert [record.spec for record in found] == [record.spec for record in expected]
    assert not same(alone, found) or name == "source"
    assert all((new.seconds > old.seconds).all() for new, old in zip(found, alone, strict=True))


@pytest.mark.parametrize("within", ["past", "batch"])
def test_a_run_that_was_stopped_keeps_the_same_outputs(tmp_path, within):
    """Outputs before the checkpoint come from the file; a run that keeps none takes the same file."""
    file, rule = tmp_path / "run.safetensors", filters.create("time", within=within, **ALWAYS)
    whole = play(ready("tent"), keep_outputs=True)
    with pytest.raises(Stopped):
        play(ready("tent"), keep_outputs=True, checkpoint=file, every=3, progress=stop_at(4))
    copied = file.read_bytes()
    resumed = play(ready("tent"), keep_outputs=True, checkpoint=file)
    assert same(replay(whole, rule), replay(resumed, rule))
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one.outputs.values, other.outputs.values)
        assert torch.equal(one.outputs.valid, other.outputs.valid)
    file.write_bytes(copied)
    assert same(play(ready("tent"), checkpoint=file), whole)


def test_a_checkpoint_without_outputs_or_of_other_classes_is_refused(tmp_path):
    file = tmp_path / "run.safetensors"
    play(ready("tent"), checkpoint=file, every=3, keep_checkpoint=True)
    with pytest.raises(StateFileError, match="did not keep outputs"):
        play(ready("tent"), checkpoint=file, keep_outputs=True)
    file.unlink()
    play(ready("tent"), checkpoint=file, every=3, keep_checkpoint=True, keep_outputs=True)
    header, tensors = tensor_file.read(file, CHECKPOINT)
    wider = {n: torch.cat((t, t[:, :1]), 1) if n.endswith("values") else t for n, t in tensors.items()}
    tensor_file.write(file, CHECKPOINT, header, wider)
    with pytest.raises(StateFileError, match="5 classes"):
        play(ready("tent"), checkpoint=file, keep_outputs=True)
    shorter = tensors | {"record.1.outputs.values": tensors["record.1.outputs.values"][1:]}
    tensor_file.write(file, CHECKPOINT, header, shorter)
    with pytest.raises(StateFileError, match=r"record\.1\.outputs\.values"):
        play(ready("tent"), checkpoint=file, keep_outputs=True)


def test_records_without_outputs_are_refused_in_words(tmp_path):
    records = play(ready("source"), keep_outputs=True)
    records[0].save(tmp_path / "record.npz")
    with pytest.raises(ValueError, match=r"keep_outputs=True.*tribe run --logits.*Record\.save\(path, outputs=True\)"):
        replay([Record.load(tmp_path / "record.npz")], filters.create("cofa"))
    assert replay([], filters.create("cofa")) == []


def test_a_record_that_is_filtered_already_is_refused():
    words = r"of source\+time, which has a time filter already: replay a filter over a record of source$"
    filtered = play(ready("source+time"), keep_outputs=True)
    again = replay(play(ready("source"), keep_outputs=True), filters.create("time"))
    for records in (filtered, again):
        with pytest.raises(ValueError, match=words):
            replay(records, filters.create("cofa"))
