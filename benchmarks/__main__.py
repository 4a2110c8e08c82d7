"""The command: ``python -m benchmarks`` compares methods, ``--growth`` watches a long run."""

import argparse
import json
from dataclasses import asdict

import torch

import tribe
from benchmarks import growth, networks, step
from tribe.atomic import write_atomically
from tribe.environment import float32_precision, machine

BATCH = {  # images on a CPU and on a GPU, where --batch does not say
    "resnet20": (64, 64),
    "wrn28_10": (8, 64),
    "resnet50": (8, 64),
}
ELSE = (16, 64)
METHODS = "default: source, tent, tribe and, for one stream, released: TRIBE as one would first write it"


def main(argv: list[str] | None = None) -> None:
    options = parser().parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser().error("torch sees no CUDA device here")
    if options.precision == "tf32" and options.device != "cuda":
        parser().error("tf32 is a format of NVIDIA GPUs: --device cuda")
    if step.RELEASED in (options.method or []) and (options.streams > 1 or options.growth):
        parser().error(f"{step.RELEASED} is a yardstick for one stream, not for --growth")
    if options.growth and (options.growth < growth.WINDOWS or options.precision == "bf16"):
        parser().error(f"--growth takes at least {growth.WINDOWS} steps, in float32 or tf32")
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = machine(torch.device(options.device))
    print(
        f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, tribe {tribe.__version__}\n",
        flush=True,
    )
    with float32_precision(options.precision):
        results = [watch(options)] if options.growth else [compare(options, name) for name in networks_of(options)]
    if options.json:
        write_atomically(options.json, json.dumps({"machine": facts, "results": results}, indent=2).encode())


def compare(options: argparse.Namespace, network: str) -> dict[str, object]:
    gpu = options.device == "cuda"
    setting = step.Setting(
        network,
        options.classes,
        options.batch or BATCH.get(network, ELSE)[gpu],
        options.streams,
        options.device,
        options.precision,
        options.repeats,
        options.graphs,
        options.kernels,
    )
    default = ["source", "tent", "tribe", *([step.RELEASED] if options.streams == 1 else [])]
    rows = step.compare(setting, options.method or default)
    print(step.show(setting, rows), end="\n\n", flush=True)
    ratios = step.class_ratios(setting, rows)
    return {"setting": asdict(setting), "rows": [asdict(row) for row in rows], "class_ratios": ratios}


def watch(options: argparse.Namespace) -> dict[str, object]:
    setting = {
        "network": (options.network or ["resnet8"])[0],
        "method": (options.method or ["tribe"])[0],
        "classes": options.classes[0],
        "batch": options.batch or 8,
        "streams": options.streams,
        "steps": options.growth,
        "device": options.device,
    }
    print(", ".join(f"{name} {value}" for name, value in setting.items()), end="\n\n", flush=True)
    windows = growth.watch(**setting)
    print(growth.show(windows))
    return {"setting": setting, "windows": [asdict(window) for window in windows]}


def networks_of(options: argparse.Namespace) -> list[str]:
    return options.network or ["resnet20", "wrn28_10" if options.device == "cuda" else "wrn16_4"]


def parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(positive(part) for part in text.split(","))

    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"expected at least 1; got {value}")
        return value

    def network(text: str) -> str:
        try:
            networks.check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    found = "cuda" if torch.cuda.is_available() else "cpu"
    p = argparse.ArgumentParser("python -m benchmarks", description="What adapting costs, against plain inference.")
    p.add_argument("--device", choices=("cpu", "cuda"), default=found, help="default here: %(default)s")
    p.add_argument("--network", type=network, action="append", help="resnet20, wrn16_4, wrn28_10, resnet50; repeatable")
    p.add_argument("--method", choices=[*tribe.methods.names(), step.RELEASED], action="append", help=METHODS)
    p.add_argument("--batch", type=positive, help="images a stream and step; default: by network and device")
    p.add_argument("--streams", type=positive, default=1)
    p.add_argument("--classes", type=numbers, default=(10,), help="such as 10, or 10,1000 to compare")
    p.add_argument("--repeats", type=positive, default=15, help="rounds, of which the median counts")
    p.add_argument("--threads", type=positive, help="of torch on the CPU")
    p.add_argument("--precision", choices=("float32", "tf32", "bf16"), default="float32", help="float32 is IEEE's")
    p.add_argument("--graphs", action="store_true", help="capture steps in CUDA graphs, where they can be")
    p.add_argument("--kernels", action="store_true", help="use the Triton kernels, on CUDA")
    p.add_argument("--growth", type=positive, nargs="?", const=2000, metavar="STEPS", help="watch a long run instead")
    p.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    return p


if __name__ == "__main__":
    main()
