"""tribe: keep a deployed image classifier accurate while the world in front of it changes.

    import tribe

    model = tribe.adapt(net)            # net: a trained classifier with BatchNorm; it is copied, never changed
    for images in camera:               # (B, C, H, W) in [0, 1], no labels
        logits = model(images)          # predicts, then adapts
    model.save("camera.safetensors")    # later: model = tribe.load("camera.safetensors", net)
    plain = model.export()              # an ordinary nn.Module with the adapted statistics

The method is TRIBE (AAAI-24); read `tribe.methods.tribe` and `tribe.norms.balanced` first.
"""

from tribe import _openmp  # noqa: F401  first: it must run before torch loads

# isort: split
from tribe import corruptions, datasets, health, methods, models, norms, scenarios, time
from tribe._version import __version__
from tribe.adapter import Adapter, adapt, load
from tribe.diagnosis import Report, doctor
from tribe.engine.augment import Augment
from tribe.engine.backbone import Backbone
from tribe.engine.normalize import Normalize
from tribe.engine.state import Affine, Stats
from tribe.fleet import Fleet, fleet
from tribe.health.calibration import Calibration, calibrate
from tribe.health.guard import Guard
from tribe.health.history import History
from tribe.health.snapshots import Snapshot, StreamInfo
from tribe.lab import metrics
from tribe.lab.record import Record
from tribe.lab.runner import run
from tribe.lab.stream import Batch, Stream
from tribe.storage.states import StateFileError

__all__ = [
    "Adapter",
    "Affine",
    "Augment",
    "Backbone",
    "Batch",
    "Calibration",
    "Fleet",
    "Guard",
    "History",
    "Normalize",
    "Record",
    "Report",
    "Snapshot",
    "StateFileError",
    "Stats",
    "Stream",
    "StreamInfo",
    "__version__",
    "adapt",
    "calibrate",
    "corruptions",
    "datasets",
    "doctor",
    "fleet",
    "health",
    "load",
    "methods",
    "metrics",
    "models",
    "norms",
    "run",
    "scenarios",
    "time",
]
