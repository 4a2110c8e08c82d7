"""``tribe diff`` compares two results; ``tribe report`` shows all results of a folder on one page."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tribe.cli.commands import app
from tribe.cli.options import AsJson
from tribe.cli.output import make_table, messages, print_json, print_message, shown, wide_console
from tribe.experiments import report as pages
from tribe.experiments.report.page import plural
from tribe.experiments.result_diff import DomainDiff, ResultDiff, Side, diff_results, load_side
from tribe.experiments.statistics import Spread
from tribe.fields import printable

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
    with messages():
        sides = load_side(a, runs), load_side(b, runs)
        found = diff_results(*sides)
    if as_json:
        print_json(_plain(sides, found))
    else:
        _print(sides, found, wide_console())


def _plain(sides: tuple[Side, Side], found: ResultDiff) -> dict[str, Any]:
    def errors(domain: DomainDiff) -> dict[str, Any]:
        a, b = domain.errors
        return {"a": a, "b": b, "gap": domain.gap.mean, "deviation": domain.gap.deviation}

    a, b = sides
    return {
        "a": a.name,
        "b": b.name,
        "spec": [{"field": place, "a": one, "b": other} for place, one, other in found.spec],
        "seeds": found.seeds,
        "streams": [{**s._asdict(), "first": None if s.first is None else s.first._asdict()} for s in found.streams],
        "instance_error": None if found.overall is None else errors(found.overall),
        "domains": {domain.domain: errors(domain) for domain in found.domains},
        "verdict": None if found.verdict is None else {"words": str(found.verdict), "p": found.verdict.p},
    }


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
    def points(gap: Spread) -> str:
        return f"{100 * gap.mean:+.2f}" + (f" ± {100 * gap.deviation:.2f}" if gap.deviation is not None else "")

    rows = (
        [row.domain, *(f"{100 * error:.2f}" for error in row.errors), points(row.gap)]
        for row in (*found.domains, overall)
    )
    console.print(make_table(["domain"], ["A, error %", "B, error %", "A - B"], rows))
    seeds = len(found.seeds)
    over = f"means over {seeds} seeds, ± is the deviation of the gap between seeds" if seeds > 1 else "of one seed"
    console.print(f"{over}; the gap is negative where A is better", highlight=False)
    if found.verdict is not None:
        console.print(f"A against B: {found.verdict}", highlight=False, soft_wrap=True)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of results, such as runs or results; searched in depth.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Show all results in a folder on one page: errors, curves, classes, calibration, cost, and how each was made.

    The page needs no network and no program but a browser. Damaged records are named, on the page and here, and make
    the exit status 1.
    """
    with messages():
        runs = pages.write(folder, out)
    for path, reason in runs.damaged:
        print_message("warning", f"{path} is left out: {reason}")
    for path, reason in runs.repeated:
        print_message("warning", f"{path} {reason}")
    results = sum(len(row.played) for group in runs.groups for row in group.rows)
    if as_json:
        groups = [group.title for group in runs.groups]
        left_out = {"damaged": dict(runs.damaged), "repeated": dict(runs.repeated)}
        print_json({"report": str(out), "records": results, "groups": groups, **left_out})
    else:
        text = f"{plural(results, 'result')} in {plural(len(runs.groups), 'group')}: {out}"
        Console().print(printable(text), soft_wrap=True, markup=False)
    if runs.damaged:
        raise typer.Exit(1)
