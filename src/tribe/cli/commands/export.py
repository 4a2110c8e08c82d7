"""``tribe export``: write an ONNX file that adapts while it predicts."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from torch import nn

import tribe
from tribe.cli.arrays import read_images
from tribe.cli.commands import app
from tribe.cli.custom import custom_network
from tribe.cli.networks import load_network, name_of_network
from tribe.cli.options import AsJson, Weights, parse_overrides, parse_shape
from tribe.cli.output import messages, print_json, shown
from tribe.data.models.weights import SHIPPED
from tribe.health.prepared import SUFFIX
from tribe.io.files import check_file, check_folder
from tribe.onnx import Session, export, quantize, write_triton
from tribe.onnx.exporting import OPSET

EXTRAS = {"valid": "valid", "uint8": "uint8", "frames": "frames", "source": "source_logits"}  # of tribe.onnx.export


@app.command("export")
def export_command(
    target: Annotated[
        str,
        typer.Argument(
            help="A prepared file, net.tribe; or a network: a name (`tribe list models`), or file.py:attribute."
        ),
    ],
    place: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The file to write.", show_default="net.onnx")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Network of a prepared file that does not name it: file.py:attribute.")
    ] = None,
    weights: Weights = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("net.onnx"),
    shape: Annotated[
        str | None, typer.Option(help="Shape of an image: 3,32,32.", show_default="of a network with a name, its own")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Begin with this state, a file of Adapter.save with method bank.")
    ] = None,
    time: Annotated[str | None, typer.Option(help="A time filter: auto.")] = None,
    extras: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="valid: an input of marks, false for padding. uint8: images of 0 to 255. frames: do not learn from "
            "black, frozen or noisy images. source: the source's predictions, too. Repeatable.",
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="float32; float16 halves the file; int8 needs --images.")] = "float32",
    images: Annotated[
        Path | None, typer.Option(help="For int8: images (N, C, H, W), .npy or .npz, that set the ranges.")
    ] = None,
    triton: Annotated[Path | None, typer.Option(help="Write a model repository of Triton here, too.")] = None,
    opset: Annotated[int, typer.Option(help="Version of ONNX's operators.")] = OPSET,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of bank: bank.observe=1. Repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an ONNX file that adapts: images and state in, logits and next state out. See docs/onnx.md."""
    with messages():
        if kind not in ("float32", "float16", "int8"):
            raise ValueError(f"--kind is float32, float16 or int8; got {kind}")
        if (kind == "int8") != (images is not None):
            raise ValueError("--kind int8 and --images go together: images set the ranges of activations")
        if unknown := [word for word in extras or () if word not in EXTRAS]:
            raise ValueError(f"--with is {', '.join(EXTRAS)}; got {unknown[0]}")
        options: dict[str, Any] = {EXTRAS[word]: word in (extras or ()) for word in EXTRAS}
        out = place or out
        check_file(out)
        if triton is not None:
            check_folder(triton)
        fields = parse_overrides(settings, ("bank",))["bank"]
        if state is not None and (fields or time is not None):
            raise ValueError("--state holds the fields and the time filter: leave out --set and --time")
        if prepared := target.endswith(SUFFIX):
            if state is not None or fields or time is not None:
                raise ValueError(f"{target} says how the network adapts: leave out --state, --set and --time")
            net, sizes = _prepared_network(Path(target), model, weights), None if shape is None else parse_shape(shape)
        else:
            net, sizes = _network(target, weights, shape)
        given: Any = net if state is None else tribe.load(state, net)
        known = target if prepared else None
        export(given, out, sizes, prepared=known, time=time, opset=opset, **options, **fields)
        if kind == "float16":
            quantize(out, out, "float16")
        elif images is not None:
            x = read_images(images)
            quantize(out, out, "int8", np.round(255 * x).astype(np.uint8) if options["uint8"] else x)
        repository = None if triton is None else write_triton(out, triton, out.stem)
    session, size = Session(out), out.stat().st_size
    made = {
        **{name: session.header[name] for name in ("method", "fields", "fingerprint", "classes", "shape", "options")},
        **{"path": str(out), "bytes": size, "kind": kind, "state": session.state_bytes},
        "triton": None if repository is None else str(repository),
        "differs": session.differs,
    }
    if as_json:
        print_json(made)
        return
    Console().print(shown(f"{out}, {size:,} bytes, {kind}, ONNX opset {opset}"), soft_wrap=True)
    Console().print(shown(f"method {made['method']}, a state of {made['state']:,} bytes a stream"), soft_wrap=True)
    for words in session.differs:
        Console().print(shown(f"unlike {Path(target).name}: {words}"), soft_wrap=True)
    if repository is not None:
        Console().print(shown(f"{repository}, for Triton"), soft_wrap=True)


def _prepared_network(path: Path, model: str | None, weights: Path | None) -> nn.Module:
    """Return the network of a prepared file."""
    return load_network(name_of_network(path, tribe.Prepared.load(path), model), weights)[0]


def _network(target: str, weights: Path | None, shape: str | None) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the network of the argument, and the shape of its images."""
    if ":" in target:
        if shape is None:
            raise ValueError("--shape is the shape of an image, such as 3,32,32: a custom network does not say it")
        return custom_network(target, weights), parse_shape(shape)
    sizes = tribe.models.architecture(target).shape
    if weights is None:
        weights = SHIPPED / f"{target}_mnist.safetensors"
        if not weights.is_file():
            raise ValueError(f"{target} needs --weights FILE, a safetensors file or a state dict")
    net = tribe.models.load(target, weights)
    first = next((layer for layer in net.modules() if isinstance(layer, nn.Conv2d)), None)
    channels = sizes[0] if first is None else first.in_channels
    return net, (channels, *sizes[1:]) if shape is None else parse_shape(shape)
