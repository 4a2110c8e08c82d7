"""``tribe sweep``: play a method at every point of a grid of fields: a table, heat maps, and the best point.

Each point is an `Experiment`, whose result is in the store, as those of `tribe run`: what is there is not computed
again, and a sweep that was stopped goes on.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from tribe import methods
from tribe.cli.app import app
from tribe.cli.custom import method_name
from tribe.cli.options import (
    DataRoot,
    DatasetName,
    Device,
    Imbalance,
    JsonFile,
    Model,
    Out,
    Precision,
    ScenarioName,
    Seeds,
    Settings,
    Severity,
    Weights,
    parse_seeds,
)
from tribe.cli.output import check_json_file, errors_as_messages, fail, percent, print_json, shown, stdout_to_stderr
from tribe.cli.overrides import parse_lists, parse_overrides
from tribe.cli.planning import COMPONENTS, Planner, Request, file_name
from tribe.cli.progress import experiment_bars, message_on_interrupt, print_warnings
from tribe.cli.terminal import OutputTarget
from tribe.experiments import plots
from tribe.experiments.experiment import STREAM, Experiment
from tribe.experiments.provenance import machine
from tribe.experiments.ray import Failure, run_all
from tribe.experiments.spec import canonical, plain, with_whole_numbers
from tribe.experiments.store import find
from tribe.experiments.sweep import (
    SCORES,
    Axis,
    Point,
    Row,
    best_by_labels,
    best_by_score,
    default_score,
    make_axes,
    make_row,
    points_of,
)
from tribe.fields import is_whole, printable
from tribe.io.files import check_folder, write_atomically
from tribe.registry import nearest

AUTO = "auto"

Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="FIELD=VALUES",
        help="A field and its values: tribe.lr=1e-4,1e-3, scenario.sigma=0.01,0.1 or batch=16,64. Repeatable: all "
        "combinations are played.",
    ),
]
Listed = Annotated[
    list[str] | None,
    typer.Option(
        "--list",
        metavar="FIELD=VALUES",
        help="As --grid, but the fields of all lists vary together: the first value of each, then the second. "
        "Repeatable.",
    ),
]
MethodName = Annotated[str, typer.Option(help="Method, see `tribe list methods`, or file.py:Class; tribe+watch too.")]
ScoreName = Annotated[
    str,
    typer.Option(
        help="Choose the best point without labels by: estimate (accuracy, of METHOD+watch with a calibration), "
        "entropy, confidence, or agreement (of teacher and student).",
        show_default="auto: the first of these that the results have",
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of a run; its results depend on it.")]
Ray = Annotated[
    bool, typer.Option("--ray", help="Run side by side on Ray: on a cluster, else on all cores; with --threads 1.")
]
RayAddress = Annotated[str | None, typer.Option(help="Run on this Ray cluster.", show_default="$RAY_ADDRESS")]
Workers = Annotated[int | None, typer.Option(help="Start a Ray cluster with this many cores of this machine.")]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw the heat maps to this file: .svg, .png or .pdf.", show_default="an .svg in --out"),
]


class _Plan(NamedTuple):
    """What is to be played."""

    planner: Planner
    method: str
    axes: list[Axis]
    points: list[Point]
    experiments: list[Experiment]  # of the points, in their order


@app.command()
def sweep(
    grid: Grid = None,
    listed: Listed = None,
    method: MethodName = "tribe",
    dataset: DatasetName = "live-mnist-c",
    model: Model = "compact",
    weights: Weights = None,
    scenario: ScenarioName = "gli-f",
    imbalance: Imbalance = None,
    severity: Severity = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first stream.", show_default="0")] = None,
    seeds: Seeds = None,
    batch: Annotated[int, typer.Option(help="Images a stream and step.")] = 64,
    settings: Settings = None,
    data: DataRoot = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    threads: Threads = None,
    out: Out = Path("runs"),
    score: ScoreName = AUTO,
    ray: Ray = False,
    ray_address: RayAddress = None,
    workers: Workers = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points, and whether they are done.")] = False,
    plot: Plot = None,
    json_file: JsonFile = None,
) -> None:
    """Play a method at every point of a grid: a table, heat maps, and the best point with labels and without.

    A point that is chosen by labels of the stream itself is an oracle: a deployment has no labels. The other choice
    needs none.
    """
    console = Console(stderr=json_file == "-")
    with print_warnings(), stdout_to_stderr(), errors_as_messages(), message_on_interrupt(out):
        _check(json_file, plot, score, out)
        axes = make_axes(parse_lists(grid, "--grid"), parse_lists(listed, "--list"))
        streams = parse_seeds(seed, seeds) or (0,)
        parts = (dataset, model, weights, scenario, imbalance, severity, streams, batch, data, device, precision)
        plan = _plan(Request(*parts, threads), method, axes, settings)
        if not dry_run:
            on = ray_address or ("auto" if ray or workers is not None else None)
            rows = _play(plan, out, on, workers)
    if dry_run:
        _dry_run(plan, out, console, json_file)
        return
    with errors_as_messages():
        _show(plan, rows, score, out, plot, json_file, console)
    if failed := [row for row in rows if row.result is None]:
        reasons = "; ".join(dict.fromkeys(row.reason for row in failed))
        fail(f"{len(failed)} of {len(rows)} points could not be played to the end: {reasons}")


def _check(json_file: str | None, plot: Path | None, score: str, out: Path) -> None:
    """Raise an error before the work for options that would fail after it."""
    if score != AUTO and score not in SCORES:
        raise ValueError(f"--score {score!r} is unknown: {nearest(score, [AUTO, *SCORES])}")
    check_json_file(json_file)
    check_folder(out)
    if plot is not None:
        plots.check_path(plot)


# -- points -----------------------------------------------------------------------------------------------------------


def _plan(request: Request, method: str, axes: list[Axis], settings: list[str] | None) -> _Plan:
    """The experiment of every point; a field or value that does not exist is refused before any is played."""
    name = method_name(method)
    owners = (*COMPONENTS, name)
    fixed = parse_overrides(settings, owners)
    swept = [place for axis in axes for place in axis.places]
    for place in swept:
        owner, dot, field = place.partition(".")
        if place != "batch" and not (dot and field):
            raise ValueError(f"{place!r} is no field: expected COMPONENT.FIELD, such as {name}.lr, or batch")
        if place != "batch" and owner not in owners:
            hint = f"--method {owner} sweeps it" if owner in methods.names() else nearest(owner, owners)
            raise ValueError(f"{place}: {owner!r} takes no part in this sweep: {hint}")
        if field in fixed.get(owner, {}):
            raise ValueError(f"{place} is set and swept: leave out --set {place}")
    planner, points = Planner(request), list(points_of(axes))
    return _Plan(planner, name, axes, points, [_experiment(planner, name, fixed, point) for point in points])


def _experiment(planner: Planner, method: str, fixed: Mapping[str, Mapping[str, Any]], point: Point) -> Experiment:
    overrides = {owner: dict(fields) for owner, fields in fixed.items()}
    for place, value in point.items():
        owner, _, field = place.partition(".")
        if place != "batch":
            overrides[owner][field] = value
    batch = point.get("batch")
    if batch is not None and not is_whole(batch, least=1):
        raise ValueError(f"batch is a number of images, at least 1; got {batch!r}")
    return planner.experiment(method, overrides, batch)


def _play(plan: _Plan, out: Path, ray: str | None, workers: int | None) -> list[Row]:
    """Run what is missing; a point that fails does not stop the others."""
    out.mkdir(parents=True, exist_ok=True)
    names = {experiment: _words(point) for experiment, point in zip(plan.experiments, plan.points, strict=True)}
    title = f"sweep of {plan.method}"
    with experiment_bars(printable(title), len(names), lambda experiment: names[experiment]) as (progress, done):
        outcomes = run_all(
            plan.experiments,
            out,
            ray=ray,
            workers=workers,
            workbench=plan.planner.workbench,
            retries=0 if ray is None else 2,
            progress=progress,
            done=done,
        )
    reasons = [outcome.reason if isinstance(outcome, Failure) else outcome for outcome in outcomes]
    return [make_row(point, outcome) for point, outcome in zip(plan.points, reasons, strict=True)]


def _words(point: Point) -> str:
    return ", ".join(f"{place}={value}" for place, value in point.items())


def _dry_run(plan: _Plan, out: Path, console: Console, json_file: str | None) -> None:
    done = [find(experiment, out, verified=True, current=True) is not None for experiment in plan.experiments]
    if json_file is not None:
        rows = [
            {"fields": point, "id": experiment.id, "done": is_done}
            for point, experiment, is_done in zip(plan.points, plan.experiments, done, strict=True)
        ]
        _write_json({"points": rows}, json_file)
    table = Table(*(Column(shown(place)) for axis in plan.axes for place in axis.places), "id", "")
    for point, experiment, is_done in zip(plan.points, plan.experiments, done, strict=True):
        table.add_row(*(shown(str(value)) for value in point.values()), experiment.id, "done" if is_done else "")
    console.print(table)
    console.print(f"{len(done)} points, {sum(done)} done", highlight=False)


# -- output -----------------------------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """The best points."""

    score: str  # the name of the score
    without_labels: Row | None
    with_labels: Row | None
    streams: int  # how many different streams the points were played on; with several there is no best point


def _choose(rows: Sequence[Row], score: str) -> _Choice:
    name = default_score(rows) if score == AUTO else score
    specs = (row.result.experiment.json() for row in rows if row.result is not None)
    streams = len({canonical(with_whole_numbers([spec[part] for part in STREAM])) for spec in specs})
    if streams > 1:
        return _Choice(name, None, None, streams)
    return _Choice(name, best_by_score(rows, name), best_by_labels(rows), streams)


def _show(
    plan: _Plan, rows: Sequence[Row], score: str, out: Path, plot: Path | None, json_file: str | None, console: Console
) -> None:
    """Print the table and the best points; write the summary and the heat maps."""
    choice = _choose(rows, score)
    if json_file == "-":
        _print(plan, rows, choice, console)
    else:
        OutputTarget("table", None).draw(lambda wide: _print(plan, rows, choice, wide))
    path = out / file_name(f"sweep-{plan.method}-", plan.experiments)
    summary = path.with_name(f"{path.name}.json")
    report = _report(plan, rows, choice)
    write_atomically(summary, json.dumps(plain(report), indent=1).encode())
    if json_file is not None:
        _write_json(report, json_file)
    picture = _draw(plan, rows, choice, plot or path.with_name(f"{path.name}.svg"), console)
    drawn = f", heat maps in {picture}" if picture else ""
    console.print(printable(f"results in {out}, summary in {summary}{drawn}"), soft_wrap=True, markup=False)


def _write_json(report: Any, json_file: str) -> None:
    if json_file == "-":
        print_json(report)
    else:
        write_atomically(json_file, json.dumps(plain(report), indent=1).encode())


def _report(plan: _Plan, rows: Sequence[Row], choice: _Choice) -> dict[str, Any]:
    """The summary as plain data."""
    return {
        "method": plan.method,
        "machine": machine(plan.planner.workbench.device),
        "axes": [{"fields": axis.places, "values": axis.values} for axis in plan.axes],
        "score": {"name": choice.score, "words": SCORES[choice.score].words, "better": SCORES[choice.score].better},
        "points": [_plain_row(row) for row in rows],
        "best": {"without_labels": _best(choice.without_labels), "with_labels": _best(choice.with_labels)},
    }


def _plain_row(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"fields": row.point, "id": None if row.result is None else row.result.experiment.id}
    if row.result is None:
        return {**found, "failed": row.reason}
    seeds = row.result.experiment.seeds
    names = ("instance_error", "category_error", "seconds_per_image")
    numbers = {name: row.result.values(name) for name in names}
    return {**found, "seeds": seeds, **numbers, "predicted_classes": row.classes, "scores": row.scores}


def _best(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {"fields": row.point, "instance_error": row.error, "scores": row.scores}


def _print(plan: _Plan, rows: Sequence[Row], choice: _Choice, console: Console) -> None:
    score = SCORES[choice.score]
    table = Table(
        *(Column(shown(place)) for axis in plan.axes for place in axis.places),
        *(
            "instance error, %",
            "category error, %",
            f"{choice.score}, {score.better} is better",
            "classes predicted",
            "ms / image",
        ),
    )
    for column in table.columns[-5:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*(shown(str(value)) for value in row.point.values()), *_cells(row, choice))
    console.print(table)
    for line in _lines(rows, choice):
        console.print(printable(line), soft_wrap=True, markup=False, highlight=False)


def _cells(row: Row, choice: _Choice) -> list[str]:
    if row.result is None:
        return ["failed", "", "", "", ""]
    errors = [percent(row.result.values(name)) for name in ("instance_error", "category_error")]
    value = row.scores[choice.score]
    score = "none" if value is None else f"{value:.4f}"
    errors[0] = f"[bold]{errors[0]}[/]" if row is choice.with_labels else errors[0]
    score = f"[bold]{score}[/]" if row is choice.without_labels else score
    times = row.result.values("seconds_per_image")
    classes = "" if row.classes is None else f"{row.classes:.1f}"
    return [*errors, score, classes, f"{1e3 * sum(times) / len(times):.2f}"]


def _lines(rows: Sequence[Row], choice: _Choice) -> list[str]:
    """The best points in words."""
    if choice.streams > 1:
        return [f"no best point: the points were played on {choice.streams} different streams"]
    lines, score = [], SCORES[choice.score]
    if (chosen := choice.without_labels) is not None:
        error = "" if chosen.error is None else f": error {100 * chosen.error:.2f} %"
        lines.append(f"best without labels, by {choice.score} ({score.words}): {_words(chosen.point)}{error}")
    else:
        lines.append(f"no best point without labels: the records do not hold {choice.score} ({score.words})")
    if (oracle := choice.with_labels) is not None and oracle.error is not None:
        same = "the same point" if oracle is chosen else _words(oracle.point)
        lines.append(f"best with labels: {same}: error {100 * oracle.error:.2f} %")
    return lines


def _draw(plan: _Plan, rows: Sequence[Row], choice: _Choice, path: Path, console: Console) -> Path | None:
    """Draw the error and the score of all points; None where matplotlib is missing."""
    across, others = plan.axes[-1], plan.axes[:-1]
    downwards = (
        [_words(point) for point in points_of(others)] if len(others) > 1 else others[0].labels() if others else [""]
    )
    columns = {
        "instance error, %": [None if row.error is None else 100 * row.error for row in rows],
        f"{choice.score}, {SCORES[choice.score].better} is better": [row.scores[choice.score] for row in rows],
    }
    maps = {
        title: torch.tensor([float("nan") if value is None else value for value in values]).view(len(downwards), -1)
        for title, values in columns.items()
        if any(value is not None for value in values)
    }
    marks = {"best without labels": choice.without_labels, "best with labels": choice.with_labels}
    chosen = {name: divmod(rows.index(row), len(across.values)) for name, row in marks.items() if row is not None}
    names = across.name, others[0].name if len(others) == 1 else ""
    try:
        figure = plots.heat_maps(maps, across.labels(), downwards, names, chosen)
    except ModuleNotFoundError as error:
        console.print(f"no heat maps: {error}", style="yellow", markup=False)
        return None
    plots.save(figure, path)
    return path
