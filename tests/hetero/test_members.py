"""Memberships behave as the trainer requires."""

from __future__ import annotations

import pytest

from thrifty.hetero import ElasticMembership
from thrifty.testing.hetero import MEMBERSHIP_CHECKS, ThreadCluster


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
def test_threads(check):
    check(ThreadCluster().member)


@pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
def test_elastic(check, lighthouse):
    check(lambda name: ElasticMembership(lighthouse, name=name, timeout_s=300, quorum_s=300))
