"""Errors where workers cannot meet. Meetings that succeed are tested in ``test_members``."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from thrifty.core import HeteroError, MissingExtraError, PeerLostError, TooFewWorkersError
from thrifty.hetero import ElasticMembership
from thrifty.hetero.workers import _elastic


pytestmark = pytest.mark.slow


coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")

LIMIT_S = 300.0
"""Limit in seconds for waits that end by themselves."""


class Hurried:
    """A clock on which a worker's wait for others is over at the first check.

    It is read when the wait begins, when the lighthouse is asked, and when the lighthouse has
    answered.
    """

    def __init__(self):
        self._looks = threading.local()

    def monotonic(self):
        self._looks.num = getattr(self._looks, "num", 0) + 1
        return 0.0 if self._looks.num <= 2 else 1e9


@pytest.fixture
def member(lighthouse):
    """Return a factory of workers that are closed at the end of the test."""
    made = []

    def make(name, **options):
        made.append(ElasticMembership(lighthouse, name=name, **{"timeout_s": LIMIT_S, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_lighthouse_has_to_be_known(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(HeteroError, match=r"no lighthouse is known.*TORCHFT_LIGHTHOUSE"):
        ElasticMembership()


def test_the_environment_names_the_lighthouse(monkeypatch, lighthouse):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse)
    monkeypatch.setenv("RANK", "3")
    one, two = ElasticMembership(timeout_s=LIMIT_S), ElasticMembership(timeout_s=LIMIT_S)
    try:
        assert one.name.startswith("3-")
        assert one.name != two.name
    finally:
        one.close()
        two.close()


def test_a_lighthouse_has_to_answer():
    # No process listens at port 1.
    with pytest.raises(HeteroError, match=r"lighthouse http://127\.0\.0\.1:1 does not answer"):
        ElasticMembership("http://127.0.0.1:1", timeout_s=0.5)


def test_without_torchft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(MissingExtraError, match=r"torchft is not installed.*\.\[elastic\]"):
        ElasticMembership("http://127.0.0.1:1")


def test_fewer_workers_than_asked_for_are_too_few(member, monkeypatch):
    alone = member("a", min_workers=2, quorum_s=LIMIT_S)
    monkeypatch.setattr(_elastic, "time", Hurried())
    with pytest.raises(
        TooFewWorkersError, match=r"1 of at least 2 workers are there; waited for 300 s"
    ):
        alone.agree(step=0)


@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_a_lighthouse_that_agrees_to_nothing_is_not_waited_for_longer(member):
    with pytest.raises(
        TooFewWorkersError,
        match=r"no agreement on who takes part within 0.5 s: is the lighthouse .* alive",
    ):
        member("a", quorum_s=0.5).agree(step=0)


def test_a_worker_that_cannot_be_reached_is_done_without(member, lighthouse):
    """The first of two workers names a store that does not answer, and dies."""
    mine = member("b", timeout_s=1.5, quorum_s=LIMIT_S)
    client = coordination.LighthouseClient(lighthouse, timedelta(seconds=LIMIT_S))
    client.heartbeat("a")
    dead = threading.Thread(
        target=lambda: client.quorum(
            "a",
            timedelta(seconds=LIMIT_S),
            address="a",
            store_address="127.0.0.1:1",
            step=0,
            world_size=1,
            data={"attempt": 0, "starts": True},
        )
    )
    dead.start()
    assert mine.agree(step=0).names == ("b",)
    dead.join()


def test_workers_that_cannot_be_reached_at_all_are_named(member, monkeypatch):
    mine = member("b")

    def refused(*_):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(mine, "_join", refused)
    with pytest.raises(TooFewWorkersError, match="the workers b could not be reached, in 10 tries"):
        mine.agree(step=0)


def test_exchanges_that_fail_are_said(member):
    """Exchanges fail with a ``PeerLostError`` when the other worker agrees and then leaves."""
    pair = {name: member(name) for name in ("a", "b")}
    agreed = [
        threading.Thread(target=lambda each=each: each.agree(step=0)) for each in pair.values()
    ]
    for thread in agreed:
        thread.start()
    for thread in agreed:
        thread.join()
    pair["b"].close()
    with pytest.raises(PeerLostError, match="a sum over all workers failed"):
        pair["a"].all_reduce(torch.ones(1))
    with pytest.raises(PeerLostError, match="a broadcast to all workers failed"):
        pair["a"].broadcast(torch.ones(1), source=1)


def test_who_does_not_start_a_job_joins_one(lighthouse, monkeypatch):
    """Two late workers do not restart a finished job; with one that may start, all three train."""
    late = [
        ElasticMembership(lighthouse, name=name, starts=False, quorum_s=LIMIT_S)
        for name in ("late", "later")
    ]
    with ThreadPoolExecutor(2) as pool, monkeypatch.context() as patched:
        patched.setattr(_elastic, "time", Hurried())
        jobs = [pool.submit(member.agree, step=0) for member in late]
        for job in jobs:
            with pytest.raises(TooFewWorkersError, match="no job to join"):
                job.result()
    first = ElasticMembership(lighthouse, name="first")
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(member.agree, step=0) for member in (first, *late)]
        views = [job.result() for job in jobs]
    for member in (first, *late):
        member.close()
    assert {view.names for view in views} == {("first", "late", "later")}


def test_a_worker_that_dies_before_it_is_met_is_done_without(lighthouse, monkeypatch):
    """A worker answers the lighthouse and leaves; the others try again without it."""
    monkeypatch.setattr(_elastic, "_CONNECT_S", 1.0)
    one, two = (
        ElasticMembership(lighthouse, name=name, quorum_s=LIMIT_S) for name in ("one", "two")
    )

    def gone():
        two._ask(0, time.monotonic() + LIMIT_S)
        two.close()

    with ThreadPoolExecutor(2) as pool:
        dying, alive = pool.submit(gone), pool.submit(one.agree, step=0)
        dying.result()
        view = alive.result()
    one.close()
    assert view.names == ("one",)
