"""Watch a stream while a method adapts to it: alarms, the estimated accuracy, and what the stream shows.

A `Watcher` is a pure step over rows that `tribe.health.guard` runs around a method.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.bounds import COUNT, NOT_NEGATIVE
from tribe.core.state import tree_map
from tribe.health.alarms import COLLAPSE, SHIFT, Alarms, AlarmState
from tribe.health.calibration import Calibration
from tribe.health.estimate import Estimate, EstimateState, Estimator, Features
from tribe.health.frames import Verdict
from tribe.health.martingale import Reference
from tribe.health.probe import OFTEN, Answers, ShiftState, ask, start_shift
from tribe.health.regression import GaussianProcess

RECENT = 500  # images of the means: of the agreement with the source, and of what a method reports of its batches
HINT = 0.5  # logarithm of the wealth of a gambler on a change, or on its end, from which more images are probes
SETTLED = 256  # images after the alarm of a shift for which more images are probes
QUARTERS = 4  # so often in a window the estimated accuracy is compared


class WatchState(NamedTuple):
    """The state of each stream."""

    alarms: AlarmState
    estimate: EstimateState
    predicted: Annotated[Tensor, COUNT]  # (S, K) int64, how often each class was predicted
    agreement: Annotated[Tensor, NOT_NEGATIVE]  # (S, 2) discounted: predictions of the source that agree, and all
    shift: ShiftState  # the statistics of the images that the source predicted
    recent: Tensor  # (S, 3) discounted: entropies and trusted shares that the method reported, and images


@dataclass(frozen=True)
class Watcher:
    """Watch streams. ``probe``: every so many images of a batch, one is also predicted by the source; 0: none."""

    probe: int
    estimator: Estimator
    normal: Reference | None  # what is normal for the source; None without a calibration
    clean: float = 0.0  # the source's accuracy on clean images, of which calibration knows the labels
    alarms: Alarms = Alarms()  # noqa: RUF009

    @staticmethod
    def of(classes: int, probe: int, calibration: Calibration | None, device: torch.device) -> "Watcher":
        """Return what watches streams on a device; without a calibration nothing is estimated."""
        if calibration is None:
            empty = GaussianProcess.flat(len(Features._fields), device)
            return Watcher(probe, Estimator(classes, 1.0, empty), None)
        estimator = calibration.estimator.to(device)
        normal = tree_map(lambda t: t.to(device), calibration.normal)
        return Watcher(probe, estimator, normal, calibration.accuracy)

    def init(self, net: Backbone, streams: int) -> WatchState:
        """The state before the first image."""
        classes = self.estimator.classes
        return WatchState(
            self.alarms.init(streams, classes, net.device),
            self.estimator.init(streams, net.device),
            torch.zeros(streams, classes, dtype=torch.int64, device=net.device),
            torch.zeros(streams, 2, device=net.device),
            start_shift(net, streams),
            torch.zeros(streams, 3, device=net.device),
        )

    def look(
        self, net: Backbone, state: WatchState, x: Tensor, valid: Tensor
    ) -> tuple[Verdict, Answers | None, WatchState]:
        """Judge images before a method learns from them, and ask the source for its predictions of some."""
        verdict, alarms = self.alarms.look(state.alarms, x, valid)
        answers, shift = None, state.shift
        if self.probe:
            often, compared = self.hinted(state), self.normal is not None
            answers, shift = ask(net, shift, x, valid, self.probe, compared, often)
        return verdict, answers, state._replace(alarms=alarms, shift=shift)

    def hinted(self, state: WatchState) -> Tensor | None:
        """Return which streams (S,) may have changed, or changed lately, so that more images are worth a probe.

        None: none of them. On other devices than a CPU the host would wait for the answer.
        """
        bet, alarms = state.alarms.martingale, state.alarms
        if self.normal is None or self.probe <= OFTEN or self.probe % OFTEN or bet.over.device.type != "cpu":
            return None
        lately = bet.changed & (alarms.images - alarms.image[:, SHIFT] < SETTLED)
        often = (bet.log_wealth.amax(1) > HINT) | (bet.over > HINT) | lately
        return often if often.any() else None

    @torch.no_grad()
    def observe(
        self, state: WatchState, verdict: Verdict, answers: Answers | None, output: Tensor, valid: Tensor, info: Any
    ) -> WatchState:
        """Add a batch: what the source says of it, what was predicted (logits), and a report."""
        predicted = output.argmax(2)
        source = known = None
        agreement = state.agreement
        if answers is not None:
            source, known = answers.logits.to(output.dtype), answers.known & valid
            agree = (source.argmax(2) == predicted) & known
            counts = torch.stack((agree, known), 1).sum(2)
            agreement = _add(agreement, counts, counts[:, 1:])
        alarms = self.alarms.observe(
            state.alarms, verdict, output, valid, info.distance, source=source, known=known, reference=self.normal
        )
        counted = state.predicted.scatter_add(1, predicted, valid.to(torch.int64))
        return WatchState(alarms, state.estimate, counted, agreement, state.shift, state.recent)

    @torch.no_grad()
    def estimate(
        self, state: WatchState, answers: Answers | None, delivered: Tensor, valid: Tensor, info: Any
    ) -> WatchState:
        """Add the answers of a batch that are delivered, after a time filter: logits.

        Whenever a quarter of a window has passed, the accuracy is compared with that of clean images.
        """
        if self.normal is None:
            return state
        estimate = self.estimator.observe(state.estimate, delivered, valid, info.student_agreement, answers)
        quarter = max(self.estimator.window // QUARTERS, 1)
        due = estimate.images // quarter > state.estimate.images // quarter
        if due.device.type == "cpu" and not due.any():  # on other devices this would synchronise
            return state._replace(estimate=estimate)
        alarms = self.alarms.compare(state.alarms, self.estimator.read_window(estimate), self.clean, due)
        return state._replace(estimate=estimate, alarms=alarms)

    @torch.no_grad()
    def read(self, state: WatchState) -> Estimate:
        """Return the estimates. Nothing is known of answers that collapse: calibration saw none."""
        estimate = self.estimator.read(state.estimate)
        familiar = estimate.familiar & ~state.alarms.on[:, COLLAPSE]
        low, high = (torch.where(familiar, t, end) for t, end in ((estimate.low, 0.0), (estimate.high, 1.0)))
        return estimate._replace(low=low, high=high, familiar=familiar)

    @torch.no_grad()
    def report(self, state: WatchState, info: Any, valid: Tensor) -> WatchState:
        """Add what the method reports of a batch, weighted by its images."""
        images = valid.sum(1, keepdim=True)
        said = torch.stack((info.entropy, info.trusted, torch.ones_like(info.entropy)), 1).to(state.recent.dtype)
        sums = _add(state.recent, said * images, images)
        return state._replace(recent=torch.where(images > 0, sums, state.recent))


def _add(sums: Tensor, new: Tensor, images: Tensor) -> Tensor:
    """Discounted sums with those of new images (S, 1): about the last `RECENT` count."""
    return torch.addcmul(new, sums, torch.exp(images / -RECENT))
