"""Where our findings are not the paper's, said plainly: TRIBE's place, the side of TEST, the best, and single cells."""

from collections.abc import Iterator, Sequence

from tribe import paper
from tribe.reproduce.comparison import Comparison, Entry, Judged
from tribe.reproduce.render import claims_markdown, number, table_row

APART = 1.5  # points: what lies farther from the paper's number is said in words
BAR = {"F 100 inst": 18.0}  # what TRIBE's error is to be at most where that is less than the paper's number
SOURCE, OURS = "TEST", "TRIBE"
SAME_STREAM = {"V 1 inst": "F 1 inst"}  # columns that repeat another


# -- TRIBE in every cell ----------------------------------------------------------------------------------------------


def in_every_cell(comparison: Comparison) -> list[str]:
    """Whether TRIBE's instance error is at most the paper's, and lower than all others', in each cell of a table."""
    table, failures, without = paper.get(comparison.name), list[str](), dict[str, list[str]]()
    lines = [f"### {OURS}'s instance error in every cell of `{table.label}`", ""]
    lines += [table_row(["", "ours", "at most", "", "next", "", ""])]
    lines += [table_row(["---", "---:", "---:", "---", "---", "---:", "---"])]
    for column in table.column_keys:
        if not column.endswith(" inst") or column in SAME_STREAM:
            continue
        cell, (ours, others) = column.removesuffix(" inst"), _standing(comparison, column)
        said = table.value(OURS, column)
        assert isinstance(said, float)
        limit = min(said, BAR.get(column, said))
        if ours is None:
            failures.append(f"{cell} was not run")
            lines.append(table_row([cell, "–", f"{limit:.2f}", "not run", "", "", ""]))
            continue
        best = min(others, key=lambda row: others[row], default=None)
        within, lowest = ours <= limit, best is None or ours < others[best]
        words = ["–", "–", "alone"] if best is None else [best, f"{others[best]:.2f}", _mark(lowest, "lowest")]
        lines.append(table_row([cell, f"{ours:.2f}", f"{limit:.2f}", _mark(within, "yes"), *words]))
        failures += [] if within else [f"{cell}: {ours:.2f} is more than {limit:.2f}"]
        failures += [] if lowest else [f"{cell}: {best} has {others[best or '']:.2f}, {OURS} {ours:.2f}"]
        if lacking := ", ".join(row for row in table.row_keys if row not in others and row != OURS):
            without.setdefault(lacking, []).append(cell)
    failures += [f"{rows} not run at {', '.join(cells)}" for rows, cells in without.items()]
    lines += ["", "The limit is the paper's number; at F 100 it is 18.0, which is less. V 1 is the stream of F 1.", ""]
    return [*lines, *(_said(failures) if failures else ["It holds in every cell, against every method."]), ""]


def _standing(comparison: Comparison, column: str) -> tuple[float | None, dict[str, float]]:
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


# -- all tables -------------------------------------------------------------------------------------------------------


def differences(comparisons: Sequence[Comparison], judgements: Sequence[Judged]) -> list[str]:
    """All that is other than the paper says: sentences first, then tables."""
    lines = ["### Where ours differs from the paper", ""]
    fallen = [j for j in judgements if j.ours.holds is False]
    lines += ["Sentences of the paper that our numbers contradict:", ""] if fallen else []
    for claim, own, mine in fallen:
        before = "" if own.holds else " (on the paper's own numbers, too)"
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
