"""One trial of a ``Trainable``, which owns its loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thrifty.core import TaskError, derive_seed
from thrifty.pack._backend import EpochPlan, Member
from thrifty.pack._random import seed_everything
from thrifty.pack._state import State, pack_state, unpack_state
from thrifty.pack.task._hyperparameters import HyperParameters, Readings
from thrifty.pack.task._metrics import as_number, check_metrics
from thrifty.pack.task._task import Trainable, own_task


class TrainableTrial:
    """One trial of a task that owns its loop."""

    adapts = False
    """Whether thrifty adapts the model between epochs; a ``Trainable`` does so in ``train``."""

    def __init__(self, task: Trainable, device: torch.device) -> None:
        # a copy, since one instance is one trial and a pack has several trials
        self.task = own_task(task)
        self.is_trained = False
        """Whether the trial has begun an epoch."""
        self._device = device

    @property
    def model(self) -> torch.nn.Module:
        """The model of the trainable, if its attribute ``model`` is one.

        Raises:
            TaskError: It is not.
        """
        model = getattr(self.task, "model", None)
        if isinstance(model, torch.nn.Module):
            return model
        raise TaskError(
            f"{type(self.task).__name__} owns its loop; its best state can be put into an instance "
            "of it with load_state"
        )

    def begin(self, member: Member) -> None:
        """Set up the trainable, and load the member's state if there is one."""
        seed_everything(derive_seed(member.seed, "model"))
        self._seed = member.seed
        self._readings = Readings(
            type(self.task).__name__, member.first_values, moving=member.moving
        )
        self.task.setup(self._readings.once("setup"), seed=member.seed, device=self._device)
        if member.state is not None:
            self.task.load_state(unpack_state(member.state))

    def num_steps(self, values: Mapping[str, Any]) -> int:
        """Return 1: thrifty does not see the steps within an epoch."""
        return 1

    def state(self) -> State:
        """Return a copy of everything that is needed to continue."""
        return pack_state(self.task.state())

    def epoch(self, plan: EpochPlan) -> Mapping[str, float]:
        """Train and evaluate a whole epoch.

        Raises:
            TaskError: A hyper-parameter that changes is read in ``setup``, but not in ``train``.
                Only a call of ``train`` shows this; its epoch is not reported.
        """
        seed_everything(derive_seed(self._seed, "epoch", plan.epoch))
        hp = HyperParameters(plan.values)
        self.is_trained = True
        self.task.train(plan.epoch, hp)
        self._readings.followed |= hp.names_read
        self._readings.check_epoch(plan)
        metrics = check_metrics(
            self.task.evaluate(), task=type(self.task).__name__, method="evaluate"
        )
        return {name: as_number(value) for name, value in metrics.items()}
