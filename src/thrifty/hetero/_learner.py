"""One worker's arithmetic: its part of the gradient, and the step that all workers take alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core import Clock, HeteroError
from thrifty.pack import borrowed_streams, seed_step, step_counters
from thrifty.perf import StepCurve

from ._batch_norm import SharedSums, Sum, whole_batch_norm
from ._flat import Begin, FlatGradients
from ._measure import measure_curve
from ._order import Share
from ._samples import PublicAndPrivate
from ._state import from_bytes, to_bytes


Loss = Callable[[nn.Module, Any], Tensor]
"""From a model and a batch to a scalar: the mean over the batch."""


class Learner:
    """A model, its optimiser and what they are trained on.

    Args:
        model: plain.
        optimizer: of its parameters.
        samples: that this worker can read.
        loss: mean over a batch.
        sum_: over all workers, for batch normalisation; None: each worker for itself.
        bucket_cap_mb: MiB of gradients that are summed while the backward pass goes on; None: all are summed after it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        samples: PublicAndPrivate,
        *,
        loss: Loss,
        sum_: Sum | None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.samples = samples
        self.device = device_of(model)
        self._loss = loss
        self._shared = SharedSums(sum_)
        # Whoever joins in sums of others has to be there at every step.
        self.least = int(sum_ is not None and whole_batch_norm(model, self._shared) > 0)
        # Normalisation sums during the backward pass, too: both would have to come in one order, without samples as well.
        self._cap_mb = None if self.least else bucket_cap_mb
        self.gradients = FlatGradients(model.parameters(), num_control=0)
        self._counters = list(step_counters(model).values())
        self._buffers = list(model.buffers())
        self._before: list[Tensor] = []

    def make_room(self, *, num_control: int) -> None:
        """So many numbers travel beside the gradients from now on."""
        self.gradients.close()
        self.gradients = FlatGradients(
            self.model.parameters(), num_control=num_control, bucket_cap_mb=self._cap_mb
        )

    def backward(self, share: Share, *, weight: float, seed: int, begin: Begin) -> float:
        """Leaves this worker's part of the gradient in the buffer; returns its part of the loss.

        Args:
            share: its samples.
            weight: its share of the global batch.
            seed: of what the model draws.
            begin: a sum over all workers.
        """
        self.gradients.zero(begin)
        self._before = [buffer.clone() for buffer in self._buffers]
        if not len(share):
            self._shared.shadow()
            return 0.0
        with borrowed_streams():
            seed_step(seed, self.device)
            batch = self.samples.batch(share.public, share.private)
            loss = self._train(batch, weight, together=True)
        self.gradients.collect()
        return loss

    def undo(self) -> None:
        """Forgets what a pass has left in buffers (running statistics): its step is trained again."""
        for buffer, before in zip(self._buffers, self._before, strict=False):
            buffer.copy_(before)

    def rehearse(self, num: int) -> None:
        """A forward and a backward pass with ``num`` samples that leave nothing behind but time and gradients."""
        kept = [buffer.clone() for buffer in self._buffers]
        public = range(min(num, self.samples.num_public))
        private = range(min(num - len(public), self.samples.num_private))
        self.gradients.zero()
        try:
            with borrowed_streams():
                self._train(self.samples.batch(public, private), 1.0, together=False)
        finally:
            for buffer, before in zip(self._buffers, kept, strict=True):
                buffer.copy_(before)
        self.synchronise()

    def update(self, *, lr_factor: float, clip_norm: float | None) -> None:
        """The optimiser's step with the gradient of all workers."""
        if clip_norm is not None:
            self.gradients.clip(clip_norm)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * lr_factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for counter in self._counters:
            counter += 1
        self._before = []
        self.synchronise()

    def measure(self, *, most: int, clock: Clock) -> StepCurve:
        """How long whole steps take; model and optimiser are afterwards as before."""
        before = to_bytes(self.state())

        def step(num: int) -> None:
            self.rehearse(num)
            self.gradients.collect()
            self.optimizer.step()
            self.synchronise()

        curve = measure_curve(step, most=most, clock=clock, least=self.least)
        self.load_state(from_bytes(before))
        self.gradients.zero()
        return curve

    def state(self) -> dict[str, Any]:
        """Of model and optimiser."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes back to what ``state`` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def synchronise(self) -> None:
        """Waits until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _train(self, batch: Any, weight: float, *, together: bool) -> float:
        with self._shared.step(together=together):
            loss = self._loss(self.model, to_device(batch, self.device)) * weight
            loss.backward()
        return float(loss.detach())


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are.

    Raises:
        HeteroError: it has none.
    """
    for parameter in model.parameters():
        return parameter.device
    raise HeteroError("the model has no parameters: there is nothing to train")


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch on a device; what is no tensor stays."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
