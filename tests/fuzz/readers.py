"""Every reader of the library: a small valid file of the library's own writer, and the call that a user reads it with.

`functions` names the functions that open or decode the file. A test compares them with the code.
"""

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import layouts
import tribe
from places import ROOT
from tribe import bench, datasets, methods, models, report, scenarios
from tribe.cli.commands import app
from tribe.datasets.array_generation import generate
from tribe.datasets.embedded import mnist_test
from tribe.datasets.fingerprint import fingerprint
from tribe.datasets.image_generation import generate_imagenet
from tribe.engine.backbone import Backbone
from tribe.knowledge import Knowledge
from tribe.lab import metrics, runner, store
from tribe.lab.record import Record
from tribe.lab.stream import Stream
from tribe.paper.gather import read_draws
from tribe.scenarios import Scenario, Schedule
from tribe.storage import tensors as tensor_file
from tribe.testing import CLASSES, images, ready, small_network
from tribe.train import checkpoint


class Reader(NamedTuple):
    """A kind of file, how to make a valid one, and how to read it."""

    format: str  # selects the mutations: json, lines, npy, npz, safetensors, torch, gzip, or "" for bytes alone
    make: Callable[[Path], Path]  # writes a valid file, and what it needs, into a folder; returns the path of the file
    read: Callable[[Path], str]  # reads it from the folder; returns a digest of the contents
    functions: tuple[str, ...]  # in the package, that open or decode the file
    sealed: bool = False  # a file with other contents is refused, since it carries a hash of them


READERS: dict[str, Reader] = {}

TENSORS = ("tribe.storage.tensors.read", "tribe.storage.tensors._decode")
STORE = ("tribe.lab.store.read_json", "tribe.lab.store._object")
PACK = ("tribe.lab.store.read_pack", "tribe.lab.store._object")
NPY = ("tribe.datasets.array_files.open_images", "tribe.datasets.array_files.open_labels")
PICTURE = ("tribe.datasets.image_files.read_image",)
NO_READERS = {  # functions that call an opener, and why no file of a user can hurt them
    "tribe.corruptions.common.digital.jpeg_compression": "decodes what it has just encoded",
    "tribe.corruptions.common.weather._frost_images": "package data",
    "tribe.datasets.embedded.mnist_test": "package data",
    "tribe.paper.claims.read_claims": "package data",
    "tribe.paper.tables.load": "package data",
    "tribe.paper.tables.released": "package data",
    "tribe.report.page._asset": "package data",
    "tribe.bench.clock.peak_memory": "of the system: /proc",
    "tribe.lab.provenance.processor": "of the system: /proc",
    "tribe.lab.provenance.code_hash": "code, which is trusted",
    "tribe.lab.experiment.Experiment.json": "decodes what it has just encoded",
    "tribe.lab.spec.describe": "decodes what it has just encoded",
}


def digest(*parts: Any) -> str:
    """A hash of tensors and plain values."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode() + part.contiguous().numpy().tobytes())
        else:
            found.update(repr(part).encode())
    return found.hexdigest()


def reader(name, format, functions, **fields):
    """Register a class with two static methods, `make` and `read`."""

    def add(cls):
        READERS[name] = Reader(format, cls.make, cls.read, tuple(functions), **fields)
        return cls

    return add


# -- tensor files -----------------------------------------------------------------------------------------------------


@reader("state", "safetensors", TENSORS, sealed=True)
class State:
    @staticmethod
    def make(folder):
        adapter = tribe.adapt(small_network(), "tribe", streams=2)
        adapter.save(folder / "state.safetensors")
        return folder / "state.safetensors"

    @staticmethod
    def read(folder):
        adapter = tribe.load(folder / "state.safetensors", small_network())
        return digest(adapter.digest(), adapter.streams, adapter.method)


@reader("knowledge", "safetensors", TENSORS, sealed=True)
class SourceKnowledge:
    @staticmethod
    def make(folder):
        ready("eata").knowledge.save(folder / "eata.safetensors")
        return folder / "eata.safetensors"

    @staticmethod
    def read(folder):
        method = methods.create("eata", classes=CLASSES, knowledge=str(folder / "eata.safetensors"))
        method.init(Backbone(small_network()))
        assert isinstance(method.knowledge, Knowledge)
        return digest(method.knowledge.digest, sorted(method.knowledge.spec.items()))


class Pictures:
    """Images in memory."""

    classes = tuple("abcd")
    domains = ("day",)

    def labels(self, domain):
        return torch.arange(24) % CLASSES

    def images(self, domain, index):
        return images(1, 24)[0][index]


@dataclasses.dataclass(frozen=True)
class InOrder(Scenario):
    """All images, in order."""

    def schedule(self, labels, seed):
        count = len(labels[0])
        return Schedule(torch.zeros(count).long(), torch.arange(count), torch.zeros(count, dtype=torch.bool))


def play(path, **options):
    stream = Stream(Pictures(), InOrder(), (0,), batch=12)
    return runner.run(Backbone(small_network()), ready("tent"), stream, checkpoint=path, every=1, **options)


@reader("run-checkpoint", "safetensors", TENSORS, sealed=True)
class RunCheckpoint:
    @staticmethod
    def make(folder):
        path = folder / "checkpoint.safetensors"
        play(path, keep_checkpoint=True)
        header, tensors = tensor_file.read(path, runner.CHECKPOINT)
        tensors["record.0.seconds"].zero_()  # the same bytes every time
        tensor_file.write(path, runner.CHECKPOINT, header, tensors)
        return path

    @staticmethod
    def read(folder):
        (record,) = play(folder / "checkpoint.safetensors")
        return digest(record.label, record.prediction, record.confidence)


def learner():
    net = small_network()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@reader("training-checkpoint", "safetensors", TENSORS, sealed=True)
class TrainingCheckpoint:
    identity = {"model": "small", "recipe": {"epochs": 3, "lr": 0.1}, "seed": 0}  # noqa: RUF012
    history = [{"epoch": 1, "loss": 0.5, "accuracy": 0.5, "seconds": 1.0}]  # noqa: RUF012

    @classmethod
    def make(cls, folder):
        net, optimizer = learner()
        net(images(1, 4)[0]).sum().backward()
        optimizer.step()
        path = folder / "net.safetensors.checkpoint"
        checkpoint.save(path, net, optimizer, cls.identity, cls.history, {})
        return path

    @classmethod
    def read(cls, folder):
        path = folder / "net.safetensors.checkpoint"
        net, optimizer = learner()
        saved = checkpoint.read(path)
        checkpoint.check_identity(path, saved.identity, cls.identity)
        checkpoint.restore(saved, net, optimizer)
        return digest(*net.state_dict().values(), saved.history, sorted(saved.tensors))


# -- weights ----------------------------------------------------------------------------------------------------------


def weights(folder, name):
    return digest(*models.load(small_network(), folder / name).state_dict().values())


@reader("weights", "safetensors", ("tribe.models.weights.read",))
class Weights:
    @staticmethod
    def make(folder):
        save_file(small_network(seed=1).state_dict(), folder / "net.safetensors")
        return folder / "net.safetensors"

    @staticmethod
    def read(folder):
        return weights(folder, "net.safetensors")


@reader("weights-pt", "torch", ("tribe.models.weights._unpickle",))
class TorchWeights:
    @staticmethod
    def make(folder):
        torch.save({"state_dict": small_network(seed=1).state_dict()}, folder / "net.pt")
        return folder / "net.pt"

    @staticmethod
    def read(folder):
        return weights(folder, "net.pt")


NETWORK = "from tribe.testing import small_network\nnet = small_network()\n"


def doctor(folder, option, name):
    """Call `tribe doctor`; exit code 2 is an error of the input, 1 a problem of the network."""
    (folder / "mine.py").write_text(NETWORK)
    result = CliRunner().invoke(app, ["doctor", f"{folder}/mine.py:net", option, str(folder / name)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 2:
        raise ValueError(result.stderr.replace("\n", ""))
    return digest(result.stdout)


@reader("doctor-weights", "safetensors", ("tribe.cli.commands.doctor.load_weights",))
class DoctorWeights:
    make = Weights.make

    @staticmethod
    def read(folder):
        return doctor(folder, "--weights", "net.safetensors")


@reader("doctor-npy", "npy", ("tribe.cli.commands.doctor._array",))
class DoctorNpy:
    @staticmethod
    def make(folder):
        np.save(folder / "images.npy", images(1, 6)[0].numpy())
        return folder / "images.npy"

    @staticmethod
    def read(folder):
        return doctor(folder, "--input", "images.npy")


@reader("doctor-npz", "npz", ("tribe.cli.commands.doctor._array",))
class DoctorNpz:
    @staticmethod
    def make(folder):
        np.savez_compressed(folder / "images.npz", x=images(1, 6)[0].numpy())
        return folder / "images.npz"

    @staticmethod
    def read(folder):
        return doctor(folder, "--input", "images.npz")


# -- results ----------------------------------------------------------------------------------------------------------


def packed_line():
    """A result of a real run, from the repository."""
    lines = (ROOT / "results/mnist-c-cpu.jsonl").read_bytes().splitlines()
    return min(lines, key=len)


def write_result(folder):
    """A result as a folder."""
    line = json.loads(packed_line())
    place = folder / line["id"]
    place.mkdir()
    same = {"schema": line["schema"], "id": line["id"]}
    store.write_json(place / store.SPEC, {"format": line["format"], **same, "spec": line["spec"]})
    store.write_json(place / store.METRICS, {**same, "seeds": line["metrics"]})
    store.write_json(place / store.ENVIRONMENT, {**same, **line["environment"]})
    return place


def written_record():
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(CLASSES, (60,), generator=generator)
    spec = {"method": {"name": "tent", "fields": {"lr": 0.1}}, "dataset": {"name": "mnist-c", "fields": {}}, "seed": 0}
    spec |= {"model": {"name": "wrn", "fields": {}}, "scenario": {"name": "gli-f", "fields": {"imbalance": 10.0}}}
    confidence, seconds = torch.rand(60, generator=generator), torch.full((60,), 1e-3)
    domain = torch.arange(60) // 30
    return Record(domain, label, label.roll(1), confidence, seconds, ("fog@5", "snow@5"), CLASSES, spec)


@reader("record", "npz", ("tribe.lab.record.Record.load",))
class RecordFile:
    @staticmethod
    def make(folder):
        written_record().save(folder / "record.npz")
        return folder / "record.npz"

    @staticmethod
    def read(folder):
        record = Record.load(folder / "record.npz")
        scores = metrics.summary(record), metrics.domain_error(record), metrics.class_counts(record)
        columns = (getattr(record, name) for name in ("domain", "label", "prediction", "confidence", "seconds"))
        return digest(*columns, *scores, record.domains, record.classes, sorted(record.spec.items()))


def written_report(folder):
    """A page about all results in a folder, without its words about damaged files."""
    runs = report.write(folder, folder / "report.html")
    assert runs.groups or runs.damaged, "a result is on the page, or it is named as damaged"
    return digest([group.title for group in runs.groups], bool(runs.damaged))


@reader("record-in-report", "npz", ("tribe.report.collect._is_another", "tribe.report.collect._read"))
class RecordInReport:
    make = RecordFile.make

    @staticmethod
    def read(folder):
        return written_report(folder)


class ResultFile:
    """A file of a result in a folder."""

    def __init__(self, name):
        self.name = name

    def make(self, folder):
        return write_result(folder) / self.name

    def read(self, folder):
        written_report(folder)
        line = json.loads(packed_line())
        result = store.load(folder / line["id"])
        store.verify(result)
        values = [result.values(metric) for metric in ("instance_error", "category_error", "seconds_per_image")]
        return digest(result.experiment.id, values, result.values("domain_error", "fog"), result.error())


for file in (store.SPEC, store.METRICS, store.ENVIRONMENT):
    reader(f"result-{file}", "json", STORE)(ResultFile(file))


@reader("packed-results", "lines", PACK)
class Pack:
    @staticmethod
    def make(folder):
        (folder / "mnist-c-cpu.jsonl").write_bytes(packed_line() + b"\n")
        return folder / "mnist-c-cpu.jsonl"

    @staticmethod
    def read(folder):
        found = list(store.survey(folder))
        if found:
            written_report(folder)
        results = list(store.finished(folder))
        return digest([(result.experiment.id, result.error(), result.values("seconds_per_image")) for result in results])


@reader("packed-results-kept", "lines", ("tribe.lab.store._write_pack", *PACK))
class KeptPack:
    @staticmethod
    def make(folder):
        line, other = packed_line(), folder / "other"
        other.mkdir()
        write_result(other)
        lines = (ROOT / "results/mnist-c-cpu.jsonl").read_bytes().splitlines()
        (folder / "mnist-c-cpu.jsonl").write_bytes(min((text for text in lines if text != line), key=len) + b"\n")
        return folder / "mnist-c-cpu.jsonl"

    @staticmethod
    def read(folder):
        path = folder / "mnist-c-cpu.jsonl"
        old = path.read_bytes().splitlines()
        store.keep(folder / "other", folder, damaged="skip")
        new = path.read_bytes().splitlines()
        assert packed_line() in new, "the result was added"
        assert len(new) > len(old) or len(set(old)) < len(old) or store._id_of(packed_line()) in map(store._id_of, old)
        return digest(len(new))


@reader("bench", "json", ("tribe.bench.results.read",))
class Bench:
    @staticmethod
    def make(folder):
        (folder / "bench.json").write_bytes((ROOT / "results/bench/wrn28_10_tf32_h200.json").read_bytes())
        return folder / "bench.json"

    @staticmethod
    def read(folder):
        result = bench.read(folder / "bench.json")
        changes = [(change.name, change.ratio) for change in bench.compare(result, result)]
        return digest(result.setting, changes, bench.results.machine_differences(result, result))


@reader("draws", "json", ("tribe.paper.gather._read_draws",))
class DrawsFile:
    @staticmethod
    def make(folder):
        (folder / "draws").mkdir()
        name = "tent_wrn28_10_tf32_h200_noise.json"
        (folder / "draws" / name).write_bytes((ROOT / "results/draws" / name).read_bytes())
        return folder / "draws" / name

    @staticmethod
    def read(folder):
        (draws,) = read_draws(folder)
        kinds = tuple(draws.ours)
        return digest([(draws.mean(kind), draws.difference(kind)) for kind in kinds], draws.agree, draws.times)


@reader("schedule", "npz", ("tribe.scenarios.schedules.load",))
class ScheduleFile:
    @staticmethod
    def make(folder):
        schedule = InOrder().schedule([torch.arange(40) % CLASSES], 0)
        scenarios.save(folder / "schedule.npz", schedule)
        return folder / "schedule.npz"

    @staticmethod
    def read(folder):
        return digest(*scenarios.load(folder / "schedule.npz"))


# -- data sets --------------------------------------------------------------------------------------------------------


def contents(dataset):
    """A digest of all images and labels."""
    parts = [fingerprint(dataset)]
    for domain in dataset.domains:
        labels = dataset.labels(domain)
        parts += [labels, dataset.images(domain, torch.arange(min(len(labels), 20)))]
    return digest(*parts, dataset.classes)


class DataFile:
    """A file of a data set in its published layout."""

    def __init__(self, write, path, name, **fields):
        self.write, self.path, self.name, self.fields = write, path, name, fields

    def make(self, folder):
        self.write(folder, np.random.default_rng(0))
        return folder / self.path

    def read(self, folder):
        return contents(layouts.made(self.name, folder, **self.fields))


def write_pickles(folder, draw):
    layouts.write_cifar_binary(folder, draw)
    layouts.write_cifar_python(folder)
    for binary in ("cifar-10-batches-bin", "cifar-100-binary"):
        for path in (folder / binary).iterdir():
            path.unlink()


def write_mnist(folder, draw):
    layouts.write_mnist(folder / "mnist", draw)


def write_mnist_gz(folder, draw):
    write_mnist(folder, draw)
    for path in list((folder / "mnist").iterdir()):
        (folder / "mnist" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()


def write_cifar_c(folder, draw):
    layouts.write_cifar_c(folder / "CIFAR-10-C", 10, draw)


def write_mnist_c(folder, draw):
    layouts.write_mnist_c(folder / "mnist_c", draw)


def write_imagenet_c(folder, draw):
    for wnid in layouts.WNIDS:
        place = folder / "ImageNet-C" / "fog" / "5" / wnid
        place.mkdir(parents=True)
        layouts.picture(draw, 224, 224).save(place / "a.JPEG", quality=90)


IDX = "mnist/t10k-{}-ubyte"
for name, format, functions, given in (
    ("cifar10", "", ("tribe.datasets.clean._rows",), (layouts.write_cifar_binary, "cifar-10-batches-bin/test_batch.bin")),
    ("cifar100", "", ("tribe.datasets.clean._rows",), (layouts.write_cifar_binary, "cifar-100-binary/test.bin")),
    ("cifar10-pickle", "", ("tribe.datasets.unpickle.unpickle",), (write_pickles, "cifar-10-batches-py/test_batch")),
    ("cifar100-pickle", "", ("tribe.datasets.unpickle.unpickle",), (write_pickles, "cifar-100-python/test")),
    ("mnist", "", ("tribe.datasets.clean._memory_map",), (write_mnist, IDX.format("images-idx3"))),
    ("mnist-labels", "", ("tribe.datasets.clean._memory_map",), (write_mnist, IDX.format("labels-idx1"))),
    ("mnist-gz", "gzip", ("tribe.datasets.clean._decompress",), (write_mnist_gz, IDX.format("images-idx3") + ".gz")),
    ("cifar10-c", "npy", NPY, (write_cifar_c, "CIFAR-10-C/fog.npy")),
    ("cifar10-c-labels", "npy", NPY, (write_cifar_c, "CIFAR-10-C/labels.npy")),
    ("mnist-c", "npy", NPY, (write_mnist_c, "mnist_c/fog/test_images.npy")),
    ("mnist-c-labels", "npy", NPY, (write_mnist_c, "mnist_c/fog/test_labels.npy")),
):
    made = "-".join(part for part in name.split("-") if part in ("cifar10", "cifar100", "mnist", "c"))
    reader(name, format, functions)(DataFile(*given, made))


@reader("imagenet-c", "", PICTURE)
class ImageNetCFile:
    @staticmethod
    def make(folder):
        write_imagenet_c(folder, np.random.default_rng(0))
        return folder / "ImageNet-C" / "fog" / "5" / layouts.WNIDS[0] / "a.JPEG"

    @staticmethod
    def read(folder):
        return contents(datasets.create("imagenet-c", data=str(folder), corruptions=("fog",)))


@reader("imagenet-c-ids", "", ("tribe.datasets.imagenet_c.ImageNetC._ids",))
class Ids:
    @staticmethod
    def make(folder):
        write_imagenet_c(folder, np.random.default_rng(0))
        (folder / "ids.txt").write_text("".join(f"{wnid}/a.JPEG\n" for wnid in reversed(layouts.WNIDS)))
        return folder / "ids.txt"

    @staticmethod
    def read(folder):
        fields = {"data": str(folder), "corruptions": ("fog",), "ids": str(folder / "ids.txt")}
        return digest(datasets.create("imagenet-c", **fields).labels("fog@5"))


class Picture:
    """An image of a folder, once as the reader of all images and once with another that is not damaged."""

    def __init__(self, suffix, **options):
        self.suffix, self.options = suffix, options

    def make(self, folder):
        draw = np.random.default_rng(0)
        for place in ("day/cat", "day/dog"):
            (folder / "images" / place).mkdir(parents=True)
        layouts.picture(draw, 24, 24).save(folder / "images/day/dog/b.png")
        image, path = layouts.picture(draw, 30, 24), folder / f"images/day/cat/a.{self.suffix}"
        (image.convert("P") if self.suffix == "gif" else image).save(path, **self.options)
        return path

    def read(self, folder):
        skipping = contents(datasets.create("folder", root=str(folder / "images"), size=16, unreadable="skip"))
        return digest(skipping, contents(datasets.create("folder", root=str(folder / "images"), size=16)))


for suffix in ("png", "jpg", "gif", "bmp", "webp", "tiff", "ppm"):
    reader(f"image-{suffix}", "", (*PICTURE, "tribe.datasets.folder.Folder.digest"))(Picture(suffix))


# -- data sets that are made ------------------------------------------------------------------------------------------


class Generated:
    """A file in a folder of `tribe corrupt mnist`, which goes on where it stopped."""

    def __init__(self, path):
        self.path = path

    def make(self, folder):
        pixels, labels = mnist_test()
        place = folder / "mnist"
        place.mkdir()
        for part in ("t10k", "train"):
            header = np.array([0x803, 5, 28, 28], ">u4").tobytes()
            (place / f"{part}-images-idx3-ubyte").write_bytes(header + pixels[:5].tobytes())
            header = np.array([0x801, 5], ">u4").tobytes()
            (place / f"{part}-labels-idx1-ubyte").write_bytes(header + labels[:5].astype(np.uint8).tobytes())
        generate("mnist", corruptions=("stripe",), out=str(folder), data=str(folder))
        return folder / "mnist_c" / self.path

    def read(self, folder):
        read = contents(layouts.made("mnist-c", folder, corruptions=("stripe",)))
        generate("mnist", corruptions=("stripe",), out=str(folder), data=str(folder))
        return digest(read, contents(layouts.made("mnist-c", folder, corruptions=("stripe",))))


INTACT = "tribe.datasets.array_generation._ImageFiles."
reader("made-json", "json", ("tribe.datasets.manifest.read_manifest",))(Generated("made.json"))
reader("made-images", "npy", (f"{INTACT}read", f"{INTACT}is_intact"))(Generated("stripe/test_images.npy"))
reader("made-labels", "npy", ("tribe.datasets.array_generation._write_labels",))(Generated("stripe/test_labels.npy"))


@reader("clean-imagenet", "", (*PICTURE, "tribe.datasets.image_generation._files_digest"))
class CleanImageNet:
    @staticmethod
    def make(folder):
        for wnid in layouts.WNIDS[:1]:
            (folder / "val" / wnid).mkdir(parents=True)
            layouts.picture(np.random.default_rng(0), 40, 60).save(folder / "val" / wnid / "a.JPEG", quality=90)
        return folder / "val" / layouts.WNIDS[0] / "a.JPEG"

    @staticmethod
    def read(folder):
        generate_imagenet(str(folder / "val"), corruptions=("brightness",), severities=(1,), out=str(folder))
        return contents(datasets.create("imagenet-c", data=str(folder), corruptions=("brightness",), severities=(1,)))
