"""``tribe run``: play a stream to some methods and print their errors. Without options: offline, on real digits."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

import tribe
from tribe.cli import options, output
from tribe.cli.commands import app
from tribe.experiments import plots
from tribe.experiments.bench.budgets import within_budget
from tribe.experiments.bench.costs import measured_costs, read_costs
from tribe.experiments.experiment import Experiment
from tribe.experiments.parallel import run_all
from tribe.experiments.provenance import machine
from tribe.experiments.realtime import Realtime
from tribe.experiments.store import Result
from tribe.fields import printable
from tribe.io.files import check_file, check_folder
from tribe.methods.bridged import PREFIX, UNCHECKED
from tribe.registry import nearest
from tribe.streams.budget import Budget

MethodNames = Annotated[
    str,
    typer.Option(
        help="Methods, comma-separated; `all`, `ablations` for TRIBE's parts, file.py:Class, or file.py:function that "
        "returns a module which adapts in its forward. tribe+time adds a time filter, see `tribe list filters`."
    ),
]
Logits = Annotated[
    bool,
    typer.Option("--logits", help="Keep the logits of every image in the records. Results without are computed again."),
]
Speed = Annotated[
    float | None,
    typer.Option(
        "--realtime",
        metavar="[SPEED]",
        help="The stream does not wait for a busy method: SPEED images arrive while plain inference predicts one; 1 if "
        "not given.",
    ),
]
Costs = Annotated[
    Path | None,
    typer.Option(
        help='With --realtime: JSON such as {"tribe": 7.25}, a step / plain inference; or a summary of --json.',
        show_default="measured once, in costs.json of --out",
    ),
]


BudgetTimes = Annotated[
    float | None,
    typer.Option(
        "--budget",
        help="Let methods learn so rarely that a batch costs at most this many times plain inference on average. It is "
        "measured once, in costs.json of --out.",
        show_default="no limit",
    ),
]


class RunCommand(TyperCommand):
    """A command whose option --realtime may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the value 1 where it is missing."""
        for i in [i for i, word in enumerate(args) if word == "--realtime"][::-1]:
            if args[i + 1 : i + 2] == [] or args[i + 1].startswith("--"):
                args.insert(i + 1, "1")
        return super().parse_args(ctx, args)


@app.command(cls=RunCommand)
def run(
    dataset: options.DatasetName = "live-mnist-c",
    model: options.Model = "compact",
    weights: options.Weights = None,
    scenario: options.ScenarioName = "gli-f",
    methods: MethodNames = "source,bn,tent,note,rotta,tribe,bank+guard+time-checked",
    seeds: options.Seeds = None,
    settings: options.Settings = None,
    data: options.DataRoot = None,
    out: options.Out = Path("runs"),
    json_file: options.JsonFile = None,
    force: Annotated[bool, typer.Option("--force", help="Compute results anew that are there.")] = False,
    logits: Logits = False,
    realtime: Speed = None,
    costs: Costs = None,
    budget: BudgetTimes = None,
    prepared: Annotated[
        Path | None,
        typer.Option(help="A prepared file, `tribe prepare`: play its method, too, without the estimate of accuracy."),
    ] = None,
) -> None:
    """Play a stream to some methods: live progress, a table of errors, and a chart.

    Without options it needs no network and no download: real digits, corrupted on the fly in 15 ways, classes in bursts
    and in a long tail, and a small network that was trained on the clean ones.
    """
    console = Console(stderr=json_file == "-")
    with output.messages():
        if json_file not in (None, "-"):
            check_file(json_file)
        check_folder(out)
        names = options.method_names(methods)
        if not names:
            raise ValueError(f"--methods {methods!r} names no method: {nearest('', tribe.methods.names())}")
        points: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names]
        ready = None if prepared is None else tribe.Prepared.load(prepared)
        if ready is not None:
            points = [point for point in points if point[0] != ready.method]
            fields = {name: value for name, value in ready.fields.items() if name != "calibration"}
            points.append((ready.method, {f"{ready.method}.{name}": value for name, value in fields.items()}))
            names = [name for name, _ in points]
        if realtime is not None:
            Realtime(realtime, 1.0)  # refuses a speed before the work
        elif costs is not None:
            raise ValueError("--costs is for runs in real time: add --realtime")
        limit = Budget.of(budget)  # refuses one before the work
        planned, workbench = options.plan_experiments(points, dataset, model, weights, scenario, seeds, settings, data)
        if ready is not None and planned[0].parts is not None:
            ready.check(planned[0].parts.net)
        if limit is not None:
            with output.timing_bar() as show:
                planned = within_budget(planned, limit, out, show)
            names = [each.method.name for each in planned]
        if realtime is not None:
            planned = _clocked(names, planned, realtime, costs, out)
        experiments, device = dict(zip(names, planned, strict=True)), machine(workbench.device)
    first = planned[0]
    assert first.parts is not None
    title, count = f"{first.dataset.name}, {first.model.name}, {first.scenario.name}", len(first.seeds)
    title += "" if realtime is None else f", real time at {realtime:g} x inference"
    streams = f"{count} stream{'s' * (count > 1)} of {len(first.parts.stream.schedules[0].index):,} images"
    console.print(
        printable(f"{title}: {streams}, batch {first.batch}, on {device['device']}"), markup=False, highlight=False
    )
    results, stopped = _play(experiments, out, force, logits)
    if results:
        _show(title, results, device, out / options.file_name("", planned), json_file, console)
    if stopped or not results:
        raise typer.Exit(130 if stopped else 2)
    if failed := [name for name in experiments if name not in results]:
        output.fail(f"{', '.join(failed)} could not be played to the end; the reasons are above")


def _clocked(
    names: list[str], planned: list[Experiment], speed: float, file: Path | None, out: Path
) -> list[Experiment]:
    """Return the experiments under the clock, each with the cost of its method."""
    if file is not None:
        costs = read_costs(file, names)
    else:
        with output.timing_bar() as show:
            costs = measured_costs(planned, out, show)
    return [dataclasses.replace(e, realtime=Realtime(speed, c)) for e, c in zip(planned, costs, strict=True)]


def _play(
    experiments: Mapping[str, Experiment], out: Path, force: bool, logits: bool
) -> tuple[dict[str, Result], bool]:
    """Run the experiments; return the result of each method that finished, and whether Ctrl-C stopped the run."""
    names, stopped = {experiment: name for name, experiment in experiments.items()}, False
    options: dict[str, Any] = {"force": force, "keep_outputs": logits, "command": ["tribe", *sys.argv[1:]]}
    with output.experiment_bars("run", len(names), names.__getitem__) as bars:
        try:
            run_all(names, out, **options, progress=bars.progress, done=bars.done)
        except KeyboardInterrupt:
            stopped = True
    results = {name: bars.results[e] for name, e in experiments.items() if e in bars.results}
    if stopped:
        before = f" What was finished before ({', '.join(results)}) is in {out}." if results else ""
        output.note(f"stopped.{before} The same command goes on from here")
    elif stored := [name for name in results if experiments[name] not in bars.played]:
        output.note(f"found in {out}, not computed again: {', '.join(stored)}; --force computes them anew")
    return results, stopped


def _show(
    title: str,
    results: Mapping[str, Result],
    device: Mapping[str, Any],
    path: Path,
    json_file: str | None,
    console: Console,
) -> None:
    cells = {name: output.result_cells(result) for name, result in results.items()}
    for i, key in enumerate(output.ERRORS if len(results) > 1 else ()):  # the lowest are bold
        means = {name: fmean(result.values(key)) for name, result in results.items()}
        for name, mean in means.items():
            cells[name][i].stylize("bold" if mean == min(means.values()) else "")
    clocks = {name: clock for name, result in results.items() if (clock := result.experiment.realtime) is not None}
    for name, clock in clocks.items():
        cells[name] += [Text(f"{clock.cost:g}"), Text(f"{100 * clock.share:.1f}")]
    header = (*output.HEADER, *(("x inference", "taken, %") if clocks else ()))
    console.print(output.make_table(["method"], header, ([name, *row] for name, row in cells.items())))
    if bridged := [name for name in results if name.startswith(PREFIX)]:
        console.print(f"{', '.join(bridged)}: {UNCHECKED}", markup=False)
    first = next(iter(results.values())).experiment
    spec = {name: value for name, value in first.json().items() if name != "method"}
    if first.realtime is not None:
        spec["realtime"] = {"speed": first.realtime.speed, "costs": {name: c.cost for name, c in clocks.items()}}
    summary = path.with_name(f"{path.name}.json")
    try:
        output.write_json({"spec": spec, "machine": device, "results": _rows(results)}, json_file, summary)
        picture = _chart(path.with_name(f"{path.name}.svg"), results, title)
    except (ValueError, OSError) as error:
        output.fail(f"the results are in {path.parent}, but their summary could not be written: {error}")
    drawn = f", chart in {picture}" if picture else ""
    console.print(printable(f"results in {path.parent}, summary in {summary}{drawn}"), soft_wrap=True, markup=False)


def _rows(results: Mapping[str, Result]) -> list[dict[str, Any]]:
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
        output.note(
            f"no chart: it needs the records of {', '.join(missing)}, which are not there; --force computes them"
        )
        return None
    records = {name: result.records() for name, result in results.items()}
    if not any(bool((record.label >= 0).any()) for runs in records.values() for record in runs):
        return None
    try:
        figure = plots.errors(records, title)
    except ModuleNotFoundError as error:
        output.note(f"no chart: {error}")
        return None
    plots.save(figure, path)
    return path
