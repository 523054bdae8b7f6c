"""Which stage is trained next, and how many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrifty.core import UsageError
from thrifty.perf import PackCurve, choose_pack

from ._search_plan import SearchPlan
from ._stages import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of joint training of one structure: back-end curves and device memory."""

    curves: tuple[PackCurve, ...]
    memory_bytes: float = math.inf


MAX_SIZE = 64
"""Largest pack: bigger ones only delay results that algorithms wait for."""


def pack_size(
    plan: SearchPlan,
    measured: Sequence[Measured],
    *,
    running: Iterable[Chain] = (),
    workers: int = 1,
    memory_margin: float = 0.9,
) -> int:
    """Return the number of trials each worker trains at a time to finish pending work soonest.

    ``measured`` holds the measurements of each structure. In a pack, each trial is slower than
    alone, but all together are faster. If one long path dominates the forecast, packs are small; if
    much other work is pending, they are large. See ``thrifty.perf.choose_pack``. Without
    measurements the size is 1.
    """
    if not measured:
        return 1
    longest = max([plan.longest_pending, *(float(chain.num_epochs) for chain in running)])
    total = max(float(plan.num_epochs_needed - plan.num_epochs_done), longest)
    if not total:
        return 1
    return max(
        choose_pack(
            each.curves,
            longest=longest,
            total=total,
            ready=MAX_SIZE * workers,
            workers=workers,
            cap_bytes=each.memory_bytes,
            margin=memory_margin,
            max_size=MAX_SIZE,
        ).size
        for each in measured
    )


Config = Mapping[str, Any]
Packs = list[list[int]]


def random_packs(configs: Sequence[Config], *, size: int, rng: np.random.Generator) -> Packs:
    """Return random packs of ``size``; the last one holds the remainder.

    Raises:
        UsageError: ``size`` is below 1.

    >>> configs = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4, 0.5)]
    >>> [len(pack) for pack in random_packs(configs, size=2, rng=np.random.default_rng(0))]
    [2, 2, 1]
    """
    _check_size(size)
    return _chunks(rng.permutation(len(configs)).tolist(), size)


def batch_size_packs(
    configs: Sequence[Config], *, key: str = "batch_size", size: int | None = None
) -> Packs:
    """Return packs of equal batch size, the value of ``key``; ``size`` limits how large they are.

    Raises:
        UsageError: ``size`` is below 1, or a configuration has no ``key``.

    >>> configs = [{"batch_size": size} for size in (20, 30, 20, 20)]
    >>> batch_size_packs(configs)
    [[0, 2, 3], [1]]
    >>> batch_size_packs(configs, size=2)
    [[0, 2], [3], [1]]
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

    >>> configs = [{"lr": lr, "net": net} for net in ("MLP", "CNN") for lr in (0.1, 0.2, 0.3)]
    >>> values = {"lr": [0.1, 0.2, 0.3], "net": ["MLP", "CNN"]}
    >>> nearest_packs(configs, size=2, values=values, rng=np.random.default_rng(3))
    [[2, 5], [0, 1], [4, 3]]
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
