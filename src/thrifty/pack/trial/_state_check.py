"""A check whether a checkpoint holds the whole state of a trial: when trials are compared."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thrifty.core import plain_logger
from thrifty.pack._backend import EpochPlan, Member, out_of_memory
from thrifty.pack.task._task import SelfDescribing, Task, Trainable
from thrifty.pack.verify import CheckBudget, training_places

from ._carried_values import moved, options_of, unread, values_of
from ._comparison import Case, Comparer, SharedVariables, kind_of
from ._fresh_trial_check import MAX_FREE_CHECKS, MadeCheck, new_trial
from ._probes import Trial
from ._state_messages import WarnOnce, no_memory, no_time_to_read, no_time_to_train
from ._trial import TaskTrial


logger = plain_logger(__name__)

SHORT_S = 1.0
"""An epoch of a ``Trainable`` is trained again for the comparison if it takes at most this long.

A longer one is trained again if something outside of the state differs or cannot be read, or the
budget allows it.
Two trials compared over more than one step take about this long together, in seconds.
"""
MAX_CARRYING_CHECKS = 12
"""How often trials that carry values are compared, if that is quick, before it has to pay."""
MAX_OTHER_CHECKS = 12
"""How often trials with other options, or after many more epochs, are compared before that too."""


@dataclass(frozen=True, slots=True)
class _Situation:
    """The situation for which the result of a comparison holds.

    Attributes:
        kind: The types of the model's modules.
        is_new: Whether a trial was compared before it was trained.
        changed: Variables that no longer had their first values.
    """

    kind: frozenset[type]
    is_new: bool
    changed: frozenset[str]


@dataclass(slots=True)
class _Known:
    """What comparisons of one kind of trial have covered.

    Attributes:
        moved: What the trials had changed since they began, beside their state.
        options: The hyper-parameters that choose between pieces of code.
        epoch: The largest number of epochs after which a trial was compared.
    """

    moved: frozenset[str] = frozenset()
    options: set[frozenset[tuple[str, Any]]] = field(default_factory=set)
    epoch: int = 1


class StateCheck:
    """A comparison of live trials with restored ones.

    The first trial of each kind is compared, and each one that carries other values from epoch to
    epoch than those before; where that is quick or the budget allows it, also trials with other
    options and after twice as many epochs. If trials share variables that have changed, each is
    compared once.

    Args:
        task: What the trials train. Its variables count as they are now.
        device: Where they are trained.
        limit_s: Seconds after which a worker is killed in which no epoch has ended.

    Attributes:
        budget: The cost of the comparisons. Report training time to it.
    """

    def __init__(
        self, task: Task | Trainable, *, device: torch.device, limit_s: float = math.inf
    ) -> None:
        self._task = task
        self._device = device
        self._limit_s = limit_s
        self.budget = CheckBudget()
        # What cannot be restored cannot be compared with a restored one, and shares nothing.
        self._is_off = isinstance(task, SelfDescribing) and not task.can_resume
        self._shared = SharedVariables(() if self._is_off else training_places({"task": task}))
        self._made = MadeCheck(task, device=device, budget=self.budget, is_off=self._is_off)
        self._warn = WarnOnce(logger)
        self._comparer = Comparer(task, device=device, shared=self._shared, warn=self._warn)
        self._seconds = 0.0
        """What the last comparison took."""
        self._checked_calls = 0
        """The calls of cached functions before the last comparison; see ``SharedVariables``."""
        self._num_cache_checks = 0
        """How many comparisons were made only because of new results of cached functions."""
        self._num_carrying = 0
        """How many comparisons were made only because trials carry values."""
        self._kinds: set[frozenset[type]] = set()
        self._passed: set[_Situation] = set()
        self._untrained: dict[_Situation, float] = {}
        """Seconds of an epoch in situations in which no epoch was trained again."""
        self._first: WeakKeyDictionary[Trial, dict[str, Any]] = WeakKeyDictionary()
        """The values that trials had when they began."""
        self._options: WeakKeyDictionary[Trial, frozenset[tuple[str, Any]]] = WeakKeyDictionary()
        self._known: dict[frozenset[type], _Known] = defaultdict(_Known)
        self._known_unread: frozenset[str] = frozenset()
        """What no look can see whole, and for which an epoch was trained again."""
        self._num_other = 0
        """How many comparisons were made only because of other options or later epochs."""

    def note(self, trial: Trial, member: Member) -> None:
        """Save the variables that the model of a new trial reads, as they are before training.

        Args:
            trial: The trial.
            member: What it was made from.

        Raises:
            StateError: Another trial has trained its parameters, or it keeps random numbers for
                others.
        """
        if not isinstance(self._task, SelfDescribing):  # a function is prepared when it trains
            self._made.check(trial, member)
        kind = kind_of(trial)
        if not self._is_off:
            self._first[trial] = values_of(trial)
            self._options[trial] = options_of(member)
        if not isinstance(trial, TaskTrial):
            return
        self._made.note_trained(trial.model)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        own = {id(module) for module in trial.model.modules()}
        places = training_places({"model": trial.model})
        self._shared.keep(place for place in places if id(place.holder) not in own)

    def is_due(self, trial: Trial, *, epoch: int, is_first: bool = True) -> bool:
        """Return whether a trial that has ended a stage, or begins one, has to be compared.

        Args:
            trial: The trial.
            epoch: How many epochs it was trained.
            is_first: Whether it has not been compared yet. Values that other trials have left in
                variables may reach it, so each is compared once as soon as variables have changed.
        """
        if self._is_off:
            return False
        situation = self._situation(trial)
        if situation not in self._passed and situation not in self._untrained:
            return True
        known = self._known[situation.kind]
        now = values_of(trial)
        if not self._moved(trial, now) <= known.moved or self._newly_unread(trial, now):
            return True
        if situation not in self._passed:
            return self._may_train(self._untrained[situation])
        affordable = self.budget.allows(self._seconds)
        is_quick = self._seconds < 3 * SHORT_S
        options = self._options.get(trial)
        is_other = options is not None and options not in known.options
        if (is_other or epoch >= 2 * known.epoch) and (
            affordable or (self._num_other < MAX_OTHER_CHECKS and is_quick)
        ):
            self._num_other += 1
            return True
        if isinstance(self._task, SelfDescribing) and self._made.has_changed():
            return self._made.is_affordable()
        if self._shared.num_calls != self._checked_calls and (
            affordable or self._num_cache_checks < MAX_FREE_CHECKS
        ):
            self._num_cache_checks += 1
            return True
        if situation.kind in self._comparer.carrying and (
            affordable or (self._num_carrying < MAX_CARRYING_CHECKS and is_quick)
        ):
            self._num_carrying += 1
            return True
        if situation.changed:
            return is_first or affordable
        return affordable and trial.adapts

    def is_changed(self) -> bool:
        """Return whether a variable that trials share no longer has its first value."""
        return bool(self._shared.changed())

    def begin(self, member: Member) -> Trial:
        """Make a trial with all variables as they are now."""
        trial = new_trial(self._task, self._device)
        trial.begin(member)
        return trial

    def check(
        self, live: Trial, member: Member, plan: EpochPlan, *, epoch: int, seconds: float
    ) -> None:
        """Compare a live trial with one restored from its checkpoint.

        Args:
            live: The live trial, which has ended an epoch. It cannot be used afterwards.
            member: The trial as read back from its checkpoint.
            plan: The epoch whose first step both take.
            epoch: How many epochs the trial was trained.
            seconds: How many seconds an epoch takes.

        Raises:
            StateError: They continue differently, or the checkpoint cannot be loaded.
        """
        situation = self._situation(live)
        began = time.perf_counter()
        held = values_of(live)
        self._note_compared(live, held, situation.kind, epoch=epoch)
        hidden = self._newly_unread(live, held)
        self._known_unread |= hidden
        now = self._shared.now()
        trains = isinstance(live, TaskTrial) or self._may_train(seconds)
        if isinstance(self._task, SelfDescribing):
            self._made.check(live, member)
        case = Case(
            live=live,
            member=member,
            plan=plan,
            later=replace(plan, epoch=epoch) if plan.epoch < epoch else None,
            first=self._first.get(live, {}),
            trains=trains,
            checks_data=not self._passed,
            follows_again=self.budget.allows(2 * SHORT_S),
            further_s=SHORT_S / 2,
        )
        try:
            self._compare(case, situation, hidden=hidden, seconds=seconds)
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._warn(no_memory(self._task))
            self._passed.add(situation)
        finally:
            now.put_back()
            self._shared.changed()
            self._checked_calls = self._shared.num_calls
        self._seconds = time.perf_counter() - began
        self.budget.spend(self._seconds)

    def _compare(
        self, case: Case, situation: _Situation, *, hidden: frozenset[str], seconds: float
    ) -> None:
        """Compare two trials, over a whole epoch if need be, and note what has been compared."""
        outside = self._comparer.compare(case)
        if outside is None:
            return
        if not case.trains and (outside or hidden):
            if self._fits(seconds):
                case = replace(case, trains=True)
                outside = self._comparer.compare(case)
            elif outside:
                self._warn(no_time_to_train(self._task, outside))
            else:
                self._warn(no_time_to_read(self._task, sorted(hidden)))
        elif not case.trains:
            self._untrained[situation] = seconds
            return
        if outside is not None:
            self._passed.add(situation)

    def _newly_unread(self, trial: Trial, now: Mapping[str, Any]) -> frozenset[str]:
        """Return what a ``Trainable`` may read that nothing can see whole, and is not known yet."""
        if isinstance(trial, TaskTrial):
            return frozenset()
        return unread(trial, now) - self._known_unread

    def _moved(self, trial: Trial, now: Mapping[str, Any]) -> frozenset[str]:
        """Return what a trial has changed since it began, beside its state; nothing if unknown.

        Args:
            trial: The trial.
            now: What ``values_of`` returns for it.
        """
        first = self._first.get(trial)
        return frozenset() if first is None else moved(first, now)

    def _note_compared(
        self, trial: Trial, now: Mapping[str, Any], kind: frozenset[type], *, epoch: int
    ) -> None:
        known = self._known[kind]
        known.moved |= self._moved(trial, now)
        known.options.add(self._options.get(trial, frozenset()))
        known.epoch = max(known.epoch, epoch, 1)

    def _may_train(self, seconds: float) -> bool:
        """Return whether a ``Trainable`` may train an epoch again without a special reason."""
        return seconds <= SHORT_S or (self._fits(seconds) and self.budget.allows(2 * seconds))

    def _fits(self, seconds: float) -> bool:
        """Return whether a worker is not killed if it trains up to four more epochs."""
        return 6 * seconds < self._limit_s

    def _situation(self, trial: Trial) -> _Situation:
        return _Situation(kind_of(trial), not trial.is_trained, self._shared.changed())
