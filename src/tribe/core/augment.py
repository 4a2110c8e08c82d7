"""The strong augmentation of RoTTA, CoTTA, PETAL and TRIBE: jitter colours, move, blur, flip, add noise.

An image is clipped to [0, 1]; goes through five colour operations in a random order; is padded by half its size with
edge values, turned, moved and scaled about its centre, blurred and cropped back; is flipped half of the time, gets a
little noise and is clipped again. `sample` draws the parameters and `apply` uses them, so that an augmentation can be
kept and replayed. Both are functions of a `Key`, and the augmentation of one stream never depends on other streams.

Shapes: S streams, B images a batch, C channels, H rows, W columns; G sets of parameters, M images that share a set.

>>> x = torch.rand(2, 8, 3, 32, 32)
>>> key = Key(seed=torch.tensor([1, 2]), clock=torch.tensor([0, 0]))
>>> Augment()(x, key).shape
torch.Size([2, 8, 3, 32, 32])
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.core import kernels
from tribe.core.kernels import colour, random_numbers
from tribe.core.rng import Key
from tribe.fields import NotNegative, Share, check_fields, is_number

# Purposes of the two draws ("AUGP" and "AUGN" in ASCII, so that no other module uses the same by accident). All
# parameters come from one draw, a column each: a draw of sixteen numbers costs as much as a draw of one.
PARAMETERS = 0x41554750
NOISE = 0x4155474E

MARGIN = 2  # pixels that a blur of five taps needs around the crop
EXPECTED = (
    "Augment takes a floating-point tensor (streams, batch, channels, height, width) with values in [0, 1], got {}; "
    "for other inputs pass a custom callable as `augment=`"
)

Range = tuple[float, float]
RANGES = "brightness", "contrast", "saturation", "hue", "gamma", "rotation", "translation", "scale", "sigma"


class Params(NamedTuple):
    """The parameters of an augmentation, (S, n) each: n = 1 (one set for a stream's batch) or n = B (one an image)."""

    order: Tensor  # (S, n, 5) int64: which of brightness, contrast, saturation, hue, gamma comes first, second, ...
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    gamma: Tensor
    rotation: Tensor  # degrees, clockwise on the screen
    dx: Tensor  # whole pixels to the right
    dy: Tensor  # whole pixels down
    scale: Tensor
    sigma: Tensor
    flip: Tensor  # bool
    key: Key  # of the pixel noise, which is too large to keep


@dataclass(frozen=True)
class Augment:
    """Draw parameters with `sample`, use them with `apply`, or do both by calling the object."""

    per: Literal["batch", "image"] = "batch"  # which images share parameters: those of a batch (as published), or none
    brightness: Range = (0.6, 1.4)
    contrast: Range = (0.7, 1.3)
    saturation: Range = (0.5, 1.5)
    hue: Range = (-0.06, 0.06)  # turns of the colour wheel
    gamma: Range = (0.7, 1.3)
    rotation: Range = (-15.0, 15.0)  # degrees
    translation: Range = (-1 / 16, 1 / 16)  # share of the padded size, then rounded to whole pixels
    scale: Range = (0.9, 1.1)  # above one enlarges
    sigma: Range = (0.001, 0.5)  # of the blur, in pixels
    flip: Share = 0.5  # probability
    noise: NotNegative = 0.005  # standard deviation

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            if name in RANGES and not (
                isinstance(value, Sequence) and len(value) == 2 and all(map(is_number, value)) and value[0] <= value[1]
            ):
                raise ValueError(f"{name} must be (low, high) with low <= high, got {value!r}")
            if name in ("gamma", "scale", "sigma") and value[0] <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def __call__(self, x: Tensor, key: Key) -> Tensor:
        """Augment x (S, B, C, H, W), of any floating dtype, with the parameters that belong to `key`."""
        return self.apply(x, self.sample(key, x.shape))

    def sample(self, key: Key, shape: Sequence[int]) -> Params:
        """Draw the parameters for images of this shape (S, B, C, H, W)."""
        if len(shape) != 5:
            raise ValueError(EXPECTED.format(f"shape {tuple(shape)}"))
        streams, batch, _, height, width = shape
        if key.seed.shape != (streams,):
            raise ValueError(f"{streams} streams need as many seeds, got a key of shape {tuple(key.seed.shape)}")
        colour = self.brightness, self.contrast, self.saturation, self.hue, self.gamma
        pixels = [tuple(bound * _padded(size) for bound in self.translation) for size in (width, height)]
        affine = self.rotation, *pixels, self.scale
        ranges = (*colour, *affine, self.sigma, (0.0, 1.0))
        u = random_numbers.uniform(key, PARAMETERS, (batch if self.per == "image" else 1, 5 + len(ranges)))
        order = u[..., :5].argsort(stable=True, dim=-1)  # the ranks of five numbers: all 120 orders are equally likely
        values = [v * (high - low) + low for v, (low, high) in zip(u[..., 5:].unbind(-1), ranges, strict=True)]
        *colour_and_rotation, dx, dy, scale, sigma, coin = values
        return Params._make((order, *colour_and_rotation, dx.round(), dy.round(), scale, sigma, coin < self.flip, key))

    @torch.no_grad()
    def apply(self, x: Tensor, params: Params) -> Tensor:
        """Augment x (S, B, C, H, W) with these parameters; computed in float32 at least, returned in x's dtype."""
        if x.ndim != 5:
            raise ValueError(EXPECTED.format(f"shape {tuple(x.shape)}"))
        if not x.is_floating_point():
            raise TypeError(EXPECTED.format(x.dtype))
        if x.numel() == 0:
            return x.clone()
        (streams, batch), n = x.shape[:2], params.flip.shape[1]
        if params.flip.shape[0] != streams or n not in (1, batch):
            raise ValueError(f"parameters drawn for {tuple(params.flip.shape)} do not fit images {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = x.to(dtype).contiguous().clamp(0, 1).view(streams * n, batch // n, *x.shape[2:])  # (G, M, C, H, W)
        order, *rest, flip = (p.flatten(0, 1) for p in params[:-1])
        *strength, rotation, dx, dy, scale, sigma = (p.to(dtype) for p in rest)  # (G,)
        y = _jitter(y, order, strength)
        y = _move(y, rotation, dx, dy, scale, flip)
        y = _blur(_blur(y, sigma, -2), sigma, -1).reshape(x.shape)
        if self.noise:
            y.add_(random_numbers.normal(params.key, NOISE, x.shape[1:]).to(dtype), alpha=self.noise)
        return y.clamp_(0, 1).to(x.dtype)


View = Augment | Callable[[Tensor], Tensor]  # a custom function takes and returns (B, ...)


def view(augment: View, x: Tensor, key: Key) -> Tensor:
    """Return the augmented images (S, B, ...); the same key gives the same images."""
    if isinstance(augment, Augment):
        return augment(x, key)
    views = [augment(images) for images in x]
    for augmented in views:
        if not isinstance(augmented, Tensor) or augmented.shape != x.shape[1:]:
            got = tuple(augmented.shape) if isinstance(augmented, Tensor) else type(augmented).__name__
            raise ValueError(f"augment turned images of shape {tuple(x.shape[1:])} into {got}; expected the same")
    return torch.stack(views).to(x)


# --- colour: x (G, M, C, H, W) in [0, 1], f (G, 1, 1, 1, 1) -----------------------------------------------------------


def _jitter(x: Tensor, order: Tensor, strength: Sequence[Tensor]) -> Tensor:
    """Apply the five operations, each set in its own order (G, 5). May overwrite x."""
    if kernels.can_run(x, kernels.EXACT) and x.shape[2] in (1, 3):
        return colour.jitter(x, order, torch.stack(tuple(strength), 1))
    readable = _readable(x)
    for place in order.unbind(1):
        for i in sorted(set(place.tolist())) if readable else range(5):
            due, f = place == i, strength[i].view(-1, 1, 1, 1, 1)  # (G,), (G, 1, 1, 1, 1)
            if not readable:
                x = torch.where(due.view(-1, 1, 1, 1, 1), OPERATIONS[i](x, f), x)
            elif due.all():
                x = OPERATIONS[i](x, f)
            else:
                index = due.nonzero()[:, 0]
                x = x.index_copy_(0, index, OPERATIONS[i](x[index], f[index]))
    return x


@kernels.comparison
def _jittered(device: torch.device) -> dict[str, Sequence[Tensor]]:
    small, large = (kernels.numbers(device, 3, 1, 3, *size).abs().clamp_max_(1) for size in ((9, 7), (65, 64)))
    order = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]], device=device)
    strength = tuple(torch.tensor([0.8, f, 1.2], device=device) for f in (0.7, 0.9, 1.1, 0.05, 1.3))
    return {"jittered colours": [_jitter(x.clone(), order, strength) for x in (small, large)]}


def _readable(x: Tensor) -> bool:
    """Return whether reading values does not synchronise: then only the operations that are due are computed."""
    return x.device.type == "cpu"


def _brightness(x: Tensor, f: Tensor) -> Tensor:
    return (x * f).clamp_(0, 1)


def _contrast(x: Tensor, f: Tensor) -> Tensor:
    # Rows, then columns: threads would divide a sum over a whole image in a way that depends on the batch.
    return _blend(x, f, _grey(x).mean(-1, keepdim=True).mean(-2, keepdim=True))


def _saturation(x: Tensor, f: Tensor) -> Tensor:
    return x if x.shape[2] == 1 else _blend(x, f, _grey(x))


def _hue(x: Tensor, f: Tensor) -> Tensor:
    """Turn the hue h by f turns.

    In HSV a channel is `low + depth * clamp(2 - 6 d, 0, 1)`, where d is the distance on the colour wheel from h to the
    hue of the channel: 0, 1/3, 2/3 for red, green, blue. So the conversion from HSV needs no case for each sector.
    """
    if x.shape[2] != 3:
        return x
    red, green, blue = x.chunk(3, 2)
    top = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    depth = top - low
    h = torch.where(green == top, (blue - red).add_(depth, alpha=2), (red - green).add_(depth, alpha=4))
    h = torch.where(red == top, green - blue, h).div_((6 * depth).clamp_min_(torch.finfo(x.dtype).tiny))  # grey: 0
    d = h.add_(f) - torch.arange(3, dtype=x.dtype, device=x.device).view(3, 1, 1) / 3
    d.sub_(d.round()).abs_()
    return torch.addcmul(low + 2 * depth, depth, d.clamp_(1 / 6, 1 / 3), value=-6)


def _gamma(x: Tensor, f: Tensor) -> Tensor:
    # Not `pow`: on a CPU its last bit depends on the position of a pixel in the tensor, and so on the other streams.
    return x.clamp(1e-8, 1).log_().mul_(f).exp_()


def _blend(x: Tensor, f: Tensor, target: Tensor) -> Tensor:
    return (x * f).add_(target * (1 - f)).clamp_(0, 1)


def _grey(x: Tensor) -> Tensor:
    if x.shape[2] != 3:
        return x.mean(2, keepdim=True)
    red, green, blue = x.chunk(3, 2)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


OPERATIONS = (_brightness, _contrast, _saturation, _hue, _gamma)


# --- geometry ---------------------------------------------------------------------------------------------------------


def _move(x: Tensor, rotation: Tensor, dx: Tensor, dy: Tensor, scale: Tensor, flip: Tensor) -> Tensor:
    """Sample the padded, moved image on the centre crop and its margin: (G, M, C, H, W) -> (G, M, C, H + 4, W + 4).

    The padded image is never computed. Inside it, sampling is sampling the original image with its nearest edge.
    Outside it are zeros. The two taps across its border along an axis differ in that alone, so the result is the share
    of the inner tap: a factor that depends on the position only.
    """
    sets, images, _, height, width = x.shape
    radians = rotation.deg2rad()
    cos, sin = (radians.cos() / scale)[:, None, None], (radians.sin() / scale)[:, None, None]
    # From output to input, in pixels from the centre: undo the flip, the translation, then rotation and scale. The
    # flip is exact here because crop, margin and blur are symmetric.
    u = _centres(width, x) * torch.where(flip, -1, 1)[:, None] - dx[:, None]  # (G, W + 4)
    v = _centres(height, x) - dy[:, None]  # (G, H + 4)
    u, v = u[:, None, :], v[:, :, None]
    u, v = cos * u + sin * v, cos * v - sin * u  # (G, H + 4, W + 4)
    # The weight of the taps inside the padded image.
    inside = ((_padded(width) + 1) / 2 - u.abs()).clamp_(0, 1) * ((_padded(height) + 1) / 2 - v.abs()).clamp_(0, 1)
    grid = torch.stack((u * (2 / width), v * (2 / height)), -1)
    grid = grid[:, None].expand(-1, images, -1, -1, -1).flatten(0, 1)  # (G M, H + 4, W + 4, 2)
    y = F.grid_sample(x.flatten(0, 1), grid, padding_mode="border", align_corners=False)
    return y.view(sets, images, *y.shape[1:]).mul_(inside[:, None, None])


def _centres(size: int, like: Tensor) -> Tensor:
    """Return positions of crop and margin along one axis, from the centre; reflected outside the padded image."""
    c = torch.arange(size + 2 * MARGIN, dtype=like.dtype, device=like.device) - (size - 1 + 2 * MARGIN) / 2
    last = (_padded(size) - 1) / 2
    return (2 * c.clamp(-last, last) - c).clamp(-last, last)  # an axis of one pixel has no neighbour: it repeats


def _blur(x: Tensor, sigma: Tensor, dim: int) -> Tensor:
    """Return gaussian blur with five taps along one axis, which loses its margin."""
    near, far = ((-(i**2) / (2 * sigma**2)).exp().view(-1, 1, 1, 1, 1) for i in (1, 2))
    total = 1 + 2 * near + 2 * far
    size = x.shape[dim] - 2 * MARGIN
    a, b, c, d, e = (x.narrow(dim, i, size) for i in range(5))
    return (c / total).addcmul_(b + d, near / total).addcmul_(a + e, far / total)


def _padded(size: int) -> int:
    return size + 2 * (size // 2)
