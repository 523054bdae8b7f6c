"""Steps that are only measured, and what disturbs a measurement."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thrifty.core import Clock, HeteroError
from thrifty.hetero.training._learner import Loss
from thrifty.hetero.workers._measure import device_of
from thrifty.pack import borrowed_streams


TINY_S = 1e-12
"""Where a time may be 0, the least that is divided by."""


class Rehearsal:
    """Runs steps of a model and restores it afterwards.

    Args:
        model: A plain model, in the mode in which it trains.
        optimizer: Optimizer of the model's parameters.
        loss: Function from a model and a batch to a scalar.
        clock: Clock for measurements on a CPU.

    Raises:
        HeteroError: No parameter needs a gradient.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, loss: Loss, clock: Clock
    ) -> None:
        self.device = device_of(model)
        self.clock = clock
        # Shared parameters count once. Reversed, because a backward pass reaches them in this
        # order.
        self.parameters = [each for each in model.parameters() if each.requires_grad][::-1]
        if not self.parameters:
            raise HeteroError("no parameter of the model needs a gradient")
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._watch = Stopwatch(self.device, clock)
        self._kept_bytes = 0

    def phases(self, batch: Any) -> tuple[float, float, float]:
        """Return the seconds of the forward pass, the backward pass and the optimizer step."""
        marks = self._step(batch)
        return tuple(  # type: ignore[return-value]
            self._watch.seconds(*pair) for pair in pairwise(marks)
        )

    def shape(self, batch: Any) -> dict[int, float]:
        """Return when each gradient is ready, as a share of the backward pass, by parameter."""
        arrived: dict[int, Any] = {}

        def arrive(at: int, _: Tensor) -> None:
            arrived[at] = self._watch.mark()

        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(arrive, at)
            )
            for at, parameter in enumerate(self.parameters)
        ]
        try:
            _, begin, end, _ = self._step(batch)
        finally:
            for hook in hooks:
                hook.remove()
        whole = max(self._watch.seconds(begin, end), 1e-12)
        return {
            at: min(1.0, self._watch.seconds(begin, mark) / whole) for at, mark in arrived.items()
        }

    def peak_bytes(self, batch: Any) -> float:
        """Return the peak memory of a step in bytes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._step(batch)
            return torch.cuda.max_memory_allocated(self.device) - self._kept_bytes
        during, after = _Storages(), _Storages()
        for each in [*self._model.parameters(), *self._model.buffers(), *tree_leaves(batch)]:
            during.note(each)
        with torch.autograd.graph.saved_tensors_hooks(during.note, lambda tensor: tensor):
            self._step(batch)
        # Gradients may reuse the memory of activations, so count them separately.
        gradients = [parameter.grad for parameter in self.parameters]
        for each in [*gradients, *tree_leaves(dict(self._optimizer.state))]:
            after.note(each)
        return during.num_bytes + after.num_bytes

    @contextmanager
    def left_as_it_was(self) -> Iterator[None]:
        """Restore the model, the optimizer, gradients and random streams on exit."""
        before = self._allocated()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        kept = [tensor.detach().clone() for tensor in tensors]
        state = copy.deepcopy(self._optimizer.state_dict())
        gradients = [parameter.grad for parameter in self._model.parameters()]
        self._kept_bytes = self._allocated() - before
        try:
            for parameter in self._model.parameters():
                parameter.grad = None
            with borrowed_streams():
                yield
        finally:
            with torch.no_grad():
                for tensor, old in zip(tensors, kept, strict=True):
                    tensor.copy_(old)
            self._optimizer.load_state_dict(state)
            for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
                parameter.grad = gradient

    def _step(self, batch: Any) -> tuple[Any, Any, Any, Any]:
        """Run a step as in a plain training loop; return marks at the boundaries of its phases."""
        mark = self._watch.mark
        begin = mark()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._model, batch)
        forward = mark()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = mark()
        self._optimizer.step()
        end = mark()
        self._watch.wait()
        return begin, forward, backward, end

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


class Stopwatch:
    """Timestamps on a device: clock times on a CPU, events on CUDA, where the host runs ahead."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return self._clock.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Wait for the device. Call this before ``seconds``."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        took = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
        return max(float(took), 1e-9)


class _Storages:
    """Sums the bytes of distinct storages. A view counts as its base's storage."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    @property
    def num_bytes(self) -> float:
        return float(sum(self._seen.values()))

    def note(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            self._seen[storage.data_ptr()] = storage.nbytes()
        return value


class ThreadQueues:
    """How long threads of this process were ready to run while others had the processor.

    Where a program shares the processor all the time, every step on a CPU is slow, so the steps
    alone do not tell. The kernel does: ``schedstat`` has seconds on the processor, then seconds of
    waiting.

    Args:
        threads: Folder with a subfolder for each thread; None: nothing is known.
    """

    def __init__(self, threads: Path | None) -> None:
        self._threads = threads

    def waited_s(self) -> dict[str, float]:
        """Return the seconds that each thread has waited so far; empty where they are not known."""
        out = {}
        for path in self._threads.glob("*/schedstat") if self._threads else ():
            with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
                out[path.parent.name] = 1e-9 * int(path.read_text().split()[1])
        return out

    @staticmethod
    def noise(before: Mapping[str, float], after: Mapping[str, float], *, took_s: float) -> float:
        """Return how much longer the thread that waited most took than it would have alone."""
        waited = max((after[key] - s for key, s in before.items() if key in after), default=0.0)
        return waited / max(took_s - waited, TINY_S)


class OtherPrograms:
    """How much of this machine's processors other programs use.

    ``/proc/stat`` has the time of all processors by what they did, since the machine began.

    Args:
        stat: That file; None: nothing is known.
    """

    def __init__(self, stat: Path | None) -> None:
        self._stat = stat
        self._before = self._counts()

    def share(self) -> float:
        """Return the share of the processors' time since the beginning; 0 if it is not known."""
        before, now = self._before, self._counts()
        if before is None or now is None or now[1] <= before[1]:
            return 0.0
        return min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1])))

    def _counts(self) -> tuple[float, float] | None:
        """Return the seconds that all processors worked for others, and those that passed."""
        if self._stat is None:
            return None
        with suppress(OSError, ValueError, IndexError):
            ticks = [int(each) for each in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
            _, _, _, idle, waiting, *_ = ticks
            tick_s = 1 / os.sysconf("SC_CLK_TCK")
            mine = os.times()
            work = sum(ticks) - idle - waiting
            return work * tick_s - mine.user - mine.system, sum(ticks) * tick_s
        return None
