"""Readers of tensor files and weights."""

import dataclasses
import hashlib
import json

import numpy as np
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import tribe
from fuzz.mutations import in_order
from fuzz.registry import digest, reader
from tribe import methods, models
from tribe.cli.commands import app
from tribe.core.backbone import Backbone
from tribe.data.scenarios import Scenario, Schedule
from tribe.experiments import runner
from tribe.experiments.stream import Stream
from tribe.health.calibration import Calibration
from tribe.health.estimate import Estimator, Features
from tribe.health.martingale import LEVELS, Reference
from tribe.health.regression import GaussianProcess
from tribe.io import tensors as tensor_file
from tribe.io.states import StateFileError
from tribe.knowledge import Knowledge
from tribe.testing import CLASSES, images, ready, small_network


@reader("state", "safetensors", ("tribe.adapter.load",), sealed=True)
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


@reader("stream", "safetensors", ("tribe.streams.fleet.Fleet.load", "tribe.streams.files.decode_bytes"), sealed=True)
class StreamOfAFleet:
    @staticmethod
    def make(folder):
        tribe.fleet(small_network()).add("cam").save("cam", folder / "cam.safetensors")
        return folder / "cam.safetensors"

    @staticmethod
    def read(folder):
        """Both ways read the same, or refuse with the same kind of error."""
        fleet = tribe.fleet(small_network())
        path, error = folder / "cam.safetensors", None
        try:
            fleet.load("file", path)
        except StateFileError as found:
            error = found
        try:
            fleet.from_bytes("bytes", path.read_bytes())
        except StateFileError:
            assert error is not None, "the file was read and its bytes were refused"
            raise error from None
        assert error is None, f"the bytes were read and the file was refused: {error}"
        assert fleet.digest("file") == fleet.digest("bytes")
        return digest(fleet.digest("file"), fleet.info("file"), fleet.method)


@reader("knowledge", "safetensors", ("tribe.knowledge.Knowledge.load",), sealed=True)
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


@reader("calibration", "safetensors", ("tribe.knowledge.Knowledge.load",), sealed=True)
class HealthCalibration:
    @staticmethod
    def make(folder):
        x = torch.rand(9, len(Features._fields), generator=torch.Generator().manual_seed(1))
        estimator = Estimator(CLASSES, 2.0, GaussianProcess.fit(x, x.sum(1), torch.zeros(9)))
        entropies = tuple(i / 511 for i in range(512))
        normal = Reference(torch.rand(CLASSES, LEVELS, generator=torch.Generator().manual_seed(0)), torch.tensor(0.1))
        made = Calibration(estimator, "tribe", "0" * 32, 200, 0.9, 0.8, 0.7, entropies, ("fog",), normal)
        made.save(folder / "health.safetensors")
        return folder / "health.safetensors"

    @staticmethod
    def read(folder):
        known = Calibration.load(folder / "health.safetensors").knowledge()
        return digest(known.digest, known.network, sorted(known.spec.items()))


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
    kept = {"checkpoint": path, "every": 1, "keep_outputs": True}
    return runner.run(Backbone(small_network()), ready("tent"), stream, **kept, **options)


@reader("run-checkpoint", "safetensors", ("tribe.experiments.runner._Checkpoint.resume",), sealed=True)
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
        return digest(record.label, record.prediction, record.confidence, record.outputs.values)


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


class TrainedWeights:
    """Weights with a card, as `tribe train` writes them."""

    def __init__(self, file):
        self.file = file

    def make(self, folder):
        path = Weights.make(folder)
        path.write_bytes(in_order(path.read_bytes()))
        card = {"model": "small", "accuracy": 0.5, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        (folder / "net.json").write_text(json.dumps(card))
        return folder / self.file

    def read(self, folder):
        return weights(folder, "net.safetensors")


reader("weights-with-card", "safetensors", ("tribe.models.weights.check_card",), sealed=True)(
    TrainedWeights("net.safetensors")
)
reader("weights-card", "json", ("tribe.models.weights.check_card",), sealed=True)(TrainedWeights("net.json"))
PICKLED = tuple(f"tribe.models.{name}" for name in ("weights._unpickle", "pickled.check_saved", "pickled._check_zip"))


@reader("weights-pt", "torch", PICKLED)
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
