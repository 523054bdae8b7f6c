"""The search space in words."""

from __future__ import annotations

import pytest

from thrifty.space import Choice, Float, Int, Space, Step
from thrifty.web.views._study_views import parameters


def told(**space):
    return [(p.kind, p.options, p.when) for p in parameters(Space(**space).to_json())]


def test_ranges_are_told_with_scale_and_step():
    assert told(a=Float(1e-4, 0.1, log=True), b=Float(0, 1, step=0.1), c=Int(32, 256)) == [
        ("real number", ["0.0001 to 0.1 (log)"], ""),
        ("real number", ["0 to 1 in steps of 0.1"], ""),
        ("whole number", ["32 to 256"], ""),
    ]


def test_conditions_are_told_apart_from_the_range():
    _, momentum = told(
        optimizer=Choice(["sgd", "adam"]), momentum=Float(0.8, 0.99).when(optimizer="sgd")
    )
    assert momentum == ("real number", ["0.8 to 0.99"], "optimizer is sgd")


def test_options_and_schedules_are_told_without_the_names_of_fields():
    lr = Step(Float(1e-4, 0.1, log=True), [Int(2, 10)], gamma=Choice([0.1, 0.3]))
    assert told(lr=lr, width=Choice([16, 32]), seed=3) == [
        ("schedule", ["Step(0.0001 to 0.1 (log), [2 to 10], gamma=0.1 or 0.3)"], ""),
        ("choice", ["16", "32"], ""),
        ("fixed", ["3"], ""),
    ]


@pytest.mark.parametrize("record", ["<b>", "Choice(", "(" * 30_000, "-" * 9_000 + "1", "\x00"])
def test_a_record_that_is_not_understood_is_shown_as_it_is(record):
    (found,) = parameters({"a": record})
    assert (found.kind, found.options, found.domain) == ("", [record], record)


@pytest.mark.parametrize("record", ["Choice()", "Float()", "Choice(...)", "a.b(1, *c, **d)"])
def test_a_record_of_another_shape_is_told_somehow(record):
    (found,) = parameters({"a": record})
    assert found.options
