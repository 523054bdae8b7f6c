"""Algorithms that check whether early scores predict later ones: ``CheckedASHA``, ``CheckedBOSS``.

The check costs no epochs: it compares the orders of trials that have been trained anyway.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice, pairwise, repeat
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.space import Space

from ._algorithm import draw
from ._curve_view import StageForest
from ._halving import RungAlgorithm, brackets_of, last_promotion, promotions
from ._history import Decision, History, Proposal
from ._sub_sampling import WideBOSS
from .samplers import GridSampler, RandomSampler, Sampler


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
    trials that share none.

    Trials that share epochs save some of those. Trials that share all epochs until a rung also tie
    there, so ``ASHA`` ends early among them, with hardly more than a guess. So what is saved is
    spent on more promotions: when ``ASHA`` ends, trials that wait go on to the next rung, those in
    the lowest rung first and of these the best ones. Where no epoch is shared, nothing is saved,
    and it is ``ASHA``.

    The check itself costs no epochs, so nothing is lost where early scores do predict late ones.
    Curves that cross are noticed only once 8 trials have reached the third rung.

    Raises:
        AlgorithmError: An option is out of range.

    >>> CheckedASHA(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)
    """

    can_grow: ClassVar[bool] = True

    def budget(self, num_trials: int | None = None) -> int:
        """Return the epochs that ``ASHA`` trains if trials share none, at least one to its end.

        Args:
            num_trials: Number of trials (default: those of the study).

        >>> CheckedASHA(max_epochs=27, num_trials=27).budget()
        81
        """
        return self._num_epochs(self.num_trials if num_trials is None else num_trials, least=1)

    def _num_epochs(self, num_trials: int, *, least: int) -> int:
        """Return the epochs of rungs that keep one in ``eta`` trials, and ``least`` or more."""
        total, before, num = 0, 0, num_trials
        for rung in self.rungs():
            total += max(num, least) * (rung - before)
            num, before = num // self.eta, rung
        return total

    def num_dropped(self, history: History) -> int:
        """Return how many of the first rungs are dropped."""
        return Orders.of(history, self.rungs()).num_dropped

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return at most ``num`` promotions or new trials, promotions in high rungs first."""
        rungs, orders = self.rungs(), Orders.of(history, self.rungs())
        dropped = orders.num_dropped
        used = rungs[dropped:]
        out: list[Decision] = []
        for step in reversed(list(pairwise(used))):
            out += promotions(history, step, eta=self.eta, num=num - len(out))
        num_left = num - len(out)
        if dropped:
            num_epochs = StageForest.of(history, epochs=self.max_epochs).num_epochs
            budget = self.budget(_most_trials(self.sampler, space, self.num_trials))
            num_left = min(num_left, max(budget - num_epochs, 0) // used[0])
            waiting = (entry[1] for rung in rungs[:dropped] for entry in history.waiting(rung))
            passing = nsmallest(max(num_left, 0), waiting)
            out += [Proposal(target=used[0], trial=number) for number in passing]
            num_left -= len(passing)
        num_new = min(num_left, self.num_trials - len(history))
        starts = repeat((0, used[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if not out and not history.num_running:
            promotions_left = self._for_saved_epochs(history, first=used[0])
            return list(islice(promotions_left, num)) or last_promotion(history, rungs)
        return out

    def _for_saved_epochs(self, history: History, *, first: int) -> Iterator[Proposal]:
        """Yield promotions of trials that wait, as long as epochs are left that sharing has saved.

        The last promotion, which ``ASHA`` makes if no trial has come to its end, is not paid from
        the saved epochs.

        Args:
            history: A history without trials that train, and of all trials that are drawn.
            first: The first rung at which trials are compared.
        """
        forest, rungs = StageForest.of(history, epochs=self.max_epochs), self.rungs()
        num_trials = min(len(history), self.num_trials)
        num_left: float = self._num_epochs(num_trials, least=0) - forest.num_epochs
        for at, (here, there) in enumerate(pairwise(rungs)):
            # One in eta of those that are promoted is promoted at the next rung, too, and so on.
            later = sum(
                (after - before) / self.eta**k
                for k, (before, after) in enumerate(pairwise(rungs[at + 1 :]), start=1)
            )
            for _, number in history.waiting(here):
                if num_left <= 0:
                    return
                target = max(there, first)
                yield Proposal(target=target, trial=number)
                known = max(here, forest.prefix(history[number].config).requested)
                num_left -= max(target - known, 0) + later


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBOSS(WideBOSS):
    """``WideBOSS`` that checks its rounds, and drops them if their order turns out reversed.

    It is ``WideBOSS`` as long as early scores predict later ones. It compares the order of trials
    after the first round with their order after the third, for the trials that have come so far. If
    one order is the reverse of the other (Kendall's tau below -0.25 with at least 8 trials), curves
    cross, and what was best early is worst late. Then rounds no longer choose: trials that wait
    before the third round train to their end, in the order of their numbers, and then new ones.
    If the sampler learns, new ones are random, because what it has learnt comes from early scores.

    Once curves cross, the study ends when it has trained as many epochs as ``WideBOSS`` would with
    trials that share none, so it may draw fewer than ``num_trials``.

    The check itself costs no epochs. Curves that cross are noticed only once 8 trials have come to
    the third round, and not at all with fewer than three rounds (``max_epochs`` below ``eta**2``).
    The first 8 may be reversed by chance. Later trials correct that, and rounds choose again.

    Args:
        max_epochs: Most epochs that a trial is trained.
        eta: Ratio between the epochs of successive rounds.
        num_trials: Number of trials; brackets repeat until all are drawn (default: as many brackets
            as Hyperband has).
        sampler: The model.

    Raises:
        AlgorithmError: An option is out of range.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in CheckedBOSS(max_epochs=9).brackets()]
    [(9, (1, 3, 9)), (9, (1, 3, 9)), (9, (1, 3, 9))]
    """

    def budget(self, num_trials: int | None = None) -> int:
        """Return the epochs that ``WideBOSS`` trains if trials share none and none fails.

        Args:
            num_trials: Number of trials (default: those of the study).

        >>> CheckedBOSS(max_epochs=27, num_trials=27).budget()
        81
        """
        num = self.num_trials if num_trials is None else num_trials
        brackets = brackets_of(self.max_epochs, eta=self.eta, num_trials=num, ladder="widest")
        return sum(
            max(bracket.num_trials // self.eta**at, 1) * (after - before)
            for bracket in brackets
            for at, (before, after) in enumerate(pairwise((0, *bracket.epochs)))
        )

    def curves_cross(self, history: History) -> bool:
        """Return whether the order after the third round is the reverse of the first one's."""
        return bool(Orders.of(history, self.brackets()[0].epochs[:3]).num_dropped)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return what ``WideBOSS`` does, or if curves cross, trials to train to their end."""
        if not self.curves_cross(history):
            # Zero-argument ``super`` does not work in a dataclass with slots before Python 3.14.
            return WideBOSS.ask(self, history, space, num=num, rng=rng)
        num_left = min(num, self._num_left(history, space))
        third = self.brackets()[0].epochs[2]
        early = (t for t in history if t.state == "waiting" and t.reached < third)
        out: list[Decision] = [
            Proposal(target=self.max_epochs, trial=trial.number, group=trial.group)
            for trial in islice(early, num_left)
        ]
        starts = islice(self._missing(history), num_left - len(out))
        sampler = RandomSampler() if self.sampler.adapts else self.sampler
        out += draw(sampler, history, space, starts=starts, num=num, rng=rng)
        if not out and not history.num_running:
            return self._last_promotion(history)
        return out

    def _num_left(self, history: History, space: Space) -> int:
        """Return how many whole trials the budget still pays for."""
        num_trials = sum(bracket.num_trials for bracket in self.brackets())
        budget = self.budget(_most_trials(self.sampler, space, num_trials))
        num_epochs = StageForest.of(history, epochs=self.max_epochs).num_epochs
        return max(budget - num_epochs, 0) // self.max_epochs

    def _missing(self, history: History) -> Iterator[tuple[int, int]]:
        """Yield the bracket and the target of each trial that is not drawn yet."""
        for group, bracket in enumerate(self.brackets()):
            num = bracket.num_trials - len(history.in_group(group))
            yield from repeat((group, self.max_epochs), max(num, 0))

    def _last_promotion(self, history: History) -> list[Decision]:
        """Return the promotion that makes the study end with a fully trained trial, if possible."""
        waiting = [trial for trial in history if trial.state == "waiting"]
        if not waiting or any(trial.reached == self.max_epochs for trial in waiting):
            return []
        best = max(waiting, key=lambda trial: (trial.reached, trial.scores[-1], -trial.number))
        return [Proposal(target=self.max_epochs, trial=best.number, group=best.group)]


def _most_trials(sampler: Sampler, space: Space, num_trials: int) -> int:
    """Return how many trials a study can have: a grid may have fewer than ``num_trials``."""
    if isinstance(sampler, GridSampler):
        return sampler.size(space, most=num_trials)
    return num_trials


class Orders:
    """The trials that have come two rungs further, by rung; up to date as a history grows."""

    def __init__(self, rungs: Sequence[int]) -> None:
        self._steps = [(rungs[at], rungs[at + 2]) for at in range(len(rungs) - 2)]
        self._numbers: list[list[int]] = [[] for _ in self._steps]
        self._are_reversed = [False] * len(self._steps)
        self._num_moves = 0

    @classmethod
    def of(cls, history: History, rungs: Sequence[int]) -> Orders:
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
        changed = set[int]()
        for number in dict.fromkeys(history.moves[self._num_moves :]):
            trial = history[number]
            for at, (_, there) in enumerate(self._steps):
                if trial.reached >= there and self._add(self._numbers[at], number):
                    changed.add(at)
        self._num_moves = len(history.moves)
        for at in changed:
            here, there = self._steps[at]
            scores = [history[number].scores for number in self._numbers[at]]
            self._are_reversed[at] = len(scores) >= MIN_TRIALS and (
                rank_correlation(
                    [each[here - 1] for each in scores], [each[there - 1] for each in scores]
                )
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


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's rank correlation over the pairs that tie in neither; 0 if all tie.

    >>> rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]), rank_correlation([1.0, 1.0], [1.0, 2.0])
    (-1.0, 0.0)
    >>> rank_correlation([1.0, float("-inf"), float("-inf")], [1.0, 0.0, 2.0])
    0.0
    """
    signs = _order_of_pairs(first) * _order_of_pairs(second)
    num = np.count_nonzero(signs)
    return float(signs.sum() / num) if num else 0.0


def _order_of_pairs(values: Sequence[float]) -> np.ndarray:
    """Return 1, 0 or -1 for each pair; minus infinity, a score that is not a number, ties too."""
    a = np.array(values)
    order: np.ndarray = (a[:, None] > a).astype(int) - (a[:, None] < a)
    return order


_KNOWN: WeakKeyDictionary[History, dict[tuple[int, ...], Orders]] = WeakKeyDictionary()
