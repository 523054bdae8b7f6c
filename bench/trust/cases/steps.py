"""Tasks that say how a step is taken: precision, parts of a batch, averages, steps of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import thrifty as th
from bench.trust.case import seeded
from bench.trust.moving import PLAIN, At, Loop, Regression, follow_lr, moving, sgd


def normed() -> nn.Module:
    """Return a network that draws numbers and keeps running statistics."""
    return seeded(
        3,
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
        ),
    )


class Normed(Regression):
    def model(self, hp: th.HyperParameters) -> nn.Module:
        return normed()


Take = Callable[[nn.Module, th.Task, list[torch.optim.Optimizer], Any], None]


def stepping(take: Take, optimizers: Callable[[nn.Module, At], Any] = sgd) -> Loop:
    return Loop(optimizer=optimizers, follow=follow_lr, take=take)


# -- what a step is made of ----------------------------------------------------------------


def _in_bf16(model: nn.Module, task: Any, optimizers: Any, batch: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = task.loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizers[0].step()


@moving("C", loop=stepping(_in_bf16))
def mixed_precision_with_clipping_and_an_average() -> type[th.Task]:
    class Mine(Normed):
        precision = "bf16-mixed"
        optimizer = th.SGD(lr="lr", momentum=0.9, clip_norm=0.5)
        average = th.EMA(0.9)

        def metrics(self, model: nn.Module, batch: Any) -> Any:
            with torch.autocast("cpu", enabled=False):  # as the plain loop evaluates
                return {"value": self.loss(model, batch)}

    return Mine


def _in_parts(model: nn.Module, task: Any, optimizers: Any, batch: Any) -> None:
    x, y = batch
    for part in zip(x.split(4), y.split(4), strict=True):
        (task.loss(model, part) / 4).backward()
    optimizers[0].step()


@moving("C", loop=stepping(_in_parts))
def parts_of_a_batch_with_running_statistics() -> type[th.Task]:
    class Mine(Normed):
        accumulate = 4

    return Mine


@moving("C", loop=PLAIN)
def averages_beside_training() -> type[th.Task]:
    class Mine(Normed):
        average = (th.EMA(0.9), th.SWA(start=2))

    return Mine


def _limited(model: nn.Module, task: Any, optimizers: Any, batch: Any) -> None:
    task.loss(model, batch).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizers[0].step()


@moving("E", loop=stepping(_limited))
def gradients_limited_by_value_and_norm() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.SGD(lr="lr", momentum=0.9, clip_value=0.05, clip_norm=0.1)

    return Mine


# -- several optimizers, and steps of their own --------------------------------------------


def _two(model: Any, at: At) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model[0].parameters(), lr=at["lr"], momentum=0.9),
        torch.optim.AdamW(model[1:].parameters(), lr=at["lr"]),
    ]


def _both(model: Any, task: Any, optimizers: Any, batch: Any) -> None:
    task.loss(model, batch).backward()
    nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()


TWO = {
    "first": th.SGD(lr="lr", momentum=0.9, clip_norm=0.1, params="0.*"),
    "rest": th.AdamW(lr="lr"),
}


@moving("E", loop=stepping(_both, _two))
def two_optimizers_of_which_one_clips() -> type[th.Task]:
    class Mine(Normed):
        optimizer = th.Optimizers(**TWO)

    return Mine


def _in_turn(model: nn.Module, task: Any, optimizers: Any, batch: Any) -> None:
    x, y = batch
    task.loss(model, (x + 0.1 * torch.randn_like(x), y)).backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    task.loss(model, batch).square().backward()
    optimizers[1].step()


@moving("E", loop=stepping(_in_turn, _two))
def two_optimizers_in_turn_on_gradients_of_both() -> type[th.Task]:
    class Mine(Normed):
        optimizer = th.Optimizers(**TWO)

        def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
            _in_turn(model, self, list(self.optimizers.values()), batch)
            return torch.zeros(())

    return Mine


@moving("D", refused="num_steps")
def a_step_that_counts_on_the_task() -> type[th.Task]:
    class Mine(Regression):
        num_steps = 0

        def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.num_steps += 1
            loss = self.loss(model, batch) / self.num_steps
            loss.backward()
            self.optimizers["optimizer"].step()
            return loss.detach()

    return Mine


@moving("D", refused="outside of its checkpoint")
def a_teacher_that_the_task_averages_itself() -> type[th.Task]:
    class Mine(Regression):
        teacher: Any = None

        def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if self.teacher is None:
                self.teacher = copy.deepcopy(model)
            with torch.no_grad():
                for old, new in zip(self.teacher.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
                wanted = self.teacher(batch[0])
            loss = self.loss(model, batch) + (model(batch[0]) - wanted).square().mean()
            loss.backward()
            self.optimizers["optimizer"].step()
            return loss.detach()

    return Mine
