"""The network of --model and --weights, of commands that need no data set."""

from pathlib import Path

from torch import nn

import tribe
from tribe.cli.custom import custom_network, is_untrained
from tribe.cli.output import print_message

DIGITS = "compact", "mnist"  # the embedded network and what it was trained on
UNTRAINED = (
    "{} gives other weights each time that it is called, so these are random, not trained: predictions mean nothing. "
    "--weights FILE takes the trained ones, or let it load them itself"
)


def name_of_network(prepared: Path, ready: tribe.Prepared, model: str | None) -> str:
    """Return the name that a person gives for the network of a prepared file, or that the file has."""
    if (name := model or ready.origin.get("model")) is None:
        raise ValueError(
            f"{prepared} does not name its network: give --model file.py:attribute, as it was prepared with"
        )
    return name


def load_network(name: str, weights: Path | None) -> tuple[nn.Module, tuple[int, ...] | None]:
    """Return the network, and the shape of its images where its design fixes it."""
    if ":" in name:
        net = custom_network(name, weights)
        if weights is None and is_untrained(name, net):
            print_message("warning", UNTRAINED.format(name))
        return net, None
    if name.startswith(("timm/", "torchvision/")):
        net = tribe.models.create(name, pretrained=weights is None)
        return net if weights is None else tribe.models.load(net, weights), None
    shape = tribe.models.architecture(name).shape
    if weights is None and name != DIGITS[0]:
        raise ValueError(f"--model {name} needs --weights FILE; without both, it is the embedded network of digits")
    return tribe.models.load(name, tribe.models.find(*DIGITS) if weights is None else weights), shape
