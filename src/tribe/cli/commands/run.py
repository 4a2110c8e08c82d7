"""``tribe run``: play a stream to some methods and print their errors. Without options: offline, on real digits.

Each method is an `Experiment`, whose result is in the store, see `tribe.experiments.store`. It is not computed again,
and a run that was killed goes on from its checkpoint.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import tribe
from tribe.cli.app import app
from tribe.cli.options import (
    DataRoot,
    DatasetName,
    JsonFile,
    Model,
    Out,
    ScenarioName,
    Seeds,
    Settings,
    Weights,
    method_names,
)
from tribe.cli.output import check_json_file, errors_as_messages, fail, shown, stdout_to_stderr
from tribe.cli.planning import Planner, file_name
from tribe.cli.progress import experiment_bars, print_warnings
from tribe.cli.tables import method_table, write_summary
from tribe.experiments import plots
from tribe.experiments.experiment import Experiment
from tribe.experiments.parallel import Failure, run_all
from tribe.experiments.provenance import machine
from tribe.experiments.store import Result
from tribe.experiments.workbench import MissingKnowledge
from tribe.fields import printable
from tribe.io.files import check_folder
from tribe.registry import nearest

DEFAULT_METHODS = "source,bn,tent,tribe"

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
    methods: MethodNames = DEFAULT_METHODS,
    seeds: Seeds = None,
    settings: Settings = None,
    data: DataRoot = None,
    out: Out = Path("runs"),
    json_file: JsonFile = None,
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
        names = method_names(methods)
        if not names:
            raise ValueError(f"--methods {methods!r} names no method: {nearest('', tribe.methods.names())}")
        planner = Planner(dataset, model, weights, scenario, names, seeds, settings, data)
        experiments = _plan(planner, names)
    _print_title(next(iter(experiments.values())), planner, console)
    results, stopped = _play(experiments, out, force, logits)
    if results:
        _show(results, planner, out / file_name("", [*experiments.values()]), json_file, console)
    if stopped or not results:
        raise typer.Exit(130 if stopped else 2)
    if failed := [name for name in experiments if name not in results]:
        fail(f"{', '.join(failed)} could not be played to the end; the reasons are above")


def _plan(planner: Planner, names: list[str]) -> dict[str, Experiment]:
    """Return the experiment of each method, or one error for all that lack their source knowledge."""
    experiments, missing = {}, []
    for name in names:
        try:
            experiments[name] = planner.experiment(name)
        except MissingKnowledge as error:
            missing.append(error)
    if missing:
        raise MissingKnowledge.of_all(missing)
    return experiments


def _print_title(first: Experiment, planner: Planner, console: Console) -> None:
    assert first.parts is not None
    names = shown(f"{first.dataset.name}, {first.model.name}, {first.scenario.name}")
    names.stylize("bold", 0, len(printable(first.dataset.name)))
    count, length = len(first.seeds), len(first.parts.stream.schedules[0].index)
    streams = f"{count} stream{'s' * (count > 1)} of {length:,} images"
    device = machine(planner.workbench.device)["device"]
    console.print(names + f": {streams}, batch {first.batch}, on {device}")


def _play(
    experiments: Mapping[str, Experiment], out: Path, force: bool, logits: bool
) -> tuple[dict[str, Result], bool]:
    """Run the experiments; return the result of each method that finished, and whether Ctrl-C stopped the run."""
    names, stopped = {experiment: name for name, experiment in experiments.items()}, False
    outcomes: dict[Experiment, Result | Failure] = {}
    with experiment_bars("run", len(names), names.__getitem__) as bars:

        def done(experiment: Experiment, outcome: Result | Failure) -> None:
            outcomes[experiment] = outcome
            bars.done(experiment, outcome)

        try:
            options: Any = {"force": force, "keep_outputs": logits, "command": ["tribe", *sys.argv[1:]]}
            run_all(experiments.values(), out, **options, progress=bars.progress, done=done)
        except KeyboardInterrupt:
            stopped = True
    results = {name: r for name, e in experiments.items() if isinstance(r := outcomes.get(e), Result)}
    if stopped:
        before = f" What was finished before ({', '.join(results)}) is in {out}." if results else ""
        _note(f"stopped.{before} The same command goes on from here")
    elif stored := [name for name in results if experiments[name] not in bars.played]:
        _note(f"found in {out}, not computed again: {', '.join(stored)}; --force computes them anew")
    return results, stopped


# -- output -----------------------------------------------------------------------------------------------------------


def _show(results: Mapping[str, Result], planner: Planner, path: Path, json_file: str | None, console: Console) -> None:
    """Print the table, and write summary and chart."""
    first = next(iter(results.values())).experiment
    spec = {name: value for name, value in first.json().items() if name != "method"}
    report = {"spec": spec, "machine": machine(planner.workbench.device), "results": _rows(results)}
    console.print(method_table(results))
    summary = path.with_name(f"{path.name}.json")
    try:
        write_summary(report, summary, json_file)
        title = f"{first.dataset.name}, {first.model.name}, {first.scenario.name}"
        picture = _chart(path.with_name(f"{path.name}.svg"), results, title)
    except (ValueError, OSError) as error:
        fail(f"the results are in {path.parent}, but their summary could not be written: {error}")
    drawn = f", chart in {picture}" if picture else ""
    console.print(printable(f"results in {path.parent}, summary in {summary}{drawn}"), soft_wrap=True, markup=False)


def _rows(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Return a row for each method and seed."""
    rows = []
    for name, result in results.items():
        for (seed, stream), seconds in zip(result.streams.items(), result.values("seconds_per_image"), strict=True):
            row = {"method": name, "id": result.experiment.id, "seed": seed, **stream.metrics}
            del row["class_counts"]
            if not row["domain_error"]:  # without labels
                del row["domain_error"]
            rows.append(row | {"seconds_per_image": seconds})
    return rows


def _chart(path: Path, results: Mapping[str, Result], title: str) -> Path | None:
    """Draw the errors; None where that is not possible."""
    if missing := [name for name, result in results.items() if not result.has_records]:
        _note(f"no chart: it needs the records of {', '.join(missing)}, which are not there; --force computes them")
        return None
    records = {name: result.records() for name, result in results.items()}
    if not any(bool((record.label >= 0).any()) for runs in records.values() for record in runs):
        return None
    try:
        figure = plots.errors(records, title)
    except ModuleNotFoundError as error:
        _note(f"no chart: {error}")
        return None
    plots.save(figure, path)
    return path


def _note(message: str) -> None:
    Console(stderr=True).print(printable(message), style="yellow", soft_wrap=True, markup=False, highlight=False)
