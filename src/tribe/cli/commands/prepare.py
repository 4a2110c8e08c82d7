"""``tribe prepare``: one file that holds all that a deployment of a network needs, from clean images."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import tribe
from tribe.cli.commands import app
from tribe.cli.commands.source import Batches, SourceImages
from tribe.cli.custom import DATASET, component_name, method_name
from tribe.cli.options import AsJson, Device, Model, Weights, make_workbench, parse_overrides
from tribe.cli.output import Bars, messages, print_json
from tribe.core.precision import deterministic, float32_precision
from tribe.data.datasets.folder import holds_one_domain
from tribe.io.files import check_file

USUAL = 1000  # images


@app.command()
def prepare(
    model: Model = "compact",
    dataset: Annotated[
        str,
        typer.Option(
            help="Clean images that the network was not trained on: the test images of a data set; or folder, with "
            "--data, whose folders are the classes. Images without such folders have no labels."
        ),
    ] = "mnist",
    weights: Weights = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Root of the data sets, or your folder.", show_default="$TRIBE_DATA or the cache directory"),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How it adapts: a name (`tribe list methods`) or file.py:Class.",
            show_default="bank-tribe if the budget allows learning, else bank",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(help="The most that a batch may cost on average, in multiples of plain inference.")
    ] = 1.5,
    images: Annotated[int, typer.Option(help="Number of images.")] = USUAL,
    quick: Annotated[bool, typer.Option("--quick", help="Take a quarter of the time, with fewer images.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the choice and order of the images.")] = 0,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("net.tribe"),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of a component: dataset.size=224. Repeatable.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Prepare a network for deployment, and say in numbers what to expect: clean, and under each corruption.

    Without options it prepares the embedded network of digits. A call that was stopped goes on when it is repeated.
    Then: tribe try net.tribe FRAMES, tribe serve net.tribe, or tribe.adapt(net, "net.tribe") in Python.
    """
    with messages():
        check_file(out)
        name = component_name(DATASET, dataset)
        chosen = None if method is None else method_name(method)
        workbench = make_workbench(model, weights, data, device)
        source = SourceImages(workbench, model, name, images, 64, seed)
        given = parse_overrides(settings, ("dataset", "model"))
        if name == "folder" and data is not None and holds_one_domain(data):
            given["dataset"].setdefault("one_domain", True)
        clean, net = source.prepare("test", given)
        read = Batches(source, clean, USUAL, f"reading {name}", whole=True)
        x, y = (torch.cat(column) for column in zip(*read, strict=True))
        labelled = bool((y >= 0).all())
        names = getattr(clean, "classes", ())
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        with float32_precision("float32"), deterministic(), Bars(*columns) as bar:
            task = bar.add_task("playing corrupted images", total=None)
            prepared = tribe.prepare(
                net,
                x,
                y if labelled else None,
                path=out,
                class_names=names if len(names) == (net.classes or 0) else (),
                method=chosen,
                budget=budget,
                quick=quick,
                seed=seed,
                origin={"model": model, "dataset": name} if ":" not in model + name else {},
                progress=lambda done, of: bar.update(task, completed=done, total=of),
            )
    if as_json:
        held = {"method": prepared.method, "fields": dict(prepared.fields), "inputs": prepared.inputs._asdict()}
        print_json({**held, "card": prepared.card.json(), "path": str(out), "bytes": out.stat().st_size})
        return
    console = Console()
    console.print(str(prepared), soft_wrap=True, highlight=False, markup=False)
    console.print(f"{out}, {out.stat().st_size:,} bytes", soft_wrap=True, highlight=False, markup=False)
