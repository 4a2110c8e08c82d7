"""``tribe doctor``: what of a model can be adapted, and whether its input looks right."""

import math
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

import tribe
from tribe.cli.app import app
from tribe.cli.custom import load_custom_model
from tribe.cli.output import describe_error, fail, print_json, stdout_to_stderr

PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".tar")
LOOK_AT = 128  # images, spread evenly over the file: enough for means, and files are often sorted by class
RANDOM = 16
LARGEST = 2**26  # numbers in an image that is made up: 4 GiB for all of them


@app.command()
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:attribute or path/to/file.py:attribute; the attribute is an nn.Module, or makes one "
            "when called without arguments."
        ),
    ],
    weights: Annotated[Path | None, typer.Option(help="State dict to load first, a safetensors file.")] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            "--input", help=f"Images (N, C, H, W), .npy or .npz, float or uint8 / 255; {LOOK_AT} are looked at."
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Make random images in [0, 1] of this shape: 3,32,32.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what of a model can be adapted and whether its input looks right. Exits with 1 if there are problems."""
    if images is not None and shape is not None:
        fail("--input gives images and --shape makes some up: choose one")
    with stdout_to_stderr():
        x = _read(images) if images is not None else _random(shape) if shape is not None else None
        model = load_custom_model(target)
        if weights is not None:
            load_weights(model, weights)
        try:
            report = tribe.doctor(model, x, noise=shape is not None)
        except Exception as error:  # the model's own code may raise anything
            fail(f"{target} failed on these images: {describe_error(error)}")
    if as_json:
        print_json(report)
    else:
        Console().print(_coloured(report), soft_wrap=True)
    raise typer.Exit(0 if report.adaptable and not report.problems else 1)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from safetensors, which is data; a pickle is code, and none is ever opened here."""
    if path.suffix.lower() in PICKLES:
        fail(
            f"{path} looks like a pickle, which can run any code when it is opened. Convert it where you trust it: "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        )
    if not path.is_file():
        fail(f"no weights at {path}")
    try:
        missing, unexpected = load_model(model, path, strict=False)
    except (SafetensorError, OSError) as error:
        fail(f"{path} is not a safetensors file, or it was cut short: {describe_error(error)}")
    except RuntimeError as error:  # torch, about shapes
        fail(f"{path} does not fit the model: {error}")
    if missing or unexpected:
        parts = {"the file lacks": missing, "the model has no": unexpected}
        fail(f"{path} does not fit the model: {'; '.join(f'{k} {_some(v)}' for k, v in parts.items() if v)}")


def _read(path: Path) -> Tensor:
    """Images from a file of arrays: (N, C, H, W), float."""
    if not path.is_file():
        fail(f"no images at {path}")
    try:
        array = _array(path)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        fail(f"{path} is not an array file that can be read without pickle: {describe_error(error)}")
    if array.ndim != 4 or 0 in array.shape:
        fail(f"{path} holds an array of shape {array.shape}; expected images (N, C, H, W)")
    if array.shape[3] in (1, 3) and array.shape[1] not in (1, 3):
        fail(f"{path} holds {array.shape}, (N, H, W, C) it seems; expected (N, C, H, W): array.transpose(0, 3, 1, 2)")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        fail(f"{path} holds {array.dtype}; expected uint8 or floating point")
    chosen = np.linspace(0, len(array) - 1, min(len(array), LOOK_AT)).astype(int)
    images = torch.from_numpy(array[chosen].astype(np.float32))
    return images / 255 if array.dtype == np.uint8 else images


def _array(path: Path) -> np.ndarray[Any, Any]:
    loaded: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        if len(loaded.files) != 1:
            fail(f"{path} holds {len(loaded.files)} arrays ({_some(loaded.files)}); expected one")
        array: np.ndarray[Any, Any] = loaded[loaded.files[0]]
    return array


def _random(shape: str) -> Tensor:
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        fail(f"--shape is the shape of one image, such as 3,32,32; got {shape!r}")
    if math.prod(sizes) > LARGEST:
        fail(f"--shape {shape} is an image of {math.prod(sizes):,} numbers; expected {LARGEST:,} at most")
    return torch.rand(RANDOM, *sizes, generator=torch.Generator().manual_seed(0))


def _coloured(report: tribe.Report) -> Text:
    text = Text(str(report))
    text.highlight_regex(r"^can be adapted", "bold green")
    text.highlight_regex(r"^cannot be adapted", "bold red")
    text.highlight_regex(r"(?m)^problem:", "bold red")
    return text


def _some(names: Any) -> str:
    known = sorted(names)
    return ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")
