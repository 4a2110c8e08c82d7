"""Study what adapting costs and where it harms: error and time of methods beside the source's, cell by cell.

``python -m studies.budget.run --dataset live-cifar10-c --data ROOT --model resnet20 --weights FILE --cells F100,iid``

A cell is a stream: F100 is GLI-F at imbalance 100, F1 is PTTA; iid, continual, recurring and clean, in bursts, are
others. ``--most`` images of each domain are used. For each method a row has the error of each seed, the most by which
its error exceeds the source's in any window of 1,000 images, the milliseconds an image, and these relative to the first
method's in that run. Results go to a JSON file after every row; ``--render`` writes the tables of README.md.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from studies.pages import play_or_render, table
from studies.play import (
    BATCH,
    Bench,
    Clock,
    InMemory,
    Subset,
    add_options,
    cell_scenario,
    open_bench,
    play,
    read,
    settings,
    write,
)
from tribe import scenarios
from tribe.core.backbone import Backbone
from tribe.data.scenarios import Scenario
from tribe.experiments import metrics
from tribe.experiments.record import Record
from tribe.methods import Method, with_fields

FOLDER = Path(__file__).parent
CELLS = "F100,F10,V100,F1,iid,continual,recurring,clean"
METHODS = "source,tribe,bank,bank-tribe"
WINDOW = 1000
ROUNDS = 5  # visits of the recurring cell


def beginning(dataset: Any, most: int) -> Subset:
    """Return a data set with the first images of each domain."""
    return Subset(dataset, lambda count: torch.arange(min(count, most)))


def scenario_of(cell: str) -> Scenario:
    """Return the scenario of a cell; the clean cell is one of bursts."""
    if cell == "recurring":
        return scenarios.create("recurring", rounds=ROUNDS)
    return cell_scenario("F1" if cell == "clean" else cell)


def named(bench: Bench, name: str) -> tuple[Backbone, Method]:
    """Return a network and a method: its name, or its name and how rarely it learns, as in bank-tribe:8."""
    method, _, every = name.partition(":")
    net, built = bench.method(method)
    return net, with_fields(built, learn_every=int(every)) if every else built


def worst_window(record: Record, source: Record) -> float:
    """Return the most by which the error exceeds the source's in a window, in points."""
    wrong = (record.prediction != record.label).double() - (source.prediction != source.label).double()
    total = torch.cat((wrong.new_zeros(1), wrong.cumsum(0)))
    size = min(WINDOW, len(wrong))
    return float((total[size:] - total[:-size]).max()) * 100 / size


def measure(o: argparse.Namespace) -> None:
    """Play all cells and write a row for each method."""
    bench = open_bench(o)
    chosen = o.corruptions.split(",") if o.corruptions else list(bench.data.domains)
    seeds = [int(seed) for seed in o.seeds.split(",")]
    path = o.out / f"budget_{o.dataset}_{o.model}_{'-'.join(map(str, seeds))}.json"
    shared = {**settings(o, bench.device), "most": o.most, "batch": BATCH, "corruptions": chosen, "seeds": seeds}
    rows: list[dict[str, Any]] = []
    clock = Clock()
    for cell in o.cells.split(","):
        if cell == "clean":
            data = beginning(InMemory(bench.data.dataset.clean), o.most * len(chosen))  # type: ignore[attr-defined]
        else:
            data = beginning(bench.data, o.most)
            data.domains = tuple(chosen)
        own = bench._replace(data=data, method=lambda name: named(bench, name))  # type: ignore[arg-type]
        source: list[Record] = []
        for name in o.methods.split(","):
            records = [play(own, name, scenario_of(cell), [seed], o.limit)[0] for seed in seeds]
            source = source or records
            pairs = list(zip(records, source, strict=True))
            rows.append(
                {
                    "cell": cell,
                    "method": name,
                    "images": [len(record.label) for record in records],
                    "error": [round(100 * float(metrics.instance_error(record)), 2) for record in records],
                    "category": [round(100 * float(metrics.category_error(record)), 2) for record in records],
                    "above": [round(worst_window(*pair), 2) for pair in pairs],
                    "ms": round(1000 * statistics.median(float(record.seconds.median()) for record in records), 4),
                }
            )
            rows[-1]["times"] = round(rows[-1]["ms"] / next(row["ms"] for row in rows if row["cell"] == cell), 2)
            clock.say(cell, name, rows[-1]["error"], rows[-1]["above"], rows[-1]["ms"])
            write(path, shared, rows)


def errors(folder: Path) -> str:
    """A table for each file: cells in rows, methods in columns."""
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read("budget_*.json", folder):
        files[row["file"]].append(row)
    return "\n".join(_table(rows) for rows in files.values())


def _table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    names = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["cell"], row["method"]): row for row in rows}
    words = f"**{first['model']}, {first['dataset']}**, {len(first['corruptions'])} corruptions, at most "
    words += (
        f"{first['most']:,} images of each, seeds {', '.join(map(str, first['seeds']))}; error in %, in brackets the "
    )
    words += "most above the source in 1,000 images; last, the median batch's time beside the source's:"
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        line = [cell]
        for name in names:
            if row := found.get((cell, name)):
                worst = "" if name == names[0] else f" ({max(row['above']):+.1f})"
                line.append(f"{statistics.mean(row['error']):.1f}{worst}")
            else:
                line.append("")
        lines.append(line)
    times = [statistics.median(row["times"] for row in rows if row["method"] == name) for name in names]
    ratios = [f"{time:.2f} x" for time in times]
    return f"{words}\n\n{table(['cell', *names], [*lines, ['time', *ratios]])}"


BLOCKS = {"errors": errors}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m studies.budget.run", description=__doc__.partition("\n")[0])
    add_options(p)
    p.set_defaults(dataset="live-cifar10-c", precision="float32", out=FOLDER / "results")
    p.add_argument("--cells", default=CELLS)
    p.add_argument("--methods", default=METHODS, help="name or name:learn_every; the first is the one to compare with")
    p.add_argument("--corruptions", help="comma-separated; default: all")
    p.add_argument("--most", type=int, default=1000, help="images of each domain (default: %(default)s)")
    p.add_argument("--seeds", default="425,5")
    play_or_render(p, argv, FOLDER, BLOCKS, measure)


if __name__ == "__main__":
    main()
