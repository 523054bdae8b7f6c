"""Metrics of a task over the validation set: checked, weighted by samples, summed in float64."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError
from thrifty.pack._state import seed_everything
from thrifty.pack.task._data import Batch, Source, valid_batches
from thrifty.pack.task._task import Task


def _as_it_is(batch: Batch) -> Batch:
    return batch


EvaluationParts = Generator[Batch | None, Batch, dict[str, float]]
"""An evaluation that another one may take turns with.

It yields each batch, is sent what to evaluate instead, an equal batch, and yields None afterwards.
At the end it returns the metrics. Each time that it goes on, the random streams must be where it
left them.
"""


def evaluating(
    task: Task,
    model: torch.nn.Module,
    *,
    source: Source,
    seed: int,
    cast: Callable[[Batch], Batch],
    forward: Callable[[], AbstractContextManager[Any]],
) -> EvaluationParts:
    """Evaluate a task's metrics over the validation set, each batch weighted by what counts in it.

    Args:
        task: The task.
        model: The model.
        source: The data.
        seed: The seed of the random streams.
        cast: Brings a batch into the precision of the model.
        forward: Returns the context of forward passes.
    """
    model.eval()
    sums = MetricSums()
    seed_everything(seed)
    batches = iter(valid_batches(source, batch_size=task.eval_batch_size))
    while True:
        with forward(), torch.no_grad():
            part = next(batches, None)
        if part is None:
            return sums.means()
        batch = yield part[0]
        with forward(), torch.no_grad():
            found = check_metrics(task.metrics(model, cast(batch)), task=type(task).__name__)
            sums.add(found, weight=weight_of(task, batch, num=part[1]))
        yield None


def evaluate(
    task: Task,
    model: torch.nn.Module,
    *,
    source: Source,
    seed: int,
    cast: Callable[[Batch], Batch] = _as_it_is,
) -> dict[str, float]:
    """Return the task's metrics over the validation set, as ``evaluating`` computes them."""
    return evaluated(
        evaluating(task, model, source=source, seed=seed, cast=cast, forward=nullcontext)
    )


def evaluated(parts: EvaluationParts) -> dict[str, float]:
    """Return the metrics of an evaluation that takes turns with no other one."""
    try:
        batch = next(parts)
        while True:
            parts.send(batch)
            batch = next(parts)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


# -- metrics ------------------------------------------------------------------------------


def check_metrics(metrics: Any, *, task: str, method: str = "metrics") -> Mapping[str, Any]:
    """Return metrics by name.

    Args:
        metrics: The value that a method of a task has returned.
        task: The name of the task, for the message.
        method: The name of the method.

    Raises:
        TaskError: They are not a mapping to numbers or tensors of one element.

    >>> check_metrics({"accuracy": "0.91"}, task="Digits")
    Traceback (most recent call last):
    ...
    thrifty.TaskError: Digits.metrics returned a str ('0.91') as
        'accuracy'; each metric is a number or a tensor of one element: the mean of the batch
    """
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"{task}.{method} returned {described(metrics)}; return a dict of metrics by name, "
            "such as {'accuracy': accuracy}"
        )
    for name, value in metrics.items():
        if not _is_number(value):
            raise TaskError(
                f"{task}.{method} returned {described(value)} as {name!r}; each metric is a "
                "number or a tensor of one element: the mean of the batch"
            )
    return metrics


def as_number(value: Any) -> float:
    """Return a metric that has been checked as a number."""
    return float(value.item() if isinstance(value, torch.Tensor | np.ndarray) else value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, Real | np.bool_)


def described(value: Any) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if value is None:
        return "nothing"
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 40 else text[:40] + '...'})"


def has_weights(task: Any) -> bool:
    """Return whether the means of a task's metrics are over what ``loss_weight`` counts."""
    return getattr(task, "_metrics_by_weight", False)


def weight_of(task: Any, batch: Any, *, num: int) -> float:
    """Return how much a validation batch counts in the means of its task's metrics.

    Args:
        task: The task.
        batch: The batch.
        num: Its number of samples, which is the weight unless the task counts something else.
    """
    found = task.loss_weight(batch) if has_weights(task) else None
    return num if found is None else float(found)


class MetricSums:
    """Sums of metrics in double precision, each batch weighted, as by its number of samples.

    A value is a number, a tensor of one element, or a tensor with one element per trial. Equal
    values of the batches give means that are equal to the last bit, in any of these forms.

    >>> sums = MetricSums()
    >>> sums.add({"accuracy": 0.5}, weight=3)
    >>> sums.add({"accuracy": torch.tensor(1.0)}, weight=1)
    >>> sums.add({"accuracy": torch.tensor(float("nan"))}, weight=0)
    >>> sums.means()
    {'accuracy': 0.625}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}
        self._has_left_out = False

    def add(self, metrics: Mapping[str, Any], *, weight: float) -> None:
        """Add the metrics of a batch; a weight of 0 leaves it out."""
        if not weight:  # a mean over nothing is not a number
            self._has_left_out = True
            return
        for name, value in metrics.items():
            # keep a tensor on its device: reading it would wait for the device at each batch
            weighted = _double(value) * weight
            known = self._sums.get(name)
            self._sums[name] = weighted if known is None else known + weighted
            self._weights[name] = self._weights.get(name, 0) + weight

    def means(self) -> dict[str, float]:
        """Return the means of one trial.

        Raises:
            TaskError: Nothing counts in any batch.
        """
        self._check()
        return {name: float(total) / self._weights[name] for name, total in self._sums.items()}

    def rows(self, size: int) -> list[dict[str, float]]:
        """Return the means of the first ``size`` of several trials.

        Raises:
            TaskError: Nothing counts in any batch.
        """
        self._check()
        table = {name: total.tolist() for name, total in self._sums.items()}
        return [
            {name: values[row] / self._weights[name] for name, values in table.items()}
            for row in range(size)
        ]

    def _check(self) -> None:
        if self._has_left_out and not self._sums:
            raise TaskError(
                "nothing counts in the validation data: loss_weight is 0 for each batch; give data "
                "in which some labels count, that is, are not -100"
            )


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return as_number(value)
    value = value.detach()
    # MPS devices have no double precision
    return (value.cpu() if value.device.type == "mps" else value).double()
