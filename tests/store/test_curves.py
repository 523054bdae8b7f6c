from __future__ import annotations

import pytest
from sqlalchemy import create_engine, text

from thrifty.store import EpochRecord, Store, migrations
from thrifty.testing import VirtualClock


CURVES = [
    {"backend": "fused", "step_s": {"1": 0.1, "8": 0.2}, "memory_bytes": {"1": 3e9}},
    {"backend": "solo", "step_s": {"1": 0.05}, "memory_bytes": {}},
]


@pytest.fixture
def clock():
    return VirtualClock(1000.0)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/t.db"


@pytest.fixture
def store(url, clock):
    with Store.open(url, clock=clock) as opened:
        yield opened


def put(store, key, curves):
    store.curves.put(key, device="cpu", structure="a line", curves=curves)


def row(store):
    with store._engine.connect() as connection:
        return connection.execute(
            text("SELECT key, device, structure, created_at FROM curves")
        ).one()


def test_curves_come_back_in_another_process(store, url):
    put(store, "a", CURVES)
    with Store.open(url, create=False) as other:
        assert other.curves.get("a") == CURVES
        assert other.curves.get("b") is None


def test_the_newest_curves_win(store, clock):
    put(store, "a", CURVES)
    clock.advance(5.0)
    put(store, "a", CURVES[1:])
    assert store.curves.get("a") == CURVES[1:]
    assert row(store) == ("a", "cpu", "a line", 1005.0)


@pytest.mark.parametrize("damaged", ["", "[{", "null", "3", '{"backend": "solo"}', "[1]"])
def test_damaged_curves_are_none(store, damaged):
    put(store, "a", CURVES)
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE curves SET curves = :it"), {"it": damaged})
    assert store.curves.get("a") is None
    put(store, "a", CURVES)
    assert store.curves.get("a") == CURVES


def test_what_an_epoch_takes_alone_is_kept(store):
    plan = store.plans.open("identity", task="T").id
    epochs = [
        EpochRecord(
            plan=plan,
            node=0,
            epoch=number,
            metrics={"loss": 1.0},
            seconds=0.5,
            worker="w",
            seconds_checks=0.1,
            seconds_alone=alone,
            seconds_alone_low=None if alone is None else 1.5,
            seconds_alone_high=None if alone is None else 2.5,
        )
        for number, alone in enumerate([None, 2.0], start=1)
    ]
    store.record(epochs)
    assert store.plans.load(plan).epochs == epochs


def test_a_database_of_version_0001_keeps_its_rows(url, monkeypatch):
    engine = create_engine(url)
    with monkeypatch.context() as older, engine.begin() as connection:
        older.setattr(migrations, "VERSION", "0001")
        migrations.upgrade(connection)
        connection.execute(text("INSERT INTO plans VALUES (1, 'identity', 'T', 10.0)"))
        connection.execute(
            text("""INSERT INTO epochs VALUES (1, 0, 1, '{"loss": 0.25}', 0.5, 'w')""")
        )
    engine.dispose()
    with Store.open(url) as store:
        assert store.plans.open("identity", task="T").created_at == 10.0
        (epoch,) = store.plans.load(1).epochs
        assert epoch == EpochRecord(
            plan=1,
            node=0,
            epoch=1,
            metrics={"loss": 0.25},
            seconds=0.5,
            worker="w",
            seconds_alone=0.5,
        )
        put(store, "a", CURVES)
    with Store.open(url, create=False) as again:
        assert again.curves.get("a") == CURVES
