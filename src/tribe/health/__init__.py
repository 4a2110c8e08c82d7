"""How well a stream does without labels, what goes wrong with it, what changed in an adapter, and the way back.

``tribe.adapt(net, health=True)`` watches: `Adapter.health` and `Adapter.events`. ``guard=True`` also acts. See
docs/health.md. ``history=True`` takes snapshots; ``rollback("2h")`` returns to one, and ``compare`` says which layers
and classes moved. See docs/deploying.md.
"""

from tribe.health.ages import Age, parse_age
from tribe.health.calibration import Calibration, calibrate
from tribe.health.changes import ClassChange, Comparison, LayerChange, StreamChange, compare_states
from tribe.health.estimate import Estimate, EstimateState, Estimator
from tribe.health.events import Event
from tribe.health.guard import Guard, Watch
from tribe.health.history import History, Kept, RolledBack
from tribe.health.recorder import Recorder
from tribe.health.snapshots import Snapshot, StreamInfo, check_snapshot, copy_like, describe_streams
from tribe.health.watch import Health

__all__ = [
    "Age",
    "Calibration",
    "ClassChange",
    "Comparison",
    "Estimate",
    "EstimateState",
    "Estimator",
    "Event",
    "Guard",
    "Health",
    "History",
    "Kept",
    "LayerChange",
    "Recorder",
    "RolledBack",
    "Snapshot",
    "StreamChange",
    "StreamInfo",
    "Watch",
    "calibrate",
    "check_snapshot",
    "compare_states",
    "copy_like",
    "describe_streams",
    "parse_age",
]
