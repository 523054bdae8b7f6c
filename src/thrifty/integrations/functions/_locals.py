"""What a training function changes that would be lost when a trial is restored.

A restored trial runs the function anew up to its loop, so a variable that its loop changes and
reads again in a later round has to be in the state. Which variables those are is known: the ones
that are live at the ``yield`` (read on some path before they are written) and no longer have the
value that they had when the loop began. Their values are followed to whatever they hold:
containers, attributes, what functions have closed over, the objects of methods, random streams,
classes of the user's own. So are the global variables that the function reads, and what users add
to the networks and optimizers in the state, which no ``state_dict`` has.

Values are compared by content, objects of compiled code included. Where a content cannot be read,
the variable is named as unread: then only an epoch that is trained again shows whether it matters.
"""

from __future__ import annotations

import dis
import io
import logging
import random
import types
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from thrifty.pack._frozen import address, storage_address
from thrifty.pack.identity import is_own, parts_of
from thrifty.pack.verify import (
    ARCHIVES,
    are_containers,
    array_content,
    attributes_of,
    file_content,
    is_unread,
    opaque_content,
    plain_digest,
    position_in,
    position_of,
    tensor_content,
)

from ._function_state import inner_optimizers
from ._loop_trial import LoopTrial, Scheduled


_MAX_PARTS = 20_000
"""How many values inside of a variable are looked at. The rest is unread."""
_MANY = 64
"""Containers with more plain values are looked at as a whole, which is faster."""
_MAX_BYTES = 2**24
"""Larger tensors and arrays are read when the loop begins and in the first look after that."""


class Locals:
    """The variables of a function when its loop begins, to compare with those of a later round.

    Args:
        frame: The frame of the function.
        kept: Objects whose state is kept, by their names; None for the dict that holds them.
        held: Parts of kept objects of the user's own, which their ``load_state_dict`` restores.
    """

    def __init__(
        self, frame: types.FrameType, *, kept: Mapping[str | None, Any], held: Iterable[Any] = ()
    ) -> None:
        self._kept = _Kept(_restored(kept.values()), held=_restored(held))
        self._home = frame.f_globals.get("__name__", "")
        self._reads_large = True
        self._values = dict(frame.f_locals)  # kept, so that ids stay theirs
        self._marks = {name: self._mark(value) for name, value in self._values.items()}
        self._read = {name: frame.f_globals[name] for name in _globals_of(frame.f_code, frame)}
        self._read_marks = {name: self._mark(value) for name, value in self._read.items()}
        self._named = {name: each for name, each in kept.items() if name is not None}
        self._named |= {
            f"{name}.{attribute}": inner
            for name, each in self._named.items()
            for attribute, inner in inner_optimizers(each).items()
        }
        self._added = {name: self._mark_added(each) for name, each in self._named.items()}
        self._unread: set[str] = set()

    def lost(self, frame: types.FrameType, *, ignore: Collection[str] = ()) -> list[str]:
        """Return the variables that the next round reads and that a restored trial lacks.

        Args:
            frame: The frame, at a ``yield``.
            ignore: Variables that are meant to be lost.
        """
        now = frame.f_locals
        live = _live(frame.f_code).get(frame.f_lasti, frozenset(now))
        self._kept.reads_held = False
        # others do not exist when the loop begins, so are written first
        names = [name for name in now if name in live and name in self._marks]
        # What a function has closed over is better named by its own variable.
        names.sort(key=lambda name: callable(now[name]))
        names = [name for name in names if not self._kept.has_object(now[name])]
        pairs = [
            *((name, self._marks[name], now[name]) for name in names),
            *((name, mark, frame.f_globals.get(name)) for name, mark in self._read_marks.items()),
        ]
        found = []
        for name, before, value in pairs:
            if name not in ignore:
                mark = self._mark(value)
                if mark.parts != before.parts:
                    found.append(name)
                elif mark.is_unread or mark.places != before.places:
                    self._unread.add(name)
        self._reads_large = False
        return found

    @property
    def unread(self) -> list[str]:
        """The variables that looks found to be read, and could not see whole."""
        return sorted(self._unread)

    @property
    def reads_held(self) -> bool:
        """Whether a variable of the last look has led to a part of a kept object."""
        return self._kept.reads_held

    def changed(self) -> list[str]:
        """Return the names of kept objects whose plain attributes or hooks have changed."""
        return [
            name
            for name, each in self._named.items()
            if self._mark_added(each) != self._added[name]
        ]

    def iterators(self, frame: types.FrameType, *, ignore: Collection[str] = ()) -> list[str]:
        """Return the variables that hold an iterator, whose place cannot be kept."""
        live = _live(frame.f_code).get(frame.f_lasti, frozenset(frame.f_locals))
        return [
            name
            for name, value in frame.f_locals.items()
            if name in live and name not in ignore and _is_iterator(value)
        ]

    def _mark(self, value: Any) -> _Mark:
        return _Look(self._kept, home=self._home, reads_large=self._reads_large).mark(value)

    def _mark_added(self, value: Any) -> Hashable:
        """Return a mark of what users add to a network or an optimizer."""
        return self._mark(list(_added(value))).parts


def _restored(kept: Iterable[Any]) -> Iterator[Any]:
    """Yield objects whose state is kept, and what of a network gets its state in place.

    An optimizer gets other ``param_groups`` and another ``state``, so other names of these would
    still name the old ones.
    """
    for each in kept:
        yield each
        if isinstance(each, torch.nn.Module):
            yield from each.modules()
            yield from each.state_dict(keep_vars=True).values()
        yield from inner_optimizers(each).values()


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__") and not isinstance(value, io.IOBase)


class _Kept:
    """Objects that a restored trial has with their state, and the memory of their tensors.

    Args:
        objects: These objects.
        held: Parts of them, which count as such objects, too.

    Attributes:
        reads_held: Whether it was asked for one of these parts.
    """

    def __init__(self, objects: Iterable[Any], *, held: Iterable[Any] = ()) -> None:
        own = {id(each): each for each in objects}
        self._objects = own | {id(each): each for each in held}
        self._held = self._objects.keys() - own.keys()
        pairs = [(_memory_of(each), key) for key, each in self._objects.items()]
        self._memory = [(each, key) for each, key in pairs if each is not None]
        self.reads_held = False

    def __contains__(self, value: object) -> bool:
        """Return whether an object is one of these, or a tensor or an array over their memory."""
        if self.has_object(value):
            return True
        memory = _memory_of(value)
        if memory is None:
            return False
        found = [key for (a, b), key in self._memory if a <= memory[0] < b]
        self.reads_held |= any(key in self._held for key in found)
        return bool(found)

    def has_object(self, value: object) -> bool:
        """Return whether an object is one of these."""
        self.reads_held |= id(value) in self._held
        return id(value) in self._objects

    def mark_of(self, value: Any) -> Hashable:
        """Return which of these an object is, or which part of their memory it shows."""
        if self.has_object(value):
            return id(value)
        if isinstance(value, torch.Tensor):
            return address(value), value.shape, value.stride()
        return value.__array_interface__["data"][0], value.shape, value.strides


def _memory_of(value: Any) -> tuple[int, int] | None:
    """Return where the memory of a tensor or an array begins and ends."""
    try:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type == "meta":
                return None
            begin = storage_address(value)
            return (begin, begin + value.untyped_storage().nbytes()) if begin else None
        if isinstance(value, np.ndarray) and value.nbytes:
            begin = int(value.__array_interface__["data"][0])
            return begin, begin + value.nbytes
    except (RuntimeError, NotImplementedError):  # no memory of its own
        return None
    return None


@dataclass(frozen=True, slots=True)
class _Mark:
    """What changes when a value does.

    Attributes:
        parts: Numbers, texts and sums.
        places: Positions in files that can be read, which matter only if code goes on from there.
        is_unread: Whether there is more that cannot be read.
    """

    parts: tuple[Any, ...]
    places: tuple[Any, ...]
    is_unread: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Large:
    """A large tensor or array: its content, or None, and what changes with most changes of it."""

    content: Any
    version: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Large):
            return NotImplemented
        if self.content is not None and other.content is not None:
            return bool(self.content == other.content)
        return bool(self.version == other.version)

    __hash__ = None  # type: ignore[assignment]


class _Look:
    """One look at a value and what is inside it.

    Args:
        kept: Objects whose state is kept.
        home: The module of the training function, whose functions and classes may hold state.
        reads_large: Whether large tensors and arrays are read.
    """

    def __init__(self, kept: _Kept, *, home: str, reads_large: bool) -> None:
        self._kept = kept
        self._home = home
        self._reads_large = reads_large
        self._places: list[Any] = []
        self._is_unread = False

    def mark(self, value: Any) -> _Mark:
        """Return what changes when a value does."""
        parts = tuple(self._parts(value))
        return _Mark(parts, tuple(self._places), self._is_unread)

    def _parts(self, value: Any) -> Iterator[Any]:
        seen: dict[int, int] = {}
        held = []  # what was made for the look, whose ids would be given to others
        open_values = [value]
        while open_values:
            one = open_values.pop()
            kind = type(one)
            if one is None or kind in _PLAIN:
                yield kind, repr(one)
                continue
            if one in self._kept:
                yield kind, self._kept.mark_of(one)
                continue
            if id(one) in seen:
                yield kind, seen[id(one)]
                continue
            if len(seen) >= _MAX_PARTS:
                self._is_unread = True
                return
            seen[id(one)] = len(seen)
            held.append(one)
            mark, inside = self._looked_at(one)
            yield mark
            open_values += inside

    def _looked_at(self, one: Any) -> tuple[Any, Iterable[Any]]:
        """Return a mark of a value, and the values within that it does not cover."""
        kind = type(one)
        if isinstance(one, torch.Tensor):
            return self._of_numbers(one, tensor_content), ()
        if isinstance(one, np.ndarray):
            if one.dtype.hasobject:
                return (kind, one.shape), one.reshape(-1).tolist()
            return self._of_numbers(one, array_content), ()
        if isinstance(one, _STREAMS):
            return (id(one), _place_of(one)), ()
        if are_containers(kind):
            return _of_container(one)
        if isinstance(one, type | types.FunctionType | types.MethodType | partial):
            return (kind, _identity(one)), _inside(one, home=self._home)
        if isinstance(one, logging.Logger):
            # It remembers which levels are enabled; what users add to it is state.
            return (kind, id(one)), [v for name, v in vars(one).items() if name not in _LOGGER]
        if isinstance(one, _FIXED):
            return (kind, id(one)), ()
        return self._of_object(one)

    def _of_numbers(self, one: Any, content_of: Any) -> Any:
        if _size_of(one) <= _MAX_BYTES or (isinstance(one, torch.Tensor) and one.is_cuda):
            content = content_of(one)
            self._is_unread |= is_unread(content)
            return content
        content = content_of(one) if self._reads_large else None
        self._is_unread |= is_unread(content)
        version = None
        if isinstance(one, torch.Tensor) and not one.is_inference():
            version = one._version
        return _Large(content, (_memory_of(one), version))

    def _of_object(self, one: Any) -> tuple[Any, Iterable[Any]]:
        kind = type(one)
        if isinstance(one, io.IOBase):
            self._places.append(position_in(one))
            return (kind, id(one), file_content(one)), ()
        if isinstance(one, ContextVar):
            return (kind, id(one)), [one.get(None)]
        if isinstance(one, types.MappingProxyType):
            return (kind,), [dict(one)]
        if isinstance(one, staticmethod | classmethod):
            return (kind,), [one.__func__]
        position = position_of(one)
        if position is not None:
            return (kind,), position
        content = opaque_content(one, stand_in=self._stand_in)
        if content is not None and not is_unread(content):
            # What the user adds to a class of compiled code is not in its memory.
            return content, attributes_of(one).values() if is_own(kind) else ()
        self._is_unread |= content is not None
        return (kind, id(one)), attributes_of(one).values()

    def _stand_in(self, one: Any) -> Any:
        return ("kept", self._kept.mark_of(one)) if one in self._kept else None


def _size_of(one: Any) -> int:
    """Return the bytes of a tensor or an array."""
    if isinstance(one, torch.Tensor) and one.layout is not torch.strided:
        return sum(part.nbytes for part in parts_of(one))
    return int(one.nbytes)


def _of_container(one: Any) -> tuple[Any, Iterable[Any]]:
    kind = type(one)
    if len(one) > _MANY:
        digest = plain_digest(one)
        if digest is not None:
            return (kind, digest), ()
    inside = [*one.keys(), *one.values()] if isinstance(one, dict) else [*one]
    return (kind, len(one)), [*inside, *attributes_of(one).values()]


def _identity(one: Any) -> Hashable:
    """Return what stays the same: each access to a method makes a new object."""
    return (id(one.__self__), id(one.__func__)) if isinstance(one, types.MethodType) else id(one)


def _inside(one: Any, *, home: str) -> list[Any]:
    """Return what a class, a function, a method or a partial call holds."""
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, type):
        if one.__module__ != home:
            return []
        return [each for name, each in vars(one).items() if not name.startswith("__")]
    cells = []
    for cell in one.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            cells.append(None)
    found = [*cells, one.__defaults__, one.__kwdefaults__, vars(one)]
    code, space = one.__code__, one.__globals__
    if space.get("__name__") == home:  # a library's wrapper may take the user's __module__
        found += [space[name] for name in _names_of(code) if name in space]
    return found


@lru_cache(maxsize=256)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function and those within it look up, sorted."""
    names = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names |= set(_names_of(each))
    return tuple(sorted(names))


def _globals_of(code: types.CodeType, frame: types.FrameType) -> list[str]:
    """Return the global variables of a module that a function reads."""
    return [
        name
        for name in _names_of(code)
        if name in frame.f_globals and not isinstance(frame.f_globals[name], types.ModuleType)
    ]


def _place_of(stream: Any) -> Hashable:
    """Return where a random stream is."""
    if isinstance(stream, torch.Generator):
        return stream.get_state().numpy().tobytes()
    if isinstance(stream, np.random.Generator):
        return repr(stream.bit_generator.state)
    if isinstance(stream, np.random.RandomState):
        return repr(stream.get_state(legacy=False))
    return stream.getstate()  # type: ignore[no-any-return]


def _added(value: Any) -> Iterator[Any]:
    """Yield what users add to a network or an optimizer: plain attributes, and hooks."""
    if isinstance(value, torch.nn.Module):
        for name, part in value.named_modules():
            yield name
            own = vars(part)
            yield [(n, each) for n, each in own.items() if _is_plain_name(n, part)]
            yield [list(own[hooks].values()) for hooks in _HOOKS if own.get(hooks)]
    elif isinstance(value, torch.optim.Optimizer):
        own = vars(value)
        yield [(n, v) for n, v in own.items() if not n.startswith("_") and n not in _OPTIMIZER]


def _is_plain_name(name: str, part: torch.nn.Module) -> bool:
    if name.startswith("_") or name == "training":
        return False
    # PyTorch's own modules keep nothing else that changes, and a user may add to them.
    return not isinstance(vars(part)[name], torch.nn.Module | torch.nn.Parameter)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER = frozenset({
    "state",
    "param_groups",
    "defaults",
    "step",
    "zero_grad",
    "add_param_group",
})
"""What PyTorch's optimizers and schedulers set themselves."""
_STREAMS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


_LOGGER = frozenset({*vars(logging.Logger("")), "manager"})  # noqa: LOG001 (known to nothing else)
"""What Python's loggers have themselves; the manager knows all other loggers."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, range})
_FIXED = (
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType),
    *(Scheduled, LoopTrial),  # a restored trial has its own
    *ARCHIVES,
)


# -- which variables are live --------------------------------------------------------------


@lru_cache(maxsize=64)
def _live(code: types.CodeType) -> Mapping[int, frozenset[str]]:
    """Return the variables that are live after each ``yield``, by where a frame waits there.

    This is the offset of the instruction, or from Python 3.13 on that of the next one. Variables
    that inner functions share count as live.
    """
    found = list(dis.get_instructions(code))
    places = {each.offset: index for index, each in enumerate(found)}
    shared = {*code.co_cellvars, *code.co_freevars}
    after: list[frozenset[str]] = [frozenset() for _ in found]
    before = list(after)
    handlers = _handlers(code)
    is_new = True
    while is_new:
        is_new = False
        for index in range(len(found) - 1, -1, -1):
            each = found[index]
            next_ones = []
            if each.opname not in _ENDS and index + 1 < len(found):
                next_ones.append(index + 1)
            if each.opcode in _JUMPS and each.argval in places:
                next_ones.append(places[each.argval])
            next_ones += [places[t] for a, b, t in handlers if a <= each.offset < b and t in places]
            out = frozenset().union(*(before[other] for other in next_ones))
            reads, writes = _touched(each)
            inside = (out - writes) | reads
            if out != after[index] or inside != before[index]:
                after[index], before[index], is_new = out, inside, True
    return {
        place.offset: after[index] | shared
        for index, each in enumerate(found)
        if each.opname in ("YIELD_VALUE", "INSTRUMENTED_YIELD_VALUE")
        for place in found[index : index + 2]
    }


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ENDS = frozenset({
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD"),
    *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP"),
})


def _touched(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the local variables that an instruction reads, and those that it then writes."""
    name, value = instruction.opname, instruction.argval
    if "_FAST" not in name:
        return frozenset(), frozenset()
    names = value if isinstance(value, tuple) else (value,)
    parts = name.split("_FAST")
    verbs = [part.strip("_").split("_")[-1] for part in parts[: len(names)]]
    reads = {n for verb, n in zip(verbs, names, strict=False) if verb == "LOAD"}
    writes = {n for verb, n in zip(verbs, names, strict=False) if verb in ("STORE", "DELETE")}
    if name == "STORE_FAST_LOAD_FAST" and len(set(names)) == 1:
        reads = set()
    return frozenset(reads), frozenset(writes)


def _handlers(code: types.CodeType) -> list[tuple[int, int, int]]:
    """Return the ranges of instructions whose errors are caught, and where that goes on."""
    parse = getattr(dis, "_parse_exception_table", None)
    return [] if parse is None else [(e.start, e.end, e.target) for e in parse(code)]
