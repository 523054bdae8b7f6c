"""Readable names of functions and classes, without the module in which a task is written."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ._own import import_name, is_own_module, module_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names as seen from the module ``home``."""

    home: str

    def label(self, module: str, name: str) -> str:
        """Return a name in a module: ``"helpers.scale"``, or ``"scale"`` in the home module."""
        module = import_name(module)
        return name if module in (self.home, "__main__") else f"{module}.{name}"

    def of(self, thing: Any) -> str:
        """Return the name of a function or a class, as it states it itself.

        For installed packages, modules whose names begin with an underscore are left out.
        """
        name = getattr(thing, "__qualname__", type(thing).__qualname__)
        if isinstance(thing, type):
            module = module_name(thing)
        else:
            module = getattr(thing, "__module__", None) or "__main__"
        return self.label(module if is_own_module(module) else _public(module), name)

    def of_code(self, function: FunctionType) -> str:
        """Return the name of a function as it was compiled, ignoring ``functools.wraps``."""
        return self.label(_public(module_name(function)), function.__code__.co_qualname)


def _public(module: str) -> str:
    if module.partition(".")[0] == "thrifty":
        return "thrifty"  # its objects may move between its modules
    return ".".join(part for part in module.split(".") if not part.startswith("_")) or module
