"""The loop of one run: ask, plan, train, record, tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from thrifty.core import Clock, Event
from thrifty.plan import Chain, droppable
from thrifty.run import Assignment, Executor
from thrifty.search import Algorithm
from thrifty.space import Space
from thrifty.store import CheckpointRemoved, Lease, Store

from ._forecast import ask_rng
from ._ledger import Ledger
from ._packing import Packing


logger = logging.getLogger(__name__)

GROUP_S = 0.1
"""Records are written together, at least this often; what is lost in a crash is trained again."""
HEARTBEAT_S = 10.0


class Observer(Protocol):
    """Watches a run: progress displays, loggers."""

    def on_event(self, event: Event, ledger: Ledger) -> None:
        """Something was reported and is in the books already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that a run is made of."""

    ledger: Ledger
    algorithm: Algorithm
    space: Space
    executor: Executor
    store: Store
    lease: Lease
    clock: Clock
    seed: int
    plan_id: int
    disk_budget_bytes: float
    observers: Sequence[Observer]
    packing: Packing


def run_loop(parts: Parts, *, stop_requested: Callable[[], bool]) -> bool:
    """Trains until the algorithm has nothing more to ask; False if it was stopped before."""
    chains: dict[int, Chain] = {}
    num_assigned = 0
    stopping = stop_requested()
    upkeep = _Upkeep(parts)
    while True:
        while not stopping:
            size = parts.packing.size(parts.ledger.plan, chains.values())
            num_free = parts.executor.num_free(pack_size=size)
            chain = _next_chain(parts, num_free) if num_free else None
            if chain is None:
                break
            chains[num_assigned] = chain
            parts.executor.submit(Assignment(number=num_assigned, chain=chain, seed=parts.seed))
            num_assigned += 1
        if not chains:
            _write(parts)
            return not stopping
        for report in parts.executor.poll(GROUP_S):
            if report.event is None:
                parts.ledger.plan.abandon(chains.pop(report.assignment))
            else:
                _take(parts, report.event)
        upkeep.tick()
        if not stopping and stop_requested():
            stopping = True
            parts.executor.stop()


def _take(parts: Parts, event: Event) -> None:
    parts.packing.on_event(event, parts.store)
    parts.ledger.handle(event)
    for observer in parts.observers:
        observer.on_event(event, parts.ledger)


class _Upkeep:
    """What has to be done now and then: write down, and say that this process lives."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._written = self._beat = parts.clock.monotonic()

    def tick(self) -> None:
        now = self._parts.clock.monotonic()
        if now - self._written >= GROUP_S:
            _write(self._parts)
            self._written = now
        if now - self._beat >= HEARTBEAT_S:
            self._parts.lease.heartbeat()
            self._beat = now


def _next_chain(parts: Parts, num_free: int) -> Chain | None:
    """What to train next; asks the algorithm when the plan has nothing that could start."""
    ledger = parts.ledger
    while True:
        chain = ledger.plan.next_chain()
        if chain is not None:
            return chain
        decisions = parts.algorithm.ask(
            ledger.history,
            parts.space,
            num=num_free,
            rng=ask_rng(parts.seed, ledger),
        )
        if not decisions:
            return None
        ledger.decide(decisions)


def _write(parts: Parts) -> None:
    """Writes down what has happened since, then frees disk space if the budget asks for it."""
    outbox = parts.ledger.outbox
    if outbox:
        parts.store.record(outbox)
        outbox.clear()
    if parts.ledger.kept_bytes > parts.disk_budget_bytes:
        _free(parts)


def _free(parts: Parts) -> None:
    ledger = parts.ledger
    refs = droppable(ledger.plan, live=ledger.live(), budget_bytes=parts.disk_budget_bytes)
    # the record goes first: a file nobody knows of is harmless, a record without its file is not
    parts.store.record([
        CheckpointRemoved(plan=parts.plan_id, node=r.node, epoch=r.epoch) for r in refs
    ])
    for ref in refs:
        ledger.plan.drop(ref)
        ledger.kept_bytes -= ref.num_bytes
        parts.store.checkpoints.delete(ref)
