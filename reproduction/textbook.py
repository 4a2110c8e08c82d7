"""Compare our TENT with TENT in plain PyTorch (BatchNorm in training mode, torch.optim) over a whole stream.

``python -m reproduction.textbook --model wrn28_10 --device cuda --seeds 16 --json results/draws/tent.json``

When a method collapses, the errors of whole streams are chaotic. One run cannot show whether two implementations agree;
many can. With data that are corrupted while they are read (``live-cifar10-c``), every seed draws other noise. Images on
disk (``cifar10-c``) stay the same, and every seed changes the last digits of the affine parameters at the start.
docs/reproduction.md says what they show.
"""

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tribe
from tribe import metrics
from tribe.core.precision import PRECISIONS, choose_device, deterministic, float32_precision
from tribe.data.datasets import Dataset, fingerprint
from tribe.data.datasets.files import data_root
from tribe.experiments import workbench
from tribe.experiments.provenance import machine
from tribe.io.files import write_atomically

BATCH = 64
NUDGE = 1e-6  # of an affine parameter: a few units in the last place of float32
ERRORS = {"inst": metrics.instance_error, "cat": metrics.category_error}


def textbook(net: nn.Module, stream: tribe.Stream, device: torch.device, lr: float = 1e-3) -> Tensor:
    """Run plain TENT over a stream and return its predictions, image by image."""
    net = copy.deepcopy(net).to(device).train().requires_grad_(False)
    affine: list[Tensor] = []
    for layer in _norms(net):
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
        affine += [layer.weight.requires_grad_(), layer.bias.requires_grad_()]
    adam = torch.optim.Adam(affine, lr=lr)
    predictions = []
    for batch in stream:
        real = batch.valid[0]
        logits = net(batch.x[0][real].to(device))
        adam.zero_grad()
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        entropy.backward()
        adam.step()
        predictions.append(logits.detach().argmax(1).cpu())
    return torch.cat(predictions)


def nudge(net: nn.Module, seed: int) -> None:
    """Change the last digits of the affine parameters."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in _norms(net):
            for parameter in (layer.weight, layer.bias):
                parameter.mul_(1 + NUDGE * torch.randn(parameter.shape, generator=draws))


def _norms(net: nn.Module) -> list[nn.BatchNorm2d]:
    return [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]


def build_draw(o: argparse.Namespace, seed: int) -> tuple[Dataset, nn.Module]:
    """Return the data and the trained network of a draw."""
    data = workbench.build_dataset(o.dataset, o.data, {"seed": seed} if is_live(o) else {})
    path = tribe.models.find(o.model, workbench.trained_on(data), data_root(o.data and str(o.data)))
    return data, tribe.models.load(o.model, path)


def is_live(o: argparse.Namespace) -> bool:
    """Return whether images are corrupted while they are read."""
    return bool(o.dataset.startswith("live-"))


def setting(o: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return what all draws share, with the fingerprints of images and weights."""
    data, net = build_draw(o, o.first)
    shared = {name: getattr(o, name) for name in ("dataset", "model", "imbalance", "seed", "precision")}
    shared |= {"images": fingerprint(data), "weights": tribe.Backbone(net).fingerprint()}
    return shared | {"method": "tent", "device": device.type, "machine": machine(device), "batch": BATCH}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser("python -m reproduction.textbook", description=__doc__.partition("\n")[0])
    p.add_argument(
        "--dataset", default="live-cifar10-c", help="live-...: each draw has other noise; else: other last digits"
    )
    p.add_argument("--model", default="resnet20")
    p.add_argument("--data", type=Path, help="root of the data sets and of weights")
    p.add_argument("--seeds", type=int, default=1, help="number of draws")
    p.add_argument("--first", type=int, default=0, help="seed of the first draw")
    p.add_argument("--imbalance", type=float, default=100)
    p.add_argument("--seed", type=int, default=425, help="seed of the stream")
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="tf32", choices=PRECISIONS[:2])
    p.add_argument("--json", type=Path, help="also write the numbers to this file, after every draw")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    o = options(argv)
    device = choose_device(o.device)
    scenario = tribe.scenarios.create("gli-f", imbalance=o.imbalance)
    shared = setting(o, device)
    drawn: list[int] = []
    errors: dict[str, dict[str, list[float]]] = {who: {kind: [] for kind in ERRORS} for who in ("ours", "textbook")}
    with float32_precision(o.precision), deterministic():  # as experiments compute
        for seed in range(o.first, o.first + o.seeds):
            data, net = build_draw(o, seed)
            if not is_live(o):
                nudge(net, seed)
            stream = tribe.Stream(data, scenario, seeds=(o.seed,), batch=BATCH)
            method = tribe.methods.create("tent", classes=len(data.classes))
            (record,) = tribe.run(tribe.Backbone(net).to(device), method, stream)
            theirs = record._replace(prediction=textbook(net, stream, device))
            drawn.append(seed)
            for who, played in (("ours", record), ("textbook", theirs)):
                for kind, error in ERRORS.items():
                    errors[who][kind].append(round(100 * float(error(played)), 4))
            ends = {who: " / ".join(f"{values[-1]:.2f}" for values in of.values()) for who, of in errors.items()}
            print(f"draw {seed}: tribe {ends['ours']}, torch.optim {ends['textbook']}", flush=True)
            if o.json is not None:
                write_atomically(o.json, json.dumps({**shared, "draws": drawn, **errors}, indent=1).encode() + b"\n")
    if len(drawn) > 1:
        for who, of in errors.items():
            spread = (
                f"{k} {statistics.mean(v):.2f}, standard deviation {statistics.stdev(v):.2f}" for k, v in of.items()
            )
            print(f"{who}: {'; '.join(spread)}")


if __name__ == "__main__":
    main()
