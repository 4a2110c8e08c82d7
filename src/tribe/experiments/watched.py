"""Estimates and alarms of a watched or guarded method while a stream was played, image by image."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.health.alarms import KINDS
from tribe.methods import AnyMethod, Pipeline

COLUMNS = {"accuracy": "f", "low": "f", "high": "f", "alarms": "i"}  # kinds of numbers
MOST_KINDS = 62  # of alarms: a bit each


class Watched(NamedTuple):
    """Columns with a value for each image of a stream, of when its batch was done."""

    accuracy: Tensor  # (T,) float32, the estimated accuracy of the last 500 images; NaN without a calibration
    low: Tensor  # (T,) float32, the lower end of its 90 % interval
    high: Tensor  # (T,) float32, its upper end
    alarms: Tensor  # (T,) int64, which alarms were on: a bit for each of `kinds`
    kinds: tuple[str, ...]  # the names of the alarms

    def beginnings(self) -> list[tuple[int, str]]:
        """Return image and kind of every alarm that began."""
        began = []
        for bit, kind in enumerate(self.kinds):
            on = (self.alarms >> bit & 1).bool()
            begins = on & ~torch.cat((torch.zeros(1, dtype=torch.bool), on[:-1]))
            began += [(image, kind) for image in begins.nonzero()[:, 0].tolist()]
        return sorted(began)

    def damage(self, images: int) -> str | None:
        """Return why no run of so many images has written such columns; None for sound ones."""
        if {len(getattr(self, name)) for name in COLUMNS} != {images}:
            return f"its columns of health do not have {images} rows each"
        if len(self.kinds) > MOST_KINDS:
            return f"it names {len(self.kinds)} kinds of alarms; expected at most {MOST_KINDS}"
        for name in ("accuracy", "low", "high"):
            column = getattr(self, name)
            if bool((column < 0).any() | (column > 1).any()):
                return f"its column {name} holds {column.min()} to {column.max()}; expected shares"
        if len(self.alarms) and (self.alarms.min() < 0 or self.alarms.max() >= 2 ** len(self.kinds)):
            return f"its column alarms holds {self.alarms.min()} to {self.alarms.max()}; expected a bit for each kind"
        return None


def look(method: AnyMethod, net: Backbone, state: Any) -> dict[str, Tensor] | None:
    """Return the columns' values now, (S,) each; None if nothing watches. Waits for the device."""
    if not isinstance(method, Pipeline) or method.guard is None:
        return None
    watcher, watch = method.guard.watcher(net, method.method), state.guard.watch
    read = watcher.estimator.read(watch.estimate)
    values = torch.stack((read.accuracy, read.low, read.high)).float().cpu()
    if watcher.normal is None:  # an estimate needs a calibration
        values = torch.full_like(values, math.nan)
    bits = 2 ** torch.arange(len(KINDS))
    alarms = (watch.alarms.on.cpu() * bits).sum(1)
    return dict(zip(COLUMNS, (*values, alarms), strict=True))
