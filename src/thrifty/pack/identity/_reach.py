"""A search for what the user's own code reaches: functions, classes, and places that they read."""

from __future__ import annotations

import builtins
import enum
import functools
import importlib.util
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from ._arrays import hooks_of
from ._contents import (
    CONTAINERS,
    NEUTRAL,
    Names,
    code_behind,
    elements,
    inside_of,
    is_a,
    is_plain,
    names_called_by,
    short,
)
from ._own import (
    field_parts_of,
    functions_in,
    import_name,
    is_installed,
    is_own,
    is_own_module,
    libraries_in,
    members_of,
    module_name,
    operators_in,
    subclasses_of,
)
from ._place import MISSING, Place, PlaceKind, slots_of, vars_of
from ._syntax import Import, Mentions, mentions
from ._unnamed import imported_module, modules_by_name
from ._values import not_vouched_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A function or class of the user's own that was found, with a readable name."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The findings of a search from some roots.

    Attributes:
        places: The variables and attributes that the user's code reads.
        functions: The user's own functions.
        classes: The user's own classes.
        packages: Import names of the installed packages that are used.
        mentioned: All names that may be attributes, in the code of all functions found; names
            that only ``__init__`` assigns are not among them.
        subclasses: Names of the user's subclasses of each class whose subclasses code may list,
            in the order in which Python lists them.
        operators: The user's operators that code may call through ``torch.ops``.
        inside: What was found directly in each object, by its id.
    """

    places: tuple[Place, ...]
    functions: tuple[Reached, ...]
    classes: tuple[Reached, ...]
    packages: frozenset[str]
    mentioned: frozenset[str]
    subclasses: Mapping[str, Sequence[str]]
    operators: Mapping[str, Any]
    inside: Mapping[int, Sequence[Any]]

    def code_in(self, value: Any) -> list[Any]:
        """Return the functions, classes and modules that a value leads to, not what these reach."""
        out, queue, seen = [], [value], set[int]()
        while queue:
            each = queue.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if is_a(each, type | FunctionType | ModuleType):
                out.append(each)
            else:
                queue += self.inside.get(id(each), ())
        return out


def reach(
    roots: Mapping[str, Any] | Iterable[Any],
    *,
    home: str | None = None,
    without: Collection[str] = (),
    instead: Callable[[Any], Any] | None = None,
    values_at: Callable[[Place], Iterable[Any]] | None = None,
    places: Iterable[Place] = (),
    values: Mapping[str, Any] | None = None,
) -> Reach:
    """Find what functions, classes and instances of the user's own code read.

    None of the user's code runs, except that a module which a function imports is imported.

    Args:
        roots: Functions, methods, classes, instances, ``functools.partial``, ``nn.Module``; a
            mapping gives instances a name.
        home: The module whose names are given without it; by default that of the first root.
        without: Names of members of the roots that are left out.
        instead: Returns a substitute for the attributes of an instance, or ``MISSING``.
        values_at: Returns what the search follows at a place (default: its value).
        places: Additional places that are read.
        values: Additional values that are reached, by name; ``without`` does not apply to them.

    Example::

        SCALE = 2.0


        def scaled(x, offset=1):
            return SCALE * x + offset


        [(place.name, place.get()) for place in reach([scaled]).places]
        # [("scaled default 'offset'", 1), ("SCALE", 2.0)]
    """
    named = list(roots.items()) if isinstance(roots, Mapping) else [("", r) for r in roots]
    if home is None and named:
        home = module_name(_code_of(named[0][1]))
    walk = _Walk(
        import_name(home or "__main__"), without=without, instead=instead, values_at=values_at
    )
    for name, root in named:
        walk.add_root(root, name)
    walk.add(places, values or {})
    return walk.run()


class _Walk:
    """A breadth-first search through everything that is found; it visits each object once."""

    def __init__(
        self,
        home: str,
        *,
        without: Collection[str],
        instead: Callable[[Any], Any] | None,
        values_at: Callable[[Place], Iterable[Any]] | None,
    ) -> None:
        self._names = Names(home=home)
        self._without = frozenset(without)
        self._instead = instead or _nothing
        self._values_at = values_at
        self._queue: deque[tuple[Any, str]] = deque()
        self._roots: set[int] = set()
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self._places: dict[tuple[int, Any], Place] = {}
        self._functions: dict[int, Reached] = {}
        self._classes: dict[int, Reached] = {}
        self._packages: set[str] = set()
        self._mentioned: set[str] = set()
        self._handed_on: dict[str, ModuleType] = {}
        self._read_whole: set[str] = set()
        self._read_deep: set[str] = set()
        self._root_modules: set[str] = set()
        self._subclasses: dict[str, list[str]] = {}
        self._listed: set[type] = set()
        self._namespaces: set[str] = set()
        self._operators: dict[str, Any] = {}
        self._inside: dict[int, list[Any]] = {}
        self._visited: int | None = None
        """The id of the object that is visited now."""

    def add_root(self, root: Any, name: str) -> None:
        self._roots.add(id(root))
        self._root_modules.add(module_name(_code_of(root)))
        if not is_a(root, type | FunctionType):
            self._roots.add(id(type(root)))
        self._queue.append((root, name or self._names.of(_code_of(root))))

    def add(self, places: Iterable[Place], values: Mapping[str, Any]) -> None:
        for place in places:
            self._note(place)
        for name, value in values.items():
            self._follow(value, name)

    def run(self) -> Reach:
        before: tuple[int, ...] | None = None
        while self._queue or before != self._sizes():
            before = self._sizes()
            while self._queue:
                value, name = self._queue.popleft()
                self._visited = id(value)
                self._visit(value, name)
            self._visited = None
            for name, module in list(self._handed_on.items()):
                whole = name in self._read_whole
                self._read_module(module, vars(module) if whole else self._mentioned)
            self._list_subclasses()
            self._find_operators()
        return Reach(
            places=tuple(self._places.values()),
            functions=tuple(self._functions.values()),
            classes=tuple(self._classes.values()),
            packages=frozenset(self._packages),
            mentioned=frozenset(self._mentioned),
            subclasses=self._subclasses,
            operators=self._operators,
            inside=self._inside,
        )

    def _sizes(self) -> tuple[int, ...]:
        """Return how much is known, which grows as long as the search finds more."""
        known = (self._places, self._handed_on, self._read_whole, self._mentioned)
        return tuple(len(each) for each in known)

    # -- values ------------------------------------------------------------------------

    def _visit(self, value: Any, name: str) -> None:
        # All modules of the process are in `sys.modules`: those that code finds there are followed.
        if is_plain(value) or value is sys.modules or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if is_a(value, type):
            self._visit_class(value)
        elif is_a(value, FunctionType):
            self._visit_function(value)
        elif is_a(value, ModuleType):
            self._visit_module(value)
        elif is_a(value, CONTAINERS) or (is_a(value, np.ndarray) and value.dtype.hasobject):
            self._visit_elements(value, name)
        elif is_a(value, torch.Tensor | np.ndarray):
            self._visit_array(value, name)
        elif is_a(value, weakref.ref | weakref.finalize):
            self._follow(code_behind(value), name)
        elif not is_a(value, NEUTRAL):
            self._visit_instance(value, name)

    def _visit_elements(self, value: Any, name: str) -> None:
        self._follow(type(value), "")
        for key, each in elements(value):
            self._follow(each, f"{name}{key}")
        self._read_attributes(value, name)

    def _visit_array(self, value: Any, name: str) -> None:
        """Follow the class of a tensor or an array, its hooks and its attributes."""
        if is_a(value, torch.Tensor) or is_own(type(value)):
            self._follow(type(value), "")
        if is_a(value, torch.Tensor):
            self._follow(hooks_of(value), name)
        for key, each in vars_of(value).items():
            self._follow(each, f"{name}.{key}")

    def _follow(self, value: Any, name: str) -> None:
        if is_plain(value):
            return
        if self._visited is not None:
            self._inside.setdefault(self._visited, []).append(value)
        if id(value) not in self._seen:
            self._queue.append((value, name))

    def _visit_instance(self, value: Any, name: str) -> None:
        self._follow(type(value), "")
        self._mentioned |= names_called_by(value)
        wrapped = inside_of(value)
        for each in wrapped:
            self._follow(each, name)
        if is_a(value, functools.partial):
            if value.func is getattr:
                for each in value.args:
                    if is_a(each, ModuleType):
                        self._visit_module(each, whole=True, deep=True)
            for key in value.keywords:
                self._note_place("item", value.keywords, key, name=f"{name} keyword {key!r}")
        if is_a(value, enum.Enum):
            self._follow(value._value_, name)
        elif not wrapped:
            stand_in = self._instead(value)
            if stand_in is MISSING:
                self._read_attributes(value, name)
            else:
                self._follow(stand_in, name)
                self._read_attributes(value, name, only=not_vouched_for(value))

    def _read_attributes(
        self, value: Any, name: str, *, only: Collection[str] | None = None
    ) -> None:
        own = is_own(type(value)) or id(value) in self._roots or is_a(value, torch.nn.Module)
        skipped: Collection[str] = self._without if id(value) in self._roots else ()
        if type(value).__module__.partition(".")[0] == "pandas":
            skipped = _CACHES_OF_PANDAS
        for key in list(vars_of(value)):
            if key in skipped or (only is not None and key not in only):
                continue
            where = f"{name}.{key}"
            if is_a(value, torch.nn.Module) and key in _MODULE_TABLES:
                self._visit_module_table(vars_of(value)[key], key, name)
            elif is_a(key, str):
                self._note_place("attribute", value, key, name=where, own=own)
        for key in slots_of(type(value)):
            if key not in skipped and (only is None or key in only):
                self._note_place("slot", value, key, name=f"{name}.{key}", own=own)

    def _visit_module_table(self, table: Any, key: str, name: str) -> None:
        """Follow the children and hooks of an ``nn.Module``; other code handles its tensors."""
        for child, each in list((table or {}).items()) if is_a(table, Mapping) else ():
            inner = f"{name}.{child}" if key == "_modules" else f"{name}.{key}[{short(child)}]"
            self._follow(each, inner)

    # -- code --------------------------------------------------------------------------

    def _visit_function(self, function: FunctionType) -> None:
        name = self._names.of(function)
        own = is_own(function)
        if own:
            self._functions[id(function)] = Reached(name=name, value=function)
            self._read_defaults(function, name)
        elif is_installed(function):
            self._note_package(function.__module__)
            return
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._read_cell(cell, variable, name=name, own=own)
        for key in vars_of(function):
            if key == "__wrapped__":
                self._follow(vars_of(function)[key], name)
            elif own:
                self._note_place("attribute", function, key, name=f"{name}.{key}")
        if own:
            self._read_globals(function)

    def _read_defaults(self, function: FunctionType, name: str) -> None:
        code, values = function.__code__, function.__defaults__ or ()
        parameters = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
        for index, parameter in enumerate(parameters):
            self._note_place("default", function, index, name=f"{name} default {parameter!r}")
        for parameter in function.__kwdefaults__ or {}:
            self._note_place("default", function, parameter, name=f"{name} default {parameter!r}")

    def _read_cell(self, cell: CellType, variable: str, *, name: str, own: bool) -> None:
        place = Place(
            name=f"{name}.<closure>.{variable}", kind="closure", holder=cell, key=variable, own=own
        )
        value = place.get()
        if own and variable != "__class__":
            self._places.setdefault((id(cell), 0), place)
            self._seen.setdefault(id(cell), cell)
        self._follow_from(value, place.name)

    def _read_globals(self, function: FunctionType) -> None:
        found = mentions(function.__code__)
        self._mentioned |= found.attributes
        if function.__name__ != "__init__":
            self._mentioned |= found.stored
        names = function.__globals__
        others = {n for n in names if not n.startswith("__")} if found.reads_all else ()
        for each in sorted(found.globals.union(others)):
            if each in names or not _is_builtin(names, each):  # it may be defined later
                self._read_global(names, each)
            self._read_module(names.get(each), found.attributes)
        if found.reads_all:
            for each in others:
                self._visit_own_module(names[each], found)
        self._read_chains(found, names)
        for imported in found.imports:
            self._read_import(imported, function=function)
        for cell in function.__closure__ or ():
            with suppress(ValueError):
                if is_a(cell.cell_contents, ModuleType):
                    self._read_module(cell.cell_contents, found.attributes)
                    self._visit_found_module(cell.cell_contents, found)
        for module in modules_by_name(found, names, homes=self._root_modules):
            self._visit_module(module, whole=True, deep=found.computes_paths)

    def _read_chains(self, found: Mentions, names: Mapping[str, Any]) -> None:
        for first, *rest in sorted(found.chains):
            module = self._ask(names.get(first), rest)
            if module is not None:
                self._visit_found_module(module, found)
            if "__subclasses__" in rest:
                self._list(names.get(first), rest)

    def _read_import(self, statement: Import, *, function: FunctionType) -> None:
        space = function.__globals__
        package = space.get("__package__") or str(space.get("__name__", "")).rpartition(".")[0]
        try:
            full = importlib.util.resolve_name("." * statement.level + statement.module, package)
        except ImportError:
            return
        found = mentions(function.__code__)
        module = imported_module(full)
        bound: list[Any] = []
        if module is None:
            self._note_package(full)
        elif not statement.names:
            bound = [imported_module(full.partition(".")[0]), module]
        elif "*" not in statement.names:
            self._read_module(module, statement.names)
            for name in statement.names:
                self._ask(module, (name,))
                known = vars(module).get(name)
                bound.append(imported_module(f"{full}.{name}") if known is None else known)
        for each in bound:
            self._read_module(each, found.attributes)
            self._read_getattr(each)
            if statement.handed_on and is_a(each, ModuleType):
                self._visit_found_module(each, found)

    def _visit_own_module(self, module: Any, found: Mentions) -> None:
        """Record that code may find a module among the globals, by a name that it computes."""
        if is_a(module, ModuleType) and is_own_module(module.__name__):
            whole = found.computes or found.evaluates
            self._visit_module(module, whole=whole, deep=found.computes_paths or found.evaluates)

    def _visit_found_module(self, module: ModuleType, found: Mentions) -> None:
        self._visit_module(
            module, whole=found.computes, deep=found.computes and found.computes_paths
        )

    def _visit_module(self, module: ModuleType, *, whole: bool = False, deep: bool = False) -> None:
        """Record a module used as a value: any code may read names of it.

        Args:
            module: The module.
            whole: Whether code may read all of it.
            deep: Whether code may do so with each of the user's modules that it has.
        """
        if is_own_module(module.__name__):
            self._handed_on[module.__name__] = module
            self._read_getattr(module)
            if whole:
                self._read_whole.add(module.__name__)
            if deep and module.__name__ not in self._read_deep:
                self._read_deep.add(module.__name__)
                for each in list(vars(module).values()):
                    if is_a(each, ModuleType) and is_own_module(each.__name__):
                        self._visit_module(each, whole=True, deep=True)
        else:
            self._note_package(module.__name__)

    def _read_module(self, module: Any, names: Iterable[str]) -> None:
        """Read the given names in a module and its submodules."""
        names, queue, seen = frozenset(names), [module], set[int]()
        while queue:
            at = queue.pop()
            if not is_a(at, ModuleType) or id(at) in seen:
                continue
            seen.add(id(at))
            if not is_own_module(at.__name__):
                self._note_package(at.__name__)
                continue
            inside = vars(at)
            for name in sorted(names & inside.keys()):
                if not (name.startswith("__") and name.endswith("__")):
                    self._read_global(inside, name)
                    queue.append(inside[name])

    def _ask(self, module: Any, names: Iterable[str]) -> ModuleType | None:
        """Follow names from a module on; if a module lacks one, read its ``__getattr__``.

        Returns the module that code has at the end, itself or as its ``__dict__``; None if it has
        something else.
        """
        for name in names:
            if not is_a(module, ModuleType) or name == "__dict__":
                break
            if name not in vars(module):
                self._read_getattr(module)
                return None
            module = vars(module)[name]
        return module if is_a(module, ModuleType) else None

    def _read_getattr(self, module: Any) -> None:
        """Read the ``__getattr__`` function of one of the user's modules, if it has one."""
        has_one = is_a(module, ModuleType) and "__getattr__" in vars(module)
        if has_one and is_own_module(module.__name__):
            self._read_global(vars(module), "__getattr__")

    def _read_global(self, names: dict[str, Any], name: str) -> None:
        module = str(names.get("__name__", "__main__"))
        self._note_place("global", names, name, name=self._names.label(module, name))

    # -- classes -----------------------------------------------------------------------

    def _visit_class(self, kind: type) -> None:
        root = id(kind) in self._roots
        for base in kind.__mro__:
            if not is_own(base):
                self._note_package(module_name(base))
                continue
            name = self._names.of(base)
            self._classes.setdefault(id(base), Reached(name=name, value=base))
            self._seen[id(base)] = base
            for key, member in members_of(base):
                if not (root and key in self._without):
                    self._read_member(base, key, member=member)
            self._read_fields(base, without=self._without if root else ())
            if issubclass(base, enum.Enum):
                for key, each in vars(base)["_member_map_"].items():
                    self._follow(each, f"{name}.{key}")
        if type(kind) is not type:
            self._follow(type(kind), "")

    def _read_fields(self, kind: type, *, without: Collection[str]) -> None:
        """Read what only the fields of a dataclass or of a named tuple hold."""
        name = self._names.of(kind)
        for field, slot in field_parts_of(kind):
            if field.name not in without:
                where = f"{name}.{field.name}" + ("" if slot == "default" else f".{slot}")
                self._note_place("slot", field, slot, name=where)
        if issubclass(kind, tuple):
            for default in vars(kind).get("_field_defaults", {}).values():
                self._follow(default, name)

    def _read_member(self, kind: type, key: str, *, member: Any) -> None:
        name = f"{self._names.of(kind)}.{key}"
        if key in vars(kind):
            self._note_place("class attribute", kind, key, name=name)
        else:
            self._follow_from(member, name)

    def _list(self, value: Any, names: Iterable[str]) -> None:
        """Note the class whose subclasses are listed by names after a global, of any package."""
        for name in names:
            if name == "__subclasses__" and is_a(value, type):
                self._listed.add(value)
            value = vars(value).get(name) if is_a(value, ModuleType) else None

    def _list_subclasses(self) -> None:
        """Follow the user's subclasses of each class whose subclasses code may list."""
        if "__subclasses__" not in self._mentioned:
            return
        for kind in [*(each.value for each in self._classes.values()), *self._listed]:
            names: list[str] = []
            for each in subclasses_of(kind):
                names.append(self._names.of(each))
                self._follow(each, "")
            if names:
                self._subclasses[self._names.of(kind)] = names

    # -- operators ---------------------------------------------------------------------

    def _find_operators(self) -> None:
        """Follow the user's operators in the namespaces of ``torch.ops`` that code names."""
        spaces = self._mentioned | self._namespaces
        if "ops" not in spaces:
            return
        for name, operator in operators_in(spaces).items():
            self._operators[name] = operator
            self._follow(operator, f"torch.ops.{name}")
        for module in libraries_in(spaces):
            self._read_module(module, functions_in(module))

    # -- notes -------------------------------------------------------------------------

    def _note_place(
        self, kind: PlaceKind, holder: Any, key: Any, *, name: str, own: bool = True
    ) -> None:
        if (id(holder), key) not in self._places:
            self._note(Place(name=name, kind=kind, holder=holder, key=key, own=own))

    def _note(self, place: Place) -> None:
        self._places[id(place.holder), place.key] = place
        found = (place.get(),) if self._values_at is None else self._values_at(place)
        for value in found:
            if place.kind != "global" or not is_a(value, ModuleType):
                self._follow_from(value, place.name)

    def _follow_from(self, value: Any, name: str) -> None:
        if value is not MISSING:
            self._follow(value, name)

    def _note_package(self, module: str) -> None:
        top = module.partition(".")[0]
        if module.startswith("torch.ops"):
            self._namespaces.update(module.split("."))
        if top not in _NO_PACKAGE and top not in sys.stdlib_module_names:
            self._packages.add(top)


def _nothing(value: Any) -> Any:  # noqa: ARG001 (the signature of ``instead``)
    return MISSING


def _code_of(root: Any) -> Any:
    """Return the object that gives a root its name and module: the root itself, or its class."""
    if is_a(root, functools.partial):
        return _code_of(root.func)
    if is_a(root, MethodType):
        return root.__func__
    return root if is_a(root, type | FunctionType) else type(root)


def _is_builtin(names: Mapping[str, Any], name: str) -> bool:
    found = names.get("__builtins__", builtins)
    return name in (vars(found) if is_a(found, ModuleType) else found)


_MODULE_TABLES = frozenset({
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_compiled_call_impl",
})  # fmt: skip
"""Attributes that ``nn.Module`` uses internally."""

_NO_PACKAGE = frozenset({"thrifty", "builtins", "__main__", "pybind11_builtins"})

_CACHES_OF_PANDAS = frozenset({"_cache", "_cacher", "_item_cache", "_id"})
"""Attributes in which pandas keeps what it has computed from an index or a frame."""
