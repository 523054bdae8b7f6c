"""New trials from a sampler."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space

from ._history import History, Proposal
from ._samplers import Sampler


def check_sampler(owner: object, sampler: object) -> None:
    """Raises AlgorithmError unless it is a sampler."""
    if not isinstance(sampler, Sampler):
        hint = f"{sampler.__name__}()" if isinstance(sampler, type) else "RandomSampler()"
        raise AlgorithmError(
            f"{type(owner).__name__}(sampler={sampler!r}): give a sampler, such as {hint}"
        )


def draw(
    sampler: Sampler,
    history: History,
    space: Space,
    *,
    starts: Iterable[tuple[int, int]],
    rng: np.random.Generator,
) -> list[Proposal]:
    """One new trial for each ``(group, target)`` of ``starts``; fewer when the sampler has no more."""
    out: list[Proposal] = []
    for group, target in starts:
        config = sampler.sample(history, space, number=len(history) + len(out), rng=rng)
        if config is None:
            break
        out.append(Proposal(target=target, config=config, group=group))
    return out
