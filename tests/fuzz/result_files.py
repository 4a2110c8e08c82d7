"""Readers of records, results, measurements and schedules."""

import json

import torch

from fuzz.registry import digest, reader
from fuzz.tensor_files import InOrder
from places import ROOT
from tribe.data import scenarios
from tribe.experiments import bench, metrics, report, store
from tribe.experiments.outputs import Outputs
from tribe.experiments.record import Record
from tribe.experiments.trace import Trace
from tribe.experiments.watched import Watched
from tribe.testing import CLASSES

STORE = {
    store.SPEC: ("tribe.experiments.store.read_spec",),
    store.METRICS: ("tribe.experiments.store._load_folder",),
    store.ENVIRONMENT: ("tribe.experiments.store.read_environment",),
}
PACK = ("tribe.experiments.store.read_pack", "tribe.experiments.store._read_line")


def packed_line():
    """A result of a real run, from the repository."""
    lines = (ROOT / "results/mnist-c-cpu.jsonl").read_bytes().splitlines()
    return min(lines, key=len)


def write_result(folder):
    """A result as a folder."""
    line = json.loads(packed_line())
    place = folder / line["id"]
    place.mkdir()
    same = {"schema": line["schema"], "id": line["id"]}
    store.write_json(place / store.SPEC, {"format": line["format"], **same, "spec": line["spec"]})
    store.write_json(place / store.METRICS, {**same, "seeds": line["metrics"]})
    store.write_json(place / store.ENVIRONMENT, {**same, **line["environment"]})
    return place


def written_record():
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(CLASSES, (60,), generator=generator)
    spec = {"method": {"name": "tent", "fields": {"lr": 0.1}}, "dataset": {"name": "mnist-c", "fields": {}}, "seed": 0}
    spec |= {"model": {"name": "wrn", "fields": {}}, "scenario": {"name": "gli-f", "fields": {"imbalance": 10.0}}}
    confidence, seconds = torch.rand(60, generator=generator), torch.full((60,), 1e-3)
    domain = torch.arange(60) // 30
    record = Record(domain, label, label.roll(1), confidence, seconds, ("fog@5", "snow@5"), CLASSES, spec)
    alarms = (torch.arange(60) > 40).to(torch.int64)
    record = record._replace(watched=Watched(confidence, confidence / 2, confidence.sqrt(), alarms, ("drift",)))
    record = record._replace(trace=Trace(torch.arange(60) // 10 + 1, *(confidence**i for i in range(1, 6))))
    sizes, some = torch.full((6,), 10), torch.tensor([False, True] * 3)
    values = torch.rand(60, CLASSES, generator=generator)
    return record._replace(outputs=Outputs(values, torch.ones(60, dtype=torch.bool), sizes, some, "logits"))


RECORD_READERS = ("Record.load", "_read_header", "_read_watched", "_read_trace", "_read_outputs")


@reader("record", "npz", tuple(f"tribe.experiments.record.{name}" for name in RECORD_READERS))
class RecordFile:
    @staticmethod
    def make(folder):
        written_record().save(folder / "record.npz", outputs=True)
        return folder / "record.npz"

    @staticmethod
    def read(folder):
        record = Record.load(folder / "record.npz")
        scores = metrics.summary(record), metrics.domain_error(record), metrics.class_counts(record)
        columns = (getattr(record, name) for name in ("domain", "label", "prediction", "confidence", "seconds"))
        watched = [] if record.watched is None else [*record.watched[:4], record.watched.beginnings()]
        trace = () if record.trace is None else record.trace.steps()
        outputs = () if record.outputs is None else record.outputs
        return digest(
            *columns, *scores, *watched, *trace, *outputs, record.domains, record.classes, sorted(record.spec.items())
        )


def written_report(folder):
    """A page about all results in a folder, without its words about damaged files."""
    runs = report.write(folder, folder / "report.html")
    assert runs.groups or runs.damaged, "a result is on the page, or it is named as damaged"
    return digest([group.title for group in runs.groups], bool(runs.damaged))


@reader(
    "record-in-report",
    "npz",
    ("tribe.experiments.report.collect._is_another", "tribe.experiments.report.collect._read"),
)
class RecordInReport:
    make = RecordFile.make

    @staticmethod
    def read(folder):
        return written_report(folder)


class ResultFile:
    """A file of a result in a folder."""

    def __init__(self, name):
        self.name = name

    def make(self, folder):
        return write_result(folder) / self.name

    def read(self, folder):
        written_report(folder)
        line = json.loads(packed_line())
        result = store.load(folder / line["id"])
        store.verify(result)
        values = [result.values(metric) for metric in ("instance_error", "category_error", "seconds_per_image")]
        return digest(result.experiment.id, values, result.values("domain_error", "fog"), result.error())


for file in (store.SPEC, store.METRICS, store.ENVIRONMENT):
    reader(f"result-{file}", "json", STORE[file])(ResultFile(file))


@reader("packed-results", "lines", PACK)
class Pack:
    @staticmethod
    def make(folder):
        (folder / "mnist-c-cpu.jsonl").write_bytes(packed_line() + b"\n")
        return folder / "mnist-c-cpu.jsonl"

    @staticmethod
    def read(folder):
        found = list(store.survey(folder))
        if found:
            written_report(folder)
        results = list(store.finished(folder))
        return digest(
            [(result.experiment.id, result.error(), result.values("seconds_per_image")) for result in results]
        )


@reader("packed-results-kept", "lines", ("tribe.experiments.store._write_pack", *PACK))
class KeptPack:
    @staticmethod
    def make(folder):
        line, other = packed_line(), folder / "other"
        other.mkdir()
        write_result(other)
        lines = (ROOT / "results/mnist-c-cpu.jsonl").read_bytes().splitlines()
        (folder / "mnist-c-cpu.jsonl").write_bytes(min((text for text in lines if text != line), key=len) + b"\n")
        return folder / "mnist-c-cpu.jsonl"

    @staticmethod
    def read(folder):
        path = folder / "mnist-c-cpu.jsonl"
        old = path.read_bytes().splitlines()
        store.keep(folder / "other", folder, damaged="skip")
        new = path.read_bytes().splitlines()
        assert packed_line() in new, "the result was added"
        assert len(new) > len(old) or len(set(old)) < len(old) or store._id_of(packed_line()) in map(store._id_of, old)
        return digest(len(new))


@reader("bench", "json", ("tribe.experiments.bench.results.read",))
class Bench:
    @staticmethod
    def make(folder):
        (folder / "bench.json").write_bytes((ROOT / "results/bench/wrn28_10_tf32_h200.json").read_bytes())
        return folder / "bench.json"

    @staticmethod
    def read(folder):
        result = bench.read(folder / "bench.json")
        changes = [(change.name, change.ratio) for change in bench.compare(result, result)]
        return digest(result.setting, changes, bench.results.machine_differences(result, result))


@reader("schedule", "npz", ("tribe.scenarios.schedules.load",))
class ScheduleFile:
    @staticmethod
    def make(folder):
        schedule = InOrder().schedule([torch.arange(40) % CLASSES], 0)
        scenarios.save(folder / "schedule.npz", schedule)
        return folder / "schedule.npz"

    @staticmethod
    def read(folder):
        return digest(*scenarios.load(folder / "schedule.npz"))
