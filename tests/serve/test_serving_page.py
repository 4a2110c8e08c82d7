"""The tables in docs/serving.md say what the code does."""

import re

import numpy as np

import tribe.serve
from places import ROOT
from tribe.serve.limits import Limits
from tribe.serve.protocol.errors import ERRORS
from tribe.serve.protocol.messages import ModelInfo
from tribe.serve.protocol.v2 import MOST_JSON
from tribe.testing import images, small_network

PAGE = (ROOT / "docs/serving.md").read_text()


def test_every_error_is_listed_with_its_status():
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| (\w+) \| (.*) \|$", PAGE, re.M)
    assert rows == [(str(each.status), each.__name__, each.code, each.when) for each in ERRORS]


def test_the_limits_are_those_of_the_code():
    limits = Limits()
    for text in (
        f"{limits.body // 2**20} MB; a state that is put: {limits.state // 2**20} MB",
        f"has arrived | {limits.body_seconds:g}; a state: {limits.state_seconds:g} |",
        f"held at once | {limits.bodies // 2**20} MB",
        f"decoded | {limits.pixels // 10**6} million",
        f"images of a request | {ModelInfo('x', (1,), 1).most_images:,} |",
        f"do not count | {MOST_JSON // 2**20} MB |",
        f"headers | {limits.head_bytes // 2**10} kB",
        f"have arrived | {limits.head_seconds:g} |",
        f"connections | {limits.connections} |",
    ):
        assert text in PAGE, text


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope = {"tribe": tribe, "net": small_network(), "images": images(1, 6)[0].numpy()}
    exec(code, scope)
    assert np.isfinite(scope["logits"]).all()
    assert (tmp_path / "streams").is_dir()
