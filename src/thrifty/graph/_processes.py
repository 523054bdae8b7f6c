"""Batches made ahead by processes, so that no other Python runs beside training.

Threads of a loader and the training loop take turns at the interpreter's lock. A training loop that
starts hundreds of GPU kernels a step cannot afford that. The processes are forks of this one, so
they share its graph. They write batches to slots of shared memory. This process only reads a short
message for each batch, copies the slot and hands it back.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock, current_thread, main_thread
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from thrifty.core import (
    TrainingError,
    UsageError,
    WorkerLostError,
    error_text,
    plain_logger,
    size_text,
)
from thrifty.core._child import follow_parent, fork_ignoring_interrupts

from ._batch import Batch, Memory
from ._features import CudaStreams, Event, Streams
from ._slots import LEAST_BYTES, PageLock, Slot, read_batch, read_header, write_batch


logger = plain_logger(__name__)

_JOB = struct.Struct("=7q")
"""Round, position, slot, its size, number of seeds, epoch, number of the batch."""

_DONE = struct.Struct("=6q")
"""Round, position, slot, its size, bytes used, whether it failed (then the bytes are an error)."""

_MOST_MESSAGES = 512

_AHEAD = 2
"""Batches whose copies to a device are started before they are requested."""

_CHECK_MS = 1000
"""Milliseconds without a batch after which the processes are checked."""

_NO_ROUND = -1


def can_fork() -> bool:
    """Return whether batches can be made by forked processes on this system."""
    return sys.platform == "linux"


class CudaPageLock:
    """Page-locking by CUDA; if that fails, copies are slower and as correct."""

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock memory, and return whether it is locked now."""
        portable = 1  # for all devices
        cudart: Any = torch.cuda.cudart
        code = int(cudart().cudaHostRegister(address, num_bytes, portable))
        if code:
            # CUDA reports the error again at the next kernel, which is not to blame.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            logger.warning(
                "CUDA cannot page-lock %s for batches (error %d), so copies of batches are "
                "slow; give the loader a smaller depth",
                size_text(num_bytes),
                code,
            )
        return not code

    def unlock(self, address: int) -> None:
        """Unlock memory that ``lock`` has locked; nothing copies from it any more."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class Target(NamedTuple):
    """Where batches go: the streams of a device, or main memory.

    Attributes:
        streams: Streams of the device; None to copy batches to ``memory``.
        page_lock: Page-locks slots; None for a device that copies from any memory.
        memory: Memory of batches on the CPU.
    """

    streams: Streams | None
    page_lock: PageLock | None
    memory: Memory


def cuda_target(device: torch.device, memory: Memory) -> Target:
    """Return a CUDA device as a target."""
    return Target(CudaStreams(device), CudaPageLock(), memory)


class Plan(NamedTuple):
    """What an iteration makes: ``num`` batches of an epoch.

    Attributes:
        epoch: The epoch, which the draws depend on.
        num: Number of batches.
        seeds: Returns the seeds of a batch by its position.
        number: Returns the number of a batch by its position, which the draws depend on, too.
    """

    epoch: int
    num: int
    seeds: Callable[[int], np.ndarray]
    number: Callable[[int], int]


class _Sent(NamedTuple):
    whole: torch.Tensor
    header: list[int]
    event: Event | None


class WorkerPool:
    """Processes that make batches, and their slots, for one iteration at a time.

    Args:
        sampler: Sampler on the graph that has the features and labels.
        dtype: Dtype of the features; None for that of the graph.
        target: Where batches go.
        num_processes: Number of processes.
        depth: Maximum number of batches that are started and not yet taken.
        num_bytes: Expected size of a batch.
    """

    def __init__(
        self,
        sampler: Any,
        dtype: torch.dtype | None,
        target: Target,
        *,
        num_processes: int,
        depth: int,
        num_bytes: int,
    ) -> None:
        self._owner = os.getpid()
        self._sampler, self._dtype, self._target = sampler, dtype, target
        self._graph = sampler.graph
        job_pipe, done_pipe = os.pipe(), os.pipe()
        self._jobs, self._done = job_pipe[1], done_pipe[0]
        # All messages fit in the pipes, so that no write ever waits.
        room = min(fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) for fd in (self._jobs, self._done))
        self._depth = max(min(depth, room // _JOB.size - 2), 1)
        self._slots: list[Slot] = []
        self._round = mmap.mmap(-1, 8)
        self._last_round = 0
        self._pids: list[int] = []
        self._files = [self._jobs, self._done]
        self._held: deque[tuple[Event, int]] = deque()
        self._end = weakref.finalize(
            self,
            _close,
            pids=self._pids,
            slots=self._slots,
            files=self._files,
            held=self._held,
            owner=self._owner,
        )
        _pools.add(self)
        try:
            while len(self._slots) < self._depth + 2:
                self._slots.append(Slot(num_bytes))
            for _ in range(num_processes):
                self._pids.append(self._fork(job_pipe, done_pipe))
        finally:
            os.close(job_pipe[0])
            os.close(done_pipe[1])
        os.set_blocking(self._done, False)
        self._poll = select.poll()
        self._poll.register(self._done, select.POLLIN)
        if target.page_lock is not None:
            for slot in self._slots:
                slot.page_lock(target.page_lock)
        self._free = list(range(len(self._slots)))
        self._outstanding = 0
        self._clear()

    def makes(self, sampler: Any, dtype: torch.dtype | None) -> bool:
        """Return whether the pool can make batches of this sampler now."""
        same = self._sampler is sampler and self._dtype == dtype
        return same and self._owner == os.getpid() and self._end.alive and not self._lost()

    def begin(self, plan: Plan) -> None:
        """Start to make batches."""
        self._free += [slot for slot, _, _ in self._ready.values()]
        self._clear()
        self._last_round += 1
        self._set_round(self._last_round)
        self._plan = plan
        self._dispatch()

    def rest(self) -> bool:
        """Make nothing more until the next ``begin``; safe during garbage collection.

        Returns:
            Whether this process has the pool, and not the one that it was forked from.
        """
        if self._owner != os.getpid():
            return False
        self._set_round(_NO_ROUND)
        return True

    def take(self) -> Batch:
        """Return the next batch of the plan; raise its error if it could not be made."""
        while self._taken not in self._sent:
            self._release()
            self._dispatch()
            if self._taken not in self._ready:
                self._wait()
            self._send()
        sent = self._sent.pop(self._taken)
        if isinstance(sent, BaseException):
            raise sent
        self._taken += 1
        # Start the next copies before anything else: they run while this batch is used.
        self._release()
        self._dispatch()
        self._collect()
        if self._target.streams is not None:
            self._send()
            assert sent.event is not None
            self._target.streams.wait(sent.event)
            self._target.streams.use(sent.whole)
        return read_batch(sent.whole, sent.header, graph=self._graph, dtype=self._dtype)

    def close(self) -> None:
        """Kill the processes and release the memory."""
        self._end()

    def _clear(self) -> None:
        self._ready: dict[int, tuple[int, int, int]] = {}
        self._sent: dict[int, _Sent | BaseException] = {}
        self._taken = self._started = self._next_sent = 0

    def _set_round(self, number: int) -> None:
        self._round[:8] = number.to_bytes(8, "little", signed=True)

    def _dispatch(self) -> None:
        """Give jobs to the processes as long as there are free slots."""
        plan, free = self._plan, self._free
        while free and self._started < min(plan.num, self._taken + self._depth):
            position = self._started
            seeds = plan.seeds(position)
            number = free.pop()
            slot = self._slots[number]
            slot.grow(seeds.nbytes)
            slot.words[: len(seeds)] = seeds
            batch = plan.number(position)
            job = self._last_round, position, number, slot.size, len(seeds), plan.epoch, batch
            try:
                os.write(self._jobs, _JOB.pack(*job))
            except BrokenPipeError:
                raise self._error() from None
            self._started += 1
            self._outstanding += 1

    def _collect(self) -> bool:
        """Read the messages that have arrived; return whether there were any."""
        try:
            messages = os.read(self._done, _MOST_MESSAGES * _DONE.size)
        except BlockingIOError:
            return False
        for done in _DONE.iter_unpack(messages):
            made_in, position, slot, size, used, failed = done
            self._outstanding -= 1
            self._slots[slot].map(size)
            if made_in == self._last_round:
                self._ready[position] = slot, used, failed
            else:
                self._free.append(slot)
        # The end of the file: all processes have ended.
        return bool(messages)

    def _wait(self) -> None:
        """Wait until a message arrives or a slot becomes free."""
        if not self._outstanding and self._held:
            self._held[0][0].synchronize()
        elif not self._collect():
            arrived = self._poll.poll(_CHECK_MS)
            if (not arrived or not self._collect()) and (lost := self._lost()):
                raise self._error(lost)

    def _error(self, lost: str = "") -> WorkerLostError:
        """Return the error of a process that is lost; wait for its end if it is not known yet."""
        while not lost:
            lost = self._lost()
            time.sleep(0 if lost else 0.001)
        return WorkerLostError(
            f"a process that makes batches {lost}; if the machine ran out of memory, give "
            "the loader a smaller depth or fewer num_threads"
        )

    def _send(self) -> None:
        """Start to copy the next batches that have been made."""
        streams = self._target.streams
        last = self._taken + (_AHEAD if streams is not None else 0)
        while self._next_sent <= last and self._next_sent in self._ready:
            number, used, failed = self._ready.pop(self._next_sent)
            slot = self._slots[number]
            if failed:
                self._sent[self._next_sent] = _unpacked(bytes(slot.words.data.cast("B")[:used]))
                self._free.append(number)
            elif streams is None:
                self._sent[self._next_sent] = _Sent(
                    self._copied(slot, used), read_header(slot), None
                )
                self._free.append(number)
            else:
                # Tensors of inference mode would be of no use to a caller that leaves it.
                with torch.inference_mode(mode=False):
                    try:
                        whole = streams.copy(slot.bytes.narrow(0, 0, used))
                    finally:
                        self._held.append((event := streams.record(), number))
                self._sent[self._next_sent] = _Sent(whole, read_header(slot), event)
            self._next_sent += 1

    def _copied(self, slot: Slot, used: int) -> torch.Tensor:
        return self._target.memory.array((used,), torch.uint8).copy_(slot.bytes[:used])

    def _release(self) -> None:
        """Free the slots whose copies are done."""
        held = self._held
        while held and held[0][0].query():
            self._free.append(held.popleft()[1])

    def _lost(self) -> str:
        """Return how a process has ended; "" if all are running."""
        for pid in list(self._pids):
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                self._pids.remove(pid)
                return "has ended"
            if ended:
                self._pids.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                return (
                    f"was killed by {signal.Signals(-code).name}"
                    if code < 0
                    else f"has ended with exit status {code}"
                )
        return ""

    def _fork(self, job_pipe: tuple[int, int], done_pipe: tuple[int, int]) -> int:
        with warnings.catch_warnings():
            # Python warns about the other threads. The child needs no lock that they may hold:
            # kernels are compiled, and it runs none of PyTorch's own threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            with_thread = current_thread() is main_thread()
            pid = fork_ignoring_interrupts()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # What this process inherited is not its to collect, such as memory of a device.
            gc.freeze()
            follow_parent(self._owner, with_thread=with_thread)
            for pool in list(_pools):
                pool._leave(keep_slots=pool is self)
            self._work(job_pipe[0], done_pipe[1])
        except BrokenPipeError:
            pass  # the parent has ended
        except BaseException:  # noqa: BLE001 -- the parent sees only how this process ends
            traceback.print_exc()
        finally:
            os._exit(1)

    def _leave(self, *, keep_slots: bool) -> None:
        """Let go of what only the parent uses, in a fork of it."""
        if self._end.detach() is None:
            return  # closed
        for file in self._files:
            os.close(file)
        for slot in self._slots:
            slot.forget_lock()
            if not keep_slots:
                slot.close()

    def _work(self, jobs: int, done: int) -> NoReturn:
        """Make batches until the parent closes the pipe."""
        # PyTorch's threads have not survived the fork.
        torch.set_num_threads(1)
        while message := os.read(jobs, _JOB.size):
            made_in, position, number, size, num_seeds, epoch, index = _JOB.unpack(message)
            slot = self._slots[number]
            used = failed = 0
            if int.from_bytes(self._round[:8], "little", signed=True) == made_in:
                slot.map(size)
                seeds = slot.words[:num_seeds].copy()
                try:
                    used = write_batch(
                        slot, self._sampler, seeds, epoch=epoch, index=index, dtype=self._dtype
                    )
                except BaseException as error:  # noqa: BLE001 -- raised again by the parent
                    text = _packed(error)
                    used, failed = len(text), 1
                    slot.words.data.cast("B")[:used] = text
                size = slot.size
            os.write(done, _DONE.pack(made_in, position, number, size, used, failed))
        os._exit(0)


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _close(
    *,
    pids: list[int],
    slots: list[Slot],
    files: list[int],
    held: deque[tuple[Event, int]],
    owner: int,
) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner that does something else
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    pids.clear()
    while held:
        with suppress(RuntimeError):  # a device that has failed copies nothing any more
            held.popleft()[0].synchronize()
    for slot in slots:
        slot.close()
    for file in files:
        os.close(file)


def _packed(error: BaseException) -> bytes:
    """Return an exception as bytes that fit in any slot."""
    text = "".join(traceback.format_exception(error))[-LEAST_BYTES // 8 :]
    with suppress(Exception):  # whatever an exception of the user does when it is pickled
        data = pickle.dumps((error, text))
        if len(data) <= LEAST_BYTES:
            pickle.loads(data)
            return data
    plain = TrainingError(f"{type(error).__name__}: {error_text(error)[:1000]}")
    return pickle.dumps((plain, text))


def _unpacked(data: bytes) -> BaseException:
    error, text = pickle.loads(data)
    error.add_note(f"In a process that makes batches:\n{text}")
    return error  # type: ignore[no-any-return]


class ProcessBatches(Iterator[Batch]):
    """An iterator over the batches of a plan, which the processes of a pool make ahead.

    The pool goes back to ``idle`` after the last batch or when the iterator is dropped. After an
    error it is closed.

    Args:
        pool: Pool that nothing else uses.
        plan: What to make.
        idle: Where pools wait for the next iteration.
    """

    def __init__(self, pool: WorkerPool, plan: Plan, idle: list[WorkerPool]) -> None:
        self._pool = pool
        self._left = plan.num
        self._turn = Lock()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _put_back, pool, idle)
        self._end.atexit = False
        pool.begin(plan)

    def __next__(self) -> Batch:
        if self._process != os.getpid():
            raise UsageError(
                "this iteration was begun before the process was forked, and its processes are "
                "those of the parent; begin a new one"
            )
        # Callers may share an iterator: each batch goes to one of them.
        with self._turn:
            if not self._end.alive:
                raise StopIteration
            try:
                batch = self._pool.take()
            except BaseException:
                # Also an interruption, which may come amid any step.
                self._end.detach()
                self._pool.close()
                raise
            self._left -= 1
            if not self._left:
                self._end()
            return batch


def _put_back(pool: WorkerPool, idle: list[WorkerPool]) -> None:
    if not pool.rest():
        return
    if idle:
        # One is enough, unless several epochs are in progress.
        pool.close()
    else:
        idle.append(pool)
