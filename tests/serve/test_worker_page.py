"""The tables of the policy and of the metrics in docs/serving.md are made from the code.

``PYTHONPATH=tests python tests/serve/test_worker_page.py`` writes them.
"""

import asyncio
import dataclasses
import inspect
import re
import tempfile

from replays import batch, new_fleet

from places import ROOT
from tribe.serve.config import Policy
from tribe.serve.store import SqliteStore
from tribe.serve.worker import Worker
from tribe.testing import small_network
from watching import calibration_of

PAGE = ROOT / "docs/serving.md"


def policy_rows():
    """The fields of the policy, with the comments beside them."""
    words = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Policy), re.M))
    for field in dataclasses.fields(Policy):
        default = "none" if field.default is None else f"{field.default:g}"
        if field.name.endswith("bytes"):
            default = f"{field.default // 2**20} MiB"
        yield f"| `{field.name}` | {default} | {words[field.name]} |"


def metric_rows(folder):
    """The metrics of a worker with a store and a stream that is watched."""

    async def run():
        store = SqliteStore(folder)
        worker = Worker(new_fleet(health=calibration_of(small_network())), store)
        await worker.start()
        await worker.infer("cam", batch(0))
        text = worker.metrics_text(streams=True)
        await worker.stop()
        store.close()
        return text

    text = asyncio.run(run())
    for name, words in re.findall(r"^# HELP (\w+) (.*)$", text, re.M):
        if name.endswith("_created"):  # when a series began, from prometheus_client
            continue
        (kind,) = re.findall(rf"^# TYPE {name} (\w+)$", text, re.M)
        yield f"| `{name}` | {kind} | {words} |"


HEADS = {"policy": "| field | default | meaning |", "metrics": "| metric | type | meaning |"}


def tables(folder):
    """The marker of each table, and the table."""
    for name, rows in (("policy", policy_rows()), ("metrics", metric_rows(folder))):
        yield f"<!-- {name} -->\n", "".join(f"{row}\n" for row in (HEADS[name], "|---|---|---|", *rows))


def test_the_tables_are_those_of_the_code(tmp_path):
    page = PAGE.read_text()
    for marker, table in tables(tmp_path):
        assert marker + table in page, f"run: PYTHONPATH=tests python {__file__}"


if __name__ == "__main__":
    page = PAGE.read_text()
    for marker, table in tables(tempfile.mkdtemp()):
        before, _, rest = page.partition(marker)
        page = before + marker + table + re.sub(r"\A(\|.*\n)*", "", rest)
    PAGE.write_text(page)
