"""Study what the time filter gives and costs: errors with and without it on sticky and other streams.

``python -m benchmarks.time_study --data data --model wrn28_10 --weights FILE --parts a,d``

Parts: (a) the streams of the paper; (b) iid and continual streams; (c) local imbalance from 10 to 0.001; (d) a stream
that turns from bursty to iid and back; (e) how soon answers follow a change of class; (f) rare classes. Each method
plays a stream once, and the filters read its predictions. Seeds are streams of one network. Results go to a JSON file
in ``--out``, after every stream. ``--render`` writes the tables of docs/time.md from the files in benchmarks/results.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import time_pages
from benchmarks.time_play import (
    FILTERS,
    Bench,
    Clock,
    Played,
    add_options,
    answers,
    cell_scenario,
    errors,
    open_bench,
    play,
    records,
    settings,
    write,
)
from tribe import scenarios
from tribe.engine.precision import float32_precision
from tribe.lab import metrics
from tribe.scenarios import Scenario, Schedule

SEEDS = 425, 5, 6, 7, 8  # of parts a, e and f; the other parts play the first one
CELLS = "F1", "F10", "F100", "F200", "V10", "V100", "V200"
SIGMAS = 10.0, 1.0, 0.1, 0.01, 0.001
STICKLESS = "source", "bn", "tent", "rotta", "tribe", "note"  # the methods of part b
SETTLED = 500  # images of each stretch of part d that are not counted
SURE = 0.5, 0.7, 0.9, 0.99  # borders between bins of confidence
LENGTHS = 2, 4, 8, 16, 32  # borders between bins of a burst's length
COUNTS = 4, 11, 31, 101, 301  # borders between bins of a class's images in a domain
LONG = 8  # images of a burst from which delays are counted: a shorter one may end before the answer follows
OVER = ("none", "past", "batch")  # the filters of parts b to f

Row = dict[str, Any]


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
        self._played: dict[tuple[str, str, tuple[int, ...]], Played] = {}

    def play(
        self, method: str, cell: str, scenario: Scenario, seeds: Sequence[int], limit: int | None = None
    ) -> Played:
        """Play a stream, or return what was played before."""
        key = method, cell, tuple(seeds)
        if key not in self._played:
            net, built = self.bench.method(method)
            stream = scenario.on(self.bench.data.domains)
            self._played[key] = play(net, built, self.bench.data, stream, seeds, limit or self.o.limit)
        return self._played[key]

    def add(self, rows: list[Row]) -> None:
        """Keep rows, and write all of them to the file."""
        self.rows += rows
        shared = {**settings(self.o, self.bench.device), "seeds": self.o.seeds or SEEDS}
        write(self.path, shared, self.rows)

    def seeds(self, part: str) -> Sequence[int]:
        """The streams of a part."""
        seeds: Sequence[int] = self.o.seeds or (SEEDS if part in ("a", "e", "f") else SEEDS[:1])
        return seeds

    def compare(self, part: str, method: str, cell: str, scenario: Scenario, filters: Sequence[str]) -> None:
        """Errors of each seed with each filter."""
        played = self.play(method, cell, scenario, self.seeds(part))
        rows = []
        for name in filters:
            judged = [errors(record) for record in records(played, answers(played, FILTERS[name]))]
            shared = {"part": part, "method": method, "cell": cell, "filter": name}
            rows += [
                {**shared, "seed": seed, "images": int(real.sum()), **error}
                for seed, real, error in zip(played.seeds, played.real, judged, strict=True)
            ]
        self.add(rows)
        means = {name: [row["inst"] for row in rows if row["filter"] == name] for name in filters}
        short = ", ".join(f"{name} {sum(values) / len(values):.2f}" for name, values in means.items())
        self.clock.say(f"{part}: {method} {cell}, seeds {' '.join(map(str, played.seeds))}: {short}")


# -- parts -------------------------------------------------------------------------------------------------------------


def paper_streams(study: Study) -> None:
    """Part a: the streams of the paper, causal, within the batch, and COFA."""
    for method in study.o.methods or ("tribe",):
        for cell in study.o.cells or CELLS:
            study.compare("a", method, cell, cell_scenario(cell), tuple(FILTERS))


def not_sticky(study: Study) -> None:
    """Part b: streams in which neighbours share nothing."""
    for method in study.o.methods or STICKLESS:
        for cell in ("iid", "continual"):
            study.compare("b", method, cell, cell_scenario(cell), OVER)


def local_imbalance(study: Study) -> None:
    """Part c: GLI-F 100 from hardly any bursts to long ones."""
    for method in study.o.methods or ("tribe",):
        for sigma in SIGMAS:
            scenario = scenarios.create("gli-f", imbalance=100.0, sigma=sigma)
            study.compare("c", method, f"sigma {sigma:g}", scenario, OVER)


def turning(study: Study) -> None:
    """Part d: errors in each stretch after its first images, with the filter on, off and as it decides."""
    length = 20_000 if study.o.limit is None else max(study.o.limit // 3, 1)
    for method in study.o.methods or ("tribe",):
        played = study.play(method, "turning", Turning(length=length), study.seeds("d"), 3 * length)
        for within in ("past", "batch"):
            rule = FILTERS[within]
            given = {"off": answers(played, None), "auto": answers(played, rule), "on": answers(played, rule, True)}
            rows = [
                {"part": "d", "method": method, "filter": within, "switch": switch, "seed": seed, "stretch": stretch}
                | {"inst": round(100 * float(wrong[_settled(length, stretch)].double().mean()), 3)}
                for switch, chosen in given.items()
                for seed, wrong in zip(played.seeds, chosen != played.label, strict=True)
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
        for cell in ("F100", "V100"):
            played = study.play(method, cell, cell_scenario(cell), study.seeds("e"))
            sure = torch.cat([z.softmax(-1).amax(-1) for z in played.logits], 1).cpu()
            rows: list[Row] = []
            for name in OVER:
                shared = {"part": "e", "method": method, "cell": cell, "filter": name}
                table = [
                    torch.cat(column)
                    for column in zip(*_bursts(played, answers(played, FILTERS[name]), sure), strict=True)
                ]
                rows += [{**shared, **row} for row in _delay_rows(*table)]
            study.add(rows)
            study.clock.say(f"e: {method} {cell}: {sum('length' in r for r in rows)} bins of lengths")


def _bursts(played: Played, chosen: Tensor, sure: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For the bursts of each stream but the first one: length, images until the answer follows, first confidence.

    A burst that is never followed has a delay of its length.
    """
    found = []
    for s, real in enumerate(played.real):
        y, right, confident = played.label[s][real], (chosen == played.label)[s][real], sure[s][real]
        starts = torch.cat((torch.tensor([0]), 1 + (y[1:] != y[:-1]).nonzero().flatten()))
        length = torch.cat((starts[1:], torch.tensor([len(y)]))) - starts
        burst = torch.repeat_interleave(torch.arange(len(starts)), length)
        place = torch.where(right, torch.arange(len(y)) - starts[burst], length[burst])
        delay = length.scatter_reduce(0, burst, place, "amin")
        found.append((length[1:], delay[1:], confident[starts[1:]]))
    return found


def _delay_rows(length: Tensor, delay: Tensor, sure: Tensor) -> list[Row]:
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
        for cell in ("F100", "V100"):
            played = study.play(method, cell, cell_scenario(cell), study.seeds("f"))
            rows: list[Row] = []
            for name in OVER:
                table = records(played, answers(played, FILTERS[name]))
                counts = torch.stack([metrics.class_counts(record) for record in table])
                missed = torch.stack([metrics.class_error(record).nan_to_num(0) for record in table]) * counts
                bins = torch.bucketize(counts, torch.tensor(COUNTS), right=True)
                for number in bins[counts > 0].unique().tolist():
                    inside = (bins == number) & (counts > 0)
                    images = int(counts[inside].sum())
                    row = {
                        "count": number,
                        "images": images,
                        "inst": round(100 * float(missed[inside].sum()) / images, 3),
                    }
                    row["cat"] = round(100 * float((missed[inside] / counts[inside]).mean()), 3)
                    rows.append({"part": "f", "method": method, "cell": cell, "filter": name, **row})
            study.add(rows)
            study.clock.say(f"f: {method} {cell}")


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
    p = argparse.ArgumentParser("python -m benchmarks.time_study", description=__doc__, formatter_class=style)
    add_options(p)
    p.add_argument("--parts", default="a,b,c,d,e,f", help="which, with commas (default: %(default)s)")
    p.add_argument("--seeds", type=int, nargs="+", help="streams (default: 425 5 6 7 8; in parts b, c, d 425)")
    p.add_argument("--cells", type=words, help="of part a, as in F100,V10 (default: seven)")
    p.add_argument("--methods", type=words, help="default: tribe; in part b " + ", ".join(STICKLESS))
    p.add_argument("--render", action="store_true", help="write the tables of docs/time.md, and play nothing")
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
        time_pages.render()
        return
    study = Study(open_bench(o), o)
    with float32_precision(o.precision):
        for part in o.parts:
            PARTS[part](study)
    print(f"written to {study.path}")


if __name__ == "__main__":
    main()
