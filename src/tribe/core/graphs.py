"""A method's whole step as one launch: recorded in CUDA graphs for one shape of batch, then replayed.

A CUDA graph replays thousands of small launches at once, but always on the memory it was recorded with. So two graphs
alternate over two states in static memory: one reads state 0 and writes state 1, the other the reverse, and no state is
copied between steps. Images are copied into static memory; a smaller batch is padded with images that are not `valid`.
A larger one is recorded anew, rounded up to a power of two, so that a handful of recordings serves batches of all
sizes. The steps of a recording are discarded, which affects no stream: a step is pure.

Segments: a step may need a decision of the host midway, such as which images enter a memory. The method then calls the
functions before and after the decision through `segment`, and each of them is captured by itself.

    prediction = segment(self._predict, net, state, x, valid)
    ...                                                     # the host decides
    state = segment(self._learn, net, state, memory)
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tribe.core import kernels
from tribe.core.augment import Augment
from tribe.core.backbone import Backbone
from tribe.core.context import hold
from tribe.core.kernels import Switch
from tribe.core.precision import deterministic
from tribe.core.state import clone, copy_missing, flatten, leaves

T = TypeVar("T")
Work = Callable[[], None]
Recorder = Callable[[Work], Work]  # records work on static memory; the result repeats it
SegmentRunner = Callable[[Callable[..., Any], tuple[Any, ...]], Any]  # runs a function with these arguments

SHAPES = 8  # shapes of images that "auto" records before it gives up: recording each costs more than it saves
WARM_UP = 3  # eager steps before a recording: libraries choose algorithms and allocate, kernels are compiled
SIDE_PRIORITY = -1  # high: the launches of the side stream are short, and must fit between those of the network

_segment_runner: ContextVar[SegmentRunner | None] = ContextVar("tribe_segments", default=None)
_side_streams: dict[torch.device, torch.cuda.Stream] = {}
_recording = threading.RLock()  # torch records one graph at a time in a process


def capture_refusal(method: Any, device: torch.device) -> str | None:
    """Return why the steps of a method cannot be captured, or None."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device; the network is on {device.type}"
    if method.capture == "never":
        return f"{method.name} cannot be captured in a CUDA graph: the host reads values in the middle of its step"
    if not isinstance(getattr(method, "augment", None), Augment | None):
        return f"{method.name} has a custom augment=, which may read values; only tribe.Augment can be captured"
    return None


@functools.cache
def _warn_without_kernels(reason: str) -> None:
    message = f"{reason}: steps on a GPU take several times as long. Set TRIBE_KERNELS=off to silence this warning"
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class Steps:
    """Takes a method's steps on a network, captured in CUDA graphs if that is requested and possible.

    The network must not be changed afterwards: a recording uses the addresses of its weights. Call `use` if it moves.
    ``graphs``: True captures, or raises with the reason; "auto" captures where it can; False never captures.
    """

    capture_disabled_reason: str | None  # why steps are taken one launch at a time; None: they are captured

    def __init__(self, method: Any, net: Backbone, graphs: Switch = "auto", deterministic: bool = False) -> None:
        if graphs not in (True, False, "auto"):
            raise ValueError(f"graphs is True, False or 'auto'; got {graphs!r}")
        self.method, self.graphs, self.deterministic = method, graphs, deterministic
        self.use(net)
        if self.graphs is True and self.capture_disabled_reason is not None:
            raise self._not_captured()

    def use(self, net: Backbone) -> None:
        """Go on with this network, which may have moved; drop the recordings."""
        self.net = net
        if net.device.type == "cuda" and kernels.missing is not None and kernels.mode() is not False:
            _warn_without_kernels(kernels.missing)
        self._captured: Captured | CapturedSegments | None = None
        never = "graphs=False" if self.graphs is False else None
        self.capture_disabled_reason = never or capture_refusal(self.method, self.net.device)

    def _not_captured(self) -> ValueError:
        reason = self.capture_disabled_reason
        return ValueError(f"{reason}. With graphs='auto' its steps are taken one launch at a time")

    def __call__(self, state: Any, x: Tensor, valid: Tensor | None = None, retired: Any = None) -> tuple[Tensor, Any]:
        """Step as `Method.step` does. The state that a captured step returns is valid until the step after the next."""
        if self.graphs is True and self.capture_disabled_reason is not None:
            raise self._not_captured()  # the network has moved to a device without graphs
        on_its_device = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()  # where kernels launch
        with on_its_device, deterministic() if self.deterministic else contextlib.nullcontext():
            return kernels.or_without(lambda: self._step(state, x, valid, retired))

    def _step(self, state: Any, x: Tensor, valid: Tensor | None, retired: Any) -> tuple[Tensor, Any]:
        failure = None
        if self.capture_disabled_reason is None and x.shape[1]:
            try:
                return self._step_captured(state, x, valid)
            except Exception as error:  # the network is the caller's, and may raise anything
                if self.graphs is True:
                    raise
                failure = f"the step could not be captured in a CUDA graph ({type(error).__name__}: {error})"
            # Here the error is gone, and with its traceback the memory of the recording, which a step may need.
            self._captured = None
            torch.cuda.empty_cache()
        # A step is pure: this one starts from the same state, and raises what is wrong with the images themselves.
        result: tuple[Tensor, Any] = self.method.step(self.net, state, x, valid, retired)
        if failure is not None:
            self._give_up(failure)
            warnings.warn(f"{failure}; it is taken one launch at a time", RuntimeWarning, stacklevel=2)
        return result

    def _step_captured(self, state: Any, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Any]:
        if self._captured is None:
            whole = self.method.capture == "whole"
            self._captured = (Captured if whole else CapturedSegments)(self.method, self.net)
        result = self._captured.step(state, x, valid)
        if self._captured.settings > SHAPES and self.graphs == "auto":
            self._give_up(f"images had more than {SHAPES} shapes or precisions, and each needs a recording")
        return result

    def _give_up(self, reason: str) -> None:
        self.capture_disabled_reason, self._captured = reason, None

    def __reduce__(self) -> Any:
        return type(self), (self.method, self.net, self.graphs, self.deterministic)  # without the recordings


class Captured:
    """A method's steps in two graphs over two static states, for the shape of the last batch.

    ``record`` makes a `Recorder` for a device; by default it records CUDA graphs.
    """

    def __init__(self, method: Any, net: Backbone, record: Callable[[torch.device], Recorder] | None = None) -> None:
        self.method, self.net = method, net
        self._record = record or cuda_graphs
        self.recorded = self.settings = 0  # recordings so far, and how many of them were not for a larger batch alone
        self._setting: Any = None  # everything that the recording depends on, apart from the number of images
        self._batch = 0  # images of a stream in the recording

    def _must_record(self, x: Tensor) -> bool:
        """Return whether a batch needs a recording; if so, set its size.

        The first is as large as its batch, so that batches of one size are not padded.
        """
        setting, batch = _setting(self.net, x), x.shape[1]
        if (new := self._setting != setting) or batch > self._batch:
            self._setting, self._batch = setting, batch if new else 1 << (batch - 1).bit_length()
            self.recorded += 1
            self.settings += new
            return True
        return False

    @torch.no_grad()
    def step(self, state: Any, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Step as `Method.step` does; ``state`` is copied into static memory, unless the last step returned it."""
        batch = x.shape[1]
        if self._must_record(x):
            self._capture(state, x)
        turn = next((i for i in (0, 1) if _same(self._states[i], state)), None)
        if turn is None:
            turn = 0
            copy_missing(state, self._states[0])
        self._x[:, :batch].copy_(x)
        self._valid[:, batch:].fill_(False)
        self._valid[:, :batch].copy_(valid) if valid is not None else self._valid[:, :batch].fill_(True)
        self._replay[turn]()
        assert self._logits is not None
        return self._logits[:, :batch].clone(), self._states[1 - turn]

    def _capture(self, state: Any, x: Tensor) -> None:
        """Record both directions for batches of this shape."""
        self._setting = None  # in case recording fails
        self._replay: list[Work] = []  # the memory of older ones may serve
        self._states, self._x = (clone(state), clone(state)), _pad(x, self._batch - x.shape[1])
        self._valid = _pad(torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), self._batch - x.shape[1])
        self._logits: Tensor | None = None
        record = self._record(x.device)
        self._replay = [record(lambda: self._work(0)), record(lambda: self._work(1))]
        self._setting = _setting(self.net, x)

    def _work(self, turn: int) -> None:
        old, spare = self._states[turn], self._states[1 - turn]
        logits, new = self.method.step(self.net, old, self._x, self._valid, spare)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        copy_missing(new, spare)


class CapturedSegments(Captured):
    """A method's steps with each of their segments recorded, for the shape of the last batch."""

    @torch.no_grad()
    def step(self, state: Any, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Step as `Method.step` does; no tensor that it returns is in static memory."""
        batch = x.shape[1]
        if self._must_record(x):
            self._recordings = Recordings(self._record(x.device))
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
        if short := self._batch - batch:
            x, valid = _pad(x, short), _pad(valid, short)
        with run_segments_with(self._recordings):
            logits, state = self.method.step(self.net, state, x, valid)
        return logits[:, :batch], state


class Recordings:
    """Runs functions on static memory: recorded at the first call with arguments of a kind, then replayed."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._recordings: dict[Any, tuple[Any, list[Any], Work]] = {}  # arguments and results, in static memory

    def __call__(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return ``work(*args)``."""
        # Of a tensor, a recording does not depend on the values.
        kinds = ((v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v for v in flatten(args))
        kind = work.__qualname__, *kinds
        if kind not in self._recordings:
            self._recordings[kind] = self._recorded(work, args)
        static, results, replay = self._recordings[kind]
        _copy_tensors(args, static)
        replay()
        return tree_map_only(Tensor, Tensor.clone, results[0])

    def _recorded(self, work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[Any], Work]:
        static: Any = tree_map_only(Tensor, Tensor.clone, args)
        results: list[Any] = []

        def run() -> None:
            done = work(*static)
            results[:] = results or [tree_map_only(Tensor, torch.empty_like, done)]
            _copy_tensors(done, results[0])

        return static, results, self._record(run)


def cuda_graphs(device: torch.device) -> Recorder:
    """Record work on a device as CUDA graphs that share their memory, as they never run at the same time."""
    with torch.cuda.device(device):
        # Always the same stream of this device. By default torch captures on a stream of the first device it used.
        pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(work: Work) -> Work:
        with _recording, torch.cuda.device(device):
            main, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            side.wait_stream(main)
            try:
                # If the capture fails, `torch.cuda.graph` leaves the thread on its stream, and this context does not.
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP):
                        work()
                    try:
                        # Capture this thread only: others may pin memory for the next batch at the same time.
                        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                            work()
                    except Exception as error:
                        # The end of a failed capture raises, too, and does not say why.
                        raise (error.__context__ or error) from None
            finally:
                main.wait_stream(side)  # before the memory of the work serves again
        return graph.replay

    return record


def _pad(x: Tensor, short: int) -> Tensor:
    """Copy a batch (S, B, ...), with ``short`` more images that are zero."""
    return nn.functional.pad(x, [0, 0] * (x.dim() - 2) + [0, short])


def _setting(net: Backbone, x: Tensor) -> tuple[Any, ...]:
    """Return everything that a recording depends on, apart from the number of images."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    backends: Any = torch.backends
    return (
        net.moves,
        x.device,
        x.dtype,
        len(x),
        x.shape[2:],
        autocast and torch.get_autocast_dtype(kind),
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        kernels.mode(),
    )


def _same(a: Any, b: Any) -> bool:
    return all(s is t for s, t in zip(leaves(a).values(), leaves(b).values(), strict=True))


def _copy_tensors(values: Any, targets: Any) -> None:
    for value, target in zip(flatten(values), flatten(targets), strict=True):
        if isinstance(target, Tensor):
            target.copy_(value)


def segment(work: Callable[..., T], *args: Any) -> T:
    """Return ``work(*args)``, as one launch while a step is captured.

    ``work`` is a pure function of tensors, alone or in (named) tuples, and of hashable plain values.
    """
    run = _segment_runner.get()
    return work(*args) if run is None else run(work, args)


def run_segments_with(runner: SegmentRunner) -> contextlib.AbstractContextManager[None]:
    """Run segments with this function; stop on exit."""
    return hold(_segment_runner, runner)


class SideStream:
    """A branch next to the main work of a step, from its first call until `join`.

    What watches a step is hundreds of small launches. While a step is captured, they are recorded on a second stream,
    so that the graph has a branch that runs while the network computes. Otherwise the work is done at once. The results
    are the same. All tensors that the branch reads must live until `join`: memory that the main work frees is used
    again by the main work.
    """

    def __init__(self, device: torch.device) -> None:
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            if device not in _side_streams:  # made in the steps before a recording
                _side_streams[device] = torch.cuda.Stream(device, priority=SIDE_PRIORITY)
            self._side = _side_streams[device] if torch.cuda.is_current_stream_capturing() else None

    def __call__(self, work: Callable[[], T]) -> T:
        """Do work that may read everything computed so far; its result may be used after `join`."""
        if self._side is None:
            return work()
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            return work()

    def join(self) -> None:
        """Let the main work wait for the branch."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
