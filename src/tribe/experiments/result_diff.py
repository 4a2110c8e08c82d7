"""The difference between two results: their specs, the first image they predict differently, and errors per domain.

difference = diff_results(load_side("3fe1", "runs"), load_side("runs/90ab12cd34ef5678"))
"""

import math
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tribe.experiments import metrics
from tribe.experiments.experiment import COMPONENTS, STREAM
from tribe.experiments.record import Record
from tribe.experiments.spec import differences, same_for_all_seeds
from tribe.experiments.statistics import Duel, Paired, Spread, duel, paired, spread
from tribe.experiments.store import Result, ResultStore, record_path

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

    name: str  # its folder or file
    spec: Mapping[str, Any]  # all that its streams have in common
    scores: Mapping[Any, Mapping[str, Any]]  # the metrics of each seed
    records: Mapping[Any, Record]  # the record of each seed; empty if only metrics were kept
    code: Mapping[str, Any] = MappingProxyType({})  # the digest of the file of each component


class Divergence(NamedTuple):
    """An image that two results predict differently."""

    image: int  # its number in the stream, from 0
    domain: str
    label: int  # -1 if unknown
    predictions: tuple[int, int]  # the class that each result predicts
    confidences: tuple[float, float]  # the probability that each result gives to its prediction


class StreamDiff(NamedTuple):
    """The predictions of two results for the stream of one seed."""

    seed: Any
    images: int
    different: int  # how many images have two different predictions
    first: Divergence | None  # the first of these
    confidence: float  # the largest difference between the confidences for one image


class DomainDiff(NamedTuple):
    """The errors of two results in one domain."""

    domain: str
    errors: tuple[float, float]  # the mean error of each over the seeds that both have, as a share
    gap: Spread  # the first error minus the second over these seeds: negative where the first result is better


class ResultDiff(NamedTuple):
    """The difference between two results on the same streams."""

    spec: tuple[tuple[str, Any, Any], ...]  # place, such as method.fields.lr, and both values of all that differs
    seeds: tuple[Any, ...]  # the seeds that both results have
    streams: tuple[StreamDiff, ...]  # the predictions for each of these; empty if a result has no records
    overall: DomainDiff | None  # the instance errors; None without labels
    domains: tuple[DomainDiff, ...]  # the errors in each domain that was visited; empty without labels
    verdict: Paired | Duel | None  # whether the first is better, over seeds or on one stream; None without labels


def load_side(text: str | PathLike[str], runs: str | PathLike[str] = "runs") -> Side:
    """Return a result by its id, or the first digits of it, in ``runs``; by its folder; or a record by its file."""
    path = Path(text)
    if path.is_file():
        return side_of_records(str(path), [Record.load(path)])
    if path.is_dir() and (results := ResultStore(path).results()):  # a folder of results
        if len(results) > 1:
            raise ValueError(f"{path} holds {len(results)} finished results; {EXPECTED}")
        return _side_of_result(results[0])
    if path.is_dir():
        path = path.resolve()
    elif ID.fullmatch(str(text)):
        path = Path(runs) / str(text)
        if not Path(runs).is_dir():
            raise FileNotFoundError(f"no folder {runs} to find the result {text} in: --runs names it")
    if not path.parent.is_dir() or not ID.fullmatch(path.name):
        raise FileNotFoundError(f"no result {path.name!r}; {EXPECTED}")
    return _side_of_result(_find_id(path.name, path.parent))


def side_of_records(name: str, records: Sequence[Record]) -> Side:
    """Return the side of records that differ in their seeds only."""
    spec = {key: value for key, value in records[0].spec.items() if key not in NOT_COMPARED}
    by_seed = {record.spec.get("seed"): record for record in records}
    return Side(name, spec, {seed: metrics.scores(record) for seed, record in by_seed.items()}, by_seed)


def _find_id(text: str, runs: Path) -> Result:
    results = [result for result in ResultStore(runs).results() if result.experiment.id.startswith(text)]
    if len(results) > 1:
        names = ", ".join(result.experiment.id for result in results[:5])
        raise ValueError(f"{len(results)} results in {runs} begin with {text} ({names}): give more digits")
    if not results:
        raise FileNotFoundError(f"no finished result {text} in {runs}; {EXPECTED}")
    return results[0]


def _side_of_result(result: Result) -> Side:
    has_some = any(record_path(result.folder, seed).exists() for seed in result.streams)  # one that is lost is named
    records = dict(zip(result.streams, result.records(), strict=True)) if has_some else {}
    code = {role: digest for role, digest in result.environment.get("code", {}).items() if role in COMPONENTS}
    return Side(str(result.folder), result.experiment.json(), result.metrics, records, code)


def diff_results(a: Side, b: Side) -> ResultDiff:
    """Return what differs between two results; raise `DifferentData` if they are of different streams."""
    _refuse_different_data(a, b)
    seeds = tuple(seed for seed in a.scores if seed in b.scores)
    if not seeds:
        have = " and ".join(
            f"{side.name} of seed{'s' * (len(side.scores) > 1)} {', '.join(map(str, side.scores))}" for side in (a, b)
        )
        raise DifferentData(f"the results are of different streams: {have}. Compare results that share a seed")
    both = [seed for seed in seeds if seed in a.records and seed in b.records]
    streams = tuple(_diff_streams(seed, a.records[seed], b.records[seed]) for seed in both)
    sides = tuple([side.scores[seed] for seed in seeds] for side in (a, b))
    for x, y in zip(*sides, strict=True):
        if x["images"] != y["images"] or x["class_counts"] != y["class_counts"]:
            raise DifferentData("the results are of different streams: their domains do not hold the same classes")
    names = dict.fromkeys(name for scores in sides[0] for name in scores["domain_error"])
    overall = _diff_errors("all", *([scores["instance_error"] for scores in side] for side in sides))
    domains = (_diff_errors(n, *([s["domain_error"].get(n) for s in side] for side in sides)) for n in names)
    code = ((f"code.{role}", a.code[role], b.code[role]) for role in a.code if role in b.code)
    spec = (*differences(a.spec, b.spec), *(place for place in code if place[1] != place[2]))
    visited = tuple(domain for domain in domains if domain is not None)
    return ResultDiff(spec, seeds, streams, overall, visited, None if overall is None else _verdict(a, b, seeds))


def _verdict(a: Side, b: Side, seeds: Sequence[Any]) -> Paired | Duel | None:
    """Compare the instance errors of the seeds with labels, in percent; with one stream, image by image.

    One stream: of one seed, or of a scenario that plays the same images for all seeds. There, seeds are no repetition.
    """
    errors = {seed: [side.scores[seed]["instance_error"] for side in (a, b)] for seed in seeds}
    labelled = {seed: pair for seed, pair in errors.items() if None not in pair}
    if len(labelled) > 1 and not same_for_all_seeds(a.spec.get("scenario")):
        return paired(*([100 * error for error in column] for column in zip(*labelled.values(), strict=True)))
    both = [seed for seed in labelled if seed in a.records and seed in b.records][:1]
    return duel([a.records[seed] for seed in both], [b.records[seed] for seed in both]) if both else None


def _refuse_different_data(a: Side, b: Side) -> None:
    """Refuse specs whose images differ, or their order. A spec without these parts passes."""
    parts = [part for part in STREAM if part in a.spec and part in b.spec]
    one, other = ({part: side.spec[part] for part in parts} for side in (a, b))
    if places := list(differences(one, other)):
        words = "; ".join(f"{place} is {x!r} and {y!r}" for place, x, y in places)
        raise DifferentData(f"the results are of different data: {words}. Compare results of the same stream")


def _diff_streams(seed: Any, a: Record, b: Record) -> StreamDiff:
    same = a.domains == b.domains and a.classes == b.classes and torch.equal(a.domain, b.domain)
    if not same or not torch.equal(a.label, b.label):
        raise DifferentData(
            f"the records of seed {seed} are of different streams: they have {len(a.label):,} and {len(b.label):,} "
            "images, and not the same labels and domains in the same order"
        )
    different = (a.prediction != b.prediction).nonzero().flatten()
    confidence = float((a.confidence - b.confidence).abs().max()) if len(a.label) else 0.0
    first = None
    if len(different):
        image = int(different[0])
        predictions = int(a.prediction[image]), int(b.prediction[image])
        confidences = float(a.confidence[image]), float(b.confidence[image])
        first = Divergence(image, a.domains[int(a.domain[image])], int(a.label[image]), predictions, confidences)
    return StreamDiff(seed, len(a.label), len(different), first, confidence)


def _diff_errors(name: str, a: Sequence[float | None], b: Sequence[float | None]) -> DomainDiff | None:
    """Compare the errors over the seeds in which both have one."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if not pairs:
        return None
    one, other = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return DomainDiff(name, (one, other), spread([x - y for x, y in pairs]))
