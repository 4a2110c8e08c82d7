"""``tribe run``: play a stream to some methods and print their errors. Without options: offline, on real digits.

Each method is an `Experiment`, whose result is in the store: ``OUT/<id>/``, see `tribe.experiments.store`. It is
not computed again, and a run that was killed goes on from its checkpoint.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import tribe
from tribe.cli.app import app
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
    method_names,
    parse_seeds,
)
from tribe.cli.output import (
    check_json_file,
    describe_error_with_line,
    errors_as_messages,
    fail,
    percent,
    print_json,
    print_message,
    shown,
    stdout_to_stderr,
)
from tribe.cli.overrides import parse_overrides
from tribe.cli.planning import COMPONENTS, Planner, Request, file_name
from tribe.cli.progress import print_warnings
from tribe.experiments import plots
from tribe.experiments.execution import run_experiment
from tribe.experiments.experiment import Experiment
from tribe.experiments.provenance import machine
from tribe.experiments.shared import SharedPlays, in_groups
from tribe.experiments.spec import plain
from tribe.experiments.store import Result
from tribe.experiments.workbench import MissingKnowledge, Workbench
from tribe.fields import printable
from tribe.io.files import CannotWrite, check_folder, write_atomically
from tribe.registry import nearest

CLEAR_ERRORS = (ValueError, OSError, ImportError, torch.OutOfMemoryError)  # their messages explain themselves
DEFAULT_METHODS = "source,bn,tent,tribe"
ERRORS = ("instance_error", "category_error")

MethodNames = Annotated[
    str,
    typer.Option(
        help="Methods, comma-separated; `all`, `ablations` for TRIBE's parts, or file.py:Class. tribe+time adds a time "
        "filter, see `tribe list filters`."
    ),
]
Logits = Annotated[
    bool,
    typer.Option("--logits", help="Keep the logits of every image in the records. Results without are computed again."),
]


@app.command()
def run(
    dataset: DatasetName = "live-mnist-c",
    model: Model = "compact",
    weights: Weights = None,
    scenario: ScenarioName = "gli-f",
    imbalance: Imbalance = None,
    severity: Severity = None,
    methods: MethodNames = DEFAULT_METHODS,
    seed: Annotated[int | None, typer.Option(help="Seed of the first stream.", show_default="0")] = None,
    seeds: Seeds = None,
    batch: Annotated[int, typer.Option(help="Images a stream and step.")] = 64,
    settings: Settings = None,
    data: DataRoot = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    out: Out = Path("runs"),
    json_file: JsonFile = None,
    chart: Annotated[bool, typer.Option(help="Save a chart of errors and class counts.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Compute results anew that are there.")] = False,
    logits: Logits = False,
) -> None:
    """Play a stream to some methods: live progress, a table of errors, and a chart.

    Without options it needs no network and no download: real digits, corrupted on the fly in 15 ways, classes in bursts
    and in a long tail, and a small network that was trained on the clean ones.
    """
    console = Console(stderr=json_file == "-")
    with print_warnings(), stdout_to_stderr(), errors_as_messages():
        check_json_file(json_file)
        check_folder(out)
        streams = parse_seeds(seed, seeds) or (0,)
        parts = (dataset, model, weights, scenario, imbalance, severity)
        workbench, experiments = _plan(Request(*parts, streams, batch, data, device, precision), methods, settings)
        first = next(iter(experiments.values()))
        length = len(first.stream(workbench).schedules[0].index)
        out.mkdir(parents=True, exist_ok=True)
    names = shown(f"{first.dataset.name}, {first.model.name}, {first.scenario.name}")
    names.stylize("bold", 0, len(printable(first.dataset.name)))
    shape = f"{len(streams)} stream{'s' * (len(streams) > 1)} of {length:,} images"
    console.print(names + f": {shape}, batch {batch}, on {machine(workbench.device)['device']}")
    with print_warnings(), stdout_to_stderr():
        results, stopped = _play(experiments, workbench, out, force, logits)
    if results:
        _show(results, workbench.device, out / file_name("", [*experiments.values()]), json_file, chart, console)
    if stopped or not results:
        raise typer.Exit(130 if stopped else 2)
    if failed := [name for name in experiments if name not in results]:
        fail(f"{', '.join(failed)} could not be played to the end; the reasons are above")


def _plan(request: Request, methods: str, settings: list[str] | None) -> tuple[Workbench, dict[str, Experiment]]:
    """Where the experiments are computed, and the experiment of each method."""
    chosen = method_names(methods)
    if not chosen:
        raise ValueError(f"--methods {methods!r} names no method: {nearest('', tribe.methods.names())}")
    planner, overrides = Planner(request), parse_overrides(settings, (*COMPONENTS, *chosen))
    experiments, missing = {}, []
    for name in chosen:
        try:
            experiments[name] = planner.experiment(name, overrides)
        except MissingKnowledge as error:
            missing.append(error)
    if missing:
        raise MissingKnowledge.of_all(missing)
    return planner.workbench, experiments


def _play(
    experiments: Mapping[str, Experiment], workbench: Workbench, out: Path, force: bool, keep_outputs: bool
) -> tuple[dict[str, Result], bool]:
    """Run the experiments; an error of one is printed, and the others go on.

    Returns the results, and whether Ctrl-C stopped it.
    """
    results: dict[str, Result] = {}
    found, plays = [], SharedPlays(experiments.values())
    order = in_groups(experiments.values())
    try:
        with progress_bar() as progress:
            for name, experiment in sorted(experiments.items(), key=lambda item: order.index(item[1])):
                total = len(experiment.stream(workbench))
                task = progress.add_task(printable(name), total=total, error="")
                show = _update_bar(progress, task)
                try:
                    options: dict[str, Any] = {"force": force, "plays": plays, "keep_outputs": keep_outputs}
                    result = run_experiment(experiment, out, workbench=workbench, progress=show, **options)
                except CannotWrite as error:
                    kept = "What is finished is kept: make room, and the same command goes on"
                    print_message("error", f"{name}: {error}. {kept}", progress.console)
                    continue
                except Exception as error:  # a custom method may raise anything
                    reason = str(error) if isinstance(error, CLEAR_ERRORS) else describe_error_with_line(error)
                    print_message("error", f"{name}: {reason}", progress.console)
                    continue
                results[name] = result
                if progress.tasks[task].completed < total:
                    found.append(name)
                    progress.update(task, completed=total)
    except KeyboardInterrupt:
        before = f" What was finished before ({', '.join(results)}) is in {out}." if results else ""
        message = f"stopped.{before} The same command goes on from here"
        Console(stderr=True).print(printable(message), soft_wrap=True, markup=False)
        return results, True
    if found:
        message = f"found in {out}, not computed again: {', '.join(found)}; --force computes them anew"
        Console(stderr=True).print(printable(message), soft_wrap=True, markup=False, highlight=False)
    return {name: results[name] for name in experiments if name in results}, False


def _update_bar(progress: Progress, task: Any) -> Callable[[int, int, float | None], None]:
    def show(done: int, _: int, wrong: float | None) -> None:
        progress.update(task, completed=done, error="" if wrong is None else f"error {100 * wrong:5.1f} %")

    return show


def progress_bar() -> Progress:
    """A bar for each method, with the error so far."""
    words, error = TextColumn("{task.description:10}", markup=False), TextColumn("{task.fields[error]}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(words, BarColumn(), MofNCompleteColumn(), error, *times, console=Console(stderr=True))


# -- output -----------------------------------------------------------------------------------------------------------


def _show(
    results: Mapping[str, Result],
    device: torch.device,
    path: Path,
    json_file: str | None,
    chart: bool,
    console: Console,
) -> None:
    """Print the table, and write summary and chart."""
    e = next(iter(results.values())).experiment
    spec = {name: value for name, value in e.json().items() if name not in ("method", "seeds")}
    report = {"spec": spec, "machine": machine(device), "results": _rows(results)}
    console.print(_table(results))
    summary, picture = path.with_name(f"{path.name}.json"), None
    try:
        for file in (summary, *([] if json_file in (None, "-") else [Path(str(json_file))])):
            write_atomically(file, json.dumps(plain(report), indent=1).encode())
        if chart:
            title = f"{e.dataset.name}, {e.model.name}, {e.scenario.name}"
            picture = _chart(path.with_name(f"{path.name}.svg"), results, title)
    except (ValueError, OSError) as error:
        fail(f"the results are in {path.parent}, but their summary could not be written: {error}")
    if json_file == "-":
        print_json(report)
    drawn = f", chart in {picture}" if picture else ""
    console.print(printable(f"results in {path.parent}, summary in {summary}{drawn}"), soft_wrap=True, markup=False)


def _rows(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """A row for each method and seed."""
    rows = []
    for name, result in results.items():
        for seed, seconds in zip(result.experiment.seeds, result.values("seconds_per_image"), strict=True):
            place = result.part_of(seed).experiment.id  # the folder of its record; `tribe diff` takes this id
            row = {"method": name, "id": place, "seed": seed, **result.metrics[str(seed)]}
            del row["class_counts"]
            if not row["domain_error"]:  # without labels
                del row["domain_error"]
            rows.append(row | {"seconds_per_image": seconds})
    return rows


def _table(results: Mapping[str, Result]) -> Table:
    grid = Table("method", "instance error, %", "category error, %", "ms / image")
    for column in grid.columns[1:]:
        column.justify = "right"
    lowest = {key: min(_mean(result.values(key)) for result in results.values()) for key in ERRORS}
    for name, result in results.items():
        cells = []
        for key in ERRORS:
            text = percent(result.values(key))
            bold = len(results) > 1 and _mean(result.values(key)) == lowest[key]
            cells.append(f"[bold]{text}[/]" if bold else text)
        grid.add_row(shown(name), *cells, f"{1e3 * _mean(result.values('seconds_per_image')):.2f}")
    return grid


def _mean(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).mean().item()


def _chart(path: Path, results: Mapping[str, Result], title: str) -> Path | None:
    """Draw the errors; None where that is not possible."""
    lacking = [name for name, result in results.items() if not result.has_records]
    if lacking:
        message = f"no chart: it needs records, which {', '.join(lacking)} has not; --force computes them"
        Console(stderr=True).print(message, style="yellow", markup=False)
        return None
    records = {name: result.records() for name, result in results.items()}
    if not any(bool((record.label >= 0).any()) for runs in records.values() for record in runs):
        return None
    try:
        figure = plots.errors(records, title)
    except ModuleNotFoundError as error:
        Console(stderr=True).print(f"no chart: {error}", style="yellow", markup=False)
        return None
    plots.save(figure, path)
    return path
