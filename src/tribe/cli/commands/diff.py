"""``tribe diff``: how two results differ: fields, the first image predicted differently, and errors per domain."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tribe.cli.app import app
from tribe.cli.options import AsJson
from tribe.cli.output import errors_as_messages, print_json, shown
from tribe.cli.tables import make_table, wide_console
from tribe.experiments.result_diff import DomainDiff, ResultDiff, Side, StreamDiff, diff_results, load_side
from tribe.experiments.statistics import Spread

WHAT = "A result: an id of --runs or its first digits, a folder such as runs/ID, or a record-SEED.npz."
Runs = Annotated[Path, typer.Option(help="Folder of results that ids are found in.")]


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help=WHAT)],
    b: Annotated[str, typer.Argument(help="The other result.")],
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Compare two results of the same streams: fields that differ, the first image predicted differently, and errors.

    The gap is the error of A minus the error of B: negative where A is better. Results of different data are refused.
    """
    with errors_as_messages():
        sides = load_side(a, runs), load_side(b, runs)
        found = diff_results(*sides)
    if as_json:
        print_json(_plain(sides, found))
    else:
        _print(sides, found, wide_console())


def _plain(sides: tuple[Side, Side], found: ResultDiff) -> dict[str, Any]:
    a, b = sides
    overall = None if found.overall is None else _plain_errors(found.overall)
    return {
        "a": a.name,
        "b": b.name,
        "spec": [{"field": place, "a": one, "b": other} for place, one, other in found.spec],
        "seeds": found.seeds,
        "streams": [_plain_stream(stream) for stream in found.streams],
        "instance_error": overall,
        "domains": {domain.domain: _plain_errors(domain) for domain in found.domains},
        "verdict": None if found.verdict is None else {"words": str(found.verdict), "p": found.verdict.p},
    }


def _plain_stream(stream: StreamDiff) -> dict[str, Any]:
    first = None if stream.first is None else stream.first._asdict()
    return {**stream._asdict(), "first": first}


def _plain_errors(found: DomainDiff) -> dict[str, Any]:
    a, b = found.errors
    return {"a": a, "b": b, "gap": found.gap.mean, "deviation": found.gap.deviation}


def _print(sides: tuple[Side, Side], found: ResultDiff, console: Console) -> None:
    for letter, side in zip("AB", sides, strict=True):
        console.print(letter, shown(side.name), soft_wrap=True)
    if found.spec:
        rows = ([place, *("" if value is None else str(value) for value in values)] for place, *values in found.spec)
        console.print(make_table(["field", "A", "B"], [], rows))
    else:
        console.print("no field differs")
    if any(seed not in found.seeds for side in sides for seed in side.scores):
        console.print(f"compared: the seeds that both have, {', '.join(map(str, found.seeds))}", highlight=False)
    if found.streams:
        _print_streams(found, console)
    else:
        console.print("without records of both it is not known which images are predicted differently")
    if found.overall is not None:
        _print_errors(found, found.overall, console)


def _print_streams(found: ResultDiff, console: Console) -> None:
    rows = []
    for stream in found.streams:
        first = ["none", "", "", "", ""]
        if (at := stream.first) is not None:
            answers = (f"{p} ({100 * c:.1f} %)" for p, c in zip(at.predictions, at.confidences, strict=True))
            first = [f"{at.image:,}", at.domain, "?" if at.label < 0 else str(at.label), *answers]
        rows.append([str(stream.seed), first[1], f"{stream.images:,}", f"{stream.different:,}", first[0], *first[2:]])
    numbers = ["images", "differ", "first: image", "label", "A predicts", "B predicts"]
    console.print(make_table(["seed", "domain"], numbers, rows))
    largest = max(stream.confidence for stream in found.streams)
    console.print(f"images count from 0; confidences of one image differ by at most {largest:.2g}", highlight=False)


def _print_errors(found: ResultDiff, overall: DomainDiff, console: Console) -> None:
    rows = []
    for row in (*found.domains, overall):
        rows.append([row.domain, *(f"{100 * error:.2f}" for error in row.errors), _points(row.gap)])
    console.print(make_table(["domain"], ["A, error %", "B, error %", "A - B"], rows))
    seeds = len(found.seeds)
    over = f"means over {seeds} seeds, ± is the deviation of the gap between seeds" if seeds > 1 else "of one seed"
    console.print(f"{over}; the gap is negative where A is better", highlight=False)
    if found.verdict is not None:
        console.print(f"A against B: {found.verdict}", highlight=False, soft_wrap=True)


def _points(gap: Spread) -> str:
    return f"{100 * gap.mean:+.2f}" + (f" ± {100 * gap.deviation:.2f}" if gap.deviation is not None else "")
