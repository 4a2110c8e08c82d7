"""Corruptions of ImageNet-C, CIFAR-C ("common") and MNIST-C ("mnist"), batched, on any device, and replayable.

`apply(images, name, severity)` corrupts a batch. The result for an image depends only on its index, the corruption,
the severity and the seed. To add a corruption, put a file beside this one that registers it. See CONTRIBUTING.

>>> import torch
>>> apply(torch.rand(2, 3, 32, 32), "contrast", 3).shape
torch.Size([2, 3, 32, 32])
"""

import importlib
import pkgutil

from tribe.data.corruptions.families import (
    SEVERITIES,
    Draw,
    Function,
    apply,
    corruption,
    family_for,
    function,
    names,
    require_severity,
)

__all__ = [
    "SEVERITIES",
    "Draw",
    "Function",
    "apply",
    "corruption",
    "family_for",
    "function",
    "names",
    "require_severity",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
