"""Measure the main job, ``tribe run``, on a quiet machine and beside busy processes: one a core, at the same priority.

``python -m benchmarks.load --out benchmarks/results``. A job that only shares its cores takes twice as long; one whose
threads wait for one another takes many times as long.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tribe._openmp import VARIABLE
from tribe.experiments.provenance import machine
from tribe.io.files import write_atomically

LIMIT = 3.0  # times as long as on a quiet machine, at most
BUSY = "while True: pass"
SETTINGS = {
    "as it is": {},
    "libgomp's default": {"OMP_WAIT_POLICY": "", VARIABLE: "300000"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def seconds(words: Sequence[str], environment: dict[str, str]) -> float:
    """How long the job takes, its start included."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tribe", "run", "--out", folder, *words]
        begun = time.perf_counter()
        subprocess.run(command, env=kept | environment, check=True, capture_output=True)
        return time.perf_counter() - begun


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["as it is"])
    parser.add_argument("words", nargs="*", help="after --: further options of `tribe run`")
    options = parser.parse_args()
    words = options.words
    cores, rows = len(os.sched_getaffinity(0)), []
    for name in options.settings:
        quiet = seconds(words, SETTINGS[name])
        with busy(cores):
            loaded = seconds(words, SETTINGS[name])
        rows.append({"setting": name, "quiet": quiet, "loaded": loaded, "ratio": loaded / quiet})
        print(f"{name}: {quiet:.1f} s quiet, {loaded:.1f} s beside {cores} busy processes, {loaded / quiet:.2f} times")
    if options.out is not None:
        content = {"machine": machine(torch.device("cpu")), "words": words, "busy": cores, "limit": LIMIT, "rows": rows}
        write_atomically(options.out / "load_cpu.json", (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
