"""Study prepared networks: what they deliver, whether estimates hold, and whether `tribe try` decides right.

``python -m studies.deploy.run --model resnet20 --weights FILE --dataset cifar10 --data ROOT --out FILE.json``

The network is prepared with the first 1,000 clean test images; streams draw from the others. `DAYS` are played in
bursts and in random order: the error of the source and of what is delivered in each part, and of every window of 500
answers whether its interval holds the accuracy. Three recordings are judged by 200 random draws of at most 100 labels.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tribe
from studies.deploy.streams import DAYS, Labelled, record
from studies.deploy.tables import BLOCKS
from studies.pages import play_or_render
from tribe.cli.custom import custom_network
from tribe.io.files import write_atomically
from tribe.trial.recordings import open_recording
from tribe.trial.replay import play
from tribe.trial.trial import Trial
from tribe.trial.verdict import decide

HELD_OUT = 1000  # images that prepare
WINDOW = 500
DRAWS, LABELS = 200, 100
HARD = (0.01, 0.0, -0.01)  # gains of recordings on which many frames differ and little or nothing is gained
STEP = 5  # labels between two looks
HELPS = {"mnist": ("glass_blur", "motion_blur", "canny_edges"), "cifar10": ("fog@5", "gaussian_noise@5", "contrast@5")}
FAMILIES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Play one network, and write its results; or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", default="11,12")
    parser.add_argument("--each", type=int, default=1000, help="images of a part")
    parser.add_argument("--budget", type=float, default=1.5)
    parser.add_argument("--method")
    parser.add_argument("--families", action="store_true", help="also leave families of corruptions out")
    parser.add_argument("--name", help="what the tables call the network")
    parser.add_argument("--out", type=Path, default=Path("deploy.json"))
    play_or_render(parser, argv, Path(__file__).parent, BLOCKS, measure)


def measure(given: argparse.Namespace) -> None:
    """Play a network, and write its results."""
    net = network(given.model, given.weights, given.dataset)
    clean = tribe.datasets.create(given.dataset, **({"data": str(given.data)} if given.data else {}))
    labels = clean.labels(clean.domains[0])
    images = clean.images(clean.domains[0], torch.arange(len(labels)))
    prepared = tribe.prepare(net, images[:HELD_OUT], labels[:HELD_OUT], budget=given.budget, method=given.method)
    rest = images[HELD_OUT:], labels[HELD_OUT:]
    result: dict[str, Any] = {
        "network": given.name or given.model,
        "method": prepared.method,
        "card": prepared.card.json(),
    }
    result["days"] = [
        {"seed": seed, "bursts": bursts, **deliver(net, prepared, record(*rest, DAYS, given.each, bursts, seed))}
        for seed in map(int, given.seeds.split(","))
        for bursts in (True, False)
    ]
    result["verdicts"] = [
        judge(net, prepared, name, stream) for name, stream in recordings(given.dataset, rest).items()
    ]
    if given.families:
        result["families"] = [left_out(net, images, labels, name, given) for name in FAMILIES]
    write_atomically(given.out, json.dumps(result, indent=1).encode())
    show(result)


def network(name: str, weights: Path | None, dataset: str) -> nn.Module:
    """Return a network by its name, or from a file."""
    if ":" in name:
        return custom_network(name, weights)
    loaded: nn.Module = tribe.models.load(name, weights or tribe.models.find(name, dataset))
    return loaded


def deliver(net: nn.Module, prepared: tribe.Prepared, stream: Labelled, batch: int = 64) -> dict[str, Any]:
    """Return the errors in each part, and the estimates of windows beside their accuracy."""
    model, source = tribe.adapt(net, prepared), tribe.adapt(net, "source")
    right, plain, windows = list[Tensor](), list[Tensor](), list[dict[str, float]]()
    on = list[tuple[int, tuple[str, ...]]]()  # images, and the alarms that are on
    for x, y in zip(stream.images.split(batch), stream.labels.split(batch), strict=True):
        x = x.float() / 255
        plain.append(source.predict(x).argmax(-1) == y)
        right.append(model(x).argmax(-1) == y)
        done = sum(map(len, right))
        on.append((done, model.health[0].alarms if model.health is not None else ()))
        if done // WINDOW > (done - len(y)) // WINDOW and model.health is not None:
            health = model.health[0]
            last, before = (torch.cat(column)[-WINDOW:].double().mean().item() for column in (right, plain))
            known = {"low": health.low, "high": health.high, "estimate": health.accuracy, "accuracy": last}
            of_source = {"source_low": health.source_low, "source_high": health.source_high, "source": before}
            windows.append({"at": done, **known, **of_source, "familiar": health.familiar})
    errors = [100 * (1 - torch.cat(column).double()) for column in (plain, right)]
    parts = [
        {
            "part": name,
            **dict(zip(("source", "delivered"), (e[stream.part == k].mean().item() for e in errors), strict=True)),
        }
        for k, name in enumerate(stream.parts)
    ]
    alarms = [[event.kind, event.image] for event in model.events]
    return {"parts": parts, "windows": windows, "alarms": alarms, "delays": delays(stream, on)}


def delays(stream: Labelled, on: Sequence[tuple[int, tuple[str, ...]]]) -> dict[str, int | None]:
    """Return how many images after the first change to night alarms begin, and after that to clean images they end.

    None: not in this part; 0: it was on, or off, before.
    """
    found = dict[str, int | None]()
    for kind in ("shift", "accuracy"):
        for name, part in (("night", "night"), ("clean", "clean")):
            place = next((k for k, p in enumerate(stream.parts) if p == part and k), None)
            if place is None:
                continue
            first, last = (int(i) for i in (stream.part == place).nonzero()[[0, -1], 0])
            here = [(n, kind in kinds) for n, kinds in on if first <= n <= last + 1]
            hit = [n - first for n, is_on in here if is_on == (name == "night")]
            found[f"{kind}, {name}"] = None if not hit else 0 if hit[0] == here[0][0] - first else hit[0]
    return found


def recordings(dataset: str, rest: tuple[Tensor, Tensor]) -> dict[str, Labelled]:
    """Return the recordings on which adapting helps, changes nothing, and cannot help."""
    kinds = {"helps": HELPS[dataset], "nothing changes": ("clean",), "cannot help": ("scrambled",)}
    # In random order: in bursts the time filter helps on clean images, too.
    return {name: record(*rest, parts, 3000 // len(parts), name == "helps", 21) for name, parts in kinds.items()}


def judge(net: nn.Module, prepared: tribe.Prepared, name: str, stream: Labelled) -> dict[str, Any]:
    """Return the true gain of a recording, and what random draws of labels say."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "frames.npy")
        np.save(path, stream.images.numpy())
        trial: Trial = play(open_recording(path), tribe.adapt(net, prepared))
    c, labels = trial.columns, stream.labels.numpy()
    gains = ((c.adapted == labels).astype(int) - (c.source == labels))[trial.differing]
    rules = {"error": trial.error, "matters": trial.matters}
    found = {
        "recording": name,
        "frames": trial.frames,
        "source": 100 * float((c.source != labels).mean()),
        "delivered": 100 * float((c.adapted != labels).mean()),
        **draw_verdicts(gains, trial.frames, rules),
    }
    if name == "helps":
        found["hard"] = [draw_verdicts(*thin(gains, trial.frames, gain), rules) for gain in HARD]
    return found


def thin(gains: NDArray[np.int64], frames: int, target: float) -> tuple[NDArray[np.int64], int]:
    """Leave out frames that adapting helps until the gain is a ``target`` share of the frames; return both."""
    others = gains[gains <= 0]
    rest = frames - int((gains > 0).sum())
    better = round((target * rest - int(others.sum())) / (1 - target))
    return np.concatenate([others, np.ones(max(better, 0), np.int64)]), rest + max(better, 0)


def draw_verdicts(gains: NDArray[np.int64], frames: int, rules: Mapping[str, float]) -> dict[str, Any]:
    """Return the gain, the answers of draws of labels, and the median of the labels that they need."""
    answers, needed = dict[str, int](), []
    for seed in range(DRAWS):
        drawn = gains[np.random.default_rng(seed).permutation(len(gains))][:LABELS]
        answer, count = "undecided", 0
        for count in (*range(0, len(drawn), STEP), len(drawn)):
            answer = decide(drawn[:count], len(gains), frames, **rules, forecast=False).answer
            if answer != "undecided":
                break
        answers[answer] = answers.get(answer, 0) + 1
        needed.append(count)
    gain = 100 * float(gains.sum()) / frames
    return {"differing": len(gains), "gain": gain, "answers": answers, "labels": float(np.median(needed))}


def left_out(net: nn.Module, images: Tensor, labels: Tensor, family: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the windows of a family of corruptions that the preparation has not seen."""
    seen = [name for other, names in FAMILIES.items() if other != family for name in names]
    prepared = tribe.prepare(
        net, images[:HELD_OUT], labels[:HELD_OUT], budget=given.budget, method=given.method, corruptions=seen
    )
    parts = tuple(f"{name}@{severity}" for name in FAMILIES[family] for severity in (3, 5))
    stream = record(images[HELD_OUT:], labels[HELD_OUT:], parts, given.each, True, 31)
    return {"family": family, **deliver(net, prepared, stream)}


def show(result: dict[str, Any]) -> None:
    """Print the results in short."""
    print(result["network"], result["method"])
    for day in result["days"]:
        told = " ".join(f"{p['part']} {p['source']:.1f}/{p['delivered']:.1f}" for p in day["parts"])
        print(f"seed {day['seed']} {'bursts' if day['bursts'] else 'random'}: {told}; {day['alarms'][:6]}")
    for name in ("days", "families"):
        windows = [w for one in result.get(name, ()) for w in one["windows"]]
        if windows:
            held = np.mean([w["low"] <= w["accuracy"] <= w["high"] for w in windows])
            of_source = np.mean([w["source_low"] <= w["source"] <= w["source_high"] for w in windows])
            off = np.mean([abs(w["estimate"] - w["accuracy"]) for w in windows])
            wide = np.mean([w["high"] - w["low"] for w in windows])
            kept = f"held {held:.0%}, source {of_source:.0%}"
            print(f"{name}: {len(windows)} windows, {kept}, off {off:.3f}, wide {wide:.2f}")
    for verdict in result["verdicts"]:
        print(verdict)


if __name__ == "__main__":
    main()
