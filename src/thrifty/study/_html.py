"""HTML for notebooks: a list of facts and a table, without colours of their own.

The values come from the ``_repr_html_`` methods of ``Study``, ``Forecast``, ``Trials`` and
``TrialResult``. Every text is escaped and cut here.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from thrifty.core import plain_text


MAX_ROWS = 10
MAX_COLUMNS = 8
"""Hyper-parameters that a table of trials has a column for."""
MAX_VALUES = 20
"""Hyper-parameters that a list of facts names."""
MAX_CHARS = 400
"""Characters of a cell; the middle of a longer text is cut."""
_LEFT = ' style="text-align:left"'  # notebooks align cells to the right


def facts(
    title: str, rows: Iterable[tuple[str, object]], *, notes: Sequence[object] = ()
) -> str:
    """Return a table with a name and a value in each row.

    >>> facts("Trial 3", [("state", "<done>")]).count("&lt;done&gt;")
    1
    """
    body = "".join(
        f'<tr><th scope="row"{_LEFT}>{_escaped(name)}</th><td{_LEFT}>{_escaped(value)}</td></tr>'
        for name, value in rows
    )
    return _block(title, f"<tbody>{body}</tbody>", notes=notes)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    notes: Sequence[object] = (),
) -> str:
    """Return a table with a row of column names; show at most ``MAX_ROWS`` rows."""
    head = "".join(f'<th scope="col"{_LEFT}>{_escaped(name)}</th>' for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td{_LEFT}>{_escaped(value)}</td>' for value in row)}</tr>"
        for row in islice(rows, MAX_ROWS)
    )
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return _block(title, content, notes=notes)


def lines(title: str, texts: Iterable[object]) -> str:
    """Return a title with a list of texts."""
    items = "".join(f"<li>{_escaped(text)}</li>" for text in texts)
    return f"<div><strong>{_escaped(title)}</strong><ul>{items}</ul></div>"


def details(title: str, text: str) -> str:
    """Return a long text, with its newlines, behind a title that unfolds it."""
    content = html.escape(plain_text(text, lines=True, limit=25 * MAX_CHARS))
    return f"<details><summary>{_escaped(title)}</summary><pre>{content}</pre></details>"


def value_text(value: Any) -> str:
    """Return a metric or the value of a hyper-parameter as text.

    >>> value_text(0.123456789), value_text(None), value_text("adam")
    ('0.123457', '-', 'adam')
    """
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else plain_text(value)


def config_rows(
    config: Mapping[str, Any], *, source: str
) -> tuple[list[tuple[str, object]], list[str]]:
    """Return the facts of a configuration, and a note if it has more than ``MAX_VALUES``."""
    shown = [(name, value_text(value)) for name, value in islice(config.items(), MAX_VALUES)]
    num_left = len(config) - len(shown)
    notes = [f"… and {num_left:,} more hyper-parameters: {source}"] if num_left else []
    return [*shown], notes


def _block(title: str, content: str, *, notes: Sequence[object]) -> str:
    style = "text-align:left;color:inherit"
    caption = f'<caption style="{style}"><strong>{_escaped(title)}</strong></caption>'
    below = "".join(f"<p>{_escaped(note)}</p>" for note in notes)
    return f"<div><table>{caption}{content}</table>{below}</div>"


def _escaped(value: object) -> str:
    return html.escape(plain_text(value, limit=MAX_CHARS))
