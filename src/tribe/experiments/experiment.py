"""An experiment is plain data, and its id is a hash of it.

experiment = Experiment.of("live-mnist-c", "compact", "gli-f", "tribe", seeds=(0, 1))
result = run_experiment(experiment, "runs")    # tribe.experiments.execution: found in the store, or computed
result.error()                                 # mean instance error over its seeds
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tribe.core.precision import check_precision, precision_on
from tribe.experiments.spec import ComponentSpec, canonical, describe, differences, with_whole_numbers
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Components, Workbench, model_code
from tribe.fields import is_whole
from tribe.io import json_files
from tribe.methods.encoding import drop_added, fill_added
from tribe.registry import nearest

COMPONENTS = ("dataset", "model", "scenario", "method")
STREAM = ("dataset", "images", "scenario")  # the parts of a spec that decide which images come in which order
COMPONENT = {"name": str, "fields?": dict, "code?": (str, None)}
SCHEMA = {
    **dict.fromkeys(COMPONENTS, COMPONENT),
    **dict.fromkeys(("images", "weights", "precision", "device"), str),
    "seeds": [int],
    "batch": int,
    "threads": (int, None),
}


class MixedResults(ValueError):
    """Results that do not belong into one table, and the field in which they differ."""


@dataclass(frozen=True, eq=False)
class Experiment:
    """All that a result depends on, as plain data. Make one with `of`, which fills in every default.

    ``threads`` is None on a GPU: there no sum depends on it.
    """

    dataset: ComponentSpec
    images: str  # fingerprint of the images that the data set has on disk
    model: ComponentSpec
    weights: str  # Backbone.fingerprint of the network, before it is rounded to a lower precision
    scenario: ComponentSpec
    method: ComponentSpec
    seeds: tuple[int, ...]  # one stream each, side by side; each stream is what it would be alone
    batch: int
    precision: str  # of tribe.core.precision.PRECISIONS
    device: str  # "cpu" or "cuda"
    threads: int | None

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
        workbench: Workbench | None = None,
    ) -> "Experiment":
        """The experiment of these components with the workbench's data, weights, device and threads."""
        workbench = workbench or Workbench()
        components = workbench.prepare(*(ComponentSpec.of(given) for given in (dataset, model, scenario, method)))
        settled = precision_on(workbench.device, precision)
        return Experiment.of_components(components, seeds, batch, settled, workbench.device.type, workbench.threads)

    @staticmethod
    def of_components(
        components: Components, seeds: Sequence[int], batch: int, precision: str, device: str, threads: int | None
    ) -> "Experiment":
        """The experiment that plays components which are built already."""
        model = components.model
        return Experiment(
            dataset=describe(components.dataset_name, components.dataset),
            images=components.images,
            model=dataclasses.replace(model, code=model_code(model.name)),
            weights=components.weights,
            scenario=describe(components.scenario_name, components.scenario),
            method=describe(components.method_name, components.method),
            seeds=tuple(seeds),
            batch=batch,
            precision=precision,
            device=device,
            threads=threads if device == "cpu" else None,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not self.seeds or not all(is_whole(seed) for seed in self.seeds) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are different integers, at least one, such as 425, 1, 2; got {list(self.seeds)}")
        check_precision(self.precision)

    def json(self) -> dict[str, Any]:
        """The experiment as plain data."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields |= {name: fields[name].json() for name in COMPONENTS}
        spec: dict[str, Any] = json.loads(canonical(fields))
        return spec

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Experiment":
        """The experiment that `json` described; an unknown field is refused.

        A field of the method that is newer than the description has the value that says what the method did then.
        """
        fields = Experiment.__dataclass_fields__.keys()
        for name in data:
            if name not in fields:
                raise ValueError(f"an experiment has no field {name!r}: {nearest(name, fields)}")
        json_files.check(data, SCHEMA, "the spec of the experiment")
        try:
            components = {name: ComponentSpec(**data[name]) for name in COMPONENTS}
            if (method := components["method"]).code is None:  # see `id`
                components["method"] = dataclasses.replace(method, fields=fill_added(method.name, method.fields))
            return Experiment(**{**data, **components})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no experiment ({error}); expected what Experiment.json gives") from error

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits of the hash of its canonical JSON, without fields of the method that changed nothing.

        Such a field was added later, with the value that says what the method did before: old results keep their ids.
        Not so in a custom method: its id must be the same where its class is unknown.
        """
        return self._hash(self.json())

    @cached_property
    def family(self) -> str:
        """The same hash without the seeds: results of one family differ in their seeds only, and add up.

        An id tells 100 from 100.0, as results that are on disk do. A family does not.
        """
        return self._hash(with_whole_numbers({name: value for name, value in self.json().items() if name != "seeds"}))

    def _hash(self, spec: dict[str, Any]) -> str:
        if self.method.code is None:
            spec["method"]["fields"] = drop_added(self.method.name, spec["method"]["fields"])
        return hashlib.sha256(canonical(spec).encode()).hexdigest()[:16]

    def with_seeds(self, seeds: Sequence[int]) -> "Experiment":
        """The same experiment with other seeds."""
        return self if tuple(seeds) == self.seeds else dataclasses.replace(self, seeds=tuple(seeds))

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Experiment) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def stream(self, workbench: Workbench) -> Stream:
        """Its streams."""
        return workbench.stream(self.dataset, self.scenario, self.seeds, self.batch, self.images)

    def length(self, workbench: Workbench) -> int:
        """How many images all its streams play."""
        return sum(len(schedule.index) for schedule in self.stream(workbench).schedules)


def difference(one: Experiment, other: Experiment) -> list[str]:
    """The fields in which two experiments differ, with both values."""
    return [f"{place} is {a!r} and {b!r}" for place, a, b in differences(one.json(), other.json())]


def refuse_mixture(experiments: Mapping[str, Experiment], varying: Collection[str] = ("method",)) -> None:
    """Refuse results that differ in more than the table varies.

    Args:
        experiments: by the name of their row or column.
        varying: fields that may differ, such as "method" or "scenario.fields.imbalance", with all below them.
    """
    rows = list(experiments.items())
    for name, experiment in rows[1:]:
        for text in difference(rows[0][1], experiment):
            place = text.partition(" ")[0]
            if not any(place == free or place.startswith(f"{free}.") for free in varying):
                raise MixedResults(f"{rows[0][0]} and {name} do not belong into one table: {text}")
