"""One model under plain autograd: the reference that packed results are compared with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from thrifty.pack._task import Task

from ._registry import UnfusableError
from ._step import Step


def train_alone(task: Task, model: torch.nn.Module, batch: Any, *, seed: int) -> Step:
    """Run one step of a model, up to its gradients, and return the result.

    Raises:
        UnfusableError: The step draws from a random stream that is not torch's.
    """
    before = _other_streams()
    device = next(model.parameters()).device
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    model.train()
    loss = task.loss(model, batch)
    loss.backward()
    if before != _other_streams():
        raise UnfusableError("it draws from Python's or NumPy's random stream")
    return Step(
        loss=loss.detach(),
        gradients={
            name: p.grad if p.requires_grad else None for name, p in model.named_parameters()
        },
        buffers=dict(model.named_buffers()),
    )


def evaluate_alone(task: Task, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
    """Return the metrics of a model on one batch."""
    model.eval()
    with torch.no_grad():
        return task.metrics(model, batch)


def _other_streams() -> tuple[Any, bytes]:
    return (
        random.getstate(),
        np.random.get_state()[1].tobytes(),  # type: ignore[index]  # noqa: NPY002
    )
