"""Back-ends in plain PyTorch: concatenated, one step of each of K models in turn, and solo.

The concatenated back-end follows Liu et al., "Understanding and Optimizing Packed Neural Network
Training for Hyper-Parameter Tuning", DEEM 2021: members share input, transfer and dispatch. Unlike
there, each keeps its own batches and optimizer. So models, optimizers and batch sizes may differ,
and every result is bit for bit that of the trial alone. That holds as long as no trial changes what
another one uses, which is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import tee
from typing import Any

import torch
from torch.utils.data import Dataset

from thrifty.core import TaskError, lines_of
from thrifty.pack._backend import Backend, EpochPlan, Member, Outcome, UnverifiedError, guarded
from thrifty.pack._state import State, loose_streams
from thrifty.pack.task._data import Batch, LastingError, own_batch
from thrifty.pack.task._task import Task, Trainable
from thrifty.pack.trial._trial import TaskTrial, TrainableTrial
from thrifty.pack.verify import Change, Watch


STREAMS_MOVED = (
    "it draws from Python's or NumPy's random stream, which is seeded for each epoch, "
    "not for each step"
)


class InterferenceError(Exception):
    """Trials that took turns have affected each other: their epochs do not count."""


class EpochGroup:
    """The trials that are in the middle of an epoch at the same time.

    Python's and NumPy's streams are seeded when an epoch starts (before each batch of a dataset),
    so the steps in between must not draw from them. A value that a step reads must not change
    until the epoch ends if another trial can write to it.
    """

    def __init__(self) -> None:
        self._watches: dict[int, Watch] = {}
        self._others: dict[int, list[Watch]] = {}
        self.seeded()

    def join(self, slot: int, trial: TaskTrial, others: Mapping[int, TaskTrial]) -> None:
        """Start watching a trial that begins an epoch; its values count as they are now.

        Args:
            slot: The slot of the trial.
            trial: The trial.
            others: The trials in the middle of an epoch, by slot.
        """
        watch = self._watches.get(slot)
        if watch is None:
            watch = self._watches[slot] = trial.new_watch()
        else:
            watch.look()
        self._others[slot] = []
        for number, other in others.items():
            if number not in self._watches:
                self._watches[number] = other.new_watch()
            theirs = self._watches[number]
            self._others[slot].append(theirs)
            self._others.setdefault(number, []).append(watch)

    def end(self, slot: int) -> None:
        """Stop watching a trial that has ended its epoch."""
        self._others.pop(slot, None)

    def forget(self, slot: int) -> None:
        """Discard what is known of a trial that has left its slot."""
        self.end(slot)
        self._watches.pop(slot, None)

    def step(self, slot: int, trial: TaskTrial) -> bool:
        """Let a trial take a step, and return False if its epoch has no steps left.

        Raises:
            InterferenceError: A trial has drawn from streams that were seeded for another one.
        """
        if not (trial.seeds_each_batch and slot in self._others):
            return trial.step()
        self.check_streams()
        try:
            batch = trial.next_batch()
        finally:
            self.seeded()
        if batch is None:
            return False
        trial.update(batch)
        return True

    def seeded(self) -> None:
        """Record where Python's and NumPy's streams are; nothing may move them from here on."""
        self._streams = loose_streams()

    def is_moved(self) -> bool:
        """Return whether Python's or NumPy's stream has moved since it was recorded."""
        return self._streams != loose_streams()

    def check_streams(self) -> None:
        """Check that no trial has drawn from Python's and NumPy's streams.

        Raises:
            InterferenceError: One has.
        """
        if self.is_moved():
            raise InterferenceError(STREAMS_MOVED)

    def check(self, slot: int) -> None:
        """Check that no other trial interfered with a trial that is at the end of its epoch.

        Raises:
            InterferenceError: Streams have moved, or a value that another trial also reads has
                changed.
        """
        others = self._others.get(slot)
        if not others:
            return
        self.check_streams()
        for change in self._watches[slot].changes():
            if _is_shared(change, others):
                raise InterferenceError(
                    f"{change.name}, which several trials read, has changed while they took turns"
                )


def _is_shared(change: Change, others: Iterable[Watch]) -> bool:
    if isinstance(change.holder, Dataset):
        # a cache, or a count of reads: the rows do not depend on it, see ``StateCheck``
        return False
    return any(not change.objects.isdisjoint(other.objects()) for other in others)


def check_parameters(trial: TaskTrial, others: Iterable[TaskTrial | TrainableTrial]) -> None:
    """Check that no other trial trains a parameter of this one; frozen ones may be shared.

    Raises:
        TaskError: Another trial trains one.
    """
    own = {id(p): name for name, p in trial.model.named_parameters() if p.requires_grad}
    for other in others:
        for parameter in other.model.parameters():
            if parameter.requires_grad and id(parameter) in own:
                raise TaskError(
                    f"{type(trial.task).__name__}.model gives the parameter {own[id(parameter)]!r} "
                    "to several trials, so one trial trains those of another; make it anew, or "
                    "copy it (copy.deepcopy), in each call"
                )


class ConcatenatedBackend(Backend):
    """A back-end with any number of slots and any models.

    Members take turns step by step as long as they do not affect each other. If a step draws from
    Python's or NumPy's stream, or writes to a variable that others read, the outcome of every
    member in the middle of an epoch is an ``UnverifiedError``. From then on each member trains
    whole epochs by itself.

    Options: ``device`` to train on.

    Attributes:
        trials: The trials in training, by slot.
        why_apart: Why members no longer take turns; "" while they do.
    """

    def __init__(self, task: Task, *, device: torch.device | str = "cpu") -> None:
        self._task = task
        self._device = torch.device(device)
        self.trials: dict[int, TaskTrial] = {}
        self.why_apart = ""
        self._under_way: set[int] = set()
        self._company = EpochGroup()

    def put(self, slot: int, member: Member) -> None:
        """Put a trial into a slot.

        Raises:
            TaskError: It trains parameters of another trial.
        """
        trial = TaskTrial(self._task, self._device)
        trial.begin(member)
        self.place(slot, trial)

    def place(self, slot: int, trial: TaskTrial) -> None:
        """Give a slot to a trial that has already begun. Raises as ``put`` does."""
        check_parameters(trial, self.trials.values())
        self.trials[slot] = trial

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """Return how many optimizer steps the next epoch has."""
        return self.trials[slot].num_steps(values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Train one step of each member in turn until the epoch of one of them ends."""
        outcomes: dict[int, Outcome] = {}
        self._company.seeded()  # between two calls other code may use the streams
        self._start(plans, outcomes)
        while self._under_way and not outcomes:
            for slot in sorted(self._under_way):
                if slot not in outcomes:
                    with lines_of(slot):
                        self._note(slot, guarded(partial(self._one_step, slot)), outcomes)
        self._check_streams(outcomes)
        return outcomes

    def whole_epoch(self, slot: int, plan: EpochPlan) -> Mapping[str, float]:
        """Train one epoch of one trial while the others wait. Errors propagate."""
        with lines_of(slot):
            return self.trials[slot].epoch(plan)

    def state(self, slot: int) -> State:
        """Return a copy of a member's full state."""
        return self.trials[slot].state()

    def release(self, slot: int) -> None:
        """Free a slot."""
        self.trials.pop(slot, None)
        self._under_way.discard(slot)
        self._company.forget(slot)

    def _start(self, plans: Mapping[int, EpochPlan], outcomes: dict[int, Outcome]) -> None:
        shared = _SharedBatches()
        for slot, plan in plans.items():
            self._note(slot, guarded(partial(shared.expect, self.trials[slot], plan)), outcomes)
        for slot, plan in plans.items():
            if slot in outcomes:
                continue
            self._check_streams(outcomes)  # before the next trial seeds them
            self._under_way.add(slot)
            with lines_of(slot):
                self._note(slot, guarded(partial(self._begin, slot, plan, shared)), outcomes)

    def _note(self, slot: int, outcome: Outcome | None, outcomes: dict[int, Outcome]) -> None:
        """Record the outcome of a step; it has no metrics until the epoch ends."""
        if isinstance(outcome, InterferenceError):
            self._part(outcome, outcomes)
        elif isinstance(outcome, Exception) or outcome:
            outcomes[slot] = outcome
            self._under_way.discard(slot)
            self._company.end(slot)

    def _check_streams(self, outcomes: dict[int, Outcome]) -> None:
        """Stop taking turns if a member within an epoch drew from Python's or NumPy's stream."""
        if self._under_way:
            try:
                self._company.check_streams()
            except InterferenceError as error:
                self._part(error, outcomes)

    def _part(self, error: InterferenceError, outcomes: dict[int, Outcome]) -> None:
        """Discard the epochs in progress, and let no member take turns any more."""
        self.why_apart = self.why_apart or str(error)
        for slot in self._under_way:
            outcomes[slot] = UnverifiedError(str(error), mismatch=False)
            self._company.end(slot)
        self._under_way.clear()
        self._company.seeded()

    def _begin(self, slot: int, plan: EpochPlan, shared: _SharedBatches) -> Mapping[str, float]:
        """Train the first step of an epoch, or all of it if members do not take turns.

        Returns:
            The metrics if the epoch has ended, else nothing.
        """
        trial = self.trials[slot]
        batches = None if self.why_apart else partial(shared.of, trial, plan)
        try:
            trial.start(plan, batches=batches)
        finally:
            self._company.seeded()  # no draw of ``adapt`` is a draw within a step of another trial
        if len(self.trials) > 1:
            check_parameters(trial, (t for s, t in self.trials.items() if s != slot))
            others = {s: self.trials[s] for s in self._under_way if s != slot}
            self._company.join(slot, trial, others)
        more = self._company.step(slot, trial)
        if len(self.trials) > 1 and not trial.seeds_each_batch and self._company.is_moved():
            # no other trial has drawn since the epoch was seeded, so the result is right
            # as long as no other trial takes a turn from here on
            self.why_apart = self.why_apart or STREAMS_MOVED
        if self.why_apart or not more:
            while more:
                more = trial.step()
            return self._finish(trial)
        return {}

    def _one_step(self, slot: int) -> Mapping[str, float]:
        """Train one step of a member, and return its metrics if its epoch has ended."""
        trial = self.trials[slot]
        if self._company.step(slot, trial):
            return {}
        self._company.check(slot)
        return self._finish(trial)

    def _finish(self, trial: TaskTrial) -> Mapping[str, float]:
        try:
            return trial.finish()
        finally:
            self._company.seeded()


def _batches_key(trial: TaskTrial, plan: EpochPlan) -> tuple[Any, ...]:
    """Return a key that is equal for members that see the same batches in the same order."""
    return (*trial.batches_key, trial.seed, plan.epoch, trial.batch_size(plan.values))


class _SharedBatches:
    """Batches prepared once for members that see the same ones in the same order.

    ``expect`` all members whose epochs begin now, then get the batches ``of`` each. Each member
    gets its own copies.
    """

    def __init__(self) -> None:
        self._num_members: Counter[tuple[Any, ...]] = Counter()
        self._known: dict[tuple[Any, ...], Iterator[Batch]] = {}

    def expect(self, trial: TaskTrial, plan: EpochPlan) -> None:
        """Count a member among those that see its batches."""
        self._num_members[_batches_key(trial, plan)] += 1

    def of(self, trial: TaskTrial, plan: EpochPlan) -> Iterator[Batch]:
        key = _batches_key(trial, plan)
        if self._num_members[key] == 1:
            return trial.batches(plan)
        known = self._known.pop(key, None)
        mine, kept = tee(_for_several(trial.batches(plan)) if known is None else known)
        self._known[key] = kept
        return map(own_batch, mine)


def _for_several(batches: Iterator[Batch]) -> Iterator[Batch]:
    # an iterator that can be copied handles its errors itself
    return batches if hasattr(batches, "__copy__") else LastingError(batches)


class SoloBackend(Backend):
    """A back-end with one slot for one trial. Works for every ``Task`` and every ``Trainable``.

    Options: ``device`` to train on.

    Attributes:
        trial: The trial in the slot.
    """

    def __init__(self, task: Task | Trainable, *, device: torch.device | str = "cpu") -> None:
        self.trial: TaskTrial | TrainableTrial
        if isinstance(task, Task):
            self.trial = TaskTrial(task, torch.device(device))
        else:
            self.trial = TrainableTrial(task, torch.device(device))

    def put(self, slot: int, member: Member) -> None:
        """Put a trial into the slot."""
        assert slot == 0, "the solo back-end has one slot"
        self.trial.begin(member)

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """Return how many optimizer steps the next epoch has."""
        return self.trial.num_steps(values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Train one epoch and evaluate it."""
        return {slot: guarded(partial(self.trial.epoch, plan)) for slot, plan in plans.items()}

    def state(self, slot: int) -> State:
        """Return a copy of the full state."""
        return self.trial.state()

    def release(self, slot: int) -> None:
        """Do nothing: the next trial takes the place of this one."""

    def restore(self, member: Member) -> None:
        """Put a trial into the slot as it was at the end of the epoch with ``member``'s values."""
        if isinstance(self.trial, TaskTrial):
            self.trial.restore(member)
        else:
            # it is not trained further, so set it up with the values of its last epoch
            self.trial.begin(replace(member, first=member.values))

    @property
    def model(self) -> torch.nn.Module:
        """The model in the slot.

        Raises:
            TaskError: A Trainable has no model that thrifty knows of.
        """
        return self.trial.model

    def averaged_model(self, average: str) -> torch.nn.Module:
        """Return the model in the slot with averaged weights (``"ema"`` or ``"swa"``).

        Raises:
            TaskError: The task has no such average; a Trainable has none.
        """
        if isinstance(self.trial, TaskTrial):
            return self.trial.averaged_model(average)
        raise TaskError(
            f"{type(self.trial.task).__name__} owns its loop, so thrifty averages none of its "
            "weights; leave average= out"
        )
