"""Lanes: the trials of a pack on several cores, a part of them on each.

When an operation on all trials runs on all cores, cores wait for each other after every operation,
small ones run on one core, and what they read is often too large for a cache. Here the trials are
divided into lanes, each with a program of its own. Some lanes run at the same time, each with its
share of the cores; others run one after the other, so that results stay in a cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any

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
"""Seconds for which a call of an operation keeps other threads from calling theirs, about."""
MAX_CALLING = 0.1
"""The largest share of its time in which a thread keeps others from calling."""
MAX_SHARED = 0.02
"""The largest share of a program that all trials have in common: each lane computes that again."""
CACHED_BYTES = 2**21
"""Mean size of a result up to which the next operation finds it in a cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """A part of the trials of a block, and the program that trains them.

    Attributes:
        rows: The rows of the trials.
        thread: Number of the thread that runs it.
        variant: The variant of the program.
        recorded: The program.
    """

    rows: slice
    thread: int
    variant: Variant
    recorded: Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the trials of a program are divided.

    Attributes:
        lanes: Number of lanes.
        threads: Number of threads; each one runs some lanes one after the other.
    """

    lanes: int
    threads: int

    def rows(self, size: int) -> list[slice]:
        """Divide the first ``size`` rows into lanes whose sizes differ by one at most.

        >>> Division(lanes=2, threads=2).rows(5)
        [slice(0, 3, None), slice(3, 5, None)]
        """
        ends = [-(-size * (k + 1) // self.lanes) for k in range(self.lanes)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def thread(self, lane: int) -> int:
        """Return the number of the thread that runs a lane."""
        return lane * self.threads // self.lanes


UNDIVIDED = Division(lanes=1, threads=1)


def division(program: Program, *, size: int, common: Sequence[int], threads: int) -> Division:
    """Return how to divide the trials of a program so that it takes least time.

    Each thread has some of the trials. It divides them once more if results of all of them would be
    too large for a cache.

    Args:
        program: The program for all trials.
        size: Number of trials.
        common: Its inputs that all trials have in common.
        threads: Number of cores to use.
    """
    calls = [c for c in alive(program) if not (c.function in VIEWS or c.function.is_view)]
    if size < 2 or not calls or any(c.function.namespace != "aten" for c in calls):
        return UNDIVIDED  # an operation of others may not be made for several threads
    shared = {*common, *program.constants}.difference(program.draws)
    if not shared.isdisjoint(changed_values(program)):
        return UNDIVIDED
    seconds = in_common = num_bytes = 0.0
    for call in alive(program):
        own = _seconds(call, program)
        seconds += own
        if shared.issuperset(call.refs):
            shared.update(call.outputs)
            in_common += own
    if in_common > MAX_SHARED * seconds:
        return UNDIVIDED
    # Of n threads, each takes `seconds / n`, and they call their operations one after the other.
    most = math.isqrt(int(MAX_CALLING * seconds / CALL_S / len(calls)))
    used = max(1, min(size, threads, most))
    num_bytes = sum(_bytes(program, call.outputs) for call in calls) / len(calls)
    rounds = math.ceil(num_bytes / used / CACHED_BYTES) if most > 1 else 1
    return Division(lanes=min(size, used * rounds), threads=used)


def _bytes(program: Program, numbers: Sequence[int]) -> int:
    sizes = (program.meta[number] for number in numbers)
    return sum(shape.numel() * dtype.itemsize for shape, _, dtype in sizes)


def _seconds(call: Call, program: Program) -> float:
    """Return about how long a call takes one core."""
    if call.function in VIEWS or call.function.is_view:
        return 0.0
    num_bytes = _bytes(program, (*call.refs, *call.outputs))
    return num_operations(call, program) / OPERATIONS_S + num_bytes / BYTES_S


class Lanes:
    """Tapes that run at the same time, or one after the other.

    Args:
        tapes: The tapes of each thread. No two of them write into the same memory, but for what
            those of one thread do not read again.
        cores: Number of cores to use; each thread gets an equal share.
    """

    def __init__(self, tapes: Sequence[Sequence[Tape]], *, cores: int) -> None:
        self._tapes = tapes
        self._cores = max(1, cores // len(tapes))

    def __call__(self) -> None:
        """Run all tapes; if some raise an error, the first of their errors is raised at the end."""
        if len(self._tapes) == 1:
            _run(self._tapes[0], flushes=None)
            return
        flushes = flushes_denormals()
        running: list[Future[Any]] = []
        try:
            for number, tapes in enumerate(self._tapes):
                running.append(self._submit(number, partial(_run, tapes, flushes=flushes)))
            wait(running)
        except RuntimeError:  # the interpreter is about to end, and threads take no more work
            wait(running)
            for tapes in self._tapes[len(running) :]:
                _run(tapes, flushes=None)
        except BaseException:  # such as Ctrl-C
            self._settle()
            raise
        for error in [each.exception() for each in running]:
            if error is not None:
                raise error

    def _submit(self, number: int, work: Callable[[], Any]) -> Future[Any]:
        return _thread(os.getpid(), number, self._cores).submit(work)

    def _settle(self) -> None:
        """Wait until no lane runs any more, since others may free what it writes."""
        for number in range(len(self._tapes)):
            last = self._submit(number, int)
            while not last.done():
                with suppress(BaseException):  # the first interruption is raised already
                    wait([last])


def _run(tapes: Sequence[Tape], *, flushes: bool | None) -> None:
    if flushes is not None:
        torch.set_flush_denormal(flushes)
    for tape in tapes:
        tape()


@cache
def _thread(process: int, number: int, cores: int) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the thread of a lane; a process that was forked needs threads of its own.

    PyTorch asks each thread once how many cores its operations may use, which is told to it by a
    setting of the process.
    """
    out = ThreadPoolExecutor(1, thread_name_prefix=f"lane-{number}")
    with _BEGINNING:
        before = torch.get_num_threads()
        try:
            out.submit(_begin, cores).result()
        finally:
            torch.set_num_threads(before)
    return out


_BEGINNING = Lock()
"""Held while the setting of the process is another one for a moment."""


def _begin(cores: int) -> None:
    torch.set_num_threads(cores)
    torch.get_num_threads()  # from here on, the setting of the process is not asked for again
    torch.set_grad_enabled(False)
