"""Freeze-thaw search: a model of all learning curves decides which trial goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from thrifty.space import Config, Schedule, Space

from ._algorithm import Algorithm, check_sampler
from ._curve_model import CannotFit, CurveModel, FloatArray, IntArray, Rows
from ._halving import rungs_between
from ._history import Decision, History, Proposal, Trial
from ._observations import ConfigCache, coordinates_of, points_of
from ._stage_prices import StageForest
from .samplers import GridSampler, RandomSampler, Sampler
from .samplers._base_sampler import Picker, check_counts, check_shares, option_error


GROWTH = 1.5
"""A trial goes on by about half of the epochs that it has, so decisions grow with the logarithm."""
NUM_ACTIVE = 96
"""Trials that the model sees."""
NUM_ROWS = 240
NUM_DRAWS = 64
"""New configurations among which the model chooses."""
NUM_PRIOR = 32
NUM_CONDITIONED = 16
"""Picks of one answer after which the model is told; with more workers, after every few picks."""
FLOOR = 0.05
"""How far beyond the best score the modelled floor lies, in units of the scores' scale."""
LEAST_GAIN, MOST_GAIN = -2.0, 0.3
"""Thresholds lie ``10**u`` above the best transformed score, with ``u`` between these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeThaw(Algorithm):
    """Trains the trial that is most likely to become the best for the price of its next epochs.

    A Gaussian process models the curves of all trials over configurations, epochs and schedules.
    Each decision draws a horizon and a threshold, the same for all candidates. The candidates are
    the waiting trials and new configurations. The one with the highest probability of exceeding the
    threshold, divided by the epochs that have to be trained until then, goes on to its next rung.
    Epochs that another trial with equal hyper-parameters trains or has trained cost nothing, and
    their scores are known.

    No trial is stopped: each may go on later. A study ends when its budget is used up; the trial
    with the best score is then trained to ``max_epochs``.

    Args:
        max_epochs: Most epochs that any trial is trained.
        num_trials: Most configurations that are drawn.
        budget_epochs: Epochs that the study trains, shared ones counted once (default: as many as
            ``ASHA`` trains with as many trials). Training the best trial to its end may exceed it
            by less than ``max_epochs``.
        full_share: Share of the trials that train to ``max_epochs`` at once, from 0 to 1, as a
            hedge against curves that cross.
        sampler: Source of new configurations. The model chooses among many draws of a sampler that
            does not learn; from one that learns, it takes the next.

    Raises:
        AlgorithmError: An option is out of range.

    >>> FreezeThaw(max_epochs=27, num_trials=100).rungs()
    (1, 2, 3, 5, 8, 12, 18, 27)

    References:
        Swersky, Snoek and Adams, "Freeze-Thaw Bayesian Optimization", 2014, for the curves' own
        parts and for pausing. Rakotoarison et al., "In-Context Freeze-Thaw Bayesian Optimization
        for Hyperparameter Optimization", ICML 2024, for random horizons and thresholds.
    """

    max_epochs: int
    num_trials: int
    budget_epochs: int | None = None
    full_share: float = 0.1
    sampler: Sampler = field(default_factory=RandomSampler)
    can_grow: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.amounts():
            return
        check_counts(self, max_epochs=self.max_epochs, num_trials=self.num_trials)
        check_shares(self, full_share=self.full_share)
        check_sampler(self, self.sampler)
        if self.budget_epochs is None:
            return
        check_counts(self, budget_epochs=self.budget_epochs)
        if self.budget_epochs < self.max_epochs:
            raise option_error(
                self,
                "no trial could be trained to its end; raise budget_epochs to max_epochs or more",
                budget_epochs=self.budget_epochs,
                max_epochs=self.max_epochs,
            )

    def rungs(self) -> tuple[int, ...]:
        """Return the epochs at which trials pause; the last is ``max_epochs``."""
        return _rungs(self.max_epochs)

    def budget(self) -> int:
        """Return how many epochs the study trains, shared ones counted once.

        >>> FreezeThaw(max_epochs=27, num_trials=27).budget()
        81
        """
        if self.budget_epochs is not None:
            return self.budget_epochs
        total, before, num = 0, 0, self.num_trials
        for rung in rungs_between(1, self.max_epochs, eta=3):
            total += max(num, 1) * (rung - before)
            num, before = num // 3, rung
        return max(total, self.max_epochs)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return at most ``num`` trials to train further, or new ones."""
        forest = StageForest.of(history, epochs=self.max_epochs)
        leader = _leader(history, self.rungs())
        reserve = self.max_epochs - leader.reached if leader is not None else 0
        picks = _Picks(self, history, space, forest, rng)
        left = self.budget() - forest.num_epochs - reserve
        out: list[Decision] = []
        for pick in picks.best(num):
            left -= pick.price
            if left < 0:
                break
            out.append(pick.proposal())
        if out or history.num_running or leader is None or leader.state != "waiting":
            return out
        return [Proposal(target=self.max_epochs, trial=leader.number)] if reserve else []


@lru_cache(maxsize=64)
def _rungs(max_epochs: int) -> tuple[int, ...]:
    rungs = [1]
    while rungs[-1] < max_epochs:
        rungs.append(max(rungs[-1] + 1, round(rungs[-1] * GROWTH)))
    # The last rung is moved rather than followed by another shortly before the end.
    if len(rungs) > 2 and max_epochs - rungs[-2] < rungs[-2] - rungs[-3]:
        rungs.pop()
    return (*rungs[:-1], max_epochs)


def _leader(history: History, rungs: Sequence[int]) -> Trial | None:
    """Return the trial with the best last score, whether it waits or is done."""
    found: Trial | None = None
    for rung in rungs:
        for score, number in history.waiting(rung)[:1]:
            if found is None or (score, -number) > (found.scores[-1], -found.number):
                found = history[number]
    return found


# -- candidates ------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A waiting trial (``trial``), or a new configuration, and what is known about its curve.

    ``known`` are the scores that it has reported or that equal trials have. Its first ``requested``
    epochs are trained or will be.
    """

    config: Config
    trial: int | None
    known: tuple[float, ...]
    requested: int


class Pick(NamedTuple):
    """A candidate and the epoch to which it is trained next."""

    candidate: Candidate
    target: int

    @property
    def price(self) -> int:
        """Epochs that nothing else trains."""
        return max(self.target - self.candidate.requested, 0)

    def proposal(self) -> Proposal:
        """Return the decision."""
        trial = self.candidate.trial
        config = self.candidate.config if trial is None else None
        return Proposal(target=self.target, trial=trial, config=config)


class _Picks:
    """The candidates of one question, picked one after the other."""

    def __init__(
        self,
        algorithm: FreezeThaw,
        history: History,
        space: Space,
        forest: StageForest,
        rng: np.random.Generator,
    ) -> None:
        self._algorithm = algorithm
        self._history = history
        self._space = space
        self._forest = forest
        self._rng = rng
        self._rungs = algorithm.rungs()
        self._picker = Picker(history, share=0.0)
        self._num_new = 0
        """New trials of this answer."""
        self._batch = 1

    def best(self, num: int) -> Iterator[Pick]:
        """Yield at most ``num`` picks, the best first."""
        self._batch = num
        for config in self._history.next_enqueued(min(num, self._num_open())):
            num -= 1
            yield self._new(self._candidate(config, None))
        if num <= 0:
            return
        active = active_trials(self._history, self._rungs, num=NUM_ACTIVE)
        fresh = [self._candidate(config, None) for config in self._draws(num)]
        num_reported = sum(trial.reached > 0 for trial in active)
        if num_reported < self._num_first():
            # So few curves say nothing about others.
            for candidate in fresh[: min(num, self._num_open())]:
                yield self._new(candidate)
            if fresh and self._num_open() >= 0 and self._num_new:
                return
        waiting = [
            self._candidate(trial.config, trial.number)
            for trial in active
            if trial.state == "waiting" and trial.reached < self._algorithm.max_epochs
        ]
        try:
            yield from self._modelled(active, waiting, fresh, num)
        except CannotFit:
            yield from self._unmodelled(waiting, fresh, num)

    def _modelled(
        self, active: list[Trial], waiting: list[Candidate], fresh: list[Candidate], num: int
    ) -> Iterator[Pick]:
        """Yield picks by the model."""
        candidates = waiting + fresh
        if not candidates:
            return
        running = [
            (self._candidate(trial.config, trial.number), trial.target)
            for trial in active
            if trial.state == "running"
        ]
        view = CurveView(self._space, self._forest, self._rungs)
        model, top = view.model(active, self._history, [*candidates, *(c for c, _ in running)])
        if running:
            model.assume(view.places([c for c, _ in running], [t for _, t in running]))
        every = -(-num // NUM_CONDITIONED)
        untold: list[Pick] = []
        for _ in range(num):
            if not candidates:
                return
            index = self._best_of(model, view, candidates, top)
            if index is None:
                return
            candidate = candidates.pop(index)
            if candidate.trial is None:
                pick = self._new(candidate)
                if not self._algorithm.sampler.adapts:
                    pass
            else:
                pick = Pick(candidate, self._next_rung(candidate))
            yield pick
            untold.append(pick)
            if len(untold) == every:
                model.assume(
                    view.places([p.candidate for p in untold], [p.target for p in untold])
                )
                untold = []

    def _best_of(
        self, model: CurveModel, view: CurveView, candidates: list[Candidate], top: float
    ) -> int | None:
        """Return the index of the candidate to train; None if there may be no new trial."""
        rng, rungs = self._rng, self._rungs
        ahead = int(rng.integers(1, self._algorithm.max_epochs + 1))
        threshold = top + 10.0 ** rng.uniform(LEAST_GAIN, MOST_GAIN)
        is_full = self._is_full()
        if is_full:
            ahead = self._algorithm.max_epochs
        ends = [
            rungs[np.searchsorted(rungs, min(c.requested + ahead, rungs[-1]))] for c in candidates
        ]
        chance = model.exceeds(view.places(candidates, ends), threshold)
        price = np.array([max(e - c.requested, 1) for c, e in zip(candidates, ends, strict=True)])
        worth = np.log(np.maximum(chance, 1e-300)) - np.log(price)
        is_new = np.array([c.trial is None for c in candidates])
        allowed = ~is_new if self._num_open() <= 0 else np.ones(len(candidates), bool)
        if not allowed.any():
            return None
        if is_full and (allowed & is_new).any():
            allowed &= is_new
        return int(np.argmax(np.where(allowed, worth.round(6), -np.inf)))

    def _unmodelled(
        self, waiting: list[Candidate], fresh: list[Candidate], num: int
    ) -> Iterator[Pick]:
        """Yield new configurations, then the waiting trials, the most trained and best first."""
        for candidate in fresh[: min(num, self._num_open())]:
            num -= 1
            yield self._new(candidate)
        order = sorted(waiting, key=lambda c: (-len(c.known), -c.known[-1], c.trial))
        for candidate in order[: max(num, 0)]:
            yield Pick(candidate, self._next_rung(candidate))

    def _num_open(self) -> int:
        """Return how many new trials may still start."""
        return self._algorithm.num_trials - len(self._history) - self._num_new

    def _num_first(self) -> int:
        """Return how many trials report before the model decides."""
        num_coordinates = len(coordinates_of(self._space))
        return min(max(num_coordinates + 1, 3), 8, self._algorithm.num_trials)

    def _is_full(self) -> bool:
        """Return whether the next new trial is trained to the end at once."""
        number, share = len(self._history) + self._num_new, self._algorithm.full_share
        return math.floor((number + 1) * share) > math.floor(number * share)

    def _new(self, candidate: Candidate) -> Pick:
        full = self._is_full()
        self._num_new += 1
        target = self._algorithm.max_epochs if full else self._next_rung(candidate)
        return Pick(candidate, target)

    def _next_rung(self, candidate: Candidate) -> int:
        """Return the first rung for which something has to be trained."""
        rungs = self._rungs
        index = int(np.searchsorted(rungs, candidate.requested, side="right"))
        return rungs[min(index, len(rungs) - 1)]

    def _candidate(self, config: Config, trial: int | None) -> Candidate:
        prefix = self._forest.prefix(config)
        known: tuple[float, ...] = ()
        if prefix.reported:
            known = self._history[prefix.trial].scores[: prefix.reported]
        return Candidate(config, trial, known, prefix.requested)

    def _draws(self, num: int) -> list[dict[str, Any]]:
        """Return new configurations, none of them twice and none that a trial has."""
        sampler, history = self._algorithm.sampler, self._history
        if self._num_open() <= 0:
            return []
        if sampler.adapts:
            num_draws = min(num, self._num_open())
            found = sampler.sample(history, self._space, num=num_draws, rng=self._rng)
        elif isinstance(sampler, GridSampler):
            # The model takes points of the grid in any order, so read it from its start.
            num_draws = history.num_drawn + max(num, NUM_DRAWS)
            found = sampler.sample(History(), self._space, num=num_draws, rng=self._rng)
        else:
            num_draws = max(2 * num, NUM_DRAWS)
            found = sampler.sample(history, self._space, num=num_draws, rng=self._rng)
        return [dict(config) for config in found if not self._picker.is_known(config)]


def active_trials(history: History, rungs: Sequence[int], *, num: int) -> list[Trial]:
    """Return at most ``num`` trials: the best of each rung, and an even spread of the others.

    Deep rungs come first. Trials in training are among them, the newest first, up to a quarter.
    """
    if len(history) <= num:
        return list(history)
    found: dict[int, Trial] = {}
    for place, rung in enumerate(reversed(rungs)):
        board = history.leaderboard(rung)
        quota = (num - num // 4 - len(found)) // (len(rungs) - place)
        best = quota - quota // 3
        spread = np.linspace(best, len(board) - 1, quota - best).astype(int).tolist()
        for index in [*range(best), *spread]:
            if index < len(board):
                number = board[index][1]
                found.setdefault(number, history[number])
    for number in reversed(history.moves[-4 * num :]):
        if len(found) >= num:
            break
        found.setdefault(number, history[number])
    return sorted(found.values(), key=lambda trial: trial.number)


# -- what the model sees ---------------------------------------------------------------------------


class _Features(NamedTuple):
    """What the model knows about a configuration: ``decays`` and ``paths`` at each rung."""

    point: FloatArray
    decays: dict[str, FloatArray]
    paths: IntArray
    moves: bool


class CurveView:
    """Turns trials and candidates into rows of the model."""

    def __init__(self, space: Space, forest: StageForest, rungs: tuple[int, ...]) -> None:
        self._coordinates = coordinates_of(space)
        self._rungs = rungs
        self._features = _features(space, forest, rungs)
        self._names: list[str] = []
        self._moves = False

    def model(
        self, active: Sequence[Trial], history: History, candidates: Sequence[Candidate]
    ) -> tuple[CurveModel, float]:
        """Return the model of all active trials, and the best transformed score."""
        seen = [*_deepest(history.prior, NUM_PRIOR), *active]
        features = [self._features.of(trial.config) for trial in seen]
        both = [*features, *(self._features.of(c.config) for c in candidates)]
        self._names = sorted({name for each in both for name in each.decays})
        self._moves = any(each.moves for each in both)
        most = max(NUM_ROWS // max(len(seen), 1), 1)
        rows: dict[int, tuple[_Features, int, float]] = {}
        for trial, each in zip(seen, features, strict=True):
            for rung, score in self._observed(trial, most):
                rows.setdefault(int(each.paths[rung]), (each, rung, score))
        if not rows:
            raise CannotFit
        scores = np.array([score for _, _, score in rows.values()])
        last = [t.scores[-1] for t in seen if t.reached and math.isfinite(t.scores[-1])]
        scaled, top = _scaled(scores, np.array(last))
        places = self._rows([each for each, _, _ in rows.values()], [r for _, r, _ in rows.values()])
        return CurveModel(places, scaled, is_choice=self._coordinates.is_choice), top

    def places(self, candidates: Sequence[Candidate], epochs: Sequence[int]) -> Rows:
        """Return rows of candidates at epochs, each of which is a rung."""
        features = [self._features.of(candidate.config) for candidate in candidates]
        return self._rows(features, np.searchsorted(self._rungs, epochs).tolist())

    def _rows(self, features: Sequence[_Features], rungs: Sequence[int]) -> Rows:
        last = math.log(self._rungs[-1]) if self._rungs[-1] > 1 else 1.0
        times = [math.log(self._rungs[r]) / last if self._rungs[-1] > 1 else 1.0 for r in rungs]
        decays = [
            [each.decays[name][r] if name in each.decays else 0.0 for name in self._names]
            for each, r in zip(features, rungs, strict=True)
        ]
        paths = [each.paths if self._moves else each.paths[:1] for each in features]
        return Rows(
            points=np.array([each.point for each in features]).reshape(len(features), -1),
            times=np.array(times),
            decays=np.array(decays, float).reshape(len(features), len(self._names)),
            paths=np.array(paths),
        )

    def _observed(self, trial: Trial, most: int) -> Iterator[tuple[int, float]]:
        """Yield ``(index of a rung, score)`` for at most ``most`` rungs, the last first."""
        rungs = self._rungs
        if trial.state == "failed":
            yield int(np.searchsorted(rungs, min(trial.target, rungs[-1]))), -math.inf
            return
        last = int(np.searchsorted(rungs, trial.reached, side="right")) - 1
        steps = [0, 1, 3, 6, 10, 15][:most]
        for step in steps:
            if last - step < 0:
                return
            yield last - step, trial.scores[rungs[last - step] - 1]


def _scaled(scores: FloatArray, last: FloatArray) -> tuple[FloatArray, float]:
    """Return minus the logarithm of each score's distance to a floor, and the best of them.

    The floor is a little beyond the best score. The scale is the distance from the best to the
    median of the trials' last scores, so that a few that diverge do not matter. Scores that are not
    finite count as the worst.
    """
    finite = scores[np.isfinite(scores)]
    if not len(finite) or not len(last):
        raise CannotFit
    best = float(last.max())
    scale = best - float(np.median(last))
    if scale <= 1e-12 * max(abs(best), 1e-300):
        scale = best - float(finite.min())
    if scale <= 1e-12 * max(abs(best), 1e-300):
        raise CannotFit  # all curves are equal
    filled = np.where(np.isfinite(scores), scores, finite.min())
    distance = np.maximum((best - filled) / scale, 0.0)
    return -np.log(FLOOR + distance).round(9), -math.log(FLOOR)


def _deepest(trials: Sequence[Trial], num: int) -> list[Trial]:
    return sorted(trials, key=lambda trial: -trial.reached)[:num]


@lru_cache(maxsize=16)
def _features(
    space: Space, forest: StageForest, rungs: tuple[int, ...]
) -> ConfigCache[_Features]:
    """Return the cache of what the model knows about configurations of a space."""
    coordinates = coordinates_of(space)

    def features(config: Config) -> _Features:
        point = points_of([config], coordinates)
        runs = forest.timeline(config).runs
        paths = [
            hash(tuple((min(run.stop, rung), run.key) for run in runs if run.start < rung))
            for rung in rungs
        ]
        schedules = {n: v for n, v in config.items() if isinstance(v, Schedule)}
        return _Features(
            point=point[0] if len(point) else np.full(len(coordinates), np.nan),
            decays={
                name: _decay([forest.timeline(config).values(name, rung - 1, num_steps=1)
                              for rung in rungs])
                for name in schedules
            },
            paths=np.array(paths, dtype=np.int64),
            moves=len(runs) > 1,
        )

    return ConfigCache(features)


def _decay(values: Sequence[Any]) -> FloatArray:
    """Return how far a schedule has decayed from its largest value, from 0 to 1, at each rung.

    It is the mean of a linear and a logarithmic scale: a drop to a hundredth counts fully on both.
    """
    if not all(isinstance(v, int | float) for v in values):
        return np.zeros(len(values))
    sizes = np.abs(np.array(values, float))
    if not sizes.max() > 0:
        return np.zeros(len(values))
    left = sizes / sizes.max()
    out: FloatArray = 0.5 * (1.0 - left) - 0.25 * np.log10(np.maximum(left, 1e-2))
    return out
