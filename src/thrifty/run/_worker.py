"""The worker of all executors: trains chains of stages, several at a time, and reports events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from thrifty.core import (
    Calibrated,
    CheckpointError,
    CheckpointRef,
    EpochDone,
    LineCapture,
    PackShrunk,
    plain_logger,
    plain_text,
    storing_artifacts,
)
from thrifty.pack import (
    ACTIVATION_DISK,
    AutoBackend,
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

from ._alone import epoch_plan
from ._executor import Assignment, Cut, Order, Report
from ._running_chain import Completeness, RunningChain, StateFiles, evaluated, nothing_to_write
from ._worker_events import BackendNews, ChainEvents, plus, with_time_alone


logger = plain_logger(__name__)


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
        self._refused = dict(spec.refused)
        self._activations = keep_activations(
            spec.device,
            memory_bytes=spec.activation_memory,
            folder=_activation_folder(spec.checkpoints),
            disk_bytes=spec.activation_disk,
        )
        self._events = ChainEvents(worker=spec.name, device=place)
        self._news = BackendNews(
            worker=spec.name,
            structure=type(task).__name__,
            refused=self._refused,
            activations=self._activations,
        )
        self._backend = self._new_backend()
        self._complete = Completeness(task, device=place, limit_s=spec.epoch_timeout)
        self._waiting: deque[RunningChain] = deque()
        self._running: dict[int, RunningChain] = {}
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
        return len(self._waiting) + len(self._running) + len(self._closing)

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
        for running in (*self._waiting, *self._running.values()):
            if running.number == assignment:
                running.is_cut = True

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
        while self._waiting and len(self._running) < self._limit:
            running = self._waiting.popleft()
            if running.is_cut:
                self._closing.append(running)
                continue
            try:
                member = self._member(running)
            except CheckpointError as error:
                self._lose(running, error)  # the file is damaged or gone
                continue
            try:
                with self._own_process_state():
                    with self._checking(running):
                        self._complete.at_begin(running, member)
                    self._backend.epochs_to_come = running.assignment.epochs_to_come
                    with self._noting_lines(running):
                        self._backend.put(running.number, member)
                    self._complete.note(self._backend.trial(running.number), member)
            except CheckpointError as error:
                self._backend.release(running.number)
                self._cannot_use(running, error)
                continue
            except Exception as error:  # noqa: BLE001 (user code may raise anything)
                if out_of_memory(error) and self._running:
                    self._backend.release(running.number)
                    self._waiting.appendleft(running)
                    self._limit_to(len(self._running), error, out)
                    return
                if out_of_memory(error) and not running.is_alone:
                    # to find out whether it can be fused takes more memory than to train it
                    self._backend.release(running.number)
                    running.is_alone = True
                    self._waiting.appendleft(running)
                    continue
                self._fail(running, error)
                continue
            self._running[running.number] = running
            out += self._news.report(running)
            if running.epoch == running.stage.start and not running.is_again:
                out.append(running.report(self._events.started(running)))

    def _lose(self, running: RunningChain, error: CheckpointError) -> None:
        """Report that the state from which a chain was to resume is lost and must be retrained."""
        resume = running.resume
        assert resume is not None
        running.final_event = self._events.lost(resume, error)
        self._closing.append(running)

    def _cannot_use(self, running: RunningChain, error: CheckpointError) -> None:
        """Handle a state from which the task cannot resume although its file is intact."""
        resume = running.resume
        if resume is None or (resume.node, resume.epoch, resume.digest) in self._unusable:
            running.final_event = self._events.failed(running, error)
            self._closing.append(running)
            return
        self._unusable.add((resume.node, resume.epoch, resume.digest))
        self._lose(running, error)

    def _member(self, running: RunningChain) -> Member:
        if running.spare is not None:
            return running.spare
        return running.member(self._state_to_begin_with(running))

    def _state_to_begin_with(self, running: RunningChain) -> State | None:
        if running.passed is not None:
            return running.passed
        resume = running.resume
        return None if resume is None else self._states.read(resume)

    def _leave(self, running: RunningChain) -> None:
        """Release the slot of a running chain; its pending writes continue."""
        self._running.pop(running.number, None)
        self._backend.release(running.number)
        self._closing.append(running)

    def _fail(self, running: RunningChain, error: Exception) -> None:
        running.final_event = self._events.failed(running, error)
        self._leave(running)

    def _collect(self, out: list[Report]) -> None:
        """Report stages whose final state is on disk; wait for writes if there is no other work."""
        for running in self._running.values():
            self._written(running, out, wait=False)
        for running in list(self._closing):
            self._written(running, out, wait=not self._running and not self._waiting)
            if not running.writes:
                if running.final_event is not None:
                    out.append(running.report(running.final_event))
                out.append(running.report(None))
                self._closing.remove(running)

    # -- training ----------------------------------------------------------------------------

    def _step(self, out: list[Report]) -> None:
        if self._pass_kept(out):
            return
        plans = self._plans()
        if not self._running:
            return
        running_chains = list(self._running.values())
        try:
            with (
                self._own_process_state(),
                storing_artifacts(self._artifacts),
                self._noting_lines(*running_chains),
            ):
                outcomes = self._backend.step(plans)
        except Exception as error:
            if not out_of_memory(error):
                raise
            out += self._news.report(running_chains[0])
            self._shrink(error, out)
            return
        for running in self._running.values():
            share = self._backend.shares.get(running.number, TimeShare())
            running.spent = running.spent.plus(share)
        out += self._news.report(running_chains[0])
        logged = {
            number: self._backend.logged(number)
            for number, outcome in outcomes.items()
            if not isinstance(outcome, Exception)
        }
        for number, outcome in outcomes.items():
            running = self._running[number]
            self._take(running, outcome, out, logged=logged.get(number, Logged()))
        self._proven = max(self._proven, len(self._running))

    @contextmanager
    def _noting_lines(self, *running_chains: RunningChain) -> Iterator[None]:
        """Note what is logged within the context with the trials that log it.

        A line of a fused step counts as one of all trials, since their steps are one computation.
        """
        with LineCapture() as capture:
            try:
                yield
            finally:
                for running in running_chains:
                    running.lines.extend(capture.of(running.number))

    def _plans(self) -> dict[int, EpochPlan]:
        """Return plans of the next epoch for all running chains that have ended their last one."""
        plans: dict[int, EpochPlan] = {}
        for running in list(self._running.values()):
            if running.under_way:
                continue
            # A chain that stops trains one more epoch if its last epochs are not verified yet.
            stopping = self._should_stop() or running.is_cut
            if not self._is_ready(running, stopping=stopping):
                continue
            try:
                with no_exits():
                    plans[running.number] = epoch_plan(
                        self._backend,
                        running.chain.timeline,
                        epoch=running.epoch,
                        slot=running.number,
                        verify=stopping or running.epoch + 1 == running.stage.stop,
                        stop=running.stage.stop,
                    )
            except Exception as error:  # noqa: BLE001 (user code may raise anything)
                self._fail(running, error)
                continue
            running.under_way = True
        return plans

    def _is_ready(self, running: RunningChain, *, stopping: bool) -> bool:
        """Return whether a running chain trains its next epoch.

        If the worker may run out of memory, this first saves the state that the chain needs to
        resume.
        """
        if running.passed is not None:
            if stopping:
                self._leave(running)
                return False
            if not self._catch_up(running):
                return False
        if self._backend.num_unverified(running.number):
            return True
        if stopping:
            if running.epoch == running.stage.start or self._save(running):
                self._leave(running)
            return False
        if len(self._running) > self._proven:
            state = self._state_of(running)
            if state is None:
                return False
            running.spare = running.member(state)
        return True

    def _take(
        self, running: RunningChain, outcome: Outcome, out: list[Report], *, logged: Logged
    ) -> None:
        running.under_way = False
        running.spare = None
        if isinstance(outcome, UnverifiedError):
            self._train_again(running)
            return
        if isinstance(outcome, Exception):
            self._fail(running, outcome)
            return
        stage = running.stage
        running.epoch += 1
        running.epoch_s = running.spent.seconds
        self._complete.trained(running.spent.seconds - running.spent.checks)
        done = self._events.epoch_done(running, self._backend, outcome, logged=logged)
        num_unverified = self._backend.num_unverified(running.number)
        running.held = [with_time_alone(running, self._backend, held) for held in running.held]
        ends, error = running.epoch == stage.stop, None
        state = self._state_of(running) if ends else None
        if state is not None:
            with self._own_process_state(), self._checking(running):
                error = self._complete.at_end(running, self._backend, state)
            done = plus(done, running.spent)
            running.spent = TimeShare()
        # Unverified epochs do not leave the worker, so no report ever has to be retracted.
        out.extend(running.verified(done, num_unverified))
        if not ends:
            return
        assert not running.held, "the end of a stage is always verified"
        if state is None:
            return
        if error is not None:
            self._fail(running, error)
            return
        self._keep(running, state)
        self._end_stage(running, out)

    def _end_stage(self, running: RunningChain, out: list[Report]) -> None:
        if running.next_stage():
            running.is_again = False
            out.append(running.report(self._events.started(running)))
        else:
            self._leave(running)

    def _train_again(self, running: RunningChain) -> None:
        """Discard what was trained since the last verified state, and train the chain alone."""
        self._running.pop(running.number)
        self._backend.release(running.number)
        running.start_again()
        self._waiting.appendleft(running)

    # -- epochs whose states are stored ------------------------------------------------------

    def _pass_kept(self, out: list[Report]) -> bool:
        """Evaluate next epochs whose states are stored, and return whether there were any."""
        passed = False
        for running in list(self._running.values()):
            ref = running.next_kept
            if ref is None or running.is_cut or self._should_stop():
                continue
            try:
                state = self._states.read(ref)
            except CheckpointError as error:
                running.lost.add(ref)  # it is trained again
                out.append(running.report(self._events.lost(ref, error)))
                continue
            passed = True
            try:
                with self._own_process_state():
                    done = self._evaluated(running, ref, state)
            except Exception as error:  # noqa: BLE001 (user code may raise anything)
                self._fail(running, error)
                continue
            running.move_to(ref, state)
            out.append(running.report(done))
            if running.epoch == running.stage.stop:
                running.writes.append((running.stage, nothing_to_write()))
                self._end_stage(running, out)
        return passed

    def _evaluated(self, running: RunningChain, ref: CheckpointRef, state: State) -> EpochDone:
        assert isinstance(self._task, Task)
        member = running.member(state)
        return evaluated(self._task, ref, member, device=self._spec.device, worker=self.name)

    def _catch_up(self, running: RunningChain) -> bool:
        """Load the state that a chain has skipped to into the back-end; False if that fails."""
        assert running.passed is not None
        member, running.passed = running.member(running.passed), None
        self._backend.release(running.number)
        try:
            with self._own_process_state():
                self._backend.put(running.number, member)
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            self._fail(running, error)
            return False
        return True

    @contextmanager
    def _checking(self, running: RunningChain) -> Iterator[None]:
        """Add the time of state comparisons within the context to the time of a running chain."""
        before = self._complete.spent_s
        yield
        seconds = self._complete.spent_s - before
        running.spent = running.spent.plus(TimeShare(seconds=seconds, checks=seconds))

    def _shrink(self, error: Exception, out: list[Report]) -> None:
        """Halve the number of trials at a time after running out of memory.

        The other trials wait, and resume from the end of their last epoch. A single trial is
        trained without a fused program, which takes memory of its own.
        """
        running_chains = list(self._running.values())
        may_go_alone = len(running_chains) == 1 and self._backend.is_fused(running_chains[0].number)
        self._limit_to(max(1, len(running_chains) // 2), error, out)
        self._running.clear()
        self._backend = self._new_backend()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        for running in reversed(running_chains):
            if may_go_alone and not running.is_alone:
                running.start_again()
                self._waiting.appendleft(running)
            elif len(running_chains) == 1:
                running.final_event = self._events.failed(running, error)
                self._closing.append(running)
            elif running.spare is None and (running.under_way or running.held):
                running.final_event = self._events.failed(running, error, kind="crowded")
                self._closing.append(running)
            else:
                running.under_way = False
                running.drop_spent()
                self._waiting.appendleft(running)

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
        out.append(next(iter(self._running.values())).report(event))

    def _new_backend(self) -> AutoBackend:
        return AutoBackend(
            self._task,
            device=self._spec.device,
            prefer=self._spec.pack,
            known=self._known,
            on_calibrated=self._news.calibrated,
            patient=True,
            refused=self._refused,
            on_refused=self._news.refuse,
            activations=self._activations,
        )

    # -- states ------------------------------------------------------------------------------

    def _state_of(self, running: RunningChain) -> State | None:
        """Return the state of a trial; if the task's code fails, fail the trial and return None."""
        try:
            with self._own_process_state():
                return self._backend.state(running.number)
        except Exception as error:
            if out_of_memory(error):
                raise
            self._fail(running, error)
            return None

    def _save(self, running: RunningChain) -> bool:
        """Start to write the state of a trial; return False if the trial has failed instead."""
        state = self._state_of(running)
        if state is None:
            return False
        self._keep(running, state)
        return True

    def _keep(self, running: RunningChain, state: State) -> None:
        stage, epoch = running.stage, running.epoch
        kept = Stage(node=stage.node, start=stage.start, stop=epoch)
        running.keep(kept, self._states.write(stage.node, epoch, state))

    def _written(self, running: RunningChain, out: list[Report], *, wait: bool) -> None:
        """Report the stages of a running chain whose final state is on disk, in order."""
        while running.writes and (wait or running.writes[0][1].done()):
            stage, future = running.writes.pop(0)
            out.append(running.report(self._events.stage_done(stage, future.result())))

    def _own_process_state(self) -> _ProcessState:
        return _ProcessState(self._spec.threads)


def _activation_folder(checkpoints: str) -> Path | None:
    """Return where activations are kept beside checkpoints; None if that is no local folder."""
    return Path(checkpoints) / "activations" if checkpoints and "://" not in checkpoints else None


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
