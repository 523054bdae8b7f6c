"""ASHA that stops to compare trials at rungs whose order turns out reversed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import pairwise, repeat
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.space import Space

from ._algorithm import draw
from ._halving import RungAlgorithm, last_promotion, promotions
from ._history import Decision, History, Proposal


MIN_TRIALS = 8
"""Trials that must have come two rungs further before an order counts as reversed."""
MAX_TRIALS = 64
"""Trials whose orders are compared: those with the smallest numbers."""
REVERSED = -0.25
"""Rank correlation (Kendall's tau) below which an order counts as reversed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedASHA(RungAlgorithm):
    """ASHA that checks its rungs, and drops those whose order turns out reversed.

    It is ``ASHA`` as long as early scores predict later ones. It compares the order of trials at
    each rung with their order two rungs later, for the trials that have come so far. If one order
    is the reverse of the other (Kendall's tau below -0.25 with at least 8 trials), curves cross,
    and what was best early is worst late. Then trials are no longer compared before the later rung:
    those that wait before it go on to it, in the order of their numbers, and new trials start with
    it. This ends once the study has trained as many epochs as ``ASHA`` would with ``num_trials``
    trials.

    The check itself costs no epochs, so nothing is lost where early scores do predict late ones.
    Curves that cross are noticed only once 8 trials have reached the third rung.

    Raises:
        AlgorithmError: An option is out of range.

    >>> CheckedASHA(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)
    """

    can_grow: ClassVar[bool] = True

    def budget(self) -> int:
        """Return the epochs after which no more trials pass dropped rungs.

        >>> CheckedASHA(max_epochs=27, num_trials=27).budget()
        81
        """
        total, before, num = 0, 0, self.num_trials
        for rung in self.rungs():
            total += max(num, 1) * (rung - before)
            num, before = num // self.eta, rung
        return total

    def num_dropped(self, history: History) -> int:
        """Return how many of the first rungs are dropped."""
        return _Orders.of(history, self.rungs()).num_dropped

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return at most ``num`` promotions or new trials, promotions in high rungs first."""
        rungs, orders = self.rungs(), _Orders.of(history, self.rungs())
        dropped = orders.num_dropped
        used = rungs[dropped:]
        out: list[Decision] = []
        for step in reversed(list(pairwise(used))):
            out += promotions(history, step, eta=self.eta, num=num - len(out))
        num_left = num - len(out)
        if dropped:
            num_left = min(num_left, max(self.budget() - orders.num_epochs, 0) // used[0])
            waiting = (entry[1] for rung in rungs[:dropped] for entry in history.waiting(rung))
            passing = nsmallest(max(num_left, 0), waiting)
            out += [Proposal(target=used[0], trial=number) for number in passing]
            num_left -= len(passing)
        num_new = min(num_left, self.num_trials - len(history))
        starts = repeat((0, used[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if not out and not history.num_running:
            return last_promotion(history, rungs)
        return out


class _Orders:
    """The trials that have come two rungs further, by rung; up to date as a history grows."""

    def __init__(self, rungs: Sequence[int]) -> None:
        self._steps = [(rungs[at], rungs[at + 2]) for at in range(len(rungs) - 2)]
        self._numbers: list[list[int]] = [[] for _ in self._steps]
        self._are_reversed = [False] * len(self._steps)
        self._targets: list[int] = []
        self.num_epochs = 0
        """Epochs that trials were asked for."""
        self._num_moves = 0

    @classmethod
    def of(cls, history: History, rungs: Sequence[int]) -> _Orders:
        """Return the up-to-date orders of a history."""
        known = _KNOWN.setdefault(history, {})
        key = tuple(rungs)
        if key not in known:
            known[key] = cls(rungs)
        known[key]._catch_up(history)
        return known[key]

    @property
    def num_dropped(self) -> int:
        """Number of rungs before the last one whose order is the reverse of an earlier order."""
        found = [at + 2 for at, is_reversed in enumerate(self._are_reversed) if is_reversed]
        return max(found, default=0)

    def _catch_up(self, history: History) -> None:
        self._targets += [0] * (len(history) - len(self._targets))
        changed = set[int]()
        for number in dict.fromkeys(history.moves[self._num_moves :]):
            trial = history[number]
            self.num_epochs += trial.target - self._targets[number]
            self._targets[number] = trial.target
            for at, (_, there) in enumerate(self._steps):
                if trial.reached >= there and self._add(self._numbers[at], number):
                    changed.add(at)
        self._num_moves = len(history.moves)
        for at in changed:
            here, there = self._steps[at]
            scores = [history[number].scores for number in self._numbers[at]]
            self._are_reversed[at] = len(scores) >= MIN_TRIALS and (
                _tau([each[here - 1] for each in scores], [each[there - 1] for each in scores])
                < REVERSED
            )

    @staticmethod
    def _add(numbers: list[int], number: int) -> bool:
        """Add a trial to those with the smallest numbers; return whether it is one of them."""
        if number in numbers or (len(numbers) == MAX_TRIALS and number > numbers[-1]):
            return False
        insort(numbers, number)
        del numbers[MAX_TRIALS:]
        return True


def _tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's rank correlation over the pairs that tie in neither; 0 if all tie.

    >>> _tau([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]), _tau([1.0, 1.0], [1.0, 2.0])
    (-1.0, 0.0)
    """
    a, b = np.array(first), np.array(second)
    signs = np.sign(a[:, None] - a) * np.sign(b[:, None] - b)
    num = np.count_nonzero(signs)
    return float(signs.sum() / num) if num else 0.0


_KNOWN: WeakKeyDictionary[History, dict[tuple[int, ...], _Orders]] = WeakKeyDictionary()
