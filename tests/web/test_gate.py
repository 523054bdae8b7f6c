from __future__ import annotations

import pytest
from starlette.websockets import WebSocketDisconnect

from tests.web.conftest import opened


pytestmark = pytest.mark.slow


TOKEN = "a-token-of-some-length"


@pytest.fixture
def guarded(database):
    with opened(database, token=TOKEN, local_only=False) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/", "/api/studies", "/static/app.css", "/nowhere", "/api/studies/x"]
)
def test_every_answer_says_what_a_browser_may_do(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8550", "127.0.0.1:1", "[::1]:8550", "127.9.9.9"]
)
def test_this_machines_own_names_are_answered(client, host):
    assert client.get("/api/studies", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", [
        "evil.example", "localhost.evil.example", "10.0.0.1", "", "127.0.0.1.evil.example", "[::2]",
        "@localhost"
    ]
)  # fmt: skip
def test_a_name_that_was_rebound_to_this_machine_is_refused(client, host):
    for path in ("/", "/api/studies", "/static/app.css"):
        response = client.get(path, headers={"Host": host})
        assert response.status_code == 400
        assert "localhost only" in response.json()["detail"]


def test_without_the_token_nothing_is_told(guarded):
    for path in ("/", "/api/studies", "/static/app.css", "/openapi.json", "/nowhere"):
        response = guarded.get(path)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-content-type-options" in response.headers


def test_the_printed_address_lets_a_browser_in(guarded):
    response = guarded.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "./")
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert guarded.get("/").status_code == 200
    assert guarded.get("/api/studies").status_code == 200


@pytest.mark.parametrize("given", ["wrong", "", TOKEN[:-1], TOKEN + "x", "é", "\udcff", "%00"])
def test_a_wrong_token(guarded, given):
    assert guarded.get("/", params={"token": given.encode("utf-8", "replace")}).status_code == 401
    header = f"Bearer {given}".encode("utf-8", "replace")
    assert guarded.get("/api/studies", headers={"Authorization": header}).status_code == 401
    cookie = f"thrifty_80={given}".encode("utf-8", "replace")
    assert guarded.get("/api/studies", headers={"Cookie": cookie}).status_code == 401


@pytest.mark.parametrize("kind", ["Bearer", "bearer"])
def test_programs_send_it_as_a_bearer(guarded, kind):
    answer = guarded.get("/api/studies", headers={"Authorization": f"{kind} {TOKEN}"})
    assert answer.status_code == 200
    assert (
        guarded.get("/api/studies", headers={"Authorization": f"Basic {TOKEN}"}).status_code == 401
    )


def test_the_token_in_an_address_is_for_the_first_page_only(guarded):
    assert guarded.get("/api/studies", params={"token": TOKEN}).status_code == 401
    assert guarded.post("/", params={"token": TOKEN}).status_code == 401


def test_odd_cookies_of_others_do_not_hide_ours(guarded):
    cookie = f'other={{"a": [1, 2]}}; thrifty_80={TOKEN}; =;;x'
    assert guarded.get("/api/studies", headers={"Cookie": cookie}).status_code == 200


def test_a_cookie_of_another_dashboard_is_not_ours(guarded):
    cookie = f"thrifty_81={TOKEN}"
    assert guarded.get("/api/studies", headers={"Cookie": cookie}).status_code == 401


def test_web_sockets_are_not_answered(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/"):
        pass
