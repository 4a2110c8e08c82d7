"""What every method shares: the protocol of a pure step, and the care for images that must not count."""

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

import numpy as np
import torch
from torch import Tensor

from tribe.engine.backbone import NO_AFFINE, Backbone, Output
from tribe.engine.losses import entropy, mean_over
from tribe.engine.rng import Key
from tribe.engine.screening import sound
from tribe.engine.state import Affine, Info, Stats, leaves, select, streams_of
from tribe.fields import is_number, is_whole, plain_numbers, require
from tribe.knowledge import Knowledge, resolve_knowledge
from tribe.norms import Norm
from tribe.registry import Registry, nearest

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
        rows = ((slice(i, i + 1), self.stream(i), self.weights[i]) for i in streams_of(x, len(self.weights)))
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
    small: ClassVar[Mapping[str, int]] = {}  # fields with which a few images are enough, for the contract
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # settings with a name of their own
    eager_only: ClassVar[str | None] = None  # why a step cannot be captured in one CUDA graph; see tribe.engine.graphs
    in_segments: ClassVar[bool] = False  # but then in several, see tribe.engine.segments
    needs: ClassVar[str | None] = None  # what it must know of the source data, in words; see tribe.knowledge
    works_on: ClassVar[tuple[Literal["affine", "statistics", "features"], ...]] = ()  # what a network must have for it
    reuses_memory: ClassVar[bool] = False  # whether step takes `retired`; set for every subclass
    more_than_a_pass: ClassVar[str | None] = None  # how `predict` goes beyond the network `deployed` describes

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.reuses_memory = "retired" in inspect.signature(cls.step).parameters
        if "predict" in vars(cls) and "more_than_a_pass" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides predict and does not say whether it still predicts what the network that "
                "deployed describes does, which is the one that is exported. Beside predict set more_than_a_pass = "
                "None if so, and otherwise to what it does besides, in words: then it is not exported"
            )

    def __post_init__(self) -> None:
        resolve_knowledge(self)
        _settle_numbers(self)
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"classes is the number of classes, at least 2; got {self.classes!r}")

    @classmethod
    def preset(cls, dataset: str, **fields: Any) -> Self:
        """The method with the hyper-parameters published for a data set; ``fields`` override single ones.

        One without any that depend on the data is told the number of classes.
        """
        classes = {"mnist": 10, "cifar10": 10, "cifar100": 100, "imagenet": 1000}
        published = cls.presets or {name: {"classes": count} for name, count in classes.items()}
        if dataset not in published:
            raise ValueError(f"{cls.name} has no preset {dataset!r}: {nearest(dataset, published)}")
        return cls(**{**published[dataset], **fields})

    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> Knowledge:
        """Take from source images (B, ...) and labels (B,) what the method needs to know; for methods with `needs`."""
        raise TypeError(f"{self.name} needs to know nothing of the source data")

    @abstractmethod
    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> Any:
        """The state before the first image. Stream i of seed s is stream 0 of seed s + i."""

    @abstractmethod
    def step(self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Predict (S, B, ...) images, then adapt: (S, B, K) predictions and the next state.

        ``valid`` (S, B) marks real images: padding weighs nothing. A step that can write the next state into memory
        that exists already takes one more argument, ``retired``: see `step_reusing`.
        """

    def step_reusing(
        self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None, retired: Any = None
    ) -> tuple[Tensor, Any]:
        """Call `step`, which may write the next state into the memory of ``retired``.

        ``retired`` is a state that the caller no longer reads, such as the one before ``state``; an error leaves
        ``state`` intact. Class statistics of 1000 classes are hundreds of megabytes.
        """
        if self.reuses_memory:
            return self.step(net, state, x, valid, retired=retired)  # type: ignore[call-arg]
        return self.step(net, state, x, valid)

    @abstractmethod
    def deployed(self, net: Backbone, state: Any) -> Deployed:
        """The network this state predicts with."""

    def predict(self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict without adapting: a pass of `deployed`. A class that overrides it declares `more_than_a_pass`."""
        x, valid, _ = screen(x, valid)
        return quiet(*self.look(net, state, x, valid))

    @torch.no_grad()
    def look(self, net: Backbone, state: Any, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """What `deployed` says of images that were screened, and of which of them (S, B) it says something."""
        logits = self.deployed(net, state).logits(net, x, valid)
        return logits, valid & finite(logits)


def _settle_numbers(method: Method) -> None:
    """Check the fields that hold numbers or truth values; replace numpy's with Python's."""
    for field in dataclasses.fields(method):
        kinds = set(get_args(field.type) or [field.type])
        value = getattr(method, field.name)
        if not kinds <= {bool, int, float, NoneType} or (value is None and NoneType in kinds):
            continue
        if float in kinds:
            valid, expected = is_number(value), "a finite number"
        elif int in kinds:
            valid, expected = is_whole(value), "a whole number"
        else:
            valid, expected = isinstance(value, bool | np.bool_), "True or False"
        require(valid, f"{field.name} of {method.name} is {expected}", value)
    plain_numbers(method)


def check_fits(net: Backbone, method: Method) -> None:
    """Refuse a network that has nothing for the method to learn, or other classes."""
    check_classes(net, method.classes)
    if "affine" in method.works_on and not net.has_affine:
        raise ValueError(NO_AFFINE)


def check_classes(net: Backbone, classes: int | None) -> None:
    """Refuse a network with one output, and a number of classes that is not that of the network's outputs."""
    if (found := net.classes) is None:
        return
    if found < 2:
        raise ValueError(
            f"the network's classifier {net.classifier!r} has a single output; expected one a class, 2 at least. "
            "Where z alone says yes or no, let the network give (0, z): torch.cat((torch.zeros_like(z), z), 1)"
        )
    if classes is not None and classes != found:
        raise ValueError(
            f"classes={classes}, but the network's classifier {net.classifier!r} has {found} outputs. If that is not "
            "the classifier, name the one that is: tribe.Backbone(model, classifier=...)"
        )


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
    """Replace padding and bad images (see `tribe.engine.screening`) before the first layer sees them.

    A copy of the stream's first good image stands in for them: what weighs nothing must yet be finite in every layer,
    and of zeros a network that standardises each image makes 0 / 0.

    Returns the images, which of them count (S, B), and how many were rejected (S,): real, but bad.
    """
    if not x.shape[1]:
        raise ValueError(f"a step needs at least one image a stream; got a batch of shape {tuple(x.shape)}")
    x = x.detach()
    good = sound(x)  # (S, B)
    offered = torch.ones_like(good) if valid is None else valid
    valid = good & offered
    first = valid.byte().argmax(1)  # of every stream; a bad one, if none is good
    spare = x[torch.arange(len(x), device=x.device), first].masked_fill(~_over(valid.any(1), x[:, 0]), 0)
    return torch.where(_over(valid, x), x, spare.unsqueeze(1)), valid, (offered & ~good).sum(1)


def _over(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of the leading axes, to be used on x."""
    return mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))


def finite(t: Tensor) -> Tensor:
    """Where the last axis holds nothing but finite numbers: then so is their sum, which is quick to take."""
    return t.sum(-1, dtype=torch.float32).abs() < math.inf  # no comparison with NaN is true


def quiet(logits: Tensor, seen: Tensor) -> Tensor:
    """Say nothing of images that were screened out, or end in what is no number: equal logits, all classes alike."""
    return torch.where(seen.unsqueeze(-1), logits, 0)


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
    """Close a step: tick the clocks, note what was seen, and leave streams without a valid image as they were.

    So are streams left whose numbers are not finite now, in a prediction or in what was learned: a black frame may be
    a sound image and yet have no features. Their images are counted as skipped.
    """
    with torch.no_grad():
        told = finite(logits)
        sane = (told | ~valid).all(1) & _finite(new, old)  # (S,)
        share = entropy(logits).float() / math.log(logits.shape[-1])
        info = Info(
            images=old.info.images + valid.sum(1),
            skipped=old.info.skipped,
            trusted=mean_over(torch.ones_like(share) if trusted is None else trusted.float(), valid),
            entropy=mean_over(share, valid),
            distance=old.info.distance if affine is None else _distance(net, affine),
        )
        moved = new._replace(key=old.key._replace(clock=old.key.clock + 1), info=info)
        chosen = valid.any(1) & sane
        stats = [name for name in new._fields if isinstance(getattr(new, name), Stats)]
        kept = select(chosen, moved._replace(**{name: getattr(old, name) for name in stats}), old)
        kept = kept._replace(**{n: select(chosen, getattr(new, n), getattr(old, n), in_place=True) for n in stats})
        skipped = old.info.skipped + rejected + torch.where(sane, 0, valid.sum(1))
        kept = kept._replace(info=kept.info._replace(skipped=skipped))
    return quiet(logits.detach(), valid & told), kept


def _finite(new: Any, old: Any) -> Tensor:
    """Which streams (S,) have finite numbers only, in all that a step changed."""
    streams, before = len(old.key.seed), leaves(old)
    changed = [t for name, t in leaves(new).items() if t is not before[name] and t.is_floating_point() and t.numel()]
    totals = [t.reshape(streams, -1).sum(-1, dtype=torch.float32) for t in changed]
    return finite(torch.stack(totals, -1)) if totals else torch.ones_like(old.key.seed, dtype=torch.bool)


def _distance(net: Backbone, affine: Affine) -> Tensor:
    """How far the affine parameters are from the source's, relative to the source's norm: (S,)."""
    source = torch.cat(net.source()[0], 1)
    moved = torch.linalg.vector_norm(torch.cat(affine, 1) - source, dim=1)
    distance: Tensor = moved / torch.linalg.vector_norm(source)
    return distance.float()
