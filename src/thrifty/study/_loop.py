"""The loop of one run (ask, plan, train, record, notify observers), and what ends it early."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

import numpy as np

from thrifty.core import (
    Clock,
    EpochDone,
    Event,
    Refused,
    StageFailed,
    StateError,
    StopNow,
    UsageError,
    derive_seed,
    plain_logger,
)
from thrifty.plan import Chain
from thrifty.run import Assignment, Executor
from thrifty.search import Algorithm, Decision, History, next_decisions
from thrifty.space import Amount, EpochSize, Space
from thrifty.store import Changes, CheckpointRemoved, Driver, Lease, Record, Store, StudyMoved
from thrifty.store._acts import Act
from thrifty.store._records import ActApplied

from ._housekeeping import DiskBudget, Packing, PassedStates
from ._ledger import Ledger
from ._trial_events import TrialEvent


logger = plain_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhen:
    """Conditions that stop a run as Ctrl-C does, as soon as one of them holds.

    Running epochs are finished and kept.

    Attributes:
        epochs: Stop after this many unique epochs were trained for this study, over all its runs
            (or ``steps(...)``, ``tokens(...)``).
            Trials begin only while epochs are left for them, so a pack exceeds this by less than
            one trial's training and one epoch of each trial in it.
        seconds: Stop when this run has lasted this many seconds.
        target: Stop when the metric of the best trial (``Study.best_trial``; with several
            objectives, the first one) is at least as good.

    Raises:
        UsageError: No condition is given, or a condition is invalid.

    >>> StopWhen(epochs=500, target=0.98)
    StopWhen(epochs=500, seconds=None, target=0.98)
    """

    epochs: int | None = None
    seconds: float | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if not any(value is not None for value in given.values()):
            raise UsageError(
                "StopWhen() has no condition, all of epochs, seconds and target are None; "
                "give at least one of them"
            )
        for name, value in given.items():
            if name == "epochs" and isinstance(value, Amount) and value:
                continue
            kind = int if name == "epochs" else int | float
            number = isinstance(value, kind) and not isinstance(value, bool)
            low = -math.inf if name == "target" else 0
            if value is not None and not (number and low < value < math.inf):
                wanted = {"epochs": "a whole number, 1 or more", "seconds": "a number above 0"}
                raise UsageError(
                    f"StopWhen({name}={value!r}): {name} must be "
                    f"{wanted.get(name, 'a finite number')}"
                )

    def amounts(self) -> tuple[Amount, ...]:
        """Return ``epochs`` if it is an amount of steps, tokens or epochs."""
        return (self.epochs,) if isinstance(self.epochs, Amount) else ()

    def in_epochs(self, size: EpochSize) -> StopWhen:
        """Return the same conditions, counted in whole epochs.

        Raises:
            UsageError: ``epochs`` is no whole number of epochs.
        """
        if not isinstance(self.epochs, Amount):
            return self
        return replace(self, epochs=size.whole(self.epochs, what="StopWhen: epochs"))

    def epochs_left(self, ledger: Ledger) -> float:
        """Return how many epochs may still be trained; infinite if they are not limited."""
        return math.inf if self.epochs is None else self.epochs - ledger.epochs.num_trained

    def watch(
        self, ledger: Ledger, clock: Clock, *, began: float | None = None
    ) -> Callable[[], str]:
        """Return a function that gives the reason to stop, or an empty string.

        Args:
            ledger: The ledger of the study.
            clock: The clock that seconds are counted by.
            began: When the run began, by the monotonic clock (default: now).
        """
        began = clock.monotonic() if began is None else began

        def reason() -> str:
            best, sign = ledger.best_value, ledger.goals.sign
            if self.epochs is not None and ledger.epochs.num_trained >= self.epochs:
                were = "was" if ledger.unit.count(ledger.epochs.num_trained) == 1 else "were"
                return f"{ledger.unit.text(ledger.epochs.num_trained)} {were} trained"
            if self.seconds is not None and clock.monotonic() - began >= self.seconds:
                return f"{self.seconds:g} s have passed"
            if self.target is not None and best is not None and sign * (best - self.target) >= 0:
                return f"{ledger.goals.metrics[0]} is {best:g}"
            return ""

        return reason


class StopOnSignal:
    """A handler of Ctrl-C and SIGTERM: the first stops cleanly, the second stops at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that has requested a stop."""
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Return whether a signal has requested a stop."""
        return self.number is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.requested():
            raise StopNow
        self.number = number
        logger.warning("stopping at the end of the epoch; once more to stop at once")

    _on_signal.raises_stop_now = True  # type: ignore[attr-defined]


LOOK_S = 1.0
"""Seconds between looks at what people ask of the study."""
GROUP_S = 0.1
"""Seconds after which collected records are written; what a crash loses is trained again."""
HEARTBEAT_S = 10.0


class Observer(Protocol):
    """An observer of a run, such as a progress display or a logger."""

    def on_event(self, event: Event | TrialEvent) -> None:
        """Handle an event that the study's ledger has already applied.

        A worker has reported something, or the study has decided or learned something.
        """
        ...


def _no_limit() -> float:
    return math.inf


@dataclass(slots=True, kw_only=True)
class RunLoop:
    """One run of a study: asks the algorithm, trains, records, and tells observers.

    ``run`` trains; the attributes are what it works with.
    """

    ledger: Ledger
    algorithm: Algorithm
    space: Space
    executor: Executor
    store: Store
    lease: Lease
    driver: Driver
    clock: Clock
    seed: int
    plan_id: int
    budget: DiskBudget
    observers: Sequence[Observer]
    packing: Packing
    passed: PassedStates
    steering: Steering
    stop_requested: Callable[[], bool]
    """Returns whether to stop at the end of the running epochs."""
    epochs_left: Callable[[], float] = _no_limit
    """Returns how many epochs may still be trained.

    A chain starts if the running ones train fewer, so the last chains may exceed them.
    """
    _chains: dict[int, Chain] = field(default_factory=dict)
    """The chains that are trained, by the number of their assignment."""
    _to_train: dict[int, int] = field(default_factory=dict)
    """The epochs that each of them has left."""
    _num_assigned: int = 0
    _looked: float = 0.0
    """When it was last looked at what people ask."""
    _written: float = 0.0
    """When records were last written."""
    _beat: float = 0.0
    """When the last heartbeat was sent."""

    def run(self) -> bool:
        """Train until the algorithm has nothing more to ask; return False if stopped before that.

        Raises:
            StateError: The task cannot be trained as it is.
        """
        self._written = self._beat = self._looked = self.clock.monotonic()
        stopping = self.stop_requested()
        self._steer()  # what was asked while no process ran the study
        while True:
            if not (stopping or self.steering.is_paused):
                self._begin_chains()
            if self._chains:
                self._drain_events()
            elif self.steering.is_paused and not stopping:
                self._wait_paused()
            elif not stopping and self.executor.may_be_asked:
                self.executor.poll(GROUP_S)
            elif stopping or not (self._others_train or self._steer()):
                self._write()
                return not stopping
            elif self._others_train:
                time.sleep(GROUP_S)
            self._keep_up()
            if not stopping and self.stop_requested():
                stopping = True
                self.executor.stop()

    def hold_budget_at_the_end(self) -> None:
        """Hold the disk budget once the algorithm has nothing more to ask."""
        self._learn(force=True)  # the budget is not held while other drivers' nodes are unknown
        self.budget.hold(self.ledger, driver=self.driver, store=self.store, done=True)

    # -- what is trained -------------------------------------------------------------------

    def _begin_chains(self) -> None:
        """Give the workers as much as they can take."""
        while not self._chains or sum(self._to_train.values()) < self.epochs_left():
            size = self.packing.size(self.ledger.plan, self._chains.values())
            num_free = self.executor.num_free(pack_size=size)
            chain = self._next_chain(num_free) if num_free else None
            if chain is None:
                return
            number = self._num_assigned
            self._num_assigned += 1
            self._chains[number], self._to_train[number] = chain, chain.num_epochs
            self.executor.submit(
                Assignment(
                    number=number,
                    chain=chain,
                    seed=self.seed,
                    epochs_to_come=self.packing.epochs_to_come(self.ledger.plan),
                )
            )

    def _next_chain(self, num_free: int) -> Chain | None:
        """Return what to train next; ask the algorithm if no pending work can start."""
        ledger = self.ledger
        while True:
            chain = ledger.plan.next_chain()
            if chain is not None:
                if self.driver.claim(chain.stages):
                    return chain
                # Another driver has claimed or changed this work, so read its changes first.
                ledger.plan.abandon(chain)
                self._learn(force=True)
                continue
            decisions = next_decisions(
                self.algorithm,
                ledger.history,
                self.space,
                num=num_free,
                rng=ask_rng(self.seed, ledger.history),
            )
            if not decisions:
                return None
            self._decide(decisions)
            tell_news(self.observers, ledger)

    def _decide(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions; lock a shared plan if they add to it."""
        ledger = self.ledger
        if not self.driver.shared or not any(map(ledger.adds_nodes, decisions)):
            ledger.decide(decisions)
            return

        def add(changes: Changes) -> Sequence[Record]:
            ledger.learn(changes)
            ledger.decide(decisions)
            return ledger.outbox

        self.driver.extend(add, num_nodes=len(ledger.plan.nodes))
        ledger.outbox.clear()

    # -- what has happened -----------------------------------------------------------------

    def _drain_events(self) -> None:
        """Apply the reports of the workers."""
        for report in self.executor.poll(GROUP_S):
            if isinstance(report.event, EpochDone):
                self._to_train[report.assignment] -= 1
            if report.event is None:
                chain = self._chains.pop(report.assignment)
                del self._to_train[report.assignment]
                self.ledger.plan.abandon(chain)
                self.driver.done(chain.stages)
            else:
                self._take(report.event)

    def _take(self, event: Event) -> None:
        self.packing.on_event(event, self.store)
        self.ledger.handle(event)
        if isinstance(event, Refused):
            self.executor.refuse(event.key, event.reason)
        tell(self.observers, event)
        tell_news(self.observers, self.ledger)
        if isinstance(event, StageFailed) and event.kind == "task":
            self._write()
            raise StateError(event.message.partition(": ")[2])

    @property
    def _others_train(self) -> bool:
        """Whether a trial waits for training by another driver."""
        return self.driver.shared and self.ledger.history.num_running > 0

    def _wait_paused(self) -> None:
        if self.executor.trains_elsewhere:
            self.executor.poll(0.0)  # so that ask(wait=False) learns that there is nothing now
        time.sleep(GROUP_S)

    # -- periodic work ---------------------------------------------------------------------

    def _keep_up(self) -> None:
        """Write records, read what other drivers and people did, and send the heartbeat."""
        now = self.clock.monotonic()
        if now - self._looked >= LOOK_S:
            self._steer()
            self._looked = now
        if now - self._written >= GROUP_S:
            self._write()
            self._learn()
            self._written = now
        # A thread sends heartbeats, too. Here an error ends the run: another process has the study.
        if now - self._beat >= HEARTBEAT_S and not self.lease.shared:
            self.lease.heartbeat()
            self._beat = now

    def _steer(self) -> bool:
        """Apply what people ask; return whether there is anything new to do."""
        found = self.steering.apply(self.ledger, self.driver)
        tell_news(self.observers, self.ledger)
        if found:
            for number, chain in self._chains.items():
                if self.steering.is_paused or not self.ledger.plan.is_wanted(chain):
                    self.executor.cut(number)
        return found

    def _learn(self, *, force: bool = False) -> None:
        """Read and apply what other drivers have done."""
        ledger = self.ledger
        changes = self.driver.changes(num_nodes=len(ledger.plan.nodes), force=force)
        if changes is not None:
            ledger.learn(changes)
            tell_news(self.observers, ledger)

    def _write(self) -> None:
        """Write the collected records, delete superseded checkpoints, and hold the disk budget."""
        outbox, passed = self.ledger.outbox, self.passed.find(self.ledger)
        removed = [
            CheckpointRemoved(plan=self.plan_id, node=ref.node, epoch=ref.epoch) for ref in passed
        ]
        # Removals share a transaction with the states that replace them. Files go after it.
        self.driver.record([*outbox, *removed])
        outbox.clear()
        self.passed.delete(self.ledger, passed)
        self.budget.hold(self.ledger, driver=self.driver, store=self.store)


def tell(observers: Sequence[Observer], event: Event | TrialEvent) -> None:
    """Send an event to all observers."""
    for observer in observers:
        observer.on_event(event)


def tell_news(observers: Sequence[Observer], ledger: Ledger) -> None:
    """Send the events since the last call to all observers."""
    news, ledger.news = ledger.news, []
    for event in news:
        tell(observers, event)


def ask_rng(seed: int, history: History) -> np.random.Generator:
    """Return the random stream of one ask, derived from the seed and the number of decisions."""
    return np.random.default_rng(derive_seed(seed, "ask", history.num_decisions))


# -- requests from people --------------------------------------------------------------------------


class Steering:
    """Applies acts in the process that runs a study, each once.

    Attributes:
        stopped_by: The user who requested that the run ends; empty without such a request.
        paused_by: The user who requested that the run waits; empty if it does not wait.
    """

    def __init__(self) -> None:
        self.stopped_by = ""
        self.paused_by = ""
        self._known: set[int] = set()
        """Acts that are applied already and whose records may not be written yet."""
        self._stops: list[Act] = []
        """Requests to stop this run. They are recorded as it ends: if the process is killed before,
        the next run stops."""

    @property
    def is_paused(self) -> bool:
        """Whether the run waits for a request to go on."""
        return bool(self.paused_by)

    def or_asked(self, reason: Callable[[], str]) -> Callable[[], str]:
        """Return a function that says why to stop: a request, or ``reason``."""
        return lambda: f"{self.stopped_by} has stopped it" if self.stopped_by else reason()

    def begin(self, ledger: Ledger, driver: Driver) -> None:
        """Apply requests about the whole study that were made while no process ran it."""
        for act in self._about_study(ledger, driver):
            if act.kind == "resume":  # no run has stopped yet, so this takes a stop back, too
                self.stopped_by = ""
                ledger.outbox.extend(self._stopped())
            self._note(act, self._apply(act, ledger), ledger)

    def end(self, ledger: Ledger, driver: Driver, *, state: str) -> None:
        """Record how a run has ended, and answer the requests to stop it.

        Requests that came too late are not those of the next run, unless this one goes on with
        longer trials.
        """
        acts, _ = driver.pending_requests(num_enqueued=ledger.history.num_ever_enqueued)
        goes_on = state == "done" and any(act.kind == "lengthen" for act in acts)
        late = [] if goes_on else self._about_study(ledger, driver)
        answers = [ActApplied(act=act.id, answer="the run had ended") for act in late]
        moved = StudyMoved(study=ledger.study_id, state=state)
        driver.record([*self._stopped(), *answers, moved])

    def _stopped(self) -> Sequence[Record]:
        """Return the records of the requests to stop, once."""
        stops, self._stops = self._stops, []
        return [ActApplied(act=act.id) for act in stops]

    def _about_study(self, ledger: Ledger, driver: Driver) -> Sequence[Act]:
        """Return the queued requests about the whole study that are not applied yet."""
        acts, _ = self._pending(ledger, driver)
        return [a for a in acts if a.kind != "stop trial" and a.id not in self._known]

    def apply(self, ledger: Ledger, driver: Driver) -> bool:
        """Apply what is queued; return whether there was anything."""
        acts, configs = self._pending(ledger, driver)
        fresh = [act for act in acts if act.id not in self._known]
        for act in fresh:
            self._note(act, self._apply(act, ledger), ledger)
        for config in configs:
            ledger.history.record_enqueued(config)
        return bool(fresh or configs)

    @staticmethod
    def _pending(
        ledger: Ledger, driver: Driver
    ) -> tuple[Sequence[Act], Sequence[Mapping[str, Any]]]:
        """Return the queued requests to the loop, and the configurations enqueued meanwhile."""
        acts, configs = driver.pending_requests(num_enqueued=ledger.history.num_ever_enqueued)
        # ``Study.run`` applies a longer max_epochs between two trainings, with another algorithm.
        return [act for act in acts if act.kind != "lengthen"], configs

    def _apply(self, act: Act, ledger: Ledger) -> str:
        if act.kind == "stop":
            self.stopped_by = act.who
            return ""
        if act.kind in ("pause", "resume"):
            self.paused_by = act.who if act.kind == "pause" else ""
            state = "paused" if self.is_paused else "running"
            ledger.outbox.append(StudyMoved(study=ledger.study_id, state=state))
            return ""
        assert act.trial is not None
        return ledger.stop_trial(act.trial)

    def _note(self, act: Act, answer: str, ledger: Ledger) -> None:
        self._known.add(act.id)
        if act.kind == "stop":
            self._stops.append(act)
        else:
            ledger.outbox.append(ActApplied(act=act.id, answer=answer))
