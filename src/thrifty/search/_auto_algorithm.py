"""The default algorithm, chosen once for a study, and the checked ASHA that it often chooses."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from itertools import islice, pairwise, repeat
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Space, Timeline

from ._algorithm import Algorithm, GridSearch, RandomSearch, draw
from ._curve_view import StageForest
from ._halving import RungAlgorithm, last_promotion, promotions
from ._history import Decision, History, Proposal
from ._scores import coordinates_of
from ._sub_sampling import WideBOSS
from .samplers import GridSampler, KDESampler
from .samplers._base_sampler import check_counts


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
            num_epochs = StageForest.of(history, epochs=self.max_epochs).num_epochs
            budget = self.budget(self._most_trials(space))
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

    def _most_trials(self, space: Space) -> int:
        """Return how many trials the study can have: a grid may have fewer than ``num_trials``."""
        if isinstance(self.sampler, GridSampler):
            return self.sampler.size(space, most=self.num_trials)
        return self.num_trials

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


class _Orders:
    """The trials that have come two rungs further, by rung; up to date as a history grows."""

    def __init__(self, rungs: Sequence[int]) -> None:
        self._steps = [(rungs[at], rungs[at + 2]) for at in range(len(rungs) - 2)]
        self._numbers: list[list[int]] = [[] for _ in self._steps]
        self._are_reversed = [False] * len(self._steps)
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


MOST_FOR_A_GRID = 1.5
"""A whole grid is trained if it takes at most this many times the epochs that rungs would take.

See docs/design/search.md for the measurement."""

MANY_TRIALS = 300
"""From this number of trials on, configurations come from a sampler that learns.

With 32 workers and 600 trials it is better than random ones, with 8 workers and 150 trials it is
not surely so."""


class AutoChoice(NamedTuple):
    """What ``Auto`` has chosen.

    Attributes:
        name: The name under which a study records it; see ``Auto.built``.
        algorithm: The algorithm.
        reason: Why, as one sentence without an end.
    """

    name: str
    algorithm: Algorithm
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(Algorithm):
    """Chooses an algorithm for the study from its space, its size and its number of workers.

    A study chooses when it first runs, says what it has chosen and why, and records it. From then
    on it is a study of that algorithm, also with another number of workers.

    Args:
        max_epochs: Most epochs that any trial is trained.
        num_trials: Most configurations that are tried.
        workers: The number of workers to choose for (default: those with which the study first
            runs; 1 for ``Study.plan``).

    Raises:
        AlgorithmError: An option is out of range.

    >>> from thrifty.space import Float, Int, Space
    >>> space = Space(lr=Float(0.1, 0.3), width=Int(1, 512))
    >>> choice = Auto(max_epochs=81, num_trials=100).chosen(space, workers=8)
    >>> choice.name, choice.reason
    ('CheckedASHA', '8 workers never wait for each other')
    """

    max_epochs: int
    num_trials: int
    workers: int | None = None
    follows_horizons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, max_epochs=self.max_epochs, num_trials=self.num_trials)
        if self.workers is not None:
            check_counts(self, workers=self.workers)

    def chosen(self, space: Space, *, workers: int = 1, num_objectives: int = 1) -> AutoChoice:
        """Return the algorithm for a space; equal arguments give the same one.

        Args:
            space: The search space.
            workers: The number of workers, unless ``Auto(workers=)`` says it.
            num_objectives: The number of metrics that are optimised.

        >>> from thrifty.space import Choice, Space
        >>> auto = Auto(max_epochs=81, num_trials=100)
        >>> auto.chosen(Space(lr=Choice([0.1, 0.2])), num_objectives=2).name
        'GridSearch'
        """
        return _chosen(self, space, workers=self.workers or workers, num_objectives=num_objectives)

    def built(self, name: str, space: Space) -> Algorithm:
        """Return the algorithm of a recorded choice.

        Raises:
            AlgorithmError: This version of thrifty knows no choice of this name.

        >>> from thrifty.space import Choice, Space
        >>> Auto(max_epochs=9, num_trials=5).built("GridSearch", Space(lr=Choice([0.1, 0.2])))
        GridSearch(max_epochs=9, levels=2)
        """
        epochs, num = self.max_epochs, self.num_trials
        if name == "GridSearch":
            return GridSearch(max_epochs=epochs, levels=_most_levels(space) or 1)
        if name == "CheckedASHA over the grid":
            sampler = GridSampler(levels=_most_levels(space) or 1)
            return CheckedASHA(max_epochs=epochs, num_trials=num, sampler=sampler)
        if name == "RandomSearch":
            return RandomSearch(max_epochs=epochs, num_trials=num)
        if name == "CheckedASHA":
            return CheckedASHA(max_epochs=epochs, num_trials=num)
        if name == "CheckedASHA with KDESampler":
            return CheckedASHA(max_epochs=epochs, num_trials=num, sampler=KDESampler())
        if name in ("WideBOSS", "BOSS"):  # the name until November 2026
            return WideBOSS(max_epochs=epochs, num_trials=num)
        raise AlgorithmError(
            f"the study records that Auto has chosen {name!r}, which this version of thrifty does "
            "not know; use the version that made the study, or a newer one"
        )

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return what the algorithm for ``workers`` (default: 1) does next."""
        return self.chosen(space).algorithm.ask(history, space, num=num, rng=rng)


@lru_cache(maxsize=32)
def _chosen(auto: Auto, space: Space, *, workers: int, num_objectives: int) -> AutoChoice:
    """Return the choice; cached by the identity of the space, because it never changes."""
    name, reason = _rule(auto, space, workers=workers, num_objectives=num_objectives)
    return AutoChoice(name, auto.built(name, space), reason)


def _rule(auto: Auto, space: Space, *, workers: int, num_objectives: int) -> tuple[str, str]:
    """Return the name of the choice and the reason."""
    grid = _small_grid(space, most=auto.num_trials)
    rungs = CheckedASHA(max_epochs=auto.max_epochs, num_trials=auto.num_trials).rungs()
    for holds, why in (
        (space.has_horizons, "each trial ends at a horizon of its own"),
        (num_objectives > 1, "rungs would compare trials by the first metric only"),
        (len(rungs) == 1, f"max_epochs={auto.max_epochs} is too short for rungs"),
    ):
        if holds:
            whole = "the space has an interval or more configurations than num_trials"
            return ("RandomSearch", f"{why}, and {whole}") if grid is None else ("GridSearch", why)
    if grid is not None:
        total = _num_epochs(grid, epochs=auto.max_epochs)
        halved = CheckedASHA(max_epochs=auto.max_epochs, num_trials=len(grid)).budget()
        name = "GridSearch" if total <= MOST_FOR_A_GRID * halved else "CheckedASHA over the grid"
        return name, (
            f"all {len(grid):,} configurations take {total:,} epochs, rungs about {halved:,}"
        )
    if workers == 1:
        return "WideBOSS", "one worker trains one round after the other"
    reason = f"{workers:,} workers never wait for each other"
    if auto.num_trials >= MANY_TRIALS:
        learns = f"a sampler learns from {auto.num_trials:,} trials"
        return "CheckedASHA with KDESampler", f"{reason}, and {learns}"
    return "CheckedASHA", reason


def _small_grid(space: Space, *, most: int) -> list[Mapping[str, Any]] | None:
    """Return all configurations of a space, or None if there are infinitely many or too many."""
    levels = _most_levels(space)
    if levels is None:
        return None
    found: list[Mapping[str, Any]] = list(islice(space.grid(levels=levels), most + 1))
    return found if len(found) <= most else None


def _most_levels(space: Space) -> int | None:
    """Return the most values that any hyper-parameter has; None if there are infinitely many."""
    sizes = (coordinate.domain.size() for coordinate in coordinates_of(space).coordinates)
    most = max(sizes, default=1.0)
    return None if math.isinf(most) else int(most)


def _num_epochs(grid: Iterable[Mapping[str, Any]], *, epochs: int) -> int:
    """Return the epochs of a whole grid, where epochs that configurations share count once."""
    lengths: dict[tuple[int, int, Hashable], int] = {}
    names: dict[tuple[int, int, Hashable], int] = {}
    for config in grid:
        parent = -1
        for run in Timeline(config, epochs=epochs).runs:
            # Equal stages after equal stages are one stage of the forest, as long as the longest.
            stage = (parent, run.start, run.key)
            lengths[stage] = max(lengths.get(stage, 0), run.stop - run.start)
            parent = names.setdefault(stage, len(names))
    return sum(lengths.values())
