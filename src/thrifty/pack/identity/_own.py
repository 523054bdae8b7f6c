"""Whether code is the user's own or a package's; which members of a class the user wrote.

Also the user's operators, which PyTorch calls by name, as in ``torch.ops.mine.scale(x)``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from ._place import vars_of


_THRIFTY = Path(__file__).resolve().parents[2]
_STANDARD = tuple({
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")
})
_HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has made."""
_ALWAYS_INSTALLED = frozenset({"numpy", "torch"})
"""Packages that are too large to search, even where they are built from source."""


def is_own_module(name: str) -> bool:
    """Return whether a module is the user's own code.

    The standard library, packages in ``site-packages`` and thrifty itself are not. A package
    installed in editable mode is in its source folder, so it counts as the user's own.
    ``thrifty.testing`` holds example tasks, which count as if a user had written them.
    """
    # in a worker, `__main__` is one of thrifty's modules, but its classes are the user's
    if name == "__main__":
        return True
    top = name.partition(".")[0]
    if top in _ALWAYS_INSTALLED or name.startswith("namedtuple_"):
        return False
    file = _file_of(sys.modules.get(name)) or _file_of(sys.modules.get(top)) or _found_file(top)
    if file is not None:
        return is_own_file(file)
    return top not in sys.stdlib_module_names and top not in sys.builtin_module_names


def is_there(name: str) -> bool:
    """Return whether a module, or its top-level package, can be found."""
    return _found_file(name.partition(".")[0]) is not None


def is_written_in_a_file(name: str) -> bool:
    """Return whether a module is loaded from a file; some that compilers generate are not."""
    return _file_of(sys.modules.get(name)) is not None


def is_own(thing: Any) -> bool:
    """Return whether a function, a class or a module is the user's own code."""
    name = module_name(thing)
    if not is_own_module(name):
        return False
    return not isinstance(thing, type) or _is_written(thing) or is_written_in_a_file(name)


def _is_written(kind: type) -> bool:
    """Return whether Python code made a class; compiled packages make some in no file's module."""
    return (
        "__dict__" in vars(kind)
        or "__slots__" in vars(kind)
        or any(isinstance(member, FunctionType) for member in vars(kind).values())
    )


def is_installed(thing: Any) -> bool:
    """Return whether a function or class can be imported from an installed package by name."""
    name = getattr(thing, "__module__", None)
    return isinstance(name, str) and not is_own_module(name) and is_importable(thing)


def is_importable(thing: Any) -> bool:
    """Return whether a function or a class is the object that its module has under its name."""
    found: Any = sys.modules.get(getattr(thing, "__module__", None) or "")
    for part in getattr(thing, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is thing


def module_name(thing: Any) -> str:
    """Return the module that contains the code of a function, a class or a module.

    ``functools.wraps`` copies ``__module__``, so the module of a function is read from its globals.
    """
    if isinstance(thing, FunctionType):
        name = thing.__globals__.get("__name__")
    elif isinstance(thing, ModuleType):
        name = thing.__name__
    else:
        name = getattr(thing, "__module__", None)
        if isinstance(thing, type) and _is_mislabelled(thing, name):
            name = _maker_of(thing)
    if isinstance(name, str):
        return name
    return "__main__" if isinstance(thing, type | FunctionType) else "builtins"


def _is_mislabelled(kind: type, name: object) -> bool:
    """Return whether a class names a module that made it for other code.

    ``type(...)`` names ``abc`` for an abstract base's subclasses, ``make_dataclass`` names
    ``types``, and ``exec`` in a namespace without a name gives ``builtins``.
    """
    if not kind.__flags__ & _HEAP_TYPE:
        return False
    return name == "builtins" or (name in _CLASS_MAKERS and not is_importable(kind))


_CLASS_MAKERS = frozenset({"abc", "types", "dataclasses", "enum", "functools", "typing"})
"""Modules of the standard library that make classes for their callers."""


def _maker_of(kind: type) -> str | None:
    """Return the module of the code in a class, else that of its first own base; None if unknown.

    Code of packages counts as well, because a package may make such a class.
    """
    for member in vars(kind).values():
        function = getattr(member, "__func__", member)
        if isinstance(function, FunctionType) and function.__globals__.get("__name__"):
            made = str(function.__globals__["__name__"])
            if made not in _CLASS_MAKERS and made not in sys.stdlib_module_names:
                return made
    for base in kind.__mro__[1:]:
        name = getattr(base, "__module__", None)
        if isinstance(name, str) and not _is_mislabelled(base, name) and is_own_module(name):
            return name
    return None


def import_name(name: str) -> str:
    """Return the name under which a module would be imported.

    For ``__main__`` it is the script's file name, so that ``python task.py`` and
    ``thrifty run task.py`` agree.
    """
    if name != "__main__":
        return name
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).stem if file and Path(file).is_file() else name


def _file_of(module: ModuleType | None) -> str | None:
    """Return the file or folder of a module; None if it is built in or created by code."""
    inside = getattr(module, "__dict__", {})  # ``sys.modules`` may hold objects of other types
    folders = inside.get("__path__")  # of a package without an `__init__.py`
    file = inside.get("__file__") or next(iter(folders or ()), None)
    return file if isinstance(file, str) else None


def _found_file(top: str) -> str | None:
    """Return the file or folder of a top-level module that is not imported yet."""
    return _file_in(top, tuple(sys.path))


@functools.lru_cache(maxsize=4096)
def _file_in(top: str, folders: tuple[str, ...]) -> str | None:  # noqa: ARG001
    """Return the file or folder of a module while the search path is as given."""
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
    """Return whether a file is the user's own code, by the folder it is in."""
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    path = path.resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if path.is_relative_to(_THRIFTY):
        return path.is_relative_to(_THRIFTY / "testing")
    return not any(path.is_relative_to(folder) for folder in _STANDARD)


def subclasses_of(kind: type) -> list[type]:
    """Return the user's subclasses of a class, in the order in which Python lists them.

    A class that was defined again, or that ``dataclass`` replaced, is left out: it is listed until
    Python collects garbage.
    """
    listed: list[type] = type.__subclasses__(kind)
    own = [each for each in listed if is_own(each)]
    current = {(each.__module__, each.__qualname__) for each in own if is_importable(each)}
    return [
        each
        for each in own
        if is_importable(each) or (each.__module__, each.__qualname__) not in current
    ]


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the members of one class, without its bases and without what Python itself adds.

    Methods that ``dataclass`` or ``namedtuple`` generate are left out, because they follow from the
    fields. Default factories of fields are named ``field.default_factory``. Of an ``Enum`` only
    what its author wrote besides its enumeration members is a member here.
    """
    made = _NAMED_TUPLE_MADE if _is_named_tuple(kind) else frozenset[str]()
    for name, member in list(vars(kind).items()):
        if name in PYTHONS_OWN or name in made or _is_generated(member):
            continue
        if name == "__match_args__" and member == _made_match_args(kind):
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


def field_parts_of(kind: type) -> Iterator[tuple[dataclasses.Field[Any], str]]:
    """Yield what fields of a dataclass hold that no attribute of the class shows.

    Each part is a field and the name of its slot: ``"default"``, ``"default_factory"`` or
    ``"metadata"``. Inherited fields are left out, because they are fields of a base class.

    With ``slots=True``, descriptors take the place of the attributes that hold the defaults. A
    factory that is a named function or class is reached as such, and so is a lambda if the class
    has only one.
    """
    lambdas = 0
    for field in own_fields_of(kind):
        factory = field.default_factory
        if field.metadata:
            yield field, "metadata"
        if field.default is not dataclasses.MISSING and not _shows_default(kind, field):
            yield field, "default"
        if factory is dataclasses.MISSING:
            continue
        lambdas += isinstance(factory, FunctionType) and not is_importable(factory)
        is_named = isinstance(factory, type | FunctionType) and lambdas < 2
        if not is_named or isinstance(vars(kind).get(field.name), MemberDescriptorType):
            yield field, "default_factory"


def own_fields_of(kind: type) -> Iterator[dataclasses.Field[Any]]:
    """Yield the fields of a dataclass that it declares itself, with those of ``InitVar``."""
    inherited = {
        id(field)
        for base in kind.__mro__[1:]
        for field in vars(base).get("__dataclass_fields__", {}).values()
    }
    for field in vars(kind).get("__dataclass_fields__", {}).values():
        if isinstance(field, dataclasses.Field) and id(field) not in inherited:
            yield field


def _shows_default(kind: type, field: dataclasses.Field[Any]) -> bool:
    """Return whether the attribute of a class shows the default of a field."""
    shown = vars(kind).get(field.name, dataclasses.MISSING)
    if shown is dataclasses.MISSING or isinstance(shown, MemberDescriptorType):
        return False
    # a descriptor, such as a static method, gives the default
    return shown is field.default or hasattr(type(shown), "__get__")


def positional_of(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's positional arguments in order, with those of ``InitVar``.

    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: float
    ...     scale: dataclasses.InitVar[float]
    ...     name: str = dataclasses.field(kw_only=True)
    >>> positional_of(Point)
    ('x', 'scale')
    """
    return tuple(
        field.name
        for field in vars(kind)["__dataclass_fields__"].values()
        if field.init and not field.kw_only and not is_class_var(field)
    )


def is_class_var(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field is a ``ClassVar``, which ``dataclass`` only records."""
    return getattr(field, "_field_type", None) is getattr(dataclasses, "_FIELD_CLASSVAR", ())


def has_init_vars(kind: type) -> bool:
    """Return whether a dataclass has an ``InitVar``, which ``dataclasses.fields`` leaves out."""
    known = vars(kind)["__dataclass_fields__"]
    num_class_vars = sum(map(is_class_var, known.values()))
    return len(known) > len(dataclasses.fields(kind)) + num_class_vars


def _made_match_args(kind: type) -> tuple[str, ...] | None:
    """Return the ``__match_args__`` that ``dataclass`` or ``namedtuple`` makes, if one does."""
    if "__dataclass_fields__" in vars(kind):
        return positional_of(kind)
    fields: tuple[str, ...] | None = vars(kind)["_fields"] if _is_named_tuple(kind) else None
    return fields


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and "_fields" in vars(kind)


def _is_generated(member: Any) -> bool:
    """Return whether ``dataclass`` has generated a method."""
    function = getattr(member, "__func__", member)
    if isinstance(function, FunctionType) and function.__globals__.get("__name__") == "reprlib":
        function = getattr(function, "__wrapped__", function)  # its __repr__, from Python 3.13 on
    return isinstance(function, FunctionType) and (
        function.__code__.co_qualname.startswith("__create_fn__.")
        or function.__globals__.get("__name__") == "dataclasses"
    )


def _is_enums_own(kind: type, name: str, *, member: Any) -> bool:
    """Return whether a member of an enumeration is a value of it, or is Python's own."""
    if isinstance(member, kind):
        return name in vars(kind)["_member_map_"]
    function = getattr(member, "__func__", member)
    code = [each for each in (function, *_in_property(member)) if isinstance(each, FunctionType)]
    if any(each.__globals__.get("__name__") == "enum" for each in code):
        return True
    if name == "__new__" or isinstance(member, _BUILT_IN):
        return True
    if name == "__hash__" and member is None:  # of a class that defines `__eq__`
        return True
    return not code and (name in _ENUM_MADE or type(member).__module__ == "enum")


def _in_property(member: Any) -> tuple[Any, ...]:
    if not isinstance(member, enum.property):
        return ()
    return (member.fget, member.fset, member.fdel)


class _Probe(enum.Flag):
    ONE = 1


_ENUM_MADE = frozenset(name for name in vars(_Probe) if name.startswith("_") and name.endswith("_"))
"""What this version of Python adds to an enumeration."""


PYTHONS_OWN = frozenset({
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__",
    "__annotations_cache__", "__classcell__", "__classdict__", "__classdictcell__",
    "__conditional_annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__",
    "__doc__", "__firstlineno__", "__module__", "__orig_bases__", "__parameters__",
    "__protocol_attrs__", "__qualname__", "__replace__", "__slotnames__", "__slots__",
    "__static_attributes__", "__type_params__", "__weakref__", "_abc_impl", "_is_protocol",
    "_is_runtime_protocol", "__non_callable_proto_members__",
    "__pydantic_core_schema__", "__pydantic_serializer__", "__pydantic_validator__",
})  # fmt: skip
"""What Python itself adds to a class, in part with an address or a line number.

So does pydantic: what it compiles of the fields, validators and options of a model.
"""

_NAMED_TUPLE_MADE = frozenset({
    "__new__", "__getnewargs__", "__repr__", "_asdict", "_field_defaults", "_fields", "_make",
    "_replace",
})  # fmt: skip

_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


# -- operators ----------------------------------------------------------------------------


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
