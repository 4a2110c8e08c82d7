"""The protocol of a method: a frozen dataclass of hyper-parameters with a pure step."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from tribe.core.augment import View
from tribe.core.backbone import DENSE, NO_AFFINE, Backbone, Output
from tribe.core.rng import Key
from tribe.core.state import Affine, Info, Stats, rows_of, streams_of
from tribe.fields import Range, check_fields
from tribe.knowledge import Knowledge, resolve_knowledge
from tribe.methods.stepping import ScreenedBatch, Update, commit_step, finite, mask_logits, screen
from tribe.norms import Norm
from tribe.registry import Registry, nearest

registry: Registry["Method"] = Registry("method")
register = registry.register


Part = Literal["affine", "statistics", "features"]  # of a network


@dataclass(frozen=True)
class Deployed:
    """The network a state predicts with. It unpacks into the arguments of a pass with the source's weights."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    norm: Norm  # frozen, or batch for methods that normalise each batch with its own statistics
    weights: Sequence[Mapping[str, Tensor]] | None = None  # a stream's own by name, for methods that adapt them too

    def __iter__(self) -> Iterator[Any]:
        return iter((self.affine, self.stats, self.norm))

    def stream(self, index: int) -> "Deployed":
        """Return one stream's network."""
        row = slice(index, index + 1)
        affine, stats = rows_of(self.affine, row), rows_of(self.stats, row)
        return Deployed(affine, stats, self.norm, self.weights and self.weights[row])

    def logits(self, net: Backbone, x: Tensor, valid: Tensor) -> Tensor:
        """Pass images (S, B, ...). Streams with their own weights pass one by one: weights cannot be batched."""
        if self.weights is None:
            return net(x, self.affine, self.stats, self.norm, valid=valid).logits  # type: ignore[no-any-return]
        rows = ((slice(i, i + 1), self.stream(i), self.weights[i]) for i in streams_of(x, len(self.weights)))
        return torch.cat([net(x[row], *alone, valid=valid[row], weights=own).logits for row, alone, own in rows])


@dataclass(frozen=True)
class Method(ABC):
    """A way to adapt. Its fields are its hyper-parameters; everything that changes is in the state.

    A subclass defines `init`, `deployed` and `adapt`; `EntropyMethod` and `MemoryMethod` define what many methods
    share. `step` is pure: it returns predictions and the next state, and changes neither its arguments nor the method.
    It never sees a label. Streams are independent: S streams in one call equal S calls with one stream.
    """

    classes: Annotated[int, Range(low=2)] | None = None  # K; every method accepts it, also one that does not use it

    # What every method declares.
    name: ClassVar[str]  # set by @register
    paper: ClassVar[str]  # where the method comes from
    # What a method declares if it differs.
    works_on: ClassVar[tuple[Part, ...]] = ()  # what a network must have for it
    does_not_adapt: ClassVar[str | None] = None  # the reason, for methods whose predictions never change
    needs: ClassVar[str | None] = None  # the source knowledge that it needs; see tribe.knowledge
    per_class: ClassVar[str | None] = None  # what it keeps for each class, for methods that require `classes`
    # Its field of how many batches there are between two learning steps, if it has one; None: see tribe.methods.rare.
    rare_field: ClassVar[str | None] = None
    follows_without_learning: ClassVar[bool] = False  # whether that may be 0, never: its statistics still adapt
    # How a step is captured in CUDA graphs: as a whole, in segments (see tribe.core.graphs) because the host reads
    # values in the middle of it, or not at all.
    capture: ClassVar[Literal["whole", "segments", "never"]] = "whole"
    not_exportable_because: ClassVar[str | None] = None  # what `logits` does besides a pass of `deployed`
    not_savable_because: ClassVar[str | None] = None  # what its state holds besides tensors
    dense: ClassVar[bool] = False  # whether it never looks at the output, which need not be logits then
    # Settings by name.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # published, by data set; a class adds to what it inherits
        "mnist": {"classes": 10},
        "cifar10": {"classes": 10},
        "cifar100": {"classes": 100},
        "imagenet": {"classes": 1000},
    }
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # such as "selftrain/fixmatch"
    small: ClassVar[Mapping[str, int]] = {}  # values for tests with few images; see `tribe.testing`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited: Mapping[str, Mapping[str, Any]] = super(cls, cls).presets  # type: ignore[misc]
        added = vars(cls).get("presets", {})
        cls.presets = {name: {**inherited.get(name, {}), **added.get(name, {})} for name in {**inherited, **added}}
        known = get_args(Part)
        # A property decides for each method what it works on.
        if isinstance(cls.works_on, str) or (isinstance(cls.works_on, tuple) and not {*cls.works_on} <= {*known}):
            raise TypeError(f"works_on of {cls.__name__} is a tuple of {', '.join(known)}; got {cls.works_on!r}")
        overridden = next((name for name in ("logits", "predict") if name in vars(cls)), None)
        if overridden is not None and "not_exportable_because" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides {overridden} and does not declare not_exportable_because. Only the network "
                "in deployed is exported. Set not_exportable_because = None if that network predicts the same; "
                "otherwise set it to a text that says what is done besides, and the method is not exported"
            )

    def __post_init__(self) -> None:
        resolve_knowledge(self)
        check_fields(self)
        for field in dataclasses.fields(self):
            if field.type == View and not callable(augment := getattr(self, field.name)):
                raise TypeError(f"{field.name} is an Augment or a callable Tensor -> Tensor; got {augment!r}")
        if self.classes is None and self.per_class is not None:
            raise ValueError(f"{self.name} keeps {self.per_class} and needs the number of classes: classes=")
        for name, value in self.defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def defaults(self) -> Mapping[str, Any]:
        """Return the values of fields that are None, where they follow from the number of classes."""
        return {}

    @classmethod
    def preset(cls, dataset: str, **fields: Any) -> Self:
        """Return the method with the hyper-parameters published for a data set; ``fields`` override single ones."""
        if dataset not in cls.presets:
            raise ValueError(f"{cls.name} has no preset {dataset!r}: {nearest(dataset, cls.presets)}")
        return cls(**{**cls.presets[dataset], **fields})

    @property
    def class_count(self) -> int:
        """`classes`, for methods that require it."""
        assert self.classes is not None
        return self.classes

    def published(self, ten: float, hundred: float, thousand: float) -> float:
        """Return what is published for 10, 100 or 1000 classes.

        NOTE: with another number of classes, the nearest of these.
        """
        return ten if self.class_count <= 20 else hundred if self.class_count <= 300 else thousand

    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> Knowledge:
        """Extract what the method `needs` from source images (B, ...) and labels (B,)."""
        raise TypeError(f"{self.name} needs to know nothing of the source data")

    @staticmethod
    def new_key_and_info(net: Backbone, streams: int, seed: int) -> tuple[Key, Info]:
        """Return the last two fields of a new state: one seed a stream and the clock at zero, and an empty report."""
        count = torch.zeros(streams, dtype=torch.int64, device=net.device)
        share = torch.zeros(streams, dtype=torch.float32, device=net.device)
        key = Key(seed + torch.arange(streams, device=net.device), count)
        same = torch.ones_like(share)  # branches start from the source and agree
        return key, Info(count.clone(), count.clone(), share, share.clone(), share.clone(), same, same.clone())

    # -- what a method defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> Any:
        """Return the state before the first image. Stream i of seed s is stream 0 of seed s + i."""

    @abstractmethod
    def deployed(self, net: Backbone, state: Any) -> Deployed:
        """Return the network that this state predicts with."""

    @abstractmethod
    def adapt(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Update:
        """Predict a batch, then learn from it.

        The network that predicts is ``batch.deploy(net, state)``. Images that are not ``batch.valid`` weigh nothing.
        """

    def logits(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Tensor:
        """Predict a batch without learning, by a pass of `deployed`; an override declares `not_exportable_because`."""
        logits: Tensor = batch.deploy(net, state).logits(net, batch.x, batch.valid)
        return logits

    def anchored(self, net: Backbone, state: Any) -> Stats | None:
        """Return the stream's statistics under the source's parameters, (S, 1, C); None if the method keeps none.

        They say how far the images have changed, whatever the method has learned.
        """
        return None

    def followed(self, state: Any) -> Tensor | None:
        """Return the share of the adapted statistics in those that predict (S,); None: a guard decides it.

        Methods that weigh the source's statistics themselves return it: no guard leans on the source a second time.
        """
        return None

    # -- what users call ---------------------------------------------------------------------------------------------

    def step(
        self,
        net: Backbone,
        state: Any,
        x: Tensor,
        valid: Tensor | None = None,
        retired: Any = None,
        *,
        deploy: Callable[[Backbone, Any], Deployed] | None = None,
        on_prediction: Callable[[Tensor], object] | None = None,
    ) -> tuple[Tensor, Any]:
        """Predict images, then adapt.

        Args:
            net: the network.
            state: what `init` or the last step returned; an error leaves it intact.
            x: images (S, B, ...).
            valid: real images (S, B): padding weighs nothing. None: all.
            retired: a state that is not read any more, such as the one before ``state``: the next state may be written
                into its memory. Class statistics of 1000 classes are hundreds of megabytes.
            deploy: the network that predicts, in place of `deployed`.
            on_prediction: may be called with the predictions before the method learns.

        Returns:
            Logits (S, B, K), whose softmax is the method's probabilities, and the next state.
        """
        x, valid, rejected = screen(x, valid)
        batch = ScreenedBatch(x, valid, deploy or self.deployed, on_prediction, retired)
        return commit_step(net, state, self.adapt(net, state, batch), valid, rejected)

    def predict(
        self,
        net: Backbone,
        state: Any,
        x: Tensor,
        valid: Tensor | None = None,
        *,
        deploy: Callable[[Backbone, Any], Deployed] | None = None,
    ) -> Tensor:
        """Return logits of images without adapting; the arguments are those of `step`."""
        x, valid, _ = screen(x, valid)
        return self.predict_batch(net, state, ScreenedBatch(x, valid, deploy or self.deployed))[0]

    def predict_and_advance(
        self, net: Backbone, state: Any, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Predict as a frozen adapter does, in the order of the stream; only a pipeline's time filter moves on."""
        return self.predict(net, state, x, valid), state

    @torch.no_grad()
    def predict_batch(self, net: Backbone, state: Any, batch: ScreenedBatch) -> tuple[Tensor, Tensor]:
        """Return the logits of a batch, equal ones for images that do not count, and which images (S, B) do.

        An image whose logits are not finite does not count.
        """
        logits = self.logits(net, state, batch)
        seen = batch.valid & finite(logits)
        return mask_logits(logits, seen), seen


def check_fits(net: Backbone, method: Any) -> None:
    """Refuse a network without anything for the method to learn, or with another number of classes."""
    if net.dense and not method.dense:
        raise ValueError(f"{method.name} needs logits, and this network may return something else: dense=True. {DENSE}")
    if not net.dense:
        check_classes(net, method.classes)
    if "affine" in method.works_on and not net.has_affine:
        raise ValueError(NO_AFFINE)
    if "features" in method.works_on and net.classifier is None:
        raise ValueError(NO_FEATURES.format(method.name))


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
    """Return the number of classes: the given one, or the one that the network's classifier has."""
    check_classes(net, classes)
    count = classes if classes is not None else net.classes
    if count is None:
        raise ValueError("the number of classes cannot be read from the network: pass classes=")
    return count


NO_FEATURES = (
    "{} uses the features of images, the input of the network's classifier, and no classifier layer was found that "
    "sees each image once: name it with tribe.Backbone(model, classifier=...)"
)


def features_of(method: Method, output: Output) -> Tensor:
    """Return the input of the network's classifier, (S, B, F)."""
    if output.features is None:
        raise ValueError(NO_FEATURES.format(method.name))
    return output.features
