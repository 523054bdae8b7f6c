"""Each system's page has its parts, in order, and names existing commands and results."""

from __future__ import annotations

import re

import pytest

from ._pages import DOCS


ROOT = DOCS.parent
PAGES = sorted(page for page in (DOCS / "systems").glob("*.md") if page.stem != "index")
PARTS = [
    r"^## What the papers? says?$",
    r"^\*Read: ",
    r"^## What thrifty does$",
    r"^\*\*How to use it\*\*",
    r"^## What was measured here$",
    r"`python -m bench\.",
    r"^## What was not reached$",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_parts_in_order(page):
    text = page.read_text(encoding="utf-8")
    at = []
    for part in PARTS:
        found = re.search(part, text, re.MULTILINE)
        assert found, part
        at.append(found.start())
    assert at == sorted(at)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_have_a_command_and_a_section(page):
    text = page.read_text(encoding="utf-8")
    benchmarks = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for command in re.findall(r"python -m bench\.(\w+)", text):
        assert (ROOT / "bench" / f"{command}.py").exists()
    sections = re.findall(r"\(\.\./benchmarks\.md#(\w+)\)", text)
    assert sections
    for section in sections:
        assert f"## {section}\n" in benchmarks


def figures(text: str) -> list[str]:
    """Return all numbers of a text, without the commas between thousands."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", re.sub(r"(?<=\d),(?=\d{3})", "", text))


def cells(text: str) -> list[str]:
    """Return the cells of the measured part's tables, apart from heads and first columns."""
    part = text.partition("## What was measured here")[2].partition("## What was not")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    rules = [i for i, row in enumerate(rows) if set("".join(row)) <= set("-: ")]
    body = [row for i, row in enumerate(rows) if i not in rules and i + 1 not in rules]
    return [cell for row in body for cell in row[1:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_of_tables_are_those_of_the_results(page):
    """The figures of tables match the results, rounded as on the page.

    Figures that a paper reports of itself are there too, in the bench's own tables.
    """
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"benchmarks\.md#bench_(\w+)\)", text))
    files = [file for name in names for file in (ROOT / "bench" / "results").glob(f"{name}_*.md")]
    results = "\n".join(file.read_text(encoding="utf-8") for file in files)
    known = [float(value) for value in figures(re.sub(r"^\{.*$", "", results, flags=re.MULTILINE))]
    found = [value for cell in cells(text) for value in figures(cell)]
    assert len(found) >= 8
    for value in found:
        digits = len(value.partition(".")[2])
        same = (
            abs(each * scale - float(value)) <= 0.51 * 10**-digits
            for each in known
            for scale in (1, 100)
        )
        assert any(same), f"{page.name} says {value}, which is nowhere in the results"


def test_all_systems_are_listed():
    index = (DOCS / "systems" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", index)) == {page.name for page in PAGES}
    assert len(PAGES) == 8
