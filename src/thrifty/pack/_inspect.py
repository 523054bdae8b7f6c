"""A dry run: what a task reads and reports, before any training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thrifty.core import derive_seed

from ._hyperparameters import HyperParameters
from ._purity import changes_nothing
from ._random import borrowed_streams, seed_everything
from ._sources import sources_of
from ._task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """What a dry run of a task has shown.

    Attributes:
        metrics: names of the metrics that it reports.
        structural: hyper-parameters that shape its model or data.
        adapts: whether it brings a model up to date with values that change.
        pure: whether ``metrics`` changes neither the model nor the task nor a random stream.
    """

    metrics: frozenset[str]
    structural: frozenset[str]
    adapts: bool
    pure: bool


def inspect_task(
    task: Task, values: Mapping[str, Any], *, seed: int, device: str = "cpu"
) -> TaskReport:
    """Builds the model once and evaluates it on the first validation batch. Errors of the task's code come through."""
    where = torch.device(device)
    hp = HyperParameters(values)
    with borrowed_streams():
        seed_everything(derive_seed(seed, "data"))
        source = sources_of(task, where).get(task, hp)
        seed_everything(derive_seed(seed, "model"))
        model = task.model(hp).to(where).eval()
        batch, _ = next(iter(source.valid_batches(batch_size=task.eval_batch_size)))
        metrics: dict[str, Any] = {}
        with torch.no_grad():
            pure = changes_nothing(
                lambda: metrics.update(task.metrics(model, batch)), task=task, model=model
            )
    return TaskReport(
        metrics=frozenset(metrics),
        structural=frozenset(hp.names_read),
        adapts=type(task).adapt is not Task.adapt,
        pure=pure,
    )
