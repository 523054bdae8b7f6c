"""Simulated workers: a discrete-event simulation over a virtual clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Any

from thrifty.core import (
    CheckpointRef,
    EpochDone,
    StageDone,
    StageFailed,
    StageStarted,
    UsageError,
)
from thrifty.pack import Task, Trainable
from thrifty.plan import Stage
from thrifty.space import Timeline

from ._assignment import Assignment, Report
from ._executor import Executor, ExecutorConfig
from ._faults import Faults
from ._simulated_worker import Counts, Course, SimulatedClock, SimulatedWorker


EpochSeconds = float | Callable[[Mapping[str, Any]], float]
Outcome = Callable[[Timeline, int, int], Mapping[str, float]]


class ValuesAt(Mapping[str, Any]):
    """The hyper-parameters of one epoch, each computed when it is read.

    >>> from thrifty.space import Step
    >>> dict(ValuesAt(Timeline({"lr": Step(1.0, [2]), "width": 64}, epochs=4), 2))
    {'lr': 0.1, 'width': 64}
    """

    __slots__ = ("_epoch", "_timeline")

    def __init__(self, timeline: Timeline, epoch: int) -> None:
        self._timeline = timeline
        self._epoch = epoch

    def __getitem__(self, name: str) -> Any:
        if name not in self._timeline.config:
            raise KeyError(name)
        return self._timeline.values(name, self._epoch, num_steps=1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._timeline.config)

    def __len__(self) -> int:
        return len(self._timeline.config)

    def __repr__(self) -> str:
        return repr(dict(self))


def _as_it_is(timeline: Timeline) -> Timeline:
    return timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated(ExecutorConfig):
    """Workers that do not train, but report on a virtual clock what real workers would report.

    ``Study.run`` does not accept them; use ``thrifty.study.simulate``.

    Attributes:
        workers: Number of workers; each trains one trial at a time.
        epoch_s: Seconds of an epoch, or a function of the hyper-parameters' values in that epoch.
        outcome: A function of a timeline, a number of epochs and a seed; it returns the metrics
            after those epochs. It may use only what the timeline does in these epochs, so that
            sharing changes no result.
        start_s: Seconds that a worker takes to load the state of a new assignment.
        checkpoint_bytes: Size of a state.
        faults: Failures, preemptions and stragglers.
        seed: Seed of the faults.
        shown: A function that maps a chain's timeline to the one that ``epoch_s`` and ``outcome``
            see.

    >>> config = Simulated(
    ...     workers=1000,
    ...     epoch_s=30.0,
    ...     outcome=lambda timeline, epoch, seed: {"loss": 1 / epoch},
    ... )
    >>> config.open().num_free()
    1000

    Raises:
        UsageError: ``workers`` is less than 1, a time is out of range, or ``checkpoint_bytes`` is
            negative.
    """

    workers: int
    epoch_s: EpochSeconds
    outcome: Outcome
    start_s: float = 0.0
    checkpoint_bytes: int = 0
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    shown: Callable[[Timeline], Timeline] = _as_it_is

    pack_size = 1

    def __post_init__(self) -> None:
        if (
            isinstance(self.workers, bool)
            or not isinstance(self.workers, int)
            or self.workers < 1
        ):
            raise UsageError(f"workers={self.workers!r}: it must be a whole number, 1 or more")
        if not callable(self.epoch_s):
            _checked_s(self.epoch_s)
        if not 0 <= self.start_s < math.inf:
            raise UsageError(
                f"start_s={self.start_s!r}: it must be a finite number of seconds, 0 or more"
            )
        if self.checkpoint_bytes < 0:
            raise UsageError(
                f"checkpoint_bytes={self.checkpoint_bytes!r}: it must be 0 or more"
            )

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.workers

    def seconds_of(self, timeline: Timeline, epoch: int) -> float:
        """Return the seconds that epoch ``epoch`` (from 1) takes on a worker that is not slow."""
        if not callable(self.epoch_s):
            return self.epoch_s
        return _checked_s(self.epoch_s(ValuesAt(self.shown(timeline), epoch - 1)))

    def slowdowns(self) -> list[float]:
        """Return the factor by which an epoch takes longer on each worker."""
        return self.faults.slowdowns(self.workers, seed=self.seed)

    def open(
        self,
        task: Task | Trainable | None = None,
        *,
        checkpoints: str = "",
        folder: str = "",
        curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> SimulatedExecutor:
        """Return the executor; its caller must use the executor's clock.

        Raises:
            UsageError: There is a task, whose study would be filled with simulated results.
        """
        if task is not None:
            raise UsageError(
                "Simulated workers train nothing, so a study cannot be run on them; "
                "use thrifty.study.simulate(...), "
                "or run the study with executor=Local(...)"
            )
        return SimulatedExecutor(self)


class _What(Enum):
    """The kinds of simulation events of a worker."""

    BEGINS = 0
    EPOCH_ENDS = 1
    FAILS = 2
    IS_ANNOUNCED = 3
    IS_TAKEN = 4
    IS_THERE = 5


class SimulatedExecutor(Executor):
    """An executor that keeps future events in a heap; ``poll`` advances the clock to the next."""

    def __init__(self, config: Simulated) -> None:
        self.clock = SimulatedClock()
        self.counts = Counts()
        self._config = config
        self._workers = [
            SimulatedWorker(number, slowdown=slowdown, faults=config.faults, seed=config.seed)
            for number, slowdown in enumerate(config.slowdowns())
        ]
        self._free: list[int] = []
        """Heap of free workers. Some may have gone since; ``_take_free`` skips those."""
        self._num_free = 0
        self._num_busy = 0
        self._stopping = False
        self._asked_at: float | None = None
        self._number = 0
        self._queue: list[tuple[float, int, _What, int, int]] = []
        """Heap of (time, sequence number, event, worker, the worker's life).

        The sequence number breaks ties: the event that was scheduled first happens first.
        """
        for number in range(config.workers):
            self._arrive(number)

    # -- the interface ------------------------------------------------------------------------

    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many more assignments can start now.

        If all workers are gone, the clock first advances until one is back.
        """
        while not self._num_free and not self._num_busy:
            self._pass_time([])
        self._asked_at = time.perf_counter() if self._num_free else None
        return self._num_free

    def submit(self, assignment: Assignment) -> None:
        """Give an assignment to a free worker."""
        self._decided()
        worker, number = self._take_free()
        worker.course = Course(assignment)
        worker.began = self.clock.now()
        worker.asked_to_stop = self._stopping
        self._num_busy += 1
        self._foresee(self._config.start_s, _What.BEGINS, number)

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Advance the clock until there is a report or another free worker; return the reports."""
        self._decided()
        reports: list[Report] = []
        free = self._num_free
        while self._queue and not reports and self._num_free <= free:
            self._pass_time(reports)
        return reports

    def stop(self) -> None:
        """Ask all workers to save their states at the end of the current epoch and finish."""
        self._stopping = True
        for worker in self._workers:
            worker.asked_to_stop = True

    def close(self) -> None:
        """Discard all future events."""
        self._queue.clear()

    # -- virtual time -------------------------------------------------------------------------

    def _foresee(self, after_s: float, what: _What, number: int) -> None:
        if after_s < math.inf:
            self._number += 1
            life = self._workers[number].life
            moment = self.clock.now() + after_s
            heappush(self._queue, (moment, self._number, what, number, life))

    def _pass_time(self, reports: list[Report]) -> None:
        """Advance the clock to the next event, and handle all events of that moment."""
        moment = self._queue[0][0]
        self.clock.pass_until(moment)
        while self._queue and self._queue[0][0] == moment:
            _, _, what, number, life = heappop(self._queue)
            if life == self._workers[number].life:
                self._happen(what, number, reports)

    def _happen(self, what: _What, number: int, reports: list[Report]) -> None:
        worker = self._workers[number]
        if what is _What.BEGINS:
            self._begin(worker, number, reports)
        elif what is _What.EPOCH_ENDS:
            self._end_epoch(worker, number, reports)
        elif what is _What.IS_THERE:
            self._arrive(number)
        elif what is _What.IS_ANNOUNCED:
            self._announce(worker, number)
        elif what is _What.IS_TAKEN:
            self._leave(
                number, reports, kind="evicted", back_after_s=self._config.faults.replace_s
            )
        else:
            self.counts.failures += 1
            self._leave(number, reports, kind="lost", back_after_s=self._config.faults.repair_s)

    def _decided(self) -> None:
        if self._asked_at is not None:
            self.counts.decisions_s.append(time.perf_counter() - self._asked_at)
            self._asked_at = None

    # -- training -----------------------------------------------------------------------------

    def _begin(self, worker: SimulatedWorker, number: int, reports: list[Report]) -> None:
        course = worker.course
        assert course is not None
        reports.append(course.report(_started(course.stage, worker)))
        self._train(worker, course, number)

    def _train(self, worker: SimulatedWorker, course: Course, number: int) -> None:
        nominal_s = self._config.seconds_of(course.timeline, course.epoch + 1)
        course.seconds = nominal_s * worker.slowdown
        self._foresee(course.seconds, _What.EPOCH_ENDS, number)

    def _end_epoch(self, worker: SimulatedWorker, number: int, reports: list[Report]) -> None:
        course = worker.course
        assert course is not None
        course.epoch += 1
        self.counts.epochs += 1
        stage = course.stage
        event = EpochDone(
            node=stage.node,
            epoch=course.epoch,
            metrics=self._config.outcome(
                self._config.shown(course.timeline), course.epoch, course.assignment.seed
            ),
            seconds=course.seconds,
            seconds_alone=course.seconds,
            worker=worker.name,
        )
        reports.append(course.report(event))
        ended = course.epoch == stage.stop
        if ended or worker.asked_to_stop:
            reports.append(course.report(self._kept(stage, course.epoch, worker)))
        if worker.asked_to_stop or (ended and not course.next_stage()):
            reports.append(course.report(None))
            self._put_down(worker)
            if not worker.asked_to_stop or self._stopping:
                self._list(number)
            return
        if ended:
            reports.append(course.report(_started(course.stage, worker)))
        self._train(worker, course, number)

    def _kept(self, stage: Stage, epoch: int, worker: SimulatedWorker) -> StageDone:
        ref = CheckpointRef(
            node=stage.node,
            epoch=epoch,
            path="",
            num_bytes=self._config.checkpoint_bytes,
            digest="",
        )
        return StageDone(
            node=stage.node, start=stage.start, stop=epoch, worker=worker.name, checkpoint=ref
        )

    def _put_down(self, worker: SimulatedWorker) -> None:
        self.counts.busy_s += self.clock.now() - worker.began
        self._num_busy -= 1
        worker.course = None

    # -- arrivals, preemptions and failures of workers ----------------------------------------

    def _arrive(self, number: int) -> None:
        worker = self._workers[number]
        worker.asked_to_stop = self._stopping
        self._list(number)
        self._foresee(worker.failures.gap_s(), _What.FAILS, number)
        self._foresee(worker.preemptions.gap_s(), _What.IS_ANNOUNCED, number)

    def _announce(self, worker: SimulatedWorker, number: int) -> None:
        """Handle the notice of a preemption.

        The worker takes no new assignment, and saves its state if an epoch ends in time.
        """
        self.counts.preemptions += 1
        worker.asked_to_stop = True
        self._unlist(worker)
        self._foresee(self._config.faults.notice_s, _What.IS_TAKEN, number)

    def _leave(
        self, number: int, reports: list[Report], *, kind: str, back_after_s: float
    ) -> None:
        worker = self._workers[number]
        course = worker.course
        self._unlist(worker)
        worker.life += 1
        if course is not None:
            stage = course.stage
            event = StageFailed(
                node=stage.node,
                start=stage.start,
                stop=stage.stop,
                epoch=stage.start,
                kind=kind,
                message=f"WorkerLostError: worker {worker.name} ended unexpectedly (simulated)",
                worker=worker.name,
            )
            reports += [course.report(event), course.report(None)]
            self._put_down(worker)
        self._foresee(back_after_s, _What.IS_THERE, number)

    def _list(self, number: int) -> None:
        self._workers[number].free = True
        self._num_free += 1
        heappush(self._free, number)

    def _unlist(self, worker: SimulatedWorker) -> None:
        if worker.free:
            worker.free = False
            self._num_free -= 1

    def _take_free(self) -> tuple[SimulatedWorker, int]:
        while True:
            number = heappop(self._free)
            worker = self._workers[number]
            if worker.free:
                self._unlist(worker)
                return worker, number


def _started(stage: Stage, worker: SimulatedWorker) -> StageStarted:
    return StageStarted(node=stage.node, start=stage.start, stop=stage.stop, worker=worker.name)


def _checked_s(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"an epoch takes {seconds!r} s: epoch_s must give a finite number above 0"
        )
    return seconds
