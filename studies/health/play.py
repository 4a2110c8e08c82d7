"""Play methods over streams and keep what estimators of accuracy may read, in one small file.

Images and labels come from a pack (`studies.health.pack`). All seeds of a stream, and all streams of calibration,
play side by side. What the source network says is the same for all methods: it passes each stream once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from studies.health.pack import Pack
from studies.play import BATCH, Shortened, cell_scenario
from tribe.core.backbone import Backbone, Output
from tribe.core.losses import entropy, probabilities
from tribe.core.rules import Frozen
from tribe.experiments.stream import Batch, Stream
from tribe.health.probe import ask, start_shift
from tribe.io import tensors as tensor_file
from tribe.io.tensors import Kind
from tribe.methods import Method

DROPOUT_PASSES, DROPOUT_RATE = 10, 0.4  # as AETTA has them
PROBE = 4  # one image in so many is a probe
REHEARSAL = "rehearsal"  # the streams of calibration are named after it and their order
SMALL = {torch.float32: torch.float16, torch.int64: torch.int16}  # of what is kept

RECORDS = Kind(
    "tribe-health-records",
    1,
    {"dataset": str, "model": str, "conditions": [[str]], "domains": [str], "machine": dict, "settings": dict},
    noun="record of a health study",
    advice="Play it again: python -m studies.health.run",
)

Columns = dict[str, Tensor]


class Played(NamedTuple):
    """One stream of one method.

    Columns have a value for each image; those of `OF_A_BATCH` have one for each batch, and ``batch`` tells which.
    """

    method: str
    stream: str
    seed: int
    columns: Columns

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.method}/{self.stream}/{self.seed}"


OF_A_BATCH = ("student", "anchor", "distance", "spread", "shift", "trusted")


# -- streams -----------------------------------------------------------------------------------------------------------


def stream_batches(
    pack: Pack, stream: str, seeds: Sequence[int], device: torch.device, limit: int | None = None
) -> list[Batch]:
    """All batches of the streams of all seeds, on a device; ``limit``: the most images of each."""
    data = pack.shown if stream.startswith("gli") else pack.shown.first(pack.per)
    scenario = cell_scenario({"gli-f": "F100", "gli-v": "V100"}.get(stream, stream)).on(data.domains)
    shown = scenario if limit is None else Shortened(scenario.domains, whole=scenario, most=limit)
    stream_of = Stream(data, shown, seeds, BATCH)  # type: ignore[arg-type]
    return [Batch(*(t.to(device) for t in batch)) for batch in stream_of]


def rehearsal_batches(pack: Pack, orders: Sequence[str], device: torch.device, limit: int | None = None) -> list[Batch]:
    """All batches of streams of calibration of equal length, on a device; ``domain`` is the condition."""
    chosen = [(plan, place) for plan, place in zip(pack.plans, pack.places, strict=True) if plan.order in orders]
    labels, reset = pack.clean[1], torch.zeros(len(chosen), dtype=torch.bool)
    place = torch.stack([place for _, place in chosen])[:, :limit]
    number = torch.stack([plan.number for plan, _ in chosen])[:, :limit]
    condition = torch.stack([plan.condition for plan, _ in chosen])[:, :limit]
    batches = []
    for p, n, c in zip(*(t.split(BATCH, 1) for t in (place, number, condition)), strict=True):
        batch = Batch(pack.corrupted[p].float().div_(255), labels[n], c, torch.ones_like(n, dtype=torch.bool), reset)
        batches.append(Batch(*(t.to(device) for t in batch)))
    return batches


# -- columns -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def watch_source(net: Backbone, batches: Sequence[Batch], temperature: float) -> list[Columns]:
    """What the source network says of each batch, and of its probes: one in four images, as in a watched stream."""
    affine, stats = net.source(len(batches[0].x))
    found, state = [], start_shift(net, len(batches[0].x))
    for batch in batches:
        logits = net(batch.x, affine, stats, Frozen(), valid=batch.valid).logits.float()
        columns = {f"source_{name}": t for name, t in _certainty(logits, temperature).items()}
        answers, state = ask(net, state, batch.x, batch.valid, PROBE)
        found.append({**columns, "shift": answers.shift})
    return found


def watch_method(
    net: Backbone, method: Method, batches: Sequence[Batch], source: Sequence[Columns], temperature: float, seed: int
) -> list[Columns]:
    """Adapt over streams side by side: the columns of each stream."""
    state: Any = method.init(net, len(batches[0].x), seed)
    parts: list[Columns] = []
    for number, (batch, beside) in enumerate(zip(batches, source, strict=True)):
        columns = dict(beside)
        with torch.no_grad():
            deployed = method.deployed(net, state)
            columns |= _dropout(net, net(batch.x, *deployed, valid=batch.valid), batch.valid, number)
        output, state = method.step(net, state, batch.x, batch.valid)
        columns |= _certainty(output.float(), temperature)
        info = state.info
        columns |= {"student": info.student_agreement, "anchor": info.anchor_agreement}
        columns |= {"distance": info.distance, "trusted": info.trusted}
        columns |= {"label": batch.y, "domain": batch.domain, "batch": torch.full_like(batch.y, number)}
        parts.append({name: t.cpu() for name, t in columns.items()})
    return [_one(parts, stream) for stream in range(len(batches[0].x))]


def _one(parts: Sequence[Columns], stream: int) -> Columns:
    """The columns of one stream, without padding."""
    joined = {}
    for name in parts[0]:
        rows = [part[name][stream] for part in parts]
        joined[name] = torch.stack(rows) if name in OF_A_BATCH else torch.cat(rows)
    real = joined["label"] >= 0
    kept = {name: t if name in OF_A_BATCH else t[real] for name, t in joined.items()}
    return {name: t.to(SMALL.get(t.dtype, t.dtype)) for name, t in kept.items()}


def _certainty(logits: Tensor, temperature: float) -> Columns:
    """Prediction, confidence with and without temperature, and entropy as a share of log K, of logits (S, B, K)."""
    confidence, prediction = probabilities(logits).max(-1)
    share = entropy(logits) / torch.tensor(float(logits.shape[-1])).log()
    tempered = probabilities(logits / temperature).amax(-1)
    return {"prediction": prediction, "confidence": confidence, "tempered": tempered, "entropy": share}


def _dropout(net: Backbone, output: Output, valid: Tensor, seed: int) -> Columns:
    """Passes with dropout before the classifier: how many differ, and the entropy of the batch's mean prediction."""
    layer, features = dict(net.model.named_modules())[str(net.classifier)], output.features
    assert features is not None
    draw = torch.Generator(features.device).manual_seed(seed)
    plain = output.logits.float()
    mean, differs = torch.zeros_like(plain), torch.zeros_like(plain[..., 0])
    for _ in range(DROPOUT_PASSES):
        kept = torch.rand(features.shape, generator=draw, device=features.device) >= DROPOUT_RATE
        dropped = (features * kept / (1 - DROPOUT_RATE)).to(layer.weight.dtype)  # type: ignore[union-attr,arg-type]
        logits = functional.linear(dropped, layer.weight, layer.bias).float()  # type: ignore[arg-type]
        mean += logits.softmax(-1) / DROPOUT_PASSES
        differs += (logits.argmax(-1) != plain.argmax(-1)).float() / DROPOUT_PASSES
    p = (mean * valid.unsqueeze(-1)).sum(1) / valid.sum(1).clamp_min(1).unsqueeze(-1)  # (S, K)
    return {"dropout": differs, "spread": -(p * p.clamp_min(1e-12).log()).sum(-1)}


# -- files -------------------------------------------------------------------------------------------------------------


class Records(NamedTuple):
    """What was played with one network."""

    header: dict[str, Any]
    clean: tuple[Tensor, Tensor]  # the source's logits of the clean images that calibrate, and labels
    played: dict[str, Played]  # by key


def save(path: Path, header: Mapping[str, Any], clean: tuple[Tensor, Tensor], played: Mapping[str, Played]) -> None:
    """Write one file."""
    tensors = {"clean/logits": clean[0].half(), "clean/labels": clean[1].to(torch.int16)}
    for key, stream in played.items():
        tensors |= {f"{key}/{name}": t for name, t in stream.columns.items()}
    tensor_file.write(path, RECORDS, header, tensors)


def load(path: Path) -> Records:
    """Read what `save` wrote."""
    header, tensors = tensor_file.read(path, RECORDS)
    clean = tensors.pop("clean/logits").float(), tensors.pop("clean/labels").long()
    columns: dict[str, Columns] = {}
    for name, tensor in tensors.items():
        key, _, column = name.rpartition("/")
        columns.setdefault(key, {})[column] = tensor.long() if not tensor.is_floating_point() else tensor.float()
    played = {}
    for key, found in columns.items():
        method, stream, seed = key.split("/")
        played[key] = Played(method, stream, int(seed), found)
    return Records(header, clean, played)
