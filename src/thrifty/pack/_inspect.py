"""A dry run that finds what a task reads and reports, before any training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thrifty.core import derive_seed

from ._followed_optimizer import FollowedOptimizer
from ._hyperparameters import HyperParameters
from ._outputs import check_metrics
from ._own_task import own_task
from ._purity import changes_nothing
from ._random import borrowed_streams, seed_everything
from ._readings import Readings
from ._sources import sources_of
from ._task import Task
from .verify import as_it_was


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """The findings of a dry run.

    Attributes:
        metrics: The metrics that the task reports.
        structural: The hyper-parameters that it reads once, to make data, model or optimizer.
        followed: The hyper-parameters that the optimizer, the batch size or ``adapt`` follows while
            they change.
        pure: Whether ``metrics`` changes neither the model nor the task nor a random stream.
    """

    metrics: frozenset[str]
    structural: frozenset[str]
    followed: frozenset[str]
    pure: bool


def inspect_task(
    task: Task,
    values: Mapping[str, Any],
    *,
    seed: int,
    device: str = "cpu",
    moving: Iterable[str] = (),
) -> TaskReport:
    """Make data, model and optimizer once, call ``adapt``, and evaluate the first validation batch.

    Errors of the task's code propagate.

    Args:
        task: The task; a copy of it is run.
        values: Hyper-parameters by name.
        seed: The seed of the random streams.
        device: Where the model is made.
        moving: Hyper-parameters that will change during training.

    Raises:
        TaskError: One of ``moving`` is read only once and not followed, or the optimizer does not
            fit the model.
    """
    where = torch.device(device)
    readings = Readings(type(task).__name__, values, moving=moving)
    own = own_task(task)
    with borrowed_streams():
        seed_everything(derive_seed(seed, "data"))
        source = sources_of(task, where).get(task, readings.once("data"))
        seed_everything(derive_seed(seed, "model"))
        model = own.model(readings.once("model")).to(where).eval()
        followed = FollowedOptimizer(own.optimizer, model, values)
        readings.note_once("optimizer", followed.read_when_built)
        adapted = HyperParameters(values)
        own.adapt(model, adapted)
        batch, _ = next(iter(source.valid_batches(batch_size=task.eval_batch_size)))
        found: list[Any] = []
        with as_it_was({"task": own, "model": model}):
            with torch.no_grad():
                pure = changes_nothing(
                    lambda: found.append(own.metrics(model, batch)), task=own, model=model
                )
            metrics = check_metrics(found[0], task=type(task).__name__)
            readings.followed |= {*followed.names, *adapted.names_read}
            if isinstance(task.batch_size, str):
                readings.followed.add(task.batch_size)
            # check before task and model are restored, which may undo the record of what was read
            readings.check()
            read_once = frozenset(readings.read_once)
        followed.check(readings.moving)
    return TaskReport(
        metrics=frozenset(metrics),
        structural=read_once,
        followed=frozenset(readings.followed),
        pure=pure,
    )
