"""Checks and steps that several algorithms share."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space

from ._history import History, Proposal
from ._samplers import Sampler


def check_at_least(least: float, **options: float) -> None:
    """Raises AlgorithmError for an option that is too small."""
    for name, value in options.items():
        if value < least:
            raise AlgorithmError(f"{name} is {value}; it must be at least {least:g}")


def rungs(min_epochs: int, max_epochs: int, *, eta: int) -> list[int]:
    """``min_epochs``, ``eta`` times as many, and so on; the last one is ``max_epochs``.

    >>> rungs(1, 81, eta=3), rungs(2, 20, eta=3)
    ([1, 3, 9, 27, 81], [2, 6, 20])
    """
    out = [min_epochs]
    while out[-1] * eta * eta <= max_epochs:
        out.append(out[-1] * eta)
    return out if out[-1] == max_epochs else [*out, max_epochs]


def draw(
    sampler: Sampler,
    history: History,
    space: Space,
    *,
    num: int,
    target: int,
    rng: np.random.Generator,
    group: Hashable = 0,
    after: int = 0,
) -> list[Proposal]:
    """New trials; fewer than ``num`` if the sampler runs out. ``after`` were decided on in the same ask."""
    proposals: list[Proposal] = []
    first = len(history) + after
    for number in range(first, first + num):
        config = sampler.sample(history, space, number=number, rng=rng)
        if config is None:
            break
        proposals.append(Proposal(target=target, config=config, group=group))
    return proposals
