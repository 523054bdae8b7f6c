"""Memberships do what the trainer relies on."""

from __future__ import annotations

import pytest

from thrifty.hetero import ElasticMembership
from thrifty.testing.hetero import MEMBERSHIP_CHECKS, ThreadCluster


@pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
def test_threads(check):
    check(ThreadCluster().member)


@pytest.fixture
def lighthouse():
    coordination = pytest.importorskip(
        "torchft.coordination", reason="torchft is not installed"
    )
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
def test_elastic(check, lighthouse):

    check(lambda name: ElasticMembership(lighthouse, name=name, timeout_s=10, quorum_s=20))
