"""A digit classifier meets bad weather: real MNIST digits, four domains, classes in bursts and out of proportion.

    python examples/digits.py [--json FILE] [--seed N]

Trains a small network on 1,600 digits (a few seconds), then lets each method predict a stream of the other 800,
corrupted, in bursts of one class, some classes ten times rarer than others. Nobody sees a label but the score.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import tribe
from tribe.atomic import write_atomically

TRAIN, BATCH, VIEWS = 1600, 32, 4  # each image is seen up to four times a domain, with new noise
SHOWN = {"source": "source", "bn": "BN", "tent": "TENT", "tribe": "TRIBE"}


def network() -> nn.Module:
    """Three convolutions with BatchNorm: what a classifier in the field looks like, made small."""

    def block(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    layers = [*block(1, 16), nn.MaxPool2d(2), *block(16, 32), nn.MaxPool2d(2), *block(32, 64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(x: torch.Tensor, y: torch.Tensor, epochs: int = 16) -> nn.Module:
    """Train the source model, with a little haze and noise so that it is not helpless outside."""
    net = network().train()
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for epoch in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            images = x[index].roll(torch.randint(-2, 3, (2,)).tolist(), (2, 3))
            contrast, haze = 1 - 0.4 * torch.rand(len(index), 1, 1, 1), 0.1 * torch.rand(len(index), 1, 1, 1)
            F.cross_entropy(net(images * contrast + haze + 0.1 * torch.randn_like(images)), y[index]).backward()
            optimiser.step()
        schedule.step()
        progress(f"training {epoch + 1}/{epochs}")
    return net.eval()


# What happens to images x at strength s, 0 to 1: weather comes and goes.
DOMAINS = {
    "clean": lambda x, s, noise: x,
    "fog": lambda x, s, noise: (1 - 0.5 * s) * x + 0.35 * s,
    "noise": lambda x, s, noise: x + 0.4 * s * noise,
    "night": lambda x, s, noise: (1 - 0.6 * s) * x + 0.04 * s * noise,
    "blur": lambda x, s, noise: (1 - s) * x + s * F.avg_pool2d(x, 5, 1, 2),
}


def stream(x: torch.Tensor, y: torch.Tensor, draw: np.random.Generator) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Batches (domain, images, labels): per domain a long tail over the classes, played in bursts."""
    batches = []
    for domain, corrupt in DOMAINS.items():
        rank = draw.permutation(10)  # which classes are rare changes with the domain
        parts = []
        for k in range(10):
            images = draw.permutation(np.flatnonzero(y.numpy() == k).repeat(VIEWS))
            images = images[: int(len(images) * 10 ** (-rank[k] / 9))]
            parts += np.array_split(images, draw.integers(2, 6))  # each class comes in two to five bursts
        order = np.concatenate([parts[i] for i in draw.permutation(len(parts))])
        noise = torch.from_numpy(draw.standard_normal((len(order), *x.shape[1:]), dtype=np.float32))
        strength = torch.linspace(0, torch.pi, len(order)).sin().view(-1, 1, 1, 1)
        images = corrupt(x[order], strength, noise).clamp(0, 1)
        batches += [(domain, *pair) for pair in zip(images.split(BATCH), y[order].split(BATCH), strict=True)]
    return batches


def progress(text: str) -> None:
    """Show where we are, on terminals only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Train, play the stream once per method, print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    with np.load(Path(__file__).with_name("digits.npz")) as data:
        x = torch.from_numpy(data["images"]).float().div(255).unsqueeze(1)
        y = torch.from_numpy(data["labels"]).long()
    net = train(x[:TRAIN], y[:TRAIN])
    batches = stream(x[TRAIN:], y[TRAIN:], np.random.default_rng(options.seed))

    errors: dict[str, dict[str, float]] = {}
    speed: dict[str, float] = {}
    for method in SHOWN:
        adapter = tribe.adapt(net, method)
        wrong: dict[str, list[torch.Tensor]] = {}
        begun = time.perf_counter()
        for i, (domain, images, labels) in enumerate(batches):
            wrong.setdefault(domain, []).append(adapter(images).argmax(1) != labels)
            progress(f"{method}: batch {i + 1}/{len(batches)}")
        seen = sum(len(labels) for _, _, labels in batches)
        speed[method] = 1e3 * (time.perf_counter() - begun) / seen
        errors[method] = {d: 100 * torch.cat(w).float().mean().item() for d, w in wrong.items()}
        errors[method]["all"] = 100 * torch.cat([t for w in wrong.values() for t in w]).float().mean().item()
    progress("")

    print(f"error in %: {seen} images, batches of {BATCH}, classes in bursts and in a long tail, seed {options.seed}")
    columns = [*DOMAINS, "all"]
    print(f"{'':8}" + "".join(f"{c:>8}" for c in columns) + f"{'ms/image':>11}")
    for method, label in SHOWN.items():
        print(f"{label:8}" + "".join(f"{errors[method][c]:8.1f}" for c in columns) + f"{speed[method]:11.2f}")
    if options.json:
        write_atomically(
            options.json, json.dumps({"seed": options.seed, "error": errors, "ms": speed}, indent=1).encode()
        )


if __name__ == "__main__":
    main()
