"""One optimizer step of one trial: precision, parts of a batch, clipping, averages, own steps."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from thrifty.core import TaskError
from thrifty.pack.task._data import Batch
from thrifty.pack.task._followed_optimizer import FollowedOptimizers
from thrifty.pack.task._metrics import check_loss
from thrifty.pack.task._step_options import EMA, Average, StepOptions, cast_batch, split_batch
from thrifty.pack.task._task import Task, lent_optimizers


_HALF = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class Update:
    """What a task's step options add to a model and its steps.

    Args:
        task: The trial's own task.
        options: Its step options.
        device: Where the model is.

    Attributes:
        options: As given.

    Raises:
        TaskError: The device does not support the precision, or no compiler is installed.
    """

    def __init__(self, task: Task, options: StepOptions, device: torch.device) -> None:
        self.options = options
        self._task = task
        self._name = type(task).__name__
        self._device = device
        self._half = _HALF.get(options.precision)
        self._scaler: Any = None
        self._averages: dict[str, tuple[Average, AveragedModel]] = {}
        self._has_stepped = False
        if options.precision != "fp32":
            self._check_precision()
        if options.precision == "fp16-mixed":
            self._scaler = torch.amp.GradScaler(device.type)
        if options.compile and device.type == "cpu" and _no_compiler():
            raise TaskError(
                f"{self._name}.compile is True, but no C++ compiler was found, which torch.compile "
                "needs on the CPU; install one (such as g++), or leave compile out"
            )

    def _check_precision(self) -> None:
        """Take a tiny step in the precision."""
        dtype = torch.bfloat16 if self._half is None else self._half
        try:
            if dtype is torch.bfloat16 and self._device.type == "cuda":
                is_supported = torch.cuda.is_bf16_supported(including_emulation=False)
                if not is_supported:
                    raise RuntimeError("the GPU has no bfloat16 arithmetic")
            weight = torch.ones(2, 2, device=self._device, requires_grad=True)
            with torch.autocast(self._device.type, dtype=dtype):
                product = weight @ weight
            if product.dtype != dtype:
                raise RuntimeError(f"torch.autocast computes in {product.dtype}")
            product.sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            raise TaskError(
                f"{self._name}.precision is {self.options.precision!r}, which torch refuses on "
                f"{self._device.type} here ({error}); use 'fp32', or another device"
            ) from error

    # -- the model -------------------------------------------------------------------------

    def prepare(self, model: torch.nn.Module) -> None:
        """Convert a new model to the precision, compile it and begin its averages."""
        if self.options.precision == "bf16":
            model.to(torch.bfloat16)
        for average in self.options.averages:
            function = None
            if isinstance(average, EMA):
                function = get_ema_multi_avg_fn(average.decay)  # type: ignore[no-untyped-call]
            try:
                averaged = AveragedModel(model, multi_avg_fn=function)
            except Exception as error:  # copying a user's model may raise anything
                raise TaskError(
                    f"{self._name}.average needs a copy of the model, which cannot be made "
                    f"({type(error).__name__}: {error}); leave average out, or let the model be "
                    "copied by copy.deepcopy"
                ) from error
            self._averages[average.prefix] = (average, averaged)
        if self.options.compile:
            model.compile()

    def averaged(self) -> Mapping[str, torch.nn.Module | None]:
        """Return the averaged models by the prefix of their metrics; None while nothing counts."""
        return {
            prefix: model.module if int(model.n_averaged) else None
            for prefix, (_, model) in self._averages.items()
        }

    def end_epoch(self, model: torch.nn.Module, epochs: int) -> None:
        """Add the weights after this number of epochs to the averages that include them."""
        for average, averaged in self._averages.values():
            if not isinstance(average, EMA) and average.takes(epochs):
                averaged.update_parameters(model)

    # -- steps -----------------------------------------------------------------------------

    def cast(self, batch: Batch) -> Batch:
        """Return a batch in the precision of the model."""
        return cast_batch(batch, torch.bfloat16) if self.options.precision == "bf16" else batch

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes."""
        if self._half is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._half)

    def step(
        self,
        model: torch.nn.Module,
        batch: Batch,
        *,
        optimizers: FollowedOptimizers,
        part_size: int,
    ) -> torch.Tensor:
        """Take one optimizer step, and return its loss, detached.

        Args:
            model: The model.
            batch: The whole batch.
            optimizers: The optimizers.
            part_size: The number of rows of each part of the batch.
        """
        batch = self.cast(batch)
        optimizers.zero_grad()
        if self.options.owns_step:
            loss = self._own_step(model, batch, optimizers)
        else:
            loss = self._gradients(model, batch, part_size=part_size)
            self._apply(optimizers)
        for average, averaged in self._averages.values():
            if isinstance(average, EMA):
                averaged.update_parameters(model)
        return loss

    def _gradients(self, model: torch.nn.Module, batch: Batch, *, part_size: int) -> torch.Tensor:
        """Compute the gradients of the mean loss over a batch, part by part."""
        if self.options.accumulate == 1:
            loss = self._loss(model, batch)
            self._backward(loss)
            return loss.detach()
        parts = split_batch(batch, part_size, task=self._name)
        weights = [self._weight(part, num) for part, num in parts]
        whole = sum(weights)
        if not whole > 0:
            raise TaskError(
                f"{self._name}.loss_weight gives all parts of a batch together a weight of "
                f"{whole!r}; it must be positive"
            )
        total = torch.zeros((), device=self._device)
        for (part, _), weight in zip(parts, weights, strict=True):
            if weight:  # a mean over nothing is not a number
                loss = self._loss(model, part) / (whole / weight)
                self._backward(loss)
                total = total + loss.detach()
        return total

    def _weight(self, part: Batch, num_rows: int) -> float:
        if not self.options.weighs:
            return float(num_rows)
        weight = float(self._task.loss_weight(part))
        if not 0 <= weight < float("inf"):
            raise TaskError(
                f"{self._name}.loss_weight returned {weight!r}; it must be a number, 0 or more, "
                "such as the number of tokens that count"
            )
        return weight

    def _loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        with self.forward():
            return check_loss(self._task.loss(model, batch), task=self._name)

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()

    def _apply(self, optimizers: FollowedOptimizers) -> None:
        """Clip the gradients and update the parameters."""
        if self._scaler is None:
            optimizers.clip()
            for optimizer in optimizers.torch.values():
                optimizer.step()
            return
        if optimizers.clips:
            for optimizer in optimizers.torch.values():
                self._scaler.unscale_(optimizer)
            optimizers.clip()
        for optimizer in optimizers.torch.values():
            self._scaler.step(optimizer)
        self._scaler.update()

    def _own_step(
        self, model: torch.nn.Module, batch: Batch, optimizers: FollowedOptimizers
    ) -> torch.Tensor:
        """Let the task take the step; its first one must update parameters.

        A method such as ``second_step`` of an optimizer calls no hook, but writes to parameters.
        """
        if self._has_stepped:
            with lent_optimizers(optimizers.torch):
                loss = self._task.step(model, batch)
        else:
            taken: list[object] = []
            before = _marks(model)
            hooks = [
                optimizer.register_step_post_hook(lambda each, *_: taken.append(each))
                for optimizer in optimizers.torch.values()
            ]
            try:
                with lent_optimizers(optimizers.torch):
                    loss = self._task.step(model, batch)
            finally:
                for hook in hooks:
                    hook.remove()
            if not taken and _marks(model) == before:
                raise TaskError(
                    f"{self._name}.step has not updated anything; call .step(), or what the "
                    "optimizer has instead, such as second_step(), of the optimizers in "
                    f"self.optimizers (it has: {', '.join(optimizers.parts)})"
                )
            self._has_stepped = True
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TaskError(
                f"{self._name}.step returned {_shown(loss)}; return the loss to report, a tensor "
                "with one number"
            )
        return loss.detach().reshape(())

    # -- state -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside model and optimizer; views, not copies."""
        out: dict[str, Any] = {}
        if self._scaler is not None:
            out["scaler"] = self._scaler.state_dict()
        if self._averages:
            out["averages"] = {
                prefix: model.state_dict() for prefix, (_, model) in self._averages.items()
            }
        return out

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        if self._scaler is not None and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        for prefix, (_, model) in self._averages.items():
            model.load_state_dict(state["averages"][prefix])


def _marks(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return what changes when parameters are written to, or get other memory."""
    return [(p.data_ptr(), p._version) for p in model.parameters()]


def _no_compiler() -> bool:
    return not any(map(shutil.which, ("c++", "g++", "clang++", "cl")))


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
