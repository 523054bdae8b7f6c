"""Hyperband's brackets, and what asking for them has in common whatever is done inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import cycle
from typing import Literal, NamedTuple

import numpy as np

from thrifty.space import Space

from ._draw import draw
from ._history import Decision, History
from ._samplers import Sampler


class Bracket(NamedTuple):
    """``num_trials`` that start together and are compared after each of ``epochs``."""

    num_trials: int
    epochs: tuple[int, ...]


Ladder = Literal["hyperband", "widest"]
"""Whether brackets go from the widest to the narrowest, or are all as wide as the widest."""


@lru_cache(maxsize=8)
def brackets_of(
    max_epochs: int, *, eta: int, num_trials: int | None = None, ladder: Ladder = "hyperband"
) -> tuple[Bracket, ...]:
    """All that ``brackets_until`` gives; asked for at each decision, and there may be thousands."""
    return tuple(brackets_until(max_epochs, eta=eta, num_trials=num_trials, ladder=ladder))


def brackets_until(
    max_epochs: int, *, eta: int, num_trials: int | None = None, ladder: Ladder = "hyperband"
) -> Iterator[Bracket]:
    """From many trials that start short to few that are trained fully; again and again until there are ``num_trials``.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 2018, algorithm 1.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in brackets_until(9, eta=3, num_trials=15)]
    [(9, (1, 3, 9)), (5, (3, 9)), (1, (9,))]
    """
    once = _standard_brackets(max_epochs, eta=eta)
    if ladder == "widest":
        once = once[:1] * len(once)
    if num_trials is None:
        yield from once
        return
    left = num_trials
    for size, rungs in cycle(once):
        yield Bracket(min(size, left), rungs)
        left -= size
        if left <= 0:
            return


def ask_brackets(
    brackets: Sequence[Bracket],
    verdicts: Callable[[int, tuple[int, ...]], Sequence[Decision]],
    *,
    sampler: Sampler,
    history: History,
    space: Space,
    num: int | None,
    rng: np.random.Generator,
) -> list[Decision]:
    """New trials of the brackets (``Trial.group``), or ``verdicts(group, rungs)`` on those that have all of theirs.

    A sampler that learns is asked for one bracket after the other, and only for workers that no verdict keeps busy:
    ``num`` trials, or (None) all that are missing of a bracket.
    """

    def verdicts_on(*, complete: bool) -> list[Decision]:
        # where a trial is running no rung is complete; there may be thousands of brackets
        groups = sorted(group for group in history.settled if isinstance(group, int))
        return [
            decision
            for group in groups
            if not complete or len(history.in_group(group)) == brackets[group].num_trials
            for decision in verdicts(group, brackets[group].epochs)
        ]

    if sampler.adapts and (out := verdicts_on(complete=True)):
        return out
    starts: Iterator[tuple[int, int]] = (
        (group, rungs[0])
        for group, (size, rungs) in enumerate(brackets)
        for _ in range(len(history.in_group(group)), size)
    )
    last = len(brackets) - 1
    if len(history.in_group(last)) == brackets[last].num_trials:
        starts = iter(())  # they are filled in order, so all are full
    if num is None:
        missing = (size - len(history.in_group(g)) for g, (size, _) in enumerate(brackets))
        num = next((m for m in missing if m), 0)
    fresh = draw(sampler, history, space, starts=starts, num=num, rng=rng)
    # where the sampler is exhausted no bracket will ever get more trials than it has
    return [*fresh] or verdicts_on(complete=False)


def _standard_brackets(max_epochs: int, *, eta: int) -> list[Bracket]:
    """The paper's, in whole numbers: ``log(243, 3)`` is 4.999... in floating point."""
    widest = 0
    while eta ** (widest + 1) <= max_epochs:
        widest += 1
    return [
        Bracket(
            -(-(widest + 1) * eta**s // (s + 1)),
            tuple(max_epochs // eta**i for i in range(s, -1, -1)),
        )
        for s in range(widest, -1, -1)
    ]
