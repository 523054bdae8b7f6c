"""Deleted studies come back as they were, and what any study needs is never removed."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import create_engine, inspect, select, text

from tests.depth import draws
from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from tests.study.helpers import Count, StopAfter, make_study
from thrifty.core import StoreBusyError, StudyMismatchError, StudyNotFoundError, UsageError
from thrifty.search import Enqueued, GridSearch, RandomSearch
from thrifty.space import Choice, Step
from thrifty.store import (
    CheckpointAdded,
    LogRecord,
    NodeRecord,
    Store,
    TrialAsked,
    TrialFailed,
    TrialReported,
    _schema as schema,
)
from thrifty.store._records import PriorRecord
from thrifty.store._trash import KEPT_S, _last_needed
from thrifty.testing import VirtualClock


pytestmark = pytest.mark.slow

OWN = (schema.studies, schema.trials, schema.priors, schema.log, schema.acts)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgresql)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/t.db"
    return request.getfixturevalue("postgresql")


def rows_of(store, name):
    """Return all rows of a study, without the numbers that the database gives."""
    study = store.studies.get(name).id
    found = {}
    with store._engine.connect() as connection:
        for table in OWN:
            column = table.c.id if table is schema.studies else table.c.study
            rows = connection.execute(
                select(table).where(column == study).order_by(*table.primary_key)
            )
            found[table.name] = [
                {k: v for k, v in row._mapping.items() if k not in ("id", "study")} for row in rows
            ]
        trained = select(schema.epochs.c.node, schema.epochs.c.epoch)
        trained = trained.where(schema.epochs.c.study == study).order_by(text("1, 2"))
        found["epochs"] = [tuple(row) for row in connection.execute(trained)]
    return found


def everything(store):
    """Make a study with a row of every kind, strange values among them."""
    plan = store.plans.open("identity", task="T").id
    prior = PriorRecord(config={"lr": 0.1}, state="waiting", target=1, metrics=[{"a": math.inf}])
    info = store.studies.create(
        "s", plan=plan, spec={"mode": "min"}, enqueued=[{"lr": Step(0.1, [3])}], priors=[prior]
    )
    asked = {"study": info.id, "target": 4, "parent": None, "node": 0}
    store.record([
        NodeRecord(plan=plan, node=0, parent=None, start=0, config={}, epochs=4),
        TrialAsked(trial=0, config={"lr": "é\u2028<b>"}, group=0, replicas=[1, 2], **asked),
        TrialAsked(trial=1, config={"lr": None}, group=("a", 1), **asked),
        TrialReported(study=info.id, trial=0, epoch=1, value=math.nan, objectives={"a": 1.0}),
        TrialFailed(study=info.id, trial=1, epoch=0, kind="k", message="m\n", traceback="t"),
    ])
    store.acts.add(info, "note", trial=1, text="seen\nby me", who="me@here")
    store.acts.add(info, "stop trial", trial=0, text="", who="me@here")
    return info


def test_every_row_comes_back(url):
    with Store.open(url) as store:
        info = everything(store)
        before = rows_of(store, "s")
        deleted = store.trash.put(info, who="me@here")
        assert store.trash.list() == [deleted]
        assert (deleted.name, deleted.num_trials, deleted.who) == ("s", 2, "me@here")
        assert store.studies.find("s") is None
        other = store.studies.create("other", plan=info.plan, spec={})  # it may get the id
        assert store.trash.restore(deleted) == "s"
        assert repr(rows_of(store, "s")) == repr(before)  # NaN is not equal to itself
        assert not rows_of(store, "other")["trials"]
        assert store.trash.list() == []
        assert store.studies.get("s").id != other.id
        with pytest.raises(StudyNotFoundError, match="another process has restored"):
            store.trash.restore(deleted)


def test_no_table_of_a_study_is_forgotten():
    """A table that is added later must come back, too."""
    refer = {
        name
        for name, table in schema.metadata.tables.items()
        if "study" in table.c and table.c.study.foreign_keys
    }
    assert refer == {table.name for table in OWN[1:]} | {"leases"}


@settings(max_examples=draws(8, 60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_deleting_and_restoring_in_any_order(tmp_path_factory, data):
    """After any sequence, studies are those of a plain model, with the same rows."""
    folder = tmp_path_factory.mktemp("trash")
    live, gone = {}, []
    with Store.open(f"sqlite:///{folder}/t.db") as store:
        plan = store.plans.open("identity", task="T").id
        for step in range(data.draw(st.integers(1, 12))):
            name = data.draw(st.sampled_from("ab"))
            if name not in live:
                if gone and data.draw(st.booleans()):
                    before = gone.pop()
                    new = data.draw(st.sampled_from([None, name]))
                    store_name = before["studies"][0]["name"] if new is None else new
                    deleted = store.trash.list()[-1]
                    if store_name in live:
                        gone.append(before)
                        with pytest.raises(StudyMismatchError, match="another name"):
                            store.trash.restore(deleted, name=new)
                        continue
                    store.trash.restore(deleted, name=new)
                    before["studies"][0]["name"] = store_name
                    live[store_name] = before
                    continue
                info = store.studies.create(name, plan=plan, spec={"number": step})
                asked = TrialAsked(
                    study=info.id, trial=0, target=1, config={"lr": step}, group=0, parent=None,
                    node=step,
                )  # fmt: skip
                store.record([asked])
                live[name] = rows_of(store, name)
            else:
                store.trash.put(store.studies.get(name), who="me")
                gone.append(live.pop(name))
            assert {each.name: rows_of(store, each.name) for each in store.studies.list()} == live
            assert [each.name for each in store.trash.list()] == [
                each["studies"][0]["name"] for each in gone
            ]


def test_a_restored_study_goes_on_where_it_was(tmp_path):
    make_study(tmp_path).run(progress=False, observers=[StopAfter(4)])
    whole = make_study(tmp_path / "whole").run(progress=False)
    make_study(tmp_path).delete()
    with pytest.raises(StudyNotFoundError, match="no study 's'"):
        make_study(tmp_path).delete()
    again = make_study(tmp_path)
    again.restore()
    count = Count()
    again.run(progress=False, observers=[count])
    assert [t.curve for t in again.trials] == [t.curve for t in whole.trials]
    total = Count()
    make_study(tmp_path / "total").run(progress=False, observers=[total])
    assert count.epochs == total.epochs - 4
    with pytest.raises(StudyNotFoundError, match="those that can be restored: none"):
        again.restore()


def test_a_study_of_the_same_name_is_in_the_way(tmp_path):
    make_study(tmp_path).run(progress=False)
    make_study(tmp_path).delete()
    study = make_study(tmp_path).run(progress=False)
    with pytest.raises(StudyMismatchError, match="under another name"):
        study.restore()
    study.restore(name="earlier")
    with Store.open(study.storage.url) as store:
        assert [each.name for each in store.studies.list()] == ["s", "earlier"]


def test_a_study_that_runs_is_not_deleted(url):
    with Store.open(url) as store:
        info = everything(store)
        with store.lease(info), pytest.raises(StoreBusyError, match="stop that process first"):
            store.trash.put(info, who="me")
        assert store.trash.list() == []


@pytest.mark.parametrize("rows", [b"", b"x", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_damaged_rows_are_said_and_kept(url, rows):
    with Store.open(url) as store:
        deleted = store.trash.put(everything(store), who="me")
        with store._engine.begin() as connection:
            connection.execute(schema.trash.update().values(rows=rows))
        with pytest.raises(UsageError, match="cannot be read"):
            store.trash.restore(deleted)
        assert store.trash.list() == [deleted]


def test_rows_of_another_version_are_said_and_kept(url, monkeypatch):
    with Store.open(url) as store:
        monkeypatch.setattr("thrifty.store._trash._FORMAT", 2)
        deleted = store.trash.put(everything(store), who="me")
        monkeypatch.undo()
        with pytest.raises(UsageError, match="another version of thrifty"):
            store.trash.restore(deleted)
        assert store.trash.list() == [deleted]


def test_an_old_database_gets_the_table(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/t.db"
    with monkeypatch.context() as patch:
        patch.setattr("thrifty.store.migrations.VERSION", "0010")
        from thrifty.store import migrations  # noqa: PLC0415

        with create_engine(url).begin() as connection:
            migrations.upgrade(connection)
    assert "trash" not in inspect(create_engine(url)).get_table_names()
    with Store.open(url) as store:
        assert store.trash.list() == []


DIES = """
import os, signal, sys
from sqlalchemy import event
from thrifty.store import Store

with Store.open(sys.argv[1]) as store:
    study = store.studies.get("s")
    statements = iter(range(int(sys.argv[2])))

    def count(*_):
        if next(statements, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(store._engine, "before_cursor_execute", count)
    store.trash.put(study, who="me")
    store.trash.restore(store.trash.list()[0])
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("after", [2, 8, 12, 14, 17, 22, 28])
def test_a_kill_loses_nothing(tmp_path, after):
    """The study is there as it was, or can be restored so."""
    url = f"sqlite:///{tmp_path}/t.db"
    with Store.open(url) as store:
        everything(store)
        before = repr(rows_of(store, "s"))
    done = subprocess.run([sys.executable, "-c", DIES, url, str(after)], check=False)
    assert done.returncode in (-signal.SIGKILL, 0)
    with Store.open(url) as store:
        if store.studies.find("s") is None:
            store.trash.restore(store.trash.find("s"))
        assert repr(rows_of(store, "s")) == before


# -- garbage ---------------------------------------------------------------------------------


SPACE = {"lr": Choice([Step(0.1, [2]), Step(0.1, [2], gamma=0.5), 0.3])}


def files(folder):
    return {path.name for path in folder.glob("t-checkpoints/*/*.safetensors")}


def gc(tmp_path, **options):
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        return store.collect_garbage(**options)


def named(tmp_path, name, **options):
    return make_study(tmp_path, name=name, **options)


def test_what_another_study_needs_stays(tmp_path):
    """Two studies share a prefix; the states that only the deleted one had go, and no other."""
    wide = GridSearch(max_epochs=6)
    first = named(tmp_path, "a", algorithm=wide).run(progress=False)
    second = named(tmp_path, "b", algorithm=Enqueued(max_epochs=6))
    second.enqueue_trial(first.trials[1].config)
    second.run(progress=False)
    before = files(tmp_path)
    first.delete()
    assert gc(tmp_path).num_states == 0, "it can be restored for a month"
    assert files(tmp_path) == before
    looked = gc(tmp_path, older_than_s=0, dry_run=True)
    assert files(tmp_path) == before
    found = gc(tmp_path, older_than_s=0)
    assert [each.name for each in found.studies] == ["a"]
    assert found.num_states == looked.num_states > 0
    assert found.num_bytes == looked.num_bytes > 0
    assert files(tmp_path) < before
    count = Count()
    second.best_trial.load_model()
    second.run(progress=False, observers=[count])
    again = named(tmp_path, "a", algorithm=wide).run(progress=False, observers=[count])
    assert count.epochs == 0, "what is known is not trained again"
    assert [t.curve for t in again.trials] == [t.curve for t in first.trials]
    assert gc(tmp_path, older_than_s=0) == replace(found, studies=(), num_states=0, num_bytes=0)


def test_studies_that_are_not_done_lose_nothing(tmp_path):
    def epochs_after(folder, *, collects):
        study = named(folder, "a")
        study.run(progress=False, observers=[StopAfter(5)])
        other = named(folder, "b", algorithm=RandomSearch(max_epochs=6, num_trials=2))
        other.run(progress=False).delete()
        if collects:
            gc(folder, older_than_s=0)
        count = Count()
        study.run(progress=False, observers=[count])
        return count.epochs

    plain = epochs_after(tmp_path / "plain", collects=False)
    assert epochs_after(tmp_path / "collected", collects=True) == plain


def test_a_plan_that_a_process_trains_is_left_alone(tmp_path):
    study = named(tmp_path, "a").run(progress=False)
    named(tmp_path, "b").run(progress=False).delete()
    study.delete()
    study.restore()
    before = files(tmp_path)
    with Store.open(study.storage.url) as store, store.lease(store.studies.get("a")):
        found = store.collect_garbage(older_than_s=0)
        looked = store.collect_garbage(older_than_s=0, dry_run=True)
    assert (found.num_busy, found.num_states) == (looked.num_busy, looked.num_states) == (1, 0)
    assert files(tmp_path) == before


def test_states_of_another_folder_are_only_counted(tmp_path):
    study = named(tmp_path, "a").run(progress=False)
    num = len(files(tmp_path))
    study.delete()
    with Store.open(study.storage.url, checkpoints=str(tmp_path / "elsewhere")) as store:
        found = store.collect_garbage(older_than_s=0)
    assert (found.num_states, found.num_elsewhere) == (0, num)
    assert len(files(tmp_path)) == num
    assert gc(tmp_path, older_than_s=0).num_states == num
    assert files(tmp_path) == set()


def test_what_killed_runs_left_goes_but_not_what_another_database_keeps(tmp_path):
    study = named(tmp_path, "a").run(progress=False)
    (plan,) = (tmp_path / "t-checkpoints").iterdir()
    (plan / "77-1.safetensors").write_bytes(b"an orphan")
    assert gc(tmp_path).num_bytes == len(b"an orphan")
    assert "77-1.safetensors" not in files(tmp_path)
    # another database that keeps states in the same folder
    shutil.copy(tmp_path / "t.db", tmp_path / "other.db")
    (plan / ".owner-0123456789abcdef").touch()
    (plan / "78-1.safetensors").write_bytes(b"of the other")
    before = files(tmp_path)
    study.delete()
    gc(tmp_path, older_than_s=0)
    assert files(tmp_path) == before


def test_the_age_is_that_of_the_deletion(tmp_path):
    clock = VirtualClock()
    with Store.open(f"sqlite:///{tmp_path}/t.db", clock=clock) as store:
        store.trash.put(everything(store), who="me")
        clock.advance(KEPT_S - 1)
        assert store.collect_garbage().studies == ()
        clock.advance(1)
        assert [each.name for each in store.collect_garbage().studies] == ["s"]
        assert store.trash.list() == []


def test_a_file_that_two_plans_use_stays(tmp_path):
    """A plan that was only evaluated from another plan's states has rows with their paths."""
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        first = store.plans.open("first", task="T")
        other = store.plans.open("other", task="T")
        store.studies.create("b", plan=other.id, spec={})
        ref = store.checkpoints.write("first", node=0, epoch=1, tensors={}, meta={})
        store.checkpoints.put("first", ".owner-x")
        for plan in (first, other):
            store.record([
                NodeRecord(plan=plan.id, node=0, parent=None, start=0, config={}, epochs=4),
                CheckpointAdded(plan=plan.id, ref=ref),
            ])
        asked = TrialAsked(
            study=store.studies.get("b").id, trial=0, target=4, config={}, group=0, parent=None,
            node=0,
        )  # fmt: skip
        store.record([asked])
        assert store.collect_garbage(older_than_s=0).num_states == 1
        store.checkpoints.read(ref)


@settings(max_examples=draws(20, 300))
@given(st.data())
def test_the_way_to_a_trial_by_its_definition(data):
    """A state is needed if a walk from a trial's node to the root passes it."""
    num = data.draw(st.integers(1, 8))
    origins = {0: (None, 0)}
    for node in range(1, num):
        parent = data.draw(st.integers(0, node - 1))
        origins[node] = (parent, data.draw(st.integers(origins[parent][1] + 1, 9 + node)))
    nodes = data.draw(st.sets(st.integers(0, num - 1)))
    last = _last_needed(nodes, origins)

    def needed(node, epoch):
        for trial in nodes:
            at, until = trial, math.inf
            while at is not None:
                if at == node and epoch <= until:
                    return True
                at, until = origins[at]
        return False

    for node in origins:
        for epoch in range(1, 20):
            assert (epoch <= last.get(node, -1)) == needed(node, epoch)


def test_logs_stay_in_order(url):
    with Store.open(url) as store:
        info = everything(store)
        before = store.studies.load(info.id).log
        store.trash.restore(store.trash.put(info, who="me"))
        after = store.studies.load(store.studies.get("s").id).log
        assert repr(after) == repr(before)  # NaN is not equal to itself
        assert all(isinstance(entry, LogRecord) for entry in after)
