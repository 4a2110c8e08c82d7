"""The contract of time filters under test: each mutant carries one bug, and a check must die of it."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from mutants import mutant, name_of
from tribe import filters, testing
from tribe.filters import Filtered, informative
from tribe.filters.cofa import Cofa
from tribe.filters.markov import Markov

CHECKS = {check.__name__: check for check in testing.FILTER_CHECKS}


def share_the_belief(rule, state, logits, valid):
    filtered = Markov.step(rule, state, logits, valid)
    belief = filtered.state.belief.mean(0, keepdim=True).expand_as(filtered.state.belief).clone()
    return filtered._replace(state=filtered.state._replace(belief=belief))


def write_into_the_old_state(rule, state, logits, valid):
    filtered = Markov.step(rule, state, logits, valid)
    state.evidence.copy_(filtered.state.evidence)
    return filtered


def count_on_the_object(rule, state, logits, valid):
    vars(rule).update(batches=vars(rule).get("batches", 0) + 1)
    return Cofa.step(rule, state, logits, valid)


last = {}


def remember_outside_the_state(rule, state, logits, valid):
    """A filter that is loaded is another object, and so has no last image."""
    before = last.get(id(rule), state) if bool(state.seen.all()) else state
    filtered = Cofa.step(rule, before, logits, valid)
    last[id(rule)] = filtered.state
    return filtered._replace(state=filtered.state._replace(logits=filtered.state.logits * 0))


def begin_every_batch_with_an_even_belief(rule, state, logits, valid):
    fresh = rule.init(*state.belief.shape[::2], logits.new_empty(0, dtype=state.belief.dtype))
    return Markov.step(rule, state._replace(belief=fresh.belief), logits, valid)


def learn_the_rate_once_a_batch(rule, images, counted, dtype):
    rate, marginal = Markov._steps(rule, images, counted, dtype)
    last = torch.arange(rate.shape[1]).eq(rate.shape[1] - 1).view(1, -1, 1)
    return rate * last, marginal


def compare_with_even_shares(rule, images, counted, dtype):
    rate, marginal = Markov._steps(rule, images, counted, dtype)
    return rate, marginal * 0


def compare_with_the_shares_of_the_stream(rule, state, logits, valid):
    """With 1,000 classes nobody knows them."""
    steps = []
    for z, real in zip(logits.split(1, 1), valid.split(1, 1), strict=True):
        steps.append(Markov.step(rule, state._replace(weight=torch.ones_like(state.weight)), z, real))
        state = steps[-1].state
    return Filtered(torch.cat([s.logits for s in steps], 1), torch.cat([s.used for s in steps], 1), state)


def never_turn_off(rule, state, logits, valid):
    filtered = Markov.step(rule, state, logits, valid)
    new = filtered.state
    once = state.evidence.amax(-1, keepdim=True) > rule.evidence_on
    kept = new._replace(evidence=torch.where(once, rule.evidence_most, new.evidence))
    return filtered._replace(used=filtered.used | (informative(logits, valid) & once), state=kept)


def never_turn_on(rule, state, logits, valid):
    filtered = Markov.step(rule, state, logits, valid)
    return filtered._replace(used=filtered.used & False)


def take_the_log_of_zero(rule, z):
    chance = Markov._likelihood(rule, z)
    probability = z.softmax(-1).unsqueeze(2)
    return chance * (probability * probability.log()).sum(-1, keepdim=True).exp()


def keep_the_graph(rule, state, logits, valid):
    filtered = Cofa.step(rule, state, logits, valid)
    return filtered._replace(state=filtered.state._replace(logits=filtered.state.logits + 0 * logits.sum()))


def answer_without_a_norm(rule, state, logits, valid):
    filtered = Cofa.step(rule, state, logits, valid)
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


MARKOV, WITHIN, COFA = Markov(), Markov(within="batch"), Cofa()
LOOKS_AHEAD = mutant("smooths within the batch, and does not say so", WITHIN, uses_batch=False)
NEVER_ON = mutant("asks for more evidence than it can collect", MARKOV, step=never_turn_on)
NO_REASON = mutant("says that it is always on, and not why", COFA, always_on="yes")
KILLED = {
    "streams_are_independent": [mutant("one belief for all streams", MARKOV, step=share_the_belief)],
    "mutates_nothing": [
        mutant("writes into the old state", MARKOV, step=write_into_the_old_state),
        mutant("changes logits", COFA, step=lambda m, s, z, v: Cofa.step(m, s, z.sub_(z.amax(-1, keepdim=True)), v)),
        mutant("counts its batches in an attribute", COFA, step=count_on_the_object),
    ],
    "resumes_exactly": [mutant("a memory outside the state", COFA, step=remember_outside_the_state)],
    "is_deterministic": [
        mutant("global noise", MARKOV, step=lambda m, s, z, v: Markov.step(m, s, z + 1e-3 * torch.rand_like(z), v))
    ],
    "padding_changes_nothing": [
        mutant("counts padding", MARKOV, step=lambda m, s, z, v: Markov.step(m, s, z, torch.ones_like(v)))
    ],
    "an_image_that_says_nothing_changes_nothing": [
        mutant(
            "equal logits make the belief forget",
            MARKOV,
            step=lambda m, s, z, v: Markov.step(m, s, z + 1e-6 * torch.arange(z.shape[-1]), v),
        )
    ],
    "is_causal": [LOOKS_AHEAD],
    "batch_size_does_not_matter": [
        LOOKS_AHEAD,
        mutant("forgets the batch before", MARKOV, step=begin_every_batch_with_an_even_belief),
        mutant("learns rho once a batch", WITHIN, _steps=learn_the_rate_once_a_batch),
    ],
    "does_no_harm_without_bursts": [
        mutant("compares with draws from even shares", MARKOV, _steps=compare_with_even_shares),
        mutant("compares with the shares of the stream alone", MARKOV, step=compare_with_the_shares_of_the_stream),
        mutant("is always on, and does not say so", COFA, always_on=None),
        mutant("says that it is always on, and is not", MARKOV, always_on="it says so, without being so"),
    ],
    "does_no_harm_to_a_cautious_network": [
        mutant("takes every network for too sure of itself", Markov(temperatures=(1.0, 1.4, 2.0, 2.8, 4.0)))
    ],
    "turns_off_when_bursts_end": [mutant("never loses evidence", MARKOV, step=never_turn_off), NEVER_ON],
    "helps_in_bursts": [NEVER_ON],
    "answers_are_log_probabilities": [
        NEVER_ON,
        mutant("averages logits as they are", COFA, step=answer_without_a_norm),
    ],
    "stays_finite": [mutant("takes the logarithm of 0", MARKOV, _likelihood=take_the_log_of_zero)],
    "keeps_no_graph": [mutant("carries a graph", COFA, step=keep_the_graph)],
    "state_size_is_fixed": [Growing()],
    "is_documented": [mutant(None, COFA), NO_REASON],
}
MUTANTS = [(mutant, check) for check, mutants in KILLED.items() for mutant in mutants]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=name_of)
def test_filter_mutant_dies(mutant, check):
    with pytest.raises(AssertionError):
        CHECKS[check](mutant)


def test_every_check_of_filters_kills_something():
    assert {check for _, check in MUTANTS} == CHECKS.keys()


def test_a_failure_names_filter_and_property():
    with pytest.raises(AssertionError, match="is_documented"):
        testing.check_filter(NO_REASON)
    testing.check_filter(Cofa())
