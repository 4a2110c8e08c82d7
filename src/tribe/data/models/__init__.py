"""Source networks by name. All take images in [0, 1]: input normalisation is part of the model.

    net = tribe.models.create("wrn28_10", classes=10)                     # fresh weights, to train
    net = tribe.models.load("wrn28_10", "wrn28_10_cifar10.safetensors")   # published ones, to adapt
    net = tribe.models.load("compact", tribe.models.find("compact", "mnist", root))     # where `tribe train` puts them
    net = tribe.models.create("timm/efficientnet_lite0", pretrained=True)

To add one, put a file beside this one: the network as a plain module, and an `Architecture` with `@register("name")`.
"""

from tribe.data.models.architectures import Architecture, architecture, create, names, register, registry
from tribe.data.models.weights import WeightsError, find, load

registry.load(__name__, __path__)

__all__ = ["Architecture", "WeightsError", "architecture", "create", "find", "load", "names", "register", "registry"]
