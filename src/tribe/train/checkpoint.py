"""A training as one file: weights, the optimiser's memory, where it stands and what it is; tensors and JSON, no pickle.

Random numbers are a function of seed and epoch, so there are none to save.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from tribe.lab.spec import differences
from tribe.storage.atomic import write_atomically

FORMAT = "tribe-training"
WEIGHTS, MEMORY = "net.", "optimizer."  # what names of tensors begin with


class CheckpointError(ValueError):
    """A checkpoint that cannot be gone on from, and why."""


class Checkpoint(NamedTuple):
    """Where a training stands."""

    identity: dict[str, Any]  # all that makes it what it is: model, data set, recipe, seed, precision
    history: list[dict[str, Any]]  # an entry for every epoch done
    scaler: dict[str, Any]  # of fp16's gradients; empty in other precisions
    tensors: dict[str, Tensor]


def save(
    path: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    history: list[dict[str, Any]],
    scaler: Mapping[str, Any],
) -> None:
    """Write a checkpoint, whole or not at all."""
    tensors = {WEIGHTS + name: tensor for name, tensor in net.state_dict().items()}
    for i, memory in optimizer.state_dict()["state"].items():
        tensors |= {f"{MEMORY}{i}.{name}": value for name, value in memory.items() if value is not None}
    header = {"format": FORMAT, "identity": identity, "history": history, "scaler": dict(scaler)}
    write_atomically(path, to_bytes(portable(tensors), {k: json.dumps(v) for k, v in header.items()}))


def portable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file takes them: on the CPU, in one piece."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def read(path: Path) -> Checkpoint:
    """Read a checkpoint, or say why it is not one."""
    try:
        with safe_open(path, framework="pt") as file:
            header = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of a training, or it is damaged ({error}); remove it"
        ) from error
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path} is a safetensors file, but no checkpoint of a training; name another output")
    return Checkpoint(header["identity"], header["history"], header["scaler"], tensors)


def check_identity(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another training, naming what differs."""
    for field, theirs, ours in differences(saved, wanted):
        if theirs != ours:
            raise CheckpointError(
                f"{path} is the checkpoint of another training: its {field} is {theirs!r}, asked for is {ours!r}. Ask "
                "for the same to go on, or start over with force (which replaces it)"
            )


def restore(saved: Checkpoint, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and the optimiser's memory back."""
    parts = {name.removeprefix(WEIGHTS): t for name, t in saved.tensors.items() if name.startswith(WEIGHTS)}
    net.load_state_dict(parts)
    memory: dict[int, dict[str, Tensor]] = {}
    for name, tensor in saved.tensors.items():
        if name.startswith(MEMORY):
            i, _, part = name.removeprefix(MEMORY).partition(".")
            memory.setdefault(int(i), {})[part] = tensor
    optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})
