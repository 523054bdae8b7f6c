"""One step of a block: its options, its program and its loss history."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thrifty.pack.task._task import Task

from ._fusable import UnfusableError
from ._packed import corner


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """Options for fusing one structure.

    ``compile`` and ``cuda_graphs`` keep a block's steps at its full size, so that trials can come
    and go without anything being built again.

    Attributes:
        size: Number of trials per block.
        max_padding: Maximum ratio of the largest to the smallest batch size in a block.
        channels_last: Whether images are stored in channels-last layout.
        compile: Whether training steps go through ``torch.compile``.
        cuda_graphs: Whether training steps are captured as CUDA graphs.
    """

    size: int = 8
    max_padding: float = 1.5
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False

    @property
    def fixed(self) -> bool:
        """Whether steps always have the full size, so that free rows train too, with no use."""
        return self.compile or self.cuda_graphs


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Treat denormal numbers as zero while a pack trains, then restore this thread's mode."""
    # torch can set the mode but cannot report it, so multiply two normal numbers to find out
    flushed = bool(torch.tensor(1e-30) * torch.tensor(1e-10) == 0)
    if not flushed:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if not flushed:
            torch.set_flush_denormal(False)


class LossHistory:
    """A ring buffer of the losses of each step; ``tick`` counts all steps ever added."""

    def __init__(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._steps = torch.zeros(0, capacity, dtype=dtype, device=device)
        self.tick = 0

    def make_room(self, num_steps: int) -> None:
        """Make room for the steps of an epoch that begins now."""
        steps = self._steps
        if num_steps <= len(steps):
            return
        longer = steps.new_zeros(2 * num_steps, steps.shape[1])
        for tick in range(max(0, self.tick - len(steps)), self.tick):
            longer[tick % len(longer)] = steps[tick % len(steps)]
        self._steps = longer

    def note(self, losses: torch.Tensor) -> None:
        """Add the losses of one more step."""
        self._steps[self.tick % len(self._steps), : len(losses)].copy_(losses)
        self.tick += 1

    def move(self, source: int, target: int) -> None:
        """Move a trial's losses from one row to another."""
        self._steps[:, target].copy_(self._steps[:, source])

    def mean(self, row: int, *, since: int) -> float:
        """Return the mean loss of the trial in a row over all steps from tick ``since`` on."""
        ticks = torch.arange(since, self.tick, device=self._steps.device)
        return float(self._steps[ticks % len(self._steps), row].mean())

    def last(self, num: int) -> torch.Tensor:
        """Return a copy of the losses of the first rows in the last step, ``[num]``."""
        return self._steps[(self.tick - 1) % len(self._steps), :num].clone()


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
    loss.backward()  # type: ignore[no-untyped-call]
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
