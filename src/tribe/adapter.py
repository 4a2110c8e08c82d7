"""The thin stateful shell: ``model = tribe.adapt(net); y = model(x)``.

Everything that computes lives in pure methods; the adapter holds the state, checks what comes in, and replaces the
state, in one place, after a step has succeeded. So an error on the way leaves it as it was. Threads take turns: each
call finds the state as the one before it left it.
"""

import copy
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from os import PathLike
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from tribe import methods
from tribe.engine.backbone import Backbone
from tribe.engine.graphs import Steps, Switch
from tribe.engine.model_copy import deepcopy_module
from tribe.engine.screening import PROBABILITIES, are_probabilities, sound
from tribe.engine.state import Store, clone, digest, leaves, rebuild, select, tree_map
from tribe.fields import is_whole, require
from tribe.methods import Method
from tribe.methods.base import check_classes, check_fits, screen
from tribe.methods.encoding import method_for_file, method_from_file
from tribe.norms.batch import PerBatch
from tribe.norms.frozen import Frozen
from tribe.storage import states
from tribe.storage.states import Saved

NOT_EXPORTED = (
    "{0} cannot be exported as an ordinary module that predicts what it predicts, because {0} {1}. Keep the adapter in "
    "its place: freeze() stops it from adapting, save() and tribe.load() carry it elsewhere"
)


class StreamInfo(NamedTuple):
    """What one stream is doing, in plain numbers."""

    images: int  # images learned from so far
    skipped: int  # images to learn from that were bad, or ended in what is no number: they touched nothing
    poisoned: tuple[int, ...]  # positions of bad images in the last batch, learned from or only predicted
    trusted: float  # share of the last batch that was trusted; 1 where a method does not choose, or not learn
    entropy: float  # mean entropy of the last predictions, as a share of log K: 0 is sure, 1 is uniform
    distance: float  # how far the affine parameters that predict have moved, relative to the norm of the source's
    steps: int  # batches learned from
    frozen: bool


class Snapshot(NamedTuple):
    """A copy of an adapter's state, to go back to, and whose it is."""

    method: Method
    state: Any
    net: Backbone  # itself, not a copy: a hash of its weights for every snapshot would cost more than the state's copy
    frozen: bool


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def adapt(
    model: nn.Module | Backbone,
    method: str | Method = "tribe",
    *,
    classes: int | None = None,
    streams: int = 1,
    seed: int = 0,
    graphs: Switch = "auto",
    deterministic: bool = False,
    **fields: Any,
) -> "Adapter":
    """Make a trained classifier adapt while it predicts.

    Args:
        model: a classifier with normalisation layers; it is copied, never changed. It takes images in [0, 1] and
            normalises them itself (see `tribe.Normalize`). A `Backbone` is taken as it is.
        method: a name from ``tribe.methods.names()``, or a method.
        classes: the number of classes; read from the last Linear layer if not given.
        streams: how many independent streams (cameras) adapt on this one network.
        seed: seed of the first stream; stream i has seed + i.
        graphs: "auto" takes a step as one launch on a GPU where it can (see `tribe.engine.graphs`: the first
            batch of a shape takes as long as eight); True insists on it, False takes one launch at a time.
        deterministic: the same bits every time on a GPU too, at some cost in speed; torch warns of an operation of the
            network for which it has no such algorithm.
        fields: the method's hyper-parameters.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    >>> adapter = adapt(net, streams=2)
    >>> adapter(torch.rand(2, 16, 3, 8, 8)).shape
    torch.Size([2, 16, 4])
    >>> adapter.info[1].images
    16
    """
    net = model if isinstance(model, Backbone) else Backbone(model)
    if isinstance(method, Method):
        if fields:
            raise TypeError(
                f"the method is built already: tribe.methods.create({method.name!r}, ...) sets {', '.join(fields)}"
            )
        return Adapter(
            net, method, streams=streams, seed=seed, classes=classes, graphs=graphs, deterministic=deterministic
        )
    methods.get(method)  # an unknown name is the first thing to say
    built = methods.create(method, classes=_count_classes(net, classes), **fields)
    return Adapter(net, built, streams=streams, seed=seed, graphs=graphs, deterministic=deterministic)


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def load(
    path: str | PathLike[str],
    model: nn.Module | Backbone,
    *,
    graphs: Switch = "auto",
    deterministic: bool = False,
    **fields: Any,
) -> "Adapter":
    """Resume from a file written by `Adapter.save`, on the model it was saved from.

    What cannot be saved (a custom ``augment=``) is asked for again and given as a field; source knowledge whose file
    has moved is given as ``knowledge=``. ``graphs`` and ``deterministic`` are as for `adapt`: a file knows nothing of
    the machine it is used on.
    """
    saved = states.read(path)
    net = model if isinstance(model, Backbone) else Backbone(model)
    method = method_from_file(path, saved.method, saved.fields, fields)
    states.check_fingerprint(path, saved.fingerprint, net)
    adapter = Adapter(net, method, streams=saved.streams, seed=0, graphs=graphs, deterministic=deterministic)
    states.check_tensors(path, saved.tensors, leaves(adapter.state))
    adapter.adapted.load_state_dict(saved.tensors)
    if saved.frozen:
        adapter.freeze()
    return adapter


class _Turn:
    """A lock that its holder may take again; a copy of it is another lock, so that what has one can be copied.

    So is a forked process's: whoever held it there is not there any more.
    """

    all: ClassVar[weakref.WeakSet["_Turn"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.all.add(self)

    @classmethod
    def renew(cls) -> None:
        """Free every lock."""
        for turn in cls.all:
            turn._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return type(self), ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Turn.renew)

P = ParamSpec("P")
R = TypeVar("R")


def _in_turn(method: Callable[Concatenate["Adapter", P], R]) -> Callable[Concatenate["Adapter", P], R]:
    """Let one thread at a time into the methods of an adapter that touch its state."""

    @wraps(method)
    def alone(self: "Adapter", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn:
            return method(self, *args, **kwargs)

    return alone


class Adapter(nn.Module):
    """A classifier that adapts while it predicts. Made by `adapt`.

    Calling it predicts, then adapts. Images are (B, ...) for one stream or (S, B, ...) for S; logits come back in the
    same layout. A bad image (one that is not finite or far too large, see `tribe.engine.screening`) gets equal logits
    (the uniform prediction) and touches nothing; `info` says where it was in the last batch and, while the adapter
    learns, how many there were. Calls from several threads are taken one by one.
    """

    def __init__(
        self,
        net: Backbone,
        method: Method,
        *,
        streams: int = 1,
        seed: int = 0,
        classes: int | None = None,
        graphs: Switch = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self._turn = _Turn()
        require(is_whole(streams, least=1), "streams is how many independent streams adapt, at least 1", streams)
        if not is_whole(seed):
            raise TypeError(f"seed is an int; got {seed!r}")
        count, start = int(streams), int(seed)
        known = _count_classes(net, classes if classes is not None else method.classes)
        if method.classes is not None and method.classes != known:
            raise ValueError(f"the method was built for {method.classes} classes; the network has {known}")
        check_fits(net, method)
        _check_source(net)
        self.net = net
        self.method = method
        self.streams = count
        self.classes = known
        self._frozen = False
        self._warned = self._looked = False  # at the range of the images, and at what the network makes of them
        self._poisoned: Tensor | None = None  # (S, B), of the last batch
        self._retired: Any = None  # the state before this one
        self._steps = Steps(method, net, graphs, deterministic)
        self._place = _place(net)  # of the state
        self.adapted = Store(method.init(net, count, start))

    # -- predicting and learning ------------------------------------------------------------------------------------

    @_in_turn
    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict, then adapt (unless frozen).

        ``valid``, (B,) for one stream or (S, B) for S, marks the images that there are: where a camera has fewer than
        the others, or none, the rest is padding. It gets equal logits, touches nothing and is not counted.
        """
        return self._run(x, valid, learn=not self._frozen)

    @_in_turn
    def predict(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict without adapting: the state stays as it is."""
        return self._run(x, valid, learn=False)

    def learn(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Adapt to images without asking for their prediction. A frozen adapter learns nothing."""
        self(x, valid)

    def _run(self, x: Tensor, valid: Tensor | None, learn: bool) -> Tensor:
        # torch.inference_mode forbids the gradients that adaptation needs, even to code that asks for them.
        with torch.inference_mode(False), torch.no_grad():
            images, valid, squeeze = self._images(x, valid)
            good = sound(images)
            poisoned = ~good if valid is None else valid & ~good
            if images.shape[1] == 0:
                logits = images.new_zeros(self.streams, 0, self.classes)
            elif learn:
                old = self.state
                logits, state = self._steps(old, images, valid, self._retired)
                self._check_logits(logits, good)
                self._put(state)
                self._retired = old  # its memory serves the step after next; a step that fails has touched no other
            else:
                logits = self.method.predict(self.net, self.state, images, valid)
                self._check_logits(logits, good)
            self._poisoned = poisoned
            return logits[0] if squeeze else logits

    def _put(self, state: Any) -> None:
        """Replace the state: the one place where an adapter changes."""
        self._poisoned = self._retired = None  # first: a step may have written the state into the retired one's memory
        self.adapted.put(state)

    # -- life cycle ---------------------------------------------------------------------------------------------------

    @property
    @_in_turn
    def state(self) -> Any:
        """The method's state, a named tuple of tensors, good until the next call; `snapshot` gives a copy to keep."""
        return self.adapted.get()

    @property
    def eager_because(self) -> str | None:
        """Why steps are not captured in CUDA graphs; None: they are."""
        return self._steps.eager_because

    @property
    @_in_turn
    def info(self) -> list[StreamInfo]:
        """What each stream is doing."""
        state = self.state
        columns = [t.tolist() for t in state.info]
        steps = state.key.clock.tolist()
        none: list[list[int]] = [[]] * self.streams
        bad = none if self._poisoned is None else [row.nonzero().flatten().tolist() for row in self._poisoned]
        return [
            StreamInfo(images, skipped, tuple(bad[i]), trusted, entropy, distance, steps[i], self._frozen)
            for i, (images, skipped, trusted, entropy, distance) in enumerate(zip(*columns, strict=True))
        ]

    @_in_turn
    def freeze(self) -> "Adapter":
        """Predict only, from now on."""
        self._frozen = True
        return self

    @_in_turn
    def unfreeze(self) -> "Adapter":
        """Adapt again."""
        self._frozen = False
        return self

    @_in_turn
    @torch.inference_mode(False)
    def reset(self, stream: int | None = None) -> "Adapter":
        """Go back to the source: all streams, or one."""
        fresh = self.method.init(self.net, self.streams, int(self.state.key.seed[0]))
        if stream is not None:
            chosen = torch.arange(self.streams, device=self.net.device) == self._stream(stream)
            fresh = select(chosen, fresh, self.state)
        self._put(fresh)
        return self

    @_in_turn
    @torch.inference_mode(False)
    def snapshot(self) -> Snapshot:
        """A copy of the state, to `restore` later."""
        return Snapshot(self.method, clone(self.state), self.net, self._frozen)

    @_in_turn
    @torch.inference_mode(False)
    def restore(self, snapshot: Snapshot) -> "Adapter":
        """Go back to a snapshot of this adapter, or of another with the same method and network; frozen if it was."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore takes what snapshot() gave; got {type(snapshot).__name__}")
        if snapshot.method != self.method:
            raise ValueError(f"the snapshot was taken with {snapshot.method}; this adapter runs {self.method}")
        if len(snapshot.state.key.seed) != self.streams:
            raise ValueError(
                f"the snapshot is of another number of streams: {len(snapshot.state.key.seed)}; this adapter has "
                f"{self.streams}"
            )
        if snapshot.net is not self.net and snapshot.net.fingerprint() != self.net.fingerprint():
            raise ValueError(
                "the snapshot was taken on another network: its weights differ from this one's. Restore it to an "
                "adapter of the network it was taken on, with the same weights and precision"
            )
        self._put(tree_map(_copy_like, snapshot.state, self.state))  # the adapter may have changed its precision since
        self._frozen = snapshot.frozen
        return self

    @_in_turn
    def digest(self) -> str:
        """A hash of the state: equal digests, equal states."""
        return digest(self.state)

    @_in_turn
    def save(self, path: str | PathLike[str]) -> None:
        """Write the state, the method and a fingerprint of the source model to a safetensors file, atomically.

        A state that is not finite is refused, and a file that is there stays.
        """
        fields, fingerprint = method_for_file(self.method), self.net.fingerprint()
        states.write(path, Saved(self.method.name, fields, self.streams, self._frozen, fingerprint, leaves(self.state)))

    @_in_turn
    @torch.inference_mode(False)
    def state_dict(self, /, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """As for any module, with a copy of the adapted state: its own memory is used again by later steps."""
        named = super().state_dict(*args, prefix=prefix, **kwargs)
        named |= {name: t.clone() for name, t in named.items() if name.startswith(f"{prefix}adapted.")}
        return named

    @_in_turn
    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module, except that a state dict that does not fit is refused before anything is copied.

        So is an adapted state that is not finite, as by `load`. It is copied even with ``assign``: its memory is used
        again by later steps. Other weights than the network has go into a copy of it, as other adapters may share it.
        """
        own = super().state_dict()
        wrong = sorted(own.keys() ^ state_dict.keys()) if strict else []
        shared = sorted(own.keys() & state_dict.keys())
        wrong += [k for k in shared if not isinstance(t := state_dict[k], Tensor) or t.shape != own[k].shape]
        if wrong:
            raise RuntimeError(
                f"the state dict is not of this network, method and number of streams: {', '.join(wrong[:4])} "
                "missing, unexpected, of another shape or no tensor. Nothing was loaded"
            )
        mine = "adapted."
        if lost := states.not_finite({k.removeprefix(mine): state_dict[k] for k in shared if k.startswith(mine)}):
            raise RuntimeError(
                f"the state dict holds a state that is not finite ({', '.join(lost[:4])}), which can predict nothing. "
                "Nothing was loaded"
            )
        theirs = "net."
        if any(not torch.equal(own[k], state_dict[k].to(own[k])) for k in shared if k.startswith(theirs)):
            weights = {k.removeprefix(theirs): t for k, t in state_dict.items() if k.startswith(theirs)}
            net = copy.deepcopy(self.net)
            net.load_state_dict(weights, strict, assign)
            _check_source(net)
            self.method.init(net)  # refuses a network that the method's source knowledge does not belong to
            self.net, self._steps = net, Steps(self.method, net, self._steps.graphs, self._steps.deterministic)
        named = leaves(self.state)
        named |= {k.removeprefix(mine): state_dict[k] for k in shared if k.startswith(mine)}
        self._put(tree_map(_copy_like, rebuild(self.state, named), self.state))
        return _IncompatibleKeys(sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys()))

    @_in_turn
    @torch.inference_mode(False)
    def export(self, stream: int | None = None) -> nn.Module:
        """A plain module with ordinary normalisation layers that predicts what `predict` predicts for a stream.

        Methods that normalise each batch with its own statistics (bn, tent) give BatchNorm layers that do the same.
        Methods whose prediction is more than a pass of a network (cotta, lame, petal, roid) or that normalise as no
        ordinary layer does (note) are refused.
        """
        if stream is None and self.streams > 1:
            raise ValueError(f"which of the {self.streams} streams? export(stream=0), say")
        if (more := self.method.more_than_a_pass) is not None:
            raise ValueError(
                NOT_EXPORTED.format(self.method.name, f"predicts with more than a pass of a network: {more}")
            )
        index = self._stream(stream or 0)
        chosen = self.method.deployed(self.net, self.state).stream(index)
        if type(chosen.norm) not in (Frozen, PerBatch):  # a rule made from one of them is another rule
            raise ValueError(
                NOT_EXPORTED.format(self.method.name, f"normalises as no ordinary layer does: {chosen.norm}")
            )
        frozen = chosen.stats if isinstance(chosen.norm, Frozen) else None
        return self.net.plain(chosen.affine, frozen, chosen.weights[0] if chosen.weights else None)

    @_in_turn
    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> "Adapter":
        return deepcopy_module(self, memo)

    @_in_turn
    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Adapter":
        self._retired = None  # of another device or precision, soon
        self._steps.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place = _place(self.net)
        return self

    def extra_repr(self) -> str:
        """The method and the number of streams."""
        return f"{self.method}, streams={self.streams}{', frozen' if self._frozen else ''}"

    # -- checks -------------------------------------------------------------------------------------------------------

    def _stream(self, index: int) -> int:
        number = index.item() if isinstance(index, Tensor) and index.numel() == 1 else index
        if not is_whole(number) or not -self.streams <= number < self.streams:
            raise IndexError(f"stream {index!r}: this adapter has streams 0 to {self.streams - 1}")
        return int(number) % self.streams

    def _images(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None, bool]:
        """Bring images into (S, B, ...) and ``valid`` into (S, B), or say what is wrong with them."""
        if not isinstance(x, Tensor):
            raise TypeError(f"expected a tensor of images; got {type(x).__name__}. For an array: torch.from_numpy(x)")
        if not x.is_floating_point():
            hint = "divide by 255: images.float() / 255" if x.dtype == torch.uint8 else "convert them: images.float()"
            raise TypeError(f"images are {x.dtype}; expected floating point in [0, 1]; {hint}")
        x = x.detach().as_subclass(Tensor).to(self.net.dtype)  # what a subclass means by it ends here
        if x.is_inference():
            x = x.clone()
        one = self.streams == 1 and not (self.net.rank and x.dim() == self.net.rank + 1 and x.shape[0] == 1)
        if one:
            x = x.unsqueeze(0)
        if x.dim() < 3 or x.shape[0] != self.streams:
            layout = "(B, ...)" if self.streams == 1 else f"({self.streams}, B, ...): one row of images a stream"
            raise ValueError(f"expected images {layout}; got {tuple(x.shape[1:] if one else x.shape)}")
        if x.device != self.net.device:
            raise ValueError(f"images are on {x.device}, the network on {self.net.device}: move one with .to()")
        self._check_together()
        valid = None if valid is None else self._mask(valid, x, one)
        if not self._warned and x.numel():
            self._check_range(x, valid)
        return x, valid, one

    def _mask(self, valid: Tensor, x: Tensor, one: bool) -> Tensor:
        """Bring ``valid`` into (S, B), or say what is wrong with it."""
        expected = tuple(x.shape[one:2])
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != expected:
            found = f"{valid.dtype} of shape {tuple(valid.shape)}" if isinstance(valid, Tensor) else repr(valid)
            raise ValueError(f"valid is a tensor of truths, one for each image, of shape {expected}; got {found}")
        valid = valid.to(x.device)
        return valid.unsqueeze(0) if one else valid

    def _check_together(self) -> None:
        """Refuse to run on a network that was moved or cast without this adapter's state."""
        if (place := _place(self.net)) != self._place:
            there, here = (f"on {device} in {dtype}" for device, dtype in (place, self._place))
            raise RuntimeError(
                f"the network is {there} by now, the state of this adapter {here}: the network, or another adapter "
                "that shares it, was moved or cast. Call .to() on this one, too"
            )

    def _check_range(self, x: Tensor, valid: Tensor | None) -> None:
        low, high = (v.item() for v in screen(x, valid)[0].aminmax())
        if x.device.type != "cpu":
            self._warned = True  # a look at the values waits for the device: the first batch only
        if low < -1e-3 or high > 1 + 1e-3:
            self._warned = True
            warnings.warn(_range_advice(low, high), UserWarning, stacklevel=_caller_level())

    def _check_logits(self, logits: Tensor, good: Tensor) -> None:
        if logits.shape[-1] != self.classes:
            raise ValueError(
                f"the network gives {logits.shape[-1]} classes; the adapter was made for {self.classes}, the outputs "
                f"of its layer {self.net.classifier!r}. Name the layer that classifies: "
                "tribe.adapt(tribe.Backbone(model, classifier=...))"
            )
        if not self._looked and self.method.output == "logits" and (kept := logits[good]).numel():
            self._looked = True  # at the first batch only: a look at the values waits for the device
            if are_probabilities(kept):
                warnings.warn(PROBABILITIES, UserWarning, stacklevel=_caller_level())


def _check_source(net: Backbone) -> None:
    if lost := net.not_finite():
        raise ValueError(
            f"the network's normalisation holds numbers that are not finite ({', '.join(lost[:4])}), and nothing can "
            "be learned beside them. Load its weights anew; a layer that it never calls may be an nn.Identity()"
        )


def _place(net: Backbone) -> tuple[torch.device, torch.dtype]:
    """Where a network keeps the source's normalisation, and in which precision; so is a state kept."""
    source: Tensor = net.origin.get().affine.weight
    return source.device, source.dtype


def _copy_like(t: Tensor, other: Tensor) -> Tensor:
    """A copy with the precision of another tensor, where that lies."""
    return t.detach().to(other, copy=True)


def _count_classes(net: Backbone, classes: int | None) -> int:
    check_classes(net, classes)
    known = classes if classes is not None else net.classes
    if known is None:
        raise ValueError("the number of classes cannot be read from the network: pass classes=")
    return known


def _caller_level() -> int:
    """The stack level of the caller's own line, past tribe and torch (`skip_file_prefixes` needs Python 3.12)."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("tribe", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def _range_advice(low: float, high: float) -> str:
    if high > 2 and low >= 0:
        cause = "they look like 0 to 255: divide by 255"
    elif low < 0:
        cause = (
            "they look normalised already: give images in [0, 1] and put the normalisation into the network, "
            "torch.nn.Sequential(tribe.Normalize(mean, std), net), because augmentation works on [0, 1]"
        )
    else:
        cause = "check how they are scaled"
    return f"images reach from {low:.3g} to {high:.3g}, outside [0, 1]; {cause}"
