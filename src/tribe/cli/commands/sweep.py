"""``tribe sweep``: play a method at every point of a grid of fields: a table, heat maps, and the best point."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.text import Text

from tribe import methods
from tribe.cli import options, output
from tribe.cli.commands import app
from tribe.cli.custom import method_name
from tribe.experiments import plots
from tribe.experiments import sweep as grids
from tribe.experiments.experiment import STREAM, Experiment
from tribe.experiments.parallel import run_all
from tribe.experiments.provenance import machine
from tribe.experiments.spec import canonical
from tribe.experiments.store import ResultStore
from tribe.experiments.sweep import SCORES, Point, SweepAxis, SweepRow
from tribe.experiments.workbench import Workbench
from tribe.fields import printable
from tribe.io.files import check_file, check_folder
from tribe.registry import nearest

AUTO = "auto"
SWEPT = ("batch", "precision")  # fields of the experiment itself that may be swept

Grid = Annotated[
    list[str] | None,
    typer.Option(
        help="A field and its values: tribe.lr=1e-4,1e-3, scenario.sigma=0.01,0.1 or batch=1,64. Each combination of "
        "the values of all grids is a point. Repeatable."
    ),
]
Listed = Annotated[
    list[str] | None,
    typer.Option(
        "--list",
        help="The same, but the fields of all lists vary together: the first value of each, then the second. "
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
Workers = Annotated[
    str | None,
    typer.Option(
        help="Run points side by side: in so many processes, or on Ray: auto ($RAY_ADDRESS, or all cores here) or the "
        "address of a cluster. With --set threads=1.",
        show_default="one after the other",
    ),
]


class SweepPlan(NamedTuple):
    """The points of a sweep, and their experiments."""

    workbench: Workbench
    method: str
    axes: list[SweepAxis]
    points: list[Point]
    experiments: list[Experiment]  # of the points, in their order


@app.command()
def sweep(
    grid: Grid = None,
    listed: Listed = None,
    method: MethodName = "tribe",
    dataset: options.DatasetName = "live-mnist-c",
    model: options.Model = "compact",
    weights: options.Weights = None,
    scenario: options.ScenarioName = "gli-f",
    seeds: options.Seeds = None,
    settings: options.Settings = None,
    data: options.DataRoot = None,
    out: options.Out = Path("runs"),
    score: ScoreName = AUTO,
    workers: Workers = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points, and whether they are done.")] = False,
    json_file: options.JsonFile = None,
) -> None:
    """Play a method at every point of a grid: a table, heat maps, and the best point with labels and without.

    A point that is chosen by labels of the stream itself is an oracle: a deployment has no labels. The other choice
    needs none.
    """
    console = Console(stderr=json_file == "-")
    with output.messages(), output.message_on_interrupt(out):
        if score != AUTO and score not in SCORES:
            raise ValueError(f"--score {score!r} is unknown: {nearest(score, [AUTO, *SCORES])}")
        if json_file not in (None, "-"):
            check_file(json_file)
        check_folder(out)
        axes = grids.make_axes(options.parse_lists(grid, "--grid"), options.parse_lists(listed, "--list"))
        name = method_name(method)
        points = _points(axes, name)
        wanted = [(name, point) for point in points]
        experiments, workbench = options.plan_experiments(
            wanted, dataset, model, weights, scenario, seeds, settings, data
        )
        plan = SweepPlan(workbench, name, axes, points, experiments)
        if not dry_run:
            rows = _play(plan, out, workers)
    with output.messages(redirect=False):
        if dry_run:
            _dry_run(plan, out, console, json_file)
            return
        _show(plan, rows, score, out, json_file, console)
    if failed := [row for row in rows if row.result is None]:
        reasons = "; ".join(dict.fromkeys(row.reason for row in failed))
        output.fail(f"{len(failed)} of {len(rows)} points could not be played to the end: {reasons}")


def _points(axes: list[SweepAxis], method: str) -> list[Point]:
    """Return all points; a field of a component that takes no part is refused."""
    owners = (*options.COMPONENTS, method)
    for place in (place for axis in axes for place in axis.places):
        owner, dot, field = place.partition(".")
        if place not in SWEPT and not (dot and field):
            raise ValueError(f"{place!r} is not a field: expected COMPONENT.FIELD, such as {method}.lr, or batch")
        if place not in SWEPT and owner not in owners:
            hint = f"--method {owner} sweeps it" if owner in methods.names() else nearest(owner, owners)
            raise ValueError(f"{place}: {owner!r} takes no part in this sweep: {hint}")
    return list(grids.points_of(axes))


def _play(plan: SweepPlan, out: Path, workers: str | None) -> list[SweepRow]:
    """Run what is missing; a point that fails does not stop the others."""
    out.mkdir(parents=True, exist_ok=True)
    names = {experiment: _words(point) for experiment, point in zip(plan.experiments, plan.points, strict=True)}
    title = printable(f"sweep of {plan.method}")
    with output.experiment_bars(title, len(names), names.__getitem__) as bars:
        outcomes = run_all(
            plan.experiments,
            out,
            workers=workers,
            workbench=plan.workbench,
            command=["tribe", *sys.argv[1:]],
            progress=bars.progress,
            done=bars.done,
        )
    return [grids.make_row(point, outcome) for point, outcome in zip(plan.points, outcomes, strict=True)]


def _words(point: Point) -> str:
    return ", ".join(f"{place}={value}" for place, value in point.items())


def _dry_run(plan: SweepPlan, out: Path, console: Console, json_file: str | None) -> None:
    store = ResultStore(out)
    rows: list[dict[str, Any]] = [
        {"fields": point, "id": experiment.id, "done": store.find(experiment) is not None}
        for point, experiment in zip(plan.points, plan.experiments, strict=True)
    ]
    output.write_json({"points": rows}, json_file)
    cells = ([*map(str, row["fields"].values()), row["id"], "done" if row["done"] else ""] for row in rows)
    console.print(output.make_table([*plan.points[0], "id", ""], [], cells))
    console.print(f"{len(rows)} points, {sum(row['done'] for row in rows)} done", highlight=False)


class BestPoints(NamedTuple):
    """The best point with labels and without, as far as there is one."""

    score: str  # the name of the score
    without_labels: SweepRow | None
    with_labels: SweepRow | None
    streams: int  # how many different streams the points were played on; with several, no point is the best

    @property
    def column(self) -> str:
        """The name of the score as the header of a column."""
        return f"{self.score}, {SCORES[self.score].better} is better"


def _choose(rows: Sequence[SweepRow], score: str) -> BestPoints:
    name = grids.default_score(rows) if score == AUTO else score
    specs = (row.result.experiment.json() for row in rows if row.result is not None)
    streams = len({canonical([spec[part] for part in STREAM]) for spec in specs})
    if streams > 1:
        return BestPoints(name, None, None, streams)
    return BestPoints(name, grids.best_by_score(rows, name), grids.lowest(rows, lambda row: row.error), streams)


def _show(
    plan: SweepPlan, rows: Sequence[SweepRow], score: str, out: Path, json_file: str | None, console: Console
) -> None:
    best = _choose(rows, score)
    wide = console if json_file == "-" else output.wide_console()
    *errors, time = output.HEADER
    cells = ([*map(str, row.point.values()), *_cells(row, best)] for row in rows)
    wide.print(output.make_table([*plan.points[0]], [*errors, best.column, "classes predicted", time], cells))
    for line in _lines(rows, best):
        wide.print(printable(line), soft_wrap=True, markup=False, highlight=False)
    path = out / options.file_name(f"sweep-{plan.method}-", plan.experiments)
    summary = path.with_name(f"{path.name}.json")
    output.write_json(_report(plan, rows, best), json_file, summary)
    picture = _draw(plan, rows, best, path.with_name(f"{path.name}.svg"))
    drawn = f", heat maps in {picture}" if picture else ""
    console.print(printable(f"results in {out}, summary in {summary}{drawn}"), soft_wrap=True, markup=False)


def _report(plan: SweepPlan, rows: Sequence[SweepRow], best: BestPoints) -> dict[str, Any]:
    def plain_best(row: SweepRow | None) -> dict[str, Any] | None:
        return None if row is None else {"fields": row.point, "instance_error": row.error, "scores": row.scores}

    score = SCORES[best.score]
    return {
        "method": plan.method,
        "machine": machine(plan.workbench.device),
        "axes": [{"fields": axis.places, "values": axis.values} for axis in plan.axes],
        "score": {"name": best.score, "words": score.words, "better": score.better},
        "points": [_plain_row(row) for row in rows],
        "best": {"without_labels": plain_best(best.without_labels), "with_labels": plain_best(best.with_labels)},
    }


def _plain_row(row: SweepRow) -> dict[str, Any]:
    if row.result is None:
        return {"fields": row.point, "id": None, "failed": row.reason}
    numbers = {name: row.result.values(name) for name in (*output.ERRORS, "seconds_per_image")}
    spec = {"fields": row.point, "id": row.result.experiment.id, "seeds": row.result.experiment.seeds}
    return {**spec, **numbers, "predicted_classes": row.classes, "scores": row.scores}


def _cells(row: SweepRow, best: BestPoints) -> list[str | Text]:
    if row.result is None:
        return ["failed", "", "", "", ""]
    instance, category, time = output.result_cells(row.result)
    value = row.scores[best.score]
    score = Text("none" if math.isnan(value) else f"{value:.4f}")
    instance.stylize("bold" if row is best.with_labels else "")
    score.stylize("bold" if row is best.without_labels else "")
    return [instance, category, score, "" if math.isnan(row.classes) else f"{row.classes:.1f}", time]


def _lines(rows: Sequence[SweepRow], best: BestPoints) -> list[str]:
    if best.streams > 1:
        return [f"no best point: the points were played on {best.streams} different streams"]
    lines, score = [], SCORES[best.score]
    if (chosen := best.without_labels) is not None:
        error = "" if math.isnan(chosen.error) else f": error {100 * chosen.error:.2f} %"
        lines.append(f"best without labels, by {best.score} ({score.words}): {_words(chosen.point)}{error}")
    else:
        lines.append(f"no best point without labels: the records do not hold {best.score} ({score.words})")
    if (oracle := best.with_labels) is not None:
        same = "the same point" if oracle is chosen else _words(oracle.point)
        lines.append(f"best with labels: {same}: error {100 * oracle.error:.2f} %")
    return lines


def _draw(plan: SweepPlan, rows: Sequence[SweepRow], best: BestPoints, path: Path) -> Path | None:
    """Draw the error and the score of all points; None where matplotlib is missing."""
    across, others = plan.axes[-1], plan.axes[:-1]
    downwards = others[0].labels() if len(others) == 1 else [_words(point) for point in grids.points_of(others)]
    columns = {
        "instance error, %": torch.tensor([100 * row.error for row in rows]),
        best.column: torch.tensor([row.scores[best.score] for row in rows]),
    }
    maps = {name: values.view(len(downwards), -1) for name, values in columns.items() if not values.isnan().all()}
    marks = {"best without labels": best.without_labels, "best with labels": best.with_labels}
    chosen = {name: divmod(rows.index(row), len(across.values)) for name, row in marks.items() if row is not None}
    names = across.name, others[0].name if len(others) == 1 else ""
    try:
        figure = plots.heat_maps(maps, across.labels(), downwards, names, chosen)
    except ModuleNotFoundError as error:
        output.note(f"no heat maps: {error}")
        return None
    plots.save(figure, path)
    return path
