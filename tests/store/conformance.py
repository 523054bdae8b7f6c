"""Conformance checks for the store, each to run on an empty database of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from thrifty.core import CheckpointRef, StoreBusyError
from thrifty.plan import Stage
from thrifty.space import Step
from thrifty.store import (
    Changes,
    CheckpointAdded,
    CheckpointRemoved,
    Driver,
    EpochRecord,
    Lease,
    NodeRecord,
    Record,
    Store,
    StudyInfo,
    StudyMoved,
    TrialAsked,
    TrialFailed,
    TrialReported,
    TrialStopped,
)


Check = Callable[[str], None]

_CONFIG: Mapping[str, object] = MappingProxyType({"lr": 0.1})


def check_records_come_back(url: str) -> None:
    """Check that records are read as they were written.

    Covered are configurations, NaN and infinite values, failures, and the order of the log.
    """
    config = {"lr": Step(0.1, [3]), "width": 8}
    said = {"odd": ["\ud800, \0", "\x1b[31m", {"a": None, "b": [1e300, True]}], "": 10**30}
    with _opened(url) as (store, study):
        failed = TrialFailed(
            study=study.id, trial=1, epoch=1, kind="error", message="boom 100%", traceback="line\n1"
        )
        with _driving(store, study) as driver:
            driver.record([
                *_nodes(study, 1),
                replace(_epoch(study, 0, 1, loss=math.nan, other=math.inf), attributes=said),
                _asked(study, 0, config=config),
                _asked(study, 1),
                TrialReported(study=study.id, trial=0, epoch=1, value=0.5),
                failed,
            ])
            driver.record([
                _asked(study, 0, config=None, target=3),
                TrialStopped(study=study.id, trial=0),
                StudyMoved(study=study.id, state="done"),
            ])
        (epoch,) = store.plans.load(study.plan).epochs
        assert math.isnan(epoch.metrics["loss"])
        assert epoch.metrics["other"] == math.inf
        assert epoch.attributes == said
        assert store.studies.user_attrs(study.id) == {0: said}
        trials, log = store.studies.load(study.id).trials, store.studies.load(study.id).log
        assert [(t.state, t.target, t.reached) for t in trials] == [
            ("stopped", 3, 1),
            ("failed", 1, 0),
        ]
        assert trials[0].config == config
        assert trials[1].error == ("error", "boom 100%", "line\n1")
        assert [e.kind for e in log] == ["asked", "asked", "reported", "failed", "asked", "stopped"]
        summary = store.studies.summary(study.name)
        assert (summary.state, summary.best_trial, summary.best_value) == ("done", 0, 0.5)


def check_the_first_epoch_and_the_last_checkpoint_stay(url: str) -> None:
    """Check that writing again keeps the first metrics of an epoch and the last checkpoint."""
    with _opened(url) as (store, study), _driving(store, study) as driver:
        driver.record([*_nodes(study, 1), _epoch(study, 0, 1, loss=0.5)])
        driver.record([_epoch(study, 0, 1, loss=0.7), _kept(study, 0, 1, digest="a")])
        driver.record([_kept(study, 0, 1, digest="b")])
        found = store.plans.load(study.plan)
        assert [e.metrics for e in found.epochs] == [{"loss": 0.5}]
        assert [c.digest for c in found.checkpoints] == ["b"]
        driver.record([CheckpointRemoved(plan=study.plan, node=0, epoch=1)])
        assert not store.plans.load(study.plan).checkpoints


def check_a_batch_is_written_whole_or_not_at_all(url: str) -> None:
    """Check that a batch with a refused row leaves nothing behind, and the next one is written."""
    with _opened(url) as (store, study), _driving(store, study) as driver:
        driver.record([*_nodes(study, 1), _asked(study, 0)])
        try:
            driver.record([_epoch(study, 0, 1, loss=1.0), _asked(study, 0)])
        except Exception:  # noqa: BLE001 (each database raises its own)
            pass
        else:
            raise AssertionError("a trial was made twice")
        assert not store.plans.load(study.plan).epochs
        driver.record([_epoch(study, 0, 1, loss=1.0)])
        assert len(store.plans.load(study.plan).epochs) == 1


def check_a_study_is_run_by_one(url: str) -> None:
    """Check that a running driver keeps others from its study.

    It also keeps them from its plan, unless both share the plan.
    """
    with _opened(url) as (store, study):
        other = _study(store, "other", plan=study.plan)
        with store.lease(study, shared=True):
            _assert_busy(store, study, shared=True)
            _assert_busy(store, other, shared=False)
            with store.lease(other, shared=True):
                pass
        with store.lease(study, shared=False):
            _assert_busy(store, other, shared=True)
        with store.lease(other, shared=False):
            pass


def check_who_was_taken_over_writes_no_more(url: str) -> None:
    """Check that a driver that lost its lease gets an error, and that it writes nothing."""
    with _opened(url) as (store, study):
        lost = store.lease(study, shared=True)
        driver = store.drive(lease=lost)
        lost.release()
        with _driving(store, study):
            for write in (lambda: driver.record([_asked(study, 0)]), lost.heartbeat):
                _assert_busy_error(write, "taken over")
            assert not store.studies.load(study.id).trials


def check_a_stage_is_claimed_by_one(url: str) -> None:
    """Check that a claim on a node holds until the chain is given back.

    A chain must be claimed whole or not at all.
    """
    with _opened(url) as (store, study):
        other = _study(store, "other", plan=study.plan)
        with _driving(store, study) as mine, _driving(store, other) as theirs:
            mine.record(_nodes(study, 3))
            _hear(theirs, num_nodes=0)
            assert mine.claim(_stages(0, 1))
            assert not theirs.claim(_stages(1, 2))
            assert theirs.claim(_stages(2)), "a chain that was refused holds a part of it"
            assert not mine.claim(_stages(2))
            heard = _hear(theirs, num_nodes=3)
            assert [(c.node, c.start, c.stop) for c in heard.claims] == [(0, 0, 2), (1, 0, 2)]
            mine.done(_stages(0, 1))
            assert not theirs.claim(_stages(1)), "it is given back before what it led to is written"
            mine.record([_epoch(study, 1, 1, loss=0.5)])
            assert not theirs.claim(_stages(1)), "it was claimed on old news"
            assert [e.epoch for e in _hear(theirs, num_nodes=3).news.epochs] == [1]
            assert theirs.claim(_stages(1))


def check_a_node_is_held_until_its_last_chain_ends(url: str) -> None:
    """Check that a driver may begin a second chain on a node while its first one is further on."""
    with _opened(url) as (store, study):
        other = _study(store, "other", plan=study.plan)
        with _driving(store, study) as mine, _driving(store, other) as theirs:
            mine.record(_nodes(study, 2))
            assert mine.claim(_stages(0, 1))
            assert mine.claim(_stages(0))
            mine.done(_stages(0, 1))
            mine.record([_epoch(study, 1, 1, loss=0.5)])
            _hear(theirs, num_nodes=0)
            assert not theirs.claim(_stages(0)), "its second chain still holds the node"
            assert theirs.claim(_stages(1))
            mine.done(_stages(0))
            mine.record([_epoch(study, 0, 1, loss=0.5)])
            _hear(theirs, num_nodes=2)
            assert theirs.claim(_stages(0))


def check_the_dead_hold_nothing(url: str) -> None:
    """Check that a driver's claims are free once its lease is given up."""
    with _opened(url) as (store, study):
        other = _study(store, "other", plan=study.plan)
        with _driving(store, study) as mine:
            with _driving(store, other) as theirs:
                theirs.record(_nodes(other, 1))
                assert theirs.claim(_stages(0))
            _hear(mine, num_nodes=0)
            assert mine.claim(_stages(0))


def check_nodes_are_numbered_by_one(url: str) -> None:
    """Check that a driver that adds nodes first learns of all existing ones."""
    with _opened(url) as (store, study):
        other = _study(store, "other", plan=study.plan)
        with _driving(store, study) as mine, _driving(store, other) as theirs:
            known = {mine: 0, theirs: 0}
            for driver, who in ((mine, study), (theirs, other), (mine, study)):

                def add(
                    changes: Changes, *, driver: Driver = driver, who: StudyInfo = who
                ) -> Sequence[Record]:
                    assert [n.node for n in changes.news.nodes] == list(
                        range(known[driver], max(known.values()))
                    )
                    first = max(known.values())
                    known[driver] = first + 1
                    return _nodes(who, 1, first=first)

                driver.extend(add, num_nodes=known[driver])
            assert [n.node for n in store.plans.load(study.plan).nodes] == [0, 1, 2]


def check_nothing_is_missed(url: str) -> None:
    """Check that a driver that polls now and then receives every epoch.

    Several threads write at once, and may commit in any order.
    """
    num_writers, num_epochs = 4, 25
    with _opened(url) as (store, study), _driving(store, study) as watching:
        watching.record(_nodes(study, num_writers))
        others = [_study(store, f"w{i}", plan=study.plan) for i in range(num_writers)]

        def write(place: int) -> None:
            with _driving(store, others[place]) as driver:
                for number in range(1, num_epochs + 1):
                    driver.record([_epoch(others[place], place, number, loss=0.0)])

        heard: set[tuple[int, int]] = set()
        with ThreadPoolExecutor(num_writers) as pool:
            writing = [pool.submit(write, place) for place in range(num_writers)]
            while not all(each.done() for each in writing):
                heard |= _epochs_heard(watching)
            for each in writing:
                each.result()
        heard |= _epochs_heard(watching)
        assert len(heard) == num_writers * num_epochs


def check_a_race_has_one_winner(url: str) -> None:
    """Check that drivers that claim overlapping chains at once never get the same node."""
    num_drivers, num_nodes = 4, 8
    with _opened(url) as (store, study):
        with _driving(store, study) as driver:
            driver.record(_nodes(study, num_nodes))
        others = [_study(store, f"d{i}", plan=study.plan) for i in range(num_drivers)]
        with _all_driving(store, others) as drivers:

            def race(place: int) -> set[int]:
                rng = np.random.default_rng(place)
                drivers[place].changes(num_nodes=0, force=True)
                mine: set[int] = set()
                for _ in range(10):
                    nodes = sorted({int(n) for n in rng.integers(num_nodes, size=2)} - mine)
                    if nodes and drivers[place].claim(_stages(*nodes)):
                        mine |= set(nodes)
                return mine

            with ThreadPoolExecutor(num_drivers) as pool:
                held = list(pool.map(race, range(num_drivers)))
        assert sum(len(nodes) for nodes in held) == len(set().union(*held))
        assert set().union(*held)


STORE_CHECKS: tuple[Check, ...] = (
    check_records_come_back,
    check_the_first_epoch_and_the_last_checkpoint_stay,
    check_a_batch_is_written_whole_or_not_at_all,
    check_a_study_is_run_by_one,
    check_who_was_taken_over_writes_no_more,
    check_a_stage_is_claimed_by_one,
    check_a_node_is_held_until_its_last_chain_ends,
    check_the_dead_hold_nothing,
    check_nodes_are_numbered_by_one,
    check_nothing_is_missed,
    check_a_race_has_one_winner,
)
"""Checks to run with ``check(url)``, where ``url`` is the address of an empty database."""


@contextmanager
def _opened(url: str) -> Iterator[tuple[Store, StudyInfo]]:
    with Store.open(url) as store:
        plan = store.plans.open("identity", task="T").id
        yield store, _study(store, "s", plan=plan)


def _study(store: Store, name: str, *, plan: int) -> StudyInfo:
    return store.studies.create(name, plan=plan, spec={"mode": "min", "metric": "loss"})


@contextmanager
def _driving(store: Store, study: StudyInfo) -> Iterator[Driver]:
    with store.lease(study, shared=True) as lease:
        yield store.drive(lease)


@contextmanager
def _all_driving(store: Store, studies: Sequence[StudyInfo]) -> Iterator[list[Driver]]:
    leases: list[Lease] = []
    try:
        leases += [store.lease(study, shared=True) for study in studies]
        yield [store.drive(lease) for lease in leases]
    finally:
        for lease in leases:
            lease.release()


def _hear(driver: Driver, *, num_nodes: int) -> Changes:
    heard = driver.changes(num_nodes=num_nodes, force=True)
    assert heard is not None
    return heard


def _epochs_heard(driver: Driver) -> set[tuple[int, int]]:
    changes = driver.changes(num_nodes=0)
    return set() if changes is None else {(e.node, e.epoch) for e in changes.news.epochs}


def _assert_busy(store: Store, study: StudyInfo, *, shared: bool) -> None:
    _assert_busy_error(lambda: store.lease(study, shared=shared), "being run")


def _assert_busy_error(do: Callable[[], object], said: str) -> None:
    try:
        do()
    except StoreBusyError as error:
        found = str(error)
    else:
        raise AssertionError(f"no word that it is {said}")
    assert said in found


def _nodes(study: StudyInfo, num: int, *, first: int = 0) -> list[Record]:
    return [
        NodeRecord(plan=study.plan, node=node, parent=None, start=0, config={"lr": node}, epochs=9)
        for node in range(first, first + num)
    ]


def _epoch(study: StudyInfo, node: int, epoch: int, **metrics: float) -> EpochRecord:
    return EpochRecord(
        plan=study.plan,
        node=node,
        epoch=epoch,
        metrics=metrics,
        seconds=0.5,
        worker="w",
        study=study.id,
    )


def _kept(study: StudyInfo, node: int, epoch: int, *, digest: str) -> CheckpointAdded:
    ref = CheckpointRef(node=node, epoch=epoch, path="p", num_bytes=3, digest=digest)
    return CheckpointAdded(plan=study.plan, ref=ref)


def _asked(
    study: StudyInfo, trial: int, *, config: Mapping[str, object] | None = _CONFIG, target: int = 1
) -> TrialAsked:
    return TrialAsked(
        study=study.id, trial=trial, target=target, config=config, group=0, parent=None, node=0
    )


def _stages(*nodes: int) -> list[Stage]:
    return [Stage(node=node, start=0, stop=2) for node in nodes]
