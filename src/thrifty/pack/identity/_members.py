"""The members of a class that its author wrote."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the members of one class, without its bases and without what Python itself adds.

    Methods that ``dataclass`` or ``namedtuple`` generate are left out, because they follow from the
    fields. Default factories of fields are named ``field.default_factory``. Of an ``Enum`` only
    the methods are members here; its enumeration members are values.
    """
    made = _NAMED_TUPLE_MADE if _is_named_tuple(kind) else frozenset[str]()
    for name, member in list(vars(kind).items()):
        if name in PYTHONS_OWN or name in made or _is_generated(member):
            continue
        if isinstance(member, _DESCRIPTORS) or type(member).__name__ == "_tuplegetter":
            continue
        if issubclass(kind, enum.Enum) and _is_enums_own(kind, name, member=member):
            continue
        yield name, member
    if "__dataclass_fields__" in vars(kind):
        for field in dataclasses.fields(kind):
            if field.default_factory is not dataclasses.MISSING:
                yield f"{field.name}.default_factory", field.default_factory


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and "_fields" in vars(kind)


def _is_generated(member: Any) -> bool:
    """Return whether ``dataclass`` has generated a method."""
    function = getattr(member, "__func__", member)
    return isinstance(function, FunctionType) and (
        function.__code__.co_qualname.startswith("__create_fn__.")
        or function.__globals__.get("__name__") == "dataclasses"
    )


def _is_enums_own(kind: type, name: str, *, member: Any) -> bool:
    return (
        isinstance(member, (kind, *_BUILT_IN))
        or type(member).__module__ == "enum"
        or (
            name.startswith("_") and name.endswith("_") and not isinstance(member, FunctionType)
        )
        or (isinstance(member, FunctionType) and member.__globals__.get("__name__") == "enum")
        or name == "__new__"
    )


PYTHONS_OWN = frozenset({
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__",
    "__annotations_cache__", "__classcell__", "__classdict__", "__classdictcell__",
    "__conditional_annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__",
    "__doc__", "__firstlineno__", "__match_args__", "__module__", "__orig_bases__",
    "__parameters__", "__protocol_attrs__", "__qualname__", "__replace__", "__slotnames__",
    "__slots__", "__static_attributes__", "__type_params__", "__weakref__", "_abc_impl",
    "_is_protocol", "_is_runtime_protocol", "__non_callable_proto_members__",
})  # fmt: skip
"""What Python itself adds to a class, in part with an address or a line number."""

_NAMED_TUPLE_MADE = frozenset({
    "__new__", "__getnewargs__", "__repr__", "_asdict", "_field_defaults", "_fields", "_make",
    "_replace",
})  # fmt: skip

_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
