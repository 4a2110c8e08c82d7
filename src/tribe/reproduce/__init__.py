"""The paper's tables and figures again: plan the experiments behind them, run what is missing, and compare.

    bench = tribe.experiment.Bench()
    plan = tribe.reproduce.plan(tribe.paper.get("mnist"), Wishes(dataset="live-mnist-c", model="compact"), bench)
    tribe.reproduce.run(plan, "runs", bench)
    print(tribe.reproduce.markdown(tribe.reproduce.compare(plan, "runs")))

On the command line: ``tribe reproduce mnist --dataset live-mnist-c --model compact``. What was run is kept as small
JSON (``--keep results``), from which `document` writes ``docs/reproduction.md``.
"""

from tribe.reproduce.beside import released
from tribe.reproduce.comparison import Comparison, Entry, Judged, compare, judged
from tribe.reproduce.costs import History, history
from tribe.reproduce.gathering import Origin, damage, damaged, gather
from tribe.reproduce.page import document
from tribe.reproduce.plans import Plan, Planned, Wishes, longest_first, plan, run
from tribe.reproduce.render import as_csv, as_json, latex, markdown

__all__ = [
    "Comparison",
    "Entry",
    "History",
    "Judged",
    "Origin",
    "Plan",
    "Planned",
    "Wishes",
    "as_csv",
    "as_json",
    "compare",
    "damage",
    "damaged",
    "document",
    "gather",
    "history",
    "judged",
    "latex",
    "longest_first",
    "markdown",
    "plan",
    "released",
    "run",
]
