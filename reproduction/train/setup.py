"""The network, images, device and files of a training: opened and checked before the first step."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from reproduction.train.checkpoint import CheckpointError
from reproduction.train.views import Images, read_images
from tribe.core.precision import choose_device
from tribe.data import datasets, models
from tribe.data.datasets import Dataset
from tribe.data.datasets.clean import Clean
from tribe.io.files import check_file
from tribe.registry import nearest

PRECISIONS = ("auto", "float32", "tf32", "bf16", "fp16")
SUFFIX = ".safetensors"


class TrainingData(NamedTuple):
    """Training and test images, and the number of classes."""

    name: str
    train: Images
    test: Images
    classes: int


def open_data(dataset: str | tuple[Dataset, Dataset], root: str | None) -> TrainingData:
    """Read both splits into memory."""
    if isinstance(dataset, str):
        cls: Any = datasets.get(dataset)
        if not issubclass(cls, Clean):
            names = [name for name in datasets.names() if issubclass(datasets.get(name), Clean)]
            raise ValueError(f"{dataset!r} has no training images: {nearest(dataset, names)}")
        pair: tuple[Dataset, Dataset] = cls(data=root, split="train"), cls(data=root, split="test")
    else:
        pair = dataset
    name = dataset if isinstance(dataset, str) else type(pair[0]).__name__
    return TrainingData(name, read_images(pair[0]), read_images(pair[1]), len(pair[0].classes))


def build_network(
    model: str | nn.Module, fields: Mapping[str, Any] | None, data: TrainingData, seed: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """The network, and its name and fields for the card; an error if it does not take these images."""
    shape = tuple(data.train.pixels.shape[1:])
    if isinstance(model, nn.Module):
        net, name, settings = model, type(model).__name__, {}
    else:
        design = models.architecture(model, **{"classes": data.classes, **(fields or {})})
        if design.channels != shape[0]:
            raise ValueError(
                f"{model} takes images {_times(design.shape)}, those of {data.name} are {_times(shape)}: choose "
                f"another network, or one with channels={shape[0]}"
            )
        with seeded(seed, device):
            net, name, settings = design.build(), model, asdict(design)
    _check_network(net, name, data, shape)
    return net.to(device), {"model": name, "fields": settings}


def _check_network(net: nn.Module, name: str, data: TrainingData, shape: tuple[int, ...]) -> None:
    """Raise ValueError if the network cannot classify a black image of this shape."""
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
    """The device; an error if it cannot be used."""
    device = choose_device(name)
    try:
        torch.empty(1, device=device).fill_(0).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]})") from error
    return device


def choose_precision(precision: str, device: torch.device) -> str:
    """The precision; "auto" is bf16 on GPUs that have it, else float32."""
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
    """Seed torch's generators (initial weights, dropout), and restore them on exit."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Files(NamedTuple):
    """The files of a training."""

    weights: Path
    card: Path
    checkpoint: Path


def open_files(out: str | PathLike[str], *, resume: bool, force: bool) -> Files:
    """The files of an output; an error if they cannot be written, or exist and may not be replaced."""
    weights = Path(out)
    if weights.suffix != SUFFIX:
        raise ValueError(f"{out}: weights are written as {SUFFIX}; name a file with this suffix")
    check_file(weights)
    files = Files(weights, weights.with_suffix(".json"), Path(f"{weights}.checkpoint"))
    if force or (resume and files.checkpoint.exists()):
        return files
    if files.checkpoint.exists():
        raise CheckpointError(
            f"{files.checkpoint} holds a training that was interrupted: continue with --resume (resume=True), or start "
            "over with --force (force=True)"
        )
    for path in (files.weights, files.card):
        if path.exists():
            raise FileExistsError(
                f"{path} exists already: name another output, or replace it with --force (force=True)"
            )
    return files
