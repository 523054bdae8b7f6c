"""The solo back-end: one trial at a time, plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from thrifty.core import DivergedError, TaskError, derive_seed, step_seed

from ._backend import Backend, EpochPlan, Member
from ._hyperparameters import HyperParameters
from ._optimizer import Optimizer
from ._random import seed_everything, seed_step
from ._sources import sources_of
from ._state import State, pack_state, unpack_state
from ._task import Task, Trainable, optimizer_of


TRAIN_LOSS = "train_loss"
"""The metric that every task has: the mean training loss of the epoch."""


class SoloBackend(Backend):
    """One slot, one trial. Works for every ``Task`` and every ``Trainable``.

    Options: ``device`` to train on.
    """

    def __init__(self, task: Task | Trainable, *, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._one: _TaskTrial | _TrainableTrial
        if isinstance(task, Task):
            self._one = _TaskTrial(task, self._device)
        else:
            self._one = _TrainableTrial(task, self._device)

    def stack(self, slot: int, member: Member) -> None:
        """Puts a trial into the slot."""
        assert slot == 0, "the solo back-end has one slot"
        self._one.begin(member)

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """How many optimiser steps the next epoch has."""
        return self._one.num_steps(values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Mapping[str, float]]:
        """Trains one epoch and evaluates it."""
        return {slot: self._one.epoch(plan) for slot, plan in plans.items()}

    def unstack(self, slot: int) -> State:
        """A copy of the full state."""
        return self._one.state()

    @property
    def model(self) -> torch.nn.Module:
        """The model in the slot.

        Raises:
            TaskError: a Trainable has no model that thrifty knows of.
        """
        return self._one.model


class _TaskTrial:
    model: torch.nn.Module

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._device = device

    def begin(self, member: Member) -> None:
        hp = HyperParameters(member.values)
        self._seed = member.seed
        seed_everything(derive_seed(member.seed, "data"))
        self._source = sources_of(self._task, self._device).get(self._task, hp)
        seed_everything(derive_seed(member.seed, "model"))
        self.model = self._task.model(hp).to(self._device)
        self._spec: Optimizer = optimizer_of(self._task, hp)
        self._optimizer = self._spec.build(self.model.parameters(), member.values)
        if member.state is not None:
            state = unpack_state(member.state)
            self.model.load_state_dict(state["model"])
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({
                "state": state["optimizer"],
                "param_groups": groups,
            })

    def num_steps(self, values: Mapping[str, Any]) -> int:
        return math.ceil(self._source.num_train / self._batch_size(values))

    def state(self) -> State:
        return pack_state({
            "model": dict(self.model.state_dict()),
            "optimizer": self._optimizer.state_dict()["state"],
        })

    def epoch(self, plan: EpochPlan) -> Mapping[str, float]:
        loss = self._train(plan)
        if not math.isfinite(loss):
            raise DivergedError(
                f"the training loss of epoch {plan.epoch + 1} is {loss}; a smaller learning rate, "
                "a warm-up or clip_norm may help"
            )
        return {TRAIN_LOSS: loss, **self._evaluate(plan.epoch)}

    def _train(self, plan: EpochPlan) -> float:
        task, model, optimizer, device = self._task, self.model, self._optimizer, self._device
        task.adapt(model, HyperParameters(plan.values))
        options = self._spec.resolve(plan.values)
        for group in optimizer.param_groups:
            group.update(options)
        clip = self._spec.clip_value(plan.values)
        followed = {name: plan.moving[name] for name in self._spec.names() & set(plan.moving)}
        batches = self._source.train_batches(
            seed=self._seed, epoch=plan.epoch, batch_size=self._batch_size(plan.values)
        )
        epoch_seed = derive_seed(self._seed, "epoch", plan.epoch)
        seed_everything(epoch_seed)
        model.train()
        losses: list[torch.Tensor] = []
        for step, batch in enumerate(batches):
            if followed:
                now = {**plan.values, **{n: values[step] for n, values in followed.items()}}
                options = self._spec.resolve(now)
                for group in optimizer.param_groups:
                    group.update(options)
                clip = self._spec.clip_value(now)
            seed_step(step_seed(epoch_seed, step), device)
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model, batch)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def _evaluate(self, epoch: int) -> dict[str, float]:
        model = self.model.eval()
        sums: dict[str, Any] = {}
        num_seen = 0
        seed_everything(derive_seed(self._seed, "evaluate", epoch))
        with torch.no_grad():
            batches = self._source.valid_batches(batch_size=self._task.eval_batch_size)
            for batch, num in batches:
                for name, value in self._task.metrics(model, batch).items():
                    sums[name] = sums.get(name, 0.0) + value * num
                num_seen += num
        return {name: float(value) / num_seen for name, value in sums.items()}

    def _batch_size(self, values: Mapping[str, Any]) -> int:
        size = self._task.batch_size
        if isinstance(size, str):
            if size not in values:
                raise TaskError(
                    f"the task's batch_size follows hyper-parameter {size!r}, which the search space does not "
                    f"have (it has: {', '.join(values)}); add it or give batch_size a number"
                )
            size = values[size]
        if int(size) != size or size < 1:
            raise TaskError(f"batch_size is {size!r}; it must be a positive integer")
        return int(size)


class _TrainableTrial:
    def __init__(self, task: Trainable, device: torch.device) -> None:
        self._task = task
        self._device = device

    @property
    def model(self) -> torch.nn.Module:
        raise TaskError(
            f"{type(self._task).__name__} owns its loop; its best state can be put into an instance "
            "of it with load_state"
        )

    def begin(self, member: Member) -> None:
        seed_everything(derive_seed(member.seed, "model"))
        self._seed = member.seed
        self._task.setup(HyperParameters(member.values), seed=member.seed, device=self._device)
        if member.state is not None:
            self._task.load_state(unpack_state(member.state))

    def num_steps(self, values: Mapping[str, Any]) -> int:
        return 1

    def state(self) -> State:
        return pack_state(self._task.state())

    def epoch(self, plan: EpochPlan) -> Mapping[str, float]:
        seed_everything(derive_seed(self._seed, "epoch", plan.epoch))
        self._task.train(plan.epoch, HyperParameters(plan.values))
        return {name: float(value) for name, value in self._task.evaluate().items()}
