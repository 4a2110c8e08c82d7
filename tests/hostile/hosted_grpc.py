"""A server of gRPC in a process of its own, whose memory and log can be looked at."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx

TOKENS = ("victim-of-16-chars", "attacker-16-chars")  # each is a name and its secret


class Hosted:
    """The ports, the process and the log of a server."""

    def __init__(self, process, log, port, grpc_port):
        self.process, self.log, self.port, self.grpc_port = process, log, port, grpc_port

    def memory(self, name="VmRSS"):
        """Bytes of memory; `VmHWM`: the most that it has had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))

    def begin_peak(self):
        """Forget the most memory so far; the memory now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory("VmHWM")

    def answers_http(self):
        return httpx.get(f"http://127.0.0.1:{self.port}/v2/health/live", timeout=60, trust_env=False).status_code == 200


@contextmanager
def hosted(folder, tokens=True, files=0, **limits):
    """Start a server with limits; `files` is how many it may open."""
    log = Path(folder, "log.txt")
    words = repr((tokens, files, limits))
    path = os.pathsep.join(each for each in sys.path if each)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, words],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=file,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        said = process.stdout.readline().split()
        assert len(said) == 2, log.read_text()
        yield Hosted(process, log, *map(int, said))
    finally:
        process.kill()
        process.communicate()


def serve(tokens, files, limits):
    """Serve until standard input ends."""
    from small_server import listening, token

    from tribe.serve.config import Limits

    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    names = [token(name, streams=f"{name[:6]}-", role="learn") for name in TOKENS] if tokens else None
    with listening(tokens=names, limits=Limits(**limits), grpc_port=0) as server:
        print(server.port, server.grpc_port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve(*eval(sys.argv[1]))
