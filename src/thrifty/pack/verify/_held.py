"""What an object holds, and what code keeps when it runs first.

An object holds attributes, slots, variables of functions and positions of iterators. None of this
runs the user's code, and no iterator is advanced. Only objects that are no Python code inside, or
whose package says how they are pickled, are asked for their content. What code keeps may depend on
the seed.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import io
import marshal
import operator
import pickle
import re
import threading
import types
import warnings
import weakref
import zipfile
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from thrifty.core import TaskError
from thrifty.pack._frozen import bytes_of
from thrifty.pack._state import seeded_otherwise
from thrifty.pack.identity import content_digest, is_own, parts_of, vars_of
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


# -- content --------------------------------------------------------------------------------


class Unread:
    """Stands for a content that cannot be read, or not all of it: it may have changed."""

    def __repr__(self) -> str:
        return "(not read)"


UNREAD = Unread()

MAX_BYTES = 2**28
"""Of larger tensors and arrays only samples are compared. Reading so much takes 0.2 s."""


def is_unread(content: Any) -> bool:
    """Return whether a stand-in lacks something of the content that it stands for."""
    if isinstance(content, tuple | list):
        return any(map(is_unread, content))
    return content is UNREAD


def tensor_content(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return a stand-in for shape, type and all values of a tensor: checksums of its bits.

    Its version would not do: ``.data``, arrays over the same memory and other tensors over it
    change values and leave the version. A shared tensor stays shared.

    >>> one = torch.zeros(5000)
    >>> before = tensor_content(one)
    >>> one.data[4000] = 1
    >>> tensor_content(one) == before
    False
    """
    about = (tuple(tensor.shape), str(tensor.dtype), str(tensor.layout))
    if tensor.is_meta:
        return about
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return (*about, *map(_tensor_sums, parts_of(tensor.detach())))
    except (RuntimeError, TypeError, NotImplementedError):  # no memory of its own, or for a copy
        return (*about, UNREAD)


def _tensor_sums(part: torch.Tensor) -> tuple[Hashable, ...]:
    part = part.resolve_conj().resolve_neg()
    if part.nbytes > MAX_BYTES:
        if not part.is_contiguous():
            return (UNREAD,)
        flat = part.reshape(-1)
        return (UNREAD, *_tensor_sums(flat[:: _step(flat.nbytes)]))
    if part.device.type == "cpu":
        return _sums(bytes_of(part))
    bits = part.contiguous().reshape(-1).view(torch.uint8)
    whole = len(bits) // _WORD * _WORD
    words = bits[:whole].clone().view(torch.int64)
    return _sum_on_device(words), *bits[whole:].tolist()


def _sums(parts: Iterable[memoryview]) -> tuple[int, int]:
    """Return two sums of bytes that no usual change leaves equal, such as a change of all signs."""
    checksum = total = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
        if len(part) >= _WORD:
            total += int(np.frombuffer(part, np.int64, len(part) // _WORD).sum())
    return checksum, total


def _sum_on_device(words: torch.Tensor) -> int:
    """Return a sum of numbers of 64 bits in which every bit and every place counts otherwise."""
    places = torch.arange(1, len(words) + 1, device=words.device) * _ODD
    weights = (places ^ (places >> 29)) | 1
    return int(((words ^ (words >> 32)) * weights).sum())


def array_content(array: np.ndarray[Any, Any]) -> tuple[Hashable, ...]:
    """Return a stand-in for shape, type and all values of an array that holds no objects."""
    about = (array.shape, str(array.dtype))
    if isinstance(array, np.memmap) and not array.flags.writeable:
        return about  # a file that it reads
    if array.nbytes > MAX_BYTES:
        if not array.flags.c_contiguous:
            return (*about, UNREAD)
        flat = array.reshape(-1)
        return (*about, UNREAD, *array_content(flat[:: _step(flat.nbytes)].copy()))
    return (*about, *_sums([np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]))


_WORD = 8
_ODD = 0x9E3779B97F4A7C1


def _step(num_bytes: int) -> int:
    """Return the distance of samples that take a sixteenth of what is read at most."""
    return 16 * num_bytes // MAX_BYTES + 1


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def plain_digest(container: Any) -> str | None:
    """Return the digest of a list, tuple, dict or deque of plain values; None for any other.

    It is much faster than to look at each value.

    >>> plain_digest([1, ("a", {"b": None})]) == plain_digest([1, ("a", {"b": 0})])
    False
    >>> plain_digest([object()])
    """
    if type(container) not in _LISTED:
        return None
    level: Any = [container]
    for _ in range(_MAX_LEVELS):
        nested = [each for each in level if type(each) in _LISTED]
        level = list(chain.from_iterable(_inside(each) for each in nested))
        kinds = set(map(type, level)) - _ATOMS
        if not all(kind in _LISTED or issubclass(kind, np.number | np.bool_) for kind in kinds):
            return None
        if not kinds.intersection(_LISTED):
            found = list(container) if type(container) is deque else container
            try:
                return _digest(marshal.dumps(found, 2))  # later versions depend on references
            except ValueError:  # a deque inside
                return None
    return None


def _inside(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if type(container) is dict else container


_ATOMS: frozenset[Any] = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MAX_LEVELS = 6


def file_content(file: io.IOBase) -> Any:
    """Return what stands for the content of a file in memory; None for any other."""
    if not isinstance(file, io.BytesIO | io.StringIO) or file.closed:
        return None
    held = file.getvalue()
    return _digest(held.encode(errors="replace") if isinstance(held, str) else held)


def position_in(file: io.IOBase) -> int | None:
    """Return the position in a file that can be read; None if it is not known."""
    try:
        if file.closed or not file.readable():
            return None
        # The position in a text file cannot be asked for while it is read line by line.
        inner = getattr(file, "buffer", file)
        return int(inner.tell()) if inner.seekable() else None
    except (OSError, ValueError):
        return None


def place_in(file: io.IOBase) -> Any:
    """Return what stands for the content of a file in memory, or the position in one on a disk."""
    if file.closed:
        return "closed"
    try:
        if isinstance(file, io.BytesIO | io.StringIO):
            return (file_content(file), file.tell())
        inner = getattr(file, "buffer", file)
        return inner.tell() if inner.seekable() else None
    except (OSError, ValueError):
        return None


def opaque_content(value: Any, *, stand_in: Callable[[Any], Any] = lambda _: None) -> Any:
    """Return a stand-in for the content of an object that is not in its attributes and slots.

    Compiled code keeps such content, and the object's package says how it is pickled. The stand-in
    is None if there is no such content, and ``UNREAD`` if it cannot be read.

    Args:
        value: The object: none of Python's containers, no tensor, array or iterator.
        stand_in: Returns what to take instead of an object within; None for the object itself.
    """
    kind: type = type(value)
    if isinstance(value, _WITHOUT_CONTENT) or kind.__name__ == "SemLock":
        return None
    if isinstance(value, io.IOBase):
        return file_content(value)
    is_compiled = _is_compiled(kind)
    if not is_compiled and not _tells_itself(kind):
        return None
    found = _buffer(value) if is_compiled else None
    if found is None:
        found = _pickled(value, stand_in)
    if found is None:
        return UNREAD if is_compiled else None
    return (kind.__qualname__, found)


ARCHIVES = (zipfile.ZipFile, np.lib.npyio.NpzFile)
"""Types that read a file at any place, so that its position tells nothing."""

_WITHOUT_CONTENT: Any = (
    type, torch.nn.Module, torch.optim.Optimizer,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.CodeType, property, staticmethod, classmethod, np.ufunc, np.dtype, re.Pattern,
    torch.dtype, torch.device, torch.layout, torch.memory_format, weakref.ref,
    weakref.ProxyType, weakref.CallableProxyType, type(threading.Lock()), type(threading.RLock()),
    type(functools.lru_cache(len)), type(NotImplemented), type(...), slice,
    *ARCHIVES,
)  # fmt: skip
"""Code, types, locks and other objects that hold nothing that training changes."""


def is_whole(value: Any) -> bool:
    """Return whether ``opaque_content`` stands for an object with all its attributes."""
    kind: Any = type(value)
    if kind is partial or is_own(kind) or not (_is_compiled(kind) or _tells_itself(kind)):
        return False
    found = opaque_content(value)
    return found is not None and not is_unread(found)


@functools.lru_cache(maxsize=1024)
def _is_compiled(kind: type) -> bool:
    """Return whether instances have memory beside their attributes and slots."""
    slots = 0
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        names = (names,) if isinstance(names, str) else tuple(names)
        slots += len([name for name in names if name not in ("__dict__", "__weakref__")])
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + _WORD * pointers or kind.__itemsize__ > 0


@functools.lru_cache(maxsize=1024)
def _tells_itself(kind: type) -> bool:
    """Return whether a class of an installed package says how it is pickled."""
    if is_own(kind):
        return False  # the user's code may leave something out
    for base in kind.__mro__[:-1]:
        if not {"__reduce__", "__reduce_ex__", "__getstate__"}.isdisjoint(vars(base)):
            return base.__module__.partition(".")[0] not in ("torch", "thrifty")
    return False


def _buffer(value: Any) -> Any:
    """Return a stand-in for the memory of an object; None if it gives no access to it."""
    try:
        with memoryview(value) as view:
            return _digest(view.tobytes()) if view.nbytes <= MAX_BYTES else (view.nbytes, UNREAD)
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None


class _TooLongError(Exception):
    """Ends the writing of an object that is too large."""


class _Digester:
    """A file that keeps only a digest of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._num_bytes += size
        if self._num_bytes > _MAX_PICKLED:
            raise _TooLongError
        self._hash.update(data)
        return size

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


_MAX_PICKLED = 2**24
"""How many bytes an object is written as, at most; that takes 0.1 s."""


class _Pickler(pickle.Pickler):
    """Writes an object so that equal contents give equal bytes; nothing reads it."""

    def __init__(self, file: _Digester, stand_in: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=5)
        self._stand_in = stand_in

    def reducer_override(self, obj: Any) -> Any:
        if obj is str:  # what stand-ins are written as
            return NotImplemented
        known = self._stand_in(obj)
        if known is None and isinstance(obj, torch.Tensor):
            known = tensor_content(obj)
            if is_unread(known):
                raise _TooLongError
        if known is not None:
            return str, (repr(known),)
        if isinstance(obj, types.FunctionType) and obj.__closure__:
            raise _TooLongError  # it may hold anything
        if isinstance(obj, type | types.FunctionType):
            return str, (f"{obj.__module__}.{obj.__qualname__}",)
        if isinstance(obj, _WITHOUT_CONTENT) and not isinstance(obj, _WRITTEN):
            return str, (type(obj).__qualname__,)
        return NotImplemented


_WRITTEN = (torch.nn.Module, torch.optim.Optimizer, types.MethodType)


def _pickled(value: Any, stand_in: Callable[[Any], Any]) -> str | None:
    """Return the digest of what an object is pickled as; None if it cannot be pickled."""
    for is_fast in (True, False):  # fast is without references, and fails where there are cycles
        out = _Digester()
        pickler = _Pickler(out, stand_in)
        pickler.fast = is_fast
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pickler.dump(value)
            return out.hexdigest()
        except _TooLongError:
            return None
        except Exception:  # noqa: BLE001 (code of others may raise anything)
            continue
    return None


# -- containers -----------------------------------------------------------------------------


def are_containers(kind: type) -> bool:
    """Return whether instances of a class are containers of Python, or of subclasses of these."""
    return issubclass(kind, _CONTAINERS)


def is_listed(kind: type) -> bool:
    """Return whether instances of a class are containers whose elements have an order."""
    return issubclass(kind, _LISTED)


def size_of(container: Any) -> int:
    """Return how many elements a container has."""
    size: int = _base_of(container).__len__(container)
    return size


def _base_of(container: Any) -> Any:
    """Return the class of Python that a container is of, to bypass what a subclass overrides."""
    return next(base for base in _CONTAINERS if issubclass(type(container), base))


def elements_of(container: Any, limit: int) -> Iterator[Any]:
    """Yield the first elements of a container; the values of a mapping."""
    if issubclass(type(container), dict):
        return (value for _, value in items_of(container, limit))
    return islice(_base_of(container).__iter__(container), limit)


def items_of(mapping: dict[Any, Any], limit: int) -> list[tuple[Any, Any]]:
    """Return the first items of a mapping; reading one of them may change it, as in torch.fx."""
    base: type[dict[Any, Any]] = OrderedDict if isinstance(mapping, OrderedDict) else dict
    return list(islice(base.items(mapping), limit))


_LISTED = (list, tuple, dict, deque)

_CONTAINERS: tuple[Any, ...] = (*_LISTED, set, frozenset)


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
