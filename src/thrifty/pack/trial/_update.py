"""One optimizer step of one trial, and the loss that its task returns.

A step has a precision, parts of a batch, clipping, averages, and steps of the task's own.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from thrifty.core import TaskError
from thrifty.pack.task._data import Batch
from thrifty.pack.task._followed_optimizer import FollowedOptimizers
from thrifty.pack.task._step_options import EMA, Average, StepOptions, cast_batch, split_batch
from thrifty.pack.task._task import Task, lent_optimizers

from ._own_step import ACCUMULATE, OwnStepGradients
from ._plain_evaluation import described
from ._weights import SharingAverage


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
        self._averages: dict[str, tuple[Average, SharingAverage]] = {}
        self._has_stepped = False
        self._own = OwnStepGradients(self._name)
        self._num_own = 0
        """How many steps the task has taken itself."""
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
                averaged = SharingAverage(model, function)
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

    def end_epoch(
        self, model: torch.nn.Module, epochs: int, *, optimizers: FollowedOptimizers
    ) -> None:
        """Add the weights after this number of epochs to the averages that include them.

        Raises:
            TaskError: No step of the task's own has updated anything.
        """
        if self.options.owns_step:
            self._check_has_stepped(optimizers)
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

        Raises:
            TaskError: The task's loss, weights or own step are not what they must be, or an
                optimizer needs a closure.
        """
        batch = self.cast(batch)
        if self.options.owns_step:
            loss = self._own_step(model, batch, optimizers)
        else:
            optimizers.zero_grad()
            if not self._has_stepped:
                _check_no_closure(optimizers, task=self._name)
                self._has_stepped = True
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
        if not whole:  # nothing counts: the loss of such a batch is what the task makes of it
            weights, whole = [1.0] * len(parts), float(len(parts))
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
        found = self._task.loss_weight(part)
        weight = float(num_rows if found is None else found)
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
        """Let the task take the step."""
        self._num_own += 1
        with self._own.step(optimizers.torch), lent_optimizers(optimizers.torch):
            loss = self._task.step(model, batch)
        self._has_stepped |= self._own.has_updated
        if self._num_own >= _MAX_WITHOUT_UPDATE:
            self._check_has_stepped(optimizers)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TaskError(
                f"{self._name}.step returned {_shown(loss)}; return the loss to report, a tensor "
                "with one number"
            )
        return loss.detach().reshape(())

    def _check_has_stepped(self, optimizers: FollowedOptimizers) -> None:
        """Check that the task's own steps have updated parameters: some may leave it out.

        Raises:
            TaskError: None has.
        """
        if not self._has_stepped:
            raise TaskError(
                f"{self._name}.step has not updated anything; call .step(), or what the "
                "optimizer has instead, such as second_step(), of the optimizers in "
                f"self.optimizers (it has: {', '.join(optimizers.parts)}); {ACCUMULATE}"
            )

    # -- state -----------------------------------------------------------------------------

    def state(self, model: torch.nn.Module, optimizers: FollowedOptimizers) -> dict[str, Any]:
        """Return what a checkpoint holds beside model and optimizer; views, not copies."""
        out: dict[str, Any] = {}
        if self.options.owns_step and (own := self._own.state(model, optimizers.torch)):
            out["own step"] = own
        if self._scaler is not None:
            out["scaler"] = self._scaler.state_dict()
        if self._averages:
            parts = {prefix: model.parts() for prefix, (_, model) in self._averages.items()}
            out["averages"] = {prefix: state for prefix, (state, _) in parts.items()}
            out["shared by averages"] = {prefix: names for prefix, (_, names) in parts.items()}
        return out

    def load(self, state: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Restore what ``state`` returned."""
        if self.options.owns_step:
            self._own.load(state.get("own step", {}), model)
        if self._scaler is not None and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        shared = state.get("shared by averages", {})  # earlier databases have none
        for prefix, (_, model) in self._averages.items():
            model.take(state["averages"][prefix], shared=shared.get(prefix, ()))


_MAX_WITHOUT_UPDATE = 100
"""After how many steps of the task's own one must have updated something."""


def _no_compiler() -> bool:
    return not any(map(shutil.which, ("c++", "g++", "clang++", "cl")))


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


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
    thrifty.TaskError: Digits.loss returned a float (0.5); return the
        mean of the batch as a tensor of one element, without .item()
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise TaskError(
        f"{task}.loss returned {described(loss)}; return the mean of the batch as a tensor of "
        "one element, without .item()"
    )


def _check_no_closure(optimizers: FollowedOptimizers, *, task: str) -> None:
    """Check that a step of the optimizers needs no function that computes the loss.

    Raises:
        TaskError: One needs it, such as that of LBFGS.
    """
    for name, optimizer in optimizers.torch.items():
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            kind = type(optimizer).__name__
            raise TaskError(
                f"{kind}.step computes the loss several times and needs a closure for it; give "
                f"{task} a method step(self, model, batch) that calls "
                f"self.optimizers[{name!r}].step(closure) and returns the loss"
            )
