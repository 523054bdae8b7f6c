"""Gradients that no optimizer has used yet, as where batches are accumulated.

Those that are left belong to the next step, which may be in the next epoch, so they are part of a
trial's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


_USED = "_thrifty_used"
"""Attribute of a gradient: its version when an optimizer has used it."""


@contextmanager
def gradients_noted() -> Iterator[list[torch.optim.Optimizer]]:
    """Note which gradients optimizers use within this context.

    Yields:
        The optimizers that have taken a step, in order.
    """
    stepped: list[torch.optim.Optimizer] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped.append(optimizer)
        note_used(parameter for group in optimizer.param_groups for parameter in group["params"])

    handle = register_optimizer_step_post_hook(note)
    try:
        yield stepped
    finally:
        handle.remove()


def note_used(parameters: Iterable[torch.Tensor]) -> None:
    """Note that the gradients of parameters, as they are now, have been used."""
    for parameter in parameters:
        if parameter.grad is not None:
            setattr(parameter.grad, _USED, parameter.grad._version)


def is_used(gradient: torch.Tensor) -> bool:
    """Return whether an optimizer has used a gradient, and it is as it was then."""
    return getattr(gradient, _USED, None) == gradient._version


def is_zero(gradient: torch.Tensor) -> bool:
    """Return whether a gradient has no other values than zeros."""
    return not (gradient if is_dense(gradient) else gradient._values()).any()


def is_dense(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is no sparse tensor."""
    return gradient.layout is torch.strided


def gradients_of(
    named: Iterable[tuple[str, torch.Tensor]], *, keeps_used: bool = False
) -> dict[str, Any]:
    """Return what a state holds of the gradients of parameters.

    Args:
        named: The parameters by name.
        keeps_used: Whether values of used gradients are kept, too.

    Returns:
        The values of gradients that no optimizer has used, and the names of those that are zero in
        a restored trial, because they are zero or were used. Empty parts are left out.
    """
    left, zero = {}, []
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None:
            continue
        if is_used(gradient) and not keeps_used:
            if is_dense(gradient):
                zero.append(name)
        elif not is_zero(gradient):
            left[name] = gradient
        elif is_dense(gradient):
            zero.append(name)
    found = {"gradients": left, "zero": zero}
    return {key: each for key, each in found.items() if each}


def load_gradients(
    named: Iterable[tuple[str, torch.Tensor]], state: Mapping[str, Any]
) -> frozenset[str]:
    """Give parameters the gradients that ``gradients_of`` has returned.

    A parameter that has a gradient already keeps it.

    Returns:
        The names of kept gradients for which there is no parameter.
    """
    left = state.get("gradients", {})
    known = set()
    for name, parameter in named:
        known.add(name)
        if parameter.grad is not None:
            continue
        if name in left:
            parameter.grad = left[name].to(parameter.device, copy=True)
        elif name in state.get("zero", ()):
            parameter.grad = torch.zeros_like(parameter)
    return frozenset(left.keys() - known)
