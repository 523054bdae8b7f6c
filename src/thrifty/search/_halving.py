"""Successive halving, Hyperband, BOHB and ASHA."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice, pairwise, repeat
from typing import ClassVar, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.core import with_advice
from thrifty.search.samplers._base_sampler import check_counts, check_halving
from thrifty.space import Space

from ._algorithm import Algorithm, check_sampler, draw
from ._history import Decision, History, Leaderboard, Proposal, Stop
from ._scores import not_surely_worse
from .samplers import KDESampler, RandomSampler, Sampler


def rungs_between(min_epochs: int, max_epochs: int, *, eta: int) -> tuple[int, ...]:
    """Return ``min_epochs * eta**i``, with the last rung extended to ``max_epochs``.

    >>> rungs_between(1, 81, eta=3), rungs_between(1, 100, eta=3)
    ((1, 3, 9, 27, 81), (1, 3, 9, 27, 100))
    """
    rungs = [min_epochs]
    while rungs[-1] * eta <= max_epochs:
        rungs.append(rungs[-1] * eta)
    # The last rung is extended rather than followed by another: a rung shortly before the end would
    # decide little.
    return (*rungs[:-1], max_epochs)


def why_other_rungs(algorithm: Algorithm, before: int, *, min_epochs: int, eta: int) -> str:
    """Return why decisions at the rungs until ``before`` do not hold; empty if they do.

    They hold if the old rungs, up to the last one, are the first of the new ones.

    >>> why_other_rungs(ASHA(max_epochs=27, num_trials=9), 9, min_epochs=1, eta=3)
    ''
    """
    earlier = rungs_between(min_epochs, before, eta=eta)
    rungs = rungs_between(min_epochs, algorithm.max_epochs, eta=eta)
    if rungs[: len(earlier)] == earlier:
        return ""
    least = before * eta
    fits = rungs_between(min_epochs, least, eta=eta)[: len(earlier)] == earlier
    hint = f"; {least} epochs or more would keep them" if fits else ""
    return (
        f"{type(algorithm).__name__} has compared trials at rungs {earlier}, which would be "
        f"{rungs}, so its past decisions do not hold{hint}"
    )


def halve(
    history: History, rungs: Sequence[int], *, eta: int, group: Hashable = 0
) -> list[Decision]:
    """Return decisions on a complete rung: the best ``1 / eta`` continue, the others stop.

    A rung is complete when all trials have reached it or failed. Only waiting trials get a
    decision, so decisions that are in the history already are never repeated. In a study with
    several seeds, trials that are not surely worse continue, too.
    """
    num_here = len(history.in_group(group))
    for here, there in pairwise(rungs):
        board = history.leaderboard(here, group=group)
        if len(board) < num_here:
            return []
        num_kept = min(max(num_here // eta, 1), board.num_alive)
        undecided = _contenders(history, board, epoch=here, cut=num_kept)
        waiting = history.waiting(here, group=group)
        if waiting:
            kept = {*best(board, num_kept), *undecided}
            return [
                Proposal(target=there, trial=number, group=group)
                if number in kept
                else Stop(trial=number)
                for _, number in waiting
            ]
        num_here = num_kept + len(undecided)
    return []


def _contenders(history: History, board: Leaderboard, *, epoch: int, cut: int) -> list[int]:
    """Return the trials behind the first ``cut`` of a rung that are not surely worse.

    There are none if the study has one seed.
    """
    if not cut or not history[board[0][1]].standard_errors:
        return []
    alive = board[: board.num_alive]
    errors = [history[number].standard_errors[epoch - 1] for _, number in alive]
    places = not_surely_worse([score for score, _ in alive], errors, cut=cut)
    return [alive[place][1] for place in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """Rule for brackets that applies ``halve``."""

    eta: int

    def decide(self, history: History, *, group: Hashable, rungs: Sequence[int]) -> list[Decision]:
        """Return decisions on the first rung that is complete and not decided yet."""
        return halve(history, rungs, eta=self.eta, group=group)


def best(board: Leaderboard, num: int) -> list[int]:
    """Return the best ``num`` trials, spread evenly over the order of proposal among ties.

    Trials that share all their stages so far tie exactly, and often many of them do. Taking the
    earliest ones would keep neighbours in the grid, which differ least.

    >>> from thrifty.search import History, Proposal
    >>> history = History()
    >>> for trial in range(7):
    ...     _ = history.record_decision(Proposal(target=1, config={"lr": trial}))
    >>> for trial in range(7):
    ...     history.record_scores(trial, [1.0 if trial == 3 else 0.5])
    >>> best(history.leaderboard(1), 3)
    [3, 1, 5]
    """
    if num >= len(board):
        return [number for _, number in board]
    cut = board[num - 1][0]
    better = [number for score, number in board[:num] if score > cut]
    tied = [number for score, number in board[len(better) :] if score == cut]
    free = num - len(better)
    # Take the middle of each of ``free`` equal parts.
    return [*better, *(tied[(2 * i + 1) * len(tied) // (2 * free)] for i in range(free))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RungAlgorithm(Algorithm):
    """An algorithm that trains ``num_trials`` trials from rung to rung."""

    max_epochs: int
    num_trials: int
    eta: int = 3
    min_epochs: int = 1
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, num_trials=self.num_trials)
        check_halving(self, eta=self.eta, min_epochs=self.min_epochs, max_epochs=self.max_epochs)
        check_sampler(self, self.sampler)

    def rungs(self) -> tuple[int, ...]:
        """Return the epochs at which trials are compared; the last is ``max_epochs``."""
        return rungs_between(self.min_epochs, self.max_epochs, eta=self.eta)

    def why_not_longer(self, before: int) -> str:
        """Return why the rungs until ``before`` are others now; empty if they are the same."""
        return why_other_rungs(self, before, min_epochs=self.min_epochs, eta=self.eta)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASHA(RungAlgorithm):
    """Asynchronous successive halving, which never waits for a rung to fill.

    A trial is promoted as soon as it is in the top ``1 / eta`` of its rung; otherwise a new trial
    starts (Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020,
    algorithm 2). Trials that are not promoted are paused, and may be promoted later. At the very
    end, if no trial has reached ``max_epochs``, the best trial of the highest rung is trained to
    there. This matters only with few trials.

    >>> ASHA(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)
    """

    can_grow: ClassVar[bool] = True

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return at most ``num`` promotions or new trials, promotions in high rungs first."""
        rungs = self.rungs()
        out: list[Decision] = []
        for here, there in reversed(list(pairwise(rungs))):
            out += promotions(history, (here, there), eta=self.eta, num=num - len(out))
        num_new = min(num - len(out), self.num_trials - len(history))
        starts = repeat((0, rungs[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        if not out and not history.num_running:
            return last_promotion(history, rungs)
        return out


def promotions(history: History, step: tuple[int, int], *, eta: int, num: int) -> list[Decision]:
    """Promote at most ``num`` trials that wait in the top ``1 / eta`` of a rung.

    In a study with several seeds, trials that are not surely worse are promoted, too.
    """
    here, there = step
    board = history.leaderboard(here)
    num_top = len(board) // eta
    out: list[Decision] = []
    for entry in islice(history.waiting(here), max(num, 0)):
        if board.rank(entry) >= num_top:
            break  # trials come best first, so no later one is in the top
        out.append(Proposal(target=there, trial=entry[1]))
    cut = min(num_top, board.num_alive)
    if len(out) < num:
        waiting = [
            number
            for number in _contenders(history, board, epoch=here, cut=cut)
            if history[number].state == "waiting" and history[number].reached == here
        ]
        out += [Proposal(target=there, trial=number) for number in waiting[: num - len(out)]]
    return out


def last_promotion(history: History, rungs: Sequence[int]) -> list[Decision]:
    """Return the promotion that makes the study end with a fully trained trial, if possible."""
    if history.leaderboard(rungs[-1]).num_alive:
        return []
    for here, there in reversed(list(pairwise(rungs))):
        for _, number in history.waiting(here)[:1]:
            return [Proposal(target=there, trial=number)]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingASHA(RungAlgorithm):
    """Asynchronous successive halving that never pauses a trial: it goes on, or stops for good.

    At each rung, a trial goes on if it is in the top ``1 / eta`` of those that have come as far, so
    the first one does. This is for training that cannot go on from a state, such as objectives of
    ``thrifty.optimize``; where it can, ``ASHA`` may promote a trial later that did not belong to
    the top when it came (the variant of Syne Tune, Salinas et al., AutoML 2022).

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> history, algorithm = History(), StoppingASHA(max_epochs=9, num_trials=20)
    >>> for score in (0.5, 0.4):
    ...     for decision in algorithm.ask(history, space, num=1, rng=rng):
    ...         number = history.record_decision(decision)
    ...         history.record_scores(number, [score] * decision.target)
    >>> [trial.reached for trial in history]
    [3]
    """

    can_grow: ClassVar[bool] = True

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return a decision about each trial that waits, and new trials if workers are left."""
        rungs = self.rungs()
        out: list[Decision] = []
        num_going_on = 0
        for here, there in reversed(list(pairwise(rungs))):
            board = history.leaderboard(here)
            num_top = math.ceil(len(board) / self.eta)
            for entry in history.waiting(here):
                if board.rank(entry) < num_top:
                    out.append(Proposal(target=there, trial=entry[1]))
                    num_going_on += 1
                else:
                    out.append(Stop(trial=entry[1]))
        num_new = min(num - num_going_on, self.num_trials - len(history))
        starts = repeat((0, rungs[0]), max(num_new, 0))
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        return out


class Bracket(NamedTuple):
    """``num_trials`` trials that start together and are compared after each of ``epochs``."""

    num_trials: int
    epochs: tuple[int, ...]


class Rule(Protocol):
    """Rule that decides which trials of a bracket continue.

    It is hashable, because state derived from a history is cached by rule.
    """

    def decide(self, history: History, *, group: int, rungs: tuple[int, ...]) -> Sequence[Decision]:
        """Return decisions about the trials of a group; they depend on these trials alone."""
        ...


Ladder = Literal["hyperband", "widest"]
"""Whether brackets go from the widest to the narrowest, or are all as wide as the widest."""


@lru_cache(maxsize=8)
def brackets_of(
    max_epochs: int, *, eta: int, num_trials: int | None = None, ladder: Ladder = "hyperband"
) -> tuple[Bracket, ...]:
    """Return all brackets of ``brackets_until``.

    The result is cached: every decision needs it, and there may be thousands of decisions.
    """
    return tuple(brackets_until(max_epochs, eta=eta, num_trials=num_trials, ladder=ladder))


def brackets_until(
    max_epochs: int, *, eta: int, num_trials: int | None = None, ladder: Ladder = "hyperband"
) -> Iterator[Bracket]:
    """Yield brackets, from many trials that start short to few that are trained fully.

    With ``num_trials``, they repeat until there are that many trials. Li et al., "Hyperband: A
    Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 2018, algorithm 1.

    >>> [
    ...     (bracket.num_trials, bracket.epochs)
    ...     for bracket in brackets_until(9, eta=3, num_trials=15)
    ... ]
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


Verdicts = Callable[[Callable[[int], bool]], list[Decision]]
"""Returns decisions about the groups for which its argument is true."""


def verdicts_by(rule: Rule, brackets: Sequence[Bracket], history: History) -> Verdicts:
    """Return what decides about brackets of which no trial is in training, by a rule."""

    def verdicts(is_ready: Callable[[int], bool]) -> list[Decision]:
        waiting = _Undecided.of(history, (rule, brackets[0], brackets[-1], len(brackets)))
        found: list[Decision] = []
        for group in sorted(waiting.groups):
            if not is_ready(group):
                continue
            decisions = rule.decide(history, group=group, rungs=brackets[group].epochs)
            if not decisions:
                waiting.groups.discard(group)
            found += decisions
        return found

    return verdicts


def fill_brackets(
    brackets: Sequence[Bracket],
    verdicts: Verdicts,
    *,
    sampler: Sampler,
    history: History,
    space: Space,
    num: int | None,
    rng: np.random.Generator,
) -> list[Decision]:
    """Return new trials of the brackets (``Trial.group``), or verdicts on earlier ones.

    A sampler that learns is asked for one bracket after the other, and only for workers that no
    verdict keeps busy: for ``num`` trials, or (None) for all missing trials of a bracket.

    Args:
        brackets: The brackets, in their order.
        verdicts: What decides about earlier trials.
        sampler: The source of configurations.
        history: The history.
        space: The search space.
        num: The number of workers that wait, for a sampler that learns.
        rng: The random numbers of this decision.
    """

    def num_missing(group: int) -> int:
        return brackets[group].num_trials - len(history.in_group(group))

    if sampler.adapts and (out := verdicts(lambda group: not num_missing(group))):
        return out
    # Brackets are filled in order, and there may be thousands, so search by bisection.
    first = bisect_left(range(len(brackets)), 1, key=lambda g: min(num_missing(g), 1))
    starts = (
        (group, brackets[group].epochs[0])
        for group in range(first, len(brackets))
        for _ in range(num_missing(group))
    )
    if num is None:
        num = num_missing(first) if first < len(brackets) else 0
    fresh = draw(sampler, history, space, starts=starts, num=num, rng=rng)
    # If the sampler is exhausted, incomplete brackets will not get more trials.
    return [*fresh] or verdicts(lambda _: True)


class _Undecided:
    """Groups that wait for a verdict of a rule, kept up to date as a history grows.

    A verdict depends on the trials of its group alone. So a group without a verdict is not checked
    again before one of its trials has changed.
    """

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self._num_moves = 0

    @classmethod
    def of(cls, history: History, rule: Hashable) -> _Undecided:
        found = _KNOWN.setdefault(history, {}).setdefault(rule, cls())
        moves, settled = history.moves, history.settled
        for number in moves[found._num_moves :]:
            group = history[number].group
            # While a trial of the group is running, no rung is complete.
            if isinstance(group, int) and group in settled:
                found.groups.add(group)
            else:
                found.groups.discard(group)
        found._num_moves = len(moves)
        return found


_KNOWN: WeakKeyDictionary[History, dict[Hashable, _Undecided]] = WeakKeyDictionary()


def _standard_brackets(max_epochs: int, *, eta: int) -> list[Bracket]:
    """Return the paper's brackets, in integers: ``log(243, 3)`` is 4.999... in floating point."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessiveHalving(RungAlgorithm):
    """Trains all trials briefly, then promotes the best ``1 / eta`` at each rung.

    Promoted trials train ``eta`` times as long. Jamieson and Talwalkar, "Non-stochastic Best Arm
    Identification and Hyperparameter Optimization", AISTATS 2016, algorithm 1. A rung of ``n``
    trials keeps its best ``n // eta`` (at least one) once all have reached it. A failed trial
    counts as having reached it, and as the worst.

    >>> halving = SuccessiveHalving(max_epochs=81, num_trials=81)
    >>> halving.rungs()
    (1, 3, 9, 27, 81)
    """

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the verdict on a complete rung."""
        rungs = self.rungs()
        starts = repeat((0, rungs[0]), max(self.num_trials - len(history), 0))
        fresh = draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        return fresh or halve(history, rungs, eta=self.eta)


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketAlgorithm(Algorithm):
    """An algorithm that trains ``num_trials`` trials in brackets (None: each bracket once)."""

    max_epochs: int
    eta: int = 3
    num_trials: int | None = None
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_halving(self, eta=self.eta, min_epochs=1, max_epochs=self.max_epochs)
        if self.num_trials is not None:
            check_counts(self, num_trials=self.num_trials)
        check_sampler(self, self.sampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperband(BracketAlgorithm):
    """Successive halving in brackets, from many trials that start short to few trained fully.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 2018,
    algorithm 1. All brackets are proposed at once and halved independently; with a sampler that
    learns from results, they are proposed one after the other. ``Trial.group`` is the bracket. With
    ``num_trials``, the brackets repeat, from the widest on, until that many trials are drawn; the
    last one is cut short.

    >>> [(bracket.num_trials, bracket.epochs) for bracket in Hyperband(max_epochs=9).brackets()]
    [(9, (1, 3, 9)), (5, (3, 9)), (3, (9,))]
    """

    def brackets(self) -> tuple[Bracket, ...]:
        """Return the brackets, widest first; with ``num_trials``, as many as it needs."""
        return brackets_of(self.max_epochs, eta=self.eta, num_trials=self.num_trials)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, or the verdicts on complete rungs."""
        brackets = self.brackets()
        return fill_brackets(
            brackets,
            verdicts_by(Halving(eta=self.eta), brackets, history),
            sampler=self.sampler,
            history=history,
            space=space,
            num=num,
            rng=rng,
        )


@with_advice()
def BOHB(  # noqa: N802
    *,
    max_epochs: int,
    eta: int = 3,
    num_trials: int | None = None,
    random_share: float = 1 / 3,
    share: float = 0.0,
) -> Hyperband:
    """Return Hyperband with configurations from kernel densities of good and bad trials.

    Falkner, Klein and Hutter, "BOHB: Robust and Efficient Hyperparameter Optimization at Scale",
    ICML 2018. This is short for a ``Hyperband`` with a ``KDESampler`` and the authors' constants;
    write that out to set the model's other options.

    Args:
        max_epochs: Most epochs that a trial is trained.
        eta: One in ``eta`` trials is promoted at each rung.
        num_trials: Number of trials; the brackets repeat until all are drawn (default: each bracket
            once).
        random_share: Share of the draws that are random.
        share: Part of the best candidate's lead over the median that may be given up to share
            training.

    Raises:
        AlgorithmError: An option is out of range.

    >>> BOHB(max_epochs=27, num_trials=100).sampler
    KDESampler(top_share=0.15, num_candidates=64, random_share=0.3333333333333333,
        bandwidth_factor=3.0, min_bandwidth=0.001, min_points=None, share=0.0)
    """
    return Hyperband(
        max_epochs=max_epochs,
        eta=eta,
        num_trials=num_trials,
        sampler=KDESampler(min_bandwidth=1e-3, random_share=random_share, share=share),
    )
