"""Tapes: recorded programs bound to fixed memory and replayed as a straight line of calls.

When a program is bound, its views and buffers are made once. Results go into these buffers, which
are reused as soon as their contents are no longer needed, and gradients go where the optimizer
reads them. Only the arithmetic is left for each step. The fixed addresses also allow capturing a
tape as a CUDA graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thrifty.core import trim_heap
from thrifty.pack._frozen import address, storage_address

from ._products import quick_product
from ._record import CREATIONS, IN_PLACE_SAFE, VIEWS, Call, Program, Ref, out_variant


MIN_EMPTIED_BYTES = 2**20
"""Size from which a buffer is freed while trials compute alone (``BufferPool.emptied``).

Small buffers would save little, and the system has to clear memory that it gives again.
"""
MIN_TRIMMED_BYTES = 2**24
"""Total size of freed buffers from which the heap is trimmed, which takes some milliseconds."""

MAX_COPIED_BYTES = 2**24
"""Size up to which results are copied into buffers if their function cannot write into them.

Copying them pays, since all calls that use them can then write into buffers.
"""


class Tape:
    """A bound program: ``tape()`` computes its outputs from the present contents of its inputs.

    Attributes:
        run: Runs the program.
        outputs: The outputs, always the same tensors; None where the program returns None.
    """

    def __init__(self, run: Callable[[], None], outputs: Sequence[torch.Tensor | None]) -> None:
        self.run = run
        self.outputs = outputs

    def __call__(self) -> None:
        """Run the program; call it with autograd off."""
        self.run()


class _Replay:
    """A captured tape; it keeps the tape, since the graph finds its memory by address.

    Tensors that models share get other memory if something writes to them. Then the tape runs call
    by call.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, tape: Tape, shared: Sequence[torch.Tensor]
    ) -> None:
        self._graph = graph
        self._tape = tape
        self._shared = shared
        self._places = [address(tensor) for tensor in shared]

    def __call__(self) -> None:
        if all(map(eq, map(address, self._shared), self._places)):
            self._graph.replay()
        else:
            self._tape()


def captured(
    tape: Tape, device: torch.device, *, shared: Sequence[torch.Tensor] = ()
) -> Tape | None:
    """Return the tape as a CUDA graph, one launch for all calls; None if it cannot be captured.

    A tape that waits for the GPU cannot. The tape must have run before. ``shared`` are the tensors
    that it reads and that models share.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    present = torch.cuda.current_stream(device)
    stream.wait_stream(present)
    collects = gc.isenabled()
    gc.disable()  # freeing the memory of another graph is not allowed meanwhile
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                tape()
            finally:
                graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    finally:
        if collects:
            gc.enable()
        present.wait_stream(stream)
    return Tape(_Replay(graph, tape, shared), tape.outputs)


class BufferPool:
    """Buffers that several tapes use in turn, so that each tape finds its buffers in cache."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._large: list[torch.Tensor] = []
        """Large buffers on the CPU, which may give their memory back. Captured GPU work may not."""
        self._emptied: list[torch.Tensor] = []
        """Buffers that have no memory now."""
        self.num_bytes = 0
        """Bytes of all buffers ever allocated, those included that are emptied at the moment."""

    def take(self, num_bytes: int, device: torch.device, *, lane: int = 0) -> torch.Tensor:
        """Return a free buffer of bytes, allocating one if needed.

        Args:
            num_bytes: Its size.
            device: Where it is.
            lane: Tapes of other lanes run at the same time, so each lane has its own buffers.
        """
        self.refill()
        known = self._free.get((num_bytes, device, lane))
        if known:
            return known.pop()
        self.num_bytes += num_bytes
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if num_bytes >= MIN_EMPTIED_BYTES and device.type == "cpu":
            self._large.append(buffer)
        return buffer

    def give_back(self, buffer: torch.Tensor, *, lane: int = 0) -> None:
        """Make a buffer available to its lane again."""
        self._free.setdefault((buffer.numel(), buffer.device, lane), []).append(buffer)

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Free the memory of large buffers within the context; what they contain is lost.

        No tape may run within the context. Buffers on a GPU keep their memory.
        """
        large = [buffer for buffer in self._large if buffer.untyped_storage().nbytes()]
        trims = sum(buffer.numel() for buffer in large) >= MIN_TRIMMED_BYTES
        self._emptied += large
        try:
            for buffer in large:
                buffer.untyped_storage().resize_(0)
            if trims:
                trim_heap()
            yield
        except BaseException:
            with suppress(RuntimeError):  # `refill` asks once more, and the first error counts
                self._give_memory(large)
            raise
        if trims:  # the heap would keep what was used within the context, beside the buffers
            trim_heap()
        self._give_memory(large)

    def refill(self) -> None:
        """Give buffers their memory again if they have none; call it before a tape runs.

        A tape that runs without it crashes the process. Buffers that ``emptied`` could not refill,
        because memory had run out, get it here, or the error is raised once more.
        """
        if self._emptied:
            self._give_memory(list(self._emptied))

    def _give_memory(self, buffers: Sequence[torch.Tensor]) -> None:
        try:
            for buffer in buffers:
                if not buffer.untyped_storage().nbytes():
                    buffer.untyped_storage().resize_(buffer.numel())
        finally:
            self._emptied = [b for b in self._emptied if not b.untyped_storage().nbytes()]


def bind(
    program: Program,
    inputs: Sequence[torch.Tensor],
    *,
    draws: Sequence[torch.Tensor] = (),
    destinations: Mapping[int, torch.Tensor] | None = None,
    buffer_pool: BufferPool | None = None,
    lane: int = 0,
) -> Tape:
    """Bind a program to its inputs.

    Args:
        program: The program.
        inputs: The tensors that the tape reads.
        draws: Tensors that replace the program's own draws.
        destinations: Tensors that outputs are written to, by position of the output.
        buffer_pool: Memory for buffers (default: a new one).
        lane: Number of the lane that the tape runs in.
    """
    known = {**dict(enumerate(inputs)), **program.constants}
    known.update({n: t for n, t in zip(program.draws, draws, strict=False) if n is not None})
    return _Binder(program, known, destinations or {}, buffer_pool or BufferPool(), lane).tape()


class _Binder:
    def __init__(
        self,
        program: Program,
        known: Mapping[int, torch.Tensor],
        destinations: Mapping[int, torch.Tensor],
        buffer_pool: BufferPool,
        lane: int,
    ) -> None:
        self._program = program
        self._buffer_pool = buffer_pool
        self._lane = lane
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
        self._local: set[int] = set()
        """Values that a local variable of the program holds now."""
        self._last_read = found.last_read
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}

    def tape(self) -> Tape:
        for index, call in enumerate(self._calls):
            self._emit(index, call)
            self._release(index)
            self._forget(index, call)
        outputs: list[torch.Tensor | None] = []
        for position, value in enumerate(self._program.outputs):
            outputs.append(None if value is None else self._output(position, value))
        for buffer in [*self._buffers.values(), *self._held]:
            self._buffer_pool.give_back(buffer, lane=self._lane)
        body = "\n    ".join(self._lines) or "pass"
        exec(f"def run():\n    {body}\n", self._names)
        # a function in its own namespace is a cycle: it would keep the program until a collection
        return Tape(self._names.pop("run"), outputs)

    # -- one call ------------------------------------------------------------------------

    def _emit(self, index: int, call: Call) -> None:
        refs = call.refs
        static = all(ref in self._static for ref in refs)
        function = call.function
        if self._fold(call, refs):
            return
        is_view = function in VIEWS or function.is_view
        if static and is_view and self._evaluate_view(call):
            return
        if is_view:
            self._dynamic(call)  # it may be a copy, or a view of what is there in a step only
        elif writes(call) or not (static and self._into_buffers(index, call)):
            self._dynamic(call)

    def _evaluate(self, call: Call) -> None:
        """Run a call once, at binding time, and keep its results as static values."""
        args, kwargs = self._values(call)
        out = _tensors(call.function(*args, **kwargs))
        self._static.update(zip(call.outputs, out, strict=True))

    def _evaluate_view(self, call: Call) -> bool:
        """Make a view of static values once, at binding time; return whether it is one.

        Some functions, such as ``to``, return a view or a copy. A copy has to be made in each step.
        """
        self._evaluate(call)
        memory = {storage_address(self._static[ref]) for ref in call.refs}
        made = [self._static[number] for number in call.outputs]
        if all(storage_address(t) in memory or not t.numel() for t in made):
            return True
        for number in call.outputs:
            del self._static[number]
        return False

    def _fold(self, call: Call, refs: Sequence[int]) -> bool:
        """Fold a call that depends only on shapes and constants; return whether it was folded.

        A call is not folded if something writes into its results.
        """
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
        variant = quick_product(call, self._program, device_type=self._device.type) or variant
        for number in call.outputs:
            target = self._to.get(number)
            self._static[number] = self._allocate(index, call, number) if target is None else target
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
        """Copy small results to fixed buffers, so that the calls that use them stay static.

        Returns:
            Whether the call could be emitted in this way.
        """
        num = len(call.function._schema.returns)
        if len(call.outputs) != num or not num or self._is_list(call) or writes(call):
            return False
        if num > 1 and self._device.type != "cpu":
            # Attention on a GPU also returns seeds, which may be on the CPU.
            return False
        meta = [self._program.meta[number] for number in call.outputs]
        if sum(shape.numel() * dtype.itemsize for shape, _, dtype in meta) > MAX_COPIED_BYTES:
            return False
        text = f"{self._constant(call.function)}({self._arguments(call)})"
        if num > 1:
            names = [f"d{number}" for number in call.outputs]
            self._lines.append(f"{', '.join(names)} = {text}")
        else:
            names = [text]
        for number, found in zip(call.outputs, names, strict=True):
            target = self._to.get(number)
            self._static[number] = self._allocate(index, call, number) if target is None else target
            self._lines.append(f"{self._name(Ref(number))}.copy_({found})")
        if num > 1:
            self._lines.append(f"del {', '.join(names)}")
        return True

    def _allocate(self, index: int, call: Call, number: int) -> torch.Tensor:
        root = self._reusable(index, call, number)
        if root is not None:
            self._buffers[number] = self._buffers.pop(root)
            return self._static[root]
        shape, stride, dtype = self._program.meta[number]
        span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        num_bytes = max(span if shape.numel() else 0, 1) * dtype.itemsize
        num_bytes = -(-num_bytes // 64) * 64
        buffer = self._buffer_pool.take(num_bytes, self._device, lane=self._lane)
        self._buffers[number] = buffer
        return buffer.view(dtype).as_strided(shape, stride)

    def _reusable(self, index: int, call: Call, number: int) -> int | None:
        """Return an argument whose buffer the call may overwrite, or None.

        The argument must have the same shape, stride and dtype, and no later call may need it.
        """
        if call.function not in IN_PLACE_SAFE:
            return None
        refs = call.refs
        roots = [self._root.get(ref, ref) for ref in refs]
        for ref, root in zip(refs, roots, strict=True):
            if (
                ref == root
                and roots.count(root) == 1  # no other argument of this call shares the memory
                and root in self._buffers
                and self._last_use.get(root) == index
                and self._program.meta[ref] == self._program.meta[number]
            ):
                return root
        return None

    def _dynamic(self, call: Call) -> None:
        """Emit a call that makes new result tensors at each step, kept for that step only."""
        outputs = [number for number in call.outputs if number not in call.refs]
        text = f"{self._constant(call.function)}({self._arguments(call)})"
        if not outputs:
            self._lines.append(text)
            return
        names = [f"d{number}" for number in call.outputs]
        tuple_out = len(call.function._schema.returns) > 1
        if tuple_out and len(names) != len(call.function._schema.returns):
            # some results are None, such as a gradient that was not requested
            where = self._constant(_TensorsOf(call.function))
            text = f"{where}({self._arguments(call)})"
        elif not tuple_out and len(names) == 1 and self._is_list(call):
            text = f"{text}[0]"
        self._lines.append(f"{', '.join(names)} = {text}")
        self._local.update(call.outputs)

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
            self._buffer_pool.give_back(self._buffers.pop(root), lane=self._lane)

    def _forget(self, index: int, call: Call) -> None:
        """Emit the deletion of local variables that no later call reads, to free their memory."""
        numbers = dict.fromkeys((*call.refs, *call.outputs))
        over = [n for n in numbers if n in self._local and self._last_read[n] <= index]
        if over:
            self._local.difference_update(over)
            self._lines.append(f"del {', '.join(f'd{number}' for number in over)}")

    def _find_targets(self) -> dict[int, torch.Tensor]:
        """Return the destinations that outputs can be computed in directly, by value."""
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
    """A wrapper that calls a function and drops the results that are None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _tensors(self._function(*args, **kwargs))
        return found[0] if len(found) == 1 else found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``change`` to a value, or to each element of nested lists and tuples."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, v) for v in value)
    return change(value)


def _tensors(out: Any) -> list[torch.Tensor]:
    found = out if isinstance(out, list | tuple) else (out,)
    return [t for t in found if isinstance(t, torch.Tensor)]


def writes_into(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a function writes into."""
    out: list[Any] = []
    for argument, value in zip(function._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            out += value if isinstance(value, list | tuple) else [value]
    for argument in function._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            out.append(kwargs.get(argument.name))
    if function in MUTATING and args[_TRAINING]:
        out += [args[i] for i in MUTATING[function]]
    return out


def writes(call: Call) -> list[int]:
    """Return the values that a call writes into."""
    found = writes_into(call.function, call.args, call.kwargs)
    return [value.value for value in found if isinstance(value, Ref)]


MUTATING = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}
"""Functions that write into arguments (running statistics) although their schema is silent."""
_TRAINING = 5
"""The place of the argument without which they only read the statistics."""


def written_inputs(program: Program) -> set[int]:
    """Return the inputs that a program writes into."""
    return {n for n in changed_values(program) if n < program.num_inputs}


def changed_values(program: Program) -> set[int]:
    """Return the values that own memory which a program writes into."""
    return _changed(program.calls, roots(program.calls))


def roots(calls: Sequence[Call]) -> dict[int, int]:
    """Return, for each value that is a view, the value that owns its memory."""
    root: dict[int, int] = {}
    for call in calls:
        refs = call.refs
        if (call.function in VIEWS or call.function.is_view) and refs:
            for number in call.outputs:
                root[number] = root.get(refs[0], refs[0])
    return root


def _changed(calls: Sequence[Call], root: Mapping[int, int]) -> set[int]:
    return {root.get(number, number) for call in calls for number in writes(call)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Analysis:
    """Facts about a program that every binding of it needs.

    Attributes:
        calls: The calls that affect an output or write into other memory that is kept.
        root: For each value that is a view, the value that owns its memory.
        changed: Values whose memory is written into.
        last_use: Index of the last call that uses a value's memory.
        last_read: Index of the last call that a value itself goes into or comes out of.
    """

    calls: tuple[Call, ...]
    root: Mapping[int, int]
    changed: set[int]
    last_use: Mapping[int, int]
    last_read: Mapping[int, int]


_ANALYSES: WeakKeyDictionary[Program, _Analysis] = WeakKeyDictionary()
"""The analysis of each program, made once and kept no longer than the program."""


def _analysed(program: Program) -> _Analysis:
    found = _ANALYSES.get(program)
    if found is None:
        found = _ANALYSES[program] = _analyse(program)
    return found


def _analyse(program: Program) -> _Analysis:
    calls = alive(program)
    root = roots(calls)
    last: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for index, call in enumerate(calls):
        for number in (*call.refs, *call.outputs):
            last[root.get(number, number)] = last_read[number] = index
    for value in program.outputs:
        if value is not None:
            last[root.get(value, value)] = last_read[value] = len(calls)
    return _Analysis(
        calls=calls, root=root, changed=_changed(calls, root), last_use=last, last_read=last_read
    )


def alive(program: Program) -> tuple[Call, ...]:
    """Return the calls that matter: those behind outputs, and those that write into live memory.

    Live memory belongs to inputs, constants and values that kept calls use.
    """
    root = roots(program.calls)
    outside = set(range(program.num_inputs)) | set(program.constants)
    needed = {root.get(v, v) for v in program.outputs if v is not None}
    kept: list[Call] = []
    for call in reversed(program.calls):
        written = {root.get(n, n) for n in writes(call)}
        produced = {root.get(n, n) for n in call.outputs}
        if written & outside or (written | produced) & needed:
            kept.append(call)
            needed |= {root.get(n, n) for n in call.refs}
    return tuple(reversed(kept))
