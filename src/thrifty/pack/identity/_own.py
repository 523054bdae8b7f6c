"""Whose code something is: the user's own, or that of an installed package."""

from __future__ import annotations

import functools
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


_THRIFTY = Path(__file__).resolve().parents[2]
_STANDARD = tuple({
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")
})
_HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has made."""
_ALWAYS_INSTALLED = frozenset({"numpy", "torch"})
"""Too large to walk where somebody has built them from source."""


def is_own_module(name: str) -> bool:
    """Whether a module is the user's own code.

    The standard library, packages in ``site-packages`` and thrifty itself are not. A package that
    is installed in editable mode lies in its source folder, so it counts as the user's own.
    ``thrifty.testing`` holds example tasks: these count as if a user had written them.
    """
    if (
        name == "__main__"
    ):  # in a worker, `__main__` is a module of thrifty's, its classes the user's
        return True
    top = name.partition(".")[0]
    if top in _ALWAYS_INSTALLED or name.startswith("namedtuple_"):
        return False
    file = _file_of(sys.modules.get(name)) or _file_of(sys.modules.get(top)) or _found_file(top)
    if file is not None:
        return is_own_file(file)
    return top not in sys.stdlib_module_names and top not in sys.builtin_module_names


def is_there(name: str) -> bool:
    """Whether a module, or the package that it would be in, can be found."""
    return _found_file(name.partition(".")[0]) is not None


def is_written_in_a_file(name: str) -> bool:
    """Whether a module is loaded and comes from a file; some that compilers make up do not."""
    return _file_of(sys.modules.get(name)) is not None


def is_own(thing: Any) -> bool:
    """Whether a function, a class or a module is the user's own code."""
    name = module_name(thing)
    if not is_own_module(name):
        return False
    return not isinstance(thing, type) or _is_written(thing) or is_written_in_a_file(name)


def _is_written(kind: type) -> bool:
    """Whether Python code has made a class; compiled packages make some in modules of no file."""
    return (
        "__dict__" in vars(kind)
        or "__slots__" in vars(kind)
        or any(isinstance(member, FunctionType) for member in vars(kind).values())
    )


def is_installed(thing: Any) -> bool:
    """Whether a function or a class can be imported from an installed package by its name."""
    name = getattr(thing, "__module__", None)
    return isinstance(name, str) and not is_own_module(name) and is_importable(thing)


def is_importable(thing: Any) -> bool:
    """Whether a function or a class is what its module has under its name."""
    found: Any = sys.modules.get(getattr(thing, "__module__", None) or "")
    for part in getattr(thing, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is thing


def module_name(thing: Any) -> str:
    """The module that the code of a function, a class or a module lies in.

    ``functools.wraps`` copies ``__module__``, so a function is asked for its globals.
    """
    if isinstance(thing, FunctionType):
        name = thing.__globals__.get("__name__")
    elif isinstance(thing, ModuleType):
        name = thing.__name__
    else:
        name = getattr(thing, "__module__", None)
        if name == "builtins" and isinstance(thing, type) and thing.__flags__ & _HEAP_TYPE:
            name = None  # made by `exec` in a namespace without a name
    if isinstance(name, str):
        return name
    return "__main__" if isinstance(thing, type | FunctionType) else "builtins"


def import_name(name: str) -> str:
    """The name under which a module would be imported: a script's file name for ``__main__``.

    ``python task.py`` and ``thrifty run task.py`` then agree.
    """
    if name != "__main__":
        return name
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).stem if file and Path(file).is_file() else name


def _file_of(module: ModuleType | None) -> str | None:
    """The file or the folder that a module comes from; none if it is built in or made by hand."""
    inside = getattr(module, "__dict__", {})  # ``sys.modules`` may hold objects of other types
    folders = inside.get("__path__")  # of a package without an `__init__.py`
    file = inside.get("__file__") or next(iter(folders or ()), None)
    return file if isinstance(file, str) else None


@functools.cache
def _found_file(top: str) -> str | None:
    """The same for a top-level module that nobody has imported yet."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return (
        spec.origin
        if spec.has_location
        else next(iter(spec.submodule_search_locations or ()), None)
    )


@functools.cache
def is_own_file(file: str) -> bool:
    """Whether a file is the user's own code, by the folder that it lies in."""
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    path = path.resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if path.is_relative_to(_THRIFTY):
        return path.is_relative_to(_THRIFTY / "testing")
    return not any(path.is_relative_to(folder) for folder in _STANDARD)
