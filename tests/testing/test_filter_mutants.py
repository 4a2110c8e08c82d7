"""The contract of time filters under test: each mutant carries one bug, and a check must die of it."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest
import torch

from tribe import filters, testing
from tribe.filters import Filtered, informative
from tribe.filters.cofa import Cofa
from tribe.filters.markov import Markov

CHECKS = {check.__name__: check for check in testing.FILTER_CHECKS}


class Streams(Markov):
    """One belief for all streams."""

    def step(self, state, logits, valid):
        filtered = super().step(state, logits, valid)
        belief = filtered.state.belief.mean(0, keepdim=True).expand_as(filtered.state.belief).clone()
        return filtered._replace(state=filtered.state._replace(belief=belief))


class InPlace(Markov):
    """Writes the new evidence into the old state."""

    def step(self, state, logits, valid):
        filtered = super().step(state, logits, valid)
        state.evidence.copy_(filtered.state.evidence)
        return filtered


class ChangesLogits(Cofa):
    """Subtracts the largest logit in place."""

    def step(self, state, logits, valid):
        logits.sub_(logits.amax(-1, keepdim=True))
        return super().step(state, logits, valid)


class CounterOnTheObject(Cofa):
    """Counts its batches in an attribute."""

    def step(self, state, logits, valid):
        object.__setattr__(self, "batches", vars(self).get("batches", 0) + 1)
        return super().step(state, logits, valid)


class MemoryOnTheClass(Cofa):
    """Keeps the last image outside the state; a filter that is loaded has another object, and so no last image."""

    last: ClassVar = {}

    def step(self, state, logits, valid):
        before = self.last.get(id(self), state) if bool(state.seen.all()) else state
        filtered = super().step(before, logits, valid)
        self.last[id(self)] = filtered.state
        return filtered._replace(state=filtered.state._replace(logits=filtered.state.logits * 0))


class GlobalRandom(Markov):
    """Breaks ties with torch's global generator."""

    def step(self, state, logits, valid):
        return super().step(state, logits + 1e-3 * torch.rand_like(logits), valid)


class CountsPadding(Markov):
    """Takes padding for images."""

    def step(self, state, logits, valid):
        return super().step(state, logits, torch.ones_like(valid))


class CountsBadImages(Markov):
    """Takes equal logits for a prediction: they make the belief forget, and count as an image."""

    def step(self, state, logits, valid):
        return super().step(state, logits + 1e-6 * torch.arange(logits.shape[-1]), valid)


class LooksAhead(Markov):
    """Smooths within the batch, and does not say so."""

    uses_batch = False


class ForgetsTheBatchBefore(Markov):
    """Every batch starts with an even belief."""

    def step(self, state, logits, valid):
        fresh = self.init(*state.belief.shape[::2], logits.new_empty(0, dtype=state.belief.dtype))
        return super().step(state._replace(belief=fresh.belief), logits, valid)


class RateOfTheBatch(Markov):
    """Learns rho once a batch: what the filter knows depends on the batch size."""

    def _steps(self, images, counted, dtype):
        rate, marginal = super()._steps(images, counted, dtype)
        last = torch.arange(rate.shape[1]).eq(rate.shape[1] - 1).view(1, -1, 1)
        return rate * last, marginal


class UniformNull(Markov):
    """Compares with independent draws from equal shares, whatever the shares of the stream are."""

    def _steps(self, images, counted, dtype):
        rate, marginal = super()._steps(images, counted, dtype)
        return rate, marginal * 0


class MarginalNull(Markov):
    """Compares with independent draws from the shares of the stream alone: with 1,000 classes nobody knows them."""

    def step(self, state, logits, valid):
        steps = []
        for z, real in zip(logits.split(1, 1), valid.split(1, 1), strict=True):
            steps.append(super().step(state._replace(weight=torch.ones_like(state.weight)), z, real))
            state = steps[-1].state
        return Filtered(torch.cat([s.logits for s in steps], 1), torch.cat([s.used for s in steps], 1), state)


class Hot(Markov):
    """Takes every network for too sure of itself."""


class NeverTurnsOff(Markov):
    """Evidence once found is never lost."""

    def step(self, state, logits, valid):
        filtered = super().step(state, logits, valid)
        new = filtered.state
        once = state.evidence.amax(-1, keepdim=True) > self.evidence_on
        kept = new._replace(evidence=torch.where(once, self.evidence_most, new.evidence))
        return filtered._replace(used=filtered.used | (informative(logits, valid) & once), state=kept)


class NeverTurnsOn(Markov):
    """Asks for more evidence than it can collect."""

    def step(self, state, logits, valid):
        filtered = super().step(state, logits, valid)
        return filtered._replace(used=filtered.used & False)


class LogOfZero(Markov):
    """Multiplies probabilities by their logarithms, also where they are 0."""

    def _likelihood(self, z):
        chance = super()._likelihood(z)
        probability = z.softmax(-1).unsqueeze(2)
        return chance * (probability * probability.log()).sum(-1, keepdim=True).exp()


class KeepsGraph(Cofa):
    """The state carries the graph of the predictions it was made of."""

    def step(self, state, logits, valid):
        filtered = super().step(state, logits, valid)
        return filtered._replace(state=filtered.state._replace(logits=filtered.state.logits + 0 * logits.sum()))


class Unnormalised(Cofa):
    """Answers with the averaged logits as they are."""

    def step(self, state, logits, valid):
        filtered = super().step(state, logits, valid)
        return filtered._replace(logits=filtered.logits + logits.logsumexp(-1, keepdim=True))


class GrowingState(NamedTuple):
    """All images of each stream."""

    past: torch.Tensor  # (S, N, K)


@dataclass(frozen=True)
class Growing(filters.TimeFilter):
    """Averages an image with all images before it."""

    def init(self, streams, classes, like):
        return GrowingState(like.new_zeros(streams, 0, classes))

    def step(self, state, logits, valid):
        past = torch.cat((state.past, logits), 1)
        mean = past.cumsum(1)[:, -logits.shape[1] :].log_softmax(-1)
        return Filtered(mean, valid, GrowingState(past))


class Undocumented(Cofa):
    pass


class NoReason(Cofa):
    """Says that it is always on, and not why."""

    always_on = "yes"


class AlwaysOn(Cofa):
    """Filters independent images, and does not say so."""

    always_on = None


class SaysAlwaysOn(Markov):
    """Says that it is always on, and is not."""

    always_on = "it says so, without being so"


MUTANTS = [
    (Streams(), "streams_are_independent"),
    (InPlace(), "mutates_nothing"),
    (ChangesLogits(), "mutates_nothing"),
    (CounterOnTheObject(), "mutates_nothing"),
    (MemoryOnTheClass(), "resumes_exactly"),
    (GlobalRandom(), "is_deterministic"),
    (CountsPadding(), "padding_changes_nothing"),
    (CountsBadImages(), "an_image_that_says_nothing_changes_nothing"),
    (LooksAhead(within="batch"), "is_causal"),
    (LooksAhead(within="batch"), "batch_size_does_not_matter"),
    (ForgetsTheBatchBefore(), "batch_size_does_not_matter"),
    (RateOfTheBatch(within="batch"), "batch_size_does_not_matter"),
    (UniformNull(), "does_no_harm_without_bursts"),
    (MarginalNull(), "does_no_harm_without_bursts"),
    (Hot(temperatures=(1.0, 1.4, 2.0, 2.8, 4.0)), "does_no_harm_to_a_cautious_network"),
    (AlwaysOn(), "does_no_harm_without_bursts"),
    (SaysAlwaysOn(), "does_no_harm_without_bursts"),
    (NeverTurnsOff(), "turns_off_when_bursts_end"),
    (NeverTurnsOn(), "turns_off_when_bursts_end"),
    (NeverTurnsOn(), "helps_in_bursts"),
    (NeverTurnsOn(), "answers_are_log_probabilities"),
    (Unnormalised(), "answers_are_log_probabilities"),
    (LogOfZero(), "stays_finite"),
    (KeepsGraph(), "keeps_no_graph"),
    (Growing(), "state_size_is_fixed"),
    (Undocumented(), "is_documented"),
    (NoReason(), "is_documented"),
]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_filter_mutant_dies(mutant, check):
    with pytest.raises(AssertionError):
        CHECKS[check](mutant)


def test_every_check_of_filters_kills_something():
    assert {check for _, check in MUTANTS} == CHECKS.keys()


def test_a_failure_names_filter_and_property():
    with pytest.raises(AssertionError, match="is_documented"):
        testing.check_filter(NoReason())
    testing.check_filter(Cofa())
