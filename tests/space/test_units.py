from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thrifty.core import UsageError
from thrifty.space import Amount, EpochSize, TimeUnit, epochs, steps, tokens


sizes = st.integers(1, 5_000)
counts = st.integers(0, 10**12)


def test_numbers_are_exact_as_written():
    assert epochs(0.1).number == Fraction(1, 10)
    assert tokens(2e9) == tokens(2_000_000_000) == tokens(np.int64(2_000_000_000))
    assert steps(5_000) * 0.1 == 0.1 * steps(5_000) == steps(500)


@given(counts, sizes)
def test_an_amount_is_read_back_from_its_text(number, per_epoch):
    for amount in (steps(number), tokens(number), Amount(Fraction(number, per_epoch), "epochs")):
        names = {"steps": steps, "tokens": tokens, "epochs": epochs, "Fraction": Fraction}
        assert eval(repr(amount), names) == amount


@given(counts, sizes)
def test_what_is_shown_means_the_same_number_of_epochs(number, per_epoch):
    size = EpochSize(steps=per_epoch)
    resolved = size.in_epochs(steps(number))
    assert size.unit("steps").amount(resolved) == steps(number)
    assert isinstance(resolved, int) == (number % per_epoch == 0)


@given(counts, counts, sizes)
def test_amounts_are_ordered_as_their_epochs(a, b, per_epoch):
    size = EpochSize(tokens=per_epoch)
    assert (tokens(a) < tokens(b)) == (size.fraction(tokens(a)) < size.fraction(tokens(b)))


def test_units_do_not_mix():
    with pytest.raises(UsageError, match=r"steps\(5\) and tokens\(5\) have different units"):
        steps(5) < tokens(5)  # noqa: B015 (the comparison raises)
    with pytest.raises(UsageError, match="the plain number counts epochs"):
        steps(5) + 3
    assert steps(5) != tokens(5)
    assert sum([steps(5), steps(6)]) == steps(11)
    assert steps(5) > 0


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), "5", True, None])
def test_an_amount_is_a_number_of_at_least_0(number):
    with pytest.raises(UsageError, match=r"give a number of steps, 0 or more"):
        steps(number)


def test_steps_and_tokens_are_whole():
    with pytest.raises(UsageError, match=r"must be whole; the nearest are 2 and 3"):
        steps(2.5)
    with pytest.raises(TypeError):
        steps(5) * "x"
    with pytest.raises(TypeError):
        steps(5) < "x"  # noqa: B015 (the comparison raises)


def test_whole_epochs_or_the_nearest_two():
    size = EpochSize(steps=500)
    assert size.whole(steps(5_000), what="horizon") == 10
    with pytest.raises(UsageError) as caught:
        size.whole(steps(5_250), what="horizon")
    assert str(caught.value) == (
        "horizon steps(5_250) is 10.5 epochs of 500 steps; use steps(5_000) or steps(5_500), or "
        "choose steps_per_epoch=250"
    )
    with pytest.raises(
        UsageError, match=r"max_epochs epochs\(0.5\) is 0.5 epochs; use epochs\(1\)"
    ):
        size.whole(epochs(0.5), what="max_epochs")
    with pytest.raises(UsageError, match=r"is 0.5 epochs of 500 steps; use steps\(500\), or"):
        size.whole(steps(250), what="max_epochs")


def test_an_unknown_size_says_what_to_do():
    with pytest.raises(UsageError, match="steps of an epoch is unknown: set steps_per_epoch"):
        EpochSize().fraction(steps(5))
    with pytest.raises(UsageError, match="tokens of an epoch is unknown: samples vary"):
        EpochSize(why_no_tokens="samples vary").fraction(tokens(5))


def test_units_as_text():
    unit = TimeUnit(name="steps", per_epoch=1)
    assert [unit.text(1), TimeUnit().text(2), TimeUnit().text(0.5)] == [
        "1 step (1 epoch)",
        "2 epochs",
        "0.5 epochs",
    ]
    assert TimeUnit.from_json(unit.to_json()) == unit
    assert TimeUnit.from_json(None) == TimeUnit.from_json({"name": "parsecs"}) == TimeUnit()
