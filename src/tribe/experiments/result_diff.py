"""The difference between two results: their specs, the first image they predict differently, and errors per domain.

    difference = diff_results(load_side("3fe1", "runs"), load_side("runs/90ab12cd34ef5678"))
    difference.spec                     # fields that differ, with both values
    difference.streams[0].first         # the first image with two different predictions
    difference.domains                  # the error of both in each domain

Both must have met the same images in the same order: `DifferentData` is raised otherwise.
"""

import math
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tribe.experiments import store
from tribe.experiments.experiment import COMPONENTS, STREAM
from tribe.experiments.record import Record
from tribe.experiments.scores import record_scores
from tribe.experiments.spec import differences, same_for_all_seeds
from tribe.experiments.statistics import Duel, Paired, Spread, duel, paired, spread
from tribe.fields import document

NOT_COMPARED = ("seed", "experiment")  # of a record's spec: streams are compared seed by seed
ID = re.compile(r"[0-9a-f]{4,16}")
EXPECTED = (
    "expected an id of a finished result or its first digits (at least 4), a folder such as runs/ID, or a record such "
    "as runs/ID/record-0.npz"
)


class DifferentData(ValueError):
    """Two results of different images, or of the same images in another order, and what differs."""


class Side(NamedTuple):
    """One of two results that are compared."""

    name: str
    spec: Mapping[str, Any]
    scores: Mapping[Any, Mapping[str, Any]]
    records: Mapping[Any, Record]
    code: Mapping[str, Any] = MappingProxyType({})


document(
    Side,
    name="Where it was found: a folder or a file.",
    spec="All that its streams have in common.",
    scores="The metrics of each seed, as metrics.json holds them.",
    records="The record of each seed; empty if only metrics were kept.",
    code="A digest of the source of each component, see tribe.experiments.sources; empty if it is not known.",
)


class Divergence(NamedTuple):
    """An image that two results predict differently."""

    image: int
    domain: str
    label: int
    predictions: tuple[int, int]
    confidences: tuple[float, float]


document(
    Divergence,
    image="Its number in the stream, from 0.",
    domain="The name of its domain.",
    label="Its class; -1 if unknown.",
    predictions="The class that each result predicts.",
    confidences="The probability that each result gives to its prediction.",
)


class StreamDiff(NamedTuple):
    """The predictions of two results for the stream of one seed."""

    seed: Any
    images: int
    different: int
    first: Divergence | None
    confidence: float


document(
    StreamDiff,
    seed="The seed of the stream.",
    images="The number of images.",
    different="How many of them have two different predictions.",
    first="The first of these; None if there is none.",
    confidence="The largest difference between the confidences for one image.",
)


class DomainDiff(NamedTuple):
    """The errors of two results in one domain."""

    domain: str
    errors: tuple[float, float]
    gap: Spread


document(
    DomainDiff,
    domain="Its name.",
    errors="The mean error of each result over the seeds that both have, as a share.",
    gap="The first error minus the second over these seeds: negative where the first result is better.",
)


class ResultDiff(NamedTuple):
    """The difference between two results on the same streams."""

    spec: tuple[tuple[str, Any, Any], ...]
    seeds: tuple[Any, ...]
    streams: tuple[StreamDiff, ...]
    overall: DomainDiff | None
    domains: tuple[DomainDiff, ...]
    verdict: Paired | Duel | None


document(
    ResultDiff,
    spec="Place, such as method.fields.lr, and both values of every field or source that differs.",
    seeds="The seeds that both results have.",
    streams="The predictions for each of these; empty if a result has no records.",
    overall="The instance errors; None without labels.",
    domains="The errors in each domain that was visited; empty without labels.",
    verdict="Whether the first is better: over seeds or, with one stream, on it; None without labels or records.",
)


# -- read -------------------------------------------------------------------------------------------------------------


def load_side(text: str | PathLike[str], runs: str | PathLike[str] = "runs") -> Side:
    """A result by its id, or the first digits of it, in ``runs``; by its folder; or a record by its file."""
    path = Path(text)
    if path.is_file():
        return side_of_records(str(path), [Record.load(path)])
    if not path.exists() and ID.fullmatch(str(text)):
        return _side_of_result(_find_id(str(text), Path(runs)))
    if (path / store.SPEC).is_file() and not (path / store.METRICS).is_file():
        raise ValueError(f"{path} is not finished: the command that began it goes on from there")
    if (path / store.METRICS).is_file() or not path.is_dir():
        try:
            result = store.load(path)
        except FileNotFoundError:
            if path.is_dir():  # the message names the file that is missing
                raise
            raise FileNotFoundError(f"there is no result {str(text)!r}; {EXPECTED}") from None
        return _side_of_result(result)
    inside = list(store.finished(path))
    if len(inside) != 1:
        raise ValueError(f"{path} holds {len(inside)} finished results; {EXPECTED}")
    return _side_of_result(inside[0])


def side_of_records(name: str, records: Sequence[Record]) -> Side:
    """The side of records that differ in their seeds only."""
    spec = {key: value for key, value in records[0].spec.items() if key not in NOT_COMPARED}
    by_seed = {record.spec.get("seed"): record for record in records}
    return Side(name, spec, {seed: record_scores(record) for seed, record in by_seed.items()}, by_seed)


def _find_id(text: str, runs: Path) -> store.Result:
    if not runs.is_dir():
        raise FileNotFoundError(f"there is no folder {runs} to find the result {text} in: --runs names it")
    found = [result for result in store.survey(runs) if result.folder.name.startswith(text)]
    if len(found) > 1:
        names = ", ".join(result.folder.name for result in found[:5])
        raise ValueError(f"{len(found)} results in {runs} begin with {text} ({names}): give more digits")
    if not found:
        raise FileNotFoundError(f"there is no finished result {text} in {runs}; {EXPECTED}")
    if isinstance(found[0], store.Damaged):
        raise found[0].error
    return found[0]


def _side_of_result(result: store.Result) -> Side:
    seeds = result.experiment.seeds
    spec = {key: value for key, value in store.record_spec(result.experiment).items() if key not in NOT_COMPARED}
    records = dict(zip(seeds, result.records(), strict=True)) if result.has_records else {}
    code = {role: digest for role, digest in result.environment.get("code", {}).items() if role in COMPONENTS}
    return Side(str(result.folder), spec, {seed: result.metrics[str(seed)] for seed in seeds}, records, code)


# -- compare ----------------------------------------------------------------------------------------------------------


def diff_results(a: Side, b: Side) -> ResultDiff:
    """What differs between two results; `DifferentData` if they are of different streams."""
    _refuse_different_data(a, b)
    seeds = tuple(seed for seed in a.scores if seed in b.scores)
    if not seeds:
        have = " and ".join(f"{side.name} of {_named(side.scores)}" for side in (a, b))
        raise DifferentData(f"the results are of different streams: {have}. Compare results that share a seed")
    both = [seed for seed in seeds if seed in a.records and seed in b.records]
    streams = tuple(_diff_streams(seed, a.records[seed], b.records[seed]) for seed in both)
    sides = tuple([side.scores[seed] for seed in seeds] for side in (a, b))
    for x, y in zip(*sides, strict=True):
        if x["images"] != y["images"] or x["class_counts"] != y["class_counts"]:
            raise DifferentData("the results are of different streams: their domains do not hold the same classes")
    names = dict.fromkeys(name for scores in sides[0] for name in scores["domain_error"])
    overall = _diff_errors("all", *([scores["instance_error"] for scores in side] for side in sides))
    domains = [_diff_errors(n, *([s["domain_error"].get(n) for s in side] for side in sides)) for n in names]
    edited = [(f"code.{role}", a.code[role], b.code[role]) for role in a.code if role in b.code]
    spec = (*differences(a.spec, b.spec), *(found for found in edited if found[1] != found[2]))
    found = tuple(domain for domain in domains if domain is not None)
    return ResultDiff(spec, seeds, streams, overall, found, None if overall is None else _verdict(a, b, seeds))


def _verdict(a: Side, b: Side, seeds: Sequence[Any]) -> Paired | Duel | None:
    """Compare the instance errors of the seeds with labels, in percent; with one stream, image by image.

    One stream: of one seed, or of a scenario that plays the same images for all seeds. There, seeds are no repetition.
    """
    errors = {seed: [side.scores[seed]["instance_error"] for side in (a, b)] for seed in seeds}
    labelled = {seed: pair for seed, pair in errors.items() if None not in pair}
    if len(labelled) > 1 and not same_for_all_seeds(a.spec.get("scenario")):
        return paired(*([100 * error for error in column] for column in zip(*labelled.values(), strict=True)))
    both = [seed for seed in labelled if seed in a.records and seed in b.records][:1]
    return duel(*([side.records[seed] for seed in both] for side in (a, b))) if both else None


def _refuse_different_data(a: Side, b: Side) -> None:
    """Refuse specs that say that the images differ, or their order. A spec that does not say it passes."""
    known = [part for part in STREAM if part in a.spec and part in b.spec]
    one, other = ({part: side.spec[part] for part in known} for side in (a, b))
    apart = list(differences(one, other))
    if apart:
        words = "; ".join(f"{place} is {x!r} and {y!r}" for place, x, y in apart)
        raise DifferentData(f"the results are of different data: {words}. Compare results of the same stream")


def _diff_streams(seed: Any, a: Record, b: Record) -> StreamDiff:
    same = a.domains == b.domains and a.classes == b.classes and torch.equal(a.domain, b.domain)
    if not same or not torch.equal(a.label, b.label):
        raise DifferentData(
            f"the records of seed {seed} are of different streams: they have {len(a.label):,} and {len(b.label):,} "
            "images, and not the same labels and domains in the same order"
        )
    apart = (a.prediction != b.prediction).nonzero().flatten()
    confidence = float((a.confidence - b.confidence).abs().max()) if len(a.label) else 0.0
    first = _divergence(a, b, int(apart[0])) if len(apart) else None
    return StreamDiff(seed, len(a.label), len(apart), first, confidence)


def _divergence(a: Record, b: Record, image: int) -> Divergence:
    predictions = int(a.prediction[image]), int(b.prediction[image])
    confidences = float(a.confidence[image]), float(b.confidence[image])
    return Divergence(image, a.domains[int(a.domain[image])], int(a.label[image]), predictions, confidences)


def _diff_errors(name: str, a: Sequence[float | None], b: Sequence[float | None]) -> DomainDiff | None:
    """The errors over the seeds in which both have one."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if not pairs:
        return None
    one, other = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return DomainDiff(name, (one, other), spread([x - y for x, y in pairs]))


def _named(seeds: Mapping[Any, Any]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
