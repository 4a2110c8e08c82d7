"""Corruptions of ImageNet-C at severities between the published ones: parameters are interpolated, and 0 is no change.

Press et al., RDumb: a simple approach that questions our progress in continual test-time adaptation, NeurIPS 2023.

>>> params_at("contrast", 0.5), params_at("jpeg_compression", 5), params_at("shot_noise", 0)
((0.7,), (7,), None)
"""

import math

from torch import Tensor

from tribe.data.corruptions.families import SEVERITIES, Params, apply, table_of
from tribe.fields import require

NOTHING: dict[str, Params] = {  # the parameters at severity 0, in the order of the tables
    "gaussian_noise": (0,),
    "shot_noise": (math.inf,),
    "impulse_noise": (0,),
    "defocus_blur": (0, 0),
    "glass_blur": (0, 0, 0),
    "motion_blur": (0, 0),
    "zoom_blur": (1, 0.01),
    "snow": (0.1, 0.3, 3, 1, 10, 4, 1),
    "frost": (1, 0),
    "fog": (0, 2),
    "brightness": (0,),
    "contrast": (1,),
    "elastic_transform": (0, 999 / 244, 0),
    "pixelate": (1,),
    "jpeg_compression": (85,),
}
WHOLE = {"glass_blur": (1, 2), "jpeg_compression": (0,)}  # positions of parameters that are whole numbers
INVERSE = ("shot_noise",)  # whose parameter's inverse is interpolated


def params_at(name: str, severity: float) -> Params | None:
    """The parameters of a corruption of large images at any severity from 0 to 5; None at 0, where nothing changes."""
    require(0 <= severity <= max(SEVERITIES), "a severity is a number from 0 to 5", severity)
    if severity == 0:
        return None
    steps = (NOTHING[name], *table_of(name, "common", large=True))
    low, share = math.floor(severity), severity - math.floor(severity)
    if share == 0:
        return steps[low]
    mixed = [_mix(a, b, share, name in INVERSE) for a, b in zip(steps[low], steps[low + 1], strict=True)]
    for i in WHOLE.get(name, ()):
        mixed[i] = round(mixed[i])
    if name == "glass_blur":
        mixed[1] = max(1, mixed[1])  # pixels cannot be moved by less
    return tuple(mixed)


def _mix(a: float, b: float, share: float, inverse: bool) -> float:
    if inverse:
        return 1 / ((1 - share) / a + share / b)
    return round((1 - share) * a + share * b, 12)


def apply_at(images: Tensor, name: str, severity: float, *, seed: int = 0, index: Tensor | None = None) -> Tensor:
    """Corrupt images (N, C, H, W) of at least 100 pixels a side; see `tribe.corruptions.apply`."""
    params = params_at(name, severity)
    if params is None:
        return images.clone()
    return apply(images, name, max(1, math.floor(severity)), seed=seed, index=index, params=params)
