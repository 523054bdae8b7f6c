"""One training step, of one trial alone and packed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thrifty.pack._task import Task

from ._layout import corner
from ._registry import UnfusableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one trial's step: loss, gradients by name, and buffers after the step."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]


def check_same(packed: Step, alone: Step, *, tolerance: float) -> None:
    """Check that a packed step equals the same step alone.

    Only the gradients and buffers in ``packed`` are compared. For a narrower model, only its own
    corner of each gradient counts.

    Raises:
        UnfusableError: The steps differ.
    """
    if not close(packed.loss, alone.loss, tolerance):
        raise UnfusableError("its packed loss differs from that of one model alone")
    for name, gradient in packed.gradients.items():
        wanted = alone.gradients[name]
        if (
            gradient is None
            or wanted is None
            or not close(corner(gradient, wanted.shape), wanted, tolerance)
        ):
            raise UnfusableError(
                f"the packed gradient of {name} differs from that of one model alone"
            )
    for name, buffer in packed.buffers.items():
        if not close(buffer, alone.buffers[name], tolerance):
            raise UnfusableError(f"packed, buffer {name} differs from that of one model alone")


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Return whether two tensors agree, relative to the largest absolute value in ``wanted``."""
    if found.shape != wanted.shape and found.numel() != wanted.numel():
        return False
    wanted = wanted.reshape(found.shape)
    if not found.dtype.is_floating_point:
        return bool(torch.equal(found, wanted))
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return bool(
        torch.allclose(found, wanted, rtol=0, atol=tolerance * max(scale, 1e-3), equal_nan=True)
    )


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
