"""Study the alarms of `tribe.health`: false alarms on healthy streams, and delays where something goes wrong.

``python -m studies.guard.alarms --data data --weights FILE --parts frames,shift,play --seeds 5,6,7,8``

Parts: frames counts the faults found in images of data sets that have none; shift tests the source's entropies on clean
images in several orders and on corrupted ones; play adapts over streams with and without faults; replay reads recorded
logits (``--recorded FILE.npz``, with arrays NAME|z of a method and NAME|s of the source). The source predicts every
fourth image. Rows of a part replace older ones in ``--out``.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.play import write
from tribe import datasets, methods, models, scenarios
from tribe.core.backbone import Backbone
from tribe.core.losses import entropy
from tribe.experiments.provenance import machine
from tribe.experiments.stream import Stream
from tribe.health.alarms import Alarms
from tribe.health.frames import FrameRules, Verdict, judge, start_frames
from tribe.health.martingale import Martingale, Reference, fit_reference, rank
from tribe.health.report import Event, read_alarms

BATCH, PART = 64, 4  # images of a batch; one in so many is also predicted by the source
CALIBRATION = 2000  # clean images that the reference is learned from
ALARMS = Alarms()
SETS = "mnist", "mnist-c", "cifar10", "cifar10-c", "cifar100", "cifar100-c"
HEALTHY = (("tribe", {}, "ptta"), ("tribe", {}, "gli-f"), ("tribe", {}, "gli-v"), ("tribe", {}, "continual"))
FAULTY = (
    ("tent", {}, "ptta", None),
    ("tribe", {"lr": 0.03}, "ptta", None),
    ("rotta", {"lr": 0.03}, "ptta", None),
    ("tribe", {}, "ptta", "black"),
    ("tribe", {}, "ptta", "covered"),
    ("tribe", {}, "ptta", "frozen"),
    ("tribe", {}, "ptta", "0-255"),
)
Row = dict[str, Any]


def ready(x: Tensor) -> Tensor:
    """A mask that counts every image."""
    return torch.ones(x.shape[:2], dtype=torch.bool)


def play_frames(o: argparse.Namespace) -> Iterator[Row]:
    """Count the faults found in each domain of each data set, by the rules and image by image."""
    for name in SETS:
        try:
            data = datasets.create(name, data=str(o.data if name.endswith("-c") else o.data_clean))
            data.labels(data.domains[0])
        except (FileNotFoundError, ValueError) as error:
            print(f"frames: {name} is left out: {error}")
            continue
        for domain in data.domains:
            found = {patience: dict.fromkeys(Verdict._fields, 0) for patience in (1, FrameRules().patience)}
            states = {patience: start_frames(1) for patience in found}
            count = len(data.labels(domain))
            for index in torch.arange(count).split(500):
                x = data.images(domain, index).unsqueeze(0)
                for patience, counts in found.items():
                    rules = FrameRules(patience=patience)
                    verdict, states[patience] = judge(rules, states[patience], x, ready(x))
                    for kind, mask in verdict._asdict().items():
                        counts[kind] += int(mask.sum())
            single, ruled = ({kind: n for kind, n in counts.items() if n} for counts in found.values())
            yield {"dataset": name, "domain": domain, "images": count, "false": ruled, "single": single}


def predict_source(net: Backbone, x: Tensor) -> Tensor:
    """The source's logits of images (N, ...)."""
    source = methods.create("source", classes=net.classes)
    state = source.init(net)
    return torch.cat([source.predict(net, state, part.unsqueeze(0))[0] for part in x.split(250)])


def certainty(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies, as a share of log K, and predictions (N,)."""
    return entropy(logits) / math.log(logits.shape[-1]), logits.argmax(-1)


def calibrate(o: argparse.Namespace, net: Backbone) -> tuple[Reference, Tensor, Tensor, Tensor]:
    """Learn what is normal, and the entropies, predictions and labels of the other clean images."""
    data = datasets.create("cifar10", data=str(o.data_clean))
    labels = data.labels(data.domains[0])
    logits = torch.cat([predict_source(net, data.images(data.domains[0], i)) for i in torch.arange(10_000).split(1000)])
    share, predicted = certainty(logits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    share, predicted, labels = share[order], predicted[order], labels[order]
    learned = fit_reference(share[:CALIBRATION], predicted[:CALIBRATION], labels[:CALIBRATION], 10)
    return learned, share[CALIBRATION:], predicted[CALIBRATION:], labels[CALIBRATION:]


def bet(reference: Reference, share: Tensor, predicted: Tensor) -> list[tuple[int, int, int]]:
    """Stream, image and beginning of every alarm on entropies (S, N) of predictions (S, N)."""
    test, alarms = Martingale(), []
    state, images = test.init(len(share)), torch.zeros(len(share), dtype=torch.int64)
    for h, p in zip(share.split(BATCH, 1), predicted.split(BATCH, 1), strict=True):
        alarm, state = test.step(reference, state, rank(reference, h, p), torch.ones_like(p, dtype=torch.bool), images)
        images = images + h.shape[1]
        for i in alarm.nonzero()[:, 0].tolist():
            alarms.append((i, int(images[i]), int(state.since[i, 0])))
    return alarms


def play_shift(o: argparse.Namespace) -> Iterator[Row]:
    """False alarms of the test of entropies on clean images, and delays on corrupted ones."""
    net = network(o)
    reference, share, predicted, labels = calibrate(o, net)
    draw = torch.Generator().manual_seed(min(o.seeds))
    streams, length = 8, 25_600
    for burst in (1, 50, 500, 5000):
        classes = torch.randint(10, (streams, length // burst + 1), generator=draw).repeat_interleave(burst, 1)
        index = torch.empty(streams, length, dtype=torch.int64)
        for label in range(10):
            own, places = (labels == label).nonzero()[:, 0], classes[:, :length] == label
            index[places] = own[torch.randint(len(own), (int(places.sum()),), generator=draw)]
        alarms = bet(reference, share[index], predicted[index])
        yield {"stream": f"clean, bursts of {burst}", "images": streams * length, "false": len(alarms)}
    data = datasets.create("cifar10-c", data=str(o.data))
    before = torch.randint(len(share), (10, 2048), generator=draw)
    for domain in data.domains:
        own, theirs = certainty(predict_source(net, data.images(domain, torch.arange(1000))))
        after = torch.randint(1000, (10, 2048), generator=draw)
        alarms = bet(
            reference, torch.cat((share[before], own[after]), 1), torch.cat((predicted[before], theirs[after]), 1)
        )
        delays = {i: image - 2048 for i, image, _ in reversed(alarms) if image > 2048}
        yield {
            "stream": domain,
            "streams": 10,
            "found": len(delays),
            "false": sum(image <= 2048 for _, image, _ in alarms),
            "delays": sorted(delays.values()),
            "mean_rank": round(float(rank(reference, own, theirs).mean()), 3),
        }


def network(o: argparse.Namespace) -> Backbone:
    """ResNet-20, trained on CIFAR-10."""
    return Backbone(models.load("resnet20", str(o.weights)))


def spoil(x: Tensor, fault: str | None, seen: int, o: argparse.Namespace) -> Tensor:
    """Images (1, B, ...) after ``seen`` others, with a fault from image ``--good`` on."""
    if fault is None or seen < o.good:
        return x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seen))
    changed = {"black": 0 * x, "covered": (0.02 * noise).clamp(0, 1), "frozen": x[:, :1].expand_as(x), "0-255": 255 * x}
    return changed[fault]


def play_streams(o: argparse.Namespace) -> Iterator[Row]:
    """Adapt over streams: the events, and the error of the method and of the source."""
    net = network(o)
    data = datasets.create("cifar10-c", data=str(o.data))
    source = methods.create("source", classes=10)
    fixed = source.init(net)
    cases = [(*case, None) for case in HEALTHY] + list(FAULTY)
    for method, fields, scenario, fault in cases:
        if o.cases and f"{method}{fields.get('lr', '')}-{scenario}-{fault or 'healthy'}" not in o.cases:
            continue
        for seed in o.seeds:
            built = methods.create(method, classes=10, **fields)
            stream = Stream(data, scenarios.create(scenario).on(data.domains), (seed,), BATCH)
            state, alarms, seen = built.init(net), ALARMS.init(1, 10), None
            events, wrong, count = list[Event](), torch.zeros(2, dtype=torch.int64), 0
            for batch in stream:
                x, valid = spoil(batch.x, fault, count, o), batch.valid
                verdict, alarms = ALARMS.look(alarms, x, valid)
                output, state = built.step(net, state, x, valid)
                logits = torch.zeros_like(output)
                logits[:, ::PART] = source.predict(net, fixed, x[:, ::PART], valid[:, ::PART])
                known = (torch.arange(x.shape[1]) % PART == 0).unsqueeze(0)
                distance = state.info.distance
                alarms = ALARMS.observe(alarms, verdict, output, valid, distance, source=logits, known=known)
                new, seen = read_alarms(alarms, seen)
                events += new
                count += int(valid.sum())
                truth = batch.y[:, ::PART]
                wrong += torch.stack([(t[:, ::PART].argmax(2) != truth).sum() for t in (output, logits)])
                if count >= o.limit:
                    break
            rates = [round(t, 1) for t in (100 * wrong / (count / PART)).tolist()]
            yield {
                "method": method, "fields": fields, "scenario": scenario, "fault": fault, "seed": seed,
                "images": count, "from": o.good if fault else 0, "error": rates[0], "source_error": rates[1],
                "distance": round(float(state.info.distance[0]), 4),
                "events": [[event.kind, event.image, event.since] for event in events],
            }  # fmt: skip


def play_recorded(o: argparse.Namespace) -> Iterator[Row]:
    """Give recorded predictions to the alarms that read predictions, all streams of a file side by side."""
    for path in o.recorded:
        with np.load(path) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        names = sorted(key[:-2] for key in arrays if key.endswith("|z"))
        lengths = torch.tensor([len(arrays[f"{name}|z"]) for name in names])
        output, logits = (_padded([arrays[f"{name}|{kind}"] for name in names]) for kind in "zs")
        state, seen, events = ALARMS.init(len(names), output.shape[2]), None, list[Event]()
        most = torch.zeros(len(names))
        for i in range(0, output.shape[1], BATCH):
            z, s = output[:, i : i + BATCH].float(), logits[:, i : i + BATCH].float()
            place = torch.arange(i, i + z.shape[1])
            valid, known = place < lengths[:, None], (place % PART == 0).expand(len(names), -1)
            sound = Verdict(*[torch.zeros_like(valid)] * len(Verdict._fields))
            state = ALARMS.observe(state, sound, z, valid, torch.zeros(len(names)), source=s, known=known)
            most = torch.maximum(most, state.collapse.evidence)
            new, seen = read_alarms(state, seen)
            events += new
        for i, name in enumerate(names):
            own = [[event.kind, event.image, event.since] for event in events if event.stream == i]
            yield {"stream": name, "images": int(lengths[i]), "evidence": round(float(most[i]), 1), "events": own}


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


PARTS = {"frames": play_frames, "shift": play_shift, "play": play_streams, "replay": play_recorded}


def main() -> None:
    """Run the chosen parts."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, default=Path("data"), help="root of the corrupted data sets")
    p.add_argument("--data-clean", type=Path, help="root of the clean ones, if another")
    p.add_argument("--weights", type=Path, help="of ResNet-20")
    p.add_argument("--parts", default="frames,shift,play")
    p.add_argument("--seeds", default="5,6,7,8")
    p.add_argument("--limit", type=int, default=2000, help="images of a stream")
    p.add_argument("--good", type=int, default=640, help="images before a fault")
    p.add_argument("--cases", type=lambda text: text.split(","), help="of part play, such as tent-ptta-healthy")
    p.add_argument("--recorded", type=Path, nargs="*", default=[], help="files of part replay")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "alarms_cpu.json")
    o = p.parse_args()
    o.seeds, o.data_clean = [int(seed) for seed in o.seeds.split(",")], o.data_clean or o.data
    torch.set_num_threads(1)
    rows: list[Row] = json.loads(o.out.read_text())["rows"] if o.out.exists() else []
    shared = {"model": "resnet20", "batch": BATCH, "source_part": PART, "machine": machine(torch.device("cpu"))}
    for part in o.parts.split(","):
        for row in PARTS[part](o):
            new = {"part": part, **row}
            rows = [old for old in rows if _identity(old) != _identity(new)] + [new]
            write(o.out, shared, rows)
            print(json.dumps(new), flush=True)


def _identity(row: Row) -> tuple[Any, ...]:
    names = ("part", "dataset", "domain", "stream", "method", "fields", "scenario", "fault", "seed")
    return tuple(json.dumps(row.get(name)) for name in names)


if __name__ == "__main__":
    main()
