"""The store's conformance suite on both databases, and what only PostgreSQL does."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import Inspector, event, inspect

from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from tests.store.conformance import STORE_CHECKS
from thrifty.core import (
    MissingExtraError,
    StoreBusyError,
    StoreUnreachableError,
    StudyNotFoundError,
    UsageError,
)
from thrifty.store import (
    EpochRecord,
    NodeRecord,
    Store,
    StudyMoved,
    TrialAsked,
    TrialReported,
    _engine,
    redact_url,
)


pytestmark = pytest.mark.slow


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgresql)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/t.db"
    return request.getfixturevalue("postgresql")


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, url):
    check(url)


@pytest.fixture
def store(url):
    with Store.open(url) as opened:
        plan = opened.plans.open("identity", task="T").id
        opened.studies.create("s", plan=plan, spec={"metric": "loss", "mode": "min"})
        yield opened


def one_more_trial(number, *, study=1):
    """Return the records of a trial that trains a node of its own for one epoch."""
    config = {"lr": number}
    return [
        NodeRecord(plan=1, node=number, parent=None, start=0, config=config, epochs=4),
        TrialAsked(
            study=study, trial=number, target=1, config=config, group=0, parent=None, node=number
        ),
        EpochRecord(plan=1, node=number, epoch=1, metrics={"loss": 0.5}, seconds=0.1, worker="w"),
        TrialReported(study=study, trial=number, epoch=1, value=0.5),
    ]


@contextmanager
def writing_between_queries(store, url) -> Iterator[list[int]]:
    """Let another process add a trial before each query of a store; yield their numbers."""
    written: list[int] = []
    with Store.open(url) as other:

        def write(connection, cursor, statement, *args) -> None:
            if statement.startswith("SELECT"):
                other.record(one_more_trial(len(written)))
                written.append(len(written))

        event.listen(store._engine, "before_cursor_execute", write)
        yield written
        event.remove(store._engine, "before_cursor_execute", write)


def test_a_study_and_its_plan_are_read_as_they_were_at_one_moment(store, url):
    info = store.studies.get("s")
    with writing_between_queries(store, url) as written:
        found = store.studies.snapshot(info)
    numbers = [trial.number for trial in found.study.trials]
    assert 0 < len(numbers) < len(written)
    assert [entry.trial for entry in found.study.log if entry.kind == "asked"] == numbers
    assert [node.node for node in found.plan.nodes] == numbers
    assert [epoch.node for epoch in found.plan.epochs] == numbers


def test_curves_are_read_as_they_were_at_one_moment(store, url):
    with writing_between_queries(store, url) as written:
        curves = store.studies.curves(1, "loss")
    assert curves == dict.fromkeys(curves, (0.5,))
    assert 0 < len(curves) < len(written)


def test_a_summary_counts_the_trials_of_one_moment(store, url):
    with writing_between_queries(store, url) as written:
        (summary,) = store.studies.list()
    assert summary.num_trials == {"waiting": summary.plan_epochs}
    assert 0 < summary.plan_epochs < len(written)


def test_a_study_is_not_deleted_while_a_process_starts_to_run_it(store):
    info = store.studies.get("s")
    store.record([StudyMoved(study=info.id, state="stopped")])
    with store.lease(info), pytest.raises(StoreBusyError, match="stop that process first"):
        store.trash.put(store.studies.get("s"), who="me")


def test_a_study_that_was_deleted_cannot_be_held(store):
    info = store.studies.get("s")
    store.trash.put(store.studies.get("s"), who="me")
    store.studies.create("s", plan=info.plan, spec={})  # it may get the id of the deleted one
    with pytest.raises(StudyNotFoundError, match="study 's' was deleted while"):
        store.lease(info)


def test_a_driver_whose_study_was_deleted_says_so(store):
    lease = store.lease(store.studies.get("s"))
    driver = store.drive(lease)
    lease.release()
    store.trash.put(store.studies.get("s"), who="me")
    for use in (
        lambda: driver.record(one_more_trial(0)),
        lease.heartbeat,
        lambda: store.drive(lease),
    ):
        with pytest.raises(StudyNotFoundError, match="study 's' was deleted while"):
            use()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_driver_whose_study_another_one_drives_says_so(store, deleted):
    lease = store.lease(store.studies.get("s"))
    driver = store.drive(lease)
    lease.release()
    if deleted:
        plan = store.studies.get("s").plan
        store.trash.put(store.studies.get("s"), who="me")
        store.studies.create("s", plan=plan, spec={})
    info = store.studies.get("s")
    other = store.drive(store.lease(info))
    for number in range(3):  # batches that this driver might take for its own
        other.record(one_more_trial(number, study=info.id))
    for number in range(3):
        with pytest.raises((StoreBusyError, StudyNotFoundError), match="'s'"):
            driver.record(one_more_trial(number))
    assert len(store.studies.snapshot(info).study.trials) == 3


def test_a_deleted_study_is_neither_read_nor_added_to(store):
    info = store.studies.get("s")
    store.trash.put(store.studies.get("s"), who="me")
    for use in (
        lambda: store.studies.snapshot(info),
        lambda: store.studies.enqueue(info, lambda known: [{"lr": 1}]),
    ):
        with pytest.raises(StudyNotFoundError, match="study 's' was deleted while"):
            use()
    with pytest.raises(StudyNotFoundError, match=f"no study with the id {info.id}"):
        store.studies.curves(info.id, "loss")


@needs_postgresql
def test_an_address_without_a_driver_is_enough(postgresql):  # noqa: F811
    with Store.open(postgresql.replace("+psycopg", "")) as store:
        assert store.studies.list() == []


@needs_postgresql
def test_a_schema_of_ones_own(postgresql):  # noqa: F811
    with Store.open(postgresql) as store, store._engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA team")
    with Store.open(f"{postgresql}&options=-csearch_path%3Dteam") as store:
        assert "studies" in inspect(store._engine).get_table_names(schema="team")


def test_many_may_open_a_new_database_at_once(url):
    def opened(_: int) -> int:
        with Store.open(url) as store:
            return len(store.studies.list())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(opened, range(8))) == [0] * 8


def test_tables_that_another_process_makes_meanwhile_are_ours(tmp_path, monkeypatch):
    """The other process commits between the question for the version and that for the tables."""
    url = f"sqlite:///{tmp_path}/t.db"
    names = Inspector.get_table_names

    def after_the_other(self, *args, **options):
        monkeypatch.undo()
        Store.open(url).close()
        return names(self, *args, **options)

    monkeypatch.setattr(Inspector, "get_table_names", after_the_other)
    with Store.open(url) as store:
        assert store.studies.list() == []


class Cursor:
    """Cursor that reports a locked database a given number of times."""

    def __init__(self, refusals: int, said: str = "database is locked") -> None:
        self.left, self.said = refusals, said

    def execute(self, statement: str) -> None:
        self.left -= 1
        if self.left >= 0:
            raise sqlite3.OperationalError(self.said)


def test_the_first_to_open_a_file_may_keep_others_waiting(monkeypatch):
    cursor = Cursor(3)
    _engine._use_wal(cursor)
    assert cursor.left == -1
    with pytest.raises(sqlite3.OperationalError, match="read"):
        _engine._use_wal(Cursor(1, "disk I/O error: cannot read"))
    monkeypatch.setattr(_engine, "_PATIENCE_S", -1.0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        _engine._use_wal(Cursor(1))


def test_a_server_that_is_not_there(tmp_path):
    url = f"postgresql+psycopg://me:secret@/none?host={tmp_path}"
    with pytest.raises(StoreUnreachableError, match="does not answer") as raised:
        Store.open(url)
    assert "secret" not in str(raised.value)


def test_a_database_that_is_not_known():
    with pytest.raises(UsageError, match=r"'mysql'.*postgresql\+psycopg"):
        Store.open("mysql://host/name")


def test_a_driver_that_is_not_installed():
    with pytest.raises(MissingExtraError, match=r"\.\[postgresql\]"):
        Store.open("postgresql+asyncmy://host/name")


def test_passwords_are_not_shown():
    assert "secret" not in redact_url("postgresql://me:secret@host/name")
