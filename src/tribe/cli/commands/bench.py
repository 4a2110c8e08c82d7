"""``tribe bench``: measure what adapting costs, side by side with plain inference of the same network."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

import tribe
from tribe.cli.commands import app
from tribe.cli.custom import custom_network
from tribe.cli.options import Device, Precision, method_names, parse_shape
from tribe.cli.output import fail, messages, timing_bar, write_json
from tribe.core.precision import choose_device, precision_on
from tribe.experiments.bench import contenders, measurement, results
from tribe.experiments.bench.measurement import REPEATS, BenchResult
from tribe.fields import printable
from tribe.io.files import check_file


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="Network: a name (`tribe list models`), timm/NAME, torchvision/NAME, or file.py:attribute.",
            show_default="resnet20; wrn28_10 on a GPU",
        ),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.", show_default="those of the network")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of an image, such as 3,32,32.", show_default="that of a named network")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods to measure, comma-separated; file.py:Class for a custom one.")
    ] = ",".join(measurement.METHODS),
    batch: Annotated[int, typer.Option(help="Images a stream and step.")] = 64,
    streams: Annotated[int, typer.Option(help="Independent streams in one step.")] = 1,
    precision: Precision = "tf32",
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of torch on the CPU.", show_default="torch's")] = None,
    graphs: Annotated[bool, typer.Option(help="Capture steps in CUDA graphs, where possible.")] = True,
    kernels: Annotated[bool, typer.Option(help="Use the Triton kernels, on CUDA.")] = True,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also measure compiled channels-last inference (compiling takes time).")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Timings of each contender; the median is reported.")] = REPEATS,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the numbers to this file; - is stdout.")
    ] = None,
    compare_file: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Show what changed since this --json file.")
    ] = None,
) -> None:
    """Measure what adapting costs in time and memory, compared with plain inference and with matrix products.

    All contenders take turns in one process, so that a noisy machine slows all of them equally. Ratios are to eager
    inference of the same network in the same precision, in NCHW and in channels-last layout. TFLOP/s count the
    convolutions and matrix products of a step; "of matmul" is their share of the rate of large matrix products. Peak
    memory includes the state, but not the network and the images.
    """
    with messages(), _out_of_memory_as_message():
        if json_file not in (None, "-"):
            check_file(json_file)
        old = None if compare_file is None else results.read(compare_file)
        where = choose_device(device)
        names = method_names(methods)
        name = model or ("wrn28_10" if where.type == "cuda" else "resnet20")
        build, count, size = _network(name, classes, None if shape is None else parse_shape(shape))
        setting = measurement.Setting(
            model=name,
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
            results.check_comparable(old.setting, setting)  # before the work, not after it
        with timing_bar() as show:
            net = build(where)
            result = measurement.measure(net, setting, names, compiled=compiled, repeats=repeats, progress=show)
    _print(result, old, json_file)


@contextlib.contextmanager
def _out_of_memory_as_message() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        fail(f"there is not enough memory for this: take fewer methods, images or streams. ({error})")


def _print(result: BenchResult, old: BenchResult | None, json_file: str | None) -> None:
    """Print the table, and the changes since an old result; write the JSON file."""
    console, data = Console(stderr=json_file == "-"), results.to_data(result)
    texts = [results.show(result)]
    if old is not None:
        surroundings, ratios = results.machine_differences(old, result), results.compare(old, result)
        data["compared"] = {"surroundings": surroundings, "now_over_then": ratios}
        texts.append(results.show_changes(old, result))
    for text in texts:
        console.print(printable(f"{text}\n", keep="\n"), soft_wrap=True, markup=False, highlight=False)
    with messages(redirect=False):
        write_json(data, json_file)


def _network(
    name: str, classes: int | None, shape: tuple[int, ...] | None
) -> tuple[Callable[[torch.device], nn.Module], int, tuple[int, ...]]:
    """A function that builds the network on a device, its number of classes, and the shape of its images."""
    if ":" not in name:
        fields: dict[str, Any] = {} if classes is None else {"classes": classes}
        design = tribe.models.architecture(name, **fields)
        return partial(contenders.build, name, design.classes), design.classes, shape or design.shape
    if shape is None:
        raise ValueError(f"the shape of the images of {name} is unknown: give it, such as --shape 3,224,224")
    net = custom_network(name)
    count = classes or tribe.Backbone(net).classes
    if count is None:
        raise ValueError(f"the number of classes of {name} is unknown: give it with --classes")
    return net.to, count, shape
