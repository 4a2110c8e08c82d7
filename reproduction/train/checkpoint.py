"""Checkpoints of a training: weights, optimiser state, settings and history in one file of tensors and JSON, no pickle.

Random numbers are a function of seed and epoch, so there is no generator state to save.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tribe.experiments.spec import differences
from tribe.io import tensors as tensor_file
from tribe.io.json_files import Where

WEIGHTS, OPTIMIZER = "net.", "optimizer."  # prefixes of tensor names


class CheckpointError(tensor_file.TensorFileError):
    """A checkpoint that a training cannot continue from, and the reason."""


ENTRY = {"epoch": int, "loss": float, "train": float, "test": float, "seconds": float}
HISTORY = Where([ENTRY], lambda entries: is_numbered(entries), "epochs in order, from 1, without a gap")
CHECKPOINT = tensor_file.Kind(
    "tribe-training",
    1,
    {"identity": dict, "history": HISTORY, "scaler": {...: float}},
    noun="checkpoint of a training",
    advice="Remove it, or name another output",
    error=CheckpointError,
    needs_digest=False,
)


def is_numbered(entries: list[dict[str, Any]]) -> bool:
    """Whether the entries of a history are the epochs 1, 2, 3 and so on."""
    return [entry["epoch"] for entry in entries] == list(range(1, len(entries) + 1))


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


def restore(
    path: Path, saved: Checkpoint, net: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Load a checkpoint into network, optimiser and scaler.

    A checkpoint that does not fit them is refused before anything is loaded.
    """
    weights = {name: t for name, t in saved.tensors.items() if name.startswith(WEIGHTS)}
    memory = {name: t for name, t in saved.tensors.items() if not name.startswith(WEIGHTS)}
    tensor_file.check_like(
        path, CHECKPOINT, "this network", weights, {WEIGHTS + name: t for name, t in net.state_dict().items()}
    )
    fields = _optimizer_fields(optimizer)
    numbers = {int(i) for name in memory if (i := name.removeprefix(OPTIMIZER).partition(".")[0]) in fields}
    # A parameter that never had a gradient has no state; if none has any, the state is missing.
    expected = [fields[str(i)] for i in sorted(numbers)] or list(fields.values())
    tensor_file.check_like(
        path, CHECKPOINT, "the state of this optimiser", memory, {n: t for part in expected for n, t in part.items()}
    )
    if saved.scaler.keys() != scaler.state_dict().keys():
        raise CheckpointError(
            f"{path} does not hold the scaler of this precision: it has {sorted(saved.scaler) or 'none'}; expected "
            f"{sorted(scaler.state_dict()) or 'none'}. {CHECKPOINT.advice}"
        )
    state: dict[int, dict[str, Tensor]] = {i: {} for i in sorted(numbers)}
    for name, tensor in memory.items():
        i, _, field = name.removeprefix(OPTIMIZER).partition(".")
        state[int(i)][field] = tensor
    net.load_state_dict({name.removeprefix(WEIGHTS): t for name, t in weights.items()})
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler.is_enabled():
        scaler.load_state_dict(saved.scaler)


def _optimizer_fields(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """For each parameter by its number, tensors like those that the optimiser keeps of it after a step."""
    if isinstance(optimizer, torch.optim.SGD):
        names, counts = ["momentum_buffer"] if optimizer.defaults["momentum"] else [], {}
    else:  # Adam and AdamW
        names, counts = ["exp_avg", "exp_avg_sq"], {"step": torch.tensor(0.0)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [dict.fromkeys(names, p) | counts for p in parameters]
    return {str(i): {f"{OPTIMIZER}{i}.{n}": t for n, t in tensors.items()} for i, tensors in enumerate(kept)}
