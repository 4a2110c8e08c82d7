"""Files of the right format with wrong contents: Hypothesis edits the JSON in a file, and it is sealed again."""

import contextlib
import copy
import io
import json

import numpy as np
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from fuzz.mutations import BOUNDARIES, in_order, members, zipped
from tribe.experiments.experiment import Experiment
from tribe.io.tensors import content_digest

# Texts that no value of Python is written as; they take the place of a word.
RAW = {
    "@deep list@": "[" * 100_000 + "]" * 100_000,
    "@deep object@": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@long integer@": "9" * 5000,
    "@infinite@": "1e999",
    "@NaN@": "NaN",
    "@surrogate@": '"\\ud800"',
    "@wide@": "[" + "[]," * 200_000 + "[]]",
}
SCALARS = st.one_of(
    st.sampled_from((None, True, False, -1, -0.5, 1e308, "", "\x00", "\x1b[31m", "../..", "a" * 10_000, "$\\foo$")),
    st.sampled_from(BOUNDARIES),
    st.sampled_from(sorted(RAW)),
    st.integers(-3, 100),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value, place=()):
    """The place of every value in a document."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


@st.composite
def edited(draw, document):
    """A document with some values replaced, removed, renamed or swapped."""
    holder = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from([place for place in places(holder) if place]))
        inside = holder
        for step in path:
            inside = inside[step]
        action = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "swap", "number")))
        if action == "number" and type(inside[key]) in (int, float):
            inside[key] = draw(st.sampled_from((-1, 0, 0.5, 2**63, 1e30, str(inside[key]), True)))
        elif action == "remove" and inside is not holder:
            del inside[key]
        elif action == "add" and isinstance(inside, dict):
            inside[draw(st.text(max_size=5) | st.sampled_from(sorted(inside)))] = draw(VALUES)
        elif action == "swap" and isinstance(inside, dict):
            other = draw(st.sampled_from(sorted(inside)))
            inside[key], inside[other] = inside[other], inside[key]
        else:
            inside[key] = draw(VALUES)
    return holder[0]


def text(document) -> str:
    """JSON, with the raw texts in their places."""
    written = json.dumps(document)
    for word, raw in RAW.items():
        written = written.replace(json.dumps(word), raw)
    return written


class Json:
    """The file is the document."""

    @staticmethod
    def load(data, path):
        return json.loads(data)

    @staticmethod
    def dump(document, data, path):
        return text(document).encode(errors="surrogatepass")


class Line:
    """The document is a line of a pack, which has the id of its experiment."""

    load = Json.load

    @staticmethod
    def dump(document, data, path):
        if isinstance(document, dict) and isinstance(document.get("spec"), dict):
            with contextlib.suppress(Exception):  # the spec is damaged, and the reader must say so
                document["id"] = Experiment.from_json(document["spec"]).id
        return text(document).encode() + b"\n"


class Words:
    """The document is the text array of a record."""

    @staticmethod
    def load(data, path):
        return json.loads(str(np.load(io.BytesIO(members(data)["words.npy"]))))

    @staticmethod
    def dump(document, data, path):
        buffer = io.BytesIO()
        np.save(buffer, np.array(text(document)))
        return zipped((members(data) | {"words.npy": buffer.getvalue()}).items())


class Header:
    """The document is the metadata of a tensor file, whose digest is computed again."""

    @staticmethod
    def load(data, path):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        return {name: _parsed(value) for name, value in metadata.items() if name not in ("digest", "format")}

    @staticmethod
    def dump(document, data, path):
        with safe_open(path, framework="pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        if isinstance(document, dict):
            edited = {name: value if isinstance(value, str) else text(value) for name, value in document.items()}
            metadata = {name: metadata[name] for name in ("format",) if name in metadata} | edited
            metadata["digest"] = content_digest(metadata, tensors)
        return in_order(save(tensors, metadata))


def _parsed(value):
    try:
        return json.loads(value)
    except ValueError:
        return value


FORMATS = {"json": Json, "lines": Line, "words": Words, "header": Header}
DOCUMENTS = {  # readers whose files hold JSON
    **dict.fromkeys(("result-spec.json", "result-metrics.json", "result-environment.json"), "json"),
    **dict.fromkeys(("bench", "draws", "made-json", "weights-card", "tokens", "request-json"), "json"),
    **dict.fromkeys(("packed-results", "packed-results-kept"), "lines"),
    **dict.fromkeys(("record", "record-in-report"), "words"),
    **dict.fromkeys(("state", "stream", "knowledge", "calibration", "run-checkpoint", "training-checkpoint"), "header"),
}
