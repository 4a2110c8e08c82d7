"""What a reader is, and functions that open files but are none."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


class Reader(NamedTuple):
    """A kind of file, how to make a valid one, and how to read it."""

    format: str  # json, lines, npy, npz, safetensors, torch, pickle, gzip, image: selects mutations; "": bytes alone
    make: Callable[[Path], Path]  # writes a valid file, and what it needs, into a folder; returns the path of the file
    read: Callable[[Path], str]  # reads it from the folder; returns a digest of the contents
    functions: tuple[str, ...]  # in the package, that open or decode the file
    sealed: bool = False  # a file with other contents is refused, since it carries a hash of them


READERS: dict[str, Reader] = {}

NO_READERS = {  # functions that call an opener, and why no file of a user can hurt them
    **dict.fromkeys(
        (
            "tribe.corruptions.common.weather._frost_images",
            "tribe.datasets.class_folders.wnids",
            "tribe.datasets.embedded.mnist_test",
            "reproduction.claims.claims",
            "reproduction.tables._read",
            "tribe.experiments.report.page._asset",
            "tribe.serve.app.Handlers.__init__",
        ),
        "it reads data of the package",
    ),
    "tribe.datasets.image_generation._is_whole": "it compares two bytes",
    **dict.fromkeys(
        (
            "tribe.corruptions.common.digital.jpeg_compression",
            "tribe.experiments.experiment.Experiment.json",
            "tribe.experiments.sources._functions",
            "tribe.experiments.spec.describe",
            "tribe.experiments.report.collect._facts",
            "tribe.experiments.report.command._plain",
            "tribe.testing.filter_checks.resumes_exactly",
            "tribe.testing.method_checks.saves_and_resumes",
            "reproduction.train.train",
        ),
        "it decodes what it has just encoded",
    ),
    **dict.fromkeys(
        (
            "tribe.experiments.jobs.CustomMethod._imported",
            "tribe.experiments.jobs.CustomMethod._of_class",
            "tribe.experiments.jobs._bytes_of",
            "tribe.experiments.provenance._hash",
            "tribe.experiments.provenance._imports",
            "tribe.experiments.sources._source",
        ),
        "it reads code, which is trusted",
    ),
    **dict.fromkeys(
        ("tribe.experiments.bench.clock.resident", "tribe.experiments.provenance.machine"),
        "it asks the system, in /proc",
    ),
    "tribe.cli.stdout.checked_stdout": "it writes to stdout",
    "tribe.streams.files.StateFiles.read": "it reads what this process has written into a folder of its own",
    **dict.fromkeys(
        ("tribe.serve.client.Client._json", "tribe.serve.client.Client.infer", "tribe.serve.client._words"),
        "it decodes what the server that the user chose has sent",
    ),
    **dict.fromkeys(
        (
            "tribe.serve.controls.Controls._create",
            "tribe.serve.controls.Controls._existing",
            "tribe.serve.controls.Controls._put_state",
            "tribe.serve.worker.Worker._open",
        ),
        "it opens a stream; the fleet and the store read the files",
    ),
    "tribe.serve.rpc.listening": "it hands the operator's certificate and key to gRPC",
    "tribe.serve.app.Handlers._arguments": "it parses JSON of bounded size as the other requests do",
    **dict.fromkeys(
        ("reproduction.command._keep", "tribe.experiments.jobs.result_files"),
        "it copies bytes and reads nothing in them",
    ),
}


def digest(*parts: Any) -> str:
    """A hash of tensors and plain values."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode() + part.contiguous().numpy().tobytes())
        else:
            found.update(repr(part).encode())
    return found.hexdigest()


def reader(name, format, functions, **fields):
    """Register a class with two static methods, `make` and `read`."""

    def add(cls):
        READERS[name] = Reader(format, cls.make, cls.read, tuple(functions), **fields)
        return cls

    return add
