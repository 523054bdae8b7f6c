"""Tasks with a plain loop beside them: how they are declared, and the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import thrifty as th
from bench.trust.case import mlp, mse, normal
from bench.trust.packed import everything
from thrifty.core import derive_seed, step_seed


EPOCHS = 4
BATCH = 16
LR = th.Choice([th.Constant(0.05), th.Step(0.05, [2], gamma=0.5)])
"""Two schedules that diverge after two epochs, so that there is a stage to share."""

At = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Training of one trial as one would write it without thrifty.

    Attributes:
        optimizer: Makes the optimizer from a model and the hyper-parameters of epoch 0; or several.
        follow: Brings the param groups up to date with the hyper-parameters of a step.
        adapt: Brings the model up to date with the hyper-parameters of an epoch.
        batch_size: Returns the batch size of an epoch.
        batches: Returns the batches of an epoch, if they are not those of arrays.
        valid: Returns the validation batch, if it is not in arrays.
        take: Takes a step with gradients of zero, given model, task, optimizers and batch; by
            default as usual.
    """

    optimizer: Callable[[nn.Module, At], Any]
    follow: Callable[[list[dict[str, Any]], At], None]
    adapt: Callable[[nn.Module, At], None] | None = None
    batch_size: Callable[[At], int] = lambda at: BATCH  # noqa: ARG005 (one size for each epoch)
    clip_norm: float | None = None
    batches: Callable[[int], Sequence[Any]] | None = None
    valid: Callable[[], Any] | None = None
    take: Callable[[nn.Module, th.Task, list[torch.optim.Optimizer], Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Moving:
    """A task and its plain loop, or None if the only right answer is a refusal.

    Attributes:
        refused: What the message names if the task must be refused; None if it must be trained.
    """

    name: str
    section: str
    task: Callable[[], th.Task]
    space: th.Space
    loop: Loop | None = None
    refused: str | None = None


class Regression(th.Task):
    """Base class of these tasks."""

    optimizer: Any = th.SGD(lr="lr", momentum=0.9)
    batch_size: Any = BATCH

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        x = normal(96, 6, seed=5)
        y = x.sin().sum(1, keepdim=True)
        return th.ArrayData(train=(x[:64], y[:64]), valid=(x[64:], y[64:]))

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return mlp(3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"value": self.loss(model, batch)}


def sgd(model: nn.Module, at: At) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=at["lr"], momentum=0.9)


def follow_lr(groups: list[dict[str, Any]], at: At) -> None:
    for group in groups:
        group["lr"] = at["lr"]


PLAIN = Loop(optimizer=sgd, follow=follow_lr)
MOVING: dict[str, Moving] = {}


def moving(
    section: str, *, loop: Loop | None = None, refused: str | None = None, **space: Any
) -> Callable[[Callable[[], type[th.Task]]], Callable[[], type[th.Task]]]:
    """Add a function that makes a task's class, under its own name."""

    def add(make: Callable[[], type[th.Task]]) -> Callable[[], type[th.Task]]:
        name = make.__name__
        assert name not in MOVING, name
        MOVING[name] = Moving(
            name=name,
            section=section,
            task=lambda: make()(),
            space=th.Space(**{"lr": LR, **space}),
            loop=loop,
            refused=refused,
        )
        return make

    return add


# -- the plain loop ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of the plain loop."""

    model: nn.Module
    curve: list[float]

    @property
    def is_diverged(self) -> bool:
        return not all(map(math.isfinite, self.curve))


def train_plainly(one: Moving, config: At) -> Trained:
    """Train one configuration in a plain loop, with thrifty's names of the random streams."""
    assert one.loop is not None
    loop, task = one.loop, one.task()

    def at(epoch: int, step: int = 0, num_steps: int = 1) -> At:
        return {
            name: value.values(epoch, epoch + 1, epochs=EPOCHS, steps_per_epoch=num_steps).tolist()[
                step
            ]
            if hasattr(value, "segments")
            else value
            for name, value in config.items()
        }

    start = th.HyperParameters(at(0))
    everything(derive_seed(0, "data"))
    data = task.data(start)
    everything(derive_seed(0, "model"))
    model = task.model(start)
    made = loop.optimizer(model, at(0))
    optimizers = made if isinstance(made, list) else [made]
    curve = []
    for epoch in range(EPOCHS):
        if loop.adapt is not None:
            loop.adapt(model, th.HyperParameters(at(epoch)))
        epoch_seed = derive_seed(0, "epoch", epoch)
        everything(epoch_seed)
        model.train()
        if loop.batches is None:
            batches = list(batches_of(data.train, epoch, size=loop.batch_size(at(epoch))))
        else:
            batches = list(loop.batches(epoch))
        for step, batch in enumerate(batches):
            for optimizer in optimizers:
                loop.follow(optimizer.param_groups, at(epoch, step, len(batches)))
                optimizer.zero_grad()
            torch.manual_seed(step_seed(epoch_seed, step))
            if loop.take is not None:
                loop.take(model, task, optimizers, batch)
                continue
            task.loss(model, batch).backward()
            if loop.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), loop.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
        model.eval()
        everything(derive_seed(0, "evaluate", epoch))
        with torch.no_grad():
            valid = data.valid if loop.valid is None else loop.valid()
            curve.append(float(task.metrics(model, tuple(t.clone() for t in valid))["value"]))
    return Trained(model=model.eval(), curve=curve)


def batches_of(train: Sequence[torch.Tensor], epoch: int, *, size: int) -> Iterator[Any]:
    """Return the batches of an epoch in the order in which thrifty draws them."""
    generator = torch.Generator().manual_seed(derive_seed(0, "data", epoch))
    order = torch.randperm(len(train[0]), generator=generator)
    return (tuple(t[part] for t in train) for part in order.split(size))
