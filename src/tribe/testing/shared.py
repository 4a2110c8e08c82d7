"""Inputs and helpers of all checks: a small network, images, predictions, equal runs, watched random generators."""

import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.rng import Key, normal, uniform
from tribe.core.state import digest, leaves, rebuild
from tribe.data.scenarios import Scenario
from tribe.methods import AnyMethod, Pipeline, with_fields

CLASSES = 4  # of the small network
SIZE = 8  # of images, in pixels
PER_CLASS = 120  # images of each class in each domain: a long tail of 100 leaves none empty


def small_network(classes: int = CLASSES, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a small convolutional classifier with BatchNorm: random weights, running statistics of random images."""
    return copy.deepcopy(_small_network(classes, seed)).to(dtype)


@functools.cache  # the checks need hundreds of them, and the running statistics take most of the time
@torch.inference_mode(False)
def _small_network(classes: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, classes),
        )
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.weight.uniform_(0.5, 1.5)
                    layer.bias.normal_(0, 0.2)
            cast(nn.Linear, model[-1]).weight.mul_(16)  # confident: methods must trust some predictions
            model.train()
            for _ in range(20):
                model(torch.rand(32, 3, SIZE, SIZE))
    return model.eval()


def small_backbone(dtype: torch.dtype = torch.float32) -> Backbone:
    """Wrap the small network."""
    return Backbone(small_network(dtype=dtype))


def images(streams: int, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw images (S, B, 3, 8, 8) in [0, 1]; each stream has its own brightness and contrast."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(streams, batch, 3, SIZE, SIZE, generator=generator, dtype=dtype)
    shift = torch.rand(streams, 1, 1, 1, 1, generator=generator, dtype=dtype)
    return (0.3 + 0.7 * x) * (0.4 + 0.6 * shift)


def doubtful_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the small network in doubt: a gray picture has no class, and a tinted one has; see `mixed_images`."""
    model, gray = cast(nn.Sequential, small_network()), mixed_images(2, 256)[1]
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
                layer.momentum = None  # the plain mean: its statistics become those of the gray pictures
        model.train()(gray)
        classifier = cast(nn.Linear, model.eval()[-1])
        classifier.bias.sub_(model(gray).mean(0))
        for parameter in classifier.parameters():
            parameter.mul_(2)
    return model.to(dtype)


def mixed_images(streams: int, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw images (S, B, 3, 8, 8) that `doubtful_network` is certain of in some streams, and not in others.

    In the first stream all images are tinted, in the second they are gray, in the third every other one is tinted, and
    so on.
    """
    picture = torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(1000), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(streams, batch, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    tint = torch.rand(streams, batch, 3, 1, 1, generator=generator, dtype=torch.float64)
    stream, place = torch.arange(streams).unsqueeze(1) % 3, torch.arange(batch)
    tinted = (stream == 0) | ((stream == 2) & (place % 2 == 0))
    gray = torch.lerp(picture, noise, 0.1)
    return torch.lerp(gray, tint, 0.75 * tinted.double().view(streams, batch, 1, 1, 1)).to(dtype)


def labels_in_bursts(
    streams: int, images: int, classes: int, stay: float, imbalance: float = 1, seed: int = 0
) -> Tensor:
    """Draw classes (S, N): an image has the class of the one before with probability ``stay``, else it is drawn anew.

    The first class is ``imbalance`` times as frequent as the last.
    """
    key = Key(torch.arange(streams) + seed, torch.zeros(streams, dtype=torch.int64))
    shares = imbalance ** -torch.linspace(0, 1, classes, dtype=torch.float64)
    edges = (shares / shares.sum()).cumsum(0)
    drawn = torch.searchsorted(edges, uniform(key, 1, (images,)).double()).clamp_max(classes - 1)
    anew = uniform(key, 2, (images,)) >= stay
    last = torch.where(anew, torch.arange(images), 0).cummax(1).values  # the image whose class was drawn
    return drawn.gather(1, last)


def predictions(labels: Tensor, classes: int, margin: float = 2.0, heat: float = 2.0, seed: int = 0) -> Tensor:
    """Draw logits (S, N, K) in float64 for images of these classes (S, N): a network without a network.

    The true class is ``margin`` above the others; each logit has noise of standard deviation 1. With ``heat`` 1 the
    softmax is the true posterior; a larger one makes it too sure, as networks are under a shift, a smaller one too
    cautious. A margin of 2 gives about a third of wrong predictions with 10 classes, one of 3 with 100.
    """
    key = Key(torch.arange(len(labels)) + seed, torch.ones(len(labels), dtype=torch.int64))
    noise = normal(key, 3, (labels.shape[1], classes)).double()
    return heat * margin * (noise + margin * torch.nn.functional.one_hot(labels, classes))


def label_sets(scenario: Scenario) -> list[Tensor]:
    """Return labels of every base domain, each in another order."""
    count = 3 if scenario.domains is None else len(scenario.domains)
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(CLASSES * PER_CLASS, generator=generator) % CLASSES for _ in range(count)]


def informed(method: AnyMethod, net: Backbone | None = None) -> AnyMethod:
    """Return the method with the source knowledge it needs, if any, from the small network (or another)."""
    if method.needs is None:
        return method
    net = net or small_backbone()
    sources = [images(1, 16, seed)[0] for seed in range(100, 106)]
    labels = [torch.randint(CLASSES, (16,), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    return with_fields(method, knowledge=method.study(net, zip(sources, labels, strict=True)))


def ready(name: str, **fields: Any) -> AnyMethod:
    """Build a registered method for the small network, with the source knowledge it needs."""
    return informed(methods.create(name, classes=CLASSES, **fields))


def small(method: AnyMethod) -> AnyMethod:
    """Return the method with the values that its class, or its guard's, declares in `small` where they are larger."""
    smaller: dict[str, Any] = {}
    for part in Pipeline.of(method).parts:
        limits: Mapping[str, Any] = getattr(part, "small", {})
        smaller |= {name: limit for name, limit in limits.items() if getattr(part, name) > limit}
    return with_fields(method, **smaller)


# -- what all checks require ------------------------------------------------------------------------------------------


def checks_of(module: Mapping[str, Any]) -> tuple[Callable[[Any], None], ...]:
    """Return the checks of a module, given its globals: all public functions that it defines, in their order."""
    functions = [value for name, value in module.items() if inspect.isfunction(value) and not name.startswith("_")]
    return tuple(function for function in functions if function.__module__ == module["__name__"])


class Played(NamedTuple):
    """A stream that was played: what came out batch by batch, and the state at its end."""

    outputs: list[Tensor]
    state: Any


def require_same(one: Played, other: Played, when: str) -> None:
    """Require the same bits of two runs."""
    assert all(map(torch.equal, one.outputs, other.outputs)), f"predictions differ {when}"
    assert digest(one.state) == digest(other.state), f"states differ {when}"


def require_no_graph(*tensors: Tensor) -> None:
    """Require that no tensor keeps an autograd graph alive."""
    assert not any(t.requires_grad for t in tensors), "a result still has a graph"


def saved_and_loaded(state: Any, fresh: Any) -> Any:
    """Save a state and load it again; ``fresh`` is another state of the same kind."""
    return rebuild(fresh, load(save({name: t.contiguous() for name, t in leaves(state).items()})))


def is_finite(state: Any) -> bool:
    """Return whether every number of a state is finite."""
    return all(bool(t.isfinite().all()) for t in leaves(state).values())


def require_same_layout(start: Any, end: Any) -> None:
    """Require that two states have the same tensors, with the same shapes and types."""
    before, after = leaves(start), leaves(end)
    assert before.keys() == after.keys(), f"the state lost or gained {sorted(before.keys() ^ after.keys())}"
    for name, t in before.items():
        old, new = (f"{tuple(u.shape)} of {u.dtype}" for u in (t, after[name]))
        assert old == new, f"{name} of the state was {old} and is {new}"


class _OneDevice(TorchFunctionMode):
    """Refuses every operation that names another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = [_device(value) for value in (*args, *(kwargs or {}).values())]
        if func is Tensor.cuda:
            named.append(torch.device("cuda"))
        elsewhere = {d.type for d in named if d is not None} - {self.device.type, "meta"}
        assert not elsewhere, (
            f"{getattr(func, '__name__', func)} names the device {', '.join(elsewhere)}, and the images are on "
            f"{self.device}: use the device of the images, x.device"
        )
        return func(*args, **(kwargs or {}))


def _device(value: Any) -> torch.device | None:
    """Return the device that an argument of an operation names, if it names one."""
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "mps", "xpu", "hpu"):
        return torch.device(value)
    return value if isinstance(value, torch.device) else None


@contextmanager
def one_device(device: torch.device) -> Iterator[None]:
    """Fail if the code inside names another device than this one, or wakes a GPU that is not there."""
    try:
        with _OneDevice(device):
            yield
    except RuntimeError as error:
        if "cuda" not in str(error).lower():
            raise
        raise AssertionError(f"it needs a GPU, and the images are on {device}: {error}") from error


@contextmanager
def generators_stay() -> Iterator[None]:
    """Fail if the code inside draws from a global random generator, or seeds it."""
    torch.rand(1)  # advance each: otherwise seeding with the seed of a moment ago would not show
    np.random.random()
    random.random()
    before = _generators()
    yield
    for (owner, old), new in zip(before.items(), _generators().values(), strict=True):
        assert old == new, f"{owner} global generator moved"


def _generators() -> dict[str, Any]:
    return {
        "torch's": torch.get_rng_state().tolist(),
        "numpy's": [np.asarray(part).tolist() for part in np.random.get_state()],
        "Python's": random.getstate(),
    }


def seed_generators(seed: int) -> None:
    """Seed all global random generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def require_documentation(component: type[Any]) -> None:
    """Require a docstring of a class and of its module, a paper and a name."""
    module = inspect.getmodule(component)
    assert component.__doc__, "the class has no docstring"
    assert module is None or module.__name__ == "__main__" or module.__doc__, "the module has no docstring"
    assert getattr(component, "paper", ""), "no paper"
    assert getattr(component, "name", ""), "not registered: no name"
