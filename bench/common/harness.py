"""Shared tools of every benchmark: options, parts, medians, goals, tables, JSON, the data."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil


PACKAGES = ("thrifty", "torch", "numpy", "sqlalchemy", "optuna", "ray", "scikit-learn")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One figure that an issue sets a goal for."""

    name: str
    value: float
    goal: str
    holds: bool


Part = tuple[Any, list[Goal]]
"""Figures and goals of a part of a benchmark."""


def at_most(name: str, value: float, limit: float) -> Goal:
    return Goal(name=name, value=_rounded(value), goal=f"<= {limit:g}", holds=value <= limit)


def at_least(name: str, value: float, limit: float) -> Goal:
    return Goal(name=name, value=_rounded(value), goal=f">= {limit:g}", holds=value >= limit)


def equal(name: str, value: float, wanted: float) -> Goal:
    return Goal(name=name, value=value, goal=f"== {wanted:g}", holds=value == wanted)


def parser(description: str | None) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=description)
    out.add_argument(
        "--quick", action="store_true", help="a smoke run: small, its figures mean nothing"
    )
    out.add_argument(
        "--repeats", type=int, default=3, help="runs of each method; medians are reported"
    )
    return out


def run_parts(
    parts: Mapping[str, Callable[..., Part]], *args: Any, only: str | None, **options: Any
) -> tuple[dict[str, Any], list[Goal]]:
    """Run all parts, or ``only`` one; return their figures by name and the goals of all.

    The other arguments go to each part.
    """
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for name, part in parts.items():
        if only in {None, name}:
            print(f"\n## {name}\n", flush=True)
            figures[name], found = part(*args, **options)
            goals += found
    return figures, goals


def interleaved(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Return the median result of each contender.

    All run in turn, round after round, and the first ``warm_up`` rounds are not counted.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name, run in contenders.items():
            value = run()
            if number >= warm_up:
                found[name].append(value)
    return {name: median(values) for name, values in found.items()}


def median_ratio(
    ones: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], *, of: str
) -> float:
    """Return the median ratio of a figure of neighbouring runs, because both saw one machine."""
    return median(one[of] / other[of] for one, other in zip(ones, others, strict=True))


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a markdown table; the first row's keys are the columns."""
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(c[i]) for c in cells)) for i, name in enumerate(names)]
    for line in [names, ["-" * w for w in widths], *cells]:
        print("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |")


def finish(bench: str, figures: dict[str, Any], goals: Sequence[Goal]) -> None:
    """Print the goals for people, then everything in one line for machines."""
    print()
    for goal in goals:
        print(
            f"{'holds' if goal.holds else 'MISSED'}: {goal.name} = {goal.value} (goal {goal.goal})"
        )
    print()
    whole = {
        "bench": bench,
        "figures": figures,
        "versions": _versions(),
        "hardware": _hardware(),
        "goals": [asdict(goal) for goal in goals],
    }
    print(json.dumps(whole), flush=True)


def _rounded(value: float) -> float:
    """Round to four decimals, or to four digits if the value is too small for that."""
    return round(value, 4) if abs(value) >= 0.01 else float(f"{value:.4g}")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def _hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "measured": time.strftime("%Y-%m"),
    }


def data_folder() -> Path:
    """Return the folder that ``THRIFTY_DATA`` names, or ``shared/data`` beside the repository."""
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("THRIFTY_DATA", default))


def data_file(*parts: str) -> Path:
    """Return the path of a public data set's file or folder.

    Raises:
        SystemExit: It is not there.
    """
    path = data_folder().joinpath(*parts)
    if not path.exists():
        raise SystemExit(
            f"this part of the benchmark reads {'/'.join(parts)}, which is not in the data folder "
            f"{data_folder()}; set THRIFTY_DATA to a folder that has it"
        )
    return path
