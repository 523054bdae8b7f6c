"""Filters of trials: those that a table shows, and those that may be the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Text, and_, cast, false, func, not_, or_

from thrifty.store import _schema as schema


_t = schema.trials


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """A filter of trials by state (none given: all), hyper-parameter text, and range of values.

    States are those of ``Study.trials``: a waiting trial is ``"done"`` if it has reached
    ``max_epochs``, else ``"paused"``.
    """

    states: Sequence[str] = ()
    max_epochs: int | None = None
    text: str = ""
    low: float | None = None
    high: float | None = None


def passes(study: int, which: TrialFilter) -> ColumnElement[bool]:
    """Return the SQL condition of a filter on the trials of a study."""
    parts = [_t.c.study == study]
    if which.states:
        parts.append(or_(*(_in_state(state, which.max_epochs) for state in which.states)))
    if which.text:
        # Escape the text as in the stored JSON, which escapes non-ASCII characters.
        text = json.dumps(which.text)[1:-1]
        parts.append(cast(_t.c.config, Text).icontains(text, autoescape=True))
    if which.low is not None:
        parts.append(_t.c.value >= which.low)
    if which.high is not None:
        parts.append(_t.c.value <= which.high)
    return and_(*parts)


def counting() -> ColumnElement[bool]:
    """Return the SQL condition of trials that may be the best: not failed, and feasible."""
    return and_(_t.c.state != "failed", func.coalesce(_t.c.violation, 0.0) == 0.0)


def _in_state(state: str, max_epochs: int | None) -> ColumnElement[bool]:
    if state not in ("done", "paused"):
        return _t.c.state == state
    farthest = false() if max_epochs is None else _t.c.reached >= max_epochs
    return and_(_t.c.state == "waiting", farthest if state == "done" else not_(farthest))
