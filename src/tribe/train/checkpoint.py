"""Checkpoints of a training: weights, optimiser state, settings and history in one file of tensors and JSON, no pickle.

Random numbers are a function of seed and epoch, so there is no generator state to save.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tribe.lab.spec import differences
from tribe.storage import tensors as tensor_file

WEIGHTS, OPTIMIZER = "net.", "optimizer."  # prefixes of tensor names


class CheckpointError(tensor_file.TensorFileError):
    """A checkpoint that a training cannot continue from, and the reason."""


CHECKPOINT = tensor_file.Kind(
    "tribe-training",
    1,
    {"identity": dict, "history": list, "scaler": dict},
    noun="checkpoint of a training",
    advice="Remove it, or name another output",
    error=CheckpointError,
    needs_digest=False,
)


class Checkpoint(NamedTuple):
    """The contents of a checkpoint."""

    identity: dict[str, Any]  # the settings of the training: model, data set, recipe, seed, precision
    history: list[dict[str, Any]]  # one entry for each finished epoch
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
        tensors |= {f"{OPTIMIZER}{i}.{name}": value for name, value in memory.items() if value is not None}
    header = {"identity": identity, "history": history, "scaler": dict(scaler)}
    tensor_file.write(path, CHECKPOINT, header, tensors)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint; CheckpointError if it is damaged or another kind of file."""
    header, tensors = tensor_file.read(path, CHECKPOINT)
    return Checkpoint(**header, tensors=tensors)


def check_identity(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise CheckpointError, with the first difference, if a checkpoint belongs to other settings."""
    for field, theirs, ours in differences(saved, wanted):
        if theirs != ours:
            raise CheckpointError(
                f"{path} is the checkpoint of another training: its {field} is {theirs!r}, yours is {ours!r}. Use "
                "the same settings to continue, or start over with force (which replaces it)"
            )


def restore(saved: Checkpoint, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimiser state into the network and the optimiser."""
    weights = {name.removeprefix(WEIGHTS): t for name, t in saved.tensors.items() if name.startswith(WEIGHTS)}
    net.load_state_dict(weights)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in saved.tensors.items():
        if name.startswith(OPTIMIZER):
            i, _, field = name.removeprefix(OPTIMIZER).partition(".")
            state.setdefault(int(i), {})[field] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
