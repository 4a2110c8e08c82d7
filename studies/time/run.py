"""Study what the time filter gives and costs: errors with and without it on sticky and other streams.

``python -m studies.time.run --data data --model wrn28_10 --weights FILE --parts a,d``

Parts: (a) the streams of the paper; (b) iid and continual streams; (c) local imbalance from 10 to 0.001; (d) a stream
that turns from bursty to iid and back; (e) how soon answers follow a change of class; (f) rare classes. Each method
plays a stream once, and the filters read its predictions. Seeds are streams of one network. Results go to a JSON file
in ``--out``, after every stream. ``--render`` writes the tables of README.md.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from studies import pages
from studies.play import (
    FILTERS,
    AlwaysOn,
    Bench,
    Clock,
    add_options,
    cell_scenario,
    errors,
    filtered,
    open_bench,
    play,
    settings,
    write,
)
from studies.time import tables
from tribe import scenarios
from tribe.core.precision import float32_precision
from tribe.data.scenarios import Scenario, Schedule
from tribe.experiments import metrics
from tribe.experiments.record import Record

SEEDS = 425, 5, 6, 7, 8  # of parts a, e and f; the other parts play the first one
STICKY = "F100", "V100"  # the streams of parts e and f
CELLS = "F100", "V100", "F10", "V10", "F200", "V200", "F1"  # the longest stream last
SIGMAS = 10.0, 1.0, 0.1, 0.01, 0.001
STICKLESS = "source", "bn", "tent", "rotta", "tribe", "note"  # the methods of part b
SETTLED = 500  # images of each stretch of part d that are not counted
SURE = 0.5, 0.7, 0.9, 0.99  # borders between bins of confidence
LENGTHS = 2, 4, 8, 16, 32  # borders between bins of a burst's length
COUNTS = 4, 11, 31, 101, 301  # borders between bins of a class's images in a domain
LONG = 8  # images of a burst from which delays are counted: a shorter one may end before the answer follows
OVER = ("none", "past", "batch")  # the filters of parts b to f

Row = dict[str, Any]


FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Turning(Scenario):
    """A stretch in bursts as PTTA plays it, one that is iid, and another one in bursts; an image may recur."""

    _: KW_ONLY
    length: int = 20_000  # images of a stretch

    def schedule(self, labels: Sequence[Tensor], seed: int) -> Schedule:
        """Join the three."""
        names, n = self.domain_names, self.length
        bursty, even = (scenarios.create(name).on(names).schedule(labels, seed) for name in ("ptta", "iid"))
        parts = ([t[:n] for t in bursty], [t[:n] for t in even], [t[n : 2 * n] for t in bursty])
        return Schedule(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class Study:
    """Plays each method once over each stream, and collects the rows of the results."""

    def __init__(self, bench: Bench, o: argparse.Namespace) -> None:
        self.bench, self.o, self.rows, self.clock = bench, o, list[Row](), Clock()
        self.path = o.out / file_name(o)
        self._played: dict[tuple[str, str], list[Record]] = {}

    def play(self, method: str, cell: str, part: str, scenario: Scenario | None = None) -> list[Record]:
        """Play the streams of a cell, or return what was played before."""
        if (method, cell) not in self._played or len(self._played[method, cell]) != len(self.seeds(part)):
            chosen = cell_scenario(cell) if scenario is None else scenario
            self._played[method, cell] = play(self.bench, method, chosen, self.seeds(part), self.o.limit)
        return self._played[method, cell]

    def filtered(self, records: list[Record], name: str) -> list[Record]:
        """The records with the answers of a filter."""
        return filtered(self.bench, records, FILTERS[name])

    def add(self, rows: list[Row]) -> None:
        """Keep rows, and write all of them to the file."""
        self.rows += rows
        shared = {**settings(self.o, self.bench.device), "seeds": self.o.seeds or SEEDS}
        write(self.path, shared, self.rows)

    def seeds(self, part: str) -> Sequence[int]:
        """The streams of a part."""
        seeds: Sequence[int] = self.o.seeds or (SEEDS if part in ("a", "e", "f") else SEEDS[:1])
        return seeds

    def compare(
        self, part: str, method: str, cell: str, filters: Sequence[str], scenario: Scenario | None = None
    ) -> None:
        """Errors of each seed with each filter."""
        played, seeds, rows = self.play(method, cell, part, scenario), self.seeds(part), list[Row]()
        for name in filters:
            shared = {"part": part, "method": method, "cell": cell, "filter": name}
            rows += [
                {**shared, "seed": seed, "images": len(record.label), **errors(record)}
                for seed, record in zip(seeds, self.filtered(played, name), strict=True)
            ]
        self.add(rows)
        means = {name: statistics.mean(row["inst"] for row in rows if row["filter"] == name) for name in filters}
        short = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
        self.clock.say(f"{part}: {method} {cell}, seeds {' '.join(map(str, seeds))}: {short}")


# -- parts -------------------------------------------------------------------------------------------------------------


def paper_streams(study: Study) -> None:
    """Part a: the streams of the paper, causal, within the batch, and COFA."""
    for method in study.o.methods or ("tribe",):
        for cell in study.o.cells or CELLS:
            study.compare("a", method, cell, tuple(FILTERS))


def not_sticky(study: Study) -> None:
    """Part b: streams in which neighbours share nothing."""
    for method in study.o.methods or STICKLESS:
        for cell in ("iid", "continual"):
            study.compare("b", method, cell, OVER)


def local_imbalance(study: Study) -> None:
    """Part c: PTTA from hardly any bursts to long ones, as in the paper's figure."""
    for method in study.o.methods or ("tribe",):
        for sigma in SIGMAS:
            scenario = scenarios.create("ptta", sigma=sigma)
            study.compare("c", method, f"sigma {sigma:g}", OVER, scenario)


def turning(study: Study) -> None:
    """Part d: errors in each stretch after its first images, with the filter on, off and as it decides."""
    length = 20_000 if study.o.limit is None else max(study.o.limit // 3, 1)
    for method in study.o.methods or ("tribe",):
        played = study.play(method, "turning", "d", Turning(length=length))
        for within in ("past", "batch"):
            on = filtered(study.bench, played, AlwaysOn(within=within))
            given = {"off": played, "auto": study.filtered(played, within), "on": on}
            rows = [
                {"part": "d", "method": method, "filter": within, "switch": switch, "seed": seed, "stretch": stretch}
                | {
                    "length": length,
                    "inst": round(100 * float(metrics.wrong(record)[_settled(length, stretch)].mean()), 3),
                }
                for switch, chosen in given.items()
                for seed, record in zip(study.seeds("d"), chosen, strict=True)
                for stretch in range(3)
            ]
            study.add(rows)
            study.clock.say(f"d: {method} {within}:", *(f"{r['switch']} {r['inst']:.2f}" for r in rows))


def _settled(length: int, stretch: int) -> slice:
    """The images of a stretch that count."""
    return slice(stretch * length + min(SETTLED, length // 4), (stretch + 1) * length)


def delays(study: Study) -> None:
    """Part e: how many images after a change of class the answers follow it."""
    for method in study.o.methods or ("tribe",):
        for cell in STICKY:
            played, rows = study.play(method, cell, "e"), list[Row]()
            for name in OVER:
                found = [
                    bursts(new, raw.confidence) for new, raw in zip(study.filtered(played, name), played, strict=True)
                ]
                columns = (torch.cat(column) for column in zip(*found, strict=True))
                shared = {"part": "e", "method": method, "cell": cell, "filter": name}
                rows += [{**shared, **row} for row in delay_rows(*columns)]
            study.add(rows)
            study.clock.say(
                f"e: {method} {cell}: {sum(r['bursts'] for r in rows if 'length' in r) // len(OVER)} bursts"
            )


def bursts(record: Record, sure: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all bursts but the first one: length, images until the answer follows, confidence in the first image.

    A burst that is never followed has a delay of its length.
    """
    y, right = record.label, record.prediction == record.label
    starts = torch.cat((torch.tensor([0]), 1 + (y[1:] != y[:-1]).nonzero().flatten()))
    length = torch.cat((starts[1:], torch.tensor([len(y)]))) - starts
    burst = torch.repeat_interleave(torch.arange(len(starts)), length)
    place = torch.where(right, torch.arange(len(y)) - starts[burst], length[burst])
    delay = length.scatter_reduce(0, burst, place, "amin")
    return length[1:], delay[1:], sure[starts[1:]]


def delay_rows(length: Tensor, delay: Tensor, sure: Tensor) -> list[Row]:
    """Median and 95th percentile by confidence, and the share of bursts that are never followed by length."""
    rows: list[Row] = []
    never = delay >= length
    waited = delay.double().masked_fill(never, float("inf"))
    for name, values, borders, least in (("sure", sure, SURE, LONG), ("length", length, LENGTHS, 1)):
        bins = torch.bucketize(values.double(), torch.tensor(borders, dtype=torch.float64), right=True)
        for number in range(len(borders) + 1):
            inside = waited[(bins == number) & (length >= least)].sort().values
            if not len(inside):
                continue
            row = {name: number, "bursts": len(inside), "never": round(100 * float(inside.isinf().double().mean()), 3)}
            for percent in (50, 95):
                value = float(inside[min(percent * len(inside) // 100, len(inside) - 1)])
                row[f"p{percent}"] = None if value == float("inf") else int(value)
            rows.append(row)
    return rows


def rare_classes(study: Study) -> None:
    """Part f: errors by how many images of its class an image's domain plays."""
    for method in study.o.methods or ("tribe",):
        for cell in STICKY:
            played, rows = study.play(method, cell, "f"), list[Row]()
            for name in OVER:
                shared = {"part": "f", "method": method, "cell": cell, "filter": name}
                rows += [{**shared, **row} for row in rare_rows(study.filtered(played, name))]
            study.add(rows)
            study.clock.say(f"f: {method} {cell}")


def rare_rows(records: list[Record]) -> list[Row]:
    """Errors of the images whose class has so many images in their domain, a row for each bin."""
    counts = torch.stack([metrics.class_counts(record) for record in records])
    missed = torch.stack([metrics.class_error(record).nan_to_num(0) for record in records]) * counts
    bins = torch.bucketize(counts, torch.tensor(COUNTS), right=True)
    rows = []
    for number in bins[counts > 0].unique().tolist():
        inside = (bins == number) & (counts > 0)
        images = int(counts[inside].sum())
        rows.append({"count": number, "images": images, "inst": round(100 * float(missed[inside].sum()) / images, 3)})
    return rows


PARTS: dict[str, Callable[[Study], None]] = {
    "a": paper_streams,
    "b": not_sticky,
    "c": local_imbalance,
    "d": turning,
    "e": delays,
    "f": rare_classes,
}


# -- command line ------------------------------------------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m studies.time.run", description=__doc__, formatter_class=style)
    add_options(p)
    p.set_defaults(out=FOLDER / "results")
    p.add_argument("--parts", default="a,b,c,d,e,f", help="which, with commas (default: %(default)s)")
    p.add_argument("--seeds", type=int, nargs="+", help="streams (default: 425 5 6 7 8; in parts b, c, d 425)")
    p.add_argument("--cells", type=words, help="of part a, as in F100,V10 (default: seven)")
    p.add_argument("--methods", type=words, help="default: tribe; in part b " + ", ".join(STICKLESS))
    p.add_argument("--render", action="store_true", help="write the tables of README.md, and play nothing")
    o = p.parse_args(argv)
    o.parts = words(o.parts)
    if unknown := [part for part in o.parts if part not in PARTS]:
        p.error(f"no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return o


def words(text: str) -> tuple[str, ...]:
    """Split at commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def file_name(o: argparse.Namespace) -> str:
    """A name that tells studies apart."""
    seeds = [] if o.seeds is None else ["-".join(map(str, o.seeds))]
    return "_".join(["time", o.dataset, o.model, "".join(o.parts), o.precision, *seeds]) + ".json"


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    if o.render:
        pages.render(FOLDER, tables.BLOCKS)
        return
    study = Study(open_bench(o), o)
    with float32_precision(o.precision):
        for part in o.parts:
            PARTS[part](study)
    print(f"written to {study.path}")


if __name__ == "__main__":
    main()
