"""The tables of README.md, from the results."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from studies.pages import table


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of all networks."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("deploy_*.json"))]


def days(folder: Path) -> str:
    """Return the errors of source and delivered answers in each part."""
    rows = []
    for result in results(folder):
        for day in result["days"]:
            order = "bursts" if day["bursts"] else "random"
            cells = [f"{part['source']:.1f} / {part['delivered']:.1f}" for part in day["parts"]]
            rows.append([result["network"], order, str(day["seed"]), *cells])
    return table(("network", "order", "seed", *(part["part"] for part in results(folder)[0]["days"][0]["parts"])), rows)


def windows(folder: Path) -> str:
    """Return how often intervals of windows held the accuracy."""
    rows = []
    for result in results(folder):
        for name, title in (("days", "days"), ("families", "families left out")):
            if found := [window for one in result.get(name, ()) for window in one["windows"]]:
                held = fmean(w["low"] <= w["accuracy"] <= w["high"] for w in found)
                source = fmean(w["source_low"] <= w["source"] <= w["source_high"] for w in found)
                off = fmean(abs(w["estimate"] - w["accuracy"]) for w in found)
                wide = fmean(w["high"] - w["low"] for w in found)
                cells = [f"{100 * share:.0f}" for share in (held, source)] + [f"{100 * v:.1f}" for v in (off, wide)]
                rows.append([result["network"], title, str(len(found)), *cells])
    return table(("network", "stream", "windows", "held, %", "of the source, %", "off, points", "width, points"), rows)


def delays(folder: Path) -> str:
    """Return the images until alarms begin after the change to night, and end after the change to clean images."""
    rows, names = [], ("shift, night", "shift, clean", "accuracy, night", "accuracy, clean")
    for result in results(folder):
        for day in result["days"]:
            if found := day.get("delays"):
                cells = ["-" if found.get(name) is None else f"{found[name]}" for name in names]
                rows.append([result["network"], "bursts" if day["bursts"] else "random", str(day["seed"]), *cells])
    header = ("network", "order", "seed", "`shift` on", "`shift` off", "`accuracy` on", "`accuracy` off")
    return table(header, rows)


def hard(folder: Path) -> str:
    """Return the verdicts where many frames differ and little or nothing is gained."""
    rows = []
    for result in results(folder):
        for judged in (hard for one in result["verdicts"] for hard in one.get("hard", ())):
            said = ", ".join(f"{answer} {count}" for answer, count in judged["answers"].items())
            rows.append(
                [result["network"], f"{judged['gain']:+.1f}", str(judged["differing"]), said, f"{judged['labels']:.0f}"]
            )
    return table(("network", "true gain", "frames that differ", "200 draws", "labels"), rows)


def verdicts(folder: Path) -> str:
    """Return the verdicts of random draws of labels."""
    rows = []
    for result in results(folder):
        for judged in result["verdicts"]:
            said = ", ".join(f"{answer} {count}" for answer, count in judged["answers"].items())
            errors = f"{judged['source']:.1f} / {judged['delivered']:.1f}"
            counts = [str(judged["differing"]), errors, f"{judged['gain']:+.1f}", said, f"{judged['labels']:.0f}"]
            rows.append([result["network"], judged["recording"], *counts])
    return table(("network", "recording", "frames that differ", "errors, %", "gain", "200 draws", "labels"), rows)


BLOCKS = {"days": days, "windows": windows, "delays": delays, "verdicts": verdicts, "hard": hard}
