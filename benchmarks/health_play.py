"""Play methods over short streams and keep what estimators of accuracy read: `tribe.health.records.Signals`.

The first images of the test set calibrate, and streams play only the others, so that no image serves both. A domain
gives ``per`` images, so that a stream of a few thousand images sees every domain.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.time_play import BATCH, Bench, cell_scenario
from tribe.datasets import Dataset
from tribe.engine.backbone import Backbone
from tribe.engine.rules import Frozen
from tribe.health.records import Signals
from tribe.lab.stream import Stream
from tribe.methods import Method
from tribe.storage import tensors as tensor_file
from tribe.storage.tensors import Kind

HELD_OUT = 2000  # images at the beginning of the test set, for calibration alone
DROPOUT_PASSES, DROPOUT_RATE = 10, 0.4  # as AETTA has them
LONG_TAIL = 4  # a long tail of imbalance 100 keeps a quarter of the images
BRANCHES = {"tribe": ("student", "anchor"), "rotta": ("student",)}  # what methods report at no extra pass

RECORD = Kind(
    "tribe-health-study",
    1,
    {"method": str, "stream": str, "seed": int, "classes": int},
    noun="record of a health study",
    advice="Play it again: python -m benchmarks.health_study",
)


class Played(NamedTuple):
    """One stream of one method."""

    method: str
    stream: str
    seed: int
    label: Tensor  # (N,)
    domain: Tensor  # (N,)
    signals: Signals


class Part:
    """Some images of each domain of a data set, none of those that calibrate."""

    def __init__(self, dataset: Dataset, per: int, seed: int = 0) -> None:
        self.dataset, self.classes, self.domains = dataset, dataset.classes, dataset.domains
        draw = torch.Generator().manual_seed(seed)
        rest = len(dataset.labels(self.domains[0])) - HELD_OUT
        self._chosen = {
            name: HELD_OUT + torch.randperm(rest, generator=draw)[:per].sort().values for name in self.domains
        }

    def labels(self, domain: str) -> Tensor:
        """Of the chosen images."""
        return self.dataset.labels(domain)[self._chosen[domain]]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Of the chosen images."""
        return self.dataset.images(domain, self._chosen[domain][index])


def play(bench: Bench, method: str, cell: str, seeds: Sequence[int], per: int) -> list[Played]:
    """Adapt over the streams of all seeds side by side; two passes beside the step serve GDE and AETTA."""
    net, built = bench.method(method)
    name = {"gli-f": "F100", "gli-v": "V100"}.get(cell, cell)
    data = Part(bench.data.dataset, per * LONG_TAIL if cell.startswith("gli") else per)
    stream = Stream(data, cell_scenario(name).on(data.domains), seeds, BATCH)  # type: ignore[arg-type]
    state, columns = built.init(net, len(seeds), seeds[0]), dict[str, list[Tensor]]()
    for number, batch in enumerate(stream):
        x, valid = batch.x.to(net.device), batch.valid.to(net.device)
        beside = _beside(net, built, state, x, valid, number)
        output, state = built.step(net, state, x, valid)
        beside["source"] = (beside["source"].argmax(-1) == output.argmax(-1)).float()
        shares = {branch: getattr(state.info, f"{branch}_agreement") for branch in BRANCHES.get(method, ())}
        beside |= {branch: share.unsqueeze(1).expand(batch.y.shape) for branch, share in shares.items()}
        given = {"label": batch.y, "domain": batch.domain, "batch": torch.full_like(batch.y, number), "logits": output}
        for column, values in {**given, **beside}.items():
            columns.setdefault(column, []).append(values.cpu())
    whole = {column: torch.cat(values, 1) for column, values in columns.items()}
    return [_one(method, cell, seed, {c: t[i] for c, t in whole.items()}) for i, seed in enumerate(seeds)]


def _one(method: str, cell: str, seed: int, columns: dict[str, Tensor]) -> Played:
    real = columns["label"] >= 0
    kept = {column: values[real] for column, values in columns.items()}
    label, domain = kept.pop("label"), kept.pop("domain")
    return Played(method, cell, seed, label, domain, Signals(**kept))


@torch.no_grad()
def _beside(net: Backbone, method: Method, state: object, x: Tensor, valid: Tensor, seed: int) -> dict[str, Tensor]:
    """The source's logits, and what passes with dropout before the classifier say of the adapted network."""
    affine, stats = net.source(len(x))
    source = net(x, affine, stats, Frozen(), valid=valid).logits
    output = net(x, *method.deployed(net, state), valid=valid)
    layer = dict(net.model.named_modules())[str(net.classifier)]
    draw = torch.Generator().manual_seed(seed)
    mean, differs = torch.zeros_like(output.logits), torch.zeros_like(output.logits[..., 0])
    for _ in range(DROPOUT_PASSES):
        kept = torch.rand(output.features.shape, generator=draw).to(x.device) >= DROPOUT_RATE
        logits = functional.linear(output.features * kept / (1 - DROPOUT_RATE), layer.weight, layer.bias)  # type: ignore[arg-type]
        mean += logits.softmax(-1) / DROPOUT_PASSES
        differs += (logits.argmax(-1) != output.logits.argmax(-1)).float() / DROPOUT_PASSES
    p = (mean * valid.unsqueeze(-1)).sum(1) / valid.sum(1).clamp_min(1).unsqueeze(-1)  # (S, K)
    spread = -(p * p.clamp_min(1e-12).log()).sum(-1)
    return {"source": source, "dropout": differs, "spread": spread.unsqueeze(1).expand(valid.shape)}


# -- files -------------------------------------------------------------------------------------------------------------


def save(folder: Path, played: Played) -> None:
    """Write one stream to a file."""
    header = {"method": played.method, "stream": played.stream, "seed": played.seed}
    header["classes"] = played.signals.logits.shape[1]
    tensors = {"label": played.label, "domain": played.domain, **_given(played.signals)}
    tensor_file.write(path_of(folder, played.method, played.stream, played.seed), RECORD, header, tensors)


def load(path: Path) -> Played:
    """Read one stream from a file."""
    header, tensors = tensor_file.read(path, RECORD)
    label, domain = tensors.pop("label"), tensors.pop("domain")
    return Played(header["method"], header["stream"], header["seed"], label, domain, Signals(**tensors))


def path_of(folder: Path, method: str, stream: str, seed: int) -> Path:
    """Where a stream is kept."""
    return folder / f"{stream}_{method}_{seed}.safetensors"


def _given(signals: Signals) -> dict[str, Tensor]:
    return {name: t for name, t in signals._asdict().items() if t is not None}
