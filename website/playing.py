"""The page "Try it": a model file, digits and ONNX Runtime for the browser, in scripts that need no server."""

import base64
import gzip
import importlib.util
import json
import tempfile
from pathlib import Path

import torch

import tribe.onnx
from tribe import datasets, models

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "build/npm/node_modules/onnxruntime-web"  # `make site` puts it there
PAGE = Path(__file__).parent / "play"
STREAM = ROOT / "examples/adapting_stream.js"
SCRIPTS = ("ort.wasm.min.js", "files.js", "adapting_stream.js", "corruptions.js", "page.js")  # in this order
EVERY = 5  # one digit in so many of the test set is on the page: 2,000
MISSING = (
    '!!! note "Not in this copy of the site"\n\n    This copy was built without {}. `make site` installs what is '
    "missing and builds the page; it needs npm.\n"
)


def missing() -> str:
    """What the page needs and this machine lacks; nothing: an empty text."""
    if not (RUNTIME / "dist").is_dir():
        return "onnxruntime-web"
    packages = ("onnx", "onnxscript")
    return ", ".join(name for name in packages if importlib.util.find_spec(name) is None)


def markdown() -> str:
    """The page's part in Markdown: HTML, styles and scripts."""
    if lacking := missing():
        return MISSING.format(lacking)
    scripts = "".join(f'<script src="play/{name}" defer></script>\n' for name in SCRIPTS)
    return f'<link rel="stylesheet" href="play/page.css">\n{(PAGE / "page.html").read_text()}{scripts}'


def files() -> dict[str, str | bytes]:
    """All files of the page, by their place on the site."""
    if missing():
        return {}
    made: dict[str, str | bytes] = {f"play/{name}": (PAGE / name).read_text() for name in ("corruptions.js", "page.js")}
    made["play/page.css"] = (PAGE / "page.css").read_text()
    made["play/adapting_stream.js"] = STREAM.read_text()
    made["play/ort.wasm.min.js"] = (RUNTIME / "dist/ort.wasm.min.js").read_bytes()
    made["play/onnxruntime-web.txt"] = (PAGE / "onnxruntime-web.txt").read_text()
    contents = {
        "wasm": (RUNTIME / "dist/ort-wasm-simd-threaded.wasm").read_bytes(),
        "glue": (RUNTIME / "dist/ort-wasm-simd-threaded.mjs").read_bytes(),
        "model": model(),
        "digits": digits(),
    }
    packed = {name: base64.b64encode(gzip.compress(data, 9, mtime=0)).decode() for name, data in contents.items()}
    made["play/files.js"] = f"const tribeFiles = {json.dumps(packed)};\n"
    return made


def model() -> bytes:
    """The embedded network with the method `bank`, and its source beside, as a model file."""
    net = models.load("compact", models.find("compact", "mnist"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.onnx"
        tribe.onnx.export(net, path, (1, 28, 28), uint8=True, source_logits=True)
        return path.read_bytes()


def digits() -> bytes:
    """Labels, then images, of digits that the network was not trained on."""
    mnist = datasets.create("mnist")
    labels = mnist.labels("clean")
    chosen = torch.arange(0, len(labels), EVERY)
    images = (255 * mnist.images("clean", chosen)).round().byte()
    return labels[chosen].byte().numpy().tobytes() + images.numpy().tobytes()
