from __future__ import annotations

import numpy as np
import pytest

from thrifty.space._pieces import (
    Hold,
    Ramp,
    Segment,
    cosine_arc,
    decay,
    hold,
    power_arc,
    ramp,
    rex_arc,
    sample_and_hold,
    values_at,
)


TIMES = np.linspace(0.0, 4.0, 9)
PIECES = [
    ramp(1.0, 0.0, 0.0, 4.0),
    cosine_arc(1.0, 0.0, 0.0, 4.0),
    power_arc(1.0, 0.0, 0.0, 4.0, power=3.0),
    rex_arc(1.0, 0.0, 0.0, 4.0, d=0.5),
    decay(1.0, gamma=0.5, start=0.0),
    hold(1.0),
]


@pytest.mark.parametrize("piece", PIECES)
def test_shifting_moves_it_in_time(piece):
    assert piece.shifted(8.0).at(TIMES + 8.0).tolist() == piece.at(TIMES).tolist()


@pytest.mark.parametrize("piece", PIECES[:4])
def test_arcs_go_from_first_to_last(piece):
    assert piece.at(np.array([0.0, 4.0])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "piece",
    [
        ramp(2.0, 2.0, 0.0, 1.0),
        cosine_arc(2.0, 2.0, 0.0, 1.0),
        power_arc(2.0, 2.0, 0.0, 1.0, power=3.0),
        rex_arc(2.0, 2.0, 0.0, 1.0, d=0.5),
        decay(2.0, gamma=1.0, start=0.0),
    ],
)
def test_level_shapes_are_holds(piece):
    assert piece == Hold(2.0, "float")


def test_degenerate_arcs_are_ramps():
    line = Ramp(1.0, 0.0, 0.0, 1.0)
    assert power_arc(1.0, 0.0, 0.0, 1.0, power=1.0) == line
    assert rex_arc(1.0, 0.0, 0.0, 1.0, d=0.0) == line


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), ((1, 2), (1.0, 2.0))])
def test_equal_values_of_other_types_are_other_holds(a, b):
    assert a == b
    assert hold(a) != hold(b)


def test_sample_and_hold_merges_equal_neighbours():
    line = (Segment(0.0, 2.0, hold(1.0)), Segment(2.0, 4.0, ramp(1.0, 0.0, 2.0, 4.0)))
    held = sample_and_hold(line, np.arange(4.0), stop=4.0)
    assert [(s.start, s.stop) for s in held] == [(0.0, 3.0), (3.0, 4.0)]


def test_held_values_keep_their_kind():
    segments = (Segment(0.0, 1.0, hold((1, 2))), Segment(1.0, 2.0, hold("adam")))
    assert values_at(segments, np.array([0.0, 0.5, 1.5])) == [(1, 2), (1, 2), "adam"]
