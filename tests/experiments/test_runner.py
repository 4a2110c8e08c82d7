"""Streams and the loop: what is played, what is written down, and how it goes on after being stopped."""

import threading
from dataclasses import dataclass

import pytest
import torch

from grid import Stopped, same, stop_at
from tribe import methods, metrics
from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.data.scenarios import Scenario, Schedule, create
from tribe.experiments.runner import CHECKPOINT, run
from tribe.experiments.stream import Stream
from tribe.io import tensors as tensor_file
from tribe.io.files import CannotWrite
from tribe.io.states import StateFileError
from tribe.testing import CLASSES, SIZE, ready, small_network


class Memory:
    """Two domains of images that tell where they come from: pixel 0 holds the domain, pixel 1 the position."""

    classes = tuple("abcd")
    domains = ("fog@5", "snow@5")

    def __init__(self, size=50):
        self.y = torch.arange(size) % CLASSES
        self.reads = []

    def labels(self, domain):
        return self.y

    def images(self, domain, index):
        self.reads.append(len(index))
        generator = torch.Generator().manual_seed(len(domain))
        x = torch.rand(len(self.y), 3, SIZE, SIZE, generator=generator)[index]
        x[:, 0, 0, 0] = self.domains.index(domain)
        x[:, 0, 0, 1] = index / 100
        return x


@dataclass(frozen=True)
class Fixed(Scenario):
    """A scenario whose streams differ in length with the seed: all images of both domains, in order, then fewer."""

    reset_at: tuple[int, ...] = ()

    def schedule(self, labels, seed):
        n = len(labels[0]) - 7 * seed
        domain = torch.arange(2).repeat_interleave(n)
        reset = torch.zeros(2 * n, dtype=torch.bool)
        reset[[r for r in self.reset_at if r < 2 * n]] = True
        return Schedule(domain, torch.arange(n).repeat(2), reset)


def play(method="source", seeds=(0, 1), resets=(), **options):
    stream = Stream(Memory(), Fixed(reset_at=resets), seeds, batch=16)
    return run(Backbone(small_network()), ready(method), stream, **options)


def stopped(method, path):
    """Stop a run after three batches, with a checkpoint of two."""
    with pytest.raises(Stopped):
        play(method, checkpoint=path, every=2, progress=stop_at(3))
    return path


def test_batches_straddle_domains_and_pad_streams_that_end_early():
    stream = Stream(Memory(), Fixed(), (0, 1), batch=16)
    batches = list(stream)
    assert len(batches) == len(stream) == 7  # 100 images in sixteens
    assert [b.x.shape[1] for b in batches] == [16] * 6 + [4]
    assert set(batches[3].domain[0].tolist()) == {0, 1}
    assert [int(b.valid[1].sum()) for b in batches] == [16] * 5 + [6, 0]
    assert all((b.x[~b.valid] == 0).all() and (b.y[~b.valid] == -1).all() for b in batches)


def test_every_image_carries_its_own_label_and_domain():
    for batch in Stream(Memory(), Fixed(), (0, 1), batch=16):
        x, y, domain = batch.x[batch.valid], batch.y[batch.valid], batch.domain[batch.valid]
        assert torch.equal(x[:, 0, 0, 0].long(), domain)
        assert torch.equal((x[:, 0, 0, 1] * 100).round().long() % CLASSES, y)


def test_a_reset_cuts_the_batch_before_it():
    batches = list(Stream(Memory(), Fixed(reset_at=(0, 50)), (0,), batch=16))
    assert [b.x.shape[1] for b in batches] == [16, 16, 16, 2, 16, 16, 16, 2]
    assert [bool(b.reset) for b in batches] == [True, False, False, False, True, False, False, False]


@pytest.mark.parametrize("ahead", [1, 3])
def test_so_many_batches_are_read_ahead_and_no_more(ahead):
    data, begun = Memory(), []
    read, expected = data.images, list(Stream(Memory(), Fixed(), (0,), batch=16))
    data.images = lambda domain, index: begun.append(len(index)) or read(domain, index)
    for taken, batch in enumerate(Stream(data, Fixed(), (0,), batch=16).starting_at(0, ahead=ahead), 1):
        assert torch.equal(batch.x, expected[taken - 1].x)
        for thread in [t for t in threading.enumerate() if t.name.startswith("tribe-reader-")]:
            thread.join()
        assert sum(begun) == min(16 * (taken + ahead), 100)


def test_a_reader_that_fails_says_so():
    data = Memory()
    data.images = lambda domain, index: (_ for _ in ()).throw(OSError("unreadable image 7"))
    with pytest.raises(OSError, match="unreadable image 7"):
        list(Stream(data, Fixed()))


@pytest.mark.parametrize("method", ["source", "tribe", "lame", "rotta", "cotta"])
def test_the_record_holds_every_image_once_and_streams_do_not_meet(method):
    """One of each kind: frozen, learning, probabilities, a memory, own weights. The contract checks all methods."""
    together = play(method)
    assert [len(r.label) for r in together] == [100, 86]
    for seed, record in enumerate(together):
        (alone,) = play(method, seeds=(seed,), seed=seed)
        assert same([record], [alone], ("domain", "label", "prediction"))
        assert torch.allclose(record.confidence, alone.confidence, atol=1e-5)
    assert together[1].spec["seed"] == 1
    assert 0 <= metrics.instance_error(together[0]) <= 1


def test_predictions_are_the_adapters():
    import tribe

    adapter = tribe.adapt(small_network())
    expected = torch.cat([adapter(b.x[0]).argmax(1) for b in Stream(Memory(), Fixed(), (0,), batch=16)])
    assert torch.equal(play("tribe", seeds=(0,))[0].prediction, expected)


def test_a_reset_brings_the_source_back():
    once, twice = play("tribe", seeds=(0,)), play("tribe", seeds=(0,), resets=(0, 50))
    first_of_two = [r.confidence[50:66] for r in (once[0], twice[0])]
    assert not torch.allclose(*first_of_two)
    fresh = run(Backbone(small_network()), ready("tribe"), Stream(Memory(), _Second(), (0,), batch=16))
    assert torch.equal(fresh[0].confidence[:16], twice[0].confidence[50:66])


@dataclass(frozen=True)
class _Second(Fixed):
    def schedule(self, labels, seed):
        domain, index, reset = super().schedule(labels, seed)
        return Schedule(domain[50:], index[50:], reset[50:])


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path):
    path, whole = tmp_path / "run.safetensors", play("tribe")
    with pytest.raises(Stopped):
        play("tribe", checkpoint=path, every=2, progress=stop_at(5))
    assert path.is_file()
    seen = []
    resumed = play("tribe", checkpoint=path, every=2, progress=lambda *update: seen.append(update))
    assert [update[:2] for update in seen] == [(5, 7), (6, 7), (7, 7)], "it went on after the checkpoint, at batch 4"
    wrong = torch.cat([record.prediction != record.label for record in resumed])
    assert seen[-1][2] == pytest.approx(wrong.double().mean().item()), "the error of the whole stream"
    assert not path.exists()
    assert same(whole, resumed)


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(b"x"), lambda p: p.write_bytes(p.read_bytes()[:-9])])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    path = stopped("tribe", tmp_path / "run.safetensors")
    for other in ({"spec": {"scenario": "other"}}, {"seed": 1}, {"resets": (0, 50)}):
        with pytest.raises(StateFileError, match="another run"):
            play("tribe", checkpoint=path, every=2, **other)
    damage(path)
    with pytest.raises(StateFileError, match="not a checkpoint"):
        play("tribe", checkpoint=path, every=2)


def rewritten(path, tensors=(), without=(), **header):
    """The same checkpoint with other contents, and the digest of these."""
    old, kept = tensor_file.read(path, CHECKPOINT)
    kept = {name: t for name, t in (kept | dict(tensors)).items() if name not in without}
    tensor_file.write(path, CHECKPOINT, old | header, kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": ["state.key.seed"]}, "state.key.seed missing or unexpected"),
        ({"without": ["record.1.seconds"]}, "record.1.seconds missing or unexpected"),
        ({"without": ["record.0.label"]}, "record.0.label missing or unexpected"),
        ({"tensors": {"notes": torch.zeros(1)}}, "notes missing or unexpected"),
        ({"tensors": {"state.affine.bias": torch.zeros(3)}}, "state.affine.bias is"),
        ({"tensors": {"record.0.label": torch.zeros(2, 16)}}, "record.0"),
        ({"tensors": {"record.0.prediction": torch.zeros(5, dtype=torch.int64)}}, "record.0"),
        ({"tensors": {"record.0.domain": torch.zeros(32)}}, "record.0.domain is"),
        ({"step": -1}, "it is -1; expected a number of batches"),
        ({"step": 8}, "8 of 7 batches are done"),
        ({"step": "2"}, "it is '2'; expected an integer"),
    ],
)
def test_a_checkpoint_with_a_valid_digest_and_wrong_contents_is_refused(tmp_path, changes, message):
    path = stopped("tent", tmp_path / "run.safetensors")
    rewritten(path, **changes)
    with pytest.raises(StateFileError, match=message):
        play("tent", checkpoint=path)


@pytest.mark.parametrize("moment", ["progress", "step", "record"])
def test_stopped_by_hand_it_goes_on_from_the_last_batch(tmp_path, monkeypatch, moment):
    path, done = tmp_path / "run.safetensors", []

    def stop(*_, **__):
        raise KeyboardInterrupt

    def watch(batches, *_):
        done.append(batches)
        if batches == 3:
            if moment == "progress":
                stop()
            # then in the middle of the next batch: before or after its step
            monkeypatch.setattr(*((Steps, "__call__") if moment == "step" else (torch, "full")), stop)

    with monkeypatch.context(), pytest.raises(KeyboardInterrupt):
        play("tribe", checkpoint=path, every=50, progress=watch)
    monkeypatch.undo()
    seen = []
    resumed = play("tribe", checkpoint=path, every=50, progress=lambda batches, *_: seen.append(batches))
    assert seen == list(range(3 if moment == "progress" else 4, 8))
    assert same(resumed, play("tribe"))


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path, written = tmp_path / "run.safetensors", []

    def write(*arguments, _write=tensor_file.write):
        if written == [2, 4]:
            raise CannotWrite("the disk is full")
        written.append(arguments[2]["step"])
        _write(*arguments)

    monkeypatch.setattr(tensor_file, "write", write)
    with pytest.raises(CannotWrite, match="the disk is full"):
        play("tribe", checkpoint=path, every=2)
    monkeypatch.undo()
    seen = []
    resumed = play("tribe", checkpoint=path, every=2, progress=lambda batches, *_: seen.append(batches))
    assert seen == [5, 6, 7]
    assert same(resumed, play("tribe"))


def test_a_checkpoint_that_cannot_be_written_is_found_before_the_first_batch(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing to write run.safetensors into"):
        play(checkpoint=tmp_path / "missing" / "run.safetensors", progress=lambda *_: pytest.fail("a batch was played"))


def test_ctrl_c_on_a_full_disk_stops_the_run(tmp_path, monkeypatch):
    def write(*_):
        raise CannotWrite("the disk is full")

    monkeypatch.setattr(tensor_file, "write", write)
    warned = pytest.warns(UserWarning, match="the disk is full. The run goes on from batch 0, not 2")
    with warned, pytest.raises(KeyboardInterrupt):
        play("tribe", checkpoint=tmp_path / "run.safetensors", progress=stop_at(3, KeyboardInterrupt))


def test_a_checkpoint_may_be_kept_until_the_records_are_written(tmp_path):
    path = tmp_path / "run.safetensors"
    played = play("tribe", checkpoint=path, every=3, keep_checkpoint=True)
    seen = []
    again = play("tribe", checkpoint=path, progress=lambda done, *_: seen.append(done))
    assert seen == [7], "after the checkpoint of batch 6"
    assert same(played, again)
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, ValueError, "at least 1; got 0"),
        ({"every": -1}, ValueError, "at least 1; got -1"),
        ({"spec": {"scenario": "gli-f", "a": {1, 2}}}, TypeError, r"cannot hold its 'a' \(Object of type set"),
        ({"spec": {"a": {"b": object()}}}, TypeError, r"cannot hold its 'a' \(Object of type object"),
        ({"spec": {"a": {1: "one", "two": 2}}}, TypeError, "cannot hold its 'a'"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["run.safetensors", None])
def test_what_would_fail_later_is_refused_at_the_start(tmp_path, checkpoint, options, error, words):
    data = Memory()
    stream = Stream(data, Fixed(), (0,), batch=16)
    where = None if checkpoint is None else tmp_path / checkpoint
    with pytest.raises(error, match=words):
        run(Backbone(small_network()), ready("source"), stream, checkpoint=where, **options)
    assert not data.reads


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch": 0}, ValueError, "at least 1"),
        ({"batch": 3.5}, ValueError, r"an integer of at least 1; got 3\.5"),
        ({"seeds": ()}, ValueError, "at least one seed"),
        ({"seeds": 425}, TypeError, "a sequence of integers, one a stream, such as .*; got 425"),
        ({"seeds": "425"}, TypeError, "a sequence of integers"),
        ({"scenario": "gli-f"}, TypeError, r"got 'gli-f': tribe\.scenarios\.create\('gli-f'\) makes one"),
        ({"scenario": None}, TypeError, r"a tribe\.scenarios\.Scenario; got None"),
    ],
)
def test_bad_streams(options, error, words):
    with pytest.raises(error, match=words):
        Stream(Memory(), **{"scenario": Fixed(), **options})


@pytest.mark.parametrize("name", ["source", "bn", "pl", "lame", "tent"])
def test_a_method_without_presets_gets_the_number_of_classes(name):
    method = methods.get(name)
    presets = {dataset: method.preset(dataset) for dataset in ("mnist", "cifar10", "cifar100", "imagenet")}
    assert [preset.classes for preset in presets.values()] == [10, 10, 100, 1000]
    assert presets["cifar100"] == methods.create(name, classes=100)
    with pytest.raises(ValueError, match=f"{name} has no preset 'cifar': did you mean .*cifar10"):
        method.preset("cifar")


def test_domains_that_the_data_set_lacks_are_named():
    with pytest.raises(ValueError, match=r"need domain 'fog@1'.* --severity 1,2,3,4,5 or .*it has fog@5, snow@5"):
        Stream(Memory(), create("gradual"))
    with pytest.raises(ValueError, match=r"plays rain@5, which the data set lacks; it has fog@5, snow@5"):
        Stream(Memory(), create("iid", domains=("fog@5", "rain@5")))


def test_a_method_that_does_not_fit_the_network_is_refused_before_anything_is_read():
    """Catches memories and thresholds for another number of classes, and an error of autograd at the 64th image."""
    stream = Stream(data := Memory(), create("replay"), batch=4)
    with pytest.raises(ValueError, match=r"classes=3, but the network's classifier .* has 4 outputs"):
        run(Backbone(small_network()), methods.create("rotta", classes=3), stream)
    net = small_network()
    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.weight = layer.bias = None
    with pytest.raises(ValueError, match="affine parameters"):
        run(Backbone(net), methods.create("rotta", classes=4), stream)
    assert not data.reads
