"""Folding: the sum of two gradients of slices that make up a tensor is their concatenation.

The gradient of a slice is a tensor of zeros with a copy in it. Where a tensor is read in two parts,
such as the halves of a rotation by position, programs make two such tensors and add them. Their
concatenation is the same to the last bit, but for the sign of zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ._narrowing import narrowed
from ._record import Call, Program, Ref, named_arguments
from ._tape import alive, changed_values, roots


aten: Any = torch.ops.aten

_FOLDED: WeakKeyDictionary[Program, Program] = WeakKeyDictionary()
"""The folded program of each one."""


def optimized(program: Program, *, device: torch.device) -> Program:
    """Return a program with the same outputs in the form in which it runs.

    Args:
        program: The program, as it was recorded.
        device: Where it runs.
    """
    return folded(narrowed(program, device=device))


def folded(program: Program) -> Program:
    """Return a program with the same outputs, in which such sums are concatenations."""
    if program not in _FOLDED:
        _FOLDED[program] = _fold(program)
    return _FOLDED[program]


def _fold(program: Program) -> Program:
    calls = alive(program)
    made = {number: call for call in calls for number in call.outputs}
    num_reads = Counter([n for call in calls for n in call.refs])
    num_reads.update(n for n in program.outputs if n is not None)
    root, changed = roots(program.calls), changed_values(program)

    def slice_of(number: int) -> Call | None:
        """Return the call that makes the gradient of a slice if only one call reads it."""
        call = made.get(number)
        if call is None or call.function is not aten.slice_backward.default:
            return None
        is_kept = changed.isdisjoint(root.get(n, n) for n in (number, *call.refs))
        return call if is_kept and num_reads[number] == 1 else None

    out: dict[int, Call] = {}
    folded_away: set[int] = set()
    for call in calls:
        found = _concatenation(call, slice_of, program)
        if found is not None:
            out[call.outputs[0]] = found
            folded_away.update(call.refs)
    return replace(
        program,
        calls=tuple(
            out.get(call.outputs[0], call) if call.outputs else call
            for call in calls
            if folded_away.isdisjoint(call.outputs)
        ),
    )


def _concatenation(
    call: Call, slice_of: Callable[[int], Call | None], program: Program
) -> Call | None:
    """Return the concatenation that a sum of two gradients of slices is; None of others."""
    if call.function is not aten.add.Tensor or len(call.refs) != 2 or len(call.args) != 2:
        return None
    if named_arguments(call)["alpha"] != 1:
        return None
    wanted = [program.meta[n][::2] for n in (*call.refs, *call.outputs)]  # shapes and dtypes
    if wanted.count(wanted[0]) != len(wanted):
        return None
    slices = [_bounds(each) for n in call.refs if (each := slice_of(n)) is not None]
    if len(slices) < 2:
        return None
    (dim, start, middle, first), (other, after, end, last) = sorted(slices)
    size = program.meta[call.outputs[0]][0][dim]
    if dim != other or (start, middle, end) != (0, after, size):
        return None
    return replace(
        call,
        function=aten.cat.default,
        args=([Ref(first), Ref(last)], dim),
        kwargs={},
        refs=(first, last),
    )


def _bounds(call: Call) -> tuple[int, int, int, int]:
    """Return dimension, beginning, end and gradient of a slice; one with steps begins nowhere."""
    given = named_arguments(call)
    dim = given["dim"] % len(given["input_sizes"])
    size = given["input_sizes"][dim]
    start, end = (
        min(max(n + size if n < 0 else n, 0), size) for n in (given["start"], given["end"])
    )
    return dim, start if given["step"] == 1 else -1, end, call.refs[0]
