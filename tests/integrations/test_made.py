"""What is made for a trial follows all hyper-parameters that it reads."""

from __future__ import annotations

import pytest

from thrifty.integrations._adapters import HpMemo
from thrifty.pack import HyperParameters


class Module:
    """A class that keeps its arguments, as data modules do."""

    def __init__(self, hp):
        self.hp = hp


def test_what_is_read_later_counts_too():
    made = HpMemo(Module)
    first = made.get(HyperParameters({"rows": 3, "lr": 0.1}), seed=0)
    assert first.hp.rows == 3
    assert made.get(HyperParameters({"rows": 3, "lr": 0.2}), seed=0) is first
    assert made.get(HyperParameters({"rows": 4, "lr": 0.1}), seed=0) is not first


def test_what_it_depends_on_counts_as_read():
    made = HpMemo(lambda hp: hp.rows)
    for _ in range(2):
        hp = HyperParameters({"rows": 3, "lr": 0.1})
        made.get(hp, seed=0)
        assert hp.names_read == {"rows"}


def test_a_text_of_all_counts_as_reading_all():
    made = HpMemo(str)
    texts = [made.get(HyperParameters({"lr": rate}), seed=0) for rate in (0.1, 0.1, 0.2)]
    assert texts == [f"HyperParameters({{'lr': {rate}}})" for rate in (0.1, 0.1, 0.2)]


@pytest.mark.parametrize(("value", "other"), [({"n": 1}, {"n": 1.0}), ({"n": None}, {})])
def test_values_that_code_can_tell_apart_are_made_apart(value, other):
    made = HpMemo(lambda hp: [hp.get("n", 3)])
    assert [made.get(HyperParameters(each), seed=0) for each in (value, other)] == [
        [value["n"]],
        [other.get("n", 3)],
    ]
    assert type(made.made[0]) is type(other.get("n", 3))
