"""Corruptions of ImageNet-C, CIFAR-C ("common") and MNIST-C ("mnist"), batched, on any device, and replayable.

`apply(images, name, severity)` corrupts a batch; what happens to an image depends on its index, the corruption, the
severity and the seed alone. A file of this package registers the corruptions it holds.

>>> import torch
>>> apply(torch.rand(2, 3, 32, 32), "contrast", 3).shape
torch.Size([2, 3, 32, 32])
"""

import importlib
import pkgutil

from tribe.corruptions.base import SEVERITIES, Draw, Function, apply, corruption, function, names

__all__ = ["SEVERITIES", "Draw", "Function", "apply", "corruption", "function", "names"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
