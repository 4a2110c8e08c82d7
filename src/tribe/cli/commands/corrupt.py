"""``tribe corrupt``: make MNIST-C, CIFAR-10-C, CIFAR-100-C or ImageNet-C from the clean images."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tribe.cli.commands import app
from tribe.cli.options import AsJson, parse_severities
from tribe.cli.output import messages, print_json, shown
from tribe.data.datasets.files import data_root
from tribe.data.datasets.generation import generate
from tribe.fields import printable
from tribe.io.files import check_folder


@app.command()
def corrupt(
    dataset: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100 or imagenet.")],
    severity: Annotated[list[str] | None, typer.Option(help="5, or 1-5, or 1,3. Repeatable. (default: 5)")] = None,
    corruptions: Annotated[str | None, typer.Option(help="fog,snow,... (default: the benchmark's fifteen)")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. (default: the data root)")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The data root, with the clean set; for imagenet also the folder of its validation images, with a "
            "folder for each class. (default: $TRIBE_DATA, else the cache directory)"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random corruptions.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace what exists; start over in a folder that was made with other settings."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a corrupted data set in its published layout. The same command continues after an interruption."""
    console = Console(stderr=True)
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), TextColumn("{task.percentage:>3.0f}%"), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("reading the clean set", total=None)

    def progress(domain: str, images: int, of: int) -> None:
        """Move the bar on a terminal; elsewhere print a line for each finished domain."""
        bar.update(task, advance=images, total=of, description=printable(domain))
        if not images and not console.is_terminal:
            console.print(shown(f"{domain}: done"), soft_wrap=True)

    with messages():
        place = out or (None if dataset == "imagenet" else data)
        check_folder(data_root(None if place is None else str(place)))
        severities = [n for text in severity for n in parse_severities(text)] if severity else None
        names = None if corruptions is None else [name.strip() for name in corruptions.split(",") if name.strip()]
        if names == []:
            raise ValueError("--corruptions names none; leave it out for all of the benchmark")
    try:
        with messages(), bar:
            summary = generate(
                dataset,
                out=None if out is None else str(out),
                data=None if data is None else str(data),
                corruptions=names,
                severities=severities,
                seed=seed,
                device=device,
                force=force,
                progress=progress,
            )
    except KeyboardInterrupt:
        same = "the same command without --force" if force else "the same command"
        console.print(f"stopped; {same} continues", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print_json({**summary._asdict(), "folder": str(summary.folder)})
    else:
        existing = f", {len(summary.there)} already there" if summary.there else ""
        made = f"{len(summary.made)} made in {summary.seconds:.1f} s"
        typer.echo(printable(f"{summary.folder}: {made}{existing}, {summary.images} images each", keep="\n"))
