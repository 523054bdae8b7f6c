"""Test tools for thrifty and code built on it: tiny tasks, fakes and conformance suites."""

from ._algorithms import (
    ALGORITHM_CHECKS,
    FakeStudy,
    check_algorithm,
    check_any_sign,
    check_best_is_finished,
    check_decisions,
    check_ends,
    check_everything_fails,
    check_interrupted,
    check_pure,
    check_same_seed,
    learning_curve,
    replay,
)
from ._executors import EXECUTOR_CHECKS, FaultyTask, LineTask, VirtualClock


__all__ = [
    "ALGORITHM_CHECKS",
    "EXECUTOR_CHECKS",
    "FakeStudy",
    "FaultyTask",
    "LineTask",
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
    "replay",
]
