"""``tribe reproduce``: any table or figure of the paper, our numbers next to the paper's; finished runs are reused."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from reproduction import gather, tables
from reproduction.beyond import LATER, MARK, extend
from reproduction.chart import draw_chart
from reproduction.compare import Comparison, compare_plan, judge_claims, stream_name
from reproduction.document import DATA, FOLDER, make_document
from reproduction.gather import REMEDY, Origin
from reproduction.plan import BATCH, COMPONENTS, Choices, Costs, Plan, make_plan, refuse_unknown_fields
from reproduction.render import FORMATS
from reproduction.terminal import list_tables, print_problems, show_claims, show_comparison, show_runs
from tribe.cli.custom import method_name
from tribe.cli.options import custom_network, parse_seeds
from tribe.cli.output import errors_as_messages, stdout_to_stderr
from tribe.cli.overrides import parse_overrides
from tribe.cli.progress import experiment_bars, message_on_interrupt
from tribe.cli.terminal import OutputTarget
from tribe.core.precision import check_precision
from tribe.data.datasets.locations import data_root
from tribe.data.datasets.manifest import FILE as MANIFEST
from tribe.experiments import plots
from tribe.experiments.experiment import Experiment
from tribe.experiments.store import Damaged, find, finished, keep, survey
from tribe.experiments.workbench import Workbench
from tribe.fields import printable
from tribe.io.files import check_file, check_folder, write_atomically
from tribe.methods import names as method_names
from tribe.methods import parse
from tribe.registry import nearest

CLAIMS = "claims"  # every sentence of the paper about its tables, judged on finished runs
DOCUMENT = "document"  # all finished runs, as a page
RELEASED = "released"  # the table of the released code
ANY = "; with --no-run any"  # that all results share
LATER_NAMES = {name for row in LATER for name in (row.key, row.method)}


def _option(help: str, default: str | bool = True, *names: str) -> Any:
    return typer.Option(*names, help=help, show_default=default)


Artifact = Annotated[
    str,
    typer.Argument(
        help="A name of `--list`, or a label such as tab:component_ablation. `released`: next to the released code. "
        "`claims`: the claims of the paper, judged on finished runs. `document`: a page of all finished runs."
    ),
]
Methods = _option("Rows to keep, comma-separated; +NAME or +file.py:Class adds a method; +tribe+time too.", "all")
Rows = _option("Only rows that match these patterns: '100 *' or 'CIFAR10-C*'.", "all")
Columns = _option("Only columns that match these patterns: 'F 100 *,V 100 *'.", "all")
PaperOnly = _option(f"Only the paper's rows, without those beyond it, which are marked {MARK}.", True, "--paper-only")
Later = _option("Also the rows of methods later than the paper; --methods DeYO finds them without.", True, "--later")
Seeds = _option("How many streams, side by side on one network, or their seeds: 425,1,2,3,4.", f"1{ANY}")
Dataset = _option("Data set in place of the paper's; live-mnist-c needs no download.")
Model = _option("Network in place of the paper's, or file.py:attribute; compact comes with the package.")
Weights = _option("Weights of the network of --model.", "where `tribe train` writes them")
Batch = _option("Images a stream and step.", f"64{ANY}")
Data = _option("Root of the data sets.", "$TRIBE_DATA or the cache directory")
Set = _option("Any field: dataset.corruptions=fog, scenario.draw=paper, tribe.h0=0.1.", True, "--set")
Device = _option("auto, cpu, cuda or cuda:1.", f"auto: a GPU where there is one{ANY}")
Precision = _option("tf32 (on a CPU float32), float32 for IEEE's, or bf16: a network of bfloat16.", f"tf32{ANY}")
Threads = _option(
    "CPU threads of a run; its results depend on it. With 1, start one process per core.", f"as torch decides{ANY}"
)
Ray = _option("Run side by side on Ray: on an existing cluster, else on all cores; with --threads 1.", True, "--ray")
RayAddress = _option("Run on this Ray cluster.", "$RAY_ADDRESS")
Workers = _option("Start a Ray cluster with this many cores of this machine.")
NoRun = _option("Only compare the results in --runs, from any machine; needs no weights.", True, "--no-run")
DryRun = _option("List the runs, whether they are done, and how long the others take.", True, "--dry-run")
Keep = _option("Copy the JSON of all finished runs to this folder, without records; run nothing.", True, "--keep")


def reproduce_artifact(
    artifact: Artifact = "",
    show_list: Annotated[bool, typer.Option("--list", help="List what can be reproduced.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder of results; finished runs are not run again.")] = Path("runs"),
    methods: Annotated[str | None, Methods] = None,
    rows: Annotated[str | None, Rows] = None,
    columns: Annotated[str | None, Columns] = None,
    paper_only: Annotated[bool, PaperOnly] = False,
    later: Annotated[bool, Later] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the first stream.", show_default=f"0{ANY}")] = None,
    seeds: Annotated[str | None, Seeds] = None,
    dataset: Annotated[str | None, Dataset] = None,
    model: Annotated[str | None, Model] = None,
    weights: Annotated[Path | None, Weights] = None,
    batch: Annotated[int | None, Batch] = None,
    data: Annotated[Path | None, Data] = None,
    settings: Annotated[list[str] | None, Set] = None,
    device: Annotated[str, Device] = "auto",
    precision: Annotated[str | None, Precision] = None,
    threads: Annotated[int | None, Threads] = None,
    ray: Annotated[bool, Ray] = False,
    ray_address: Annotated[str | None, RayAddress] = None,
    workers: Annotated[int | None, Workers] = None,
    no_run: Annotated[bool, NoRun] = False,
    dry_run: Annotated[bool, DryRun] = False,
    style: Annotated[str, typer.Option("--format", help="table, markdown, latex, csv or json.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write the output to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a chart to this file: .svg, .png or .pdf.")] = None,
    kept: Annotated[Path | None, Keep] = None,
) -> None:
    """Reproduce a table or a figure of the paper: run what is missing, then compare.

    Results in --runs are never computed again. Several processes with the same arguments share the work.
    """
    with errors_as_messages(), message_on_interrupt(runs):
        reading = no_run or artifact in (CLAIMS, DOCUMENT)  # nothing is run, no device is opened
        streams, images = parse_seeds(seed, seeds), BATCH if batch is None else batch
        origin = Origin(streams, precision, _device_type(device) if reading else None, threads, batch)
        choices = Choices(dataset, model, seeds=streams or (0,), precision=precision or "tf32", batch=images)
        output = OutputTarget(style, out)
        _check(output, choices.precision, plot)
        if show_list:
            list_tables(output)
            return
        if artifact in (CLAIMS, DOCUMENT):
            flags = {"paper_only": paper_only, "later": later}
            _refuse(artifact, methods=methods, rows=rows, columns=columns, plot=plot, **flags)
        if reading or kept is not None:
            _require_folder(runs)
        if kept is not None:
            check_folder(kept)
            _keep(runs, kept, data_root(None if data is None else str(data)))
            return
        if artifact == DOCUMENT:
            _document(runs, origin, output)
            return
        workbench = _workbench(data, "cpu" if reading else device, threads, model, weights, reading)
        if artifact == CLAIMS:
            choices = dataclasses.replace(choices, overrides=_parse(settings, COMPONENTS))
            _claims(choices, runs, workbench, origin, output)
            return
        table = _find_table(artifact)
        if not paper_only:
            table = extend(table, later or not LATER_NAMES.isdisjoint((methods or "").split(",")))
        with stdout_to_stderr():
            choices = _with_rows(choices, table, methods, rows, columns, settings)
        refuse_unknown_fields([table], choices)
        plan = _plan(table, choices, workbench, (runs, origin) if no_run else None)
        if dry_run:
            _dry_run(plan, runs, output)
            return
        if not no_run:
            plan = _run(plan, runs, ray_address or ("auto" if ray or workers is not None else None), workers)
        comparison = compare_plan(plan, gather.results_of(plan, runs))
        others = _comparer(choices.for_any_table, runs, workbench, origin if no_run else None)
        show_comparison(comparison, judge_claims(others, runs, [comparison], table.name), output)
        if plot is not None:
            plots.save(draw_chart(comparison), plot)
        _exit_with(plan.problems)


def _workbench(
    data: Path | None, device: str, threads: int | None, model: str | None, weights: Path | None, reading: bool
) -> Workbench:
    """Where experiments are computed; a custom network is built here, unless results are only read."""
    if weights is not None and model is None:
        raise ValueError("--weights are those of a network: --model names it")
    custom = model is not None and ":" in model and not reading
    with stdout_to_stderr():
        networks = {model: custom_network(model, weights)} if model is not None and custom else {}
    files = {model: weights} if model is not None and weights is not None else {}
    return Workbench(data, device, files, threads, networks)


# -- options ----------------------------------------------------------------------------------------------------------


def _find_table(artifact: str) -> tables.Table:
    if not artifact:
        raise ValueError(f"name what to reproduce: {', '.join(tables.names())}; `tribe reproduce --list` has titles")
    return tables.released().table if artifact == RELEASED else tables.get(artifact)


def _check(output: OutputTarget, precision: str, plot: Path | None) -> None:
    """Raise ValueError before the work for options that would fail after it."""
    if output.style not in ("table", *FORMATS):
        raise ValueError(f"--format {output.style!r} is unknown: {nearest(output.style, ['table', *FORMATS])}")
    check_precision(precision)
    if output.path is not None:
        check_file(output.path)
    if plot is not None:
        plots.check_path(plot)


def _with_rows(
    choices: Choices,
    table: tables.Table,
    methods: str | None,
    rows: str | None,
    columns: str | None,
    settings: list[str] | None,
) -> Choices:
    """The choices with rows, columns and overrides."""
    words = _split(methods)
    spelling = {name.lower(): name for name in method_names()}  # the paper writes CoTTA
    added = []
    for word in (word[1:] for word in words if word.startswith("+")):
        method = parse(word).unfiltered
        added.append(method_name(spelling.get(method.lower(), method) + word.removeprefix(method)))
    known = {str(m) for row in table.rows if (m := row.get("method") or table.common.get("method"))}
    known |= {parse(name).unfiltered for name in known}
    return dataclasses.replace(
        choices,
        only=[word for word in words if not word.startswith("+")],
        added=added,
        rows=_split(rows),
        columns=_split(columns),
        overrides=_parse(settings, (*COMPONENTS, *sorted(known), *added)),
    )


def _parse(settings: list[str] | None, owners: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {owner: fields for owner, fields in parse_overrides(settings, owners).items() if fields}


def _split(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _device_type(device: str) -> str | None:
    """The device type that results must have; None: any. This machine need not have such a device."""
    if device == "auto":
        return None
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: expected auto, cpu or cuda") from error


def _plan(table: tables.Table, choices: Choices, workbench: Workbench, found: tuple[Path, Origin] | None) -> Plan:
    """A plan of what to run, or of what is ``found`` in a folder of results."""
    if found is None:
        return make_plan(table, choices, workbench)
    return gather.plan_from_results(table, choices, found[0], workbench, found[1])


def _refuse(artifact: str, **options: object) -> None:
    """Raise ValueError for options that would have no effect."""
    for name, value in options.items():
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{artifact} covers all tables: {option} is for one table, as in `tribe reproduce cifar10`"
            )


def _require_folder(runs: Path) -> None:
    if not runs.is_dir():
        raise ValueError(f"there is no folder {runs}: --runs names the folder of results")


def _comparer(
    choices: Choices, runs: Path, workbench: Workbench, origin: Origin | None
) -> Callable[[tables.Table], Comparison]:
    """Compare other tables that claims need; with an origin from results alone, else as they would be run here."""
    device, threads = workbench.device.type, workbench.threads
    here = Origin(choices.seeds, choices.precision, device, threads, choices.batch)

    def compare(table: tables.Table) -> Comparison:
        # A network of another library would be downloaded: too much for a claim.
        downloads = any("/" in str(part.get("model", "")) for part in (table.common, *table.rows))
        if origin is not None or (downloads and choices.model is None):
            plan = gather.plan_from_results(table, choices, runs, workbench, origin or here)
        else:
            plan = make_plan(table, choices, workbench)
        return compare_plan(plan, gather.results_of(plan, runs))

    return compare


# -- runs -------------------------------------------------------------------------------------------------------------


def _run(plan: Plan, runs: Path, ray: str | None, workers: int | None) -> Plan:
    """Run with a progress bar for all experiments and one for each that is running."""
    if any(find(experiment, runs) is None for experiment in plan.experiments):  # else nothing is written
        check_folder(runs)
    runs.mkdir(parents=True, exist_ok=True)
    count = len(plan.experiments)
    if not count:
        return plan

    def name_of(experiment: Experiment) -> str:
        return f"{experiment.method.name}, {experiment.dataset.name} {stream_name(experiment)}"

    with experiment_bars(plan.table.name, count, name_of) as (progress, done):
        return gather.run(plan, runs, ray=ray, workers=workers, progress=progress, done=done)


def _dry_run(plan: Plan, runs: Path, output: OutputTarget) -> None:
    costs = Costs.of(finished(runs, damaged="skip"))
    rows: list[dict[str, Any]] = []
    beyond = {planned.experiment for (row, _), planned in plan.cells.items() if row in plan.table.beyond}
    for experiment in plan.experiments:
        images = experiment.length(plan.workbench)
        seconds, measured = costs.estimate(experiment, images)
        rows.append(
            {
                "id": experiment.id,
                "method": experiment.method.name,
                "model": experiment.model.name,
                "stream": f"{experiment.dataset.name} {stream_name(experiment)}",
                "images": images,
                "done": find(experiment, runs, verified=True, current=True) is not None,
                "minutes": seconds / 60,
                "measured": measured,
                "beyond_paper": experiment in beyond,
            }
        )
    show_runs(plan, rows, output)


def _keep(runs: Path, target: Path, root: Path) -> None:
    """Copy results without records, and the files that say how corrupted images were made."""
    kept = keep(runs, target, damaged="skip")
    for made in sorted(root.glob(f"*/{MANIFEST}")):
        place = target / DATA / made.parent.name
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / made.name, made.read_bytes())
    size = sum(path.stat().st_size for path in target.rglob("*.json*"))
    typer.echo(f"{printable(str(target))}: {len(kept)} results, {size / 1e3:,.0f} kB of JSON")
    damaged = [found for folder in (runs, target) for found in survey(folder) if isinstance(found, Damaged)]
    _exit_with({f"{found.error}. {REMEDY}": [found.folder.name] for found in damaged})


# -- output -----------------------------------------------------------------------------------------------------------


def _document(runs: Path, origin: Origin, output: OutputTarget) -> None:
    if output.style not in ("table", "markdown"):  # table is the default
        raise ValueError(f"the document comes as markdown; got --format {output.style}")
    folder = FOLDER if output.path is None else output.path.stem
    document = make_document(runs, origin, folder)
    if output.path is not None and document.files:
        place = output.path.with_name(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name, text in document.files.items():
            write_atomically(place / name, text.encode())
    output.write(document.page)
    _report_damage(runs)


def _claims(choices: Choices, runs: Path, workbench: Workbench, origin: Origin, output: OutputTarget) -> None:
    refuse_unknown_fields(tables.all_tables(), choices)
    judgements = judge_claims(_comparer(choices, runs, workbench, origin), runs)
    show_claims(judgements, output)
    _report_damage(runs)


def _report_damage(runs: Path) -> None:
    """Print the results that cannot be used, and exit with status 1 if there are some."""
    _exit_with({why: [name] for name, why in gather.damaged(runs).items()})


def _exit_with(problems: Mapping[str, Sequence[str]]) -> None:
    if problems:
        print_problems(problems)
        raise typer.Exit(1)
