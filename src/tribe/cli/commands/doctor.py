"""``tribe doctor``: report which layers of a model can be adapted, and whether its input looks right."""

import contextlib
import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

import tribe
from tribe.cli.arrays import SAMPLE, read_images
from tribe.cli.commands import app
from tribe.cli.custom import custom_network
from tribe.cli.options import AsJson, DataRoot, Weights, parse_shape
from tribe.cli.output import fail, messages, print_json
from tribe.experiments.workbench import build_dataset, restrict
from tribe.fields import printable

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
            x = torch.from_numpy(read_images(images))
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


def _coloured(report: tribe.Report) -> Text:
    text = Text(printable(str(report), keep="\n"))
    text.highlight_regex(r"^can be adapted(?=\n|$)", "bold green")
    text.highlight_regex(r"^can be adapted, but.*", "bold yellow")
    text.highlight_regex(r"^cannot be adapted", "bold red")
    text.highlight_regex(r"(?m)^problem:", "bold red")
    return text
