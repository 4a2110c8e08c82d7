"""Checks of a network and of what goes in and out of it, for everything that adapts one: adapters and fleets."""

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.inputs import in_range, warn, warn_of_range
from tribe.core.model_copy import by_reason
from tribe.core.screening import PROBABILITIES, are_probabilities, sound

Place = tuple[torch.device, torch.dtype]


class Checks:
    """Checks of images and of logits; each warns once.

    Args:
        net: the network.
        classes: the number of classes that its logits must have; None: not known, of a network that may return others.
        logits: whether the method returns logits; otherwise it returns probabilities.
    """

    def __init__(self, net: Backbone, classes: int | None, logits: bool) -> None:
        self.classes, self._dense = classes, net.dense
        self._classifier = net.classifier
        self._range_checked, self._output_checked = False, not logits

    def find_bad(self, x: Tensor, valid: Tensor | None) -> Tensor | None:
        """Which images (S, B) are bad; None: no image is. Warns once of images outside [0, 1].

        The step screens its images itself. If the extremes of a batch lie in [0, 1], no image is bad, so a batch is
        screened again only if they do not, or on a GPU, where reading them would wait for the device.
        """
        gpu = x.device.type != "cpu"
        if x.numel() and not (gpu and self._range_checked) and in_range(x):
            self._range_checked |= gpu
            return None
        good = sound(x)
        if not self._range_checked:
            self._range_checked = warn_of_range(x[good if valid is None else good & valid]) or gpu
        return ~good

    def check_logits(self, logits: Tensor, bad: Tensor | None) -> None:
        """Refuse logits of another number of classes; warn once of probabilities in place of logits."""
        if self._dense and (logits.dim() != 3 or logits.shape[-1] != self.classes):
            return  # no logits
        check_count(logits, self.classes, self._classifier)
        if self._output_checked:
            return
        if (kept := logits if bad is None else logits[~bad]).numel():
            self._output_checked = True  # once: reading the values waits for the device
            if are_probabilities(kept):
                warn(PROBABILITIES)


def check_count(logits: Tensor, classes: int | None, classifier: str | None) -> None:
    """Refuse logits (..., K) of another number of classes than the outputs of the layer that was taken to classify."""
    if logits.shape[-1] != classes:
        raise ValueError(
            f"the network gives {logits.shape[-1]} classes; the adapter was made for {classes}, the outputs "
            f"of its layer {classifier!r}. Name the layer that classifies: "
            "tribe.adapt(tribe.Backbone(model, classifier=...))"
        )


def check_source(net: Backbone) -> None:
    """Refuse a network whose normalisation holds numbers that are not finite."""
    if names := net.not_finite():
        raise ValueError(
            f"the network's normalisation holds numbers that are not finite ({', '.join(names[:4])}), so nothing can "
            "be learned. Load its weights again; replace a layer that it never calls by nn.Identity()"
        )


def warn_of_layers_left_alone(net: Backbone) -> None:
    """Warn where fewer normalisation layers adapt than stay as they are."""
    if len(net.left_alone) > len(net.slots):
        warn(
            f"only {len(net.slots)} of {len(net.slots) + len(net.left_alone)} normalisation layers adapt; the others "
            f"are left alone ({'; '.join(by_reason(net.left_alone))}). The network will adapt little. Replace them by "
            "BatchNorm, LayerNorm or GroupNorm of torch, which compute the same, before the call"
        )


def place_of(net: Backbone) -> Place:
    """The device and precision of the source's affine parameters, which a state shares."""
    source: Tensor = net.origin.state.affine.weight
    return source.device, source.dtype
