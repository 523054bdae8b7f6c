"""Stand-ins for contents of tensors, arrays, files and compiled objects, and of containers."""

from __future__ import annotations

import functools
import hashlib
import io
import marshal
import pickle
import re
import threading
import types
import warnings
import weakref
import zipfile
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from thrifty.pack._frozen import bytes_of
from thrifty.pack.identity import is_own, parts_of


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
