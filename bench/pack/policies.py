"""The three policies of pack-aware Hyperband (Liu et al., DEEM 2021): which trials are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thrifty.core import UsageError


Config = Mapping[str, Any]
Packs = list[list[int]]


def random_packs(configs: Sequence[Config], *, size: int, rng: np.random.Generator) -> Packs:
    """Return random packs of ``size``; the last one holds the remainder.

    Raises:
        UsageError: ``size`` is below 1.
    """
    _check_size(size)
    return _chunks(rng.permutation(len(configs)).tolist(), size)


def batch_size_packs(
    configs: Sequence[Config], *, key: str = "batch_size", size: int | None = None
) -> Packs:
    """Return packs of equal batch size, the value of ``key``; ``size`` limits how large they are.

    Raises:
        UsageError: ``size`` is below 1, or a configuration has no ``key``.
    """
    size = max(1, len(configs)) if size is None else size
    _check_size(size)
    groups: dict[Any, list[int]] = {}
    for i, config in enumerate(configs):
        groups.setdefault(_value(config, key), []).append(i)
    return [pack for group in groups.values() for pack in _chunks(group, size)]


def nearest_packs(
    configs: Sequence[Config],
    *,
    size: int,
    values: Mapping[str, Sequence[Any]],
    rng: np.random.Generator,
) -> Packs:
    """Return packs of a random configuration and its nearest neighbours.

    The next pack is formed from the remaining configurations, until none is left. ``values`` lists
    the values of each dimension that counts. For numbers, the distance of two configurations is the
    difference of their positions in the list; for other values, it is 1 if they differ. Distances
    add up over the dimensions.

    Raises:
        UsageError: ``size`` is below 1, or a configuration has a value that is not listed.
    """
    _check_size(size)
    points = np.array([_point(config, values) for config in configs])
    left = rng.permutation(len(configs))
    packs: Packs = []
    while len(left):
        distances = np.abs(points[left] - points[left[0]]).sum(axis=1)
        distances[0] = -1  # the pivot sorts before configurations equal to it
        left = left[np.argsort(distances, kind="stable")]
        packs.append(left[:size].tolist())
        left = rng.permutation(left[size:])
    return packs


def _point(config: Config, values: Mapping[str, Sequence[Any]]) -> list[float]:
    """Return coordinates whose absolute differences add up to the distance."""
    point: list[float] = []
    for name, listed in values.items():
        value = _value(config, name)
        if value not in listed:
            raise UsageError(
                f"{name}={value!r} of a configuration is not among its values {list(listed)}; "
                "list it in values"
            )
        place = listed.index(value)
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in listed):
            point.append(place)
        else:  # one-hot with 0.5: two values that differ do so in two coordinates
            point += [0.5 * (i == place) for i in range(len(listed))]
    return point


def _value(config: Config, name: str) -> Any:
    if name not in config:
        raise UsageError(
            f"a configuration has no {name!r} (it has: {', '.join(config) or 'nothing'}); "
            "name a hyper-parameter that all have"
        )
    return config[name]


def _chunks(indices: list[int], size: int) -> Packs:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _check_size(size: int) -> None:
    if size < 1:
        raise UsageError(f"size={size}: a pack has at least 1 configuration; use 1 or more")
