"""The worker: trains chains of stages and says what happens, on any executor."""

from __future__ import annotations

import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from thrifty.core import (
    CheckpointError,
    CheckpointLost,
    CheckpointRef,
    DivergedError,
    EpochDone,
    Event,
    StageDone,
    StageFailed,
    StageStarted,
    StoreWriteError,
)
from thrifty.pack import (
    Member,
    SoloBackend,
    State,
    Task,
    Trainable,
    borrowed_streams,
)
from thrifty.plan import Stage
from thrifty.space import Timeline
from thrifty.store import CheckpointFolder

from ._alone import epoch_plan
from ._assignment import Assignment
from ._tensors import state_from_arrays, state_to_arrays


CACHE_BYTES = 256 * 2**20
"""How much recent state a worker keeps in memory, so that a branch need not read what it just wrote."""


class Worker:
    """Trains on one device. States are written by a thread of their own while training goes on.

    ``should_stop`` is asked between epochs.
    """

    def __init__(
        self,
        task: Task | Trainable,
        *,
        name: str,
        checkpoints: CheckpointFolder,
        folder: str,
        device: str = "cpu",
        threads: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self._backend = SoloBackend(task, device=device)
        self._checkpoints = checkpoints
        self._folder = folder
        self._threads = threads
        self._should_stop = should_stop
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-writer")
        self._recent = _RecentStates(CACHE_BYTES)

    def close(self) -> None:
        """Waits for states that are still being written."""
        self._writer.shutdown()

    def run(self, assignment: Assignment) -> Iterator[Event]:
        """Trains a chain, yielding what happens as it happens.

        A failure of the task's code becomes an event; StoreWriteError is raised.
        """
        chain = assignment.chain
        try:
            state = None if chain.resume is None else self._load(chain.resume)
        except CheckpointError as error:
            assert chain.resume is not None
            yield CheckpointLost(checkpoint=chain.resume, reason=str(error), worker=self.name)
            return
        writes: list[tuple[Stage, Future[CheckpointRef]]] = []
        position = _Position(chain.stages[0])
        try:
            self._begin(assignment, state)
            for stage in chain.stages:
                position.stage, position.epoch = stage, stage.start
                yield StageStarted(
                    node=stage.node, start=stage.start, stop=stage.stop, worker=self.name
                )
                for epoch in range(stage.start, stage.stop):
                    if self._should_stop():
                        break
                    yield self._epoch(stage, epoch, chain.timeline)
                    position.epoch = epoch + 1
                if position.epoch > stage.start:
                    writes.append(self._save(stage, position.epoch))
                yield from self._written(writes, wait=False)
                if position.epoch < stage.stop:
                    break
        except StoreWriteError:
            raise
        except Exception as error:  # noqa: BLE001 (user code may raise anything; the study goes on)
            yield from self._written(writes, wait=True)
            yield self._failed(position, error)
        yield from self._written(writes, wait=True)

    def _begin(self, assignment: Assignment, state: State | None) -> None:
        first, timeline = assignment.chain.stages[0], assignment.chain.timeline
        with self._own_process_state():
            self._backend.stack(
                0,
                Member(
                    values=timeline.at(first.start),
                    seed=assignment.seed,
                    epoch=first.start,
                    state=state,
                ),
            )

    def _epoch(self, stage: Stage, epoch: int, timeline: Timeline) -> EpochDone:
        began = time.perf_counter()
        with self._own_process_state():
            plan = epoch_plan(self._backend, timeline, epoch=epoch)
            metrics = self._backend.step({0: plan})[0]
        return EpochDone(
            node=stage.node,
            epoch=epoch + 1,
            metrics=metrics,
            seconds=time.perf_counter() - began,
            worker=self.name,
        )

    def _save(self, stage: Stage, epoch: int) -> tuple[Stage, Future[CheckpointRef]]:
        state = self._backend.unstack(0)
        self._recent.add((stage.node, epoch), state)
        return Stage(node=stage.node, start=stage.start, stop=epoch), self._writer.submit(
            self._write, stage.node, epoch, state
        )

    def _write(self, node: int, epoch: int, state: State) -> CheckpointRef:
        arrays, meta = state_to_arrays(state)
        return self._checkpoints.write(
            self._folder, node=node, epoch=epoch, tensors=arrays, meta=meta
        )

    def _written(
        self, writes: list[tuple[Stage, Future[CheckpointRef]]], *, wait: bool
    ) -> Iterator[Event]:
        """Reports the stages whose end is safely kept, in order."""
        while writes and (wait or writes[0][1].done()):
            stage, future = writes.pop(0)
            yield StageDone(
                node=stage.node,
                start=stage.start,
                stop=stage.stop,
                worker=self.name,
                checkpoint=future.result(),
            )

    def _load(self, ref: CheckpointRef) -> State:
        known = self._recent.get((ref.node, ref.epoch))
        if known is not None:
            return known
        arrays, meta = self._checkpoints.read(ref)
        try:
            state = state_from_arrays(arrays, meta)
        except (KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{ref.path}: not a state of a trial ({error})") from error
        self._recent.add((ref.node, ref.epoch), state)
        return state

    def _failed(self, position: _Position, error: Exception) -> StageFailed:
        return StageFailed(
            node=position.stage.node,
            start=position.stage.start,
            stop=position.stage.stop,
            epoch=position.epoch,
            kind="diverged" if isinstance(error, DivergedError) else "error",
            message=f"{type(error).__name__}: {error}",
            worker=self.name,
            traceback="".join(traceback.format_exception(error)),
        )

    def _own_process_state(self) -> _ProcessState:
        return _ProcessState(self._threads)


class _Position:
    """How far a chain has got; its last good epoch."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.epoch = stage.start


class _RecentStates:
    """The states used last, up to some bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._states: OrderedDict[tuple[int, int], State] = OrderedDict()

    def get(self, key: tuple[int, int]) -> State | None:
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)

    def add(self, key: tuple[int, int], state: State) -> None:
        replaced = self._states.pop(key, None)
        self._held_bytes += _num_bytes(state) - (_num_bytes(replaced) if replaced else 0)
        self._states[key] = state
        while self._held_bytes > self._max_bytes and len(self._states) > 1:
            _, dropped = self._states.popitem(last=False)
            self._held_bytes -= _num_bytes(dropped)


class _ProcessState:
    """Random streams and thread count are the worker's while it trains, the user's otherwise."""

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._streams = borrowed_streams()

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._threads is not None and self._threads != self._before:
            torch.set_num_threads(self._threads)
        self._streams.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._streams.__exit__(*exc)  # type: ignore[arg-type]
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)


def _num_bytes(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.tensors.values())
