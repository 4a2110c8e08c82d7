"""Study what the guard saves and costs: clean streams, corrupted ones, and faults followed by normal images.

``python -m benchmarks.guard_study --data data --model resnet20 --weights FILE --parts clean,faults``

Parts: (clean) streams in which nothing has changed, in random order and in bursts, in batches of 1, 16 and 64;
(corrupted) one corruption after another; (faults) normal images, a fault, normal images again: the errors after the
fault, of the source, the method unguarded, guarded, and the method that never met the fault. Results go to a JSON file
in ``--out``, after every stream. ``--render`` writes the tables of docs/health.md from the files in benchmarks/results.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import pages
from benchmarks.pages import RESULTS
from tribe import corruptions, datasets, methods, models
from tribe.engine.backbone import Backbone
from tribe.storage.atomic import write_atomically

PAGE = Path(__file__).parents[1] / "docs" / "health.md"
BATCH = 64
NORMAL = "fog", 3  # the world before and after a fault
BEFORE, AFTER, LATER = 1000, 2000, 1000  # images before a fault, after it, and of those the last ones
WORLDS = ("gaussian_noise", "pixelate", "motion_blur", "jpeg_compression", "fog", "contrast", "brightness")
RATES = {"lr x 10": 1e-2, "lr x 30": 3e-2, "lr x 100": 1e-1}
Row = dict[str, Any]


class Images(NamedTuple):
    """Images (N, ...) in [0, 1], or something else in a fault, and their labels; -1: they do not count."""

    x: Tensor
    y: Tensor


class Source:
    """Clean labelled images, drawn by a seed, and corrupted on demand."""

    def __init__(self, name: str, data: str | None) -> None:
        self.dataset = datasets.create(name, **({} if data is None else {"data": data}))
        self.labels = self.dataset.labels("clean")

    def draw(self, count: int, seed: int, world: tuple[str, int] | None = None, bursts: bool = False) -> Images:
        """Draw images; an image may recur. In bursts, each class in turn has 50 of them."""
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(len(self.labels), (count,), generator=generator)
        if bursts:
            index = torch.cat([part[self.labels[part].argsort(stable=True)] for part in index.split(500)])
        return self.take(index, world)

    def of_class(self, label: int, count: int, seed: int, world: tuple[str, int] | None) -> Images:
        """Images of one class only."""
        places = torch.where(self.labels == label)[0]
        generator = torch.Generator().manual_seed(seed)
        return self.take(places[torch.randint(len(places), (count,), generator=generator)], world)

    def take(self, index: Tensor, world: tuple[str, int] | None) -> Images:
        """Images by place."""
        x = self.dataset.images("clean", index)
        if world is not None:
            x = corruptions.apply(x, world[0], world[1], index=index)
        return Images(x, self.labels[index])


def play(net: Backbone, method: Any, images: Images, batch: int = BATCH, state: Any = None) -> tuple[Tensor, Any]:
    """Which answers are wrong, (N,), and the state after the stream."""
    state = method.init(net) if state is None else state
    wrong = []
    for x, y in zip(images.x.split(batch), images.y.split(batch), strict=True):
        output, state = method.step(net, state, x.unsqueeze(0))
        wrong.append(output[0].argmax(-1) != y)
    return torch.cat(wrong), state


def percent(wrong: Tensor) -> float:
    return round(100 * float(wrong.float().mean()), 2)


def faults(source: Source, other: Source, seed: int) -> Iterator[tuple[str, Images]]:
    """The faults of a stream, by name."""
    nothing = torch.full((2000,), -1)
    normal = source.draw(2000, seed + 1, NORMAL)
    generator = torch.Generator().manual_seed(seed)
    shape = normal.x.shape
    yield "one class, 5,000 images", source.of_class(3, 5000, seed, NORMAL)
    yield "black", Images(torch.zeros(shape), nothing)
    yield "covered lens", Images((0.02 * torch.randn(shape, generator=generator)).clamp(0, 1), nothing)
    yield "white", Images(torch.ones(shape), nothing)
    yield "frozen", Images(normal.x[:1].expand(shape).contiguous(), nothing)
    yield "noise", Images(torch.rand(shape, generator=generator), nothing)
    yield "another data set", Images(other.draw(2000, seed).x, nothing)
    centred = (normal.x[:1000] - 0.45) / 0.25
    yield "wrong normalisation", Images(centred, nothing[:1000])
    yield "0 to 255", Images(normal.x[:1000] * 255, nothing[:1000])


def study_clean(net: Backbone, source: Source, names: Sequence[str], seed: int, count: int) -> Iterator[Row]:
    for bursts in (False, True):
        for batch in (64, 16, 1):
            images = source.draw(count if batch > 1 else min(count, 1500), seed, bursts=bursts)
            for name in names:
                wrong, _ = play(net, build(name, net), images, batch)
                order = "bursts" if bursts else "random"
                yield {"part": "clean", "order": order, "batch": batch, "method": name, "error": percent(wrong)}


def study_corrupted(net: Backbone, source: Source, names: Sequence[str], seed: int, count: int) -> Iterator[Row]:
    for bursts in (False, True):
        parts = [source.draw(count, seed + i, (world, 5), bursts) for i, world in enumerate(WORLDS)]
        for name in names:
            method, state = build(name, net), None
            for world, images in zip(WORLDS, parts, strict=True):
                wrong, state = play(net, method, images, state=state)
                order = "bursts" if bursts else "random"
                yield {"part": "corrupted", "order": order, "world": world, "method": name, "error": percent(wrong)}


def study_faults(
    net: Backbone, source: Source, other: Source, names: Sequence[str], seed: int, only: Sequence[str]
) -> Iterator[Row]:
    before, after = source.draw(BEFORE, seed + 2, NORMAL), source.draw(AFTER, seed + 3, NORMAL)

    def row(fault: str, name: str, wrong: Tensor) -> Row:
        late = percent(wrong[-LATER:])
        return {"part": "faults", "fault": fault, "method": name, "error": percent(wrong), "later": late}

    if not only or "none" in only:
        for name in ("source", *names):
            method = build(name, net)
            _, state = play(net, method, before)
            yield row("none", name, play(net, method, after, state=state)[0])
    for fault, images in faults(source, other, seed):
        for name in names if not only or fault in only else ():
            method = build(name, net)
            _, state = play(net, method, before)
            _, state = play(net, method, images, state=state)
            yield row(fault, name, play(net, method, after, state=state)[0])
    for fault, rate in RATES.items():
        for name in names if not only or fault in only else ():
            method = build(name, net, lr=rate)
            _, state = play(net, method, before)
            yield row(fault, name, play(net, method, after, state=state)[0])


# -- the page ----------------------------------------------------------------------------------------------------------

TITLES = {"clean": "Nothing has changed", "corrupted": "One corruption after another", "faults": "After a fault"}
PLACES = {
    "clean": lambda row: f"{row['order']}, batch {row['batch']}",
    "corrupted": lambda row: f"{row['world']}, {row['order']}",
    "faults": lambda row: row["fault"],
}


def rendered(text: str, folder: Path = RESULTS) -> str:
    """The page with its tables made anew."""
    return pages.rendered(text, "guard_study", {"guard": tables}, folder)


def tables(folder: Path) -> str:
    """A table for each part and network: errors in percent."""
    parts = []
    for path in sorted(folder.glob("guard_*.json")):
        _, dataset, model, seed = path.stem.split("_", 3) if path.stem.count("_") == 3 else _words(path.stem)
        rows = json.loads(path.read_text())["rows"]
        for part, title in TITLES.items():
            found = [row for row in rows if row["part"] == part]
            if found:
                parts.append(_table(f"{title} ({dataset}, {model}, seed {seed})", found, PLACES[part]))
    return "\n".join(parts)


def _words(stem: str) -> list[str]:
    """The parts of a name whose model has an underscore."""
    kind, dataset, *model, seed = stem.split("_")
    return [kind, dataset, "_".join(model), seed]


def _table(caption: str, rows: Sequence[Row], place: Any) -> str:
    names = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for where in dict.fromkeys(map(place, rows)):
        found = {row["method"]: row for row in rows if place(row) == where}
        lines.append([where, *(_cell(found.get(name)) for name in names)])
    if rows[0]["part"] == "corrupted":
        means = [[row["error"] for row in rows if row["method"] == name] for name in names]
        lines.append(["mean", *(f"{sum(m) / len(m):.1f}" for m in means)])
    return f"{caption}; error, %:\n\n{pages.table(['', *names], lines)}"


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row['error']:.1f}" + (f" / {row['later']:.1f}" if "later" in row else "")


def build(name: str, net: Backbone, **fields: Any) -> Any:
    return methods.create(name, classes=net.classes, **fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="root folder of the data sets")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--other", default="cifar100", help="the data set of the fault 'another data set'")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--weights")
    parser.add_argument("--methods", default="tribe,tribe+guard")
    parser.add_argument("--parts", default="clean,corrupted,faults")
    parser.add_argument("--faults", default="", help="only these, separated by semicolons")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--count", type=int, default=3000, help="images of a clean stream, and of a corruption")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--render", action="store_true", help="write the tables of docs/health.md, and play nothing")
    options = parser.parse_args()
    if options.render:
        PAGE.write_text(rendered(PAGE.read_text()))
        return
    source, net = Source(options.dataset, options.data), Backbone(models.load(options.model, options.weights))
    names, seed, rows = options.methods.split(","), options.seed, []
    parts = {
        "clean": lambda: study_clean(net, source, ("source", *names), seed, options.count),
        "corrupted": lambda: study_corrupted(net, source, ("source", *names), seed, options.count // 3),
        "faults": lambda: study_faults(
            net,
            source,
            Source(options.other, options.data),
            names,
            seed,
            options.faults.split(";") if options.faults else (),
        ),
    }
    target = options.out / f"guard_{options.dataset}_{options.model}_{seed}.json"
    for part in options.parts.split(","):
        for row in parts[part]():
            rows.append(row)
            print(row, flush=True)
            write_atomically(target, (json.dumps({"seed": seed, "rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
