"""Study what the guard saves and costs: clean streams, corrupted ones, faults, the paper's streams, many visits.

``python -m studies.guard.run --data data --model resnet20 --weights FILE --parts clean,faults``

Parts: (clean) streams in which nothing has changed, in random order and in bursts, in batches of 64, 16 and 1;
(corrupted) one corruption after another; (faults) normal images, a fault, normal images again: the errors after the
fault, of the source, the method unguarded, guarded, and the method that never met the fault; (collapse) methods that
collapse in bursts, with and without a guard; (paper) the streams of the paper; (recurring) the same short stream again
and again, the error of every visit. The last three read the corrupted data set, such as CIFAR-10-C. Seeds are streams
of one network. Results go to a JSON file for each part in ``--out``, after every row. ``--render`` writes the tables of
docs/health.md from the files in benchmarks/results.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from studies import pages, play
from studies.guard.play import NORMAL, Player, Source, faults, some
from tribe import methods, scenarios
from tribe.core.backbone import Backbone
from tribe.core.precision import PRECISIONS, choose_device, float32_precision
from tribe.experiments import metrics
from tribe.experiments.record import Record
from tribe.health.guard import Guard

FOLDER = Path(__file__).parent
BEFORE, AFTER, LATER = 1000, 2000, 1000  # images before a fault, after it, and of those the last ones
SINGLE = 1500  # most images of a stream in batches of one
WORLDS = ("gaussian_noise", "pixelate", "motion_blur", "jpeg_compression", "fog", "contrast", "brightness")
RATES = {"lr x 10": 1e-2, "lr x 30": 3e-2, "lr x 100": 1e-1}
CELLS = "F100", "V100", "F200", "V200", "F10", "V10"
COLLAPSING = "tent", "pl", "eata", "cotta"
Row = dict[str, Any]


class Bench(NamedTuple):
    """What the parts play on."""

    net: Backbone
    source: Source
    options: argparse.Namespace
    guard: Mapping[str, float]  # settings that differ from the defaults

    @property
    def names(self) -> list[str]:
        """The methods."""
        named: list[str] = self.options.methods.split(",")
        return named

    def player(self, name: str, **fields: Any) -> Player:
        """A method on the network."""
        own = self.guard if "+guard" in name else {}
        return Player(self.net, methods.create(name, classes=self.net.classes, **own, **fields))

    def over(self, data: play.Bench, **fields: Any) -> play.Bench:
        """A corrupted data set with this study's guard, and with fields of the methods."""

        def method(name: str) -> tuple[Backbone, Any]:
            net, built = data.method(name)
            own = {key: value for key, value in fields.items() if hasattr(built, key)}
            return net, replace(built, **own, **(self.guard if "+guard" in name else {}))

        return data._replace(method=method)


def percent(wrong: Tensor) -> dict[str, Any]:
    """The error of all streams (S, N) in %, and that of each stream if there are several."""
    each = [round(100 * float(row.float().mean()), 2) for row in wrong]
    return {"error": round(sum(each) / len(each), 2), **({"errors": each} if len(each) > 1 else {})}


# -- parts -------------------------------------------------------------------------------------------------------------


def study_clean(bench: Bench) -> Iterator[Row]:
    """Nothing has changed."""
    for batch in (64, 16, 1):
        players = {name: bench.player(name) for name in ("source", *bench.names)}
        for order in ("random", "bursts"):
            count = bench.options.count if batch > 1 else min(bench.options.count, SINGLE)
            images = bench.source.draw(count, bursts=order == "bursts")
            for name, player in players.items():
                wrong, _ = player(images, batch)
                yield {"order": order, "batch": batch, "method": name, **percent(wrong)}


def study_corrupted(bench: Bench) -> Iterator[Row]:
    """One corruption after another."""
    for bursts in (False, True):
        count = bench.options.count // 3
        parts = [bench.source.draw(count, i, (world, 5), bursts) for i, world in enumerate(WORLDS)]
        for name in ("source", *bench.names):
            play, state = bench.player(name), None
            for world, images in zip(WORLDS, parts, strict=True):
                wrong, state = play(images, state=state)
                order = "bursts" if bursts else "random"
                yield {"order": order, "world": world, "method": name, **percent(wrong)}


def study_faults(bench: Bench) -> Iterator[Row]:
    """A fault between normal images. Every method meets each fault in the state that the first images left."""
    o, source = bench.options, bench.source
    only = o.faults.split(";") if o.faults else ()
    other = Source(o.other, o.data, source.seeds, source.device)
    before, after = source.draw(BEFORE, 2, NORMAL), source.draw(AFTER, 3, NORMAL)

    def row(fault: str, name: str, play: Player, state: Any) -> Row:
        wrong, _ = play(after, state=state)
        return {"fault": fault, "method": name, **percent(wrong), "later": percent(wrong[:, -LATER:])["error"]}

    players = {name: bench.player(name) for name in ("source", *bench.names)}
    begun = {name: play(before)[1] for name, play in players.items()}
    if not only or "none" in only:
        for name, play in players.items():
            yield row("none", name, play, begun[name])
    for fault, images in faults(source, other):
        for name in bench.names if not only or fault in only else ():
            yield row(fault, name, players[name], players[name](images, state=begun[name])[1])
    for fault, rate in RATES.items():
        for name in bench.names if not only or fault in only else ():
            play = bench.player(name, lr=rate)
            yield row(fault, name, play, play(before)[1])


def study_paper(bench: Bench) -> Iterator[Row]:
    """The streams of the paper: instance and category error of every seed."""
    setup = bench.over(_corrupted(bench.options))
    for cell in bench.options.cells.split(","):
        for name in bench.names:
            start = time.monotonic()
            records = play.play(setup, name, play.cell_scenario(cell), bench.source.seeds, bench.options.limit)
            took = round(time.monotonic() - start, 1)
            both = [play.errors(record) for record in records]
            means = {key: round(sum(row[key] for row in both) / len(both), 3) for key in both[0]}
            yield {
                "cell": cell,
                "method": name,
                "images": len(records[0].label),
                **means,
                "each": both,
                "seconds": took,
            }


def study_collapse(bench: Bench) -> Iterator[Row]:
    """PTTA for methods that collapse, alone and guarded: the error of the whole stream and of its last third."""
    o = bench.options
    rate = {} if o.rate is None else {"lr": o.rate}
    data = bench.over(_part(o), **rate)
    for name in ("source", *(whole for part in o.collapsing.split(",") for whole in (part, f"{part}+guard"))):
        records = play.play(data, name, scenarios.create("ptta"), bench.source.seeds)
        wrong = torch.stack([metrics.wrong(record) for record in records])
        later = percent(wrong[:, -(wrong.shape[1] // 3) :])["error"]
        changed = {} if name == "source" else rate
        yield {"method": name, "images": wrong.shape[1], **changed, **percent(wrong), "later": later}


def study_recurring(bench: Bench) -> Iterator[Row]:
    """The same short stream again and again; unguarded only the first visits, if so many are asked for."""
    o = bench.options
    data = bench.over(_part(o))
    for name in bench.names:
        rounds = o.visits if "+" in name else min(o.unguarded, o.visits)
        records = play.play(data, name, scenarios.create("recurring", rounds=rounds), bench.source.seeds)
        visits = torch.stack([_by_visit(record, rounds) for record in records])  # (S, visits)
        means = [round(100 * float(v), 2) for v in visits.mean(0)]
        slope = round(100 * _slope(visits.mean(0)), 4) if rounds > 1 else None
        error = round(sum(means) / len(means), 2)
        yield {"method": name, "images": o.visit, "error": error, "visits": means, "points a visit": slope}


def _by_visit(record: Record, rounds: int) -> Tensor:
    wrong: Tensor = metrics.wrong(record)
    return wrong.double().view(rounds, -1).mean(1)


def _slope(values: Tensor) -> float:
    """The change from one value to the next of the straight line through all."""
    place = torch.arange(len(values), dtype=torch.float64)
    place = place - place.mean()
    return float((place * (values.double() - values.double().mean())).sum() / place.square().sum())


def _part(o: argparse.Namespace) -> play.Bench:
    """Some images of each domain: as many as a visit takes."""
    setup = _corrupted(o)
    short = some(setup.data.dataset, o.visit // len(setup.data.domains))
    return setup._replace(data=play.InMemory(short))  # type: ignore[arg-type]


def _corrupted(o: argparse.Namespace) -> play.Bench:
    """The corrupted data set, and methods for it as the lab builds them."""
    return play.open_bench(argparse.Namespace(**{**vars(o), "dataset": o.shifted, "data": o.corrupted}))


PARTS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "clean": study_clean,
    "corrupted": study_corrupted,
    "faults": study_faults,
    "collapse": study_collapse,
    "paper": study_paper,
    "recurring": study_recurring,
}


# -- the page ----------------------------------------------------------------------------------------------------------

TITLES = {
    "clean": "Nothing has changed",
    "corrupted": "One corruption after another",
    "faults": "After a fault",
    "collapse": "Methods that collapse, PTTA",
    "paper": "The streams of the paper",
    "recurring": "Visit after visit",
}
PLACES: Mapping[str, Callable[[Row], str]] = {
    "clean": lambda row: f"{row['order']}, batch {row['batch']}",
    "corrupted": lambda row: f"{row['world']}, {row['order']}",
    "faults": lambda row: str(row["fault"]),
    "collapse": lambda row: (
        f"{row['method'].removesuffix('+guard')}, {row['images']:,} images{_rate(row)}"  # as in "tent, 3,000 images"
    ),
    "paper": lambda row: str(row["cell"]),
    "recurring": lambda row: "all",
}


def tables(folder: Path) -> str:
    """A table for each part and network: errors in percent."""
    parts = []
    for part, title in TITLES.items():
        for path in sorted(folder.glob(f"guard_{part}_*.json")):
            file = json.loads(path.read_text())
            given, rows = file["settings"], file["rows"]
            seeds = ", ".join(map(str, given["seeds"]))
            where = f"{given['dataset']}, {given['model']}, {given['precision']}, seed {seeds}"
            where += f", the first {given['limit']:,} images" if given["limit"] and part == "paper" else ""
            where += "".join(f", {name} {value:g}" for name, value in given.get("guard", {}).items())
            parts.append(f"{title} ({where}); error, %:\n\n{_table(part, rows)}")
    return "\n".join([*parts, *_costs(folder)])


def _costs(folder: Path) -> list[str]:
    """What watching and guarding add to a step, as `studies.guard.cost` measures it; nothing if there is none."""
    lines = []
    for path in sorted(folder.glob("guard_cost_*.json")):
        file = json.loads(path.read_text())
        given = file["settings"]
        for batch in dict.fromkeys(row["batch"] for row in file["rows"]):
            alone, *others = (row for row in file["rows"] if row["batch"] == batch)
            where = [given["model"], given["machine"]["device"], given["precision"], str(batch)]
            lines.append([*where, f"{alone['step_ms']:.1f}", *(f"{100 * row['share']:+.1f} %" for row in others)])
    header = ["network", "device", "precision", "batch", "TRIBE's step, ms", "watched", "guarded"]
    return [f"Time:\n\n{pages.table(header, lines)}"] if lines else []


def _table(part: str, rows: Sequence[Row]) -> str:
    if part == "recurring":
        return _visits(rows)
    place = PLACES[part]
    column = (lambda row: "guarded" if "+" in row["method"] else "alone") if part == "collapse" else _method
    names = list(dict.fromkeys(map(column, rows)))
    lines = []
    for where in dict.fromkeys(map(place, rows)):
        found = {column(row): row for row in rows if place(row) == where}
        lines.append([where, *(_cell(found.get(name)) for name in names)])
    if part == "corrupted":
        means = [[row["error"] for row in rows if row["method"] == name] for name in names]
        lines.append(["mean", *(f"{sum(m) / len(m):.1f}" for m in means)])
    return pages.table(["", *names], lines)


def _visits(rows: Sequence[Row]) -> str:
    """The mean, the first and the last visit, and the slope."""
    header = ["", "visits", "images each", "mean", "first", "last", "points a visit"]
    lines = []
    for row in rows:
        ends = [f"{row['visits'][i]:.1f}" for i in (0, -1)]
        slope = "" if row["points a visit"] is None else f"{row['points a visit']:+.3f}"
        shown = [row["method"], str(len(row["visits"])), f"{row['images']:,}", f"{row['error']:.1f}", *ends, slope]
        lines.append(shown)
    return pages.table(header, lines)


def _rate(row: Row) -> str:
    return f", lr {row['lr']:g}" if "lr" in row else ""


def _method(row: Row) -> str:
    return str(row["method"])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "inst" in row:
        return f"{row['inst']:.2f} / {row['cat']:.2f}"
    return f"{row['error']:.1f}" + (f" / {row['later']:.1f}" if "later" in row else "")


# -- command line ------------------------------------------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", help="root folder of the clean data sets")
    p.add_argument("--corrupted", help="root folder of the corrupted ones (default: that of --data)")
    p.add_argument("--dataset", default="cifar10")
    p.add_argument("--shifted", help="the corrupted one (default: cifar10-c for cifar10)")
    p.add_argument("--other", default="cifar100", help="the data set of the fault 'another data set'")
    p.add_argument("--model", default="resnet20")
    p.add_argument("--weights")
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="tf32", choices=PRECISIONS)
    p.add_argument("--methods", default="tribe,tribe+guard")
    p.add_argument("--guard", nargs="*", default=[], help="settings of the guard, such as lean_half=0.03")
    p.add_argument("--fitted", type=int, help="fit the guard to the network with so many clean images")
    p.add_argument("--parts", default="clean,corrupted,faults")
    p.add_argument("--faults", default="", help="only these, separated by semicolons")
    p.add_argument("--cells", default=",".join(CELLS), help="streams of the paper (default: %(default)s)")
    p.add_argument("--collapsing", default=",".join(COLLAPSING), help="methods (default: %(default)s)")
    p.add_argument("--rate", type=float, help="learning rate of the methods in 'collapse' (default: their own)")
    p.add_argument("--seeds", type=int, nargs="+", default=[5])
    p.add_argument("--count", type=int, default=3000, help="images of a clean stream; a corruption has a third")
    p.add_argument("--limit", type=int, help="most images of a stream of the paper")
    p.add_argument("--visit", type=int, default=15_000, help="images of a visit, and of a stream in 'collapse'")
    p.add_argument("--visits", type=int, default=20)
    p.add_argument("--unguarded", type=int, default=1, help="visits of methods without a guard")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time")
    p.add_argument("--out", type=Path, default=FOLDER / "results")
    p.add_argument("--render", action="store_true", help="write the tables of README.md, and play nothing")
    o = p.parse_args(argv)
    o.corrupted, o.shifted = o.corrupted or o.data, o.shifted or f"{o.dataset}-c"
    if unknown := [part for part in o.parts.split(",") if part not in PARTS]:
        p.error(f"no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return o


BLOCKS = {"guard": tables}


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    if o.render:
        pages.render(FOLDER, BLOCKS)
        return
    clock, device, begun = play.Clock(), choose_device(o.device), time.monotonic()
    opened = play.open_bench(argparse.Namespace(**vars(o)))
    net, source = opened.method("source")[0], Source(o.dataset, o.data, o.seeds, device)
    with float32_precision(o.precision):
        guard = {name: float(value) for name, _, value in (pair.partition("=") for pair in o.guard)}
        if o.fitted:
            clean = source.dataset.images("clean", torch.arange(o.fitted)).to(device)
            made = Guard.fitted(net, clean)
            found = {"lean_half": made.lean_half, "lean_single": made.lean_single}
            guard = {**{name: value for name, value in found.items() if value is not None}, **guard}
            clock.say("the guard is fitted:", guard)
        bench = Bench(net, source, o, guard)
        shared = {**play.settings(o, device), "seeds": o.seeds, "guard": guard, "fitted": o.fitted}
        seeds = "-".join(map(str, o.seeds))
        for part in o.parts.split(","):
            rows: list[Row] = []
            path = o.out / f"guard_{part}_{o.dataset}_{o.model}_{shared['precision']}_{seeds}.json"
            if time.monotonic() - begun > o.seconds:
                clock.say(f"{part}: not begun, out of time")
                continue
            for row in PARTS[part](bench):
                rows.append(row)
                clock.say(part, row)
                play.write(path, shared, rows)
                if time.monotonic() - begun > o.seconds:
                    clock.say(f"{part}: ended early, out of time")
                    break


if __name__ == "__main__":
    main()
