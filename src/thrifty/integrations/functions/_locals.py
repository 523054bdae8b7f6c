"""Local variables of a training function that would be lost when a trial is restored.

A restored trial runs the function anew up to its loop, so a variable that its loop changes and
reads again in a later round has to be in the state. Which variables those are is known: the ones
that are live at the ``yield`` (read on some path before they are written) and no longer have the
value that they had when the loop began.
"""

from __future__ import annotations

import dis
import io
import types
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ._loop_trial import LoopTrial, Scheduled


_MAX_PARTS = 20_000
"""How many values inside of variables are looked at."""
_MAX_BYTES = 2**24
"""Larger arrays are compared by their memory only."""


class Locals:
    """The variables of a function when its loop begins, to compare with those of a later round.

    Args:
        frame: The frame of the function.
        kept: Objects whose state is kept.
    """

    def __init__(self, frame: types.FrameType, *, kept: Collection[Any]) -> None:
        self._kept = {id(each): each for each in kept}
        self._values = dict(frame.f_locals)  # kept, so that ids stay theirs
        self._marks = {name: self._mark(value) for name, value in self._values.items()}

    def lost(self, frame: types.FrameType, *, ignore: Collection[str] = ()) -> list[str]:
        """Return the variables that the next round reads and that a restored trial lacks.

        Args:
            frame: The frame, at a ``yield``.
            ignore: Variables that are meant to be lost.
        """
        now = frame.f_locals
        live = _live(frame.f_code).get(frame.f_lasti, frozenset(now))
        return [
            name
            for name in now
            if name in live
            and name not in ignore
            and name
            in self._marks  # others do not exist when the loop begins, so are written first
            and id(now[name]) not in self._kept
            and self._mark(now[name]) != self._marks[name]
        ]

    def iterators(self, frame: types.FrameType, *, ignore: Collection[str] = ()) -> list[str]:
        """Return the variables that hold an iterator, whose place cannot be kept."""
        live = _live(frame.f_code).get(frame.f_lasti, frozenset(frame.f_locals))
        return [
            name
            for name, value in frame.f_locals.items()
            if name in live and name not in ignore and _is_iterator(value)
        ]

    def _mark(self, value: Any) -> Hashable:
        return tuple(_parts(value, kept=self._kept))


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__") and not isinstance(value, io.IOBase)


def _parts(value: Any, *, kept: Mapping[int, Any]) -> Iterator[Hashable]:
    """Yield what changes when a value does: numbers, texts, and where tensors have their memory."""
    seen: set[int] = set()
    open_values = [value]
    while open_values and len(seen) < _MAX_PARTS:
        one = open_values.pop()
        kind = type(one)
        if one is None or kind in _PLAIN:
            yield kind, repr(one)
            continue
        if id(one) in kept or id(one) in seen:
            yield kind, id(one)
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one.data_ptr() if one.layout is torch.strided else id(one), one._version
        elif isinstance(one, np.ndarray):
            yield (id(one), one.tobytes() if one.nbytes <= _MAX_BYTES else one.ctypes.data)
        elif isinstance(one, Mapping):
            yield kind, len(one)
            open_values += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            yield kind, len(one)
            open_values += one
        elif isinstance(one, _FIXED):
            yield kind, id(one)
        else:
            yield kind, id(one)
            open_values += _attributes(one)


_PLAIN = frozenset({bool, int, float, complex, str, bytes, range})
_FIXED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType),
    *(Scheduled, LoopTrial),  # a restored trial has its own
)


def _attributes(value: Any) -> Iterable[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            found.append(getattr(value, name, None))
    return found


# -- which variables are live --------------------------------------------------------------


@lru_cache(maxsize=64)
def _live(code: types.CodeType) -> Mapping[int, frozenset[str]]:
    """Return the variables that are live after each ``yield``, by the offset of the instruction.

    Variables that inner functions share count as live.
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
        each.offset: after[index] | shared
        for index, each in enumerate(found)
        if each.opname in ("YIELD_VALUE", "INSTRUMENTED_YIELD_VALUE")
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
