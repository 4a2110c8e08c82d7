"""Measure what the web server adds to a model: wrk against a model that does nothing, so that all time is overhead.

``python -m benchmarks.serve --out benchmarks/results``

The server runs in a process of its own. Requests are those that tritonclient sends: JSON with the image as bytes after
it. Where others use the machine, latencies are theirs, too; the processor time that one request takes in the server
(`cpu_us_p99`) then says what an answer would wait for on a quiet one. Needs wrk (a Debian package) and the extra
`serve`. The results go to serve_cpu.json.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from tribe.experiments.provenance import machine
from tribe.io.files import write_atomically
from tribe.serve.edge import choose_parser
from tribe.serve.metrics import Events, Metrics
from tribe.serve.protocol import InferResult, ModelInfo
from tribe.serve.server import Listener
from tribe.serve.service import Service

RESULTS = Path(__file__).parent / "results"
CLASSES = 10
SCRIPT = """
local file = io.open("{body}", "rb")
wrk.method, wrk.body = "POST", file:read("*a")
file:close()
wrk.headers["Inference-Header-Content-Length"] = "{length}"
wrk.headers["Content-Type"] = "application/octet-stream"
wrk.headers["X-Tribe-Stream"] = "cam1"
done = function(summary, latency, requests)
  local failed = summary.errors
  local errors = failed.connect + failed.read + failed.write + failed.status + failed.timeout
  local form = '"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "max_ms": %f, "errors": %d'
  io.write("RESULT {{" .. string.format(form, summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, latency.max / 1e3, errors) .. "}}\\n")
end
"""


class NoModel:
    """A worker that answers at once, or after a fixed time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.logits, self.times = seconds, torch.zeros(1, CLASSES), list[float]()
        self.metrics, self.log = Metrics("none"), Events(1)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def infer(self, stream: str | None, images: torch.Tensor, **_: Any) -> InferResult:
        self.times.append(time.thread_time())
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return InferResult(self.logits, True, 1, 1, {"trusted": 0.9, "entropy": 0.1, "distance": 0.2})


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """The least that a server on uvicorn can do: read a body, drop it, answer as many bytes."""
    while (await receive()).get("more_body", False):
        pass
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"300")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(300)})


def serve(what: str, shape: tuple[int, ...], connection: Any) -> None:
    """Serve a model that does nothing, or nothing at all, in this process."""
    torch.set_num_threads(1)
    if what == "uvicorn":
        taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        taken.bind(("127.0.0.1", 0))
        taken.listen(1024)
        connection.send(taken.getsockname()[1])
        config = uvicorn.Config(
            bare, http=choose_parser(loopback=True), lifespan="off", log_config=None, access_log=False
        )
        uvicorn.Server(config).run([taken])
    else:
        model = NoModel()
        service = Service(model, ModelInfo("none", shape, CLASSES))  # type: ignore[arg-type]
        listener = Listener(service, port=0)
        listener.run(lambda: connection.send(listener.port))
        spent = np.diff(
            model.times[len(model.times) // 6 :]
        )  # after the warm-up, of the event loop's thread, from one request to the next
        connection.send({f"cpu_us_p{each}": round(1e6 * float(np.percentile(spent, each))) for each in (50, 99)})


def request(shape: tuple[int, ...], dtype: str) -> tuple[bytes, int]:
    """The body of a request with one image, and the length of its JSON."""
    image = np.zeros((1, *shape), {"FP32": np.float32, "UINT8": np.uint8}[dtype])
    tensor = {"name": "images", "shape": image.shape, "datatype": dtype}
    header = {
        "id": "1",
        "parameters": {"sequence_id": "cam1", "sequence_start": False, "binary_data_output": True},
        "inputs": [tensor | {"parameters": {"binary_data_size": image.nbytes}}],
    }
    text = json.dumps(header).encode()
    return text + image.tobytes(), len(text)


def cpu_seconds(pid: int) -> float:
    """What a process has used of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    what: str, shape: tuple[int, ...], dtype: str, connections: int, seconds: int, rounds: int
) -> dict[str, Any]:
    """Some rounds of wrk against a fresh server; the one with the lowest p99: what else the machine does only adds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(what, shape, theirs))
    process.start()
    try:
        port = ours.recv()
        body, length = request(shape, dtype)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "body").write_bytes(body)
            script = Path(folder) / "post.lua"
            script.write_text(SCRIPT.format(body=Path(folder) / "body", length=length))
            url = f"http://127.0.0.1:{port}/v2/models/none/infer"
            words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "-s", str(script), url]
            found = [round_of(words, process.pid or 0) for _ in range(rounds + 1)][1:]  # the first is to warm up
        process.terminate()
        spent = ours.recv() if what == "tribe" else {}
    finally:
        process.terminate()
        process.join()
    best = min(found, key=lambda each: each["p99_ms"])
    about = {"server": what, "body_bytes": len(body), "datatype": dtype, "connections": connections}
    return about | best | spent | {"p99_ms_of_rounds": [each["p99_ms"] for each in found]}


def round_of(words: list[str], server: int) -> dict[str, Any]:
    """One round of wrk, and what the server used of the processors meanwhile."""
    used = -cpu_seconds(server)
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    used += cpu_seconds(server)
    found: dict[str, Any] = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT"))[7:])
    row = {"requests_per_second": round(found["requests"] / found["seconds"])}
    row["cpu_us_per_request"] = round(1e6 * used / found["requests"])
    return row | {name: round(found[name], 3) for name in ("p50_ms", "p99_ms", "max_ms")} | {"errors": found["errors"]}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m benchmarks.serve", description=__doc__, formatter_class=style)
    p.add_argument("--seconds", type=int, default=2, help="of each round (default: %(default)s)")
    p.add_argument("--connections", default="1,4,16,64", help="at once, with commas (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=5, help="the best of them counts (default: %(default)s)")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    if shutil.which("wrk") is None:
        sys.exit("benchmarks.serve needs wrk: apt install wrk")
    rows, before = [], os.getloadavg()[0]
    for shape, dtype in (((1, 28, 28), "UINT8"), ((3, 112, 112), "FP32")):
        for connections in map(int, o.connections.split(",")):
            for what in ("tribe", "uvicorn"):
                rows.append(measure(what, shape, dtype, connections, o.seconds, o.rounds))
                print(json.dumps(rows[-1]), flush=True)
    words = "wrk against a model that does nothing: all time is overhead. uvicorn: the same bodies, read and dropped. "
    words += "Each row is the round with the lowest p99"
    load = "load of the machine's 2 cores by others, before and after"
    found = {"what": words, "machine": machine(torch.device("cpu")), load: [before, os.getloadavg()[0]], "rows": rows}
    write_atomically(o.out / "serve_cpu.json", (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
