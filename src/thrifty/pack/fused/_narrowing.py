"""Programs in the form in which they run: without rows that nothing reads, halves put together.

*Narrowing.* A classifier that reads the last token of each sequence needs that row of its top block
alone, and only in that row the gradient is not zero. The recorded program computes all rows. Here,
products, normalisations and functions of elements compute the rows that matter.

``narrowed`` goes through a program twice. Forwards, it finds gradients that are zero outside some
rows; backwards, it finds the rows of each value that are read. Functions without a rule
(``_row_rules.py``) read and compute everything. What a narrowed program computes is compared with
plain PyTorch like that of any other one: in the dry run of its structure, and while it trains.

*Folding.* The gradient of a slice is a tensor of zeros with a copy in it. Where a tensor is read in
two parts, such as the halves of a rotation by position, programs make two such tensors and add
them. Their concatenation is the same to the last bit, but for the sign of zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ._record import Call, Program, Ref, named_arguments
from ._row_rules import SELECTIONS, Given, Rows, RowsOrAll, Rule, moved, rule_of
from ._samplewise import num_operations
from ._tape import alive, changed_values, roots, writes


aten: Any = torch.ops.aten

MAX_SHARE = 0.5
"""The largest share of a dimension for which its other rows are left out."""
MIN_SAVED = 0.1
"""The share of a program's multiplications that narrowing must save; else it stays as it is."""


_NARROWED: WeakKeyDictionary[Program, Program | None] = WeakKeyDictionary()
"""The narrowed program of each one; None where it stays as it is."""


def narrowed(program: Program, *, device: torch.device) -> Program:
    """Return a program with the same outputs that leaves out rows that nothing reads.

    Args:
        program: The program.
        device: Where it runs; single calls are tried there to learn the layout of their results.

    Returns:
        The narrowed program, or the given one if little would be saved.
    """
    if program not in _NARROWED:
        _NARROWED[program] = _narrow(program, device)
    return _NARROWED[program] or program


def _narrow(program: Program, device: torch.device) -> Program | None:
    calls = alive(program)
    if any(dtype == torch.float16 for _, _, dtype in program.meta):
        return None  # rows that nothing reads may overflow, and spoil plain gradients
    if not any(call.function.overloadpacket in SELECTIONS for call in calls):
        return None
    plan = _Plan(replace(program, calls=calls))
    if not plan.narrows:
        return None
    try:
        found = _Writer(plan, device).program()
    except (RuntimeError, ValueError, IndexError):
        return None  # a layout that a view cannot have, say: all rows are right, too
    before, after = (sum(num_operations(c, p) for c in p.calls) for p in (plan.program, found))
    return found if after <= (1 - MIN_SAVED) * before else None


class _Plan:
    """Which rows of each value are zero or not read, and what each call reads.

    Attributes:
        program: The program, without calls that do not matter.
        zeros: The rows outside of which a value is zero.
        stored: The rows that a value is computed in, for values of which not all are.
        reads: For each narrowed call what it reads, by its place.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        root = roots(program.calls)
        changed = {root.get(n, n) for call in program.calls for n in writes(call)}
        self._is_kept = [
            not any(root.get(n, n) in changed for n in (*call.refs, *call.outputs))
            for call in program.calls
        ]
        self.zeros: dict[int, Rows] = {}
        self._find_zeros()
        self.stored: dict[int, Rows] = {}
        self.reads: dict[int, dict[int, RowsOrAll]] = {}
        self._find_reads()

    @property
    def narrows(self) -> bool:
        """Whether any call computes some rows only."""
        return bool(self.reads)

    def given(self, index: int) -> Given:
        """Return a call with what is known about its arguments."""
        return Given(self.program.calls[index], self.program, self.zeros)

    def _rule(self, index: int) -> Rule | None:
        call = self.program.calls[index]
        return rule_of(call) if self._is_kept[index] and call.outputs else None

    def _find_zeros(self) -> None:
        for index, call in enumerate(self.program.calls):
            rule = self._rule(index)
            if rule is None or rule.zeros is None:
                continue
            for number, rows in zip(call.outputs, rule.zeros(self.given(index)), strict=True):
                if rows is not None and self._pays(number, rows):
                    self.zeros[number] = rows

    def _find_reads(self) -> None:
        read: dict[int, RowsOrAll] = {n: None for n in self.program.outputs if n is not None}
        for index in reversed(range(len(self.program.calls))):
            call = self.program.calls[index]
            rule = self._rule(index)
            given = self.given(index)
            given.wanted = {
                place: self.zeros.get(number, read[number])
                for place, number in enumerate(call.outputs)
                if number in read
            }
            found = None if rule is None else rule.reads(given)
            if found is None or not all(self._pays(*each) for each in found.items()):
                found = dict.fromkeys(call.refs)
            elif any(found.values()) or any(given.wanted.values()):
                self.reads[index] = found
                if rule is not None and not rule.is_view:
                    self._store(call, given.wanted)
            for number, rows in found.items():
                read[number] = rows if read.get(number, rows) == rows else None

    def _store(self, call: Call, wanted: Mapping[int, RowsOrAll]) -> None:
        some = next((rows for rows in wanted.values() if rows is not None), None)
        for place, number in enumerate(call.outputs):
            rows = wanted.get(place, some)
            if rows is not None:
                self.stored[number] = rows

    def _pays(self, number: int, rows: RowsOrAll) -> bool:
        return rows is None or rows.num <= MAX_SHARE * self.program.meta[number][0][rows.dim]


class _Writer:
    """Writes the narrowed program: calls with some rows, and slices of what has more."""

    def __init__(self, plan: _Plan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._whole = plan.program.meta
        self._meta = list(plan.program.meta)
        self._calls: list[Call] = []
        self._stored: dict[int, Rows] = {}
        """The rows that values have so far; others have all."""
        self._parts: dict[tuple[int, RowsOrAll], int] = {}
        """Values that hold other rows of a value."""
        self._copies: dict[int, int] = {}
        """Copies of values in dense memory."""

    def program(self) -> Program:
        calls = self._plan.program.calls
        for index, call in enumerate(calls):
            if index in self._plan.reads:
                self._narrow(index, call)
            else:
                self._calls.append(self._with(call, {n: self._get(n, None) for n in call.refs}))
        outputs = tuple(
            None if n is None else self._get(n, None) for n in self._plan.program.outputs
        )
        return replace(
            self._plan.program, calls=tuple(self._calls), outputs=outputs, meta=tuple(self._meta)
        )

    def _narrow(self, index: int, call: Call) -> None:
        rule = rule_of(call)
        assert rule is not None
        reads = self._plan.reads[index]
        if rule.is_view:
            self._view(index, call, rule)
            return
        some = next((self._plan.stored[n] for n in call.outputs if n in self._plan.stored), None)
        given = self._plan.given(index)
        changes = {} if rule.changes is None else rule.changes(given, some)
        parts = {n: self._get(n, rows) for n, rows in reads.items()}
        if rule.needs_dense:
            parts = {n: self._dense(part) if part != n else n for n, part in parts.items()}
        self._emit(call, parts, changes)
        for number in call.outputs:
            if number in self._plan.stored:
                self._stored[number] = self._plan.stored[number]

    def _view(self, index: int, call: Call, rule: Rule) -> None:
        """Write a view of the remaining rows; a view of all rows costs nothing."""
        (number,) = set(call.refs)
        have = self._stored.get(number)
        given = self._plan.given(index)
        rows = None
        if have is not None:
            rows = moved(given, have)
        if rows is None:
            part = self._get(number, None)
            self._calls.append(self._with(call, {number: part}))
            return
        assert rule.changes is not None
        self._emit(call, {number: number}, rule.changes(given, rows))
        self._stored[call.outputs[0]] = rows

    def _get(self, number: int, rows: RowsOrAll) -> int:
        """Return the value that holds some rows of a value; write a call for it if there is none.

        Raises:
            ValueError: Rows that are not computed are asked for; it cannot happen.
        """
        have = self._stored.get(number)
        if have == rows:
            return number
        if (number, rows) in self._parts:
            return self._parts[number, rows]
        if have is not None:
            if self._plan.zeros.get(number) != have:
                raise ValueError(f"value {number} lacks rows: {have}, not {rows}")
            if rows is not None:
                whole = self._get(number, None)
                return self._slice(number, whole, rows)
            shape = list(self._whole[number][0])
            args = (Ref(number), shape, *have.slice_args())
            return self._part(aten.slice_backward.default, args, number, rows)
        assert rows is not None
        return self._guarded(number, rows)

    def _guarded(self, number: int, rows: Rows) -> int:
        """Return rows of a value that are NaN if any other of its rows is not finite.

        Zero times NaN is NaN, so in plain PyTorch such rows spoil the gradients of all weights. A
        trial whose loss is NaN in a pack is trained again, alone.
        """
        part = self._slice(number, number, rows)
        if not self._plan.zeros or not self._meta[number][2].is_floating_point:
            return part
        whole = self._new(aten.sum.dim_IntList, (Ref(number), [rows.dim], True))
        zero = self._new(aten.mul.Scalar, (Ref(whole), 0.0))
        self._parts[number, rows] = self._new(aten.add.Tensor, (Ref(part), Ref(zero)))
        return self._parts[number, rows]

    def _slice(self, number: int, whole: int, rows: Rows) -> int:
        return self._part(aten.slice.Tensor, (Ref(whole), *rows.slice_args()), number, rows)

    def _dense(self, number: int) -> int:
        """Return a value with the same content in dense memory."""
        if number not in self._copies:
            form = {"memory_format": torch.contiguous_format}
            self._copies[number] = self._new(aten.clone.default, (Ref(number),), **form)
        return self._copies[number]

    def _part(self, function: Any, args: tuple[Any, ...], number: int, rows: RowsOrAll) -> int:
        self._parts[number, rows] = self._new(function, args)
        return self._parts[number, rows]

    def _new(self, function: Any, args: tuple[Any, ...], **kwargs: Any) -> int:
        """Write a call that makes a new value, and return its number."""
        new = len(self._meta)
        self._meta.append(self._meta[0])  # noted when it has been tried
        refs = tuple(a.value for a in args if isinstance(a, Ref))
        call = Call(
            function=function, args=args, kwargs=kwargs, refs=refs, outputs=(new,), places=(0,)
        )
        self._emit(call, {n: n for n in refs}, {})
        return new

    def _emit(self, call: Call, parts: Mapping[int, int], changes: Mapping[str, Any]) -> None:
        """Write a call on parts of its arguments, and note the layout of its results."""
        new = self._with(call, parts, changes)
        for number, meta in zip(new.outputs, self._tried(new), strict=True):
            self._meta[number] = meta
        self._calls.append(new)

    def _with(
        self, call: Call, parts: Mapping[int, int], changes: Mapping[str, Any] | None = None
    ) -> Call:
        """Return a call with other arguments."""
        changes = changes or {}
        names = [argument.name for argument in call.function._schema.arguments]
        args = [
            changes[name] if name in changes else _renamed(value, parts)
            for name, value in zip(names, call.args, strict=False)
        ]
        kwargs = {name: _renamed(value, parts) for name, value in call.kwargs.items()}
        for place, name in enumerate(names):
            if name in changes and place >= len(call.args):
                kwargs[name] = changes[name]
        return replace(
            call, args=tuple(args), kwargs=kwargs, refs=tuple(parts[n] for n in call.refs)
        )

    def _tried(self, call: Call) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
        """Return shape, stride and dtype of the results, from a run on tensors of any content."""

        def made(value: Any) -> Any:
            if isinstance(value, Ref):
                shape, stride, dtype = self._meta[value.value]
                return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
            if isinstance(value, list | tuple):
                return type(value)(made(each) for each in value)
            return value

        with torch.no_grad():
            out = call.function(
                *(made(a) for a in call.args), **{n: made(a) for n, a in call.kwargs.items()}
            )
        found = out if isinstance(out, list | tuple) else (out,)
        return [(t.shape, t.stride(), t.dtype) for t in (found[place] for place in call.places)]


def _renamed(value: Any, parts: Mapping[int, int]) -> Any:
    if isinstance(value, Ref):
        return Ref(parts[value.value])
    if isinstance(value, list | tuple):
        return type(value)(_renamed(each, parts) for each in value)
    return value


# -- folding -------------------------------------------------------------------------------

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
