"""An executor on a virtual clock with made-up workers that fail, straggle and are preempted."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Any

import numpy as np

from thrifty.core import (
    CheckpointRef,
    EpochDone,
    StageDone,
    StageFailed,
    StageStarted,
    UsageError,
    derive_seed,
)
from thrifty.pack import Task, Trainable
from thrifty.plan import Stage
from thrifty.space import Timeline
from thrifty.store._plan_files import MAX_BASE_BYTES

from ._executor import Assignment, ChainProgress, Executor, ExecutorConfig, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often simulated workers fail, are preempted or are slow; by default never.

    Each worker has random streams of its own, so adding workers changes nothing for the others.

    Attributes:
        mean_between_failures_s: Mean seconds between failures of one worker, exponentially
            distributed. A failed worker loses its training since the last checkpoint.
        repair_s: Seconds until a failed worker is available again.
        mean_between_preemptions_s: Mean seconds between preemptions of one worker, as on spot
            machines, exponentially distributed.
        notice_s: Seconds between the notice of a preemption and the preemption itself. If an epoch
            ends in that time, its state is saved.
        replace_s: Seconds until another machine replaces a preempted one.
        stragglers: Fraction of the workers that are always slow.
        slowdown: Factor by which an epoch takes longer on those.

    >>> Faults(mean_between_failures_s=86_400, stragglers=0.05).slowdown
    2.0

    Raises:
        UsageError: A time, the fraction or the factor is out of range.
    """

    mean_between_failures_s: float = math.inf
    repair_s: float = 0.0
    mean_between_preemptions_s: float = math.inf
    notice_s: float = 0.0
    replace_s: float = 0.0
    stragglers: float = 0.0
    slowdown: float = 2.0

    def __post_init__(self) -> None:
        for name in ("mean_between_failures_s", "mean_between_preemptions_s"):
            if not getattr(self, name) > 0:
                raise UsageError(
                    f"Faults({name}={getattr(self, name)!r}): it must be above 0 (math.inf: never)"
                )
        for name in ("repair_s", "notice_s", "replace_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(
                    f"Faults({name}={getattr(self, name)!r}): it must be a finite number of "
                    "seconds, 0 or more"
                )
        if not 0 <= self.stragglers <= 1:
            raise UsageError(
                f"Faults(stragglers={self.stragglers!r}): it is a share of the workers, from 0 to 1"
            )
        if not 1 <= self.slowdown < math.inf:
            raise UsageError(
                f"Faults(slowdown={self.slowdown!r}): the factor by which an epoch is "
                "slower must be 1 or more"
            )

    def slowdowns(self, workers: int, *, seed: int) -> list[float]:
        """Return the factor by which an epoch takes longer on each worker; 1.0 if it is not slow.

        >>> Faults(stragglers=0.5, slowdown=3).slowdowns(6, seed=0).count(3.0) in range(7)
        True
        """
        if not self.stragglers:
            return [1.0] * workers
        draws = np.random.default_rng(derive_seed(seed, "stragglers")).random(workers)
        return [float(self.slowdown) if draw < self.stragglers else 1.0 for draw in draws]


class Times:
    """Times of random events of one worker, with exponential gaps from a stream of its own."""

    __slots__ = ("_mean_s", "_rng")

    def __init__(self, mean_s: float, *, seed: int) -> None:
        self._mean_s = mean_s
        # Most simulations have thousands of workers and no such events, so make no generator.
        self._rng = None if math.isinf(mean_s) else np.random.default_rng(seed)

    def gap_s(self) -> float:
        """Draw the seconds from now until the next event (``math.inf``: never)."""
        return math.inf if self._rng is None else self._mean_s * self._rng.standard_exponential()


class SimulatedClock:
    """A virtual clock that advances only from event to event.

    >>> clock = SimulatedClock()
    >>> clock.pass_until(90.0)
    >>> clock.now(), clock.monotonic()
    (90.0, 90.0)
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Return the seconds since the simulation began."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds since the simulation began."""
        return self._now

    def pass_until(self, moment: float) -> None:
        """Advance the clock to ``moment``."""
        assert moment >= self._now
        self._now = moment


@dataclass(slots=True)
class Counts:
    """Counts of what simulated workers have done so far.

    Attributes:
        epochs: Epochs that were trained to their end; an epoch trained twice counts twice.
        busy_s: Busy seconds of all workers together, including loading states and lost work.
        failures: Failures of workers, busy or idle.
        preemptions: Announced preemptions.
        decisions_s: Real seconds of each scheduling decision: from the query for free workers to
            the next assignment, or to the next poll if there is none.
    """

    epochs: int = 0
    busy_s: float = 0.0
    failures: int = 0
    preemptions: int = 0
    decisions_s: array[float] = field(default_factory=lambda: array("d"))


class SimulatedChain(ChainProgress):
    """The progress of a simulated assignment."""

    __slots__ = ("seconds",)

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.seconds = 0.0
        """Seconds that the current epoch takes."""


class SimulatedWorker:
    """One worker, its current assignment, and the random times of its failures and preemptions.

    ``life`` counts how often the worker was gone. Events scheduled in an earlier life are ignored.
    """

    __slots__ = (
        "asked_to_stop",
        "began",
        "failures",
        "free",
        "life",
        "name",
        "preemptions",
        "running",
        "slowdown",
    )

    def __init__(self, number: int, *, slowdown: float, faults: Faults, seed: int) -> None:
        self.name = f"simulated-{number}"
        self.slowdown = slowdown
        self.life = 0
        self.running: SimulatedChain | None = None
        self.began = 0.0
        """When the worker got its current assignment."""
        self.free = False
        self.asked_to_stop = False
        self.failures = Times(
            faults.mean_between_failures_s, seed=derive_seed(seed, "failures", number)
        )
        self.preemptions = Times(
            faults.mean_between_preemptions_s, seed=derive_seed(seed, "preemptions", number)
        )


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


def as_it_is(timeline: Timeline) -> Timeline:
    """Return the timeline that workers are shown if nothing hides it."""
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
    ...     workers=1000, epoch_s=30.0, outcome=lambda timeline, epoch, seed: {"loss": 1 / epoch}
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
    shown: Callable[[Timeline], Timeline] = as_it_is

    pack_size = 1

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise UsageError(f"workers={self.workers!r}: it must be a whole number, 1 or more")
        if not callable(self.epoch_s):
            _checked_s(self.epoch_s)
        if not 0 <= self.start_s < math.inf:
            raise UsageError(
                f"start_s={self.start_s!r}: it must be a finite number of seconds, 0 or more"
            )
        if self.checkpoint_bytes < 0:
            raise UsageError(f"checkpoint_bytes={self.checkpoint_bytes!r}: it must be 0 or more")

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
        max_base_bytes: float = MAX_BASE_BYTES,
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


class _EventKind(Enum):
    """The kinds of simulation events of a worker."""

    BEGINS = 0
    EPOCH_ENDS = 1
    FAILS = 2
    PREEMPT_NOTICE = 3
    PREEMPTED = 4
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
        self._queue: list[tuple[float, int, _EventKind, int, int]] = []
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
        worker.running = SimulatedChain(assignment)
        worker.began = self.clock.now()
        worker.asked_to_stop = self._stopping
        self._num_busy += 1
        self._foresee(self._config.start_s, _EventKind.BEGINS, number)

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

    def _foresee(self, after_s: float, what: _EventKind, number: int) -> None:
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

    def _happen(self, what: _EventKind, number: int, reports: list[Report]) -> None:
        worker = self._workers[number]
        if what is _EventKind.BEGINS:
            self._begin(worker, number, reports)
        elif what is _EventKind.EPOCH_ENDS:
            self._end_epoch(worker, number, reports)
        elif what is _EventKind.IS_THERE:
            self._arrive(number)
        elif what is _EventKind.PREEMPT_NOTICE:
            self._announce(worker, number)
        elif what is _EventKind.PREEMPTED:
            self._leave(number, reports, kind="evicted", back_after_s=self._config.faults.replace_s)
        else:
            self.counts.failures += 1
            self._leave(number, reports, kind="lost", back_after_s=self._config.faults.repair_s)

    def _decided(self) -> None:
        if self._asked_at is not None:
            self.counts.decisions_s.append(time.perf_counter() - self._asked_at)
            self._asked_at = None

    # -- training -----------------------------------------------------------------------------

    def _begin(self, worker: SimulatedWorker, number: int, reports: list[Report]) -> None:
        running = worker.running
        assert running is not None
        reports.append(running.report(_started(running.stage, worker)))
        self._train(worker, running, number)

    def _train(self, worker: SimulatedWorker, running: SimulatedChain, number: int) -> None:
        nominal_s = self._config.seconds_of(running.chain.timeline, running.epoch + 1)
        running.seconds = nominal_s * worker.slowdown
        self._foresee(running.seconds, _EventKind.EPOCH_ENDS, number)

    def _end_epoch(self, worker: SimulatedWorker, number: int, reports: list[Report]) -> None:
        running = worker.running
        assert running is not None
        running.epoch += 1
        self.counts.epochs += 1
        stage = running.stage
        event = EpochDone(
            node=stage.node,
            epoch=running.epoch,
            metrics=self._config.outcome(
                self._config.shown(running.chain.timeline), running.epoch, running.assignment.seed
            ),
            seconds=running.seconds,
            seconds_alone=running.seconds,
            worker=worker.name,
        )
        reports.append(running.report(event))
        ended = running.epoch == stage.stop
        if ended or worker.asked_to_stop:
            reports.append(running.report(self._kept(stage, running.epoch, worker)))
        if worker.asked_to_stop or (ended and not running.next_stage()):
            reports.append(running.report(None))
            self._release_worker(worker)
            if not worker.asked_to_stop or self._stopping:
                self._list(number)
            return
        if ended:
            reports.append(running.report(_started(running.stage, worker)))
        self._train(worker, running, number)

    def _kept(self, stage: Stage, epoch: int, worker: SimulatedWorker) -> StageDone:
        ref = CheckpointRef(
            node=stage.node,
            epoch=epoch,
            path=f"simulated/{stage.node}-{epoch}.safetensors",
            num_bytes=self._config.checkpoint_bytes,
            digest="",
        )
        return StageDone(
            node=stage.node, start=stage.start, stop=epoch, worker=worker.name, checkpoint=ref
        )

    def _release_worker(self, worker: SimulatedWorker) -> None:
        self.counts.busy_s += self.clock.now() - worker.began
        self._num_busy -= 1
        worker.running = None

    # -- arrivals, preemptions and failures of workers ----------------------------------------

    def _arrive(self, number: int) -> None:
        worker = self._workers[number]
        worker.asked_to_stop = self._stopping
        self._list(number)
        self._foresee(worker.failures.gap_s(), _EventKind.FAILS, number)
        self._foresee(worker.preemptions.gap_s(), _EventKind.PREEMPT_NOTICE, number)

    def _announce(self, worker: SimulatedWorker, number: int) -> None:
        """Handle the notice of a preemption.

        The worker takes no new assignment, and saves its state if an epoch ends in time.
        """
        self.counts.preemptions += 1
        worker.asked_to_stop = True
        self._unlist(worker)
        self._foresee(self._config.faults.notice_s, _EventKind.PREEMPTED, number)

    def _leave(self, number: int, reports: list[Report], *, kind: str, back_after_s: float) -> None:
        worker = self._workers[number]
        running = worker.running
        self._unlist(worker)
        worker.life += 1
        if running is not None:
            stage = running.stage
            event = StageFailed(
                node=stage.node,
                start=stage.start,
                stop=stage.stop,
                epoch=stage.start,
                kind=kind,
                message=f"WorkerLostError: worker {worker.name} ended unexpectedly (simulated)",
                worker=worker.name,
                reached=running.epoch,
            )
            reports += [running.report(event), running.report(None)]
            self._release_worker(worker)
        self._foresee(back_after_s, _EventKind.IS_THERE, number)

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
        raise UsageError(f"an epoch takes {seconds!r} s: epoch_s must give a finite number above 0")
    return seconds
