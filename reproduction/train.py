"""Train a source network from the published images: resumable, with a card that says how it was trained.

    trained = train("compact", "mnist", out="compact_mnist.safetensors")
    trained.accuracy, trained.net

A CPU gives the same weights for the same seed and number of threads, interrupted or not.

Shapes: B images a batch, C channels, H rows, W columns.
"""

import ast
import contextlib
import hashlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from reproduction.augment import Images, consistency, crop, draw_views, read_images
from reproduction.recipe import DEFAULT, Recipe, change, preset
from tribe.cli.options import AsJson, DataRoot, Device
from tribe.cli.output import messages, print_json
from tribe.core.precision import choose_device, float32_precision
from tribe.core.rng import Key
from tribe.data import datasets, models
from tribe.data.datasets import Dataset
from tribe.data.datasets.clean import Clean
from tribe.data.datasets.files import data_root
from tribe.experiments.provenance import machine
from tribe.experiments.spec import differences
from tribe.io.files import check_file, write_atomically
from tribe.io.tensors import portable
from tribe.registry import nearest

PRECISIONS = ("auto", "float32", "tf32", "bf16")
SAVE_EVERY = 20.0  # seconds between checkpoints, at least: writing one may take longer than an epoch
TEST_BATCH = 500
SEED_LIMIT = 2**63
EPOCH_SEED = 1_000_003  # the epochs of neighbouring seeds get different seeds

Entry = Mapping[str, Any]  # of the history: epoch, loss, train and test accuracy, seconds


class TrainingError(ValueError):
    """A training that cannot continue: the reason, and what to do."""


@dataclass(frozen=True)
class Trained:
    """A trained network and its card: settings, history, accuracy and machine."""

    net: nn.Module
    accuracy: float  # on the test set, in float32
    card: dict[str, Any]
    path: Path | None  # of the weights, if they were written


def train(
    model: str | nn.Module,
    dataset: str | tuple[Dataset, Dataset],
    recipe: Recipe | str = DEFAULT,
    *,
    data: str | None = None,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    force: bool = False,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    save_every: float = SAVE_EVERY,
    on_epoch: Callable[[Entry], None] | None = None,
) -> Trained:
    """Train a source network; a module is trained in place. The options are those of `train_command`.

    Args:
        dataset: a name, or a pair of data sets: training images, test images.
        out: a .safetensors file for the weights; beside it a card (.json) and, while training, a checkpoint
            (.checkpoint). None: nothing is written.
        save_every: seconds between checkpoints at least; they are written at the end of an epoch.
        on_epoch: called with an entry of the history after each epoch.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed must be a number from 0 to 2**63 - 1; got {seed}")
    if not isinstance(recipe, Recipe):
        recipe = preset(str(dataset), recipe).recipe
    place = choose_device(device)
    precision = _choose_precision(precision, place)
    files = None if out is None else _Files(Path(out), resume, force)
    name, images, test, classes = _open_data(dataset, data)
    if recipe.batch > len(images.labels):
        raise ValueError(f"a batch of {recipe.batch} images is more than the {len(images.labels)} there are")
    net, network = _build(model, images, classes, seed, place)
    learner = _Learner(net, recipe, images.to(place), seed, precision)
    counts = {"train": len(images.labels), "test": len(test.labels)}
    identity = {**network, "dataset": name, "images": counts, "recipe": asdict(recipe), "seed": seed}
    identity = json.loads(json.dumps(identity | {"precision": precision}))  # as in a file: tuples become lists
    history = files.restore(learner, identity) if files is not None and resume else []
    _run_epochs(learner, test.to(place), history, identity, files, save_every, on_epoch)
    accuracy = learner.accuracy(test.to(place), "float32")
    card = {**identity, "accuracy": accuracy, "history": history, "seconds": sum(e["seconds"] for e in history)}
    card |= machine(place)
    if files is not None:
        files.write(net, card)
    return Trained(net.eval(), accuracy, card, None if files is None else files.weights)


def _run_epochs(
    learner: "_Learner",
    test: Images,
    history: list[Entry],
    identity: Mapping[str, Any],
    files: "_Files | None",
    save_every: float,
    on_epoch: Callable[[Entry], None] | None,
) -> None:
    """Run the epochs that are left, and append each to the history."""
    saved = time.perf_counter()
    while len(history) < learner.recipe.epochs:
        start = time.perf_counter()
        loss, accuracy = learner.epoch(len(history))
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in epoch {len(history) + 1}: the training diverged, no weights were written. "
                f"Lower the learning rate (now {learner.recipe.lr}) or warm up longer"
            )
        entry = {"epoch": len(history) + 1, "loss": loss, "train": accuracy, "test": learner.accuracy(test)}
        history.append(entry | {"seconds": time.perf_counter() - start})
        if files is not None and len(history) < learner.recipe.epochs and time.perf_counter() - saved >= save_every:
            files.save(learner, identity, history)
            saved = time.perf_counter()
        if on_epoch is not None:
            on_epoch(history[-1])


# -- the network and its images ---------------------------------------------------------------------------------------


def _open_data(dataset: str | tuple[Dataset, Dataset], root: str | None) -> tuple[str, Images, Images, int]:
    """Read both splits into memory; return the name, training and test images, and the number of classes."""
    if isinstance(dataset, str):
        cls: Any = datasets.get(dataset)
        if not issubclass(cls, Clean):
            names = [name for name in datasets.names() if issubclass(datasets.get(name), Clean)]
            raise ValueError(f"{dataset!r} has no training images: {nearest(dataset, names)}")
        pair: tuple[Dataset, Dataset] = cls(data=root, split="train"), cls(data=root, split="test")
    else:
        pair = dataset
    name = dataset if isinstance(dataset, str) else type(pair[0]).__name__
    return name, read_images(pair[0]), read_images(pair[1]), len(pair[0].classes)


def _build(
    model: str | nn.Module, images: Images, classes: int, seed: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network, and its name and fields for the card. Raise ValueError if it does not fit the images."""
    shape = tuple(images.pixels.shape[1:])
    if isinstance(model, nn.Module):
        net, name, fields = model, type(model).__name__, {}
    else:
        design = models.architecture(model, classes=classes)
        if design.channels != shape[0]:
            raise ValueError(f"{model} takes images of {design.channels} channels, these have {shape[0]}")
        with _seeded(seed, device):
            net, name, fields = design.build(), model, asdict(design)
    net = net.to(device)
    try:
        with torch.no_grad():
            logits = net.eval()(torch.zeros(1, *shape, device=device))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name} does not take images of {shape}: {error}") from error
    if logits.shape != (1, classes):
        raise ValueError(f"{name} gives {tuple(logits.shape[1:])} numbers an image; there are {classes} classes")
    return net, {"model": name, "fields": fields}


def _choose_precision(precision: str, device: torch.device) -> str:
    """Return the precision; "auto" is bf16 on GPUs that have it, else float32."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}; got {precision!r}")
    cuda = device.type == "cuda"
    if precision == "auto":
        return "bf16" if cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if precision == "tf32" and not cuda:
        raise ValueError(f"precision {precision} is for CUDA devices, this is {device}: use float32 or bf16")
    return precision


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators (initial weights, dropout), and restore them on exit."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _Learner:
    """A network, its optimiser and its training images on one device."""

    def __init__(self, net: nn.Module, recipe: Recipe, images: Images, seed: int, precision: str) -> None:
        self.device = images.labels.device
        self.layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self.net: nn.Module = net.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.recipe, self.images, self.seed, self.precision = recipe, images, seed, precision
        self.optimizer = make_optimizer(net, recipe)

    def epoch(self, epoch: int) -> tuple[float, float]:
        """Train on every image once; return the mean loss and the accuracy during the epoch."""
        recipe, steps = self.recipe, len(self.images.labels) // self.recipe.batch
        loss_sum, correct = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.net.train()
        views = draw_views(len(self.images.labels), recipe.shift, recipe.flip, self.seed, epoch, self.device)
        epoch_seed = (self.seed * EPOCH_SEED + epoch) % SEED_LIMIT  # for dropout and other random layers
        with _seeded(epoch_seed, self.device), self._arithmetic(self.precision):
            for i, batch in enumerate(views.batches(recipe.batch)):
                step = epoch * steps + i
                for group in self.optimizer.param_groups:
                    group["lr"] = recipe.rate(step, recipe.epochs * steps)
                y = self.images.labels[batch.order]
                loss, logits = self._loss(crop(self.images.pixels, batch, recipe.border, recipe.cutout), y, step)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                loss_sum += loss.detach()
                correct += (logits.argmax(1) == y).sum()
        return loss_sum.item() / steps, correct.item() / (steps * recipe.batch)

    def _loss(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss of images x (B, C, H, W) uint8 with labels y (B,), and the logits without AugMix."""
        clean, augmix = x.float().div_(255), self.recipe.augmix
        if augmix is None:
            logits = self._logits(clean)
            return F.cross_entropy(logits, y, label_smoothing=self.recipe.smoothing), logits
        key = Key(torch.tensor([self.seed], device=self.device), torch.tensor([step], device=self.device))
        logits, *mixed = self._logits(torch.cat((clean[None], augmix(x, key))).flatten(0, 1)).split(len(y))
        loss = F.cross_entropy(logits, y, label_smoothing=self.recipe.smoothing)
        return loss + augmix.weight * consistency(logits, *mixed), logits

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x.contiguous(memory_format=self.layout))
        return logits.float()

    @torch.no_grad()
    def accuracy(self, images: Images, precision: str | None = None) -> float:
        """Return the share of correct predictions; BatchNorm uses its running statistics."""
        self.net.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        with self._arithmetic(precision or self.precision):
            for x, y in zip(images.pixels.split(TEST_BATCH), images.labels.split(TEST_BATCH), strict=True):
                correct += (self._logits(x.float() / 255).argmax(1) == y).sum()
        return correct.item() / len(images.labels)

    @contextlib.contextmanager
    def _arithmetic(self, precision: str) -> Iterator[None]:
        """Set the precision, and let cuDNN search the fastest convolutions: shapes stay the same."""
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            half = torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")
            with float32_precision("float32" if precision == "float32" else "tf32"), half:
                yield
        finally:
            torch.backends.cudnn.benchmark = before


def make_optimizer(net: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimiser; only weights with more than one axis decay."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, recipe.lr, momentum=recipe.momentum, nesterov=recipe.momentum > 0)
    return (torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW)(groups, recipe.lr)


# -- files ------------------------------------------------------------------------------------------------------------


class _Files:
    """The weights, the card and the checkpoint of a training, checked before the first step."""

    def __init__(self, weights: Path, resume: bool, force: bool) -> None:
        if weights.suffix != ".safetensors":
            raise ValueError(f"{weights}: weights are written as .safetensors; name a file with this suffix")
        check_file(weights)
        self.weights, self.card = weights, weights.with_suffix(".json")
        self.checkpoint = weights.with_suffix(".checkpoint")
        if force or (resume and self.checkpoint.exists()):
            return
        if self.checkpoint.exists():
            raise TrainingError(f"{self.checkpoint} holds a training that was interrupted: use --resume or --force")
        for path in (self.weights, self.card):
            if path.exists():
                raise FileExistsError(f"{path} exists already: name another output, or replace it with --force")

    def save(self, learner: _Learner, identity: Mapping[str, Any], history: list[Entry]) -> None:
        """Write a checkpoint, whole or not at all."""
        content = {"identity": dict(identity), "history": history}
        content |= {"net": learner.net.state_dict(), "optimizer": learner.optimizer.state_dict()}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_atomically(self.checkpoint, buffer.getvalue())

    def restore(self, learner: _Learner, identity: Mapping[str, Any]) -> list[Entry]:
        """Load the checkpoint, if there is one, and return its history."""
        if not self.checkpoint.exists():
            return []
        try:
            saved = torch.load(self.checkpoint, learner.device, weights_only=True)
            for field, theirs, ours in differences(saved["identity"], identity):
                raise TrainingError(
                    f"{self.checkpoint} is of another training: its {field} is {theirs!r}, yours is {ours!r}. Use the "
                    "same settings to continue, or --force to start over"
                )
            learner.net.load_state_dict(saved["net"])
            learner.optimizer.load_state_dict(saved["optimizer"])
        except TrainingError:
            raise
        except Exception as error:  # torch.load raises many types for a damaged file
            raise TrainingError(f"{self.checkpoint} is damaged ({error}): remove it to start over") from error
        history: list[Entry] = saved["history"]
        return history

    def write(self, net: nn.Module, card: dict[str, Any]) -> None:
        """Write weights and card, and remove the checkpoint; the hash of the weights goes into the card."""
        state = net.state_dict()
        if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
            raise TrainingError("some weights are not finite after the last step: lower the learning rate")
        weights = to_bytes(portable(state), {"format": "pt"})
        card["sha256"] = hashlib.sha256(weights).hexdigest()
        write_atomically(self.weights, weights)
        write_atomically(self.card, (json.dumps(card, indent=1) + "\n").encode())
        self.checkpoint.unlink(missing_ok=True)


# -- the command ------------------------------------------------------------------------------------------------------


def train_command(
    dataset: Annotated[str, typer.Argument(help="Data set: mnist, cifar10 or cifar100.")],
    model: Annotated[str | None, typer.Option(help="Network, see `tribe list models`; default: the preset's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Weights, a .safetensors file.", show_default="DATA/weights/MODEL_DATASET.safetensors"),
    ] = None,
    name: Annotated[
        str, typer.Option("--preset", help="Recipe: fast, or mnist's paper, cifar10's full, cifar100's augmix.")
    ] = DEFAULT,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the recipe: epochs=8, batch=128, lr=0.1, cutout=8.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of initial weights, order and augmentation.")] = 0,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32, tf32 or bf16.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint, if there is one.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing weights, or start over.")] = False,
    data: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Train a source network; write its weights and a card. With --resume, continue an interrupted training."""
    with messages(redirect=False):
        chosen = preset(dataset, name)
        recipe = change(chosen.recipe, **dict(_setting(text) for text in settings or ()))
        model = model or chosen.model
        root = data_root(None if data is None else str(data))
        if (
            out is None and root.is_dir()
        ):  # otherwise the data are missing too, and opening them gives the better message
            (root / "weights").mkdir(exist_ok=True)
        stem = model.replace("/", "_")
        file = f"{stem if stem.endswith(f'_{dataset}') else f'{stem}_{dataset}'}.safetensors"
        trained = train(
            model,
            dataset,
            recipe,
            data=None if data is None else str(data),
            out=out or root / "weights" / file,
            resume=resume,
            force=force,
            seed=seed,
            device=device,
            precision=precision,
            on_epoch=lambda entry: _print_epoch(entry, recipe.epochs),
        )
    if as_json:
        print_json(trained.card)
        return
    images = trained.card["images"]["test"]
    text = f"{model} on {dataset}: {100 * trained.accuracy:.2f} % of {images:,} test images correct\n{trained.path}"
    Console().print(text, soft_wrap=True, highlight=False)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes FIELD=VALUE, such as epochs=8; got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _print_epoch(entry: Entry, epochs: int) -> None:
    accuracy = f"train {100 * entry['train']:.2f} % test {100 * entry['test']:.2f} %"
    print(f"epoch {entry['epoch']}/{epochs} loss {entry['loss']:.4f} {accuracy}", file=sys.stderr, flush=True)
