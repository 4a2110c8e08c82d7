"""``tribe bench``: what adapting costs, against plain inference of the same network, measured side by side."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

import tribe
import tribe.bench
from tribe.bench import REPEATS
from tribe.bench.contest import Watch
from tribe.cli.app import app
from tribe.cli.custom import load_custom_model
from tribe.cli.options import Device, Precision, method_names
from tribe.cli.output import errors_as_messages, fail, print_json, refuse_unwritable, stdout_to_stderr
from tribe.engine.precision import choose_device, precision_on


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="Network: a name (`tribe list models`), timm/NAME, torchvision/NAME, or file.py:attribute.",
            show_default="resnet20; wrn28_10 on a GPU",
        ),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="Classes it tells apart.", show_default="those it was made for")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Shape of an image, such as 3,32,32.", show_default="what a named network is made for"),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods to measure, comma-separated; file.py:Class is your own.")
    ] = ",".join(tribe.bench.METHODS),
    batch: Annotated[int, typer.Option(help="Images a stream and step.")] = 64,
    streams: Annotated[int, typer.Option(help="Independent streams in one step.")] = 1,
    precision: Precision = "tf32",
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="Of torch on the CPU.", show_default="as torch decides")] = None,
    graphs: Annotated[bool, typer.Option(help="Capture steps in CUDA graphs, where they can be.")] = True,
    kernels: Annotated[bool, typer.Option(help="Use the Triton kernels, on CUDA.")] = True,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Measure compiled channels-last inference, too (it compiles a while).")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Timings of each contender, in turn; the median counts.")] = REPEATS,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the numbers here too; - is stdout.")
    ] = None,
    compare_file: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Show what changed since this --json was written.")
    ] = None,
) -> None:
    """Measure what adapting costs: time, against plain inference and the device's own limit, and memory.

    All contenders take turns in one process, so that a noisy machine hurts all alike. Ratios are to eager inference of
    the same network in the same precision, as it comes (NCHW) and in channels-last; TFLOP/s count the convolutions and
    matrix products that a step does, next to what large matrix products reach meanwhile; peak memory is beside the
    network and the images, the state's included.
    """
    console = Console(stderr=json_file == "-")
    try:
        with stdout_to_stderr(), errors_as_messages():
            names = method_names(methods)
            where = choose_device(device)
            old = None if compare_file is None else tribe.bench.read(compare_file)
            refuse_unwritable(json_file)
            asked = model or ("wrn28_10" if where.type == "cuda" else "resnet20")
            tribe.bench.check(names)
            make, count, size = _network(asked, classes, _shape(shape))
            setting = tribe.bench.Setting(
                model=asked,
                shape=size,
                classes=count,
                batch=batch,
                streams=streams,
                device=str(where),
                precision=precision_on(where, precision),
                graphs=graphs,
                kernels=kernels,
                threads=threads,
            )
            if old is not None:
                tribe.bench.check_comparable(old.setting, setting)  # before the work, not after it
            with _progress() as watch:
                net = make(where)
                result = tribe.bench.measure(net, setting, names, compiled=compiled, repeats=repeats, watch=watch)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        fail(f"there is not enough memory for this: take fewer methods, images or streams. ({error})")
    data = tribe.bench.to_data(result)
    _say(console, tribe.bench.show(result))
    if old is not None:
        changes, around = tribe.bench.compare(old, result), tribe.bench.surroundings(old, result)
        data["compared"] = {"surroundings": around, "now_over_then": {change.name: change.ratio for change in changes}}
        _say(console, tribe.bench.show_changes(changes, around))
    if json_file == "-":
        print_json(data)
    elif json_file is not None:
        try:
            tribe.bench.write(json_file, data)
        except OSError as error:
            fail(f"the results above could not be written: {error}")


def _network(
    name: str, classes: int | None, shape: tuple[int, ...] | None
) -> tuple[Callable[[torch.device], nn.Module], int, tuple[int, ...]]:
    """What makes the network, how many classes it tells apart, and the shape of its images."""
    if ":" not in name:
        fields: dict[str, Any] = {} if classes is None else {"classes": classes}
        design = tribe.models.architecture(name, **fields)
        return partial(tribe.bench.build, name, design.classes), design.classes, shape or design.shape
    if shape is None:
        raise ValueError(f"{name} does not say what images it takes: --shape 3,224,224, say")
    net = load_custom_model(name)
    count = classes or tribe.Backbone(net).classes
    if count is None:
        raise ValueError(f"{name} does not show how many classes it tells apart: --classes")
    return net.to, count, shape


def _shape(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"--shape is the shape of one image, such as 3,32,32; got {text!r}") from None


@contextlib.contextmanager
def _progress() -> Iterator[Watch]:
    """A bar that moves between timings only: a thread that draws would be timed with the rest."""
    words = TextColumn("{task.description:14}")
    columns = (words, BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("building", total=None)

        def watch(done: int, of: int, what: str) -> None:
            bar.update(task, completed=done, total=of, description=what, refresh=True)

        yield watch


def _say(console: Console, text: str) -> None:
    console.print(f"{text}\n", soft_wrap=True, markup=False, highlight=False)
