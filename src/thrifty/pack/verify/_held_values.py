"""What objects hold; what code keeps when it runs first, and whether the seed matters for that."""

from __future__ import annotations

import functools
import gc
import operator
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType
from typing import Any, Generic, NamedTuple, TypeVar

from thrifty.core import TaskError
from thrifty.pack._state import seeded_otherwise
from thrifty.pack.identity import content_digest, is_own, vars_of
from thrifty.pack.identity._own import is_own_file

from ._keeper import Keeper, caches_in, kept_places, results_of


class Part(NamedTuple):
    """A value that an object holds other than as an attribute.

    Attributes:
        name: The name of a variable or an argument.
        note: What it is, such as ``"closure"``.
    """

    name: str
    note: str


def parts_held(one: Any) -> Mapping[Any, Any]:
    """Return the values that an object holds, by attribute or ``Part``.

    Slots of the user's own classes are attributes. Of functions and generators only the user's own
    are looked into; a function that wraps one of the user's own counts as that one.
    """
    if isinstance(one, FunctionType):
        return _of_function(one)
    if isinstance(one, partial):
        return _of_partial(one)
    if type(one) is GeneratorType:
        return {Part(name, "local"): value for name, value in _locals_of(one).items()}
    kind: Any = type(one)
    slots = _slots_of(kind)
    return {**vars_of(one), **_in_slots(one, slots)} if slots else vars_of(one)


def attributes_of(one: Any) -> dict[str, Any]:
    """Return the attributes and slots of an object of any class."""
    kind: Any = type(one)
    return {**vars_of(one), **_in_slots(one, _all_slots_of(kind))}


def _in_slots(one: Any, slots: Iterable[tuple[str, MemberDescriptorType]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, member in slots:
        try:
            found[name] = member.__get__(one)
        except AttributeError:  # not set
            continue
    return found


def holds(one: Any) -> bool:
    """Return whether ``parts_held`` may return anything."""
    kind: Any = type(one)
    if kind in _OF_CODE or isinstance(one, partial):
        return bool(parts_held(one))
    return bool(vars_of(one) or _slots_of(kind))


def path_of(name: str, key: Any) -> str:
    """Return where a value is that ``parts_held`` returns for an object of a name.

    >>> path_of("self", "f"), path_of("", "f"), path_of("self.f", Part("n", "closure"))
    ('self.f', 'f', 'self.f.n')
    """
    plain = key.name if type(key) is Part else key
    return f"{name}.{plain}" if name else str(plain)


def note_of(key: Any) -> str:
    """Return what follows the path of a value in a message.

    >>> note_of("f"), note_of(Part("n", "closure"))
    ('', ' (closure)')
    """
    return f" ({key.note})" if type(key) is Part else ""


def _of_function(function: FunctionType) -> Mapping[Any, Any]:
    inner = function
    for _ in range(_MAX_WRAPPERS):
        if is_own(inner) or not isinstance(vars(inner).get("__wrapped__"), FunctionType):
            break
        inner = vars(inner)["__wrapped__"]
    if not is_own(inner):
        return {}
    code = inner.__code__
    found: dict[Any, Any] = {**vars(function), **vars(inner)}
    if inner is not function:
        found.pop("__wrapped__", None)
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=False):
        if _is_filled(cell):
            found[Part(name, "closure")] = cell.cell_contents
    defaults = inner.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    for name, value in (*zip(names, defaults, strict=False), *(inner.__kwdefaults__ or {}).items()):
        found[Part(name, "default")] = value
    return found


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _of_partial(one: partial[Any]) -> Mapping[Any, Any]:
    found: dict[Any, Any] = dict(vars_of(one))
    names: tuple[str, ...] = ()
    if isinstance(one.func, FunctionType):
        found |= _of_function(one.func)
        code = one.func.__code__
        names = code.co_varnames[: code.co_argcount]
    else:
        found["func"] = one.func
    for number, value in enumerate(one.args):
        name = names[number] if number < len(names) else f"args[{number}]"
        found[Part(name, "argument")] = value
    for name, value in one.keywords.items():
        found[Part(name, "argument")] = value
    return found


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: Any) -> tuple[tuple[str, MemberDescriptorType], ...]:
    """Return the slots of the user's own classes; those of others hold caches of their own."""
    return tuple(
        each for base in reversed(kind.__mro__) if is_own(base) for each in _slots_in(base)
    )


@functools.lru_cache(maxsize=1024)
def _all_slots_of(kind: Any) -> tuple[tuple[str, MemberDescriptorType], ...]:
    return tuple(each for base in reversed(kind.__mro__) for each in _slots_in(base))


def _slots_in(base: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    if "__slots__" in vars(base):
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType):
                yield name, member


# -- iterators ------------------------------------------------------------------------------


def position_of(value: Any) -> tuple[Any, ...] | None:
    """Return values that tell an iterator's position; None for anything else.

    It works for the iterators of Python, for those of ``itertools``, and for the user's own
    generators.

    >>> position_of(iter({"a": 1, "b": 2})), position_of(iter(["a", "b"]))
    ((2,), (['a', 'b'], 0))
    """
    kind = type(value)
    if kind is GeneratorType:
        return _position_of_generator(value)
    if kind in _SIZED:
        return (operator.length_hint(value, -1),)
    if kind in _REDUCED or kind.__module__ == "itertools":
        return tuple(_reduced(value))
    return None


def _position_of_generator(generator: GeneratorType[Any, Any, Any]) -> tuple[Any, ...] | None:
    if not _is_of_own_file(generator.gi_code.co_filename):
        return None
    frame = generator.gi_frame
    if frame is None:
        return ("ended",)
    return (frame.f_lasti, _locals_of(generator), generator.gi_yieldfrom)


def _locals_of(generator: GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    frame = generator.gi_frame
    if frame is None or not _is_of_own_file(generator.gi_code.co_filename):
        return {}
    return dict(frame.f_locals)


@functools.lru_cache(maxsize=1024)
def _is_of_own_file(file: str) -> bool:
    return is_own_file(file)


def _reduced(value: Any) -> Iterator[Any]:
    """Yield what an iterator would be pickled as, without its class, or else what it refers to."""
    if "__reduce__" not in vars(type(value)):
        yield from gc.get_referents(value)
        return
    try:
        with warnings.catch_warnings():  # itertools plans to drop this
            warnings.simplefilter("ignore")
            _, *parts = value.__reduce__()
    except TypeError:
        return
    for part in parts:
        if type(part) is tuple:
            yield from part
        else:
            yield part


_OF_CODE = frozenset({FunctionType, GeneratorType})

_EMPTY: Any = {}

_SIZED = frozenset(
    map(
        type,
        (
            iter(_EMPTY), iter(_EMPTY.values()), iter(_EMPTY.items()), reversed(_EMPTY),
            reversed(_EMPTY.values()), reversed(_EMPTY.items()), iter(OrderedDict()),
            iter(set()), iter(deque()), reversed(deque()),
        ),
    )
)  # fmt: skip
"""Iterators whose position is the number of values that are left."""

_REDUCED = frozenset(
    map(
        type,
        (
            iter([]), iter(()), iter(range(0)), iter(range(1 << 70)), iter(""), iter("é"),
            iter(b""), iter(bytearray()), reversed([]), reversed(()), enumerate(()), zip(),
            map(len, ()), filter(None, ()),
        ),
    )
)  # fmt: skip
"""Iterators that are pickled as a container and a position in it, or as other iterators."""

_MAX_WRAPPERS = 8
"""How many wrappers of a function are looked through."""


# -- what code keeps when it runs first ------------------------------------------------


Made = TypeVar("Made")


class MadeOnce:
    """What code keeps when it runs first: in variables, in attributes, and in caches.

    A value that is drawn from a seeded stream, and kept, depends on the trial that made it. Then
    the streams end elsewhere if a trial is made a second time with the same seed, because nothing
    is drawn for the value that was kept. That is only a suspicion: code that seeds the streams
    itself also leaves them elsewhere. ``first_made`` runs the code as if for the first time, with
    this seed and with another: what is kept must be the same.

    Example::

        kept = MadeOnce({"task": task})
        task.model(hp)
        kept.take_changed()  # ["CACHE", "projection(...)"]

    Args:
        roots: Code and objects by name, such as a task.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._keeper = self._before = Keeper(kept_places(roots), containers_only=True)
        self._num_calls = self._count_calls()
        self._filled: list[Any] = []
        self.last_changed: list[str] = []
        """The names of the last changes that ``take_changed`` has found."""

    def take_changed(self) -> list[str]:
        """Return the names of what has been made since the last call."""
        changed = self._changed()
        if changed:
            self.last_changed = changed
            self._before, self._filled = self._keeper, self._filled_caches()
            self._keeper = self._keeper.grown()
            self._num_calls = self._count_calls()
        return changed

    def undo(self) -> None:
        """Undo the changes that ``take_changed`` found last; caches are emptied."""
        self._before.put_back()
        for cache in self._filled:
            cache.cache_clear()

    def has_changed(self) -> bool:
        """Return whether anything has been made since the last call of ``take_changed``."""
        return bool(self._changed())

    def first_made(self, make: Callable[[], Made]) -> FirstMade[Made]:
        """Run code as if for the first time, and find out what it keeps that depends on the seed.

        Tables and caches are as they were before the changes that ``take_changed`` found last, and
        are put back afterwards.

        Args:
            make: Runs the code. It seeds the streams with ``seed_everything``.
        """
        with seeded_otherwise():
            otherwise, other, _ = self._run(make)
        made, same, is_known = self._run(make)
        differing = {name for name, digests in same.items() if other.get(name) != digests}
        if differing:  # what also differs for the same seed, such as a time, is not drawn
            _, again, _ = self._run(make)
            differing = {name for name in differing if again.get(name) == same[name]}
        return FirstMade(made=made, otherwise=otherwise, drawn=sorted(differing), is_known=is_known)

    def _run(self, make: Callable[[], Made]) -> tuple[Made, dict[str, Any], bool]:
        """Run code; return its result, digests of what it keeps, and whether all have one."""
        with self._as_before():
            made = make()
            out: dict[str, Any] = {
                place.name: digest_or_none(place.get())
                for place in self._before.places_changed()
                if not caches_in([place])
            }
            for cache in self._before.caches:
                results = results_of(cache)
                if results and cache.cache_info().misses:
                    found = [digest_or_none(result) for result in results]
                    out[cached_name(cache)] = None if None in found else sorted(map(str, found))
        known = {name: digests for name, digests in out.items() if digests is not None}
        return made, known, bool(out) and len(known) == len(out)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        now = self._before.grown()
        self._before.put_back()
        self._before.empty_caches({}, only=self._filled)
        try:
            yield
        finally:
            now.put_back()

    def _changed(self) -> list[str]:
        return self._keeper.changed() + [cached_name(each) for each in self._filled_caches()]

    def _filled_caches(self) -> list[Any]:
        known = self._num_calls
        return [
            each for each in self._keeper.caches if each.cache_info().misses != known.get(each, 0)
        ]

    def _count_calls(self) -> dict[Any, int]:
        """Return how often each cached function has had to compute its result."""
        return {each: each.cache_info().misses for each in self._keeper.caches}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstMade(Generic[Made]):
    """The findings of ``MadeOnce.first_made``.

    Attributes:
        made: What the code has returned.
        otherwise: What it has returned with another seed.
        drawn: The names of what it keeps that depends on the seed.
        is_known: Whether it keeps something, all of which could be compared.
    """

    made: Made
    otherwise: Made
    drawn: list[str]
    is_known: bool


def cached_name(cache: Any) -> str:
    """Return the name of a function under ``functools.lru_cache``, for messages."""
    return f"{cache.__wrapped__.__qualname__}(...)"


def digest_or_none(value: Any) -> str | None:
    """Return the digest of a value; None if something in it has no content."""
    try:
        return content_digest(value)
    except TaskError:
        return None
