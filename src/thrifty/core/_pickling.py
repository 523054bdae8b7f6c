"""Bytes of a user's code and objects, for other processes of the same study."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import cloudpickle


_CACHED = type(lru_cache(len))


def pickled(value: Any) -> bytes:
    """Return the bytes of an object; code that another process cannot import is among them.

    Unlike ``cloudpickle.dumps``, it takes functions under ``functools.lru_cache`` that a script
    itself defines, and properties under ``functools.cached_property``. The cache of such a function
    is empty in the other process.

    Args:
        value: An object, such as a task.

    Example::

        pickle.loads(pickled(lru_cache(lambda n: n + 1)))(1)  # 2
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _CACHED and not _can_be_imported(obj):
            # attributes travel as state, which may refer to the function itself
            own = {name: value for name, value in vars(obj).items() if name != "__wrapped__"}
            args = (obj.__wrapped__, obj.cache_parameters())
            return _cached, args, own or None, None, None, _set_attributes
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and _is_imported(obj):
            # such as torch.backends.cudnn, whose settings are properties of a class of its own
            return import_module, (obj.__name__,)
        if type(obj) is cached_property:  # Python 3.11 gives it a lock, which cannot be pickled
            return _property, (obj.func, obj.attrname, obj.__doc__)
        return super().reducer_override(obj)


def _is_imported(module: ModuleType) -> bool:
    """Return whether another process finds a module under its name."""
    name = module.__name__
    return name != "__main__" and sys.modules.get(name) is module


def _can_be_imported(function: Any) -> bool:
    name = function.__module__
    if name == "__main__" or name in cloudpickle.list_registry_pickle_by_value():
        return False
    found: Any = sys.modules.get(name)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = lru_cache(**parameters)(function)
    return made


def _set_attributes(function: Callable[..., Any], attributes: Mapping[str, Any]) -> None:
    vars(function).update(attributes)


def _property(
    function: Callable[[Any], Any], name: str | None, doc: str | None
) -> cached_property[Any]:
    made = cached_property(function)
    made.attrname, made.__doc__ = name, doc
    return made
