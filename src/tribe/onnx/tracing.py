"""Find the layer that keeps a network from being traced, and say why."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from tribe.onnx.layers import RecordingNetwork, constant_values
from tribe.onnx.states import ModelFileError


class _Alone(nn.Module):
    """A layer whose arguments, tensors aside, are fixed."""

    def __init__(self, network: RecordingNetwork, layer: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.network, self.layer, self.args = network, layer, args

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        with constant_values(self.network, tensors[0].shape[0] if tensors else 0):
            return self.layer(*(next(given) if isinstance(arg, Tensor) else arg for arg in self.args))


def explain(network: RecordingNetwork, images: Tensor, error: Exception) -> Exception:
    """Return the error for a network that cannot be traced: its innermost layer that cannot, and the reason."""
    calls: dict[str, tuple[Any, ...]] = {}
    names = {layer: name for name, layer in network.model.named_modules() if name}

    def record(layer: nn.Module, args: tuple[Any, ...]) -> None:
        calls.setdefault(names[layer], args)

    hooks = [layer.register_forward_pre_hook(record) for layer in names]
    try:
        with constant_values(network, len(images)):
            network.model(images.to(torch.float32))
    finally:
        for hook in hooks:
            hook.remove()
    place, layer = "", network.model
    failure = _failure(network, layer, (images.to(torch.float32),))
    if failure is None:  # the network is not to blame
        return error
    while failure is not None:
        where, error = (f"layer {place!r}, {type(layer).__name__}," if place else "the network"), failure
        inner = [(f"{place}.{name}".lstrip("."), child) for name, child in layer.named_children()]
        failures = ((name, child, _failure(network, child, calls[name])) for name, child in inner if name in calls)
        place, layer, failure = next((found for found in failures if found[2] is not None), ("", layer, None))
    return ModelFileError(f"{where} cannot be written as ONNX: {_reason(error)}")


def _failure(network: RecordingNetwork, layer: nn.Module, args: tuple[Any, ...]) -> Exception | None:
    """Return the error of a layer that is traced alone."""
    given = tuple(arg for arg in args if isinstance(arg, Tensor))
    try:
        program = torch.export.export(_Alone(network, layer, args), given)
        torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        return error
    return None


def _reason(error: BaseException) -> str:
    """Return the first line of what went wrong at the root of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()]
    return next((line for line in lines if line), type(error).__name__)[:300]
