"""An experiment is plain data, and its id is a hash of it.

experiment = Experiment.of("live-mnist-c", "compact", "gli-f", "tribe", seeds=(0, 1))
(result,) = run_all([experiment], "runs")      # tribe.experiments.parallel: from the store, or computed
result.error()                                 # mean instance error over its seeds
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tribe.core.precision import check_precision, precision_on
from tribe.data import models
from tribe.experiments.provenance import code_at, code_of
from tribe.experiments.realtime import Realtime
from tribe.experiments.spec import ComponentSpec, canonical, describe, differences
from tribe.experiments.workbench import Parts, Workbench
from tribe.fields import is_whole
from tribe.io import json_files

COMPONENTS = ("dataset", "model", "scenario", "method")
STREAM = ("dataset", "images", "scenario")  # the parts of a spec that decide which images come in which order
COMPONENT = {"name": str, "fields?": dict, "code?": (str, None)}
SCHEMA = {
    **dict.fromkeys(COMPONENTS, COMPONENT),
    **dict.fromkeys(("images", "weights", "precision", "device"), str),
    "batch": int,
    "threads": (int, None),
}
CLOCK = {"realtime?": {"speed": float, "cost": float}}


@dataclass(frozen=True, eq=False)
class Experiment:
    """All that a result depends on, as plain data, and the seeds of the streams that are played.

    A stream does not depend on the streams beside it, so the seeds are not part of the id: each id has one result,
    with one stream for each seed. Make an experiment with `of`, which fills in every default.
    """

    dataset: ComponentSpec
    images: str  # fingerprint of the images that the data set has on disk
    model: ComponentSpec
    weights: str  # Backbone.fingerprint of the network, before it is rounded to a lower precision
    scenario: ComponentSpec
    method: ComponentSpec
    batch: int  # images a stream and step
    precision: str  # of tribe.core.precision.PRECISIONS
    device: str  # "cpu" or "cuda"
    threads: int | None  # of the CPU; None on a GPU, where no sum depends on it
    realtime: Realtime | None = None  # the stream does not wait; None: it does, and the spec has no such field
    seeds: tuple[int, ...] = (0,)  # one stream each, side by side; each stream is what it would be alone
    parts: Parts | None = field(default=None, repr=False)  # the components, where this process has built them

    @staticmethod
    def of(
        dataset: str | ComponentSpec,
        model: str | ComponentSpec,
        scenario: str | ComponentSpec,
        method: str | ComponentSpec,
        *,
        seeds: Sequence[int] = (0,),
        batch: int = 64,
        precision: str = "float32",
        realtime: Realtime | None = None,
        workbench: Workbench | None = None,
    ) -> "Experiment":
        """Build the components on the workbench, and return the experiment that plays them."""
        workbench = workbench or Workbench()
        data, network, protocol, adapting = (
            ComponentSpec(given) if isinstance(given, str) else given for given in (dataset, model, scenario, method)
        )
        parts = workbench.build(data, network, protocol, adapting, seeds, batch)
        place, colon, _ = network.name.rpartition(":")
        code = code_at(place) if colon else code_of(type(models.architecture(network.name)))
        return Experiment(
            dataset=describe(data.name, parts.stream.dataset),
            images=parts.images,
            model=dataclasses.replace(network, code=code),
            weights=parts.weights,
            scenario=describe(protocol.name, parts.stream.scenario),
            method=describe(adapting.name, parts.method),
            batch=batch,
            precision=precision_on(workbench.device, precision),
            device=workbench.device.type,
            threads=workbench.threads if workbench.device.type == "cpu" else None,
            realtime=realtime,
            seeds=tuple(seeds),
            parts=parts,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not self.seeds or not all(is_whole(seed) for seed in self.seeds) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are different integers, at least one, such as 425, 1, 2; got {list(self.seeds)}")
        check_precision(self.precision)

    def json(self) -> dict[str, Any]:
        """Return all that the id is a hash of, as plain data."""
        fields = {name: getattr(self, name) for name in SCHEMA}
        fields |= {name: fields[name].json() for name in COMPONENTS}
        fields |= {} if self.realtime is None else {"realtime": self.realtime.json()}
        spec: dict[str, Any] = json.loads(json.dumps(fields, sort_keys=True, allow_nan=False))
        return spec

    @staticmethod
    def from_json(data: Mapping[str, Any], seeds: Sequence[int] = (0,)) -> "Experiment":
        """Return the experiment that `json` described, with these seeds; a damaged spec raises ValueError."""
        json_files.check(data, SCHEMA | CLOCK, "the spec of the experiment")
        if unknown := sorted(data.keys() - SCHEMA.keys() - {"realtime"}):
            raise ValueError(f"the spec of the experiment has an unknown field {unknown[0]!r}: remove it")
        try:
            components: dict[str, Any] = {name: ComponentSpec(**data[name]) for name in COMPONENTS}
            components |= {"realtime": Realtime(**data["realtime"])} if "realtime" in data else {}
        except TypeError as error:
            raise ValueError(f"the spec of the experiment is damaged: {error}") from error
        return Experiment(**{**data, **components}, seeds=tuple(seeds))

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits of the hash of its canonical JSON."""
        return hashlib.sha256(canonical(self.json()).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return (self.id, self.seeds) == (other.id, other.seeds) if isinstance(other, Experiment) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.id, self.seeds))


def difference(one: Experiment, other: Experiment) -> list[str]:
    """Return the fields in which two experiments differ, with both values."""
    return [f"{place} is {a!r} and {b!r}" for place, a, b in differences(one.json(), other.json())]
