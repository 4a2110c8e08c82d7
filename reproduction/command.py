"""``tribe reproduce``: any table or figure of the paper, our numbers next to the paper's; finished runs are reused."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table as Grid

from reproduction import plan as planning
from reproduction import tables
from reproduction.beyond import MARK, extend
from reproduction.chart import draw_chart
from reproduction.claims import Verdict, claims, judge
from reproduction.compare import Comparison, compare, stream_name
from reproduction.document import all_comparisons, by_settings, write_document
from reproduction.keep import keep
from reproduction.output import OutputTarget
from reproduction.plan import COMPONENTS, Choices, Plan, select
from reproduction.render import FORMATS, claims_grid, claims_markdown, draw
from tribe.cli.custom import method_name
from tribe.cli.options import DataRoot, Device, make_workbench, parse_overrides, parse_seeds
from tribe.cli.output import experiment_bars, message_on_interrupt, messages, shown
from tribe.core.precision import check_precision
from tribe.data.datasets.files import data_root
from tribe.data.datasets.manifest import FILE as MANIFEST
from tribe.experiments import plots
from tribe.experiments.experiment import Experiment
from tribe.experiments.parallel import Failure, run_all
from tribe.experiments.store import Result, ResultStore, finished
from tribe.experiments.workbench import Workbench
from tribe.fields import is_whole, printable
from tribe.io.files import check_file, check_folder, write_atomically
from tribe.methods import names as method_names
from tribe.methods import parse
from tribe.registry import nearest

SUFFIXES = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json"}
PLAIN = ("dataset", "model", "weights", "batch", "precision", "threads")  # keys of --set without a component
BEYOND = ("none", "time", "all")

Artifact = Annotated[
    str,
    typer.Argument(
        help="A table or its label; without one, list them. `released`: next to the released code. `claims`: the "
        "paper's claims, judged on finished runs. `document`: the page of all finished runs, with --out. `keep`: copy "
        "the results without records to the folder --out."
    ),
]
Runs = Annotated[Path, typer.Option(help="Folder of results; finished runs are not run again.")]
Rows = Annotated[
    str | None, typer.Option(help="Rows to keep: names, methods or patterns; +NAME or +file.py:Class adds a method.")
]
Columns = Annotated[str | None, typer.Option(help="Columns to keep: names or patterns, such as 'F 100 *,V 100 *'.")]
Beyond = Annotated[
    str, typer.Option(help=f"Rows beyond the paper, marked {MARK}: none, time (filters), or all (other methods, too).")
]
Seeds = Annotated[str | None, typer.Option(help="How many streams, side by side, or their seeds: 425,1,2.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="dataset=NAME, model=NAME (or file.py:attribute), weights=FILE, batch=64, precision=tf32, threads=1; or "
        "any field: dataset.corruptions=fog, scenario.draw=paper, tribe.h0=0.1.",
    ),
]
Workers = Annotated[
    str | None, typer.Option(help="Run side by side on Ray: a number of cores, `auto`, or the address of a cluster.")
]
NoRun = Annotated[bool, typer.Option("--no-run", help="Only compare results in --runs; needs no data or weights.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the runs, and whether they are done.")]
Style = Annotated[str, typer.Option("--format", help="table, markdown, latex, csv or json.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Write to this file; .md, .tex, .csv and .json set the format; .svg, .png, .pdf: a chart."),
]


def reproduce(
    artifact: Artifact = "",
    runs: Runs = Path("runs"),
    rows: Rows = None,
    columns: Columns = None,
    beyond: Beyond = "time",
    seeds: Seeds = None,
    settings: Settings = None,
    data: DataRoot = None,
    device: Device = "auto",
    workers: Workers = None,
    no_run: NoRun = False,
    dry_run: DryRun = False,
    style: Style = "table",
    out: Out = None,
) -> None:
    """Reproduce a table or a figure of the paper: run what is missing, then compare.

    Results in --runs are never computed again. Several processes with the same arguments share the work.
    """
    with messages(redirect=False), message_on_interrupt(runs):
        chart = out is not None and out.suffix in plots.FORMATS
        output = _output(style, None if chart else out)
        if not artifact:
            _list_tables(output)
            return
        if (no_run or artifact in ("claims", "document", "keep")) and not runs.is_dir():
            raise ValueError(f"there is no folder {runs}: --runs names the folder of results")
        if artifact in ("document", "keep"):
            if out is None:
                raise ValueError(f"{artifact} needs --out: the page or the folder that it writes")
            write_document(runs, out) if artifact == "document" else _keep(runs, out, data)
            return
        if artifact == "claims":
            choices, _ = _choices(None, rows, columns, seeds, settings, device)
            _show_claims(_judge_all(choices, finished(runs)), output)
            return
        table = _find_table(artifact, beyond)
        if chart and out is not None:
            plots.check_path(out)
        with messages():
            choices, weights = _choices(table, rows, columns, seeds, settings, device)
        if no_run:
            workbench = Workbench(data, "cpu", threads=choices.threads)
            plan = planning.search(table, choices, finished(runs), workbench)
        else:
            with messages():
                workbench = make_workbench(choices.model or "", weights, data, device, choices.threads)
            plan = planning.build(table, choices, workbench)
            if dry_run:
                _show_runs(plan, runs, output)
                return
            plan = _run(plan, runs, workers)
        comparison = compare(plan)
        verdicts = [judge(c, {comparison.name: comparison}) for c in claims() if list(c.tables) == [comparison.name]]
        _show(comparison, verdicts, output)
        if chart and out is not None:
            plots.save(draw_chart(comparison), out)
        if plan.problems:
            _print_problems(plan.problems)
            raise typer.Exit(1)


# -- options ----------------------------------------------------------------------------------------------------------


def _output(style: str, out: Path | None) -> OutputTarget:
    """Return where the output goes and in which format."""
    if out is not None and style == "table":
        style = SUFFIXES.get(out.suffix, style)
    if style not in ("table", *FORMATS):
        raise ValueError(f"--format {style!r} is unknown: {nearest(style, ['table', *FORMATS])}")
    if out is not None and not out.is_dir():
        check_file(out)
    return OutputTarget(style, out)


def _find_table(artifact: str, beyond: str) -> tables.Table:
    if beyond not in BEYOND:
        raise ValueError(f"--beyond is {', '.join(BEYOND)}; got {beyond!r}")
    table = tables.released() if artifact == "released" else tables.get(artifact)
    return table if beyond == "none" else extend(table, later=beyond == "all")


def _choices(
    table: tables.Table | None,
    rows: str | None,
    columns: str | None,
    seeds: str | None,
    settings: Sequence[str] | None,
    device: str,
) -> tuple[Choices, Path | None]:
    """Return the choices of all options, and the file of weights."""
    spelling = {name.lower(): name for name in method_names()}  # the paper writes CoTTA
    words = []
    for word in _split(rows):
        method = parse(word.removeprefix("+")).unfiltered
        name = word.removeprefix("+").replace(method, spelling.get(method.lower(), method), 1)
        words.append(f"+{method_name(name)}" if word.startswith("+") else word)
    known = {word[1:] for word in words if word.startswith("+")}
    if table is not None:
        papers = {str(m) for row in table.rows if (m := row.get("method") or table.common.get("method"))}
        known |= papers | {parse(name).unfiltered for name in papers}
    overrides = parse_overrides(settings, (*COMPONENTS, *sorted(known)), PLAIN)
    plain = overrides.pop("")
    weights = plain.pop("weights", None)
    if weights is not None and "model" not in plain:
        raise ValueError("--set weights= is for the network of --set model=: name it")
    check_precision(plain.get("precision", "tf32"))
    for name in ("batch", "threads"):
        if name in plain and not is_whole(plain[name], least=1):
            raise ValueError(f"--set {name}= takes a whole number, at least 1; got {plain[name]!r}")
    try:
        plain["device"] = None if device == "auto" else torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"--device is auto, cpu or cuda: {error}") from None
    plain["seeds"] = None if seeds is None else parse_seeds(seeds)
    fields = {owner: of for owner, of in overrides.items() if of}
    choices = Choices(rows=words, columns=_split(columns), overrides=fields, **plain)
    return choices, None if weights is None else Path(weights)


def _split(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


# -- runs -------------------------------------------------------------------------------------------------------------


def _run(plan: Plan, runs: Path, workers: str | None) -> Plan:
    """Run the experiments that are missing; return the plan with all results."""
    missing, outcomes = plan.experiments, dict[str, Result | str]()
    if missing:
        check_folder(runs)
        with experiment_bars(plan.table.name, len(missing), _name_of) as bars:
            results = run_all(
                sorted(missing, key=lambda e: -_images(e)),  # no worker starts a long run at the end
                runs,
                workers=workers,
                workbench=plan.workbench,
                progress=bars.progress,
                done=bars.done,
            )
        for outcome in results:
            reason = outcome.reason if isinstance(outcome, Failure) else outcome
            outcomes[outcome.experiment.id] = reason
    return plan.with_results(outcomes)


def _images(experiment: Experiment) -> int:
    """Return how many images the streams of a planned experiment play."""
    return 0 if experiment.parts is None else experiment.parts.stream.images


def _name_of(experiment: Experiment) -> str:
    return f"{experiment.method.name}, {experiment.dataset.name} {stream_name(experiment)}"


def _show_runs(plan: Plan, runs: Path, output: OutputTarget) -> None:
    """Print the runs of a plan, whether they are done, and the time of the others where the like of it was measured."""
    store = ResultStore(runs)
    measured = {_kind(r.experiment): r.values("seconds_per_image") for r in store.results()}
    rows: list[dict[str, Any]] = []
    for experiment in plan.experiments:
        images, seconds = _images(experiment), measured.get(_kind(experiment))
        rows.append(
            {
                "id": experiment.id,
                "method": experiment.method.name,
                "model": experiment.model.name,
                "stream": f"{experiment.dataset.name} {stream_name(experiment)}",
                "images": images,
                "done": store.find(experiment) is not None,
                "minutes": images * max(seconds) / 60 if seconds else None,
            }
        )
    if output.style == "json":
        missing = [{"reason": reason, "cells": cells} for reason, cells in plan.problems.items()]
        output.write_json({"artifact": plan.table.name, "runs": rows, "missing": missing})
        return
    grid = Grid("id", "method", "network", "stream", "images", "minutes", "")
    for row in rows:
        names = row["id"], row["method"], row["model"], row["stream"]
        minutes = "?" if row["minutes"] is None else f"{row['minutes']:.1f}"
        grid.add_row(*map(shown, names), f"{row['images']:,}", minutes, "done" if row["done"] else "")
    output.draw(lambda console: console.print(grid, "?: no such run was measured here"))
    _print_problems(plan.problems)


def _kind(experiment: Experiment) -> tuple[str, str, str, str]:
    return experiment.method.name, experiment.model.name, experiment.device, experiment.precision


def _keep(runs: Path, target: Path, data: Path | None) -> None:
    """Copy results without records, and the files that say how corrupted images were made."""
    check_folder(target)
    keep(runs, target)
    for made in sorted(data_root(None if data is None else str(data)).glob(f"*/{MANIFEST}")):
        place = target / "data" / made.parent.name
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / made.name, made.read_bytes())
    typer.echo(f"{printable(str(target))}: {len([*finished(target)])} results")


# -- output -----------------------------------------------------------------------------------------------------------


def _judge_all(choices: Choices, results: Sequence[Result]) -> list[Verdict]:
    """Judge all claims on the first series of results that the choices accept."""
    accepted = [select(found, choices.seeds) for found in results if choices.accepts(found.experiment)]
    series = by_settings([found for found in accepted if found is not None])
    compared = all_comparisons(next(iter(series.values()), []))
    return [judge(claim, {c.name: c for c in compared if "(ours:" not in c.title}) for claim in claims()]


def _show_claims(verdicts: Sequence[Verdict], output: OutputTarget) -> None:
    if output.style == "json":
        output.write_json([verdict.json() for verdict in verdicts])
    elif output.style == "markdown":
        output.write(claims_markdown(verdicts))
    else:
        output.draw(lambda console: console.print(claims_grid(verdicts)))


def _show(comparison: Comparison, verdicts: Sequence[Verdict], output: OutputTarget) -> None:
    if output.style == "table":
        output.draw(lambda console: draw(comparison, verdicts, console))
    else:
        output.write(FORMATS[output.style](comparison, verdicts))


def _list_tables(output: OutputTarget) -> None:
    if output.style == "json":
        names = ("name", "label", "kind", "where", "title")
        output.write_json([{name: getattr(table, name) for name in names} for table in tables.all_tables()])
        return
    grid = Grid("name", "what", "in the paper")
    grid.columns[0].no_wrap = True
    for table in tables.all_tables():
        grid.add_row(table.name, table.title, f"{table.where}, {table.label}")
    output.draw(lambda console: console.print(grid))


def _print_problems(problems: Mapping[str, Iterable[str]]) -> None:
    """Print why cells are missing, on stderr."""
    console = Console(stderr=True)
    for reason, cells in problems.items():
        found = list(cells)
        some = "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        console.print(printable(f"missing: {some}: {reason}"), style="yellow", markup=False, soft_wrap=True)
