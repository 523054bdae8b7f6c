"""What a trial does next: one step and one evaluation, to be compared with those of another trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thrifty.core import derive_seed

from ._backend import EpochPlan
from ._data import Batch
from ._random import seed_everything
from ._trainable_trial import TrainableTrial
from ._trial import TaskTrial
from .verify import Probe, stand_in


Trial = TaskTrial | TrainableTrial


def probe(trial: Trial, plan: EpochPlan, *, trains: bool) -> Probe:
    """Let a trial take one step of an epoch, and evaluate.

    Args:
        trial: It is used up.
        plan: The epoch.
        trains: Whether a ``Trainable``, which has no steps, trains the whole epoch.
    """
    if isinstance(trial, TaskTrial):
        return _one_step(trial, plan)
    return _one_epoch(trial, plan) if trains else _no_epoch(trial)


def _one_step(trial: TaskTrial, plan: EpochPlan) -> Probe:
    """One step of an epoch, then the metrics of one validation batch."""
    seen: list[Any] = []

    def noted() -> Iterator[Batch]:
        for batch in trial.batches(plan):
            seen.append(stand_in(batch))
            yield batch

    trial.start(plan, batches=noted())
    trial.step()
    loss = trial.losses[-1]
    trial.model.eval()
    seed_everything(derive_seed(trial.seed, "evaluate", plan.epoch))
    with torch.no_grad():
        batches = trial.source.valid_batches(batch_size=trial.task.eval_batch_size)
        batch, _ = next(iter(batches))
        seen.append(stand_in(batch))
        metrics = trial.task.metrics(trial.model, batch)
    return Probe(
        loss=loss,
        batch=seen,
        tensors=stand_in(dict(trial.model.state_dict())),
        moments=trial.followed.moments(),
        metrics=dict(metrics),
    )


def _no_epoch(trial: TrainableTrial) -> Probe:
    """The metrics of a trial as it stands, and its state."""
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
    """A whole epoch, and what came of it."""
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
