"""Tapes: a recorded program bound to fixed memory, replayed by a straight line of calls.

Views are made once, when the program is bound; results go into buffers that are made once and used again as soon as nobody needs
what is in them; a gradient goes where the optimiser reads it. What is left for a step is the arithmetic. The same fixed addresses let a
GPU capture a tape as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ._out_variants import CREATIONS, IN_PLACE_SAFE, VIEWS, out_variant
from ._record import Call, Program, Ref


MAX_COPIED_BYTES = 2**20
"""Beyond this, results of functions that cannot write into a buffer stay where they are."""


class Tape:
    """``tape()`` computes the program's outputs from what is in its inputs; ``outputs`` are always the same tensors."""

    def __init__(self, run: Callable[[], None], outputs: Sequence[torch.Tensor | None]) -> None:
        self.run = run
        self.outputs = outputs

    def __call__(self) -> None:
        """To be called without autograd."""
        self.run()


def captured(tape: Tape) -> Tape:
    """The same tape as a CUDA graph: one launch for all of its calls. It must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tape()
    return Tape(graph.replay, tape.outputs)


class Arena:
    """Buffers that several tapes use one after the other: what one leaves in cache is where the next one works."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self.num_bytes = 0
        """All that was ever taken: nothing is freed before the arena is."""

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A buffer of bytes that nobody uses."""
        known = self._free.get((num_bytes, device))
        if known:
            return known.pop()
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """It may be used again."""
        self._free.setdefault((buffer.numel(), buffer.device), []).append(buffer)


def bind(
    program: Program,
    inputs: Sequence[torch.Tensor],
    *,
    draws: Sequence[torch.Tensor] = (),
    destinations: Mapping[int, torch.Tensor] | None = None,
    arena: Arena | None = None,
) -> Tape:
    """Binds a program to its inputs.

    ``draws`` take the place of those of the program; ``destinations`` says where outputs are wanted, by position.
    """
    known = {**dict(enumerate(inputs)), **program.constants}
    known.update({n: t for n, t in zip(program.draws, draws, strict=False) if n is not None})
    return _Binder(program, known, destinations or {}, arena or Arena()).tape()


class _Binder:
    def __init__(
        self,
        program: Program,
        known: Mapping[int, torch.Tensor],
        destinations: Mapping[int, torch.Tensor],
        arena: Arena,
    ) -> None:
        self._program = program
        self._arena = arena
        self._device = known[0].device
        self._static: dict[int, torch.Tensor] = dict(known)
        self._constant_values: set[int] = set()
        self._wanted = destinations
        found = _analysed(program)
        self._calls, self._root = found.calls, found.root
        self._changed, self._last_use = found.changed, found.last_use
        self._to: dict[int, torch.Tensor] = self._find_targets()
        self._buffers: dict[int, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}

    def tape(self) -> Tape:
        for index, call in enumerate(self._calls):
            self._emit(index, call)
            self._release(index)
        outputs: list[torch.Tensor | None] = []
        for position, value in enumerate(self._program.outputs):
            outputs.append(None if value is None else self._output(position, value))
        for buffer in [*self._buffers.values(), *self._held]:
            self._arena.give_back(buffer)
        body = "\n    ".join(self._lines) or "pass"
        exec(f"def run():\n    {body}\n", self._names)
        return Tape(self._names["run"], outputs)

    # -- one call ------------------------------------------------------------------------

    def _emit(self, index: int, call: Call) -> None:
        refs = call.refs
        static = all(ref in self._static for ref in refs)
        function = call.function
        if self._fold(call, refs):
            return
        if static and (function in VIEWS or function.is_view):
            self._evaluate(call)
        elif _writes(call) or not (static and self._into_buffers(index, call)):
            self._dynamic(call)

    def _evaluate(self, call: Call) -> None:
        """Once and for all."""
        args, kwargs = self._values(call)
        out = _tensors(call.function(*args, **kwargs))
        self._static.update(zip(call.outputs, out, strict=True))

    def _fold(self, call: Call, refs: Sequence[int]) -> bool:
        """What depends on shapes and constants alone is worked out once, unless something is written into it."""
        if any(self._root.get(n, n) in self._changed for n in call.outputs):
            return False
        if call.function not in CREATIONS and not (
            refs and all(ref in self._constant_values for ref in refs)
        ):
            return False
        self._evaluate(call)
        self._constant_values.update(call.outputs)
        return True

    def _into_buffers(self, index: int, call: Call) -> bool:
        found = out_variant(call.function, self._device.type)
        if found is None or len(found[1]) != len(call.outputs):
            return self._copied(index, call)
        variant, out_names = found
        for number in call.outputs:
            target = self._to.get(number)
            self._static[number] = (
                self._allocate(index, call, number) if target is None else target
            )
        outs = ", ".join(
            f"{name}={self._name(Ref(number))}"
            for name, number in zip(out_names, call.outputs, strict=True)
        )
        arguments = self._arguments(call)
        self._lines.append(
            f"{self._constant(variant)}({arguments}{', ' if arguments else ''}{outs})"
        )
        return True

    def _copied(self, index: int, call: Call) -> bool:
        """A small result is copied to where it always is, so that what comes after it stays static."""
        if (
            len(call.outputs) != 1
            or len(call.function._schema.returns) != 1
            or self._is_list(call)
        ):
            return False
        (number,) = call.outputs
        shape, _, dtype = self._program.meta[number]
        if _writes(call) or shape.numel() * dtype.itemsize > MAX_COPIED_BYTES:
            return False
        arguments = self._arguments(call)
        target = self._to.get(number)
        self._static[number] = self._allocate(index, call, number) if target is None else target
        self._lines.append(
            f"{self._name(Ref(number))}.copy_({self._constant(call.function)}({arguments}))"
        )
        return True

    def _allocate(self, index: int, call: Call, number: int) -> torch.Tensor:
        shape, stride, dtype = self._program.meta[number]
        root = self._reusable(index, call, number)
        if root is None:
            span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
            num_bytes = max(span if shape.numel() else 0, 1) * dtype.itemsize
            buffer = self._arena.take(-(-num_bytes // 64) * 64, self._device)
        else:
            buffer = self._buffers.pop(root)
        self._buffers[number] = buffer
        return buffer.view(dtype).as_strided(shape, stride)

    def _reusable(self, index: int, call: Call, number: int) -> int | None:
        """An argument that nobody needs afterwards, of the same shape, where the function may write over it."""
        if call.function not in IN_PLACE_SAFE:
            return None
        refs = call.refs
        roots = [self._root.get(ref, ref) for ref in refs]
        for ref, root in zip(refs, roots, strict=True):
            if (
                ref == root
                and roots.count(root) == 1  # nothing else in this call looks at the same memory
                and root in self._buffers
                and self._last_use.get(root) == index
                and self._program.meta[ref] == self._program.meta[number]
            ):
                return root
        return None

    def _dynamic(self, call: Call) -> None:
        """Called at each step; its results live as long as the step."""
        outputs = [number for number in call.outputs if number not in call.refs]
        text = f"{self._constant(call.function)}({self._arguments(call)})"
        if not outputs:
            self._lines.append(text)
            return
        names = [f"d{number}" for number in call.outputs]
        tuple_out = len(call.function._schema.returns) > 1
        if tuple_out and len(names) != len(call.function._schema.returns):
            # some results are None (a gradient nobody asked for)
            where = self._constant(_TensorsOf(call.function))
            text = f"{where}({self._arguments(call)})"
        elif not tuple_out and len(names) == 1 and self._is_list(call):
            text = f"{text}[0]"
        self._lines.append(f"{', '.join(names)} = {text}")

    def _is_list(self, call: Call) -> bool:
        return "List" in str(call.function._schema.returns[0].type)

    # -- arguments -----------------------------------------------------------------------

    def _arguments(self, call: Call) -> str:
        parts = [self._argument(a) for a in call.args]
        parts += [f"{name}={self._argument(a)}" for name, a in call.kwargs.items()]
        return ", ".join(parts)

    def _argument(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._name(value)
        if isinstance(value, list | tuple) and any(isinstance(v, Ref) for v in value):
            return f"[{', '.join(self._argument(v) for v in value)}]"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        return self._constant(value)

    def _name(self, ref: Ref) -> str:
        if ref.value in self._static:
            name = f"s{ref.value}"
            self._names[name] = self._static[ref.value]
            return name
        return f"d{ref.value}"

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def _values(self, call: Call) -> tuple[Any, Any]:
        def value(ref: Any) -> Any:
            if not isinstance(ref, Ref):
                return ref
            known = self._static.get(ref.value)
            if known is None:  # only its shape matters
                shape, stride, dtype = self._program.meta[ref.value]
                known = torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
            return known

        return _mapped(value, call.args), {n: _mapped(value, a) for n, a in call.kwargs.items()}

    # -- lifetimes -----------------------------------------------------------------------

    def _release(self, index: int) -> None:
        for root in [r for r in self._buffers if self._last_use.get(r, -1) <= index]:
            self._arena.give_back(self._buffers.pop(root))

    def _find_targets(self) -> dict[int, torch.Tensor]:
        """Outputs that can be computed right where they are wanted."""
        used = {ref for call in self._calls for ref in call.refs}
        return {
            value: self._wanted[position]
            for position, value in enumerate(self._program.outputs)
            if value is not None
            and position in self._wanted
            and value not in used
            and self._program.outputs.count(value) == 1
            and self._wanted[position].shape == self._program.meta[value][0]
        }

    def _output(self, position: int, value: int) -> torch.Tensor | None:
        wanted = self._wanted.get(position)
        held = self._static.get(value)
        if wanted is None:
            if held is not None:
                return held
            shape, _, dtype = self._program.meta[value]
            wanted = torch.empty(shape, dtype=dtype, device=self._device)
        if held is not wanted:
            self._lines.append(f"{self._constant(wanted)}.copy_({self._name(Ref(value))})")
        return wanted


class _TensorsOf:
    """Calls a function and leaves out the results that are None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _tensors(self._function(*args, **kwargs))
        return found[0] if len(found) == 1 else found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with everything in it changed, lists and tuples gone through."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, v) for v in value)
    return change(value)


def _tensors(out: Any) -> list[torch.Tensor]:
    found = out if isinstance(out, list | tuple) else (out,)
    return [t for t in found if isinstance(t, torch.Tensor)]


def _writes(call: Call) -> list[int]:
    """The values that a call writes into."""
    out = []
    for argument, value in zip(call.function._schema.arguments, call.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            inside = value if isinstance(value, list | tuple) else (value,)
            out += [v.value for v in inside if isinstance(v, Ref)]
    for argument in call.function._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = call.kwargs.get(argument.name)
            out += [value.value] if isinstance(value, Ref) else []
    if call.function in MUTATING:
        out += [
            call.args[i].value for i in MUTATING[call.function] if isinstance(call.args[i], Ref)
        ]
    return out


MUTATING = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}
"""Functions that write into arguments (running statistics) though their schema does not say so."""


def _roots(calls: Sequence[Call]) -> dict[int, int]:
    """For each value that shares memory with another one, the one whose memory it is."""
    root: dict[int, int] = {}
    for call in calls:
        refs = call.refs
        if (call.function in VIEWS or call.function.is_view) and refs:
            for number in call.outputs:
                root[number] = root.get(refs[0], refs[0])
    return root


def _changed(calls: Sequence[Call], root: Mapping[int, int]) -> set[int]:
    return {root.get(number, number) for call in calls for number in _writes(call)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Analysis:
    """What binding needs to know of a program, however often it is bound.

    ``calls`` are those that matter; ``root`` has, for each value that is a view, whose memory it is; ``changed`` the
    memory that is written into; ``last_use`` the last call that looks at some memory.
    """

    calls: tuple[Call, ...]
    root: Mapping[int, int]
    changed: set[int]
    last_use: Mapping[int, int]


_ANALYSES: WeakKeyDictionary[Program, _Analysis] = WeakKeyDictionary()
"""Made once for each program, and kept no longer than it."""


def _analysed(program: Program) -> _Analysis:
    found = _ANALYSES.get(program)
    if found is None:
        found = _ANALYSES[program] = _analyse(program)
    return found


def _analyse(program: Program) -> _Analysis:
    calls = _alive(program)
    root = _roots(calls)
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        for number in (*call.refs, *call.outputs):
            last[root.get(number, number)] = index
    for value in program.outputs:
        if value is not None:
            last[root.get(value, value)] = len(calls)
    return _Analysis(calls=calls, root=root, changed=_changed(calls, root), last_use=last)


def _alive(program: Program) -> tuple[Call, ...]:
    """The calls that matter: those behind outputs, and those that write into something that matters."""
    root = _roots(program.calls)
    outside = set(range(program.num_inputs)) | set(program.constants)
    needed = {root.get(v, v) for v in program.outputs if v is not None}
    kept: list[Call] = []
    for call in reversed(program.calls):
        written = {root.get(n, n) for n in _writes(call)}
        produced = {root.get(n, n) for n in call.outputs}
        if written & outside or (written | produced) & needed:
            kept.append(call)
            needed |= {root.get(n, n) for n in call.refs}
    return tuple(reversed(kept))
