from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import StatementError

from thrifty.core import (
    CheckpointRef,
    StoreBusyError,
    StoreError,
    StoreUnreachableError,
    StoreVersionError,
    StoreWriteError,
    StudyMismatchError,
    StudyNotFoundError,
    UsageError,
)
from thrifty.plan import Stage
from thrifty.space import Step
from thrifty.store import (
    CheckpointAdded,
    CheckpointRemoved,
    EpochRecord,
    Heartbeat,
    NodeRecord,
    PriorRecord,
    StageRecord,
    Store,
    StudyMoved,
    TrialAsked,
    TrialEnqueued,
    TrialFailed,
    TrialReported,
    TrialStopped,
)
from thrifty.store._records import records_of
from thrifty.store._schema import metadata
from thrifty.store.migrations import upgrade
from thrifty.testing import VirtualClock


pytestmark = pytest.mark.slow


@pytest.fixture
def clock():
    return VirtualClock(1000.0)


@pytest.fixture
def store(tmp_path, clock):
    with Store.open(f"sqlite:///{tmp_path}/t.db", clock=clock) as opened:
        yield opened


@pytest.fixture
def study(store):
    plan = store.plans.open("identity", task="T").id
    return store.studies.create("s", plan=plan, spec={"mode": "min", "metric": "loss"}).id


def asked(study, trial, *, target=1, fresh=True):
    config = {"lr": Step(0.1, [3]), "width": 8} if fresh else None
    return TrialAsked(
        study=study, trial=trial, target=target, config=config, group=0, parent=None, node=0
    )


def reported(study, trial, value, *, epoch=1):
    return TrialReported(study=study, trial=trial, epoch=epoch, value=value)


def epoch(node, number, **metrics):
    return EpochRecord(plan=1, node=node, epoch=number, metrics=metrics, seconds=0.5, worker="w")


def node(number):
    return NodeRecord(plan=1, node=number, parent=None, start=0, config={"lr": 1}, epochs=4)


def ref(node=0, number=1, digest="d"):
    return CheckpointRef(node=node, epoch=number, path="p", num_bytes=3, digest=digest)


def test_a_trial_comes_back_as_it_was_asked(store, study):
    store.record([asked(study, 0)])
    (trial,) = store.studies.load(study).trials
    assert trial.config == {"lr": Step(0.1, [3]), "width": 8}
    assert (trial.state, trial.target, trial.reached) == ("running", 1, 0)


def test_the_last_word_on_a_trial_holds_within_one_batch(store, study):
    store.record([
        asked(study, 0),
        reported(study, 0, 0.5),
        asked(study, 0, target=3, fresh=False),
        asked(study, 1),
        reported(study, 1, 0.4),
        TrialStopped(study=study, trial=1),
    ])
    trials = store.studies.load(study).trials
    assert [(t.state, t.target, t.reached) for t in trials] == [
        ("running", 3, 1),
        ("stopped", 1, 1),
    ]


def test_the_log_keeps_the_order(store, study):
    store.record([asked(study, 0), asked(study, 1), reported(study, 1, 0.4)])
    store.record([reported(study, 0, 0.5), TrialStopped(study=study, trial=1)])
    log = store.studies.load(study).log
    assert [(e.kind, e.trial, e.value) for e in log] == [
        ("asked", 0, None),
        ("asked", 1, None),
        ("reported", 1, 0.4),
        ("reported", 0, 0.5),
        ("stopped", 1, None),
    ]


def test_a_failure_is_kept_with_its_traceback(store, study):
    failed = TrialFailed(
        study=study, trial=0, epoch=1, kind="error", message="boom", traceback="line 1"
    )
    store.record([asked(study, 0), failed])
    (trial,) = store.studies.load(study).trials
    assert (trial.state, trial.error) == ("failed", ("error", "boom", "line 1"))


def test_values_that_are_no_numbers_survive(store, study):
    store.record([epoch(0, 1, loss=math.nan, other=math.inf)])
    (found,) = store.plans.load(1).epochs
    assert math.isnan(found.metrics["loss"])
    assert found.metrics["other"] == math.inf


def test_the_first_record_of_an_epoch_stays(store, study):
    store.record([epoch(0, 1, loss=0.5)])
    store.record([epoch(0, 1, loss=0.7)])
    assert [e.metrics for e in store.plans.load(1).epochs] == [{"loss": 0.5}]


def test_the_last_record_of_a_checkpoint_stays(store, study):
    store.record([CheckpointAdded(plan=1, ref=ref())])
    store.record([CheckpointAdded(plan=1, ref=ref(digest="new"))])
    assert store.plans.load(1).checkpoints == [ref(digest="new")]
    store.record([CheckpointRemoved(plan=1, node=0, epoch=1)])
    assert store.plans.load(1).checkpoints == []


def test_curves_follow_the_path_of_nodes(store, study):
    store.record([
        NodeRecord(plan=1, node=0, parent=None, start=0, config={"lr": 1}, epochs=4),
        NodeRecord(plan=1, node=1, parent=0, start=1, config={"lr": 2}, epochs=4),
        epoch(0, 1, loss=3.0),
        epoch(0, 2, loss=9.0),
        epoch(1, 2, loss=2.0),
        TrialAsked(study=study, trial=0, target=2, config={"lr": 2}, group=0, parent=None, node=1),
        reported(study, 0, 2.0, epoch=2),
    ])
    assert store.studies.curves(study, "loss") == {0: (3.0, 2.0)}


def test_trials_are_trained_to_the_last_epoch_on_their_path(store, study):
    def ask(trial, node, target):
        row = {"study": study, "trial": trial, "target": target, "node": node}
        return TrialAsked(**row, config={"lr": 1}, group=0, parent=None)

    def branch(number, start):
        return NodeRecord(plan=1, node=number, parent=0, start=start, config={}, epochs=4)

    nodes = [node(0), branch(1, 1), branch(2, 2), branch(3, 3)]
    trained = [epoch(0, 1), epoch(0, 2), epoch(1, 2), epoch(1, 3)]
    asked_of = [ask(0, 0, 1), ask(1, 1, 4), ask(2, 2, 4), ask(3, 3, 4), ask(4, 1, 2)]
    store.record([*nodes, *trained, *asked_of])
    # Trial 0 asks for one epoch only; trials 2 and 3 have no epoch on a node of their own.
    expected = {0: 1, 1: 3, 2: 2, 3: 2, 4: 2}
    assert store.studies.trained_to(study, state="running") == expected
    assert store.studies.trained_to(study, state="stopped") == {}


def test_a_trial_without_any_epoch_is_trained_to_epoch_0(store, study):
    store.record([node(0), asked(study, 0)])
    assert store.studies.trained_to(study, state="running") == {0: 0}


def test_a_summary_counts_and_finds_the_best(store, study):
    store.record([asked(study, i) for i in range(4)])
    store.record([reported(study, 0, 0.5), reported(study, 1, 0.2), reported(study, 2, 0.1)])
    failed = TrialFailed(study=study, trial=2, epoch=1, kind="k", message="m", traceback="")
    stage = StageRecord(
        plan=1,
        node=0,
        start=0,
        stop=1,
        worker="w",
        state="done",
        started_at=0.0,
        seconds=1.0,
        error="",
    )
    store.record([failed, epoch(0, 1, loss=0.5), stage])
    summary = store.studies.summary("s")
    assert summary.num_trials == {"waiting": 2, "running": 1, "failed": 1}
    assert (summary.best_trial, summary.best_value, summary.best_epochs) == (1, 0.2, 1)
    assert (summary.plan_epochs, summary.plan_seconds, summary.trial_epochs) == (1, 0.5, 4)
    assert (summary.trained_epochs, summary.seconds) == (0, 0.0)  # the epoch is of no study


def test_nothing_of_a_refused_batch_is_written(store, study, monkeypatch):
    store.record([asked(study, 0)])
    with pytest.raises(Exception, match="UNIQUE"):
        store.record([epoch(5, 1, loss=1.0), asked(study, 0)])
    assert store.plans.load(1).epochs == []


def test_a_full_disk_says_what_to_do(tmp_path, store, study):
    with store._engine.begin() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar()
        connection.execute(text(f"PRAGMA max_page_count={pages}"))
    with pytest.raises(StoreWriteError, match="free some disk space"):
        store.record([epoch(n, 1, loss=1.0) for n in range(5000)])
    assert store.plans.load(1).epochs == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreWriteError, match="choose another place"):
        Store.open(f"sqlite:///{tmp_path}/file/below/t.db")


def test_a_database_that_cannot_be_opened(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreWriteError, match="choose a writable place"):
        Store.open(f"sqlite:///{tmp_path}/folder")


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "t.db").write_bytes(b"certainly not a database, but long enough to look at" * 40)
    with pytest.raises(StoreError, match="damaged or not a thrifty database"):
        Store.open(f"sqlite:///{tmp_path}/t.db")


def test_another_programs_database(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    with create_engine(url).begin() as connection:
        connection.execute(text("CREATE TABLE customers (id INTEGER)"))
    with pytest.raises(StoreError, match="another program"):
        Store.open(url)


def test_an_address_that_is_none():
    with pytest.raises(UsageError, match="not a database address"):
        Store.open("thrifty.db")


def test_a_missing_database_is_not_made_for_reading(tmp_path):
    with pytest.raises(StudyNotFoundError, match="there is no database"):
        Store.open(f"sqlite:///{tmp_path}/none.db", create=False)


def test_a_newer_database_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    with Store.open(url) as store, store._engine.begin() as connection:
        connection.execute(text("UPDATE thrifty_version SET version_num='9999'"))
    with pytest.raises(StoreVersionError, match=r"schema 9999.*upgrade"):
        Store.open(url)


def test_migrations_lead_to_the_same_tables(tmp_path):
    migrated = create_engine(f"sqlite:///{tmp_path}/migrated.db")
    with migrated.begin() as connection:
        upgrade(connection)
    fresh = create_engine(f"sqlite:///{tmp_path}/fresh.db")
    metadata.create_all(fresh)
    assert _tables(migrated) == _tables(fresh)


def _tables(engine):
    seen = inspect(engine)
    return {
        name: (
            {c["name"]: (str(c["type"]), c["nullable"]) for c in seen.get_columns(name)},
            sorted(str(i["column_names"]) for i in seen.get_indexes(name)),
            seen.get_pk_constraint(name)["constrained_columns"],
        )
        for name in seen.get_table_names()
    }


def test_an_unknown_study_names_its_likeness(store, study):
    with pytest.raises(StudyNotFoundError, match="it has: s"):
        store.studies.get("something else")
    store.studies.create("digits", plan=1, spec={})
    with pytest.raises(StudyNotFoundError, match="did you mean 'digits'"):
        store.studies.get("digit")


def test_a_name_is_given_once(store, study):
    with pytest.raises(StudyMismatchError, match="choose another name"):
        store.studies.create("s", plan=1, spec={})


def test_a_deleted_study_leaves_its_plan(store, study):
    store.record([asked(study, 0), epoch(0, 1, loss=1.0)])
    store.trash.put(store.studies.get("s"), who="me")
    assert store.studies.list() == []
    assert len(store.plans.load(1).epochs) == 1


def test_a_study_that_a_process_runs_is_not_deleted(store, study):
    with (
        store.lease(store.studies.get("s")),
        pytest.raises(StoreBusyError, match="stop that process first"),
    ):
        store.trash.put(store.studies.get("s"), who="me")
    store.trash.put(store.studies.get("s"), who="me")
    assert store.studies.find("s") is None


def test_failures_are_kept_by_trial(store, study):
    store.record([asked(study, 0), asked(study, 1), reported(study, 0, 0.5)])
    assert store.studies.failures(study) == {}
    failed = TrialFailed(study=study, trial=1, epoch=1, kind="k", message="m", traceback="t")
    store.record([failed])
    assert store.studies.failures(study) == {1: ("k", "m", "t")}


def test_one_identity_is_one_plan(store):
    assert store.plans.open("a", task="T") == store.plans.open("a", task="T")
    assert store.plans.open("b", task="T").id != store.plans.open("a", task="T").id


def test_others_read_while_one_writes(store, study):
    store.record([asked(study, 0)])
    with Store.open(store._engine.url.render_as_string(), create=False) as reader:
        assert len(reader.studies.load(study).trials) == 1
        store.record([asked(study, 1)])
        assert len(reader.studies.load(study).trials) == 2


@pytest.fixture
def info(store, study):
    return store.studies.get("s")


def test_a_study_is_held_by_one(store, info):
    with store.lease(info), pytest.raises(StoreBusyError, match=r"'s'.*is being run by process"):
        store.lease(info)
    store.lease(info).release()


@pytest.mark.parametrize("change", ["pid=999999999", "pid_started='12'"])
def test_a_dead_process_holds_nothing(store, info, change):
    store.lease(info)
    with store._engine.begin() as connection:
        connection.execute(text(f"UPDATE leases SET {change}"))
    store.lease(info).release()


def test_a_process_of_another_container_is_not_looked_for_here(store, info, clock):
    """Processes of another container are not looked up here.

    Containers may share the name of their machine, but not the numbers of processes.
    """
    store.lease(info)
    with store._engine.begin() as connection:
        change = "pid=999999999, pid_started='12@pid:[1]'"
        connection.execute(text(f"UPDATE leases SET {change}"))
    with pytest.raises(StoreBusyError):
        store.lease(info)
    clock.advance(61.0)
    store.lease(info).release()


def test_a_silent_holder_elsewhere_is_taken_over(store, info, clock):
    lost = store.lease(info)
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE leases SET host='elsewhere'"))
    with pytest.raises(StoreBusyError, match="elsewhere"):
        store.lease(info)
    lost.heartbeat()
    clock.advance(61.0)
    store.lease(info)
    with pytest.raises(StoreBusyError, match="taken over"):
        lost.heartbeat()


@pytest.mark.parametrize(
    ("change", "silent_s", "state"),
    [
        ("pid=pid", 1000.0, "running"),  # local processes are checked by id, not by heartbeat
        ("pid=999999999", 0.0, "interrupted"),
        ("host='elsewhere'", 59.0, "running"),
        ("host='elsewhere'", 61.0, "interrupted"),
    ],
)
def test_a_study_whose_process_is_gone_is_interrupted(store, info, clock, change, silent_s, state):
    store.lease(info)
    with store._engine.begin() as connection:
        connection.execute(text(f"UPDATE leases SET {change}"))
    clock.advance(silent_s)
    assert store.studies.summary("s").state == store.studies.list()[0].state == state


@pytest.mark.parametrize("state", ["stopped", "done"])
def test_what_has_ended_is_not_interrupted(store, info, state):
    store.studies.create("other", plan=info.plan, spec={})
    with store.lease(store.studies.get("other")):
        store.record([StudyMoved(study=info.id, state=state)])
        assert [s.state for s in store.studies.list()] == [state, "running"]
    assert [s.state for s in store.studies.list()] == [state, "interrupted"]


def test_what_the_dead_train_is_free(store, info, clock):
    other = store.studies.create("other", plan=info.plan, spec={})
    with store.lease(info, shared=True) as lease:
        mine = store.drive(lease)
        dead = store.drive(store.lease(other, shared=True))
        dead.record([node(0)])
        mine.changes(num_nodes=0, force=True)
        assert dead.claim([Stage(node=0, start=0, stop=2)])
        assert not mine.claim([Stage(node=0, start=0, stop=2)])
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE leases SET pid=999999999 WHERE name='other'"))
        clock.advance(4.0)
        assert mine.changes(num_nodes=1) is None, (
            "dead drivers are only looked for every LOOK_S seconds"
        )
        clock.advance(2.0)
        changes = mine.changes(num_nodes=1)
        assert changes is not None
        assert changes.claims == ()
        assert mine.claim([Stage(node=0, start=0, stop=2)])
        with pytest.raises(StoreBusyError, match="taken over"):
            dead.record([node(1)])


def test_what_is_claimed_after_a_take_over_is_free_again(store, info, clock):
    """Claims after a take-over are released, even without a lease.

    A driver that was silent for long, and is killed before it learns of the take-over, leaves them.
    """
    other = store.studies.create("other", plan=info.plan, spec={})
    with store.lease(info, shared=True) as lease:
        mine = store.drive(lease)
        silent = store.drive(store.lease(other, shared=True))
        silent.record([node(0)])
        mine.changes(num_nodes=0, force=True)
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE leases SET pid=999999999 WHERE name='other'"))
        lease.reap_dead_leases()
        assert silent.claim([Stage(node=0, start=0, stop=2)])
        assert not mine.claim([Stage(node=0, start=0, stop=2)])
        clock.advance(6.0)
        mine.changes(num_nodes=1)
        assert mine.claim([Stage(node=0, start=0, stop=2)])


def _watch(lease, clock, *, beats):
    """Beat every ten seconds, and reap dead leases after each beat."""
    for _ in range(beats):
        clock.advance(10.0)
        lease.heartbeat()
        lease.reap_dead_leases()


def test_who_begins_after_the_database_was_away_takes_nobody_for_dead(store, info, clock):
    other = store.studies.create("other", plan=info.plan, spec={})
    far = store.lease(other, shared=True)
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE leases SET host='elsewhere'"))
    clock.advance(120.0)
    with store.lease(info, shared=True) as lease:
        lease.reap_dead_leases()
        far.heartbeat()
        _watch(lease, clock, beats=7)
        with pytest.raises(StoreBusyError, match="taken over"):
            far.heartbeat()


def test_nobody_is_dead_because_the_database_was_away(store, info, clock):
    """An outage of the database declares no driver dead.

    After it, all heartbeats are old: the first driver to look waits until the others can beat.
    """
    other = store.studies.create("other", plan=info.plan, spec={})
    with store.lease(info, shared=True) as lease:
        far = store.lease(other, shared=True)
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE leases SET host='elsewhere' WHERE name='other'"))
        clock.advance(120.0)
        lease.reap_dead_leases()
        lease.heartbeat()
        lease.reap_dead_leases()
        far.heartbeat()
        _watch(lease, clock, beats=5)
        far.heartbeat()
        _watch(lease, clock, beats=7)
        with pytest.raises(StoreBusyError, match="taken over"):
            far.heartbeat()


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_a_clock_that_is_set_anew_kills_nobody_and_hides_nobody(store, info, clock, jump_s):
    """A clock change neither kills live drivers nor hides dead ones.

    Time set back once kept dead drivers alive for as long as it was set back.
    """
    other = store.studies.create("other", plan=info.plan, spec={})
    with store.lease(info, shared=True) as lease:
        clock.advance(31.0)
        lease.heartbeat()
        clock.jump(jump_s)
        lease.heartbeat()
        far = store.lease(other, shared=True)
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE leases SET host='elsewhere' WHERE name='other'"))
        _watch(lease, clock, beats=5)
        far.heartbeat()
        _watch(lease, clock, beats=7)
        with pytest.raises(StoreBusyError, match="taken over"):
            far.heartbeat()


def test_others_are_not_dead_because_the_clock_was_set_forward(store, info, clock):
    other = store.studies.create("other", plan=info.plan, spec={})
    with store.lease(info, shared=True) as lease:
        far = store.lease(other, shared=True)
        with store._engine.begin() as connection:
            connection.execute(text("UPDATE leases SET host='elsewhere' WHERE name='other'"))
        clock.jump(86_400.0)
        lease.reap_dead_leases()
        lease.heartbeat()
        lease.reap_dead_leases()
        far.heartbeat()


def test_a_lease_beats_by_itself(store, info):
    beaten = threading.Event()

    class Lease:
        study = info

        def heartbeat(self) -> None:
            beaten.set()

    with Heartbeat(Lease(), every_s=0.001):
        beaten.wait()


@pytest.mark.parametrize("error", [StoreUnreachableError, StoreBusyError])
def test_a_heart_that_fails(info, error, caplog):
    """A failing heartbeat goes on or ends.

    It goes on if the database may come back, and ends if another driver has the study.
    """
    beats = []
    twice = threading.Event()

    class Lease:
        study = info

        def heartbeat(self) -> None:
            beats.append(1)
            if len(beats) == 2:
                twice.set()
            raise error("no answer")

    with Heartbeat(Lease(), every_s=0.001) as heart:
        if error is StoreBusyError:
            heart._thread.join()
        else:
            twice.wait()
    assert (len(beats) == 1) == (error is StoreBusyError)
    assert ("no answer" in caplog.text) == (error is StoreUnreachableError)


def test_what_is_enqueued_keeps_its_place_in_the_log(store, study):
    config = {"lr": Step(0.1, [3]), "width": (1, 2)}
    store.record([asked(study, 0), TrialEnqueued(study=study, place=0, config=config)])
    store.record([reported(study, 0, 0.5)])
    log = store.studies.load(study).log
    assert [(e.kind, e.trial, e.config) for e in log] == [
        ("asked", 0, None),
        ("enqueued", 0, config),
        ("reported", 0, None),
    ]
    assert store.studies.enqueued(study) == [config]


def test_a_study_is_made_with_all_it_knows_or_not_at_all(store, study):
    prior = PriorRecord(config={"lr": 0.1}, state="waiting", target=1, metrics=[{"loss": math.inf}])
    queue = [{"lr": Step(0.1, [3])}]
    made = store.studies.create("t", plan=1, spec={}, enqueued=queue, priors=[prior])
    assert store.studies.priors(made.id) == [prior]
    assert store.studies.enqueued(made.id) == queue
    with pytest.raises(StatementError, match="serializable"):
        store.studies.create("u", plan=1, spec={}, enqueued=[{"lr": object()}], priors=[prior])
    assert store.studies.find("u") is None
    store.trash.put(store.studies.get("t"), who="me")
    assert store.studies.priors(made.id) == store.studies.enqueued(made.id) == []


def test_several_objectives_and_violations_are_kept(store, study):
    store.record([asked(study, 0), asked(study, 1)])
    both = {"loss": 0.5, "size": 3.0}
    moves = [
        TrialReported(study=study, trial=n, epoch=1, value=0.5 - v, objectives=both, violation=v)
        for n, v in ((0, 0.0), (1, 0.25))
    ]
    store.record(moves)
    trials = store.studies.load(study).trials
    assert [(t.objectives, t.violation, t.feasible) for t in trials] == [
        (both, 0.0, True),
        (both, 0.25, False),
    ]
    summary = store.studies.summary("s")
    assert (summary.best_trial, summary.best_value) == (0, 0.5)


def test_an_epoch_outlives_the_study_that_trained_it(store, study):
    record = EpochRecord(
        plan=1, node=0, epoch=1, metrics={"loss": 1.0}, seconds=0.5, worker="w", study=study
    )
    store.record([record])
    assert store.plans.load(1).epochs == [record]
    store.trash.put(store.studies.get("s"), who="me")
    assert [e.study for e in store.plans.load(1).epochs] == [None]


def test_a_field_without_a_column_is_no_silent_default():
    @dataclass(frozen=True, kw_only=True)
    class Counted:
        number: int
        times: int = 0

    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        whole = connection.execute(text("SELECT 1 AS number, 2 AS times, 3 AS more")).all()
        part = connection.execute(text("SELECT 1 AS number")).all()
    assert records_of(Counted, whole) == [Counted(number=1, times=2)]
    with pytest.raises(ValueError, match="not in tuple"):
        records_of(Counted, part)


def test_the_checkpoints_of_a_study_in_memory_go_with_its_process(tmp_path):
    script = """
import os, pathlib, sys
from thrifty.store import Store
folder = Store.open("sqlite://", create=True).checkpoints.root
(pathlib.Path(folder) / "state").write_text("a")
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
print(folder, os.path.exists(pathlib.Path(folder) / "state"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=120,
    )
    folder, there = done.stdout.split()
    assert there == "True"
    assert Path(folder).parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_made_for_a_database_is_logged(tmp_path, caplog):
    caplog.set_level("INFO", logger="thrifty.store._engine")
    url = f"sqlite:///{tmp_path}/some/where/t.db"
    for _ in range(2):
        Store.open(url).close()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "thrifty.store._engine"]
    assert line == f"made the folder {tmp_path}/some/where for the database t.db"
