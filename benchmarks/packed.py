"""What class statistics in 8 bits change over a long stream: `python -m benchmarks.packed --classes 1000 --steps 2000`.

A small network with many classes plays one stream several times, side by side: with full statistics, with packed ones
(`class_stats="packed"`), with statistics that are rounded to bfloat16 after every step, and with full statistics and
images that differ by a millionth, which says how far any rounding spreads. The classes are patterns with noise; a batch
holds 24 of them, and the world (contrast, brightness, noise, blur, gamma) changes every hundred steps.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.state import Stats, count_bytes, tree_map
from tribe.health.changes import squared_moves
from tribe.methods import create

SIZE, BATCH, TOGETHER = 16, 64, 24  # pixels, images of a batch, classes of a batch
WORLDS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, noise: x,
    lambda x, noise: (x - 0.5) * 0.35 + 0.5,
    lambda x, noise: (x + 0.3).clamp(0, 1),
    lambda x, noise: (x + 0.15 * noise).clamp(0, 1),
    lambda x, noise: F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1),
    lambda x, noise: x**2,
)


class World:
    """Images of classes that are patterns, from a generator of its own."""

    def __init__(self, classes: int, noise: float, seed: int) -> None:
        patterns = torch.Generator().manual_seed(0)
        self.patterns = F.interpolate(torch.randn(classes, 3, 5, 5, generator=patterns), size=SIZE, mode="bicubic")
        self.noise, self.generator = noise, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def images(self, labels: Tensor) -> Tensor:
        noise, light = self.normal(len(labels), 3, SIZE, SIZE), self.normal(len(labels), 3, 1, 1)
        return torch.sigmoid(self.patterns[labels] + self.noise * noise + 0.3 * light)

    def stream(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches and labels; some classes are more frequent than others."""
        classes = len(self.patterns)
        weights = (torch.arange(classes) + 1.0).rsqrt()[torch.randperm(classes, generator=self.generator)]
        for step in range(steps):
            few = torch.multinomial(weights, min(TOGETHER, classes), generator=self.generator)
            labels = few[torch.randint(0, len(few), (BATCH,), generator=self.generator)]
            world = WORLDS[step // 100 % len(WORLDS)]
            yield world(self.images(labels), self.normal(BATCH, 3, SIZE, SIZE)), labels


@torch.no_grad()
def trained(world: World) -> nn.Module:
    """Random convolutions with a linear classifier, fitted to clean images by ridge regression."""
    classes, widths = len(world.patterns), (3, 16, 32, 64)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, 1 + (i > 0), 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    body = nn.Sequential(*layers, nn.Flatten())
    for _ in range(20):
        body(world.images(torch.randint(0, classes, (256,), generator=world.generator)))
    labels = torch.arange(classes).repeat_interleave(max(4, 8000 // classes))
    seen = torch.cat([body.eval()(world.images(part)) for part in labels.split(500)])
    centre = seen.mean(0)
    inner = (seen - centre).T @ (seen - centre) + 30 * torch.eye(seen.shape[1])
    weight = 12 * torch.linalg.solve(inner, (seen - centre).T @ (F.one_hot(labels, classes) - 1 / classes))
    head = nn.Linear(*weight.shape)
    head.weight.copy_(weight.T)
    head.bias.copy_(-centre @ weight)
    return nn.Sequential(*body, head).eval()


def rounded(state: Any) -> Any:
    """A state whose class statistics were stored in bfloat16."""
    pair, anchor = (tree_map(lambda t: t.bfloat16().to(t.dtype), Stats(*s)) for s in (state.pair, state.anchor))
    return state._replace(pair=pair, anchor=anchor)


def study(classes: int, steps: int, noise: float) -> dict[str, Any]:
    """The errors of each, and how far its predictions and its pooled statistics are from those of full ones."""
    world = World(classes, noise, seed=1)
    net = Backbone(trained(world))
    kinds = {"full": "full", "packed": "packed", "bfloat16": "full", "images x (1 + 1e-6)": "full"}
    methods = {name: create("tribe", classes=classes, class_stats=kind) for name, kind in kinds.items()}
    states = {name: method.init(net) for name, method in methods.items()}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in kinds}
    found: dict[str, Any] = {name: {"megabytes": count_bytes(state) / 1e6} for name, state in states.items()}
    logits: dict[str, Tensor] = {}
    for x, labels in world.stream(steps):
        for name, method in methods.items():
            logits[name], states[name] = method.step(net, states[name], (x * (1 + 1e-6) if "x" in name else x)[None])
            states[name] = rounded(states[name]) if name == "bfloat16" else states[name]
            ours, wanted = logits[name][0], logits["full"][0]
            error, other = (ours.argmax(-1) != labels).float().mean(), ours.argmax(-1) != wanted.argmax(-1)
            sums[name] += torch.stack([error, other.float().mean(), (ours - wanted).abs().mean() / wanted.std()])
    stats = {name: method.deployed(net, states[name]).stats for name, method in methods.items()}
    for name in kinds:
        apart = squared_moves(net, stats["full"], stats[name]).mean().sqrt().item()
        error, other, gap = (sums[name] / steps).tolist()
        found[name] |= {"error": error, "other predictions": other, "logits": gap, "statistics": apart}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--noise", type=float, default=1.0, help="of images, relative to the patterns of classes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, numbers in study(given.classes, given.steps, given.noise).items():
        print(name, json.dumps({key: float(f"{value:.4g}") for key, value in numbers.items()}))
