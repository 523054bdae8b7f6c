from __future__ import annotations

import copy
import enum
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.strategies import domains, floats, ints, seeds
from thrifty.core import SpaceError
from thrifty.space import Choice, Constant, Float, Int, Space, Step


class Kind(enum.StrEnum):
    A = "a"


class Size(enum.IntEnum):
    A = 1


class Rate(float):
    pass


class Count(int):
    pass


class Name(str):
    def __str__(self):
        return "another"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.one_of(floats, ints), seeds)
def test_draws_stay_in_bounds(domain, seed):
    drawn = [domain.sample(rng(seed)) for _ in range(20)]
    assert all(domain.low <= value <= domain.high for value in drawn)
    assert {type(value) for value in drawn} == {float if isinstance(domain, Float) else int}


@given(st.one_of(floats, ints), st.integers(1, 9))
def test_levels_stay_in_bounds_and_ascend(domain, num):
    levels = domain.levels(num)
    assert list(levels) == sorted(set(levels))
    assert 1 <= len(levels) <= num
    assert domain.low <= levels[0]
    assert levels[-1] <= domain.high


@given(domains, seeds)
def test_same_generator_same_draw(domain, seed):
    assert domain.sample(rng(seed)) == domain.sample(rng(seed))


@given(ints)
def test_as_many_levels_as_values_are_all_values(domain):
    assert len(domain.levels(10_000)) == domain.size()


@given(domains)
def test_domains_are_values(domain):
    twin = copy.deepcopy(domain)
    assert twin == domain
    assert hash(twin) == hash(domain)


@given(domains)
def test_a_condition_changes_nothing_else(domain):
    child = domain.when(kind="a")
    assert child.size() == domain.size()
    assert child.levels(3) == domain.levels(3)
    assert child.when(depth=[1, 2]).conditions[0] == child.conditions[0]


def test_log_draws_are_uniform_in_the_exponent():
    generator = rng()
    drawn = [Float(1e-4, 1.0, log=True).sample(generator) for _ in range(4000)]
    counts, _ = np.histogram(np.log10(drawn), bins=4, range=(-4, 0))
    assert counts.min() > 900


def test_log_integers_share_the_exponent_scale():
    generator = rng()
    drawn = [Int(1, 1000, log=True).sample(generator) for _ in range(4000)]
    assert 0.2 < np.mean(np.array(drawn) < 10) < 0.5


def test_step_snaps():
    assert Float(0.1, 0.35, step=0.1).levels(9) == (0.1, 0.2, 0.3)
    assert Float(0.0, 0.3, step=0.1).size() == 4
    assert Int(1, 10, step=4).levels(9) == (1, 5, 9)


def test_third_of_one_is_its_own_lowest_level():
    # Fifteen digits of 1/3 are less than 1/3.
    assert Float(1 / 3, 2 / 3).levels(2) == (1 / 3, 2 / 3)


@pytest.mark.parametrize(
    ("domain", "size"),
    [
        (Float(0.0, 1.0), math.inf),
        (Float(2.0, 2.0), 1),
        (Int(0, 9), 10),
        (Int(0, 9, step=4), 3),
        (Choice([1, 1.0, True]), 3),
    ],
)
def test_a_domain_has_as_many_values_as_it_can_take(domain, size):
    assert domain.size() == size


def test_lists_become_tuples_and_numpy_scalars_plain():
    assert Choice([[1, 2], np.int64(3)]).options == ((1, 2), 3)


def test_a_schedule_may_be_an_option():
    assert Choice([Constant(1.0), 0.1]).size() == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float("1", 2), "low must be a number"),
        (lambda: Float(0, True), "high must be a number"),
        (lambda: Float(0.0, math.inf), "bounds must be finite"),
        (lambda: Float(2.0, 1.0), "low must not exceed high"),
        (lambda: Float(0.0, 1.0, log=True), "log=True needs low > 0"),
        (lambda: Float(0.0, 1.0, step=0), "step must be positive"),
        (lambda: Float(1.0, 2.0, step=0.1, log=True), "cannot be combined"),
        (lambda: Int(1.0, 2), "low must be an integer; use Float"),
        (lambda: Int(0, np.float64(2)), "high must be an integer"),
        (lambda: Int(0, np.True_), "high must be an integer"),
        (lambda: Int(0, None), "high must be an integer"),
        (lambda: Int(0, 9, step=None), "step must be an integer"),
        (lambda: Int(0, 2**70), r"within \+-2\*\*53"),
        (lambda: Int(-(2**70), 0), r"within \+-2\*\*53"),
        (lambda: Float(0, np.bool_(True)), "high must be a number"),
        (lambda: Float(0, math.nan), "bounds must be finite"),
        (lambda: Float(-math.inf, 0), "bounds must be finite"),
        (lambda: Float(0, 10**400), "bounds must be finite"),
        (lambda: Float(-1e308, 1e308), "so must their difference"),
        (lambda: Float(0, 1, step=math.nan), "step must be positive and finite"),
        (lambda: Float(0, 1, step=1e-300), "more than 2\\*\\*53 values"),
        (lambda: Float(0.1, 1, log="yes"), "log must be True or False"),
        (lambda: Float(0, 1).when(), "name a hyper-parameter"),
        (lambda: Float(0, 1).when(kind=[]), r"when\(kind=\[\]\) never holds"),
        (lambda: Int(1, 8, step=2, log=True), "cannot be combined"),
        (lambda: Choice("adam"), "give a list"),
        (lambda: Choice([]), "at least one option"),
        (lambda: Choice([1, 2, 1]), "there twice"),
        (lambda: Choice([math.nan]), "not a finite number"),
        (lambda: Choice([object()]), "cannot be a value"),
        (lambda: Choice(list(Kind)), r"member of an enum.*\[each.name for each in Kind\]"),
        (lambda: Choice([["a", Kind.A]]), "member of an enum"),
        (lambda: Choice(list(Size)), "member of an enum"),
        (lambda: Float(0, 1).when(kind=Kind.A), "member of an enum"),
        (lambda: Space(kind=Kind.A), "member of an enum"),
        (lambda: Step(Size.A, [2]), "member of an enum"),
    ],
)
def test_what_makes_no_domain(make, message):
    with pytest.raises(SpaceError, match=message):
        make()


def test_numbers_and_strings_of_other_types_become_plain():
    """A study that goes on reads plain ones, so one that begins must have them, too."""
    options = Choice([Rate(0.5), Count(3), Name("a"), [Rate(1.5), True], np.str_("b")]).options
    assert options == (0.5, 3, "a", (1.5, True), "b")
    assert [type(option) for option in options] == [float, int, str, tuple, str]
    assert type(options[3][0]) is float
    assert {type(v) for v in (Int(Count(1), Size.A).high, Float(Rate(0.5), 2).low)} == {int, float}


def test_numpy_scalars_are_numbers():
    domain = Float(np.float32(0.5), np.int64(2), step=np.float64(0.5))
    assert domain == Float(0.5, 2, step=0.5)
    assert {type(value) for value in (domain.low, domain.high, domain.step)} == {float, int}
    assert repr(Int(np.int32(1), np.uint8(8))) == repr(Int(1, 8))


def test_the_widest_integers_are_drawn():
    domain = Int(-(2**53), 2**53)
    assert domain.levels(2) == (-(2**53), 2**53)
    assert domain.low <= domain.sample(rng()) <= domain.high


def test_options_that_are_no_list_have_advice():
    with pytest.raises(
        SpaceError, match=r"^Choice\(0.1, 0.2\): give a list: Choice\(\[0.1, 0.2\]\)$"
    ):
        Choice(0.1, 0.2)
    assert Choice(options=[0.1, 0.2]) == Choice([0.1, 0.2])
