"""What estimators of accuracy read: the predictions of one stream, image by image, and what the method reported."""

from typing import NamedTuple

from torch import Tensor


class Signals(NamedTuple):
    """The signals of N images of one stream, in order. No label is among them.

    A method reports shares for a whole batch; here every image of the batch carries them.
    """

    prediction: Tensor  # (N,) int64, the predicted class
    confidence: Tensor  # (N,), the probability of the predicted class
    tempered: Tensor  # (N,), the same after the temperature of the calibration
    batch: Tensor  # (N,) int64, the number of the batch that an image came in; batches are numbered in order
    student: Tensor | None = None  # (N,), share of the batch on which teacher and student agree; None: there are none
    anchor: Tensor | None = None  # (N,), the same of teacher and anchor
    source: Tensor | None = None  # (N,), whether the source network predicts the same class; it takes one more pass
    dropout: Tensor | None = None  # (N,), share of passes with dropout that disagree; it takes those passes
    spread: Tensor | None = None  # (N,), entropy in nats of the batch's mean prediction over the passes with dropout
