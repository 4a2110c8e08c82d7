"""The verdict: does adapting help on this recording? By labels of frames that were drawn at random.

Where both models predict the same, adapting gains nothing, whatever the label is. So only frames on which they differ
are drawn, and the gain of the recording is their share times their mean gain: 1 where the adapted prediction is right,
-1 where the source's is, 0 where neither is.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tribe.fields import Share, check_fields, is_whole, require
from tribe.trial.betting import excludes_below, sum_interval

Answer = Literal["helps", "harms", "no difference that matters", "does not help", "undecided"]
ERROR = 0.005  # the share of trials whose interval may ever exclude the true gain: half of it says "helps" wrongly
MATTERS = 0.01  # the least gain or loss of accuracy that matters
SIMULATIONS = 100
FARTHEST = 1000  # labels that a simulation draws at most
PRIOR = 0.5  # of each kind of value, in frames, when what is to come is simulated


@dataclass(frozen=True)
class GainVerdict:
    """The gain of adapting by the labels, as numbers and words."""

    answer: Answer
    low: float  # the least gain of accuracy on the recording, as a share of its frames, at all times with 1 - error
    high: float  # the greatest
    estimate: float | None  # the gain that the labels show; None: frames differ, and none has a label
    frames: int  # of the recording
    differing: int  # frames on which the two differ
    labels: int  # of drawn frames, in the order of the draw
    better: int  # of them, frames on which the adapted prediction is right
    worse: int  # and those on which the source's is
    more: int | None  # labels that half of the simulations still need; None: decided, or more than 1,000
    most: int | None  # labels that nine of ten simulations need at most; None likewise
    error: Share  # the share of trials whose interval may ever exclude the true gain
    matters: Share  # the least gain or loss that matters

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def headline(self) -> str:
        """The answer as a short sentence, without a full stop."""
        low, high = 100 * self.low, 100 * self.high
        if self.answer == "helps":
            return f"Adapting helps by {_points(low, high)}"
        if self.answer == "harms":
            return f"Adapting harms by {_points(-high, -low)}"
        if self.answer == "no difference that matters":
            return "Adapting makes no difference that matters"
        if self.answer == "does not help":
            return "Adapting does not help"
        count = f"more than {FARTHEST:,}" if self.more is None else f"about {rounded(self.more):,}"
        many = self.most is None or rounded(self.most) > rounded(self.more or 0)
        close = f" ({rounded(self.most):,} if it is close)" if self.more is not None and self.most and many else ""
        if not self.labels:
            return f"{count.capitalize()} labels will tell whether adapting helps{close}"
        return f"Not decided: {count} labels more{close}"

    @property
    def words(self) -> str:
        """The verdict as a sentence with all numbers, without a full stop."""
        labels = f"{self.labels} label{'' if self.labels == 1 else 's'}"
        where, between = f"on these {self.frames:,} frames", f"between {100 * self.low:+.1f} and {100 * self.high:+.1f}"
        if self.answer in ("helps", "harms"):
            return f"{self.headline} {where} ({labels})"
        if self.answer in ("no difference that matters", "does not help"):
            return f"{self.headline} {where}: the gain is {between} points ({labels})"
        return f"{self.headline}; {where} the gain is {between} points ({labels})"

    def json(self) -> dict[str, Any]:
        """Return the fields and the words, as plain data."""
        return {**dataclasses.asdict(self), "headline": self.headline, "words": self.words}


def decide(
    gains: Sequence[int] | NDArray[np.integer[Any]],
    differing: int,
    frames: int,
    *,
    error: float = ERROR,
    matters: float = MATTERS,
    forecast: bool = True,
) -> GainVerdict:
    """Return the verdict after the labels of some frames. It is valid at any time: look after every label.

    Args:
        gains: Of the drawn frames, in the order of the draw: 1 where the label is the adapted prediction, -1 where it
            is the source's, 0 where it is neither. They must be drawn uniformly from all that differ.
        differing: The number of frames on which the two predictions differ.
        frames: The number of frames of the recording.
        error: The share of trials whose interval may ever exclude the true gain.
        matters: The least gain or loss of accuracy that matters, as a share.
        forecast: Whether to say how many labels more are needed, by simulation.

    >>> decide([], 0, 500).answer, decide([1] * 20, 400, 500).headline
    ('no difference that matters', 'Adapting helps by 29.0 to 80.0 points')
    """
    values = np.asarray(gains, np.int64).reshape(-1)
    require(bool(np.isin(values, (-1, 0, 1)).all()), "gains are -1, 0 or 1", gains)
    require(is_whole(frames, 1), "frames is the number of frames, at least 1", frames)
    sizes = is_whole(differing, 0) and len(values) <= differing <= frames
    require(sizes, f"differing is between the {len(values)} gains and the {frames} frames", differing)
    require(0 < error < 1, "error is between 0 and 1", error)
    require(matters >= 0, "matters is a share, not negative", matters)
    least, greatest = sum_interval(values, differing, error)
    bound = math.floor(matters * frames + 1e-9)  # the largest sum that does not matter
    if -bound <= least and greatest <= bound:
        answer: Answer = "no difference that matters"
    elif least > 0:
        answer = "helps"
    elif greatest < 0:
        answer = "harms"
    elif greatest <= bound:
        answer = "does not help"
    else:
        answer = "undecided"
    more, most = _missing(values, differing, bound, error) if forecast and answer == "undecided" else (None, None)
    estimate = 0.0 if not differing else None if not len(values) else float(values.mean()) * differing / frames
    return GainVerdict(
        answer,
        least / frames,
        greatest / frames,
        estimate,
        frames,
        differing,
        len(values),
        int((values > 0).sum()),
        int((values < 0).sum()),
        more,
        most,
        error,
        matters,
    )


def rounded(count: int) -> int:
    """Return a number of labels as people say it: 5, 30, 120.

    >>> rounded(3), rounded(27), rounded(118)
    (5, 30, 120)
    """
    step = 5 if count <= 50 else 10
    return step * max(1, -(-count // step))


def _missing(values: NDArray[np.int64], differing: int, bound: int, error: float) -> tuple[int | None, int | None]:
    """Return how many labels half, and nine tenths, of simulated continuations need to be decided; None: too many.

    Each draws its own shares of the three values by what was seen. The numbers are the same each time.
    """
    chance = np.random.default_rng(0)
    horizon = min(differing - len(values), FARTHEST)
    seen = PRIOR + np.array([(values == value).sum() for value in (-1, 0, 1)])
    shares = chance.dirichlet(seen, SIMULATIONS)[:, :, None].cumsum(1)  # (simulations, values, 1)
    drawn = chance.random((SIMULATIONS, 1, horizon))
    future = (drawn > shares[:, :2]).sum(1) - 1
    whole = np.concatenate([np.broadcast_to(values, (SIMULATIONS, len(values))), future], 1)

    def above(total: int) -> NDArray[np.bool_]:
        return excludes_below(whole, differing, total, error)

    def below(total: int) -> NDArray[np.bool_]:
        return excludes_below(-whole, differing, -total, error)

    decided = above(0) | below(0)
    if bound < differing:
        decided |= below(bound + 1)
    decided = decided[:, len(values) :]
    if horizon == differing - len(values):
        decided[:, -1] = True  # all are labelled: the gain is known
    needed = np.where(decided.any(1), decided.argmax(1) + 1.0, np.inf)
    numbers = np.quantile(needed, (0.5, 0.9), method="higher")
    half, most = (int(number) if np.isfinite(number) else None for number in numbers)
    return half, most


def _points(low: float, high: float) -> str:
    """Return a range of points: "2.1 to 9.3 points"."""
    return f"{low:.1f} points" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f} points"
