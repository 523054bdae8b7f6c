"""Print the size and shape of a checkout: ``python scripts/shape.py [FOLDER]``.

Lines of code leave out blank lines, comments and docstrings. Long lines leave out rows of tables
and JSON in Markdown, which cannot be wrapped.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path


MAX_COLUMNS = 100
NOT_CODE = frozenset((
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
))  # fmt: skip


def code_lines(source: str) -> int:
    """Return the number of lines that hold code.

    >>> code_lines('"What it is."\\n\\n# why\\nx = [\\n    1\\n]\\n')
    3
    """
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            # a docstring of a module, a class, a function or an attribute
            used.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(used)


def constructors(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of each ``__init__`` with the name of its class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    yield (each.end_lineno or each.lineno) - each.lineno + 1, node.name


def long_lines(path: Path) -> int:
    """Return the number of lines over 100 columns that could be wrapped."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".md":
        lines = [line for line in lines if not line.lstrip().startswith(("|", '{"'))]
    return sum(len(line) > MAX_COLUMNS for line in lines)


def main() -> None:
    """Print one line for each measure."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    paths = sorted((root / "src").rglob("*.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths]
    sizes = [source.count("\n") for source in sources]
    longest, name = max(each for source in sources for each in constructors(source))
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    for suffix in (".py", ".md"):
        number = sum(long_lines(root / path) for path in tracked if path.endswith(suffix))
        print(f"lines over {MAX_COLUMNS} columns, {suffix}: {number:,}")
    print(f"source files: {len(paths)}")
    print(f"median lines of a source file: {statistics.median(sizes):g}")
    print(f"source files under 60 lines: {sum(size < 60 for size in sizes)}")
    print(f"lines: {sum(sizes):,}")
    print(f"lines of code: {sum(map(code_lines, sources)):,}")
    print(f"longest constructor: {name}, {longest} lines")


if __name__ == "__main__":
    main()
