"""The solo back-end, which trains one trial at a time in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from thrifty.pack._backend import Backend, EpochPlan, Member, Outcome, guarded
from thrifty.pack._state import State
from thrifty.pack.task._task import Task, Trainable
from thrifty.pack.trial._trial import TaskTrial, TrainableTrial


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

    def stack(self, slot: int, member: Member) -> None:
        """Put a trial into the slot."""
        assert slot == 0, "the solo back-end has one slot"
        self.trial.begin(member)

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """Return how many optimizer steps the next epoch has."""
        return self.trial.num_steps(values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Train one epoch and evaluate it."""
        return {slot: guarded(partial(self.trial.epoch, plan)) for slot, plan in plans.items()}

    def unstack(self, slot: int) -> State:
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
