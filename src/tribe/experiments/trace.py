"""The trace of a run: what the method's state said of itself after every step, next to the images of the step."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.state import Info
from tribe.fields import document

FROM_INFO = ("entropy", "trusted", "distance", "student_agreement", "anchor_agreement")  # fields of tribe's Info
COLUMNS = {"step": "i", **dict.fromkeys(FROM_INFO, "f")}  # kinds of numbers


class Trace(NamedTuple):
    """Columns with a value for each image of a stream: the values after the step in which the image came."""

    step: Tensor
    entropy: Tensor
    trusted: Tensor
    distance: Tensor
    student_agreement: Tensor
    anchor_agreement: Tensor

    def steps(self) -> "Trace":
        """One row for each step."""
        last = torch.ones_like(self.step, dtype=torch.bool)
        last[:-1] = self.step[1:] != self.step[:-1]
        return Trace(*(column[last] for column in self))

    def damage(self, images: int) -> str | None:
        """Why no run of so many images has written such columns; None for sound ones."""
        lengths = {len(column) for column in self}
        return None if lengths == {images} else f"its trace has {sorted(lengths)} rows; expected {images}"


document(
    Trace,
    step="(T,) int64, the batch that the image came in, from 1; -1 where an older version of tribe played it.",
    entropy="(T,) float32, the mean entropy of the batch's predictions, as a share of log K.",
    trusted="(T,) float32, the share of the batch that the method learned from.",
    distance="(T,) float32, how far the affine parameters have moved, relative to the norm of the source's.",
    student_agreement="(T,) float32, the share of images that teacher and student classify the same; 1 without them.",
    anchor_agreement="(T,) float32, the same of teacher and anchor.",
)


def unknown(images: int) -> dict[str, Tensor]:
    """The columns of images whose trace was not kept."""
    nan = torch.full((images,), torch.nan)
    return {"step": torch.full((images,), -1), **{name: nan.clone() for name in FROM_INFO}}


def look(state: Any, step: int) -> dict[str, Tensor] | None:
    """The columns' values after a step, (S,) each; None if the state has no report. Waits for the device."""
    info = getattr(state, "info", None)
    if not isinstance(info, Info):
        return None
    values = torch.stack([getattr(info, name).float() for name in FROM_INFO]).cpu()  # one copy from the device
    return {"step": torch.full(values.shape[1:], step), **dict(zip(FROM_INFO, values, strict=True))}
