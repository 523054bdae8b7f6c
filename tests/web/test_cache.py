from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from thrifty.web._responses import Cache, PollThrottle, ResponseService, StudyRequest
from thrifty.web.views import _models as models


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def made(cache, clock, *, stamp, cost=0.0, key="k"):
    def make():
        clock.now += cost
        return stamp

    return cache.get(key, stamp=stamp, make=make).value


def test_what_has_not_changed_is_never_made_again(clock):
    cache = Cache(patience_s=1, now=clock)
    first = cache.get("k", stamp="1", make=object)
    clock.now = 1e9
    assert cache.get("k", stamp="1", make=object) is first


def test_what_has_changed_is_made_again_after_a_while(clock):
    cache = Cache(patience_s=1, now=clock)
    assert made(cache, clock, stamp="1") == "1"
    clock.now += 0.9
    assert made(cache, clock, stamp="2") == "1"
    clock.now += 0.2
    assert made(cache, clock, stamp="2") == "2"


def test_what_is_dear_is_made_more_rarely(clock):
    cache = Cache(patience_s=1, share=0.05, now=clock)
    made(cache, clock, stamp="1", cost=2.0)
    clock.now += 39
    assert made(cache, clock, stamp="2", cost=2.0) == "1"
    clock.now += 2
    assert made(cache, clock, stamp="3", cost=2.0) == "3"


def test_without_patience_every_change_is_seen(clock):
    cache = Cache(patience_s=0, now=clock)
    assert [made(cache, clock, stamp=s, cost=5) for s in "123"] == ["1", "2", "3"]


def test_without_a_stamp_only_age_counts(clock):
    cache = Cache(patience_s=1, now=clock)
    first = cache.get("k", stamp=None, make=object)
    assert cache.get("k", stamp=None, make=object) is first
    clock.now += 1.1
    assert cache.get("k", stamp=None, make=object) is not first


def test_what_is_made_from_an_older_value_is_made_again_once_that_is_newer(clock):
    cache = Cache(patience_s=1, now=clock)

    def ask(stamp):
        return cache.get("answer", stamp=stamp, make=lambda: made(cache, clock, stamp=stamp))

    made(cache, clock, stamp="1", cost=0.1)
    assert (ask("1").value, ask("1").stamp) == ("1", "1")
    clock.now += 2  # The answer may be made again, but what it is made from is dear.
    assert ask("2").value == "1"
    assert ask("2").stamp not in ("1", "2")
    clock.now += 10
    assert (ask("2").value, ask("2").stamp) == ("2", "2")


def test_an_old_value_is_noticed_through_several_others(clock):
    cache = Cache(patience_s=1, now=clock)
    made(cache, clock, stamp="1", key="view", cost=1)
    clock.now += 2

    def forest():
        return made(cache, clock, stamp="2", key="view")

    def answer():
        return cache.get("forest", stamp="2", make=forest).value

    assert cache.get("answer", stamp="2", make=answer).value == "1"
    clock.now += 50
    assert cache.get("answer", stamp="2", make=answer).value == "2"


def test_only_so_many_are_kept_the_least_used_go_first(clock):
    cache = Cache(size=2, now=clock)
    first = cache.get("a", stamp="1", make=object)
    cache.get("b", stamp="1", make=object)
    assert cache.get("a", stamp="1", make=object) is first
    cache.get("c", stamp="1", make=object)
    assert cache.get("a", stamp="1", make=object) is first
    assert cache.get("b", stamp="1", make=lambda: "again").value == "again"


def test_many_who_ask_at_once_get_one_answer():
    cache = Cache()
    began, go_on = threading.Event(), threading.Event()
    calls = []

    def make():
        calls.append(1)
        began.set()
        go_on.wait()
        return object()

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.get("k", stamp="1", make=make)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    began.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert (len(calls), len(found), len(set(map(id, found)))) == (1, 8, 1)


def test_what_fails_is_tried_again():
    cache = Cache()

    def fail():
        raise KeyError("k")

    for _ in range(2):
        with pytest.raises(KeyError):
            cache.get("k", stamp="1", make=fail)
    assert not cache._making
    assert cache.get("k", stamp="1", make=lambda: 1).value == 1


def test_a_page_never_takes_an_old_view_of_a_study_for_its_present_revision(clock):
    stored = SimpleNamespace(state="1")

    def read(study):
        clock.now += 1.0
        return stored.state

    views = SimpleNamespace(studies=SimpleNamespace(stamp=lambda study: stored.state, get=read))
    service = ResponseService(views, Cache(now=clock), PollThrottle(now=clock))
    asked = StudyRequest(service, Request({"type": "http", "headers": []}), 7)

    def ask():
        found = asked.answer(("detail",), lambda _, view: models.Revision(revision=view))
        polled = service.revision(asked.request, 7)
        assert json.loads(polled.body)["revision"] == polled.headers["X-Revision"]
        return json.loads(found.body)["revision"], found.headers["X-Revision"]

    service.study(7)
    stored.state = "2"
    clock.now += 10
    shown, revision = ask()
    assert (shown, revision == "2") == ("1", False)
    clock.now += 50
    assert ask() == ("2", "2")
