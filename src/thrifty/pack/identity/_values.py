"""Digests of values by content, equal in every process whatever the addresses and hash seed."""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import inspect
import typing
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from types import (
    CodeType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError

from ._arrays import writer_for
from ._contents import (
    BUILT_IN,
    CACHED,
    CONTAINERS,
    LISTABLE,
    OF_WEAK_CONTAINERS,
    PLAIN_WRITERS,
    SUBCLASSED,
    WEAK_CONTAINERS,
    Names,
    callables_of,
    code_behind,
    compiled_from,
    held_by,
    is_a,
    is_iterator,
    is_of_a_package,
    items_of,
    members_in,
    neutral_name,
    no_content,
    parts_of_super,
    short,
    unreadable,
    why_no_content,
)
from ._own import (
    field_parts_of,
    functions_of,
    is_installed,
    is_operator,
    is_own,
    members_of,
    name_of,
)
from ._place import MISSING, slots_of, vars_of
from ._syntax import assigned_to_self, code_digest, content, extension_digest


HOOK = "__thrifty_identity__"


def not_vouched_for(value: Any) -> list[str]:
    """Return the attributes of an object that its identity hook cannot know.

    A hook speaks for the attributes that the code of its class and of that class's bases assigns.
    Others are those of a subclass, or options that were set on the object from outside. A class of
    the user's own that has the hook itself speaks for all of its objects.
    """
    kind = type(value)
    definer = next((each for each in kind.__mro__ if HOOK in vars(each)), kind)
    if definer is kind and is_own(kind):
        return []
    known = _assigned_by(definer)
    names = {**vars_of(value), **dict.fromkeys(slots_of(kind))}
    return [key for key in names if is_a(key, str) and key not in known]


@functools.lru_cache(maxsize=64)
def _assigned_by(kind: type) -> frozenset[str]:
    """Return the attributes that the code of a class and of its bases assigns or computes once."""
    found: set[str] = set()
    for name, member in (pair for each in kind.__mro__ for pair in vars(each).items()):
        if is_a(member, functools.cached_property):
            found.add(name)
        for function in _functions_of(member):
            found |= assigned_to_self(function.__code__)
    return frozenset(found)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a member of a class whose first argument is an instance."""
    if is_a(member, property):
        parts: tuple[Any, ...] = (member.fget, member.fset, member.fdel)
    elif is_a(member, functools.cached_property):
        parts = (member.func,)
    else:
        parts = (member,)
    for part in parts:
        whole = inspect.unwrap(part) if is_a(part, FunctionType) else part
        yield from (
            each for each in {id(part): part, id(whole): whole}.values() if is_a(each, FunctionType)
        )


class Values:
    """A computation of digests of values; it caches those of arrays, which may be large.

    >>> values = Values(Names(home="task"))
    >>> values.digest({"a": [1, 2.0]}, path="x") == values.digest({"a": [1, 2]}, path="x")
    False
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._arrays: dict[int, tuple[Any, str]] = {}
        self.ambiguous: frozenset[str] = frozenset()
        """Names that several classes have, so that they do not tell which one is meant."""

    def digest(self, value: Any, *, path: str, known_as: str = "") -> str:
        """Return the digest of a value.

        Args:
            value: Anything with content.
            path: Where the value is, for the error message.
            known_as: The name of a function or a class whose code is covered elsewhere.

        Raises:
            TaskError: Something in it has no content.
        """
        writer = _Writer(
            self._names, arrays=self._arrays, known_as=known_as, ambiguous=self.ambiguous
        )
        try:
            writer.value(value, path)
        except RecursionError as error:
            raise no_content(path, value, "is nested too deeply") from error
        return writer.hexdigest()


def content_digest(value: Any) -> str:
    """Return the digest of one value, for comparisons within this process.

    Raises:
        TaskError: Something in it has no content.

    >>> content_digest([1, 2]) == content_digest([1, 2])
    True
    """
    return Values(Names(home="__main__")).digest(value, path=type(value).__name__)


class _Writer:
    """A writer of one value into a hash. An object that occurs again is written as a reference.

    So cycles end, and one list in two places differs from two equal lists. Plain immutable values
    are always written out, because Python may or may not share them.
    """

    def __init__(
        self,
        names: Names,
        *,
        arrays: dict[int, tuple[Any, str]],
        known_as: str = "",
        ambiguous: frozenset[str] = frozenset(),
    ) -> None:
        self._hash = hashlib.blake2b(digest_size=12)
        self._names = names
        self._arrays = arrays
        self._known_as = known_as
        self._ambiguous = ambiguous
        self._known: FunctionType | None = None
        """The function that has the name, of which the code is covered elsewhere."""
        self._shallow = False
        self._writers = (self._write_array, self._write_wrapper, self._write_hidden)
        # keeps the objects alive, so that their ids stay unique
        self._memo: dict[int, tuple[int, Any]] = {}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def token(self, *parts: str | bytes) -> None:
        for part in parts:
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            self._hash.update(b"%d:" % len(data))
            self._hash.update(data)

    def value(self, value: Any, path: str) -> None:
        kind = type(value)
        plain = PLAIN_WRITERS.get(kind)
        if plain is not None:
            self.token(kind.__name__, plain(value))
        elif kind is tuple or kind is frozenset:
            self._elements(value, path)
        elif id(value) in self._memo:
            self.token("again", str(self._memo[id(value)][0]))
        else:
            self._memo[id(value)] = (len(self._memo), value)
            self._new(value, path)

    def _new(self, value: Any, path: str) -> None:
        hook = None if is_a(value, type) else getattr(type(value), HOOK, None)
        neutral = neutral_name(value)
        if callable(hook):
            self.token(HOOK, self._names.of(type(value)))
            self.value(hook(value), path)
            if more := not_vouched_for(value):
                self.value({key: getattr(value, key, None) for key in more}, path)
        elif is_a(value, FunctionType):
            self._function(value, path)
        elif is_a(value, type):
            self._class(value, path)
        elif neutral is not None:
            self.token("neutral", neutral or type(value).__name__)
        elif is_a(value, enum.Enum):
            self.token("enum", self._names.of(type(value)), str(value._name_))
            self.value(value._value_, path)
        elif any(write(value, path) for write in self._writers):
            return
        elif is_a(value, CONTAINERS):
            self._elements(value, path)
        else:
            self._object(value, path)

    # -- containers --------------------------------------------------------------------

    def _elements(self, value: Any, path: str) -> None:
        kind = type(value)
        items, members = items_of(value), members_in(value)
        if items is not None:
            self.token(self._names.of(kind), str(len(items)))
            self._items(items, path)
            if is_a(value, defaultdict):
                self.value(value.default_factory, f"{path}.default_factory")
        elif members is not None:
            self.token(self._names.of(kind), str(len(members)))
            self.token(*sorted(self._apart(each, path) for each in members))
        else:
            self.token(self._names.of(kind), str(len(value)))
            self._sequence(value, path)
        if kind not in _EXACT:
            self._own_attributes(value, path)

    def _items(self, items: list[tuple[Any, Any]], path: str) -> None:
        if {type(each) for item in items for each in item} <= LISTABLE:
            self.token(ascii(items))
            return
        for key, each in items:
            self.value(key, f"a key of {path}")
            self.value(each, f"{path}[{short(key)}]")

    def _sequence(self, value: Any, path: str) -> None:
        base: Any = next(each for each in (list, tuple, deque) if is_a(value, each))
        if base is deque:
            self.token(str(value.maxlen))
        elements = list(base.__iter__(value))
        if set(map(type, elements)) <= LISTABLE:
            self.token(ascii(elements))
            return
        for index, each in enumerate(elements):
            self.value(each, f"{path}[{index}]")

    def _apart(self, value: Any, path: str) -> str:
        """Return the digest of a set's element, written by itself because it has no position."""
        inner = _Writer(
            self._names, arrays=self._arrays, known_as=self._known_as, ambiguous=self._ambiguous
        )
        inner._shallow = self._shallow
        if type(value) not in PLAIN_WRITERS:
            inner._memo = dict(self._memo)
        inner.value(value, f"an element of {path}")
        return inner.hexdigest()

    # -- code --------------------------------------------------------------------------

    def _function(self, function: FunctionType, path: str) -> None:
        if is_installed(function):
            self.token("function", self._names.of(function))
            return
        own = is_own(function)
        name = self._names.of(function) if own else self._names.of_code(function)
        self.token("function", name)
        if own and name == self._known_as and self._known is None:
            self._known = function
            return
        if own:
            self.token(code_digest(function))
            self.value(function.__defaults__, f"a default of {name}")
            self.value(function.__kwdefaults__, f"a default of {name}")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in cells:
            self.token(variable)
            try:
                inside = cell.cell_contents
            except ValueError:
                self.token("empty")
                continue
            where = f"{name}.<closure>.{variable}"
            if own:
                self.value(inside, where)
            else:
                self._inside_of_installed(inside, where)
        others = {k: v for k, v in vars_of(function).items() if k != "__wrapped__"}
        self._named(others if own else {}, path)

    def _inside_of_installed(self, value: Any, path: str) -> None:
        """Write what a package's wrapper holds, such as the function that it wraps and its options.

        Of objects of a package, only plain attributes are written, because others may be caches.
        """
        was, self._shallow = self._shallow, True
        self.value(value, path)
        self._shallow = was

    def _class(self, kind: type, path: str) -> None:
        name = self._names.of(kind)
        self.token("class", name)
        is_ambiguous = name in self._ambiguous
        if not is_own(kind) or not (is_ambiguous or "<locals>" in name):
            return
        if name == self._known_as and not is_ambiguous:
            return
        # several classes have this name, or several local ones may, so each is written out
        for base in kind.__bases__:
            self.value(base, path)
        parts = {f"{each.name}.{slot}": getattr(each, slot) for each, slot in field_parts_of(kind)}
        self._named({**dict(members_of(kind)), **parts}, name)

    def _write_wrapper(self, value: Any, path: str) -> bool:
        """Write an object that only wraps or names a callable, and return whether it is one."""
        kind = type(value)
        if is_a(value, functools.partial | functools.partialmethod):
            self.token(self._names.of(kind))
            self.value((value.func, value.args), path)
            self._named({**value.keywords, **self._attributes(value)}, path)
        elif is_a(value, CACHED):
            self.token("lru_cache", repr(sorted(value.cache_parameters().items())))
            self.value(value.__wrapped__, path)
        elif is_a(value, BUILT_IN):
            self._built_in(value, path)
        elif is_a(value, ContextVar):
            held = held_by(value)
            self.token("context variable", value.name, "empty" if held is MISSING else "")
            if held is not MISSING:
                self.value(held, f"{path}.get()")
        elif is_a(value, CodeType):
            self.token("code", repr(content(value)))
        elif is_operator(value):
            self.token(self._names.of(kind), name_of(value))
            self.value(functions_of(value), path)
        elif kind.__module__ == "typing" or is_a(value, (GenericAlias, UnionType)):
            inside = typing.get_args(value)
            self.token("type", str(typing.get_origin(value)) if inside else repr(value))
            self.value(inside, path)
        elif kind in _WRAPPERS:
            self.token(kind.__name__)
            self.value(tuple(getattr(value, each) for each in _WRAPPERS[kind]), path)
        else:
            return self._write_compiled(value, path)
        return True

    def _write_hidden(self, value: Any, path: str) -> bool:
        """Write an object that hides the code that it calls, and return whether it is one."""
        if is_a(value, weakref.WeakMethod):
            self.token("weak method")
            self.value(code_behind(value), path)
            return True
        if is_a(value, super):
            self.token("super")
            self.value(parts_of_super(value), path)
            return True
        if not is_a(value, np.ufunc):
            return False
        inner = callables_of(value)
        if inner:
            self.token("ufunc", value.__name__, str(value.nin), str(value.nout))
            self.value((inner, value.identity), path)
        elif not self._shallow and not is_of_a_package(value):
            raise unreadable(path)
        return bool(inner)

    def _write_compiled(self, value: Any, path: str) -> bool:
        """Write what an installed compiler has made of a function as that function."""
        inner = compiled_from(value)
        if inner is None:
            return False
        self.token("compiled", self._names.of(type(value)))
        self.value(inner, path)
        self.value(vars_of(value).get("targetoptions"), path)
        return True

    def _built_in(self, value: Any, path: str) -> None:
        holder = getattr(value, "__self__", None)
        name = getattr(value, "__qualname__", value.__name__)
        module = str(getattr(value, "__module__", None) or "")
        self.token("built in", module, name, extension_digest(module))
        if holder is not None and not is_a(holder, (ModuleType, type)):
            self.value(holder, path)

    # -- objects -----------------------------------------------------------------------

    def _write_array(self, value: Any, path: str) -> bool:
        kind: Any = type(value)
        write = writer_for(kind)
        if write is None:
            return False
        known = self._arrays.get(id(value))
        if known is None:
            inner = _Writer(self._names, arrays=self._arrays, ambiguous=self._ambiguous)
            inner._memo = {id(value): (0, value)}
            write(value, inner.token, lambda inside: inner.value(inside, path))
            known = self._arrays[id(value)] = (value, inner.hexdigest())
        self.token(self._names.of(type(value)), known[1])
        return True

    def _object(self, value: Any, path: str) -> None:
        kind = type(value)
        self.token("object", self._names.of(kind))
        if self._shallow and not is_own(kind):
            found = vars_of(value)
            self._named({k: v for k, v in found.items() if type(v) in PLAIN_WRITERS}, path)
            return
        reason = why_no_content(value)
        if reason:
            raise no_content(path, value, reason)
        for base in SUBCLASSED:
            if is_a(value, base):
                self.value(base(value), path)
                self._own_attributes(value, path)
                return
        self._parts(_parts(value, path), value, path)

    def _parts(self, parts: Any, value: Any, path: str) -> None:
        """Write an object as it would be pickled; nothing is ever unpickled."""
        if parts is None:
            self._own_attributes(value, path)
            return
        if isinstance(parts, str):
            self.token(parts)
            if is_own(type(value)):
                self._left_out(value, path, state=None)
            return
        made, arguments, *rest = parts
        self.value(made, path)
        self.value(tuple(arguments), path)
        state = rest[0] if rest else None
        if _is_default_state(value, state):
            self._own_attributes(value, path)
        elif type(state) is dict and all(type(key) is str for key in state):
            self._named(state, path)
        else:
            self.value(state, path)
        for each in rest[1:3]:  # items of a list, items of a dict
            self.value(list(each) if is_iterator(each) else each, path)
        if is_own(type(value)):
            self._left_out(value, path, state=state)

    def _left_out(self, value: Any, path: str, *, state: Any) -> None:
        """Write the attributes of an object of the user's that its pickling leaves out.

        Those without content are left out here, too: a file, a lock, a connection.
        """
        if not _says_itself(type(value)) or _is_of_a_dataclass(type(value)):
            return
        written = state if type(state) is dict else {}
        for name, held in sorted(self._attributes(value).items()):
            is_known = type(held) not in PLAIN_WRITERS and id(held) in self._memo
            if is_known or written.get(name, MISSING) is held:
                continue
            with suppress(TaskError):
                self.token(name, self._apart(held, f"{path}.{name}"))

    def _own_attributes(self, value: Any, path: str) -> None:
        found = self._attributes(value)
        if is_a(value, torch.nn.Module):
            found.pop("_compiled_call_impl", None)
            for name, table in found.items():
                if "_hooks" in name and is_a(table, dict):
                    # the keys only count the hooks made in this process
                    found[name] = list(dict.values(table))
        if is_a(value, WEAK_CONTAINERS):
            found = {k: v for k, v in found.items() if k not in OF_WEAK_CONTAINERS}
        self._named(found, path)

    def _attributes(self, value: Any) -> dict[str, Any]:
        """Return what an instance holds in its dict and slots, without cached properties."""
        cached = {
            name
            for base in type(value).__mro__
            for name, member in vars(base).items()
            if is_a(member, functools.cached_property)
        }
        found = {str(k): v for k, v in vars_of(value).items() if k not in cached}
        for base in type(value).__mro__:
            for name in slots_of(base):
                try:
                    found.setdefault(name, vars(base)[name].__get__(value))
                except (KeyError, AttributeError):  # a slot of a base class, or an empty one
                    continue
        return found

    def _named(self, values: dict[str, Any], path: str) -> None:
        self.token(str(len(values)))
        for name in sorted(values):
            self.token(name)
            self.value(values[name], f"{path}.{name}")


def _parts(value: Any, path: str) -> Any:
    """Return how an object would be pickled; None if only its attributes show what it holds."""
    kind = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    try:
        return reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except Exception as error:
        if _says_itself(kind) and vars_of(value):
            return None
        raise no_content(path, value, f"does not say what it holds ({error})") from error


def _says_itself(kind: type) -> bool:
    """Return whether a class defines how its objects are pickled."""
    return any(
        getattr(kind, name) not in (getattr(object, name), getattr(torch.nn.Module, name))
        for name in ("__getstate__", "__reduce__", "__reduce_ex__")
    )


def _is_of_a_dataclass(kind: type) -> bool:
    """Return whether the class is pickled as dataclasses with slots are."""
    made = getattr(kind, "__getstate__", None)
    return getattr(made, "__module__", "") == "dataclasses"


def _is_default_state(value: Any, state: Any) -> bool:
    """Return whether a state is only the attributes, which are then written by name."""
    if _says_itself(type(value)):
        return False
    return state is None or isinstance(state, dict | tuple)


_EXACT = frozenset({dict, list, tuple, set, frozenset, MappingProxyType})

_WRAPPERS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    enum.property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    slice: ("start", "stop", "step"),
}
