from __future__ import annotations

import math
import sys

import pytest
from hypothesis import assume, given, strategies as st

from thrifty.core import TaskError, UsageError
from thrifty.search import GridSearch
from thrifty.space import Space
from thrifty.study import Bound, Study, at_least, at_most
from thrifty.study._goals import Goals, is_better_smaller
from thrifty.testing import LineTask


finite = st.floats(allow_nan=False, allow_infinity=False)
limits = st.floats(-100, 100)


def goals(mode="max", **constraints) -> Goals:
    return Goals.of("a", mode, constraints=constraints)


def deb(one, other) -> bool:
    """Order trials as Deb words it; a trial is its metric and its violation."""
    if not one[1] and not other[1]:
        return one[0] > other[0]
    if not one[1] or not other[1]:
        return not one[1]
    return one[1] < other[1]


def apart(a: float, b: float) -> bool:
    """Return whether two numbers differ by more than rounding."""
    return a == b or not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-290)


@given(finite, finite, finite, finite, limits, st.sampled_from(["max", "min"]))
def test_scores_are_in_debs_order(a, b, x, y, limit, mode):
    wanted = goals(mode, x=limit)
    one, other = {"a": a, "x": x}, {"a": b, "x": y}
    v, w = wanted.violation(one), wanted.violation(other)
    assume(apart(a, b) and apart(1 + v, 1 + w) and (v == w or abs(v - w) > 1e-12))
    better = deb((wanted.sign * a, v), (wanted.sign * b, w))
    assert (wanted.score(one) > wanted.score(other)) == better


@given(finite, finite, limits)
def test_a_finite_score_stays_finite(a, x, limit):
    score = goals(x=limit).score({"a": a, "x": x})
    assert math.isfinite(score)
    assert math.isfinite(goals(x=limit).violation({"a": a, "x": x}))


@given(finite, st.sampled_from(["max", "min"]))
def test_without_constraints_the_score_is_the_metric(a, mode):
    assert goals(mode).score({"a": a}) == (a if mode == "max" else -a)


@given(finite, finite)
def test_a_limit_is_kept_or_broken(x, limit):
    assert (at_most(limit).excess(x) == 0) == (x <= limit)
    assert (at_least(limit).excess(x) == 0) == (x >= limit)


def test_violations_are_shares_of_the_limits_and_add_up():
    wanted = goals(ms=4.0, recall=at_least(0.8), zero=0)
    broken = wanted.violation({"a": 1.0, "ms": 6.0, "recall": 0.4, "zero": 0.25})
    assert broken == pytest.approx(0.5 + 0.5 + 0.25)
    assert wanted.violation({"a": 1.0, "ms": 4.0, "recall": 0.8, "zero": -3.0}) == 0


def test_violations_beyond_all_bounds_are_numbers():
    wanted = goals(x=at_most(sys.float_info.min), y=1e-300)
    metrics = {"a": 1.0, "x": sys.float_info.max, "y": sys.float_info.max}
    assert wanted.violation(metrics) == sys.float_info.max


@pytest.mark.parametrize("metrics", [{"a": math.nan, "x": 0.0}, {"a": 1.0, "x": math.inf}])
def test_what_is_not_finite_is_the_worst(metrics):
    assert goals(x=1).score(metrics) == -math.inf


def test_a_missing_metric_is_named():
    with pytest.raises(TaskError, match="the study's metric 'a' is not among"):
        goals().check({"b"})
    with pytest.raises(TaskError, match="the study's constrained metric 'x' is not among"):
        goals(x=1).check({"a"})


@pytest.mark.parametrize(
    ("metric", "mode", "constraints", "message"),
    [
        (3, "max", None, "a metric's name, or a list of names"),
        (["a", 3], ["max", "max"], None, "a metric's name, or a list of names"),
        ([], [], None, "at least one metric"),
        (["a", "a"], ["max", "max"], None, "each only once"),
        ("a", "best", None, '"max" or "min"'),
        ("a", 3, None, '"max" or "min"'),
        (["a", "b"], "max", None, "give each metric its"),
        ("a", "max", ["b"], r"write \{"),
        ("a", "max", {"b": "5"}, "a constraint is '5'"),
        ("a", "max", {"b": math.nan}, "a constraint is nan"),
    ],
)
def test_arguments_that_say_nothing(metric, mode, constraints, message):
    with pytest.raises(UsageError, match=message):
        Goals.of(metric, mode, constraints=constraints)


@pytest.mark.parametrize("make", [at_most, at_least])
@pytest.mark.parametrize("limit", [math.inf, True, "5"])
def test_a_limit_is_a_finite_number(make, limit):
    with pytest.raises(UsageError, match="must be a finite number"):
        make(limit)


def test_bounds_are_values():
    assert at_most(5.0) == Bound("at_most", 5.0)
    assert len({at_least(1.0), at_least(1.0)}) == 1


def study_of(metric, mode=None):
    return Study(
        LineTask(),
        Space(lr=0.1),
        algorithm=GridSearch(max_epochs=1),
        metric=metric,
        mode=mode,
        storage="sqlite://",
        name="line",
    )


def warned(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "thrifty.study._study"]


def test_a_loss_that_is_maximised_by_default_is_said_once(caplog):
    study = study_of("mse")
    assert (study.mode, warned(caplog)) == ("max", [])
    study.plan()
    study.run(progress=False)
    study.run(progress=False)
    assert warned(caplog) == [
        (
            "study 'line' maximises 'mse', because mode was not given, but its name says that "
            'smaller is better; pass mode="min" to minimise it (or mode="max" to keep this)'
        )
    ]


@pytest.mark.parametrize("mode", ["min", "max", ["max"]])
def test_a_mode_that_is_given_is_not_doubted(caplog, mode):
    study_of("mse", mode).run(progress=False)
    assert warned(caplog) == []


@pytest.mark.parametrize(
    ("metric", "is_small"),
    [
        ("valid_loss", True),
        ("val/RMSE", True),
        ("test.error", True),
        ("eval-ppl", True),
        ("ema_nll", True),
        ("accuracy", False),
        ("lossless", False),
        ("terror", False),
        ("neg_log_loss", False),
        ("", False),
    ],
)
def test_names_of_which_smaller_is_better(metric, is_small):
    assert is_better_smaller(metric) == is_small
