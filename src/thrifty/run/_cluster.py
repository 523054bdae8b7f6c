"""Workers on a cluster: long-lived ones that come up when there is room, and may vanish at any time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from thrifty.core import StoreWriteError, UsageError, WorkerLostError, plain_logger

from ._assignment import Assignment, Refusal, Report
from ._executor import Executor
from ._remote import TURN_S, Turn
from ._seat import Seat
from ._worker import WorkerSpec


logger = plain_logger(__name__)

SLICE_S = 1.0
"""How long to wait before the cluster is looked after again."""
START_S = 60.0
"""A worker that was asked for and has not come up for so long is not counted on any more."""
IDLE_S = 300.0
"""A worker that had nothing to do for so long makes room for others."""
MAX_STARTS = 3
"""So many workers in a row may vanish before they are up, but for those whose machines go."""


class WorkerEvictedError(WorkerLostError):
    """A worker is gone because its machine is: no fault of what it trained."""


class Cluster(Protocol):
    """What an executor needs of a cluster. Workers and calls are opaque; ``result`` raises WorkerLostError."""

    def hire(self) -> Any:
        """Asks for a worker (a ``RemoteWorker``); it comes up when there is room."""
        ...

    def prepare(self, worker: Any, spec: WorkerSpec) -> Any:
        """Calls ``prepare`` on a worker, with the task."""
        ...

    def advance(
        self,
        worker: Any,
        assignments: Sequence[Assignment],
        *,
        refusals: Sequence[Refusal],
        stop: bool,
    ) -> Any:
        """Calls ``advance`` on a worker."""
        ...

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """The calls that are over, waiting for one if none is."""
        ...

    def result(self, call: Any) -> Any:
        """What a call has returned.

        Raises:
            WorkerEvictedError: its worker is gone, and so is the machine.
            WorkerLostError: its worker is gone for another reason.
        """
        ...

    def dismiss(self, worker: Any) -> None:
        """Ends a worker now, or stops asking for it."""
        ...

    def check(self) -> None:
        """Does nothing as long as the cluster is there.

        Raises:
            WorkerLostError: it is gone.
        """
        ...

    def close(self) -> None:
        """Leaves the cluster."""
        ...


class ClusterExecutor(Executor):
    """Asks the cluster for a worker when there is work for one, and keeps one call open on each busy worker.

    The first ``expected`` workers are counted on from the start: the cluster has room for them now. More are asked
    for when those are busy, at most as many at a time as are up, and get work when they are up.
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
        self._hands = [
            _Hand(spec, cluster, clock, expected=i < expected) for i, spec in enumerate(specs)
        ]
        self._stopping = False
        self._through: list[Report] = []
        self._unwritable = ""
        self._failed_starts = 0
        self._pack_size = 1
        self._warned = False

    def num_free(self, *, pack_size: int = 1) -> int:
        """How many more assignments can start on workers that are up, or should be soon."""
        self._pack_size = pack_size
        free = sum(hand.num_free(pack_size) for hand in self._hands if hand.counted)
        if any(hand.up or hand.waiting for hand in self._hands):
            return free
        return max(free, 1)  # somebody has to be the first

    def submit(self, assignment: Assignment) -> None:
        """Gives an assignment to the worker that has least to do, one that is up if there is one."""
        hand = min(
            self._hands,
            key=lambda h: (not h.counted, h.load, not h.up, not h.starting),
        )
        hand.waiting.append(assignment)
        self._move(hand)
        if self.num_free(pack_size=self._pack_size) == 0:
            self._ask_for_more()

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """What has happened since; also ends, with nothing to tell, when a worker comes up that has no work."""
        until = self._clock() + timeout_s
        while True:
            reports, self._through = self._through, []
            self._look_after()
            calls = {hand.call: hand for hand in self._hands if hand.call is not None}
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
        """Tell all workers, by their next call or their start, that a structure is not fused."""
        for hand in self._hands:
            hand.refuse(Refusal(key=key, reason=reason))

    def stop(self) -> None:
        """Asks all workers to keep their present states and be through."""
        self._stopping = True
        for hand in self._hands:
            self._through += [Report(assignment=each.number) for each in hand.waiting]
            hand.waiting.clear()

    def close(self) -> None:
        """Ends all workers now, and leaves the cluster."""
        for hand in self._hands:
            hand.end()
        self._cluster.close()

    # -- what becomes of workers ---------------------------------------------------------------

    def _move(self, hand: _Hand) -> None:
        """Whatever is next for a worker that has something to do."""
        if hand.worker is None:
            hand.start()
        elif hand.call is None:
            hand.go(stop=self._stopping)

    def _come_up(self, hand: _Hand) -> bool:
        """A worker is up, or will not be; whether it is up and has no work."""
        try:
            trouble = self._cluster.result(hand.call)
        except WorkerLostError as error:
            hand.end()
            self._failed_starts += not isinstance(error, WorkerEvictedError)
            if self._failed_starts == MAX_STARTS:
                raise WorkerLostError(
                    f"no worker can be started on the cluster: {MAX_STARTS} in a row vanished before they were up, "
                    f"the last one because of this: {error}"
                ) from error
            if hand.waiting:
                hand.start()
            return False
        if trouble:
            raise UsageError(
                "the task cannot be loaded by a worker on the cluster; if its code is not there, send it along with "
                f"Ray(runtime_env={{'working_dir': '.'}}). What the worker says:\n{trouble}"
            )
        self._failed_starts = 0
        hand.come_up()
        if hand.waiting:
            hand.go(stop=self._stopping)
            return False
        return True

    def _end_turn(self, hand: _Hand) -> Sequence[Report]:
        """What a call has brought; the next one begins at once."""
        try:
            turn: Turn = self._cluster.result(hand.call)
        except WorkerLostError as error:
            hand.end()
            if hand.waiting:
                hand.start()
            return hand.seat.vanish(str(error), evicted=isinstance(error, WorkerEvictedError))
        hand.seat.note(turn.reports)
        hand.rest()
        if turn.unwritable:
            self._unwritable = turn.unwritable
        elif hand.load:
            hand.go(stop=self._stopping)
        return turn.reports

    def _end_hung(self) -> list[Report]:
        """End workers that train for too long without the end of an epoch. A turn has one long epoch at most."""
        reports: list[Report] = []
        for hand in self._hands:
            if hand.up and hand.call is not None and hand.turn_s >= self._limit_s + TURN_S:
                hand.end()
                reports += hand.seat.time_out(self._limit_s)
                if hand.waiting:
                    hand.start()
        return reports

    def _share(self) -> None:
        """Who has nothing to do takes over what waits for a worker that is not up yet."""
        for idle in self._hands:
            if not idle.up or idle.load:
                continue
            donor = next((h for h in self._hands if h.starting and h.waiting), None)
            if donor is None:
                return
            idle.waiting.append(donor.waiting.popleft())
            idle.go(stop=self._stopping)

    def _ask_for_more(self) -> None:
        """The cluster may grow: it sees what is asked for."""
        num_up = sum(hand.up for hand in self._hands)
        num_asked = sum(hand.starting and not hand.counted for hand in self._hands)
        idle = [hand for hand in self._hands if hand.worker is None and not hand.counted]
        for hand in idle[: max(0, max(1, num_up) - num_asked)]:
            hand.start()

    def _look_after(self) -> None:
        """Errors that nobody but the user can mend; workers that nobody needs."""
        if self._unwritable:
            raise StoreWriteError(self._unwritable)
        self._cluster.check()
        for hand in self._hands:
            if hand.up and not hand.load and self._clock() - hand.since >= IDLE_S:
                hand.end()
        self._warn()

    def _warn(self) -> None:
        """Says once that nothing happens, and why that may be."""
        asked = [hand.since for hand in self._hands if hand.starting]
        if self._warned or not asked or any(hand.up for hand in self._hands):
            return
        if self._clock() - min(asked) >= START_S:
            self._warned = True
            logger.warning(
                "no worker has come up in %.0f s: the cluster has no room for one (%s), or is still growing",
                START_S,
                self._needs,
            )


class _Hand:
    """One worker's place: the worker, if there is one, what it was given, and what waits until it is up."""

    def __init__(
        self,
        spec: WorkerSpec,
        cluster: Cluster,
        clock: Callable[[], float],
        *,
        expected: bool,
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._clock = clock
        self._expected = expected
        self.seat = Seat(spec.name)
        self.waiting: deque[Assignment] = deque()
        self._refusals: list[Refusal] = []
        """What its worker has not been told yet."""
        self.worker: Any = None
        self.call: Any = None
        self.up = False
        self.since = clock()
        """Since when it is starting, has nothing to do, or trains on its present call."""

    @property
    def turn_s(self) -> float:
        """How long the present call has lasted."""
        return self._clock() - self.since

    @property
    def starting(self) -> bool:
        return self.worker is not None and not self.up

    @property
    def counted(self) -> bool:
        """Whether it is up, or can be expected to be soon."""
        if self.starting:
            return self._expected and self._clock() - self.since < START_S
        return self.up or self._expected

    @property
    def load(self) -> int:
        return len(self.seat.assignments) + len(self.waiting)

    def num_free(self, pack_size: int) -> int:
        return max(0, self.seat.num_free(pack_size) - len(self.waiting))

    def refuse(self, refusal: Refusal) -> None:
        refused = {**self._spec.refused, refusal.key: refusal.reason}
        self._spec = replace(self._spec, refused=refused)
        if self.worker is not None:
            self._refusals.append(refusal)

    def start(self) -> None:
        self._refusals.clear()  # its specification has them
        self.worker = self._cluster.hire()
        self.call = self._cluster.prepare(self.worker, self._spec)
        self.since = self._clock()

    def come_up(self) -> None:
        # there is room for it, whatever was thought before
        self.up = self._expected = True
        self.rest()

    def rest(self) -> None:
        self.call = None
        self.since = self._clock()

    def go(self, *, stop: bool) -> None:
        """Trains what it has, and what has come since."""
        assignments = list(self.waiting)
        self.waiting.clear()
        for assignment in assignments:
            self.seat.take(assignment)
        refusals, self._refusals = self._refusals, []
        self.call = self._cluster.advance(
            self.worker, assignments, refusals=refusals, stop=stop
        )
        self.since = self._clock()

    def end(self) -> None:
        if self.worker is not None:
            self._cluster.dismiss(self.worker)
        self.worker = self.call = None
        self.up = False
