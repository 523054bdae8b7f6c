"""Writes docs/benchmarks.md from bench/results: ``python scripts/benchmarks_page.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
---
hide: [toc]
---

<!-- Made by scripts/benchmarks_page.py from bench/results.
Do not edit: run `python scripts/benchmarks_page.py`. -->

# Benchmarks

All measurements, each with the command that repeats it.
Run the commands in the checkout, with the extra `bench`:
`pip install -c constraints.txt -e '.[bench]'`.
Each bench has *goals*, which were set before it ran; missed goals are listed like the others.
Where a bench ran several times, all runs count.
Compare ratios rather than seconds: machines are noisy.
"""
GOAL = re.compile(
    r"^(?:- )?(?P<verdict>holds|MISSED): (?P<name>.+) = (?P<value>\S+) \(goal (?P<goal>.+)\)$"
)
ROW = re.compile(r"^\|.*\|$")
RULE = re.compile(r"^\|[ :|-]+\|$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure that was to be reached, and the part of the bench that it belongs to."""

    part: str
    name: str
    value: str
    goal: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one file of results says: words first, then tables."""

    name: str
    setting: str
    command: str
    words: str
    tables: str
    goals: tuple[Goal, ...]

    @property
    def missed(self) -> list[Goal]:
        """The goals that do not hold."""
        return [goal for goal in self.goals if not goal.holds]

    @property
    def machine(self) -> str:
        """The machine that the bench ran on."""
        return self.setting.partition(", ")[0]

    @property
    def heading(self) -> str:
        """The heading of this result: a bench that also ran on a GPU has one for each machine."""
        maker, _, model = self.machine.partition(" ")
        return f"{self.name}, {model}" if maker == "NVIDIA" else self.name

    @property
    def anchor(self) -> str:
        """The anchor that mkdocs and GitHub both give to the heading."""
        return self.heading.lower().replace(",", "").replace(" ", "-")


def page(
    results: Path = ROOT / "bench" / "results", readme: Path = ROOT / "bench" / "README.md"
) -> str:
    """The page for a folder of results."""
    what = purposes(readme.read_text(encoding="utf-8"))
    found = [parsed(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*.md"))]
    parts = [HEAD, *_overview(found, what), *(_section(result, what) for result in found)]
    return "\n".join(parts).rstrip() + "\n"


def purposes(readme: str) -> dict[str, str]:
    """What each bench measures, by its name: the rows of the table of benches."""
    found = re.findall(r"^\| `(bench_\w+)` \| (.+) \|$", readme, flags=re.MULTILINE)
    return {name: words[:1].upper() + words[1:] for name, words in found}


def parsed(text: str) -> Result:
    """A file of results, taken apart."""
    title, *lines = _without_json(text).splitlines()
    name, _, setting = title.removeprefix("# ").partition(", ")
    command = re.search(r"`(python -m bench\.[^`]+)`", text)
    begin = next((i for i, line in enumerate(lines) if _is_figure(line)), len(lines))
    return Result(
        name=name,
        setting=setting,
        command=command[1] if command else f"python -m bench.{name}",
        words=_spaced(lines[:begin]),
        tables=_spaced([line for line in lines[begin:] if not GOAL.match(line)]),
        goals=tuple(_goals(lines)),
    )


def _is_figure(line: str) -> bool:
    return bool(line.startswith("## ") or ROW.match(line) or GOAL.match(line))


def _without_json(text: str) -> str:
    text = re.sub(r"^```(?:json)?\n\{.*?^```\n?", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^\{.*\}\n?", "", text, flags=re.MULTILINE)


def _goals(lines: list[str]) -> list[Goal]:
    part, out = "", []
    for line in lines:
        if line.startswith("## "):
            part = line.removeprefix("## ")
        elif match := GOAL.match(line):
            out.append(
                Goal(
                    part=part,
                    name=match["name"],
                    value=match["value"],
                    goal=match["goal"],
                    holds=match["verdict"] == "holds",
                )
            )
    return out


def _spaced(lines: list[str]) -> str:
    """Add blank lines around tables and before lists, and turn headings into bold lines."""
    out: list[str] = []
    for i, line in enumerate(lines):
        before = out[-1] if out else ""
        row, after_row = bool(ROW.match(line)), bool(ROW.match(before))
        head = row and i + 1 < len(lines) and bool(RULE.match(lines[i + 1]))
        bullet = line.startswith("- ") and not before.startswith(("- ", "  "))
        said = bool(line.strip()) and not line.startswith((" ", "- ")) and not row
        # lines of a program's output are lines; wrapped prose goes on
        apart = head or row != after_row or bullet or (said and _is_output(before))
        if before.strip() and apart:
            out.append("")
        out.append(re.sub(r"^#+ (.+)$", r"**\1**", line).rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _is_output(line: str) -> bool:
    return len(line) < 100 and re.match(r"^[\w ,.()'/+-]+: ", line) is not None


def _overview(found: list[Result], what: dict[str, str]) -> list[str]:
    rows = [
        f"| [`{r.name}`](#{r.anchor}) | {r.machine} | {what.get(r.name, '')} "
        f"| {len(r.goals) - len(r.missed)} | {len(r.missed)} |"
        for r in found
    ]
    head = ["| bench | machine | measures | goals held | missed |", "|---|---|---|---:|---:|"]
    return [*head, *rows, ""]


def _section(result: Result, what: dict[str, str]) -> str:
    purpose = f"{what[result.name]}.\n" if result.name in what else ""
    parts = [f"## {result.heading}\n", purpose, f"```\n{result.command}\n```\n"]
    parts.append(f"*{result.setting}*\n")
    parts += [result.words + "\n", _verdicts(result)]
    if result.tables:
        tables = "\n".join(f"    {line}".rstrip() for line in result.tables.splitlines())
        parts.append(f'??? note "All tables of {result.heading}"\n\n{tables}\n')
    return "\n".join(part for part in parts if part)


def _verdicts(result: Result) -> str:
    if not result.goals:
        return ""
    missed = [f"- {_where(g)}{g.name} = **{g.value}**, goal {g.goal}" for g in result.missed]
    held = len(result.goals) - len(missed)
    title = f"{held} of {len(result.goals)} goals held"
    if missed:
        body = "\n".join(f"    {line}" for line in ["Missed:", "", *missed])
        first = f'!!! warning "{title}"\n\n{body}\n'
    else:
        first = f'!!! success "{title}"\n\n    None was missed.\n'
    rows = [
        f"    | {_cell(_where(g) + g.name)} | {g.value} | {_cell(g.goal)} "
        f"| {'held' if g.holds else '**missed**'} |"
        for g in result.goals
    ]
    table = "\n".join(["    | goal | measured | required | |", "    |---|---:|---|---|", *rows])
    return f'{first}\n??? note "All goals of {result.heading}"\n\n{table}\n'


def _where(goal: Goal) -> str:
    """Return the run of a goal. Goals are printed when a run ends, so a part of a run has none."""
    is_run = re.search(r"\brun\b|`python", goal.part)
    return f"({goal.part.partition(' (`')[0]}) " if is_run else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs" / "benchmarks.md").write_text(page(), encoding="utf-8")
