"""The contract under test: each mutant carries one bug of the field, and a check must die of it."""

import dataclasses
import itertools
import math
import random
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from mutants import mutant, name_of
from tribe import testing
from tribe.core.losses import entropy
from tribe.core.memory import filled, images
from tribe.core.optim import Adam, adam_step
from tribe.core.rng import Key
from tribe.core.rules import PerBatch
from tribe.core.state import Affine, Info, Stats, select
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

# -- norm rules --------------------------------------------------------------------------------------------------------


class PooledOverRows(PerBatch):
    """Batch statistics over all streams at once, as an implementation that folds streams into the batch has them."""

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        together = [t.flatten(0, 1).unsqueeze(0) for t in (mean, var, valid)]
        m, v, _ = super().__call__(*together[:2], count, stats, labels, together[2], eps)
        return m.expand(len(mean), -1, -1), v.expand(len(mean), -1, -1), stats


def write_into_statistics(norm, mean, var, count, stats, labels, valid, eps):
    m, v, kept = Robust.__call__(norm, mean, var, count, stats, labels, valid, eps)
    stats.mean.copy_(kept.mean)
    return m, v, kept


def take_padding_for_images(norm, mean, var, count, stats, labels, valid, eps):
    return Balanced.__call__(norm, mean, var, count, stats, labels, torch.ones_like(valid), eps)


def divide_by_nothing(norm, mean, var, count, stats, labels, valid, eps):
    share = valid.to(mean.dtype).unsqueeze(-1)
    m = (share * mean).sum(1, keepdim=True) / share.sum(1, keepdim=True)
    v = (share * (var + (mean - m) ** 2)).sum(1, keepdim=True) / share.sum(1, keepdim=True)
    m, v = (s + norm.alpha * (b - s) for s, b in zip(stats, (m, v), strict=True))
    return m, v, Stats(m.detach(), v.detach())


def favour_the_first(norm, mean, var, count, stats, labels, valid, eps):
    earlier = (labels.unsqueeze(2) == labels.unsqueeze(1)).tril(-1) & valid.unsqueeze(1)
    return Balanced.__call__(norm, mean, var, count, stats, labels, valid & ~earlier.any(2), eps)


def ignore_the_gradient(norm, mean, var, *rest):
    return Robust.__call__(norm, mean.detach(), var.detach(), *rest)


def keep_with_the_graph(norm, *given):
    m, v, _ = Robust.__call__(norm, *given)
    return m, v, Stats(m, v)


NORM_MUTANTS = {
    "rows_are_independent": [
        PooledOverRows(),
    ],
    "gradients_are_right": [
        mutant("statistics are constants", Robust(), __call__=ignore_the_gradient),
        mutant("an excuse for a right gradient", Robust(), stops_gradient="no reason"),
        mutant("carries the graph of the batch", Robust(), __call__=keep_with_the_graph),
    ],
    "changes_no_argument": [mutant("writes into its argument", Robust(), __call__=write_into_statistics)],
    "invalid_samples_weigh_nothing": [mutant("counts padding", Balanced(), __call__=take_padding_for_images)],
    "nothing_valid_keeps_the_statistics": [mutant("an empty division", Robust(), __call__=divide_by_nothing)],
    "order_in_the_batch_does_not_matter": [
        mutant("only the first sample of a class counts", Balanced(classes=3), __call__=favour_the_first),
    ],
}

# -- methods -----------------------------------------------------------------------------------------------------------


class Stepped(NamedTuple):
    """What a step was given, and its result."""

    net: Any
    state: Any
    x: torch.Tensor
    valid: torch.Tensor | None
    retired: Any
    y: torch.Tensor
    new: Any


class Hooked:
    """A method with hooks for bugs: an action before its step, an action after it, and a change of the result."""

    def step(self, net, state, x, valid=None, retired=None):
        self.before()
        stepped = Stepped(net, state, x, valid, retired, *super().step(net, state, x, valid))
        self.then(stepped)
        return self.after(stepped)

    def before(self):
        pass

    def then(self, stepped):
        pass

    def after(self, stepped):
        return stepped.y, stepped.new


def mean_entropy(logits, valid):
    return (entropy(logits) * valid).sum(1) / valid.sum(1).clamp_min(1)


class TentWith(Hooked, Tent):
    """TENT with more hooks."""

    rule: ClassVar = PerBatch()

    def loss(self, logits, valid):
        return mean_entropy(logits, valid)

    def normalisation(self, net, state, batch):
        return self.deployed(net, state).stats, self.rule

    def objective(self, net, state, batch, affine, logits):
        return self.loss(logits, batch.valid), None


class TribeWith(Hooked, Tribe):
    """TRIBE with the hooks."""


class LameWith(Hooked, Lame):
    """LAME with the hooks."""


class Corrected(TentWith):
    """TENT with a prior that corrects the network's predictions, and says so: healthy."""

    not_exportable_because = "a prior corrects the network's predictions"
    prior: ClassVar = torch.linspace(0, 1, K)

    def after(self, s):
        return self._correct(s.y, s.x, s.valid), s.new

    def predict(self, net, state, x, valid=None):
        return self._correct(super().predict(net, state, x, valid), x, valid)

    def _correct(self, logits, x, valid):
        return torch.where(counted(x, valid), logits + self.prior, 0)


def counted(x, valid=None):
    """Whether each image counts: (S, B, 1)."""
    return screen(x, valid)[1].unsqueeze(-1)


def raw(method, net, state, x, valid=None):
    """Predict what stands in the place of images that do not count, too."""
    x, valid, _ = screen(x, valid)
    return method.deployed(net, state).logits(net, x, valid)


def probabilities(method, net, state, x, valid=None):
    """Return probabilities of a prediction without learning."""
    x, valid, _ = screen(x, valid)
    return method.deployed(net, state).logits(net, x, valid).softmax(-1)


past = {}


def loss_that_remembers(method, logits, valid):
    loss = mean_entropy(logits, valid)
    before, past["loss"] = past.get("loss", 0), loss.detach().mean()
    return loss * (1 + before)


def step_without_a_screen(method, net, state, x, valid=None, retired=None):
    with torch.enable_grad():
        affine = state.affine.leaf()
        logits = net(x, affine, method.deployed(net, state).stats, PerBatch()).logits
        grads = Affine(*torch.autograd.grad(entropy(logits).mean(1).sum(), affine))
    moved, moments = adam_step(state.affine, grads, state.adam, method.lr)
    valid = torch.ones(x.shape[:2], dtype=torch.bool)
    update = Update(logits, state._replace(affine=moved, adam=moments), affine=moved)
    return commit_step(net, state, update, valid, torch.zeros(len(x), dtype=torch.int64))


def kept_if(gate):
    """Return an update that is kept in the streams that ``gate`` chooses by which images (S, B) are certain: (S,)."""

    def after(method, s):
        every = torch.ones(s.x.shape[:2], dtype=torch.bool)
        uncertainty = entropy(method.deployed(s.net, s.state).logits(s.net, s.x, every))
        chosen = gate(uncertainty < 0.4 * math.log(K)).expand(len(s.x))
        return s.y, s.new._replace(affine=select(chosen, s.new.affine, s.state.affine))

    return after


def move_on_nothing(method, s):
    moved, moments = adam_step(s.new.affine, Affine(*map(torch.zeros_like, s.new.affine)), s.new.adam, method.lr)
    return s.y, s.new._replace(affine=moved, adam=moments)


def deploy_zeros(method, net, state):
    return Tent.deployed(method, net, state._replace(affine=Affine(*map(torch.zeros_like, state.affine))))


def deploy_zero_weights(method, net, state):
    teacher = Cotta.deployed(method, net, state)
    return dataclasses.replace(teacher, weights=[{name: 0 * t for name, t in own.items()} for own in teacher.weights])


def predict_as_tent(method, net, state, x, valid=None):
    return Tent.deployed(method, net, state).logits(net, *screen(x, valid)[:2])


class GrowingState(NamedTuple):
    affine: Affine
    adam: Adam
    key: Key
    info: Info
    past: torch.Tensor  # (S, steps + 1, C)


def start_growing(method, net, streams=1, seed=0):
    start = TentWith.init(method, net, streams, seed)
    return GrowingState(*start, past=start.affine.weight.unsqueeze(1))


def grow(method, s):
    return s.y, s.new._replace(past=torch.cat((s.new.past, s.new.affine.weight.unsqueeze(1)), 1))


def step_with_labels(method, net, state, x, valid=None, retired=None, targets=None):
    return TentWith.step(method, net, state, x, valid)


def step_with_a_shared_threshold(method, net, state, x, valid=None, retired=None):
    return Tribe.step(method, net, state, x * x.mean() * 2, valid)


def learning_from(change):
    """Return an update of RoTTA that learns from a changed memory, and keeps the memory as it is."""

    def update(method, net, state, shape, due):
        other = state._replace(memory=change(method, state.memory, shape))
        return Rotta.update(method, net, other, shape, due)._replace(memory=state.memory)

    return update


def noisy(method, memory, shape):
    return memory._replace(image=memory.image + 0.1 * torch.rand_like(memory.image))


def full(method, memory, shape):
    return memory._replace(held=torch.full_like(memory.held, method.size))


def full_of_stand_ins(method, memory, shape):
    return full(method, memory, shape)._replace(image=images(memory, shape).flatten(2))


def updating(name, change):
    """Return an update of RoTTA after which the scales of a branch are changed: ``change(old, new)``."""

    def update(method, net, state, shape, due):
        new = Rotta.update(method, net, state, shape, due)
        old, branch = getattr(state, name), getattr(new, name)
        weight = change(old.affine.weight, branch.affine.weight)
        return new._replace(**{name: branch._replace(affine=branch.affine._replace(weight=weight))})

    return update


def teach_free_places(method, net, state, shape, due):
    with torch.enable_grad():
        affine = state.affine.leaf()
        seen, counts = images(state.memory, shape), filled(state.memory) & due.unsqueeze(1)
        logits, _, stats = net(seen, affine, state.stats, method._norm(observing=True), valid=counts)
        grads = Affine(*torch.autograd.grad(entropy(logits).mean(1).sum(), affine))
    moved, moments = adam_step(state.affine, grads, state.adam, method.lr)
    return state._replace(affine=moved, stats=stats, adam=moments)


def drawing_by(seeds):
    """Return what NOTE does with arrivals, drawn by other seeds."""

    def remember(method, state, x, seen, arriving):
        other = state._replace(key=state.key._replace(seed=seeds(state.key.seed)))
        return Note.remember(method, other, x, seen, arriving)._replace(key=state.key)

    return remember


TENT, TRIBE, ROTTA, NOTE = TentWith(), TribeWith(classes=K), Rotta(classes=K), Note(classes=K)
IN_PLACE = mutant("moves the old student", ROTTA, update=updating("student", lambda old, new: old.copy_(new)))
METHOD_MUTANTS = {
    "streams_are_independent": [
        mutant("batch statistics of all streams", TENT, rule=PooledOverRows()),
        mutant("learns if any image of any stream is certain", TENT, after=kept_if(torch.any)),
        mutant("learns if every image of every stream is certain", TENT, after=kept_if(torch.all)),
        mutant("a threshold of all streams", TRIBE, step=step_with_a_shared_threshold),
        mutant(
            "one teacher for all streams, from the first update on",
            ROTTA,
            update=updating("teacher", lambda old, new: new.mean(0, keepdim=True).expand_as(new).clone()),
        ),
        mutant("one lot for all streams", NOTE, remember=drawing_by(lambda seed: seed[:1].expand_as(seed))),
    ],
    "mutates_nothing": [
        mutant("moves the old state", TENT, then=lambda m, s: s.state.affine.weight.copy_(s.new.affine.weight)),
        mutant("a counter on the object", TENT, before=lambda m: vars(m).update(calls=vars(m).get("calls", 0) + 1)),
        mutant("moves a weight", TENT, then=lambda m, s: next(s.net.model.parameters()).data.mul_(1.001)),
        IN_PLACE,
    ],
    "saves_and_resumes": [mutant("a moving average that no file holds", TENT, loss=loss_that_remembers)],
    "stays_on_the_device_of_its_images": [
        mutant("calls cuda", TENT, loss=lambda m, z, valid: mean_entropy(z, valid.cuda())),
        mutant("moves to a GPU", TENT, loss=lambda m, z, valid: mean_entropy(z, valid.to("cuda:1"))),
        mutant(
            "makes a tensor on a GPU",
            TENT,
            loss=lambda m, z, valid: mean_entropy(z, valid) * torch.ones(1, device=torch.device("cuda")),
        ),
    ],
    "is_deterministic": [
        mutant("global noise", TENT, loss=lambda m, z, valid: mean_entropy(z + 0.1 * torch.randn_like(z), valid)),
        mutant(
            "draws from numpy's generator the same numbers in every step",
            TENT,
            before=lambda m: np.random.seed(0),
            loss=lambda m, z, valid: mean_entropy(z, valid) * (1 + 0.1 * np.random.random()),
        ),
        mutant("seeds Python's generator", TENT, before=lambda m: random.seed(2)),
        mutant(
            "seeds torch's generator where nothing is learned",
            TENT,
            not_exportable_because=None,
            predict=lambda m, *given: torch.manual_seed(0) and TentWith.predict(m, *given),
        ),
        mutant("learns from global noise", ROTTA, update=learning_from(noisy)),
        mutant(
            "draws by a seed of numpy's global generator",
            NOTE,
            remember=drawing_by(lambda seed: torch.from_numpy(np.random.randint(0, 2**31, seed.shape))),
        ),
    ],
    "its_clock_ticks": [
        mutant("a standing clock", TRIBE, after=lambda m, s: (s.y, s.new._replace(key=s.state.key))),
        mutant(
            "a clock that counts images",
            TRIBE,
            after=lambda m, s: (s.y, s.new._replace(key=s.state.key._replace(clock=s.new.info.images))),
        ),
        mutant(
            "one seed for all streams, once they have begun",
            TRIBE,
            after=lambda m, s: (s.y, s.new._replace(key=s.new.key._replace(seed=s.new.key.seed[[0, 0]]))),
        ),
    ],
    "stays_finite": [
        mutant(
            "a mean over the confident samples, also over none",
            TENT,
            loss=lambda m, z, valid: (entropy(z) * (sure := valid & (entropy(z) < 1e-3))).sum(1) / sure.sum(1),
        ),
        mutant("NaN images go straight in", TENT, step=step_without_a_screen),
    ],
    "keeps_no_graph": [
        mutant(
            "keeps a graph",
            TENT,
            after=lambda m, s: (s.y + 0 * s.state.affine.weight.detach().requires_grad_().sum(), s.new),
        ),
        mutant(
            "an update that keeps its graph",
            ROTTA,
            update=updating("student", lambda old, new: new.clone().requires_grad_() * 1),
        ),
    ],
    "padding_weighs_nothing": [
        mutant("padding in the loss", TENT, loss=lambda m, z, valid: entropy(z).mean(1)),
        mutant("free places weigh", ROTTA, update=learning_from(full)),
        mutant("stand-ins weigh", ROTTA, update=learning_from(full_of_stand_ins)),
        mutant("free places are in the loss", NOTE, update=teach_free_places),
    ],
    "a_poisoned_batch_touches_nothing": [mutant("momentum without an image", TENT, after=move_on_nothing)],
    "says_nothing_of_what_does_not_count": [
        mutant(
            "predicts what stands in for an image that is not finite",
            TENT,
            after=lambda m, s: (torch.where(counted(s.x, s.valid), s.y, raw(m, *s[:4])), s.new),
        ),
        mutant("the same without learning", TENT, not_exportable_because=None, predict=raw),
        mutant("predicts padding", TENT, after=lambda m, s: (torch.where(counted(s.x), raw(m, *s[:3]), s.y), s.new)),
        mutant(
            "logits that prefer a class for an image that is not finite",
            LameWith(),
            after=lambda m, s: (torch.where(counted(s.x, s.valid), s.y, torch.eye(K)[0]), s.new),
        ),
    ],
    "reusing_memory_changes_no_number": [
        mutant(
            "writes into the state in use, although another one was retired",
            TENT,
            then=lambda m, s: s.retired and s.state.affine.bias.copy_(s.new.affine.bias),
        ),
        IN_PLACE,
    ],
    "prediction_comes_before_learning": [
        mutant("learns first", TENT, after=lambda m, s: (m.predict(s.net, s.new, s.x, s.valid), s.new)),
    ],
    "predicts_with_what_it_deploys": [
        mutant("deploys zeros", TENT, not_exportable_because=None, deployed=deploy_zeros, predict=predict_as_tent),
        mutant("deploys zero weights", Cotta(classes=K, p_th=0.0), deployed=deploy_zero_weights),
        mutant(
            "deploys what has not adapted",
            TENT,
            not_exportable_because=None,
            deployed=lambda m, net, state: Deployed(*net.source(len(state.key.seed)), PerBatch()),
            predict=predict_as_tent,
        ),
        mutant("corrects unsaid", Corrected(), not_exportable_because=None),
        mutant("says it corrects", TENT, not_exportable_because="it says so"),
    ],
    "cost_does_not_grow": [
        mutant("keeps where every step led", TENT, init=start_growing, after=grow),
        mutant(
            "a report of another type from the first batch on",
            TENT,
            after=lambda m, s: (s.y, s.new._replace(info=s.new.info._replace(entropy=s.new.info.entropy.double()))),
        ),
    ],
    "never_sees_labels": [mutant("takes labels by another name", TENT, step=step_with_labels)],
    "adapts": [
        mutant("claims to adapt", TentWith(lr=0.0)),
        mutant("says that it does not adapt", Tent(), does_not_adapt="it says so"),
    ],
    "batch_size_may_change": [
        mutant(
            "remembers the size of the first batch",
            TENT,
            loss=lambda m, z, valid: mean_entropy(z[:, :6], valid[:, :6]) + 0 * z[:, 5].sum(),
        ),
    ],
    "returns_logits": [
        mutant("probabilities", TENT, after=lambda m, s: (s.y.softmax(-1), s.new)),
        mutant("probabilities without learning", TENT, not_exportable_because=None, predict=probabilities),
    ],
    "is_documented": [
        mutant(None, TENT, paper="a paper"),
        mutant("has an idea and no paper", TENT, paper=""),
    ],
    "a_few_images_are_enough": [
        mutant("no check but one plays enough images", ROTTA, small={"size": 8}),
        mutant("no check plays more images than it holds", NOTE, small={}),
    ],
}

# -- data sets and scenarios -------------------------------------------------------------------------------------------


class Healthy:
    """Two domains of images that depend on nothing but domain and position; the third cannot be read."""

    classes, domains = tuple("abc"), ("fog@5", "snow@5")

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.pixels = torch.rand(2, 9, 3, 4, 4, generator=draw)
        self.pixels[0, 2] = float("nan")

    def labels(self, domain):
        self.domains.index(domain)
        return self.relabel(torch.arange(9) % 4 - 1)

    def images(self, domain, index):
        if index.min() < 0:
            raise IndexError("no such image")
        return self.change(self.pixels[self.domains.index(domain)][index])

    def relabel(self, y):
        return y

    def change(self, x):
        return x


def poisoned(data, x):
    x[:, 0, 0, 0] = float("nan")
    return x


def noise_by_place(data, x):
    return (x + torch.linspace(0, 0.1, len(x)).view(-1, 1, 1, 1)).clamp_max(1)


def domains_of_two_sizes(data, domain, index):
    return Healthy.images(data, domain, index)[..., : 3 + data.domains.index(domain)]


def in_file_order(data, domain, index):
    return Healthy.images(data, domain, index.sort().values)


def handed_out_cache(data, domain, index):
    return vars(data).setdefault(f"{domain} {index.tolist()}", Healthy.images(data, domain, index))


def shifted_index(data, domain, index):
    x = Healthy.images(data, domain, index)
    index += 1
    return x


def next_block(data, domain, index):
    if index.min() < 0:
        raise IndexError("no such image")
    return torch.cat((*data.pixels, data.pixels[0]))[index + 9 * data.domains.index(domain)]


DATA, calls = Healthy(), itertools.count()
DATASET_MUTANTS = {
    "names_are_different": [
        mutant("no domains", DATA, domains=()),
        mutant("a domain twice", DATA, domains=("fog@5", "fog@5")),
    ],
    "labels_fit_the_classes": [
        mutant("labels as floats", DATA, relabel=lambda _, y: y.float()),
        mutant("labels from one", DATA, relabel=lambda _, y: y + 1),
        mutant("labels in another order", DATA, relabel=lambda _, y: y.roll(next(calls))),
    ],
    "images_are_in_range": [
        mutant("bytes", DATA, change=lambda _, x: x * 255),
        mutant("channels last", DATA, change=lambda _, x: x.permute(0, 2, 3, 1)),
        mutant("doubles", DATA, change=lambda _, x: x.double()),
        mutant("drops images", DATA, change=lambda _, x: x[x.isfinite().flatten(1).all(1)]),
        mutant("a poisoned corner", DATA, change=poisoned),
        mutant("domains of different sizes", DATA, images=domains_of_two_sizes),
    ],
    "order_of_reading_does_not_matter": [
        mutant("noise by the place in the batch", DATA, change=noise_by_place),
        mutant("scales by the batch", DATA, change=lambda _, x: x / x.nan_to_num(0).max()),
        mutant("sorts the index", DATA, images=in_file_order),
    ],
    "reading_again_gives_the_same": [
        mutant("global noise", DATA, change=lambda _, x: x * torch.rand(1)),
        mutant("hands out its cache", DATA, images=handed_out_cache),
        mutant("shifts the index it is given", DATA, images=shifted_index),
    ],
    "what_is_not_there_is_refused": [
        mutant("takes any domain for the first", DATA, labels=lambda s, _: Healthy.labels(s, s.domains[0])),
        mutant("counts from the end", DATA, images=lambda s, d, index: s.pixels[s.domains.index(d)][index]),
        mutant("reads the next block", DATA, images=next_block),
    ],
}
SEED_OF_THE_CLOCK = mutant(
    "says that the seed changes nothing, and draws",
    Replay(),
    play=lambda scenario, labels, classes, rng: rng.permutation(len(labels)),
)
KILLED = NORM_MUTANTS | METHOD_MUTANTS | DATASET_MUTANTS | {"same_seed_same_schedule": [SEED_OF_THE_CLOCK]}
MUTANTS = [(mutant, check) for check, mutants in KILLED.items() for mutant in mutants]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=name_of)
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
    for gate in (torch.any, torch.all):
        CHECKS["streams_are_independent"](
            mutant("decides for each", TENT, after=kept_if(lambda c, gate=gate: gate(c, 1)))
        )


def test_a_method_with_its_own_predict_says_what_it_does_besides():
    with pytest.raises(TypeError, match="not_exportable_because"):
        mutant("says nothing", Tent(), predict=Tent.predict)


@pytest.mark.parametrize("works_on", [("bogus",), ("affine", "bogus"), "affine"])
def test_what_a_method_works_on_is_a_part_of_a_network(works_on):
    with pytest.raises(TypeError, match="works_on"):
        mutant("works on what no network has", Tent(), works_on=works_on)


def test_every_check_kills_something():
    checks = testing.METHOD_CHECKS + testing.NORM_CHECKS + testing.DATASET_CHECKS
    assert {check.__name__ for check in checks} <= {check for _, check in MUTANTS}


def test_a_failure_names_method_and_property():
    with pytest.raises(AssertionError, match=r"TentWith.*fails adapts"):
        testing.check_method(TentWith(lr=0.0))


def test_a_gpu_that_a_method_names_is_the_cause_in_words():
    on_gpu = mutant("calls cuda", TENT, loss=lambda m, z, valid: mean_entropy(z, valid.cuda()))
    with pytest.raises(AssertionError, match=r"fails stays_on_the_device_of_its_images.*x\.device"):
        testing.check_method(on_gpu)


def test_source_passes_through_the_public_door():
    testing.check_method(Source(classes=K))
    testing.check_norm(Balanced(classes=3, gamma=0.3, convention="paper"))
