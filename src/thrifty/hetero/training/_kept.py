"""State that a pass through a model changes besides gradients, copied to restore or to inspect."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn


_NUMBERS = (int, float, complex, bool)
_PLAIN = (*_NUMBERS, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)


class KeptBuffers:
    """A copy of a model's buffers, with references to the originals.

    A forward pass may change a buffer in place or replace it by another tensor. ``restore`` undoes
    both.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def changed(self, *, besides: tuple[type[nn.Module], ...] = ()) -> bool:
        """Return whether a buffer was written to or replaced, except those of some module types."""
        return any(
            module._buffers.get(name) is not buffer or buffer._version != version
            for module, name, buffer, _, version in self._held
            if not isinstance(module, besides)
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        for module, name, buffer, value, _ in self._held:
            module._buffers[name] = buffer
            buffer.copy_(value)


class StateSnapshot:
    """A copy of the state that user code may change in a pass.

    It covers buffers and attributes of the model's modules, and what functions keep in closures,
    globals and the objects that they are methods of, including modules among these. Containers are
    copied one level deep. Other objects are not copied.

    Args:
        model: The model, with its modules.
        functions: Functions that are called with the model.
        besides: Module types whose values are restored but are not part of ``values``.
        lists: Whether to also restore lists and other containers that functions write to.
    """

    def __init__(
        self,
        model: nn.Module,
        *functions: Callable[..., Any] | None,
        besides: tuple[type[nn.Module], ...] = (),
        lists: bool = True,
    ) -> None:
        self._besides = besides
        self._lists = True
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._slots: list[tuple[str, MutableMapping[str, Any]]] = []
        self._cells: dict[str, tuple[CellType, Any]] = {}
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        self._keep_module(model, "")
        self._lists = lists
        for function in functions:
            self._keep_function(function)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all copied state."""
        for container, before in self._containers:
            _refill(container, before)
        for cell, value in self._cells.values():
            cell.cell_contents = value
        for place, name, value in self._globals:
            place[name] = value
        for tensor, value in self._tensors:
            tensor.copy_(value)

    def values(self) -> dict[str, Any]:
        """Return copies of all current tensors and numbers, by name."""
        found = {
            f"{path}{name}": value
            for path, place in self._slots
            for name, value in place.items()
            if not isinstance(value, nn.Parameter)
        }
        found |= {name: cell.cell_contents for name, (cell, _) in self._cells.items()}
        found |= {name: place[name] for place, name, _ in self._globals}
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in found.items()
            if isinstance(value, Tensor) or type(value) in _NUMBERS
        }

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign other values to tensors and numbers, until ``restore``."""
        places = dict(reversed(self._slots))  # of a module: its attributes, not its buffers
        for path, place in self._slots:
            for name in place:
                if f"{path}{name}" in values:
                    place[name] = _copy(values[f"{path}{name}"])
        for full, value in values.items():
            path, dot, name = full.rpartition(".")
            if type(value) in _NUMBERS and f"{path}{dot}" in places:
                places[f"{path}{dot}"].setdefault(name, value)
        for name, (cell, _) in self._cells.items():
            if name in values:
                cell.cell_contents = _copy(values[name])
        for place, name, _ in self._globals:
            if name in values:
                place[name] = values[name]

    def _keep_module(self, module: nn.Module, path: str) -> None:
        lists, self._lists = self._lists, True
        for name, each in module.named_modules():
            if id(each) in self._seen:
                continue
            self._seen.add(id(each))
            where = f"{path}{name}." if name else path
            self._keep_attributes(each, where, listed=not isinstance(each, self._besides))
        self._lists = lists

    def _keep_attributes(self, owner: Any, path: str, *, listed: bool = True) -> None:
        attributes = vars(owner)
        self._keep_container(attributes)
        if listed:
            self._slots.append((path, attributes))
        for name, value in list(attributes.items()):
            self._keep_value(value)
            if listed and type(value) is dict:
                # Name buffers as PyTorch does, without "_buffers" in the path.
                self._slots.append((path if name == "_buffers" else f"{path}{name}.", value))

    def _keep_value(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.grad_fn is None and not isinstance(value, nn.Parameter):
                self._tensors.append((value, value.detach().clone()))
        elif type(value) in _CONTAINERS and self._lists:
            self._keep_container(value)

    def _keep_container(self, container: Any) -> None:
        if id(container) not in self._seen:
            self._seen.add(id(container))
            self._containers.append((container, container.copy()))
            if type(container) is dict:
                for value in list(container.values()):
                    if isinstance(value, Tensor):
                        self._keep_value(value)

    def _keep_function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        if isinstance(function, nn.Module):
            self._keep_module(function, f"{type(function).__name__}.")
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
        if isinstance(owner, nn.Module):
            self._keep_function(owner)
        elif hasattr(owner, "__dict__") and not isinstance(owner, type):
            self._keep_attributes(owner, f"{type(owner).__name__}.")
            for value in list(vars(owner).values()):
                self._follow(value)

    def _keep_closure(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                value = cell.cell_contents
                self._cells[f"{function.__name__}.{name}"] = cell, value
                self._keep_value(value)
                self._follow(value)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, function)
            if type(value) in _PLAIN:
                self._globals.append((function.__globals__, name, value))
            elif type(value) in _CONTAINERS:
                self._keep_value(value)
            elif isinstance(value, nn.Module):
                self._keep_function(value)

    def _follow(self, value: Any) -> None:
        if isinstance(value, FunctionType | MethodType | partial | nn.Module):
            self._keep_function(value)


@contextlib.contextmanager
def untouched(
    model: nn.Module, *functions: Callable[..., Any] | None, lists: bool = True
) -> Iterator[StateSnapshot]:
    """Restore on exit everything that ``StateSnapshot`` copies."""
    kept = StateSnapshot(model, *functions, lists=lists)
    try:
        yield kept
    finally:
        kept.restore()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _refill(container: Any, before: Any) -> None:
    """Restore the elements of a container if they have changed."""
    if isinstance(container, dict):
        if list(container) != list(before) or any(container[k] is not before[k] for k in before):
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
