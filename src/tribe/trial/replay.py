"""Play recorded frames through a network and through the model that adapts it."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tribe.fields import is_whole, require
from tribe.health.estimate import WINDOW
from tribe.health.report import Health
from tribe.streams.adapter import Adapter, adapt
from tribe.trial.frames import Recording
from tribe.trial.trial import CANDIDATES, Columns, EstimatedAccuracy, EstimatedWindow, Trial
from tribe.trial.verdict import ERROR, MATTERS

Progress = Callable[[int, int | None], object]  # frames done, of so many; None: not known


class Probabilities(NamedTuple):
    """Probabilities (B, K) of a batch, and the seconds that they took."""

    values: Tensor
    seconds: float


def play(
    recording: Recording,
    adapter: Adapter,
    *,
    classes: Sequence[str] | None = None,
    batch: int = 64,
    seed: int = 0,
    error: float = ERROR,
    matters: float = MATTERS,
    progress: Progress | None = None,
) -> Trial:
    """Play a recording once, through the adapter and through its network, and return what they predict.

    Args:
        recording: What `tribe.trial.recordings.open_recording` returns.
        adapter: A fresh adapter of one stream; it learns from the frames.
        classes: Names of the classes; None: their numbers.
        batch: Frames at a time.
        seed: Of the order in which frames are drawn to be labelled.
        error: The share of trials whose verdict may ever be wrong.
        matters: The least gain or loss of accuracy that matters.
        progress: Called after every batch.

    Example:
        >>> import tempfile
        >>> from tribe.trial.recordings import open_recording
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/frames.npy", np.zeros((8, 3, 8, 8), np.uint8))
        ...     trial = play(open_recording(f"{folder}/frames.npy"), adapt(net))
        >>> trial.frames
        8
    """
    require(is_whole(batch, 1), "batch is a whole number, at least 1", batch)
    require(adapter.streams == 1, "a trial plays one stream; the adapter has more", adapter.streams)
    source = adapt(adapter.net, "source").export().eval()
    already = len(adapter.events)
    parts: list[dict[str, Any]] = []
    seconds: list[tuple[float, float, int]] = []
    windows: list[EstimatedWindow] = []
    done = 0
    for images in recording.batches(batch):
        x = images.to(adapter.device)
        plain = _ask_source(source, x)
        adapted = _ask_adapter(adapter, x)
        if not parts:
            count = plain.values.shape[1]
            names = tuple(classes or map(str, range(count)))
            require(len(names) == count, f"the network has {count} classes; expected as many names", len(names))
        parts.append(_columns(plain.values, adapted.values, images))
        seconds.append((plain.seconds, adapted.seconds, len(images)))
        done += len(images)
        if adapter.health is not None and done // WINDOW > (windows[-1].end if windows else 0) // WINDOW:
            windows.append(_window(done, adapter.health[0]))
        if progress is not None:
            progress(done, recording.length)
    if adapter.health is not None and (not windows or windows[-1].end < done):
        windows.append(_window(done, adapter.health[0]))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    timed = seconds[1:] or seconds  # the first batch also compiles and allocates
    images_timed = sum(count for *_, count in timed)
    return Trial(
        recording={**recording.spec(), "batch": batch, "pixels": list(recording.size or ())},
        network=adapter.net.fingerprint(),
        method=adapter.method.name,
        settings=settings_of(adapter),
        classes=names,
        columns=Columns(**joined, times=np.array(recording.times, np.int64)),
        windows=tuple(windows),
        events=tuple(adapter.events[already:]),
        seconds=(sum(s for s, *_ in timed) / images_timed, sum(a for _, a, _ in timed) / images_timed),
        remarks=(*recording.remarks, *_unknown(windows)),
        seed=seed,
        error=error,
        matters=matters,
    )


def settings_of(adapter: Adapter) -> str:
    """Return the settings of an adapter's method as text, by which the same ones are recognised."""
    return repr(adapter.method)


@torch.inference_mode()
def _ask_source(network: nn.Module, x: Tensor) -> Probabilities:
    start = time.perf_counter()
    logits: Tensor = network(x)
    values = logits.float().softmax(-1).cpu()  # waits for the device
    return Probabilities(_finite(values), time.perf_counter() - start)


def _ask_adapter(adapter: Adapter, x: Tensor) -> Probabilities:
    start = time.perf_counter()
    values = adapter(x).float().softmax(-1).cpu()
    return Probabilities(_finite(values), time.perf_counter() - start)


def _finite(values: Tensor) -> Tensor:
    """Replace what is not finite, of an unreadable frame, by equal probabilities."""
    return torch.where(values.isfinite().all(-1, keepdim=True), values, 1 / values.shape[-1])


def _columns(source: Tensor, adapted: Tensor, images: Tensor) -> dict[str, Any]:
    (s_confidence, s), (a_confidence, a) = source.max(-1), adapted.max(-1)
    readable = images.flatten(1).isfinite().all(1)
    differ = (s != a) & readable
    merit = (source + adapted)[differ]
    both = torch.stack((s[differ], a[differ]), 1).sort(1).values  # by number: a labeller cannot tell which is whose
    merit.scatter_(1, both, torch.tensor([[4.0, 3.0]]).expand(len(both), 2))  # the two predictions come first
    return {
        "source": s.numpy().astype(np.int32),
        "adapted": a.numpy().astype(np.int32),
        "source_confidence": s_confidence.numpy(),
        "adapted_confidence": a_confidence.numpy(),
        "readable": readable.numpy(),
        "candidates": merit.topk(min(CANDIDATES, merit.shape[1])).indices.numpy().astype(np.int32),
    }


def _window(end: int, health: Health) -> EstimatedWindow:
    """Return the estimates of the moment."""
    adapted = _estimate(health.accuracy, health.low, health.high)
    return EstimatedWindow(end, adapted, _estimate(health.source_accuracy, health.source_low, health.source_high))


def _unknown(windows: Sequence[EstimatedWindow]) -> list[str]:
    """Return a remark if the accuracy of some windows is not known."""
    bounds = [window.adapted[1:] for window in windows if window.adapted is not None]
    if not (unknown := bounds.count((0.0, 1.0))):
        return []
    return [f"calibration saw no images like those of {unknown} of {len(bounds)} windows: their accuracy is not known"]


def _estimate(accuracy: float | None, low: float | None, high: float | None) -> EstimatedAccuracy | None:
    return None if accuracy is None or low is None or high is None else EstimatedAccuracy(accuracy, low, high)
