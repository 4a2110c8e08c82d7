"""``tribe schedule``: show the schedule of a stream; no image is read."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import tribe
from tribe.cli.commands import app
from tribe.cli.custom import DATASET, SCENARIO, component_name
from tribe.cli.options import AsJson, DataRoot, DatasetName, parse_overrides
from tribe.cli.output import make_table, messages, print_json
from tribe.data.scenarios import class_counts, digest, local_balance, save
from tribe.experiments import plots
from tribe.experiments.workbench import build_dataset, build_scenario
from tribe.io.files import check_file

MOST = 20  # classes in a table


@app.command()
def schedule(
    scenario: Annotated[str, typer.Argument(help="Protocol, see `tribe list scenarios`, or file.py:Class.")],
    dataset: DatasetName = "live-mnist-c",
    seed: Annotated[int, typer.Option(help="Seed of the stream.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field: scenario.imbalance=10, dataset.severities=1,3. Repeatable."),
    ] = None,
    data: DataRoot = None,
    out: Annotated[Path | None, typer.Option(help="Write the schedule to this npz file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this file: .svg, .png or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a stream's schedule: class counts of each domain, local balance, and a hash to compare with."""
    with messages():
        if out is not None:
            check_file(out)
        if plot is not None:
            plots.check_path(plot)
        dataset, scenario = component_name(DATASET, dataset), component_name(SCENARIO, scenario)
        overrides = parse_overrides(settings, ("dataset", "scenario"))
        images = build_dataset(dataset, data, overrides["dataset"])
        protocol = build_scenario(scenario, overrides["scenario"])
        stream = tribe.Stream(images, protocol, (seed,))
        plan, labels = stream.schedules[0], stream.labels
        if out is not None:
            save(out, plan)
        if plot is not None:
            plots.save(plots.schedule(plan, labels, stream.domains), plot)
        classes = len(images.classes)
        labelled = all(bool((y >= 0).all()) for y in labels)
        counts = class_counts(plan, labels, classes) if labelled else None
        balance = local_balance(plan, labels, classes=classes).mean().item() if labelled else None
    if as_json:
        print_json(
            {
                "images": len(plan.index),
                "digest": digest(plan),
                "local_balance": balance,
                "domains": stream.domains,
                "class_counts": None if counts is None else counts.tolist(),
            }
        )
        return
    console = Console()
    if counts is not None and classes <= MOST:
        pairs = zip(stream.domains, counts.tolist(), strict=True)
        grid = make_table(
            ["domain"], [*images.classes, "all"], ([name, *map(str, (*row, sum(row)))] for name, row in pairs)
        )
        grid.padding, grid.columns[0].no_wrap = 0, True
        console.print(grid)
    local = "" if balance is None else f", local balance {balance:.3f} (1: even, 0: one class at a time)"
    console.print(f"{len(plan.index):,} images of {len(stream.domains)} domains{local}, BLAKE2b-128 {digest(plan)}")
