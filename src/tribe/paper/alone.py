"""What methods take with nothing else running: what ``tribe bench --json`` measured, in ``bench/`` beside results.

The seconds of experiments say little of that, since several may have shared a device.
"""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from tribe import bench
from tribe.lab.experiment import Experiment

FOLDER = "bench"


class Alone(NamedTuple):
    """Milliseconds an image."""

    ms: dict[str, float]  # by method, with its default settings
    how: str  # they were measured; empty: they were not


def measured_alone(root: str | PathLike[str], experiment: Experiment, model: str) -> Alone:
    """All that was measured of a network in the way of an experiment."""
    e, found, words = experiment, dict[str, float](), list[str]()
    for path in sorted((Path(root) / FOLDER).glob("*.json")):
        told = bench.read(path)
        here = told.setting.model, told.setting.precision, told.setting.device.partition(":")[0], told.setting.batch
        if here == (model, e.precision, e.device, e.batch) and told.setting.streams == 1:
            found |= {row.name: row.ms_per_image for row in told.rows}
            words.append(f"`tribe bench`, nothing else running, {told.machine.get('device', 'unknown')}, {e.precision}")
    return Alone(found, " and ".join(dict.fromkeys(words)))
