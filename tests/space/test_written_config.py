from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.strategies import seeds, spaces
from thrifty.core import SpaceError
from thrifty.space import Branched, Choice, Constant, Coordinates, Float, Int, Space, Step
from thrifty.space._coordinates import fill_config


def completed(space, given, seed=0):
    return fill_config(space, given, rng=np.random.default_rng(seed))


@given(spaces, seeds)
def test_a_whole_configuration_stays_as_it_is(space, seed):
    config = space.sample(np.random.default_rng(seed))
    assert repr(completed(space, config)) == repr(config)


@given(spaces, seeds, st.data())
def test_what_is_left_out_is_drawn_from_the_space(space, seed, data):
    config = space.sample(np.random.default_rng(seed))
    names = data.draw(st.sets(st.sampled_from(sorted(config))))
    given = {name: config[name] for name in names}
    found = completed(space, given, seed=1)
    Coordinates(space).values(found)  # it belongs to the space
    assert {name: found[name] for name in names} == given
    assert completed(space, given, seed=1) == found


def test_values_come_out_as_the_space_would_draw_them():
    space = Space(lr=Float(0, 10), decay=Float(0.1, 0.7, step=0.2), drop=Step(Float(0, 1), [2]))
    found = completed(space, {"lr": 1, "decay": 0.1 + 0.2, "drop": Step(1, [2])})
    assert repr(found) == "{'lr': 1.0, 'decay': 0.3, 'drop': Step(1.0, (2,))}"


def test_of_a_branch_the_stem_is_of_the_space():
    space = Space(lr=Choice([0.1, Step(0.5, [2])]), decay=Choice([Constant(0.3), 0.2]))
    lr = Branched(Branched(Constant(0.1), 7.0, at=2), at=3, factor=0.3)
    decay = Branched(0.2, 5, at=1)
    assert completed(space, {"lr": lr, "decay": decay}) == {"lr": lr, "decay": decay}
    assert completed(space, {"lr": Branched(Step(0.5, [2]), at=3, factor=2)})["lr"].factor == 2
    assert completed(space, {"decay": Constant(0.3)})["decay"] == Constant(0.3)
    assert completed(space, {"decay": Constant(0.2)})["decay"] == 0.2
    space = Space(lr=Float(0.0, 1.0))
    assert completed(space, {"lr": Branched(1, at=3, factor=2)})["lr"] == Branched(
        1.0, at=3, factor=2
    )
    for stem in (1.5, Step(0.5, [2]), Branched(1.5, 0.5, at=2)):
        with pytest.raises(SpaceError, match="is not in"):
            completed(space, {"lr": Branched(stem, 0.5, at=4)})


def test_a_condition_is_drawn_so_that_it_holds():
    space = Space(kind=Choice(list("abcdefgh")), momentum=Float(0, 1).when(kind="e"))
    assert all(completed(space, {"momentum": 0.5}, seed)["kind"] == "e" for seed in range(20))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": 0.1}, r"'learning_rate' is not in the space \(lr, width, kind, m\)"),
        ({"lr": 3.0}, r"lr=3\.0 is not in the space; lr must be "),
        ({"lr": "fast"}, "lr='fast' is not in"),
        ({"width": 8.0}, "is not in"),
        ({"width": True}, "is not in"),
        ({"kind": Constant(0.1)}, "is not in"),
        ({"kind": "adam", "m": 0.9}, "'m' is there only where kind is 'sgd'"),
    ],
)
def test_what_is_not_in_the_space_is_refused(given, message):
    space = Space(
        lr=Float(0, 1),
        width=Int(8, 64, log=True),
        kind=Choice(["sgd", "adam"]),
        m=Choice([0.9]).when(kind="sgd"),
    )
    with pytest.raises(SpaceError, match=message):
        completed(space, given)
