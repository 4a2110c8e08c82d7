"""The dashboard in deploy/grafana.json asks only for metrics and labels that a server exports."""

import json
import re

from http_calls import IMAGES, web
from small_server import serving

import tribe
from places import ROOT
from tribe.serve.client import Client
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker
from tribe.testing import small_network
from watching import calibration_of

BOARD = json.loads((ROOT / "deploy/grafana.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
VARIABLES = [each["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"]
NAME = re.compile(r"\b(?:tribe|nv)_\w+")


def exported(tmp_path):
    """The names of samples that a server exports, and their labels."""
    store = SqliteStore(tmp_path / "data")
    net = small_network()
    worker = Worker(tribe.fleet(net, health=calibration_of(net)), store, model="small")
    with serving(worker) as server, Client(server.url, "small") as client:
        client.predict("cam1", IMAGES)
        for _ in range(16):
            client.predict("cam2", 0 * IMAGES)  # it has an alarm
        text = web.get(f"{server.url}/metrics?streams=true").text
    store.close()
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels = re.match(r"(\w+)(?:\{(.*)\})? ", line).groups()
            found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels or ""))
    return found


def test_every_query_asks_for_what_is_exported(tmp_path):
    metrics = exported(tmp_path)
    assert len(QUERIES) > 20
    for query in (*QUERIES, *VARIABLES):
        names = NAME.findall(query)
        assert names, query
        for name in names:
            assert name in metrics, (query, name)
            asked = {label for group in re.findall(r"\{(.*?)\}", query) for label in re.findall(r"(\w+)=~", group)}
            grouped = {label for group in re.findall(r" by \((.*?)\)", query) for label in group.split(", ")}
            empty = {"outcome", "reason"} if name == "tribe_learning_dropped_total" else set()  # none was dropped
            assert (asked | grouped) - {"le", "instance"} <= metrics[name] | empty, query


def test_every_panel_says_what_it_shows_and_none_covers_another():
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]]
    assert len(set(taken)) == len(taken)
    assert all(0 <= x <= 24 - p["gridPos"]["w"] for (x, _), p in zip(taken, BOARD["panels"], strict=True))
    for panel in BOARD["panels"]:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(each["legendFormat"] for each in panel["targets"])
