"""New trials from a sampler."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space

from ._history import History, Proposal
from ._samplers import Sampler


def check_sampler(owner: object, sampler: object) -> None:
    """Raise AlgorithmError unless ``sampler`` is a sampler."""
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
    num: int,
    rng: np.random.Generator,
) -> list[Proposal]:
    """Return one new trial for each ``(group, target)`` of ``starts``, enqueued ones first.

    There are fewer if the sampler is exhausted, and at most ``num`` if it learns from results.
    """
    places = list(islice(starts, num) if sampler.adapts else starts)
    configs = list(history.next_enqueued(len(places)))
    missing = len(places) - len(configs)
    if missing:
        configs += sampler.sample(history, space, num=missing, rng=rng)
    return [
        Proposal(target=target, config=config, group=group)
        for (group, target), config in zip(places, configs, strict=False)
    ]
