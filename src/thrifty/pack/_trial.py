"""One trial of a task, step by step: plain PyTorch, what every other way of training has to equal."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch

from thrifty.core import DivergedError, TaskError, derive_seed, step_seed

from ._backend import EpochPlan, Member
from ._counters import step_counters
from ._data import Batch, Source, steps_of
from ._hyperparameters import HyperParameters
from ._metric_sums import MetricSums
from ._optimizer import Optimizer
from ._random import seed_everything, seed_step
from ._sources import sources_of
from ._state import State, pack_state, unpack_state
from ._task import Task, optimizer_of


TRAIN_LOSS = "train_loss"
"""The metric that every task has: the mean training loss of the epoch."""


class TaskTrial:
    """A model, its optimiser and its place in the data.

    ``start`` an epoch, ``step`` until there is nothing left, ``finish`` it.
    """

    model: torch.nn.Module

    def __init__(self, task: Task, device: torch.device) -> None:
        self._owner = task
        # what the task notes down about one trial (in ``adapt``, say) must not reach another one
        self.task = copy(task)
        self.device = device
        self.loose_streams = False
        """Whether its code draws from Python's or NumPy's stream, which are not seeded at each step."""

    def begin(self, member: Member) -> None:
        """Makes model and optimiser, from the member's state if it has one."""
        hp = HyperParameters(member.values)
        self.seed = member.seed
        seed_everything(derive_seed(member.seed, "data"))
        sources = sources_of(self._owner, self.device)
        self.source: Source = sources.get(self._owner, hp)
        self.source_number = sources.number_of(self.source)
        """What tells its data from those of all other trials, also of trials that are gone."""
        seed_everything(derive_seed(member.seed, "model"))
        self.model = self.task.model(hp).to(self.device)
        self.spec: Optimizer = optimizer_of(self.task, hp)
        self.optimizer = self.spec.build(self.model.parameters(), member.values)
        if member.state is not None:
            state = unpack_state(member.state)
            self.model.load_state_dict(state["model"])
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({
                "state": state["optimizer"],
                "param_groups": groups,
            })

    def batch_size(self, values: Mapping[str, Any]) -> int:
        """Rows of a batch.

        Raises:
            TaskError: it is no positive integer, or follows a hyper-parameter that is not there.
        """
        return batch_size_of(self.task, values)

    def num_steps(self, values: Mapping[str, Any]) -> int:
        """How many optimizer steps an epoch has.

        Raises:
            TaskError: It has none, because only whole batches count and there is no whole one.
        """
        return steps_of(self.source, self.batch_size(values))

    def state(self) -> State:
        """A copy of everything that is needed to go on."""
        return pack_state({
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict()["state"],
        })

    def batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """The batches of an epoch."""
        return self.source.train_batches(
            seed=self.seed, epoch=plan.epoch, batch_size=self.batch_size(plan.values)
        )

    def fetch_seeds(self, plan: EpochPlan) -> Callable[[int], int] | None:
        """The seed of reading each batch; None for data in memory, which are only sliced."""
        if self.source.arrays is not None:
            return None
        return partial(step_seed, derive_seed(self.seed, "fetch", plan.epoch))

    def start(self, plan: EpochPlan, *, batches: Iterator[Batch] | None = None) -> None:
        """Gets ready for an epoch; ``batches`` are those of ``plan``, where somebody has them already."""
        self.plan = plan
        self.task.adapt(self.model, HyperParameters(plan.values))
        options = self.spec.resolve(plan.values)
        for group in self.optimizer.param_groups:
            group.update(options)
        self._clip = self.spec.clip_value(plan.values)
        self._followed = {n: plan.moving[n] for n in self.spec.names() & set(plan.moving)}
        self._batches = self.batches(plan) if batches is None else batches
        self._fetch_seeds = self.fetch_seeds(plan)
        self._counters = list(step_counters(self.model).values())
        self._epoch_seed = derive_seed(self.seed, "epoch", plan.epoch)
        seed_everything(self._epoch_seed)
        self.model.train()
        self._losses: list[torch.Tensor] = []

    def step(self) -> bool:
        """One update; False if the epoch has no batch left."""
        step = len(self._losses)
        if self._fetch_seeds is not None:
            # what a data set draws must not depend on who drew before
            seed_everything(self._fetch_seeds(step))
        batch = next(self._batches, None)
        if batch is None:
            return False
        if self._followed:
            now = {**self.plan.values, **{n: v[step] for n, v in self._followed.items()}}
            options = self.spec.resolve(now)
            for group in self.optimizer.param_groups:
                group.update(options)
            self._clip = self.spec.clip_value(now)
        seed_step(step_seed(self._epoch_seed, step), self.device)
        before = _loose_streams() if not step else None
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model, batch)
        loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        for counter in self._counters:
            counter += 1
        self._losses.append(loss.detach())
        if before is not None and before != _loose_streams():
            self.loose_streams = True
        return True

    def finish(self) -> Mapping[str, float]:
        """The metrics of the epoch.

        Raises:
            DivergedError: the training loss is not finite.
        """
        loss = float(torch.stack(self._losses).mean())
        check_finite(loss, epoch=self.plan.epoch)
        return {TRAIN_LOSS: loss, **self.evaluate(self.plan.epoch)}

    def epoch(self, plan: EpochPlan) -> Mapping[str, float]:
        """A whole epoch."""
        self.start(plan)
        while self.step():
            pass
        return self.finish()

    def evaluate(self, epoch: int) -> dict[str, float]:
        """The task's metrics over the validation set."""
        return evaluate(
            self.task,
            self.model,
            source=self.source,
            seed=derive_seed(self.seed, "evaluate", epoch),
        )


def evaluate(
    task: Task, model: torch.nn.Module, *, source: Source, seed: int
) -> dict[str, float]:
    """The task's metrics over the validation set, each batch weighted by its samples."""
    model.eval()
    sums = MetricSums()
    seed_everything(seed)
    with torch.no_grad():
        for batch, num in source.valid_batches(batch_size=task.eval_batch_size):
            sums.add(task.metrics(model, batch), num=num)
    return sums.means()


def check_finite(loss: float, *, epoch: int) -> None:
    """Raises DivergedError for a training loss that is no number."""
    if not math.isfinite(loss):
        raise DivergedError(
            f"the training loss of epoch {epoch + 1} is {loss}; a smaller learning rate, "
            "a warm-up or clip_norm may help"
        )


def batch_size_of(task: Task, values: Mapping[str, Any]) -> int:
    """The batch size of a task under some hyper-parameters; see ``TaskTrial.batch_size``."""
    size = task.batch_size
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


def _loose_streams() -> tuple[Any, ...]:
    numpy = np.random.get_state()  # noqa: NPY002 (looked at, not drawn from)
    return (random.getstate(), numpy[2:], bytes(numpy[1]))
