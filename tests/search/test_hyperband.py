from collections import Counter

import pytest

from tests.search._drive import ask, ends, to_the_end
from thrifty.search import Bracket, GridSampler, Hyperband
from thrifty.space import Choice, Space


def test_the_papers_brackets():
    history = to_the_end(Hyperband(max_epochs=81))
    assert len(history) == 143
    # 81x1 27x3 9x9 3x27 1x81 | 34x3 11x9 3x27 1x81 | 15x9 5x27 1x81 | 8x27 2x81 | 5x81, less those
    # promoted.
    assert [ends(history, group=g) for g in range(5)] == [
        {1: 54, 3: 18, 9: 6, 27: 2, 81: 1},
        {3: 23, 9: 8, 27: 2, 81: 1},
        {9: 10, 27: 4, 81: 1},
        {27: 6, 81: 2},
        {81: 5},
    ]


def test_all_brackets_are_proposed_at_once():
    asked = ask(Hyperband(max_epochs=81), num=1)
    assert Counter(p.group for p in asked) == {0: 81, 1: 34, 2: 15, 3: 8, 4: 5}
    assert Counter(p.target for p in asked) == {1: 81, 3: 34, 9: 15, 27: 8, 81: 5}


@pytest.mark.parametrize(("eta", "power"), [(3, 5), (3, 6), (2, 10), (5, 3), (10, 3)])
def test_exact_powers_have_a_bracket_more(eta, power):
    # In floating point log(243, 3) is 4.999... and log(1000, 10) is 2.999...
    assert len(Hyperband(max_epochs=eta**power, eta=eta).brackets()) == power + 1
    assert len(Hyperband(max_epochs=eta**power - 1, eta=eta).brackets()) == power


def test_last_rung_is_always_max_epochs():
    for max_epochs in range(1, 60):
        brackets = Hyperband(max_epochs=max_epochs).brackets()
        assert {bracket.epochs[-1] for bracket in brackets} == {max_epochs}
        assert brackets[0].epochs[0] >= 1


def test_num_trials_repeats_brackets_and_cuts_the_last():
    brackets = Hyperband(max_epochs=9, num_trials=9 + 5 + 3 + 9 + 2).brackets()
    assert [bracket.num_trials for bracket in brackets] == [9, 5, 3, 9, 2]
    assert brackets[4] == Bracket(2, (3, 9))


def test_fewer_trials_than_the_widest_bracket():
    assert ends(to_the_end(Hyperband(max_epochs=9, num_trials=4))) == {1: 3, 9: 1}


def test_brackets_do_not_wait_for_each_other():
    history = to_the_end(Hyperband(max_epochs=9), failing=range(9))
    assert ends(history, group=0) == {0: 9}
    assert ends(history, group=1) == {3: 4, 9: 1}


def test_small_grid_ends_in_the_first_bracket():
    space = Space(lr=Choice([0.1, 0.2, 0.3]))
    history = to_the_end(Hyperband(max_epochs=9, sampler=GridSampler()), space=space)
    assert ends(history) == {1: 2, 9: 1}
