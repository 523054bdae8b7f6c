"""Lanes: the trials of a pack on several cores, a part of them on each.

When one operation on all trials runs on all cores, cores wait for each other after every operation,
small ones run on one core, and what they read is often too large for a cache. Here each lane runs
the program of its own trials with its own share of the cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from ._record import VIEWS, Call, Program
from ._samplewise import num_operations
from ._step import flushes_denormals
from ._structure import Recorded, Variant
from ._tape import Tape, alive, changed_values


OPERATIONS_S = 1e11
"""Multiplications and additions that a core takes in a second, in single precision, about."""
BYTES_S = 1e10
"""Bytes that a core reads or writes in a second, about."""
CALL_S = 1e-5
"""Seconds for which a call of an operation keeps other lanes from calling theirs, about."""
MAX_CALLING = 0.1
"""The largest share of a lane's time in which it keeps others from calling."""
MAX_SHARED = 0.02
"""The largest share of a program that all trials have in common: each lane computes that again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """Some trials of a block, and the program that is recorded for so many.

    Attributes:
        rows: The rows of the trials.
        variant: The variant of the program.
        recorded: The program.
    """

    rows: slice
    variant: Variant
    recorded: Recorded


def rows_of_lanes(size: int, num: int) -> list[slice]:
    """Divide the first ``size`` rows into ``num`` parts that differ by one at most.

    >>> rows_of_lanes(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    ends = [-(-size * (k + 1) // num) for k in range(num)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def num_lanes(program: Program, *, size: int, common: Sequence[int], threads: int) -> int:
    """Return in how many lanes a program takes least time.

    Args:
        program: The program for all trials.
        size: Number of trials.
        common: Its inputs that all trials have in common.
        threads: Number of cores to use.
    """
    calls = [c for c in alive(program) if not (c.function in VIEWS or c.function.is_view)]
    if min(size, threads) < 2 or not calls or any(c.function.namespace != "aten" for c in calls):
        return 1  # an operation of others may not be made for several threads
    shared = {*common, *program.constants}.difference(program.draws)
    if not shared.isdisjoint(changed_values(program)):
        return 1
    seconds = in_common = 0.0
    for call in alive(program):
        own = _seconds(call, program)
        seconds += own
        if shared.issuperset(call.refs):
            shared.update(call.outputs)
            in_common += own
    if in_common > MAX_SHARED * seconds:
        return 1
    # Of n lanes, each takes `seconds / n`, and they call their operations one after the other.
    most = math.isqrt(int(MAX_CALLING * seconds / CALL_S / len(calls)))
    return max(1, min(size, threads, most))


def _seconds(call: Call, program: Program) -> float:
    """Return about how long a call takes one core."""
    if call.function in VIEWS or call.function.is_view:
        return 0.0
    sizes = [program.meta[n] for n in (*call.refs, *call.outputs)]
    num_bytes = sum(shape.numel() * dtype.itemsize for shape, _, dtype in sizes)
    return num_operations(call, program) / OPERATIONS_S + num_bytes / BYTES_S


class Lanes:
    """Tapes that run at the same time, each in a thread of its own.

    Args:
        tapes: The tapes; no two of them write into the same memory.
        threads: Number of cores to use; each tape gets an equal share.
    """

    def __init__(self, tapes: Sequence[Tape], *, threads: int) -> None:
        self._tapes = tapes
        self._threads = max(1, threads // len(tapes))

    def __call__(self) -> None:
        """Run all tapes; if some raise an error, the first of their errors is raised at the end."""
        flushed = flushes_denormals()
        running = [
            _thread(os.getpid(), number, self._threads).submit(_run, tape, flushed)
            for number, tape in enumerate(self._tapes)
        ]
        for error in [each.exception() for each in running]:
            if error is not None:
                raise error


def _run(tape: Tape, flushed: bool) -> None:
    torch.set_flush_denormal(flushed)
    tape()


@cache
def _thread(process: int, number: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the thread of a lane; a process that was forked needs threads of its own.

    PyTorch asks each thread once how many cores its operations may use, which is told to it by a
    setting of the process.
    """
    out = ThreadPoolExecutor(1, thread_name_prefix=f"lane-{number}")
    before = torch.get_num_threads()
    try:
        out.submit(_begin, threads).result()
    finally:
        torch.set_num_threads(before)
    return out


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.get_num_threads()  # from here on, the setting of the process is not asked for again
    torch.set_grad_enabled(False)
