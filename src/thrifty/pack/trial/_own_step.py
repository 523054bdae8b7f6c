"""Gradients between steps that a task takes itself.

A step that never clears gradients finds them cleared. A step that clears those of an optimizer
itself, as to accumulate over several batches, finds them as it has left them, like a plain loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from thrifty.core import TaskError

from ._left_gradients import (
    gradients_noted,
    gradients_of,
    is_used,
    is_zero,
    load_gradients,
    note_used,
)


Optimizers = Mapping[str, torch.optim.Optimizer]

ACCUMULATE = "to accumulate gradients over several batches, set accumulate and define loss instead"

_SETS = ("clears", "calls_zero_grad", "has_stepped", "has_written")


class OwnStepGradients:
    """Hold the gradients that a task's own step finds, and refuse cases of doubt.

    Args:
        task: The name of the task, for messages.

    Attributes:
        clears: The optimizers whose gradients the step clears itself.
        calls_zero_grad: Those whose ``zero_grad`` it calls to do so.
        has_stepped: Those whose ``step`` it has called.
        has_written: Those that have changed parameters by another method.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self.clears: set[str] = set()
        self.calls_zero_grad: set[str] = set()
        self.has_stepped: set[str] = set()
        self.has_written: set[str] = set()
        self._stepped: set[str] = set()
        """The optimizers that the last call has stepped."""
        self._calls: set[str] = set()
        """The optimizers whose ``zero_grad`` the present call has called."""

    @contextmanager
    def step(self, optimizers: Optimizers) -> Iterator[None]:
        """Let the task take a step within this context.

        Raises:
            TaskError: It is in doubt whether gradients count that an earlier call has left.
        """
        used = self._clear(optimizers)
        left = {name: _with_versions(each) for name, each in optimizers.items()}
        marks = {name: _marks(each) for name, each in optimizers.items()}
        self._calls = set()
        with gradients_noted() as stepped, self._zero_grad_noted(optimizers):
            yield
        self._stepped = self._find_stepped(optimizers, stepped, marks)
        for name, optimizer in optimizers.items():
            self._note_cleared(name, optimizer, left[name])
            if name in self._stepped:
                self._check(name, had_left=bool(left[name]), had_used=name in used)

    @property
    def has_updated(self) -> bool:
        """Whether the last call has updated anything."""
        return bool(self._stepped)

    def _clear(self, optimizers: Optimizers) -> set[str]:
        """Clear the gradients that do not count; return the optimizers that had used some."""
        used = set()
        for name, optimizer in optimizers.items():
            for parameter in _parameters(optimizer):
                if parameter.grad is not None and not self._counts(name, parameter.grad):
                    if is_used(parameter.grad):
                        used.add(name)
                    parameter.grad = None
        return used

    def _counts(self, name: str, gradient: torch.Tensor) -> bool:
        """Return whether a gradient that a call has left stays for the next one."""
        if is_used(gradient):
            return False
        # After an update, what another backward pass adds is left over, as in a GAN.
        return name in self.clears or name not in self._stepped

    @contextmanager
    def _zero_grad_noted(self, optimizers: Optimizers) -> Iterator[None]:
        own = {name: vars(each).get("zero_grad") for name, each in optimizers.items()}
        for name, each in optimizers.items():
            vars(each)["zero_grad"] = self._noting(name, each.zero_grad)
        try:
            yield
        finally:
            for name, each in optimizers.items():
                del vars(each)["zero_grad"]
                if own[name] is not None:
                    vars(each)["zero_grad"] = own[name]

    def _noting(self, name: str, zero_grad: Any) -> Any:
        def noting(*args: Any, **options: Any) -> Any:
            self._calls.add(name)
            self.calls_zero_grad.add(name)
            return zero_grad(*args, **options)

        return noting

    def _find_stepped(
        self,
        optimizers: Optimizers,
        stepped: list[torch.optim.Optimizer],
        marks: Mapping[str, list[tuple[int, int]]],
    ) -> set[str]:
        """Return the optimizers that a call has stepped.

        A method such as ``second_step`` calls no hook, but writes to parameters. Where ``step`` is
        called at times, other writes are no step: a task may clip weights.
        """
        taken = {id(p) for each in stepped for p in _parameters(each)}
        found = {
            name
            for name, each in optimizers.items()
            if any(id(p) in taken for p in _parameters(each))
        }
        self.has_stepped |= found
        for name, optimizer in optimizers.items():
            if name not in self.has_stepped and _marks(optimizer) != marks[name]:
                if any(p.grad is not None for p in _parameters(optimizer)):
                    self.has_written.add(name)
                note_used(_parameters(optimizer))
                found.add(name)
        return found

    def _note_cleared(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        left: Mapping[int, tuple[torch.Tensor, int]],
    ) -> None:
        """Note whether a call has cleared the gradients of an optimizer."""
        if name in self._calls or any(
            _is_cleared(p.grad, *left[id(p)]) for p in _parameters(optimizer) if id(p) in left
        ):
            self.clears.add(name)

    def _check(self, name: str, *, had_left: bool, had_used: bool) -> None:
        """Check an optimizer that the last call has stepped.

        Args:
            name: Its name.
            had_left: Whether it had gradients that earlier calls have left.
            had_used: Whether it had gradients that it had used, which are cleared.

        Raises:
            TaskError: It is in doubt which gradients count.
        """
        zero_grad = f"self.optimizers[{name!r}].zero_grad()"
        if had_left and name not in self.clears:
            raise TaskError(
                f"{self._task}.step updates parameters by gradients that an earlier call has left, "
                "and never clears them, so thrifty cannot tell whether they count. If they do not, "
                f"as where an update was left out, call {zero_grad} before backward(); {ACCUMULATE}"
                f", or call {zero_grad} after each step() of the optimizer"
            )
        if name in self.has_written and name in self.has_stepped:
            raise TaskError(
                f"{self._task}.step first changes parameters of the optimizer {name!r} without its "
                "step(), and calls step() later, so thrifty cannot tell which gradients count; "
                f"{ACCUMULATE}, or change parameters only where step() was called"
            )
        if had_used and name in self.calls_zero_grad and name not in self._calls:
            raise TaskError(
                f"{self._task}.step calls {zero_grad} only at some steps, and updates parameters "
                "by gradients that were used before at others; call it at each update, or never: "
                "used gradients are cleared before each call"
            )

    # -- state -----------------------------------------------------------------------------

    def state(self, model: torch.nn.Module, optimizers: Optimizers) -> dict[str, Any]:
        """Return what a checkpoint holds, empty if nothing."""
        counts = {
            id(p)
            for name, each in optimizers.items()
            for p in _parameters(each)
            if p.grad is not None and self._counts(name, p.grad)
        }
        named = [(name, p) for name, p in model.named_parameters() if id(p) in counts]
        sets = {name: sorted(getattr(self, name)) for name in _SETS}
        return {**gradients_of(named), **{name: each for name, each in sets.items() if each}}

    def load(self, state: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Restore what ``state`` returned."""
        for name in _SETS:
            setattr(self, name, set(state.get(name, ())))
        self._stepped = set()
        for parameter in model.parameters():
            parameter.grad = None
        load_gradients(model.named_parameters(), state)


def _with_versions(optimizer: torch.optim.Optimizer) -> dict[int, tuple[torch.Tensor, int]]:
    """Return the gradients of an optimizer and their versions, by parameter."""
    return {id(p): (p.grad, p.grad._version) for p in _parameters(optimizer) if p.grad is not None}


def _is_cleared(now: torch.Tensor | None, left: torch.Tensor, version: int) -> bool:
    """Return whether a gradient was cleared that an earlier call has left.

    Another gradient in its place says so only if nothing was added to it before.
    """
    if now is None or is_zero(now):
        return True
    return now is not left and left._version == version


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _marks(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return what changes when parameters are written to, or get other memory."""
    return [(p.data_ptr(), p._version) for p in _parameters(optimizer)]
