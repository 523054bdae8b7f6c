"""Acts from the dashboard: what a page may ask, and that no other page can with its cookie."""

from __future__ import annotations

import itertools
import json
import sqlite3
from contextlib import closing

import pytest

from tests.web.conftest import opened
from thrifty.core import StoreWriteError, UsageError
from thrifty.space import Constant, Step
from thrifty.store import Store
from thrifty.store._steering_requests import MAX_EPOCHS
from thrifty.web import create_app, serve
from thrifty.web._app import LARGEST_BODY
from thrifty.web._steering_routes import CODE_S, MOST_CODES, Codes


pytestmark = pytest.mark.slow

TOKEN = "a-token-of-some-length"
HERE = "http://localhost"
PAGE = {"Origin": HERE, "Sec-Fetch-Site": "same-origin"}
ACTS = "/api/studies/1/acts"


@pytest.fixture
def steering(database):
    """Return a client with the cookie of a reader."""
    with opened(database, token=TOKEN, steer=True) as client:
        client.get(f"/?token={TOKEN}")
        yield client


def code_for(client, study=1):
    found = client.get(f"/api/studies/{study}/code", headers={"Sec-Fetch-Site": "same-origin"})
    assert found.status_code == 200
    assert found.headers["cache-control"] == "no-store"
    return found.json()["code"]


def note(client, *, headers=PAGE, study=1, **fields):
    body = {"kind": "note", "text": "seen", "code": code_for(client), **fields}
    return client.post(f"/api/studies/{study}/acts", json=body, headers=headers)


def written(database):
    with Store.open(f"sqlite:///{database}") as store:
        return [act for study in (1, 2) for act in store.acts.of(study)]


def test_a_page_acts_and_sees_what_was_asked(steering, database):
    before = steering.get("/api/studies/1/revision").json()["revision"]
    made = note(steering, trial=3, text="<b>odd</b>")
    assert made.status_code == 201
    assert (made.json()["kind"], made.json()["trial"], made.json()["queued"]) == ("note", 3, False)
    assert note(steering, kind="tag", text="good").status_code == 201
    shown = steering.get(ACTS).json()
    assert shown["can_act"]
    assert [act["text"] for act in shown["acts"]] == ["<b>odd</b>", "good"]
    assert steering.get("/api/studies/1/revision").json()["revision"] != before
    assert [act.kind for act in written(database)] == ["note", "tag"]


def test_a_program_acts_with_the_token_and_no_origin(database):
    with opened(database, token=TOKEN, steer=True) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        assert note(client, headers={}).status_code == 201


ATTACKS = {
    "another site": {"Origin": "http://evil.example"},
    "a site that contains our name": {"Origin": f"{HERE}.evil.example"},
    "another port of this machine": {"Origin": f"{HERE}:1234"},
    "another scheme": {"Origin": "https://localhost"},
    "a sandboxed frame": {"Origin": "null"},
    "no origin": {},
    "an empty origin": {"Origin": ""},
    "two origins": {"Origin": f"{HERE} {HERE}"},
    "a bearer of another site": {"Origin": "http://evil.example", "Authorization": "Bearer x"},
    "cross-site by its own word": {**PAGE, "Sec-Fetch-Site": "cross-site"},
    "another name of the site": {**PAGE, "Sec-Fetch-Site": "same-site"},
    "typed by hand": {**PAGE, "Sec-Fetch-Site": "none"},
    "a form": {**PAGE, "Content-Type": "application/x-www-form-urlencoded"},
    "a form with files": {**PAGE, "Content-Type": "multipart/form-data"},
    "plain text, as without a question before": {**PAGE, "Content-Type": "text/plain"},
    "a type that only looks like JSON": {**PAGE, "Content-Type": "text/json"},
}


@pytest.mark.parametrize("headers", ATTACKS.values(), ids=ATTACKS)
def test_a_request_from_elsewhere_is_refused(steering, database, headers):
    assert note(steering, headers=headers).status_code in (400, 403, 422)
    assert written(database) == []


def test_without_the_token_nothing_is_asked(steering, database):
    code = code_for(steering)
    steering.cookies.clear()
    body = {"kind": "note", "text": "seen", "code": code}
    for headers in (PAGE, {**PAGE, "Authorization": "Bearer wrong-token-of-some-length"}):
        assert steering.post(ACTS, json=body, headers=headers).status_code == 401
        assert steering.get("/api/studies/1/code", headers=headers).status_code == 401
    assert written(database) == []


def test_a_rebound_name_is_refused_with_its_own_origin(steering, database):
    headers = {**PAGE, "Host": "evil.example", "Origin": "http://evil.example"}
    assert note(steering, headers=headers).status_code == 400
    assert written(database) == []


@pytest.mark.parametrize("code", ["", "x", None, 7, "a" * 5000])
def test_a_code_that_was_never_given(steering, database, code):
    assert note(steering, code=code).status_code in (403, 422)
    assert written(database) == []


def test_a_request_that_is_sent_again_does_nothing(steering, database):
    code = code_for(steering)
    assert note(steering, code=code).status_code == 201
    assert note(steering, code=code).status_code == 403
    assert len(written(database)) == 1


def test_a_code_is_for_one_study(steering, database):
    assert note(steering, study=2, code=code_for(steering, study=1)).status_code == 403
    assert note(steering, study=1, code=code_for(steering, study=2)).status_code == 403
    assert written(database) == []


def test_other_sites_cannot_read_a_code(steering):
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert steering.get("/api/studies/1/code", headers=headers).status_code == 403
    answer = steering.get("/api/studies/1/code")
    assert "access-control-allow-origin" not in answer.headers
    asked = steering.options(
        ACTS, headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("method", ["get", "head", "put", "patch", "delete"])
def test_only_a_post_acts(steering, database, method):
    code = code_for(steering)
    steering.request(method.upper(), f"{ACTS}?kind=note&text=x&code={code}", headers=PAGE)
    assert written(database) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "delete"},
        {"kind": "stop trial", "trial": "3"},
        {"trial": -1},
        {"trial": 2**40},
        {"trial": 1.5},
        {"text": "x" * 2001},
        {"text": 7},
        {"who": "root@here"},
    ],
)
def test_a_malformed_act_is_refused(steering, database, fields):
    assert note(steering, **fields).status_code == 422
    assert written(database) == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "stop", "text": ""}, "is done"),
        ({"kind": "pause", "text": ""}, "is done"),
        ({"kind": "resume", "text": ""}, "not paused"),
        ({"kind": "note", "trial": 10_000}, "no trial 10000"),
        ({"kind": "untag"}, "no tag"),
        ({"text": " "}, "needs a text"),
    ],
)
def test_what_cannot_be_asked_now_is_said(steering, fields, told):
    answer = note(steering, **fields)
    assert answer.status_code == 409
    assert told in answer.json()["detail"]


def test_a_study_that_does_not_exist(steering):
    headers = {"Sec-Fetch-Site": "same-origin"}
    assert steering.get("/api/studies/99/code", headers=headers).status_code == 404
    assert note(steering, study=99).status_code == 404


def branch(client, *, headers=PAGE, study=1, **fields):
    body = {"trial": 1, "epoch": 2, "name": "lr", "factor": 0.3, "code": code_for(client)}
    return client.post(f"/api/studies/{study}/branches", json={**body, **fields}, headers=headers)


def enqueued(database):
    with Store.open(f"sqlite:///{database}") as store:
        return store.studies.enqueued(1)


def test_a_branch_is_enqueued_with_its_cost_before(steering, database):
    query = {"epoch": 2, "name": "lr", "factor": 0.3}
    cost = steering.get("/api/studies/1/trials/1/branch", params=query)
    assert cost.status_code == 200
    assert "factor=0.3" in cost.json()["config"]["lr"]
    assert cost.json()["known_epochs"] == 2
    assert enqueued(database) == []
    assert branch(steering).status_code == 201
    assert branch(steering).status_code == 409
    (config,) = enqueued(database)
    assert config["lr"].at == 2
    (act,) = written(database)
    assert (act.kind, act.trial, act.text) == ("branch", 1, "after epoch 2: lr times 0.3")


SCHEDULE = {"schedule": "Step", "fields": {"value": 0.1, "milestones": [1]}}


@pytest.mark.parametrize(
    ("value", "after"), [("0.02", Constant(0.02)), (json.dumps(SCHEDULE), Step(0.1, [1]))]
)
def test_a_branch_may_have_another_value_or_schedule(steering, database, value, after):
    change = {"factor": None, "value": value}
    query = {"epoch": 2, "name": "lr", "value": value}
    cost = steering.get("/api/studies/1/trials/1/branch", params=query)
    assert repr(after) in cost.json()["config"]["lr"]
    assert branch(steering, **change).status_code == 201
    (config,) = enqueued(database)
    assert config["lr"].after == after
    (act,) = written(database)
    assert act.text == f"after epoch 2: lr = {value}"


@pytest.mark.parametrize("headers", ATTACKS.values(), ids=ATTACKS)
def test_a_branch_from_elsewhere_is_refused(steering, database, headers):
    assert branch(steering, headers=headers).status_code in (400, 403, 422)
    assert enqueued(database) == []


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"trial": 10_000}, 404),
        ({"epoch": 10_000}, 409),
        ({"epoch": 0}, 422),
        ({"name": "nothing"}, 409),
        ({"factor": 1.0}, 409),
        ({"factor": "1"}, 422),
        ({"factor": None}, 409),
        ({"value": "0.5"}, 409),
        ({"factor": None, "value": "{"}, 409),
        ({"factor": None, "value": "NaN"}, 409),
        ({"factor": None, "value": '"text"'}, 409),
        ({"factor": None, "value": '{"schedule": "os.system", "fields": {}}'}, 409),
        ({"factor": None, "value": "[" * 1000}, 409),
        ({"factor": None, "value": "1" * 1001}, 422),
        ({"factor": None, "value": 0.5}, 422),
        ({"code": "x"}, 403),
        ({"study": 99}, 404),
    ],
)
def test_a_bad_branch_is_refused(steering, database, fields, status):
    assert branch(steering, **fields).status_code == status
    assert enqueued(database) == []


def enqueue(client, config, *, headers=PAGE, study=1, **fields):
    body = json.dumps({"trial": 1, "config": config, "code": code_for(client), **fields})
    headers = {"Content-Type": "application/json", **headers}
    return client.post(f"/api/studies/{study}/configurations", content=body, headers=headers)


def config_of(client, trial=1):
    return client.get(f"/api/studies/1/trials/{trial}").json()["config"]


def test_a_configuration_is_enqueued_from_that_of_a_trial(steering, database):
    changed = {
        **config_of(steering),
        "lr": {"schedule": "Step", "fields": {"value": 0.1, "milestones": [2]}},
    }
    assert enqueue(steering, changed).status_code == 201
    again = enqueue(steering, changed)
    assert (again.status_code, "enqueued already" in again.json()["detail"]) == (409, True)
    (found,) = enqueued(database)
    assert found["lr"] == Step(0.1, [2])
    (act,) = written(database)
    assert (act.kind, act.trial, act.text) == ("enqueue", 1, "lr=Step(0.1, (2,))")


@pytest.mark.parametrize("headers", ATTACKS.values(), ids=ATTACKS)
def test_a_configuration_from_elsewhere_is_refused(steering, database, headers):
    config = config_of(steering)
    assert enqueue(steering, config, headers=headers).status_code in (400, 403, 422)
    assert enqueued(database) == []


@pytest.mark.parametrize(
    ("config", "fields", "status", "told"),
    [
        ({"lr": Step(0.1, [2]).to_json()}, {"trial": 10_000}, 404, "no trial 10000"),
        ({"lr": Step(0.1, [2]).to_json()}, {"code": "x"}, 403, "reload"),
        ({"lr": 0.1}, {"study": 99}, 404, "no study"),
        ({}, {}, 409, "lacks lr"),
        ({"lr": 7.0}, {}, 409, "lr=7.0 is not in"),
        ({"lr": float("nan")}, {}, 409, "not a finite number"),
        ({"rate": 0.1}, {}, 409, "'rate' is not in the space"),
        ({"lr": {"schedule": "No"}}, {}, 409, "unknown schedule"),
        ({"lr": {"schedule": "Step", "fields": {"value": []}}}, {}, 409, "Step"),
        (
            {"lr": {"schedule": "Branched", "fields": {"before": 0.1, "after": 0.5, "at": 10**6}}},
            {},
            409,
            "epochs",
        ),
        ([0.1], {}, 422, "config"),
        ("lr", {}, 422, "config"),
    ],
)
def test_a_bad_configuration_is_refused(steering, database, config, fields, status, told):
    whole = {**config_of(steering), **config} if isinstance(config, dict) and config else config
    found = enqueue(steering, whole, **fields)
    assert (found.status_code, told in found.text) == (status, True)
    assert enqueued(database) == []


def test_a_space_that_only_code_can_read_takes_no_configurations(steering, database):
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("""update studies set spec = json_set(spec, '$.space.lr', 'Own(0.1)')""")
    found = enqueue(steering, config_of(steering))
    assert (found.status_code, "by the code of its study" in found.json()["detail"]) == (409, True)


def longer(client, *, headers=PAGE, study=1, **fields):
    body = {"max_epochs": 12, "code": code_for(client), **fields}
    return client.post(f"/api/studies/{study}/length", json=body, headers=headers)


def test_longer_trials_are_requested_from_a_page(steering, database):
    made = longer(steering)
    assert made.status_code == 201
    assert (made.json()["kind"], made.json()["text"]) == ("lengthen", "12")
    assert made.json()["queued"]
    assert longer(steering, max_epochs=20).status_code == 201
    (shown, _) = steering.get(ACTS).json()["acts"]
    assert shown == made.json()
    assert [(act.kind, act.max_epochs) for act in written(database)] == [
        ("lengthen", 12),
        ("lengthen", 20),
    ]


@pytest.mark.parametrize("headers", ATTACKS.values(), ids=ATTACKS)
def test_longer_trials_from_elsewhere_are_refused(steering, database, headers):
    assert longer(steering, headers=headers).status_code in (400, 403, 422)
    assert written(database) == []


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_epochs": 6}, 409),
        ({"max_epochs": 1}, 409),
        ({"max_epochs": 0}, 422),
        ({"max_epochs": -8}, 422),
        ({"max_epochs": MAX_EPOCHS + 1}, 422),
        ({"max_epochs": 12.0}, 422),
        ({"max_epochs": 12.5}, 422),
        ({"max_epochs": "12"}, 422),
        ({"max_epochs": True}, 422),
        ({"max_epochs": None}, 422),
        ({"max_epochs": [12]}, 422),
        ({"trial": 1}, 422),
        ({"who": "root@here"}, 422),
        ({"code": None}, 422),
        ({"code": "x"}, 403),
        ({"study": 2}, 403),
        ({"study": 99}, 404),
    ],
)
def test_bad_longer_trials_are_refused(steering, database, fields, status):
    answer = longer(steering, **fields)
    assert answer.status_code == status
    if status == 409:
        told = f"study 'line' trains 6 epochs already, and got max_epochs={fields['max_epochs']}"
        assert told in answer.json()["detail"]
    assert written(database) == []


def test_longer_trials_without_a_field_or_a_second_time(steering, database):
    for body in ({"max_epochs": 12}, {"code": code_for(steering)}, {}, [], 12):
        answer = steering.post("/api/studies/1/length", json=body, headers=PAGE)
        assert answer.status_code == 422
    code = code_for(steering)
    assert longer(steering, code=code).status_code == 201
    assert longer(steering, code=code, max_epochs=20).status_code == 403
    assert len(written(database)) == 1


def test_an_act_of_another_kind_cannot_request_longer_trials(steering, database):
    assert note(steering, kind="lengthen", text="12").status_code == 422
    assert note(steering, kind="extend", text="12").status_code == 422
    assert written(database) == []


def test_longer_trials_of_a_database_that_cannot_be_written(steering, monkeypatch):
    def full(*_, **__):
        raise StoreWriteError("the disk is full")

    monkeypatch.setattr("thrifty.web._steering_routes.ask_longer", full)
    answer = longer(steering)
    assert (answer.status_code, answer.json()["detail"]) == (503, "the disk is full")


def test_a_dashboard_that_only_shows(database):
    with opened(database, token=TOKEN) as client:
        client.get(f"/?token={TOKEN}")
        assert not client.get(ACTS).json()["can_act"]
        assert client.get("/api/studies/1/code").status_code == 403
        body = {"kind": "note", "text": "seen", "code": "x"}
        assert client.post(ACTS, json=body, headers=PAGE).status_code == 403
        body = {"max_epochs": 12, "code": "x"}
        answer = client.post("/api/studies/1/length", json=body, headers=PAGE)
        assert answer.status_code == 403
        assert "read-only" in answer.json()["detail"]
    assert written(database) == []


def test_a_database_that_cannot_be_written(steering, monkeypatch):
    def full(*_, **__):
        raise StoreWriteError("the disk is full")

    monkeypatch.setattr("thrifty.web._steering_routes.ask", full)
    answer = note(steering)
    assert (answer.status_code, answer.json()["detail"]) == (503, "the disk is full")


def test_steering_needs_a_token_also_on_this_machine(database):
    with pytest.raises(UsageError, match="needs a token, also on this machine"):
        create_app(f"sqlite:///{database}", steer=True)
    server = serve(f"sqlite:///{database}", port=0, steer=True)
    server.socket.close()
    assert "?token=" in server.address


def test_codes_end_and_do_not_pile_up():
    clock = itertools.count()
    codes = Codes(now=lambda: float(next(clock)))
    first = codes.issue(1)
    for _ in range(MOST_CODES):
        last = codes.issue(1)
    assert not codes.use(first, study=1)
    clock = itertools.count(int(2 * CODE_S))
    assert not codes.use(last, study=1)


ODD = {
    "no number": b'{"kind": "note", "text": NaN, "code": "x"}',
    "half a character": b'{"kind": "\\ud800", "text": "x", "code": "x"}',
    "a name that is no text": b'{"\\ud800": 1}',
    "too large a number": b'{"kind": "note", "trial": 1e400, "code": "x"}',
    "no text": b"\xff\xfe",
    "deep": b"[" * 5000,
}


@pytest.mark.parametrize("steer", [True, False])
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_odd_bodies_are_refused_and_not_repeated(database, body, kind, steer):
    with opened(database, token=TOKEN, steer=steer) as client:
        client.get(f"/?token={TOKEN}")
        said = client.post(ACTS, content=body, headers={**PAGE, "Content-Type": kind})
        assert said.status_code in (400, 403, 422)
        assert said.json()["detail"]
        assert len(said.content) < 1000


def test_large_bodies_are_not_read(steering, database):
    large = b'{"kind": "note", "code": "x", "text": "' + b"x" * LARGEST_BODY + b'"}'
    headers = {**PAGE, "Content-Type": "application/json"}
    assert steering.post(ACTS, content=large, headers=headers).status_code == 413
    assert steering.post(ACTS, content=iter([large]), headers=headers).status_code == 411
    odd = {**headers, "Content-Length": "9" * 30}
    assert steering.post(ACTS, content=b"{}", headers=odd).status_code == 413
    assert note(steering, text="\U0001f600" * 2000).status_code == 201
    assert len(written(database)) == 1
