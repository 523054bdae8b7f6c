"""A split follows the workers' speed and nothing else."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf import Balancer, BalancerOptions, StepCurve, forecast_split, split_batch


pytestmark = pytest.mark.slow


EQUAL = [StepCurve(sample_s=1.0)] * 2
UNEQUAL = [
    StepCurve(sample_s=0.01, fixed_s=0.1),
    StepCurve(sample_s=0.02, fixed_s=0.05),
    StepCurve(sample_s=0.04),
]


def play(balancer, curves, loads, *, noise=None):
    """Run the balancer and return its changes by step, counted from 1.

    ``loads`` gives the slowness of each worker in each step.
    """
    changes = {}
    for step, load in enumerate(loads, 1):
        seconds = [
            curve.scaled(slowness).seconds(size) if size else 0.0
            for curve, slowness, size in zip(curves, load, balancer.split, strict=True)
        ]
        if noise is not None:
            seconds = seconds * np.maximum(0.1, noise(len(seconds)))
        if change := balancer.observe(list(seconds)):
            changes[step] = change
    return changes


def settled(curves=EQUAL, *, batch=100, options=None, steps=12):
    """Return a balancer after some steps at the measured speeds."""
    balancer = Balancer(curves, batch=batch, options=options)
    assert not play(balancer, curves, [(1.0,) * len(curves)] * steps)
    return balancer


@pytest.mark.parametrize("seed", range(4))
def test_calm_workers_raise_no_alarm(seed):
    rng = np.random.default_rng(seed)
    balancer = Balancer(UNEQUAL, batch=100)
    changes = play(balancer, UNEQUAL, [(1.0,) * 3] * 2000, noise=lambda n: rng.normal(1.0, 0.03, n))
    assert {change.reason for change in changes.values()} <= {"settled", "drift"}
    assert np.subtract(balancer.split, split_batch(UNEQUAL, 100)) == pytest.approx(0, abs=2)


@pytest.mark.parametrize("seed", range(4))
def test_unusual_steps_here_and_there_raise_no_alarm(seed):
    # One step in six is 1.2 times slower or faster than usual, but hardly ever five in a row.
    rng = np.random.default_rng(seed)
    loads, one = [(1.0, 1.0)] * 500, BalancerOptions(patience=1)
    for options, alarms in [(None, False), (one, True)]:
        balancer = Balancer(EQUAL, batch=100, options=options)
        changes = play(balancer, EQUAL, loads, noise=lambda n: rng.normal(1.0, 0.13, n))
        assert any(change.reason in {"slower", "faster"} for change in changes.values()) == alarms


@pytest.mark.parametrize("patience", [1, 3, 5])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_split_follows_a_load_and_returns_after_it(patience, seed):
    rng = np.random.default_rng(seed)
    noise = None if seed is None else lambda n: rng.normal(1.0, 0.03, n)
    options = BalancerOptions(patience=patience)
    balancer = Balancer(UNEQUAL, batch=100, options=options)
    calm, loaded = (1.0, 1.0, 1.0), (1.0, 4.0, 1.0)
    assert not play(balancer, UNEQUAL, [calm] * 60, noise=noise)
    before = balancer.split

    changes = play(balancer, UNEQUAL, [loaded] * (patience + 1), noise=noise)
    (slower,) = changes.values()
    assert list(changes) == [patience]
    assert (slower.reason, slower.workers) == ("slower", (1,))
    assert (slower.before, slower.after) == (before, balancer.split)
    slow = [UNEQUAL[0], UNEQUAL[1].scaled(4.0), UNEQUAL[2]]
    near = 0 if seed is None else 3
    assert np.subtract(balancer.split, split_batch(slow, 100)) == pytest.approx(0, abs=near)
    expected = [forecast_split(slow, split).step_s for split in (before, balancer.split)]
    assert slower.step_s == pytest.approx(expected, rel=0.1 if seed is not None else 1e-9)

    assert not play(balancer, UNEQUAL, [loaded] * 150, noise=noise)
    changes = play(balancer, UNEQUAL, [calm] * (patience + 1), noise=noise)
    (faster,) = changes.values()
    assert list(changes) == [patience]
    assert (faster.reason, faster.workers) == ("faster", (1,))
    assert np.subtract(balancer.split, before) == pytest.approx(0, abs=near)


def test_steps_after_a_change_of_split_raise_no_alarm():
    # The third worker gets many times its previous samples.
    balancer = settled(UNEQUAL)
    loaded = [(8.0, 8.0, 1.0)] * 500
    changes = play(balancer, UNEQUAL, loaded)
    assert list(changes) == [5]
    assert balancer.split[2] > 2 * changes[5].before[2]


@pytest.mark.parametrize("load", [4.0, 0.25])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("begins", [6, 47])  # 47 steps reach over the end of a window
def test_fewer_unusual_steps_than_patience_change_nothing(load, steps, begins):
    balancer = settled(steps=begins)
    unusual, calm = [(1.0, load)] * steps, [(1.0, 1.0)]
    assert not play(balancer, EQUAL, (unusual + calm) * 3 + calm * 100)
    assert balancer.split == (50, 50)
    assert balancer.curves == tuple(EQUAL)


def test_steps_that_are_now_slow_now_fast_raise_no_alarm_but_are_followed():
    balancer = settled()
    slow, fast = (1.0, 4.0), (1.0, 0.25)
    changes = play(balancer, EQUAL, [slow, slow, fast, slow, slow, slow, slow, fast] * 30)
    assert [change.reason for change in changes.values()] == ["drift"]
    assert balancer.curves == (EQUAL[0], EQUAL[1].scaled(4.0))


def test_times_that_say_nothing_are_passed_over():
    balancer = settled()
    for time_s in (0.0, -1.0, math.nan, math.inf):
        assert balancer.observe([time_s, 50.0]) is None
    assert balancer.curves == tuple(EQUAL)


def test_a_split_may_be_judged_by_another_cost():
    """Both splits take the same time, but a custom cost decides between them."""

    def dear(curves, split):
        return float(split[0])

    def cheap(curves, batch):
        return (0, batch) if curves[1].sample_s < 0.5 else (batch, 0)

    balancer = Balancer(EQUAL, batch=10, split=cheap, cost=dear)
    assert balancer.split == (10, 0)
    for _ in range(10):
        balancer.probe(1, 1.0, 1)
    changes = [balancer.probe(1, 0.1, 1) for _ in range(5)]
    assert changes[-1].after == (0, 10)


def test_a_first_guess_that_was_wrong_is_corrected_at_once():
    """A worker's pause of 30 s a step is first taken for time per sample, then corrected."""

    def seconds(split, *, pause):
        return [float(split[0]), split[1] + pause if split[1] else 0.0]

    seen = {}
    for correction in (2, 5):
        balancer = settled(batch=16, options=BalancerOptions(correction=correction))
        changes = [balancer.observe(seconds(balancer.split, pause=30.0)) for _ in range(20)]
        assert all(change.reason == "slower" for change in changes if change)
        seen[correction] = [step for step, change in enumerate(changes, 1) if change]
        assert balancer.split == (16, 0)
    assert seen == {2: [5, 7, 9], 5: [5, 10, 15]}


@pytest.mark.parametrize(("back", "after"), [(1.1, (50, 50)), (0.9, (50, 50)), (1.4, (58, 42))])
def test_a_speed_that_is_back_has_its_split_back(back, after):
    """The old split returns with the old speed, as far as steps of another size can show it."""
    balancer = settled()
    play(balancer, EQUAL, [(1.0, 4.0)] * 20)
    assert balancer.split == (80, 20)
    (change,) = play(balancer, EQUAL, [(1.0, back)] * 5).values()
    assert (change.reason, change.after) == ("faster", after)


def test_a_load_that_is_back_is_remembered_too():
    balancer = settled()
    for load in (4.0, 1.0, 4.4, 0.9, 3.6):
        play(balancer, EQUAL, [(1.0, load)] * 20)
        assert balancer.split == ((80, 20) if load > 2 else (50, 50))


def test_corrections_do_not_count_as_speeds_from_before():
    balancer = settled()
    play(balancer, EQUAL, [(1.0, 4.0)] * 5 + [(1.0, 8.0)] * 20)
    assert balancer.split == (89, 11)
    play(balancer, EQUAL, [(1.0, 1.1)] * 5)
    assert balancer.split == (50, 50)


def test_corrections_end():
    """Corrections end, and two unusual steps long after a change have no effect."""
    balancer = settled()
    assert play(balancer, EQUAL, [(1.0, 4.0)] * 5)
    assert not play(balancer, EQUAL, [(1.0, 4.0)] * 9)
    assert not play(balancer, EQUAL, [(1.0, 8.0)] * 2 + [(1.0, 4.0)] * 3)
    assert play(balancer, EQUAL, [(1.0, 8.0)] * 5)


def test_one_outlier_among_slow_steps_does_not_count():
    balancer = settled()
    loads = [4.0, 4.0, 40.0, 4.0, 4.0]
    assert list(play(balancer, EQUAL, [(1.0, load) for load in loads])) == [5]
    assert balancer.curves == (EQUAL[0], EQUAL[1].scaled(4.0))


@pytest.mark.parametrize(
    ("load", "alarms"), [(1.25, True), (1.15, False), (0.8, True), (0.9, False)]
)
def test_a_step_is_unusual_from_a_fifth_on(load, alarms):
    changes = play(settled(), EQUAL, [(1.0, load)] * 5)
    assert bool(changes) == alarms


def test_what_is_usual_is_the_workers_own():
    # Both workers are far from their curves, but by a constant factor.
    balancer = Balancer(EQUAL, batch=100)
    changes = play(balancer, EQUAL, [(3.0, 1.0)] * 300)
    assert [(step, change.reason) for step, change in changes.items()] == [(5, "settled")]
    assert balancer.split == (25, 75)
    assert list(play(balancer, EQUAL, [(3.0, 3.0)] * 6)) == [5]
    assert balancer.split == (50, 50)


@pytest.mark.parametrize("patience", [1, 4])
def test_first_steps_set_what_is_measured_alone(patience):
    balancer = Balancer(EQUAL, batch=100, options=BalancerOptions(patience=patience))
    changes = play(balancer, EQUAL, [(1.0, 3.0)] * 40)
    assert list(changes) == [patience]
    assert changes[patience].reason == "settled"
    assert changes[patience].after == balancer.split == (75, 25)


def test_a_long_first_step_does_not_count():
    balancer = Balancer(EQUAL, batch=100)
    assert not play(balancer, EQUAL, [(1.0, 30.0), (1.0, 3.0)] + [(1.0, 1.0)] * 200)
    assert balancer.curves == tuple(EQUAL)


def test_workers_that_change_together_are_told_together():
    curves = [StepCurve(sample_s=1.0)] * 3
    balancer = settled(curves)
    (change,) = play(balancer, curves, [(0.5, 1.0, 2.0)] * 5).values()
    assert (change.reason, set(change.workers)) == ("slower", {0, 2})
    balancer = settled(curves)
    (change,) = play(balancer, curves, [(1.0, 4.0, 4.0)] * 5).values()
    assert (change.reason, change.workers) == ("slower", (1, 2))


def test_a_load_on_all_leaves_the_split():
    balancer = settled(UNEQUAL)
    assert not play(balancer, UNEQUAL, [(4.0, 4.0, 4.0)] * 200)
    assert balancer.curves == tuple(curve.scaled(4.0) for curve in UNEQUAL)


@pytest.mark.parametrize(("gain", "changes"), [(0.10, True), (0.15, False)])
def test_a_split_that_saves_too_little_is_not_taken(gain, changes):
    # Going from 50 samples of 1.3 s to 43 cuts 65 s to 57 s, an eighth less.
    balancer = settled(options=BalancerOptions(gain=gain))
    assert bool(play(balancer, EQUAL, [(1.0, 1.3)] * 200)) == changes
    assert (balancer.split == (57, 43)) == changes
    assert balancer.curves == (EQUAL[0], EQUAL[1].scaled(1.3))


def test_small_losses_add_up_to_a_change():
    # Neither load alone justifies a new split.
    balancer = settled(options=BalancerOptions(gain=0.15))
    assert not play(balancer, EQUAL, [(1.0, 1.3)] * 60)
    assert play(balancer, EQUAL, [(1.0, 1.3**2)] * 5)[5].before == (50, 50)


def test_the_same_split_is_no_change_even_where_nothing_has_to_be_saved():
    balancer = Balancer(EQUAL, batch=100, options=BalancerOptions(gain=0.0))
    assert not play(balancer, EQUAL, [(1.0, 1.0)] * 200)


@pytest.mark.parametrize("window", [20, 50])
def test_drift_is_followed_once_a_window(window):
    # The drift is 0.4 % a step: 1.1 times as slow as the median of 50 steps, which raises no alarm.
    balancer = settled(options=BalancerOptions(window=window), steps=window)
    loads = [(1.0, 1.004**step) for step in range(8 * window)]
    changes = play(balancer, EQUAL, loads)
    assert {change.reason for change in changes.values()} == {"drift"}
    assert all(step % window == 0 for step in changes)
    assert len(changes) >= (3 if window == 20 else 7)
    fair = split_batch([EQUAL[0], EQUAL[1].scaled(loads[-1][1])], 100)
    assert balancer.split == pytest.approx(fair, abs=5)
    assert balancer.split != (50, 50)


def test_other_sizes_are_judged_by_themselves():
    balancer = settled(UNEQUAL)
    for sizes in itertools.islice(itertools.cycle([(3, 1, 20), (60, 60, 60), (0, 0, 1)]), 60):
        seconds = [curve.seconds(size) for curve, size in zip(UNEQUAL, sizes, strict=True)]
        assert balancer.observe(seconds, sizes=sizes) is None
    assert balancer.curves == tuple(UNEQUAL)
    for _ in range(5):
        slow = [UNEQUAL[0].seconds(3), UNEQUAL[1].seconds(2), 4 * UNEQUAL[2].seconds(1)]
        change = balancer.observe(slow, sizes=(3, 2, 1))
    assert (change.reason, change.workers) == ("slower", (2,))


def left_out():
    """Return a balancer whose second worker became so slow that it gets no samples."""
    curves = [StepCurve(sample_s=0.01, fixed_s=0.1), StepCurve(sample_s=0.01, fixed_s=0.1)]
    balancer = settled(curves)
    play(balancer, curves, [(1.0, 100.0)] * 5)
    assert balancer.split == (100, 0)
    # The second worker is idle, so its recorded time has no effect.
    assert not [change for _ in range(60) if (change := balancer.observe([1.1, 0.0]))]
    assert balancer.split == (100, 0)
    return balancer, curves


def test_a_worker_that_was_left_out_comes_back_by_probing():
    balancer, curves = left_out()
    for probes in range(1, 6):
        change = balancer.probe(1, curves[1].seconds(12), 12)
        assert (change is None) == (probes < 5)
        # The other worker keeps training.
        if change is None:
            assert balancer.observe([curves[0].seconds(100), 0.0]) is None
    assert (change.reason, change.workers, change.before) == ("faster", (1,), (100, 0))
    assert change.after == balancer.split == (50, 50)


def test_probing_a_worker_that_is_still_slow_changes_nothing():
    balancer, curves = left_out()
    for _ in range(30):
        assert balancer.probe(1, 100 * curves[1].seconds(12), 12) is None
    assert balancer.split == (100, 0)


def test_a_worker_that_never_had_a_share_comes_in_once_a_window():
    curves = [StepCurve(sample_s=0.01), StepCurve(sample_s=0.01, fixed_s=20.0)]
    balancer = settled(curves, steps=49)
    assert balancer.split == (100, 0)
    for _ in range(5):
        assert balancer.probe(1, 0.001 * curves[1].seconds(12), 12) is None
    changes = play(balancer, curves, [(1.0, 0.001)] * 60)
    assert {step: change.reason for step, change in changes.items()} == {1: "drift"}
    assert balancer.split[1] > 90


def test_a_batch_that_nobody_can_hold_is_refused():
    curves = [StepCurve(sample_s=1.0, max_samples=8)] * 2
    message = "a global batch of 17 samples does not fit these 2 workers"
    with pytest.raises(UsageError, match=message):
        Balancer(curves, batch=17)
    with pytest.raises(UsageError, match="there is no worker"):
        Balancer([], batch=16)


def test_the_split_may_be_another_functions():
    def lazily(curves, batch):
        fastest = min(range(len(curves)), key=lambda worker: curves[worker].sample_s)
        return tuple(batch if worker == fastest else 0 for worker in range(len(curves)))

    curves = [StepCurve(sample_s=1.0), StepCurve(sample_s=2.0)]
    balancer = Balancer(curves, batch=8, split=lazily)
    assert balancer.split == (8, 0)
    play(balancer, curves, [(3.0, 1.0)] * 5)
    assert balancer.split == (0, 8)


bursts = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.lists(st.sampled_from([0.3, 0.9, 1.0, 1.1, 4.0]), min_size=3, max_size=3),
    ),
    max_size=12,
)


@given(bursts, st.sampled_from([0.01, 0.03, 0.2]), st.sampled_from([1, 3, 5]))
@drawn
def test_a_change_says_what_is_done_and_saves_the_gain(runs, gain, patience):
    curves = [
        UNEQUAL[0],
        StepCurve(sample_s=0.02, min_samples=5),
        StepCurve(sample_s=0.04, max_samples=30),
    ]
    options = BalancerOptions(gain=gain, patience=patience, window=10)
    balancer = Balancer(curves, batch=100, options=options)
    for load in itertools.chain.from_iterable([load] * steps for steps, load in runs):
        before = balancer.split
        change = play(balancer, curves, [load]).get(1)
        assert sum(balancer.split) == 100
        assert all(
            curve.min_samples <= size <= (curve.max_samples or 100)
            for curve, size in zip(curves, balancer.split, strict=True)
        )
        if change is None:
            assert balancer.split == before
            continue
        assert (change.before, change.after) == (before, balancer.split)
        forecasts = [
            forecast_split(balancer.curves, split).step_s for split in (before, balancer.split)
        ]
        assert change.step_s == tuple(forecasts)
        assert forecasts[1] <= forecasts[0] * (1 - gain)


@given(bursts, bursts)
@drawn
def test_equal_times_give_equal_splits(runs, others):
    one, two, other = (Balancer(UNEQUAL, batch=100) for _ in range(3))
    loads = [load for steps, load in runs for _ in range(steps)]
    distractions = itertools.cycle([load for _, load in others] or [(1.0, 1.0, 1.0)])
    for load in loads:
        changes = [play(balancer, UNEQUAL, [load]) for balancer in (one, two)]
        # A third balancer's observations do not affect them.
        play(other, UNEQUAL, [next(distractions)])
        assert changes[0] == changes[1]
        assert one.split == two.split
        assert one.curves == two.curves


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slower": 1.0}, "`slower` must be above 1, got 1.0"),
        ({"slower": -2.0}, "`slower` must be above 1, got -2.0"),
        ({"patience": 0}, "1 <= patience <= window, not patience=0, window=50"),
        ({"window": 4}, "1 <= patience <= window, not patience=5, window=4"),
        ({"correction": 0}, "`correction` must be at least 1, got 0"),
        ({"gain": -0.1}, "`gain` must be in .0, 1., got -0.1"),
        ({"gain": 1.0}, "`gain` must be in .0, 1., got 1.0"),
        ({"gain": math.nan}, "`gain` must be in .0, 1., got nan"),
    ],
)
def test_options_out_of_their_range_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        BalancerOptions(**changes)
