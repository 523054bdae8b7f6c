"""A connection that breaks at any point of a transaction loses no events and repeats no work."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager

import pytest
from sqlalchemy import event

from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from thrifty.plan import Stage
from thrifty.store import EpochRecord, NodeRecord, Store


pytestmark = pytest.mark.slow


MOST_POINTS = 200


class Cuts:
    """Fault injector that cuts an engine's connections once, before or after one of its calls."""

    def __init__(self, engine) -> None:
        self._at: int | None = None
        self._passed = 0
        self.fired = False
        engine.dispose()
        event.listen(engine, "do_connect", self._wrap)

    def arm(self, at: int) -> None:
        self._at, self._passed, self.fired = at, 0, False

    def point(self, connection) -> None:
        if self._at is not None and self._passed == self._at:
            self._at, self.fired, connection.cut = None, True, True
            # The connection rolls back, as a server does when a connection breaks.
            sqlite3.Connection.rollback(connection)
        self._passed += 1
        if connection.cut:
            # SQLAlchemy takes only this error of SQLite for a lost connection.
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")

    def _wrap(self, dialect, record, arguments, options) -> None:
        cuts = self

        class Cursor(sqlite3.Cursor):
            def execute(self, *what):
                cuts.point(self.connection)
                done = super().execute(*what)
                cuts.point(self.connection)
                return done

        class Connection(sqlite3.Connection):
            cut = False

            def cursor(self, *_):
                return super().cursor(Cursor)

            def commit(self):
                cuts.point(self)
                super().commit()
                cuts.point(self)

            def rollback(self):
                cuts.point(self)
                super().rollback()
                cuts.point(self)

        options["factory"] = Connection


class Scene:
    """Two drivers of one plan; only the connections of ``mine`` are cut."""

    def __init__(self, folder, name: str) -> None:
        self.url = f"sqlite:///{folder}/{name}.db"

    @contextmanager
    def __call__(self):
        with Store.open(self.url) as mine, Store.open(self.url) as theirs:
            plan = mine.plans.open("identity", task="T").id
            spec = {"mode": "min", "metric": "loss"}
            studies = [mine.studies.create(name, plan=plan, spec=spec) for name in "ab"]
            with (
                mine.lease(studies[0], shared=True) as one,
                theirs.lease(studies[1], shared=True) as other,
            ):
                driver = mine.drive(one)
                driver._sleep = lambda _: None
                cuts = Cuts(mine._engine)
                yield driver, theirs.drive(other), cuts
                cuts.arm(-1)


def node(number):
    return NodeRecord(plan=1, node=number, parent=None, start=0, config={"lr": number}, epochs=9)


def epoch(of, number, loss=0.5):
    return EpochRecord(
        plan=1, node=of, epoch=number, metrics={"loss": loss}, seconds=1.0, worker="w"
    )


def at_each_point(folder, do):
    """Run a scene with a cut at its first point, then its second, until no cut happens."""
    for point in range(MOST_POINTS):
        with Scene(folder, str(point))() as (mine, theirs, cuts):
            do(mine, theirs, lambda cuts=cuts, point=point: cuts.arm(point))
            if not cuts.fired:
                return point
    raise AssertionError("there is no end to the points")


def test_news_that_was_read_before_a_cut_is_read_again(tmp_path):
    def do(mine, theirs, arm):
        theirs.record([node(0), epoch(0, 1), epoch(0, 2)])
        assert theirs.claim([Stage(node=0, start=2, stop=5)])
        arm()
        heard = mine.changes(num_nodes=0)
        assert [n.node for n in heard.news.nodes] == [0]
        assert [e.epoch for e in heard.news.epochs] == [1, 2]
        assert [(c.node, c.stop) for c in heard.claims] == [(0, 5)]
        assert mine.changes(num_nodes=1) is None

    assert at_each_point(tmp_path, do) > 10


def test_nodes_are_added_once_and_on_all_news(tmp_path):
    def do(mine, theirs, arm):
        theirs.record([node(0), epoch(0, 1)])
        told = []

        def add(changes):
            told.append(changes.news)
            return [node(1), epoch(1, 1)]

        arm()
        mine.extend(add, num_nodes=0)
        (news,) = told
        assert [n.node for n in news.nodes] == [0]
        assert [e.epoch for e in news.epochs] == [1]
        theirs.record([epoch(0, 2)])
        later = mine.changes(num_nodes=2)
        assert (0, 2) in {(e.node, e.epoch) for e in later.news.epochs}
        heard = theirs.changes(num_nodes=1)
        assert [n.node for n in heard.news.nodes] == [1]

    assert at_each_point(tmp_path, do) > 10


def test_what_others_write_between_two_tries_is_read(tmp_path):
    def do(mine, theirs, arm):
        mine.record([node(0)])
        theirs.changes(num_nodes=0)
        written = {8}

        def write_between(_):
            theirs.record([epoch(0, 7)])
            written.add(7)

        mine._sleep = write_between
        arm()
        mine.record([epoch(0, 1)])
        theirs.record([epoch(0, 8)])
        heard = mine.changes(num_nodes=1)
        assert {e.epoch for e in heard.news.epochs} - {1} == written

    assert at_each_point(tmp_path, do) > 5


def test_a_stage_is_claimed_once(tmp_path):
    def do(mine, theirs, arm):
        theirs.record([node(0), node(1)])
        mine.changes(num_nodes=0)
        arm()
        stages = [Stage(node=0, start=0, stop=2), Stage(node=1, start=2, stop=4)]
        assert mine.claim(stages)
        theirs.changes(num_nodes=2, force=True)
        assert not theirs.claim(stages[1:])

    assert at_each_point(tmp_path, do) > 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgresql", marks=needs_postgresql)])
def test_a_claim_on_a_node_that_is_made_meanwhile(store, tmp_path, request):
    """Each claim that we see has its node, though another driver adds and claims nodes meanwhile.

    It does so between our queries.
    """
    url = (
        f"sqlite:///{tmp_path}/t.db" if store == "sqlite" else request.getfixturevalue("postgresql")
    )
    with Store.open(url) as ours, Store.open(url) as others:
        plan = ours.plans.open("identity", task="T").id
        spec = {"mode": "min", "metric": "loss"}
        studies = [ours.studies.create(name, plan=plan, spec=spec) for name in "ab"]
        with (
            ours.lease(studies[0], shared=True) as one,
            others.lease(studies[1], shared=True) as other,
        ):
            mine, theirs = ours.drive(one), others.drive(other)
            theirs.record([node(0)])
            made, claimed = [0], [None]

            def go_on(connection, cursor, statement, *rest) -> None:
                if statement.startswith("SELECT"):
                    number = made[-1] + 1
                    theirs.record([node(number)])
                    made.append(number)
                    if claimed[0] is not None:
                        theirs.done([claimed[0]])
                    claimed[0] = Stage(node=number, start=0, stop=2)
                    assert theirs.claim([claimed[0]])

            event.listen(ours._engine, "after_cursor_execute", go_on)
            heard = mine.changes(num_nodes=0, force=True)
            event.remove(ours._engine, "after_cursor_execute", go_on)
            known = {n.node for n in heard.news.nodes}
            assert {c.node for c in heard.claims} <= known
            # Later claims and releases are above the known revision.
            assert mine.changes(num_nodes=len(known)) is not None
