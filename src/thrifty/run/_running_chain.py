"""A chain of stages while a worker trains it: its trials, their states, and their frozen bases."""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thrifty.core import CheckpointError, CheckpointRef, EpochDone, Event, LineBuffer, plain_logger
from thrifty.pack import (
    TRAIN_LOSS,
    AutoBackend,
    Member,
    State,
    StateCheck,
    Task,
    TimeShare,
    Trainable,
    Trial,
    evaluate_state,
)
from thrifty.pack._frozen import Base, FrozenTensor, LoadedBase, bytes_of, digest_of
from thrifty.plan import Stage
from thrifty.store import CheckpointFolder
from thrifty.store._plan_files import MAX_BASE_BYTES, BaseFile, BaseTensor, size_of

from ._alone import member_at, plan_of
from ._executor import Assignment, ChainProgress, Report


logger = plain_logger(__name__)


class RunningChain(ChainProgress):
    """An assignment in progress: its current epoch, and its checkpoints still being written."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.under_way = False
        self.spent = TimeShare()
        """Time spent on the current epoch so far."""
        self.dropped = TimeShare()
        """Time spent on discarded epochs; it is reported with the next epoch."""
        self.writes: list[tuple[Stage, Future[CheckpointRef | None]]] = []
        self.passed: State | None = None
        """State after the last epoch if that was not trained; it is in no back-end slot yet."""
        self.lost: set[CheckpointRef] = set()
        self.spare: Member | None = None
        """State after the last epoch, held while all trials together may not fit into memory."""
        self.final_event: Event | None = None
        self.held: list[EpochDone] = []
        """Epochs that have ended but are not verified yet."""
        self.is_again = False
        """Whether it has started its current stage before."""
        self.is_cut = False
        """Whether it ends with its current epoch, because no trial needs more of it."""
        self.is_alone = False
        """Whether it must no longer be fused with other trials."""
        self.is_compared = False
        """Whether it was compared with a restored trial at the end of a stage."""
        self.epoch_s = 0.0
        """Seconds that the last epoch took."""
        self.lines = LineBuffer()
        """What was logged in the current epoch so far."""
        self._num_reported = self.epoch
        self._start: tuple[int, CheckpointRef | Future[CheckpointRef] | None]
        self._start = (self.epoch, self.chain.resume)

    @property
    def resume(self) -> CheckpointRef | None:
        """The last checkpoint from which it can be trained again; None: a fresh model.

        Raises:
            StoreWriteError: The checkpoint could not be written.
        """
        return self._start[1].result() if isinstance(self._start[1], Future) else self._start[1]

    @property
    def next_kept(self) -> CheckpointRef | None:
        """The state after the next epoch, if another plan has trained that epoch."""
        ref = self.stage.kept_at(self.epoch + 1)
        return None if self.under_way or self.held or ref in self.lost else ref

    def move_to(self, kept: CheckpointRef, state: State) -> None:
        """Skip an epoch whose state is stored already."""
        self.epoch, self.passed = self.epoch + 1, state
        self._start = (self.epoch, kept)

    def verified(self, done: EpochDone, num_unverified: int) -> list[Report]:
        """Add an epoch that has ended; return reports of the newly verified epochs, each once."""
        self.held.append(done)
        num_ready = len(self.held) - num_unverified
        ready, self.held = self.held[:num_ready], self.held[num_ready:]
        fresh = [event for event in ready if event.epoch > self._num_reported]
        for event in ready[: len(ready) - len(fresh)]:
            self._drop(event)
        self._num_reported = max([self._num_reported, *(event.epoch for event in ready)])
        return [self.report(event) for event in fresh]

    def start_again(self) -> None:
        """Go back to the last state from which it can be trained again."""
        self.epoch = self._start[0]
        self.under_way = False
        self.is_again = self.is_alone = True
        self.spare = self.passed = None
        self.drop_spent()
        for event in self.held:
            self._drop(event)
        self.held.clear()

    def drop_spent(self) -> None:
        """Count the time spent on the current epoch as time of discarded epochs."""
        self.lines.clear()
        self.dropped, self.spent = self.dropped.plus(self.spent), TimeShare()

    def _drop(self, event: EpochDone) -> None:
        lost = TimeShare(seconds=event.seconds, checks=event.seconds_checks)
        self.dropped = self.dropped.plus(lost)

    def keep(self, stage: Stage, writing: Future[CheckpointRef]) -> None:
        """Note that the state at the end of a stage is being written."""
        self.writes.append((stage, writing))  # type: ignore[arg-type] # futures are only read
        self._start = (self.epoch, writing)

    def member(self, state: State | None, *, epoch: int | None = None) -> Member:
        """Return the trial with ``state``, about to train ``epoch`` (None: the current one)."""
        return member_at(
            self.chain.timeline,
            seed=self.assignment.seed,
            epoch=self.epoch if epoch is None else epoch,
            stop=self.stage.stop,
            state=state,
            alone=self.is_alone,
        )


def evaluated(
    task: Task, ref: CheckpointRef, member: Member, *, device: str, worker: str
) -> EpochDone:
    """Evaluate a state that another plan has trained.

    Args:
        task: The trained task; its metrics may have changed since.
        ref: The checkpoint, with the training loss of its last epoch.
        member: The same state, with the hyper-parameters of that epoch.
        device: Device to evaluate on.
        worker: Name of the worker.
    """
    assert ref.train_loss is not None
    began = time.perf_counter()
    metrics = {TRAIN_LOSS: ref.train_loss, **evaluate_state(task, member, device=device)}
    seconds = time.perf_counter() - began
    return EpochDone(
        node=ref.node,
        epoch=ref.epoch,
        metrics=metrics,
        seconds=seconds,
        seconds_alone=seconds,
        worker=worker,
        evaluated=True,
    )


def nothing_to_write() -> Future[CheckpointRef | None]:
    """Return a finished write, for a state whose file exists already."""
    future: Future[CheckpointRef | None] = Future()
    future.set_result(None)
    return future


class Completeness:
    """A check that compares live trials with restored ones, when ``StateCheck`` says it is due."""

    def __init__(
        self, task: Task | Trainable, *, device: torch.device, limit_s: float | None = None
    ) -> None:
        self._check = StateCheck(
            task, device=device, limit_s=math.inf if limit_s is None else limit_s
        )

    def trained(self, seconds: float) -> None:
        """Add training time, which the budget for comparisons is relative to."""
        self._check.budget.trained_s += seconds

    @property
    def spent_s(self) -> float:
        """Seconds spent on comparisons so far."""
        return self._check.budget.spent_s

    def note(self, trial: Trial, member: Member) -> None:
        """Register a new trial before it is trained.

        Raises:
            StateError: It shares what it trains, or keeps random numbers for other trials.
        """
        self._check.note(trial, member)

    def at_end(self, running: RunningChain, backend: AutoBackend, state: State) -> Exception | None:
        """Compare a trial that has ended a stage with a trial restored from its state.

        The comparison removes the trial from the back-end; training continues from ``state``.

        Args:
            running: The chain that is trained.
            backend: The back-end that holds the trial.
            state: The current state of the trial.

        Returns:
            The error that the comparison found, or None.
        """
        if not self._check.is_due(
            backend.trial(running.number), epoch=running.epoch, is_first=not running.is_compared
        ):
            return None
        running.is_compared = True
        live = backend.take(running.number)
        running.passed = state
        arrays, meta = state_to_arrays(state)
        meta = json.loads(json.dumps(meta))  # what writing and reading a checkpoint does
        state = replace(state_from_arrays(arrays, meta), base=state.base)
        # Compare at the values of epochs already trained: if the values of the next epoch make a
        # step hang or fail, this stage is not to blame. A change that ``adapt`` made only once, for
        # certain values, shows at other values, so compare at those of epoch 0, too.
        last, timeline = running.epoch - 1, running.chain.timeline
        try:
            self._compare(running, live, state, epoch=last)
            if live.adapts and timeline.at(0) != timeline.at(last):
                self._compare(running, live, live.state(), epoch=0)
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            return error
        return None

    def at_begin(self, running: RunningChain, member: Member) -> None:
        """Compare a trial that begins in this process with one that begins in a new process.

        Values that other trials have left in shared variables must not influence this trial.

        Raises:
            StateError: They do.
        """
        if self._check.is_changed():
            live = self._check.begin(member)
            if self._check.is_due(live, epoch=running.epoch):
                self._compare(running, live, member.state, epoch=running.epoch)

    def _compare(
        self, running: RunningChain, live: Trial, state: State | None, *, epoch: int
    ) -> None:
        plan = plan_of(live.num_steps, running.chain.timeline, epoch=epoch)
        member = running.member(state, epoch=epoch)
        self._check.check(live, member, plan, epoch=running.epoch, seconds=running.epoch_s)


CACHE_BYTES = 32 * 2**20
"""Size of the cache of recent states, so that a branch need not read what was just written."""


class StateFiles:
    """The states that a worker reads, and writes in a thread of its own.

    Args:
        checkpoints: The checkpoint folder of the study.
        folder: The folder of the plan within it.
        name: The name of the worker.
        max_base_bytes: How many bytes the bases of the plan may take.
    """

    def __init__(
        self, checkpoints: str, *, folder: str, name: str, max_base_bytes: float = MAX_BASE_BYTES
    ) -> None:
        self._checkpoints = CheckpointFolder(checkpoints)
        self._folder = folder
        self._bases = BaseFiles(self._checkpoints, folder=folder, max_bytes=max_base_bytes)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-writer")
        self._recent = RecentStates(CACHE_BYTES)

    def write(self, node: int, epoch: int, state: State) -> Future[CheckpointRef]:
        """Start to write the state after an epoch of a node."""
        # what waits in the cache keeps no base in memory
        base = None if state.base is None else self._bases.stored(state.base)
        self._recent.add((node, epoch), replace(state, base=base))
        return self._writer.submit(self._write, node, epoch, state)

    def read(self, ref: CheckpointRef) -> State:
        """Return a state, from the cache if it is there.

        Raises:
            CheckpointError: The file is missing, damaged or not that of a state.
        """
        known = self._recent.get((ref.node, ref.epoch))
        if known is not None:
            return known
        state = read_state(self._checkpoints, ref)
        self._recent.add((ref.node, ref.epoch), state)
        return state

    def close(self) -> None:
        """Wait for states that are still being written."""
        self._writer.shutdown()

    def _write(self, node: int, epoch: int, state: State) -> CheckpointRef:
        self._bases.keep(state.base)
        arrays, meta = state_to_arrays(state)
        return self._checkpoints.write(
            self._folder, node=node, epoch=epoch, tensors=arrays, meta=meta
        )


def read_state(checkpoints: CheckpointFolder, ref: CheckpointRef) -> State:
    """Return the state in a checkpoint, with the base that it names.

    Raises:
        CheckpointError: The file is missing, damaged or not that of a state.
    """
    arrays, meta = checkpoints.read(ref)
    try:
        state = state_from_arrays(arrays, meta)
        digest = meta.get("base")
        if digest is None:
            return state
        folder, _, _ = ref.path.partition("/")
        return replace(state, base=StoredBase(checkpoints, folder=folder, digest=digest))
    except CheckpointError as error:
        raise CheckpointError(f"{ref.path}: {error}") from error


def state_to_arrays(state: State) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return a state as NumPy arrays and JSON data.

    NumPy has no bfloat16 and no float8, so those are stored as integers of the same width.
    """
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for key, tensor in state.tensors.items():
        held = tensor.cpu().contiguous()
        try:
            arrays[key] = held.numpy()
        except TypeError:
            width = {1: torch.uint8, 2: torch.int16}[held.element_size()]
            arrays[key] = held.view(width).numpy()
            dtypes[key] = str(held.dtype).removeprefix("torch.")
    meta = {"tree": state.tree, "dtypes": dtypes}
    return arrays, meta if state.base is None else {**meta, "base": state.base.digest}


def state_from_arrays(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> State:
    """Return the state from which ``state_to_arrays`` made arrays and JSON data.

    Raises:
        CheckpointError: The arrays or the JSON data are not the output of ``state_to_arrays``.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        for key, array in arrays.items():
            tensor = torch.from_numpy(array.copy() if not array.flags.writeable else array)
            dtype = meta["dtypes"].get(key)
            tensors[key] = tensor if dtype is None else tensor.view(_dtype(dtype))
        return State(tensors=tensors, tree=meta["tree"])
    except (KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"this is not the state of a trial ({error})") from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype of torch")
    return found


class RecentStates:
    """The most recently used states, up to a number of bytes; at least one state is kept."""

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


def _num_bytes(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.tensors.values())


# -- frozen bases ----------------------------------------------------------------------------------


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that safetensors has for types of numbers."""
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


class StoredBase(Base):
    """A base in a file, of which tensors are read when they are asked for.

    Args:
        checkpoints: The checkpoint folder.
        folder: The plan's folder within it.
        digest: The digest of the base.
    """

    def __init__(self, checkpoints: CheckpointFolder, *, folder: str, digest: str) -> None:
        self._file = BaseFile(checkpoints, folder=folder, digest=digest)
        self._digest = digest

    @property
    def digest(self) -> str:
        """The digest of names and contents."""
        return self._digest

    def tensor(self, name: str, *, digest: str) -> torch.Tensor:
        """Return a parameter.

        Raises:
            CheckpointError: The file is missing or damaged, or the parameter is not in it.
        """
        dtype, shape, data = self._file.read(name)
        try:
            held = torch.frombuffer(bytearray(data), dtype=_TYPES[dtype]).reshape(shape)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the stored base {self._file.name} is damaged: {name!r} cannot be read ({error})"
            ) from error
        if digest_of(held) != digest:
            raise CheckpointError(
                f"the stored base {self._file.name} is damaged: {name!r} is not what was written"
            )
        return held


class BaseFiles:
    """The bases that a worker writes, each once.

    Args:
        checkpoints: The checkpoint folder.
        folder: The plan's folder within it.
        max_bytes: How many bytes all bases of the plan may take.
    """

    def __init__(self, checkpoints: CheckpointFolder, *, folder: str, max_bytes: float) -> None:
        self._checkpoints = checkpoints
        self._folder = folder
        self._max_bytes = max_bytes
        self._done: set[str] = set()

    def stored(self, base: Base) -> StoredBase:
        """Return a base as one that is read from its file."""
        return StoredBase(self._checkpoints, folder=self._folder, digest=base.digest)

    def keep(self, base: Base | None) -> None:
        """Write a base to a file. Do nothing if an intact file exists, or if the base is too large.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        if not isinstance(base, LoadedBase) or base.digest in self._done:
            return
        self._done.add(base.digest)
        if any(each.tensor.dtype not in _NAMES for each in base.tensors.values()):
            logger.info("a base is not stored: safetensors has no name for one of its types")
            return
        first = {each.digest: name for name, each in reversed(base.tensors.items())}
        tensors = {name: _part(base.tensors[name]) for name in sorted(first.values())}
        also = {name: first[each.digest] for name, each in base.tensors.items()}
        file = BaseFile(self._checkpoints, folder=self._folder, digest=base.digest)
        num_bytes, (found, others) = size_of(tensors, also=also), file.num_bytes()
        if found == num_bytes and self._is_intact(base):
            return
        if num_bytes + others > self._max_bytes:
            besides = f", besides {others:,} bytes of others," if others else ""
            logger.info(
                "a base of %s bytes%s is over Storage(max_base_bytes=%s) and is not stored; the "
                "task has to make it again for each trial that goes on",
                f"{num_bytes:,}",
                besides,
                f"{self._max_bytes:,.0f}" if math.isfinite(self._max_bytes) else "inf",
            )
            return
        file.write(tensors, also=also)

    def _is_intact(self, base: LoadedBase) -> bool:
        """Return whether a file has all tensors of a base; reads it once."""
        stored = self.stored(base)
        try:
            for name, each in base.tensors.items():
                stored.tensor(name, digest=each.digest)
        except CheckpointError as error:
            logger.warning("%s; it is written again", error)
            return False
        return True


def _part(frozen: FrozenTensor) -> BaseTensor:
    tensor = frozen.tensor
    return BaseTensor(
        dtype=_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        num_bytes=tensor.nbytes,
        read=lambda: bytes_of(tensor),
    )
