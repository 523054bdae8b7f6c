"""Memberships behave as the trainer requires."""

from __future__ import annotations

import pytest

from tests.hetero.memberships import MEMBERSHIP_CHECKS, PARTIAL_CHECKS, ThreadCluster
from thrifty.hetero import ElasticMembership


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
def test_members_in_threads_conform(check):
    check(ThreadCluster().member)


@pytest.mark.parametrize("check", PARTIAL_CHECKS)
def test_members_in_threads_can_stand_by(check):
    check(ThreadCluster().member)


@pytest.mark.parametrize("check", MEMBERSHIP_CHECKS)
def test_members_at_a_lighthouse_conform(check, lighthouse):
    check(lambda name: ElasticMembership(lighthouse, name=name, timeout_s=300, quorum_s=300))
