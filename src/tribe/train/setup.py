"""What is trained, on what and where: settled, or refused in words, before the first step."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tribe import datasets, models
from tribe.datasets import Dataset
from tribe.datasets.clean import Clean
from tribe.engine.precision import choose_device
from tribe.registry import nearest
from tribe.train.checkpoint import CheckpointError
from tribe.train.views import Images, read

PRECISIONS = ("auto", "float32", "tf32", "bf16", "fp16")
SUFFIX = ".safetensors"


class Data(NamedTuple):
    """Images to learn from and to test on, and how many kinds there are."""

    name: str
    learn: Images
    test: Images
    classes: int


def open_data(dataset: str | tuple[Dataset, Dataset], root: str | None) -> Data:
    """Read both splits into memory."""
    if isinstance(dataset, str):
        cls: Any = datasets.get(dataset)
        if not issubclass(cls, Clean):
            known = [name for name in datasets.names() if issubclass(datasets.get(name), Clean)]
            raise ValueError(f"{dataset!r} has no images to learn from: {nearest(dataset, known)}")
        pair: tuple[Dataset, Dataset] = cls(data=root, split="train"), cls(data=root, split="test")
    else:
        pair = dataset
    name = dataset if isinstance(dataset, str) else type(pair[0]).__name__
    return Data(name, read(pair[0]), read(pair[1]), len(pair[0].classes))


def build(
    model: str | nn.Module, fields: Mapping[str, Any] | None, data: Data, seed: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """The network, and its name and fields for the card; refused if it does not take these images."""
    shape = tuple(data.learn.pixels.shape[1:])
    if isinstance(model, nn.Module):
        net, name, described = model, type(model).__name__, {}
    else:
        design = models.architecture(model, **{"classes": data.classes, **(fields or {})})
        if design.channels != shape[0]:
            raise ValueError(
                f"{model} takes images {_times(design.shape)}, those of {data.name} are {_times(shape)}: choose "
                f"another network, or one with channels={shape[0]}"
            )
        with seeded(seed, device):
            net, name, described = design.build(), model, asdict(design)
    _try_out(net, name, data, shape)
    return net.to(device), {"model": name, "fields": described}


def _try_out(net: nn.Module, name: str, data: Data, shape: tuple[int, ...]) -> None:
    """One image through the network, which says more about what fits than any table of sizes."""
    parameter = next(net.parameters(), None)
    if parameter is None:
        raise ValueError(f"{name} has no parameters to train")
    try:
        with torch.no_grad():
            logits = net.eval()(torch.zeros(1, *shape, device=parameter.device))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name} does not take the images of {data.name}, {_times(shape)}: {error}") from error
    if logits.shape != (1, data.classes):
        raise ValueError(
            f"{name} gives {tuple(logits.shape[1:])} numbers an image; {data.name} has {data.classes} classes"
        )


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def open_device(name: str) -> torch.device:
    """The device, after it has answered."""
    device = choose_device(name)
    try:
        torch.empty(1, device=device).fill_(0).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]})") from error
    return device


def choose_precision(precision: str, device: torch.device) -> str:
    """What to compute in; "auto" is bf16 on GPUs that have it, else float32."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}; got {precision!r}")
    cuda = device.type == "cuda"
    if precision == "auto":
        return "bf16" if cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if precision in ("tf32", "fp16") and not cuda:
        raise ValueError(f"precision {precision} is for CUDA devices, this is {device}: use float32 or bf16")
    return precision


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's own random numbers (initial weights, dropout) from a seed, and as if nothing had happened afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Files(NamedTuple):
    """Where a training writes."""

    weights: Path
    card: Path
    checkpoint: Path


def open_files(out: str | PathLike[str], *, resume: bool, force: bool) -> Files:
    """The files of an output; refused if something would be lost without being asked for."""
    weights = Path(out)
    if weights.suffix != SUFFIX:
        raise ValueError(f"{out}: weights are written as {SUFFIX}; name a file that ends so")
    if weights.is_dir():
        raise IsADirectoryError(f"{out} is a folder; expected the path of a file")
    if not weights.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {weights.parent} to write {weights.name} into; make it first")
    files = Files(weights, weights.with_suffix(".json"), Path(f"{weights}.checkpoint"))
    if force or (resume and files.checkpoint.exists()):
        return files
    if files.checkpoint.exists():
        raise CheckpointError(
            f"{files.checkpoint} holds a training that was interrupted: go on with --resume (resume=True), or start "
            "over with --force (force=True)"
        )
    for path in (files.weights, files.card):
        if path.exists():
            raise FileExistsError(
                f"{path} exists already: name another output, or replace it with --force (force=True)"
            )
    return files
