"""The worker of all executors: trains chains of stages, several at a time, and reports events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from thrifty.core import (
    ActivationsKept,
    Calibrated,
    CheckpointError,
    CheckpointLost,
    CheckpointRef,
    DivergedError,
    EpochDone,
    LineCapture,
    PackShrunk,
    Refused,
    StageDone,
    StageFailed,
    StageStarted,
    StateError,
    WorkerLostError,
    error_text,
    error_traceback,
    plain_logger,
    plain_text,
    storing_artifacts,
)
from thrifty.pack import (
    ACTIVATION_DISK,
    AutoBackend,
    Calibration,
    EpochPlan,
    Logged,
    Member,
    Outcome,
    Prefer,
    State,
    Task,
    TimeShare,
    Trainable,
    UnverifiedError,
    borrowed_streams,
    keep_activations,
    out_of_memory,
)
from thrifty.pack._backend import no_exits
from thrifty.perf import PackCurve
from thrifty.plan import Stage
from thrifty.store import CheckpointFolder
from thrifty.store._plan_files import MAX_BASE_BYTES, ArtifactFiles

from ._alone import device_use, epoch_plan
from ._executor import Assignment, Cut, Order, Report
from ._running_chain import Completeness, RunningChain, StateFiles, evaluated, nothing_to_write


logger = plain_logger(__name__)

_KINDS: Mapping[type[Exception], str] = {
    DivergedError: "diverged",
    StateError: "task",
    WorkerLostError: "lost",
}
"""Kinds of failures by error; a trial may be a distributed job and lose a worker of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The specification of a worker.

    ``pack`` says how several trials are trained jointly, as in ``Local``. ``curves`` are the known
    pack curves, by key. ``refused`` maps the keys of structures that must not be fused, because a
    check failed, to the reasons. ``activation_memory``, ``activation_disk`` and
    ``epoch_timeout`` are as in ``Local``. ``max_base_bytes`` is that of ``Storage``.
    """

    name: str
    device: str
    threads: int
    checkpoints: str
    folder: str
    pack: Prefer = "auto"
    curves: Mapping[str, Sequence[Mapping[str, Any]]]
    refused: Mapping[str, str] = field(default_factory=dict)
    activation_memory: int | None = None
    activation_disk: int = ACTIVATION_DISK
    max_base_bytes: float = MAX_BASE_BYTES
    epoch_timeout: float | None = None


class Worker:
    """A worker that trains on one device, while a thread of its own writes states.

    It takes any number of assignments; ``advance`` trains all of them until there is something to
    report. ``should_stop`` is called between epochs.
    """

    def __init__(
        self,
        task: Task | Trainable,
        spec: WorkerSpec,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        place = torch.device(spec.device)
        if place.type == "cuda":
            torch.cuda.set_device(place)  # what names no device, user code too, means this one
        self.name = spec.name
        self._device = place
        self._task = task
        self._spec = spec
        self._should_stop = should_stop
        self._states = StateFiles(
            spec.checkpoints, folder=spec.folder, name=spec.name, max_base_bytes=spec.max_base_bytes
        )
        self._artifacts = ArtifactFiles(CheckpointFolder(spec.checkpoints), folder=spec.folder)
        self._known = {
            key: [PackCurve.from_json(curve) for curve in curves]
            for key, curves in spec.curves.items()
        }
        self._calibrated: list[Calibration] = []
        self._refused = dict(spec.refused)
        self._newly_refused: list[tuple[str, str]] = []
        self._activations = keep_activations(
            spec.device,
            memory_bytes=spec.activation_memory,
            folder=_activation_folder(spec.checkpoints),
            disk_bytes=spec.activation_disk,
        )
        self._activations.take_news()  # that of earlier studies in this process
        self._backend = self._new_backend()
        self._complete = Completeness(task, device=place, limit_s=spec.epoch_timeout)
        self._waiting: deque[RunningChain] = deque()
        self._courses: dict[int, RunningChain] = {}
        self._closing: list[RunningChain] = []
        self._unusable: set[tuple[int, int, str]] = set()
        """States from which the task could not resume.

        If a state is trained again, comes out the same and cannot be used again, the stage fails.
        """
        self._limit: float = float("inf")
        self._proven = 1

    @property
    def num_active(self) -> int:
        """Number of assignments that the worker has."""
        return len(self._waiting) + len(self._courses) + len(self._closing)

    def submit(self, assignment: Assignment) -> None:
        """Add an assignment."""
        self._waiting.append(RunningChain(assignment))

    def obey(self, order: Order) -> None:
        """Do what the study says while assignments are trained."""
        if isinstance(order, Cut):
            self.cut(order.assignment)
        else:
            self.refuse(order.key, order.reason)

    def cut(self, assignment: int) -> None:
        """End an assignment with its current epoch, and keep its state; it may have ended."""
        for course in (*self._waiting, *self._courses.values()):
            if course.number == assignment:
                course.is_cut = True

    def refuse(self, key: str, reason: str) -> None:
        """Stop fusing trials of a structure, because another worker's check has failed."""
        self._refused[key] = reason
        self._backend.refuse(key, reason)

    def close(self) -> None:
        """Wait for states that are still being written."""
        self._states.close()

    def advance(self) -> list[Report]:
        """Train until at least one epoch has ended, and return the reports.

        A failure of the task's code becomes an event; StoreWriteError is raised.
        """
        out: list[Report] = []
        self._admit(out)
        if any(isinstance(report.event, Calibrated) for report in out):
            return out  # so that others join these trials before the first step
        self._step(out)
        self._collect(out)
        return out

    # -- assignments -----------------------------------------------------------------------

    def _admit(self, out: list[Report]) -> None:
        while self._waiting and len(self._courses) < self._limit:
            course = self._waiting.popleft()
            if course.is_cut:
                self._closing.append(course)
                continue
            try:
                member = self._member(course)
            except CheckpointError as error:
                self._lose(course, error)  # the file is damaged or gone
                continue
            try:
                with self._own_process_state():
                    with self._checking(course):
                        self._complete.at_begin(course, member)
                    self._backend.epochs_to_come = course.assignment.epochs_to_come
                    with self._noting_lines(course):
                        self._backend.stack(course.number, member)
                    self._complete.note(self._backend.trial(course.number), member)
            except CheckpointError as error:
                self._backend.release(course.number)
                self._cannot_use(course, error)
                continue
            except Exception as error:  # noqa: BLE001 (user code may raise anything)
                if out_of_memory(error) and self._courses:
                    self._backend.release(course.number)
                    self._waiting.appendleft(course)
                    self._limit_to(len(self._courses), error, out)
                    return
                if out_of_memory(error) and not course.is_alone:
                    # to find out whether it can be fused takes more memory than to train it
                    self._backend.release(course.number)
                    course.is_alone = True
                    self._waiting.appendleft(course)
                    continue
                self._fail(course, error)
                continue
            self._courses[course.number] = course
            self._report_calibrations(course, out)
            self._report_activations(course, out)
            if course.epoch == course.stage.start and not course.is_again:
                out.append(course.report(self._started(course)))

    def _lose(self, course: RunningChain, error: CheckpointError) -> None:
        """Report that the state from which a chain was to resume is lost and must be retrained."""
        resume = course.resume
        assert resume is not None
        course.finale = CheckpointLost(checkpoint=resume, reason=str(error), worker=self.name)
        self._closing.append(course)

    def _cannot_use(self, course: RunningChain, error: CheckpointError) -> None:
        """Handle a state from which the task cannot resume although its file is intact."""
        resume = course.resume
        if resume is None or (resume.node, resume.epoch, resume.digest) in self._unusable:
            course.finale = self._failed(course, error)
            self._closing.append(course)
            return
        self._unusable.add((resume.node, resume.epoch, resume.digest))
        self._lose(course, error)

    def _member(self, course: RunningChain) -> Member:
        if course.parked is not None:
            return course.parked
        return course.member(self._state_to_begin_with(course))

    def _state_to_begin_with(self, course: RunningChain) -> State | None:
        if course.passed is not None:
            return course.passed
        resume = course.resume
        return None if resume is None else self._states.read(resume)

    def _leave(self, course: RunningChain) -> None:
        """Release the slot of a course; its pending writes continue."""
        self._courses.pop(course.number, None)
        self._backend.release(course.number)
        self._closing.append(course)

    def _fail(self, course: RunningChain, error: Exception) -> None:
        course.finale = self._failed(course, error)
        self._leave(course)

    def _collect(self, out: list[Report]) -> None:
        """Report stages whose final state is on disk; wait for writes if there is no other work."""
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
        if self._pass_kept(out):
            return
        plans = self._plans()
        if not self._courses:
            return
        courses = list(self._courses.values())
        try:
            with (
                self._own_process_state(),
                storing_artifacts(self._artifacts),
                self._noting_lines(*courses),
            ):
                outcomes = self._backend.step(plans)
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._report_refused(next(iter(self._courses.values())), out)
            self._shrink(error, out)
            return
        for course in self._courses.values():
            share = self._backend.shares.get(course.number, TimeShare())
            course.spent = course.spent.plus(share)
        self._report_calibrations(next(iter(self._courses.values())), out)
        self._report_refused(next(iter(self._courses.values())), out)
        self._report_activations(next(iter(self._courses.values())), out)
        logged = {
            number: self._backend.logged(number)
            for number, outcome in outcomes.items()
            if not isinstance(outcome, Exception)
        }
        for number, outcome in outcomes.items():
            course = self._courses[number]
            self._take(course, outcome, out, logged=logged.get(number, Logged()))
        self._proven = max(self._proven, len(self._courses))

    @contextmanager
    def _noting_lines(self, *courses: RunningChain) -> Iterator[None]:
        """Note what is logged within the context with the trials that log it.

        A line of a fused step counts as one of all trials, since their steps are one computation.
        """
        with LineCapture() as capture:
            try:
                yield
            finally:
                for course in courses:
                    course.lines.extend(capture.of(course.number))

    def _plans(self) -> dict[int, EpochPlan]:
        """Return plans of the next epoch for all courses that have ended their last one."""
        plans: dict[int, EpochPlan] = {}
        for course in list(self._courses.values()):
            if course.under_way:
                continue
            # A stopping course trains one more epoch if its last epochs are not verified yet.
            stopping = self._should_stop() or course.is_cut
            if not self._is_ready(course, stopping=stopping):
                continue
            try:
                with no_exits():
                    plans[course.number] = epoch_plan(
                        self._backend,
                        course.chain.timeline,
                        epoch=course.epoch,
                        slot=course.number,
                        verify=stopping or course.epoch + 1 == course.stage.stop,
                        stop=course.stage.stop,
                    )
            except Exception as error:  # noqa: BLE001 (user code may raise anything)
                self._fail(course, error)
                continue
            course.under_way = True
        return plans

    def _is_ready(self, course: RunningChain, *, stopping: bool) -> bool:
        """Return whether a course trains its next epoch.

        If the worker may run out of memory, this first saves the state that the course needs to
        resume.
        """
        if course.passed is not None:
            if stopping:
                self._leave(course)
                return False
            if not self._catch_up(course):
                return False
        if self._backend.num_unverified(course.number):
            return True
        if stopping:
            if course.epoch == course.stage.start or self._save(course):
                self._leave(course)
            return False
        if len(self._courses) > self._proven:
            state = self._state_of(course)
            if state is None:
                return False
            course.parked = course.member(state)
        return True

    def _take(
        self, course: RunningChain, outcome: Outcome, out: list[Report], *, logged: Logged
    ) -> None:
        course.under_way = False
        course.parked = None
        if isinstance(outcome, UnverifiedError):
            self._train_again(course)
            return
        if isinstance(outcome, Exception):
            self._fail(course, outcome)
            return
        stage = course.stage
        course.epoch += 1
        done = self._epoch_done(course, outcome, logged=logged)
        num_unverified = self._backend.num_unverified(course.number)
        course.held = [self._with_time_alone(course, held) for held in course.held]
        ends, error = course.epoch == stage.stop, None
        state = self._state_of(course) if ends else None
        if state is not None:
            with self._own_process_state(), self._checking(course):
                error = self._complete.at_end(course, self._backend, state)
            done = _plus(done, course.spent)
            course.spent = TimeShare()
        # Unverified epochs do not leave the worker, so no report ever has to be retracted.
        out.extend(course.verified(done, num_unverified))
        if not ends:
            return
        assert not course.held, "the end of a stage is always verified"
        if state is None:
            return
        if error is not None:
            self._fail(course, error)
            return
        self._keep(course, state)
        self._end_stage(course, out)

    def _end_stage(self, course: RunningChain, out: list[Report]) -> None:
        if course.next_stage():
            course.is_again = False
            out.append(course.report(self._started(course)))
        else:
            self._leave(course)

    def _train_again(self, course: RunningChain) -> None:
        """Discard what a course has trained since its last verified state, and train it alone."""
        self._courses.pop(course.number)
        self._backend.release(course.number)
        course.start_again()
        self._waiting.appendleft(course)

    # -- epochs whose states are stored ------------------------------------------------------

    def _pass_kept(self, out: list[Report]) -> bool:
        """Evaluate next epochs whose states are stored, and return whether there were any."""
        passed = False
        for course in list(self._courses.values()):
            ref = course.next_kept
            if ref is None or course.is_cut or self._should_stop():
                continue
            try:
                state = self._states.read(ref)
            except CheckpointError as error:
                course.lost.add(ref)  # it is trained again
                event = CheckpointLost(checkpoint=ref, reason=str(error), worker=self.name)
                out.append(course.report(event))
                continue
            passed = True
            try:
                with self._own_process_state():
                    done = self._evaluated(course, ref, state)
            except Exception as error:  # noqa: BLE001 (user code may raise anything)
                self._fail(course, error)
                continue
            course.move_to(ref, state)
            out.append(course.report(done))
            if course.epoch == course.stage.stop:
                course.writes.append((course.stage, nothing_to_write()))
                self._end_stage(course, out)
        return passed

    def _evaluated(self, course: RunningChain, ref: CheckpointRef, state: State) -> EpochDone:
        assert isinstance(self._task, Task)
        member = course.member(state)
        return evaluated(self._task, ref, member, device=self._spec.device, worker=self.name)

    def _catch_up(self, course: RunningChain) -> bool:
        """Load the state that a course has skipped to into the back-end; False if that fails."""
        assert course.passed is not None
        member, course.passed = course.member(course.passed), None
        self._backend.release(course.number)
        try:
            with self._own_process_state():
                self._backend.stack(course.number, member)
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            self._fail(course, error)
            return False
        return True

    @contextmanager
    def _checking(self, course: RunningChain) -> Iterator[None]:
        """Add the time of state comparisons within the context to the time of a course."""
        before = self._complete.spent_s
        yield
        seconds = self._complete.spent_s - before
        course.spent = course.spent.plus(TimeShare(seconds=seconds, checks=seconds))

    def _epoch_done(
        self, course: RunningChain, metrics: Mapping[str, float], *, logged: Logged
    ) -> EpochDone:
        spent, dropped = course.spent, course.dropped
        course.spent = course.dropped = TimeShare()
        own_s = spent.seconds - spent.checks
        course.epoch_s = spent.seconds
        self._complete.trained(own_s)
        is_alone = not self._backend.is_fused(course.number)
        done = EpochDone(
            node=course.stage.node,
            epoch=course.epoch,
            metrics=metrics,
            seconds=spent.seconds,
            seconds_checks=spent.checks,
            seconds_alone=own_s if is_alone else None,
            worker=self.name,
            attributes=logged.attributes,
            artifacts=logged.artifacts,
            lines=course.lines.take(),
        )
        return self._with_time_alone(course, _plus(done, dropped))

    def _with_time_alone(self, course: RunningChain, done: EpochDone) -> EpochDone:
        """Add the time that a fused trial's epoch would take alone, if that is known by now."""
        if done.seconds_alone is not None or not self._backend.is_fused(course.number):
            return done
        values = course.chain.timeline.at(done.epoch - 1)
        alone = self._backend.alone_time(course.number, values)
        if alone is None:
            return done
        return replace(
            done,
            seconds_alone=alone.seconds,
            seconds_alone_low=alone.low,
            seconds_alone_high=alone.high,
        )

    def _shrink(self, error: Exception, out: list[Report]) -> None:
        """Halve the number of trials at a time after running out of memory.

        The other trials wait, and resume from the end of their last epoch. A single trial is
        trained without a fused program, which takes memory of its own.
        """
        courses = list(self._courses.values())
        may_go_alone = len(courses) == 1 and self._backend.is_fused(courses[0].number)
        self._limit_to(max(1, len(courses) // 2), error, out)
        self._courses.clear()
        self._backend = self._new_backend()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        for course in reversed(courses):
            if may_go_alone and not course.is_alone:
                course.start_again()
                self._waiting.appendleft(course)
            elif len(courses) == 1:
                course.finale = self._failed(course, error)
                self._closing.append(course)
            elif course.parked is None and (course.under_way or course.held):
                course.finale = self._failed(course, error, kind="crowded")
                self._closing.append(course)
            else:
                course.under_way = False
                course.drop_spent()
                self._waiting.appendleft(course)

    def _limit_to(self, size: int, error: Exception, out: list[Report]) -> None:
        self._limit = size
        self._activations.shrink()
        reason = plain_text(error, lines=True).split("\n")[0]
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
            refused=self._refused,
            on_refused=self._note_refused,
            activations=self._activations,
        )

    def _note_refused(self, key: str, reason: str) -> None:
        self._refused[key] = reason
        self._newly_refused.append((key, reason))

    def _report_refused(self, course: RunningChain, out: list[Report]) -> None:
        for key, reason in self._newly_refused:
            event = Refused(
                key=key, structure=type(self._task).__name__, reason=reason, worker=self.name
            )
            out.append(course.report(event))
        self._newly_refused.clear()

    def _report_activations(self, course: RunningChain, out: list[Report]) -> None:
        for kept in self._activations.take_news():
            event = ActivationsKept(
                num_samples=kept.num_samples,
                num_bytes=kept.num_bytes,
                saved=kept.saved,
                is_training=kept.is_training,
                worker=self.name,
            )
            logger.info("%s: %s", self.name, event)
            out.append(course.report(event))

    def _report_calibrations(self, course: RunningChain, out: list[Report]) -> None:
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

    def _started(self, course: RunningChain) -> StageStarted:
        stage = course.stage
        return StageStarted(node=stage.node, start=stage.start, stop=stage.stop, worker=self.name)

    def _state_of(self, course: RunningChain) -> State | None:
        """Return the state of a trial; if the task's code fails, fail the trial and return None."""
        try:
            with self._own_process_state():
                return self._backend.unstack(course.number)
        except Exception as error:
            if out_of_memory(error):
                raise
            self._fail(course, error)
            return None

    def _save(self, course: RunningChain) -> bool:
        """Start to write the state of a trial; return False if the trial has failed instead."""
        state = self._state_of(course)
        if state is None:
            return False
        self._keep(course, state)
        return True

    def _keep(self, course: RunningChain, state: State) -> None:
        stage, epoch = course.stage, course.epoch
        kept = Stage(node=stage.node, start=stage.start, stop=epoch)
        course.keep(kept, self._states.write(stage.node, epoch, state))

    def _written(self, course: RunningChain, out: list[Report], *, wait: bool) -> None:
        """Report the stages of a course whose final state is on disk, in order."""
        while course.writes and (wait or course.writes[0][1].done()):
            stage, future = course.writes.pop(0)
            done = StageDone(
                node=stage.node,
                start=stage.start,
                stop=stage.stop,
                worker=self.name,
                checkpoint=future.result(),
                use=device_use(self._device),
            )
            out.append(course.report(done))

    def _failed(
        self, course: RunningChain, error: Exception, *, kind: str | None = None
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
            lines=course.lines.take(),
            use=device_use(self._device),
        )

    def _own_process_state(self) -> _ProcessState:
        return _ProcessState(self._spec.threads)


def _activation_folder(checkpoints: str) -> Path | None:
    """Return where activations are kept beside checkpoints; None if that is no local folder."""
    return Path(checkpoints) / "activations" if checkpoints and "://" not in checkpoints else None


def _plus(done: EpochDone, more: TimeShare) -> EpochDone:
    """Return an epoch with additional time."""
    return replace(
        done, seconds=done.seconds + more.seconds, seconds_checks=done.seconds_checks + more.checks
    )


class _ProcessState:
    """A context with the worker's random streams and thread count; it restores the user's."""

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
