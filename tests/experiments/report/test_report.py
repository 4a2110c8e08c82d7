"""The report: every number is that of the records, every file's words are only words, and what is damaged is named."""

import html
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser

import pytest
import torch

import tribe
import tribe.experiments.record
from commands import succeeded, tribe_command
from grid import run_experiment
from places import ROOT
from reproduction.keep import keep as keep_results
from tribe import metrics
from tribe.data import scenarios
from tribe.experiments import report, store
from tribe.experiments.experiment import Experiment
from tribe.experiments.record import Watched
from tribe.experiments.report import groups
from tribe.experiments.spec import ComponentSpec, plain
from tribe.methods.encoding import encode_fields

VOID = {"br", "hr", "input", "link", "meta"}


def record(
    method="tribe",
    seed=0,
    *,
    images=600,
    classes=4,
    domains=("fog@5", "snow@5"),
    error=0.3,
    label=None,
    fields=None,
    **spec,
):
    """A record with an error of its own making; ``label=-1``: without labels."""
    g = torch.Generator().manual_seed(seed + 1000 * len(method))
    y = torch.randint(classes, (images,), generator=g)
    p = torch.where(torch.rand(images, generator=g) < error, (y + 1) % classes, y)
    words = {
        "method": {"name": method, "fields": fields or {}},
        "dataset": {"name": "cifar10-c", "fields": {}},
        "model": {"name": "wrn", "fields": {}},
        "scenario": {"name": "gli-f", "fields": {"imbalance": 100.0}},
        "batch": 64,
        "seed": seed,
    }
    domain = torch.arange(images) * len(domains) // images
    y = y if label is None else torch.full_like(y, label)
    seconds = torch.full((images,), 1e-3 * len(method))
    return tribe.Record(domain, y, p, torch.rand(images, generator=g), seconds, domains, classes, words | spec)


def keep(folder, **records):
    folder.mkdir(parents=True, exist_ok=True)
    for name, kept in records.items():
        kept.save(folder / f"{name}.npz")
    return folder


def results(folder):
    """The results in a folder by the name of their method."""
    return {result.experiment.method.name: result for result in store.finished(folder)}


def tribe_report(*arguments):
    return tribe_command("report", *arguments)


class Page(HTMLParser):
    """A page taken apart; raises where elements are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.tables, self.cell = [], None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name == "table":
            self.tables.append([])
        if name == "tr":
            self.tables[-1].append([])
        if name in ("td", "th"):
            self.cell = {"text": "", "bold": False}
            self.tables[-1][-1].append(self.cell)
        if name == "b" and self.cell is not None:
            self.cell["bold"] = True

    def handle_endtag(self, name):
        assert self.open.pop() == name
        if name in ("td", "th"):
            self.cell = None

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)
        if self.cell is not None:
            self.cell["text"] += data

    def count(self, name):
        return sum(element == name for element, _ in self.elements)

    def attributes(self, key):
        return [found[key] for _, found in self.elements if key in found]

    @property
    def text(self):
        return " ".join(self.words)


def page_of(folder, out=None):
    out = out or folder.parent / "report.html"
    report.write(folder, out)
    return Page(out.read_text(encoding="utf-8"))


def test_the_overview_holds_the_means_and_spreads_of_the_records_and_the_lowest_is_bold(tmp_path):
    runs = {f"{m}{s}": record(m, s, error=e) for m, e in (("source", 0.5), ("tribe", 0.1), ("bn", 0.3)) for s in (0, 1)}
    page = page_of(keep(tmp_path / "runs", **runs))
    _, _, *rows = page.tables[0]
    assert [row[0]["text"] for row in rows] == ["source", "bn", "tribe"]
    for name, *cells in rows:
        mine = [runs[f"{name['text']}{seed}"] for seed in (0, 1)]
        for cell, metric in zip(cells, (metrics.instance_error, metrics.category_error), strict=False):
            values = 100 * torch.stack([metric(one) for one in mine])
            assert cell["text"] == f"{values.mean():.2f} ± {values.std():.2f}"
            assert cell["bold"] == (name["text"] == "tribe")
        assert cells[2]["text"] == f"{len(name['text']):.2f}"  # ms per image
        assert cells[2]["bold"] == (name["text"] == "bn")


def test_per_domain_errors_calibration_confusion_and_class_counts_are_those_of_the_record(tmp_path):
    # Domain a: 40 images of class 0, of which 10 are taken for 1; domain b: 20 of class 1, all right. All 90 % sure.
    label = torch.tensor([0] * 40 + [1] * 20)
    prediction = torch.tensor([1] * 10 + [0] * 30 + [1] * 20)
    made = record(domains=("a", "b"), classes=2)._replace(
        **{"domain": label, "label": label, "prediction": prediction},
        **{"confidence": torch.full((60,), 0.9), "seconds": torch.full((60,), 0.001)},
    )
    page = page_of(keep(tmp_path / "runs", r=made))
    tables = [[[cell["text"] for cell in row] for row in table] for table in page.tables]
    assert [["domain", "tribe"], ["a", "25.00"], ["b", "0.00"]] in tables
    assert ["87 to 93 %", "83 % of 60"] in next(t for t in tables if t[0][0] == "confidence")
    assert [["", "0", "1"], ["a", "40", "·"], ["b", "·", "20"]] in tables  # played
    assert [["", "0", "1"], ["0", "75", "25"], ["1", "·", "100"]] in tables  # confused
    assert [["", "0", "1"], ["the labels", "67", "33"], ["tribe", "50", "50"]] in tables  # predicted
    assert "most often predicts 0 as 1 (10 images)" in page.text


def test_estimates_of_a_watched_stream_are_drawn_beside_its_accuracy_with_alarms(tmp_path):
    plain = record("tribe+watch", images=600, error=0.3)
    half, alarms = torch.full((600,), 0.5), torch.zeros(600, dtype=torch.int64)
    alarms[400:450] = 2
    watched = Watched(half, half - 0.1, half + 0.1, alarms, ("black", "collapse"))
    page = page_of(keep(tmp_path / "runs", tribe=plain._replace(watched=watched), other=record("tent")))
    assert "Accuracy, estimated and true" in page.text
    assert "tribe+watch: alarm collapse, image 401" in page.text
    points = abs(100 * float((plain.label == plain.prediction).double().mean()) - 50)
    found = float(re.search(r"tribe\+watch: ([0-9.]+) points apart, 1 alarm", page.text).group(1))
    assert found == pytest.approx(points, abs=5)
    without = page_of(keep(tmp_path / "plain", tribe=record("tribe")))
    assert "Accuracy, estimated and true" not in without.text


def test_records_without_labels_are_shown_without_errors(tmp_path):
    page = page_of(keep(tmp_path / "runs", a=record("tribe", label=-1), b=record("bn", label=-1)))
    assert [cell["text"] for cell in page.tables[0][2]] == ["bn", "–", "–", "2.00"]
    assert "No labels, so no errors." in page.text
    assert "Error per domain" not in page.text
    assert "Classes predicted" in page.text


def test_in_a_group_with_and_without_labels_the_errors_are_those_of_the_labelled(tmp_path):
    labelled = record("tribe", 0)
    page = page_of(keep(tmp_path / "runs", a=labelled, b=record("tribe", 1, label=-1)))
    assert page.tables[0][2][1]["text"] == f"{100 * metrics.instance_error(labelled):.2f}"


@pytest.mark.parametrize("classes", [1, 3, 21, 150])
def test_any_number_of_classes_fits(tmp_path, classes):
    page = page_of(keep(tmp_path / "runs", a=record(classes=classes), b=record("bn", classes=classes)))
    assert page.text.count("Confusion of tribe") == (classes > 20)  # a map with a title, or a table


def test_a_method_that_broke_down_is_shown(tmp_path):
    broken = record()._replace(confidence=torch.full((600,), float("nan")))
    page = page_of(keep(tmp_path / "runs", a=broken, b=record("bn")))
    assert "ECE –" in page.text
    assert page.count("svg") > 4


def test_results_of_different_specs_are_never_in_one_group_and_the_title_says_what_differs(tmp_path):
    whole = {"name": "gli-f", "fields": {"imbalance": 100}}  # the others have 100.0, which is the same
    folder = keep(tmp_path / "runs", a=record(scenario=whole), b=record("bn"), c=record("bn", batch=32))
    groups = report.collect(folder).groups
    assert [(g.title, [row.label for row in g.rows]) for g in groups] == [
        ("cifar10-c, gli-f, imbalance 100, wrn, batch 32", ["bn"]),
        ("cifar10-c, gli-f, imbalance 100, wrn, batch 64", ["bn", "tribe"]),
    ]


def test_runs_in_real_time_have_a_table_of_their_errors_at_each_speed(tmp_path):
    def clocked(method, error, speed, cost):
        return record(method, error=error, realtime={"speed": speed, "cost": cost})

    runs = {"waits": record("tribe", error=0.1), "source_waits": record("source", error=0.6)}
    for speed, tribe_error, cost in ((1, 0.3, 7.25), (2.0, 0.5, 7.25), (4, 0.8, 7.5)):
        runs |= {f"t{speed}": clocked("tribe", tribe_error, speed, cost), f"s{speed}": clocked("source", 0.6, speed, 1)}
    runs["other"] = clocked("tribe", 0.2, 1, 9)
    page = page_of(keep(tmp_path / "runs", **runs))
    (table,) = [t for t in page.tables if t[0][-1]["text"] == "4 x"]
    assert [cell["text"] for cell in table[0]] == ["method", "x inference", "waits", "1 x", "2 x", "4 x"]
    expected = {
        "source": ["1", *(runs[name] for name in ("source_waits", "s1", "s2.0", "s4"))],
        "tribe": ["7.25, 7.5", *(runs[name] for name in ("waits", "t1", "t2.0", "t4"))],
    }
    for name, cost, *cells in table[1:]:
        if name["text"] in expected:
            mine, *records = expected[name["text"]]
            assert cost["text"] == mine
            assert [c["text"] for c in cells] == [f"{100 * metrics.instance_error(one):.2f}" for one in records]
    bold = {(row[0]["text"], i) for row in table[1:] for i, cell in enumerate(row) if cell["bold"]}
    assert bold == {("tribe", 2), ("tribe (2)", 3), ("tribe", 4), ("source", 5)}
    assert [row[1]["text"] for row in table[1:] if row[0]["text"] == "tribe (2)"] == ["9"]
    error = 100 * metrics.instance_error(runs["t2.0"])
    assert f"tribe: 7.25 x inference, {error:.1f} %" in page.text, "the chart of cost against error"
    assert "tribe: 5.00 ms" in page.text, "where the stream waits, the time"
    assert "Real time" not in page_of(keep(tmp_path / "plain", a=record())).text


@pytest.mark.parametrize("odd", [None, 7, "fast", {"speed": "2", "cost": 1}, {"speed": 2}, {"speed": 0, "cost": -1}])
def test_a_clock_of_any_form_is_shown(tmp_path, odd):
    assert "tribe" in page_of(keep(tmp_path / "runs", a=record(realtime=odd), b=record("bn"))).text


def test_a_method_with_other_fields_is_a_row_of_its_own_named_by_what_differs(tmp_path):
    usual = plain(encode_fields(tribe.methods.create("tribe", classes=10)))
    preset = usual | tribe.methods.get("tribe").presets["cifar10"]
    folder = keep(
        tmp_path / "runs",
        a=record(fields=preset),
        b=record(fields=preset | {"gamma": 0.375}),
        c=record("strange", fields={"x": 1, "y": 5}),
        d=record("strange", fields={"x": 2, "y": 5}),
        e=record("lone", fields={"x": 1}),
    )
    (group,) = report.collect(folder).groups
    assert [row.label for row in group.rows] == [
        *("lone, x 1", "strange, x 1, y 5", "strange, x 2, y 5", "tribe", "tribe, gamma 0.375")
    ]


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [("tribe", {"convention": "paper"}, True), ("rotta", {"room": 1}, True), ("rotta", {"room": 10**6}, False)],
)
def test_what_follows_from_another_field_or_is_room_for_larger_images_is_no_departure(name, fields, said):
    method = tribe.methods.create(name, **(tribe.methods.get(name).presets["cifar10"] | {"classes": 10} | fields))
    spec = record(name, fields=plain(encode_fields(method))).spec
    assert groups.departures(spec) == (fields if said else {})


def test_a_record_that_is_there_twice_counts_once_and_one_that_contradicts_is_named(tmp_path):
    made = record()
    wrong = made._replace(prediction=(made.prediction + 1) % 4)
    keep(tmp_path / "runs" / "x", r=made)
    keep(tmp_path / "runs" / "y", r=made._replace(seconds=2 * made.seconds))
    runs = report.collect(keep(tmp_path / "runs" / "z", r=wrong).parent)
    assert [played.path for group in runs.groups for row in group.rows for played in row.played] == ["x/r.npz"]
    (same, words), (other, loud) = runs.repeated
    assert (same, other) == ("y/r.npz", "z/r.npz")
    assert "predicts the same as x/r.npz" in words
    assert "PREDICTS OTHERWISE" in loud


def test_many_methods_and_groups_have_a_navigation_and_every_link_leads_somewhere(tmp_path):
    runs = {
        f"r{m}x{i}": record(f"m{m}", scenario={"name": "gli-v", "fields": {"imbalance": i}})
        for m in range(10)
        for i in (1, 10, 100, 200)
    }
    page = page_of(keep(tmp_path / "runs", **runs))
    ids = page.attributes("id")
    assert max(Counter(ids).values()) == 1
    links = page.attributes("href")
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert page.text.index("imbalance 10 ") < page.text.index("imbalance 100 ")
    assert page.count("section") == 6  # overview, four groups, about
    charts = [i for i, (name, a) in enumerate(page.elements) if name == "svg" and a.get("role") == "img"]
    assert len(charts) == 4 * 4
    assert all([page.elements[i + k][0] for k in (1, 2)] == ["title", "desc"] for i in charts)


def test_many_streams_that_share_few_methods_are_folded_below_a_table_without_empty_columns(tmp_path):
    runs = {
        f"r{i}{name}": record(name, error=error, scenario={"name": "gli-v", "fields": {"imbalance": i}})
        for i in range(1, 13)
        for name, error in (("source", 0.4), ("tribe", 0.3), (f"only{i}", 0.2))
    }
    page = page_of(keep(tmp_path / "runs", **runs))
    head, *rows = [[cell["text"] for cell in row] for row in page.tables[0]]
    assert head == ["stream", "methods", "source", "tribe", "lowest", "of"]
    assert len(rows) == 12
    for i, (_, count, *errors, lowest, winner) in enumerate(rows, 1):
        assert (count, winner) == ("3", f"only{i}")
        assert float(lowest) < min(map(float, errors))
    folded = [a for name, a in page.elements if name == "details" and a.get("class") == "group"]
    assert len(folded) == 12
    assert all("open" not in a for a in folded)
    links = {link[1:] for link in page.attributes("href") if link.startswith("#")}
    assert links <= set(page.attributes("id"))


SHORT = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=400")


def test_the_command_that_made_a_result_is_shown(tmp_path, monkeypatch, few_digits):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tribe", "run", "--methods", "source"])
    options = ("--methods", "source", "--data", few_digits, "--out", "runs")
    succeeded(tribe_command("run", *SHORT, *options))
    (result,) = store.finished("runs")
    report.write("runs", "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<pre class="command"><code>tribe run --methods source</code>' in page
    assert f"Made on device {result.environment['machine']['device']}" in page


def test_a_stale_result_is_not_the_one_that_is_shown(tmp_path, monkeypatch, few_digits):
    monkeypatch.chdir(tmp_path)
    for folder, seeds in (("a", (0, 1)), ("b", (0,))):
        options = ("--methods", "source", "--data", few_digits, "--out", f"runs/{folder}", "--seeds", len(seeds))
        succeeded(tribe_command("run", *SHORT, *options))
    (old,) = store.finished("runs/a")
    (pack,) = (tmp_path / "runs/a").glob("*.jsonl")
    lines = [json.loads(line) for line in pack.read_text().splitlines()]
    for line in lines:
        line["environment"]["code"]["method"] = "0" * 16
    pack.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (path, relation) = report.collect("runs").repeated[0]
    assert path == f"a/{old.folder.name}/record-0.npz"
    assert relation.startswith("predicts the same as b/")


def test_the_spec_is_there_word_for_word(tmp_path):
    made = record(note={"deep": [1, 2.5, None], "word": "ü"})
    report.write(keep(tmp_path / "runs", r=made), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    (spec,) = re.findall(r"<pre><code>(.*?)</code>", page, re.S)
    assert json.loads(html.unescape(spec)) == {k: v for k, v in made.spec.items() if k != "seed"}


@pytest.mark.parametrize("odd", [None, 3, "", [], {}, {"name": 3}, {"name": "tribe", "fields": [1]}, [[{}]], 1e400])
def test_specs_of_any_form_are_shown(tmp_path, odd):
    keys = ("method", "dataset", "model", "scenario", "batch", "fields", "seed", "threads", "experiment")
    runs = {f"r{key}": record(**{key: odd}) if key not in ("method", "seed") else record() for key in keys}
    runs |= {f"s{key}": (made := record())._replace(spec=made.spec | {key: odd}) for key in ("method", "seed")}
    runs["fields"] = record(fields={"classes": odd, "gamma": odd, "augment": odd, "knowledge": odd})
    runs["deep"] = record(scenario={"name": "gli-f", "fields": {"imbalance": odd, "domains": odd}})
    found = report.collect(keep(tmp_path / "runs", **runs))
    assert not found.damaged
    assert len(found.groups) > 3


def test_nothing_is_loaded_from_anywhere(tmp_path):
    report.write(keep(tmp_path / "runs", a=record(), b=record("bn")), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.attributes("src")
    assert {link for link in page.attributes("href") if not link.startswith("#")} == {"data:,"}
    assert not re.search(r"url\((?!#)|@import|//[a-z]+\.|https?:", text)
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x00\ud800</style></title>"


def test_words_from_files_are_only_words(tmp_path):
    evil = record(
        EVIL, domains=(EVIL, "b"), fields={EVIL: EVIL}, dataset={"name": EVIL}, model=EVIL, more={EVIL: [EVIL]}
    )
    folder = keep(tmp_path / "runs" / "<b>folder", r=evil).parent
    (folder / "<i>bad.npz").write_bytes(b"<u>")
    page = page_of(folder)
    assert page.count("script") == 1
    assert page.count("style") == 1
    assert not {"img", "u", "i"} & {name for name, _ in page.elements}
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert "<script>alert(1)</script>" in page.text  # as text
    assert "<b>folder/r.npz" in page.text
    assert "<i>bad.npz" in page.text


def test_the_same_records_make_the_same_bytes(tmp_path):
    folder = keep(tmp_path / "runs", b=record("bn"), a=record(), c=record("bn", 1))
    report.write(folder, tmp_path / "one.html")
    other = tmp_path / "elsewhere"
    for file in sorted(folder.iterdir(), reverse=True):
        other.mkdir(exist_ok=True)
        shutil.copy(file, other)
    report.write(other, tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_damaged_records_are_named_and_the_others_are_shown(tmp_path):
    folder = keep(tmp_path / "runs", good=record(), cut=record("bn"))
    whole = (folder / "cut.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.npz").write_bytes(b"")
    keep(folder, range=record()._replace(prediction=torch.full((600,), 4)), none=record(images=0))
    result = tribe_report(folder, "-o", tmp_path / "report.html")
    assert result.exit_code == 1
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    for name in ("cut.npz", "empty.npz", "range.npz", "none.npz"):
        assert f"{name} is left out" in " ".join(result.stderr.split())
        assert name in page.text
    assert "its column prediction holds 4 to 4; expected 0 to 3" in page.text
    assert [row[0]["text"] for row in page.tables[0][2:]] == ["tribe"]


def test_files_of_other_kinds_are_passed_over(tmp_path):
    folder = keep(tmp_path / "runs", r=record())
    labels = [torch.arange(100) % 4]
    scenarios.save(folder / "schedule.npz", scenarios.create("iid", domains=("fog",)).schedule(labels, 0))
    (folder / "summary.json").write_text("{not json")
    result = succeeded(tribe_report(folder, "-o", tmp_path / "report.html", "--json"))
    assert json.loads(result.stdout) == {
        "report": str(tmp_path / "report.html"),
        "records": 1,
        "groups": ["cifar10-c, gli-f, imbalance 100, wrn"],
        "damaged": {},
        "repeated": {},
    }


def test_results_without_records_are_shown(tmp_path):
    """A folder of packs, as `tribe reproduce --keep` writes it."""
    runs = report.collect(ROOT / "results")
    played = [p for group in runs.groups for row in group.rows for p in row.played]
    assert not runs.damaged
    assert not runs.repeated
    found = [result for folder in ("results", "results/later") for result in store.finished(ROOT / folder)]
    assert len(played) == sum(len(result.streams) for result in found)
    folder = tmp_path / "some"
    folder.mkdir()
    lines = (ROOT / "results" / "mnist-c-cpu.jsonl").read_text()
    (folder / "mnist-c-cpu.jsonl").write_text(lines + "torn\n")
    page = page_of(folder)
    assert "No records were kept of" in page.text
    assert "Error per domain" in page.text
    assert "Error over time" not in page.text
    assert "mnist-c-cpu.jsonl" in page.text


def test_results_without_records_in_folders_are_shown_beside_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, stream = ComponentSpec("live-mnist-c", {"corruptions": ["impulse_noise"]}), ComponentSpec("gli-f")
    for method in ("source", "bn"):
        run_experiment(Experiment.of(data, "compact", stream, method), "runs")
    whole = report.collect("runs")
    (results("runs")["bn"].folder / "record-0.npz").unlink()
    page = page_of(tmp_path / "runs")
    (group,) = report.collect("runs").groups
    assert [len(row.records) for row in group.rows] == [1, 0]
    assert "No records were kept of bn:" in page.text
    before, after = ([row.score(groups.INSTANCE) for row in g.rows] for g in (whole.groups[0], group))
    assert before == after
    keep_results("runs", "runs/packed")
    assert {reason.partition(" ")[0] for _, reason in report.collect("runs").repeated} == {"predicts"}


def test_a_record_of_a_newer_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tribe.experiments.record.SCHEMA", 3)
    folder = keep(tmp_path / "runs", r=record())
    monkeypatch.undo()
    (damaged,) = report.collect(folder).damaged
    assert damaged[0] == "r.npz"
    assert "schema is 3; expected 2" in damaged[1]


@pytest.mark.parametrize(
    ("make", "out", "words"),
    [
        (lambda runs: None, "report.html", "no folder"),
        (lambda runs: runs.mkdir(), "report.html", "no record or result under"),
        (lambda runs: keep(runs, r=record()), "nowhere/report.html", "no folder"),
        (lambda runs: keep(runs, r=record()), "runs/r.npz", "a report ends in .html"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_lost(tmp_path, make, out, words):
    make(tmp_path / "runs")
    (tmp_path / "report.html").write_text("older")
    before = sorted(tmp_path.rglob("*"))
    result = tribe_report(tmp_path / "runs", "-o", tmp_path / out)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "report.html").read_text() == "older"
    if (tmp_path / "runs" / "r.npz").exists():
        tribe.Record.load(tmp_path / "runs" / "r.npz")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("domain_error", {}), ("class_counts", {}), ("instance_error", 1.5), ("instance_error", -1)),
        *(("images", 2**70), ("seconds_per_image", None)),
    ],
)
def test_a_result_whose_metrics_cannot_be_is_named_as_damaged_and_one_without_times_is_shown(tmp_path, place, value):
    line = json.loads((ROOT / "results/mnist-c-cpu.jsonl").read_bytes().splitlines()[0])
    line["metrics" if place in line["metrics"] else "environment"][place] = value
    (tmp_path / "mnist-c-cpu.jsonl").write_text(json.dumps(line) + "\n")
    runs = report.write(tmp_path, tmp_path / "page.html")
    assert ["damaged" in reason for _, reason in runs.damaged] == ([True] if value is not None else [])
    assert len(runs.groups) == (value is None)
