"""Study whether TRIBE learns better from the answers of the time filter than from its own predictions.

``python -m studies.time.learning --data data --weights FILE --device cuda``

Each variant is TRIBE with some of its pseudo labels replaced, or some of its images left out, by what the filter says.
Raw is TRIBE's own error, filtered the error after the filter within the batch. The results go to ``time_learning.json``
in ``--out``; ``python -m studies.time.run --render`` writes them into README.md.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from studies.play import (
    FILTERS,
    Bench,
    Clock,
    add_options,
    cell_scenario,
    errors,
    filtered,
    open_bench,
    play,
    write,
)
from studies.play import settings as shared_settings
from tribe.core.augment import view
from tribe.core.moments import accumulation_dtype
from tribe.core.precision import float32_precision
from tribe.core.state import tree_map
from tribe.filters.markov import Markov, MarkovState
from tribe.methods import Affine, Backbone, Info, Key, ScreenedBatch, Stats, Update, losses, optim, report_agreement
from tribe.methods.tribe import Tribe, interleave

CELLS = "F100", "V100"
SEEDS = 1, 2, 3, 4
VARIANTS: dict[str, dict[str, Any]] = {  # settings of `Learning`, by their names in the results
    "TRIBE": {},
    "Balanced BN's labels from the filter": {"labels": "filter"},
    "Balanced BN only where both agree": {"labels": "agree"},
    "Balanced BN's labels from the filter where it is sure": {"labels": "sure"},
    "trust only where both agree": {"trust": "agree"},
    "Balanced BN and trust only where both agree": {"labels": "agree", "trust": "agree"},
    "labels from the filter, trust where both agree": {"labels": "filter", "trust": "agree"},
    "labels and target from the filter": {"labels": "filter", "target": "filter"},
    "target from the filter": {"target": "filter"},
    "target from the filter, trust where it is sure": {"target": "filter", "trust": "sure"},
    "Balanced BN where both agree, trust where both agree and the filter is sure": {
        "labels": "agree",
        "trust": "sure and agree",
    },
    "trust where both agree and the filter is sure, in place of entropy": {"trust": "sure and agree"},
    "trust where both agree and one is sure": {"trust": "one sure, agree"},
    "labels where the filter is sure, trust where both agree, causal": {
        "labels": "sure",
        "trust": "agree",
        "within": "past",
    },
    "labels from the filter, trust where both agree, causal": {"labels": "filter", "trust": "agree", "within": "past"},
    "trust only where both agree, causal": {"trust": "agree", "within": "past"},
    "trust only where both agree, anchor twice as heavy": {"trust": "agree", "lambda_anc": 1.0},
}


class LearningState(NamedTuple):
    """TRIBE's state and that of the filter."""

    affine: Affine
    pair: Stats
    anchor: Stats
    adam: optim.Adam
    key: Key
    info: Info
    time: MarkovState


class Answer(NamedTuple):
    """What the filter says of a batch."""

    label: Tensor  # (S, B), the teacher's where the filter is off
    on: Tensor  # (S, B)
    sure: Tensor  # (S, B)


@dataclass(frozen=True)
class Learning(Tribe):
    """TRIBE that learns from the filter. With the defaults it is TRIBE."""

    labels: Literal["teacher", "filter", "sure", "agree"] = "teacher"  # of Balanced BN; agree: without the other images
    target: Literal["teacher", "filter"] = "teacher"  # of the loss of self-training
    trust: Literal["certain", "agree", "sure", "sure and agree", "one sure, agree"] = "certain"  # whose loss counts
    within: Literal["past", "batch"] = "batch"  # what the filter may use
    surely: float = 0.95  # probability above which the filter is sure

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> LearningState:  # type: ignore[override]
        """TRIBE's state and a filter that has seen nothing."""
        source = net.source()[0].weight
        like = source.new_empty(0, dtype=accumulation_dtype(source.dtype))
        return LearningState(*super().init(net, streams, seed), self.rule.init(streams, self.class_count, like))

    @property
    def rule(self) -> Markov:
        """The filter."""
        return Markov(within=self.within)

    def adapt(self, net: Backbone, state: LearningState, batch: ScreenedBatch) -> Update:  # type: ignore[override]
        """Predict with the teacher, filter, learn from both."""
        prediction, _ = self.predict_batch(net, state, batch)
        logits, on, after = self.rule.step(state.time, prediction, batch.valid)
        teacher = prediction.argmax(-1)
        says = Answer(torch.where(on, logits.argmax(-1), teacher), on, logits.amax(-1) > math.log(self.surely))
        new, trusted = self._learn_from(net, state, batch.x, teacher, says, batch.valid)
        return Update(prediction, new._replace(time=after), trusted, new.affine)

    def _learn_from(
        self, net: Backbone, state: LearningState, x: Tensor, teacher: Tensor, says: Answer, valid: Tensor
    ) -> tuple[LearningState, Tensor]:
        """As `Tribe._learn`, with the labels, the target and the trust of this variant."""
        labels, counted = self._labels(teacher, says, valid)
        anchor, anchor_stats = self._anchor(net, state, x, labels, counted, None)
        with torch.enable_grad():
            affine = state.affine.leaf()
            views = interleave(x, view(self.augment, x, state.key))
            both = tree_map(interleave, affine, affine)
            marks = labels.repeat_interleave(2, 0), counted.repeat_interleave(2, 0)
            pair, _, pair_stats = net(views, both, state.pair, self.norm, *marks)
            taught, student = pair.unflatten(0, (-1, 2)).unbind(1)
            own = taught.detach().argmax(-1)
            trusted = self._trusted(taught.detach(), own, says) & valid
            target = torch.where(says.on, says.label, own) if self.target == "filter" else own
            loss = losses.mean_over(losses.cross_entropy(student, target), trusted)
            if anchor is not None:
                loss = loss + self._anchor_loss(taught, anchor, trusted)
            grads = affine.gradient(loss)
        moved, moments = optim.adam_step(state.affine, grads, state.adam, self.lr)
        new = state._replace(affine=moved, pair=pair_stats, anchor=anchor_stats, adam=moments)
        info = report_agreement(state.info, taught, student, anchor, valid)
        return new._replace(info=info), trusted

    def _labels(self, teacher: Tensor, says: Answer, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The labels of Balanced BN, and the images that its statistics count."""
        if self.labels == "filter":
            return says.label, valid
        if self.labels == "sure":
            return torch.where(says.sure, says.label, teacher), valid
        if self.labels == "agree":
            same = valid & (teacher == says.label)
            return teacher, torch.where(same.any(1, keepdim=True), same, valid)
        return teacher, valid

    def _trusted(self, taught: Tensor, own: Tensor, says: Answer) -> Tensor:
        """Whose loss counts, (S, B); where the filter is off, those of which the teacher is certain."""
        certain = losses.entropy(taught) < self.h0 * math.log(self.class_count)  # type: ignore[operator]
        same = own == says.label
        chosen = {
            "certain": certain,
            "agree": certain & same,
            "sure": says.sure,
            "sure and agree": says.sure & same,
            "one sure, agree": (says.sure | certain) & same,
        }[self.trust]
        return torch.where(says.on, chosen, certain)


def measure(
    bench: Bench, fields: Mapping[str, Any], cell: str, seeds: Sequence[int], limit: int | None
) -> dict[str, Any]:
    """The mean errors of a variant on a stream, raw and filtered."""
    net, tribe = bench.method("tribe")
    usual = {field.name: getattr(tribe, field.name) for field in dataclasses.fields(tribe)}
    learning = bench._replace(method=lambda _: (net, Learning(**{**usual, **fields})))
    played = play(learning, "learning", cell_scenario(cell), seeds, limit)
    means = {}
    for kind, records in (("raw", played), ("filtered", filtered(bench, played, FILTERS["batch"]))):
        found = [errors(record) for record in records]
        means[kind] = [round(statistics.mean(error[name] for error in found), 2) for name in ("inst", "cat")]
    return means


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m studies.time.learning", description=__doc__, formatter_class=style)
    add_options(p)
    p.set_defaults(out=Path(__file__).parent / "results")
    p.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    p.add_argument("--cells", nargs="+", default=CELLS)
    p.add_argument("--variants", type=int, nargs="+", default=range(len(VARIANTS)), help="their numbers, from 0")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    bench, clock, rows = open_bench(o), Clock(), []
    shared = {
        **shared_settings(o, bench.device),
        "seeds": list(o.seeds),
        "filter": "the filter of tribe.filters.markov",
    }
    shared["category"] = "the mean over domains of the mean over classes"
    path = o.out / "time_learning.json"
    with float32_precision(o.precision):
        for name, fields in [list(VARIANTS.items())[number] for number in o.variants]:
            for cell in o.cells:
                row = {
                    "variant": name,
                    "fields": fields,
                    "cell": cell,
                    **measure(bench, fields, cell, o.seeds, o.limit),
                }
                rows.append(row)
                write(path, shared, rows)
                clock.say(f"{name}, {cell}: raw {rows[-1]['raw'][0]:.2f}, filtered {rows[-1]['filtered'][0]:.2f}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
