"""Runner for the code blocks of a page, one after the other, as a reader would type them."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from thrifty.cli import main


DOCS = Path(__file__).parents[2] / "docs"
SHOWN = frozenset({"", "text", "toml", "yaml"})
"""Languages of blocks that are only shown."""
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, its title, and where it begins."""

    language: str
    title: str
    text: str
    line: int
    not_run: bool


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page.

    ``<!-- not run: why -->`` above a block says that it cannot run here.
    """
    out = []
    found = re.finditer(
        r"(?P<skip><!-- not run: [^>]+ -->\n+)?^(?P<in> *)```(?P<lang>\w*)(?P<rest>[^\n`]*)\n"
        r"(?P<text>.*?)^(?P=in)```$",
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    for match in found:
        title = re.search(r'title="([^"]*)"', match["rest"])
        out.append(
            Block(
                language=match["lang"],
                title=title[1] if title else "",
                text=textwrap.dedent(match["text"]),
                line=page.count("\n", 0, match.start("lang")) + 1,
                not_run=match["skip"] is not None,
            )
        )
    return out


class Reader:
    """A reader who types what a page shows: writes files, and runs sessions and commands.

    The output is compared with the page. All of a page's Python shares one namespace, and
    everything runs in ``folder``.
    """

    def __init__(self, folder: Path, *, page: str) -> None:
        self._folder = folder
        self._page = page
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.num_run = 0

    def read(self, block: Block) -> None:
        """Run one block."""
        if block.not_run or block.language in SHOWN:
            return
        self.num_run += 1
        if block.language == "console":
            self._type(block)
        elif block.language != "python":
            raise AssertionError(f"{self._where(block)}: no test can run {block.language!r}")
        elif block.title.endswith(".py"):
            (self._folder / block.title).write_text(block.text, encoding="utf-8")
        elif ">>> " in block.text:
            self._session(block)
        else:
            lines = "\n" * block.line + block.text
            exec(compile(lines, self._page, "exec"), self.names)

    def _where(self, block: Block) -> str:
        return f"{self._page}, line {block.line}"

    def _session(self, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(
            block.text, {}, self._where(block), self._page, block.line
        )
        test.globs = self.names
        said: list[str] = []
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        result = runner.run(test, out=said.append, clear_globs=False)
        assert result.attempted, f"{self._where(block)}: no examples found"
        assert not result.failed, "".join(said)

    def _type(self, block: Block) -> None:
        for command, wanted in commands(block.text):
            got = self._shell(command)
            same = doctest.OutputChecker().check_output(f"{wanted}\n", f"{got}\n", FLAGS)
            assert same or not wanted, (
                f"{self._where(block)}: $ {command}\nwanted:\n{wanted}\ngot:\n{got}"
            )

    def _shell(self, command: str) -> str:
        program, *words = shlex.split(command)
        assert program == "thrifty", f"no test can run {program!r}"
        said = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["thrifty", *words]),
            mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}),
            contextlib.chdir(self._folder),
            contextlib.redirect_stdout(said),
        ):
            try:
                main()
            except SystemExit as leaving:
                if leaving.code:
                    raise AssertionError(f"$ {command}\n{said.getvalue()}") from None
        return said.getvalue()


def commands(text: str) -> list[tuple[str, str]]:
    """Return each command of a console block and its expected output (empty: any)."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), f"a console block begins with a command, not with {parts[0]!r}"
    return [(command, out.strip()) for command, _, out in (p.partition("\n") for p in parts[1:])]
