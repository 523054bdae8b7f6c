"""The comparison of a live trial with one restored from its checkpoint.

Both take the same step on the same batch, and are evaluated. A difference comes from state outside
of the checkpoint: a counter, a buffer that is not persistent, a global variable. Variables that the
trials of a process share are put back to what they were before the first trial.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from thrifty.core import StateError
from thrifty.pack._backend import EpochPlan, Member, out_of_memory
from thrifty.pack.identity import Place
from thrifty.pack.task._data import datasets_of
from thrifty.pack.task._task import SelfDescribing, Task, Trainable
from thrifty.pack.verify import (
    Keeper,
    Probe,
    cached_name,
    cached_places,
    how_far_apart,
    outside_of_state,
    probes_differ,
)

from ._carried_values import act_later, carriers_of, shared_buffers, unlike, unread
from ._fresh_trial_check import restored_trial
from ._probes import Trial, check_data, probe, probe_further
from ._state_messages import (
    drawn_once,
    incomplete,
    not_repeatable,
    only_one_raises,
    only_rounding,
    task_name,
    used_later,
    without_effect,
)
from ._trial import TaskTrial, TrainableTrial


Result = TypeVar("Result")

NOISE = 1e-3
"""The relative difference allowed between equal steps where a device adds in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two trials to compare.

    Attributes:
        live: The trial that has ended an epoch.
        member: The trial as read back from its checkpoint.
        plan: The epoch whose first step both take.
        later: The epoch after those that the live trial has trained, with values of an epoch that
            it has trained; None if ``plan`` is that epoch.
        first: What ``attributes`` returned when the live trial began; empty if that is not known.
        trains: Whether a ``Trainable`` trains the whole epoch.
        checks_data: Whether the data are loaded again, if that is quick, and compared.
        follows_again: Whether trials take further steps even if others of the kind have done so
            with the same values outside of the state.
        further_s: How many seconds the further steps of one trial may take.
        ended: What ``plan`` was before it became the later epoch; None if it is what it was.
    """

    live: Trial
    member: Member
    plan: EpochPlan
    later: EpochPlan | None
    first: Mapping[str, Any]
    trains: bool
    checks_data: bool
    follows_again: bool
    further_s: float
    ended: EpochPlan | None = None

    def probe(self, trial: Trial) -> Probe:
        """Return what a trial does in its next step."""
        return probe(trial, self.plan, trains=self.trains)

    def again(self, trial: Trial, num_steps: int) -> Probe:
        """Return what a trial does in its next step, or in ``num_steps`` steps after that one."""
        first = self.probe(trial)
        return self.further(trial, num_steps)[0] if num_steps else first

    def further(self, trial: Trial, num_steps: int | None = None) -> tuple[Probe, int]:
        """Return what a probed trial does in the steps after its probe, and how many there are."""
        assert isinstance(trial, TaskTrial)
        return probe_further(trial, self.plan, num_steps=num_steps, limit_s=self.further_s)


class Comparer:
    """Compares live trials of a task with restored ones.

    Args:
        task: What the trials train.
        device: Where they are trained.
        shared: The variables that they share.
        warn: Shows a warning.

    Attributes:
        carrying: Kinds of trials that carry values from epoch to epoch which were equal after a
            probe. A counter of epochs without progress, for example, is 0 as long as there is
            progress.
    """

    def __init__(
        self,
        task: Task | Trainable,
        *,
        device: torch.device,
        shared: SharedVariables,
        warn: Callable[[str], None],
    ) -> None:
        self._task = task
        self._device = device
        self._shared = shared
        self._warn = warn
        self.carrying: set[frozenset[type]] = set()
        self._empties_caches = False
        """Whether steps change cached results, so that restored trials begin with empty caches."""
        self._followed: set[tuple[frozenset[type], frozenset[str]]] = set()
        """Kinds of trials, and what was outside of their state, that have taken further steps."""

    def compare(self, case: Case) -> Sequence[str] | None:
        """Compare two trials, and return the names of what differs outside of the state.

        If no epoch is trained, hooks, files and the like count, too.
        The result is None if the user's code fails in both of them. Shared variables are not put
        back.

        Args:
            case: The trials. They cannot be used afterwards.

        Raises:
            StateError: They continue differently or may do so later, the task or its data are not
                repeatable, or the checkpoint cannot be loaded.
        """
        shared = self._shared
        changed, now = shared.changed(), shared.now()
        restored = self._restored(case)
        carried = _outside(case.live, restored, meant=self._task.not_state)
        hidden = _hidden(case.live, restored)
        buffers = shared_buffers(case.live, restored)
        if case.trains and carried and self._acting_later(case, carried, restored=restored):
            self.carrying.add(kind_of(case.live))
        if carried or hidden or changed:
            case = _in_later_epoch(case)
        case, restored, theirs = self._probed(case, restored)
        moved = shared.moved_results(now)
        if moved:
            # The state before the first step is not known of these results, so a restored trial
            # must begin with empty caches, as in another process.
            changed |= moved
            self._empties_caches = True
            case, restored, theirs = self._probed(case, self._restored(case))
        left = shared.now()
        if case.checks_data and isinstance(case.live, TaskTrial) and isinstance(self._task, Task):
            check_data(self._task, case.live)
        now.put_back()
        meant = self._meant(case.live)
        hidden += unlike(buffers, shared_buffers(case.live, restored) if buffers else {})
        mine = _attempted(case.probe, case.live)
        if isinstance(mine, Exception) or isinstance(theirs, Exception):
            if isinstance(mine, Exception) and isinstance(theirs, Exception):
                return None  # it will also fail in training, with its own message
            names = _named([*carried, *sorted(changed)], hidden, case.live)
            raise StateError(incomplete(self._task, _raised(mine, theirs), names))
        outside = [*_outside(case.live, restored, meant=self._task.not_state), *sorted(changed)]
        if probes_differ(mine, theirs):
            self._judge(case, mine, theirs, meant=meant, outside=_named(outside, hidden, case.live))
        elif outside and case.trains:
            self._go_on(case, restored, left, meant=meant, outside=outside, hidden=hidden)
        if case.trains and not self._empties_caches:
            self._check_cached(case, theirs)
        return outside if case.trains else _seen(outside, hidden)

    def _probed(self, case: Case, restored: Trial) -> tuple[Case, Trial, Probe | Exception]:
        """Probe a restored trial, and return it with its case and the result.

        A trial that fails in the later epoch of a case, as where there is no such epoch, is made
        and probed again in the epoch that has ended.
        """
        found = _attempted(case.probe, restored)
        if case.ended is None or not isinstance(found, Exception):
            return case, restored, found
        case = replace(case, plan=case.ended, ended=None)
        restored = self._restored(case)
        return case, restored, _attempted(case.probe, restored)

    def _restored(self, case: Case, *, empty_caches: bool = False) -> Trial:
        """Make a trial from the checkpoint, as another process would.

        Raises:
            StateError: The checkpoint does not fit the model, or models are not the same each time.
        """
        self._shared.put_back(empty_caches=empty_caches or self._empties_caches)
        return restored_trial(self._task, self._device, case.member, live=case.live)

    def _judge(
        self,
        case: Case,
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
            raise StateError(not_repeatable(self._task, probes_differ(theirs, again)))
        if _is_noise(mine, theirs, noise=noise):
            self._warn(only_rounding(self._task, self._device))
        elif not (meant and self._agrees(case, mine, meant, num_steps=num_steps)):
            raise StateError(incomplete(self._task, difference, outside))

    def _go_on(
        self,
        case: Case,
        restored: Trial,
        left: SavedValues,
        *,
        meant: Sequence[Mapping[str, Any]],
        outside: Sequence[str],
        hidden: Sequence[str],
    ) -> None:
        """Compare further steps of two trials that have taken the same one.

        A single step does not show an effect of every fifth step, or of the end of an epoch.

        Args:
            case: The trials.
            restored: The restored trial. Both have been probed.
            left: Variables as the restored trial has left them.
            meant: Values that are meant not to be state.
            outside: Names of what is outside of the state.
            hidden: Names of what differs and is no attribute, for the message.

        Raises:
            StateError: They differ, or code goes by a value outside of the state, so its effect may
                come later.
        """
        known = (kind_of(case.live), frozenset(outside))
        if isinstance(case.live, TaskTrial) and (known not in self._followed or case.follows_again):
            now = self._shared.now()
            left.put_back()
            theirs = _attempted(case.further, restored)
            num_steps = None if isinstance(theirs, Exception) else theirs[1]
            now.put_back()
            mine = _attempted(partial(case.further, num_steps=num_steps), case.live)
            if isinstance(mine, Exception) != isinstance(theirs, Exception):
                names = _named(outside, hidden, case.live)
                raise StateError(incomplete(self._task, _raised(mine, theirs), names))
            if not isinstance(mine, Exception) and not isinstance(theirs, Exception):
                names = _named(outside, hidden, case.live)
                self._judge(case, mine[0], theirs[0], meant=meant, outside=names, num_steps=mine[1])
            self._followed.add(known)
        used = self._acting_later(case, outside, restored=restored)
        if used:
            raise StateError(used_later(self._task, used))
        self._warn(without_effect(self._task, outside))

    def _check_cached(self, case: Case, theirs: Probe) -> None:
        """Compare a restored trial with one whose cached functions have kept nothing yet.

        Raises:
            StateError: They differ: a cached function has drawn random numbers for an earlier
                trial, or an earlier step.
        """
        kept = [each for each in self._shared.caches if each.cache_info().currsize]
        if not kept:
            return
        fresh = _attempted(case.probe, self._restored(case, empty_caches=True))
        if isinstance(fresh, Probe) and not probes_differ(theirs, fresh):
            return
        again = _attempted(case.probe, self._restored(case))
        if (
            isinstance(again, Probe)
            and isinstance(fresh, Probe)
            and _is_noise(theirs, fresh, noise=how_far_apart(theirs, again))
        ):
            return
        raise StateError(drawn_once(task_name(self._task), sorted(map(cached_name, kept))))

    def _acting_later(self, case: Case, names: Sequence[str], *, restored: Trial) -> list[str]:
        """Return those values outside of the state that code goes by."""
        return act_later(
            case.live, names, restored=restored, shared=self._shared.places, first=case.first
        )

    def _meant(self, live: Trial) -> list[dict[str, Any]]:
        """Copy the attributes of the task and of each module that are meant not to be state."""
        names = self._task.not_state
        held = [{n: vars(one)[n] for n in names if n in vars(one)} for one in _owners(live)]
        return deepcopy(held) if any(held) else []

    def _agrees(
        self, case: Case, mine: Probe, meant: Sequence[Mapping[str, Any]], *, num_steps: int
    ) -> bool:
        """Return whether a restored trial takes the same steps if given what is not state."""
        restored = self._restored(case)
        for one, values in zip(_owners(restored), meant, strict=False):
            vars(one).update(deepcopy(values))
        return not probes_differ(mine, case.again(restored, num_steps))


def _in_later_epoch(case: Case) -> Case:
    """Return a case whose probe is an epoch that the live trial has not trained yet.

    Code such as ``if epoch == 3: self.scale = 0.1`` would run again in the epoch that has just
    ended, and give the restored trial what its checkpoint lacks.
    """
    task = case.live.task
    if case.later is None or isinstance(case.live, TaskTrial) or not case.trains:
        return case
    # A training function keeps its flags, and an adapter makes what it trains in each epoch.
    is_left_out = isinstance(task, SelfDescribing) or _is_adapter(task)
    return case if is_left_out else replace(case, plan=case.later, ended=case.plan)


def _is_adapter(task: Any) -> bool:
    """Return whether a task keeps what it trains itself, as those of Lightning do."""
    return hasattr(task, "_thrifty_internals")


def kind_of(trial: Trial) -> frozenset[type]:
    """Return the types of the modules in a trial's model; none for a ``Trainable``."""
    if isinstance(trial, TaskTrial):
        return frozenset(map(type, trial.model.modules()))
    return frozenset()


def _owners(trial: Trial) -> list[Any]:
    """Return the objects of a trial that may have the user's attributes."""
    if not isinstance(trial, TaskTrial):
        return [trial.task]
    return [trial.task, *trial.model.modules(), *trial.optimizers.torch.values()]


def _outside(live: Trial, restored: Trial, *, meant: Collection[str]) -> list[str]:
    """Return the names of attributes that differ between two trials, except those in ``meant``."""
    mine: dict[str, Any] = {"self": live.task}
    theirs: dict[str, Any] = {"self": restored.task}
    if isinstance(live, TaskTrial) and isinstance(restored, TaskTrial):
        mine |= {"model": live.model, **live.optimizers.torch, **datasets_of(live.source)}
        theirs |= {"model": restored.model, **restored.optimizers.torch}
        theirs |= datasets_of(restored.source)
    if isinstance(live.task, SelfDescribing):
        own = live.task.internals
    else:
        own = getattr(live.task, "_thrifty_internals", ())  # of an adapter
    return outside_of_state(mine, theirs, meant={*meant, *own})


def _hidden(live: Trial, restored: Trial) -> list[str]:
    """Return the names of what differs elsewhere than in attributes, before the trials train."""
    found = unlike(carriers_of(live), carriers_of(restored))
    if isinstance(restored, TrainableTrial):
        found += [f"{name} (gradients)" for name in sorted(restored.unrestored)]
    return found


def _named(outside: Sequence[str], hidden: Sequence[str], live: Trial) -> list[str]:
    """Return the names of all that differs, or else of what may differ, as nothing can read it."""
    found = _seen(outside, hidden)
    if found or isinstance(live, TaskTrial):
        return found
    return [f"{name} (its content is hidden)" for name in sorted(unread(live))]


def _seen(outside: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """Return the names of all that differs; a file in memory is named as a file only."""
    return [*(name for name in outside if f"{name} (a file)" not in hidden), *hidden]


def _is_noise(one: Probe, other: Probe, *, noise: float) -> bool:
    """Return whether two probes differ no more than equal steps may.

    Args:
        one: A probe.
        other: Another one.
        noise: How far apart two equal steps are. If it is 0, no difference is noise.
    """
    return noise > 0 and how_far_apart(one, other) <= max(NOISE, 10 * noise)


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
    return only_one_raises(next(each for each in found if isinstance(each, Exception)))


@dataclass(frozen=True, slots=True)
class SavedValues:
    """The values of shared variables at one moment.

    Attributes:
        keepers: Copies of the values, one for each keeper of the variables.
    """

    keepers: Sequence[Keeper]

    def put_back(self) -> None:
        """Set all variables to these values."""
        for keeper in self.keepers:
            keeper.put_back()


class SharedVariables:
    """The variables that the trials of a process share, with their first values.

    They are global variables, attributes of classes, closures and the like, and the results that
    cached functions keep.

    Args:
        places: Where the variables are. Their values now are the first ones.

    Attributes:
        num_calls: How often cached functions had been called for a result that they did not have,
            when ``changed`` was called last.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.num_calls = 0
        self._keepers: list[Keeper] = []
        self._results: list[Keeper] = []
        """The keepers that save what cached functions keep."""
        self.keep(places)

    @property
    def places(self) -> list[Place]:
        """Where the variables are."""
        return [place for keeper in self._keepers for place in keeper.places]

    @property
    def caches(self) -> list[Any]:
        """The cached functions that the code reads."""
        caches = {id(c): c for keeper in self._keepers for c in keeper.caches}
        return list(caches.values())

    def keep(self, places: Iterable[Place]) -> None:
        """Add those places that are not saved yet, with their values now."""
        known = set().union(*(keeper.keys for keeper in self._keepers))
        new = [place for place in places if (id(place.holder), place.key) not in known]
        if new:
            self._keepers.append(Keeper(new))

    def changed(self) -> frozenset[str]:
        """Return the names of the variables that do not have their first values.

        A result that a cached function has kept since is saved as it is now.
        """
        caches = self.caches
        num_calls = sum(cache.cache_info().misses for cache in caches)
        if num_calls != self.num_calls:
            self.num_calls = num_calls
            before = len(self._keepers)
            self.keep(cached_places(caches))
            self._results += self._keepers[before:]
        return frozenset(name for keeper in self._keepers for name in keeper.changed())

    def now(self) -> SavedValues:
        """Save the values that the variables have now."""
        return SavedValues([keeper.now() for keeper in self._keepers])

    def put_back(self, *, empty_caches: bool = False) -> None:
        """Set all variables to their first values, as they are in a new process.

        Args:
            empty_caches: Whether cached functions also forget their results.
        """
        SavedValues(self._keepers).put_back()
        if empty_caches:
            empty: dict[Any, Any] = {}
            for keeper in self._keepers:
                keeper.empty_caches(empty)

    def moved_results(self, before: SavedValues) -> frozenset[str]:
        """Return the names of cached results that have changed.

        Args:
            before: The values of the variables before, saved after the last call of ``changed``.
        """
        pairs = zip(self._keepers, before.keepers, strict=True)
        saved = [was for keeper, was in pairs if keeper in self._results]
        return frozenset(name for keeper in saved for name in keeper.changed())
