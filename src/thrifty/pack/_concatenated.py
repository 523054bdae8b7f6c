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

from ._backend import Backend, EpochPlan, Member, Outcome, guarded
from ._batches import LastingError, own_copy
from ._data import Batch, WholeBatch
from ._state import State
from ._task import Task
from ._trial import TaskTrial


class ConcatenatedBackend(Backend):
    """Any number of slots, any models. On a GPU each member has a stream of its own.

    Options: ``device`` to train on.
    """

    def __init__(self, task: Task, *, device: torch.device | str = "cpu") -> None:
        self._task = task
        self._device = torch.device(device)
        self.trials: dict[int, TaskTrial] = {}
        self._streams: dict[int, Any] = {}
        self._under_way: set[int] = set()

    def stack(self, slot: int, member: Member) -> None:
        """Puts a trial into a slot."""
        trial = TaskTrial(self._task, self._device)
        trial.begin(member)
        self.place(slot, trial)

    def place(self, slot: int, trial: TaskTrial) -> None:
        """Gives a trial that has begun a slot."""
        self.trials[slot] = trial
        if self._device.type == "cuda" and slot not in self._streams:
            self._streams[slot] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """How many optimiser steps the next epoch has."""
        return self.trials[slot].num_steps(values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """One step of each in turn, until somebody's epoch ends."""
        outcomes = self._start(plans)
        while self._under_way and not outcomes:
            for slot in sorted(self._under_way):
                outcome = self._one_step(slot)
                if outcome is not None:
                    outcomes[slot] = outcome
        self._under_way -= set(outcomes)
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

    def _start(self, plans: Mapping[int, EpochPlan]) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        shared = _SharedBatches(
            _batches_key(self.trials[slot], plan) for slot, plan in plans.items()
        )
        for slot, plan in plans.items():
            outcome = guarded(partial(self._begin, slot, plan, shared))
            if isinstance(outcome, Exception) or outcome:
                outcomes[slot] = outcome
            else:
                self._under_way.add(slot)
        return outcomes

    def _begin(self, slot: int, plan: EpochPlan, shared: _SharedBatches) -> Mapping[str, float]:
        """The first step of an epoch; all of it where a trial must have Python's and NumPy's streams to itself."""
        trial = self.trials[slot]
        trial.start(plan, batches=shared.of(trial, plan))
        if slot in self._streams:  # batches and model were put there on the stream of everybody
            self._streams[slot].wait_stream(torch.cuda.current_stream(self._device))
        with self._stream(slot):
            more = trial.step()
            while more and trial.loose_streams:
                more = trial.step()
            return {} if more else trial.finish()

    def _one_step(self, slot: int) -> Outcome | None:
        """One step of a member; its outcome if that was the end of its epoch."""
        trial = self.trials[slot]

        def advance() -> Mapping[str, float]:
            with self._stream(slot):
                return {} if trial.step() else trial.finish()

        outcome = guarded(advance)
        return outcome or None if isinstance(outcome, Mapping) else outcome

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
