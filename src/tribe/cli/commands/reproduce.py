"""``tribe reproduce``: any table or figure of the paper again, ours next to its own; what was run before is kept."""

import contextlib
import dataclasses
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Grid

from tribe.cli.app import app
from tribe.cli.custom import METHOD, component_name
from tribe.cli.output import fail, stdout_to_stderr
from tribe.cli.overrides import parse_overrides
from tribe.datasets.files import data_root
from tribe.datasets.made import FILE as MADE
from tribe.engine.precision import check_precision
from tribe.lab import plots
from tribe.lab.experiment import Experiment
from tribe.lab.ray import Failure
from tribe.lab.spec import plain
from tribe.lab.store import Damaged, Result, find, finished, keep, survey
from tribe.lab.workbench import Workbench
from tribe.methods import names as method_names
from tribe.paper import reproduce
from tribe.paper import tables as paper
from tribe.paper.chart import chart
from tribe.paper.gathering import REMEDY
from tribe.paper.page import DATA
from tribe.paper.plans import artifacts, refuse_unknown_fields
from tribe.paper.render import FORMATS, WORDS, claims_json, claims_markdown, number, ours
from tribe.paper.reproduce import Comparison, Judged, Origin, Plan, Wishes, released
from tribe.registry import nearest
from tribe.storage.atomic import write_atomically

WIDE = 240  # columns of a table that goes to a file
CLAIMS = "claims"  # every sentence of the paper about its tables, judged on what was run before
DOCUMENT = "document"  # all of what was run before, as a page
RELEASED = "released"  # the table of the released code
ANY = "; with --no-run any"  # that all results share


@app.command("reproduce")
def reproduce_artifact(
    artifact: Annotated[
        str,
        typer.Argument(
            help="A name of `--list`, or a label such as tab:component_ablation; `released`: next to the released "
            "code; of what was run before: `claims`, or `document`, a page of all of it."
        ),
    ] = "",
    show_list: Annotated[bool, typer.Option("--list", help="List what can be reproduced.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder of results: what lies there is not run again.")] = Path("runs"),
    methods: Annotated[
        str | None,
        typer.Option(help="Rows to keep, comma-separated; +NAME or +file.py:Class adds a method.", show_default="all"),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="Only rows of these patterns: '100 *' or 'CIFAR10-C*'.", show_default="all")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Only columns of these patterns: 'F 100 *,V 100 *'.", show_default="all")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first stream.", show_default=f"0{ANY}")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="How many streams: one a seed, side by side on one network.", show_default=f"1{ANY}"),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Play this in place of the paper's: live-mnist-c needs no download.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Use this in place of the paper's: compact comes with the package.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Root of the data sets.", show_default="$TRIBE_DATA or the cache directory")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field: dataset.corruptions=fog, scenario.draw=paper, tribe.h0=0.1."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:1.", show_default=f"auto: a GPU where there is one{ANY}")
    ] = "auto",
    precision: Annotated[
        str | None,
        typer.Option(
            help="tf32 (on a CPU float32), float32 for IEEE's, or bf16: a network of bfloat16.",
            show_default=f"tf32{ANY}",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of a run on the CPU, a part of what it is. With 1, start one process a core.",
            show_default=f"as torch decides{ANY}",
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run side by side on Ray: on the cluster there is, or all cores; --threads 1.")
    ] = False,
    ray_address: Annotated[
        str | None, typer.Option(help="Run on this cluster of Ray.", show_default="$RAY_ADDRESS")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Run on a new cluster of Ray, with as many cores of this machine.")
    ] = None,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Compare what lies in --runs, wherever it was made; needs no weights.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, which are done, and what others take.")
    ] = False,
    style: Annotated[str, typer.Option("--format", help="table, markdown, latex, csv or json.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write it here and not to the terminal.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it here: .svg, .png or .pdf.")] = None,
    kept: Annotated[
        Path | None,
        typer.Option("--keep", help="Copy the JSON of all finished runs here, without their records; runs nothing."),
    ] = None,
) -> None:
    """Reproduce a table or a figure of the paper: run what is missing, then compare.

    What is in --runs is never computed twice. Several processes that are started with the same words share the work.
    """
    try:
        looked = no_run or artifact in (CLAIMS, DOCUMENT)  # at what there is: nothing is run, no device is opened
        given = Origin(seed, seeds, precision, _kind(device) if looked else None, threads)
        first, count, precise = seed or 0, 1 if seeds is None else seeds, precision or "tf32"
        _check(style, precise, count, out, plot)
        if show_list:
            _list(style, out)
            return
        wanted = Wishes(dataset, model, seeds=range(first, first + count), precision=precise)
        if kept is not None:
            _need(runs)
            _keep(runs, kept, data_root(None if data is None else str(data)))
            return
        if artifact in (CLAIMS, DOCUMENT):
            _refuse(artifact, methods=methods, rows=rows, columns=columns, plot=plot)
        if looked:
            _need(runs)
        if artifact == DOCUMENT:
            _document(runs, given, style, out)
            return
        workbench = Workbench(data, "cpu" if looked else device, threads=threads)
        if artifact == CLAIMS:
            told = parse_overrides(settings, ("dataset", "model", "scenario"))
            wishes = dataclasses.replace(wanted, settings={owner: fields for owner, fields in told.items() if fields})
            refuse_unknown_fields(artifacts(), wishes)
            judgements = reproduce.judged(lambda table: reproduce.gather(table, wishes, runs, workbench, given), runs)
            _claims(judgements, style, out)
            _tell_damage(runs)
            return
        table = _asked(artifact)
        with stdout_to_stderr():
            wishes = _with_rows(wanted, table, methods, rows, columns, settings)
        refuse_unknown_fields([table], wishes)
        plan = (
            reproduce.gather(table, wishes, runs, workbench, given)
            if no_run
            else reproduce.plan(table, wishes, workbench)
        )
        if dry_run:
            _dry_run(plan, runs, style, out)
            return
        if not no_run:
            runs.mkdir(parents=True, exist_ok=True)
            with _told(Console(stderr=True)) as console:
                cluster = ray_address or ("auto" if ray or workers is not None else None)
                with stdout_to_stderr():
                    plan = _run(plan, runs, console, cluster, workers)
        comparison = reproduce.compare(plan, runs)
        others = _planning(wishes.of_any_table, workbench, runs, given if no_run else None)
        judgements = reproduce.judged(others, runs, [comparison], table.name)
        _show(comparison, judgements, style, out)
        if plot is not None:
            plots.save(chart(comparison), plot)
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        words = f"stopped; what was done is in {runs}, and the same command goes on from there"
        Console(stderr=True).print(words, soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(130) from None
    _end_with(plan.problems)


# -- what was asked ---------------------------------------------------------------------------------------------------


def _asked(artifact: str) -> paper.Table:
    if not artifact:
        raise ValueError(f"say what to reproduce: {', '.join(paper.names())}; `tribe reproduce --list` tells more")
    return released().table if artifact == RELEASED else paper.get(artifact)


def _check(style: str, precision: str, seeds: int, out: Path | None, plot: Path | None) -> None:
    """Refuse before the work what would fail after it."""
    if style not in ("table", *FORMATS):
        raise ValueError(f"--format {style!r} is unknown: {nearest(style, ['table', *FORMATS])}")
    check_precision(precision)
    if seeds < 1:
        raise ValueError(f"--seeds is how many streams, at least 1; got {seeds}")
    for target in (out, plot):
        if target is not None and not target.parent.is_dir():
            raise ValueError(f"there is no folder {target.parent} to write {target.name} into")
    if plot is not None and plot.suffix.lower() not in plots.FORMATS:
        raise ValueError(f"a chart ends in {', '.join(plots.FORMATS)}; got {plot}")


def _with_rows(
    wishes: Wishes,
    table: paper.Table,
    methods: str | None,
    rows: str | None,
    columns: str | None,
    settings: list[str] | None,
) -> Wishes:
    """The rows and columns that are wanted, and the fields that are set."""
    given = _listed(methods)
    added = [word[1:] for word in given if word.startswith("+")]
    added = [component_name(METHOD, _in_any_case(word)) for word in added]
    known = {str(m) for row in table.rows if (m := row.get("method") or table.common.get("method"))}
    told = parse_overrides(settings, ("dataset", "model", "scenario", *sorted(known), *added))
    return dataclasses.replace(
        wishes,
        only=[word for word in given if not word.startswith("+")],
        added=added,
        rows=_listed(rows),
        columns=_listed(columns),
        settings={owner: fields for owner, fields in told.items() if fields},
    )


def _in_any_case(word: str) -> str:
    """The name of a method that the paper may spell otherwise, such as CoTTA."""
    spelt = {name.lower(): name for name in method_names()}
    return word if word in spelt.values() else spelt.get(word.lower(), word)


def _kind(device: str) -> str | None:
    """The kind of device that results must be from; None: any. It need not be here."""
    if device == "auto":
        return None
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: expected auto, cpu or cuda") from error


def _refuse(artifact: str, **given: object) -> None:
    """Refuse options that would be passed over in silence."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{artifact} is of all tables: --{name} is for one, as in `tribe reproduce cifar10`")


def _need(runs: Path) -> None:
    """Refuse to speak of results where there can be none."""
    if not runs.is_dir():
        raise ValueError(f"there is no folder {runs} of results: --runs names it")


def _planning(
    wishes: Wishes, workbench: Workbench, runs: Path, gathered: Origin | None
) -> Callable[[paper.Table], Plan]:
    """How tables that a claim needs beside the one that was asked for are looked up: planned, or gathered alone."""
    if gathered is not None:
        return lambda table: reproduce.gather(table, wishes, runs, workbench, gathered)
    alike = Origin(wishes.seeds[0], len(wishes.seeds), wishes.precision, workbench.device.type, workbench.threads)

    def plan(table: paper.Table) -> Plan:
        fetched = any("/" in str(part.get("model", "")) for part in (table.common, *table.rows))
        if fetched and wishes.model is None:  # another library's network: a sentence is not worth a download
            return reproduce.gather(table, wishes, runs, workbench, alike)
        return reproduce.plan(table, wishes, workbench)

    return plan


def _listed(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


# -- what is run ------------------------------------------------------------------------------------------------------


def _run(plan: Plan, runs: Path, console: Console, ray: str | None, workers: int | None) -> Plan:
    """Run with a bar for all experiments and one for each that is under way."""
    if not plan.experiments:
        return plan
    words, bar = TextColumn("{task.description}"), BarColumn()
    with Progress(words, bar, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        whole = progress.add_task(f"{plan.table.name}: 0 of {len(plan.experiments)} runs", total=len(plan.experiments))
        present: dict[Experiment, TaskID] = {}

        def follow(experiment: Experiment, done: int, of: int, wrong: float | None) -> None:
            name = f"{experiment.method.name}, {_stream_words(experiment)}"
            told = "" if wrong is None else f": error {100 * wrong:.1f} %"
            if experiment not in present:
                present[experiment] = progress.add_task(name)
            progress.update(present[experiment], completed=done, total=of, description=name + told)

        def done(experiment: Experiment, outcome: Result | Failure) -> None:
            if experiment in present:
                progress.remove_task(present.pop(experiment))
            progress.advance(whole)
            count = f"{int(progress.tasks[0].completed)} of {len(plan.experiments)} runs"
            progress.update(whole, description=f"{plan.table.name}: {count}")

        return reproduce.run(plan, runs, plan.workbench, ray=ray, workers=workers, progress=follow, done=done)


def _stream_words(experiment: Experiment) -> str:
    fields = experiment.scenario.fields
    told = [f"{name} {fields[name]:g}" for name in ("imbalance", "sigma") if fields.get(name) is not None]
    return f"{experiment.dataset.name} {experiment.scenario.name} {' '.join(told)}"


@contextlib.contextmanager
def _told(console: Console) -> Iterator[Console]:
    """Say warnings in a line each, as what was damaged and set aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: console.print(f"warning: {message}", style="yellow", markup=False)
        yield console


def _dry_run(plan: Plan, runs: Path, style: str, out: Path | None) -> None:
    known = reproduce.history(finished(runs, damaged="skip"))
    rows: list[dict[str, Any]] = []
    for experiment in plan.experiments:
        images = experiment.length(plan.workbench)
        seconds, measured = known.estimate(experiment, images)
        rows.append(
            {
                "id": experiment.id,
                "method": experiment.method.name,
                "model": experiment.model.name,
                "stream": _stream_words(experiment),
                "images": images,
                "done": find(experiment, runs, verified=True) is not None,
                "minutes": seconds / 60,
                "measured": measured,
            }
        )
    left = sum(row["minutes"] for row in rows if not row["done"])
    if style == "json":
        missing = [{"reason": reason, "cells": cells} for reason, cells in plan.problems.items()]
        _write(_json({"artifact": plan.table.name, "runs": rows, "minutes_left": left, "missing": missing}), out)
        return
    grid = Grid("id", "method", "network", "stream", "images", "minutes", "")
    for row in rows:
        minutes = f"{row['minutes']:.1f}" + ("" if row["measured"] else " ?")
        state = "done" if row["done"] else ""
        grid.add_row(row["id"], row["method"], row["model"], row["stream"], f"{row['images']:,}", minutes, state)
    done = sum(row["done"] for row in rows)
    words = f"{len(rows)} runs, {done} done; the others take about {left:.0f} minutes (?: guessed, never measured here)"
    _draw(lambda console: console.print(grid, words), out)
    _complain(plan.problems)


def _keep(runs: Path, target: Path, root: Path) -> None:
    """Leave records behind; what is known of the making of corrupted images goes along."""
    known = keep(runs, target, damaged="skip")
    for made in sorted(root.glob(f"*/{MADE}")):
        place = target / DATA / made.parent.name
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / made.name, made.read_bytes())
    size = sum(path.stat().st_size for path in target.rglob("*.json"))
    typer.echo(f"{target}: {len(known)} results, {size / 1e3:,.0f} kB of JSON")
    left = [found for folder in (runs, target) for found in survey(folder) if isinstance(found, Damaged)]
    _end_with({f"{found.error}. {REMEDY}": [found.folder.name] for found in left})


# -- what came out ----------------------------------------------------------------------------------------------------


def _list(style: str, out: Path | None) -> None:
    if style == "json":
        told = ("name", "label", "kind", "where", "title")
        _write(_json([{name: getattr(table, name) for name in told} for table in artifacts()]), out)
        return
    grid = Grid("name", "what", "in the paper")
    grid.columns[0].no_wrap = True
    for table in artifacts():
        grid.add_row(table.name, table.title, f"{table.where}, {table.label}")
    _draw(lambda console: console.print(grid), out)


def _document(runs: Path, given: Origin, style: str, out: Path | None) -> None:
    if style not in ("table", "markdown"):  # the first is what nobody asked for
        raise ValueError(f"the document comes as markdown; got --format {style}")
    _write(reproduce.document(runs, given), out)
    _tell_damage(runs)


def _claims(judgements: list[Judged], style: str, out: Path | None) -> None:
    if style == "json":
        _write(_json(claims_json(judgements)), out)
    elif style == "markdown":
        _write("\n".join(claims_markdown(judgements)) + "\n", out)
    elif style == "table":
        _draw(lambda console: console.print(_claims_grid(judgements)), out)
    else:
        raise ValueError(f"claims come as table, markdown or json; got --format {style}")


def _show(comparison: Comparison, judgements: list[Judged], style: str, out: Path | None) -> None:
    if style == "table":
        _draw(lambda console: _print(comparison, judgements, console), out)
    else:
        _write(FORMATS[style](comparison, judgements), out)


def _draw(draw: Callable[[Console], None], out: Path | None) -> None:
    """A table in the terminal, or wide, where it goes elsewhere."""
    if out is None:
        console = Console()
        draw(console if console.is_terminal else Console(width=WIDE))
        return
    console = Console(width=WIDE, record=True, file=io.StringIO())
    draw(console)
    _write(console.export_text(), out)


def _json(data: Any) -> str:
    return json.dumps(plain(data), indent=2, allow_nan=False) + "\n"


def _write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())


def _print(comparison: Comparison, judgements: list[Judged], console: Console) -> None:
    console.print(
        f"[bold]{escape(comparison.title)}[/] ({comparison.label}): ours, [dim]the {comparison.theirs}'s[/], difference"
    )
    grid = Grid("", *comparison.columns, padding=(0, 1))
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in comparison.rows:
        grid.add_row(row, *(_cell(comparison, row, column) for column in comparison.columns))
    console.print(grid)
    for note in comparison.notes:
        console.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)
    if judgements:
        console.print(_claims_grid(judgements))


def _claims_grid(judgements: list[Judged]) -> Grid:
    grid = Grid("the paper says", "on its own numbers", "on ours")
    for claim, own, mine in judgements:
        verdicts = (escape(f"{WORDS[verdict.holds]}: {verdict.why}") for verdict in (own, mine))
        grid.add_row(escape(claim.says), *verdicts)
    return grid


def _cell(comparison: Comparison, row: str, column: str) -> str:
    entry = comparison.entries[row, column]
    told = escape(ours(entry))
    lines = [f"[bold]{told}[/]" if comparison.is_best(row, column) else told]
    if entry.paper is not None:
        lines.append(f"[dim]{escape(number(entry.paper, entry.unit))}[/]")
    if entry.difference is not None:
        lines.append(number(entry.difference, entry.unit, signed=True))
    return "\n".join(lines)


def _tell_damage(runs: Path) -> None:
    """Name results that no sentence or table could be made of."""
    _end_with({why: [name] for name, why in reproduce.damaged(runs).items()})


def _end_with(problems: Mapping[str, Sequence[str]]) -> None:
    """Complain of what there is to complain of, and say so to whoever called."""
    if problems:
        _complain(problems)
        raise typer.Exit(1)


def _complain(problems: Mapping[str, Sequence[str]]) -> None:
    console = Console(stderr=True)
    for reason, cells in problems.items():
        some = "; ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
        console.print(f"missing: {some}: {reason}", style="yellow", markup=False, soft_wrap=True)
