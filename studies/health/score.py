"""Compare estimates of accuracy with the accuracy, from the records of a study of health; no network is needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from studies.health import baselines
from studies.health.play import PROBE, REHEARSAL, Columns, Played, Records, load
from studies.health.records import Signals
from studies.health.tables import TODAY, mean_errors
from studies.play import write
from tribe.core.losses import probabilities
from tribe.health.calibration import fit_temperature
from tribe.health.estimate import WINDOW, Estimator, Features, Images, window_features
from tribe.health.fitting import Labelled, fit

BRANCHES = {"tribe": ("student", "anchor"), "rotta": ("student",)}  # what methods report at no extra pass

Row = dict[str, Any]


class Known(NamedTuple):
    """What calibration learned of a network."""

    classes: int
    temperature: float
    accuracy: float
    confidence: float
    threshold: float


def known_of(records: Records) -> Known:
    """What clean images tell of the source network."""
    logits, labels = records.clean
    temperature = fit_temperature(logits, labels)
    tempered = probabilities(logits / temperature).amax(-1)
    accuracy = float((logits.argmax(-1) == labels).double().mean())
    return Known(logits.shape[1], temperature, accuracy, float(tempered.mean()), float(tempered.quantile(1 - accuracy)))


def labelled(records: Records, method: str) -> list[Labelled]:
    """The streams of a method's calibration."""
    names = list(dict.fromkeys(name for name, _ in records.header["conditions"]))
    kinds = torch.tensor([names.index(name) for name, _ in records.header["conditions"]])
    played = [p for p in records.played.values() if p.method == method and p.stream.startswith(REHEARSAL)]
    return [Labelled(images_of(p.columns), right_of(p), kinds[p.columns["domain"]]) for p in played]


def learn(records: Records, method: str, known: Known, window: int = WINDOW) -> Estimator:
    """Calibrate a method from what it said of the images that calibrate."""
    return fit(labelled(records, method), known.classes, known.temperature, window)


def right_of(played: Played) -> Tensor:
    """Which predictions are right (N,)."""
    return played.columns["prediction"] == played.columns["label"]


def images_of(columns: Columns) -> Images:
    """What our estimator reads of each image."""
    c = columns
    same = torch.where(c["source_prediction"] == c["prediction"], 1.0, -1.0)
    source = torch.where(probes(c["batch"]), same, 0)
    shift = c["shift"][c["batch"]].unbind(1)
    return Images(c["tempered"], c["student"][c["batch"]], source, *shift, c["prediction"])


def probes(batch: Tensor) -> Tensor:
    """Which images the source predicts in a watched stream (N,), from the number of their batches."""
    counts = batch.unique_consecutive(return_counts=True)[1]
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return (torch.arange(len(batch)) - first) % PROBE == 0


def window_features_of(columns: Columns, classes: int, size: int = WINDOW) -> Features:
    """The features of all windows of a stream that do not overlap."""
    images = Images(*(t.unfold(0, size, size) for t in images_of(columns)))
    return window_features(images, torch.ones_like(images.confidence, dtype=torch.bool), classes)


def signals_of(played: Played) -> Signals:
    """What baselines read of each image."""
    c, branches = played.columns, BRANCHES.get(played.method, ())
    shares = {name: c[name][c["batch"]] for name in branches}
    source = None if played.method == "source" else (c["source_prediction"] == c["prediction"]).float()
    spread = c["spread"][c["batch"]]
    given = c["prediction"], c["confidence"], c["tempered"], c["batch"]
    return Signals(*given, **shares, source=source, dropout=c["dropout"], spread=spread)


def estimates(signals: Signals, known: Known) -> dict[str, Tensor]:
    """What every baseline says of each image; the mean over a window is its estimate."""
    found = {
        "confidence": baselines.mean_confidence(signals),
        "temperature": baselines.tempered_confidence(signals),
        "atc": baselines.atc(signals, known.threshold),
        "doc": baselines.doc(signals, known.accuracy, known.confidence),
        "gde": baselines.gde(signals),
        "aetta": baselines.aetta(signals, known.classes),
    }
    return {name: values for name, values in found.items() if values is not None}


def judge(played: Played, known: Known, estimator: Estimator) -> Row:
    """The true accuracy of every window and all estimates of it, in %."""
    size = estimator.window

    def windows(values: Tensor) -> list[float]:
        return percent(values.double().unfold(0, size, size).mean(-1))

    features = window_features_of(played.columns, estimator.classes, size)
    ours, half = estimator.accuracy(features), estimator.half_width(features, torch.tensor(size))
    columns = {name: windows(values) for name, values in estimates(signals_of(played), known).items()}
    return {
        **{"method": played.method, "stream": played.stream, "seed": played.seed},
        **{"images": len(played.columns["label"]), "true": windows(right_of(played))},
        **{"low": percent((ours - half).clamp_min(0)), "high": percent((ours + half).clamp_max(1))},
        "left_out": round(100 * estimator.unseen, 2),
        "estimates": {"ours": percent(ours), **columns},
    }


def percent(shares: Tensor) -> list[float]:
    """Shares in %, rounded."""
    return [round(100 * share, 2) for share in shares.tolist()]


def gather(files: Sequence[Path]) -> list[Records]:
    """Read files of records; those of the same network and data set become one."""
    found: dict[tuple[str, str], Records] = {}
    for path in files:
        records = load(path)
        first = found.setdefault((records.header["dataset"], records.header["model"]), records)
        first.played.update(records.played)
    return list(found.values())


def score(records: Records, out: Path, seeds: Sequence[int] | None = None) -> Path:
    """Write the results of what was played with a network; ``seeds``: only these."""
    rows = list[Row]()
    methods = dict.fromkeys(played.method for played in records.played.values())
    known = known_of(records)
    for method in methods:
        estimator = learn(records, method, known)
        streams = [p for p in records.played.values() if p.method == method and not p.stream.startswith(REHEARSAL)]
        found = [judge(played, known, estimator) for played in streams if seeds is None or played.seed in seeds]
        rows += found
        errors = ", ".join(f"{name} {value:.1f}" for name, value in mean_errors(found).items())
        print(f"{method}: {errors}; on a corruption that is left out {100 * estimator.unseen:.1f}")
    header = records.header
    corruptions = [name for name in dict.fromkeys(name for name, _ in header["conditions"]) if name != "clean"]
    shared = {"dataset": header["dataset"], "model": header["model"], "machine": header["machine"]}
    shared["model_of_accuracy"] = TODAY
    target = out / f"health_{header['dataset']}_{header['model']}.json"
    write(target, {**shared, **header["settings"], "corruptions": corruptions}, rows)
    return target
