"""Damaged files of every kind end in the right result or in an error that the reader documents, in bounded memory.

Each reader reads a valid file that is changed in many ways: bits flipped, bytes removed, repeated or replaced, the file
cut short or extended. All cases of a reader run in one child process with a limit of memory. The seeds are fixed, so
that a failure repeats; the message names the seed.
"""

import contextlib
import gzip
import json
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import layouts
import tribe
from processes import run_limited
from trials import recorded, table
from tribe import datasets
from tribe.data.datasets import manifest
from tribe.data.datasets.files import open_npy, read_npz
from tribe.data.datasets.manifest import Manifest
from tribe.data.images import read_image
from tribe.data.models import weights
from tribe.experiments.bench.costs import read_costs
from tribe.experiments.record import Record
from tribe.io import json_files, states
from tribe.knowledge import SHIPPED, Knowledge
from tribe.onnx.states import ModelFileError
from tribe.onnx.states import read as read_in_numpy
from tribe.serve.store import Write, backup
from tribe.serve.store.sqlite import SqliteStore
from tribe.testing import images, small_network
from tribe.trial.labels import read_labels
from tribe.trial.recordings import open_recording
from tribe.trial.trial import Trial

MEGABYTES = 700  # beside what the imports take
INTERESTING = [b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"9" * 20, b"{", b"[" * 40, b'"', b"(", b"-1"]


def draw(seed):
    return np.random.default_rng(seed)


def write_record(path):
    column = torch.arange(30)
    spec = {"method": {"name": "source", "fields": {}}, "seed": 0}
    record = Record(column // 15, column % 4, column % 3, column / 30, column / 1e4, ("fog@5", "snow@5"), 4, spec)
    record.save(path)


def write_weights(path):
    torch.save(small_network().state_dict(), path)


def write_state(path):
    adapter = tribe.adapt(small_network())
    adapter(images(1, 6)[0])
    adapter.save(path)


def write_bank(path):
    adapter = tribe.adapt(small_network(), "bank", compare=0)
    adapter(images(1, 6)[0])
    adapter.save(path)


def write_backup(path):
    with contextlib.closing(SqliteStore(path.parent / "store")) as store:
        for seed in range(2):
            claim = store.claim(f"cam{seed}", "a fuzzer", 60)
            if claim is not None:
                adapter = tribe.adapt(small_network())
                adapter(images(1, 6, seed)[0])
                adapter.save(path.parent / "state")
                store.write([Write(claim, (path.parent / "state").read_bytes(), 1, ["request"])])
    backup.backup(path.parent / "store", path)


def write_manifest(path):
    blocks = {"fog@5": {"sha256": "0" * 64, "device": "cpu", "torch": "2", "tribe": "1"}}
    manifest.write_manifest(path.parent, Manifest("cifar10", 3, "0" * 64, 0, "common", "down", blocks))


def write_idx(path):
    layouts.write_mnist(path.parent / "mnist", draw(0))
    path.write_bytes((path.parent / "mnist/t10k-images-idx3-ubyte").read_bytes())


def read_idx(path):
    (path.parent / "mnist").mkdir(exist_ok=True)
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        target = path.parent / "mnist" / name
        content = np.array([0x801, layouts.PER], ">u4").tobytes() + bytes(layouts.PER)
        target.write_bytes(path.read_bytes() if "images" in name else content)
    return datasets.create("mnist", data=str(path.parent)).labels("clean")


def write_usps(path):
    layouts.write_usps(path.parent / "usps", draw(0))
    path.write_bytes(gzip.decompress((path.parent / "usps/zip.test.gz").read_bytes()))


def read_usps(path):
    (path.parent / "usps").mkdir(exist_ok=True)
    (path.parent / "usps/zip.test.gz").unlink(missing_ok=True)
    (path.parent / "usps/zip.test").write_bytes(path.read_bytes())
    return datasets.create("usps", data=str(path.parent)).labels("usps")


def picture(kind):
    return lambda path: layouts.picture(draw(1), 40, 30).save(path, kind)


def small_trial(path):
    return table([0] * 6, [1] * 6), recorded(path.parent, 6)


def write_labels(path):
    path.write_text("frame,file,label\n0,,1\n3,,?\n5,,2\n")


def write_frames(path):
    layouts.picture(draw(1), 8, 6).save(path.parent / "a.png")
    path.write_text("file\na.png\na.png\n")


def write_trial(path):
    table([0] * 6, [1] * 6).save(path.parent)


READERS = {  # name of the file: how to write a valid one, how to read it, and the errors that the reader documents
    "image.jpg": (picture("JPEG"), read_image, ValueError),
    "image.png": (picture("PNG"), read_image, ValueError),
    "image.webp": (picture("WEBP"), read_image, ValueError),
    "image.tif": (picture("TIFF"), read_image, ValueError),
    "array.npy": (lambda path: np.save(path, draw(2).random((7, 5))), open_npy, ValueError),
    "columns.npz": (lambda path: np.savez_compressed(path, a=np.arange(50), b=np.ones(50)), read_npz, ValueError),
    "images.idx": (write_idx, read_idx, ValueError),
    "usps.txt": (write_usps, read_usps, ValueError),
    "made.json": (write_manifest, lambda path: manifest.read_manifest(path.parent), ValueError),
    "costs.json": (
        lambda path: path.write_text(json.dumps({"source": 1, "tribe": 7.25})),
        lambda path: read_costs(path, ["source", "tribe"]),
        ValueError,
    ),
    "plain.json": (
        lambda path: path.write_text(json.dumps({"a": [1, 2.5, None, "x"], "b": {"c": True}})),
        lambda path: json_files.read(path, {"a": list, "b": {"c": bool}}),
        ValueError,
    ),
    "weights.safetensors": (
        lambda path: save_file({"a": torch.linspace(0, 1, 30), "b": torch.arange(9)}, path),
        weights.read,
        weights.WeightsError,
    ),
    "weights.pt": (write_weights, weights.read, weights.WeightsError),
    "knowledge.safetensors": (
        lambda path: path.write_bytes((SHIPPED / "eata_compact_mnist.safetensors").read_bytes()),
        Knowledge.load,
        ValueError,
    ),
    "state.safetensors": (write_state, states.read, states.StateFileError),
    "state-in-numpy.safetensors": (write_bank, read_in_numpy, ModelFileError),
    "streams.backup": (write_backup, backup.check, ValueError),
    "labels.csv": (write_labels, lambda path: read_labels(path, *small_trial(path)), ValueError),
    "list.csv": (write_frames, lambda path: list(open_recording(path).batches(4)), (ValueError, OSError)),
    "trial.json": (write_trial, lambda path: Trial.load(path.parent), (ValueError, OSError)),
    "predictions.npz": (write_trial, lambda path: Trial.load(path.parent), (ValueError, OSError)),
    "record.npz": (write_record, Record.load, ValueError),
}


def mutated(content, chance):
    """Return content that is changed in one to four places."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        place = chance.randrange(len(data) or 1)
        if chance.random() < 0.5:  # the start of a file says most about the rest
            place = min(place, chance.randrange(400))
        length = chance.choice((1, 2, 8, 64, 1000))
        kind = chance.randrange(7)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = data[place : place + length] * chance.choice((1, 3))
        elif kind == 3:
            data[place : place + 1] = chance.choice(INTERESTING)
        elif kind == 4:
            del data[place:]
        elif kind == 5:
            data += chance.randbytes(length)
        else:
            data[place : place + length] = chance.randbytes(length)
    return bytes(data)


def run(name, folder, cases):
    """Read damaged files, and return what went wrong: an error of another kind, or one that does not name the file."""
    write, read, expected = READERS[name]
    path, failures = folder / name, []
    write(path)
    read(path)
    content = path.read_bytes()
    for seed in range(cases):
        path.write_bytes(mutated(content, random.Random(f"{name} {seed}")))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path)
        except expected as error:
            if len(str(error)) < 5:
                failures.append(f"{name}, seed {seed}: the error says nothing: {error!r}")
        except BaseException as error:
            failures.append(f"{name}, seed {seed}: {error!r}")
    return failures


CHILD = """
from pathlib import Path
sys.path[:0] = sys.argv[4].split(":")
from fuzz import test_fuzz
print(test_fuzz.json.dumps(test_fuzz.run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
"""


@pytest.mark.parametrize("cases", [40, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name, cases, tmp_path):
    done = run_limited(CHILD, name, tmp_path, cases, ":".join(sys.path), megabytes=MEGABYTES)
    assert done.code == 0, f"{name}: the process ended with {done.code}:\n{done.err[-2000:]}"
    assert json.loads(done.out.splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("read", "message"),
    [(lambda path: [][1], "IndexError"), (lambda path: (_ for _ in ()).throw(ValueError("")), "says nothing")],
)
def test_the_fuzzer_notices_a_broken_reader(read, message, tmp_path, monkeypatch):
    reads = iter([lambda path: None] + [read] * 3)
    monkeypatch.setitem(
        READERS, "broken", (lambda path: path.write_bytes(b"abc"), lambda path: next(reads)(path) and None, ValueError)
    )
    failures = run("broken", tmp_path, 3)
    assert len(failures) == 3
    assert message in failures[0]
