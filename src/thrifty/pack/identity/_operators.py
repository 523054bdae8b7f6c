"""The user's operators that PyTorch calls by name, as in ``torch.ops.mine.scale(x)``."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from ._own import is_own, is_own_file
from ._place import vars_of


def is_operator(value: Any) -> bool:
    """Return whether a value is an operator, what ``custom_op`` returns, or a ``Library``."""
    return issubclass(type(value), _OPERATORS)


_OPERATORS = (CustomOpDef, OpOverload, OpOverloadPacket, torch.library.Library)


def name_of(operator: Any) -> str:
    """Return the full name of an operator, such as ``"mine::scale"`` or ``"aten::add.Tensor"``.

    That of a library is what it was made with.
    """
    if issubclass(type(operator), torch.library.Library):
        return f"{operator.kind} {operator.ns} {operator.dispatch_key}"
    if issubclass(type(operator), OpOverload):
        return str(operator.name())
    key = "_qualname" if issubclass(type(operator), CustomOpDef) else "_qualified_op_name"
    return str(getattr(operator, key))


def functions_of(operator: Any) -> dict[str, Any]:
    """Return the functions that ``custom_op`` and its ``register_...`` methods were given.

    It is empty for an operator that was defined in another way.
    """
    found = vars_of(OPDEFS.get(name_of(operator).partition(".")[0]))
    return {name: found[name] for name in _PARTS if found.get(name)}


_PARTS = (
    "_schema", "_init_fn", "_backend_fns", "_abstract_fn", "_setup_context_fn", "_backward_fn",
    "_torch_dispatch_fns", "_vmap_fn", "_autocast_dtype", "_disabled_kernel",
)  # fmt: skip


def operators_in(spaces: Collection[str]) -> dict[str, Any]:
    """Return the user's operators in some namespaces that ``custom_op`` has made, by name."""
    return {
        name: operator
        for name, operator in sorted(OPDEFS.items())
        if name.partition("::")[0] in spaces and is_own(operator._init_fn)
    }


def libraries_in(spaces: Collection[str]) -> Iterator[ModuleType]:
    """Yield the user's modules that make a ``torch.library.Library`` for some namespaces.

    PyTorch keeps no reference to the functions that a library registers, but it knows the file.
    """
    others = frozenset(spaces) - _PYTORCHS_OWN
    files: set[str] = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.partition("::")[0] in others:
            files |= {*_REGISTERED.findall(torch._C._dispatch_dump(name))}
    files = {file for file in files if is_own_file(file)}
    for module in list(sys.modules.values()) if files else ():
        if vars_of(module).get("__file__") in files:
            yield module


_PYTORCHS_OWN = frozenset({"aten", "prim", "prims", "quantized"})
_REGISTERED = re.compile(r"registered at (.+?):\d+")


def functions_in(module: ModuleType) -> list[str]:
    """Return the names of the user's functions in a module."""
    return [k for k, v in vars(module).items() if isinstance(v, FunctionType) and is_own(v)]
