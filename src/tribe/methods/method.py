"""The protocol of a method: a frozen dataclass of hyper-parameters with a pure step."""

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from tribe.core.augment import View, check_view
from tribe.core.backbone import DENSE, NO_AFFINE, Backbone, Output
from tribe.core.rng import Key
from tribe.core.rules import Frozen, PerBatch
from tribe.core.state import Affine, Info, Stats, streams_of
from tribe.fields import is_number, is_whole, plain_numbers, require
from tribe.knowledge import Knowledge, resolve_knowledge
from tribe.methods.stepping import finite, mask_logits, screen
from tribe.norms import Norm
from tribe.registry import Registry, nearest

registry: Registry["Method"] = Registry("method")
register = registry.register


@dataclass(frozen=True)
class Deployed:
    """The network a state predicts with. It unpacks into the arguments of a pass with the source's weights."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    norm: Norm  # frozen, or batch for methods that normalise each batch with its own statistics
    weights: Sequence[Mapping[str, Tensor]] | None = None  # a stream's own by name, for methods that adapt them too

    @classmethod
    def frozen(cls, net: Backbone, affine: Affine) -> Self:
        """A network with the source's statistics."""
        return cls(affine, net.source(len(affine.weight))[1], Frozen())

    @classmethod
    def per_batch(cls, net: Backbone, affine: Affine, weights: Sequence[Mapping[str, Tensor]] | None = None) -> Self:
        """A network that normalises each batch with its own statistics; the source's only give the shape."""
        return cls(affine, net.source(len(affine.weight))[1], PerBatch(), weights)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.affine, self.stats, self.norm))

    def stream(self, index: int) -> "Deployed":
        """One stream's network."""
        row = slice(index, index + 1)
        affine, stats = Affine(*(t[row] for t in self.affine)), Stats(*(t[row] for t in self.stats))
        return Deployed(affine, stats, self.norm, self.weights and self.weights[row])

    def logits(self, net: Backbone, x: Tensor, valid: Tensor) -> Tensor:
        """Pass images (S, B, ...). Streams with their own weights pass one by one: weights cannot be batched."""
        if self.weights is None:
            return net(x, *self, valid=valid).logits  # type: ignore[no-any-return]
        rows = ((slice(i, i + 1), self.stream(i), self.weights[i]) for i in streams_of(x, len(self.weights)))
        return torch.cat([net(x[row], *alone, valid=valid[row], weights=own).logits for row, alone, own in rows])


@dataclass(frozen=True)
class Method(ABC):
    """A way to adapt. Its fields are its hyper-parameters; everything that changes is in the state.

    `step` is pure: it returns predictions and the next state, and changes neither its arguments nor the method. It
    never sees a label. Streams are independent: S streams in one call equal S calls with one stream.
    """

    classes: int | None = None  # K; every method accepts it, also one that does not use it

    name: ClassVar[str]  # set by @register
    paper: ClassVar[str]  # where the method comes from
    output: ClassVar[Literal["logits", "probabilities"]] = "logits"  # what step returns
    does_not_adapt: ClassVar[str | None] = None  # the reason, for methods whose predictions never change
    per_class: ClassVar[str | None] = None  # what it keeps for each class, for methods that require `classes`
    # Fields by data set. A class adds to what it inherits, so the number of classes is written here alone.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mnist": {"classes": 10},
        "cifar10": {"classes": 10},
        "cifar100": {"classes": 100},
        "imagenet": {"classes": 1000},
    }
    small: ClassVar[Mapping[str, int]] = {}  # values for tests with few images; see `tribe.testing`
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # named settings
    # Fields that are newer than results and state files of this method, with what the method did before: a spec without
    # the field means this value, and an experiment with this value has the id that it had before. See methods/encoding.
    added: ClassVar[Mapping[str, Any]] = {}
    eager_only: ClassVar[str | None] = None  # why a step cannot be captured in one CUDA graph; see tribe.core.graphs
    in_segments: ClassVar[bool] = False  # but it can be captured in several; see tribe.core.graphs
    needs: ClassVar[str | None] = None  # what it must know of the source data; see tribe.knowledge
    works_on: ClassVar[tuple[Literal["affine", "statistics", "features"], ...]] = ()  # what a network must have for it
    reuses_memory: ClassVar[bool] = False  # whether step takes `retired`; set for every subclass
    dense: ClassVar[bool] = False  # whether it never looks at the output, which need not be logits then
    not_exportable_because: ClassVar[str | None] = None  # what `predict` does besides a pass of `deployed`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.reuses_memory = "retired" in inspect.signature(cls.step).parameters
        inherited: Mapping[str, Mapping[str, Any]] = super(cls, cls).presets  # type: ignore[misc]
        added = vars(cls).get("presets", {})
        cls.presets = {name: {**inherited.get(name, {}), **added.get(name, {})} for name in {**inherited, **added}}
        if "predict" in vars(cls) and "not_exportable_because" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides predict and does not declare not_exportable_because. Only the network in "
                "deployed is exported. Set not_exportable_because = None if predict returns what that network returns; "
                "otherwise set it to a text that says what predict does besides, and the method is not exported"
            )

    def __post_init__(self) -> None:
        resolve_knowledge(self)
        _check_fields(self)
        if self.classes is None and self.per_class is not None:
            raise ValueError(f"{self.name} keeps {self.per_class} and needs the number of classes: classes=")
        if self.classes is not None and self.classes < 2:
            raise ValueError(f"classes is the number of classes, at least 2; got {self.classes!r}")

    @classmethod
    def preset(cls, dataset: str, **fields: Any) -> Self:
        """The method with the hyper-parameters published for a data set; ``fields`` override single ones."""
        if dataset not in cls.presets:
            raise ValueError(f"{cls.name} has no preset {dataset!r}: {nearest(dataset, cls.presets)}")
        return cls(**{**cls.presets[dataset], **fields})

    def require_range(
        self, *names: str, low: float = 0, high: float = math.inf, above: float = -math.inf, below: float = math.inf
    ) -> None:
        """Refuse a number in these fields outside [low, high], or not strictly between ``above`` and ``below``."""
        bounds = "not negative" if low == 0 else f"at least {low:g}"
        if high < math.inf:
            bounds = f"between {low:g} and {high:g}"
        if above > -math.inf:
            bounds = f"above {above:g}"
        if below < math.inf:
            bounds += f" and below {below:g}"
        for name in names:
            value = getattr(self, name)
            if value is not None:
                require(low <= value <= high and above < value < below, f"{name} of {self.name} is {bounds}", value)

    @property
    def class_count(self) -> int:
        """`classes`, for methods that require it."""
        assert self.classes is not None
        return self.classes

    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> Knowledge:
        """Extract what the method `needs` from source images (B, ...) and labels (B,)."""
        raise TypeError(f"{self.name} needs to know nothing of the source data")

    @staticmethod
    def new_key_and_info(net: Backbone, streams: int, seed: int) -> tuple[Key, Info]:
        """The last two fields of a new state: one seed a stream and the clock at zero, and an empty report."""
        count = torch.zeros(streams, dtype=torch.int64, device=net.device)
        share = torch.zeros(streams, dtype=torch.float32, device=net.device)
        key = Key(seed + torch.arange(streams, device=net.device), count)
        same = torch.ones_like(share)  # branches start from the source and agree
        return key, Info(count.clone(), count.clone(), share, share.clone(), share.clone(), same, same.clone())

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

    def recast(self, net: Backbone, state: Any) -> Any:
        """A state that was cast with the network, where parts of it keep a precision of their own."""
        return state

    def anchored(self, net: Backbone, state: Any) -> Stats | None:
        """The stream's statistics under the source's parameters, (S, 1, C); None if the method keeps none.

        They say how far the images have changed, whatever the method has learned.
        """
        return None

    def predict(self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict without adapting: a pass of `deployed`. A class that overrides it sets `not_exportable_because`."""
        x, valid, _ = screen(x, valid)
        return self.predict_screened(net, state, x, valid)

    def predict_and_advance(
        self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Predict without adapting, in the order of the stream: what a frozen adapter does. A time filter goes on."""
        return self.predict(net, state, x, valid), state

    def predict_screened(self, net: Backbone, state: Any, x: Tensor, valid: Tensor) -> Tensor:
        """A pass of `deployed`, for a step that has screened its images already."""
        return mask_logits(*self.pass_deployed(net, state, x, valid))

    @torch.no_grad()
    def pass_deployed(self, net: Backbone, state: Any, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Pass screened images through `deployed`: the logits, and which images (S, B) count and have finite ones."""
        logits = self.deployed(net, state).logits(net, x, valid)
        return logits, valid & finite(logits)


def _check_fields(method: Method) -> None:
    """Check fields of numbers, truth values, fixed choices and views; replace numpy's numbers with Python's."""
    for field in dataclasses.fields(method):
        value, kinds = getattr(method, field.name), set(get_args(field.type) or [field.type])
        choices = next((get_args(kind) for kind in (field.type, *kinds) if get_origin(kind) is Literal), ())
        if value is None and NoneType in kinds:
            continue
        if field.type == View:
            check_view(value)
        if choices:
            *others, last = map(repr, choices)
            valid, expected = value in choices, f"{', '.join(others)} or {last}"
        elif not kinds <= {bool, int, float, NoneType}:
            continue
        elif float in kinds:
            valid, expected = is_number(value), "a finite number"
        elif int in kinds:
            valid = is_whole(value) and -(2**63) <= value < 2**63
            expected = "a whole number of at most 64 bits" if is_whole(value) else "a whole number"
        else:
            valid, expected = isinstance(value, bool | np.bool_), "True or False"
        require(valid, f"{field.name} of {method.name} is {expected}", value)
    plain_numbers(method)


def check_fits(net: Backbone, method: Any) -> None:
    """Refuse a network without anything for the method to learn, or with another number of classes."""
    if net.dense and not method.dense:
        raise ValueError(f"{method.name} needs logits, and this network may return something else: dense=True. {DENSE}")
    if not net.dense:
        check_classes(net, method.classes)
    if "affine" in method.works_on and not net.has_affine:
        raise ValueError(NO_AFFINE)


def check_classes(net: Backbone, classes: int | None) -> None:
    """Refuse a network with a single output, and a number of classes that differs from the network's outputs."""
    if (found := net.classes) is None:
        return
    if found < 2:
        raise ValueError(
            f"the network's classifier {net.classifier!r} has a single output; expected one a class, at least 2. "
            "If one logit z decides between two classes, return (0, z): torch.cat((torch.zeros_like(z), z), 1)"
        )
    if classes is not None and classes != found:
        raise ValueError(
            f"classes={classes}, but the network's classifier {net.classifier!r} has {found} outputs. If that is not "
            "the classifier, name the right layer: tribe.Backbone(model, classifier=...)"
        )


def count_classes(net: Backbone, classes: int | None) -> int:
    """The number of classes: the given one, or the one that the network's classifier has."""
    check_classes(net, classes)
    count = classes if classes is not None else net.classes
    if count is None:
        raise ValueError("the number of classes cannot be read from the network: pass classes=")
    return count


NO_FEATURES = (
    "{} uses the features of images, the input of the network's classifier, and no classifier layer was found that "
    "sees each image once: name it with tribe.Backbone(model, classifier=...)"
)


def require_features(net: Backbone, method: Method) -> None:
    """Refuse a network whose classifier is not known."""
    if net.classifier is None:
        raise ValueError(NO_FEATURES.format(method.name))


def features_of(method: Method, output: Output) -> Tensor:
    """The input of the network's classifier, (S, B, F)."""
    if output.features is None:
        raise ValueError(NO_FEATURES.format(method.name))
    return output.features
