"""Study what adapting costs and where it harms: error and cost of methods beside the source's, cell by cell.

``python -m studies.budget.run --dataset live-cifar10-c --data ROOT --model resnet20 --weights FILE --cells F100,iid``

A cell is a stream: F100 is GLI-F at imbalance 100, F1 is PTTA; iid, continual, recurring and clean, in bursts, are
others. ``--most`` images of each domain are used. A method is a name; a name and how rarely it learns, bank-tribe:8; or
a name and its budget, tent@1.5, as ``tribe run --budget`` resolves it. With ``--realtime 1,2,4`` the stream does not
wait. For each method a row has the error of each seed, the most by which its error exceeds the first method's in any
window of 1,000 images, its mean cost, and the milliseconds an image of this run.

The cost is in multiples of plain inference. It is measured once for each network, on a batch of all domains, and kept
in a file beside the results, so that the rows depend on no clock. Results go to a JSON file after every row;
``--render`` writes the tables of README.md and draws docs/pictures/budget.svg.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from studies.budget import tables
from studies.budget.costs import BudgetTooSmall, Contestant, Costs, contestant
from studies.pages import play_or_render
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
    settings,
    write,
)
from tribe import scenarios
from tribe.data.scenarios import Scenario
from tribe.experiments import metrics
from tribe.experiments.realtime import Realtime
from tribe.experiments.record import Record

FOLDER = Path(__file__).parent
CELLS = "F100,F10,V100,F1,iid,continual,recurring,clean"
METHODS = "source,tribe,bank,bank-tribe"
WINDOW = 1000
ROUNDS = 5  # visits of the recurring cell


def beginning(dataset: Any, most: int) -> Subset:
    """Return a data set with the first images of each domain."""
    return Subset(dataset, lambda count: torch.arange(min(count, most)))


def cell_data(bench: Bench, cell: str, most: int, chosen: Sequence[str]) -> InMemory:
    """Return the images of a cell: the first ones of each chosen domain, or as many clean ones."""
    if cell == "clean":
        return InMemory(beginning(bench.data.dataset.clean, most * len(chosen)))  # type: ignore[attr-defined,arg-type]
    data = beginning(bench.data.dataset, most)
    data.domains = tuple(chosen)
    return InMemory(data)  # type: ignore[arg-type]


def scenario_of(cell: str) -> Scenario:
    """Return the scenario of a cell; the clean cell is one of bursts."""
    if cell == "recurring":
        return scenarios.create("recurring", rounds=ROUNDS)
    return cell_scenario("F1" if cell == "clean" else cell)


def worst_window(record: Record, source: Record) -> float:
    """Return the most by which the error exceeds the source's in a window, in points."""
    wrong = (record.prediction != record.label).double() - (source.prediction != source.label).double()
    total = torch.cat((wrong.new_zeros(1), wrong.cumsum(0)))
    size = min(WINDOW, len(wrong))
    return float((total[size:] - total[:-size]).max()) * 100 / size


def scores(records: Sequence[Record], source: Sequence[Record]) -> dict[str, Any]:
    """Return the numbers of the records of all seeds, compared with the source's."""
    return {
        "images": [len(record.label) for record in records],
        "error": [round(100 * float(metrics.instance_error(record)), 2) for record in records],
        "category": [round(100 * float(metrics.category_error(record)), 2) for record in records],
        "above": [round(worst_window(*pair), 2) for pair in zip(records, source, strict=True)],
        "ms": round(1000 * statistics.mean(float(metrics.seconds_per_image(record)) for record in records), 4),
    }


def measure(o: argparse.Namespace) -> None:
    """Play all cells and write a row for each method, and each speed."""
    bench, names, cells = open_bench(o), o.methods.split(","), o.cells.split(",")
    chosen = o.corruptions.split(",") if o.corruptions else list(bench.data.domains)
    seeds = [int(seed) for seed in o.seeds.split(",")]
    speeds = [float(speed) for speed in o.realtime.split(",")] if o.realtime else [None]
    title = o.name or ("realtime" if o.realtime else "budget")
    path = o.out / f"{title}_{o.dataset}_{o.model}_{'-'.join(map(str, seeds))}.json"
    facts = settings(o, bench.device)
    shared = {**facts, "most": o.most, "batch": BATCH, "corruptions": chosen, "seeds": seeds}
    corrupted = bench._replace(data=cell_data(bench, "", o.most, chosen))
    costs = Costs(o.out / f"costs_{o.dataset}_{o.model}.json", facts)
    rows: list[dict[str, Any]] = []
    clock, players = Clock(), {}
    for name in names:
        try:
            players[name] = contestant(corrupted, name, costs)
        except BudgetTooSmall as error:
            rows.append({"method": name, "refused": str(error)})
            clock.say(name, error)
    for cell in cells:
        data = cell_data(bench, cell, o.most, chosen) if cell == "clean" else corrupted.data
        source: dict[float | None, list[Record]] = {}
        for (name, one), speed in itertools.product(players.items(), speeds):
            records = played(bench._replace(data=data), one, cell, seeds, o.limit, speed)
            row = {"cell": cell, "method": name, "every": one.every, "cost": one.cost}
            row |= {} if speed is None else {"speed": speed}
            rows.append(row | scores(records, source.setdefault(speed, records)))
            clock.say(cell, name, speed or "", rows[-1]["error"], rows[-1]["above"], rows[-1]["ms"])
            write(path, shared, rows)


def played(
    bench: Bench, one: Contestant, cell: str, seeds: Sequence[int], limit: int | None, speed: float | None
) -> list[Record]:
    """Play a cell with a method, seed by seed; at a speed, the stream does not wait."""
    own = bench._replace(method=lambda _: (one.net, one.method))
    realtime = None if speed is None else Realtime(speed, one.cost)
    return [play(own, one.method.name, scenario_of(cell), [seed], limit, realtime)[0] for seed in seeds]


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m studies.budget.run", description=__doc__.partition("\n")[0])
    add_options(p)
    p.set_defaults(dataset="live-cifar10-c", precision="float32", out=FOLDER / "results")
    p.add_argument("--cells", default=CELLS)
    p.add_argument("--methods", default=METHODS, help="tent, bank-tribe:8 or tent@1.5; the first is compared with")
    p.add_argument("--corruptions", help="comma-separated; default: all")
    p.add_argument("--most", type=int, default=1000, help="images of each domain (default: %(default)s)")
    p.add_argument("--seeds", default="425,5")
    p.add_argument("--realtime", help="speeds of streams that do not wait, such as 1,2,4")
    p.add_argument("--name", help="of the file of results: budget, peers or realtime, and what is in it")
    play_or_render(p, argv, FOLDER, tables.BLOCKS, measure, tables.draw)


if __name__ == "__main__":
    main()
