"""The content of a class apart from its members: its bases and the options of its decorator."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from ._own import is_own_module, module_name
from ._plain import Names, digest
from ._source import extension_digest
from ._values import Values


def class_digest(kind: type, *, names: Names, values: Values) -> str:
    """Return the digest of a class; its functions and attributes have digests of their own.

    Raises:
        TaskError: A member of an enumeration has no content.
    """
    name = names.of(kind)
    parts: list[Any] = [[names.of(base) for base in kind.__bases__], names.of(type(kind))]
    if "__dataclass_fields__" in vars(kind):
        told = vars(kind)["__dataclass_params__"]
        parts.append([(option, getattr(told, option)) for option in _OPTIONS])
        parts.append([
            (field.name, field.init, field.repr, field.hash, field.compare, field.kw_only)
            for field in dataclasses.fields(kind)
        ])
    if issubclass(kind, tuple) and "_fields" in vars(kind):
        parts.append((vars(kind)["_fields"], dict(vars(kind).get("_field_defaults", {}))))
    if issubclass(kind, enum.Enum):
        members = vars(kind)["_member_map_"]
        parts.append([(key, member._value_) for key, member in members.items()])
    module = module_name(kind)
    if is_own_module(module):
        parts.append(extension_digest(module))
    return digest(values.digest(parts, path=name))


_OPTIONS = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
"""The options of ``dataclass`` that every supported version of Python has."""
