"""A page for each method, made while the site is built: idea, equations, departures, numbers, links and source."""

import csv
import functools
import inspect
import re
import sys
import textwrap

import tribe
from website.methods import ROOT, later_errors, paths

EQUATIONS = ROOT / "website/equations.md"
ARXIV = {
    "bdn": "2407.20080",
    "bn": "2006.16971",
    "cotta": "2203.13591",
    "delta": "2301.13018",
    "deyo": "2403.07366",
    "eata": "2204.02610",
    "lame": "2201.05718",
    "note": "2208.05117",
    "petal": "2212.09713",
    "petta": "2311.18193",
    "roid": "2306.00650",
    "rotta": "2303.13899",
    "sar": "2302.12400",
    "selftrain": "2309.14949",
    "snap": "2511.15276",
    "sotta": "2310.10074",
    "tent": "2006.10726",
    "tribe": "2309.14949",
    "ttac": "2206.02721",
}
LINKS = {name: f"https://arxiv.org/abs/{number}" for name, number in ARXIV.items()}
LINKS |= {"cmf": "https://openreview.net/forum?id=BllUWdpIOA", "bank": "../budget.md", "bank-tribe": "../budget.md"}
TABLES = {"cifar10": "CIFAR10-C", "cifar100": "CIFAR100-C", "mnist": "MNIST-C"}
ROWS = {"TEST": "source"}  # of these tables; others have the name of the method
ERRORS = """## Errors

Instance errors in percent on the streams of the paper ([Reproduction](../reproduction.md)), with its own in brackets.
F and V: the distribution of classes is fixed or varies, with this imbalance.

"""
LATER = "{} on two other streams ([Methods](../methods.md#methods-later-than-the-paper)), in percent: {}.\n\n"


def pages() -> dict[str, str]:
    """Return all pages, by their place on the site."""
    return {f"methods/{name}.md": page(name) for name in tribe.methods.names()}


def page(name: str) -> str:
    """Return the page of a method, in Markdown."""
    cls, path = tribe.methods.get(name), paths()[name]
    code = (ROOT / path).read_text()
    idea, steps, settings = texts(name)
    paper = re.sub("^none: .|^t", lambda match: match[0][-1].upper(), cls.paper)
    link = f"[{'Paper' if 'http' in LINKS[name] else 'More'}]({LINKS[name]}) · " if name in LINKS else ""
    api = f"[API reference](../reference/methods.md#{cls.__module__}.{cls.__qualname__})"
    parts = [
        f"---\ntitle: 'Method: {name}'\n---\n# `{name}`\n\n**{idea}**",
        f"{paper}.\n{link}{api} · [source](#source)",
    ]
    if name in equations():
        parts += [f"## Equations\n\n{equations()[name]}", f'<small markdown="1">{notation()}</small>']
    parts += [f"## Step by step\n\n{steps}"] if steps else []
    parts += [f"## Cost\n\n{facts(name)}", errors(name)]
    if notes := notes_in(code):
        parts.append("## Departures\n\n" + "".join(f"- {note[0].upper()}{note[1:]}\n" for note in notes))
    presets = "".join(f"- preset `{preset}`: {text}\n" for preset, text in presets_of(name).items() if text)
    parts += [f"## Settings\n\n{settings}\n\n{presets}"] if settings or presets else []
    source = textwrap.indent(f"```python\n{code}```", "    ")
    parts.append(f'## Source {{ data-search-exclude }}\n\n??? quote "{path}"\n\n{source}')
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def texts(name: str) -> tuple[str, str, str]:
    """Return the first sentence of a method's file, what follows it, and what its class says of settings.

    In a file with several methods, the first sentence is that of the class.
    """
    cls = tribe.methods.get(name)
    of_class = (inspect.getdoc(cls) or "").replace("``", "`")
    first, _, rest = of_class.partition("\n")
    rest = re.sub(r"(?ms)^NOTE: .*?(?=\n\n|\Z)", "", rest).strip()
    if list(paths().values()).count(paths()[name]) > 1:
        return first, listed(rest), ""
    idea, _, steps = (inspect.getdoc(sys.modules[cls.__module__]) or "").replace("``", "`").partition("\n")
    return idea, listed(steps.strip("\n")), rest


def listed(text: str) -> str:
    """Return a docstring with its blocks of names and what they mean as lists; other blocks stay code.

    >>> listed("Per batch:\\n\\n    predict    the teacher\\n    learn      one step\\n               of Adam")
    'Per batch:\\n\\n- **predict** the teacher\\n- **learn** one step of Adam'
    """

    def block(match: re.Match[str]) -> str:
        joined = re.sub(r"\n {5,}", " ", match[0])
        items = [re.fullmatch(r" {4}([\w-]+(?: \w+)*) {2,}((?:\S| (?! {3}))+)", line) for line in joined.split("\n")]
        if not all(items):
            return match[0]
        rows = (f"- **{item[1]}** {item[2]}" for item in items if item)
        return "\n".join(row.replace(" -> ", " → ").replace(" <- ", " ← ") for row in rows)

    return re.sub(r"(?m)^ {4}\S.*(?:\n {4}.*)*", block, re.sub(r" {2,}(->|\()", r" \1", text))


def facts(name: str) -> str:
    """Return the row of docs/methods.md about a method, as a table of two columns."""
    lines = (ROOT / "docs/methods.md").read_text().splitlines()
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| "))
    row = next((row for row in rows if f"[`{name}`]" in row[0]), None)
    if row is None:
        return "Not measured yet: `make pages` does it.\n"
    titles = [title if title.islower() else f"state: {title}" for title in head[2:]]
    titles = [f"passes {title}" if title in ("forward", "backward") else title for title in titles]
    return f"| | `{name}` |\n|---|---|\n" + "".join(
        f"| {title} | {cell} |\n" for title, cell in zip(titles, row[2:], strict=True)
    )


def errors(name: str) -> str:
    """Return the errors of a method in the committed results; an empty text if there are none."""
    found: dict[tuple[str, str], str] = {}
    for table in TABLES:
        with (ROOT / f"docs/reproduction/{table}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                method = ROWS.get(row["row"], row["row"].removesuffix(" †").lower())
                if method == name and row["column"].endswith(" inst") and row["ours"] and "live" not in row["dataset"]:
                    spread = f" ± {float(row['deviation']):.2f}" if row["deviation"] else ""
                    paper = f" ({float(row['paper']):.2f})" if row["paper"] else ""
                    found[table, row["column"].removesuffix(" inst")] = f"{float(row['ours']):.2f}{spread}{paper}"
    text = ""
    if found:
        tables = [table for table in TABLES if any(key[0] == table for key in found)]
        columns = list(dict.fromkeys(column for _, column in found))
        text = ERRORS + f"| | {' | '.join(TABLES[table] for table in tables)} |\n|{'---|' * (len(tables) + 1)}\n"
        cells = ([found.get((table, column), "–") for table in tables] for column in columns)
        text += "".join(f"| {column} | {' | '.join(row)} |\n" for column, row in zip(columns, cells, strict=True))
    later = [f"{title} {error}" for (title, method), error in later_errors().items() if method == name]
    if later:
        text += ("\n" if text else "## Errors\n\n") + LATER.format(
            "Also" if text else "Instance errors", "; ".join(later)
        )
    return text


def notes_in(source: str) -> list[str]:
    """Return the texts after NOTE: in comments, and in docstrings up to the end of the paragraph.

    >>> notes_in("x = 1  # NOTE: of one line\\ny = 2\\n# NOTE: of\\n# two\\n# lines\\nz = 3")
    ['of one line', 'of two lines']
    """
    comment, docstring = r"# NOTE: (.+(?:\n *# (?!NOTE: ).+)*)", r"^ +NOTE: (.+(?:\n +[^\s#\"].*)*)"
    texts = (one or other for one, other in re.findall(f"(?m){comment}|{docstring}", source))
    return [re.sub(r"\n *(?:# )?", " ", text).replace("``", "`") for text in texts]


def presets_of(name: str) -> dict[str, str]:
    """Return the fields of each preset, besides the number of classes."""
    presets = tribe.methods.get(name).presets.items()
    return {p: ", ".join(f"`{f}={v!r}`" for f, v in fields.items() if f != "classes") for p, fields in presets}


@functools.cache
def equations() -> dict[str, str]:
    """Return the sections of equations.md, by method; TRIBE's equations are those of how-it-works.md."""
    explained = re.findall(r"(?m)^\$\$ .* \$\$$", (ROOT / "docs/how-it-works.md").read_text())
    text = EQUATIONS.read_text().replace("<!-- equations of how-it-works.md -->", "\n\n".join(explained))
    return {name: rest.strip() for name, _, rest in (part.partition("\n") for part in text.split("\n## ")[1:])}


def notation() -> str:
    """Return the paragraph of equations.md that all pages share."""
    return EQUATIONS.read_text().split("\n\n")[2].replace("\n", " ")
