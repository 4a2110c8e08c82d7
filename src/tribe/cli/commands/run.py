"""``tribe run``: play a stream to some methods and say how they did. Without options: offline, on real digits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import tribe
from tribe.cli.app import app
from tribe.cli.custom import DATASET, SCENARIO, component_name
from tribe.cli.folders import Records, departures, earlier, folder_name, record_file, together
from tribe.cli.options import Device, Precision, build_dataset, build_network, method_names
from tribe.cli.output import (
    describe_error_with_line,
    errors_as_messages,
    fail,
    print_json,
    print_message,
    refuse_unwritable,
    stdout_to_stderr,
)
from tribe.cli.overrides import parse_overrides
from tribe.datasets.fingerprint import fingerprint
from tribe.engine.backbone import Backbone
from tribe.engine.precision import choose_device, float32_precision, precision_on
from tribe.lab import metrics, plots, workbench
from tribe.lab.provenance import coded, machine
from tribe.lab.record import Record
from tribe.lab.spec import describe, plain
from tribe.methods import Method
from tribe.registry import nearest
from tribe.storage.atomic import write_atomically

IN_WORDS = (ValueError, OSError, ImportError, torch.OutOfMemoryError)  # errors that were written to be read
DEFAULT_METHODS = "source,bn,tent,tribe"


@app.command()
def run(
    dataset: Annotated[
        str, typer.Option(help="Data set, see `tribe list datasets`; file.py:Class for one of your own.")
    ] = "live-mnist-c",
    model: Annotated[
        str,
        typer.Option(
            help="Network: a name (`tribe list models`), timm/NAME, torchvision/NAME, or file.py:attribute, a "
            "module or a tribe.Backbone."
        ),
    ] = "compact",
    weights: Annotated[
        Path | None, typer.Option(help="Its weights; by default those in the package or where `tribe train` puts them.")
    ] = None,
    scenario: Annotated[
        str,
        typer.Option(help="Protocol of the stream, see `tribe list scenarios`; file.py:Class for one of your own."),
    ] = "gli-f",
    imbalance: Annotated[
        float | None, typer.Option(help="How many times rarer the rarest class is.", show_default="100")
    ] = None,
    severity: Annotated[
        str | None, typer.Option(help="Severities of the corruptions: 5, or 1,3,5.", show_default="5")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated; `all`, `ablations` for TRIBE's parts, file.py:Class for one of your own."
        ),
    ] = DEFAULT_METHODS,
    seed: Annotated[int, typer.Option(help="Seed of the first stream.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many streams: one a seed, side by side on one network.")] = 1,
    batch: Annotated[int, typer.Option(help="Images a stream and step.")] = 64,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any field of a component: scenario.sigma=0.01, dataset.seed=1, tribe.gamma=0.1, mine.rate=0.1 of the "
            "class Mine. Repeatable.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Root of the data sets.", show_default="$TRIBE_DATA or the cache directory")
    ] = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for records, summary and chart; other methods and seeds are added to what lies there.",
            show_default="runs/DATASET-MODEL-SCENARIO, and what else is not the default",
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the summary here too; - is stdout.")
    ] = None,
    chart: Annotated[bool, typer.Option(help="Save a chart of errors and class counts.")] = True,
) -> None:
    """Play a stream to some methods: live progress, a table of errors, and a chart.

    Without options it needs no network and no download: real digits, corrupted on the fly in 15 ways, classes in bursts
    and in a long tail, and a small network that was trained on the clean ones.
    """
    console = Console(stderr=json_file == "-")
    with stdout_to_stderr(), errors_as_messages():
        refuse_unwritable(json_file)
        where = choose_device(device)
        precision = precision_on(where, precision)
        if seeds < 1:
            raise ValueError(f"--seeds is how many streams, at least 1; got {seeds}")
        dataset, scenario = component_name(DATASET, dataset), component_name(SCENARIO, scenario)
        chosen = method_names(methods)
        if not chosen:
            raise ValueError(f"--methods {methods!r} names no method: {nearest('', tribe.methods.names())}")
        wanted = parse_overrides(settings, ("dataset", "scenario", "model", *chosen))
        source = build_dataset(dataset, data, severity, wanted["dataset"])
        protocol = workbench.build_scenario(scenario, imbalance, wanted["scenario"])
        stream = tribe.Stream(source, protocol, range(seed, seed + seeds), batch)
        net = build_network(model, weights, source, dataset, data, wanted["model"], where)
        asked = workbench.Request(dataset, model, weights, data)
        built = _ready(chosen, net, source, asked, wanted)
        said = {"name": model, "fields": wanted["model"], **coded(workbench.model_code(model))}
        spec = {
            "dataset": describe(dataset, source).json() | {"fingerprint": fingerprint(source)},
            "model": {**said, "fingerprint": net.fingerprint()},
            "scenario": describe(scenario, protocol).json(),
            "batch": batch,
            "precision": precision,
        }
        specs = {}
        for name, method in built.items():
            fields = describe(name, method)
            specs[name] = plain(spec | {"fields": fields.fields, **coded(fields.code)})
        images, network = (spec[part]["fingerprint"] for part in ("dataset", "model"))
        options = (  # and what they are by default
            ("pictures", f"{data.name}@{images[:8]}" if data is not None and dataset == "folder" else None, None),
            ("weights", None if weights is None else network[:8], None),
            ("batch", batch, 64),
            ("seed", seed, 0),
            ("seeds", seeds, 1),
            ("precision", precision, precision_on(where, "tf32")),
        )
        told = departures({"dataset": source, "scenario": protocol}, {n: wanted[n] for n in ("model", *chosen)})
        told += [f"{name}={value}" for name, value, usual in options if value != usual]
        folder = out or Path("runs") / folder_name(f"{dataset}-{model}-{scenario}", told)
        earlier(folder, specs, stream.seeds)  # what must not be mixed is refused before the work
        folder.mkdir(parents=True, exist_ok=True)
    shape = f"{seeds} stream{'s' * (seeds > 1)} of {len(stream.schedules[0].index):,} images"
    console.print(f"[bold]{dataset}[/], {model}, {scenario}: {shape}, batch {batch}, on {machine(where)['device']}")
    with stdout_to_stderr():
        records, stopped = _play(net, built, stream, specs, folder, precision)
    if not records:
        raise typer.Exit(130 if stopped else 2)
    report = {"spec": spec, "machine": machine(where), "results": _results(records)}
    console.print(_table(records))
    try:
        left = earlier(folder, specs, stream.seeds)  # others may have written there meanwhile
        everything = together(left.records, records)  # a summary of this run alone would hide what lies beside it
        summary = report | {"results": _results(everything)}
        write_atomically(folder / "summary.json", json.dumps(plain(summary), indent=1).encode())
        if json_file not in (None, "-"):
            write_atomically(str(json_file), json.dumps(plain(report), indent=1).encode())
        picture = _chart(folder, everything, f"{dataset}, {model}, {scenario}") if chart else None
    except (ValueError, OSError) as error:
        fail(f"the records are in {folder}, but what sums them up could not be written: {error}")
    for reason in left.damaged:
        print_message("warning", f"{reason}. It is left out of the summary")
    if json_file == "-":
        print_json(report)
    kept = [name for name in left.records if name not in records]
    beside = f" (beside {', '.join(kept)} of before)" if kept else ""
    told_chart = f", chart in {picture}" if picture else ""
    console.print(f"records and summary in {folder}{beside}{told_chart}", soft_wrap=True, markup=False)
    if stopped:
        raise typer.Exit(130)
    if failed := [name for name in built if name not in records]:
        fail(f"{', '.join(failed)} could not be played to the end; the reasons are told above")


def _ready(chosen: Any, net: Any, data: Any, asked: Any, fields: Any) -> dict[str, Method]:
    built: dict[str, Method] = {}
    missing = []
    for name in chosen:
        try:
            built[name] = workbench.build_method(name, net, data, asked, fields[name])
        except workbench.MissingKnowledge as error:
            missing.append(error)
    if missing:
        raise workbench.MissingKnowledge.of_all(missing)
    return built


def _play(
    net: Backbone,
    methods: Mapping[str, Method],
    stream: tribe.Stream,
    specs: Mapping[str, Mapping[str, Any]],
    folder: Path,
    precision: str,
) -> tuple[Records, bool]:
    """Play the stream to each method and save its records; one that fails is told and left out, the others go on.

    Returns the records, and whether it was stopped by hand before all had their turn.
    """
    records: Records = {}
    try:
        with float32_precision(precision), progress_bar() as progress:
            for name, method in methods.items():
                show = _shown(progress, name, len(stream))
                try:
                    rounded, ready = workbench.in_precision(net, method, precision)
                    played = tribe.run(rounded, ready, stream, seed=stream.seeds[0], spec=specs[name], progress=show)
                    for record in played:  # now: the command may be stopped before the next is done
                        record.save(record_file(folder, name, record.spec["seed"]))
                except Exception as error:  # a method of one's own may raise anything
                    reason = str(error) if isinstance(error, IN_WORDS) else describe_error_with_line(error)
                    print_message("error", f"{name}: {reason}", progress.console)
                else:
                    records[name] = played
    except KeyboardInterrupt:
        whole = f". What was finished before ({', '.join(records)}) is in {folder}" if records else ""
        Console(stderr=True).print(f"stopped{whole}", soft_wrap=True, markup=False)
        return records, True
    return records, False


def _shown(progress: Progress, name: str, total: int) -> Callable[[int, int, float | None], None]:
    """What keeps a method's bar up to date."""
    task = progress.add_task(name, total=total, error="")

    def show(done: int, of: int, wrong: float | None) -> None:
        progress.update(task, completed=done, error="" if wrong is None else f"error {100 * wrong:5.1f} %")

    return show


def progress_bar() -> Progress:
    """A bar a method, with the error so far."""
    words, error = TextColumn("{task.description:10}"), TextColumn("{task.fields[error]}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(words, BarColumn(), MofNCompleteColumn(), error, *times, console=Console(stderr=True))


# -- what came out ----------------------------------------------------------------------------------------------------


def _results(records: Records) -> list[dict[str, Any]]:
    return [
        {"method": name, "seed": record.spec["seed"], "images": len(record.label), **metrics.summary(record)}
        | ({"domain_error": _by_domain(record)} if bool((record.label >= 0).any()) else {})
        for name, runs in records.items()
        for record in runs
    ]


def _by_domain(record: Record) -> dict[str, float]:
    return dict(zip(record.domains, metrics.domain_error(record).tolist(), strict=True))


def _table(records: Records) -> Table:
    grid = Table("method", "instance error, %", "category error, %", "ms / image")
    for column in grid.columns[1:]:
        column.justify = "right"
    rows = {name: [metrics.summary(record) for record in runs] for name, runs in records.items()}
    best = {k: min((_mean(r, k) for r in rows.values()), default=0.0) for k in ("instance_error", "category_error")}
    for name, scores in rows.items():
        cells = []
        for key in ("instance_error", "category_error"):
            bold = len(rows) > 1 and _mean(scores, key) == best[key]
            cells.append(f"[bold]{_spread(scores, key)}[/]" if bold else _spread(scores, key))
        grid.add_row(name, *cells, f"{1e3 * _mean(scores, 'seconds_per_image'):.2f}")
    return grid


def _values(scores: list[dict[str, float | None]], key: str) -> torch.Tensor:
    return torch.tensor([float("nan") if score[key] is None else score[key] for score in scores], dtype=torch.float64)


def _mean(scores: list[dict[str, float | None]], key: str) -> float:
    return _values(scores, key).mean().item()


def _spread(scores: list[dict[str, float | None]], key: str) -> str:
    values = 100 * _values(scores, key)
    if bool(values.isnan().any()):
        return "no labels"
    return f"{values.mean():.2f}" + (f" ± {values.std():.2f}" if len(values) > 1 else "")


def _chart(folder: Path, records: Records, title: str) -> Path | None:
    if not any(bool((record.label >= 0).any()) for runs in records.values() for record in runs):
        return None
    try:
        figure = plots.errors(records, title)
    except ModuleNotFoundError as error:
        Console(stderr=True).print(f"no chart: {error}", style="yellow", markup=False)
        return None
    plots.save(figure, folder / "chart.svg")
    return folder / "chart.svg"
