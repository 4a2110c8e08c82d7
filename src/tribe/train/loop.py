"""The training itself: look at every image once an epoch, learn, test, and never lose more than a little of it.

Shapes: B images a batch, C channels, H rows, W columns.
"""

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

import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from tribe.datasets import Dataset
from tribe.engine.precision import float32_precision
from tribe.engine.rng import Key
from tribe.lab.provenance import machine
from tribe.storage.atomic import write_atomically
from tribe.train import checkpoint
from tribe.train.augmix import consistency
from tribe.train.recipe import DEFAULT, Recipe, preset
from tribe.train.setup import Files, build, choose_precision, open_data, open_device, open_files, seeded
from tribe.train.views import Images, look, plan

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SAVE_EVERY = 20.0  # seconds between checkpoints, at least: writing one may take longer than an epoch
SHOW_EVERY = 0.5  # seconds between reports of progress, each of which waits for the device
TEST_BATCH = 500
SEED_LIMIT = 2**63
EPOCH_SEED = 1_000_003  # keeps the epochs of neighbouring seeds apart


class TrainingError(RuntimeError):
    """A training that could not go on: why, and what to do."""


class Progress(NamedTuple):
    """Where a training stands."""

    epoch: int  # the current one, from 1
    epochs: int
    step: int  # done in this epoch
    steps: int  # in an epoch
    loss: float  # the mean over this epoch so far
    train: float  # accuracy on this epoch's training images so far, as augmented
    test: float | None  # accuracy on the test set after the last whole epoch
    speed: float  # training images a second
    left: float  # seconds to the end, about
    done: bool  # whether the epoch is over and tested


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Trained:
    """A trained network and its card, which holds all that is known about it."""

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
    progress: Report | None = None,
) -> Trained:
    """Train a source network. A CPU gives the same weights for the same seed and threads, interrupted or not.

    Args:
        model: a name, as `tribe.models.create` takes it, or a network, trained in place from its present weights;
            None: the one the preset is for.
        dataset: a name, or a pair of data sets: images to learn from, images to test on.
        recipe: the numbers, or the name of a preset of the data set.
        fields: as `tribe.models.create` takes them, beside a name; the classes are the data set's.
        data: root of the data sets.
        out: a .safetensors file for the weights; beside it a card (.json) and, while training, a checkpoint
            (.safetensors.checkpoint). None: nothing is written.
        resume: go on from the checkpoint, if there is one.
        force: replace weights and a checkpoint that exist.
        seed: of initial weights, order and augmentation.
        device: "auto", "cpu", "cuda", "cuda:1".
        precision: "float32" (IEEE's), "tf32", "bf16", "fp16"; "auto" is bf16 on GPUs that have it, else float32.
        channels_last: memory layout of images; None: where it pays, on GPUs.
        compile: hand the network to torch.compile first.
        save_every: seconds between checkpoints at least; they are written at the end of an epoch.
        progress: told where the training stands, twice a second and after each epoch.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed must be a number from 0 to 2**63 - 1; got {seed}")
    if not isinstance(recipe, Recipe):
        model, recipe = _from_preset(model, dataset, recipe)
    if model is None:
        raise ValueError("say which network to train: only presets come with one")
    where = open_device(device)
    precision = choose_precision(precision, where)
    content = open_data(dataset, data)
    files = None if out is None else open_files(out, resume=resume, force=force)
    if recipe.batch > len(content.learn.labels):
        raise ValueError(f"a batch of {recipe.batch} images is more than the {len(content.learn.labels)} there are")
    net, told = build(model, fields, content, seed, where)
    layout = channels_last if channels_last is not None else where.type == "cuda"
    learner = Learner(net, recipe, content.learn.to(where), seed, precision, layout, compile)
    identity = {
        **told,
        "dataset": content.name,
        "images": {"train": len(content.learn.labels), "test": len(content.test.labels)},
        "recipe": asdict(recipe),
        "seed": seed,
        "precision": precision,
    }
    identity = json.loads(json.dumps(identity))  # as a file gives it back: tuples are lists there
    history: list[dict[str, Any]] = []
    if resume and files is not None and files.checkpoint.exists():
        history = learner.resume(files.checkpoint, identity)
    test = content.test.to(where)
    _learn(learner, test, history, identity, files, save_every, progress)
    if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values()):
        raise TrainingError(
            "some weights are not finite after the last step: lower the learning rate; none were written"
        )
    accuracy = learner.accuracy(test, "float32")
    card = {
        **identity,
        "accuracy": accuracy,
        "history": history,
        "parameters": sum(p.numel() for p in net.parameters()),
        "seconds": sum(entry["seconds"] for entry in history),
        "channels_last": layout,
        "compile": compile,
        **machine(where),
    }
    if files is not None:
        with _writing(files, history, recipe.epochs):
            weights = to_bytes(checkpoint.portable(net.state_dict()), {"format": "pt"})
            card["sha256"] = hashlib.sha256(weights).hexdigest()
            write_atomically(files.weights, weights)
            write_atomically(files.card, (json.dumps(card, indent=1) + "\n").encode())
        files.checkpoint.unlink(missing_ok=True)
    return Trained(net.eval(), accuracy, card, None if files is None else files.weights)


def _from_preset(
    model: str | nn.Module | None, dataset: str | tuple[Dataset, Dataset], name: str
) -> tuple[str | nn.Module, Recipe]:
    if not isinstance(dataset, str):
        raise ValueError("presets belong to data sets by name; for your own images pass a Recipe")
    found = preset(dataset, name)
    return found.model if model is None else model, found.recipe


def _learn(
    learner: "Learner",
    test: Images,
    history: list[dict[str, Any]],
    identity: Mapping[str, Any],
    files: Files | None,
    save_every: float,
    progress: Report | None,
) -> None:
    """All epochs that are left, each with its entry in the history."""
    epochs = learner.recipe.epochs
    watch = _Watch(learner, epochs, progress, history)
    saved = time.perf_counter()
    while len(history) < epochs:
        epoch, begun = len(history), time.perf_counter()
        loss, accuracy = learner.epoch(epoch, watch)
        watch.check(loss)
        entry = {"epoch": epoch + 1, "loss": loss, "train": accuracy, "test": learner.accuracy(test)}
        history.append({**entry, "seconds": time.perf_counter() - begun})
        watch.tell(epoch, learner.steps, loss, accuracy, done=True)
        if files is not None and len(history) < epochs and time.perf_counter() - saved >= save_every:
            with _writing(files, history[:-1], epochs):
                learner.save(files.checkpoint, identity, history)
            saved = time.perf_counter()


class _Watch:
    """Looks at a training while it runs: tells the caller where it stands, and stops it if it goes wrong."""

    def __init__(self, learner: "Learner", epochs: int, report: Report | None, history: list[dict[str, Any]]) -> None:
        self.learner, self.epochs, self.report, self.history = learner, epochs, report, history
        self.start, self.before = time.perf_counter(), len(history) * learner.steps
        self.told = self.start

    def step(self, epoch: int, step: int, loss: Tensor, correct: Tensor) -> None:
        """After a step; loss and correct predictions are sums over this epoch, on the device."""
        if step < self.learner.steps and time.perf_counter() - self.told >= SHOW_EVERY:
            mean = loss.item() / step
            self.check(mean)
            self.tell(epoch, step, mean, correct.item() / (step * self.learner.recipe.batch))

    def check(self, loss: float) -> None:
        """Stop a training that diverged."""
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in epoch {len(self.history) + 1} of {self.epochs}: the training diverged. "
                f"Lower the learning rate (now {self.learner.recipe.lr}) or warm up longer; no weights were written"
            )

    def tell(self, epoch: int, step: int, loss: float, train: float, done: bool = False) -> None:
        """Report where the training stands."""
        self.told = time.perf_counter()
        if self.report is None:
            return
        steps = self.learner.steps
        since = epoch * steps + step - self.before  # steps since the start of this process
        speed = since / max(self.told - self.start, 1e-9)
        left = (self.epochs * steps - epoch * steps - step) / max(speed, 1e-9)
        test = self.history[-1]["test"] if self.history else None
        images = speed * self.learner.recipe.batch
        self.report(Progress(epoch + 1, self.epochs, step, steps, loss, train, test, images, left, done))


class Learner:
    """A network, its optimiser and its images on one device."""

    def __init__(
        self,
        net: nn.Module,
        recipe: Recipe,
        images: Images,
        seed: int,
        precision: str,
        channels_last: bool,
        compile: bool,
    ) -> None:
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.net: nn.Module = net.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.forward: Callable[[Tensor], Tensor] = torch.compile(net, dynamic=False) if compile else net
        self.recipe, self.images, self.seed, self.precision = recipe, images, seed, precision
        self.device = images.labels.device
        self.steps = len(images.labels) // recipe.batch
        self.optimizer = _optimizer(net, recipe)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")

    def epoch(self, epoch: int, watch: _Watch) -> tuple[float, float]:
        """Look at every image once; the mean loss, and the accuracy on the way."""
        recipe, total = self.recipe, self.recipe.epochs * self.steps
        loss_sum, correct = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.net.train()
        views = plan(len(self.images.labels), recipe.shift, recipe.flip, self.seed, epoch, self.device)
        own = (self.seed * EPOCH_SEED + epoch) % SEED_LIMIT  # of dropout and the like, should the network have them
        with seeded(own, self.device), self._arithmetic(self.precision):
            for i, part in enumerate(views.batches(recipe.batch)):
                step = epoch * self.steps + i
                for group in self.optimizer.param_groups:
                    group["lr"] = recipe.rate(step, total)
                y = self.images.labels[part.order]
                loss, logits = self._loss(look(self.images.pixels, part, recipe.border, recipe.cutout), y, step)
                self.optimizer.zero_grad(set_to_none=True)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                loss_sum += loss.detach()
                correct += (logits.argmax(1) == y).sum()
                watch.step(epoch, i + 1, loss_sum, correct)
        return loss_sum.item() / self.steps, correct.item() / (self.steps * recipe.batch)

    def _loss(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss of images x (B, C, H, W) uint8 with labels y (B,), and the logits of the images themselves."""
        clean, augmix = x.float().div_(255), self.recipe.augmix
        if augmix is None:
            logits = self._logits(clean)
            return F.cross_entropy(logits, y, label_smoothing=self.recipe.smoothing), logits
        key = Key(torch.tensor([self.seed], device=self.device), torch.tensor([step], device=self.device))
        logits, *mixed = self._logits(torch.cat((clean[None], augmix(x, key))).flatten(0, 1)).split(len(y))
        loss = F.cross_entropy(logits, y, label_smoothing=self.recipe.smoothing)
        return loss + augmix.weight * consistency(logits, *mixed), logits

    def _logits(self, x: Tensor) -> Tensor:
        with self._autocast(self.precision):
            return self.forward(x.contiguous(memory_format=self.layout)).float()

    @torch.no_grad()
    def accuracy(self, images: Images, precision: str | None = None) -> float:
        """The share of images whose class the network predicts, BatchNorm with its running statistics."""
        precision = precision or self.precision
        self.net.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        with self._arithmetic(precision), self._autocast(precision):
            for x, y in zip(images.pixels.split(TEST_BATCH), images.labels.split(TEST_BATCH), strict=True):
                logits = self.net((x.float() / 255).contiguous(memory_format=self.layout))
                correct += (logits.argmax(1) == y).sum()
        return correct.item() / len(images.labels)

    def save(self, path: Path, identity: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Write a checkpoint."""
        checkpoint.save(path, self.net, self.optimizer, identity, history, self.scaler.state_dict())

    def resume(self, path: Path, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Go on from a checkpoint of the same training: its history."""
        saved = checkpoint.read(path)
        checkpoint.check_identity(path, saved.identity, identity)
        checkpoint.restore(saved, self.net, self.optimizer)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(saved.scaler)
        return saved.history

    def _autocast(self, precision: str) -> torch.autocast:
        return torch.autocast(self.device.type, HALF.get(precision), enabled=precision in HALF)

    @contextlib.contextmanager
    def _arithmetic(self, precision: str) -> Iterator[None]:
        """What float32 means on a GPU; which also tries what convolves fastest, as shapes stay the same."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            with float32_precision("float32" if precision == "float32" else "tf32"):
                yield
        finally:
            torch.backends.cudnn.benchmark = before


def _optimizer(net: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimiser; only weights with more than one axis decay."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, recipe.lr, momentum=recipe.momentum, nesterov=recipe.momentum > 0)
    return (torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW)(groups, recipe.lr)


@contextlib.contextmanager
def _writing(files: Files, history: list[dict[str, Any]], epochs: int) -> Iterator[None]:
    """Say what is kept, should the disk be full."""
    try:
        yield
    except OSError as error:
        kept = f"{files.checkpoint} is kept" if files.checkpoint.exists() else "nothing was saved yet"
        raise TrainingError(
            f"writing {files.weights.name} or its checkpoint failed after epoch {len(history)} of {epochs} ({error}); "
            f"{kept}: make room, then go on with --resume (resume=True)"
        ) from error
