"""Converts states of other libraries to values that a checkpoint can hold, and back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


_TAG = "thrifty:kind"


def to_plain(value: Any) -> Any:
    """Convert a nested state to dicts, lists, tensors and plain values.

    Other containers are marked with their kind. NumPy numbers become Python numbers, NumPy arrays
    become tensors. Values of unknown types stay as they are.

    >>> to_plain({"milestones": {3, 1}, "best": np.float64(0.5)})
    {'milestones': {'thrifty:kind': 'set', 'inside': [1, 3]}, 'best': 0.5}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _marked("array", torch.from_numpy(value.copy()))
    if isinstance(value, Counter):
        return _marked("counter", [[to_plain(k), count] for k, count in value.items()])
    if isinstance(value, set | frozenset):
        return _marked(
            type(value).__name__, [to_plain(item) for item in sorted(value, key=repr)]
        )
    if isinstance(value, deque):
        return _marked("deque", [value.maxlen, *(to_plain(item) for item in value)])
    if isinstance(value, Mapping):
        return {key: to_plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        # A named tuple comes back as a plain tuple.
        return (list if isinstance(value, list) else tuple)(to_plain(item) for item in value)
    return value


def from_plain(value: Any) -> Any:
    """Return the value that ``to_plain`` converted.

    >>> from_plain(to_plain({"milestones": {3, 1}}))
    {'milestones': {1, 3}}
    """
    if isinstance(value, Mapping):
        kind = value.get(_TAG)
        if kind is None:
            return {key: from_plain(inside) for key, inside in value.items()}
        return _unmarked(kind, value["inside"])
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(from_plain(item) for item in value)
    return value


def _marked(kind: str, inside: Any) -> dict[str, Any]:
    return {_TAG: kind, "inside": inside}


def _unmarked(kind: str, inside: Any) -> Any:
    if kind == "array":
        return inside.numpy()
    items = from_plain(inside)
    if kind == "counter":
        return Counter(dict(items))
    if kind == "deque":
        return deque(items[1:], maxlen=items[0])
    return set(items) if kind == "set" else frozenset(items)
