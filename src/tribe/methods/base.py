"""What every method shares: the protocol of a pure step, and the care for images that must not count."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from tribe import source
from tribe.backbone import Backbone, Output
from tribe.losses import entropy, mean_over
from tribe.norms import Norm
from tribe.registry import Registry, nearest
from tribe.rng import Key
from tribe.screening import sound
from tribe.state import Affine, Info, Stats, select

registry: Registry["Method"] = Registry("method")
register = registry.register


class State(Protocol):
    """A method's own named tuple of tensors; every one has at least these two."""

    @property
    def key(self) -> Key: ...  # noqa: D102
    @property
    def info(self) -> Info: ...  # noqa: D102


@dataclass(frozen=True)
class Deployed:
    """The network a state predicts with. It unpacks into what a pass of the source's weights takes."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    norm: Norm  # frozen, or batch for methods that normalise each batch with its own statistics
    weights: Sequence[Mapping[str, Tensor]] | None = None  # a stream's own by name, for methods that adapt them too

    def __iter__(self) -> Iterator[Any]:
        return iter((self.affine, self.stats, self.norm))

    def stream(self, index: int) -> "Deployed":
        """One stream's network."""
        row = slice(index, index + 1)
        affine, stats = Affine(*(t[row] for t in self.affine)), Stats(*(t[row] for t in self.stats))
        return Deployed(affine, stats, self.norm, self.weights and self.weights[row])

    def logits(self, net: Backbone, x: Tensor, valid: Tensor) -> Tensor:
        """Pass images (S, B, ...); weights cannot be batched over streams, so those with their own go one by one."""
        if self.weights is None:
            return net(x, *self, valid=valid).logits  # type: ignore[no-any-return]
        rows = ((slice(i, i + 1), self.stream(i), own) for i, own in enumerate(self.weights))
        return torch.cat([net(x[row], *alone, valid=valid[row], weights=own).logits for row, alone, own in rows])


@dataclass(frozen=True)
class Method(ABC):
    """A way to adapt. Its fields are its hyper-parameters; all that changes is in the state it is handed.

    `step` is pure: it returns predictions and the next state and touches neither its arguments nor itself. It never
    sees a label. Streams never meet: S streams in one call equal S calls of one.
    """

    classes: int | None = None  # K; methods that do not need to know it accept it all the same

    name: ClassVar[str]  # set by @register
    paper: ClassVar[str]  # where the method comes from
    output: ClassVar[Literal["logits", "probabilities"]] = "logits"  # what step returns
    does_not_adapt: ClassVar[str | None] = None  # a reason, for methods whose predictions never change
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # fields by data set
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # settings with a name of their own
    eager_only: ClassVar[str | None] = None  # why a step cannot be captured in one CUDA graph; see tribe.graphs
    in_parts: ClassVar[bool] = False  # but then in several, see tribe.parts
    needs: ClassVar[str | None] = None  # what it must know of the source data, in words; see tribe.source
    more_than_a_pass: ClassVar[str | None] = None  # how `predict` goes beyond the network `deployed` describes

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "predict" in vars(cls) and "more_than_a_pass" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides predict and does not say whether it still predicts what the network that "
                "deployed describes does, which is the one that is exported. Beside predict set more_than_a_pass = "
                "None if so, and otherwise to what it does besides, in words: then it is not exported"
            )

    def __post_init__(self) -> None:
        source.settle(self)
        _settle_numbers(self)
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"classes is the number of classes, at least 2; got {self.classes!r}")

    @classmethod
    def preset(cls, dataset: str, **fields: Any) -> Self:
        """The method with the hyper-parameters published for a data set; ``fields`` override single ones."""
        if dataset not in cls.presets:
            raise ValueError(f"{cls.name} has no preset {dataset!r}: {nearest(dataset, cls.presets)}")
        return cls(**{**cls.presets[dataset], **fields})

    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> source.Knowledge:
        """Take from source images (B, ...) and labels (B,) what the method needs to know; for methods with `needs`."""
        raise TypeError(f"{self.name} needs to know nothing of the source data")

    @abstractmethod
    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> Any:
        """The state before the first image. Stream i of seed s is stream 0 of seed s + i."""

    @abstractmethod
    def step(
        self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None, *, donate: Any = False
    ) -> tuple[Tensor, Any]:
        """Predict (S, B, ...) images, then adapt: (S, B, K) predictions and the next state.

        ``valid`` (S, B) marks real images: padding weighs nothing. ``donate`` allows (and does not oblige) the step to
        reuse memory that the caller will not look at again: True gives up ``state`` itself; a retired state, say the
        one before it, is given up instead, and then an error on the way leaves ``state`` whole.
        """

    @abstractmethod
    def deployed(self, net: Backbone, state: Any) -> Deployed:
        """The network this state predicts with."""

    def predict(self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict without adapting: a pass of `deployed`. A class that overrides it declares `more_than_a_pass`."""
        x, valid, _ = screen(x, valid)
        with torch.no_grad():
            return quiet(self.deployed(net, state).logits(net, x, valid), valid)


def _settle_numbers(method: Method) -> None:
    """Refuse what is no number in a field that is one, and turn numpy's numbers into plain ones, which files hold."""
    for field in dataclasses.fields(method):
        kinds = set(get_args(field.type) or [field.type])
        value = getattr(method, field.name)
        if not kinds & {int, float} or not kinds <= {int, float, NoneType} or (value is None and NoneType in kinds):
            continue
        expected, meant = (Real, "a number") if float in kinds else (Integral, "a whole number")
        if not isinstance(value, expected) or isinstance(value, bool) or value != value:
            raise ValueError(f"{field.name} of {method.name} is {meant}; got {value!r}")
        if not isinstance(value, int | float):
            plain = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(method, field.name, plain)


def new_key(net: Backbone, streams: int, seed: int) -> Key:
    """One seed a stream, the clock at zero."""
    clock = torch.zeros(streams, dtype=torch.int64, device=net.device)
    return Key(seed + torch.arange(streams, device=net.device), clock)


def new_info(net: Backbone, streams: int) -> Info:
    """Nothing seen yet."""
    count = torch.zeros(streams, dtype=torch.int64, device=net.device)
    share = torch.zeros(streams, dtype=torch.float32, device=net.device)
    return Info(count, count.clone(), share, share.clone(), share.clone())


def screen(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Replace padding and bad images (see `tribe.screening`) before the first layer sees them.

    Returns the images, which of them count (S, B), and how many were rejected (S,): real, but bad.
    """
    good = sound(x)  # (S, B)
    offered = torch.ones_like(good) if valid is None else valid
    valid = good & offered
    mask = valid.view(*valid.shape, *[1] * (x.dim() - 2))
    return torch.where(mask, x, 0), valid, (offered & ~good).sum(1)


def quiet(logits: Tensor, valid: Tensor) -> Tensor:
    """Say nothing about images that were screened out: equal logits, the uniform prediction."""
    return torch.where(valid.unsqueeze(-1), logits, 0)


def features_of(method: Method, output: Output) -> Tensor:
    """What the network's classifier was given, (S, B, F)."""
    if output.features is None:
        raise ValueError(NO_FEATURES.format(method.name))
    return output.features


NO_FEATURES = (
    "{} looks at the features of images, the input of the network's classifier, and no classifier layer was found that "
    "sees each image once: name it with tribe.Backbone(model, classifier=...)"
)


def finish(
    net: Backbone,
    old: Any,
    new: Any,
    logits: Tensor,
    valid: Tensor,
    rejected: Tensor,
    trusted: Tensor | None = None,
    affine: Affine | None = None,
) -> tuple[Tensor, Any]:
    """Close a step: tick the clocks, note what was seen, and leave streams without a valid image as they were."""
    with torch.no_grad():
        share = entropy(logits).float() / math.log(logits.shape[-1])
        info = Info(
            images=old.info.images + valid.sum(1),
            skipped=old.info.skipped,
            trusted=mean_over(torch.ones_like(share) if trusted is None else trusted.float(), valid),
            entropy=mean_over(share, valid),
            distance=old.info.distance if affine is None else _distance(net, affine),
        )
        moved = new._replace(key=old.key._replace(clock=old.key.clock + 1), info=info)
        # Statistics need no choice: a norm rule leaves rows without a valid sample as they were.
        stats = [name for name in new._fields if isinstance(getattr(new, name), Stats)]
        kept = select(valid.any(1), moved._replace(**{name: getattr(old, name) for name in stats}), old)
        kept = kept._replace(**{name: getattr(new, name) for name in stats})
        kept = kept._replace(info=kept.info._replace(skipped=old.info.skipped + rejected))
    return quiet(logits.detach(), valid), kept


def _distance(net: Backbone, affine: Affine) -> Tensor:
    """How far the affine parameters are from the source's, relative to the source's norm: (S,)."""
    source = torch.cat(net.source()[0], 1)
    moved = torch.linalg.vector_norm(torch.cat(affine, 1) - source, dim=1)
    distance: Tensor = moved / torch.linalg.vector_norm(source)
    return distance.float()
