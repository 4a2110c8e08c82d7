"""Networks of timm and torchvision, by name: "timm/efficientnet_lite0", "torchvision/resnet50"."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tribe.models.base import IMAGENET, Architecture, Normalization, input_layer, register

EXTRA = "models"  # of this package, which installs both


class Normalized(nn.Module):
    """Another library's network behind the normalisation it was trained with, so that it takes images in [0, 1]."""

    def __init__(self, model: nn.Module, normalize: Normalization | None) -> None:
        super().__init__()
        self.normalize = input_layer(normalize)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        return self.model(self.normalize(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class External(Architecture):
    """What the two have in common."""

    classes: int = 1000
    normalize: Normalization | None = None  # None: what the library says the network wants
    model: str = ""  # the library's name for it
    pretrained: bool = False  # True: with the library's weights, which it may download

    size = 224
    head = ""  # every network has its own

    @classmethod
    def preset(cls, name: str) -> Mapping[str, Any] | None:
        """All that stands behind "timm/" is timm's name."""
        library, slash, model = name.partition("/")
        return {"model": model} if library == cls.name and slash else super().preset(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError(f"say which of {self.name}'s networks: create({self.name + '/resnet50'!r})")

    def build(self) -> nn.Module:
        """The library's network as the library initialises it, behind its normalisation."""
        return self.network()

    def library(self) -> Any:
        """The library, or an error that says how to get it."""
        try:
            return importlib.import_module(self.name)
        except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
            raise ImportError(
                f"{self.name}/{self.model} needs {self.name}, which cannot be imported here ({error}): "
                f"pip install 'tribe-tta[{EXTRA}]'"
            ) from error


@register("timm")
@dataclass(frozen=True)
class Timm(External):
    """A network of timm."""

    paper = "Wightman, PyTorch Image Models"

    def network(self) -> nn.Module:
        """The network behind the normalisation of its configuration."""
        timm = self.library()
        if not timm.is_model(self.model):
            raise ValueError(f"timm has no network {self.model!r}; timm.list_models() lists them")
        net = timm.create_model(
            self.model, pretrained=self.pretrained, num_classes=self.classes, in_chans=self.channels
        )
        wants = net.pretrained_cfg
        return Normalized(net, self.normalize or (tuple(wants["mean"]), tuple(wants["std"])))


@register("torchvision")
@dataclass(frozen=True)
class Torchvision(External):
    """A network of torchvision, all of whose classifiers want ImageNet's mean and standard deviation."""

    paper = "torchvision.models"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels != 3:
            raise ValueError(f"torchvision's networks take 3 channels; got {self.channels}")

    def network(self) -> nn.Module:
        """The network behind ImageNet's normalisation."""
        models = self.library().models
        if self.model not in models.list_models():
            raise ValueError(f"torchvision has no network {self.model!r}; torchvision.models.list_models() lists them")
        weights = "DEFAULT" if self.pretrained else None
        net = models.get_model(self.model, weights=weights, num_classes=self.classes)
        return Normalized(net, self.normalize or IMAGENET)
