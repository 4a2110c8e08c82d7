"""The tables in docs/serving.md say what the code does."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from http_calls import web

import tribe.serve
from places import ROOT
from tribe.serve import errors, protocol
from tribe.serve.config import Limits, Policy
from tribe.serve.protocol import ModelInfo
from tribe.testing import images, small_network

PAGE = (ROOT / "docs/serving.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def test_every_error_is_listed_with_its_status():
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| (\w+) \| (.*) \|$", PAGE, re.M)
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ServeError)]
    listed = [each for each in kinds if not issubclass(each, errors.Conflict) or each is errors.Conflict]
    assert sorted(rows) == sorted((str(e.status), e.__name__, e.code, e.__doc__.removesuffix(".")) for e in listed)


def test_the_limits_are_those_of_the_code():
    limits = Limits()
    for text in (
        f"{limits.body // 2**20} MB; a state that is put: {limits.state // 2**20} MB",
        f"has arrived | {limits.body_seconds:g}; a state: {limits.state_seconds:g} |",
        f"held at once | {limits.bodies // 2**20} MB",
        f"decoded | {limits.pixels // 10**6} million",
        f"pixels of all images of a request | {limits.request_pixels:,} |",
        f"images of a request | {ModelInfo('x', (1,), 1).most_images:,} |",
        f"do not count | {protocol.MAX_JSON // 2**20} MB |",
        f"beside the numbers of the images | {protocol.MAX_HEAD:,} |",
        f"of an answer | {protocol.MAX_NUMBERS:,}; {protocol.MAX_ANSWER_NUMBERS:,} |",
        f"connections | {limits.connections}; with a token {4 * limits.connections:,} |",
    ):
        assert text in PAGE, text


def test_the_fields_of_the_policy_exist():
    names = {field.name for kind in (Policy, Limits) for field in dataclasses.fields(kind)}
    kept = PAGE.partition("## What is kept")[2].partition("## ")[0]
    assert set(re.findall(r"`(write_every|lease|lag|idle|drain)`", kept)) <= names
    assert set(re.findall(r"--set (?:policy|limits)\.(\w+)=", PAGE)) <= names


def test_the_shell_blocks_are_those_that_are_tested():
    """A new block needs a test. The last two are those of test_backup.py and test_haproxy.py."""
    first = [block.splitlines()[0] for block in BLOCKS]
    assert first == [
        "tribe serve --data streams",
        "python - <<'END'",
        "for camera in motion_blur spatter rotate; do",
        "curl -s http://127.0.0.1:8000/v1/streams/rotate",
        "tribe source health --model compact --dataset mnist --method tribe+guard --out health.safetensors",
        "tribe store backup streams night.backup",
        "tribe serve --data streams --port 8101 &",
    ]


class Shell:
    """Runs blocks of the page in a folder, with a free port in place of 8000, as a reader would in a terminal."""

    def __init__(self, folder):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        source = str(ROOT / "src")
        self.options = {"cwd": folder, "env": {**os.environ, "PATH": path, "PYTHONPATH": source}, "text": True}

    def run(self, block):
        """Run a block to its end, and return what it prints."""
        command = ["bash", "-e", "-c", block.replace(":8000", f":{self.port}")]
        done = subprocess.run(command, **self.options, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def serving(self, command):
        """Run a server until the end of the block, as Ctrl-C ends it."""
        words = f"exec {command} --port {self.port}"
        with subprocess.Popen(["bash", "-c", words], **self.options, stdout=subprocess.PIPE) as process:
            try:
                assert "Ctrl-C stops it" in process.stdout.readline()
                yield
            finally:
                process.send_signal(signal.SIGINT)
            assert process.stdout.read() == "stopped; every stream is stored\n"

    def stream(self, name):
        return web.get(f"http://127.0.0.1:{self.port}/v1/streams/{name}").json()


@pytest.mark.slow  # a calibration, and five starts of Python
def test_five_minutes_from_nothing_to_three_adapting_streams_and_their_health(tmp_path):
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("needs curl and bash")
    shell, (serve, pictures, send, look, watch, *_) = Shell(tmp_path), BLOCKS
    with shell.serving(serve.strip()):
        shell.run(pictures)
        lines = shell.run(send).splitlines()
        assert len(lines) == 60
        assert all('{"stream":"' in line and line.endswith(".png") for line in lines)
        clocks = {name: shell.stream(name)["clock"] for name in ("motion_blur", "spatter", "rotate")}
        assert set(clocks.values()) == {20}
        answers = shell.run(look)
        assert answers.count('"name":"rotate"') == 5
        net = tribe.models.load("compact", tribe.models.find("compact", "mnist"))
        assert tribe.load(tmp_path / "rotate.safetensors", net).info[0].steps == 20
    with shell.serving(serve.strip()):
        shell.run(send)
        assert shell.stream("spatter")["clock"] == 40, "it goes on where it was"
    calibrate, guarded = watch.strip().splitlines()
    shell.run(calibrate)
    shutil.rmtree(tmp_path / "streams")
    with shell.serving(guarded):
        shell.run(send)
        known = shell.stream("rotate")
        assert 0 <= known["accuracy_low"] <= known["accuracy"] <= known["accuracy_high"] <= 1
        assert isinstance(known["alarms"], list)


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope = {"tribe": tribe, "net": small_network(), "images": images(1, 6)[0].numpy()}
    exec(code, scope)
    assert np.isfinite(scope["logits"]).all()
    assert (tmp_path / "streams").is_dir()
