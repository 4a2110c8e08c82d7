"""One network in training: an epoch, the loss, the accuracy, and its checkpoint.

Shapes: B images a batch, C channels, H rows, W columns.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.train import checkpoint
from reproduction.train.augmix import consistency
from reproduction.train.recipe import Recipe
from reproduction.train.setup import seeded
from reproduction.train.views import Images, crop, draw_views
from tribe.core.precision import float32_precision
from tribe.core.rng import Key

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
TEST_BATCH = 500
SEED_LIMIT = 2**63
EPOCH_SEED = 1_000_003  # the epochs of neighbouring seeds get different seeds

OnStep = Callable[[int, int, Tensor, Tensor], None]  # epoch, steps done, sum of losses, number of correct predictions


class Learner:
    """A network, its optimiser and its training images on one device."""

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

    def epoch(self, epoch: int, on_step: OnStep) -> tuple[float, float]:
        """Train on every image once; returns the mean loss and the accuracy during the epoch."""
        recipe, total = self.recipe, self.recipe.epochs * self.steps
        loss_sum, correct = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.net.train()
        views = draw_views(len(self.images.labels), recipe.shift, recipe.flip, self.seed, epoch, self.device)
        epoch_seed = (self.seed * EPOCH_SEED + epoch) % SEED_LIMIT  # for dropout and other random layers
        with seeded(epoch_seed, self.device), self._arithmetic(self.precision):
            for i, batch in enumerate(views.batches(recipe.batch)):
                step = epoch * self.steps + i
                for group in self.optimizer.param_groups:
                    group["lr"] = recipe.rate(step, total)
                y = self.images.labels[batch.order]
                loss, logits = self._loss(crop(self.images.pixels, batch, recipe.border, recipe.cutout), y, step)
                self.optimizer.zero_grad(set_to_none=True)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                loss_sum += loss.detach()
                correct += (logits.argmax(1) == y).sum()
                on_step(epoch, i + 1, loss_sum, correct)
        return loss_sum.item() / self.steps, correct.item() / (self.steps * recipe.batch)

    def _loss(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss of images x (B, C, H, W) uint8 with labels y (B,), and the logits of the images without AugMix."""
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
        """The share of correct predictions; BatchNorm uses its running statistics."""
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
        """Load a checkpoint of the same training; returns its history."""
        saved = checkpoint.read(path)
        checkpoint.check_identity(path, saved.identity, identity)
        checkpoint.restore(path, saved, self.net, self.optimizer, self.scaler)
        return saved.history

    def _autocast(self, precision: str) -> torch.autocast:
        return torch.autocast(self.device.type, HALF.get(precision), enabled=precision in HALF)

    @contextlib.contextmanager
    def _arithmetic(self, precision: str) -> Iterator[None]:
        """Set float32's precision on a GPU, and let cuDNN search the fastest convolutions: shapes stay the same."""
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
