"""The reader of pages finds every block and reports every error."""

from __future__ import annotations

import re

import pytest

from ._pages import DOCS, Reader, blocks, commands


PAGE = """
# A page

```python title="here.py"
VALUE = 1
```

<!-- not run: it would not end -->
```console
$ thrifty dashboard
```

    ```python
    >>> import here
    >>> here.VALUE + 1
    2
    ```
"""


def test_blocks_in_order_with_titles_and_lines():
    found = blocks(PAGE)
    assert [b.language for b in found] == ["python", "console", "python"]
    assert [b.title for b in found] == ["here.py", "", ""]
    assert [b.not_run for b in found] == [False, True, False]
    assert found[2].text.startswith(">>> import here\n")
    assert PAGE.splitlines()[found[1].line - 1] == "```console"


def test_a_page_is_read_in_order(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    reader = Reader(tmp_path, page="page.md")
    for block in blocks(PAGE):
        reader.read(block)
    assert reader.num_run == 2
    assert reader.names["here"].VALUE == 1


@pytest.mark.parametrize(
    "text",
    [
        "```python\n>>> 1 + 1\n3\n```",
        "```python\nassert False\n```",
        "```python\n# >>> 1 + 1\n```",
        "```ruby\nputs 1\n```",
        "```console\n$ thrifty --version\nthrifty, version 1900\n```",
        "```console\n$ thrifty no-such-command\n```",
    ],
)
def test_what_is_wrong_is_found(tmp_path, text):
    (block,) = blocks(text)
    with pytest.raises((AssertionError, KeyError)):
        Reader(tmp_path, page="page.md").read(block)


def test_commands_and_what_they_print():
    assert commands("$ thrifty a\none\n\ntwo\n$ thrifty b\n") == [
        ("thrifty a", "one\n\ntwo"),
        ("thrifty b", ""),
    ]
    with pytest.raises(AssertionError, match="begins with a command"):
        commands("thrifty a\n")


def test_sessions_can_be_pasted_into_a_terminal():
    """There, an empty line ends a class or a function."""
    ended = re.compile(r"^ *\.\.\.\n *\.\.\. +\S.*", re.MULTILINE)
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    assert len(pages) > 20
    assert [
        (page.name, match[0]) for page in pages for match in ended.finditer(page.read_text())
    ] == []
