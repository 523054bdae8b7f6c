"""One worker's computation: the shared loss, its part of the gradient, the update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.core import Clock, HeteroError
from thrifty.hetero._samples import PublicAndPrivate, ReadSamples, Share
from thrifty.hetero.workers._measure import device_of, measure_curve, to_device
from thrifty.hetero.workers._membership import from_bytes, to_bytes
from thrifty.pack import borrowed_streams, step_counters
from thrifty.pack._state import seed_everything
from thrifty.perf import StepCurve

from ._flat import Begin, FlatGradients
from ._model_state import (
    KeptBuffers,
    SharedSums,
    Sum,
    WholeBatchNorm,
    unshared_batch_norm,
    untouched,
    whole_batch_norm,
)


Loss = Callable[[nn.Module, Any], Tensor]
"""Computes a scalar from a model and a batch."""

Weight = Callable[[Any], "float | Tensor"]
"""Returns what the loss of a batch divides by, such as the number of its tokens."""

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, and how the losses of parts of a batch combine to it.

    Args:
        loss: Function from a model and a batch to a scalar.
        reduction: Whether the loss of a batch is the mean of its parts' losses, or their sum.
        weight: Weight of a part in that mean (default: its number of samples).

    Raises:
        HeteroError: ``reduction`` is unknown, or a sum has weights.
    """

    loss: Loss
    reduction: Reduction = "mean"
    weight: Weight | None = None

    def __post_init__(self) -> None:
        if self.reduction not in {"mean", "sum"}:
            raise HeteroError(f"`reduction` must be 'mean' or 'sum', got {self.reduction!r}")
        if self.weight is not None and self.reduction == "sum":
            raise HeteroError(
                "`weight` belongs to a mean, and `reduction` is 'sum'; pass one of the two"
            )

    @property
    def has_weights(self) -> bool:
        """Whether the weight of a part differs from its number of samples."""
        return self.weight is not None

    def weigh(self, batch: Any, num: int) -> float:
        """Return the weight of a part of ``num`` samples.

        Raises:
            HeteroError: The user's function returned an invalid weight.
        """
        if self.weight is None:
            return float(num)
        weight = float(self.weight(batch))
        if not (math.isfinite(weight) and weight >= 0):
            raise HeteroError(
                f"`weight` returned {weight} for a batch of {num} samples; it must return a finite "
                "number >= 0, such as the number of tokens that count"
            )
        return weight


_DIGEST_BITS = 24
"""Bits of a digest that travels with the gradients: exact in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one worker contributes to a step, besides its gradient.

    Attributes:
        loss: Its part of the loss.
        weight: Weight of its share in the mean.
        buffers: Whether its forward pass changed buffers.
    """

    loss: float
    weight: float
    buffers: bool


class Learner:
    """A model, its optimizer and its training data on one worker.

    Args:
        model: A plain model.
        optimizer: Optimizer of the model's parameters.
        samples: Samples that this worker can read.
        objective: The objective to minimise.
        sum_: Sum over all workers for batch normalisation; None: each worker uses its own
            statistics.
        bucket_cap_mb: MiB of a bucket of gradients, summed while the backward pass continues; None:
            all gradients are summed after it.
        micro_batch: Most samples of one forward and backward pass; None: the whole share.

    Raises:
        HeteroError: The optimizer trains tensors that are not part of the model, or the options
            combine micro-batches with batch normalisation over the global batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        samples: PublicAndPrivate,
        *,
        objective: Objective,
        sum_: Sum | None,
        bucket_cap_mb: float | None = None,
        micro_batch: int | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.samples = samples
        self.device = device_of(model)
        self.objective = objective
        self._sums = sum_ is not None
        self._shared = SharedSums(sum_)
        # A worker that takes part in the other workers' sums must be present at every step.
        self.min_samples = int(sum_ is not None and whole_batch_norm(model, self._shared) > 0)
        if self.min_samples and micro_batch is not None:
            raise HeteroError(
                "batch normalisation over the global batch needs all samples in one pass, and "
                f"micro_batch={micro_batch}; use batch_norm='local', whose statistics are those of "
                "a micro-batch, or leave micro_batch out"
            )
        self._micro_batch = micro_batch
        # Batch normalisation also sums during the backward pass. Both kinds of sums would need one
        # common order, even on workers without samples.
        self._cap_mb = None if self.min_samples else bucket_cap_mb
        self._before: KeptBuffers | None = None
        self._check_optimizer()
        self.gradients = FlatGradients(model.parameters(), num_control=0)
        self._standing = _standing(model)

    def make_room(self, *, num_control: int) -> None:
        """Reserve ``num_control`` control numbers, and follow the model's current parameters."""
        self.gradients.close()
        self.gradients = FlatGradients(
            self.model.parameters(), num_control=num_control, bucket_cap_mb=self._cap_mb
        )
        self._standing = _standing(self.model)

    def news(self) -> int:
        """Return 0, or a digest of the trained parameters if they have changed.

        Parameters may be frozen, unfrozen, replaced, added, or change their type or shape.
        """
        now = _standing(self.model)
        same = len(now) == len(self._standing) and all(
            a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, self._standing, strict=True)
        )
        # 0 (no news) and 1 (`REFUSED`) have other meanings in a note.
        return 0 if same else 2 + self.trained() % (2**_DIGEST_BITS - 2)

    def refusal(self) -> str:
        """Return why the model cannot be trained as it is now; empty if it can."""
        return unshared_batch_norm(self.model, self._shared) if self._sums else ""

    def structure(self) -> int:
        """Return a digest of the names, shapes and types of the tensors in the model's state.

        Buffers outside the state may be caches, which differ from worker to worker.
        """
        named = self.model.state_dict().items()
        return _digest(
            f"{name} {tuple(each.shape)} {each.dtype}"
            for name, each in named
            if isinstance(each, Tensor)
        )

    def trained(self) -> int:
        """Return a digest of the parameters that are trained."""
        return _digest(
            f"{name} {tuple(each.shape)} {each.dtype}"
            for name, each in self.model.named_parameters()
            if each.requires_grad
        )

    def backward(
        self,
        share: Share,
        *,
        batch_size: int,
        seed: int,
        begin: Begin,
        inspect: Callable[[ReadSamples], None] | None = None,
    ) -> Pass:
        """Compute this worker's part of the gradient and leave it in the buffer.

        Args:
            share: This worker's samples.
            batch_size: Samples of all workers.
            seed: Seed of the draws of data set, model and loss.
            begin: Begins a sum over all workers.
            inspect: Inspects the samples before they are trained on.
        """
        generators = self.samples.generators
        with borrowed_streams(), generators.seeded(seed):
            seed_everything(seed)
            first, *others = share.parts(self._micro_batch)
            taken = None
            if len(share):
                taken = self.samples.take(first.public, first.private, watched=inspect is not None)
                if inspect is not None:
                    with generators.kept():
                        inspect(taken)
            # Gradients left by other code would count as part of this step.
            self.optimizer.zero_grad(set_to_none=True)
            self.gradients.zero(None if others else begin)
            before = self._before = KeptBuffers(self.model)
            if taken is None:
                self._shared.shadow()
                return Pass(loss=0.0, weight=0.0, buffers=False)
            loss, weight = self._part(taken, batch_size=batch_size)
            for part in others:
                if part is others[-1]:
                    self.gradients.begin_last(begin)
                taken = self.samples.take(part.public, part.private)
                more_loss, more_weight = self._part(taken, batch_size=batch_size)
                loss, weight = loss + more_loss, weight + more_weight
        self.gradients.collect()
        changed = before.changed(besides=(WholeBatchNorm,))
        return Pass(loss=loss, weight=weight, buffers=changed)

    def _part(self, taken: ReadSamples, *, batch_size: int) -> tuple[float, float]:
        """Add the gradient of some samples; return their part of the loss, and their weight."""
        batch = taken.batch()
        weight = self.objective.weigh(batch, len(taken))
        factor = 1.0 if self.objective.reduction == "sum" else weight / batch_size
        return self._train(batch, factor, together=True), weight

    def undo(self) -> None:
        """Restore the buffers that a pass has changed, because its step is trained again."""
        if self._before is not None:
            self._before.restore()

    def rehearse(self, num: int) -> None:
        """Run a forward and a backward pass that change nothing except the gradients."""
        public = range(min(num, self.samples.num_public))
        private = range(min(num - len(public), self.samples.num_private))
        share = Share(public=tuple(public), private=tuple(private))
        self.gradients.zero()
        # Entries appended to lists do not matter. Counters and running values may.
        kept = self.samples.generators.kept()
        with borrowed_streams(), kept, untouched(self.model, self.objective.loss, lists=False):
            for part in share.parts(self._micro_batch):
                batch = self.samples.batch(part.public, part.private)
                self._train(batch, 1.0, together=False)
        self.synchronise()

    def update(self, *, lr_factor: float, clip_norm: float | None) -> None:
        """Take the optimizer's step with the gradient of all workers."""
        if clip_norm is not None:
            self.gradients.clip(clip_norm)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * lr_factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for counter in step_counters(self.model).values():
            counter += 1
        self._before = None
        self.synchronise()

    def measure(self, *, max_samples: int, clock: Clock) -> StepCurve:
        """Time whole steps; model and optimizer are afterwards as before."""
        before = to_bytes(self.state())

        def step(num: int) -> None:
            self.rehearse(num)
            self.gradients.collect()
            self.optimizer.step()
            self.synchronise()

        curve = measure_curve(
            step, max_samples=max_samples, clock=clock, min_samples=self.min_samples
        )
        self.load_state(from_bytes(before))
        self.gradients.zero()
        return curve

    def state(self) -> dict[str, Any]:
        """Return the state of model and optimizer."""
        named = self.model.named_parameters()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "trained": [name for name, each in named if each.requires_grad],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if "trained" in state:
            trained = set(state["trained"])
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in trained)

    def buffers(self) -> dict[str, Any]:
        """Return the buffers that do not stay up to date on workers without samples."""
        return {
            path: {name: each for name, each in module._buffers.items() if each is not None}
            for path, module in self.model.named_modules()
            if not isinstance(module, WholeBatchNorm)
        }

    @torch.no_grad()
    def load_buffers(self, buffers: Mapping[str, Any]) -> None:
        """Copy in the buffers that ``buffers`` returned."""
        for path, values in buffers.items():
            own = self.model.get_submodule(path)._buffers
            for name, value in values.items():
                here = own.get(name)
                if here is not None and here.shape == value.shape:
                    here.copy_(value)
                else:
                    # The forward pass creates or enlarges this buffer.
                    own[name] = value.to(self.device)

    def settings(self) -> list[dict[str, Any]]:
        """Return the plain values of the optimizer's parameter groups, such as learning rates."""
        return [
            {
                name: each.item() if isinstance(each, Tensor) else each
                for name, each in group.items()
                if _is_plain(each)
            }
            for group in self.optimizer.param_groups
        ]

    def load_settings(self, settings: list[dict[str, Any]]) -> None:
        """Set the values that ``settings`` returned."""
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            for name, value in values.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value

    def synchronise(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check_optimizer(self) -> None:
        own = set(map(id, self.model.parameters()))
        others = [p for g in self.optimizer.param_groups for p in g["params"] if id(p) not in own]
        if others:
            raise HeteroError(
                f"the optimizer trains {len(others)} tensors that are no parameters of the model, "
                f"the first one of shape {tuple(others[0].shape)}: their gradients would not be "
                "summed over the workers; make them part of the model"
            )

    def _train(self, batch: Any, factor: float, *, together: bool) -> float:
        with self._shared.step(together=together):
            loss = self.objective.loss(self.model, to_device(batch, self.device))
            if not factor and not loss.detach().isfinite():
                # All samples have weight 0, so there is no gradient to add.
                if self.min_samples:
                    raise HeteroError(
                        "all samples of a worker's share have weight 0, and batch normalisation "
                        "over the global batch needs their gradients; use a larger global_batch or "
                        "batch_norm='local'"
                    )
                return 0.0
            loss = loss * factor
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


def _standing(model: nn.Module) -> list[tuple[nn.Parameter, bool, torch.dtype, torch.Size]]:
    """Return the parameters with their trained state, type and shape.

    The list refers to the parameters themselves, so that a new one cannot reuse an old one's id.
    """
    return [(each, each.requires_grad, each.dtype, each.shape) for each in model.parameters()]


def _is_plain(value: Any) -> bool:
    """Return whether a setting is a number, or numbers, that can be compared and sent."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(isinstance(each, float | int) for each in value)
    return value is None or isinstance(value, bool | float | int | str)


def settings_digest(settings: Any) -> int:
    """Return a positive digest of an optimizer's settings, exact in single precision."""
    return 1 + _digest([repr(settings)]) % ((1 << _DIGEST_BITS) - 1)


def _digest(lines: Any) -> int:
    text = "\n".join(lines).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())
