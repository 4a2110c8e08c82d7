"""Sections of the document: how ours agrees with the paper."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reproduction import tables
from reproduction.compare import APART, Comparison, Entry, Judged
from reproduction.render import VERDICTS, ours, table_head, table_row
from tribe.experiments import statistics

FAR = 5.0  # points: methods that are further from the paper on average are listed
MAIN = ("cifar10", "cifar100", "mnist")  # tables of all methods
MOST_ELSEWHERE = 3  # sentences about other data or networks than the paper's
LACKING = "lack results"  # why a claim is open
UNADAPTED = ("cifar10-ptta", "cifar100-fixed")  # tables that show the source network
NOISE = ("shot", "gaussian", "impulse")  # columns
AIM = {"F 100 inst": 18.0}  # this project's limits for TRIBE's error, where they are below the paper's number
SOURCE, TRIBE = "TEST", "TRIBE"  # rows
LIMIT = (
    "The limit is the paper's number, or this project's aim where it is lower ("
    + ", ".join(f"{column.removesuffix(' inst')}: {limit:.1f}" for column, limit in AIM.items())
    + ")."
)
SAME_STREAM = {f"V 1 {kind}": f"F 1 {kind}" for kind in ("inst", "cat")}  # columns that repeat another


# -- TRIBE in every cell ----------------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """TRIBE's instance error in one cell of a table, next to its limit and to the other methods."""

    cell: str  # such as F 100
    entry: Entry | None  # of TRIBE
    limit: float
    spread: float  # of TRIBE's error
    others: dict[str, Entry]  # of the other methods

    @property
    def ours(self) -> float | None:
        """TRIBE's error, the mean over its seeds."""
        return self.entry.ours if self.entry is not None and isinstance(self.entry.ours, float) else None

    @property
    def errors(self) -> dict[str, float]:
        """The errors of the other methods."""
        return {row: e.ours for row, e in self.others.items() if isinstance(e.ours, float)}

    @property
    def best(self) -> str | None:
        """The best of the other methods."""
        return min(self.errors, key=lambda row: self.errors[row], default=None)

    @property
    def within(self) -> bool:
        """Whether the error is at most the limit and one spread."""
        return self.ours is not None and self.ours <= self.limit + self.spread

    @property
    def lowest(self) -> bool:
        """Whether the error is lower than those of all other methods: on the seeds that both have."""
        return self.entry is not None and all(_gap(self.entry, other).difference < 0 for other in self.others.values())


def _gap(one: Entry, other: Entry) -> statistics.Paired:
    """The difference of two errors over the seeds that both have; without such seeds, of their means."""
    seeds = [seed for seed in one.by_seed if seed in other.by_seed]
    pairs = [(one.by_seed[s], other.by_seed[s]) for s in seeds] or [(_value(one), _value(other))]
    return statistics.paired([a for a, _ in pairs], [b for _, b in pairs])


def _value(entry: Entry) -> float:
    assert isinstance(entry.ours, float)
    return entry.ours


def standings(comparison: Comparison) -> Iterator[Standing]:
    """TRIBE's standing in every cell of a table."""
    table = tables.get(comparison.name)
    for column in table.column_keys:
        if column.endswith(" inst") and column not in SAME_STREAM:
            paper = table.value(TRIBE, column)
            assert isinstance(paper, float)
            rows = [row for row in comparison.rows if row not in comparison.beyond]
            entries = {row: comparison.entries.get((row, column)) for row in rows}
            known = {row: e for row, e in entries.items() if e is not None and isinstance(e.ours, float)}
            ours, limit = known.pop(TRIBE, None), min(paper, AIM.get(column, paper))
            spread = 0.0 if ours is None else comparison.spread_of(ours)
            yield Standing(column.removesuffix(" inst"), ours, limit, spread, known)


def in_every_cell(comparison: Comparison) -> list[str]:
    """The section that shows TRIBE's instance error, its limit and the next method in each cell of a table."""
    table, failures, not_run = tables.get(comparison.name), list[str](), dict[str, list[str]]()
    lines = [f"### {TRIBE}'s instance error in every cell of `{table.label}`", ""]
    head = ["cell", "ours", "limit", "within", "best other method", "its error", "TRIBE is", "difference"]
    lines += table_head(head, "lrrllrll")
    for standing in standings(comparison):
        cell, entry, limit, spread, others = standing
        if entry is None or standing.ours is None:
            failures.append(f"{cell} was not run")
            lines.append(table_row([cell, "–", f"{limit:.2f}", "not run", "", "", "", ""]))
            continue
        best, within = standing.best, "yes" if standing.within else "**no**"
        lowest = "lowest" if standing.lowest else "**not lowest**"
        rival = ["–", "–", "the only method", ""]
        if best is not None:
            rival = [best, _with_spread(others[best]), lowest, str(_gap(entry, others[best]))]
        lines.append(table_row([cell, _with_spread(entry), f"{limit:.2f}", within, *rival]))
        above = f"{cell}: {standing.ours:.2f} is above the limit {limit:.2f}"
        above += f" by more than the spread {spread:.2f}" if spread else ""
        failures += [] if standing.within else [above]
        beaten = f"{cell}: {best} has {standing.errors[best or '']:.2f}, {TRIBE} {standing.ours:.2f}" if best else ""
        failures += [] if standing.lowest else [beaten]
        if lacking := ", ".join(row for row in table.row_keys if row not in others and row != TRIBE):
            not_run.setdefault(lacking, []).append(cell)
    failures += [f"{', '.join(cells)}: not run with {rows}" for rows, cells in not_run.items()]
    lines += ["", f"{LIMIT} An error is within it up to one spread. V 1 is the same stream as F 1.", ""]
    if not failures:
        return [*lines, "TRIBE is within its limit and lowest in every cell.", ""]
    return [*lines, "Failures, and cells that were not run:", "", *(f"- {f}" for f in failures), ""]


def _with_spread(entry: Entry) -> str:
    """An error, with its standard deviation and the number of seeds if there are several."""
    return ours(entry) + (f" ({len(entry.by_seed)})" if len(entry.by_seed) > 1 else "")


# -- in a few sentences -----------------------------------------------------------------------------------------------


def in_short(comparisons: Sequence[Comparison], judgements: Sequence[Judged], table: str) -> list[str]:
    """The findings that a reader should know first.

    Args:
        comparisons: all tables of a series.
        judgements: of all claims on these.
        table: the one in which TRIBE should be best everywhere.
    """
    lines = []
    for comparison in comparisons:
        if comparison.name == table and (run := [one for one in standings(comparison) if one.ours is not None]):
            above = ", ".join(one.cell for one in run if not one.within)
            but = f" (not in {above})" if above else ""
            margin = ", up to one spread," if any(one.spread for one in run) else ""
            lines.append(
                f"- {TRIBE}'s instance error is within its limit{margin} in {sum(one.within for one in run)} of "
                f"{len(run)} cells of `{comparison.label}`{but}, and the lowest of all methods that were run in "
                f"{sum(one.lowest for one in run)}. {LIMIT}"
            )
    verdicts = [j.ours.holds for j in judgements]
    failing = sum(j.paper.holds is False for j in judgements)
    open_claims = Counter(_why_open(j) for j in judgements if j.ours.holds is None)
    reasons = ", ".join(f"{count} {why}" for why, count in open_claims.items())
    reasons = f" ({reasons})" if reasons else ""
    lines.append(
        f"- The paper makes {len(verdicts)} claims about its tables. On our numbers, {verdicts.count(True)} hold, "
        f"{verdicts.count(False)} fail and {verdicts.count(None)} cannot be judged{reasons}; on the paper's own "
        f"numbers, {failing} fail."
    )
    cells = _whole_streams(comparisons)
    near = sum(abs(entry.difference or 0.0) <= APART for _, entry in cells.values())
    errors = "error of a whole stream" if len(cells) == 1 else "errors of whole streams"
    are = "is" if near == 1 else "are"
    lines.append(f"- Of {len(cells)} {errors}, {near} {are} within {APART} points of the paper's number.")
    return lines


def _why_open(judged: Judged) -> str:
    why = judged.ours.why
    if why.startswith("within the spread"):
        return "are within the spread of the seeds"
    if "is our reading" in why:
        return "depend on rows that the paper leaves open"
    return "repeat the paper's own numbers" if "repeats numbers" in why else LACKING


def _whole_streams(comparisons: Sequence[Comparison]) -> dict[tuple[str, float], tuple[str, Entry]]:
    """All errors of whole streams that the paper has, too, with their rows; once each, as tables round differently."""
    return {
        (entry.experiment, _value(entry)): (row, entry)
        for comparison in comparisons
        for (row, column), entry in comparison.entries.items()
        if entry.difference is not None and entry.experiment and entry.unit == "%" and column not in by_domain()
    }


def by_domain() -> set[str]:
    """The columns of single corruptions."""
    return {c["key"] for name in tables.names() for c in tables.get(name).columns if "domain" in c}


KNOWN = {  # why rows are far from the paper's
    "TTAC": "the released code has 76.69 at F 100, with batch statistics; the paper's 43.40 may be of frozen ones",
    "BN": "the released code agrees with ours on these weights: the network differs",
    "NOTE": "the released code agrees with ours on these weights",
}


def disagreement(comparisons: Sequence[Comparison], judgements: Sequence[Judged]) -> list[str]:
    """What does not agree with the paper: methods whose errors are far, and claims that fail."""
    gaps: dict[str, list[float]] = {}
    for comparison in comparisons:
        if comparison.name in MAIN:
            for row, entry in _whole_streams([comparison]).values():
                gaps.setdefault(f"{comparison.name.upper()}-C {row}", []).append(entry.difference or 0.0)
    means = {row: sum(values) / len(values) for row, values in gaps.items()}
    lines = []
    if far := {row: mean for row, mean in means.items() if abs(mean) > FAR}:
        words = ", ".join(f"{row} {mean:+.1f}" for row, mean in far.items())
        lines.append(f"- Methods whose errors are more than {FAR:g} points from the paper's on average: {words}.")
        names = {row.partition(" ")[2] for row in far}
        lines += [f"- {row}: {why}." for row, why in KNOWN.items() if row in names]
    failing = [j for j in judgements if j.ours.holds is False]
    here = [j for j in failing if j.paper.holds is not False]
    if failing:
        too = (
            f"; {len(failing) - len(here)} of them fail on the paper's own numbers, too"
            if len(here) < len(failing)
            else ""
        )
        rest = ". These fail on ours alone:" if here else "."
        lines.append(f"- {len(failing)} claims of the paper fail on ours{too}{rest}")
        lines += [f"  - “{j.claim.says}”: {_first(j.ours.why)}." for j in here]
    return lines or ["- Nothing that was run."]


def _first(why: str) -> str:
    """The first counterexample, and how many there are."""
    first, *more = why.split("; ")
    return first + (" and more" if more else "")


def certainty(comparisons: Sequence[Comparison], seeds: str) -> list[str]:
    """How sure the numbers are: how many seeds they have, and what counts as a difference."""
    cells = _whole_streams(comparisons).values()
    several = [entry for _, entry in cells if len(entry.by_seed) > 1]
    usual = max((c.usual for c in comparisons), default=0.0)
    if not several:
        return [
            f"- All errors are of one seed ({seeds}). The spread between seeds was not measured, and a difference of a "
            "few points may be luck: no interval is given, and claims are judged without a margin."
        ]
    most = max(len(entry.by_seed) for entry in several)
    return [
        f"- {len(several)} of {len(cells)} errors of whole streams have several seeds, up to {most} ({seeds}); they "
        "are shown as mean ± standard deviation. A seed is another stream: other classes, order and augmentations.",
        f"- The standard deviation between seeds is {usual:.2f} points (root mean square over errors with several "
        "seeds); an error of one seed is taken to have it, too.",
        "- A difference from the paper's single number is called one only if it exceeds the spread; the tables show = "
        "where it does not. The paper gives one seed, whose own spread is unknown.",
        "- “A is better than B” is judged over the seeds that both have, by a paired t test, two-sided.",
    ]


# -- all tables -------------------------------------------------------------------------------------------------------


def judged_claims(judgements: Sequence[Judged]) -> list[str]:
    """The section of the claims that could be judged on ours, are too close, or fail on the paper's own numbers."""
    lines = ["### What the paper claims", ""]
    shown = [j for j in judgements if j.ours.holds is not None or j.paper.holds is False or _why_open(j) != LACKING]
    for verdict in (True, False, None):
        for claim, paper, own in (j for j in shown if j.ours.holds is verdict):
            on_its_own = VERDICTS[paper.holds] + (f": {paper.why}" if paper.holds is False else "")
            lines.append(f"- **{VERDICTS[verdict]}**: “{claim.says}”. Ours: {own.why}. The paper's: {on_its_own}.")
    if rest := len(judgements) - len(shown):
        lines += ["", f"{rest} more claims cannot be judged on ours; they do not fail on the paper's own numbers."]
    return [*lines, ""]


def best_methods(comparison: Comparison) -> list[str]:
    """For a table on other data than the paper's: in how many columns each method is the best, ours and theirs."""
    winners = [_winners(errors) for _, errors in comparison.rivals()]
    if not winners:
        return []
    counts = (Counter(names).most_common() for names in zip(*winners, strict=True))
    own, theirs = (", ".join(f"{row} in {n}" for row, n in count) for count in counts)
    return [f"The lowest method of {len(winners)} columns: {own}. In the paper: {theirs}.", ""]


def lowest_elsewhere(comparisons: Iterable[Comparison]) -> list[str]:
    """For tables on other data or networks than the paper's: which method is the lowest on whole streams."""
    lines = []
    for comparison in comparisons:
        for column, errors in _streams(comparison):
            own, theirs = _winners(errors)
            also = f"; {TRIBE} has {errors[TRIBE][0]:.2f}" if TRIBE in errors and own != TRIBE else ""
            paper = ", as in the paper" if own == theirs else f"; in the paper it is {theirs}"
            lines.append(
                f"- {comparison.title}, {column}: {own} is the lowest of {len(errors)} methods ({errors[own][0]:.2f}"
                f"{also}){paper}."
            )
    return lines[:MOST_ELSEWHERE]


def other_order(comparison: Comparison) -> list[str]:
    """Where the order of methods differs from the paper's."""
    return [f"- {line}" if not line.startswith("  - ") else line for line in (*_best(comparison), *_sides(comparison))]


def weaker_on_noise(comparison: Comparison) -> list[str]:
    """How much worse the source network is than the paper's on noise, and on the other corruptions."""
    columns = [c for c in comparison.columns if c in by_domain()]
    row = next((row for row in comparison.rows if row == SOURCE or row.endswith(f" {SOURCE}")), None)
    if comparison.name not in UNADAPTED or row is None:
        return []
    gaps = {c: comparison.entries[row, c].difference for c in columns}
    groups = [[gap for c, gap in gaps.items() if gap is not None and (c in NOISE) is noise] for noise in (True, False)]
    if not all(groups):
        return []
    noise, rest = (sum(group) / len(group) for group in groups)
    where = f"{row}, {comparison.title}"
    return [f"- {where}: on noise {noise:+.1f} points from the paper's network, on the rest {rest:+.1f}."]


def _winners(errors: Mapping[str, tuple[float, float]]) -> tuple[str, str]:
    """The row with the lowest error of ours, and of the paper's."""
    return min(errors, key=lambda row: errors[row][0]), min(errors, key=lambda row: errors[row][1])


def _streams(comparison: Comparison) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """The methods that had the same stream, without columns of single corruptions and without repeated columns."""
    without = by_domain() | SAME_STREAM.keys()
    return ((column, errors) for column, errors in comparison.rivals() if column not in without)


def _best(comparison: Comparison) -> list[str]:
    """Columns in which another method is the best."""
    found = []
    for column, errors in _streams(comparison):
        own, theirs = _winners(errors)
        if own != theirs:
            here = f"{column}: {own} is lowest ({errors[own][0]:.2f})"
            found.append(f"{here}; in the paper it is {theirs} (here {errors[theirs][0]:.2f})")
    return ["Another method is lowest:", *(f"  - {line}" for line in found)] if found else []


def _sides(comparison: Comparison) -> list[str]:
    """Methods that are better than TEST in the paper and worse here, or the other way round."""
    better, worse = list[str](), list[str]()
    for column, errors in _streams(comparison):
        source = next((row for row in errors if row == SOURCE or row.endswith(f" {SOURCE}")), None)
        if source is None:
            continue
        for row, (own, theirs) in errors.items():
            is_better = own < errors[source][0]
            if row != source and is_better != (theirs < errors[source][1]):
                text = f"{row} at {column} ({own:.2f}; {SOURCE} {errors[source][0]:.2f})"
                (better if is_better else worse).append(text)
    lines = [f"Better than {SOURCE} here, not in the paper: {'; '.join(better)}"] if better else []
    return lines + ([f"Better than {SOURCE} in the paper, not here: {'; '.join(worse)}"] if worse else [])
