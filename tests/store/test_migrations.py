"""A database of an older version is brought up to date with all that is in it."""

from __future__ import annotations

from sqlalchemy import create_engine, text

from tests.study.helpers import make_study
from thrifty.core import EpochDone
from thrifty.store import Store, _migrate


def old_database(url, version, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_migrate, "VERSION", version)
        with create_engine(url).begin() as connection:
            _migrate.upgrade(connection)


def copied(new, old, monkeypatch) -> None:
    """What a study left behind, in the tables of an older version."""
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


def test_a_study_of_an_older_version_is_read_and_run(tmp_path, monkeypatch):
    study = make_study(tmp_path).run(progress=False)
    old = f"sqlite:///{tmp_path}/old.db"
    old_database(old, "0002", monkeypatch)
    copied(study.storage.url, old, monkeypatch)
    (tmp_path / "t-checkpoints").rename(tmp_path / "old-checkpoints")
    count = Count()
    again = make_study(tmp_path, storage=old)
    again.run(progress=False, observers=[count])
    assert count.epochs == 0
    assert [t.curve for t in again.trials] == [t.curve for t in study.trials]
    with Store.open(old) as store:
        summary = store.studies.summary("s")
        assert summary.best_trial == study.best_trial.number
        assert store.studies.priors(1) == store.studies.enqueued(1) == []


def test_the_status_is_answered_from_its_index(tmp_path):
    url = make_study(tmp_path).run(progress=False).storage.url
    with Store.open(url) as store, store._engine.connect() as connection:
        query = (
            "EXPLAIN QUERY PLAN SELECT number, value FROM trials WHERE study = 1 AND state != 'failed' "
            "AND value IS NOT NULL AND coalesce(violation, 0.0) = 0.0 ORDER BY value, number"
        )
        plan = " ".join(str(row) for row in connection.execute(text(query)))
    assert "USING COVERING INDEX trials_status" in plan
