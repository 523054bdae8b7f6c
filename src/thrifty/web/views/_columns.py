"""Configurations as columns of numbers and categories, with schedules split into their fields."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from thrifty.core import ThriftyError
from thrifty.space import config_from_json

from ._models import finite


Scalar = float | int | str | bool | None
_MAX_LABELS = 24
_MAX_TICKS = 12
_LOG_FROM = 50.0
"""Ratio of largest to smallest from which positive numbers get a logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One coordinate of the configurations.

    ``values`` are numbers or indices into ``labels``; None where a trial does not have the
    coordinate. ``ticks`` are the distinct numbers if there are few of them, such as the options of
    a ``Choice``.
    """

    name: str
    labels: tuple[str, ...]
    log: bool
    values: tuple[float | None, ...]
    ticks: tuple[float, ...] = ()


def flatten(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return a JSON configuration as named scalars.

    >>> from thrifty.space import Cosine, config_to_json
    >>> flatten(config_to_json({"lr": Cosine(0.1), "width": 64}))["lr"]
    'Cosine'
    """
    out: dict[str, Scalar] = {}
    for name, value in config.items():
        _put(name, value, out)
    return out


def columns(configs: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the coordinates in which configurations differ, in order of first appearance.

    A part of a schedule that is equal in all schedules of a kind adds nothing to the kind, so it is
    left out.

    >>> [(c.name, c.labels, c.values) for c in columns([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}])]
    [('b', ('x', 'y'), (0.0, 1.0))]
    """
    flat = [flatten(config) for config in configs]
    names = list(dict.fromkeys(name for each in flat for name in each))
    out = []
    for name in names:
        values = [each.get(name) for each in flat]
        if len(set(map(repr, values))) > 1 and not _follows(name, values, flat):
            out.append(_column(name, values))
    return out


def _follows(name: str, values: Sequence[Scalar], flat: Sequence[Mapping[str, Scalar]]) -> bool:
    """Return whether a column has one value, present or missing depending only on the schedule."""
    if len({repr(value) for value in values if value is not None}) > 1 or "." not in name:
        return False
    kinds = [each.get(name.rpartition(".")[0]) for each in flat]
    both = {(repr(kind), value is None) for kind, value in zip(kinds, values, strict=True)}
    return len(both) == len(set(map(repr, kinds)))


def texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return hyper-parameters in readable form; unreadable ones as they are in the JSON.

    >>> texts({"lr": 0.1, "layers": [1, 2]})
    {'lr': '0.1', 'layers': '(1, 2)'}
    """
    try:
        return {name: _text(value) for name, value in config_from_json(config).items()}
    except (ThriftyError, TypeError, KeyError, ValueError):
        return {name: str(value) for name, value in config.items()}


def _text(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _put(name: str, value: Any, out: dict[str, Scalar]) -> None:
    if isinstance(value, Mapping) and "schedule" in value:
        out[name] = str(value["schedule"])
        for field, part in dict(value.get("fields", {})).items():
            _put(f"{name}.{field}", part, out)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _put(f"{name}[{index}]", item, out)
    elif value is not None:
        out[name] = value if isinstance(value, bool | int | float) else str(value)


def _column(name: str, values: Sequence[Scalar]) -> Column:
    present = [value for value in values if value is not None]
    numbers = [finite(value) for value in present]
    if all(number is not None for number in numbers):
        given = tuple(finite(value) for value in values)
        ticks = _ticks([n for n in given if n is not None])
        low, high = (min(n for n in given if n is not None), max(n for n in given if n is not None))
        log = low > 0 and (high / low >= _LOG_FROM or _is_geometric(ticks))
        return Column(name=name, labels=(), log=log, values=given, ticks=ticks)
    # Keep the most frequent labels, and combine the others.
    often = Counter(map(str, present)).most_common()
    labels = [label for label, _ in often[:_MAX_LABELS]]
    if len(often) > _MAX_LABELS:
        labels[-1] = "(others)"
    numeric = {str(v): n for v, n in zip(present, numbers, strict=True) if n is not None}
    labels.sort(key=lambda label: (label not in numeric, numeric.get(label, 0.0)))
    place = {label: float(index) for index, label in enumerate(labels)}
    rest = float(len(labels) - 1)
    return Column(
        name=name,
        labels=tuple(labels),
        log=False,
        values=tuple(None if v is None else place.get(str(v), rest) for v in values),
    )


def _ticks(numbers: Sequence[float]) -> tuple[float, ...]:
    """Return the distinct numbers if they are few and each occurs about twice or more."""
    distinct = sorted(set(numbers))
    few = len(distinct) <= min(_MAX_TICKS, len(numbers) / 2)
    return tuple(distinct) if few else ()


def _is_geometric(ticks: Sequence[float]) -> bool:
    """Return whether positive numbers are spaced more evenly by ratios than by differences."""
    if len(ticks) < 3 or ticks[0] <= 0:
        return False

    def unevenness(points: Sequence[float]) -> float:
        gaps = [b - a for a, b in pairwise(points)]
        # Two neighbours may be so close that their logarithms are equal.
        return max(gaps) / min(gaps) if min(gaps) > 0 else math.inf

    return unevenness([math.log(tick) for tick in ticks]) < unevenness(ticks)
