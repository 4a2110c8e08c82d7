"""``python -m fuzz``: read damaged files, and say which were not read or refused as they should."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from fuzz.cases import Fuzzer
from fuzz.readers import READERS

parser = argparse.ArgumentParser("fuzz", description=__doc__)
parser.add_argument("--reader", nargs="+", choices=READERS, default=list(READERS), metavar="NAME", help="default: all")
parser.add_argument("--seed", nargs="+", type=int, help="these cases; default: the first --cases of each reader")
parser.add_argument("--cases", type=int, default=60)
parser.add_argument("--file", type=Path, help="read this file")
given = parser.parse_args()

MOST = 5  # failures of a reader
failures = 0
with Fuzzer() as fuzzer:
    for name in given.reader:
        counts = Counter()
        seeds = [None] if given.file else given.seed or range(given.cases)
        for seed in seeds:
            content = given.file.read_bytes() if given.file else fuzzer.seeded(name, seed)
            outcome = fuzzer.read(name, content)
            counts[outcome.kind] += 1
            if outcome.is_failure:
                failures += 1
                if counts.total() - counts["read"] - counts["refused"] > MOST:
                    break
                print(f"--reader {name} --seed {seed}: {fuzzer.explain(name, content, outcome)}\n")
            elif len(seeds) == 1:
                print(f"{outcome.kind}: {outcome.text}")
        print(f"{name}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}", flush=True)
sys.exit(failures > 0)
