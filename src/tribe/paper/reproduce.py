"""The paper's tables and figures again: plan the experiments behind them, run what is missing, and compare.

    workbench = tribe.lab.workbench.Workbench()
    plan = tribe.paper.reproduce.plan(tables.get("mnist"), Wishes(dataset="live-mnist-c", model="compact"), workbench)
    tribe.paper.reproduce.run(plan, "runs", workbench)
    print(tribe.paper.reproduce.markdown(tribe.paper.reproduce.compare(plan, "runs")))

On the command line: ``tribe reproduce mnist --dataset live-mnist-c --model compact``. What was run is kept as small
JSON (``--keep results``), from which `document` writes ``docs/reproduction.md``.
"""

from tribe.paper.beside import released
from tribe.paper.comparison import Comparison, Entry, Judged, compare, judged
from tribe.paper.costs import History, history
from tribe.paper.gathering import Origin, damage, damaged, gather
from tribe.paper.page import document
from tribe.paper.plans import Plan, Planned, Wishes, longest_first, plan, run
from tribe.paper.render import as_csv, as_json, latex, markdown

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
