"""Checks of what a task's methods have returned, before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError


def check_loss(loss: Any, *, task: str) -> torch.Tensor:
    """Return a training loss.

    Args:
        loss: The value that ``loss`` has returned.
        task: The name of the task, for the message.

    Raises:
        TaskError: It is not a tensor of one element.

    >>> check_loss(0.5, task="Digits")
    Traceback (most recent call last):
    ...
    thrifty.core._errors.TaskError: Digits.loss returned a float (0.5); return the
        mean of the batch as a tensor of one element, without .item()
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise TaskError(
        f"{task}.loss returned {_described(loss)}; return the mean of the batch as a tensor of "
        "one element, without .item()"
    )


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
    thrifty.core._errors.TaskError: Digits.metrics returned a str ('0.91') as
        'accuracy'; each metric is a number or a tensor of one element: the mean of the batch
    """
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"{task}.{method} returned {_described(metrics)}; return a dict of metrics by name, "
            "such as {'accuracy': accuracy}"
        )
    for name, value in metrics.items():
        if not _is_number(value):
            raise TaskError(
                f"{task}.{method} returned {_described(value)} as {name!r}; each metric is a "
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


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if value is None:
        return "nothing"
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 40 else text[:40] + '...'})"
