"""The training loop: for every epoch train, test, report progress and write a checkpoint."""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from reproduction.train.learner import SEED_LIMIT, Learner
from reproduction.train.recipe import DEFAULT, Recipe, preset
from reproduction.train.setup import Files, build_network, choose_precision, open_data, open_device, open_files
from reproduction.train.views import Images
from tribe.data.datasets import Dataset
from tribe.experiments.provenance import machine
from tribe.io.files import check_folder, write_atomically
from tribe.io.tensors import portable

SAVE_EVERY = 20.0  # seconds between checkpoints, at least: writing one may take longer than an epoch
SHOW_EVERY = 0.5  # seconds between reports of progress, each of which waits for the device


class TrainingError(RuntimeError):
    """A training that cannot continue: the reason, and what to do."""


class Progress(NamedTuple):
    """The progress of a training."""

    epoch: int  # the current one, from 1
    epochs: int
    step: int  # done in this epoch
    steps: int  # in an epoch
    loss: float  # the mean over this epoch so far
    train: float  # accuracy on this epoch's training images so far, as augmented
    test: float | None  # accuracy on the test set after the last whole epoch
    speed: float  # training images a second
    left: float  # seconds to the end, estimated
    done: bool  # whether the epoch is over and tested


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Trained:
    """A trained network and its card: settings, history, accuracy and machine."""

    net: nn.Module
    accuracy: float  # on the test set, in float32
    card: dict[str, Any]
    path: Path | None  # of the weights, if they were written


def train(
    model: str | nn.Module | None,
    dataset: str | tuple[Dataset, Dataset],
    recipe: Recipe | str = DEFAULT,
    *,
    fields: Mapping[str, Any] | None = None,
    data: str | None = None,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    force: bool = False,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    channels_last: bool | None = None,
    compile: bool = False,
    save_every: float = SAVE_EVERY,
    progress: OnProgress | None = None,
) -> Trained:
    """Train a source network. A CPU gives the same weights for the same seed and threads, interrupted or not.

    Args:
        model: a name, as `tribe.models.create` takes it, or a network, which is trained in place from its current
            weights; None: the network of the preset.
        dataset: a name, or a pair of data sets: training images, test images.
        recipe: the numbers, or the name of a preset of the data set.
        fields: as `tribe.models.create` takes them, beside a name; the classes are the data set's.
        data: root of the data sets.
        out: a .safetensors file for the weights; beside it a card (.json) and, while training, a checkpoint
            (.safetensors.checkpoint). None: nothing is written.
        resume: continue from the checkpoint, if there is one.
        force: replace weights and a checkpoint that exist.
        seed: of initial weights, order and augmentation.
        device: "auto", "cpu", "cuda", "cuda:1".
        precision: "float32" (IEEE's), "tf32", "bf16", "fp16"; "auto" is bf16 on GPUs that have it, else float32.
        channels_last: memory layout of images; None: channels-last on GPUs.
        compile: compile the network with torch.compile.
        save_every: seconds between checkpoints at least; they are written at the end of an epoch.
        progress: called with the progress twice a second and after each epoch.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed must be a number from 0 to 2**63 - 1; got {seed}")
    if not isinstance(recipe, Recipe):
        model, recipe = _from_preset(model, dataset, recipe)
    if model is None:
        raise ValueError("name the network to train: only presets include one")
    place = open_device(device)
    precision = choose_precision(precision, place)
    if out is not None:
        check_folder(Path(out).parent)
    images = open_data(dataset, data)
    files = None if out is None else open_files(out, resume=resume, force=force)
    if recipe.batch > len(images.train.labels):
        raise ValueError(f"a batch of {recipe.batch} images is more than the {len(images.train.labels)} there are")
    net, network = build_network(model, fields, images, seed, place)
    layout = channels_last if channels_last is not None else place.type == "cuda"
    learner = Learner(net, recipe, images.train.to(place), seed, precision, layout, compile)
    counts = {"train": len(images.train.labels), "test": len(images.test.labels)}
    identity = {**network, "dataset": images.name, "images": counts, "recipe": asdict(recipe), "seed": seed}
    identity = json.loads(json.dumps(identity | {"precision": precision}))  # as in a file: tuples become lists
    history: list[dict[str, Any]] = []
    if resume and files is not None and files.checkpoint.exists():
        history = learner.resume(files.checkpoint, identity)
    test = images.test.to(place)
    _run_epochs(learner, test, history, identity, files, save_every, progress)
    accuracy = _test_finished(learner, test)
    card = {
        **identity,
        "accuracy": accuracy,
        "history": history,
        "parameters": sum(p.numel() for p in net.parameters()),
        "seconds": sum(entry["seconds"] for entry in history),
        "channels_last": layout,
        "compile": compile,
        **machine(place),
    }
    if files is not None:
        _write(files, net, card)
    return Trained(net.eval(), accuracy, card, None if files is None else files.weights)


def _from_preset(
    model: str | nn.Module | None, dataset: str | tuple[Dataset, Dataset], name: str
) -> tuple[str | nn.Module, Recipe]:
    if not isinstance(dataset, str):
        raise ValueError("presets are for data sets given by name; for your own images pass a Recipe")
    found = preset(dataset, name)
    return found.model if model is None else model, found.recipe


def _run_epochs(
    learner: Learner,
    test: Images,
    history: list[dict[str, Any]],
    identity: Mapping[str, Any],
    files: Files | None,
    save_every: float,
    progress: OnProgress | None,
) -> None:
    """Run the epochs that are left, and append each to the history."""
    epochs = learner.recipe.epochs
    monitor = _Monitor(learner, progress, history)
    saved = time.perf_counter()
    while len(history) < epochs:
        epoch, start = len(history), time.perf_counter()
        loss, accuracy = learner.epoch(epoch, monitor.after_step)
        monitor.check_loss(loss)
        entry = {"epoch": epoch + 1, "loss": loss, "train": accuracy, "test": learner.accuracy(test)}
        history.append({**entry, "seconds": time.perf_counter() - start})
        monitor.report(epoch, learner.steps, loss, accuracy, done=True)
        if files is not None and len(history) < epochs and time.perf_counter() - saved >= save_every:
            with _explain_failed_write(files, len(history) - 1, epochs):
                learner.save(files.checkpoint, identity, history)
            saved = time.perf_counter()


class _Monitor:
    """Reports the progress of a training, and stops it if the loss is not finite."""

    def __init__(self, learner: Learner, progress: OnProgress | None, history: list[dict[str, Any]]) -> None:
        self.learner, self.epochs, self.progress, self.history = learner, learner.recipe.epochs, progress, history
        self.start, self.steps_before = time.perf_counter(), len(history) * learner.steps
        self.last_report = self.start

    def after_step(self, epoch: int, step: int, loss: Tensor, correct: Tensor) -> None:
        """Report twice a second; loss and correct predictions are sums over this epoch, on the device."""
        if step < self.learner.steps and time.perf_counter() - self.last_report >= SHOW_EVERY:
            mean = loss.item() / step
            self.check_loss(mean)
            self.report(epoch, step, mean, correct.item() / (step * self.learner.recipe.batch))

    def check_loss(self, loss: float) -> None:
        """Stop a training that diverged."""
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in epoch {len(self.history) + 1} of {self.epochs}: the training diverged. "
                f"Lower the learning rate (now {self.learner.recipe.lr}) or warm up longer; no weights were written"
            )

    def report(self, epoch: int, step: int, loss: float, train: float, done: bool = False) -> None:
        """Call ``progress``."""
        self.last_report = time.perf_counter()
        if self.progress is None:
            return
        steps = self.learner.steps
        since = epoch * steps + step - self.steps_before  # steps since the start of this process
        speed = since / max(self.last_report - self.start, 1e-9)
        left = (self.epochs * steps - epoch * steps - step) / max(speed, 1e-9)
        test = self.history[-1]["test"] if self.history else None
        images = speed * self.learner.recipe.batch
        self.progress(Progress(epoch + 1, self.epochs, step, steps, loss, train, test, images, left, done))


def _test_finished(learner: Learner, test: Images) -> float:
    """The accuracy of the trained network in float32; an error if its weights are not finite."""
    if not all(bool(tensor.isfinite().all()) for tensor in learner.net.state_dict().values()):
        raise TrainingError(
            "some weights are not finite after the last step: lower the learning rate; none were written"
        )
    return learner.accuracy(test, "float32")


def _write(files: Files, net: nn.Module, card: dict[str, Any]) -> None:
    """Write weights and card, and remove the checkpoint; the hash of the weights goes into the card."""
    epochs = len(card["history"])
    with _explain_failed_write(files, epochs, epochs):
        weights = to_bytes(portable(net.state_dict()), {"format": "pt"})
        card["sha256"] = hashlib.sha256(weights).hexdigest()
        write_atomically(files.weights, weights)
        write_atomically(files.card, (json.dumps(card, indent=1) + "\n").encode())
    files.checkpoint.unlink(missing_ok=True)


@contextlib.contextmanager
def _explain_failed_write(files: Files, done: int, epochs: int) -> Iterator[None]:
    """Turn a failed write, as on a full disk, into an error that says which epochs are saved."""
    try:
        yield
    except OSError as error:
        saved = f"{files.checkpoint} is kept" if files.checkpoint.exists() else "nothing was saved yet"
        raise TrainingError(
            f"writing {files.weights.name} or its checkpoint failed after epoch {done} of {epochs} ({error}); "
            f"{saved}: free disk space, then continue with --resume (resume=True)"
        ) from error
