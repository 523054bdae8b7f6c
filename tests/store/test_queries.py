"""Every view agrees with the records it is made of, on both databases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sqlalchemy import insert
from sqlalchemy.exc import SQLAlchemyError

from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from thrifty.core import StudyNotFoundError, UsageError
from thrifty.space import Cosine, Step
from thrifty.store import (
    EpochRecord,
    NodeRecord,
    StageRecord,
    Store,
    StudyMoved,
    TrialAsked,
    TrialFailed,
    TrialReported,
    _schema as schema,
    best_trials,
)
from thrifty.store.queries import TrialFilter, Views, sortable


pytestmark = pytest.mark.slow


EPOCHS = 9
NUM = 40


DATABASES = ["sqlite", pytest.param("postgresql", marks=needs_postgresql)]


@pytest.fixture(scope="module", params=DATABASES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def read_only(kind, request, tmp_path_factory):
    """Return the address of a database that no test writes to."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('views')}/t.db"
    else:
        url = request.getfixturevalue("server").new_database("views")
    with Store.open(url) as opened:
        fill(opened)
    return url


@pytest.fixture
def written(kind, request, tmp_path):
    """Return the address of a database of the test's own."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path}/t.db"
    else:
        url = request.getfixturevalue("postgresql")
    with Store.open(url) as opened:
        fill(opened)
    return url


@pytest.fixture
def url(kind, request):
    own = "written" in request.fixturenames
    return request.getfixturevalue("written" if own else "read_only")


@pytest.fixture
def store(url):
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def views(url):
    with Views.open(url) as opened:
        yield opened


def fill(store):
    """Fill a store with two studies of one plan.

    The plan has a trunk (node 0), and branches that leave it at epochs 2 and 4.
    """
    plan = store.plans.open("plan", task="T").id
    spec = {"metric": "loss", "mode": "min", "max_epochs": EPOCHS, "space": {"lr": "?"}}
    first = store.studies.create("first", plan=plan, spec=spec).id
    store.studies.create("empty", plan=plan, spec={**spec, "mode": "max"})
    rng = np.random.default_rng(0)
    records = [NodeRecord(plan=plan, node=0, parent=None, start=0, config={"lr": 1}, epochs=EPOCHS)]
    for number in range(NUM):
        node = number + 1
        parent, start = (0, 2) if number % 2 else (max(node - 2, 0), 0)
        if number % 2 == 0:
            parent, start = (0, 4)
        records.append(
            NodeRecord(
                plan=plan, node=node, parent=parent, start=start, config={"lr": 1}, epochs=EPOCHS
            )
        )  # fmt: skip
        records += trial(plan, first, number=number, start=start, rng=rng)
    records.append(stage(plan, began=10.0, seconds=5.0))
    records.append(stage(plan, began=12.0, seconds=1.0, worker="w-2"))
    store.record(records)


def trial(plan, study, *, number, start, rng):
    reached = int(rng.integers(1, EPOCHS + 1))
    config = {
        "lr": Step(0.1, [start]) if number % 3 else Cosine(0.1),
        "width": [64, 8, 16, "wide"][number % 4],
    }
    out = [
        TrialAsked(
            study=study, trial=number, target=reached, config=config, group=0, parent=None,
            node=number + 1
        )
    ]  # fmt: skip
    for epoch in range(1, reached + 1):
        node = 0 if epoch <= start else number + 1
        metrics = {"loss": 1 / epoch + node / 100}
        out.append(
            EpochRecord(
                plan=plan, node=node, epoch=epoch, metrics=metrics, seconds=1.0, worker="w",
                study=study
            )
        )  # fmt: skip
    if number % 10 == 9:
        out.append(
            TrialFailed(
                study=study, trial=number, epoch=0, kind="error", message="m", traceback="t"
            )
        )  # fmt: skip
    else:
        violation = 1.0 if number % 7 == 0 else 0.0
        value = round(float(rng.normal()), 1)  # some are equal
        out.append(
            TrialReported(
                study=study, trial=number, epoch=reached, value=value, violation=violation
            )
        )  # fmt: skip
    return out


def stage(plan, *, began, seconds, worker="w"):
    return StageRecord(
        plan=plan, node=0, start=0, stop=2, worker=worker, state="done", started_at=began,
        seconds=seconds, error=""
    )  # fmt: skip


@pytest.fixture
def trials(store):
    return store.studies.load(1).trials


def counting(trial):
    return trial.state != "failed" and trial.feasible


def test_studies_at_a_glance(store, views, trials):
    first, empty = views.studies.list()
    summary = store.studies.summary("first")
    assert (first.name, first.state, first.task) == ("first", "interrupted", "T")
    assert (first.best_value, first.best_trial) == (summary.best_value, summary.best_trial)
    best = best_trials(store.studies.get("first"), trials)[0]
    assert (best.value, best.number) == (first.best_value, first.best_trial)
    assert dict(first.num_trials) == dict(summary.num_trials)
    assert first.asked_epochs == summary.trial_epochs
    assert first.reached_epochs == sum(t.reached for t in trials)
    assert (first.trained_epochs, first.seconds) == (summary.plan_epochs, summary.seconds)
    assert first.last_activity == summary.last_activity
    assert (empty.trained_epochs, empty.best_value, empty.last_activity) == (0, None, None)
    assert (views.studies.get(1), views.studies.get(2), views.studies.get(3)) == (
        first,
        empty,
        None,
    )


def test_the_stamp_changes_with_whatever_is_written(written, store, views):
    stamps = [(views.studies.stamp(), views.studies.stamp(1), views.studies.stamp(2))]

    def write(*records):
        store.record(records)
        stamps.append((views.studies.stamp(), views.studies.stamp(1), views.studies.stamp(2)))

    write(TrialReported(study=1, trial=0, epoch=9, value=0.0))
    write(stage(1, began=20.0, seconds=1.0))
    write(StudyMoved(study=1, state="done"))
    everything, first, second = zip(*stamps, strict=True)
    assert len(set(everything)) == len(set(first)) == 4
    # Reports of another study do not change the stamp, but epochs trained for the plan do.
    assert second[0] == second[1]
    assert second[1] != second[2]
    assert views.studies.stamp(3) is None
    assert views.studies.stamp() == everything[-1]


def test_the_stamp_changes_when_a_study_is_left_alone(written, store, views):
    def seen():
        return views.studies.get(1).state, [s.state for s in views.studies.list()]

    nobody = views.studies.stamp(), views.studies.stamp(1)
    with store.lease(store.studies.get("first")):
        held = views.studies.stamp(), views.studies.stamp(1)
        assert seen() == ("running", ["running", "interrupted"])
    assert seen() == ("interrupted", ["interrupted", "interrupted"])
    assert (views.studies.stamp(), views.studies.stamp(1)) == nobody
    assert not set(nobody) & set(held)


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", ["number", "state", "value", "reached", "target", "violation"])
def test_trials_sorted_by_a_column(views, trials, sort, order):
    rows = views.trials.page(1, TrialFilter(), sort=sort, order=order, limit=500)
    sign = -1 if order == "desc" else 1
    keys = {t.number: getattr(t, sort) for t in trials}
    if sort == "state":
        values = sorted(set(keys.values()))
        keys = {number: values.index(state) for number, state in keys.items()}
    wanted = sorted(keys, key=lambda n: (keys[n] is None, sign * (keys[n] or 0), n))
    assert [row.number for row in rows] == wanted


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_trials_sorted_by_a_hyper_parameter_numbers_and_texts(views, trials, order):
    rows = views.trials.page(1, TrialFilter(), sort="param:width", order=order, limit=500)
    found = [row.config["width"] for row in rows]
    numbers = [w for w in found if w != "wide"]
    assert numbers == sorted(numbers, reverse=order == "desc")
    # Texts are together, on one side.
    places = [i for i, w in enumerate(found) if w == "wide"]
    assert places == list(range(places[0], places[0] + len(places)))
    assert len(found) == len(trials)


def test_pages_have_each_trial_once(views):
    parts = [
        views.trials.page(1, TrialFilter(), sort="value", offset=o, limit=15) for o in (0, 15, 30)
    ]
    assert [len(part) for part in parts] == [15, 15, NUM - 30]
    assert len({row.number for part in parts for row in part}) == NUM


@pytest.mark.parametrize(
    ("which", "passes"),
    [
        (TrialFilter(), lambda t: True),
        (TrialFilter(states=["failed"]), lambda t: t.state == "failed"),
        (
            TrialFilter(states=["done"], max_epochs=EPOCHS),
            lambda t: t.state == "waiting" and t.reached == EPOCHS
        ),
        (
            TrialFilter(states=["paused"], max_epochs=EPOCHS),
            lambda t: t.state == "waiting" and t.reached < EPOCHS
        ),
        (TrialFilter(states=["paused", "failed"]), lambda t: True),
        (TrialFilter(states=["running"], is_run=False), lambda t: False),
        (TrialFilter(states=["paused", "failed"], is_run=False), lambda t: True),
        (TrialFilter(states=["done"]), lambda t: False),
        (TrialFilter(text="COSINE"), lambda t: "Cosine" in str(t.config)),
        (TrialFilter(text="wide"), lambda t: t.config["width"] == "wide"),
        (TrialFilter(text="w_de"), lambda t: False),
        (TrialFilter(text="%"), lambda t: False),
        (TrialFilter(text="\x00"), lambda t: False),
        (TrialFilter(low=0.0), lambda t: t.value is not None and t.value >= 0),
        (TrialFilter(high=0.0), lambda t: t.value is not None and t.value <= 0),
    ],
)  # fmt: skip
def test_a_filter_passes_what_its_definition_says(views, trials, which, passes):
    rows = views.trials.page(1, which, limit=500)
    assert [row.number for row in rows] == [t.number for t in trials if passes(t)]
    assert views.trials.count(1, which) == len(rows)


@pytest.mark.parametrize(
    "sort", ["", "config", "param:", "lr", 'param:a"b', "param:a\0b", "number; --"]
)
def test_what_trials_cannot_be_sorted_by(views, sort):
    assert not sortable(sort)
    with pytest.raises(UsageError, match="cannot sort trials by"):
        views.trials.page(1, TrialFilter(), sort=sort)


@pytest.mark.parametrize(
    "name", ["a'b", "a.b[0]", "ü", "a\\b", "$", "drop table trials", "%s", ":x"]
)
def test_odd_names_are_only_names(views, name):
    assert len(views.trials.page(1, TrialFilter(), sort=f"param:{name}", limit=500)) == NUM


def test_one_trial(views):
    row = views.trials.get(1, 9)
    assert (row.state, row.error) == ("failed", ["error", "m", "t"])
    assert views.trials.get(1, NUM) is None
    assert views.trials.get(2, 0) is None


def test_values_and_whether_they_count(views, trials):
    wanted = [(t.number, t.value, counting(t)) for t in trials if t.value is not None]
    assert views.samples.values(1) == wanted


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_are_ranked_by_value_then_number(views, trials, mode):
    sign = 1 if mode == "min" else -1
    ranked = sorted((t for t in trials if counting(t)), key=lambda t: (sign * t.value, t.number))
    rows = views.samples.best(1, mode=mode, limit=7)
    assert [(r.number, r.node, r.reached) for r in rows] == [
        (t.number, t.node, t.reached) for t in ranked[:7]
    ]


def test_some_are_the_same_again_and_mostly_the_same_later(written, store, views):
    first = [row.number for row in views.samples.some(1, limit=10)]
    assert first == [row.number for row in views.samples.some(1, limit=10)]
    assert first != sorted(first)
    asked = TrialAsked(study=1, trial=NUM, target=1, config={}, group=0, parent=None, node=0)
    store.record([asked, TrialReported(study=1, trial=NUM, epoch=1, value=1.0)])
    assert len({row.number for row in views.samples.some(1, limit=10)} & set(first)) >= 9


@pytest.mark.parametrize("limit", [1, 3, 7, NUM, 1000])
def test_spread_takes_one_of_each_part(views, trials, limit):
    ranked = sorted((t for t in trials if t.value is not None), key=lambda t: (t.value, t.number))
    rows = views.samples.spread(1, limit=limit)
    assert len(rows) == min(limit, len(ranked))
    places = [[t.number for t in ranked].index(row.number) for row in rows]
    if limit < len(ranked):
        assert [place * limit // len(ranked) for place in places] == list(range(limit))
    assert rows[-1].number == ranked[-1].number  # the ends are included


def test_levels_count_the_trials_that_stand_at_each_epoch(views, trials):
    standing = [t.reached for t in trials if t.reached and t.state != "failed"]
    assert views.samples.levels(1) == [(e, standing.count(e)) for e in sorted(set(standing))]


@pytest.mark.parametrize("epoch", [1, 2, 3, 4, 5, EPOCHS])
def test_at_epoch_is_the_curve_at_that_epoch(store, views, trials, epoch):
    curves = store.studies.curves(1, "loss")
    passed = [t for t in trials if t.reached >= epoch and t.state != "failed"]
    found = views.samples.at_epoch(1, epoch, plan=1, limit=500)
    assert [metrics["loss"] for _, metrics in found] == [
        curves[t.number][epoch - 1] for t in passed
    ]
    assert [config["width"] for config, _ in found] == [t.config["width"] for t in passed]
    assert len(views.samples.at_epoch(1, epoch, plan=1, limit=2)) == 2


@pytest.mark.parametrize("every", [1, 3])
def test_paths_are_curves(store, views, trials, every):
    curves = store.studies.curves(1, "loss")
    reported = [t for t in trials if t.reached]
    paths = views.plans.paths(1, [t.node for t in reported], every=every)
    for t in reported:
        found = [(epoch, metrics["loss"]) for epoch, metrics in paths.curve(t.node, t.reached)]
        wanted = list(enumerate(curves[t.number], start=1))
        assert found == [(e, v) for e, v in wanted if e % every == 0]
    assert views.plans.paths(1, []).origins == {}
    assert paths.curve(999, 3) == []


def test_the_tree_says_how_far_each_node_is_trained(store, views):
    plan = store.plans.load(1)
    last = {}
    for each in plan.epochs:
        last[each.node] = max(last.get(each.node, 0), each.epoch)
    assert [tuple(row) for row in views.plans.tree(1)] == [
        (n.node, n.parent, n.start, last.get(n.node)) for n in plan.nodes
    ]


def test_where_trials_end(written, store, views, trials):
    asked = TrialAsked(study=1, trial=0, target=EPOCHS, config=None, group=0, parent=None, node=1)
    store.record([asked])
    ends = {(row.node, row.epoch): row for row in views.plans.ends(1)}
    assert sum(row.trials for row in ends.values()) == NUM
    for t in trials[1:]:
        row = ends[t.node, t.reached]
        value = t.value if counting(t) else None
        assert (row.first, row.failed, row.low, row.high) == (
            t.number, t.state == "failed", value, value
        )  # fmt: skip
    assert (1, EPOCHS) in ends  # the running stage's target


def test_stages_in_a_span(views):
    extent = views.plans.extent(1)
    assert (extent.number, extent.began, extent.ended, extent.workers) == (2, 10.0, 15.0, 2)

    def found(since, until, limit=10):
        total, rows = views.plans.stages(1, since=since, until=until, limit=limit)
        return total, [row.started_at for row in rows]

    assert found(None, None) == (2, [10.0, 12.0])
    assert found(14.0, None) == (1, [10.0])
    assert found(None, 11.0) == (1, [10.0])
    assert found(16.0, None) == (0, [])
    assert found(None, None, limit=1) == (2, [10.0])  # the longest


def test_infinite_values_do_not_hurt(written, store, views):
    asked = TrialAsked(study=2, trial=0, target=1, config={}, group=0, parent=None, node=0)
    store.record([asked, TrialReported(study=2, trial=0, epoch=1, value=-math.inf)])
    assert views.studies.get(2).best_value == -math.inf
    assert views.samples.values(2) == [(0, -math.inf, True)]


def test_nothing_can_be_written(views):
    row = insert(schema.plans).values(identity="x", task="x", created_at=0.0)
    with views._engine.connect() as connection, pytest.raises(SQLAlchemyError, match=r"read-?only"):
        connection.execute(row)


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(StudyNotFoundError, match="there is no database"):
        Views.open(f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(UsageError, match="in memory"):
        Views.open("sqlite://")
