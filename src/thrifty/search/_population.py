"""Population-based training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from thrifty.core import AlgorithmError
from thrifty.space import Choice, Domain, Float, Int, MultiStep, Space, Timeline

from ._algorithm import Algorithm, check_sampler, draw
from ._history import Decision, History, Leaderboard, Proposal, Stop
from .samplers import RandomSampler, Sampler
from .samplers._base_sampler import check_counts, option_error


Ranking = list[tuple[float, int]]

_SETTLED: WeakKeyDictionary[History, dict[tuple[int, float], int]] = WeakKeyDictionary()
"""The last generation of each history that is decided, by interval and quantile.

No member waits before it any more, so no later ask ranks it again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationBasedTraining(Algorithm):
    """Population-based training: the worst members continue from the best with varied values.

    Jaderberg et al., "Population Based Training of Neural Networks", 2017, sections 3 and 4.1
    (truncation selection). It runs in lockstep, every ``interval`` epochs, so that the result does
    not depend on the number of workers.

    A member of the worst ``quantile`` is stopped. A new trial replaces it, which *is* a donor from
    the best ``quantile`` up to the current epoch: its training is shared, and no checkpoint is
    copied. From there on, each hyper-parameter named in ``explore`` gets a new value: with
    probability ``resample`` it is drawn anew, otherwise it is multiplied by one of ``perturb`` (a
    ``Choice`` of numbers moves to a neighbour). ``explore`` must be given, because some
    hyper-parameters, such as a width, cannot change midway. ``Trial.group`` is the generation in
    which the trial was born.

    >>> PopulationBasedTraining(
    ...     max_epochs=20, population=8, interval=5, explore=("lr",)
    ... ).generations()
    (5, 10, 15, 20)
    >>> continued(0.1, 0.12, epoch=5)  # the learning rate of a member born at epoch 5
    MultiStep((0.1, 0.12), milestones=(5,))
    """

    max_epochs: int
    population: int
    interval: int
    explore: tuple[str, ...] = ()
    perturb: tuple[float, ...] = (0.8, 1.2)
    quantile: float = 0.25
    resample: float = 0.25
    sampler: Sampler = field(default_factory=RandomSampler)

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(
            self, max_epochs=self.max_epochs, population=self.population, interval=self.interval
        )
        _check_options(self)
        check_sampler(self, self.sampler)

    @property
    def varied(self) -> tuple[str, ...]:
        """Hyper-parameters that the algorithm changes while a trial trains."""
        return self.explore

    def generations(self) -> tuple[int, ...]:
        """Return the epochs at which the population is compared, and ``max_epochs``."""
        return (*range(self.interval, self.max_epochs, self.interval), self.max_epochs)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return the first population, or the next generation once the previous one is complete."""
        _check_space(self, space)
        epochs = self.generations()
        num_missing = max(self.population - len(history.in_group(0)), 0)
        fresh = draw(
            self.sampler,
            history,
            space,
            starts=repeat((0, epochs[0]), num_missing),
            num=num,
            rng=rng,
        )
        if fresh:
            return fresh
        num_members = len(history.in_group(0))
        settled = _SETTLED.setdefault(history, {})
        rule = (self.interval, self.quantile)
        for born in range(settled.get(rule, 0) + 1, len(epochs)):
            boards = [history.leaderboard(epochs[born - 1], group=g) for g in range(born)]
            num_alive = sum(board.num_alive for board in boards)
            if sum(map(len, boards)) < num_members or not num_alive:
                return []
            ranking = _ranking(boards)
            _, losers = self._select(history, ranking, epochs[born - 1])
            if len(history.in_group(born)) < len(losers) or any(
                history.waiting(epochs[born - 1], group=g) for g in range(born)
            ):
                return self._next(history, space, ranking, born=born, rng=rng)
            settled[rule] = born
        return []

    def _num_exchanged(self, num_members: int) -> int:
        """Return how many members are replaced if no more than that have failed."""
        return min(max(int(self.quantile * num_members), 1), num_members // 2)

    def _next(
        self,
        history: History,
        space: Space,
        ranking: Ranking,
        *,
        born: int,
        rng: np.random.Generator,
    ) -> list[Decision]:
        """Return the open decisions about a generation; none if the history has all of it."""
        here, target = self.generations()[born - 1 : born + 1]
        donors, losers = self._select(history, ranking, here)
        out: list[Decision] = []
        for _, number in ranking:
            if history[number].state == "waiting" and history[number].reached == here:
                stays = number not in losers
                out.append(
                    Proposal(target=target, trial=number, group=history[number].group)
                    if stays
                    else Stop(trial=number)
                )
        for _ in range(len(history.in_group(born)), len(losers)):
            donor = donors[int(rng.integers(len(donors)))]
            config = self._branch(history[donor].config, space, epoch=here, rng=rng)
            out.append(Proposal(target=target, config=config, group=born, parent=(donor, here)))
        return out

    def _select(self, history: History, ranking: Ranking, here: int) -> tuple[list[int], set[int]]:
        """Return donors and losers of a generation that has reached an epoch.

        Members that failed, and those that a person has stopped there, always lose and are never
        donors.
        """
        num = self._num_exchanged(len(ranking))
        failed = [number for score, number in ranking if score == -np.inf]
        losers = {*failed, *(number for _, number in ranking[len(ranking) - num :])}
        trials = (history[number] for _, number in ranking)
        losers |= {t.number for t in trials if t.state == "stopped" and t.target == here}
        donors = [number for _, number in ranking if number not in losers]
        return donors[: max(num, 1)], losers

    def _branch(
        self, config: Any, space: Space, *, epoch: int, rng: np.random.Generator
    ) -> dict[str, Any]:
        """Return the donor's configuration until ``epoch``, with explored values from there on."""
        now = Timeline(config, epochs=self.max_epochs)
        out = dict(config)
        for name in self.explore:
            if name in config:
                value = now.values(name, epoch - 1, num_steps=1)
                fresh = self._explored(space[name], value, rng)
                out[name] = continued(config[name], fresh, epoch=epoch)
        return out

    def _explored(self, domain: Domain, value: Any, rng: np.random.Generator) -> Any:
        if rng.random() < self.resample:
            return domain.sample(rng)
        moved = [perturbed(domain, value, factor) for factor in self.perturb]
        # At a bound some factors change nothing, and a copy of the donor would teach nothing.
        different = [other for other in moved if other != value] or [value]
        return different[int(rng.integers(len(different)))]


def continued(before: Any, fresh: Any, *, epoch: int) -> Any:
    """Return ``before`` until ``epoch`` and ``fresh`` from there on.

    The result is flat, however many generations there were.

    >>> continued(continued(0.1, 0.12, epoch=5), 0.1, epoch=10)
    MultiStep((0.1, 0.12, 0.1), milestones=(5, 10))
    """
    if not isinstance(before, MultiStep):
        return before if before == fresh else MultiStep((before, fresh), milestones=(epoch,))
    if before.levels[-1] == fresh:
        return before
    return MultiStep((*before.levels, fresh), milestones=(*before.milestones, epoch))


def perturbed(domain: Domain, value: Any, factor: float) -> Any:
    """Return ``value * factor`` within the domain, or the neighbour in a choice of numbers.

    >>> perturbed(Float(0.01, 0.1), 0.09, 1.2), perturbed(Choice([16, 32, 64]), 32, 0.8)
    (0.1, 16)
    """
    if isinstance(domain, Choice):
        options = sorted(domain.options)
        place = options.index(value) + (1 if factor > 1 else -1)
        return options[min(max(place, 0), len(options) - 1)]
    assert isinstance(domain, Float | Int)
    moved = min(max(value * factor, domain.low), domain.high)
    if isinstance(domain, Float) and domain.step is None:
        return float(moved)
    # Move by whole steps, and by at least one: 2 * 1.2 must not round to 2 again.
    step = domain.step or 1
    before = round((value - domain.low) / step)
    after = round((moved - domain.low) / step)
    if after == before:
        after += 1 if factor > 1 else -1
    levels = domain.low + min(max(after, 0), int(domain.size()) - 1) * step
    return levels if isinstance(domain, Int) else float(f"{levels:.15g}")


def _ranking(boards: Sequence[Leaderboard]) -> Ranking:
    """Return all members that have completed a generation, best first, wherever they were born."""
    entries = [entry for board in boards for entry in board]
    return sorted(entries, key=lambda entry: (-entry[0], entry[1]))


def _check_options(self: PopulationBasedTraining) -> None:
    if isinstance(self.explore, str) or not self.explore:
        raise option_error(
            self,
            "give the names of the hyper-parameters that may change during training, such as "
            'explore=("lr",)',
            explore=self.explore,
        )
    if self.population < 2:
        advice = "a trial needs another to copy; use 2 or more"
        raise option_error(self, advice, population=self.population)
    if self.interval >= self.max_epochs:
        advice = "nothing would ever be exchanged; lower interval"
        raise option_error(self, advice, interval=self.interval, max_epochs=self.max_epochs)
    if not self.perturb or any(not f > 0 or f == 1 for f in self.perturb):
        advice = "give positive factors other than 1, such as (0.8, 1.2)"
        raise option_error(self, advice, perturb=self.perturb)
    if not 0.0 < self.quantile <= 0.5:
        raise option_error(self, "it must be above 0 and at most 0.5", quantile=self.quantile)
    if not 0.0 <= self.resample <= 1.0:
        advice = "it is a probability between 0 and 1"
        raise option_error(self, advice, resample=self.resample)


def _check_space(self: PopulationBasedTraining, space: Space) -> None:
    for name in self.explore:
        if name not in space.names:
            raise AlgorithmError(
                f"PopulationBasedTraining explores {name!r}, which the space does not have "
                f"({', '.join(space.names)}); name others in explore"
            )
        if not _is_numeric(space[name]):
            raise AlgorithmError(
                f"PopulationBasedTraining explores {name!r}, which is {space[name]!r}; only "
                "Float, Int and a Choice of numbers can be explored"
            )
    for name in space.names:
        for condition in getattr(space[name], "conditions", ()):
            if condition.name in self.explore:
                raise AlgorithmError(
                    f"PopulationBasedTraining explores {condition.name!r}, but whether there "
                    f"is {name!r} depends on it; take it out of explore"
                )


def _is_numeric(domain: object) -> bool:
    if isinstance(domain, Choice):
        return all(isinstance(o, int | float) and not isinstance(o, bool) for o in domain.options)
    return isinstance(domain, Float | Int)
