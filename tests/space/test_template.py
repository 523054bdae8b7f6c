from __future__ import annotations

import math

from thrifty.space import Choice, Constant, Float, Int, Step
from thrifty.space._variants import expand, holds_schedule, resolve, size


NESTED = Step(Choice([0.1, 0.05]), [Int(10, 30, step=10), 60], gamma=Choice([0.1, 0.2]))


def test_resolve_draws_every_domain_inside():
    drawn = resolve(NESTED, lambda domain: domain.levels(2)[0])
    assert drawn == Step(0.1, [10, 60], gamma=0.1)


def test_resolve_goes_on_where_a_draw_gives_a_domain():
    drawn = resolve(Choice([Float(0.1, 0.2)]), lambda domain: domain.levels(2)[0])
    assert drawn == 0.1


def test_resolve_leaves_what_is_fixed():
    fixed = Step(0.1, [10])
    assert resolve(fixed, lambda domain: domain.levels(1)[0]) is fixed


def test_expand_gives_each_once():
    every = list(expand(NESTED, lambda domain: domain.levels(9)))
    assert len(set(every)) == len(every) == 12 == size(NESTED, lambda domain: domain.size())


def test_size_sums_over_options_and_multiplies_over_fields():
    value = Choice([Step(Choice([1, 2]), [Int(1, 3)]), Constant(Choice([1, 2, 3])), "none"])
    assert size(value, lambda domain: domain.size()) == 2 * 3 + 3 + 1
    assert math.isinf(size((Float(0, 1), 2), lambda domain: domain.size()))


def test_holds_schedule_looks_into_choices():
    assert holds_schedule(Choice([Choice([1, Constant(1)])]))
    assert not holds_schedule(Choice([1, (2, 3)]))
