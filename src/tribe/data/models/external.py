"""Networks of timm and torchvision, by name: "timm/efficientnet_lite0", "torchvision/resnet50"."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tribe.data.models.architectures import IMAGENET, Architecture, Normalization, input_layer, register
from tribe.fields import Count


class Normalized(nn.Module):
    """A network of another library after its input normalisation, so that it takes images in [0, 1]."""

    def __init__(self, model: nn.Module, normalize: Normalization | None) -> None:
        super().__init__()
        self.normalize = input_layer(normalize)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        return self.model(self.normalize(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class External(Architecture):
    """The base of both libraries."""

    classes: Count = 1000
    normalize: Normalization | None = None  # None: that of the library
    model: str = ""  # the library's name of the network
    pretrained: bool = False  # True: with the library's weights, which it may download

    size = 224
    head = ""  # differs between networks

    @classmethod
    def preset(cls, name: str) -> Mapping[str, Any] | None:
        """The name after "timm/" is timm's."""
        library, slash, model = name.partition("/")
        return {"model": model} if library == cls.name and slash else super().preset(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError(f"say which of {self.name}'s networks: create({self.name + '/resnet50'!r})")

    def build(self) -> nn.Module:
        """Build the network with the library's initial weights, after its normalisation."""
        return self.network()

    def library(self) -> Any:
        """Import the library, or raise an error that says how to install it."""
        try:
            return importlib.import_module(self.name)
        except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
            raise ImportError(
                f"{self.name}/{self.model} needs {self.name}, which cannot be imported here ({error}): "
                f"pip install 'tribe-tta[models]'"
            ) from error


@register("timm")
@dataclass(frozen=True)
class Timm(External):
    """A network of timm."""

    paper = "Wightman, PyTorch Image Models"

    def network(self) -> nn.Module:
        """Build the network after the normalisation of its configuration."""
        timm = self.library()
        if not timm.is_model(self.model):
            raise ValueError(f"timm has no network {self.model!r}; timm.list_models() lists them")
        net = timm.create_model(
            self.model, pretrained=self.pretrained, num_classes=self.classes, in_chans=self.channels
        )
        config = net.pretrained_cfg
        return Normalized(net, self.normalize or (tuple(config["mean"]), tuple(config["std"])))


@register("torchvision")
@dataclass(frozen=True)
class Torchvision(External):
    """A network of torchvision. All its classifiers use ImageNet's mean and standard deviation."""

    paper = "torchvision.models"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels != 3:
            raise ValueError(f"torchvision's networks take 3 channels; got {self.channels}")

    def network(self) -> nn.Module:
        """Build the network after ImageNet's normalisation."""
        models = self.library().models
        if self.model not in models.list_models():
            raise ValueError(f"torchvision has no network {self.model!r}; torchvision.models.list_models() lists them")
        weights = "DEFAULT" if self.pretrained else None
        net = models.get_model(self.model, weights=weights, num_classes=self.classes)
        return Normalized(net, self.normalize or IMAGENET)
