"""Layers that the networks share: input normalisation, BatchNorm with ReLU, pooling, initial weights."""

from torch import Tensor, nn

from tribe.core.normalize import Normalize

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation, one entry per channel
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Normalization = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # of RobustBench's AugMix networks


class InputNormalize(Normalize):
    """Normalisation as a constant of the network. It is not in the state dict, which has the published names."""

    def __init__(self, normalize: Normalization) -> None:
        super().__init__(*normalize)
        for name, value in list(self.named_buffers()):
            self.register_buffer(name, value, persistent=False)


def input_layer(normalize: Normalization | None) -> nn.Module:
    """The first layer of a network: the normalisation of its images, if any."""
    return nn.Identity() if normalize is None else InputNormalize(normalize)


class BatchNormReLU(nn.BatchNorm2d):
    """BatchNorm and ReLU as one layer with the name of the BatchNorm: adapting it takes one pass, not two.

    Code that replaces BatchNorm layers, such as `nn.SyncBatchNorm.convert_sync_batchnorm`, must add ``act`` after the
    new layer.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)  # timm's name; in place is safe, because no other layer reads the input

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> the same shape, not negative."""
        return self.act(super().forward(x))  # type: ignore[no-any-return]


def global_pool(x: Tensor) -> Tensor:
    """The mean over all pixels, (N, C, H, W) -> (N, C)."""
    return x.mean((2, 3))


def initialize(net: nn.Module) -> nn.Module:
    """Set He et al.'s initial weights, with which all of these networks were published."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net
