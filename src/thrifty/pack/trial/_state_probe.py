"""A probe of a trial: its next step and evaluation, for comparison with those of another trial."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from thrifty.core import derive_seed
from thrifty.pack._backend import EpochPlan
from thrifty.pack._random import seed_everything
from thrifty.pack.task._data import Batch
from thrifty.pack.verify import Probe, stand_in

from ._trial import TaskTrial, TrainableTrial


Trial = TaskTrial | TrainableTrial

FURTHER_STEPS = 100
"""How many steps a probe takes at least, if time allows.

In short epochs, state outside of the checkpoint that acts less often than this may be missed.
"""


def probe(trial: Trial, plan: EpochPlan, *, trains: bool) -> Probe:
    """Let a trial take one step of an epoch, and evaluate it.

    Args:
        trial: The trial; it cannot be used afterwards.
        plan: The epoch.
        trains: Whether a ``Trainable``, which has no steps, trains the whole epoch.
    """
    if isinstance(trial, TaskTrial):
        return _one_step(trial, plan)
    return _one_epoch(trial, plan) if trains else _no_epoch(trial)


def probe_further(
    trial: TaskTrial, plan: EpochPlan, *, num_steps: int | None = None, limit_s: float
) -> tuple[Probe, int]:
    """Let a trial continue after a probe: to the end of the epoch, and into later ones.

    Args:
        trial: The trial; it cannot be used afterwards.
        plan: The epoch that it was probed in. Later ones have the same values.
        num_steps: How many steps to take (default: an epoch and one more, but at least
            ``FURTHER_STEPS``, as far as the time allows).
        limit_s: How many seconds that may take. It applies only without ``num_steps``.

    Returns:
        The results of the steps, and how many steps there were.
    """
    began = time.perf_counter()
    enough = max(trial.num_steps(plan.values) + 1, FURTHER_STEPS)
    losses: list[torch.Tensor] = []
    metrics: list[Mapping[str, Any]] = []

    def goes_on() -> bool:
        if num_steps is not None:
            return len(losses) < num_steps
        return len(losses) < enough and time.perf_counter() - began < limit_s

    trial.model.train()
    while goes_on():
        if trial.step():
            losses.append(trial.losses[-1])
        else:
            metrics.append(_metrics(trial, plan)[1])
            plan = replace(plan, epoch=plan.epoch + 1)
            trial.start(plan)
    metrics.append(_metrics(trial, plan)[1])
    found = Probe(
        loss=torch.stack(losses) if losses else torch.zeros(0),
        batch=None,
        tensors=stand_in(dict(trial.model.state_dict())),
        moments=trial.followed.moments(),
        metrics={
            f"{name} of evaluation {number}": value
            for number, each in enumerate(metrics, start=1)
            for name, value in each.items()
        },
    )
    return found, len(losses)


def _one_step(trial: TaskTrial, plan: EpochPlan) -> Probe:
    """Take one step of an epoch, then compute the metrics of one validation batch."""
    seen: list[Any] = []

    def noted() -> Iterator[Batch]:
        for number, batch in enumerate(trial.batches(plan)):
            if not number:
                seen.append(stand_in(batch))
            yield batch

    trial.start(plan, batches=noted)
    trial.step()
    loss = trial.losses[-1]
    batch, metrics = _metrics(trial, plan)
    seen.append(batch)
    return Probe(
        loss=loss,
        batch=seen,
        tensors=stand_in(dict(trial.model.state_dict())),
        moments=trial.followed.moments(),
        metrics=metrics,
    )


def _metrics(trial: TaskTrial, plan: EpochPlan) -> tuple[Any, dict[str, Any]]:
    """Return a stand-in for one validation batch, and its metrics."""
    trial.model.eval()
    seed_everything(derive_seed(trial.seed, "evaluate", plan.epoch))
    with torch.no_grad():
        batches = trial.source.valid_batches(batch_size=trial.task.eval_batch_size)
        batch, _ = next(iter(batches))
        seen = stand_in(batch)
        return seen, dict(trial.task.metrics(trial.model, batch))


def _no_epoch(trial: TrainableTrial) -> Probe:
    """Return the metrics of a trial as it stands, and its state."""
    seed_everything(0)
    metrics = trial.task.evaluate()
    state = trial.state()
    return Probe(
        loss=torch.zeros(()),
        batch=None,
        tensors=state.tensors,
        moments={"": {"tree": state.tree}},
        metrics=dict(metrics),
    )


def _one_epoch(trial: TrainableTrial, plan: EpochPlan) -> Probe:
    """Train a whole epoch, and return its metrics and the state after it."""
    metrics = trial.epoch(plan)
    state = trial.state()
    moments: Mapping[str, Mapping[str, Any]] = {"": {"tree": state.tree}}
    return Probe(
        loss=torch.zeros(()),
        batch=None,
        tensors=state.tensors,
        moments=moments,
        metrics=metrics,
    )
