"""Which configurations of a rung are packed together: three policies that look at nothing but the configurations.

Liu et al., "Understanding and Optimizing Packed Neural Network Training for Hyper-Parameter Tuning", DEEM 2021 (pack-random,
pack-bs and pack-knn there). Each gives a partition: lists of indices in which every configuration is once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thrifty.core import UsageError


Config = Mapping[str, Any]
Packs = list[list[int]]


def random_packs(configs: Sequence[Config], *, size: int, rng: np.random.Generator) -> Packs:
    """Packs of ``size`` at random; the last one has what is left.

    >>> configs = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4, 0.5)]
    >>> [len(pack) for pack in random_packs(configs, size=2, rng=np.random.default_rng(0))]
    [2, 2, 1]

    Raises:
        UsageError: ``size`` is below 1.
    """
    _check_size(size)
    return _chunks(rng.permutation(len(configs)).tolist(), size)


def batch_size_packs(
    configs: Sequence[Config], *, key: str = "batch_size", size: int | None = None
) -> Packs:
    """Packs of equal batch size, the value of ``key``; with ``size`` none is larger.

    >>> configs = [{"batch_size": size} for size in (20, 30, 20, 20)]
    >>> batch_size_packs(configs)
    [[0, 2, 3], [1]]
    >>> batch_size_packs(configs, size=2)
    [[0, 2], [3], [1]]

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
    """A random configuration and its nearest ones, then another of those left, and so on.

    ``values`` lists the values of each dimension that counts. Where they are numbers, two configurations are as far apart
    as their values stand in the list; otherwise 1 if they differ. Distances add up over the dimensions.

    >>> configs = [{"lr": lr, "net": net} for net in ("MLP", "CNN") for lr in (0.1, 0.2, 0.3)]
    >>> values = {"lr": [0.1, 0.2, 0.3], "net": ["MLP", "CNN"]}
    >>> nearest_packs(configs, size=2, values=values, rng=np.random.default_rng(3))
    [[2, 5], [0, 1], [4, 3]]

    Raises:
        UsageError: ``size`` is below 1, or a configuration has a value that is not listed.
    """
    _check_size(size)
    points = np.array([_point(config, values) for config in configs])
    left = rng.permutation(len(configs))
    packs: Packs = []
    while len(left):
        distances = np.abs(points[left] - points[left[0]]).sum(axis=1)
        distances[0] = -1  # the pivot, before its equals
        left = left[np.argsort(distances, kind="stable")]
        packs.append(left[:size].tolist())
        left = rng.permutation(left[size:])
    return packs


def _point(config: Config, values: Mapping[str, Sequence[Any]]) -> list[float]:
    """Coordinates whose absolute differences add up to the distance."""
    point: list[float] = []
    for name, listed in values.items():
        value = _value(config, name)
        if value not in listed:
            raise UsageError(
                f"{name}={value!r} of a configuration is not among its values {list(listed)}; list it in values"
            )
        place = listed.index(value)
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in listed):
            point.append(place)
        else:  # two that differ do so in two of these
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
