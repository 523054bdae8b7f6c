"""What networks of a ``Trainable`` carry beside their ``state_dict``: flags and gradients.

A restored trial would otherwise train other parameters than the live one, or in another mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from thrifty.pack.identity import is_own, reach
from thrifty.pack.verify import parts_held, path_of

from ._left_gradients import gradients_of, load_gradients


_MAX_ELEMENTS = 64
"""Longer containers are data."""
_MAX_OBJECTS = 5_000
_MAX_DEPTH = 8


def networks_in(
    roots: Mapping[str, Any], *, leave_out: Collection[str] = ()
) -> tuple[dict[str, torch.nn.Module], dict[str, torch.Tensor], list[Any]]:
    """Return the networks that objects hold, trained tensors in none of them, and optimizers.

    Networks and tensors have their paths. Schedulers and the like count as optimizers. Objects of
    the user's classes, objects with ``state_dict``, the user's functions, and small containers are
    looked into. A network within another one has no entry of its own.

    Args:
        roots: The objects by name.
        leave_out: Names of attributes of the roots that are not looked at.
    """
    modules: dict[str, torch.nn.Module] = {}
    tensors: dict[str, torch.Tensor] = {}
    others: list[Any] = []
    seen: set[int] = set()
    found = [(name, one, 0) for name, one in roots.items()]
    for name, one, depth in found:  # grows
        if id(one) in seen or len(seen) > _MAX_OBJECTS:
            continue
        seen.add(id(one))
        if isinstance(one, torch.nn.Module):
            modules[name] = one
        elif isinstance(one, torch.Tensor):
            if one.is_leaf and (one.requires_grad or isinstance(one, torch.nn.Parameter)):
                tensors[name] = one
        elif depth < _MAX_DEPTH:
            if depth and _has_state(type(one)):
                others.append(one)
            held = _held(name, one)
            found += [(n, x, depth + 1) for n, key, x in held if depth or key not in leave_out]
    inner = {id(part) for each in modules.values() for part in each.modules() if part is not each}
    modules = {name: module for name, module in modules.items() if id(module) not in inner}
    known = {id(p) for module in modules.values() for p in module.parameters()}
    return modules, {n: each for n, each in tensors.items() if id(each) not in known}, others


def _has_state(kind: type) -> bool:
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def _held(name: str, one: Any) -> list[tuple[str, Any, Any]]:
    """Return what an object holds, each with its path and its key."""
    kind = type(one)
    if isinstance(one, dict):
        items = list(one.items()) if len(one) <= _MAX_ELEMENTS else []
        return [(f"{name}[{key!r}]", key, each) for key, each in items]
    if isinstance(one, list | tuple | set | frozenset):
        elements = list(enumerate(one)) if len(one) <= _MAX_ELEMENTS else []
        return [(f"{name}[{n}]", n, each) for n, each in elements]
    if isinstance(one, torch.optim.Optimizer):
        trained = (p for group in one.param_groups for p in group["params"])
        return [(f"{name}.parameters[{n}]", n, p) for n, p in enumerate(trained)]
    if isinstance(one, MethodType):
        return [(name, "", one.__self__)]
    is_code = isinstance(one, FunctionType | partial)
    if not is_code and not is_own(kind) and not _has_state(kind):
        return []
    return [(path_of(name, key), key, each) for key, each in parts_held(one).items()]


class NetworkFlags:
    """What networks carry beside their ``state_dict``.

    These are which parameters are trained, which parts are in training mode, and gradients.

    Args:
        roots: The objects that hold the networks, by name.
        leave_out: Names of attributes of the roots that are not looked at.
    """

    def __init__(self, roots: Mapping[str, Any], *, leave_out: Collection[str] = ()) -> None:
        self.modules, self.tensors, self.others = networks_in(roots, leave_out=leave_out)

    def leave_out(self, known: Collection[int]) -> None:
        """Leave out networks and tensors whose identities are known."""
        self.modules = {n: each for n, each in self.modules.items() if id(each) not in known}
        self.tensors = {n: each for n, each in self.tensors.items() if id(each) not in known}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all parameters and trained tensors, each once, by path."""
        seen: set[int] = set()
        for path, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (f"{path}.{name}" if path else name), parameter
        yield from self.tensors.items()

    def parts(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield all parts of networks by path."""
        for path, module in self.modules.items():
            for name, part in module.named_modules():
                yield (f"{path}.{name}" if path and name else path or name), part

    def read(self, *, keeps_used: bool = False) -> dict[str, Any]:
        """Return the flags and gradients.

        Args:
            keeps_used: Whether values of gradients that an optimizer has used are kept, too.
        """
        return {**self.flags(), **gradients_of(self.parameters(), keeps_used=keeps_used)}

    def flags(self) -> dict[str, list[str]]:
        """Return which networks there are, what is not trained, and what is no training mode."""
        return {
            "networks": [*self.modules, *self.tensors],
            "frozen": [name for name, each in self.parameters() if not each.requires_grad],
            "evaluating": [name for name, part in self.parts() if not part.training],
        }

    def load(self, state: Mapping[str, Any]) -> frozenset[str]:
        """Set the flags and gradients that ``read`` has returned; other networks stay as they are.

        Returns:
            The names of kept gradients for which there is no parameter.
        """
        self.load_flags(state)
        return load_gradients(self.parameters(), state)

    def load_flags(self, state: Mapping[str, Any]) -> None:
        """Set the flags that ``flags`` has returned; forget networks that it did not know."""
        known = frozenset(state["networks"])
        self.modules = {name: each for name, each in self.modules.items() if name in known}
        self.tensors = {name: each for name, each in self.tensors.items() if name in known}
        for name, parameter in self.parameters():
            if parameter.is_leaf and parameter.requires_grad is (name in state["frozen"]):
                parameter.requires_grad_(name not in state["frozen"])
        for name, part in self.parts():
            part.training = name not in state["evaluating"]


def reads_gradients(task: Any) -> bool:
    """Return whether a task's code may read gradients that an optimizer has used before.

    Code that clears gradients and never names ``grad`` cannot.
    """
    names: set[str] = set()
    for each in reach({"self": task}).functions:
        names |= _names_in(each.value.__code__)
    return bool(names & {"grad", "_grad"}) or "zero_grad" not in names


def _names_in(code: CodeType) -> set[str]:
    inside = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inside)
