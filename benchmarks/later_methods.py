"""Methods later than the paper: what their papers claim, and what is found here. A part of docs/methods.md.

Numbers found here come from results: those of the tables, in ``results``, and those of shorter streams on a CPU, in
``benchmarks/results/later``, which `tribe run` played and `tribe reproduce --keep` packed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reproduction.beyond import LATER
from reproduction.compare import stream_name
from studies.pages import RESULTS, table
from tribe.experiments.experiment import Experiment
from tribe.experiments.store import Result, finished

FOLDERS = (RESULTS.parent.parent / "results", RESULTS / "later")
BESIDE = {"TEST": "source", "RoTTA": "rotta", "TRIBE": "tribe"}  # rows to compare with, by their methods
TEXT = """## Methods later than the paper

The paper compares TRIBE with the methods of its time. These are later, or not in its tables. In tables they are marked
as beyond the paper; `tribe reproduce cifar10 --beyond all` runs them. The file of each says which equations are
published and where ours differ. “Our reading” marks what could not be found.
"""


class Claim(NamedTuple):
    """What a paper says of its method, with the setting; only numbers that were seen at their source."""

    text: str
    setting: str


CLAIMS: Mapping[str, Claim] = {
    "DELTA": Claim(
        "helps TENT, pseudo labels and entropy with weights in all four settings; no number was checked",
        "CIFAR-100-C, ImageNet-C; i.i.d. or correlated classes, even or long-tailed; reset after each corruption",
    ),
    "SoTTA": Claim(
        "above others where the stream holds images of no known class, as good without; no number was checked",
        "CIFAR-10-C, CIFAR-100-C and ImageNet-C, ResNet-18; i.i.d. classes, with other images among them",
    ),
    "CMF": Claim(
        "above ROID and others under shifts of images and of classes; no number was checked",
        "ImageNet-C and its relatives; the CIFAR settings are those of ROID's repository",
    ),
    "DeYO": Claim(
        "above TENT, EATA and SAR; later papers report for it 43.9 % accuracy (ResNet-50 with GroupNorm) and 61.4 % "
        "(ViT-B) with correlated classes, and an error of 18.3 % on CIFAR-10-C (WRN-28)",
        "ImageNet-C, severity 5, correlated classes; CIFAR-10-C, i.i.d., large batches",
    ),
    "PeTTA": Claim(
        "errors of 22.8 %, 35.1 % and 60.5 %; the source model 43.5 %, 46.5 % and 82.0 %",
        "CIFAR-10-C (WRN-28-10), CIFAR-100-C (ResNeXt-29), ImageNet-C (ResNet-50); all corruptions 20 times in turn, "
        "correlated classes, batches of 64",
    ),
    "BDN": Claim(
        "with COFA the best on average over 24 settings; no number was checked",
        "CIFAR-10-C, CIFAR-100-C and ImageNet-C; domains and classes i.i.d., correlated or in turn, even or not",
    ),
}


def section(folders: tuple[Path, ...] = FOLDERS) -> str:
    """The part of the page, as Markdown."""
    claims = table(("method", "its paper claims", "setting"), ((row.key, *CLAIMS[row.key]) for row in LATER))
    return "\n".join([TEXT, claims, *_found([result for folder in folders for result in finished(folder)])])


def _found(results: list[Result]) -> Iterator[str]:
    """For each stream that a later method has played: the errors of all these methods, in percent."""
    keys = {**BESIDE, **{row.key: row.method for row in LATER}}
    later = [result for result in results if result.experiment.method.name in {row.method for row in LATER}]
    streams = {(_stream(r.experiment), r.experiment.seeds): r for r in later}
    if not streams:
        return
    yield "Errors found here, over all images of a stream, in percent:\n"
    rows = []
    for key, method in keys.items():
        own = [result for result in results if result.experiment.method.name == method]
        rows.append((key, *(_error(own, *stream) for stream in streams)))
    yield table(("method", *map(_title, streams.values())), rows)


def _stream(e: Experiment) -> str:
    """What two results share if they are of the same images, network and settings."""
    return repr((e.dataset, e.model, e.scenario, e.weights, e.images, e.batch, e.precision, e.device))


def _error(results: list[Result], stream: str, seeds: tuple[int, ...]) -> str:
    """The mean over these seeds, in percent; "-" if no result has them all."""
    for result in results:
        if _stream(result.experiment) == stream and {*seeds} <= {*result.experiment.seeds}:
            values = [result.metrics[str(seed)]["instance_error"] for seed in seeds]
            return f"{100 * sum(values) / len(values):.1f}"
    return "-"


def _title(result: Result) -> str:
    e = result.experiment
    shown = result.metrics[str(e.seeds[0])]["domain_error"]
    domains = ", ".join(name.partition("@")[0].replace("_", " ") for name in shown)
    images = sum(result.metrics[str(seed)]["images"] for seed in e.seeds)
    seeds = f"seed{'s' * (len(e.seeds) > 1)} {', '.join(map(str, e.seeds))}"
    return f"{e.dataset.name}, {e.model.name}, {stream_name(e)}, {domains}, {images:,} images, {seeds}"
