"""Long-lived workers on a cluster, which start when there is room and may vanish at any time."""

from __future__ import annotations

import math
import pickle
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from thrifty.core import (
    EpochDone,
    StoreWriteError,
    UsageError,
    WorkerLostError,
    error_traceback,
    plain_logger,
)

from ._executor import Assignment, Cut, Executor, Order, Refusal, Report, WorkerSlot
from ._worker import Worker, WorkerSpec


logger = plain_logger(__name__)

SLICE_S = 1.0
"""Longest wait for calls before the cluster is checked again."""
START_S = 60.0
"""If a requested worker takes longer than this to start, ``num_free`` no longer counts it."""
IDLE_S = 300.0
"""An idle worker is stopped after this time, to make room for others."""
WARN_AGAIN_S = 600.0
"""While no worker starts, the warning about it is repeated after this time."""
MAX_STARTS = 3
"""If this many workers in a row vanish while starting, the run fails; evictions do not count."""


class WorkerEvictedError(WorkerLostError):
    """A worker is gone because its machine is gone; the trials that it trained are not to blame."""


class Cluster(Protocol):
    """The operations of a cluster that an executor needs.

    Workers and calls are opaque objects.
    """

    def start_worker(self) -> Any:
        """Request a worker (a ``RemoteWorker``); it starts when there is room."""
        ...

    def prepare(self, worker: Any, spec: WorkerSpec) -> Any:
        """Call ``prepare`` on a worker, with the task."""
        ...

    def advance(
        self, worker: Any, assignments: Sequence[Assignment], *, orders: Sequence[Order], stop: bool
    ) -> Any:
        """Call ``advance`` on a worker."""
        ...

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Return the calls that have ended; wait up to ``timeout_s`` if there are none."""
        ...

    def result(self, call: Any) -> Any:
        """Return the result of a call.

        Raises:
            WorkerEvictedError: The call's worker is gone, and so is its machine.
            WorkerLostError: The call's worker is gone for another reason.
        """
        ...

    def stop_worker(self, worker: Any) -> None:
        """Stop a worker now, or cancel the request for it."""
        ...

    def check(self) -> None:
        """Check that the cluster can be reached.

        Raises:
            WorkerLostError: The cluster is gone.
        """
        ...

    def close(self) -> None:
        """Disconnect from the cluster."""
        ...


class ClusterExecutor(Executor):
    """An executor that requests workers when there is work, and keeps one call open on each.

    The cluster has room for the first ``expected`` workers now, so ``num_free`` counts them from
    the start. When those are busy, the executor requests more, at most as many at a time as are
    running. Those get work once they are running.
    """

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[WorkerSpec],
        *,
        expected: int,
        needs: str = "a place",
        epoch_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._limit_s = math.inf if epoch_timeout_s is None else epoch_timeout_s
        self._needs = needs
        self._clock = clock
        self._handles = [
            WorkerHandle(spec, cluster, clock, expected=i < expected)
            for i, spec in enumerate(specs)
        ]
        self._stopping = False
        self._through: list[Report] = []
        self._unwritable = ""
        self._failed_starts = 0
        self._pack_size = 1
        self._warn_from = -math.inf
        """When the warning that no worker starts may be given again."""

    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many more assignments fit on workers that run or should soon."""
        self._pack_size = pack_size
        free = sum(handle.num_free(pack_size) for handle in self._handles if handle.counted)
        if any(handle.up or handle.waiting for handle in self._handles):
            return free
        return max(free, 1)  # no worker is requested before there is an assignment

    def submit(self, assignment: Assignment) -> None:
        """Give an assignment to the worker with the least work, preferably one that is running."""
        handle = min(self._handles, key=lambda h: (not h.counted, h.load, not h.up, not h.starting))
        handle.waiting.append(assignment)
        self._move(handle)
        if self.num_free(pack_size=self._pack_size) == 0:
            self._ask_for_more()

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Return the new reports; return early, even without any, when an idle worker starts."""
        until = self._clock() + timeout_s
        while True:
            reports, self._through = self._through, []
            self._look_after()
            calls = {handle.call: handle for handle in self._handles if handle.call is not None}
            if not calls:
                return reports
            left_s = 0.0 if reports else max(0.0, until - self._clock())
            idle = False
            for call in self._cluster.wait(list(calls), min(SLICE_S, left_s)):
                if calls[call].starting:
                    idle |= self._come_up(calls[call])
                else:
                    reports += self._end_turn(calls[call])
            reports += self._end_hung()
            self._share()
            if reports or idle or self._clock() >= until:
                return reports

    def refuse(self, key: str, reason: str) -> None:
        """Tell all workers, with their next call or when they start, not to fuse a structure."""
        for handle in self._handles:
            handle.refuse(Refusal(key=key, reason=reason))

    def cut(self, assignment: int) -> None:
        """Tell the worker that has an assignment to end it with its current epoch.

        An assignment that waits for its worker ends at once.
        """
        for handle in self._handles:
            handle.cut(assignment)
            for each in [each for each in handle.waiting if each.number == assignment]:
                handle.waiting.remove(each)
                self._through.append(Report(assignment=each.number))

    def stop(self) -> None:
        """Ask all workers to save their current states and finish."""
        self._stopping = True
        for handle in self._handles:
            self._through += [Report(assignment=each.number) for each in handle.waiting]
            handle.waiting.clear()

    def close(self) -> None:
        """Stop all workers now, and disconnect from the cluster."""
        for handle in self._handles:
            handle.end()
        self._cluster.close()

    # -- life cycle of workers -----------------------------------------------------------------

    def _move(self, handle: WorkerHandle) -> None:
        """Start a worker that has work, or call it if it is idle."""
        if handle.worker is None:
            handle.start()
        elif handle.call is None:
            handle.go(stop=self._stopping)

    def _come_up(self, handle: WorkerHandle) -> bool:
        """Handle the end of a worker's start; return whether it runs and has no work."""
        try:
            trouble = self._cluster.result(handle.call)
        except WorkerLostError as error:
            handle.end()
            self._failed_starts += not isinstance(error, WorkerEvictedError)
            if self._failed_starts == MAX_STARTS:
                raise WorkerLostError(
                    f"no worker can be started on the cluster: {MAX_STARTS} in a row vanished "
                    "before they were up, "
                    f"the last one because of this: {error}"
                ) from error
            if handle.waiting:
                handle.start()
            return False
        if trouble:
            raise UsageError(
                "the task cannot be loaded by a worker on the cluster; if its code is not there, "
                "put it into a folder that all machines see, or send it along with "
                f"Ray(runtime_env={{'working_dir': '.'}}). What the worker says:\n{trouble}"
            )
        self._failed_starts = 0
        handle.come_up()
        if handle.waiting:
            handle.go(stop=self._stopping)
            return False
        return True

    def _end_turn(self, handle: WorkerHandle) -> Sequence[Report]:
        """Return the reports of a call that has ended, and start the worker's next call."""
        try:
            turn: Turn = self._cluster.result(handle.call)
        except WorkerLostError as error:
            handle.end()
            if handle.waiting:
                handle.start()
            return handle.slot.vanish(str(error), evicted=isinstance(error, WorkerEvictedError))
        handle.slot.note(turn.reports)
        handle.rest()
        if turn.unwritable:
            self._unwritable = turn.unwritable
        elif turn.is_last:
            handle.end()
            if handle.waiting:
                handle.start()
        elif handle.load:
            handle.go(stop=self._stopping)
        return turn.reports

    def _end_hung(self) -> list[Report]:
        """Stop workers whose epoch takes too long, and return the reports of their failures.

        A call contains at most one epoch that is longer than ``TURN_S``.
        """
        reports: list[Report] = []
        for handle in self._handles:
            if handle.up and handle.call is not None and handle.turn_s >= self._limit_s + TURN_S:
                handle.end()
                reports += handle.slot.time_out(self._limit_s)
                if handle.waiting:
                    handle.start()
        return reports

    def _share(self) -> None:
        """Move assignments that wait for a starting worker to idle workers."""
        for idle in self._handles:
            if not idle.up or idle.load:
                continue
            donor = next((h for h in self._handles if h.starting and h.waiting), None)
            if donor is None:
                return
            idle.waiting.append(donor.waiting.popleft())
            idle.go(stop=self._stopping)

    def _ask_for_more(self) -> None:
        """Request further workers, so that a cluster that scales with demand grows."""
        num_up = sum(handle.up for handle in self._handles)
        num_asked = sum(handle.starting and not handle.counted for handle in self._handles)
        idle = [handle for handle in self._handles if handle.worker is None and not handle.counted]
        for handle in idle[: max(0, max(1, num_up) - num_asked)]:
            handle.start()

    def _look_after(self) -> None:
        """Raise errors that only the user can fix, and stop workers that have long been idle."""
        if self._unwritable:
            raise StoreWriteError(self._unwritable)
        self._cluster.check()
        for handle in self._handles:
            if handle.up and not handle.load and self._clock() - handle.since >= IDLE_S:
                handle.end()
        self._warn()

    def _warn(self) -> None:
        """Warn, and again now and then, if no worker starts, and say why that may be."""
        asked = [handle.since for handle in self._handles if handle.starting]
        now = self._clock()
        if now < self._warn_from or not asked or any(handle.up for handle in self._handles):
            return
        if now - min(asked) >= START_S:
            self._warn_from = now + WARN_AGAIN_S
            logger.warning(
                "no worker has come up in %.0f s: the cluster has no room for one (%s), "
                "or is still growing; the run waits",
                now - min(asked),
                self._needs,
            )


class WorkerHandle:
    """A worker slot: its worker, if it has one, and the assignments running and waiting."""

    def __init__(
        self, spec: WorkerSpec, cluster: Cluster, clock: Callable[[], float], *, expected: bool
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._clock = clock
        self._expected = expected
        self.slot = WorkerSlot(spec.name)
        self.waiting: deque[Assignment] = deque()
        self._orders: list[Order] = []
        """Orders that the worker has not received yet."""
        self.worker: Any = None
        self.call: Any = None
        self.up = False
        self.since = clock()
        """When the worker began to start, to be idle, or to run its current call."""

    @property
    def turn_s(self) -> float:
        """Seconds since the current call began."""
        return self._clock() - self.since

    @property
    def starting(self) -> bool:
        return self.worker is not None and not self.up

    @property
    def counted(self) -> bool:
        """Whether the worker runs, or can be expected to run soon."""
        if self.starting:
            return self._expected and self._clock() - self.since < START_S
        return self.up or self._expected

    @property
    def load(self) -> int:
        return len(self.slot.assignments) + len(self.waiting)

    def num_free(self, pack_size: int) -> int:
        return max(0, self.slot.num_free(pack_size) - len(self.waiting))

    def refuse(self, refusal: Refusal) -> None:
        refused = {**self._spec.refused, refusal.key: refusal.reason}
        self._spec = replace(self._spec, refused=refused)
        if self.worker is not None:
            self._orders.append(refusal)

    def cut(self, assignment: int) -> None:
        if assignment in self.slot.assignments:
            self._orders.append(Cut(assignment=assignment))

    def start(self) -> None:
        self._orders.clear()  # the specification already contains refusals
        self.worker = self._cluster.start_worker()
        self.call = self._cluster.prepare(self.worker, self._spec)
        self.since = self._clock()

    def come_up(self) -> None:
        # The cluster evidently has room for this worker, even if it was not expected.
        self.up = self._expected = True
        self.rest()

    def rest(self) -> None:
        self.call = None
        self.since = self._clock()

    def go(self, *, stop: bool) -> None:
        """Call the worker to train its assignments, including those that were waiting."""
        assignments = list(self.waiting)
        self.waiting.clear()
        for assignment in assignments:
            self.slot.take(assignment)
        orders, self._orders = self._orders, []
        self.call = self._cluster.advance(self.worker, assignments, orders=orders, stop=stop)
        self.since = self._clock()

    def end(self) -> None:
        if self.worker is not None:
            self._cluster.stop_worker(self.worker)
        self.worker = self.call = None
        self.up = False


# -- one remote worker -----------------------------------------------------------------------------


class Pulse:
    """A liveness check that asks in a thread of its own, because an answer may never come.

    It asks every ``every_s`` seconds. ``check`` is quick and never raises. It reports an error
    once there has been no answer for ``patience_s``.
    """

    def __init__(
        self,
        ask: Callable[[], object],
        *,
        every_s: float = 5.0,
        patience_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._every_s = every_s
        self._patience_s = patience_s
        self._clock = clock
        self._answered = self._asked = clock()
        self._trouble = "no answer"
        self._asking: threading.Thread | None = None

    def check(self) -> str:
        """Return what is wrong, or an empty text; ask again if it is time."""
        now = self._clock()
        if self._asking is not None and self._asking.is_alive():
            if now - self._asked >= self._patience_s:
                return self._silent(now)
            return ""
        if self._asked - self._answered >= self._patience_s:
            return self._silent(now)
        if now - self._asked >= self._every_s:
            self._asked = now
            self._asking = threading.Thread(target=self._listen, name="pulse", daemon=True)
            self._asking.start()
        return ""

    def _listen(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001 (any error means that there was no answer)
            self._trouble = " ".join(str(error).split()) or type(error).__name__
        else:
            self._answered = self._clock()

    def _silent(self, now: float) -> str:
        return f"{self._trouble} for {now - self._answered:.0f} s"


TURN_S = 0.1
"""Duration of a call if epochs are shorter; the overhead of a call is a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one call of ``advance``.

    Attributes:
        reports: What has happened.
        unwritable: The message of a StoreWriteError.
        is_last: Whether the worker ends now, because its machine was told to.
    """

    reports: Sequence[Report]
    unwritable: str = ""
    is_last: bool = False


class RemoteWorker:
    """A ``Worker`` controlled by calls, one at a time.

    The first call is ``prepare``. Then ``advance`` is called while the worker has assignments.
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._stopping = False
        self.is_leaving = False
        """Whether it ends its assignments with their current epochs, whatever it is told."""

    @property
    def num_active(self) -> int:
        """Number of assignments that the worker has."""
        return 0 if self._worker is None else self._worker.num_active

    def prepare(self, spec: WorkerSpec, paths: Sequence[str], task: bytes) -> str:
        """Load the task; return the traceback if that fails, else an empty text.

        ``paths`` are the folders in which the study's process finds the user's code.
        """
        # Extend the path before loading the task, so that its module is found where the study
        # found it.
        sys.path[:0] = [path for path in paths if path not in sys.path]
        try:
            loaded = pickle.loads(task)
            self._worker = Worker(
                loaded, spec, should_stop=lambda: self._stopping or self.is_leaving
            )
        except BaseException as error:  # noqa: BLE001 (user code may raise SystemExit, too)
            return error_traceback(error)
        return ""

    def advance(
        self, assignments: Sequence[Assignment], *, orders: Sequence[Order] = (), stop: bool = False
    ) -> Turn:
        """Add assignments, and train until there is something to report or ``TURN_S`` is over."""
        worker = self._worker
        assert worker is not None, "prepare() comes first"
        self._stopping = stop
        for assignment in assignments:
            worker.submit(assignment)
        for order in orders:
            worker.obey(order)
        reports: list[Report] = []
        until = time.monotonic() + TURN_S
        try:
            while worker.num_active and time.monotonic() < until:
                reports += worker.advance()
                # The study must know of a stage's start before the stage can kill the worker, and
                # of its end because that makes room for another assignment.
                if any(not isinstance(report.event, EpochDone) for report in reports):
                    break
        except StoreWriteError as error:
            return Turn(reports=reports, unwritable=str(error))
        return Turn(reports=reports, is_last=self.is_leaving and not worker.num_active)


def user_paths() -> list[str]:
    """Return the entries of ``sys.path`` outside the Python installation, as absolute paths.

    Each machine has a Python installation of its own.
    """
    installed = [
        Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    paths = [Path(path).absolute() for path in sys.path]
    return [
        str(path)
        for path in paths
        if path.name not in ("site-packages", "dist-packages")
        and path.name != f"python{sys.version_info.major}{sys.version_info.minor}.zip"
        and not any(path.is_relative_to(each) for each in installed)
    ]
