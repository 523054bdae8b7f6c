"""The interface of a search algorithm, and the simple ones: grid, random, median stopping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import islice, pairwise, repeat
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.core import with_advice
from thrifty.space import Amount, EpochSize, Space
from thrifty.space._domain import amounts_in

from ._history import Decision, History, Proposal, SortedList, Stop, Trial
from .samplers import GridSampler, RandomSampler, Sampler
from .samplers._base_sampler import check_counts, option_error


class Algorithm(ABC):
    """A search algorithm: a frozen dataclass of options, without any state.

    It decides what to train and for how long. It takes all its knowledge from the history, so a
    study can be resumed from its records alone.
    """

    __slots__ = ()
    max_epochs: int
    """Most epochs that any trial is trained."""
    follows_horizons: ClassVar[bool] = False
    """Whether it trains each trial to the horizon that its space gives it, and no further.

    Algorithms that compare trials after the same number of epochs cannot: there, some trials have
    cooled down and others have not.
    """
    can_grow: ClassVar[bool] = False
    """Whether a study of it may get more trials later.

    So it is if what it has decided does not depend on ``num_trials``, as with a rung's size.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the class say which options there are if one that it does not have is given.

        A dataclass with slots is created twice; the second time, it has its ``__init__``.
        """
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = with_advice()(cls.__init__)  # type: ignore[method-assign]

    def why_not_longer(self, before: int) -> str:
        """Return why past decisions do not hold for this ``max_epochs``; empty if they do.

        Args:
            before: The smaller ``max_epochs`` with which these decisions were made.
        """
        return (
            f"{type(self).__name__} may have decided otherwise with more than {before} epochs, so "
            "its past decisions need not hold"
        )

    @property
    def varied(self) -> tuple[str, ...]:
        """Hyper-parameters that the algorithm changes while a trial trains."""
        return ()

    def amounts(self) -> tuple[Amount, ...]:
        """Return the options that are in steps, tokens or epochs, so that their value is unknown.

        Algorithms check their options once they are in epochs.

        Raises:
            AlgorithmError: Such an amount stands where no epochs are meant.
        """
        given = _amounts_of(self)
        for name, value in given.items():
            if not name.endswith(_TIMES):
                raise option_error(
                    self,
                    f"{name} is not a time; give a plain value, not steps, tokens or epochs",
                    **{name: value},
                )
        # The horizon is first: its unit is the one in which a study shows what it trains.
        values = sorted(given.items(), key=lambda item: item[0] != "max_epochs")
        return amounts_in(tuple(value for _, value in values))

    def in_epochs(self, size: EpochSize) -> Self:
        """Return the same algorithm with all options in whole epochs.

        Raises:
            UsageError: An option is no whole number of epochs (the message names the nearest two
                that are), or the size of an epoch is unknown in its unit.

        >>> from thrifty.space import EpochSize, steps
        >>> GridSearch(max_epochs=steps(5_000)).in_epochs(EpochSize(steps=500))
        GridSearch(max_epochs=10, levels=5)
        """
        if not self.amounts():
            return self

        def whole(name: str, value: Any) -> Any:
            if isinstance(value, Amount):
                return size.whole(value, what=f"{type(self).__name__}: {name}")
            return tuple(whole(name, item) for item in value) if isinstance(value, tuple) else value

        given = {name: whole(name, value) for name, value in _amounts_of(self).items()}
        return replace(self, **given)  # type: ignore[type-var]

    @abstractmethod
    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return what to do next, given the history so far.

        The study calls this when a worker is idle. An algorithm that knows all of its next trials
        returns them all at once, whatever ``num`` is: the more the search plan knows, the more it
        shares. An algorithm that adapts to every result returns at most ``num``. No decision while
        trials run means: wait for them. No decision while none runs means: the study is done.

        The answer depends on the arguments alone. ``rng`` is a fresh stream named by the seed and
        ``history.num_decisions``.
        """


_TIMES = ("epochs", "interval", "horizons")
"""Ends of the names of options that count epochs."""


def why_not_longer(algorithm: Algorithm, before: int) -> str:
    """Return why an algorithm's past decisions do not hold for its ``max_epochs`` now.

    Empty if they do. A class of the user's that derives from one of thrifty's may decide otherwise,
    so it has to say so itself.

    Args:
        algorithm: The algorithm.
        before: The smaller ``max_epochs`` with which these decisions were made.
    """
    kind = type(algorithm)
    if kind.__module__.partition(".")[0] == "thrifty" or "why_not_longer" in vars(kind):
        return algorithm.why_not_longer(before)
    return f"{Algorithm.why_not_longer(algorithm, before)}; if they do, define why_not_longer in it"


def _amounts_of(algorithm: Algorithm) -> dict[str, Any]:
    if not is_dataclass(algorithm):
        return {}
    options = {each.name: getattr(algorithm, each.name) for each in fields(algorithm)}
    return {
        name: value
        for name, value in options.items()
        if isinstance(value, Amount | tuple) and amounts_in(value)
    }


def next_decisions(
    algorithm: Algorithm, history: History, space: Space, *, num: int, rng: np.random.Generator
) -> Sequence[Decision]:
    """Ask an algorithm what to do next; once it is done, propose what is still enqueued.

    Most algorithms have a number of trials. What the user enqueues later would not be among them,
    so it is trained to its end, in a group of its own that no rung compares.

    Args:
        algorithm: The algorithm.
        history: All trials so far.
        space: The search space.
        num: How many trials can start.
        rng: The stream of this question; see ``Algorithm.ask``.

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> history, algorithm = History(), RandomSearch(max_epochs=9, num_trials=1)
    >>> for decision in next_decisions(algorithm, history, space, num=1, rng=rng):
    ...     history.record_scores(history.record_decision(decision), [0.5] * 9)
    >>> history.record_enqueued({"lr": 0.2})
    >>> [each.config for each in next_decisions(algorithm, history, space, num=1, rng=rng)]
    [{'lr': 0.2}]
    """
    found = algorithm.ask(history, space, num=num, rng=rng)
    if found or history.num_running:
        return found
    longer = going_on(history, history.in_group(_LATER), target=algorithm.max_epochs)
    if longer or not history.num_enqueued:
        return longer
    configs = history.next_enqueued(history.num_enqueued)
    return [
        Proposal(
            target=algorithm.max_epochs if horizon is None else horizon,
            config=config,
            group=_LATER,
            horizon=horizon,
        )
        for config in configs
        for horizon in [space.horizon_of(config)]
    ]


_LATER = "enqueued"
"""The group of trials that were enqueued after the algorithm was done."""


def going_on(history: History, numbers: Iterable[int], *, target: int) -> list[Decision]:
    """Return proposals to train trials to ``target`` that wait before it.

    These trials had ended when ``max_epochs`` was smaller.
    """
    if not history.num_unfinished:
        return []
    trials = (history[number] for number in numbers)
    ends = ((t, target if t.horizon is None else min(target, t.horizon)) for t in trials)
    return [
        Proposal(target=end, trial=trial.number, group=trial.group)
        for trial, end in ends
        if trial.state == "waiting" and trial.reached < end
    ]


def check_sampler(owner: object, sampler: object) -> None:
    """Raise AlgorithmError unless ``sampler`` is a sampler."""
    if not isinstance(sampler, Sampler):
        hint = f"{sampler.__name__}()" if isinstance(sampler, type) else "RandomSampler()"
        raise option_error(owner, f"give a sampler, such as {hint}", sampler=sampler)


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

    There are fewer if the sampler is exhausted, and at most ``num`` if it learns from results. In a
    space with horizons, a trial's target is at most its horizon.
    """
    places = list(islice(starts, num) if sampler.adapts else starts)
    configs = list(history.next_enqueued(len(places)))
    missing = len(places) - len(configs)
    if missing:
        configs += sampler.sample(history, space, num=missing, rng=rng)
    horizons = map(space.horizon_of, configs)
    return [
        Proposal(
            target=target if horizon is None else min(target, horizon),
            config=config,
            group=group,
            horizon=horizon,
        )
        for (group, target), config, horizon in zip(places, configs, horizons, strict=False)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSearch(Algorithm):
    """Grid search: trains every configuration of the grid for ``max_epochs``.

    Intervals are thinned to ``levels`` values. Each trial of a ``Ladder`` is trained to its own
    horizon.

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> asked = GridSearch(max_epochs=9, levels=3).ask(History(), space, num=1, rng=rng)
    >>> [(proposal.config["lr"], proposal.target) for proposal in asked]
    [(0.1, 9), (0.2, 9), (0.3, 9)]
    """

    max_epochs: int
    levels: int = 5
    follows_horizons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, max_epochs=self.max_epochs, levels=self.levels)

    def why_not_longer(self, before: int) -> str:
        """Return an empty text: trials that have ended go on to the new end."""
        return ""

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all configurations of the grid that are not in the history yet."""
        sampler = GridSampler(levels=self.levels)
        num_left = sampler.size(space) - history.num_drawn + history.num_enqueued
        starts = repeat((0, self.max_epochs), num_left)
        return [
            *going_on(history, range(len(history)), target=self.max_epochs),
            *draw(sampler, history, space, starts=starts, num=num, rng=rng),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSearch(Algorithm):
    """Random search: trains ``num_trials`` configurations of a sampler for ``max_epochs``.

    Each trial of a ``Ladder`` is trained to its own horizon. Bergstra and Bengio, "Random Search
    for Hyper-Parameter Optimization", JMLR 2012.

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> len(RandomSearch(max_epochs=9, num_trials=20).ask(History(), space, num=1, rng=rng))
    20
    """

    max_epochs: int
    num_trials: int
    sampler: Sampler = field(default_factory=RandomSampler)
    follows_horizons: ClassVar[bool] = True
    can_grow: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, max_epochs=self.max_epochs, num_trials=self.num_trials)
        check_sampler(self, self.sampler)

    def why_not_longer(self, before: int) -> str:
        """Return an empty text: trials that have ended go on to the new end."""
        return ""

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet."""
        starts = repeat((0, self.max_epochs), max(self.num_trials - len(history), 0))
        return [
            *going_on(history, range(len(history)), target=self.max_epochs),
            *draw(self.sampler, history, space, starts=starts, num=num, rng=rng),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued(Algorithm):
    """Trains the configurations that are enqueued, and nothing else.

    The study is done when all of them are trained, and goes on when others are enqueued. Each trial
    of a ``Ladder`` is trained to its own horizon.

    Args:
        max_epochs: The length of a whole training, for which schedules without an end are made.
        epochs: How far each trial is trained (default: to its end).

    >>> from thrifty.search import History
    >>> from thrifty.space import Float, Space
    >>> space, rng = Space(lr=Float(0.1, 0.3)), np.random.default_rng(0)
    >>> history = History()
    >>> Enqueued(max_epochs=9).ask(history, space, num=1, rng=rng)
    []
    >>> history.record_enqueued({"lr": 0.2})
    >>> [proposal.config for proposal in Enqueued(max_epochs=9).ask(history, space, num=1, rng=rng)]
    [{'lr': 0.2}]
    """

    max_epochs: int
    epochs: int | None = None
    follows_horizons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, max_epochs=self.max_epochs, epochs=self.target)
        if self.target > self.max_epochs:
            raise option_error(
                self,
                "a trial has no more than max_epochs; train it for fewer",
                epochs=self.epochs,
                max_epochs=self.max_epochs,
            )

    @property
    def target(self) -> int:
        """The epoch to which each trial is trained, unless its horizon is shorter."""
        return self.max_epochs if self.epochs is None else self.epochs

    def why_not_longer(self, before: int) -> str:
        """Return an empty text: trials that have ended go on to the new end."""
        return ""

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all enqueued trials that are not in the history yet."""
        starts = repeat((0, self.target), history.num_enqueued)
        return [
            *going_on(history, range(len(history)), target=self.target),
            *draw(RandomSampler(), history, space, starts=starts, num=num, rng=rng),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianStopping(Algorithm):
    """Stops trials whose best score is below the median of the other trials' average scores.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2.
    Scores up to the current epoch count. Trials are judged after ``grace_epochs`` and every
    ``interval`` epochs from then on, against the other trials that have come as far. While those
    are fewer than ``min_trials``, no trial is stopped.

    >>> MedianStopping(max_epochs=10, num_trials=20, grace_epochs=4, interval=3).checkpoints()
    (4, 7, 10)
    """

    max_epochs: int
    num_trials: int
    grace_epochs: int = 1
    min_trials: int = 5
    interval: int = 1
    sampler: Sampler = field(default_factory=RandomSampler)
    can_grow: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(
            self,
            max_epochs=self.max_epochs,
            num_trials=self.num_trials,
            grace_epochs=self.grace_epochs,
            min_trials=self.min_trials,
            interval=self.interval,
        )
        if self.grace_epochs > self.max_epochs:
            raise option_error(
                self,
                "no trial would ever be judged; lower grace_epochs",
                grace_epochs=self.grace_epochs,
                max_epochs=self.max_epochs,
            )
        check_sampler(self, self.sampler)

    def checkpoints(self) -> tuple[int, ...]:
        """Return the epochs at which trials are judged, and ``max_epochs``."""
        return (*range(self.grace_epochs, self.max_epochs, self.interval), self.max_epochs)

    def why_not_longer(self, before: int) -> str:
        """Return why trials that have ended at ``before`` would not be judged there."""
        if before in self.checkpoints():
            return ""
        return (
            f"MedianStopping judges trials at {self.checkpoints()} then, and not at "
            f"{before}, where trials have ended"
        )

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return all trials that are not in the history yet, and verdicts on waiting trials."""
        checkpoints = self.checkpoints()
        starts = repeat((0, checkpoints[0]), max(self.num_trials - len(history), 0))
        out: list[Decision] = []
        out += draw(self.sampler, history, space, starts=starts, num=num, rng=rng)
        averages = _Averages.of(history, checkpoints)
        for here, there in pairwise(checkpoints):
            waiting = history.waiting(here)
            if waiting:
                ascending = averages.at[here]
                out += [self._verdict(history[number], there, ascending) for _, number in waiting]
        return out

    def _verdict(self, trial: Trial, there: int, ascending: SortedList[float]) -> Decision:
        """Return whether a trial stops or continues.

        ``ascending`` has the averages of all trials that have come as far, including this one.
        """
        judged = len(ascending) > self.min_trials
        own = _average(trial, trial.reached)
        if judged and max(trial.scores) < _median_without(ascending, own):
            return Stop(trial=trial.number)
        return Proposal(target=there, trial=trial.number)


class _Averages:
    """Average scores of all trials at each checkpoint, kept up to date as a history grows."""

    def __init__(self, checkpoints: Sequence[int]) -> None:
        self.at: dict[int, SortedList[float]] = {epoch: SortedList() for epoch in checkpoints}
        self._reached: list[int] = []
        """Epoch that each trial had reached when it was last counted."""
        self._num_moves = 0

    @classmethod
    def of(cls, history: History, checkpoints: tuple[int, ...]) -> _Averages:
        known = _KNOWN.setdefault(history, {})
        if checkpoints not in known:
            known[checkpoints] = cls(checkpoints)
        found = known[checkpoints]
        found._catch_up(history)
        return found

    def _catch_up(self, history: History) -> None:
        self._reached += [0] * (len(history) - len(self._reached))
        for number in history.moves[self._num_moves :]:
            trial, before = history[number], self._reached[number]
            for epoch in range(before + 1, trial.reached + 1):
                if epoch in self.at:
                    self.at[epoch].add(_average(trial, epoch))
            self._reached[number] = trial.reached
        self._num_moves = len(history.moves)


_KNOWN: WeakKeyDictionary[History, dict[tuple[int, ...], _Averages]] = WeakKeyDictionary()


def _average(trial: Trial, epoch: int) -> float:
    return sum(trial.scores[:epoch]) / epoch


def _median_without(ascending: SortedList[float], own: float) -> float:
    """Return the median of all values but one.

    Unlike ``np.median``, it accepts -inf (an epoch without a finite score).
    """
    place, num = ascending.rank(own), len(ascending) - 1
    low, high = (ascending[index + (index >= place)] for index in ((num - 1) // 2, num // 2))
    return low if low == high else (low + high) / 2
