from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given

from tests.strategies import configs, seeds, spaces
from thrifty.core import ScheduleError, SpaceError
from thrifty.space import (
    REX,
    Choice,
    Constant,
    Cosine,
    Float,
    Int,
    Linear,
    Space,
    Step,
    Timeline,
    common_prefix,
    config_from_json,
    config_to_json,
)


pytestmark = pytest.mark.slow


CONDITIONAL = Space(
    momentum=Choice([0.8, 0.9]).when(optimizer="sgd"),
    nesterov=Choice([True, False]).when(momentum=[0.9]),
    optimizer=Choice(["sgd", "adam"]),
)


@given(seeds)
def test_draws_have_the_active_names_in_the_given_order(seed):
    config = CONDITIONAL.sample(np.random.default_rng(seed))
    assert list(config) == [name for name in CONDITIONAL.names if name in config]
    assert ("momentum" in config) == (config["optimizer"] == "sgd")
    assert ("nesterov" in config) == (config.get("momentum") == 0.9)


@given(spaces, seeds)
def test_same_generator_same_configuration(space, seed):
    drawn = [space.sample(np.random.default_rng(seed)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert list(drawn[0]) == [name for name in space.names if name in drawn[0]]


@given(configs)
def test_json_gives_a_configuration_back(config):
    again = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert again == config
    assert Timeline(again, epochs=12) == Timeline(config, epochs=12)


@given(spaces)
def test_grid_has_each_configuration_once(space):
    grid = [tuple(map(repr, config.items())) for config in space.grid(levels=3)]
    assert len(set(grid)) == len(grid)


@given(spaces, seeds)
def test_gridded_draws_are_in_the_grid(space, seed):
    assert space.sample(np.random.default_rng(seed), levels=3) in list(space.grid(levels=3))


def test_conditions_hold_in_the_grid():
    assert list(CONDITIONAL.grid()) == [
        {"momentum": 0.8, "optimizer": "sgd"},
        {"momentum": 0.9, "nesterov": True, "optimizer": "sgd"},
        {"momentum": 0.9, "nesterov": False, "optimizer": "sgd"},
        {"optimizer": "adam"},
    ]
    assert CONDITIONAL.size() == 4


def test_a_space_has_as_many_configurations_as_its_options_allow():
    assert Space(lr=Choice([1, 2]), width=Int(1, 3), depth=7).size() == 6
    assert math.isinf(Space(lr=Float(0, 1).when(width=1), width=Int(1, 3)).size())


def test_gridded_draws_share_prefixes():
    space, rng = Space(lr=Step(Float(0.1, 0.2), [5])), np.random.default_rng(0)
    a, b, *_ = (Timeline(space.sample(rng, levels=1), epochs=9) for _ in range(2))
    assert common_prefix(a, b) == 9


def test_fixed_values_stay():
    space = Space(lr=0.1, layers=(1, 2), schedule=Cosine(0.1))
    assert space["layers"] == (1, 2)
    assert space.sample(np.random.default_rng(0)) == {
        "lr": 0.1,
        "layers": (1, 2),
        "schedule": Cosine(0.1),
    }


def test_it_describes_itself():
    space = Space(lr=Float(0.1, 0.2), width=64)
    assert "lr=Float(" in repr(space)
    assert set(space.to_json()) == {"lr", "width"}


def branch_epochs(space, *, max_epochs):
    """Return the epochs at which two configurations of a space may diverge, ascending."""
    found = space.branches(max_epochs=max_epochs)
    inside = {e for i in found.intervals for e in range(i.first, i.last + 1)}
    return tuple(sorted({*found.epochs, *inside.intersection(range(1, max_epochs))}))


def test_branch_epochs_are_where_pieces_end():
    lr = Choice([0.1, Step(0.1, [Choice([3, 4.5]), 7]), REX(0.1, epochs=9)])
    space = Space(lr=lr, width=Int(1, 9))
    assert branch_epochs(space, max_epochs=10) == (3, 4, 7, 9)


def test_branch_epochs_of_too_many_variants_are_all_between_the_extreme_ones():
    space = Space(lr=Step(0.1, [Int(1, 99), Int(105, 199)]))
    assert branch_epochs(space, max_epochs=300) == (*range(1, 100), *range(105, 200))


def test_branch_epochs_of_variants_with_different_pieces_are_all():
    space = Space(lr=Choice([0.1, Step(Choice([0.1, 0.2]), every=Int(1, 5000), gamma=0.5)]))
    assert branch_epochs(space, max_epochs=300) == tuple(range(1, 300))


def test_branches_are_at_branch_epochs():
    space = Space(lr=Choice([0.1, Step(0.1, [3.5]), Step(0.1, [6], gamma=0.5)]))
    lines = [Timeline(config, epochs=9) for config in space.grid()]
    parted = {common_prefix(a, b) for a in lines for b in lines if a != b}
    assert parted <= set(branch_epochs(space, max_epochs=9))


def test_check_names_the_hyper_parameter():
    space = Space(width=64, lr=Choice([0.1, Linear(0.1, epochs=Choice([5, 20]))]))
    space.check(max_epochs=20)
    with pytest.raises(ScheduleError, match=r"hyper-parameter 'lr': .*at least 20 epochs"):
        space.check(max_epochs=10)


def test_what_changes_over_time():
    space = Space(lr=Choice([0.1, REX(0.1)]), width=Constant(64), depth=3, cut=Step(1, [2]))
    changing = [n for n in space.names if space.changes_over_time(n, max_epochs=9)]
    assert changing == ["lr", "cut"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Space(), "the space is empty"),
        (lambda: Space(a=Float(0, 1).when(b=1)), "'a' depends on 'b', which is not in"),
        (lambda: Space(a=Int(0, 1).when(b=1), b=Int(0, 1).when(a=1)), "circle: a, b"),
        (lambda: Space(a=Int(0, 1).when(a=1)), "circle: a"),
        (lambda: Space(a={"b": 1}), "cannot be a value"),
        (lambda: Space(a=[0.1, 1]), r"did you mean Choice\(\[0.1, 1\]\) or Float\(0.1, 1\)\?"),
        (lambda: Space(a=[1, 8]), r"did you mean Choice\(\[1, 8\]\) or Int\(1, 8\)\?"),
        (lambda: Space(a=["x", "y"]), r"did you mean Choice.*a=\('x', 'y'\), for a fixed list"),
    ],
)
def test_what_makes_no_space(make, message):
    with pytest.raises(SpaceError, match=message):
        make()


# -- conditions that would be ignored, or never hold ---------------------------------------

KIND = Choice(["sgd", "adam"])
SGD = Float(0.0, 1.0).when(kind="sgd")


@pytest.mark.parametrize(
    "value",
    [
        Choice([0.1, SGD]),
        Choice([Choice([0.2, SGD])]),
        Step(SGD, [3]),
        Choice([0.1, Step(0.1, [Int(2, 5).when(kind="sgd")])]),
        (0.1, SGD),
    ],
)
def test_a_condition_of_a_part_is_refused(value):
    with pytest.raises(SpaceError, match=r"when\(kind='sgd'\) would be ignored.*lr=Choice"):
        Space(kind=KIND, lr=value)


@pytest.mark.parametrize(
    ("parent", "value"),
    [
        (KIND, "rmsprop"),
        (KIND, ["sgd", "rmsprop"]),
        (Int(1, 4), "1"),
        (Int(1, 4), 5),
        (Int(1, 9, step=4), 3),
        (Int(1, 4), 1.5),
        (Float(0.0, 1.0), 1.5),
        (Float(0.0, 1.0, step=0.5), 0.3),
        (Choice([1, 2]), "1"),
        (Choice([1, Int(4, 8)]), 3),
        (Choice([(1, 2)]), 1),
        (Constant(0.1), Step(0.1, [2])),
        (64, 32),
        (True, "True"),
    ],
)
def test_a_condition_that_never_holds_is_refused(parent, value):
    with pytest.raises(SpaceError, match=r"'lr' depends on parent=.* which never holds"):
        Space(parent=parent, lr=Float(0, 1).when(parent=value))


@pytest.mark.parametrize(
    ("parent", "value"),
    [
        (KIND, ["sgd", "adam"]),
        (Int(1, 9, step=4), 5),
        (Int(1, 9, log=True), 5),
        (Int(1, 4), 2.0),
        (Float(0.0, 1.0, step=0.1), 0.3),
        (Float(0.0, 1.0), 1),
        (Choice([1, Int(4, 8)]), 6),
        (Choice([(1, 2)]), (1, 2)),
        (Choice([0.1, Step(0.1, [Int(2, 4)])]), Step(0.1, [3])),
        (64, 64),
        (Choice([True, False]), True),
    ],
)
def test_a_condition_that_may_hold_is_taken(parent, value):
    condition = {"parent": [value] if isinstance(value, tuple) else value}
    assert Space(parent=parent, lr=Float(0, 1).when(**condition)).names == ("parent", "lr")


def test_conditions_that_contradict_each_other_are_refused():
    with pytest.raises(SpaceError, match=r"'lr' is never there.*one of \['sgd'\].*\['adam'\]"):
        Space(kind=KIND, lr=Float(0, 1).when(kind="sgd").when(kind="adam"))
    with pytest.raises(SpaceError, match="'nesterov' is never there"):
        Space(kind=KIND, momentum=SGD, nesterov=Choice([1, 2]).when(momentum=0.5, kind="adam"))
    with pytest.raises(SpaceError, match="'c' is never there"):
        Space(kind=KIND, a=SGD, b=Int(0, 1).when(a=0.5), c=Int(0, 1).when(kind="adam", b=1))


def test_conditions_that_agree_are_taken():
    lr = Float(0, 1).when(kind=["sgd", "adam"]).when(kind="sgd", momentum=0.5)
    space = Space(kind=KIND, momentum=SGD, lr=lr)
    assert space.names == ("kind", "momentum", "lr")
