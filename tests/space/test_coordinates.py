from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.strategies import domains, floats, ints, plain_values, schedules, seeds
from thrifty.core import SpaceError
from thrifty.space import (
    Choice,
    Constant,
    Coordinate,
    Coordinates,
    Cosine,
    Float,
    Int,
    MultiStep,
    Space,
    Step,
    Warmup,
)


pytestmark = pytest.mark.slow


NESTED = Space(
    lr=Choice([
        Constant(Float(1e-4, 1e-1, log=True)),
        Step(Choice([0.1, 0.05]), [Int(10, 30, step=10)], gamma=Float(0.1, 0.5, step=0.1)),
        Warmup(Int(1, 5), Choice([0.1, Float(0.2, 0.3), Cosine(Float(0.2, 0.3))])),
        0.01,
    ]),
    kind=Choice(["sgd", "adam"]),
    momentum=Float(0.8, 0.99).when(kind="sgd"),
    width=64,
)
"""A space of nested schedules and choices, conditions, steps, logarithms, and a fixed value."""


@st.composite
def shapes(draw, depth=2):
    """Draw nested domains and schedules."""
    kind = draw(st.sampled_from(["plain", "choice", "tuple", "constant", "warmup", "steps"]))
    if kind == "plain" or not depth:
        return draw(st.one_of(domains, plain_values, schedules))
    if kind == "warmup":
        return Warmup(Int(1, 3), draw(domains))
    inside = st.lists(shapes(depth - 1), min_size=1, max_size=3, unique_by=repr).map(tuple)
    if kind == "choice":
        return Choice(draw(inside))
    if kind == "tuple":  # a nested schedule would be refused
        return draw(st.lists(st.one_of(floats, ints, plain_values), max_size=3).map(tuple))
    levels = draw(inside)
    if kind == "constant" or len(levels) < 2:
        return Constant(levels[0])
    return MultiStep(levels[:2], milestones=(Int(1, 4),))


@st.composite
def spaces(draw):
    rest = draw(st.dictionaries(st.sampled_from(["lr", "width"]), shapes(), max_size=2))
    return Space(
        momentum=draw(domains).when(kind="sgd"),
        kind=Choice(draw(st.permutations(["sgd", "adam"]))),
        **rest,
    )


def same(one, other):
    """Return whether two values are equal, numbers up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12 * 2e3)
    return one == other and type(one) is type(other)


@given(spaces(), seeds)
def test_values_give_the_configuration_back(space, seed):
    config = space.sample(np.random.default_rng(seed))
    flat = Coordinates(space)
    values = flat.values(config)
    again = flat.compose(lambda coordinate: values[coordinate.name])
    assert list(again) == list(config)
    assert repr(again) == repr(config)


@given(spaces(), seeds)
def test_the_unit_cube_gives_the_configuration_back(space, seed):
    flat = Coordinates(space)
    values = flat.values(space.sample(np.random.default_rng(seed)))
    point = flat.to_unit(flat.compose(lambda coordinate: values[coordinate.name]))
    assert np.all(np.isnan(point) | ((point >= 0) & (point <= 1)))
    again = flat.values(flat.from_unit(point))
    assert (
        again.keys()
        == values.keys()
        == {name for name, place in zip(flat.names, point, strict=True) if not math.isnan(place)}
    )
    for coordinate in flat.coordinates:
        one, other = again.get(coordinate.name), values.get(coordinate.name)
        exact = isinstance(coordinate.domain, Int | Choice) or coordinate.domain.step is not None
        assert (one == other) if exact else same(one, other)


@given(spaces(), seeds)
def test_every_point_of_the_cube_is_a_configuration(space, seed):
    flat = Coordinates(space)
    config = flat.from_unit(np.random.default_rng(seed).random(len(flat.names)) * 1.2 - 0.1)
    assert flat.values(config)


def test_names_and_what_they_are():
    flat = Coordinates(NESTED)
    assert flat.names == (
        "lr",
        "lr[0].value",
        "lr[1].value",
        "lr[1].milestones[0]",
        "lr[1].gamma",
        "lr[2].epochs",
        "lr[2].schedule",
        "lr[2].schedule[1]",
        "lr[2].schedule[2].value",
        "kind",
        "momentum",
    )
    assert flat.is_choice.tolist() == [
        name in {"lr", "lr[1].value", "lr[2].schedule", "kind"} for name in flat.names
    ]
    assert len(flat) == 11
    assert flat.num_options.tolist() == [4, 0, 2, 0, 0, 0, 3, 0, 0, 2, 0]
    assert flat.coordinates[9] == Coordinate(name="kind", domain=Choice(["sgd", "adam"]))


def test_only_what_is_there_is_asked_for():
    asked = []

    def pick(coordinate):
        asked.append(coordinate.name)
        return {"lr": 3, "kind": 1}[coordinate.name]

    assert Coordinates(NESTED).compose(pick) == {"lr": 0.01, "kind": "adam", "width": 64}
    assert asked == ["lr", "kind"]


def test_a_plain_value_where_a_schedule_is_expected_is_found():
    config = {"lr": Warmup(2, Constant(0.25)), "kind": "adam", "width": 64}
    assert Coordinates(NESTED).values(config) == {
        "lr": 2,
        "lr[2].epochs": 2,
        "lr[2].schedule": 1,
        "lr[2].schedule[1]": 0.25,
        "kind": 1,
    }


def test_the_first_option_that_fits_is_taken():
    flat = Coordinates(Space(lr=Choice([Float(0.0, 1.0), Float(0.5, 2.0), (1, 2)])))
    assert flat.values({"lr": 0.7}) == {"lr": 0, "lr[0]": 0.7}
    assert flat.values({"lr": 1.7}) == {"lr": 1, "lr[1]": 1.7}
    assert flat.values({"lr": [1, 2]}) == {"lr": 2}


def test_options_of_other_types_are_others():
    flat = Coordinates(Space(a=Choice([1, 1.0, True, (1,)])))
    assert [flat.values({"a": a})["a"] for a in (1, 1.0, True, (1,))] == [0, 1, 2, 3]
    with pytest.raises(SpaceError, match="is not in"):
        flat.values({"a": (1.0,)})


def test_values_are_placed_evenly_between_zero_and_one():
    def positions(domain, *values):
        coordinate = Coordinate(name="", domain=domain)
        return [coordinate.to_unit(value) for value in values]

    assert positions(Float(-1.0, 1.0), -1.0, 0.0, 1.0) == [0, 0.5, 1]
    assert positions(Float(0.01, 1.0, log=True), 0.01, 0.1, 1.0) == pytest.approx([0, 0.5, 1])
    assert positions(Float(0.0, 1.1, step=0.5), 0.0, 0.5, 1.0) == [0, 0.5, 1]
    assert positions(Int(1, 6, step=2), 1, 3, 5) == [0, 0.5, 1]
    assert positions(Int(1, 100, log=True), 1, 10, 100) == [0, 0.5, 1]
    assert positions(Choice(["a", "b", "c"]), 0, 1, 2) == [0, 0.5, 1]
    assert positions(Float(2.0, 2.0), 2.0) == positions(Choice(["a"]), 0) == [0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "adam", "width": 64}, "lr is missing"),
        (
            {"lr": 0.01, "kind": "adam", "width": 64, "momentum": 0.9},
            "momentum should not be there",
        ),
        (
            {"lr": 0.01, "kind": "adam", "width": 65},
            "width=65 is not in the space; width must be 64",
        ),
        (
            {"lr": 0.01, "kind": "adam", "width": 64.0},
            "width=64.0 is not in the space; width must be 64",
        ),
        ({"lr": 0.02, "kind": "adam", "width": 64}, "lr=0.02 is not in"),
        ({"lr": Step(0.1, [15], gamma=0.2), "kind": "adam", "width": 64}, "is not in"),
        ({"lr": Constant(True), "kind": "adam", "width": 64}, "is not in"),
        ({"lr": 0.01, "kind": "adam", "width": 64, "depth": 2}, "'depth' is not in the space"),
    ],
)
def test_what_is_not_of_the_space_is_refused(config, message):
    with pytest.raises(SpaceError, match=message):
        Coordinates(NESTED).values(config)


def test_a_coordinate_that_is_there_needs_a_position():
    flat = Coordinates(Space(lr=Choice([0.1, Float(0.2, 0.3)])))
    assert flat.from_unit(np.array([0.0, np.nan])) == {"lr": 0.1}
    with pytest.raises(SpaceError, match=r"lr\[1\] is there"):
        flat.from_unit(np.array([1.0, np.nan]))


def test_names_that_coincide_are_refused():
    with pytest.raises(SpaceError, match="rename one"):
        Coordinates(Space(**{"lr": Choice([Float(0, 1)]), "lr[0]": Float(0, 1)}))


@pytest.mark.parametrize(
    ("domain", "value", "said"),
    [
        (0.1, 0.5, "lr=0.5 is not in the space; lr must be 0.1"),
        (Choice([0.1]), 0.2, "lr=0.2 is not in the space; lr must be 0.1"),
        (Choice(["a", "b"]), "c", "lr='c' is not in the space; lr must be one of 'a', 'b'"),
        (Float(0.1, 1), 2, "lr=2 is not in the space; lr must be a number from 0.1 to 1"),
        (
            Int(2, 8, step=2),
            3,
            "lr=3 is not in the space; lr must be a whole number from 2 to 8 in steps of 2",
        ),
        (
            Choice([0.1, Choice([0.2, 0.3])]),
            0.4,
            "lr=0.4 is not in the space; lr must be one of 0.1, Choice(options=(0.2, 0.3))",
        ),
    ],
)
def test_the_message_for_a_value_says_which_values_there_are(domain, value, said):
    with pytest.raises(SpaceError) as error:
        Coordinates(Space(lr=domain)).values({"lr": value})
    assert str(error.value) == said
