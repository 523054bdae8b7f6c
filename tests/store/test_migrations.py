"""A database of an older version is upgraded and keeps all its data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, text

from tests.study.helpers import make_study
from thrifty.core import EpochDone
from thrifty.store import EpochAgain, EpochRecord, RefusalRecord, Store, migrations


pytestmark = pytest.mark.slow


def old_database(url, version, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "VERSION", version)
        with create_engine(url).begin() as connection:
            migrations.upgrade(connection)


def copied(new, old, monkeypatch) -> None:
    """Copy what a study left behind into the tables of an older version."""
    with create_engine(old).begin() as target, create_engine(new).begin() as source:
        for table in ("plans", "nodes", "epochs", "checkpoints", "studies", "trials", "log"):
            names = [row[1] for row in target.execute(text(f"PRAGMA table_info({table})"))]
            columns = ", ".join(f'"{name}"' for name in names)
            values = ", ".join(f":{name}" for name in names)
            for row in source.execute(text(f"SELECT {columns} FROM {table}")).mappings():
                target.execute(
                    text(f"INSERT INTO {table} ({columns}) VALUES ({values})"), dict(row)
                )


class Count:
    def __init__(self) -> None:
        self.epochs = 0

    def on_event(self, event) -> None:
        self.epochs += isinstance(event, EpochDone)


@pytest.mark.parametrize("version", ["0002", "0008", "0011"])
def test_a_study_of_an_older_version_is_read_and_run(tmp_path, monkeypatch, version):
    study = make_study(tmp_path).run(progress=False)
    old = f"sqlite:///{tmp_path}/old.db"
    old_database(old, version, monkeypatch)
    copied(study.storage.url, old, monkeypatch)
    (tmp_path / "t-checkpoints").rename(tmp_path / "old-checkpoints")
    count = Count()
    again = make_study(tmp_path, storage=old)
    again.run(progress=False, observers=[count])
    assert count.epochs == 0
    assert [t.curve for t in again.trials] == [t.curve for t in study.trials]
    assert [t.user_attrs for t in again.trials] == [{}] * len(study.trials)
    with Store.open(old) as store:
        summary = store.studies.summary("s")
        assert summary.best_trial == study.best_trial.number
        assert store.studies.priors(1) == store.studies.enqueued(1) == []


def test_many_may_open_an_older_database_at_once(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/old.db"
    old_database(url, "0001", monkeypatch)

    def opened(_: int) -> int:
        with Store.open(url) as store:
            return len(store.studies.list())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(opened, range(8))) == [0] * 8


def test_what_an_older_version_has_not_measured_is_not_known(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/old.db"
    old_database(url, "0006", monkeypatch)
    with create_engine(url).begin() as connection:
        connection.execute(
            text("INSERT INTO plans (id, identity, task, created_at) VALUES (1, 'i', 'T', 0)")
        )
        for epoch, alone, again_alone in [(1, "NULL", 0.5), (2, "3.0", 2.0)]:
            connection.execute(
                text(
                    "INSERT INTO epochs (plan, node, epoch, metrics, seconds, worker, "
                    "seconds_alone, "
                    f"again, again_s, again_alone_s) VALUES (1, 0, {epoch}, '{{}}', 0.5, 'w', "
                    f"{alone}, 1, 0.5, {again_alone})"
                )
            )
    with Store.open(url) as store:
        one, other = store.plans.load(1).epochs
        assert store.plans.refusals(1) == {}
    # The first epoch ran alone; the other ran in a pack, and one measurement says too little.
    assert (one.seconds_alone, one.seconds_checks, one.again_alone_low_s) == (0.5, 0.0, 0.5)
    assert (other.seconds_alone, other.again_alone_low_s) == (None, None)


def test_epochs_trained_again_are_summed_until_one_is_not_measured(tmp_path):
    key = {"plan": 1, "node": 0, "epoch": 1}
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        store.plans.open("i", task="T")
        store.record([EpochRecord(**key, metrics={}, seconds=1.0, worker="w")])
        ends = {"seconds_alone_low": 1.0, "seconds_alone_high": 4.0}
        again = EpochAgain(**key, seconds=1.0, seconds_checks=0.5, seconds_alone=2.0, **ends)
        store.record([again])
        store.record([again])
        (epoch,) = store.plans.load(1).epochs
        assert (epoch.again, epoch.again_s, epoch.again_checks_s) == (2, 2.0, 1.0)
        assert (epoch.again_alone_low_s, epoch.again_alone_s) == (2.0, 4.0)
        assert epoch.again_alone_high_s == 8.0
        store.record([EpochAgain(**key, seconds=1.0)])
        (epoch,) = store.plans.load(1).epochs
        assert epoch.again_alone_low_s is epoch.again_alone_high_s is None


def test_the_first_reason_of_a_refusal_stays(tmp_path):
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        plans = [store.plans.open(name, task="T").id for name in "ab"]
        for reason in ("first", "second"):
            store.record([RefusalRecord(plan=plans[0], key="k", reason=reason, study=1)])
        assert store.plans.refusals(plans[0]) == {"k": "first"}
        assert store.plans.refusals(plans[1]) == {}


def test_the_status_is_answered_from_its_index(tmp_path):
    url = make_study(tmp_path).run(progress=False).storage.url
    with Store.open(url) as store, store._engine.connect() as connection:
        query = (
            "EXPLAIN QUERY PLAN SELECT number, value FROM trials WHERE study = 1 AND state != "
            "'failed' "
            "AND value IS NOT NULL AND coalesce(violation, 0.0) = 0.0 ORDER BY value, number"
        )
        plan = " ".join(str(row) for row in connection.execute(text(query)))
    assert "USING COVERING INDEX trials_status" in plan
