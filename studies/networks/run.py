"""Methods on networks that others wrote: errors on clean images and under corruptions.

``python -m studies.networks.run --model lite0.py:net --data ROOT --every 7`` plays every seventh image of ImageNet.
Each method starts from the source twice: it plays the clean images, then the corruptions one after another.
``--render`` writes the tables into the page.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from studies.pages import play_or_render, table
from studies.play import Clock, Progress, Subset, read, write
from tribe import scenarios
from tribe.cli.custom import custom_network
from tribe.core.precision import PRECISIONS, float32_precision, precision_on
from tribe.data.datasets import Dataset, optional
from tribe.experiments import metrics
from tribe.experiments.provenance import machine
from tribe.experiments.runner import run
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Workbench, in_precision, restrict

FOLDER = Path(__file__).parent
CORRUPTIONS = "gaussian_noise,motion_blur,fog,contrast"
NAMES = {"source": "TEST", "bn": "BN", "tent": "TENT", "sar": "SAR", "rotta": "RoTTA", "tribe": "TRIBE"}
MANY = 6  # corruptions, from which on a table has no column for each


def every(dataset: Dataset, step: int) -> Subset:
    """Return a data set with only the first of every so many images."""
    return Subset(dataset, lambda count: torch.arange(0, count, step))


def measure(o: argparse.Namespace) -> None:
    """Play all methods and write what they got wrong after each of them."""
    networks = {o.model: custom_network(o.model)} if ":" in o.model else None
    bench = Workbench(o.data, o.device, {o.model: o.weights} if o.weights else None, networks=networks)
    chosen = {} if o.corruptions == "all" else {"corruptions": o.corruptions.split(",")}
    corrupted = bench.dataset(ComponentSpec(o.dataset, chosen))
    clean = bench.dataset(ComponentSpec(optional(corrupted, "clean_name")))
    net = bench.network(o.model, corrupted, {})
    precision = precision_on(bench.device, o.precision)
    name = o.name or o.model.rpartition(":")[0].rpartition("/")[2].removesuffix(".py") or o.model
    path = o.out / f"networks_{o.dataset}_{name}_{precision}_{o.every}.json"
    shared = {key: getattr(o, key) for key in ("dataset", "scenario", "batch", "every")}
    shared |= {"network": name, "precision": precision, "machine": machine(bench.device), **described(net)}
    rows: list[dict[str, Any]] = []
    clock = Clock()
    for method in o.methods.split(","):
        found: dict[str, float] = {}
        built = bench.method(method, net, corrupted, o.model, {})
        for data in (clean, corrupted):
            own, method_used = in_precision(restrict(net, data), built, precision)
            stream = Stream(every(data, o.every), scenarios.create(o.scenario), range(o.seeds), o.batch)
            with float32_precision(precision):
                records = run(own, method_used, stream, spec={}, progress=Progress(method))
            wrong = torch.stack([metrics.domain_error(record) for record in records]).mean(0)
            found |= {
                d.partition("@")[0]: round(100 * e, 2) for d, e in zip(stream.domains, wrong.tolist(), strict=True)
            }
        rows.append({"method": method, "images": len(every(clean, o.every).labels(clean.domains[0])), "error": found})
        clock.say(method, found)
        write(path, shared, rows)


def described(net: Any) -> dict[str, Any]:
    """What adapts in a network."""
    kinds = [type(slot.layer).__name__ for slot in net.slots]
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return {"layers": layers, "statistics": net.has_statistics}


def errors(folder: Path) -> str:
    """A table for each network."""
    files: dict[str, list[dict[str, Any]]] = {}
    for row in read("networks_*.json", folder):
        files.setdefault(row["file"], []).append(row)
    return "\n".join(_table(rows) for rows in files.values())


def _table(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    words = f"**{first['network']}** ({first['layers']}), {first['images']} images a domain, batch {first['batch']}, "
    words += f"scenario `{first['scenario']}`, {first['precision']}, {first['machine']['device']}; errors in %:"
    clean, *corruptions = first["error"]
    shown = [clean, *corruptions] if len(corruptions) <= MANY else [clean]
    header = ["", *(domain.replace("_", " ") for domain in shown), f"mean of {len(corruptions)} corruptions"]
    header += ["lower than TEST in"] if len(corruptions) > MANY else []
    lines = []
    for row in rows:
        others = [row["error"][domain] for domain in corruptions]
        cells = [*(row["error"][domain] for domain in shown), sum(others) / len(others)]
        lower = sum(row["error"][domain] < first["error"][domain] for domain in corruptions)
        count = [str(lower) if row is not first else ""] if len(corruptions) > MANY else []
        lines.append([NAMES.get(row["method"], row["method"]), *(f"{cell:.1f}" for cell in cells), *count])
    return f"{words}\n\n{table(header, lines)}"


BLOCKS = {"networks": errors}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m studies.networks.run", description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="resnet50", help="a name, or file.py:attribute")
    p.add_argument("--name", help="of the network in the table")
    p.add_argument("--weights", type=Path)
    p.add_argument("--dataset", default="live-imagenet-c")
    p.add_argument("--data", type=Path)
    p.add_argument("--corruptions", default=CORRUPTIONS, help="comma-separated, or all")
    p.add_argument("--every", type=int, default=1, help="play the first of every so many images")
    p.add_argument("--methods", default="source,bn,tent,rotta,tribe")
    p.add_argument("--scenario", default="ptta")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="tf32", choices=PRECISIONS)
    p.add_argument("--out", type=Path, default=FOLDER / "results")
    play_or_render(p, argv, FOLDER, BLOCKS, measure)


if __name__ == "__main__":
    main()
