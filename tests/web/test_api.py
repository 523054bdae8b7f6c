from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial

import pytest
from sqlalchemy import create_engine, text

from tests.study.helpers import SOLO, Sized, make_study
from tests.web.conftest import SCRIPT, opened
from thrifty.agents._store_documents import status_document
from thrifty.search import GridSearch
from thrifty.space import Choice, Ladder, Space, Step
from thrifty.store import EpochRecord, NodeRecord, Store, StudyMoved, TrialAsked, TrialReported
from thrifty.web import create_app
from thrifty.web._responses import PollThrottle


pytestmark = pytest.mark.slow


def get(client, path, **params):
    response = client.get(f"/api{path}", params=params)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def store(database):
    with Store.open(f"sqlite:///{database}") as found:
        yield found


def report(store, *, trial=1000, value=0.5, name="line"):
    info = store.studies.get(name)
    asked = TrialAsked(
        study=info.id, trial=trial, target=1, config={"lr": 0.3}, group=0, parent=None, node=0
    )  # fmt: skip
    store.record([asked, TrialReported(study=info.id, trial=trial, epoch=1, value=value)])


# -- what is said ---------------------------------------------------------------------


def test_the_list_says_how_studies_stand(client, store):
    line, harm = get(client, "/studies")["studies"]
    summary = store.studies.summary("line")
    assert (line["name"], line["state"]) == ("line", summary.state)
    assert (line["best_value"], line["best_trial"]) == (summary.best_value, summary.best_trial)
    assert (line["trials"], line["num_trials"]) == ({"done": 18}, 18)
    assert line["epochs"]["trained"] == summary.plan_epochs
    assert line["epochs"]["saved"] == summary.trial_epochs - summary.plan_epochs
    assert line["last_activity"] == summary.last_activity
    assert (harm["best_value"], harm["best_trial"], harm["trials"]) == (None, None, {"failed": 1})


@pytest.mark.parametrize("state", ["running", "stopped", "done"])
def test_the_list_counts_trials_as_thrifty_status_does(client, store, state):
    """Two trials of three are done, one is paused, and a fourth is in training."""
    plan = store.plans.open("four", task="four").id
    made = store.studies.create("four", plan=plan, spec={"max_epochs": 4})
    store.record([NodeRecord(plan=plan, node=0, parent=None, start=0, config={}, epochs=4)])
    asked = {"study": made.id, "target": 4, "config": {}, "group": 0, "parent": None, "node": 0}
    for trial, epoch in enumerate((4, 4, 2)):
        store.record([
            TrialAsked(trial=trial, **{**asked, "target": epoch}),
            TrialReported(study=made.id, trial=trial, epoch=epoch, value=0.5),
        ])
    store.record([TrialAsked(trial=3, **asked)])
    store.record([StudyMoved(study=made.id, state=state)])
    with store.lease(made) if state == "running" else nullcontext():
        (said,) = status_document(store, url="sqlite://", name="four")["studies"]
        listed = get(client, "/studies")["studies"][-1]
        shown = get(client, f"/studies/{made.id}")["study"]
    assert said["state"] == state
    for study in (listed, shown):
        found = {key: study[key] for key in ("num_trials", "trials", "stopped_in_training")}
        assert found == {key: said[key] for key in found}
        assert (study["trials"]["done"], study["trials"]["paused"]) == (2, 1)
        assert sum(study["trials"].values()) + study["stopped_in_training"] == 4


def test_a_study_says_what_it_was_made_from(client, store):
    detail = get(client, "/studies/1")
    best = store.studies.load(1).trials[detail["study"]["best_trial"]]
    assert detail["best_config"]["lr"] == str(best.config["lr"])
    assert [p["name"] for p in detail["space"]] == ["lr", "width", "dropout"]
    assert detail["max_epochs"] == 6
    assert detail["resume"] == ""
    assert detail["best_epochs"] == best.reached
    assert (detail["num_seeds"], detail["best_interval"]) == (1, None)


def test_history_ends_with_the_best(client):
    found = get(client, "/studies/1/history")
    best = get(client, "/studies/1")["study"]
    assert found["best_values"][-1] == best["best_value"]
    assert found["best_trials"][-1] == best["best_trial"]
    assert found["best_values"] == sorted(found["best_values"], reverse=True)
    assert (found["shown"], found["total"]) == (18, 18)


def test_history_is_thinned_out_but_never_loses_the_best(client):
    found = get(client, "/studies/1/history", limit=2)
    assert (found["shown"], len(found["trials"])) == (2, 2)
    assert found["best_values"][-1] == get(client, "/studies/1")["study"]["best_value"]


def test_curves_are_those_of_the_store(client, store):
    wanted = store.studies.curves(1, "mse")
    found = get(client, "/studies/1/curves")["curves"]
    assert len(found) == 18
    for curve in found:
        assert [v for _, v in curve["points"]] == list(wanted[curve["trial"]])
        assert [e for e, _ in curve["points"]] == list(range(1, 7))


def test_the_best_curves_come_first_and_nobody_twice(client):
    found = get(client, "/studies/1/curves", best=3, others=5)["curves"]
    assert [c["best"] for c in found[:3]] == [True] * 3
    values = [c["value"] for c in get(client, "/studies/1/curves", best=18, others=0)["curves"]]
    assert [c["value"] for c in found[:3]] == sorted(values)[:3]
    assert len({c["trial"] for c in found}) == len(found) <= 8


def test_a_metric_that_is_not_there_is_the_first(client):
    assert get(client, "/studies/1/curves", metric="nonsense")["metric"] == "mse"


def test_parallel_has_a_place_for_each_coordinate(client):
    found = get(client, "/studies/1/parallel")
    names = [axis["name"] for axis in found["axes"]]
    assert {"lr", "width", "dropout"} <= set(names)
    assert all(len(row) == len(names) + 1 for row in found["rows"])
    assert [row[-1] for row in found["rows"]] == sorted(row[-1] for row in found["rows"])


def test_parallel_names_the_numeric_options_in_order(client, store):
    axes = {axis["name"]: axis for axis in get(client, "/studies/1/parallel")["axes"]}
    width = sorted({t.config["width"] for t in store.studies.load(1).trials})
    assert (axes["width"]["kind"], axes["width"]["ticks"]) == ("number", width)


def test_parallel_takes_evenly_over_the_ranks(client):
    everything = [row[-1] for row in get(client, "/studies/1/parallel")["rows"]]
    some = [row[-1] for row in get(client, "/studies/1/parallel", limit=6)["rows"]]
    assert len(some) == 6
    assert [everything.index(v) // 3 for v in some] == list(range(6))


def test_importance_is_taken_where_trials_can_be_compared(client):
    found = get(client, "/studies/1/importance")
    assert (found["epoch"], found["trials"], found["note"]) == (6, 18, "")
    found_shares = [each["share"] for each in found["shares"]]
    assert found_shares[0] > 0
    assert sum(found_shares) == pytest.approx(1.0)


def fill_study(store, value_of, *, num_trials=24, **space):
    """Create a study whose trials have two hyper-parameters that are always equal."""
    spec = {"metric": "mse", "mode": "min", "max_epochs": 1, "space": {"a": "a", "b": "b"}}
    spec["space"].update(space)
    plan = store.plans.open("twins", task="Twins").id
    study = store.studies.create("twins", plan=plan, spec=spec).id
    for n in range(num_trials):
        config = {"a": float(n), "b": float(n)}
        asked = TrialAsked(
            study=study, trial=n, target=1, config=config, group=0, parent=None, node=n
        )  # fmt: skip
        store.record([
            NodeRecord(plan=plan, node=n, parent=None, start=0, config=config, epochs=1),
            EpochRecord(
                plan=plan, node=n, epoch=1, metrics={"mse": value_of(n)}, seconds=1.0, worker="w"
            ),
            asked,
            TrialReported(study=study, trial=n, epoch=1, value=value_of(n)),
        ])
    return study


def test_what_two_coordinates_explain_alone_is_shared_out(client, store):
    study = fill_study(store, float)
    found = get(client, f"/studies/{study}/importance")
    assert {each["name"]: each["share"] for each in found["shares"]} == {"a": 0.5, "b": 0.5}


def test_importance_names_hyperparameters_with_one_value(client, store):
    study = fill_study(store, float, width="Choice(options=(8, 16))", seed="7")
    found = get(client, f"/studies/{study}/importance")
    assert found["one_value"] == ["width"]
    assert {each["name"] for each in found["shares"]} == {"a", "b"}


def test_equally_good_trials_have_no_shares_and_a_note(client, store):
    study = fill_study(store, lambda n: 0.5)
    found = get(client, f"/studies/{study}/importance")
    assert (found["trials"], found["shares"]) == (24, [])
    assert found["note"] == "no hyper-parameter explains a difference between these trials"


def test_importance_of_few_trials_says_so(client):
    found = get(client, "/studies/2/importance")
    assert (found["shares"], found["note"]) == ([], "needs 16 trials that have reported")


def test_the_forest_saves_what_the_study_saves(client):
    forest = get(client, "/studies/1/forest")
    study = get(client, "/studies/1")["study"]
    assert forest["saved"] == study["epochs"]["saved"]
    assert sum(s["stop"] - s["start"] for s in forest["stages"]) == study["epochs"]["trained"]
    assert {s["state"] for s in forest["stages"]} == {"done"}
    assert max(s["trials"] for s in forest["stages"]) > 1
    best = min(s["best"] for s in forest["stages"] if s["parent"] is None)
    assert best == study["best_value"]


def test_a_cut_forest_says_what_is_left_out(client):
    forest = get(client, "/studies/1/forest", limit=3)
    assert len(forest["stages"]) == 3
    assert sum(more["stages"] for more in forest["more"]) == forest["total"] - 3


def test_workers_did_all_stages(client, store):
    found = get(client, "/studies/1/workers")
    stages = [stage for worker in found["workers"] for stage in worker["stages"]]
    assert found["shown"] == found["total"] == len(stages) > 0
    assert sum(s["stop"] - s["start"] for s in stages) == store.studies.summary("line").plan_epochs
    assert found["began"] <= min(s["began"] for s in stages)


def test_workers_in_a_span_of_time(client):
    found = get(client, "/studies/1/workers")
    ended = found["ended"]
    assert get(client, "/studies/1/workers", since=ended + 1)["total"] == 0
    assert get(client, "/studies/1/workers", until=found["began"] - 1)["total"] == 0
    few = get(client, "/studies/1/workers", limit=2)
    assert (few["shown"], sum(len(w["stages"]) for w in few["workers"])) == (2, 2)
    # Trials that are not drawn still count.
    told = ("lanes", "total", "largest", "busy")
    assert [[w[k] for k in told] for w in few["workers"]] == [
        [w[k] for k in told] for w in found["workers"]
    ]


def test_a_trial_with_its_schedule_and_its_neighbours(client, store):
    for trial in store.studies.load(1).trials:
        found = get(client, f"/studies/1/trials/{trial.number}")
        assert found["value"] == trial.value
        assert {line["name"]: line["text"] for line in found["schedule"]} == {
            name: str(v) for name, v in trial.config.items()
        }
        assert [v for _, v in found["curves"]["mse"]] == list(
            store.studies.curves(1, "mse")[trial.number]
        )
        assert [s["start"] for s in found["stages"]] == [
            0,
            *(s["stop"] for s in found["stages"][:-1]),
        ]
        assert found["stages"][-1]["stop"] == 6
        assert all(trial.number not in s["others"] for s in found["stages"])
    shared = [get(client, f"/studies/1/trials/{n}")["shared_epochs"] for n in range(18)]
    assert max(shared) == 6 or max(shared) > 0


def test_attributes_of_a_trial_are_texts_without_control_characters(client):
    found = get(client, "/studies/2/trials/0")["user_attrs"]
    assert found == {
        SCRIPT: json.dumps({SCRIPT: SCRIPT}),
        "text": SCRIPT,
        "\\x1b[31m": "red\\x1b[31m",
    }


def test_a_trial_without_attributes(client):
    assert get(client, "/studies/1/trials/0")["user_attrs"] == {}


def test_why_a_trial_failed(client):
    found = get(client, "/studies/2/trials/0")
    assert (found["error"], found["traceback"]) == (f"error: {SCRIPT}", SCRIPT)


# -- the table ------------------------------------------------------------------------


def numbers(client, **params):
    return [t["number"] for t in get(client, "/studies/1/trials", **params)["trials"]]


def test_sorted_by_a_column(client, store):
    trials = store.studies.load(1).trials
    wanted = sorted(trials, key=lambda t: (t.value, t.number))
    assert numbers(client, sort="value") == [t.number for t in wanted]
    wanted = sorted(trials, key=lambda t: (-t.value, t.number))
    assert numbers(client, sort="value", order="desc") == [t.number for t in wanted]


def test_sorted_by_a_hyper_parameter(client, store):
    width = {t.number: t.config["width"] for t in store.studies.load(1).trials}
    found = [width[n] for n in numbers(client, sort="param:width", order="desc")]
    assert found == sorted(width.values(), reverse=True)


def test_what_has_no_value_comes_last(client, store):
    info = store.studies.get("line")
    asked = TrialAsked(
        study=info.id, trial=99, target=1, config={"lr": 1}, group=0, parent=None, node=0
    )  # fmt: skip
    store.record([asked])
    for order in ("asc", "desc"):
        assert numbers(client, sort="value", order=order)[-1] == 99
        assert numbers(client, sort="param:width", order=order)[-1] == 99


def test_pages_are_all_of_it_once(client):
    parts = [numbers(client, sort="value", offset=o, limit=7) for o in (0, 7, 14, 21)]
    assert [len(part) for part in parts] == [7, 7, 4, 0]
    assert sorted(n for part in parts for n in part) == list(range(18))


def test_trials_are_filtered_by_value_state_and_text(client, store):
    report(store, value=123.0)
    page = get(client, "/studies/1/trials", low=100)
    assert ([t["number"] for t in page["trials"]], page["total"]) == ([1000], 1)
    assert 1000 not in numbers(client, high=100)
    assert numbers(client, state="failed") == []
    assert len(numbers(client, state="done")) == 18
    assert numbers(client, state="paused") == [1000]
    assert len(numbers(client, state=["done", "paused", "failed"])) == 19
    assert get(client, "/studies/1/trials/0")["state"] == "done"
    assert get(client, "/studies/1/trials/1000")["state"] == "paused"
    assert set(numbers(client, text="warmup")) == {
        t.number for t in store.studies.load(1).trials if "Warmup" in str(t.config["lr"])
    }


@pytest.mark.parametrize("sign", ["%", "_", "\\", "ü", '"', "\x00", "'"])
def test_a_text_is_looked_for_as_it_is(client, store, sign):
    info = store.studies.get("line")
    odd = {"lr": f"a{sign}b"}
    store.record([
        TrialAsked(study=info.id, trial=77, target=1, config=odd, group=0, parent=None, node=0)
    ])
    assert numbers(client, text=f"a{sign}b") == [77]
    assert numbers(client, text=f"{sign}nowhere") == []


def test_several_objectives(client, store):
    plan = store.plans.open("several", task="T").id
    spec = {"metric": ["loss", "size"], "mode": ["min", "max"], "space": {}, "max_epochs": 2}
    study = store.studies.create("several", plan=plan, spec=spec).id
    asked = TrialAsked(study=study, trial=0, target=1, config={}, group=0, parent=None, node=0)
    done = TrialReported(
        study=study, trial=0, epoch=1, value=0.5, objectives={"loss": 0.5, "size": 3.0},
        violation=0.25
    )  # fmt: skip
    store.record([asked, done])
    card = get(client, f"/studies/{study}")["study"]
    assert (card["metrics"], card["modes"]) == (["loss", "size"], ["min", "max"])
    assert card["best_value"] is None  # it breaks a constraint
    row = get(client, f"/studies/{study}/trials")["trials"][0]
    assert (row["values"], row["violation"]) == ({"size": 3.0}, 0.25)


# -- numbers that JSON has not --------------------------------------------------------


def test_what_is_not_finite_is_null(client, store):
    info = store.studies.get("line")
    node = store.studies.load(info.id).trials[0].node
    # The first record of an epoch stays, so this is a new node.
    asked = TrialAsked(
        study=info.id, trial=50, target=1, config={"lr": 0.1}, group=0, parent=None, node=node
    )  # fmt: skip
    store.record([
        EpochRecord(
            plan=info.plan, node=node, epoch=50,
            metrics={"mse": float("nan"), "other": float("inf")}, seconds=1.0, worker="w"
        ),
        asked,
        TrialReported(study=info.id, trial=50, epoch=50, value=float("inf")),
    ])  # fmt: skip
    found = get(client, "/studies/1/trials/50")
    assert found["value"] is None
    assert found["curves"]["mse"][-1] == [50, None]
    assert found["curves"]["other"][-1] == [50, None]
    for view in ("history", "curves", "parallel", "forest", "importance", "trials"):
        get(client, f"/studies/1/{view}")


# -- what changes, and what does not --------------------------------------------------


VIEWS = [
    "/revision",
    "/studies",
    "/studies/1",
    "/studies/1/revision",
    "/studies/1/history",
    "/studies/1/curves",
    "/studies/1/parallel",
    "/studies/1/importance",
    "/studies/1/forest",
    "/studies/1/workers",
    "/studies/1/trials",
    "/studies/1/trials/0",
]


@pytest.mark.parametrize("path", VIEWS)
def test_what_the_reader_has_is_not_sent_again(client, path):
    first = client.get(f"/api{path}")
    again = client.get(f"/api{path}", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["x-revision"] == first.headers["x-revision"]
    other = client.get(f"/api{path}", headers={"If-None-Match": '"other"'})
    assert (other.status_code, other.content) == (200, first.content)


def test_a_report_changes_the_revision_and_what_is_about_it(client, store):
    before = {path: client.get(f"/api{path}").headers for path in VIEWS}
    report(store)
    for path, headers in before.items():
        now = client.get(f"/api{path}").headers
        assert now["x-revision"] != headers["x-revision"]
    changed = {
        p for p, headers in before.items()
        if client.get(f"/api{p}").headers["etag"] != headers["etag"]
    }  # fmt: skip
    assert {
        "/studies/1",
        "/studies/1/trials",
        "/studies/1/history",
        "/studies/1/revision",
    } <= changed
    assert "/studies/1/workers" not in changed


@pytest.mark.parametrize("path", ["/revision", "/studies/1/revision"])
def test_a_page_is_told_when_to_ask_again(database, path, monkeypatch):
    monkeypatch.setattr("thrifty.web._app.PollThrottle", partial(PollThrottle, now=lambda: 5.0))
    with opened(database) as client:
        first = client.get(f"/api{path}")
        again = client.get(f"/api{path}", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
    # The second comes after the first, which comes no earlier than a page alone.
    assert [each.headers["x-ask-again"] for each in (first, again)] == ["2.000", "2.100"]


def test_what_happens_in_another_study_is_not_this_ones(client, store):
    before = get(client, "/studies/1/revision")
    report(store, name=SCRIPT)
    assert get(client, "/studies/1/revision") == before
    assert get(client, "/studies")["studies"][1]["num_trials"] == 2


def test_a_state_changes_the_revision(client, store):
    before = get(client, "/studies/1/revision")
    store.record([StudyMoved(study=1, state="stopped")])
    assert get(client, "/studies/1/revision") != before
    assert get(client, "/studies/1")["study"]["state"] == "stopped"


# -- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    "view", ["", "/revision", "/history", "/curves", "/forest", "/trials", "/trials/0"]
)
def test_unknown_studies(client, view):
    response = client.get(f"/api/studies/99{view}")
    assert (response.status_code, response.json()) == (
        404,
        {"detail": "there is no study number 99"},
    )


def test_unknown_trials(client):
    response = client.get("/api/studies/1/trials/99")
    assert response.json() == {"detail": "study 'line' has no trial 99"}
    assert response.status_code == 404


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "path",
    [
        "/studies/0",
        "/studies/x",
        "/studies/1.5",
        f"/studies/{2**31}",
        f"/studies/{'9' * 400}",
        "/studies/1/trials/-1",
        "/studies/1/trials?limit=501",
        "/studies/1/trials?limit=0",
        "/studies/1/trials?offset=-1",
        f"/studies/1/trials?offset={2**63}",
        "/studies/1/trials?order=sideways",
        "/studies/1/trials?state=odd",
        "/studies/1/trials?low=nan",
        "/studies/1/trials?high=inf",
        "/studies/1/trials?sort=config",
        "/studies/1/trials?sort=param:",
        "/studies/1/trials?sort=param:unknown",
        "/studies/1/trials?sort=number;drop table trials",
        f"/studies/1/trials?text={'x' * 201}",
        f"/studies/1/curves?metric={'x' * 201}",
        "/studies/1/curves?best=201",
        "/studies/1/curves?others=1001",
        "/studies/1/forest?limit=10001",
        "/studies/1/parallel?limit=5001",
        "/studies/1/history?limit=10001",
        "/studies/1/workers?since=nan",
        "/studies/1/workers?until=-1",
        "/studies/1/workers?limit=10001",
    ],
)
def test_parameters_beyond_their_limits(client, path):
    response = client.get(f"/api{path}")
    assert response.status_code == 422
    assert "detail" in response.json()


def test_a_name_that_no_statement_can_hold_is_not_sorted_by(client, store):
    plan = store.plans.open("odd", task="T").id
    spec = {"metric": "m", "mode": "min", "space": {'a"b': "?"}}
    study = store.studies.create("odd", plan=plan, spec=spec).id
    response = client.get(f"/api/studies/{study}/trials", params={"sort": 'param:a"b'})
    assert response.status_code == 422


@pytest.mark.parametrize(
    "path",
    [
        "/static/../_app.py",
        "/static/%2e%2e/_app.py",
        "/static/..%2f_app.py",
        "/static/%2e%2e%2f%2e%2e%2fcore/_errors.py",
        "/static//etc/passwd",
        "/static/js/..\\..\\_app.py",
        "/static/%00",
        "/static/",
        "/etc/passwd",
        "/api/../_app.py",
        "/docs",
        "/redoc",
    ],
)
def test_nothing_but_what_is_meant_to_be_read_is_served(client, path):
    response = client.get(path)
    assert response.status_code == 404
    assert "import" not in response.text


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
def test_nothing_can_be_written(client, method):
    for path in ("/", "/api/studies", "/api/studies/1", "/api/studies/1/trials/0"):
        assert getattr(client, method)(path).status_code == 405


def test_text_stays_text(client):
    for path in ("/studies", "/studies/2", "/studies/2/trials", "/studies/2/trials/0"):
        response = client.get(f"/api{path}")
        assert SCRIPT in response.json().__repr__().replace('\\"', '"').replace("\\'", "'")
        assert response.headers["content-type"] == "application/json"


def test_a_database_that_is_gone_is_a_message(database):
    with opened(database) as client:
        engine = create_engine(f"sqlite:///{database}")
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE trials RENAME TO gone"))
        engine.dispose()
        response = client.get("/api/studies/1/history")
    assert response.status_code == 503
    assert "the database cannot be read now" in response.json()["detail"]


def test_the_page_and_its_parts_are_there(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for name in (
        "app.css",
        "icon.svg",
        "js/main.js",
        "vendor/echarts.min.js",
        "vendor/echarts.LICENSE",
    ):
        assert client.get(f"/static/{name}").status_code == 200
    assert "http:" not in page.text
    assert "https:" not in page.text


MADE = ("/acts", "/branches", "/configurations", "/length")
"""Routes that answer with what they have made."""


def test_the_schema_is_real(database):
    schema = create_app(f"sqlite:///{database}").openapi()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            made = method == "post" and path.endswith(MADE)
            status = "201" if made else "200"
            content = operation["responses"][status]["content"]
            if path.endswith("/artifacts/{digest}"):
                assert [*content] == ["application/octet-stream"]
                continue
            answer = content["application/json"]["schema"]
            assert answer["$ref"].startswith("#/components/schemas/"), path


def test_curves_of_several_seeds_are_their_means(tmp_path):
    study = make_study(
        tmp_path, name="seeds", seeds=3, space=Space(lr=Choice([0.1, Step(0.1, [2])]))
    )
    study.run(progress=False, executor=SOLO)
    with opened(tmp_path / "t.db") as client:
        shown = get(client, "/studies/1/curves")["curves"]
        one = get(client, "/studies/1/trials/0")
        get(client, "/studies/1/forest")
        detail = get(client, "/studies/1")
    by_number = {curve["trial"]: curve["points"] for curve in shown}
    for trial in study.trials:
        assert [v for _, v in by_number[trial.number]] == pytest.approx(trial.curve)
    assert [v for _, v in one["curves"]["mse"]] == pytest.approx(study.trials[0].curve)
    assert one["value"] == study.trials[0].value
    assert one["seed_values"] == [curve[-1] for curve in study.trials[0].curves]
    assert one["sd"] == pytest.approx(study.trials[0].sd)
    assert one["interval"] == pytest.approx(study.trials[0].interval)
    assert detail["num_seeds"] == 3
    assert detail["best_interval"] == pytest.approx(study.best_trial.interval)


def test_trials_of_a_ladder_are_done_at_their_own_horizons(tmp_path):
    study = make_study(
        tmp_path,
        space=Ladder(horizons=[2, 4], rates=[0.1, 0.2], cooldown=1),
        algorithm=GridSearch(max_epochs=4),
    )
    study.run(progress=False, executor=SOLO)
    with opened(tmp_path / "t.db") as client:
        rows = get(client, "/studies/1/trials", state="done")["trials"]
        assert [(r["number"], r["horizon"]) for r in rows] == [(0, 2), (1, 4), (2, 2), (3, 4)]
        assert get(client, "/studies/1/trials", state="paused")["trials"] == []
        (line,) = get(client, "/studies/1/trials/0")["schedule"]
        assert max(line["epochs"]) <= 2  # the picture ends where the trial does


def test_the_pareto_front_is_that_of_the_study(tmp_path):
    space = Space(lr=Choice([0.02, 0.05, 0.1]), width=Choice([2, 4]), dropout=0.2)
    study = make_study(
        tmp_path,
        task=Sized(),
        space=space,
        metric=["mse", "size"],
        mode=["min", "max"],
        algorithm=GridSearch(max_epochs=2),
    ).run(progress=False, executor=SOLO)
    with opened(tmp_path / "t.db") as client:
        whole = client.get("/api/studies/1/pareto").json()
        few = client.get("/api/studies/1/pareto?limit=1").json()
    assert whole["front"] == [trial.number for trial in study.best_trials]
    assert (whole["metrics"], whole["modes"]) == (["mse", "size"], ["min", "max"])
    assert whole["total"] == len(whole["trials"]) == 6
    assert set(whole["front"]) <= set(few["trials"])
    assert len(few["trials"]) < 6
    by_number = dict(zip(whole["trials"], whole["rows"], strict=True))
    for trial in study.trials:
        assert by_number[trial.number] == [trial.value, trial.values["size"]]


def test_one_objective_has_no_pareto_front(client):
    found = client.get("/api/studies/1/pareto").json()
    assert (found["trials"], found["front"]) == ([], [])
