"""Where our findings are not the paper's, said plainly: TRIBE's place, the side of TEST, the best, and single cells."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tribe.paper import tables as paper
from tribe.paper.comparison import Comparison, Entry, Judged
from tribe.paper.render import claims_markdown, number, table_row

APART = 1.5  # points: what lies farther from the paper's number is said in words
BAR = {"F 100 inst": 18.0}  # what this project wants TRIBE's error to be at most, where that is less than the paper's
SOURCE, OURS = "TEST", "TRIBE"
_LIMIT = (
    "the paper's number, or this project's aim where that is less ("
    + ", ".join(f"{column.removesuffix(' inst')}: {limit:.1f}" for column, limit in BAR.items())
    + ")"
)
SAME_STREAM = {"V 1 inst": "F 1 inst"}  # columns that repeat another


# -- TRIBE in every cell ----------------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """TRIBE's instance error in one cell of a table."""

    cell: str  # such as F 100
    ours: float | None
    limit: float
    others: dict[str, float]  # what other methods have there

    @property
    def best(self) -> str | None:
        """The lowest of the others."""
        return min(self.others, key=lambda row: self.others[row], default=None)

    @property
    def within(self) -> bool:
        """Whether it is at most what it is to be."""
        return self.ours is not None and self.ours <= self.limit

    @property
    def lowest(self) -> bool:
        """Whether it is lower than all others."""
        return self.ours is not None and all(self.ours < other for other in self.others.values())


def standings(comparison: Comparison) -> Iterator[Standing]:
    """Every cell of a table."""
    table = paper.get(comparison.name)
    for column in table.column_keys:
        if column.endswith(" inst") and column not in SAME_STREAM:
            said = table.value(OURS, column)
            assert isinstance(said, float)
            ours, others = _numbers(comparison, column)
            yield Standing(column.removesuffix(" inst"), ours, min(said, BAR.get(column, said)), others)


def in_every_cell(comparison: Comparison) -> list[str]:
    """Whether TRIBE's instance error is at most the paper's, and lower than all others', in each cell of a table."""
    table, failures, without = paper.get(comparison.name), list[str](), dict[str, list[str]]()
    lines = [f"### {OURS}'s instance error in every cell of `{table.label}`", ""]
    lines += [table_row(["", "ours", "at most", "", "next", "", ""])]
    lines += [table_row(["---", "---:", "---:", "---", "---", "---:", "---"])]
    for one in standings(comparison):
        cell, ours, limit, others = one
        if ours is None:
            failures.append(f"{cell} was not run")
            lines.append(table_row([cell, "–", f"{limit:.2f}", "not run", "", "", ""]))
            continue
        best = one.best
        words = ["–", "–", "alone"] if best is None else [best, f"{others[best]:.2f}", _mark(one.lowest, "lowest")]
        lines.append(table_row([cell, f"{ours:.2f}", f"{limit:.2f}", _mark(one.within, "yes"), *words]))
        failures += [] if one.within else [f"{cell}: {ours:.2f} is more than {limit:.2f}"]
        failures += [] if one.lowest else [f"{cell}: {best} has {others[best or '']:.2f}, {OURS} {ours:.2f}"]
        if lacking := ", ".join(row for row in table.row_keys if row not in others and row != OURS):
            without.setdefault(lacking, []).append(cell)
    failures += [f"{rows} not run at {', '.join(cells)}" for rows, cells in without.items()]
    lines += ["", f"At most: {_LIMIT}. V 1 is the stream of F 1.", ""]
    return [*lines, *(_said(failures) if failures else ["It holds in every cell, against every method."]), ""]


def _numbers(comparison: Comparison, column: str) -> tuple[float | None, dict[str, float]]:
    """TRIBE's number, and those of the others."""
    numbers = {
        row: value
        for row in comparison.rows
        if (row, column) in comparison.entries and isinstance(value := comparison.entries[row, column].ours, float)
    }
    return numbers.pop(OURS, None), numbers


def _said(failures: Sequence[str]) -> list[str]:
    return ["It does not hold, or was not shown, in these:", "", *(f"- {failure}" for failure in failures)]


def _mark(holds: bool, word: str) -> str:
    return word if holds else f"**not {word}**" if word != "yes" else "**no**"


# -- in a few sentences -----------------------------------------------------------------------------------------------


def in_short(comparisons: Sequence[Comparison], judgements: Sequence[Judged], table: str) -> list[str]:
    """What a reader should know first.

    Args:
        comparisons: all tables of a series.
        judgements: of all claims on these.
        table: the one in which TRIBE is to be best throughout.
    """
    lines = []
    for comparison in comparisons:
        if comparison.name == table and (run := [one for one in standings(comparison) if one.ours is not None]):
            above = ", ".join(one.cell for one in run if not one.within)
            but = f" (not at {above})" if above else ""
            lines.append(
                f"- {OURS}'s instance error is at most {_LIMIT} in {sum(one.within for one in run)} of {len(run)} "
                f"cells of `{comparison.label}`{but}, and the lowest of all methods that were run in "
                f"{sum(one.lowest for one in run)}."
            )
    judged = [j.ours.holds for j in judgements]
    fallen = sum(j.paper.holds is False for j in judgements)
    lines.append(
        f"- Of {len(judged)} sentences of the paper about its tables, {judged.count(True)} hold on our numbers, "
        f"{judged.count(False)} do not, and {judged.count(None)} are not judged on ours; {fallen} do not hold on the "
        "paper's own numbers."
    )
    single = {c["key"] for name in paper.names() for c in paper.get(name).columns if "domain" in c}
    cells = {  # a number may stand in several tables, where the paper may round its own otherwise
        (entry.experiment, entry.ours): abs(entry.difference)
        for comparison in comparisons
        for (_, column), entry in comparison.entries.items()
        if entry.difference is not None and entry.experiment and entry.unit == "%" and column not in single
    }
    near = sum(apart <= APART for apart in cells.values())
    lines.append(f"- Of {len(cells)} errors of whole streams, {near} lie within {APART} points of the paper's number.")
    return lines


# -- all tables -------------------------------------------------------------------------------------------------------


def differences(comparisons: Sequence[Comparison], judgements: Sequence[Judged]) -> list[str]:
    """All that is other than the paper says: sentences first, then tables."""
    lines = ["### Where ours differs from the paper", ""]
    fallen = [j for j in judgements if j.ours.holds is False]
    lines += ["Sentences of the paper that our numbers contradict:", ""] if fallen else []
    for claim, own, mine in fallen:
        before = " (on the paper's own numbers, too)" if own.holds is False else ""
        lines.append(f"- “{claim.says}”{before}: {mine.why}")
    lines += [""] if fallen else []
    risen = [j for j in judgements if j.ours.holds and j.paper.holds is False]
    lines += ["Sentences that hold on our numbers, though not on the paper's own:", ""] if risen else []
    lines += [*(f"- “{claim.says}”: {mine.why}" for claim, _, mine in risen), *[""] * bool(risen)]
    for comparison in comparisons:
        found = [*_best(comparison), *_sides(comparison)]
        far = _apart(comparison)
        if found or far:
            lines += [f"{comparison.title} (`{comparison.label}`):", "", *(f"- {line}" for line in (*found, *far[:1]))]
            lines += [*(f"  - {line}" for line in far[1:]), ""]
    return lines if len(lines) > 2 else [*lines, "Nowhere, in what was run.", ""]


def judged_claims(judgements: Sequence[Judged]) -> list[str]:
    """The claims that could be judged on ours, or fail on the paper's own numbers."""
    told = [j for j in judgements if j.ours.holds is not None or j.paper.holds is False]
    rest = len(judgements) - len(told)
    more = [f"{rest} more could not be judged on ours, and do not fail on the paper's own numbers.", ""] if rest else []
    return ["### What the paper claims", "", *claims_markdown(told), "", *more]


def _errors(comparison: Comparison) -> Iterator[str]:
    """The columns that hold errors."""
    return (c for c in comparison.columns if any(comparison.entries[r, c].unit == "%" for r in comparison.rows))


def _both(comparison: Comparison, column: str, group: str) -> dict[str, tuple[float, float]]:
    """Ours and the paper's of the methods that met the same stream."""
    entries = {r: comparison.entries[r, column] for r in comparison.rows if comparison.groups.get(r) == group}
    return {
        r: (e.ours, e.paper) for r, e in entries.items() if isinstance(e.ours, float) and isinstance(e.paper, float)
    }


def _rivals(comparison: Comparison) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    for column in _errors(comparison):
        for group in dict.fromkeys(comparison.groups.values()):
            both = _both(comparison, column, group)
            if len(both) > 1:
                yield column, both


def _best(comparison: Comparison) -> list[str]:
    """Columns in which another method is the lowest."""
    told = []
    for place, both in _rivals(comparison):
        ours, theirs = (min(both, key=lambda row, i=i: both[row][i]) for i in (0, 1))  # type: ignore[misc]
        if ours != theirs:
            told.append(f"{place}: {ours} {both[ours][0]:.2f}, not {theirs} {both[theirs][0]:.2f}")
    return [f"The lowest is another: {'; '.join(told)}"] if told else []


def other_than_the_paper(comparison: Comparison) -> list[str]:
    """Of a table on other data than the paper's: what can be compared all the same, which method is the best."""
    rivals = list(_rivals(comparison))
    if not rivals:
        return []
    counts = [Counter(min(both, key=lambda row, i=i: both[row][i]) for _, both in rivals) for i in (0, 1)]  # type: ignore[misc]
    ours, theirs = (", ".join(f"{row} in {n}" for row, n in count.most_common()) for count in counts)
    return [f"The lowest of {len(rivals)} columns: {ours}. In the paper: {theirs}.", ""]


def _sides(comparison: Comparison) -> list[str]:
    """Methods that help in the paper and harm here, or the other way round."""
    helps, harms = list[str](), list[str]()
    for place, both in _rivals(comparison):
        source = next((row for row in both if row == SOURCE or row.endswith(f" {SOURCE}")), None)
        for row, (ours, theirs) in both.items() if source is not None else ():
            source_ours, source_theirs = both[source or ""]
            words = f"{row} at {place} ({ours:.2f}; {SOURCE} {source_ours:.2f})"
            here, there = ours < source_ours, theirs < source_theirs
            (helps if here else harms).extend([words] if row != source and here != there else [])
    told = [f"Better than {SOURCE} here, not in the paper: {'; '.join(helps)}"] if helps else []
    return told + ([f"Better than {SOURCE} in the paper, not here: {'; '.join(harms)}"] if harms else [])


def _apart(comparison: Comparison) -> list[str]:
    """Cells that lie far from the paper's, row by row; of single corruptions how many, and the farthest."""
    single = {column["key"] for column in paper.get(comparison.name).columns if "domain" in column}
    columns = list(_errors(comparison))
    told, cells, found = [], 0, 0
    for row in comparison.rows:
        entries = {c: e for c in columns if (e := comparison.entries[row, c]).difference is not None and e.unit == "%"}
        far = {c: e for c, e in entries.items() if abs(e.difference or 0.0) > APART}
        cells, found = cells + len(entries), found + len(far)
        words = [f"{c} {_beside(e)}" for c, e in far.items() if c not in single]
        if many := {c: e for c, e in far.items() if c in single}:
            most = max(many, key=lambda c: abs(many[c].difference or 0.0))
            words.append(
                f"{len(many)} of {len(single & entries.keys())} corruptions, most at {most}: {_beside(many[most])}"
            )
        told += [f"{row}: {'; '.join(words)}"] if words else []
    if not told:
        return []
    return [
        f"More than {APART} points from the paper's number, ours (paper's, difference), {found} of {cells} cells:",
        *told,
    ]


def _beside(entry: Entry) -> str:
    return f"{number(entry.ours, '%')} ({number(entry.paper, '%')}, {number(entry.difference, '%', signed=True)})"
