"""tribe: keep a deployed image classifier accurate while the world in front of it changes.

    import tribe

    model = tribe.adapt(net)            # net: a trained classifier with BatchNorm; it is copied, never changed
    for images in camera:               # (B, C, H, W) in [0, 1], no labels
        logits = model(images)          # predicts, then adapts
    model.save("camera.safetensors")    # later: model = tribe.load("camera.safetensors", net)
    plain = model.export()              # an ordinary nn.Module with the adapted statistics

The method is TRIBE (AAAI-24); read `tribe.methods.tribe` and `tribe.norms.balanced` first.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tribe import _openmp  # noqa: F401  first: it must run before torch loads

# isort: split
from tribe._version import __version__

if TYPE_CHECKING:
    from tribe import filters, health, methods, norms, onnx
    from tribe.core.augment import Augment
    from tribe.core.backbone import Backbone
    from tribe.core.calling import Normalize
    from tribe.core.state import Affine, Stats
    from tribe.data import corruptions, datasets, models, scenarios
    from tribe.diagnosis import Report, doctor
    from tribe.experiments import metrics
    from tribe.experiments.record import Record
    from tribe.experiments.runner import run
    from tribe.experiments.stream import Batch, Stream
    from tribe.health.calibration import Calibration, calibrate
    from tribe.health.guard import Guard
    from tribe.health.history import History, Snapshot
    from tribe.health.prepared import Prepared
    from tribe.health.report import StreamInfo
    from tribe.io.states import StateFileError
    from tribe.methods.bridged import bridge
    from tribe.preparing.preparing import prepare
    from tribe.streams.adapter import Adapter, adapt, load
    from tribe.streams.budget import Budget, Deadline
    from tribe.streams.fleet import Fleet, fleet
    from tribe.streams.shadow import Shadow

_HOMES = {  # everything is imported when it is used: `tribe.onnx` runs where there is no torch
    "tribe": ("core", "filters", "health", "io", "methods", "norms", "onnx", "streams"),
    "tribe.core.augment": ("Augment",),
    "tribe.core.backbone": ("Backbone",),
    "tribe.core.calling": ("Normalize",),
    "tribe.core.state": ("Affine", "Stats"),
    "tribe.data": ("corruptions", "datasets", "models", "scenarios"),
    "tribe.diagnosis": ("Report", "doctor"),
    "tribe.experiments": ("metrics",),
    "tribe.experiments.record": ("Record",),
    "tribe.experiments.runner": ("run",),
    "tribe.experiments.stream": ("Batch", "Stream"),
    "tribe.health.calibration": ("Calibration", "calibrate"),
    "tribe.health.guard": ("Guard",),
    "tribe.health.history": ("History", "Snapshot"),
    "tribe.health.prepared": ("Prepared",),
    "tribe.health.report": ("StreamInfo",),
    "tribe.io.states": ("StateFileError",),
    "tribe.methods.bridged": ("bridge",),
    "tribe.preparing": ("prepare",),
    "tribe.streams": ("Fleet", "fleet"),
    "tribe.streams.adapter": ("Adapter", "adapt", "load"),
    "tribe.streams.budget": ("Budget", "Deadline"),
    "tribe.streams.shadow": ("Shadow",),
}

__all__ = [
    "Adapter",
    "Affine",
    "Augment",
    "Backbone",
    "Batch",
    "Budget",
    "Calibration",
    "Deadline",
    "Fleet",
    "Guard",
    "History",
    "Normalize",
    "Prepared",
    "Record",
    "Report",
    "Shadow",
    "Snapshot",
    "StateFileError",
    "Stats",
    "Stream",
    "StreamInfo",
    "__version__",
    "adapt",
    "bridge",
    "calibrate",
    "corruptions",
    "datasets",
    "doctor",
    "filters",
    "fleet",
    "health",
    "load",
    "methods",
    "metrics",
    "models",
    "norms",
    "onnx",
    "prepare",
    "run",
    "scenarios",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a name of `_HOMES` when it is first used."""
        for home, names in _HOMES.items():
            if name in names:
                module = importlib.import_module(home)
                value = vars(module)[name] if name in vars(module) else importlib.import_module(f"{home}.{name}")
                globals()[name] = value
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
