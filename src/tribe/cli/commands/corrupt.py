"""``tribe corrupt``: make MNIST-C, CIFAR-10-C, CIFAR-100-C or ImageNet-C from the clean images."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tribe.cli.commands import app
from tribe.cli.options import AsJson, parse_severities
from tribe.cli.output import messages, print_json, shown
from tribe.data.datasets.corrupted_files import BENCHMARKS
from tribe.data.datasets.files import data_root
from tribe.data.datasets.generation import GenerationProgress, Summary, generate
from tribe.fields import printable
from tribe.io.files import check_folder
from tribe.registry import nearest

EVERY = 30  # seconds between two lines if stderr is not a terminal


class Settings(TypedDict):
    """The settings that all data sets share."""

    corruptions: list[str] | None
    severities: list[int] | None
    seed: int
    device: str
    force: bool


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
    with messages():
        if dataset not in BENCHMARKS:
            raise ValueError(f"unknown data set {dataset!r}: {nearest(dataset, BENCHMARKS)}")
        place = out or (None if dataset == "imagenet" else data)
        check_folder(data_root(None if place is None else str(place)))
        severities = [n for text in severity for n in parse_severities(text)] if severity else None
        settings = Settings(
            corruptions=_names(corruptions), severities=severities, seed=seed, device=device, force=force
        )
    root, target = (None if path is None else str(path) for path in (data, out))
    try:
        with messages(), _Bar(console) if console.is_terminal else _Lines(console) as progress:
            summary = generate(dataset, out=target, data=root, progress=progress, **settings)
    except KeyboardInterrupt:
        same = "the same command without --force" if force else "the same command"
        console.print(f"stopped; {same} continues", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print_json({**summary._asdict(), "folder": str(summary.folder)})
    else:
        typer.echo(printable(_describe(summary), keep="\n"))


def _names(corruptions: str | None) -> list[str] | None:
    names = None if corruptions is None else [name.strip() for name in corruptions.split(",") if name.strip()]
    if names == []:
        raise ValueError("--corruptions names none; leave it out for all of the benchmark")
    return names


def _describe(summary: Summary) -> str:
    existing = f", {len(summary.there)} already there" if summary.there else ""
    made = f"{len(summary.made)} made in {summary.seconds:.1f} s"
    return f"{summary.folder}: {made}{existing}, {summary.images} images each"


class _Lines(GenerationProgress):
    """Prints a line for each domain, and one every 30 seconds."""

    def __init__(self, console: Console) -> None:
        self.console, self.total, self.done, self.printed = console, 0, 0, time.monotonic()

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, images: int, there: Sequence[str]) -> None:
        """Print the domains that exist already."""
        self.total = images
        if there:
            self._print(f"already there: {', '.join(there)}")

    def advance(self, domain: str, images: int) -> None:
        """Print the progress every 30 seconds."""
        self.done += images
        if time.monotonic() - self.printed > EVERY:
            self._print(f"{domain}: {self.done} of {self.total} images")

    def finish(self, domain: str) -> None:
        """Print the finished domain."""
        self._print(f"{domain}: done")

    def _print(self, text: str) -> None:
        self.printed = time.monotonic()
        self.console.print(shown(text), soft_wrap=True)


class _Rate(ProgressColumn):
    """A column with the images a second."""

    def render(self, task: Task) -> Text:
        """Return the current speed as text."""
        return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")


class _Bar(GenerationProgress):
    """Shows a bar: domain, share, images a second, time left."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self.bar = Progress(*columns, _Rate(), TimeRemainingColumn(), console=console, transient=True)
        self.task = self.bar.add_task("reading the clean set", total=None)

    def __enter__(self) -> GenerationProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def begin(self, images: int, there: Sequence[str]) -> None:
        """Print the domains that exist already, and set the length of the bar."""
        if there:
            self.bar.console.print(shown(f"already there: {', '.join(there)}"))
        self.bar.update(self.task, total=images)

    def advance(self, domain: str, images: int) -> None:
        """Move the bar."""
        self.bar.update(self.task, advance=images, description=printable(domain))
