"""The tables hold the numbers of the paper, and every cell is an experiment that can be built."""

import re

import pytest

from places import SHARED
from reproduction import tables
from reproduction.tables import released
from tribe import datasets, methods, models, scenarios

TEX = SHARED / "paper.tex"
TABLES = [tables.get(name) for name in tables.names()]
NUMBERED = [table for table in TABLES if table.kind == "table" and table.name != "protocols"]


def names(tables):
    return [table.name for table in tables]


def test_the_released_numbers_are_those_that_were_measured():
    path = TEX.with_name("REFERENCE.md")
    if not path.is_file():
        pytest.skip("REFERENCE.md does not lie beside the clone")
    measured, seen = released(), 0
    rows = [
        line.strip("|").split("|") for line in path.read_text().splitlines() if re.match(r"\| [A-Z]\w+[^|]*\|", line)
    ]
    for name, *cells in rows:
        found = [re.fullmatch(r"([\d.]+) / ([\d.]+), \**([\d.]+)\**", cell.strip()) for cell in cells]
        key = {"EATA (alpha 0, d .05)": "EATA (alpha 0)"}.get(name.strip(), name.strip().partition(" (")[0])
        for dataset, match in zip(("CIFAR10-C", "CIFAR100-C", "MNIST-C"), found, strict=False):
            if match is not None:
                errors = [measured.value(key, f"{dataset} {kind}") for kind in ("inst", "cat")]
                assert errors == [float(match[1]), float(match[2])], (key, dataset)
                seen += 1
    assert seen == sum(value is not None for row in measured.values for value in row[::2])


@pytest.fixture(scope="module")
def tex():
    if not TEX.is_file():
        pytest.skip("paper.tex does not lie beside the clone")
    text = TEX.read_text()
    return "\n".join(re.sub(r"(?<!\\)%.*", "", line) for line in text.splitlines())


def parse(tex, label):
    """Heading and body of the tabular with a label: rows of cells, without commands that only set type."""
    (found,) = [
        part
        for part in re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", tex, re.DOTALL)
        if rf"\label{{{label}}}" in part
    ]
    (body,) = re.findall(r"\\begin\{tabular\}\{[^}]*\}(.*?)\\end\{tabular\}", found, re.DOTALL)
    head, _, rest = body.partition(r"\midrule")
    return [[[_plain(cell) for cell in row.split("&")] for row in part.split(r"\\")] for part in (head, rest)]


def _plain(cell):
    cell = re.sub(
        r"\\dtplus\{[^}]*\}|~?\\cite\{[^}]*\}|\\(mid|top|bottom|cmid)rule(\[.*?\])?(\{.*?\})?|\\hline", "", cell
    )
    cell = re.sub(r"\\rowcolor\{\w+\}|\\multirow\{[^}]*\}\{\*\}|\\rotatebox\[[^]]*\]\{45\}", "", cell)
    cell = cell.replace(r"\method", "TRIBE").replace(r"\bf", "")
    return re.sub(r"\\(change|textbf|underline)|[{}]", "", cell).strip()


def numbers(cells):
    return [float(n) for cell in cells for n in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", cell)]


def words(cells):
    return [cell for cell in cells if cell and not numbers([cell])]


@pytest.mark.parametrize("table", NUMBERED, ids=names(NUMBERED))
def test_every_number_is_that_of_the_paper_at_its_place(tex, table):
    _, body = parse(tex, table.label)
    rows = [(words(row), numbers(row)) for row in body]
    rows = [(said, found) for said, found in rows if found]
    if table.name in ("cifar10", "cifar100", "mnist"):  # fixed above, varying below
        half = len(rows) // 2
        assert [said for said, _ in rows[:half]] == [said for said, _ in rows[half:]]
        rows = [(said, above + below) for (said, above), (_, below) in zip(rows[:half], rows[half:], strict=True)]
    if table.name == "gradual":  # methods across
        ((_, values),) = rows
        rows = [([method], [value]) for method, value in zip(parse(tex, table.label)[0][0][1:], values, strict=True)]
    assert [found for _, found in rows] == [list(row) for row in table.values]


# The paper names rows by what has no name of its own ("--"), or leaves the first cell to the row above.
@pytest.mark.parametrize("table", NUMBERED, ids=names(NUMBERED))
def test_rows_have_the_names_of_the_paper(tex, table):
    head, body = parse(tex, table.label)
    rows = [words(row) for row in body if numbers(row)] if table.name != "gradual" else [[m] for m in head[0][1:]]
    for said, key in zip(rows, table.row_keys, strict=False):
        own = [w.split(" (")[0].split("~")[0] for w in said if w not in ("--", r"\checkmark") and w[0].isalpha()]
        for word in own:
            if word in ("Inst. Avg.", "Cat. Avg."):
                assert key.endswith({"Inst. Avg.": "inst", "Cat. Avg.": "cat"}[word])
            elif table.name != "ablation" or word not in ("BN", "Robust BN", "Balanced BN"):
                assert word.lower() in key.lower()


@pytest.mark.parametrize("table", NUMBERED, ids=names(NUMBERED))
def test_columns_have_the_names_of_the_paper(tex, table):
    head = [cell for row in parse(tex, table.label)[0] for cell in row]
    domains = [column["key"] for column in table.columns if "domain" in column]
    assert [cell for cell in head if cell in domains] == domains
    if table.name in ("gamma", "h0", "lambda", "local-imbalance", "imbalance", "norms"):
        said = [float(n) for cell in head for n in re.findall(r"^\s*(\d+\.?\d*)\b", cell)]
        assert [float(key) for key in table.column_keys] == said
    if table.name == "eta":
        assert [cell.strip("$").replace(r" \times K_c", " K") for cell in head if "times" in cell] == table.column_keys
    if table.name in ("cifar10", "cifar100", "mnist"):
        factors = [n for cell in head for n in re.findall(r"I\.F\.=(\d+)", cell)]
        assert [f"F {n} inst" for n in factors] == table.column_keys[:8:2]


def test_every_table_and_every_figure_with_evidence_is_there(tex):
    labels = set(re.findall(r"\\label\{((?:tab|fig):[^}]*)\}", tex))
    drawings = {"fig:Setting", "fig:protocol", "fig:Method"}  # of ideas, not of numbers
    assert {table.label for table in TABLES} == labels - drawings


def test_the_chart_of_domains_is_the_table_of_the_supplement():
    chart, table = tables.get("domains"), tables.get("cifar10-fixed")
    for row in chart.row_keys:
        for column in chart.column_keys:
            assert chart.value(row, column) == table.value(f"100 {row}", column)


@pytest.mark.parametrize("table", TABLES, ids=names(TABLES))
def test_every_cell_is_an_experiment_that_can_be_made(table):
    assert len(set(table.row_keys)) == len(table.rows)
    assert len(set(table.column_keys)) == len(table.columns)
    for row in table.row_keys:
        for column in table.column_keys:
            cell = table.cell(row, column)
            if cell.mean_of:
                assert set(cell.mean_of) < set(table.column_keys)
                continue
            scenario = scenarios.create(cell.scenario, **cell.scenario_fields)
            if cell.dataset is not None:
                data = datasets.create(cell.dataset, **cell.dataset_fields)
                if cell.domain is not None:
                    assert cell.domain in {name.partition("@")[0] for name in data.domains}
                if cell.model in models.names():
                    models.architecture(cell.model)
                assert scenario.on(data.domains).domain_names
            if cell.method is not None:
                known = methods.get(cell.method).__dataclass_fields__
                assert set(cell.fields) <= set(known)
                assert methods.create(cell.method, classes=10).name == cell.method.partition("/")[0]


def test_cells_by_hand():
    cell = tables.get("cifar10").cell("TRIBE", "V 100 cat")
    assert (cell.dataset, cell.model, cell.method) == ("cifar10-c", "wrn28_10", "tribe")
    assert (cell.scenario, cell.scenario_fields) == ("gli-v", {"imbalance": 100})
    assert cell.metric == "category_error_absent_correct"
    assert tables.get("cifar10").cell("BN", "V 1 inst").scenario == "ptta"
    assert tables.get("cifar10").value("TRIBE", "V 100 cat") == 25.50
    cell = tables.get("local-imbalance").cell("ImageNet-C RoTTA", "0.01")
    assert (cell.dataset, cell.scenario, cell.scenario_fields) == ("imagenet-c", "ptta", {"sigma": 0.01})
    assert tables.get("tab:BN_gamma").cell("CIFAR100-C cat", "0.3").fields == {"gamma": 0.7}
    assert tables.get("gradual").cell("BN", "Avg.").dataset_fields == {"severities": [1, 2, 3, 4, 5]}
    assert tables.get("learning-rate").cell("TTAC x 0.01", "0.005").scale == {"lr": 0.01}
    assert tables.get("wall-clock").cell("BN", "seconds").unit == "s"


def test_what_is_not_in_the_paper():
    with pytest.raises(ValueError, match="cifar10"):
        tables.get("cifar11")
    with pytest.raises(ValueError, match="TRIBE"):
        tables.get("cifar10").value("TRIBES", "F 1 inst")
    with pytest.raises(ValueError, match="column"):
        tables.get("cifar10").cell("TRIBE", "F 2 inst")
