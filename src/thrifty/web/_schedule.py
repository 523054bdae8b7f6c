"""Plot data of a configuration: each hyper-parameter over the epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thrifty.core import ThriftyError
from thrifty.space import Schedule, Timeline, config_from_json

from ._models import Line, finite


_MAX_POINTS = 240
_MAX_STEPS = 8


def lines(config: Mapping[str, Any], *, epochs: int) -> list[Line]:
    """Return a line per hyper-parameter of a JSON configuration, those that change first.

    >>> from thrifty.space import Step, config_to_json
    >>> found = lines(config_to_json({"width": 64, "lr": Step(0.5, [2], gamma=0.5)}), epochs=4)
    >>> [(line.name, line.text, line.moves, sorted(set(line.values))) for line in found]
    [('lr', 'Step(0.5, (2,), gamma=0.5)', True, [0.25, 0.5]), ('width', '64', False, [64.0])]
    """
    try:
        read = config_from_json(config)
        timeline = Timeline(read, epochs=max(epochs, 1))
        drawn = [_line(timeline, name, value) for name, value in read.items()]
    except (ThriftyError, TypeError, KeyError, ValueError):
        # This version does not know the kind: show the value as stored.
        drawn = [_still(name, value) for name, value in config.items()]
    return sorted(drawn, key=lambda line: not line.moves)


def _still(name: str, value: Any) -> Line:
    number = finite(value)
    return Line(
        name=name,
        text=str(value),
        kind="text" if number is None else "number",
        moves=False,
        epochs=[0.0],
        values=[str(value) if number is None else number],
    )


def _line(timeline: Timeline, name: str, value: Any) -> Line:
    if not isinstance(value, Schedule):
        return _still(name, value)
    steps = max(1, min(_MAX_STEPS, _MAX_POINTS // timeline.epochs))
    every = max(1, timeline.epochs // _MAX_POINTS)
    at: list[float] = []
    values: list[Any] = []
    for epoch in range(0, timeline.epochs, every):
        within = timeline.values(name, epoch, num_steps=steps)
        spread = within if isinstance(within, list) else [within] * steps
        at.extend(epoch + step / steps for step in range(steps))
        values.extend(spread)
    numeric = all(finite(v) is not None for v in values)
    shown = [finite(v) if numeric else str(v) for v in values]
    return Line(
        name=name,
        text=str(value),
        kind="number" if numeric else "text",
        moves=len(set(shown)) > 1,
        epochs=at,
        values=shown,
    )
