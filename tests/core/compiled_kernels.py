"""Compile the kernels ahead of time, without a GPU, and print what each takes, as a table in CSV.

    python tests/core/compiled_kernels.py > tests/core/compiled_kernels.csv

Launches are recorded: functions of `tribe.core.kernels` are called with tensors on torch's meta device, behind a
stand-in for Triton's driver. So every signature, tile and number of warps is the one that a GPU would get.
"""

import csv
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

if __name__ == "__main__":  # not where pytest looks for examples: Triton loads slowly, and a GPU is pretended
    torch.cuda.device_count = lambda: 1

    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tribe.core.kernels import activations, colour, filtering, random_numbers, statistics
    from tribe.core.rng import Key
    from tribe.norms.balanced import Groups

TARGETS = {f"sm_{arch}": ("cuda", arch, 32) for arch in (80, 89, 90, 120)} | {"gfx942": ("hip", "gfx942", 64)}
COLUMNS = "kernel", "target", "registers", "stack", "loads", "vector_loads"


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def images(channels, size, dtype=torch.bfloat16, last=True, batch=8):
    """Activations (R, B, C, H, W) of a student and a teacher."""
    x = meta(2 * batch, channels, size, size, dtype=dtype)
    return (x.contiguous(memory_format=torch.channels_last) if last else x).unflatten(0, (2, batch))


def layer(x, share=True):
    """A layer's passes over its activations, with all that can stand next to it."""
    scale = meta(2, 1 if share else x.shape[1], x.shape[2])
    offset, active, moments = meta(x.shape[2]), x.to(torch.int8), tuple(meta(*x.shape[:3]) for _ in range(3))
    activations.observe(x)
    activations.apply(x, scale, scale, True, offset)
    activations.apply(x, scale, scale, True, None, x, active)
    activations.apply_backward(x, x, scale, scale, True, offset)
    activations.apply_backward(x, x, scale, scale, True, None, active)
    activations.joint_backward(x, x, scale, scale, moments, True, offset)
    activations.joint_backward(x, x, scale, scale, None, False)


def class_statistics(classes, channels, batch, among_present):
    mean, by_sample, own = meta(2, batch, channels), meta(2, batch, 1), meta(2, 1, 1)
    code = meta(2, batch, dtype=torch.int64)
    present = meta(2, classes, dtype=torch.bool)
    groups = Groups(code, code, meta(2, batch, batch), by_sample, by_sample, by_sample, own, own, present)
    past, settings = meta(2, classes, channels), (classes, 0.1, classes - 1, among_present)
    *_, terms = statistics.update(mean, mean, (past, past), meta(3, 2, channels), groups, *settings)
    statistics.update_backward(meta(2, 1, channels), meta(2, 1, channels), terms, groups, *settings)


def parameters(channels, batch):
    mean, weight, valid = meta(2, batch, channels), meta(2, channels), meta(2, batch, dtype=torch.bool)
    statistics.fold(mean, mean, weight, weight, 1e-5)
    statistics.fold_backward(mean, mean, mean, mean, weight, 1e-5)
    centre, spread, count = statistics.pool(mean, mean, valid)
    statistics.pool_backward(centre, spread, mean, valid, centre, count)


def time_filter(classes):
    likelihood, counted = meta(2, 16, 5, classes), meta(2, 16, dtype=torch.bool)
    state = [meta(2, 5, classes)] * 2 + [meta(2, 5)] * 5 + [meta(2, dtype=torch.int64)]
    filtering.scan(likelihood, counted, state, [0.01] * 14)
    filtering.smooth(meta(2, 16, classes), meta(2, 16), meta(2, 16, classes), counted)


def random(shape):
    key = Key(meta(2, dtype=torch.int64), meta(2, dtype=torch.int64))
    for normal in (False, True):
        random_numbers._draw(key, 7, shape, normal)


def jitter(channels, size):
    colour.jitter(meta(2, 8, channels, size, size), meta(2, 5, dtype=torch.int64), meta(2, 5))


LAUNCHES = {
    "bfloat16, 64 channels": lambda: layer(images(64, 56)),
    "bfloat16, 24 channels": lambda: layer(images(24, 56)),
    "float32, 160 channels": lambda: layer(images(160, 32, torch.float32), share=False),
    "float32, 14 x 14 pixels first": lambda: layer(images(256, 14, torch.float32, last=False)),
    "over 1000 classes": lambda: activations.observe(meta(2, 1000, 1024).transpose(1, 2).unsqueeze(1)),
    "64 images": lambda: parameters(512, 64),
    "10 classes": lambda: class_statistics(10, 160, 64, True),
    "1000 classes": lambda: class_statistics(1000, 64, 128, False),
    "filter of 10 classes": lambda: time_filter(10),
    "filter of 1000 classes": lambda: time_filter(1000),
    "filter of 21841 classes": lambda: time_filter(21841),
    "random numbers": lambda: random((64, 3, 32, 32)),
    "64 x 64 pixels": lambda: jitter(3, 64),
    "224 x 224 pixels": lambda: jitter(3, 224),
    "28 x 28 pixels, grey": lambda: jitter(1, 28),
}


class Driver:
    """Stands in for Triton's driver: each target is a device."""

    def __init__(self, number):
        self.get_current_device = lambda: number
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: GPUTarget(*list(TARGETS.values())[number])


def recorded(target):
    """Return the launches for a target: a name, what Triton compiles, and its options."""
    found, case = {}, ""

    def record(fn, compile, **_):
        kernel, constants = fn.jit_function, compile["constants"]
        named = ((kernel.arg_names[at].lower(), value) for (at,), value in constants.items())
        name = " ".join([kernel.__name__.strip("_"), *(arg for arg, value in named if value is True or value == "sum")])
        source = ASTSource(kernel, compile["signature"], constants, compile["configs"][0])
        found.setdefault(f"{name}: {case}", (source, {"num_warps": compile["num_warps"]}))
        return True  # nothing is compiled or launched

    triton.runtime.driver.set_active(Driver(list(TARGETS).index(target)))
    torch.version.hip = "6" if target.startswith("gfx") else None
    knobs.runtime.jit_cache_hook = record
    for case, launch in LAUNCHES.items():  # noqa: B007
        launch()
    return found


def resources(binary):
    """Return the registers and the bytes of stack of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout).groups()
    return int(registers), int(stack)


def compiled(target):
    """Compile all launches for a target, and return the rows of the table: of a CUDA target only."""
    for name, (source, options) in recorded(target).items():
        kernel = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
        if target.startswith("sm_"):
            loads = re.findall(r"ld\.global(\.\w+)*?(\.v\d)?\.b\d+", kernel.asm["ptx"])
            yield name, target, *resources(kernel.asm["cubin"]), len(loads), sum(bool(v) for _, v in loads)
        else:
            assert kernel.asm["hsaco"]


if __name__ == "__main__":
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(COLUMNS)
    for each in TARGETS:
        table.writerows(compiled(each))
