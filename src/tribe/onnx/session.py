"""Run a model file that adapts: streams by name on one ONNX Runtime session, without torch."""

import base64
import threading
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from tribe.io import json_files
from tribe.onnx import states
from tribe.onnx.running import Array, Held, ModelRunner
from tribe.onnx.states import FORMAT, ModelFileError, State, StateHeader

HEADER = {  # of a model file
    **{"method": str, "fingerprint": str, "classes": int, "frozen": bool, "shape": [int], "moving": [str]},
    **{"fields": {"observe": int}, "options": {"valid": bool, "uint8": bool, "frames": bool}},
    **{"state": {...: [(str, int, float, None)]}, "shapes": {...: [int]}},
}


class StreamSummary(NamedTuple):
    """The images that a stream of a session has seen."""

    images: int  # learned from so far
    skipped: int  # bad, or whose output was not finite
    steps: int
    entropy: float  # mean entropy of the last batch's predictions, as a share of log K
    frozen: bool


class StreamSnapshot(NamedTuple):
    """A copy of a stream's state, for `Session.restore`."""

    fingerprint: str
    state: State
    frozen: bool


class _Stream:
    """The state of a stream, replaced by each step."""

    def __init__(self, held: Held, frozen: bool) -> None:
        self.held, self.frozen, self.lock = held, frozen, threading.Lock()


class Session:
    """Streams that adapt on one model file.

    Args:
        path: a file that `tribe.onnx.export` wrote.
        threads: of each run; None: ONNX Runtime's choice.
        providers: of ONNX Runtime.
        tune: rewrite the graph for the processor of this machine, in a few seconds; it needs the package onnx, and
            pays on a CPU, most for large images and batches.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        threads: int | None = None,
        providers: list[str] | None = None,
        tune: bool = False,
    ) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no model file at {path}")
        self._runner = ModelRunner(path, threads, providers)
        metadata = self._runner.metadata
        if metadata.get("tribe.format") != FORMAT:
            raise ModelFileError(f"{path} is an ONNX file that tribe.onnx.export did not write")
        try:
            self.header: dict[str, Any] = json_files.parse(metadata["tribe.header"], HEADER, "its header")
            compact = load_tensors(base64.b64decode(metadata["tribe.start"]))
            shapes = self.header["shapes"]
            self._start = {name: np.broadcast_to(compact[name], shape) for name, shape in shapes.items()}
        except (KeyError, ValueError, SafetensorError) as error:
            raise ModelFileError(f"{path} is damaged: what tribe wrote into it cannot be read ({error})") from error
        self.moving: list[str] = self.header["moving"]  # the tensors of a state that steps change
        self.predictions = [name for name in self._runner.outputs if not name.startswith("next.")]
        self._prefix = self.moving[0].removesuffix("stats.mean")
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()  # of the names
        if tune:
            self._runner = self._tuned(path)

    def _tuned(self, path: str | PathLike[str]) -> ModelRunner:
        """Return a runner for the processor of this machine, if it computes the same of noise."""
        faster, draw, shape = self._runner.tuned(path), np.random.default_rng(0), self.header["shape"]
        for count in (1, 2 * self.header["fields"]["observe"] + 1):
            x = draw.random((count, *shape), dtype=np.float32)
            x = (255 * x).astype(np.uint8) if self.header["options"]["uint8"] else x
            if not self._runner.agrees(faster, self._held(self._start), self.given(x)):
                raise ModelFileError("tuning changes what the file computes on this machine: open it without")
        return faster

    def __call__(self, images: Array, valid: Array | None = None, stream: str = "default") -> Array:
        """Predict images (N, C, H, W), then adapt the stream, unless it is frozen: logits (N, K)."""
        return self.run(images, valid, stream)["logits"]

    def run(self, images: Array, valid: Array | None = None, stream: str = "default") -> dict[str, Array]:
        """Do as a call does; return ``source_logits`` too, if the file has them."""
        entry = self._entry(stream)
        with entry.lock:
            outputs, after = self._runner.step(entry.held, self.given(images, valid))
            entry.held = self._after(entry, after)
        return outputs

    def predict(self, images: Array, valid: Array | None = None, stream: str = "default") -> Array:
        """Predict without adapting; a time filter stays where it is."""
        return self._runner.step(self._entry(stream).held, self.given(images, valid))[0]["logits"]

    def _after(self, entry: _Stream, after: Held) -> Held:
        """Return the state after a step: of a frozen stream, only its time filter moves on."""
        before = entry.held
        if entry.frozen:
            filtered = {name: value for name, value in after.values.items() if name.startswith("filter.")}
            return Held(before.values | filtered, before.folded)
        if after.folded is not None:  # no image was observed
            return after
        pooled = (after.array(f"{self._prefix}pooled.{part}") for part in ("mean", "var"))
        return after if all(np.isfinite(t).all() for t in pooled) else before

    def _held(self, state: Mapping[str, Array]) -> Held:
        return self._runner.held(state, self.moving)

    def given(self, images: Array, valid: Array | None = None) -> dict[str, Array]:
        """Return the inputs of a run beside the state, checked."""
        given = {"images": self._checked(images)}
        if self.header["options"]["valid"]:
            given["valid"] = np.ones(len(images), bool) if valid is None else np.asarray(valid, bool)
        elif valid is not None:
            raise ValueError("this model file takes no marks of real images: export it with valid=True")
        return given

    def _checked(self, images: Array) -> Array:
        shape, kind = self.header["shape"], np.dtype(np.uint8 if self.header["options"]["uint8"] else np.float32)
        images = np.asarray(images)
        if images.ndim != 4 or list(images.shape[1:]) != shape or not len(images):
            raise ValueError(
                f"expected images of shape (N, {', '.join(map(str, shape))}), at least one; got {images.shape}"
            )
        if images.dtype != kind:
            if kind == np.uint8 or not np.issubdtype(images.dtype, np.floating):
                raise ValueError(f"expected images of {kind}; got {images.dtype}")
            images = images.astype(kind)
        return np.ascontiguousarray(images)

    # -- streams ------------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> list[str]:
        """The names of the streams that have begun."""
        return sorted(self._streams)

    def _entry(self, stream: str) -> _Stream:
        with self._lock:
            if stream not in self._streams:
                self._streams[stream] = _Stream(self._held(self._start), self.header["frozen"])
            return self._streams[stream]

    @property
    def differs(self) -> tuple[str, ...]:
        """The ways in which it differs from the prepared file that it was exported with."""
        return tuple(self.header.get("differs", ()))

    @property
    def state_bytes(self) -> int:
        """The memory of a stream's state."""
        return sum(t.nbytes for t in self._start.values())

    def state(self, stream: str = "default") -> State:
        """Return a copy of a stream's state, by the names of the library's."""
        return self._entry(stream).held.arrays()

    def info(self, stream: str = "default") -> StreamSummary:
        """Return what a stream has seen."""
        entry = self._entry(stream)
        held, at = entry.held, self._prefix
        images, skipped, steps = (
            int(held.array(at + name)[0]) for name in ("info.images", "info.skipped", "key.clock")
        )
        return StreamSummary(images, skipped, steps, float(held.array(f"{at}info.entropy")[0]), entry.frozen)

    def freeze(self, stream: str = "default") -> Self:
        """Stop adapting a stream: only predict."""
        self._entry(stream).frozen = True
        return self

    def unfreeze(self, stream: str = "default") -> Self:
        """Adapt a stream again."""
        self._entry(stream).frozen = False
        return self

    def reset(self, stream: str = "default") -> Self:
        """Return a stream to the state that the file was exported with."""
        entry = self._entry(stream)
        with entry.lock:
            entry.held = self._held(self._start)
        return self

    def remove(self, stream: str) -> Self:
        """Forget a stream."""
        with self._lock:
            self._streams.pop(stream, None)
        return self

    def snapshot(self, stream: str = "default") -> StreamSnapshot:
        """Return a copy of a stream for `restore`."""
        entry = self._entry(stream)
        with entry.lock:
            return StreamSnapshot(self.header["fingerprint"], entry.held.arrays(), entry.frozen)

    def restore(self, snapshot: StreamSnapshot, stream: str = "default") -> Self:
        """Return a stream to a snapshot of this session, or of another with the same network."""
        own = {name: t for name, t in snapshot.state.items() if name in self.header["state"]}
        self._check(own, snapshot.fingerprint, "the snapshot")
        entry = self._entry(stream)
        with entry.lock:
            entry.held, entry.frozen = self._held(snapshot.state), snapshot.frozen
        return self

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str], stream: str = "default") -> None:
        """Write the state of a stream, a file that `tribe.load` reads, too."""
        entry, header = self._entry(stream), self.header
        with entry.lock:
            state, frozen = entry.held.arrays(), entry.frozen
        own = {name: state[name] for name in header["state"]}  # the frame checks begin anew
        states.write(path, StateHeader(header["method"], header["fields"], 1, frozen, header["fingerprint"]), own)

    def load(self, path: str | PathLike[str], stream: str = "default") -> Self:
        """Go on with a state that `Session.save` or `tribe.Adapter.save` wrote."""
        saved, state = states.read(path)
        if saved.streams != 1:
            raise ModelFileError(f"{path} holds {saved.streams} streams; expected 1")
        if saved.method != self.header["method"]:
            raise ModelFileError(f"{path} was saved with method {saved.method!r}; here {self.header['method']!r} runs")
        for name in sorted(saved.fields.keys() | self.header["fields"].keys()):
            theirs, ours = saved.fields.get(name), self.header["fields"].get(name)
            if theirs != ours:
                raise ModelFileError(f"{path} was saved with {name}={theirs}; here {name}={ours}")
        self._check(state, saved.fingerprint, str(path))
        entry = self._entry(stream)
        with entry.lock:
            entry.held, entry.frozen = self._held({**self._start, **state}), saved.frozen
        return self

    def _check(self, state: State, fingerprint: str, source: str) -> None:
        """Raise unless a state fits this file."""
        if fingerprint != self.header["fingerprint"]:
            raise ModelFileError(f"{source} belongs to another network: its weights differ from those in this file")
        expected = self.header["state"]
        if wrong := sorted(state.keys() ^ expected.keys()):
            raise ModelFileError(f"{source} does not hold this method's state: {', '.join(wrong[:4])}")
        for name, (kind, low, high) in expected.items():
            t, shape = state[name], tuple(self.header["shapes"][name])
            if t.shape != shape or str(t.dtype) != kind:
                raise ModelFileError(f"{source}: {name} is {t.shape} {t.dtype}; expected {shape} {kind}")
            if not t.size or ("info" in name.split(".") and t.dtype.kind == "f"):
                continue
            if not np.isfinite(t).all():
                raise ModelFileError(f"{source} holds a state that is not finite ({name}), which can predict nothing")
            if not (-np.inf if low is None else low) <= t.min() <= t.max() <= (np.inf if high is None else high):
                raise ModelFileError(f"{source}: {name} is outside its bounds, {low:g} to {high:g}")
