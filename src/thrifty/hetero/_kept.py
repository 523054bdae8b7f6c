"""What a pass through a model changes besides gradients, to be put back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn


_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)


class KeptBuffers:
    """A copy of a model's buffers, and where they are.

    A forward pass may change a buffer in place or put another tensor in its place; ``restore``
    undoes both.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def changed(self, *, besides: tuple[type[nn.Module], ...] = ()) -> bool:
        """Whether a buffer was written to or replaced, besides those of some modules."""
        return any(
            module._buffers.get(name) is not buffer or buffer._version != version
            for module, name, buffer, _, version in self._held
            if not isinstance(module, besides)
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back."""
        for module, name, buffer, value, _ in self._held:
            module._buffers[name] = buffer
            buffer.copy_(value)


class Kept:
    """A copy of what user code may count or note down in a pass.

    Buffers and attributes of a model's modules, and what functions keep in closures, globals and
    the objects that they are methods of. Containers are copied one level deep; other objects are
    not.

    Args:
        model: with its modules.
        functions: that are called with it.
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any] | None) -> None:
        self._buffers = KeptBuffers(model)
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        for module in model.modules():
            self._keep_attributes(module)
        for function in functions:
            self._keep_function(function)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for container, before in self._containers:
            _refill(container, before)
        for cell, value in self._cells:
            cell.cell_contents = value
        for place, name, value in self._globals:
            place[name] = value
        for tensor, value in self._tensors:
            tensor.copy_(value)
        self._buffers.restore()

    def _keep_attributes(self, owner: Any) -> None:
        attributes = vars(owner)
        self._keep_container(attributes)
        for value in list(attributes.values()):
            self._keep_value(value)

    def _keep_value(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.grad_fn is None and not isinstance(value, nn.Parameter):
                self._tensors.append((value, value.detach().clone()))
        elif type(value) in _CONTAINERS:
            self._keep_container(value)

    def _keep_container(self, container: Any) -> None:
        if id(container) not in self._seen:
            self._seen.add(id(container))
            self._containers.append((container, container.copy()))

    def _keep_function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if isinstance(function, partial):
            for each in (function.func, *function.args, *function.keywords.values()):
                self._keep_function(each) if callable(each) else self._keep_value(each)
        elif isinstance(function, MethodType):
            self._keep_function(function.__func__)
            self._keep_owner(function.__self__)
        elif isinstance(function, FunctionType):
            self._keep_closure(function)
        else:
            self._keep_owner(function)

    def _keep_owner(self, owner: Any) -> None:
        modules = owner.modules() if isinstance(owner, nn.Module) else (owner,)
        for each in modules:
            if hasattr(each, "__dict__") and not isinstance(each, type):
                self._keep_attributes(each)
                for value in list(vars(each).values()):
                    if isinstance(value, FunctionType | MethodType | partial):
                        self._keep_function(value)

    def _keep_closure(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                value = cell.cell_contents
                self._cells.append((cell, value))
                if isinstance(value, FunctionType | MethodType | partial):
                    self._keep_function(value)
                else:
                    self._keep_value(value)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, function)
            if type(value) in _PLAIN:
                self._globals.append((function.__globals__, name, value))
            elif type(value) in _CONTAINERS:
                self._keep_container(value)


@contextlib.contextmanager
def untouched(model: nn.Module, *functions: Callable[..., Any] | None) -> Iterator[None]:
    """Puts everything back that ``Kept`` keeps."""
    kept = Kept(model, *functions)
    try:
        yield
    finally:
        kept.restore()


def _refill(container: Any, before: Any) -> None:
    """Gives a container its elements back, if they have changed."""
    if isinstance(container, dict):
        if list(container) != list(before) or any(
            container[k] is not before[k] for k in before
        ):
            container.clear()
            container.update(before)
    elif isinstance(container, set):
        if container != before:
            container.clear()
            container |= before
    elif len(container) != len(before) or any(
        a is not b for a, b in zip(container, before, strict=True)
    ):
        container.clear()
        container.extend(before)
