"""Get the results of a plan: run the experiments that are missing, or find results that were computed elsewhere.

`plan_from_results` needs no data, no weights and no device: a result belongs to a cell if its spec matches. Device,
weights and the like may have any value, or those of an `Origin`, but all cells of a table must share them. Results that
differ in their seeds only belong together: a cell has the mean of them all, and another cell may have other seeds.

Next to the results, their folder may hold measurements: ``bench/*.json`` (`measured_alone`) and ``draws/*.json``
(`read_draws`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reproduction.plan import Choices, Costs, Plan, plan_with
from reproduction.tables import Cell, Table
from tribe import methods
from tribe.core.precision import precision_on
from tribe.experiments import bench as benchmark
from tribe.experiments import statistics
from tribe.experiments.experiment import Experiment, MixedResults, difference
from tribe.experiments.jobs import error_message
from tribe.experiments.ray import ExperimentProgress, Failure, run_all
from tribe.experiments.spec import decode_fields, describe
from tribe.experiments.store import Damaged, Result, find, finished, missing_seeds, survey, verify
from tribe.experiments.workbench import Workbench, build_scenario, trained_on
from tribe.io import json_files
from tribe.io.json_files import Where

FROM_DATASET = ("domains", "classes")  # fields of a scenario that the data set decides
FROM_FILE = ("code",)  # of a custom network, whose file need not be here; its weights are in every result
FROM_NETWORK = ("knowledge", "classes")  # fields of a method that depend on the network
FROM_IMAGES = "room"  # a field of a method that depends on the size of the images, unless it is overridden
NOTHING = "no result fits"
REMEDY = "Where it can be run, `tribe reproduce` without --no-run computes it again; else move its folder away"
SELECTING = (
    "--seed, --seeds, --precision, --device, --threads and --batch"  # options that select one of several results
)


# -- run --------------------------------------------------------------------------------------------------------------


def run(
    plan: Plan,
    root: str | PathLike[str],
    *,
    ray: str | None = None,
    workers: int | None = None,
    progress: ExperimentProgress | None = None,
    done: Callable[[Experiment, Result | Failure], None] | None = None,
) -> Plan:
    """Run the missing experiments, the longest first. The returned plan notes those that failed.

    Args:
        plan: the plan of a table.
        root: the folder of results.
        ray: None runs them in this process; see `tribe.experiments.ray.run_all` for this and the others.
        workers: cores of a cluster that is started on this machine.
        progress: called as experiments advance.
        done: called after each experiment, with its result or its failure.
    """
    retries = 0 if ray is None else 2  # another worker may have what one lacks; this process does not change
    order = {_with_missing_seeds(e, root): e for e in longest_first(plan, root)}
    outcomes = run_all(
        [*order],
        root,
        ray=ray,
        workers=workers,
        workbench=plan.workbench,
        retries=retries,
        progress=progress,
        done=done,
    )
    failures = [failed for failed in outcomes if isinstance(failed, Failure)]
    return plan.without({order[failed.experiment].id: failed.reason for failed in failures})


def _with_missing_seeds(experiment: Experiment, root: str | PathLike[str]) -> Experiment:
    """The experiment with the seeds that have to be played; as it is if there are none."""
    return experiment.with_seeds(missing_seeds(experiment, root) or experiment.seeds)


def longest_first(plan: Plan, root: str | PathLike[str]) -> list[Experiment]:
    """Sort the experiments of a plan by expected time, so that no worker starts a long one when the others end."""
    costs = Costs.of(finished(root, damaged="skip"))
    return sorted(plan.experiments, key=lambda e: -costs.estimate(e, e.length(plan.workbench))[0])


# -- find -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """How results were computed; None matches any value."""

    seeds: Sequence[int] | None = None  # some of these; the others of a result are left out
    precision: str | None = None  # as the device of the result understands it
    device: str | None = None
    threads: int | None = None  # of results from a CPU
    batch: int | None = None

    def mismatches(self, experiment: Experiment) -> list[str]:
        """The fields in which an experiment differs, as messages."""
        on_cpu = experiment.device == "cpu"
        precision = self.precision and precision_on(torch.device(experiment.device), self.precision)
        fields: list[tuple[str, Any, Any]] = [
            ("its precision", experiment.precision, precision),
            ("its device", experiment.device, self.device),
            ("the number of its threads", experiment.threads, self.threads if on_cpu else None),
            ("its batch", experiment.batch, self.batch),
        ]
        found = [f"{name} is {actual}, not {wanted}" for name, actual, wanted in fields if wanted not in (None, actual)]
        if self.seeds is not None and not self.seeds_of(experiment):
            found.insert(0, f"its seeds are {_list(experiment.seeds)}, not {_list(self.seeds)}")
        return found

    def seeds_of(self, experiment: Experiment) -> list[int]:
        """The seeds of an experiment that are wanted, in the order in which they are wanted."""
        return [s for s in self.seeds if s in experiment.seeds] if self.seeds is not None else [*experiment.seeds]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def plan_from_results(
    table: Table, choices: Choices, root: str | PathLike[str], workbench: Workbench, origin: Origin | None = None
) -> Plan:
    """Plan a table with the results in ``root``; each cell has all seeds that are there, or those of the origin.

    Two results for one cell that differ in more than their seeds raise MixedResults, naming the difference.

    A cell whose result is damaged holds the reason. If a damaged result does not say which experiment it is of, the
    reason stands in all empty cells.
    """
    results = list(survey(root))
    readable = {found.experiment: found for found in results if found.experiment is not None}
    why = {e: damage(found) for e, found in readable.items()}
    plan = plan_from_experiments(table, choices, families(e for e in readable if why[e] is None), workbench, origin)
    if broken := families(e for e in readable if why[e] is not None):
        reasons = {e.family: str(reason) for e, reason in why.items() if reason is not None}
        plan = _with_damage(plan, plan_from_experiments(table, choices, broken, workbench, origin), reasons)
    unknown = [
        error_message(found.error) for found in results if isinstance(found, Damaged) and found.experiment is None
    ]
    if not unknown:
        return plan
    problem = f"{NOTHING}, unless it is one of these: {'; '.join(unknown)}. {REMEDY}"
    cells = {
        place: dataclasses.replace(p, problem=problem) if p.problem == NOTHING else p for place, p in plan.cells.items()
    }
    return dataclasses.replace(plan, cells=cells)


def _with_damage(plan: Plan, broken: Plan, reasons: Mapping[str, str]) -> Plan:
    """The plan, with the reason in every cell whose only results are damaged; reasons by `Experiment.family`."""
    cells = dict(plan.cells)
    for place, planned in plan.cells.items():
        damaged = broken.cells[place].experiment
        if planned.experiment is None and damaged is not None:
            cells[place] = dataclasses.replace(planned, problem=reasons[damaged.family])
    return dataclasses.replace(plan, cells=cells)


def families(experiments: Iterable[Experiment]) -> list[Experiment]:
    """One experiment for all that differ in their seeds only, with all these seeds."""
    found: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        found.setdefault(experiment.family, []).append(experiment)
    return [
        alike[0] if len(alike) == 1 else alike[0].with_seeds(sorted({seed for e in alike for seed in e.seeds}))
        for alike in found.values()
    ]


def plan_from_experiments(
    table: Table,
    choices: Choices,
    experiments: Sequence[Experiment],
    workbench: Workbench,
    origin: Origin | None = None,
) -> Plan:
    """Plan a table with finished experiments."""
    described = [(experiment, _describe(experiment)) for experiment in experiments]

    def find(cell: Cell) -> Experiment:
        wanted, names = origin or Origin(), (cell.method, choices.dataset_of(cell).name, choices.model_of(cell).name)
        alike = [(e, d) for e, d in described if (e.method.name, e.dataset.name, e.model.name) == names]
        expected = _expected(cell, choices, workbench) if alike else None  # it takes a while
        matching = [experiment for experiment, found in alike if expected is not None and _fits(found, expected)]
        fitting = [experiment for experiment in matching if not wanted.mismatches(experiment)]
        if len(fitting) > 1:
            raise MixedResults(
                f"{fitting[0].id} and {fitting[1].id} both fit a cell of {cell.method}: "
                f"{'; '.join(difference(*fitting[:2]))}. A table holds one of "
                f"them: select it with {SELECTING}, or keep the others in another folder"
            )
        if not fitting:
            raise ValueError(": ".join([NOTHING, *("; ".join(wanted.mismatches(e)) for e in matching[:1])]))
        return fitting[0].with_seeds(wanted.seeds_of(fitting[0]))

    return plan_with(table, choices, workbench, find)


def _expected(cell: Cell, choices: Choices, workbench: Workbench) -> dict[str, Any]:
    """The description of a cell's experiment, with every default filled in; `FROM_IMAGES` only if it is overridden."""
    dataset, scenario, model = choices.dataset_of(cell), choices.scenario_of(cell), choices.model_of(cell)
    data, name = workbench.dataset(dataset), cell.method or ""
    clean = trained_on(data, dataset.name)
    published: Mapping[str, Any] = methods.get(name).presets.get(clean, {})
    tribes = methods.get("tribe").presets.get(clean, {})  # has all data sets of the paper: no file must be opened
    classes = tribes["classes"] if tribes else len(data.classes)
    overrides = choices.method_fields_of(cell, lambda: classes)
    fields = {**published, "classes": classes, **overrides}
    protocol = describe(scenario.name, build_scenario(scenario.name, decode_fields(scenario.fields)))
    method = describe(name, methods.create(name, **fields))
    return {
        "dataset": describe(dataset.name, data).json(),
        "model": _without(model.json(), FROM_FILE),
        "scenario": (protocol.name, _without(protocol.fields, FROM_DATASET), protocol.code),
        "method": (name, _without(method.fields, (*FROM_NETWORK, FROM_IMAGES)), method.code),
        **({FROM_IMAGES: method.fields[FROM_IMAGES]} if FROM_IMAGES in overrides else {}),
    }


def _describe(experiment: Experiment) -> dict[str, Any]:
    """The same description of a finished experiment."""
    spec, scenario, method = experiment.json(), experiment.scenario, experiment.method
    return {
        "dataset": spec["dataset"],
        "model": _without(spec["model"], FROM_FILE),
        "scenario": (scenario.name, _without(spec["scenario"]["fields"], FROM_DATASET), scenario.code),
        "method": (method.name, _without(spec["method"]["fields"], (*FROM_NETWORK, FROM_IMAGES)), method.code),
        FROM_IMAGES: spec["method"]["fields"].get(FROM_IMAGES),
    }


def _fits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether a finished experiment is what is expected; what is not mentioned may have any value."""
    return all(found[part] == value for part, value in expected.items())


def _without(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# -- damage -----------------------------------------------------------------------------------------------------------


def results_of(plan: Plan, root: str | PathLike[str]) -> dict[str, Result]:
    """The finished results of a plan's experiments, by id."""
    return {e.id: found for e in plan.experiments if (found := find(e, root, verified=True)) is not None}


def damage(found: Result | Damaged) -> str | None:
    """Why a finished result cannot be used, naming the file; None if it can."""
    try:
        if isinstance(found, Damaged):
            raise found.error
        verify(found)
    except (OSError, ValueError) as error:
        return f"{error_message(error)}. {REMEDY}"
    return None


def damaged(root: str | PathLike[str]) -> dict[str, str]:
    """All finished results in ``root`` that cannot be used: the name of each, and the reason."""
    return {found.folder.name: why for found in survey(root) if (why := damage(found)) is not None}


# -- measurements next to the results ---------------------------------------------------------------------------------


class Alone(NamedTuple):
    """Milliseconds per image with nothing else running; experiments may share a device, so their seconds differ."""

    ms: dict[str, float]  # by method, with its default settings
    how: str  # how they were measured; empty: they were not


def measured_alone(root: str | PathLike[str], experiment: Experiment, model: str) -> Alone:
    """The times that ``tribe bench --json`` measured for a network, with the settings of an experiment."""
    e, found, words = experiment, dict[str, float](), list[str]()
    for path in sorted((Path(root) / "bench").glob("*.json")):
        result = benchmark.read(path)
        setting = result.setting
        settings = setting.model, setting.precision, setting.device.partition(":")[0], setting.batch, setting.streams
        if settings == (model, e.precision, e.device, e.batch, 1):
            found |= {row.name: row.ms_per_image for row in result.rows}
            words.append(
                f"`tribe bench` with nothing else running, {result.machine.get('device', 'unknown')}, {e.precision}"
            )
    return Alone(found, " and ".join(dict.fromkeys(words)))


KINDS = {"inst": "instance", "cat": "category"}  # of errors
LIVE = "live-"  # data that are corrupted as they are read: every draw has other noise
SURE = 2.0  # standard errors within which a difference may be chance


@dataclass(frozen=True)
class Draws:
    """One method many times, and the same in plain PyTorch, as ``python -m benchmarks.textbook --json`` measured.

    It is chance when a method collapses. One stream does not show whether two implementations agree, many do.
    """

    dataset: str
    images: str  # fingerprint of the images on disk
    model: str
    weights: str  # fingerprint of the network
    method: str  # with its default settings
    imbalance: float
    seed: int
    batch: int
    precision: str
    device: str
    ours: Mapping[str, Sequence[float]]  # errors in percent by kind, one per draw
    textbook: Mapping[str, Sequence[float]]  # in plain PyTorch, on the same images

    @property
    def what(self) -> str:
        """What differs between the draws."""
        noise = self.dataset.startswith(LIVE)
        return "other noise in the images" if noise else "the same images, other last digits of the parameters"

    @property
    def times(self) -> int:
        """The number of draws."""
        return len(self.ours["inst"])

    def are_of(self, experiment: Experiment) -> bool:
        """Whether an experiment has the same settings, but for what is drawn."""
        e = experiment
        drawn = self.method, self.model, self.weights, self.precision, self.device, self.batch, (self.seed,)
        played = e.method.name, e.model.name, e.weights, e.precision, e.device, e.batch, e.seeds
        alike = drawn == played and self.imbalance == e.scenario.fields.get("imbalance")
        other_noise = self.dataset == f"{LIVE}{e.dataset.name}"
        return alike and (other_noise or (self.dataset, self.images) == (e.dataset.name, e.images))

    def mean(self, kind: str) -> float:
        """Our mean error."""
        return statistics.spread(self.ours[kind]).mean

    def difference(self, kind: str) -> tuple[float, float | None]:
        """The mean of ours minus plain PyTorch's, and its standard error; None for a single draw."""
        pairs = zip(self.ours[kind], self.textbook[kind], strict=True)
        gap = statistics.spread([ours - textbook for ours, textbook in pairs])
        return gap.mean, None if gap.deviation is None else gap.deviation / math.sqrt(self.times)

    @property
    def agree(self) -> bool | None:
        """Whether chance explains the differences from plain PyTorch; None: too few draws."""
        gaps = [self.difference(kind) for kind in KINDS]
        close = [abs(mean) <= SURE * error for mean, error in gaps if error is not None]
        return all(close) if close else None


ERRORS = dict.fromkeys(KINDS, Where([float], bool, "a number for every draw, at least one"))
DRAWS = {
    **dict.fromkeys(("dataset", "images", "model", "weights", "method", "precision", "device"), str),
    **dict.fromkeys(("seed", "batch"), int),
    "imbalance": float,
    "ours": ERRORS,
    "textbook": ERRORS,
}


def read_draws(root: str | PathLike[str]) -> list[Draws]:
    """All draws next to the results in ``root``."""
    return [_read_draws(path) for path in sorted((Path(root) / "draws").glob("*.json"))]


def _read_draws(path: Path) -> Draws:
    remedy = f"`python -m benchmarks.textbook --json {path}` measures again; without the file, the page omits it"
    data = json_files.read(path, DRAWS, remedy)
    if len({len(data[name][kind]) for name in ("ours", "textbook") for kind in KINDS}) > 1:
        raise ValueError(
            f"{path} is damaged: it does not have as many draws of ours as of the textbook, of each kind. {remedy}"
        )
    return Draws(**{field.name: data[field.name] for field in dataclasses.fields(Draws)})
