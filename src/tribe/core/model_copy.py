"""Copy a caller's model, or say why it cannot be adapted; the order of its weights in memory; copies for threads."""

import copy
import itertools
import threading
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tribe.core.slots import Slot

M = TypeVar("M", bound=nn.Module)


class ThreadCopies(threading.local):
    """A thread's copy of a network, for passes that put other weights into its modules.

    The copy has modules of its own and shares the network's tensors. So other threads, and code that reads the network
    during such a pass, see the source's weights only. The copy is made when it is first needed; a copy or pickle of
    this object starts empty.
    """

    model: nn.Module | None = None

    def of(self, model: nn.Module) -> nn.Module:
        """Return this thread's copy of the model."""
        if self.model is None:
            layers = [slot.layer for slot in model.modules() if isinstance(slot, Slot)]
            tensors = (t for m in (model, *layers) for t in itertools.chain(m.parameters(), m.buffers()))
            self.model = copy.deepcopy(model, {id(t): t for t in tensors})
        return self.model

    def __reduce__(self) -> Any:
        return type(self), ()


def unwrap(model: nn.Module) -> nn.Module:
    """Remove DataParallel, DistributedDataParallel and torch.compile wrappers, in any order."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def refuse_scripts(model: nn.Module) -> None:
    """Refuse a model with layers that torch.jit compiled."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ValueError(
                f"{f'layer {name!r}' if name else 'the model'} was compiled by torch.jit (script, trace, or a file of "
                "either), and the normalisation of compiled code cannot be replaced: give the eager module that it was "
                "made from"
            )


def refuse_unknown_sizes(model: nn.Module) -> None:
    """Refuse a model with lazy layers that have no size yet."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"the size of layer {name!r} is not known yet: run the model once before adapting it")


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy; raise with what prevents it."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({error}), and tribe never adapts the caller's model itself. Usual causes are "
            "tensors that still carry a graph, or hooks of an old weight_norm: remove those first"
        ) from error


def deepcopy_module(module: M, memo: dict[int, Any]) -> M:
    """Copy a module as copy.deepcopy copies one without a ``__deepcopy__`` method."""
    new = object.__new__(type(module))
    memo[id(module)] = new
    vars(new).update(copy.deepcopy(vars(module), memo))
    return new


def with_memory_format(t: Tensor, channels_last: bool) -> Tensor:
    """Return a tensor of four axes in channels-last or contiguous order; any other tensor as it is."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    return t.contiguous(memory_format=form) if t.dim() == 4 else t


def is_channels_last(model: nn.Module) -> bool:
    """Return whether some weights of a model are in channels-last order."""
    weights = (p for p in model.parameters() if p.dim() == 4 and not p.is_contiguous())
    return any(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
