"""What a step costs: every method against plain inference of the same network, in one process, in turn."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import tribe
from benchmarks import networks
from benchmarks.measure import Call, Precision, megabytes, peak_memory, race, summary, table
from benchmarks.released import Released
from tribe import kernels

PLAIN, CHANNELS_LAST = "plain", "channels-last"
RELEASED = "released"  # TRIBE in the structure of the released code: one stream, one launch at a time


@dataclass(frozen=True)
class Setting:
    """One network under one load."""

    network: str
    classes: tuple[int, ...]
    batch: int
    streams: int
    device: str
    precision: Precision
    repeats: int
    graphs: bool = False  # steps captured in CUDA graphs, where they can be
    kernels: bool = False  # Triton kernels, on CUDA


@dataclass(frozen=True)
class Row:
    """What one contender took."""

    network: str
    classes: int
    name: str
    ms_per_image: float  # median
    spread: float  # between the quartiles, relative to the median
    times_plain: float  # eager inference as the user has it
    times_channels_last: float  # the same in the layout that suits convolutions
    peak_bytes: int | None  # above rest, during a call
    state_bytes: int  # what adapts, at rest


def compare(setting: Setting, methods: Sequence[str]) -> list[Row]:
    """Race the methods and plain inference, for every number of classes, all in turn."""
    with kernels.using("auto" if setting.kernels else "off"):
        return _compare(setting, methods)


def _compare(setting: Setting, methods: Sequence[str]) -> list[Row]:
    device, size = torch.device(setting.device), networks.image_size(setting.network)
    first = networks.build(setting.network, setting.classes[0], device)
    x = torch.rand(setting.streams, setting.batch, 3, size, size, device=device)
    calls: dict[tuple[int, str], Call] = {}
    states: dict[tuple[int, str], int] = {}
    for classes in setting.classes:
        net = copy.deepcopy(first)
        if classes != setting.classes[0]:
            net.fc = nn.Linear(net.fc.in_features, classes, device=device)  # the same backbone: only the head differs
        images = x.flatten(0, 1)
        calls[classes, PLAIN] = _inference(net, images, setting)
        calls[classes, CHANNELS_LAST] = _inference(
            copy.deepcopy(net).to(memory_format=torch.channels_last),
            images.to(memory_format=torch.channels_last),
            setting,
        )
        for method in methods:
            if method == RELEASED:
                yardstick = Released(net, tribe.methods.create("tribe", classes=classes))
                calls[classes, method] = _autocast(yardstick, images, setting)
                states[classes, method] = yardstick.nbytes()
                continue
            adapter = tribe.adapt(net, method, streams=setting.streams, graphs="auto" if setting.graphs else False)
            calls[classes, method] = _autocast(adapter, x if setting.streams > 1 else x[0], setting)
            states[classes, method] = sum(t.nbytes for t in adapter.adapted.buffers())
    times = {key: summary(t) for key, t in race(calls, setting.repeats, device).items()}
    per_image = 1e3 / (setting.streams * setting.batch)
    return [
        Row(
            setting.network,
            classes,
            name,
            ms_per_image=median * per_image,
            spread=spread,
            times_plain=median / times[classes, PLAIN][0],
            times_channels_last=median / times[classes, CHANNELS_LAST][0],
            peak_bytes=peak_memory(calls[classes, name], device),
            state_bytes=states.get((classes, name), 0),
        )
        for (classes, name), (median, spread) in times.items()
    ]


def _inference(net: nn.Module, x: torch.Tensor, setting: Setting) -> Call:
    return torch.no_grad()(_autocast(net, x, setting))


def _autocast(net: Callable[[torch.Tensor], object], x: torch.Tensor, setting: Setting) -> Call:
    def call() -> object:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.precision == "bf16"):
            return net(x)

    return call


def show(setting: Setting, rows: Sequence[Row]) -> str:
    """The rows as text, and how the cost grows with the number of classes where several were measured."""
    size = networks.image_size(setting.network)
    parts = []
    for classes in setting.classes:
        load = f"{setting.streams} stream{'s' * (setting.streams > 1)} x {setting.batch} images"
        title = f"{setting.network}, {classes} classes, {load} of 3x{size}x{size}, {setting.precision}"
        header = ("", "ms/image", "spread", "x plain", "x channels-last", "peak MB", "state MB")
        cells = [
            (
                row.name,
                f"{row.ms_per_image:.3f}",
                f"{row.spread:.0%}",
                f"{row.times_plain:.2f}",
                f"{row.times_channels_last:.2f}",
                megabytes(row.peak_bytes),
                megabytes(row.state_bytes),
            )
            for row in rows
            if row.classes == classes
        ]
        parts.append(f"{title}\n\n{table(header, cells)}")
    for name, ratio in class_ratios(setting, rows).items():
        parts.append(f"{name}: a step at {setting.classes[-1]} classes takes {ratio:.3f} x one at {setting.classes[0]}")
    return "\n\n".join(parts)


def class_ratios(setting: Setting, rows: Sequence[Row]) -> dict[str, float]:
    """How much longer each contender takes with the last number of classes than with the first."""
    if len(setting.classes) < 2:
        return {}
    took = {(row.classes, row.name): row.ms_per_image for row in rows}
    first, last = setting.classes[0], setting.classes[-1]
    return {row.name: took[last, row.name] / took[first, row.name] for row in rows if row.classes == first}
