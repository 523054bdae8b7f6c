"""Copies of batches to a CUDA device while the device works on earlier batches."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import torch

from ._batch import Batch, copied
from ._memory import Memory


class Event(Protocol):
    """A point in the work of a stream, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether all work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until all work before it is done."""
        ...


class Streams(Protocol):
    """A device's copy stream, which runs beside its computation."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy page-locked memory; the result is ready after a later event."""
        ...

    def record(self) -> Event:
        """Return an event behind all copies so far."""
        ...

    def wait(self, event: Event) -> None:
        """Make the calling thread's computation wait for the event; the CPU does not wait."""
        ...

    def use(self, tensor: torch.Tensor) -> None:
        """Note that the calling thread's computation reads a copy.

        Its memory is not given to another copy before that computation is done.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch whose copies have been started."""

    batch: Batch
    arrays: tuple[torch.Tensor, ...]
    event: Event


class Transfer:
    """A sender of batches to a device that does not wait for the copies.

    Memory that is being copied from is held until the copy is done. Loader threads call ``send``;
    the training thread calls ``receive`` before it uses a batch. After SALIENT (Kaler et al.,
    MLSys 2022, section 4.3).

    Args:
        streams: streams of the device.
        memory: page-locked memory; arrays outside it are copied to it first.
    """

    def __init__(self, streams: Streams, memory: Memory) -> None:
        self._streams = streams
        self._memory = memory
        self._held: deque[tuple[Event, list[torch.Tensor]]] = deque()
        # One batch at a time: its event must not be recorded amid the copies of another batch.
        self._sending = Lock()
        weakref.finalize(self, _release_all, self._held)

    def send(self, batch: Batch) -> Sent:
        """Start to copy a batch whose ``x`` is already in page-locked memory."""
        pinned: list[torch.Tensor] = []
        arrays: list[torch.Tensor] = []

        def copy(array: torch.Tensor) -> torch.Tensor:
            pinned.append(self._pinned(array))
            arrays.append(self._streams.copy(pinned[-1]))
            return arrays[-1]

        with self._sending:
            _release_done(self._held)
            try:
                moved = copied(batch, copy)
            finally:
                # Also if a copy failed, say for lack of device memory: earlier copies are still
                # in progress.
                event = self._streams.record()
                self._held.append((event, pinned))
        return Sent(moved, tuple(arrays), event)

    def receive(self, sent: Sent) -> Batch:
        """Return the batch, ready for the calling thread's computation."""
        self._streams.wait(sent.event)
        for array in sent.arrays:
            self._streams.use(array)
        return sent.batch

    def _pinned(self, array: torch.Tensor) -> torch.Tensor:
        if array.is_pinned():
            return array
        return self._memory.array(array.shape, array.dtype).copy_(array)


class CudaStreams:
    """A side stream of a CUDA device.

    Args:
        device: device of the stream; ``cuda`` is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy page-locked memory; the result is ready after a later event."""
        with torch.cuda.stream(self._stream):
            return tensor.to(self._stream.device, non_blocking=True)

    def record(self) -> Event:
        """Return an event behind all copies so far."""
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        """Make the calling thread's computation wait for the event; the CPU does not wait."""
        self._current().wait_event(event)

    def use(self, tensor: torch.Tensor) -> None:
        """Note that the calling thread's computation reads a copy.

        Its memory is not given to another copy before that computation is done.
        """
        tensor.record_stream(self._current())

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)


def _release_done(held: deque[tuple[Event, list[torch.Tensor]]]) -> None:
    while held and held[0][0].query():
        held.popleft()


def _release_all(held: deque[tuple[Event, list[torch.Tensor]]]) -> None:
    # No lock, because a thread may still be sending: the exit of the process must not wait for it.
    with suppress(IndexError):
        while True:
            # This name keeps the memory until the copy is done.
            kept = held.popleft()
            kept[0].synchronize()
