"""The trace of a run: the reports of the method's state after every step, next to the images of the step."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.state import Info

FROM_INFO = ("entropy", "trusted", "distance", "student_agreement", "anchor_agreement")  # fields of tribe's Info
COLUMNS = {"step": "i", **dict.fromkeys(FROM_INFO, "f")}  # kinds of numbers


class Trace(NamedTuple):
    """Columns with a value for each image of a stream: the values after the step in which the image came."""

    step: Tensor  # (T,) int64, the batch that the image came in, from 1
    entropy: Tensor  # (T,) float32, the mean entropy of the batch's predictions, as a share of log K
    trusted: Tensor  # (T,) float32, the share of the batch that the method learned from
    distance: Tensor  # (T,) float32, how far the affine parameters have moved, relative to the norm of the source's
    student_agreement: Tensor  # (T,) float32, the share of images that teacher and student classify the same; else 1
    anchor_agreement: Tensor  # (T,) float32, the same of teacher and anchor

    def steps(self) -> "Trace":
        """Return one row for each step."""
        last = torch.ones_like(self.step, dtype=torch.bool)
        last[:-1] = self.step[1:] != self.step[:-1]
        return Trace(*(column[last] for column in self))

    def damage(self, images: int) -> str | None:
        """Return why no run of so many images has written such columns; None for sound ones."""
        lengths = {len(column) for column in self}
        return None if lengths == {images} else f"its trace has {sorted(lengths)} rows; expected {images}"


def look(state: Any, step: int) -> dict[str, Tensor] | None:
    """Return the columns' values after a step, (S,) each; None if the state has no report. Waits for the device."""
    info = getattr(state, "info", None)
    if not isinstance(info, Info):
        return None
    values = torch.stack([getattr(info, name).float() for name in FROM_INFO]).cpu()  # one copy from the device
    return {"step": torch.full(values.shape[1:], step), **dict(zip(FROM_INFO, values, strict=True))}
