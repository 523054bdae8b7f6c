"""Folding: sums that are computed where their terms are, in one pass over memory.

A recorded program writes each result to memory and reads it again for the sum that it goes into.
Here a sum takes over the call that makes its last term, if nothing else reads that term:

- ``x + a @ b`` becomes ``addmm`` or ``baddbmm``, which add to ``x`` where it is;
- ``x + a * b`` becomes ``addcmul``;
- the sum of two gradients of slices that make up a tensor becomes ``cat``.

Results are the same but for rounding. Like those of any other program, they are compared with plain
PyTorch while it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ._narrowing import narrowed
from ._record import VIEWS, Call, Program, Ref
from ._tape import alive, changed_values, roots


aten: Any = torch.ops.aten

_FOLDED: WeakKeyDictionary[Program, Program] = WeakKeyDictionary()
"""The folded program of each one."""

_ADDING = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}
"""What adds a product to its first argument."""
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})


def optimized(program: Program, *, device: torch.device) -> Program:
    """Return a program with the same outputs in the form in which it runs.

    Args:
        program: The program, as it was recorded.
        device: Where it runs.
    """
    return folded(narrowed(program, device=device))


def folded(program: Program) -> Program:
    """Return a program with the same outputs whose sums are computed in fewer passes."""
    if program not in _FOLDED:
        _FOLDED[program] = program if _rounds_to_single(program) else _Folder(program).program()
    return _FOLDED[program]


def _rounds_to_single(program: Program) -> bool:
    """Return whether a program computes in double precision, but some values in single.

    Dry runs compare such programs as if all were in double precision (a normalisation of
    transformers, say, is always in single). They have to be the same to the last bit: another last
    bit in double precision may become one in single.
    """
    computed = {
        program.meta[number][2]
        for call in alive(program)
        if not (call.function in VIEWS or call.function.is_view)
        for number in call.outputs
    }
    return {torch.float32, torch.float64} <= computed


class _Folder:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._calls: list[Call | None] = list(alive(program))
        self._meta = list(program.meta)
        root = roots(program.calls)
        self._root = root
        self._changed = changed_values(program)
        self._uses: dict[int, int] = {}
        self._made_at: dict[int, int] = {}
        for index, call in enumerate(alive(program)):
            for number in call.refs:
                self._uses[number] = self._uses.get(number, 0) + 1
            for number in call.outputs:
                self._made_at[number] = index
        for value in program.outputs:
            if value is not None:
                self._uses[value] = self._uses.get(value, 0) + 2  # never folded away

    def program(self) -> Program:
        calls: list[Call] = []
        new: dict[int, list[Call]] = {}
        for index, call in enumerate(self._calls):
            if call is not None and self._is_plain_sum(call):
                found = self._fold(call)
                if found is not None:
                    new[index] = found
        for index, call in enumerate(self._calls):
            if index in new:
                calls += new[index]
            elif call is not None:
                calls.append(call)
        return replace(self._program, calls=tuple(calls), meta=tuple(self._meta))

    def _is_plain_sum(self, call: Call) -> bool:
        return (
            call.function is aten.add.Tensor
            and len(call.args) == len(call.refs) == 2
            and not call.kwargs
            and call.refs[0] != call.refs[1]
            and len({self._meta[n][2] for n in (*call.refs, *call.outputs)}) == 1
            and self._meta[call.outputs[0]][2] in (torch.float32, torch.float64)
        )

    def _fold(self, call: Call) -> list[Call] | None:
        """Return the calls that a sum becomes; None if it stays as it is."""
        # the term that was made last: it goes into the sum soon after
        terms = sorted(call.refs, key=lambda n: self._made_at.get(n, -1), reverse=True)
        for term in terms:
            other = next(n for n in call.refs if n != term)
            for fold in (self._as_slices, self._as_product, self._as_elements):
                found = fold(call, term, other)
                if found is not None:
                    return found
        return None

    # -- what a term is made by ------------------------------------------------------------

    def _only_maker(self, number: int) -> Call | None:
        """Return the call that makes a value which only one call reads, or None."""
        index = self._made_at.get(number)
        if index is None or self._uses.get(number) != 1:
            return None
        call = self._calls[index]
        if call is None or len(call.outputs) != 1:
            return None
        touched = {self._root.get(n, n) for n in (*call.refs, *call.outputs)}
        return None if touched & self._changed else call

    def _take(self, *numbers: int) -> None:
        """Leave out the calls that make these values."""
        for number in numbers:
            self._calls[self._made_at[number]] = None

    def _is_dense(self, number: int) -> bool:
        shape, stride, _ = self._meta[number]
        return stride == _dense(shape)

    # -- the folds ---------------------------------------------------------------------------

    def _as_product(self, call: Call, term: int, other: int) -> list[Call] | None:
        """Fold ``other + a @ b``; the product may be reshaped before it is added."""
        (out,) = call.outputs
        taken, maker = [term], self._only_maker(term)
        while maker is not None and maker.function in _RESHAPES:
            taken.append(maker.refs[0])
            maker = self._only_maker(maker.refs[0])
        if maker is None or maker.function not in _ADDING or maker.kwargs:
            return None
        product = maker.outputs[0]
        shape, flat = self._meta[out][0], self._meta[product][0]
        if not all(map(self._is_dense, (other, out, product, *taken))):
            return None
        if not (self._meta[other][0] == self._meta[term][0] == shape):
            return None
        if self._root.get(other, other) in self._changed:
            return None
        function = _ADDING[maker.function]
        if flat == shape:
            self._take(*taken)
            return [_call(function, (Ref(other), *maker.args), out)]
        if out in self._program.outputs:
            return None  # it would be a view, and is computed where its reader wants it
        self._take(*taken)
        before, after = self._new(product), self._new(product)
        return [
            _call(aten.view.default, (Ref(other), list(flat)), before),
            _call(function, (Ref(before), *maker.args), after),
            _call(aten.view.default, (Ref(after), list(shape)), out),
        ]

    def _as_elements(self, call: Call, term: int, other: int) -> list[Call] | None:
        """Fold ``other + a * b``."""
        (out,) = call.outputs
        maker = self._only_maker(term)
        if maker is None or maker.function is not aten.mul.Tensor or len(maker.refs) != 2:
            return None
        dtype = self._meta[out][2]
        if self._meta[term][0] != self._meta[out][0] or maker.kwargs:
            return None
        if any(self._meta[n][2] != dtype for n in maker.refs):
            return None
        if self._root.get(other, other) in self._changed:
            return None
        self._take(term)
        return [_call(aten.addcmul.default, (Ref(other), *maker.args), out)]

    def _as_slices(self, call: Call, term: int, other: int) -> list[Call] | None:
        """Fold the sum of the gradients of two slices, which are zero outside of their slices."""
        (out,) = call.outputs
        parts = [self._slice(term), self._slice(other)]
        if None in parts:
            return None
        first, last = sorted((part for part in parts if part is not None), key=itemgetter(1))
        size = self._meta[out][0][first[0]]
        if first[0] != last[0] or (first[1], first[2], last[2]) != (0, last[1], size):
            return None
        self._take(term, other)
        return [_call(aten.cat.default, ([Ref(first[3]), Ref(last[3])], first[0]), out)]

    def _new(self, like: int) -> int:
        """Add a value of the layout of another one; return its number."""
        self._meta.append(self._meta[like])
        return len(self._meta) - 1

    def _slice(self, number: int) -> tuple[int, int, int, int] | None:
        """Return dimension, begin, end and number of the gradient of a slice; None of others."""
        maker = self._only_maker(number)
        if maker is None or maker.function is not aten.slice_backward.default or maker.kwargs:
            return None
        gradient, sizes, dim, start, end, step = maker.args
        if step != 1 or start is None or end is None:
            return None
        dim, size = dim % len(sizes), sizes[dim]
        start, end = (min(max(n + size if n < 0 else n, 0), size) for n in (start, end))
        return dim, start, end, gradient.value


def _call(function: Any, args: tuple[Any, ...], output: int) -> Call:
    refs = tuple(a.value for arg in args for a in _each(arg) if isinstance(a, Ref))
    return Call(function=function, args=args, kwargs={}, refs=refs, outputs=(output,), places=(0,))


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _dense(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, in the usual order."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))
