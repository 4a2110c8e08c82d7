"""The record of a stream: a table with a row for each image, and the spec of the run. Plain data on disk."""

import io
import json
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tribe.storage.atomic import write_atomically

FORMAT, SCHEMA = "tribe-record", 2
COLUMNS = ("domain", "label", "prediction", "confidence", "seconds")


class Record(NamedTuple):
    """One stream as it was predicted, image by image, in order."""

    domain: Tensor  # (T,) int64, into `domains`
    label: Tensor  # (T,) int64, never seen by the method; -1 where unknown
    prediction: Tensor  # (T,) int64
    confidence: Tensor  # (T,) float32, the largest probability
    seconds: Tensor  # (T,) float32, what predicting and adapting took, shared evenly by the images of a batch
    domains: tuple[str, ...]
    classes: int
    spec: Mapping[str, Any]  # of the run: dataset, model, scenario, method, seed, ... as in tribe.lab.experiment

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table and the spec (as JSON) to one npz file, atomically."""
        words = {
            "format": FORMAT,
            "schema": SCHEMA,
            "domains": self.domains,
            "classes": self.classes,
            "spec": dict(self.spec),
        }
        buffer = io.BytesIO()
        columns = {name: getattr(self, name).numpy() for name in COLUMNS}
        np.savez_compressed(buffer, words=np.array(json.dumps(words)), **columns)
        write_atomically(path, buffer.getvalue())

    @staticmethod
    def load(path: str | PathLike[str]) -> "Record":
        """Read what `save` wrote, or say why it cannot be read."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no record at {path}")
        try:
            zipfile.ZipFile(path).close()  # or numpy takes it for a pickle, and says how to open that
            with np.load(path, allow_pickle=False) as file:
                words = json.loads(str(file["words"]))
                columns = {name: torch.from_numpy(file[name]) for name in COLUMNS}
        except Exception as error:  # damaged bytes make the readers fail in any way
            raise ValueError(
                f"{path} is not a record, or it is damaged ({error}); expected one of Record.save"
            ) from error
        if not isinstance(words, dict) or not isinstance(words.get("spec", {}), dict):
            raise ValueError(f"{path} is damaged: it holds no words about its table")
        if words.get("format") != FORMAT or words.get("schema", SCHEMA + 1) > SCHEMA:
            raise ValueError(
                f"{path} is of format {words.get('format')} {words.get('schema')}; this reads {FORMAT} {SCHEMA}"
            )
        if len({len(column) for column in columns.values()}) != 1 or not words.keys() >= {"domains", "classes", "spec"}:
            raise ValueError(f"{path} is damaged: its columns differ in length, or words are missing")
        spec = words["spec"] if words["schema"] == SCHEMA else _from_schema_1(words["spec"])
        return Record(**columns, domains=tuple(words["domains"]), classes=words["classes"], spec=spec)


def _from_schema_1(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of an older record: fields and code stood beside the method's name, fingerprints in the components."""
    new = {name: value for name, value in spec.items() if name not in ("fields", "code")}
    if isinstance(spec.get("method"), str):
        new["method"] = {"name": spec["method"], **{key: spec[key] for key in ("fields", "code") if key in spec}}
    for component, name in (("dataset", "images"), ("model", "weights")):
        if isinstance(part := spec.get(component), Mapping) and "fingerprint" in part:
            new[component] = {key: value for key, value in part.items() if key != "fingerprint"}
            new[name] = part["fingerprint"]
    return new
