"""Turn docstring examples into code blocks of the reference (griffe extension, see mkdocs.yml)."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestFences(griffe.Extension):
    """Puts a fence around each run of lines that begins with a prompt."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Once all of a package is read."""
        _visit(pkg)


def _visit(part: griffe.Object) -> None:
    if part.docstring is not None:
        part.docstring.value = fenced(part.docstring.value)
    for member in part.members.values():
        if isinstance(member, griffe.Object):
            _visit(member)


def fenced(text: str) -> str:
    """The text with its doctests in fences; what stands in a fence already stays."""
    lines: list[str] = []
    inside = fence = False
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("```"):
            fence = not fence
        if not inside and not fence and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            if lines and lines[-1].strip():
                lines.append("")
            lines.append(f"{indent}```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append(f"{indent}```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1])
