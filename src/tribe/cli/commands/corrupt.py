"""``tribe corrupt``: make MNIST-C, CIFAR-10-C, CIFAR-100-C or ImageNet-C from the clean images."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tribe.cli.app import app
from tribe.cli.output import fail, print_json
from tribe.datasets.array_generation import LAYOUTS, generate
from tribe.datasets.generation import GenerationProgress, Summary
from tribe.datasets.image_generation import generate_imagenet
from tribe.registry import nearest

EVERY = 30  # seconds between two lines where no bar can be drawn


class How(TypedDict):
    """What all data sets share of a request."""

    corruptions: list[str] | None
    severities: list[int] | None
    seed: int
    device: str
    force: bool


@app.command()
def corrupt(
    dataset: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100, or imagenet (with --images).")],
    severity: Annotated[list[str] | None, typer.Option(help="5, or 1-5, or 1,3; may be repeated. (default: 5)")] = None,
    corruptions: Annotated[str | None, typer.Option(help="fog,snow,... (default: the benchmark's fifteen)")] = None,
    out: Annotated[Path | None, typer.Option(help="Write below this folder. (default: the data root)")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The data root, where the clean set lies. (default: $TRIBE_DATA, else the cache directory)"),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="ImageNet's validation pictures, a folder a class.")] = None,
    seed: Annotated[int, typer.Option(help="Of the corruptions' randomness.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Make again what is there; begin anew where a folder was made with other settings."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Write a corrupted data set in its published layout. Run again after an interruption, it goes on."""
    known = [*LAYOUTS, "imagenet"]
    if dataset not in known:
        fail(f"unknown data set {dataset!r}: {nearest(dataset, known)}")
    if (images is None) == (dataset == "imagenet"):
        fail("imagenet needs its pictures: --images FOLDER" if images is None else "--images is for imagenet alone")
    names = None if corruptions is None else [name.strip() for name in corruptions.split(",") if name.strip()]
    if names == []:
        fail("--corruptions names none; leave it out for all of the benchmark")
    levels = None if not severity else [level for text in severity for level in parse_severities(text)]
    root, below = (None if path is None else str(path) for path in (data, out))
    how: How = {"corruptions": names, "severities": levels, "seed": seed, "device": device, "force": force}
    console = Console(stderr=True)
    try:
        with _Bar(console) if console.is_terminal else _Lines(console) as progress:
            if images is None:
                summary = generate(dataset, out=below, data=root, progress=progress, **how)
            else:
                summary = generate_imagenet(str(images), out=below or root, progress=progress, **how)
    except (ValueError, OSError, ImportError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        same = "the same command without --force" if force else "the same command"
        console.print(f"stopped; {same} goes on from there", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print_json({**summary._asdict(), "folder": str(summary.folder)})
    else:
        typer.echo(_told(summary))


def parse_severities(text: str) -> list[int]:
    """Severities in words: "5", "1-5" or "1,3".

    >>> parse_severities("1,3-5")
    [1, 3, 4, 5]
    """
    levels: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-5])(?:-([1-5]))?\s*", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            fail(f"--severity is 1 to 5, such as 5, 1-5 or 1,3; got {text!r}")
        levels += range(int(found[1]), int(found[2] or found[1]) + 1)
    return levels


def _told(summary: Summary) -> str:
    said = [f"{len(summary.made)} made in {summary.seconds:.1f} s"]
    if summary.there:
        said.append(f"{len(summary.there)} already there")
    return f"{summary.folder}: {', '.join(said)}, {summary.images} images each"


class _Lines(GenerationProgress):
    """A line a domain, and one now and then while a long one is made."""

    def __init__(self, console: Console) -> None:
        self.console, self.total, self.done, self.said = console, 0, 0, time.monotonic()

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, images: int, there: Sequence[str]) -> None:
        """Say what is there."""
        self.total = images
        if there:
            self._say(f"already there: {', '.join(there)}")

    def advance(self, domain: str, images: int) -> None:
        """Say that it goes on."""
        self.done += images
        if time.monotonic() - self.said > EVERY:
            self._say(f"{domain}: {self.done} of {self.total} images")

    def finish(self, domain: str) -> None:
        """Say what is finished."""
        self._say(f"{domain}: done")

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        self.console.print(Text(text), soft_wrap=True)


class _Rate(ProgressColumn):
    """Images a second."""

    def render(self, task: Task) -> Text:
        """The speed of late."""
        return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")


class _Bar(GenerationProgress):
    """A bar: domain, share, images a second, time left."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self.bar = Progress(*columns, _Rate(), TimeRemainingColumn(), console=console, transient=True)
        self.task = self.bar.add_task("reading the clean set", total=None)

    def __enter__(self) -> GenerationProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def begin(self, images: int, there: Sequence[str]) -> None:
        """Say what is there, and how long the bar is."""
        if there:
            self.bar.console.print(Text(f"already there: {', '.join(there)}"))
        self.bar.update(self.task, total=images)

    def advance(self, domain: str, images: int) -> None:
        """Move on."""
        self.bar.update(self.task, advance=images, description=domain)
