"""A check whether a checkpoint holds the whole state of a trial.

A trial restored from its checkpoint and the live one take the same step on the same batch, and are
evaluated. A difference comes from state outside of the checkpoint: a counter, a buffer that is not
persistent, a global variable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary

import torch

from thrifty.core import StateError, TaskError, plain_logger
from thrifty.pack._backend import EpochPlan, Member, out_of_memory
from thrifty.pack.identity import Place
from thrifty.pack.task._data import datasets_of
from thrifty.pack.task._task import HyperParameters, SelfDescribing, Task, Trainable, own_task
from thrifty.pack.verify import (
    FIRST_BATCH,
    CheckBudget,
    Keeper,
    MadeOnce,
    Probe,
    cached_name,
    cached_places,
    digest_or_none,
    how_far_apart,
    outside_of_state,
    own_tensors,
    probes_differ,
    same,
    training_places,
)

from ._kept_messages import drawn_once
from ._later_effects import act_later, attributes
from ._probes import Trial, check_data, check_kept, made_model, probe, probe_further
from ._trial import TaskTrial, TrainableTrial


logger = plain_logger(__name__)

Result = TypeVar("Result")

SHORT_S = 1.0
"""An epoch of a ``Trainable`` is trained again for the comparison if it takes at most this long.

A longer one is trained again if something outside of the state differs, or the budget allows it.
Two trials compared over more than one step take about this long together, in seconds.
"""
MAX_FREE_CHECKS = 3
"""How often what is kept for later trials is checked before the budget has to allow it."""
MAX_CARRYING_CHECKS = 12
"""How often trials that carry values are compared, if that is quick, before it has to pay."""
NOISE = 1e-3
"""The relative difference allowed between equal steps where a device adds in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Two trials to compare.

    Attributes:
        live: The trial that has ended an epoch.
        member: The trial as read back from its checkpoint.
        plan: The epoch whose first step both take.
        trains: Whether a ``Trainable`` trains the whole epoch.
    """

    live: Trial
    member: Member
    plan: EpochPlan
    trains: bool

    def probe(self, trial: Trial) -> Probe:
        return probe(trial, self.plan, trains=self.trains)

    def again(self, trial: Trial, num_steps: int) -> Probe:
        """Return what a trial does in its next step, or in ``num_steps`` steps after that one."""
        first = self.probe(trial)
        return self.further(trial, num_steps)[0] if num_steps else first

    def further(self, trial: Trial, num_steps: int | None = None) -> tuple[Probe, int]:
        """Return what a probed trial does in the steps after its probe, and how many there are."""
        assert isinstance(trial, TaskTrial)
        return probe_further(trial, self.plan, num_steps=num_steps, limit_s=SHORT_S / 2)


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


class StateCheck:
    """A comparison of live trials with restored ones.

    The first trial of each kind is compared, and each trial once if trials share variables that
    have changed.

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
        self._keepers = [] if self._is_off else [Keeper(training_places({"task": task}))]
        self._made = None if self._is_off else MadeOnce({"task": task})
        self._num_made = 0
        """How many trials were made again because the first making has changed variables."""
        self._made_s = 0.0
        self._num_calls = 0
        """How often cached functions have been called for a result that they did not have."""
        self._checked_calls = 0
        """That number at the last comparison."""
        self._num_cache_checks = 0
        """How many comparisons were made only because of new results."""
        self._results: list[Keeper] = []
        """Those keepers that save what cached functions keep."""
        self._empties_caches = False
        """Whether steps change cached results, so that restored trials begin with empty caches."""
        self._kinds: set[frozenset[type]] = set()
        self._passed: set[_Situation] = set()
        self._untrained: dict[_Situation, float] = {}
        """Seconds of an epoch in situations in which no epoch was trained again."""
        self._carrying: set[frozenset[type]] = set()
        """Kinds of trials that carry values from epoch to epoch which were equal after a probe.

        A counter of epochs without progress, for example, is 0 as long as there is progress.
        """
        self._num_carrying = 0
        """How many comparisons were made only because of such values."""
        self._followed: set[tuple[frozenset[type], frozenset[str]]] = set()
        self._warned: set[str] = set()
        self._seconds = 0.0
        self._first: WeakKeyDictionary[Trial, dict[str, Any]] = WeakKeyDictionary()
        """The attributes of trials when they began."""
        self._trained: dict[int, ReferenceType[torch.Tensor]] = {}

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
            self._check_made(trial, member)
        kind = _kind(trial)
        if not any(situation.kind == kind for situation in self._passed):
            self._first[trial] = attributes(trial)
        if not isinstance(trial, TaskTrial):
            return
        self._note_parameters(trial.model)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        own = {id(module) for module in trial.model.modules()}
        places = training_places({"model": trial.model})
        self._keep(place for place in places if id(place.holder) not in own)

    def _check_made(self, trial: Trial, member: Member) -> None:
        """Make a trial again if making it has changed variables, and compare what both draw."""
        if self._made is None or not self._may_make() or not self._made.take_changed():
            return
        self._num_made += 1
        began = time.perf_counter()
        again = self._new()
        again.begin(replace(member, state=None))
        if isinstance(trial, TaskTrial) and isinstance(again, TaskTrial):
            self._check_shared(trial, again)
        if again.drawn != trial.drawn:
            self._check_kept(self._made, trial, member)
        self._made.take_changed()
        self._made_s = time.perf_counter() - began
        self.budget.spend(self._made_s)

    def _check_kept(self, kept: MadeOnce, trial: Trial, member: Member) -> None:
        """Make a trial as if it were the first one, to see what depends on its seed.

        Raises:
            StateError: What it keeps for later trials does, or what it makes depends on whether
                that was kept before.
        """
        task = self._task
        if isinstance(task, Task):
            own = own_task(task)

            def model() -> tuple[torch.nn.Module, Any]:
                hp = HyperParameters(member.first_values)
                return made_model(own, hp, seed=member.seed, device=self._device)

            check_kept(kept, model, own_tensors, drawn=trial.drawn, name=f"{self._name}.model")
            return

        def make() -> tuple[TrainableTrial, Any]:
            one = TrainableTrial(task, self._device)
            one.begin(replace(member, state=None))
            return one, one.drawn

        name = self._name if isinstance(task, SelfDescribing) else f"{self._name}.setup"
        check_kept(kept, make, _made_values, drawn=trial.drawn, name=name)

    def _may_make(self) -> bool:
        return self._num_made < MAX_FREE_CHECKS or self.budget.allows(self._made_s)

    def _keep(self, places: Iterable[Place]) -> None:
        """Save the places that are not saved yet."""
        known = set().union(*(keeper.keys for keeper in self._keepers))
        new = [place for place in places if (id(place.holder), place.key) not in known]
        if new:
            self._keepers.append(Keeper(new))

    def _note_parameters(self, model: torch.nn.Module) -> None:
        own = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for name, parameter in own.items():
            known = self._trained.get(id(parameter))
            if known is not None and known() is parameter:
                raise self._shared(name)
        self._trained = {key: ref for key, ref in self._trained.items() if ref() is not None}
        self._trained |= {id(p): ReferenceType(p) for p in own.values()}

    def is_due(self, trial: Trial, *, is_first: bool = True) -> bool:
        """Return whether a trial that has ended a stage, or begins one, has to be compared.

        Args:
            trial: The trial.
            is_first: Whether it has not been compared yet. Values that other trials have left in
                variables may reach it, so each is compared once as soon as variables have changed.
        """
        if self._is_off:
            return False
        situation = _situation(trial, self._changed())
        if situation not in self._passed:
            seconds = self._untrained.get(situation)
            return seconds is None or self._may_train(seconds)
        affordable = self.budget.allows(self._seconds)
        if isinstance(self._task, SelfDescribing) and self._made and self._made.has_changed():
            return self._may_make()
        if self._num_calls != self._checked_calls and (
            affordable or self._num_cache_checks < MAX_FREE_CHECKS
        ):
            self._num_cache_checks += 1
            return True
        if situation.kind in self._carrying and (
            affordable or (self._num_carrying < MAX_CARRYING_CHECKS and self._seconds < 3 * SHORT_S)
        ):
            self._num_carrying += 1
            return True
        if situation.changed:
            return is_first or affordable
        return affordable and trial.adapts

    def is_changed(self) -> bool:
        """Return whether a variable that trials share no longer has its first value."""
        return bool(self._changed())

    def begin(self, member: Member) -> Trial:
        """Make a trial with all variables as they are now."""
        trial = self._new()
        trial.begin(member)
        return trial

    def check(self, live: Trial, member: Member, plan: EpochPlan, *, seconds: float) -> None:
        """Compare a live trial with one restored from its checkpoint.

        Args:
            live: The live trial, which has ended an epoch. It cannot be used afterwards.
            member: The trial as read back from its checkpoint.
            plan: The epoch whose first step both take.
            seconds: How many seconds an epoch takes.

        Raises:
            StateError: They continue differently, or the checkpoint cannot be loaded.
        """
        situation = _situation(live, self._changed())
        began = time.perf_counter()
        now = [keeper.now() for keeper in self._keepers]
        trains = isinstance(live, TaskTrial) or self._may_train(seconds)
        case = _Case(live=live, member=member, plan=plan, trains=trains)
        if isinstance(self._task, SelfDescribing):
            self._check_made(live, member)
        try:
            outside = self._compare(case)
            if outside and not trains and self._fits(seconds):
                outside = self._compare(replace(case, trains=True))
                trains = True
            if outside and not trains:
                self._warn(
                    f"{self._name}: not in the checkpoint: {_listed(outside)}. epoch_timeout "
                    "leaves no time to train an epoch again, so it is not checked whether that "
                    "changes results; make it six times as long as an epoch, or name these in "
                    "not_state"
                )
            if outside is not None and not outside and not trains:
                self._untrained[situation] = seconds
            elif outside is not None:
                self._passed.add(situation)
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._warn(f"{self._name}: there was no memory to check that its state is complete")
            self._passed.add(situation)
        finally:
            for keeper in now:
                keeper.put_back()
            self._changed()
            self._checked_calls = self._num_calls
        self._seconds = time.perf_counter() - began
        self.budget.spend(self._seconds)

    def _may_train(self, seconds: float) -> bool:
        """Return whether a ``Trainable`` may train an epoch again without a special reason."""
        return seconds <= SHORT_S or (self._fits(seconds) and self.budget.allows(2 * seconds))

    def _fits(self, seconds: float) -> bool:
        """Return whether a worker is not killed if it trains up to four more epochs."""
        return 6 * seconds < self._limit_s

    # -- one comparison ------------------------------------------------------------------

    def _compare(self, case: _Case) -> Sequence[str] | None:
        """Compare two trials; return what differs outside of the state.

        The result is None if the user's code fails in both of them.
        """
        changed = self._changed()
        now = [keeper.now() for keeper in self._keepers]
        restored = self._restored(case)
        carried = _outside(case.live, restored, meant=self._task.not_state)
        if case.trains and carried and self._acting_later(case.live, carried, restored=restored):
            self._carrying.add(_kind(case.live))
        theirs = _attempted(case.probe, restored)
        moved = self._moved_results(now)
        if moved:
            changed |= moved
            self._empties_caches = True
            restored = self._restored(case)
            theirs = _attempted(case.probe, restored)
        left = [keeper.now() for keeper in self._keepers]
        if isinstance(case.live, TaskTrial) and isinstance(self._task, Task) and not self._passed:
            check_data(self._task, case.live)
        _put_back(now)
        meant = self._meant(case.live)
        mine = _attempted(case.probe, case.live)
        if isinstance(mine, Exception) or isinstance(theirs, Exception):
            if isinstance(mine, Exception) and isinstance(theirs, Exception):
                return None  # it will also fail in training, with its own message
            raise StateError(self._incomplete(_raised(mine, theirs), sorted(changed)))
        difference = probes_differ(mine, theirs)
        outside = [*_outside(case.live, restored, meant=self._task.not_state), *sorted(changed)]
        if difference:
            self._judge(case, mine, theirs, meant=meant, outside=outside)
        elif outside and case.trains:
            self._go_on(case, restored, left, meant=meant, outside=outside)
        if case.trains and not self._empties_caches:
            self._check_cached(case, theirs)
        return outside

    def _check_cached(self, case: _Case, theirs: Probe) -> None:
        """Compare a restored trial with one whose cached functions have kept nothing yet.

        Raises:
            StateError: They differ: a cached function has drawn random numbers for an earlier
                trial, or an earlier step.
        """
        kept = [each for each in self._caches() if each.cache_info().currsize]
        if not kept:
            return
        self._empties_caches = True
        try:
            fresh = _attempted(case.probe, self._restored(case))
        finally:
            self._empties_caches = False
        if isinstance(fresh, Probe) and not probes_differ(theirs, fresh):
            return
        again = _attempted(case.probe, self._restored(case))
        if isinstance(again, Probe) and isinstance(fresh, Probe):
            noise = how_far_apart(theirs, again)
            if noise and how_far_apart(theirs, fresh) <= max(NOISE, 10 * noise):
                return
        raise StateError(drawn_once(self._name, sorted(map(cached_name, kept))))

    def _caches(self) -> list[Any]:
        """Return the cached functions that the code reads."""
        caches = {id(c): c for keeper in self._keepers for c in keeper.caches}
        return list(caches.values())

    def _moved_results(self, before: Sequence[Keeper]) -> frozenset[str]:
        """Return the names of cached results that a step has changed.

        The state before the first step is not known of them, so a restored trial must begin with
        empty caches, as in another process.
        """
        pairs = zip(self._keepers, before, strict=True)
        saved = [was for keeper, was in pairs if keeper in self._results]
        return frozenset(name for keeper in saved for name in keeper.changed())

    def _go_on(
        self,
        case: _Case,
        restored: Trial,
        left: Sequence[Keeper],
        *,
        meant: Sequence[Mapping[str, Any]],
        outside: Sequence[str],
    ) -> None:
        """Compare further steps of two trials that have taken the same one.

        A single step does not show an effect of every fifth step, or of the end of an epoch.

        Args:
            case: The trials.
            restored: The restored trial. Both have been probed.
            left: Variables as the restored trial has left them.
            meant: Values that are meant not to be state.
            outside: Names of what is outside of the state.
        """
        known = (_kind(case.live), frozenset(outside))
        if isinstance(case.live, TaskTrial) and (
            known not in self._followed or self.budget.allows(2 * SHORT_S)
        ):
            now = [keeper.now() for keeper in self._keepers]
            _put_back(left)
            theirs = _attempted(case.further, restored)
            num_steps = None if isinstance(theirs, Exception) else theirs[1]
            _put_back(now)
            mine = _attempted(partial(case.further, num_steps=num_steps), case.live)
            if isinstance(mine, Exception) != isinstance(theirs, Exception):
                raise StateError(self._incomplete(_raised(mine, theirs), outside))
            if not isinstance(mine, Exception) and not isinstance(theirs, Exception):
                self._judge(
                    case, mine[0], theirs[0], meant=meant, outside=outside, num_steps=mine[1]
                )
            self._followed.add(known)
        self._refuse_used(case.live, outside, restored=restored)
        self._note_attributes(outside)

    def _judge(
        self,
        case: _Case,
        mine: Probe,
        theirs: Probe,
        *,
        meant: Sequence[Mapping[str, Any]],
        outside: Sequence[str],
        num_steps: int = 0,
    ) -> None:
        """Find out why two trials differ, if they do.

        Args:
            case: The trials.
            mine: The results of the live trial.
            theirs: The results of the restored trial.
            meant: Values that are meant not to be state.
            outside: Names of what is outside of the state.
            num_steps: How many steps after the first one they have taken.

        Raises:
            StateError: The reason is state outside of the checkpoint, or the task is not
                repeatable.
        """
        after = f"{num_steps} further steps" if num_steps else "the next step"
        difference = probes_differ(mine, theirs, after=after)
        if not difference:
            return
        again = case.again(self._restored(case), num_steps)
        noise = how_far_apart(theirs, again)
        # Rounding noise grows from step to step, so after several steps it cannot be told from a
        # different result.
        if noise > NOISE and not num_steps:
            raise StateError(self._not_repeatable(probes_differ(theirs, again)))
        if noise and how_far_apart(mine, theirs) <= max(NOISE, 10 * noise):
            self._warn(
                f"{self._name}: equal steps differ in their last bits on {self._device}, "
                "so its state cannot be checked exactly"
            )
        elif not (meant and self._agrees(case, mine, meant, num_steps=num_steps)):
            raise StateError(self._incomplete(difference, outside))

    def _restored(self, case: _Case) -> Trial:
        """Make a trial from the checkpoint, as another process would.

        Raises:
            StateError: The checkpoint does not fit the model, or models are not the same each time.
        """
        _put_back(self._keepers)
        if self._empties_caches:
            empty: dict[Any, Any] = {}
            for keeper in self._keepers:
                keeper.empty_caches(empty)
        member, restored = case.member, self._new()
        if isinstance(restored, TrainableTrial) or isinstance(case.live, TrainableTrial):
            self._load(restored, member)
            return restored
        first = self._new()
        assert isinstance(first, TaskTrial)
        first.begin(replace(member, state=None))
        fresh = {name: t.detach().clone() for name, t in own_tensors(first.model).items()}
        self._check_shared(case.live, first)
        restored.begin(replace(member, state=None))
        names = [n for n, t in own_tensors(restored.model).items() if not same(t, fresh.get(n))]
        if names:
            raise StateError(
                f"{self._name}.model gives another {names[0]!r} each time, for the same seed and "
                "the same hyper-parameters; draw initial values from torch's, NumPy's or Python's "
                "global stream, which thrifty seeds, and copy what several models start from"
            )
        if member.state is not None:
            self._load(restored, member)
        return restored

    def _new(self) -> Trial:
        if isinstance(self._task, Task):
            return TaskTrial(self._task, self._device)
        return TrainableTrial(self._task, self._device)

    def _load(self, trial: Trial, member: Member) -> None:
        try:
            if isinstance(trial, TaskTrial):
                assert member.state is not None
                trial.load(member.state)
            else:
                trial.begin(member)
        except TaskError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise StateError(
                f"a checkpoint of {self._name} cannot be loaded into a new "
                f"{'model' if isinstance(trial, TaskTrial) else 'trial'} "
                f"({type(error).__name__}: {error}); what it trains must be able to go on from its "
                "state"
            ) from error

    def _check_shared(self, live: TaskTrial, other: TaskTrial) -> None:
        """Refuse parameters that several models share, unless they are frozen."""
        own = {id(parameter) for parameter in live.model.parameters()}
        shared = [
            name
            for name, parameter in other.model.named_parameters()
            if id(parameter) in own and parameter.requires_grad
        ]
        if shared:
            raise self._shared(shared[0])

    def _shared(self, name: str) -> StateError:
        return StateError(
            f"{self._name}.model gives the same parameter {name!r} to several trials, so one trial "
            "trains those of another; make it anew, or copy it (copy.deepcopy), in each call"
        )

    def _meant(self, live: Trial) -> list[dict[str, Any]]:
        """Copy the attributes of the task and of each module that are meant not to be state."""
        names = self._task.not_state
        held = [{n: vars(one)[n] for n in names if n in vars(one)} for one in _places(live)]
        return deepcopy(held) if any(held) else []

    def _agrees(
        self, case: _Case, mine: Probe, meant: Sequence[Mapping[str, Any]], *, num_steps: int
    ) -> bool:
        """Return whether a restored trial takes the same steps if given what is not state."""
        restored = self._restored(case)
        for one, values in zip(_places(restored), meant, strict=False):
            vars(one).update(deepcopy(values))
        return not probes_differ(mine, case.again(restored, num_steps))

    # -- messages ------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return (
            self._task.name if isinstance(self._task, SelfDescribing) else type(self._task).__name__
        )

    def _incomplete(self, difference: str, outside: Sequence[str]) -> str:
        places = _listed(outside) or "something that is not an attribute"
        return (
            f"{self._name} keeps state outside of its checkpoint: restored from it, a trial goes "
            f"on differently ({difference} differs). Not in the checkpoint: {places}; "
            f"{self._mend(outside)}"
        )

    def _mend(self, outside: Sequence[str]) -> str:
        """Return what to do with state that is not kept."""
        return (
            self._task.mend
            if isinstance(self._task, SelfDescribing)
            else "keep it in state() and load_state()"
            if isinstance(self._task, Trainable)
            else "keep it in the optimizer's state of a parameter (self.state[p]), or in its "
            "param_groups"
            if outside and all(name.startswith("optimizer.") for name in outside)
            else "keep it in a buffer of the model (register_buffer), or make it follow from the "
            "hyper-parameters and the epoch in adapt"
        )

    def _not_repeatable(self, difference: str) -> str:
        if difference == FIRST_BATCH:
            return (
                f"the data of {self._name} are not the same each time that an epoch is read: "
                f"{difference} differs. Draw from torch's, NumPy's or Python's global stream, "
                "which thrifty seeds for each batch, and keep nothing in the dataset that changes "
                "while it is read"
            )
        return (
            f"{self._name} gives another result each time, from the same state and the same seed "
            f"({difference} differs); draw from torch's, NumPy's or Python's global stream, which "
            "thrifty seeds before each step, or from a generator that is seeded in each call"
        )

    def _acting_later(self, live: Trial, names: Sequence[str], *, restored: Trial) -> list[str]:
        shared = [place for keeper in self._keepers for place in keeper.places]
        first = self._first.get(live, {})
        return act_later(live, names, restored=restored, shared=shared, first=first)

    def _refuse_used(self, live: Trial, outside: Sequence[str], *, restored: Trial) -> None:
        """Refuse values outside of the state that code goes by: their effect may come later.

        Raises:
            StateError: There is such a value.
        """
        found = self._acting_later(live, outside, restored=restored)
        if found:
            raise StateError(
                f"{self._name} keeps values outside of its checkpoint that it uses later: "
                f"{_listed(found)}. A restored trial takes the same next steps, but may part from "
                f"the live one afterwards; {self._mend(found)}; or, if no result depends on them, "
                "name the attributes in not_state"
            )

    def _note_attributes(self, outside: Sequence[str]) -> None:
        if outside:
            self._warn(
                f"{self._name}: not in the checkpoint: {_listed(outside)}. A restored trial takes "
                "the same next steps; if that is meant, name the attributes in not_state"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _changed(self) -> frozenset[str]:
        """Return the names of the variables that do not have their first values.

        A result that a cached function has kept since is saved as it is now.
        """
        caches = self._caches()
        num_calls = sum(cache.cache_info().misses for cache in caches)
        if num_calls != self._num_calls:
            self._num_calls = num_calls
            before = len(self._keepers)
            self._keep(cached_places(caches))
            self._results += self._keepers[before:]
        return frozenset(name for keeper in self._keepers for name in keeper.changed())


# -- trials --------------------------------------------------------------------------------


def _situation(trial: Trial, changed: frozenset[str]) -> _Situation:
    return _Situation(_kind(trial), not trial.is_trained, changed)


def _kind(trial: Trial) -> frozenset[type]:
    if isinstance(trial, TaskTrial):
        return frozenset(map(type, trial.model.modules()))
    return frozenset()


def _places(trial: Trial) -> list[Any]:
    """Return the objects of a trial that may have the user's attributes."""
    if not isinstance(trial, TaskTrial):
        return [trial.task]
    return [trial.task, *trial.model.modules(), *trial.optimizers.torch.values()]


def _made_values(trial: TrainableTrial) -> dict[str, str | None]:
    """Return digests of what the preparation of a trial has made, by name."""
    if isinstance(trial.task, SelfDescribing):
        state = trial.state()
        return {n: digest_or_none(t) for n, t in state.tensors.items()} | {
            "state": digest_or_none(state.tree)
        }
    return {f"self.{name}": digest_or_none(value) for name, value in vars(trial.task).items()}


def _outside(live: Trial, restored: Trial, *, meant: Collection[str]) -> list[str]:
    mine: dict[str, Any] = {"self": live.task}
    theirs: dict[str, Any] = {"self": restored.task}
    if isinstance(live, TaskTrial) and isinstance(restored, TaskTrial):
        mine |= {"model": live.model, **live.optimizers.torch, **datasets_of(live.source)}
        theirs |= {"model": restored.model, **restored.optimizers.torch}
        theirs |= datasets_of(restored.source)
    own = live.task.internals if isinstance(live.task, SelfDescribing) else ()
    return outside_of_state(mine, theirs, meant={*meant, *own})


def _attempted(does: Callable[[Trial], Result], trial: Trial) -> Result | Exception:
    """Return the result of probing a trial, or the error that its code raises."""
    try:
        return does(trial)
    except Exception as error:
        if out_of_memory(error):
            raise
        return error


def _raised(*found: object) -> str:
    """Describe the error that only one of two trials raises."""
    error = next(each for each in found if isinstance(each, Exception))
    return f"only one of them raises {type(error).__name__}: {error}, and so what it does"


def _put_back(keepers: Sequence[Keeper]) -> None:
    for keeper in keepers:
        keeper.put_back()


def _listed(names: Sequence[str]) -> str:
    """Return the first few names, as a list in a sentence."""
    return ", ".join(map(repr, names[:5]))
