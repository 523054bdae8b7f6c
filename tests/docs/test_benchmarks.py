"""The page of benchmarks says what the results say."""

from __future__ import annotations

import re
import runpy

import pytest

from ._pages import DOCS


SCRIPT = runpy.run_path(str(DOCS.parent / "scripts" / "benchmarks_page.py"))
RESULTS = sorted((DOCS.parent / "bench" / "results").glob("*.md"))
parsed, purposes, page = SCRIPT["parsed"], SCRIPT["purposes"], SCRIPT["page"]

TEXT = """\
# bench_speed, 2 CPU cores, November 2026

`python -m bench.bench_speed` (twice). It is
fast.
- **One**: point
  that goes on.

## first run

PyG: none
| a  | b |
| -- | - |
| 1  | 2 |
| c  | d |
| -- | - |
| 3  | 4 |
floor: 3 ms

holds: a | b = 2 (goal >= 1)
- MISSED: c = 0.5 (goal <= 0.4)

```json
{"bench": "speed",
 "goals": []}
```

## speed

holds: a | b = 3 (goal >= 1)

{"bench": "speed"}
"""


def test_a_file_is_taken_apart():
    found = parsed(TEXT)
    assert found.name == "bench_speed"
    assert found.setting == "2 CPU cores, November 2026"
    assert found.command == "python -m bench.bench_speed"
    assert found.words.startswith(
        "`python -m bench.bench_speed` (twice). It is\nfast.\n\n- **One**"
    )
    assert "{" not in found.words + found.tables
    assert [(g.part, g.name, g.value, g.goal, g.holds) for g in found.goals] == [
        ("first run", "a | b", "2", ">= 1", True),
        ("first run", "c", "0.5", "<= 0.4", False),
        ("speed", "a | b", "3", ">= 1", True),
    ]


def test_tables_stand_by_themselves():
    tables = parsed(TEXT).tables
    assert "PyG: none\n\n| a  | b |\n| -- | - |\n| 1  | 2 |\n\n| c  | d |" in tables
    assert "| 3  | 4 |\n\nfloor: 3 ms" in tables
    assert "**speed**" in tables


def test_the_page_says_what_was_missed(tmp_path):
    (tmp_path / "speed.md").write_text(TEXT)
    readme = tmp_path / "README"
    readme.write_text("| `bench_speed` | how fast it is |\n")
    made = page(tmp_path, readme)
    assert "| [`bench_speed`](#bench_speed) | 2 CPU cores | How fast it is | 2 | 1 |" in made
    assert '!!! warning "2 of 3 goals held"' in made
    assert "- (first run) c = **0.5**, goal <= 0.4" in made
    assert "| (first run) a \\| b | 2 | >= 1 | held |" in made
    assert "| a \\| b | 3 | >= 1 | held |" in made


def test_purposes_are_the_rows_of_the_table_of_benches():
    readme = "| `python -m bench.` | measures |\n|---|---|\n| `bench_a` | what it is |\n"
    other = "| path | holds |\n|---|---|\n| `bench_<thing>.py` | the command |\n"
    assert purposes(readme + other) == {"bench_a": "What it is"}


def test_a_run_on_a_gpu_has_a_heading_of_its_own():
    found = parsed(TEXT.replace("2 CPU cores", "NVIDIA H200"))
    assert found.machine == "NVIDIA H200"
    assert found.heading == "bench_speed, H200"
    assert found.anchor == "bench_speed-h200"
    assert parsed(TEXT).heading == parsed(TEXT).anchor == "bench_speed"


def test_each_bench_of_the_page_says_where_and_what_it_measures():
    made = page()
    rows = [line.strip("| ").split("|") for line in re.findall(r"^\| \[`.+$", made, re.MULTILINE)]
    assert len(rows) == len(RESULTS)
    assert [row for row in rows if len(row) != 5 or not all(map(str.strip, row))] == []


def test_no_heading_of_the_page_repeats_and_each_link_has_one():
    made = page()
    headings = re.findall(r"^## (.+)$", made, re.MULTILINE)
    assert len(set(headings)) == len(headings) == len(RESULTS)
    # as mkdocs and GitHub make them
    anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings]
    assert re.findall(r"^\| \[`.+?`\]\(#(.+?)\)", made, re.MULTILINE) == anchors


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_no_goal_of_a_file_is_overlooked(file):
    text = file.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:- )?(?:holds|MISSED): ", text, flags=re.MULTILINE)
    found = parsed(text)
    assert len(found.goals) == len(lines)
    assert len(found.missed) == len(re.findall(r"^(?:- )?MISSED: ", text, flags=re.MULTILINE))
    assert found.words
    assert '{"bench"' not in found.tables


def test_the_page_is_what_the_generator_makes():
    committed = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert committed == page(), "run: python scripts/benchmarks_page.py"
