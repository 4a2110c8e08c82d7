"""Follow the stream at several speeds at once, and predict with the mixture that foresees it best: a bank of speeds.

Beyond the paper. One pass a batch, no gradient: what a step costs beside plain inference is the moments of each layer,
and the few images that pass twice. Per batch:

    predict     with the mixture of the source's statistics and those of every speed, from before this batch
    score       each speed by how well its pooled statistics foresaw the moments of this batch, in the same pass
    update      Balanced BN at every speed, with the labels just predicted
    compare     some predictions with the source's, which takes over where it is better: `tribe.methods.probing`
    look again  at the images after a change, with the source and at places that are known: `tribe.methods.places`

The score of a speed is the Gaussian negative log-likelihood of each image's moments (mean, var) in each channel,

    0.5 (log V + (var + (mean - M)^2) / V),    M, V the pooled mean and variance of the speed,

averaged over channels and over the last images. Images of classes that came often lately count less: a burst says
little about the world. The weights of the mixture are softmax(-score / temperature), where the source has a bonus:
adapting costs accuracy where little has changed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import TRUTH
from tribe.core.rules import Recorded
from tribe.core.state import Affine, Info, Stats, room_for, select, tree_map
from tribe.core.validation import warn
from tribe.fields import NotNegative, Positive, Range, Share, require
from tribe.methods import Backbone, Deployed, Frozen, Key, Method, ScreenedBatch, Update, finite, mask_logits, register
from tribe.methods.method import Part
from tribe.methods.places import (
    Arrival,
    PlaceMemory,
    World,
    arrive,
    first_world,
    measure_surprise,
    measure_surprise_and_excess,
    no_places,
    record,
    watch,
)
from tribe.methods.probing import Probes, add_probes, first_probes, source_share
from tribe.norms.balanced import Balanced, ClassSums, published_eta

GROUP = 8  # images that pass the source after each other, near together: fewer passes, of more images
MOST_WEIGHT = 10.0  # of an image of a rare class, relative to the mean


class BankState(NamedTuple):
    """Class statistics at every speed above 0, and how well each speed foresees the stream."""

    stats: Stats  # (V S, K, C), the V speeds of a stream are adjacent
    pooled: Stats  # (V S, 1, C), the same pooled over classes
    score: Tensor  # (S, V + 1) relative to the source, which is first; lower is better
    frequency: Annotated[Tensor, TRUTH]  # (S, K) of the classes predicted lately
    probes: Probes
    world: World
    places: PlaceMemory
    key: Key
    info: Info


@register("bank")
@dataclass(frozen=True)
class Bank(Method):
    """A bank of speeds. A field that is None gets a value for the number of classes."""

    speeds: tuple[float, ...] | None = None  # momenta of one image in Balanced BN, beside 0, the source
    gamma: Share | None = None  # share of the class-agnostic update; more where pseudo labels are poor
    bonus: NotNegative = 0.05  # by which the source's score is better than it measures
    temperature: Positive = 0.02  # of the weights: lower decides harder
    horizon: Positive = 300.0  # images over which scores and frequencies are averaged
    observe: Annotated[int, Range(low=1)] = 4  # an image in so many is observed
    compare: Annotated[int, Range(low=0)] = 32  # an image in so many also passes the source, in groups; 0: none does
    memory: Annotated[int, Range(low=0)] = 8  # places that are remembered; with compare=0 there are none

    paper = "none: one forward pass with TRIBE's Balanced BN at several speeds"
    works_on: ClassVar[tuple[Part, ...]] = ("statistics",)
    per_class = "statistics of each class"
    small = {"compare": 2}
    capture = "never"  # the host chooses the images that pass the source

    def __post_init__(self) -> None:
        super().__post_init__()
        speeds = tuple(self.speeds or ())
        fine = all(isinstance(v, int | float) and 0 < v <= 1 for v in speeds) and len(set(speeds)) == len(speeds) > 0
        expected = "speeds of bank are different numbers above 0 and at most 1, beside 0, which is the source"
        require(fine, expected, self.speeds)
        if len(speeds) == 1:
            warn("a bank of one speed has none to choose; expected two or more, such as 0.01, 0.03, 0.1")
        object.__setattr__(self, "speeds", tuple(float(v) for v in speeds))

    def defaults(self) -> dict[str, object]:
        """Return TRIBE's momentum, three and ten times as much, and its gamma for 100 classes at least.

        Where most labels are wrong, as at night, the statistics of single classes do not move: a share of all does.
        """
        eta = published_eta(self.class_count)
        speeds = tuple(dict.fromkeys(min(scale * eta, 1.0) for scale in (1, 3, 10)))
        return {"speeds": speeds, "gamma": self.published(0.1, 0.1, 0.5)}

    @cached_property
    def norm(self) -> Balanced:
        """Return Balanced BN; each row has a speed of its own."""
        return Balanced(self.class_count, gamma=self.gamma or 0.0)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> BankState:
        """Start every speed at the source."""
        assert self.speeds is not None
        rows = streams * len(self.speeds)
        stats, pooled = (net.source(rows, count)[1] for count in (self.class_count, 1))
        key, info = self.new_key_and_info(net, streams, seed)
        score = pooled.mean.new_zeros(streams, len(self.speeds) + 1)
        frequency = pooled.mean.new_full((streams, self.class_count), 1 / self.class_count)
        source: Stats = net.origin.state.stats
        probes = first_probes(pooled.mean, streams, self.class_count)
        world = first_world(source, streams, self.class_count)
        places = no_places(source, self.memory if self.compare else 0, streams)
        return BankState(stats, pooled, score, frequency, probes, world, places, key, info)

    def weights(self, state: BankState) -> Tensor:
        """Return the weights of the source and of every speed in the mixture: (S, V + 1)."""
        bonus = state.score.new_tensor([self.bonus] + [0.0] * (state.score.shape[1] - 1))
        weights = ((bonus - state.score) / self.temperature).softmax(1)
        if not self.compare:
            return weights
        source = self.source_share(state).unsqueeze(1)
        whole = torch.zeros_like(weights)
        whole[:, 0] = 1
        return weights.lerp(whole, source)

    def source_share(self, state: BankState) -> Tensor:
        """Return the share of the source (S,) beside the weights of the scores."""
        return source_share(state.probes, state.world.distance)

    def followed(self, state: BankState) -> Tensor:
        """Return the share of all speeds in the mixture, (S,)."""
        return 1 - self.weights(state)[:, 0]

    def deployed(self, net: Backbone, state: BankState) -> Deployed:
        """Return the source's parameters with the mixture of the statistics."""
        weights = self.weights(state).unsqueeze(2)
        mean, var = ((weights * t).sum(1, keepdim=True) for t in self._candidates(net, state))
        affine = Affine(*(t.expand(len(mean), -1) for t in net.origin.state.affine))
        return Deployed(affine, Stats(mean, var), Frozen())

    def _candidates(self, net: Backbone, state: BankState) -> Stats:
        """Return the statistics of the source and the pooled ones of every speed: (S, V + 1, C)."""
        streams, pairs = len(state.score), zip(net.origin.state.stats, state.pooled, strict=True)
        return Stats(
            *(
                torch.cat((own.expand(streams, -1, -1), t.view(streams, len(self.speeds or ()), t.shape[2])), 1)
                for own, t in pairs
            )
        )

    @torch.no_grad()
    def adapt(self, net: Backbone, state: BankState, batch: ScreenedBatch) -> Update:
        """Predict, score the speeds, update the statistics, and compare some predictions with the source's."""
        deployed, compares = batch.deploy(net, state), self.compare and net.has_statistics
        order = batch.valid.long().cumsum(1) - 1 + state.info.images.unsqueeze(1)  # (S, B), of each image in its stream
        observed = batch.valid & (order % self.observe == 0)
        part = self._part(observed, batch.valid)
        norm = deployed.norm if part is None else Recorded(part.start or 0, part.step or 1)
        logits, _, moments = net(batch.x, deployed.affine, deployed.stats, norm, valid=batch.valid)
        seen = batch.valid & finite(logits)
        logits = mask_logits(logits, seen)
        shown = (observed & seen)[:, part or slice(0)]
        world = state.world
        if compares and part is not None:
            world = self._watch(net, state, deployed, moments, shown)
        looking, arrival = world.look > 0, None
        if compares and looking.any():
            logits, world, arrival = self._look(net, state.places, deployed, world, batch.x, logits, seen)
        if batch.on_prediction is not None:
            batch.on_prediction(logits)
        new = state
        if part is not None:
            spare = None if batch.retired is None else batch.retired.stats
            new = self._follow(net, state, moments, logits[:, part].argmax(-1), shown, spare, self.observe)
            new = select(shown.any(1), new, state)
        if compares:
            new = self._probe(net, state, new._replace(world=world), batch.x, logits, seen, looking)
        if arrival is not None:
            new = self._begin(net, new, arrival)
        return Update(logits, new, seen=seen)

    def _part(self, observed: Tensor, valid: Tensor) -> slice | None:
        """Return the part of a batch that holds the images to observe (S, B); None: there are none."""
        if self.observe == 1:
            return slice(None)
        if not observed.any():
            return None
        if len(observed) > 1 or not valid.all():
            return slice(None)
        return slice(int(observed.byte().argmax()), None, self.observe)

    def _follow(
        self,
        net: Backbone,
        state: BankState,
        moments: Stats,
        labels: Tensor,
        seen: Tensor,
        spare: Any = None,
        weight: float = 1.0,
    ) -> BankState:
        """Score and update every speed with the moments (S, B, C) and the labels (S, B) of the images ``seen``.

        Each image stands for ``weight`` images.
        """
        sums = self.norm.sum_classes(moments, labels, seen, net.origin.state.stats.mean)
        images = sums.images.sum(1)  # (S, 1)
        keep = torch.exp(-weight * images / self.horizon)
        most = images.clamp_min(1)
        came = sums.images.squeeze(2) / most  # (S, G)
        seldom = (1 / (self.class_count * state.frequency)).clamp_max(MOST_WEIGHT)
        if sums.labels is not None:
            seldom = seldom.gather(1, sums.labels)
            came = torch.zeros_like(state.frequency).scatter_add(1, sums.labels, came)
        gain = self._surprise(net, state, sums, seldom / most)  # (S, V + 1)
        score = torch.lerp(gain - gain[:, :1], state.score, keep)
        frequency = torch.lerp(came, state.frequency, keep)
        stats = room_for(state.stats, spare)
        speeds = (images.new_tensor(self.speeds) * weight).clamp_max(1)
        pooled = self.norm.follow(state.stats, speeds.view(-1, 1, 1), sums, stats)
        return state._replace(stats=stats, pooled=pooled, score=score, frequency=frequency)

    def _watch(self, net: Backbone, state: BankState, deployed: Deployed, moments: Stats, shown: Tensor) -> World:
        """Watch the surprise of images; where the source normalises, their moments (S, B, C) are those of its pass."""
        surprise = measure_surprise_and_excess(moments, deployed.stats, net.origin.state.stats, net.eps)
        return watch(state.world, surprise, self.observe * shown.sum(1).to(surprise.dtype), shown)

    def _probe(
        self, net: Backbone, old: BankState, new: BankState, x: Tensor, logits: Tensor, seen: Tensor, looking: Tensor
    ) -> BankState:
        """Pass some images through the source too."""
        place, step = seen.long().cumsum(1) - 1 + old.info.images.unsqueeze(1), max(1, self.compare // 4)
        due = (place % (GROUP * self.compare) < GROUP * step) & (place % step == 0)
        chosen = seen & due & ~looking.unsqueeze(1)
        index = chosen.flatten().nonzero()[:, 0]
        if not len(index):
            return new
        source, stats = net.source()
        passed = net(x.flatten(0, 1)[index].unsqueeze(0), source, stats, Recorded())
        by_source = Stats(*(_spread(t[0], index, seen.shape) for t in passed.stats))
        passed_logits = _spread(passed.logits[0], index, seen.shape)
        both = chosen & finite(passed_logits)
        weight, by_source_logits = both.to(new.world.slow.dtype), mask_logits(passed_logits, both)
        probes = add_probes(old.probes, by_source_logits, logits, weight)
        classes = by_source_logits.to(weight).softmax(2)
        world = record(new.world, by_source, classes, weight, net.origin.state.stats, net.eps)
        return new._replace(probes=probes, world=world)

    def _look(
        self,
        net: Backbone,
        places: PlaceMemory,
        deployed: Deployed,
        world: World,
        x: Tensor,
        logits: Tensor,
        seen: Tensor,
    ) -> tuple[Tensor, World, Arrival | None]:
        """Pass the images of a new world through the source too, keep better predictions of them, and find the place.

        Of each image, that pass's prediction is kept which its moments surprise least.
        """
        looking, eps, own_source = world.look > 0, net.eps, net.origin.state.stats
        rows = (looking & seen.any(1)).nonzero()[:, 0]
        if not len(rows):
            return logits, world, None
        x, valid, (affine, stats) = x[rows], seen[rows], net.source(len(rows))

        def attempt(affine: Affine, stats: Stats) -> tuple[Tensor, Tensor, Stats]:
            passed = net(x, affine, stats, Recorded(), valid=valid)
            surprise = measure_surprise(Stats(*passed.stats), stats, eps)
            return passed.logits, surprise.where(finite(passed.logits), torch.inf), Stats(*passed.stats)

        mixture, moved = tree_map(lambda t: t[rows], deployed.stats), tree_map(lambda t: t[rows], deployed.affine)
        own = attempt(moved, mixture)
        source = attempt(affine, stats)
        predicted, surprise = [logits[rows], source[0]], [own[1], source[1]]
        order = valid.long().cumsum(1)
        latest = order > order[:, -1:] - world.look[rows].unsqueeze(1)
        weight = (valid & latest & finite(source[0])).to(world.slow.dtype)
        classes = mask_logits(source[0], weight > 0).to(weight).softmax(2)
        passed = (*source[2], classes, weight)
        mean, var, classes, weight = (t.new_zeros(len(seen), *t.shape[1:]).index_copy(0, rows, t) for t in passed)
        world, arrival = record(world, Stats(mean, var), classes, weight, own_source, eps), None
        arrived = looking & (world.look == 0)
        if arrived.any():
            arrival = arrive(arrived, world, places, deployed.stats, own_source, eps)
            world = arrival.world
            if arrival.recalled.any():
                place = attempt(affine, Stats(*(t[rows] for t in arrival.stats)))
                predicted.append(place[0])
                surprise.append(place[1].where(arrival.recalled[rows].unsqueeze(1), torch.inf))
        best = torch.stack(surprise).argmin(0)[None, ..., None]
        chosen = torch.stack(predicted).take_along_dim(best, 0)[0]
        return logits.index_copy(0, rows, mask_logits(chosen, valid)), world, arrival

    def _begin(self, net: Backbone, new: BankState, arrival: Arrival) -> BankState:
        """Begin the streams that have arrived somewhere at the statistics of that place."""
        streams = len(arrival.arrived)
        like = self.init(net, streams)
        begun = Stats(*(t.repeat_interleave(len(new.stats.mean) // streams, 0) for t in arrival.stats))
        stats = Stats(*(t.expand_as(s).clone() for t, s in zip(begun, new.stats, strict=True)))
        score = like.score.clone()
        score[:, 1:] = -(self.bonus + 4 * self.temperature) * arrival.recalled.to(score.dtype).unsqueeze(1)
        doubt = new.probes._replace(images=new.probes.images.clamp_max(2))
        new = new._replace(probes=select(arrival.arrived, doubt, new.probes), places=arrival.places)
        fresh = like._replace(stats=stats, pooled=begun, score=score, key=new.key, info=new.info)
        return select(arrival.moves, fresh, new)._replace(world=new.world, places=arrival.places)

    def _surprise(self, net: Backbone, state: BankState, sums: ClassSums, weight: Tensor) -> Tensor:
        """Return the negative log-likelihood of images, weighted by their class (S, G), under each speed: (S, V + 1).

        The square is expanded around the source's mean, so that no tensor of images, speeds and channels is made.
        """
        foreseen, spread = self._candidates(net, state)
        offset, spread = foreseen - sums.origin, spread + net.eps
        weight = weight.unsqueeze(2)
        total = (weight * sums.images).sum(1, keepdim=True)  # (S, 1, 1)
        linear, square = (weight * sums.joint).sum(1, keepdim=True).chunk(2, 2)  # (S, 1, C)
        apart = torch.addcmul(square + total * net.eps, offset, total * offset - 2 * linear)
        surprise: Tensor = 0.5 * torch.addcmul(apart / spread, total, spread.log()).mean(2)
        return surprise


def _spread(t: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Put the rows (n, ...) of chosen images at their places in a batch (S, B, ...); the others are 0."""
    room = t.new_zeros(shape.numel(), *t.shape[1:])
    spread: Tensor = room.index_copy(0, index, t).unflatten(0, tuple(shape))
    return spread
