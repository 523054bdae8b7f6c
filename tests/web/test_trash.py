"""Deleting and restoring studies from the dashboard, and that no other page can."""

from __future__ import annotations

import pytest

from tests.web.conftest import opened
from tests.web.test_steering import (
    ATTACKS,
    PAGE,
    TOKEN,
    code_for,
    steering,  # noqa: F401 (a fixture)
)
from thrifty.core import StoreWriteError
from thrifty.store import Store


pytestmark = pytest.mark.slow


def delete(client, *, headers=PAGE, study=1, **fields):
    body = {"name": "line", "code": code_for(client), **fields}
    return client.post(f"/api/studies/{study}/delete", json=body, headers=headers)


def code_of_deleted(client, number=1):
    found = client.get(f"/api/deleted/{number}/code", headers={"Sec-Fetch-Site": "same-origin"})
    assert found.headers["cache-control"] == "no-store"
    return found.json()["code"]


def restore(client, *, headers=PAGE, number=1, **fields):
    body = {"code": code_of_deleted(client), **fields}
    return client.post(f"/api/deleted/{number}/restore", json=body, headers=headers)


def names(database):
    """Return the names of the studies, and of those that can be restored."""
    with Store.open(f"sqlite:///{database}") as store:
        live = [
            study.name for study in store.studies.list() if study.id == 1 or len(study.name) < 9
        ]
        return live, [study.name for study in store.trash.list()]


def test_a_study_is_deleted_and_restored(steering, database):  # noqa: F811
    before = steering.get("/api/studies/1/trials").json()
    revision = steering.get("/api/revision").json()["revision"]
    assert steering.get("/api/deleted").json() == {"studies": [], "can_act": True}
    found = delete(steering)
    assert found.status_code == 200
    assert found.json()["num_trials"] == before["total"]
    assert steering.get("/api/studies/1").status_code == 404
    assert steering.get("/api/revision").json()["revision"] != revision
    (listed,) = steering.get("/api/deleted").json()["studies"]
    assert listed == found.json()
    assert names(database) == ([], ["line"])
    assert restore(steering).json() == {"name": "line"}
    assert names(database) == (["line"], [])
    assert steering.get("/api/deleted").json()["studies"] == []
    number = next(
        s["id"] for s in steering.get("/api/studies").json()["studies"] if s["name"] == "line"
    )
    assert steering.get(f"/api/studies/{number}/trials").json() == before


@pytest.mark.sample(5)
@pytest.mark.parametrize("headers", ATTACKS.values(), ids=ATTACKS)
def test_requests_from_elsewhere_are_refused(steering, database, headers):  # noqa: F811
    assert delete(steering, headers=headers).status_code in (400, 403, 422)
    assert names(database) == (["line"], [])
    assert delete(steering).status_code == 200
    assert restore(steering, headers=headers).status_code in (400, 403, 422)
    assert names(database) == ([], ["line"])


def test_without_the_token_nothing_is_deleted(steering, database):  # noqa: F811
    code = code_for(steering)
    steering.cookies.clear()
    body = {"name": "line", "code": code}
    for headers in (PAGE, {**PAGE, "Authorization": "Bearer wrong-token-of-some-length"}):
        found = steering.post("/api/studies/1/delete", json=body, headers=headers)
        assert found.status_code == 401
        assert steering.get("/api/deleted/1/code", headers=headers).status_code == 401
        assert steering.get("/api/deleted", headers=headers).status_code == 401
    assert names(database) == (["line"], [])


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"name": "lin"}, 409),
        ({"name": ""}, 409),
        ({"name": "LINE"}, 409),
        ({"name": None}, 422),
        ({"name": "x" * 2001}, 422),
        ({"code": "x"}, 403),
        ({"code": 7}, 422),
        ({"yes": True}, 422),
        ({"study": 2}, 403),
        ({"study": 99}, 404),
        ({"study": 0}, 422),
        ({"study": "line"}, 422),
    ],
)
def test_a_bad_request_deletes_nothing(steering, database, fields, status):  # noqa: F811
    assert delete(steering, **fields).status_code == status
    assert names(database) == (["line"], [])


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["get", "head", "put", "patch", "delete"])
def test_only_a_post_deletes(steering, database, method):  # noqa: F811
    code = code_for(steering)
    path = f"/api/studies/1/delete?name=line&code={code}"
    assert steering.request(method.upper(), path, headers=PAGE).status_code == 405
    assert steering.request("DELETE", "/api/studies/1", headers=PAGE).status_code == 405
    assert names(database) == (["line"], [])


def test_codes_are_for_one_thing_and_one_use(steering, database):  # noqa: F811
    code = code_for(steering)
    assert delete(steering, code=code, name="other").status_code == 409
    assert delete(steering, code=code).status_code == 403, "it was used"
    assert delete(steering, code=code_of_deleted(steering)).status_code == 403
    assert delete(steering).status_code == 200
    assert restore(steering, code=code_for(steering, study=2)).status_code == 403
    code = code_of_deleted(steering)
    assert restore(steering, code=code).status_code == 200
    assert restore(steering, code=code).status_code == 403
    assert restore(steering).status_code == 404
    assert names(database)[0] == ["line"]


def test_what_cannot_be_done_now_is_said(steering, database, monkeypatch):  # noqa: F811
    with Store.open(f"sqlite:///{database}") as store:
        info = store.studies.get("line")
        with store.lease(info):
            found = delete(steering)
        assert (found.status_code, "stop that process" in found.json()["detail"]) == (409, True)
        assert delete(steering).status_code == 200
        store.studies.create("line", plan=info.plan, spec={})
    found = restore(steering)
    assert (found.status_code, "another name" in found.json()["detail"]) == (409, True)

    def full(*_, **__):
        raise StoreWriteError("the disk is full")

    monkeypatch.setattr("thrifty.store._trash._write_back", full)
    found = restore(steering)
    assert (found.status_code, found.json()["detail"]) == (503, "the disk is full")


def test_a_dashboard_that_only_shows(database):
    with opened(database, token=TOKEN) as client:
        client.get(f"/?token={TOKEN}")
        assert client.get("/api/deleted").json() == {"studies": [], "can_act": False}
        body = {"name": "line", "code": "x"}
        assert client.post("/api/studies/1/delete", json=body, headers=PAGE).status_code == 403
        assert client.get("/api/deleted/1/code").status_code == 403
        body = {"code": "x"}
        assert client.post("/api/deleted/1/restore", json=body, headers=PAGE).status_code == 403
    assert names(database) == (["line"], [])
