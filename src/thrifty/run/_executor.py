"""The interface of an executor: what it is given, what it reports, who is at work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from thrifty.core import EpochDone, Event, StageDone, StageFailed, StageStarted, UsageError
from thrifty.pack import Prefer, Task, Trainable
from thrifty.plan import Chain, Stage
from thrifty.store._plan_files import MAX_BASE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A chain of stages for one worker.

    Attributes:
        number: Its number in the run.
        chain: The stages.
        seed: The seed that all trials of the plan share.
        epochs_to_come: The epochs that the plan still needs, divided by the number of workers. More
            may be asked for later.
    """

    number: int
    chain: Chain
    seed: int
    epochs_to_come: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A structure whose trials must no longer be fused; the fields are those of ``Refused``."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The number of an assignment that ends with its current epoch."""

    assignment: int


Order = Refusal | Cut
"""What a worker is told while it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An event of an assignment; ``event`` is None when the worker has finished with it."""

    assignment: int
    event: Event | None = None


class ChainProgress:
    """The progress of an assignment: its current stage and epoch."""

    __slots__ = ("_index", "assignment", "chain", "epoch", "number")

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.number = assignment.number
        self.chain = assignment.chain
        self._index = 0
        self.epoch = self.stage.start

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self.chain.stages[self._index]

    def next_stage(self) -> bool:
        """Move to the next stage; return False if there is none."""
        if self._index + 1 == len(self.chain.stages):
            return False
        self._index += 1
        return True

    def report(self, event: Event | None) -> Report:
        """Return a report of an event of this assignment."""
        return Report(assignment=self.number, event=event)


class Executor(ABC):
    """A set of workers, each of which trains assignments and reports their events.

    A worker trains one or several assignments at a time. The reports of an assignment come in
    order, and the last one has no event. A failure of user code or of a worker is never raised, but
    reported as an event. If the store cannot write, ``poll`` raises StoreWriteError.
    """

    may_be_asked: bool = False
    """Whether it is free only while ``Study.ask`` waits for a trial.

    A study is then not done while its executor has no work and is not free.
    """
    trains_elsewhere: bool = False
    """Whether a loop of the user trains, which calls ``Study.ask`` and ``Study.tell``."""
    was_stopped: bool = False
    """Whether those who give it work have ended the run."""

    @abstractmethod
    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many more assignments can start now, with ``pack_size`` for each worker."""

    @abstractmethod
    def submit(self, assignment: Assignment) -> None:
        """Give an assignment to the worker with the least work."""

    @abstractmethod
    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Return the new reports; wait up to ``timeout_s`` seconds if there are none."""

    def refuse(self, key: str, reason: str) -> None:
        """Tell workers not to fuse trials of a structure.

        A worker that is not told finds out by its own check.

        Args:
            key: Identifier of the structure, equal in every process.
            reason: What the check has found.
        """
        return

    def cut(self, assignment: int) -> None:
        """Ask a worker to keep the state of an assignment after its current epoch, and to end it.

        An executor that cannot trains it to its end.
        """
        return

    @abstractmethod
    def stop(self) -> None:
        """Ask all workers to save their states at the end of the current epoch and finish."""

    @abstractmethod
    def close(self) -> None:
        """Stop all workers now; training since the last checkpoints is lost."""


class ExecutorConfig(ABC):
    """The user's frozen description of an executor; ``open`` makes the executor.

    Attributes:
        pack_size: Trials that a worker trains at a time. None: found by measurement.
        memory_margin: Fraction of a device's memory that a pack may use.
        threads: CPU threads of each worker. None: not fixed here.
        epoch_timeout: Seconds that a worker may train until an epoch ends. None: no limit.
    """

    pack_size: int | None = None
    memory_margin: float = 0.9
    threads: int | None = None
    epoch_timeout: float | None = None

    @property
    def default_threads(self) -> int | None:
        """CPU threads of each worker if ``threads`` is None; None: their number does not matter."""
        return None

    def with_threads(self, threads: int) -> ExecutorConfig:
        """Return a copy with ``threads`` CPU threads per worker; itself if they do not matter."""
        return self

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return 1

    @property
    def local_devices(self) -> tuple[str, ...]:
        """Devices of this machine that workers train on; none if they are not known here."""
        return ()

    @abstractmethod
    def open(
        self,
        task: Task | Trainable,
        *,
        checkpoints: str,
        folder: str,
        curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        refused: Mapping[str, str] | None = None,
        max_base_bytes: float = MAX_BASE_BYTES,
    ) -> Executor:
        """Return the executor for a task; workers save states under ``checkpoints``/``folder``.

        ``curves`` are the known pack curves (times of joint steps), by the key of ``Calibrated``.
        ``refused`` maps the structures that must not be fused to the reasons, by the key of
        ``Refused``. ``max_base_bytes`` is that of ``Storage``.
        """


def check_options(config: Any) -> None:
    """Check the options that all executors share.

    Raises:
        UsageError: An option is invalid: fewer than one worker, thread or trial per pack, an
            unknown ``pack``, a ``memory_margin`` outside (0, 1], or an ``epoch_timeout`` that is
            not a positive number.
    """
    name = type(config).__name__
    margin = config.memory_margin
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise UsageError(f"{name}(memory_margin={margin!r}): it must be a number")
    if config.pack not in get_args(Prefer):
        raise UsageError(
            f"{name}(pack={config.pack!r}): it is one of {', '.join(map(repr, get_args(Prefer)))}"
        )
    if not 0.0 < config.memory_margin <= 1.0:
        raise UsageError(
            f"{name}(memory_margin={config.memory_margin}): a share above 0 and at most 1"
        )
    limit = config.epoch_timeout
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if limit is not None and not (number and 0.0 < limit < math.inf):
        raise UsageError(
            f"{name}(epoch_timeout={limit!r}): it must be a finite number of seconds above 0, "
            "or None for no limit"
        )
    for option in ("workers", "threads", "pack_size"):
        value = getattr(config, option)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}({option}={value!r}): {option} must be an integer")
        if value < 1:
            raise UsageError(f"{name}({option}={value}): needs at least one")


class WorkerSlot:
    """One worker's assignments, their last events, and which trials may have crashed it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.assignments: dict[int, Assignment] = {}
        self._last: dict[int, Event] = {}
        self._ended: tuple[int, int] | None = None
        """Node and epoch of the last stage that it has ended."""
        self._suspects = 0
        """Number of trials still to train alone after the worker crashed with several trials.

        Training each of them alone shows which one crashes the worker.
        """

    def num_free(self, pack_size: int) -> int:
        """Return how many more assignments the worker can take."""
        return max(0, (1 if self._suspects else pack_size) - len(self.assignments))

    def has_state_of(self, assignment: Assignment) -> bool:
        """Return whether the worker has just trained what an assignment goes on from."""
        resume = assignment.chain.resume
        return resume is not None and self._ended == (resume.node, resume.epoch)

    def take(self, assignment: Assignment) -> None:
        """Add an assignment."""
        self.assignments[assignment.number] = assignment

    def note(self, reports: Iterable[Report]) -> None:
        """Record the worker's reports."""
        for report in reports:
            if report.event is None:
                del self.assignments[report.assignment]
                self._last.pop(report.assignment, None)
                self._suspects = max(0, self._suspects - 1)
            elif isinstance(report.event, StageStarted | EpochDone | StageDone):
                self._last[report.assignment] = report.event
                if isinstance(report.event, StageDone):
                    self._ended = (report.event.node, report.event.stop)

    def vanish(self, why: str, *, evicted: bool = False) -> list[Report]:
        """Return reports that the worker is gone and its stages have failed; drop its assignments.

        If the worker trained a single trial, that trial is lost. If it trained several, the one
        that caused the crash is unknown, so each is trained again, alone. If the worker's machine
        is gone (``evicted``), no trial is to blame.
        """
        message = f"WorkerLostError: worker {self.name} ended unexpectedly ({why})"
        return self._give_up("evicted" if evicted else "lost", message)

    def time_out(self, limit_s: float) -> list[Report]:
        """Return reports that the worker was killed because no epoch ended within the limit."""
        message = (
            f"EpochTimeoutError: no epoch has ended in {limit_s:g} s on worker {self.name}, "
            "which was killed; if epochs "
            "take so long, raise epoch_timeout"
        )
        return self._give_up("timeout", message)

    def _give_up(self, kind: str, message: str) -> list[Report]:
        alone = len(self.assignments) == 1
        evicted = kind == "evicted"
        if not alone and not evicted:
            kind = "crowded"
        reports: list[Report] = []
        for number, assignment in self.assignments.items():
            last = self._last.get(number)
            at = _stage_after(assignment, last)
            # Epochs that were reported are safe, whatever happens to the rest of the stage.
            reached = last.epoch if isinstance(last, EpochDone) else at.start
            event = StageFailed(
                node=at.node,
                start=at.start,
                stop=at.stop,
                epoch=max(at.start, reached) if kind == "timeout" else at.start,
                kind=kind,
                message=message,
                worker=self.name,
                reached=reached,
            )
            reports += [Report(assignment=number, event=event), Report(assignment=number)]
        if not evicted:
            self._suspects = max(self._suspects - 1, 0) if alone else len(self.assignments)
        self.clear()
        return reports

    def clear(self) -> None:
        """Drop all assignments."""
        self.assignments.clear()
        self._last.clear()


def _stage_after(assignment: Assignment, last: Event | None) -> Stage:
    """Return the stage at which an assignment was after its last event."""
    stages = assignment.chain.stages
    if isinstance(last, StageStarted):
        return next(s for s in stages if (s.node, s.stop) == (last.node, last.stop))
    if isinstance(last, StageDone):
        rest = [s for s in stages if s.start >= last.stop]
        return rest[0] if rest else stages[-1]
    if isinstance(last, EpochDone):
        return next(s for s in stages if s.node == last.node and s.stop >= last.epoch)
    return stages[0]
