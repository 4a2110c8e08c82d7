"""What estimators of accuracy read: the predictions of one stream, image by image, and what the method reported."""

from typing import NamedTuple

from torch import Tensor

from tribe.fields import document


class Signals(NamedTuple):
    """The signals of N images of one stream, in order. No label is among them.

    A method reports shares for a whole batch; here every image of the batch carries them.
    """

    prediction: Tensor
    confidence: Tensor
    tempered: Tensor
    batch: Tensor
    student: Tensor | None = None
    anchor: Tensor | None = None
    source: Tensor | None = None
    dropout: Tensor | None = None
    spread: Tensor | None = None


document(
    Signals,
    prediction="(N,) int64, the predicted class.",
    confidence="(N,), the probability of the predicted class.",
    tempered="(N,), the same after the temperature of the calibration.",
    batch="(N,) int64, the number of the batch that an image came in; batches are numbered in order.",
    student="(N,), share of the batch that teacher and student put in the same class; None: the method has none.",
    anchor="(N,), the same of teacher and anchor.",
    source="(N,), whether the source network predicts the same class; it takes one more pass.",
    dropout="(N,), share of passes with dropout whose class differs from the prediction; it takes those passes.",
    spread="(N,), entropy in nats of the batch's mean prediction over the passes with dropout.",
)
