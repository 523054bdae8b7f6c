"""Models of exchanges reproduce measured times, predict others, and state their uncertainty."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import nnls

from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf import Link
from thrifty.perf.network import CollectiveModel, CollectiveTiming, _nonnegative, _terms


pytestmark = pytest.mark.slow


LINK = Link(bytes_per_s=1e9, latency_s=5e-5, inner_bytes_per_s=1e10, inner_latency_s=5e-6)
SIZES = (1e3, 1e5, 1e6, 1e7, 1e8)
SHAPES = ((2, 1), (4, 1), (1, 4), (4, 4))


def timing(num_bytes, shape=(2, 1), *, factor=1.0, link=LINK, name="vm", **options):
    nodes, per_node = shape
    seconds = factor * link.all_reduce_s(num_bytes=num_bytes, nodes=nodes, per_node=per_node)
    return CollectiveTiming(
        name=name, num_bytes=num_bytes, nodes=nodes, per_node=per_node, seconds=seconds, **options
    )


def ring(sizes=SIZES, shapes=SHAPES, **options):
    return [timing(size, shape, **options) for size, shape in itertools.product(sizes, shapes)]


links = st.builds(
    Link,
    bytes_per_s=st.floats(1e7, 1e11),
    latency_s=st.floats(1e-6, 1e-2),
    inner_bytes_per_s=st.floats(1e7, 1e12),
    inner_latency_s=st.floats(1e-7, 1e-3),
)
shapes = st.tuples(st.integers(1, 64), st.integers(1, 8)).filter(lambda shape: shape != (1, 1))


@given(links, st.floats(1.0, 1e10), shapes)
@drawn
def test_a_ring_is_found_again_at_sizes_and_shapes_nobody_measured(link, num_bytes, shape):
    model = CollectiveModel.fit(ring(link=link))
    nodes, per_node = shape
    seconds = model.seconds("vm", num_bytes=num_bytes, nodes=nodes, per_node=per_node)
    expected = link.all_reduce_s(num_bytes=num_bytes, nodes=nodes, per_node=per_node)
    assert seconds == pytest.approx(expected, rel=1e-3)


def test_a_plain_ring_is_exact():
    model = CollectiveModel.fit(ring())
    for num_bytes, shape in itertools.product((1.0, 3e4, 1e12), ((3, 1), (2, 8), (64, 4), (1, 16))):
        expected = LINK.all_reduce_s(num_bytes=num_bytes, nodes=shape[0], per_node=shape[1])
        assert model.seconds(
            "vm", num_bytes=num_bytes, nodes=shape[0], per_node=shape[1]
        ) == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.floats(0.3, 3.0), min_size=5, max_size=5), st.integers(0, 3))
@drawn
def test_measured_times_that_rise_count_themselves(factors, at):
    timings = [
        timing(size, factor=factor) for size, factor in zip(SIZES, sorted(factors), strict=True)
    ]
    model = CollectiveModel.fit(timings)
    for each in timings:
        assert model.seconds("vm", num_bytes=each.num_bytes, nodes=2) == pytest.approx(each.seconds)
    middle = (SIZES[at] + SIZES[at + 1]) / 2
    expected = (timings[at].seconds + timings[at + 1].seconds) / 2
    assert model.seconds("vm", num_bytes=middle, nodes=2) == pytest.approx(expected)


def test_repeats_of_one_size_count_by_their_median():
    model = CollectiveModel.fit([timing(1e6, factor=factor) for factor in (1.0, 9.0, 2.0)])
    assert model.seconds("vm", num_bytes=1e6, nodes=2) == pytest.approx(
        timing(1e6, factor=2.0).seconds
    )


@given(st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5))
@drawn
def test_more_bytes_never_take_less_time(factors):
    model = CollectiveModel.fit([
        timing(size, factor=factor) for size, factor in zip(SIZES, factors, strict=True)
    ])
    seconds = model.seconds("vm", num_bytes=[0.0, *np.geomspace(1.0, 1e11, 200)], nodes=2)
    assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all()
    assert (seconds > 0).all()


def test_deviations_fade_beyond_the_measured_sizes():
    """A largest size that takes twice the predicted time affects larger sizes less and less."""
    timings = [*ring(SIZES[:-1], [(2, 1)]), timing(SIZES[-1], factor=2.0)]
    model = CollectiveModel.fit(timings)
    sizes = (1e8, 1e9, 1e10, 1e13)
    ratio = [
        float(model.seconds("vm", num_bytes=size, nodes=2)) / timing(size).seconds for size in sizes
    ]
    assert ratio == sorted(ratio, reverse=True)
    assert ratio[0] == pytest.approx(2.0)
    assert ratio[-1] < 1.3
    # Far below the measured sizes only the number of messages counts, not the bytes.
    small = model.seconds("vm", num_bytes=10, nodes=2)
    assert small == pytest.approx(timings[0].seconds, rel=0.05)


def test_deviations_fade_with_the_distance_of_shapes():
    """A slow measurement at 2 machines matters less and less up to the 64 of the other ones."""
    timings = [timing(1e6, (2, 1), factor=1.5), *ring(np.geomspace(1e3, 1e8, 50), [(64, 1)])]
    model = CollectiveModel.fit(timings)
    ratio = [
        float(model.seconds("vm", num_bytes=1e6, nodes=n))
        / LINK.all_reduce_s(num_bytes=1e6, nodes=n)
        for n in (2, 3, 4, 8, 48, 64)
    ]
    assert ratio[0] == pytest.approx(1.5)
    assert ratio[-1] == pytest.approx(1.0)
    assert ratio == sorted(ratio, reverse=True)
    # At 4 the deviation at 2 is one doubling away, that at 64 four: they weigh 16 to 1, and half of
    # the sum is kept.
    assert ratio[2] == pytest.approx(1.5 ** (16 / 17 / 2), rel=0.03)


@given(
    st.lists(st.tuples(st.floats(1e3, 1e9), shapes, st.floats(1e-5, 10.0)), min_size=1, max_size=8)
)
@drawn
def test_no_set_of_terms_is_nearer(points):
    terms = np.stack([_terms(np.array(num_bytes), shape) for num_bytes, shape, _ in points])
    seconds = np.array([s for *_, s in points])
    rows = terms / seconds[:, None]
    scale = np.maximum(rows.max(axis=0), 1e-12)
    ours = _nonnegative(terms, seconds)
    assert (ours >= 0).all()
    _, least = nnls(rows / scale, np.ones(len(points)))
    assert np.linalg.norm(rows @ ours - 1) <= least + 1e-5


def test_arguments_broadcast_and_one_device_alone_waits_for_nobody():
    model = CollectiveModel.fit(ring())
    seconds = model.seconds("vm", num_bytes=[[1e5], [1e6]], nodes=[1, 2, 4])
    assert seconds.shape == (2, 3)
    assert (seconds[:, 0] == 0).all()
    for row, num_bytes in enumerate((1e5, 1e6)):
        for column, nodes in enumerate((1, 2, 4)):
            assert seconds[row, column] == model.seconds("vm", num_bytes=num_bytes, nodes=nodes)


def test_devices_of_a_machine_broadcast_too():
    model = CollectiveModel.fit(ring())
    seconds = model.seconds("vm", num_bytes=1e6, nodes=[2, 2, 1], per_node=[1, 4, 1])
    one, many = (float(model.seconds("vm", num_bytes=1e6, nodes=2, per_node=n)) for n in (1, 4))
    assert seconds.tolist() == [one, many, 0.0]
    assert many > one


def test_networks_and_collectives_are_apart():
    timings = [
        *ring(factor=3.0),
        *ring(factor=5.0, name="other"),
        *ring(factor=7.0, collective="all_gather"),
    ]
    model = CollectiveModel.fit(timings)
    plain = LINK.all_reduce_s(num_bytes=2e6, nodes=2)
    known = [("vm", "all_reduce"), ("other", "all_reduce"), ("vm", "all_gather")]
    found = [
        float(model.seconds(name, num_bytes=2e6, nodes=2, collective=collective)) / plain
        for name, collective in known
    ]
    assert found == pytest.approx([3.0, 5.0, 7.0], rel=0.2)
    assert model.names == ("other", "vm")


# -- quantiles -------------------------------------------------------------------------------


quantiles = st.floats(0.001, 0.999)


@given(
    st.lists(quantiles, min_size=2, max_size=6).map(sorted), st.integers(2, 30), st.integers(0, 99)
)
@drawn
def test_quantiles_ascend(levels, count, seed):
    draw = np.random.default_rng(seed)
    timings = [
        timing(size, factor=draw.lognormal(0, 0.3)) for size in np.geomspace(1e3, 1e8, count)
    ]
    model = CollectiveModel.fit(timings)
    seconds = [float(model.seconds("vm", num_bytes=2e5, nodes=2, quantile=q)) for q in levels]
    assert seconds == sorted(seconds)


def test_intervals_hold_what_they_promise():
    draw, inside = np.random.default_rng(3), []
    for _ in range(40):
        timings = [
            timing(size, factor=draw.lognormal(0, 0.2)) for size in np.geomspace(1e4, 1e8, 19)
        ]
        model = CollectiveModel.fit(timings)
        size = float(np.exp(draw.uniform(np.log(1e4), np.log(1e8))))
        truth = timing(size, factor=draw.lognormal(0, 0.2)).seconds
        low, high = (model.seconds("vm", num_bytes=size, nodes=2, quantile=q) for q in (0.05, 0.95))
        inside.append(bool(low <= truth <= high))
    assert 0.8 <= np.mean(inside) <= 1.0
    assert high / low < 4


@pytest.mark.parametrize(("count", "expected"), [(1, 3.0), (4, 3.0), (8, 3.0), (19, 1.0)])
def test_few_measurements_make_wide_intervals(count, expected):
    model = CollectiveModel.fit(ring(np.geomspace(1e4, 1e8, count), [(2, 1)]))
    asked = {"num_bytes": 1e6, "nodes": 2}
    width = model.seconds("vm", **asked, quantile=0.95) / model.seconds("vm", **asked)
    assert width == pytest.approx(expected, rel=1e-3)


def test_the_only_measurement_of_a_ring_is_no_error_of_the_others():
    timings = [*ring(np.geomspace(1e4, 1e8, 39), [(2, 1)]), timing(1e6, (1, 4))]
    model = CollectiveModel.fit(timings)
    asked = {"num_bytes": 1e6, "nodes": 2}
    width = model.seconds("vm", **asked, quantile=0.99) / model.seconds("vm", **asked)
    assert width < 10


def test_errors_beyond_the_prior_make_intervals_wider_than_it():
    timings = [timing(1e6, factor=1.0), timing(1.1e6, factor=100.0)]
    model = CollectiveModel.fit(timings)
    high = model.seconds("vm", num_bytes=1e6, nodes=2, quantile=0.95)
    assert high / model.seconds("vm", num_bytes=1e6, nodes=2) > 50


# -- the prior -------------------------------------------------------------------------------


@given(st.floats(0.0, 1e10), shapes)
@drawn
def test_what_nobody_measured_goes_by_its_name(num_bytes, shape):
    model = CollectiveModel.fit([], prior={"vm": LINK})
    asked = {"num_bytes": num_bytes, "nodes": shape[0], "per_node": shape[1]}
    middle = LINK.all_reduce_s(**asked)
    assert model.seconds("vm", **asked) == pytest.approx(middle)
    assert model.seconds("vm", **asked, collective="all_gather") == pytest.approx(middle / 2)
    low, high = (model.seconds("vm", **asked, quantile=q) for q in (0.05, 0.95))
    assert (low, high) == (pytest.approx(middle / 3), pytest.approx(middle * 3))


def test_rings_that_nobody_measured_go_by_their_name_with_its_interval():
    between = CollectiveModel.fit(
        ring(shapes=[(2, 1), (4, 1)], sizes=np.geomspace(1e3, 1e8, 10)), prior={"vm": LINK}
    )
    asked = {"num_bytes": 1e7, "nodes": 4, "per_node": 8}
    middle = between.seconds("vm", **asked)
    assert middle == pytest.approx(LINK.all_reduce_s(**asked), rel=1e-6)
    assert between.seconds("vm", **asked, quantile=0.95) / middle == pytest.approx(3.0)
    asked["per_node"] = 1
    assert between.seconds("vm", **asked, quantile=0.95) / between.seconds("vm", **asked) < 1.01


def test_measured_beats_named():
    slow = Link(bytes_per_s=1e6)
    model = CollectiveModel.fit(ring(), prior={"vm": slow, "named": slow})
    assert model.seconds("vm", num_bytes=1e6, nodes=2) == pytest.approx(timing(1e6).seconds)
    assert model.names == ("named", "vm")


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "unknown"}, "nothing is known of all_reduce on 'unknown': .* there are vm"),
        ({"collective": "broadcast"}, "nothing is known of broadcast on 'vm'"),
        ({"collective": "gossip"}, "`collective` must be one of all_reduce, .*, got 'gossip'"),
        ({"per_node": 2}, "all_reduce on 'vm' was never measured inside a machine"),
        ({"quantile": 0.0}, "`quantile` must be between 0 and 1, got 0.0"),
        ({"quantile": 1.0}, "`quantile` must be between 0 and 1, got 1.0"),
        ({"num_bytes": -1.0}, "num_bytes is not negative"),
        ({"nodes": 0}, "nodes and per_node are 1 or more"),
        ({"per_node": 0}, "nodes and per_node are 1 or more"),
    ],
)
def test_questions_without_an_answer(asked, message):
    model = CollectiveModel.fit(ring(shapes=[(2, 1)]))
    with pytest.raises(UsageError, match=message):
        model.seconds(**{"name": "vm", "num_bytes": 1e6, "nodes": 2, **asked})


def test_inside_machines_says_nothing_of_between():
    model = CollectiveModel.fit(ring(shapes=[(1, 4)]))
    assert model.seconds("vm", num_bytes=1e6, nodes=1, per_node=4) > 0
    with pytest.raises(UsageError, match="never measured between machines"):
        model.seconds("vm", num_bytes=1e6, nodes=2)
    with pytest.raises(UsageError, match="there are none"):
        CollectiveModel.fit([]).seconds("vm", num_bytes=1e6, nodes=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 0.0}, "an exchange has bytes and takes time: num_bytes=0.0"),
        ({"num_bytes": math.inf}, "num_bytes=inf"),
        ({"seconds": 0.0}, "seconds=0.0 of 'vm'"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"nodes": 1}, "an exchange needs two devices: nodes=1, per_node=1"),
        ({"nodes": 0}, "an exchange needs two devices"),
        ({"nodes": -2, "per_node": -1}, "an exchange needs two devices"),
        ({"collective": "gossip"}, "`collective` must be one of"),
    ],
)
def test_timings_that_cannot_be(change, message):
    with pytest.raises(UsageError, match=message):
        CollectiveTiming(**{"name": "vm", "num_bytes": 1e6, "nodes": 2, "seconds": 1.0, **change})


def test_it_survives_json():
    model = CollectiveModel.fit(ring(), prior={"named": Link(bytes_per_s=1e9)})
    again = CollectiveModel.from_json(json.loads(json.dumps(model.to_json(), allow_nan=False)))
    for name, quantile in itertools.product(("vm", "named"), (0.1, 0.5)):
        asked = {"num_bytes": 3e6, "nodes": [1, 2, 3], "quantile": quantile}
        assert np.array_equal(again.seconds(name, **asked), model.seconds(name, **asked))


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"timings": [1], "prior": {}}, {"timings": [], "prior": {"vm": {"speed": 1}}}],
)
def test_other_json_is_refused(data):
    with pytest.raises(UsageError, match="this is no model of collectives"):
        CollectiveModel.from_json(data)
