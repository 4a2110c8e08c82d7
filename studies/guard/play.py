"""What the study of the guard plays: clean images, corrupted ones, faults of a camera, and parts of a data set.

Seeds are streams of one network, side by side: images are (S, N, ...), labels (S, N).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from studies.play import Subset
from tribe import corruptions, datasets
from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.state import clone
from tribe.data.datasets import Dataset

BATCH = 64
NORMAL = "fog", 3  # the world before and after a fault
World = tuple[str, int] | None  # a corruption and its severity


class Images(NamedTuple):
    """Images (S, N, ...) in [0, 1], or something else in a fault, and their labels (S, N); -1: they do not count."""

    x: Tensor
    y: Tensor


class Source:
    """Clean labelled images, drawn by seeds, and corrupted on demand, on the device."""

    def __init__(self, name: str, data: str | None, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.dataset = datasets.create(name, **({} if data is None else {"data": data}))
        self.labels, self.seeds, self.device = self.dataset.labels("clean"), tuple(seeds), device

    def draw(self, count: int, offset: int = 0, world: World = None, bursts: bool = False) -> Images:
        """Draw images of every stream; an image may recur. In bursts, each class has its share of 500 in turn."""
        return self._each(torch.arange(len(self.labels)), count, offset, world, bursts)

    def of_class(self, label: int, count: int, world: World = None) -> Images:
        """Images of one class only."""
        return self._each(torch.where(self.labels == label)[0], count, 0, world, False)

    def _each(self, places: Tensor, count: int, offset: int, world: World, bursts: bool) -> Images:
        streams = []
        for seed in self.seeds:
            generator = torch.Generator().manual_seed(seed + offset)
            index = places[torch.randint(len(places), (count,), generator=generator)]
            if bursts:
                index = torch.cat([part[self.labels[part].argsort(stable=True)] for part in index.split(500)])
            streams.append(self.take(index, world))
        return Images(*(torch.stack(column) for column in zip(*streams, strict=True)))

    def take(self, index: Tensor, world: World) -> Images:
        """Images of one stream, by place."""
        x = self.dataset.images("clean", index).to(self.device)
        if world is not None:
            x = corruptions.apply(x, world[0], world[1], index=index)
        return Images(x, self.labels[index].to(self.device))


class Player:
    """Plays one method on a network: its steps are captured once, where there is a GPU."""

    def __init__(self, net: Backbone, method: Any) -> None:
        self.net, self.method, self._steps = net, method, Steps(method, net)

    def __call__(self, images: Images, batch: int = BATCH, state: Any = None) -> tuple[Tensor, Any]:
        """Which answers are wrong, (S, N), and the state after the streams; the state that is given stays whole."""
        state = self.method.init(self.net, len(images.x)) if state is None else state
        wrong = []
        for x, y in zip(images.x.split(batch, 1), images.y.split(batch, 1), strict=True):
            output, state = self._steps(state, x)
            wrong.append(output.argmax(-1) != y)
        return torch.cat(wrong, 1), clone(state)  # that of a captured step is valid for two steps only


def faults(source: Source, other: Source) -> Iterator[tuple[str, Images]]:
    """The faults of a stream, by name; ``other`` is another data set."""
    normal = source.draw(2000, 1, NORMAL)
    nothing, shape = torch.full_like(normal.y, -1), normal.x.shape
    lens, noise = (_random(source.seeds, shape[1:], kind).to(normal.x.device) for kind in ("normal", "uniform"))
    yield "one class, 5,000 images", source.of_class(3, 5000, NORMAL)
    yield "black", Images(torch.zeros_like(normal.x), nothing)
    yield "covered lens", Images((0.02 * lens).clamp(0, 1), nothing)
    yield "white", Images(torch.ones_like(normal.x), nothing)
    yield "frozen", Images(normal.x[:, :1].expand(shape).contiguous(), nothing)
    yield "noise", Images(noise, nothing)
    yield "another data set", Images(other.draw(2000).x, nothing)
    centred = (normal.x[:, :1000] - 0.45) / 0.25
    yield "wrong normalisation", Images(centred, nothing[:, :1000])
    yield "0 to 255", Images(normal.x[:, :1000] * 255, nothing[:, :1000])


def _random(seeds: Sequence[int], shape: Sequence[int], kind: str) -> Tensor:
    """Random numbers of every stream; the uniform ones are drawn after the normal ones."""
    drawn = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(*shape, generator=generator)
        drawn.append(numbers if kind == "normal" else torch.rand(*shape, generator=generator))
    return torch.stack(drawn)


def some(dataset: Dataset, per: int, seed: int = 0) -> Subset:
    """Return some images of each domain of a data set, the same ones in all domains: a short visit of each."""

    def choose(count: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:per].sort().values

    return Subset(dataset, choose)
