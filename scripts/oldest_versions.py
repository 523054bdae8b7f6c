"""Print ``constraints-oldest.txt``: the lower bounds of ``pyproject.toml`` as exact versions.

python scripts/oldest_versions.py > constraints-oldest.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


HEAD = "# The oldest supported versions. Do not edit: scripts/oldest_versions.py makes this file."
ROOT = Path(__file__).resolve().parents[1]


def oldest(project: dict[str, list[str]]) -> str:
    """Return one line for each package with a lower bound, sorted by name.

    Where several extras bound one package, the highest bound counts, so that the extras can be
    installed together.

    Args:
        project: Requirements by group, such as the extras of ``pyproject.toml``.
    """
    found: dict[str, str] = {}
    for requirement in (each for group in project.values() for each in group):
        parts = re.match(r"([\w.-]+)(?:\[[\w,]+\])?\s*>=\s*([\d.]+)", requirement)
        if parts is not None:
            name, version = parts.groups()
            found[name] = max(found.get(name, "0"), version, key=_numbers)
    lines = [f"{name}=={found[name]}" for name in sorted(found, key=str.lower)]
    return "\n".join([HEAD, *lines, ""])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def page() -> str:
    """Return the text of the file for this repository's ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return oldest({"": project["dependencies"], **project["optional-dependencies"]})


if __name__ == "__main__":
    sys.stdout.write(page())
