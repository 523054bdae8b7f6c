"""Test tools for thrifty and code built on it: tiny tasks, fakes and conformance suites."""

from ._algorithms import (
    ALGORITHM_CHECKS as ALGORITHM_CHECKS,
    FakeStudy as FakeStudy,
    check_algorithm as check_algorithm,
    check_any_sign as check_any_sign,
    check_best_is_finished as check_best_is_finished,
    check_decisions as check_decisions,
    check_ends as check_ends,
    check_everything_fails as check_everything_fails,
    check_interrupted as check_interrupted,
    check_pure as check_pure,
    check_same_seed as check_same_seed,
    learning_curve as learning_curve,
    replay as replay,
)
from ._clock import VirtualClock as VirtualClock
from ._executors import EXECUTOR_CHECKS as EXECUTOR_CHECKS
from ._postgresql import (
    FlakyProxy as FlakyProxy,
    PrivatePostgreSQL as PrivatePostgreSQL,
    postgresql_programs as postgresql_programs,
)
from ._stores import STORE_CHECKS as STORE_CHECKS
from ._tasks import FaultyTask as FaultyTask, LineTask as LineTask


__all__ = [
    "ALGORITHM_CHECKS",
    "EXECUTOR_CHECKS",
    "STORE_CHECKS",
    "FakeStudy",
    "FaultyTask",
    "FlakyProxy",
    "LineTask",
    "PrivatePostgreSQL",
    "VirtualClock",
    "check_algorithm",
    "check_any_sign",
    "check_best_is_finished",
    "check_decisions",
    "check_ends",
    "check_everything_fails",
    "check_interrupted",
    "check_pure",
    "check_same_seed",
    "learning_curve",
    "postgresql_programs",
    "replay",
]
