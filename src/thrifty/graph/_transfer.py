"""Batches on their way to a CUDA device, while the device works on those before."""

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
    """A point in the work of a stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether all work before it is done."""
        ...

    def synchronize(self) -> None:
        """Waits until it is."""
        ...


class Streams(Protocol):
    """A device's copying beside its computing."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy page-locked memory; the result may be read after an event behind it."""
        ...

    def record(self) -> Event:
        """An event behind all copies so far."""
        ...

    def wait(self, event: Event) -> None:
        """The computing of the calling thread goes on after the event; the CPU does not wait."""
        ...

    def use(self, tensor: torch.Tensor) -> None:
        """The computing of the calling thread reads a copy: its memory is not to be given to another copy before that is done."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch whose copies were begun."""

    batch: Batch
    arrays: tuple[torch.Tensor, ...]
    event: Event


class Transfer:
    """Sends batches to a device without waiting; memory that is being copied from is held until the copy is done.

    Threads ``send`` what they made; whoever trains calls ``receive`` before using it. After SALIENT (Kaler et al., MLSys 2022, section 4.3).

    Args:
        streams: of the device.
        memory: page-locked; arrays that do not lie in it are copied to it first.
    """

    def __init__(self, streams: Streams, memory: Memory) -> None:
        self._streams = streams
        self._memory = memory
        self._held: deque[tuple[Event, list[torch.Tensor]]] = deque()
        # one batch after the other: the event of one must not be recorded amid the copies of another
        self._sending = Lock()
        weakref.finalize(self, _release_all, self._held)

    def send(self, batch: Batch) -> Sent:
        """Begins to copy a batch. ``batch.x`` lies in page-locked memory already."""
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
                # also if a copy failed, for want of device memory say: those before it are under way
                event = self._streams.record()
                self._held.append((event, pinned))
        return Sent(moved, tuple(arrays), event)

    def receive(self, sent: Sent) -> Batch:
        """The batch, ready for the calling thread's computing."""
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
        device: ``cuda`` is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy page-locked memory; the result may be read after an event behind it."""
        with torch.cuda.stream(self._stream):
            return tensor.to(self._stream.device, non_blocking=True)

    def record(self) -> Event:
        """An event behind all copies so far."""
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        """The computing of the calling thread goes on after the event; the CPU does not wait."""
        self._current().wait_event(event)

    def use(self, tensor: torch.Tensor) -> None:
        """The computing of the calling thread reads a copy: its memory is not to be given to another copy before that is done."""
        tensor.record_stream(self._current())

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)


def _release_done(held: deque[tuple[Event, list[torch.Tensor]]]) -> None:
    while held and held[0][0].query():
        held.popleft()


def _release_all(held: deque[tuple[Event, list[torch.Tensor]]]) -> None:
    # a thread may send meanwhile: the end of the process waits for nobody's turn
    with suppress(IndexError):
        while True:
            # kept by this name until the copy is done
            kept = held.popleft()
            kept[0].synchronize()
