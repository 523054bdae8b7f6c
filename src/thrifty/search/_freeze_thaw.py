"""Freeze-thaw search: a model of all learning curves decides which trial goes on."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import ClassVar, NamedTuple

import numpy as np

from thrifty.space import Config, Space

from ._algorithm import Algorithm
from ._curve_model import CannotFit, CurveModel, Rows
from ._curve_view import NUM_ACTIVE, Candidate, CurveView, StageForest, active_trials
from ._halving import RungAlgorithm
from ._history import Decision, History, Proposal, Trial
from ._scores import coordinates_of
from .samplers import GridSampler
from .samplers._base_sampler import Picker, check_counts, check_shares, option_error


NUM_DRAWS = 16
"""New configurations among which the model chooses."""
MODELLED_SHARE = 0.5
"""Share of the new configurations that the model chooses; the others are the sampler's next."""
NUM_COMPARED = 32
"""Waiting trials of a rung that the model compares: the best by score, and a spread."""
MOST_PROMOTED = 1.5
"""At most this many times ``1 / eta`` of a rung go on, however bad those before turn out."""
NUM_TOLD = 16
"""How often the model is told of new trials within one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeThaw(RungAlgorithm):
    """Asynchronous halving in which a model of all learning curves chooses who goes on.

    A Gaussian process models the curves of all trials over configurations, epochs and schedules.
    At each rung, one in ``eta`` of the trials goes on, as with ``ASHA``. Here it is not the trial
    with the best score so far but the one with the best predicted end. Where some need fewer epochs
    until then, it is the one that is most likely to end best, for these epochs. Epochs that another
    trial with equal hyper-parameters trains or has trained cost nothing, and their scores are
    known. Other trials are paused and may go on at any time. Half of the new configurations are
    chosen by the model, too.

    A study ends when its budget is used up; the trial with the best score is then trained to
    ``max_epochs``.

    Args:
        max_epochs: Most epochs that any trial is trained.
        num_trials: Most configurations that are drawn.
        eta: One in ``eta`` trials goes on from each rung.
        min_epochs: The first rung.
        sampler: Source of new configurations. The model chooses among many draws of a sampler that
            does not learn; from one that learns, it takes the next.
        budget_epochs: Epochs that the study trains, shared ones counted once (default: as many as
            ``ASHA`` trains with as many trials that share nothing). Training the best trial to its
            end may exceed it by less than ``max_epochs``.
        full_share: Share of the trials that train to ``max_epochs`` at once, from 0 to 1: a hedge
            against curves that cross, where what is best early is not best at the end.

    Raises:
        AlgorithmError: An option is out of range.

    >>> FreezeThaw(max_epochs=81, num_trials=1000, min_epochs=3).rungs()
    (3, 9, 27, 81)

    References:
        Swersky, Snoek and Adams, "Freeze-Thaw Bayesian Optimization", 2014, for the model of curves
        and for pausing. Li et al., "A System for Massively Parallel Hyperparameter Tuning",
        MLSys 2020, for the rungs.
    """

    budget_epochs: int | None = None
    full_share: float = 0.02
    can_grow: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is made anew, and the name would mean the first one.
        RungAlgorithm.__post_init__(self)
        if self.amounts():
            return
        check_shares(self, full_share=self.full_share)
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

    def why_not_longer(self, before: int) -> str:
        """Return that the model may have chosen otherwise: it predicts the scores at the end."""
        return Algorithm.why_not_longer(self, before)

    def budget(self) -> int:
        """Return how many epochs the study trains, shared ones counted once.

        >>> FreezeThaw(max_epochs=27, num_trials=27).budget()
        81
        """
        if self.budget_epochs is not None:
            return self.budget_epochs
        total, before, num = 0, 0, self.num_trials
        for rung in self.rungs():
            total += max(num, 1) * (rung - before)
            num, before = num // self.eta, rung
        return total

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Return at most ``num`` trials to train further, or new ones."""
        forest = StageForest.of(history, epochs=self.max_epochs)
        leader = _leader(history, self.rungs())
        missing = self.max_epochs - leader.reached if leader is not None else 0
        left = self.budget() - forest.num_epochs - missing
        out: list[Decision] = []
        if left > 0:
            for pick in _Picks(self, history, space, forest=forest, rng=rng, num=num):
                left -= pick.price
                if left < 0:
                    break
                out.append(pick.proposal())
        if out or history.num_running or leader is None or not missing:
            return out
        if forest.num_epochs + missing >= self.budget() + self.max_epochs:
            return []  # earlier leaders have been trained to their ends, and failed or got worse
        return [Proposal(target=self.max_epochs, trial=leader.number)]


def _leader(history: History, rungs: Sequence[int]) -> Trial | None:
    """Return the waiting or finished trial with the best last score."""
    found: Trial | None = None
    for rung in rungs:
        for score, number in history.waiting(rung)[:1]:
            if found is None or (score, -number) > (found.scores[-1], -found.number):
                found = history[number]
    return found


# -- picks ---------------------------------------------------------------------------------------


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
    """The answer to one question, pick by pick; iterating yields at most ``num`` of them."""

    def __init__(
        self,
        algorithm: FreezeThaw,
        history: History,
        space: Space,
        *,
        forest: StageForest,
        rng: np.random.Generator,
        num: int,
    ) -> None:
        self._algorithm = algorithm
        self._history = history
        self._space = space
        self._forest = forest
        self._rng = rng
        self._num = num
        self._rungs = algorithm.rungs()
        self._picker = Picker(history, share=0.0)
        self._num_new = 0
        """New trials of this answer."""
        self._gone: set[int] = set()
        """Trials of this answer that go on."""
        self._promoted: Counter[int] = Counter()
        """Their number, by the rung at which they waited."""
        self._untold: list[Pick] = []
        """New trials of this answer that the model does not know of."""

    def __iter__(self) -> Iterator[Pick]:
        for _ in range(self._num):
            pick = self._enqueued() or self._promotion() or self._new() or self._left_over()
            if pick is None:
                return
            trial = pick.candidate.trial
            if trial is None:
                self._num_new += 1
                self._untold.append(pick)
            else:
                self._promoted[self._history[trial].reached] += 1
                self._gone.add(trial)
            yield pick

    def _enqueued(self) -> Pick | None:
        """Return the next configuration of the user."""
        if self._num_open <= 0:
            return None
        configs = self._history.next_enqueued(self._num_new + 1)[self._num_new :]
        return self._started(self._candidate(configs[0], None)) if configs else None

    def _promotion(self) -> Pick | None:
        """Return the best trial of the deepest rung from which another one may go on."""
        for rung in reversed(self._rungs[:-1]):
            board, waiting = self._history.leaderboard(rung), self._history.waiting(rung)
            num_top = len(board) // self._algorithm.eta
            num_promoted = board.num_alive - len(waiting) + self._promoted[rung]
            if not num_top or len(waiting) == self._promoted[rung]:
                continue
            if num_promoted > MOST_PROMOTED * num_top:
                continue
            spread = np.linspace(0, len(waiting) - 1, NUM_COMPARED // 4).astype(int).tolist()
            places = dict.fromkeys([*range(min(NUM_COMPARED, len(waiting))), *spread])
            numbers = [waiting[place][1] for place in places]
            numbers = [number for number in numbers if number not in self._gone]
            if not numbers:
                continue
            pick = self._best_of(numbers)
            if num_promoted < num_top or self._num_ahead(pick, rung, num_promoted) < num_top:
                return pick
        return None

    def _num_ahead(self, pick: Pick, rung: int, num_promoted: int) -> float:
        """Estimate how many of the trials that went on from a rung are better than a pick.

        ASHA does the same with scores: a trial goes on if it is among the best ``1 / eta``, however
        many others that are not among them any more did so before.
        """
        ends, number = self._known_ends, pick.candidate.trial
        assert number is not None
        if not ends:
            board = self._history.leaderboard(rung)
            return board.rank((self._history[number].scores[rung - 1], number))
        promoted = [t.number for t in self._active if t.reached > rung or t.target > rung]
        known = [ends[each] for each in promoted if each in ends and each not in self._gone]
        if number not in ends or not known:
            return num_promoted
        share = sum(end > ends[number] for end in known) / len(known)
        return share * num_promoted

    def _left_over(self) -> Pick | None:
        """Return the best of all waiting trials, as no new one may start."""
        numbers = [
            trial.number
            for trial in self._active
            if trial.state == "waiting"
            and trial.reached < self._algorithm.max_epochs
            and trial.number not in self._gone
        ]
        if not numbers:  # those that wait are none of the active ones
            waiting = chain.from_iterable(map(self._history.waiting, self._rungs[-2::-1]))
            others = (number for _, number in waiting if number not in self._gone)
            numbers = list(islice(others, NUM_COMPARED))
        return self._best_of(numbers) if numbers else None

    def _new(self) -> Pick | None:
        """Return a new configuration, half of the time by the model.

        A trial that trains to its end at once is expensive, so the model always chooses it.
        """
        if self._num_open <= 0 or not self._draws:
            return None
        index = 0
        chooses = self._rng.random() < MODELLED_SHARE or self._is_full
        if chooses and not self._algorithm.sampler.adapts:
            index = self._most_promising(self._draws) or 0
        return self._started(self._draws.pop(index))

    def _best_of(self, numbers: Sequence[int]) -> Pick:
        """Return the trial to train next: by the model, or else the deepest and best."""
        trials = [self._history[number] for number in numbers]
        candidates = [self._candidate(trial.config, trial.number) for trial in trials]
        index = self._most_promising(candidates) if len(candidates) > 1 else 0
        if index is None:
            keys = [(t.reached, t.scores[-1], -t.number) for t in trials]
            index = keys.index(max(keys))
        return Pick(candidates[index], self._next_rung(candidates[index]))

    def _most_promising(self, candidates: Sequence[Candidate]) -> int | None:
        """Return the candidate with the best predicted end, if all have the same price.

        The price is the number of epochs until the end that nothing else trains. Where prices
        differ, it is the one most likely to become the best, for its price. The answer is None if
        there is no model.
        """
        model = self._model
        if model is None:
            return None
        prices = [self._rungs[-1] - candidate.requested for candidate in candidates]
        if len(set(prices)) == 1:
            # Predicted ends rank better than chances, which favour what is uncertain, but only
            # chances can be divided by a price.
            return int(np.argmax(model.predict(self._ends(candidates))[0].round(6)))
        chances = model.exceeds(self._ends(candidates), self._best_end)
        return int(np.argmax((chances - np.log(np.maximum(prices, 1))).round(6)))

    @property
    def _best_end(self) -> float:
        """The best end that the model predicts for any trial; else the best score so far, 0."""
        return max(self._known_ends.values(), default=0.0)

    @cached_property
    def _known_ends(self) -> dict[int, float]:
        """The ends that the model predicts for all trials that it sees; empty without a model."""
        known = [t for t in self._active if t.reached and t.state != "failed"]
        if self._fitted is None or not known:
            return {}
        candidates = [self._candidate(trial.config, trial.number) for trial in known]
        ends = self._fitted.predict(self._ends(candidates))[0].round(6).tolist()
        return {trial.number: end for trial, end in zip(known, ends, strict=True)}

    def _ends(self, candidates: Sequence[Candidate]) -> Rows:
        return self._view.places(candidates, [self._rungs[-1]] * len(candidates))

    @cached_property
    def _active(self) -> list[Trial]:
        return active_trials(self._history, self._rungs, num=NUM_ACTIVE)

    @cached_property
    def _view(self) -> CurveView:
        return CurveView(self._space, self._forest, self._rungs)

    @property
    def _model(self) -> CurveModel | None:
        """The model, told of all trials in training and of most picks; None without one."""
        model = self._fitted
        if model is not None and len(self._untold) > self._num // NUM_TOLD:
            picks, self._untold = self._untold, []
            with contextlib.suppress(CannotFit):  # it goes on without knowing of them
                model.assume(
                    self._view.places([p.candidate for p in picks], [p.target for p in picks])
                )
        return model

    @cached_property
    def _fitted(self) -> CurveModel | None:
        active = self._active
        num_first = min(max(len(coordinates_of(self._space)) + 1, 3), 8)
        if sum(trial.reached > 0 for trial in active) < num_first:
            return None  # so few curves say nothing about others
        running = [trial for trial in active if trial.state == "running"]
        going = [self._candidate(trial.config, trial.number) for trial in running]
        untold = [pick.candidate for pick in self._untold]
        try:
            model = self._view.model(active, self._history, [*self._draws, *going, *untold])
            if running:
                model.assume(self._view.places(going, [trial.target for trial in running]))
        except CannotFit:
            return None
        return model

    @cached_property
    def _draws(self) -> list[Candidate]:
        """New configurations, none of them twice and none that a trial has."""
        sampler, history = self._algorithm.sampler, self._history
        if self._num_open <= 0:
            return []
        num = min(self._num, self._num_open)
        if sampler.adapts:
            found = sampler.sample(history, self._space, num=num, rng=self._rng)
        elif isinstance(sampler, GridSampler):
            # The model takes points of the grid in any order, so read it from its start.
            num += len(history) + NUM_DRAWS
            found = sampler.sample(History(), self._space, num=num, rng=self._rng)
        else:
            found = sampler.sample(history, self._space, num=num + NUM_DRAWS, rng=self._rng)
        out = []
        for config in found:
            if not self._picker.is_known(config):
                self._picker.take(config)
                out.append(self._candidate(config, None))
        return out

    @property
    def _num_open(self) -> int:
        """How many new trials may still start."""
        return self._algorithm.num_trials - len(self._history) - self._num_new

    @property
    def _is_full(self) -> bool:
        """Whether the next new trial is trained to the end at once."""
        number, share = len(self._history) + self._num_new, self._algorithm.full_share
        # Half a period earlier than the share is full: the sooner curves are known to cross, the
        # better.
        return math.floor((number + 1) * share + 0.5) > math.floor(number * share + 0.5)

    def _started(self, candidate: Candidate) -> Pick:
        full = self._is_full
        return Pick(candidate, self._rungs[-1] if full else self._next_rung(candidate))

    def _next_rung(self, candidate: Candidate) -> int:
        """Return the first rung for which something has to be trained."""
        later = [rung for rung in self._rungs if rung > candidate.requested]
        return later[0] if later else self._rungs[-1]

    def _candidate(self, config: Config, trial: int | None) -> Candidate:
        prefix = self._forest.prefix(config)
        known: tuple[float, ...] = ()
        if prefix.reported:
            known = self._history[prefix.trial].scores[: prefix.reported]
        return Candidate(config, trial, known, prefix.requested)
