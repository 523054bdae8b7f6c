"""Spaces are read from their texts, and nothing else is run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given

from tests.strategies import spaces
from thrifty.core import SpaceError
from thrifty.space import Branched, Choice, Constant, Schedule, Space, Step, steps
from thrifty.space._space import space_from_json


@given(spaces)
def test_a_space_is_the_one_that_was_written(space):
    found = space_from_json(space.to_json())
    assert found.to_json() == space.to_json()
    assert found.names == space.names
    assert {type(found[name]) for name in found.names} == {type(space[n]) for n in space.names}


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, "a")),
        None,
        "it's\n",
        -1e-300,
        Step(0.1, [steps(500)]),
        Branched(Constant(0.1), at=2, factor=0.3),
        Choice([True, None, (1,), "x"]),
    ],
    ids=repr,
)
def test_values_and_schedules_of_each_kind(value):
    space = Space(a=value)
    assert space_from_json(space.to_json()).to_json() == space.to_json()


@dataclass(frozen=True)
class Own(Schedule):
    """A schedule of a user."""

    value: float


@pytest.mark.parametrize(
    "text",
    [
        "Own(value=0.1)",
        "__import__('os').system('true')",
        "Choice.__subclasses__()",
        "Choice(options=(0.1,), conditions=(), **{})",
        "Schedule()",
        "Choice(options=())",
        "Step(0.1, [2])",
        "open('x')",
        "0.1 ",
        "0.10",
        "",
        "(" * 5000,
        "-" * 50_000 + "1",
        "1," * 60_000,
        "nan",
        "lambda: 0",
    ],
    ids=lambda text: text[:30],
)
def test_nothing_else_is_read(text):
    with pytest.raises(SpaceError, match="can only be read by the code of its study"):
        space_from_json({"lr": text})


@pytest.mark.parametrize("text", [None, 0.1, ["0.1"]])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(SpaceError, match="can only be read"):
        space_from_json({"lr": text})


def test_a_space_without_hyper_parameters_is_refused():
    with pytest.raises(SpaceError, match="empty"):
        space_from_json({})
