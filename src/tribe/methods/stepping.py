"""Begin and end a step: which images count, what the network learns from them, and what the state reports."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.losses import entropy, mean_over
from tribe.core.packed import ClassStats
from tribe.core.state import JOINED, Affine, Info, flatten, select
from tribe.core.validation import good_images, in_range


def screen(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Replace padding and bad images (see `tribe.core.validation`) before the first layer.

    A copy of the stream's first good image replaces them. They weigh nothing, but must be finite in every layer: a
    network that standardises each image would make 0 / 0 of zeros.

    Returns the images, which of them count (S, B), and how many are real but bad (S,).
    """
    if not x.shape[1]:
        raise ValueError(f"a step needs at least one image a stream; got a batch of shape {tuple(x.shape)}")
    x = x.detach()
    offered = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
    if x.device.type == "cpu" and in_range(x) and (valid is None or valid.all()):  # it would synchronise elsewhere
        return x, offered, torch.zeros(x.shape[0], dtype=torch.int64)
    good = good_images(x)  # (S, B)
    valid = good & offered
    first = valid.byte().argmax(1)  # of every stream; a bad one, if none is good
    mask = valid.view(*valid.shape, *[1] * (x.dim() - 2))  # (S, B, 1, ...)
    spare = x[torch.arange(len(x), device=x.device), first].masked_fill(~mask.any(1), 0)
    return torch.where(mask, x, spare.unsqueeze(1)), valid, (offered & ~good).sum(1)


def finite(t: Tensor) -> Tensor:
    """Return whether all numbers of the last axis, or of all after the second, are finite: then their sum is."""
    values = t.flatten(2) if t.dim() > 3 else t
    return values.sum(-1, dtype=torch.float32).abs() < math.inf  # no comparison with NaN is true


def mask_logits(logits: Tensor, seen: Tensor) -> Tensor:
    """Set the logits of all images but those ``seen`` (S, B) to zero: every class is equally likely."""
    if seen.device.type == "cpu" and seen.all():
        return logits
    return torch.where(seen.view(*seen.shape, *[1] * (logits.dim() - 2)), logits, 0)


@torch.no_grad()
def report_agreement(info: Info, teacher: Tensor, student: Tensor, anchor: Tensor | None, valid: Tensor) -> Info:
    """Report on which share of the images that count (S, B) the branches' logits (S, B, K) predict the same class."""
    predicted = teacher.argmax(-1)
    info = info._replace(student_agreement=mean_over((predicted == student.argmax(-1)).float(), valid))
    if anchor is None:
        return info
    return info._replace(anchor_agreement=mean_over((predicted == anchor.argmax(-1)).float(), valid))


class ScreenedBatch(NamedTuple):
    """The images of a step or of a prediction, and the network that predicts them."""

    x: Tensor  # (S, B, ...), padding and bad images replaced: see `screen`
    valid: Tensor  # (S, B), images that count
    deploy: Callable[[Backbone, Any], Any]  # `Method.deployed`; under a guard, its network leans on the source
    on_prediction: Callable[[Tensor], object] | None = None  # what watches can work while the method learns
    retired: Any = None  # a state that is not read any more: the next one may take its memory


class Update(NamedTuple):
    """The predictions of a batch, and the state after it."""

    logits: Tensor  # (S, B, K)
    state: Any  # `commit_step` sets its key, and its info but for the agreement of branches
    trusted: Tensor | None = None  # (S, B), images that the method learned from; None: all
    affine: Affine | None = None  # the parameters that predict, for the distance from the source; None: they stayed
    seen: Tensor | None = None  # (S, B), images that count and have finite logits, where the others were left out


def commit_step(net: Backbone, old: Any, update: Update, valid: Tensor, rejected: Tensor) -> tuple[Tensor, Any]:
    """End a step: advance the clocks, fill in the report, and keep the old state of streams without a valid image.

    A stream also keeps its old state if a prediction or a learned number is not finite: a black image is sound and may
    have no features. Its images count as skipped.
    Returns the predictions, equal for images that do not count, and the next state.
    """
    logits, new = update.logits, update.state
    with torch.no_grad():
        offered = valid.sum(1)
        if update.seen is None:
            predicted = finite(logits)
            sane = (valid <= predicted).all(1) & _finite(new, old)  # (S,)
            predicted, count = valid & predicted, offered
        else:
            valid = predicted = update.seen
            sane, count = _finite(new, old), valid.sum(1)
        if (classes := logits.shape[2]) > 1:
            share = entropy(logits.movedim(2, -1)).float() / math.log(classes)  # of the largest
            share = share.flatten(2).mean(2) if share.dim() > 2 else share  # (S, B), the mean over pixels
        else:
            share = torch.zeros(logits.shape[:2], device=logits.device)
        some = count > 0
        info = new.info._replace(
            images=old.info.images + count,
            trusted=some.float() if update.trusted is None else mean_over(update.trusted.float(), valid),
            entropy=torch.where(valid, share, 0).sum(1) / count.clamp_min(1),
            distance=old.info.distance if update.affine is None else distance_of(net, update.affine),
        )
        moved = new._replace(key=old.key._replace(clock=old.key.clock + 1), info=info)
        chosen = sane & some
        stats = [name for name in new._fields if isinstance(getattr(new, name), ClassStats)]
        result = select(chosen, moved._replace(**{name: getattr(old, name) for name in stats}), old)
        result = result._replace(**{n: select(chosen, getattr(new, n), getattr(old, n), in_place=True) for n in stats})
        skipped = old.info.skipped + rejected + offered - torch.where(sane, count, 0)
        result = result._replace(info=result.info._replace(skipped=skipped))
    return mask_logits(logits.detach(), predicted), result


def _finite(new: Any, old: Any) -> Tensor:
    """Return which streams (S,) have only finite numbers in the tensors that a step changed."""
    streams, pairs = len(old.key.seed), zip(flatten(new), flatten(old), strict=True)
    changed = [t for t, before in pairs if t is not before and t.is_floating_point() and t.numel()]
    if not changed:
        return torch.ones_like(old.key.seed, dtype=torch.bool)
    rows = [t.reshape(streams, -1) for t in changed]
    small = [t for t in rows if t.numel() <= JOINED]  # one sum for all of them
    joined = [torch.cat(small, 1)] if small else []
    totals = [t.sum(-1, dtype=torch.float32) for t in (*joined, *(t for t in rows if t.numel() > JOINED))]
    return finite(torch.stack(totals, -1))


def distance_of(net: Backbone, affine: Affine) -> Tensor:
    """Return the norm of the move of the affine parameters, relative to the norm of the source's: (S,)."""
    source = torch.cat(net.origin.state.affine, 1)
    moved = torch.linalg.vector_norm(torch.cat(affine, 1) - source, dim=1)
    distance: Tensor = moved / torch.linalg.vector_norm(source)
    return distance.float()
