"""The contract under test: each mutant carries one bug of the field, and a check must die of it."""

import dataclasses
import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from tribe import testing
from tribe.core.losses import entropy
from tribe.core.memory import filled, images
from tribe.core.optim import Adam, adam_step
from tribe.core.rng import Key
from tribe.core.rules import PerBatch
from tribe.core.state import Affine, Info, Stats
from tribe.data.scenarios.protocols import Replay
from tribe.methods import Deployed, Method, Update, screen
from tribe.methods.cotta import Cotta
from tribe.methods.lame import Lame
from tribe.methods.note import Note
from tribe.methods.rotta import Rotta
from tribe.methods.source import Source
from tribe.methods.stepping import commit_step
from tribe.methods.tent import Tent
from tribe.methods.tribe import Tribe
from tribe.norms.balanced import Balanced
from tribe.norms.batch import Robust

K = testing.CLASSES
ALL_CHECKS = testing.METHOD_CHECKS + testing.NORM_CHECKS + testing.SCENARIO_CHECKS + testing.DATASET_CHECKS
CHECKS = {check.__name__: check for check in ALL_CHECKS}


class PooledOverRows(PerBatch):
    """Batch statistics over all streams at once, as an implementation that folds streams into the batch has them."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        together = [t.flatten(0, 1).unsqueeze(0) for t in (mean, var, valid)]
        m, v, _ = super().__call__(*together[:2], count, stats, labels, together[2], eps)
        return m.expand(len(mean), -1, -1), v.expand(len(mean), -1, -1), stats


class Detached(Robust):
    """Robust BN whose gradient takes the statistics for constants."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        return super().__call__(mean.detach(), var.detach(), count, stats, labels, valid, eps)


class Excused(Robust):
    """Robust BN with a reason for a wrong gradient that it does not have."""

    stops_gradient: ClassVar[str] = "no reason"


class InPlace(Robust):
    """Robust BN that writes into the statistics it is given."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        m, v, kept = super().__call__(mean, var, count, stats, labels, valid, eps)
        stats.mean.copy_(kept.mean)
        return m, v, kept


class CountsPadding(Balanced):
    """Balanced BN that takes padding for images."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        return super().__call__(mean, var, count, stats, labels, torch.ones_like(valid), eps)


class EmptyDivision(Robust):
    """Robust BN that divides by the number of samples, even by none."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        share = valid.to(mean.dtype).unsqueeze(-1)
        m = (share * mean).sum(1, keepdim=True) / share.sum(1, keepdim=True)
        v = (share * (var + (mean - m) ** 2)).sum(1, keepdim=True) / share.sum(1, keepdim=True)
        m, v = (s + self.alpha * (b - s) for s, b in zip(stats, (m, v), strict=True))
        return m, v, Stats(m.detach(), v.detach())


class FavoursTheFirst(Balanced):
    """Balanced BN that lets only the first sample of each class speak, not its class's sum."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        earlier = (labels.unsqueeze(2) == labels.unsqueeze(1)).tril(-1) & valid.unsqueeze(1)
        return super().__call__(mean, var, count, stats, labels, valid & ~earlier.any(2), eps)


class CarriesGraph(Robust):
    """Robust BN whose kept statistics still carry the batch's graph."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        m, v, _ = super().__call__(mean, var, count, stats, labels, valid, eps)
        return m, v, Stats(m, v)


NORM_MUTANTS = [
    (PooledOverRows(), "rows_are_independent"),
    (Detached(), "gradients_are_right"),
    (Excused(), "gradients_are_right"),
    (InPlace(), "changes_no_argument"),
    (CountsPadding(), "invalid_samples_weigh_nothing"),
    (EmptyDivision(), "nothing_valid_keeps_the_statistics"),
    (FavoursTheFirst(classes=3), "order_in_the_batch_does_not_matter"),
    (CarriesGraph(), "gradients_are_right"),
]


class Hooked:
    """A method with a hook for a bug after its step."""

    def step(self, net, state, x, valid=None, retired=None):
        return self.after(net, state, x, valid, retired, *super().step(net, state, x, valid))

    def after(self, net, state, x, valid, retired, y, new):
        return y, new


class TentWith(Hooked, Tent):
    """TENT with more hooks."""

    rule: ClassVar = PerBatch()

    def loss(self, logits, valid):
        return (entropy(logits) * valid).sum(1) / valid.sum(1).clamp_min(1)

    def normalisation(self, net, state, batch):
        return self.deployed(net, state).stats, self.rule

    def objective(self, net, state, batch, affine, logits):
        return self.loss(logits, batch.valid), None


class StreamsMeet(TentWith):
    """One set of batch statistics for all streams."""

    rule = PooledOverRows()


class InPlaceOptimiser(TentWith):
    """An optimiser that moves the old state."""

    def after(self, net, state, x, valid, retired, y, new):
        state.affine.weight.copy_(new.affine.weight)
        return y, new


class CounterOnTheObject(TentWith):
    """A clock on the method: two streams of one method would share it."""

    def step(self, net, state, x, valid=None, retired=None):
        object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
        return super().step(net, state, x, valid)


class MemoryOnTheObject(TentWith):
    """A moving average that is kept outside the state, so that no file holds it."""

    def loss(self, logits, valid):
        past = vars(MemoryOnTheObject).get("past")
        loss = super().loss(logits, valid)
        MemoryOnTheObject.past = loss.detach().mean()
        return loss if past is None else loss * (1 + past)


class GlobalRandom(TentWith):
    """Noise from torch's global generator."""

    def loss(self, logits, valid):
        return super().loss(logits + 0.1 * torch.randn_like(logits), valid)


class SeedsNumpy(TentWith):
    """Draws from numpy's generator, the same numbers in every step."""

    def loss(self, logits, valid):
        np.random.seed(0)
        return super().loss(logits, valid) * (1 + 0.1 * np.random.random())


class SeedsPython(TentWith):
    """Seeds Python's generator, as the last of two equal runs did."""

    def step(self, net, state, x, valid=None, retired=None):
        random.seed(2)
        return super().step(net, state, x, valid)


class PredictionSeeds(TentWith):
    """Seeds torch's generator where nothing is learned."""

    not_exportable_because = None

    def predict(self, net, state, x, valid=None):
        torch.manual_seed(0)
        return super().predict(net, state, x, valid)


class StandingClock(Hooked, Tribe):
    """Every step draws the augmentation of the first."""

    def after(self, net, state, x, valid, retired, y, new):
        return y, new._replace(key=state.key)


class LeapingClock(Hooked, Tribe):
    """Counts images, where batches are reported."""

    def after(self, net, state, x, valid, retired, y, new):
        return y, new._replace(key=state.key._replace(clock=new.info.images))


class OneSeed(Hooked, Tribe):
    """Every stream draws what the first draws, once it has begun."""

    def after(self, net, state, x, valid, retired, y, new):
        return y, new._replace(key=new.key._replace(seed=new.key.seed[:1].expand_as(new.key.seed).clone()))


class EmptyMean(TentWith):
    """A mean over the confident samples, also when there is none."""

    def loss(self, logits, valid):
        sure = valid & (entropy(logits) < 1e-3)
        return (entropy(logits) * sure).sum(1) / sure.sum(1)


class TrainedBackbone(TentWith):
    """A weight of the frozen network moves."""

    def after(self, net, state, x, valid, retired, y, new):
        with torch.no_grad():
            next(net.model.parameters()).mul_(1.001)
        return y, new


class KeepsGraph(TentWith):
    """Results that still carry the graph of the step."""

    def step(self, net, state, x, valid=None, retired=None):
        with torch.enable_grad():
            weight = state.affine.weight.detach().requires_grad_()
            y, new = super().step(net, state, x, valid)
            return y + 0 * weight.sum(), new


class IgnoresPadding(TentWith):
    """Padding takes part in the loss."""

    def loss(self, logits, valid):
        return entropy(logits).mean(1)


class NoScreen(TentWith):
    """NaN images go straight in."""

    def step(self, net, state, x, valid=None, retired=None):
        with torch.enable_grad():
            affine = state.affine.leaf()
            logits = net(x, affine, self.deployed(net, state).stats, PerBatch()).logits
            grads = Affine(*torch.autograd.grad(entropy(logits).mean(1).sum(), affine))
        moved, moments = adam_step(state.affine, grads, state.adam, self.lr)
        valid = torch.ones(x.shape[:2], dtype=torch.bool)
        update = Update(logits, state._replace(affine=moved, adam=moments), affine=moved)
        return commit_step(net, state, update, valid, torch.zeros(len(x), dtype=torch.int64))


class MovesOnNothing(TentWith):
    """Adam's momentum carries a stream on although every image was poisoned."""

    def after(self, net, state, x, valid, retired, y, new):
        moved, moments = adam_step(new.affine, Affine(*map(torch.zeros_like, new.affine)), new.adam, self.lr)
        return y, new._replace(affine=moved, adam=moments)


class RawStep(TentWith):
    """A prediction of the black image that took the place of one that is not finite."""

    def after(self, net, state, x, valid, retired, y, new):
        x, valid, _ = screen(x, valid)
        return torch.where(valid.unsqueeze(-1), y, self.deployed(net, state).logits(net, x, valid)), new


class RawPredict(TentWith):
    """The same without learning."""

    not_exportable_because = None

    def predict(self, net, state, x, valid=None):
        x, valid, _ = screen(x, valid)
        return self.deployed(net, state).logits(net, x, valid)


class RawPadding(TentWith):
    """Silent about images that are not finite; padding it predicts."""

    def after(self, net, state, x, valid, retired, y, new):
        x, finite, _ = screen(x, None)
        return torch.where(finite.unsqueeze(-1), self.deployed(net, state).logits(net, x, finite), y), new


class RawProbabilities(Hooked, Lame):
    """Probabilities that prefer a class for an image that is not finite."""

    def after(self, net, state, x, valid, retired, y, new):
        counts = screen(x, valid)[1].unsqueeze(-1)
        return torch.where(counts, y, torch.eye(K)[0]), new


class ReusesTheState(TentWith):
    """Overwrites the state in use, although another one was retired."""

    def after(self, net, state, x, valid, retired, y, new):
        if retired is not None:
            state.affine.bias.copy_(new.affine.bias)
        return y, new


class PredictsLast(TentWith):
    """The prediction has already seen the batch."""

    def after(self, net, state, x, valid, retired, y, new):
        return self.predict(net, new, x, valid), new


class DeploysNothing(TentWith):
    """Predicts as it should; the network that would be exported has zeros for parameters."""

    not_exportable_because = None

    def deployed(self, net, state):
        return Tent.deployed(self, net, state._replace(affine=Affine(*map(torch.zeros_like, state.affine))))

    def predict(self, net, state, x, valid=None):
        return Tent.deployed(self, net, state).logits(net, *screen(x, valid)[:2])


class DeploysZeroWeights(Cotta):
    """A teacher that predicts, and zeros for its weights that would be exported."""

    def deployed(self, net, state):
        teacher = super().deployed(net, state)
        return dataclasses.replace(
            teacher, weights=[{name: 0 * t for name, t in own.items()} for own in teacher.weights]
        )


class DeploysTheSource(DeploysNothing):
    """What would be exported has not adapted."""

    def deployed(self, net, state):
        return Deployed(*net.source(len(state.key.seed)), PerBatch())


class Corrected(TentWith):
    """TENT with a prior that corrects the network's predictions, and says so: healthy."""

    not_exportable_because = "a prior corrects the network's predictions"
    prior: ClassVar = torch.linspace(0, 1, K)

    def after(self, net, state, x, valid, retired, y, new):
        return self._correct(y, x, valid), new

    def predict(self, net, state, x, valid=None):
        return self._correct(super().predict(net, state, x, valid), x, valid)

    def _correct(self, logits, x, valid):
        return torch.where(screen(x, valid)[1].unsqueeze(-1), logits + self.prior, 0)


class CorrectedUnsaid(Corrected):
    """The same, and says that it is a plain pass."""

    not_exportable_because = None


class SaysItCorrects(TentWith):
    """Says so, and does not."""

    not_exportable_because = "it says so"


class GrowingState(NamedTuple):
    affine: Affine
    adam: Adam
    key: Key
    info: Info
    past: torch.Tensor  # (S, steps + 1, C)


class Growing(TentWith):
    """A state that keeps where every step led."""

    def init(self, net, streams=1, seed=0):
        start = super().init(net, streams, seed)
        return GrowingState(*start, past=start.affine.weight.unsqueeze(1))

    def after(self, net, state, x, valid, retired, y, new):
        return y, new._replace(past=torch.cat((new.past, new.affine.weight.unsqueeze(1)), 1))


class Widening(TentWith):
    """A report that is of another type from the first batch on."""

    def after(self, net, state, x, valid, retired, y, new):
        return y, new._replace(info=new.info._replace(entropy=new.info.entropy.double()))


class SeesLabels(TentWith):
    """Takes labels by another name."""

    def step(self, net, state, x, valid=None, retired=None, targets=None):
        return super().step(net, state, x, valid)


class Idle(TentWith):
    """Claims to adapt."""

    lr: float = 0.0


class FirstSize(TentWith):
    """Remembers the size of the first batch."""

    def loss(self, logits, valid):
        return super().loss(logits[:, :6], valid[:, :6]) + 0 * logits[:, 5].sum()


class Undocumented(TentWith):
    paper = "a paper"


class FromNowhere(TentWith):
    """Has an idea and no paper."""

    paper = ""


@dataclass(frozen=True)
class SecretlyAdapting(Tent):
    """Says that it does not adapt."""

    does_not_adapt = "it says so"


class SharedThreshold(Tribe):
    """TRIBE whose trusted samples are counted over all streams."""

    def step(self, net, state, x, valid=None, retired=None):
        valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        return super().step(net, state, x * x.mean() * 2, valid)


class SlowRotta(Rotta):
    """RoTTA as published: no check but one plays it enough images to learn from."""

    small: ClassVar = {"size": 8}


class RoomyNote(Note):
    """NOTE as published: no check plays it more images than it can hold."""

    small: ClassVar = {}


class UpdateFromOutside(Rotta):
    """The memory is learned from with noise of torch's global generator."""

    def update(self, net, state, shape, due):
        image = state.memory.image
        noisy = state.memory._replace(image=image + 0.1 * torch.rand_like(image))
        return super().update(net, state._replace(memory=noisy), shape, due)._replace(memory=state.memory)


class UpdateKeepsGraph(Rotta):
    """The student that an update makes carries the graph it was made by."""

    def update(self, net, state, shape, due):
        new = super().update(net, state, shape, due)
        weight = new.student.affine.weight.clone().requires_grad_() * 1
        return new._replace(student=new.student._replace(affine=new.student.affine._replace(weight=weight)))


class UpdateInPlace(Rotta):
    """An optimiser that moves the old student, too."""

    def update(self, net, state, shape, due):
        new = super().update(net, state, shape, due)
        state.student.affine.weight.copy_(new.student.affine.weight)
        return new


class UpdatePooled(Rotta):
    """One teacher for all streams, from the first update on."""

    def update(self, net, state, shape, due):
        new = super().update(net, state, shape, due)
        affine = new.teacher.affine
        weight = affine.weight.mean(0, keepdim=True).expand_as(affine.weight).clone()
        return new._replace(teacher=new.teacher._replace(affine=affine._replace(weight=weight)))


class FreePlacesWeigh(Rotta):
    """A memory that is not full is learned from as if it were."""

    def update(self, net, state, shape, due):
        full = state.memory._replace(held=torch.full_like(state.memory.held, self.size))
        return super().update(net, state._replace(memory=full), shape, due)._replace(memory=state.memory)


class StandInsWeigh(Rotta):
    """The same, with what stands in for the images that are not there."""

    def update(self, net, state, shape, due):
        memory = state.memory
        full = memory._replace(image=images(memory, shape).flatten(2), held=torch.full_like(memory.held, self.size))
        return super().update(net, state._replace(memory=full), shape, due)._replace(memory=memory)


class FreePlacesTeach(Note):
    """Free places are left out of the statistics, and not of the loss."""

    def update(self, net, state, shape, due):
        with torch.enable_grad():
            affine = state.affine.leaf()
            seen, counts = images(state.memory, shape), filled(state.memory) & due.unsqueeze(1)
            logits, _, stats = net(seen, affine, state.stats, self._norm(observing=True), valid=counts)
            grads = Affine(*torch.autograd.grad(entropy(logits).mean(1).sum(), affine))
        moved, moments = adam_step(state.affine, grads, state.adam, self.lr)
        return state._replace(affine=moved, stats=stats, adam=moments)


class OneLot(Note):
    """What the reservoir lets go of is drawn once, for all streams."""

    def remember(self, state, x, seen, arriving):
        seeds = state.key.seed[:1].expand_as(state.key.seed)
        drawn = super().remember(state._replace(key=state.key._replace(seed=seeds)), x, seen, arriving)
        return drawn._replace(key=state.key)


class LotsFromOutside(Note):
    """The reservoir draws by a seed of numpy's global generator."""

    def remember(self, state, x, seen, arriving):
        seeds = torch.from_numpy(np.random.randint(0, 2**31, state.key.seed.shape))
        drawn = super().remember(state._replace(key=state.key._replace(seed=seeds)), x, seen, arriving)
        return drawn._replace(key=state.key)


METHOD_MUTANTS = [
    (StreamsMeet(), "streams_are_independent"),
    (InPlaceOptimiser(), "mutates_nothing"),
    (CounterOnTheObject(), "mutates_nothing"),
    (MemoryOnTheObject(), "saves_and_resumes"),
    (GlobalRandom(), "is_deterministic"),
    (SeedsNumpy(), "is_deterministic"),
    (SeedsPython(), "is_deterministic"),
    (PredictionSeeds(), "is_deterministic"),
    (StandingClock(classes=K), "its_clock_ticks"),
    (LeapingClock(classes=K), "its_clock_ticks"),
    (OneSeed(classes=K), "its_clock_ticks"),
    (EmptyMean(), "stays_finite"),
    (TrainedBackbone(), "mutates_nothing"),
    (KeepsGraph(), "keeps_no_graph"),
    (IgnoresPadding(), "padding_weighs_nothing"),
    (NoScreen(), "stays_finite"),
    (MovesOnNothing(), "a_poisoned_batch_touches_nothing"),
    (RawStep(), "says_nothing_of_what_does_not_count"),
    (RawPredict(), "says_nothing_of_what_does_not_count"),
    (RawPadding(), "says_nothing_of_what_does_not_count"),
    (RawProbabilities(), "says_nothing_of_what_does_not_count"),
    (ReusesTheState(), "reusing_memory_changes_no_number"),
    (PredictsLast(), "prediction_comes_before_learning"),
    (DeploysNothing(), "predicts_with_what_it_deploys"),
    (DeploysZeroWeights(p_th=0.0), "predicts_with_what_it_deploys"),
    (DeploysTheSource(), "predicts_with_what_it_deploys"),
    (CorrectedUnsaid(), "predicts_with_what_it_deploys"),
    (SaysItCorrects(), "predicts_with_what_it_deploys"),
    (Growing(), "cost_does_not_grow"),
    (Widening(), "cost_does_not_grow"),
    (SeesLabels(), "never_sees_labels"),
    (Idle(lr=0.0), "adapts"),
    (FirstSize(), "batch_size_may_change"),
    (Undocumented(), "is_documented"),
    (FromNowhere(), "is_documented"),
    (SecretlyAdapting(), "adapts"),
    (SharedThreshold(classes=K), "streams_are_independent"),
    (SlowRotta(classes=K), "a_few_images_are_enough"),
    (RoomyNote(classes=K), "a_few_images_are_enough"),
    (UpdateFromOutside(classes=K), "is_deterministic"),
    (UpdateKeepsGraph(classes=K), "keeps_no_graph"),
    (UpdateInPlace(classes=K), "mutates_nothing"),
    (UpdateInPlace(classes=K), "reusing_memory_changes_no_number"),
    (UpdatePooled(classes=K), "streams_are_independent"),
    (FreePlacesWeigh(classes=K), "padding_weighs_nothing"),
    (StandInsWeigh(classes=K), "padding_weighs_nothing"),
    (FreePlacesTeach(classes=K), "padding_weighs_nothing"),
    (OneLot(classes=K), "streams_are_independent"),
    (LotsFromOutside(classes=K), "is_deterministic"),
]


class Healthy:
    """Two domains of images that depend on nothing but domain and position; the third cannot be read."""

    classes, domains = tuple("abc"), ("fog@5", "snow@5")

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.pixels = torch.rand(2, 9, 3, 4, 4, generator=draw)
        self.pixels[0, 2] = float("nan")

    def labels(self, domain):
        self.domains.index(domain)
        return torch.arange(9) % 4 - 1

    def images(self, domain, index):
        if index.min() < 0:
            raise IndexError("no such image")
        return self.pixels[self.domains.index(domain)][index]


class Changed(Healthy):
    """One part is changed on its way out."""

    def __init__(self, images=lambda x: x, labels=lambda y: y, domains=Healthy.domains):
        super().__init__()
        self.change, self.relabel, self.domains = images, labels, domains

    def labels(self, domain):
        return self.relabel(super().labels(domain))

    def images(self, domain, index):
        return self.change(super().images(domain, index).clone())


def poisoned(x):
    x[:, 0, 0, 0] = float("nan")
    return x


def noise_by_place(x):
    return (x + torch.linspace(0, 0.1, len(x)).view(-1, 1, 1, 1)).clamp_max(1)


class ShuffledLabels(Healthy):
    """Labels in another order at every call."""

    calls = 0

    def labels(self, domain):
        self.calls += 1
        return super().labels(domain).roll(self.calls)


class Smaller(Healthy):
    """Domains of different sizes."""

    def images(self, domain, index):
        return super().images(domain, index)[..., : 3 + self.domains.index(domain)]


class SortsTheIndex(Healthy):
    """Read in file order, and handed out so."""

    def images(self, domain, index):
        return super().images(domain, index.sort().values)


class SharedMemory(Healthy):
    """Hands out its cache, which the caller then writes into."""

    def images(self, domain, index):
        cache = vars(self).setdefault("cache", {})
        key = domain, tuple(index.tolist())
        return cache.setdefault(key, super().images(domain, index))


class ShiftsTheIndex(Healthy):
    """Adds where its block begins to the index it was given."""

    def images(self, domain, index):
        x = super().images(domain, index)
        index += 1
        return x


class AnyDomain(Healthy):
    """An unknown domain is taken for the first."""

    def labels(self, domain):
        return super().labels(self.domains[0])


class FromTheEnd(Healthy):
    """Position -1 is the last image, as numpy has it."""

    def images(self, domain, index):
        return self.pixels[self.domains.index(domain)][index]


class NextBlock(Healthy):
    """Past the end of a domain the next one begins, as in a file of five severities."""

    def images(self, domain, index):
        if index.min() < 0:
            raise IndexError("no such image")
        both = torch.cat((*self.pixels, self.pixels[0]))
        return both[index + 9 * self.domains.index(domain)]


DATASET_MUTANTS = [
    (Changed(domains=()), "names_are_different"),
    (Changed(domains=("fog@5", "fog@5")), "names_are_different"),
    (Changed(labels=torch.Tensor.float), "labels_fit_the_classes"),
    (Changed(labels=lambda y: y + 1), "labels_fit_the_classes"),
    (ShuffledLabels(), "labels_fit_the_classes"),
    (Changed(lambda x: x * 255), "images_are_in_range"),
    (Changed(lambda x: x.permute(0, 2, 3, 1)), "images_are_in_range"),
    (Changed(torch.Tensor.double), "images_are_in_range"),
    (Changed(lambda x: x[x.isfinite().flatten(1).all(1)]), "images_are_in_range"),
    (Changed(poisoned), "images_are_in_range"),
    (Smaller(), "images_are_in_range"),
    (Changed(noise_by_place), "order_of_reading_does_not_matter"),
    (Changed(lambda x: x / x.nan_to_num(0).max()), "order_of_reading_does_not_matter"),
    (SortsTheIndex(), "order_of_reading_does_not_matter"),
    (Changed(lambda x: x * torch.rand(1)), "reading_again_gives_the_same"),
    (SharedMemory(), "reading_again_gives_the_same"),
    (ShiftsTheIndex(), "reading_again_gives_the_same"),
    (AnyDomain(), "what_is_not_there_is_refused"),
    (FromTheEnd(), "what_is_not_there_is_refused"),
    (NextBlock(), "what_is_not_there_is_refused"),
]


class SeedOfTheClock(Replay):
    """Says that the seed changes nothing, and draws."""

    def play(self, labels, classes, rng):
        return rng.permutation(len(labels))


MUTANTS = [*NORM_MUTANTS, *METHOD_MUTANTS, *DATASET_MUTANTS, (SeedOfTheClock(), "same_seed_same_schedule")]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_mutant_dies(mutant, check):
    mutant = testing.small(mutant) if isinstance(mutant, Method) else mutant
    with pytest.raises((AssertionError, IndexError)):  # an error of the mutant's own is a failure, too
        CHECKS[check](mutant)


def test_the_hook_itself_is_healthy():
    """The mutants' common base passes everything, so each dies of its own bug."""
    testing.check_method(TentWith())
    testing.check_method(Corrected())
    testing.check_method(Cotta(p_th=0.0))
    testing.check_dataset(Healthy())


def test_a_method_with_its_own_predict_says_what_it_does_besides():
    with pytest.raises(TypeError, match="not_exportable_because"):

        class Unsaid(Tent):
            def predict(self, net, state, x, valid=None):
                return super().predict(net, state, x, valid)


def test_every_check_kills_something():
    checks = testing.METHOD_CHECKS + testing.NORM_CHECKS + testing.DATASET_CHECKS
    assert {check.__name__ for check in checks} <= {check for _, check in MUTANTS}


def test_a_failure_names_method_and_property():
    with pytest.raises(AssertionError, match=r"Idle.*fails adapts"):
        testing.check_method(Idle(lr=0.0))


def test_source_passes_through_the_public_door():
    testing.check_method(Source(classes=K))
    testing.check_norm(Balanced(classes=3, gamma=0.3, convention="paper"))
