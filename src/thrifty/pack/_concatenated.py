"""The concatenated back-end: K plain models in one process, one step of each in turn.

Liu et al., "Understanding and Optimizing Packed Neural Network Training for Hyper-Parameter Tuning", DEEM 2021: members share input,
transfer and dispatch. Unlike there each keeps its own batches and optimiser, so that models, optimisers and batch sizes may differ and
every result is bit for bit that of the trial alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import tee
from typing import Any

import torch

from ._backend import Backend, EpochPlan, Member, Outcome, UnverifiedError, guarded
from ._batches import LastingError, own_copy
from ._company import STREAMS_MOVED, Company, InterferenceError, check_parameters
from ._data import Batch, WholeBatch
from ._state import State
from ._task import Task
from ._trial import TaskTrial


class ConcatenatedBackend(Backend):
    """Any number of slots, any models. On a GPU each member has a stream of its own.

    Members take turns step by step as long as they do not reach each other: a step that draws from Python's or
    NumPy's stream, or that writes to a variable which others read, takes the result from all who were under way (an
    ``UnverifiedError``). From then on each trains whole epochs by itself.

    Options: ``device`` to train on.

    Attributes:
        trials: Those in training, by slot.
        why_apart: Why members do not take turns any more; "" while they do.
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
        """Puts a trial into a slot.

        Raises:
            TaskError: It trains parameters of another trial.
        """
        trial = TaskTrial(self._task, self._device)
        trial.begin(member)
        self.place(slot, trial)

    def place(self, slot: int, trial: TaskTrial) -> None:
        """Gives a trial that has begun a slot. Raises as ``stack`` does."""
        check_parameters(trial, self.trials.values())
        self.trials[slot] = trial
        if self._device.type == "cuda" and slot not in self._streams:
            self._streams[slot] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """How many optimiser steps the next epoch has."""
        return self.trials[slot].num_steps(values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """One step of each in turn, until somebody's epoch ends."""
        outcomes: dict[int, Outcome] = {}
        self._company.seeded()  # between two calls the streams are somebody else's
        self._start(plans, outcomes)
        while self._under_way and not outcomes:
            for slot in sorted(self._under_way):
                if slot not in outcomes:
                    self._note(slot, guarded(partial(self._one_step, slot)), outcomes)
        self._check_streams(outcomes)
        return outcomes

    def whole_epoch(self, slot: int, plan: EpochPlan) -> Outcome:
        """An epoch of one trial while the others wait."""
        return guarded(partial(self.trials[slot].epoch, plan))

    def unstack(self, slot: int) -> State:
        """A copy of the full state."""
        return self.trials[slot].state()

    def release(self, slot: int) -> None:
        """Frees a slot."""
        self.trials.pop(slot, None)
        self._under_way.discard(slot)
        self._company.forget(slot)

    def _start(self, plans: Mapping[int, EpochPlan], outcomes: dict[int, Outcome]) -> None:
        shared = _SharedBatches(
            _batches_key(self.trials[slot], plan) for slot, plan in plans.items()
        )
        for slot, plan in plans.items():
            self._check_streams(outcomes)  # the next trial seeds them
            self._under_way.add(slot)
            self._note(slot, guarded(partial(self._begin, slot, plan, shared)), outcomes)

    def _note(self, slot: int, outcome: Outcome, outcomes: dict[int, Outcome]) -> None:
        """Take note of what came of a step: no metrics as long as the epoch goes on."""
        if isinstance(outcome, InterferenceError):
            self._part(outcome, outcomes)
        elif isinstance(outcome, Exception) or outcome:
            outcomes[slot] = outcome
            self._under_way.discard(slot)
            self._company.end(slot)

    def _check_streams(self, outcomes: dict[int, Outcome]) -> None:
        """Whether those in the middle of an epoch have left Python's and NumPy's streams alone."""
        if self._under_way:
            try:
                self._company.check_streams()
            except InterferenceError as error:
                self._part(error, outcomes)

    def _part(self, error: InterferenceError, outcomes: dict[int, Outcome]) -> None:
        """Nothing counts of the epochs that are under way, and no member takes turns any more."""
        self.why_apart = self.why_apart or str(error)
        for slot in self._under_way:
            outcomes[slot] = UnverifiedError(str(error), mismatch=False)
            self._company.end(slot)
        self._under_way.clear()
        self._company.seeded()

    def _begin(self, slot: int, plan: EpochPlan, shared: _SharedBatches) -> Mapping[str, float]:
        """The first step of an epoch; all of it if members do not take turns. The metrics if that was all of it."""
        trial = self.trials[slot]
        trial.start(
            plan, batches=trial.batches(plan) if self.why_apart else shared.of(trial, plan)
        )
        if len(self.trials) > 1:
            check_parameters(trial, (t for s, t in self.trials.items() if s != slot))
            others = {s: self.trials[s] for s in self._under_way if s != slot}
            self._company.join(slot, trial, others)
        self._company.seeded()
        if slot in self._streams:  # batches and model were put there on the stream of everybody
            self._streams[slot].wait_stream(torch.cuda.current_stream(self._device))
        with self._stream(slot):
            more = self._company.step(slot, trial)
            if len(self.trials) > 1 and not trial.seeds_each_batch and self._company.is_moved():
                # nobody else has drawn since the epoch was seeded: what comes is right if nobody else follows
                self.why_apart = self.why_apart or STREAMS_MOVED
            if self.why_apart or not more:
                while more:
                    more = trial.step()
                return self._finish(trial)
            return {}

    def _one_step(self, slot: int) -> Mapping[str, float]:
        """One step of a member; its metrics if that was the end of its epoch."""
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
        return nullcontext() if stream is None else torch.cuda.stream(stream)  # type: ignore[no-any-return]


def _batches_key(trial: TaskTrial, plan: EpochPlan) -> tuple[Any, ...]:
    """Equal for members that see the same batches in the same order."""
    return (id(trial.source), trial.seed, plan.epoch, trial.batch_size(plan.values))


class _SharedBatches:
    """Members that see the same batches in the same order have them prepared once; each gets copies of its own.

    Args:
        keys: Of all members whose epochs begin now.
    """

    def __init__(self, keys: Iterable[tuple[Any, ...]]) -> None:
        self._num_members = Counter(keys)
        self._known: dict[tuple[Any, ...], Iterator[Batch]] = {}

    def of(self, trial: TaskTrial, plan: EpochPlan) -> Iterator[Batch]:
        key = _batches_key(trial, plan)
        if self._num_members[key] == 1:
            return trial.batches(plan)
        known = self._known.pop(key, None)
        mine, kept = tee(_for_several(trial.batches(plan)) if known is None else known)
        self._known[key] = kept
        return map(_own, mine)


def _for_several(batches: Iterator[Batch]) -> Iterator[Batch]:
    # one that knows how to be copied sees to its errors itself
    return batches if hasattr(batches, "__copy__") else LastingError(batches)


def _own(batch: Batch) -> Batch:
    # whole batches see to it themselves
    is_whole = isinstance(batch, WholeBatch) and not isinstance(batch, torch.Tensor)
    return batch if is_whole else own_copy(batch)
