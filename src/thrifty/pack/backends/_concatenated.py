"""The concatenated back-end: K plain models in one process, one step of each in turn.

Follows Liu et al., "Understanding and Optimizing Packed Neural Network Training for
Hyper-Parameter Tuning", DEEM 2021: members share input, transfer and dispatch. Unlike there, each
keeps its own batches and optimizer. So models, optimizers and batch sizes may differ, and every
result is bit for bit that of the trial alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import tee
from typing import Any

import torch

from thrifty.pack._backend import Backend, EpochPlan, Member, Outcome, UnverifiedError, guarded
from thrifty.pack._state import State
from thrifty.pack.task._data import Batch, LastingError, WholeBatch, own_copy
from thrifty.pack.task._task import Task
from thrifty.pack.trial._trial import TaskTrial

from ._company import STREAMS_MOVED, Company, InterferenceError, check_parameters


class ConcatenatedBackend(Backend):
    """A back-end with any number of slots and any models. On a GPU each member has its own stream.

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
        self._streams: dict[int, Any] = {}
        self._under_way: set[int] = set()
        self._company = Company()

    def stack(self, slot: int, member: Member) -> None:
        """Put a trial into a slot.

        Raises:
            TaskError: It trains parameters of another trial.
        """
        trial = TaskTrial(self._task, self._device)
        trial.begin(member)
        self.place(slot, trial)

    def place(self, slot: int, trial: TaskTrial) -> None:
        """Give a slot to a trial that has already begun. Raises as ``stack`` does."""
        check_parameters(trial, self.trials.values())
        self.trials[slot] = trial
        if self._device.type == "cuda" and slot not in self._streams:
            self._streams[slot] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

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
                    self._note(slot, guarded(partial(self._one_step, slot)), outcomes)
        self._check_streams(outcomes)
        return outcomes

    def whole_epoch(self, slot: int, plan: EpochPlan) -> Mapping[str, float]:
        """Train one epoch of one trial while the others wait. Errors propagate."""
        return self.trials[slot].epoch(plan)

    def unstack(self, slot: int) -> State:
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
            self._note(slot, guarded(partial(self._begin, slot, plan, shared)), outcomes)

    def _note(self, slot: int, outcome: Outcome, outcomes: dict[int, Outcome]) -> None:
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
        if slot in self._streams:  # the default stream has put batches and model there
            self._streams[slot].wait_stream(torch.cuda.current_stream(self._device))
        with self._stream(slot):
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
        with self._stream(slot):
            if self._company.step(slot, trial):
                return {}
            self._company.check(slot)
            return self._finish(trial)

    def _finish(self, trial: TaskTrial) -> Mapping[str, float]:
        try:
            return trial.finish()
        finally:
            self._company.seeded()

    def _stream(self, slot: int) -> AbstractContextManager[Any]:
        stream = self._streams.get(slot)
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def _batches_key(trial: TaskTrial, plan: EpochPlan) -> tuple[Any, ...]:
    """Return a key that is equal for members that see the same batches in the same order."""
    return (id(trial.source), trial.seed, plan.epoch, trial.batch_size(plan.values))


class _SharedBatches:
    """Batches prepared once for members that see the same ones in the same order.

    ``expect`` all members whose epochs begin now, then get the batches ``of`` each. Each member
    gets its own copies.
    """

    def __init__(self) -> None:
        self._num_members: Counter[tuple[Any, ...]] = Counter()
        self._known: dict[tuple[Any, ...], Iterator[Batch]] = {}

    def expect(self, trial: TaskTrial, plan: EpochPlan) -> Mapping[str, float]:
        """Count a member among those that see its batches; the mapping returned is empty."""
        self._num_members[_batches_key(trial, plan)] += 1
        return {}

    def of(self, trial: TaskTrial, plan: EpochPlan) -> Iterator[Batch]:
        key = _batches_key(trial, plan)
        if self._num_members[key] == 1:
            return trial.batches(plan)
        known = self._known.pop(key, None)
        mine, kept = tee(_for_several(trial.batches(plan)) if known is None else known)
        self._known[key] = kept
        return map(_own, mine)


def _for_several(batches: Iterator[Batch]) -> Iterator[Batch]:
    # an iterator that can be copied handles its errors itself
    return batches if hasattr(batches, "__copy__") else LastingError(batches)


def _own(batch: Batch) -> Batch:
    # whole batches handle copying themselves
    is_whole = isinstance(batch, WholeBatch) and not isinstance(batch, torch.Tensor)
    return batch if is_whole else own_copy(batch)
