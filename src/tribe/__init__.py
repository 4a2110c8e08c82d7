"""tribe: keep a deployed image classifier accurate while the world in front of it changes.

    import tribe

    model = tribe.adapt(net)            # net: a trained classifier with BatchNorm; it is copied, never changed
    for images in camera:               # (B, C, H, W) in [0, 1], no labels
        logits = model(images)          # predicts, then adapts
    model.save("camera.safetensors")    # later: model = tribe.load("camera.safetensors", net)
    plain = model.export()              # an ordinary nn.Module with the adapted statistics

The method is TRIBE (AAAI-24); read `tribe.methods.tribe` and `tribe.norms.balanced` first.
"""

__version__ = "0.1.0.dev0"

from tribe import corruptions, datasets, methods, metrics, models, norms, scenarios
from tribe.adapter import Adapter, Snapshot, StreamInfo, adapt, load
from tribe.augment import Augment
from tribe.backbone import Backbone
from tribe.doctor import Report, doctor
from tribe.files import StateFileError
from tribe.normalize import Normalize
from tribe.record import Record
from tribe.run import run
from tribe.state import Affine, Stats
from tribe.stream import Batch, Stream

__all__ = [
    "Adapter",
    "Affine",
    "Augment",
    "Backbone",
    "Batch",
    "Normalize",
    "Record",
    "Report",
    "Snapshot",
    "StateFileError",
    "Stats",
    "Stream",
    "StreamInfo",
    "adapt",
    "corruptions",
    "datasets",
    "doctor",
    "load",
    "methods",
    "metrics",
    "models",
    "norms",
    "run",
    "scenarios",
]
