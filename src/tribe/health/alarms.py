"""Alarms of every stream: faults of the camera, a change of the images, and adapting that goes wrong.

Three pure functions over rows watch a method: `Alarms.look` before it learns, `Alarms.observe` after, and
`Alarms.compare` its estimated accuracy. They do not synchronise, so that they can be part of a captured step. On the
host, `tribe.health.report` turns what is new into events in words. Adapting that goes wrong shows in what a method
predicts and how far it moved; each sign is compared with a cause:

drift        the affine parameters moved further than the number of steps explains
collapse     nearly all predictions are one class or two, while the source's predictions of the same images are spread,
             and it hardly sees these classes
scatter      neighbours share their class according to the source, but not according to the adapted network: batches of
             few classes are normalised with their own statistics, and answers spread over classes that are not there

A stream may show one class for a thousand images, so one class alone is not a sign. Without the source's predictions
`scatter` cannot be measured, and `collapse` needs longer. Thresholds were chosen on CIFAR-10-C; see docs/health.md.
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import COUNT, MOST, NOT_NEGATIVE, Bounds
from tribe.core.losses import entropy
from tribe.health.frames import FrameRules, FrameState, Verdict, judge, start_frames
from tribe.health.martingale import Martingale, MartingaleState, Reference, rank

FAULTS = Verdict._fields
KINDS = (*FAULTS, "shift", "accuracy", "drift", "collapse", "scatter")
SHIFT, ACCURACY, COLLAPSE = (KINDS.index(kind) for kind in ("shift", "accuracy", "collapse"))
NUMBERS = 4  # the most that the text of an alarm says
BEGIN, END = 0.5, 0.1  # share of faulty frames at which an alarm begins and ends
FALLEN, BACK = 0.1, 0.05  # how far below that of clean images an accuracy is, for certain, if an alarm begins and ends

NEAR, MIDDLE, FAR = 32, 256, 2000  # images: neighbours, a burst, the mixture of bursts
WINDOWS = (NEAR, MIDDLE, FAR, NEAR, MIDDLE)  # of the rows of `CollapseState.shares`: three adapted, two of the source
EVERY = 4  # if the source predicts fewer than one image in so many, it takes longer to see a burst
FEW = 2  # among so many predictions of the source half of the order is luck
PURE = 0.4  # the share of a class above 1 / K at which the source sees a burst of it
AGREES = 0.2  # the share of a class above 1 / K at which the source, too, sees it often
MOST_STEPS = 2500  # after which no more drift is explained by steps: 0.6 of the norm
PAIRS = 16  # weight of pairs with earlier images; a batch of n has (n - 1) / 2 pairs of its own for each image


@dataclass(frozen=True)
class CollapseRules:
    """The thresholds, each with what healthy streams reach."""

    drift: float = 0.012  # distance / sqrt(steps): TRIBE 0.0015, TENT 0.003; learning rate x 30 starts at 0.047
    steps: int = 4  # steps before the distance counts
    share: float = 0.93  # of one class in about 250 predictions; TRIBE reaches 0.855 where the source is spread
    spread: float = 0.22  # the source's predictions are spread below: 0 if uniform, 1 if one class
    alone: float = 0.995  # of one class without the source's predictions: 1,300 images in a row
    shares: float = 0.4  # part of the concentration of predictions that the source's must share
    unconfirmed: float = 0.1  # by which they share less; healthy streams reach 0.082. A quarter of it ends the alarm
    follow: float = 0.5  # part of the source's order that predictions must follow
    margin: float = 0.03  # of order that they may lack besides
    evidence: float = 12.0  # images without any order; TRIBE reaches 6 (8 with few source predictions), BN and TENT 10


BURST = Bounds(-1, MOST, classes=True)  # a class, or none


class CollapseState(NamedTuple):
    """Histograms of predictions over windows of several lengths, and sums."""

    shares: Annotated[Tensor, NOT_NEGATIVE]  # (S, 5, K) exponential means times `weight`
    weight: Annotated[Tensor, NOT_NEGATIVE]  # (S, 5) how full each window is
    steps: Annotated[Tensor, COUNT]  # (S,) int64
    evidence: Tensor  # (S,) of scatter, in images
    length: Annotated[Tensor, COUNT]  # (S,) int64, images since there was no evidence
    burst: Annotated[Tensor, BURST]  # (S,) int64, the class of the source's last burst; -1: none
    # (S,) int64, images since the source's bursts changed their class; FAR: never, or long ago
    changed: Annotated[Tensor, COUNT]


class Signs(NamedTuple):
    """The signs that each stream shows, and their numbers, (S,) each."""

    drift: Tensor
    collapse: Tensor
    unconfirmed: Tensor  # a quarter of what begins a collapse: then it does not end
    scatter: Tensor
    top: Tensor
    top_share: Tensor
    order: Tensor
    source_order: Tensor


def start_collapse(streams: int, classes: int, device: torch.device | str | None = None) -> CollapseState:
    """The state before the first image."""
    one = torch.zeros(streams, device=device)
    shares = torch.zeros(streams, len(WINDOWS), classes, device=device)
    count = one.to(torch.int64)
    return CollapseState(shares, shares[..., 0].clone(), count, one, count.clone(), count - 1, count + FAR)


class AlarmState(NamedTuple):
    """Everything that the alarms of a stream remember; n is the number of `KINDS`."""

    frames: FrameState
    martingale: MartingaleState
    collapse: CollapseState
    images: Annotated[Tensor, COUNT]  # (S,) int64, images seen
    faults: Annotated[Tensor, NOT_NEGATIVE]  # (S, 7) share of the last frames that show each fault
    first: Annotated[Tensor, COUNT]  # (S, 7) int64, after how many images each fault began
    on: Tensor  # (S, n) bool, which alarms are on
    times: Annotated[Tensor, COUNT]  # (S, n) int64, how often each alarm began
    image: Annotated[Tensor, COUNT]  # (S, n) int64, images seen when it last began
    since: Annotated[Tensor, COUNT]  # (S, n) int64, after how many images its cause began
    numbers: Tensor  # (S, n, 4) what `read` says of it
    fine: Annotated[Tensor, COUNT]  # (S,) int64, images when the estimated accuracy was last above the alarm's


@dataclass(frozen=True)
class Alarms:
    """The settings of all alarms."""

    frames: FrameRules = FrameRules()  # noqa: RUF009
    collapse: CollapseRules = CollapseRules()
    martingale: Martingale = Martingale()  # noqa: RUF009
    window: int = 32  # frames of which half must be faulty

    def init(self, streams: int, classes: int, device: torch.device | str | None = None) -> AlarmState:
        """The state before the first image."""
        count = torch.zeros(streams, len(KINDS), dtype=torch.int64, device=device)
        share = torch.zeros(streams, len(FAULTS), device=device)
        return AlarmState(
            frames=start_frames(streams, device),
            martingale=self.martingale.init(streams, device),
            collapse=start_collapse(streams, classes, device),
            images=count[:, 0].clone(),
            faults=share,
            first=share.to(torch.int64),
            on=count > 0,
            times=count,
            image=count.clone(),
            since=count.clone(),
            numbers=torch.zeros(streams, len(KINDS), NUMBERS, device=device),
            fine=count[:, 0].clone(),
        )

    @torch.no_grad()
    def look(self, state: AlarmState, x: Tensor, valid: Tensor) -> tuple[Verdict, AlarmState]:
        """Judge images (S, B, ...) before a method learns from them: ``teaches_nothing`` of the verdict says which."""
        verdict, frames = judge(self.frames, state.frames, x, valid)
        marked = torch.stack(verdict, 2)  # (S, B, 7)
        count = valid.sum(1, keepdim=True)
        share = marked.sum(1) / count.clamp_min(1)
        faults = torch.lerp(share, state.faults, torch.exp(count / -self.window))
        before = (valid.cumsum(1) - 1).unsqueeze(2)  # real images of the batch before each
        start = torch.where(marked, before, valid.shape[1]).amin(1) + state.images.unsqueeze(1)
        fewer_than_one = state.faults < 1 - math.exp(-0.9 / self.window)
        first = torch.where(marked.any(1) & fewer_than_one, start, state.first)
        return verdict, state._replace(frames=frames, faults=faults, first=first)

    @torch.no_grad()
    def observe(
        self,
        state: AlarmState,
        verdict: Verdict,
        output: Tensor,
        valid: Tensor,
        distance: Tensor,
        *,
        source: Tensor | None = None,
        known: Tensor | None = None,
        reference: Reference | None = None,
    ) -> AlarmState:
        """Add what a method did with a batch. Frames that teach nothing say nothing of the method and are left out.

        `look` returned the state and the verdict. ``output`` are the method's logits (S, B, K), ``source`` the source's
        of the images that are ``known`` (S, B; None: all), and ``distance`` (S,) is how far the affine parameters have
        moved. "shift" needs a ``reference``.
        """
        images = state.images + valid.sum(1)
        valid = valid & ~verdict.teaches_nothing
        sourced = torch.zeros_like(valid) if source is None else valid if known is None else valid & known
        own = output.argmax(2)
        classes = own if source is None else source.argmax(2)
        predicted, counted = torch.stack((own, classes), 1), torch.stack((valid, sourced), 1)
        signs, collapse = look_for_collapse(self.collapse, state.collapse, predicted, counted, distance)
        state = state._replace(collapse=collapse)
        if reference is not None:
            logits, ranked = (output, valid) if source is None else (source, sourced)
            ranks = rank(reference, entropy(logits) / math.log(logits.shape[2]), classes)
            _, martingale = self.martingale.step(reference, state.martingale, ranks, ranked, state.images)
            state = state._replace(martingale=martingale)
        return _update(state, signs, images, distance, compared=reference is not None)

    @torch.no_grad()
    def compare(
        self, state: AlarmState, estimate: tuple[Tensor, Tensor, Tensor], clean: float, due: Tensor
    ) -> AlarmState:
        """Compare the estimated accuracy of the streams that are ``due`` (S,) with that of ``clean`` images.

        ``estimate`` has the accuracy and the ends of its interval, (S,) each. The alarm "accuracy" begins where the
        whole interval lies `FALLEN` below, and ends where it does not lie `BACK` below.
        """
        accuracy, low, high = estimate
        fallen, back = high < clean - FALLEN, high >= clean - BACK
        was_on = state.on[:, ACCURACY]
        on = state.on.clone()
        on[:, ACCURACY] = torch.where(due, fallen | (was_on & ~back), was_on)
        numbers = torch.stack((accuracy, low, high, torch.full_like(high, clean)), 1)
        state = _begin(state, on, state.fine.unsqueeze(1), numbers.unsqueeze(1).to(state.numbers.dtype))
        return state._replace(fine=torch.where(due & (accuracy >= clean - FALLEN), state.images, state.fine))


def _update(state: AlarmState, signs: Signs, images: Tensor, distance: Tensor, compared: bool) -> AlarmState:
    """Update the alarms after so many images (S,): which are on, and when and with which numbers others begin."""
    bet = state.martingale
    began, ranks, mean = bet.since[:, 0], bet.ranks[:, 0], bet.level
    if compared:  # else they stay as they were in the beginning
        larger, mean = bet.level > 0, bet.level + 0.5
        began, ranks = (torch.where(larger, t[:, 0], t[:, 1]) for t in (bet.since, bet.ranks))
    was_on = state.on[:, : len(FAULTS)]
    faulty = torch.where(was_on, state.faults > END, state.faults >= BEGIN)
    scatter = signs.scatter | (state.on[:, -1] & (state.collapse.evidence > 0))  # until nothing speaks for it
    collapse = signs.collapse | (state.on[:, COLLAPSE] & signs.unconfirmed)
    kinds = bet.changed, state.on[:, ACCURACY], signs.drift, collapse, scatter
    on = torch.cat((faulty, torch.stack(kinds, 1)), 1)

    filling = (1 - signs.top_share).clamp_min_(1e-6).log_().mul_(MIDDLE)  # a window of one class fills so fast
    pure = (images + filling).long().clamp_min_(0)
    ordered = (images - state.collapse.length).clamp_min_(0)
    since = torch.cat((state.first, torch.stack((began, state.fine, state.images, pure, ordered), 1)), 1)
    none = torch.zeros_like(mean)  # `Alarms.compare` has the numbers of the accuracy
    pairs = mean, ranks, none, none, distance, state.collapse.steps, signs.top_share, signs.top, signs.order
    others = torch.stack([t.float() for t in (*pairs, signs.source_order)], 1).unflatten(1, (-1, 2))
    faults = torch.stack((state.faults, state.frames.grey.unsqueeze(1).expand_as(state.faults)), 2)
    numbers = torch.nn.functional.pad(torch.cat((faults, others), 1), (0, NUMBERS - 2))
    return _begin(state._replace(images=images), on, since, numbers)


def _begin(state: AlarmState, on: Tensor, since: Tensor, numbers: Tensor) -> AlarmState:
    """Return the state with the alarms that are ``on`` (S, n), and what is known of those that begin."""
    begins = on & ~state.on
    return state._replace(
        on=on,
        times=state.times + begins,
        image=torch.where(begins, state.images.unsqueeze(1), state.image),
        since=torch.where(begins, since, state.since),
        numbers=torch.where(begins.unsqueeze(2), numbers, state.numbers),
    )


# -- adapting that goes wrong ------------------------------------------------------------------------------------------


@torch.no_grad()
def look_for_collapse(
    rules: CollapseRules, state: CollapseState, predicted: Tensor, counted: Tensor, distance: Tensor
) -> tuple[Signs, CollapseState]:
    """Add the classes (S, 2, B) that network and source predicted, those ``counted``; return signs and next state."""
    batch = _count(state, predicted, counted)
    means = state.shares / state.weight.unsqueeze(2).clamp_min(1e-6)
    order, source_order = _order(batch, means)
    evidence = _evidence(rules, state, batch, order, source_order)
    shares, weight = _add(state, batch)
    own_count, source_count = batch.counts.unbind(1)
    steps = state.steps + (own_count > 0)
    top_share, top = shares[:, 1].max(1)  # not divided by the weight: a short stream does not collapse
    near, far = means[:, ::3], means[:, 2::2]
    beyond_chance = (near * (near - far)).sum(2)  # for people; `order` decides
    collapse, unconfirmed = _collapsed(rules, shares, weight, top, top_share)
    signs = Signs(
        drift=(distance > rules.drift * steps.clamp_max(MOST_STEPS).sqrt()) & (steps >= rules.steps),
        collapse=collapse,
        unconfirmed=unconfirmed,
        scatter=evidence >= rules.evidence,
        top=top,
        top_share=top_share,
        order=beyond_chance[:, 0],
        source_order=beyond_chance[:, 1],
    )
    length = torch.where(evidence > 0, state.length + own_count, 0)
    bursts = _follow_bursts(state, shares[:, 3:], weight[:, 3:], own_count, source_count)
    return signs, CollapseState(shares, weight, steps, evidence, length, *bursts)


class Histograms(NamedTuple):
    """The predictions of a batch: of the adapted network, and of the source."""

    shares: Tensor  # (S, 2, K) of the classes
    counts: Tensor  # (S, 2) of the predictions


def _count(state: CollapseState, predicted: Tensor, counted: Tensor) -> Histograms:
    """Count the predictions (S, 2, B) of a batch by class, those that are ``counted``."""
    count = counted.sum(2)
    hits = state.shares.new_zeros(*count.shape, state.shares.shape[2]).scatter_add_(2, predicted, counted.float())
    return Histograms(hits / count.clamp_min(1).unsqueeze(2), count)


def _order(batch: Histograms, means: Tensor) -> tuple[Tensor, Tensor]:
    """The excess over chance of neighbours that share their class (S,): adapted network, and source."""
    near, far = means[:, ::3], means[:, 2::2]  # (S, 2, K) each: of `WINDOWS` 0 and 3, 2 and 4
    alike, source_alike = _alike(batch.shares, batch.counts, near).unbind(1)
    chance, source_chance = (batch.shares * far).sum(2).unbind(1)
    lately = (batch.shares[:, 0] * means[:, 1]).sum(1)  # over the source's horizon
    return alike - torch.minimum(chance, lately), source_alike - source_chance


def _evidence(
    rules: CollapseRules, state: CollapseState, batch: Histograms, order: Tensor, source_order: Tensor
) -> Tensor:
    """The evidence of scatter (S,): images whose order the source sees and the adapted network does not."""
    own_count, source_count = batch.counts.unbind(1)
    asked = source_count / own_count.clamp_min(1) * own_count.clamp_min(NEAR)
    expected = rules.follow * asked / (asked + FEW) * source_order
    # NOTE: an order below 0 is a stream whose classes have become more even, not a lack of order.
    lack = own_count * (expected - order.clamp_min(0) - rules.margin)
    # NOTE: a source that says one class after all classes may be stuck: bursts are those that change their class.
    lack = torch.where(state.changed < FAR, lack, lack.clamp_max(0))
    started = (source_count > 0) & (state.weight[:, 3] > 0)
    return (state.evidence + torch.where(started, lack, 0.0)).clamp_(0, 2 * rules.evidence)


def _add(state: CollapseState, batch: Histograms) -> tuple[Tensor, Tensor]:
    """The shares (S, 5, K) of all windows after a batch, and their weight (S, 5)."""
    own_count, source_count = batch.counts.unbind(1)
    own_keep = torch.stack([torch.exp(own_count / -window) for window in WINDOWS[:3]], 1)
    source_keep = torch.where((source_count > 0).unsqueeze(1), own_keep[:, :2], 1.0)
    keep = torch.cat((own_keep, source_keep), 1)
    shown = torch.cat((batch.shares[:, :1].expand(-1, 3, -1), batch.shares[:, 1:].expand(-1, 2, -1)), 1)
    return torch.lerp(shown, state.shares, keep.unsqueeze(2)), torch.addcmul(1 - keep, state.weight, keep)


def _collapsed(
    rules: CollapseRules, shares: Tensor, weight: Tensor, top: Tensor, top_share: Tensor
) -> tuple[Tensor, Tensor]:
    """Mark the streams (S,) that predict one class or two that the source does not confirm, and that still do."""
    classes, source, filled = shares.shape[2], shares[:, 4], weight[:, 4]
    own = shares[:, 1] / weight[:, 1:2].clamp_min(1e-6)
    alike = (own * source).sum(1) / filled.clamp_min(1e-6) - 1 / classes
    lack = rules.shares * (own.square().sum(1) - 1 / classes) - alike.clamp_min(0)
    most = math.sqrt(rules.spread * (1 - 1 / classes) + 1 / classes)  # the norm of shares at the threshold of spread
    spread = torch.linalg.vector_norm(source, dim=1) <= most * filled
    agrees = source.gather(1, top.unsqueeze(1))[:, 0] >= (1 / classes + AGREES) * filled
    one = (top_share >= rules.share) & ~agrees
    few = (lack >= rules.unconfirmed) & (weight[:, 1] > 0.5)
    found = torch.where(filled > 0.5, (one | few) & spread, top_share >= rules.alone)
    return found, (lack >= rules.unconfirmed / 4) & spread


def _follow_bursts(
    state: CollapseState, shares: Tensor, weight: Tensor, own_count: Tensor, their_count: Tensor
) -> tuple[Tensor, Tensor]:
    """The next ``burst`` and ``changed``, from the source's near and middle windows (S, 2, K) and their weight."""
    dense = (EVERY * their_count >= own_count).unsqueeze(1)
    share, said = (shares / weight.unsqueeze(2).clamp_min(1e-6)).max(2)
    share, said, filled = (torch.where(dense, t[:, :1], t[:, 1:])[:, 0] for t in (share, said, weight))
    pure = (their_count > 0) & (share >= 1 / shares.shape[2] + PURE) & (filled > 0.5)
    switched = pure & (said != state.burst) & (state.burst >= 0)
    changed = torch.where(switched, 0, (state.changed + own_count).clamp_max(FAR))
    return torch.where(pure, said, state.burst), changed


def _alike(batch: Tensor, count: Tensor, near: Tensor) -> Tensor:
    """Return the share of neighbours of one class (S, 2).

    The n (n - 1) / 2 pairs of a batch count beside `PAIRS` n pairs with earlier images: all divided by n.
    """
    half = count.unsqueeze(2) / 2
    same = (batch * torch.add(half * batch, near, alpha=PAIRS)).sum(2)  # n / 2 pairs are of an image with itself
    return (same - 0.5) / (half[:, :, 0] + (PAIRS - 0.5))
