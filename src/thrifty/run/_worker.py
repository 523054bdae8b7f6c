"""The worker: trains chains of stages, several at a time, and says what happens, on any executor."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from thrifty.core import (
    Calibrated,
    CheckpointError,
    CheckpointLost,
    CheckpointRef,
    DivergedError,
    EpochDone,
    Event,
    PackShrunk,
    StageDone,
    StageFailed,
    StageStarted,
    WorkerLostError,
    error_text,
    error_traceback,
    plain_logger,
)
from thrifty.pack import (
    AutoBackend,
    Calibration,
    EpochPlan,
    Member,
    Outcome,
    Prefer,
    State,
    Task,
    Trainable,
    borrowed_streams,
    out_of_memory,
)
from thrifty.pack._backend import no_exits
from thrifty.perf import PackCurve
from thrifty.plan import Stage
from thrifty.store import CheckpointFolder

from ._alone import epoch_plan
from ._assignment import Assignment, Report
from ._tensors import state_from_arrays, state_to_arrays


logger = plain_logger(__name__)

_KINDS: Mapping[type[Exception], str] = {DivergedError: "diverged", WorkerLostError: "lost"}
"""Errors that are told apart; a trial may itself be a job of several workers, and lose one."""

CACHE_BYTES = 256 * 2**20
"""How much recent state a worker keeps in memory, so that a branch need not read what it just wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker is told about itself.

    ``pack`` says how several trials are trained jointly; ``curves`` what is known of that, by key.
    """

    name: str
    device: str
    threads: int
    checkpoints: str
    folder: str
    pack: Prefer = "auto"
    curves: Mapping[str, Sequence[Mapping[str, Any]]]


class Worker:
    """Trains on one device. States are written by a thread of their own while training goes on.

    It takes any number of assignments; ``advance`` trains all of them until something is worth a report.
    ``should_stop`` is asked between epochs.
    """

    def __init__(
        self,
        task: Task | Trainable,
        spec: WorkerSpec,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = spec.name
        self._task = task
        self._spec = spec
        self._should_stop = should_stop
        self._checkpoints = CheckpointFolder(spec.checkpoints)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{spec.name}-writer")
        self._recent = _RecentStates(CACHE_BYTES)
        self._known = {
            key: [PackCurve.from_json(curve) for curve in curves]
            for key, curves in spec.curves.items()
        }
        self._calibrated: list[Calibration] = []
        self._backend = self._new_backend()
        self._waiting: deque[_Course] = deque()
        self._courses: dict[int, _Course] = {}
        self._closing: list[_Course] = []
        self._lost: set[tuple[int, int, str]] = set()
        """States that nothing could go on from; one that is made again just the same is a failure."""
        self._limit: float = float("inf")
        self._proven = 1

    @property
    def num_active(self) -> int:
        """How many assignments it has."""
        return len(self._waiting) + len(self._courses) + len(self._closing)

    def submit(self, assignment: Assignment) -> None:
        """Takes one more assignment."""
        self._waiting.append(_Course(assignment))

    def close(self) -> None:
        """Waits for states that are still being written."""
        self._writer.shutdown()

    def advance(self) -> list[Report]:
        """Trains until at least one epoch has ended, and returns what has happened.

        A failure of the task's code becomes an event; StoreWriteError is raised.
        """
        out: list[Report] = []
        self._admit(out)
        self._step(out)
        self._collect(out)
        return out

    # -- coming and going ------------------------------------------------------------------

    def _admit(self, out: list[Report]) -> None:
        while self._waiting and len(self._courses) < self._limit:
            course = self._waiting.popleft()
            try:
                member = self._member(course)
            except CheckpointError as error:
                self._lose(course, error)
                continue
            try:
                with self._own_process_state():
                    self._backend.stack(course.number, member)
            except CheckpointError as error:
                # The file is as it was written, but the task cannot go on from what is in it.
                self._backend.release(course.number)
                self._lose(course, error)
                continue
            except Exception as error:  # noqa: BLE001 (user code may raise anything; the study goes on)
                if out_of_memory(error) and self._courses:
                    self._backend.release(course.number)
                    self._waiting.appendleft(course)
                    self._limit_to(len(self._courses), error, out)
                    return
                self._fail(course, error)
                continue
            self._courses[course.number] = course
            self._report_calibrations(course, out)
            if course.epoch == course.stage.start:
                out.append(course.report(self._started(course)))

    def _lose(self, course: _Course, error: CheckpointError) -> None:
        """The state that a chain was to go on from is lost: what made it is trained again, once."""
        resume = course.chain.resume
        if resume is None or (resume.node, resume.epoch, resume.digest) in self._lost:
            course.finale = self._failed(course, error)
        else:
            self._lost.add((resume.node, resume.epoch, resume.digest))
            course.finale = CheckpointLost(
                checkpoint=resume, reason=str(error), worker=self.name
            )
        self._closing.append(course)

    def _member(self, course: _Course) -> Member:
        if course.parked is not None:
            return course.parked
        chain = course.chain
        state = None if chain.resume is None else self._load(chain.resume)
        return Member(
            values=chain.timeline.at(course.epoch),
            seed=course.assignment.seed,
            epoch=course.epoch,
            state=state,
        )

    def _leave(self, course: _Course) -> None:
        """Its place is free for somebody else; what it has still to write is written."""
        self._courses.pop(course.number, None)
        self._backend.release(course.number)
        self._closing.append(course)

    def _fail(self, course: _Course, error: Exception) -> None:
        course.finale = self._failed(course, error)
        self._leave(course)

    def _collect(self, out: list[Report]) -> None:
        """Reports the stages whose end is safely kept; waits for that if there is nothing else to do."""
        for course in self._courses.values():
            self._written(course, out, wait=False)
        for course in list(self._closing):
            self._written(course, out, wait=not self._courses and not self._waiting)
            if not course.writes:
                if course.finale is not None:
                    out.append(course.report(course.finale))
                out.append(course.report(None))
                self._closing.remove(course)

    # -- training ----------------------------------------------------------------------------

    def _step(self, out: list[Report]) -> None:
        plans = self._plans()
        if not self._courses:
            return
        began = time.perf_counter()
        try:
            with self._own_process_state():
                outcomes = self._backend.step(plans)
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._shrink(error, out)
            return
        share = (time.perf_counter() - began) / len(self._courses)
        for course in self._courses.values():
            course.seconds += share
        self._report_calibrations(next(iter(self._courses.values())), out)
        for number, outcome in outcomes.items():
            self._take(self._courses[number], outcome, out)
        self._proven = max(self._proven, len(self._courses))

    def _plans(self) -> dict[int, EpochPlan]:
        """The next epoch of each course that has ended its last one."""
        plans: dict[int, EpochPlan] = {}
        for course in list(self._courses.values()):
            if course.under_way:
                continue
            if self._should_stop():
                if course.epoch == course.stage.start or self._save(course):
                    self._leave(course)
                continue
            if len(self._courses) > self._proven:
                state = self._state_of(course)
                if state is None:
                    continue
                course.parked = Member(
                    values=course.chain.timeline.at(course.epoch),
                    seed=course.assignment.seed,
                    epoch=course.epoch,
                    state=state,
                )
            try:
                with no_exits():
                    plans[course.number] = epoch_plan(
                        self._backend,
                        course.chain.timeline,
                        epoch=course.epoch,
                        slot=course.number,
                    )
            except Exception as error:  # noqa: BLE001 (user code may raise anything)
                self._fail(course, error)
                continue
            course.under_way = True
        return plans

    def _take(self, course: _Course, outcome: Outcome, out: list[Report]) -> None:
        course.under_way = False
        course.parked = None
        if isinstance(outcome, Exception):
            self._fail(course, outcome)
            return
        stage = course.stage
        course.epoch += 1
        out.append(course.report(self._epoch_done(course, outcome)))
        if course.epoch < stage.stop:
            return
        if not self._save(course):
            return
        if course.next_stage():
            out.append(course.report(self._started(course)))
        else:
            self._leave(course)

    def _epoch_done(self, course: _Course, metrics: Mapping[str, float]) -> EpochDone:
        seconds, course.seconds = course.seconds, 0.0
        calibration = self._backend.calibration(course.number)
        alone = None
        if calibration is not None:
            values = course.chain.timeline.at(course.epoch - 1)
            alone = calibration.solo_s * self._backend.num_steps(course.number, values)
        return EpochDone(
            node=course.stage.node,
            epoch=course.epoch,
            metrics=metrics,
            seconds=seconds,
            seconds_alone=alone,
            worker=self.name,
        )

    def _shrink(self, error: Exception, out: list[Report]) -> None:
        """Out of memory: half as many at a time; the others wait, from where their last epoch ended."""
        courses = list(self._courses.values())
        self._limit_to(max(1, len(courses) // 2), error, out)
        self._courses.clear()
        self._backend = self._new_backend()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        for course in reversed(courses):
            if len(courses) == 1:
                course.finale = self._failed(course, error)
                self._closing.append(course)
            elif course.under_way and course.parked is None:
                course.finale = self._failed(course, error, kind="crowded")
                self._closing.append(course)
            else:
                course.under_way = False
                course.seconds = 0.0
                self._waiting.appendleft(course)

    def _limit_to(self, size: int, error: Exception, out: list[Report]) -> None:
        self._limit = size
        reason = error_text(error).split("\n")[0]
        logger.warning(
            "%s: out of memory; at most %d trials at a time from now on (%s)",
            self.name,
            size,
            reason,
        )
        event = PackShrunk(size=size, reason=reason, worker=self.name)
        out.append(next(iter(self._courses.values())).report(event))

    def _new_backend(self) -> AutoBackend:
        return AutoBackend(
            self._task,
            device=self._spec.device,
            prefer=self._spec.pack,
            known=self._known,
            on_calibrated=self._calibrated.append,
            patient=True,
        )

    def _report_calibrations(self, course: _Course, out: list[Report]) -> None:
        for calibration in self._calibrated:
            event = Calibrated(
                key=calibration.key,
                structure=calibration.structure,
                device=calibration.device,
                curves=tuple(curve.to_json() for curve in calibration.curves),
                memory_bytes=calibration.memory_bytes,
                worker=self.name,
            )
            out.append(course.report(event))
        self._calibrated.clear()

    # -- states ------------------------------------------------------------------------------

    def _started(self, course: _Course) -> StageStarted:
        stage = course.stage
        return StageStarted(
            node=stage.node, start=stage.start, stop=stage.stop, worker=self.name
        )

    def _state_of(self, course: _Course) -> State | None:
        """Return the state of a trial; None if the task's code failed to give it, and so the trial."""
        try:
            with self._own_process_state():
                return self._backend.unstack(course.number)
        except Exception as error:
            if out_of_memory(error):
                raise
            self._fail(course, error)
            return None

    def _save(self, course: _Course) -> bool:
        """Have the state of a trial written; False if it has none, and has failed."""
        stage, epoch = course.stage, course.epoch
        state = self._state_of(course)
        if state is None:
            return False
        self._recent.add((stage.node, epoch), state)
        kept = Stage(node=stage.node, start=stage.start, stop=epoch)
        course.writes.append((kept, self._writer.submit(self._write, stage.node, epoch, state)))
        return True

    def _write(self, node: int, epoch: int, state: State) -> CheckpointRef:
        arrays, meta = state_to_arrays(state)
        return self._checkpoints.write(
            self._spec.folder, node=node, epoch=epoch, tensors=arrays, meta=meta
        )

    def _written(self, course: _Course, out: list[Report], *, wait: bool) -> None:
        """Reports the stages of a course whose end is safely kept, in order."""
        while course.writes and (wait or course.writes[0][1].done()):
            stage, future = course.writes.pop(0)
            done = StageDone(
                node=stage.node,
                start=stage.start,
                stop=stage.stop,
                worker=self.name,
                checkpoint=future.result(),
            )
            out.append(course.report(done))

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

    def _failed(
        self, course: _Course, error: Exception, *, kind: str | None = None
    ) -> StageFailed:
        if kind is None:
            kind = next((k for each, k in _KINDS.items() if isinstance(error, each)), "error")
        return StageFailed(
            node=course.stage.node,
            start=course.stage.start,
            stop=course.stage.stop,
            epoch=course.epoch,
            kind=kind,
            message=error_text(error),
            worker=self.name,
            traceback=error_traceback(error),
        )

    def _own_process_state(self) -> _ProcessState:
        return _ProcessState(self._spec.threads)


class _Course:
    """One assignment on its way: where it stands, and what of it is still being written."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.number = assignment.number
        self.chain = assignment.chain
        self._index = 0
        self.epoch = self.stage.start
        self.under_way = False
        self.seconds = 0.0
        self.writes: list[tuple[Stage, Future[CheckpointRef]]] = []
        self.parked: Member | None = None
        """Its state at the end of its last epoch, while it is not sure that there is memory for everybody."""
        self.finale: Event | None = None

    @property
    def stage(self) -> Stage:
        """The stage that it is at."""
        return self.chain.stages[self._index]

    def next_stage(self) -> bool:
        """Goes on to the next stage; False if there is none."""
        if self._index + 1 == len(self.chain.stages):
            return False
        self._index += 1
        return True

    def report(self, event: Event | None) -> Report:
        """A report on this assignment."""
        return Report(assignment=self.number, event=event)


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

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._streams = borrowed_streams()

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._threads != self._before:
            torch.set_num_threads(self._threads)
        self._streams.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.__exit__(kind, error, trace)
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)
        if error is not None and not isinstance(error, Exception):
            with no_exits():
                raise error


def _num_bytes(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.tensors.values())
