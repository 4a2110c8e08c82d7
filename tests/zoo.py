"""Small networks of many kinds, their images, and arguments of a pass."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from networks import Around
from tribe import norms
from tribe.core.backbone import Backbone, Output
from tribe.core.state import Affine, Stats
from tribe.data.models.architectures import BatchNormReLU
from tribe.norms import Norm
from tribe.norms.balanced import Balanced

FROZEN, BATCH = norms.create("frozen"), norms.create("batch")
BALANCED = Balanced(classes=4, eta=0.1, gamma=0.2)


def small(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """Two convolutions, each with a norm layer and an in-place ReLU, as in common networks."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        norm(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2, bias=False),
        norm(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Nested(nn.Module):
    """Norm layers inside a ModuleList inside a ModuleDict inside a Sequential, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"norm": nn.BatchNorm2d(5), "conv": nn.Conv2d(5, 5, 3, padding=1)}) for _ in range(2)]
        self.stem = nn.Sequential(nn.Sequential(nn.Conv2d(3, 5, 3)), nn.Sequential(nn.BatchNorm2d(5)))
        self.parts = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.parts["blocks"]:
            x = x + block["conv"](block["norm"](x).relu())
        return self.head(x.mean((2, 3)))


class Shared(nn.Module):
    """One BatchNorm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 3)
        self.norm1 = self.norm2 = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm2(self.second(self.norm1(self.first(x)).relu())).relu().mean((2, 3)))


class Encoder(nn.Module):
    """A small vision transformer of torch's layers, which have a fused fast path in evaluation mode."""

    def __init__(self, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=batch_first, norm_first=norm_first)
        self.batch_first = batch_first
        self.embed = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(8), enable_nested_tensor=batch_first and not norm_first
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)  # (N, T, 8)
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x[:, 0])


class BatchNormAct2d(nn.BatchNorm2d):
    """BatchNorm with a built-in activation, as timm writes it. Its drop layer here shows whether it is called."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Hardtanh(), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        train = self.training or self.running_mean is None
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, train, 0.1, self.eps)
        return self.act(self.drop(x))


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of (N, C, H, W), as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """The same in a class of its own, as the authors of ConvNeXt write it."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / ((x - mean).pow(2).mean(1, keepdim=True) + self.eps).sqrt()
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def activated() -> nn.Sequential:
    """The same two convolutions with layers that normalise and activate, as in tribe's networks."""
    return nn.Sequential(*(m for m in small(BatchNormReLU) if not isinstance(m, nn.ReLU)))


class Doubled(nn.BatchNorm2d):
    """A BatchNorm with a custom forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def late(frames: Tensor) -> Tensor:
    """Pool (B, T, ...) over time; later frames weigh more, so that their order matters."""
    return (frames * torch.arange(1, frames.shape[1] + 1, dtype=frames.dtype)[:, None]).mean(1)


class Video(nn.Module):
    """Folds time into the batch (N = B T) for its convolutions, as video networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.layernorm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.LayerNorm(5)
        self.head = nn.Linear(5, 4)

    def frames(self, x: Tensor) -> Tensor:
        return self.layernorm(self.norm(self.conv(x.flatten(0, 1))).relu().mean((2, 3)))  # (B T, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(late(self.frames(x).unflatten(0, x.shape[:2])))


class ByFrame(Video):
    """Classifies every frame and pools the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return late(self.head(self.frames(x)).unflatten(0, x.shape[:2]))


def wrapped(change: Callable[[Tensor], Any]) -> nn.Module:
    """A network whose output is changed."""
    return Around(lambda inner, x: change(inner(x)), small())


class Bare(nn.Module):
    """One norm layer and nothing else: what a Backbone returns is exactly what its slot computed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bn = layer
        self.precision = nn.Parameter(torch.ones(()))  # images take the precision of the weights that are not a norm's

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x).flatten(1)


def mixed() -> nn.Module:
    """A LayerNorm without affine parameters, and one without a bias, beside a BatchNorm."""
    norms = (nn.BatchNorm1d(8), nn.LayerNorm(8, elementwise_affine=False), nn.Tanh(), nn.LayerNorm(8, bias=False))
    return nn.Sequential(nn.Linear(6, 8), *norms, nn.Linear(8, 4))


def no_affine_no_statistics(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)


IMAGE = (3, 8, 8)
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d (N, C)": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)), (6,)),
    "BatchNorm1d (N, C, L)": (
        lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(30, 4)),
        (3, 8),
    ),
    "BatchNorm2d": (small, IMAGE),
    "BatchNorm3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 5, 3), nn.BatchNorm3d(5), nn.ReLU(), nn.Flatten(), nn.Linear(40, 4)),
        (2, 4, 4, 4),
    ),
    "SyncBatchNorm": (partial(small, nn.SyncBatchNorm), IMAGE),
    "affine=False": (partial(small, partial(nn.BatchNorm2d, affine=False)), IMAGE),
    "track_running_stats=False": (partial(small, partial(nn.BatchNorm2d, track_running_stats=False)), IMAGE),
    "neither": (partial(small, no_affine_no_statistics), IMAGE),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), (6,)),
    "LayerNorm (C, H, W)": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.LayerNorm([2, 6, 6]), nn.Tanh(), nn.Flatten(), nn.Linear(72, 4)),
        IMAGE,
    ),
    "LayerNorms beside BatchNorm": (mixed, (6,)),
    "GroupNorm": (partial(small, partial(nn.GroupNorm, 2)), IMAGE),
    "LayerNorm2d": (partial(small, LayerNorm2d), IMAGE),
    "nested": (Nested, IMAGE),
    "shared": (Shared, IMAGE),
    "TransformerEncoder": (Encoder, (5, 6)),
    "TransformerEncoder, norm first": (partial(Encoder, norm_first=True), (5, 6)),
    "TransformerEncoder, tokens first": (partial(Encoder, batch_first=False), (5, 6)),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), small()), IMAGE),
    "BatchNormAct2d": (partial(small, BatchNormAct2d), IMAGE),
    "BatchNormReLU": (activated, IMAGE),
    "video": (Video, (3, 3, 6, 6)),
    "video by frame": (ByFrame, (3, 3, 6, 6)),
    ".logits": (lambda: wrapped(lambda y: SimpleNamespace(logits=y, loss=None)), IMAGE),
}
each_model = pytest.mark.parametrize("name", ZOO)


def build(name: str, seed: int = 0) -> nn.Module:
    """A model of the zoo whose norm layers are not new: no weight is 1, no mean 0."""
    torch.manual_seed(seed)
    model = ZOO[name][0]()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)
            if getattr(layer, "running_mean", None) is not None:
                nn.init.normal_(layer.running_mean, 0.0, 0.3)
                nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return model.eval()


def images(name: str, rows: int = 1, batch: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, batch, *ZOO[name][1], generator=g, dtype=torch.float64).to(dtype)


def logits(result: Any) -> Tensor:
    return getattr(result, "logits", result)


class Arguments(NamedTuple):
    affine: Affine
    stats: Stats
    norm: Norm
    labels: Tensor
    valid: Tensor

    def row(self, r: int) -> "Arguments":
        row = slice(r, r + 1)
        affine, stats = Affine(*(t[row] for t in self.affine)), Stats(*(t[row] for t in self.stats))
        return Arguments(affine, stats, self.norm, self.labels[row], self.valid[row])


def different_rows(net: Backbone, norm: Norm, rows: int, batch: int = 6, seed: int = 0) -> Arguments:
    """Every row with its own affine parameters, statistics, labels and valid samples."""
    g = torch.Generator().manual_seed(seed)
    affine, stats = net.source(rows, norm.classes)

    def shaken(t: Tensor) -> Tensor:
        return t * (0.7 + 0.6 * torch.rand(t.shape, generator=g, dtype=t.dtype))

    labels = torch.randint(norm.classes, (rows, batch), generator=g)
    valid = torch.rand(rows, batch, generator=g) > 0.2
    return Arguments(Affine(*map(shaken, affine)), Stats(*map(shaken, stats)), norm, labels, valid)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max()) if a.numel() else 0.0


def run(model: nn.Module, x: Tensor | None = None) -> Output:
    net = Backbone(model)
    x = images("BatchNorm2d") if x is None else x
    return net(x, *net.source(len(x)), FROZEN)
