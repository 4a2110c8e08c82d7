"""``tribe doctor``: report which layers of a model can be adapted, and whether its input looks right."""

import contextlib
import math
import zipfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

import tribe
from tribe.cli.commands import app
from tribe.cli.custom import custom_network
from tribe.cli.options import AsJson, DataRoot, Weights, parse_shape
from tribe.cli.output import fail, messages, print_json
from tribe.data.datasets.files import open_npy, read_npz
from tribe.experiments.workbench import build_dataset, restrict
from tribe.fields import printable

SAMPLE = 128  # images, spread evenly over the file: enough for means, and files are often sorted by class
RANDOM = 16  # images of --shape
LARGEST = 2**26  # values in a random image: 4 GiB for all of them


@app.command()
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:attribute or path/to/file.py:attribute; the attribute is an nn.Module, or a function "
            "without arguments that returns one."
        ),
    ],
    weights: Weights = None,
    images: Annotated[
        Path | None,
        typer.Option(
            "--input", help=f"Images (N, C, H, W), .npy or .npz, float or uint8 / 255; {SAMPLE} of them are used."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help=f"Use {SAMPLE} clean images of a data set, see `tribe list datasets`, with their labels."),
    ] = None,
    data: DataRoot = None,
    shape: Annotated[str | None, typer.Option(help="Use random images in [0, 1] of this shape: 3,32,32.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report which layers of a model can be adapted, and whether its input looks right. Exit with 1 on problems."""
    if sum(given is not None for given in (images, shape, dataset)) > 1:
        fail("--input reads images, --dataset those of a data set, and --shape makes random ones: choose one")
    with messages():
        x, labels, known = None, None, None
        if dataset is not None:  # images of the first domain, spread evenly
            known = build_dataset(dataset, data, {})
            y = known.labels(known.domains[0])
            chosen = torch.linspace(0, len(y) - 1, min(len(y), SAMPLE)).long()
            x, labels = known.images(known.domains[0], chosen), y[chosen]
        elif images is not None:
            x = _read(images)
        elif shape is not None:
            sizes = parse_shape(shape)
            if math.prod(sizes) > LARGEST:
                fail(f"--shape {shape} is an image of {math.prod(sizes):,} numbers; expected {LARGEST:,} at most")
            x = torch.rand(RANDOM, *sizes, generator=torch.Generator().manual_seed(0))
        model = custom_network(target, weights)
        try:
            if known is not None:
                with contextlib.suppress(ValueError, TypeError):  # the report says why it cannot be adapted
                    model = model if isinstance(model, tribe.Backbone) else tribe.Backbone(model)
                if isinstance(model, tribe.Backbone):
                    model = restrict(model, known)
            report = tribe.doctor(model, x, labels, noise=shape is not None)
        except Exception as error:  # the code of the model may raise anything
            fail(f"{target} failed on these images: {type(error).__name__}: {error}")
    if as_json:
        print_json(report)
    else:
        Console().print(_coloured(report), soft_wrap=True)
    raise typer.Exit(0 if report.adaptable and not report.problems else 1)


def _read(path: Path) -> Tensor:
    """Read images (N, C, H, W), float, from an array file."""
    if not path.is_file():
        fail(f"no images at {path}")
    try:
        if zipfile.is_zipfile(path):
            arrays = read_npz(path)
            if len(arrays) != 1:
                raise ValueError(f"it holds {len(arrays)} arrays ({', '.join(list(arrays)[:8])}); expected one")
            array = next(iter(arrays.values()))
        else:
            array = open_npy(path)
    except (ValueError, OSError) as error:
        fail(f"{path} is not an array file that can be read without pickle: {type(error).__name__}: {error}")
    if array.ndim != 4 or 0 in array.shape:
        fail(f"{path} holds an array of shape {array.shape}; expected images (N, C, H, W)")
    if array.shape[3] in (1, 3) and array.shape[1] not in (1, 3):
        fail(f"{path} holds {array.shape}, probably (N, H, W, C); expected (N, C, H, W): array.transpose(0, 3, 1, 2)")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        fail(f"{path} holds {array.dtype}; expected uint8 or floating point")
    chosen = np.linspace(0, len(array) - 1, min(len(array), SAMPLE)).astype(int)
    images = torch.from_numpy(array[chosen].astype(np.float32))
    return images / 255 if array.dtype == np.uint8 else images


def _coloured(report: tribe.Report) -> Text:
    text = Text(printable(str(report), keep="\n"))
    text.highlight_regex(r"^can be adapted(?=\n|$)", "bold green")
    text.highlight_regex(r"^can be adapted, but.*", "bold yellow")
    text.highlight_regex(r"^cannot be adapted", "bold red")
    text.highlight_regex(r"(?m)^problem:", "bold red")
    return text
