"""Columns, importance, lanes and schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thrifty.space import Constant, Cosine, MultiStep, Step, Timeline, config_to_json
from thrifty.store._epoch_times import busy
from thrifty.web.views._charts import lanes, shares
from thrifty.web.views._layouts import Column, columns, flatten, texts
from thrifty.web.views._models import finite
from thrifty.web.views._study_views import lines


def test_schedules_are_taken_apart():
    flat = flatten(config_to_json({"lr": Step(0.1, [3, 5]), "layers": (4, 8), "name": None}))
    assert flat["lr"] == "Step"
    assert [flat["lr.milestones[0]"], flat["lr.milestones[1]"]] == [3, 5]
    assert [flat["layers[0]"], flat["layers[1]"]] == [4, 8]
    assert "name" not in flat


def test_what_is_the_same_for_all_is_no_column():
    found = columns([{"a": 1, "b": 2, "c": 1}, {"a": 1, "b": 3}])
    assert [(c.name, c.values) for c in found] == [("b", (2.0, 3.0)), ("c", (1.0, None))]


def test_what_follows_from_the_kind_of_a_schedule_is_no_column():
    configs = [{"lr": lr} for lr in (0.1, Cosine(0.1), Cosine(0.2), Step(0.2, [3]))]
    found = columns([config_to_json(config) for config in configs])
    # All cosines have one floor, all steps have one gamma, and their first milestone is the only
    # one.
    assert [c.name for c in found] == ["lr", "lr.value"]


def test_what_only_some_schedules_of_a_kind_have_is_a_column():
    configs = [{"lr": lr} for lr in (Step(0.1, [3]), Step(0.1, [3, 5]))]
    (found,) = columns([config_to_json(config) for config in configs])
    assert (found.name, found.values) == ("lr.milestones[1]", (None, 5.0))


def test_wide_ranges_are_logarithmic():
    wide, narrow, signed = columns([{"a": 0.001, "b": 1, "c": -1}, {"a": 0.1, "b": 2, "c": 100}])
    assert (wide.log, narrow.log, signed.log) == (True, False, False)


def test_of_many_categories_the_rare_ones_are_one():
    configs = [{"a": f"rare {i}"} for i in range(40)] + [{"a": "often"}] * 5
    (column,) = columns(configs)
    assert column.labels[0] == "often"
    assert (len(column.labels), column.labels[-1]) == (24, "(others)")
    assert max(v for v in column.values if v is not None) == 23


def test_numbers_beside_texts_are_categories():
    (column,) = columns([{"a": 1}, {"a": "x"}])
    assert set(column.labels) == {"1", "x"}


def test_few_numbers_are_ticks_in_order_logarithmic_if_spaced_by_ratio():
    rates = [0.3, 0.03, 0.1] * 2
    (column,) = columns([{"lr": rate} for rate in rates])
    assert (column.ticks, column.log, column.labels) == ((0.03, 0.1, 0.3), True, ())
    (column,) = columns([{"layers": layers} for layers in [3, 1, 2] * 2])
    assert (column.ticks, column.log) == ((1.0, 2.0, 3.0), False)


@pytest.mark.parametrize("near", [(0.1, 0.1 + 2**-56, 0.2), (10**15, 10**15 + 1, 10**16)])
def test_ticks_may_be_as_close_as_numbers_can_be(near):
    (column,) = columns([{"lr": value} for value in (*near, *near)])
    assert column.ticks == tuple(map(float, near))


def test_numbers_that_hardly_repeat_have_no_ticks():
    (column,) = columns([{"lr": rate} for rate in (0.1, 0.2, 0.4)])
    assert (column.ticks, column.log) == ((), False)


def test_numbers_among_categories_are_in_order_and_first():
    (column,) = columns([{"a": a} for a in ("x", "x", 10, 2, 0.5, "x")])
    assert column.labels == ("0.5", "2", "10", "x")
    assert column.values == (3.0, 3.0, 2.0, 1.0, 0.0, 3.0)


def test_booleans_are_categories():
    (column,) = columns([{"a": True}, {"a": False}])
    assert set(column.labels) == {"True", "False"}


def test_texts_of_what_cannot_be_read():
    odd = {"lr": {"schedule": "Unknown", "fields": {}}}
    assert texts(odd) == {"lr": str(odd["lr"])}
    assert texts(config_to_json({"lr": Cosine(0.1)})) == {"lr": "Cosine(0.1)"}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None, "1", True])
def test_what_is_not_a_finite_number(value):
    assert finite(value) is None


def column(name, values, labels=()):
    return Column(name=name, labels=labels, log=False, values=tuple(values))


def test_importance_finds_what_matters():
    rng = np.random.default_rng(0)
    x, z = rng.uniform(size=(2, 400))
    group = rng.integers(3, size=400)
    y = 4 * (x - 0.5) ** 2 + 0.5 * (group == 1)
    axes = [
        column("x", x),
        column("z", z),
        column("group", map(float, group), labels=("a", "b", "c")),
    ]
    found = shares(axes, list(y), mode="min")
    assert list(found) == ["x", "group", "z"]
    assert found["x"] > 0.5 > found["group"] > 0.2
    assert found["z"] < 0.05


def test_importance_is_not_ruled_by_what_exploded():
    rng = np.random.default_rng(1)
    x, z = rng.uniform(size=(2, 400))
    y = x.copy()
    y[z > 0.99] = 1e9
    found = shares([column("x", x), column("z", z)], list(y), mode="min")
    assert found["x"] > 0.8


def test_what_chance_alone_would_explain_is_taken_away():
    found = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        axis = column("z", rng.uniform(size=40))
        found.append(shares([axis], list(rng.normal(size=40)), mode="min")["z"])
    # Eight groups of five random numbers differ by 7 / 39 of the variance.
    assert np.mean(found) < 0.1


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.sampled_from(["min", "max"]))
def test_shares_are_shares(values, mode):
    axes = [
        column("a", (float(i % 3) for i in range(len(values)))),
        column("b", (None if i % 2 else float(i) for i in range(len(values)))),
    ]
    if values:
        found = shares(axes, values, mode=mode)
        assert all(0.0 <= share <= 1.0 for share in found.values())
        assert list(found.values()) == sorted(found.values(), reverse=True)


SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda s: (s[0], s[0] + s[1])),
    max_size=20,
).map(sorted)


@given(SPANS)
def test_lanes_never_overlap_and_are_as_few_as_can_be(spans):
    placed = lanes(spans)
    for i, (a, mine) in enumerate(zip(spans, placed, strict=True)):
        for b, other in zip(spans[:i], placed[:i], strict=True):
            assert mine.lane != other.lane or b[1] <= a[0]
    at_once = max((sum(b <= a < e for b, e in spans) for a, _ in spans), default=0)
    assert max((each.lane for each in placed), default=-1) + 1 == at_once
    assert max((each.pack for each in placed), default=0) == at_once


@given(SPANS)
def test_busy_is_the_length_of_the_union(spans):
    assert busy(spans) == len({second for b, e in spans for second in range(b, e)})


def test_stages_one_after_the_other_are_no_pack():
    # The second one's clock was read a moment before the first one's.
    assert [each.pack for each in lanes([(0.0, 1.0), (0.9995, 2.0)])] == [1, 1]


def test_a_schedule_is_drawn_as_it_is_trained():
    config = {"lr": Step(0.1, [3]), "mode": MultiStep(["a", "b"], milestones=[2]), "w": 8}
    found = {line.name: line for line in lines(config_to_json(config), epochs=6)}
    assert [found[n].moves for n in ("lr", "mode", "w")] == [True, True, False]
    timeline = Timeline(config, epochs=6)
    for name in ("lr", "mode"):
        line = found[name]
        for epoch in range(6):
            drawn = line.values[line.epochs.index(float(epoch))]
            assert drawn == timeline.at(epoch)[name]
    assert (found["lr"].kind, found["mode"].kind) == ("number", "text")


def test_what_moves_within_an_epoch_is_drawn_within_it():
    (line,) = lines(config_to_json({"lr": Cosine(0.1)}), epochs=4)
    assert len(set(line.values)) > 4 * 4
    assert line.epochs == sorted(line.epochs)


def test_long_schedules_are_thinned_out():
    (line,) = lines(config_to_json({"lr": Cosine(0.1)}), epochs=100_000)
    assert len(line.values) <= 500
    assert line.moves


@pytest.mark.parametrize(
    "config",
    [{"lr": {"schedule": "Unknown", "fields": {}}}, config_to_json({"lr": Step(0.1, [30])})],
)
def test_a_schedule_that_cannot_be_read_or_does_not_fit_is_shown_as_written(config):
    (line,) = lines(config, epochs=4)
    assert line.kind == "text"
    assert not line.moves


def test_constants_do_not_move():
    (line,) = lines(config_to_json({"lr": Constant(0.1)}), epochs=4)
    assert not line.moves
