"""Optimisers by name: a torch optimiser whose options may be hyper-parameters that change over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from thrifty.core import TaskError


Value = float | str | tuple["float | str", ...]
Factory = Callable[..., torch.optim.Optimizer]


class Optimizer:
    """A torch optimiser class and its options; a string option names a hyper-parameter.

    What is named follows its schedule, step by step. Options go to the torch class as they are;
    ``clip_norm`` clips the gradient's norm before each step.

    >>> optimizer = Optimizer(torch.optim.Adadelta, lr="lr", rho=0.9)
    >>> sorted(optimizer.names())
    ['lr']
    """

    def __init__(
        self, factory: Factory, *, clip_norm: float | str | None = None, **options: Any
    ) -> None:
        self.factory = factory
        self.clip_norm = clip_norm
        self.options = options

    def __repr__(self) -> str:
        inside = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Optimizer({getattr(self.factory, '__name__', self.factory)}{inside})"

    def names(self) -> set[str]:
        """The hyper-parameters that it follows."""
        return set(_strings(self.options.values())) | set(_strings([self.clip_norm]))

    def build(
        self, parameters: Iterable[torch.nn.Parameter], values: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """The torch optimiser, with the values of this moment.

        Raises:
            TaskError: a named hyper-parameter is not in the space.
        """
        return self.factory(list(parameters), **self.resolve(values))

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The options with every name replaced by its value."""
        return {
            option: _lookup(value, values, where=option)
            for option, value in self.options.items()
        }

    def clip_value(self, values: Mapping[str, Any]) -> float | None:
        """The clipping norm of this moment, if there is one."""
        return (
            None
            if self.clip_norm is None
            else _lookup(self.clip_norm, values, where="clip_norm")
        )


def SGD(  # noqa: N802 (named like the torch class that it stands for)
    *, lr: Value, momentum: Value = 0.0, clip_norm: float | str | None = None, **options: Any
) -> Optimizer:
    """Stochastic gradient descent (``torch.optim.SGD``); any option may name a hyper-parameter."""
    return Optimizer(torch.optim.SGD, lr=lr, momentum=momentum, clip_norm=clip_norm, **options)


def Adam(  # noqa: N802
    *, lr: Value, clip_norm: float | str | None = None, **options: Any
) -> Optimizer:
    """Adam (``torch.optim.Adam``); any option may name a hyper-parameter."""
    return Optimizer(torch.optim.Adam, lr=lr, clip_norm=clip_norm, **options)


def AdamW(  # noqa: N802
    *, lr: Value, clip_norm: float | str | None = None, **options: Any
) -> Optimizer:
    """AdamW (``torch.optim.AdamW``); any option may name a hyper-parameter."""
    return Optimizer(torch.optim.AdamW, lr=lr, clip_norm=clip_norm, **options)


def RMSprop(  # noqa: N802
    *, lr: Value, clip_norm: float | str | None = None, **options: Any
) -> Optimizer:
    """RMSprop (``torch.optim.RMSprop``); any option may name a hyper-parameter."""
    return Optimizer(torch.optim.RMSprop, lr=lr, clip_norm=clip_norm, **options)


def Adagrad(  # noqa: N802
    *, lr: Value, clip_norm: float | str | None = None, **options: Any
) -> Optimizer:
    """Adagrad (``torch.optim.Adagrad``); any option may name a hyper-parameter."""
    return Optimizer(torch.optim.Adagrad, lr=lr, clip_norm=clip_norm, **options)


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _strings(value)


def _lookup(value: Any, values: Mapping[str, Any], *, where: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_lookup(item, values, where=where) for item in value)
    if not isinstance(value, str):
        return value
    if value not in values:
        known = ", ".join(values) or "none"
        raise TaskError(
            f"the task's optimizer follows hyper-parameter {value!r} ({where}={value!r}), which the search "
            f"space does not have (it has: {known}); add it to the space or give {where} a number"
        )
    return values[value]
