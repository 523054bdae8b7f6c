"""Intervals around step-time predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bench.cloud.step_time_models import Ernest
from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf.steptime import Intervals, PerfectScaling, Setup
from thrifty.perf.steptime._model import LocalErrors, _crossed, _quantile

from ._draw import grid, noisy


pytestmark = pytest.mark.slow


class Spy:
    """A model that predicts 1 second and records its fit data and its queries."""

    def __init__(self, log):
        self._log = log

    def fit(self, setups, step_s):
        assert len(setups) == len(step_s)
        self._shown = list(setups)

    def predict(self, setups):
        self._log.append((self._shown, list(setups)))
        return np.ones(len(setups))


class Memory:
    """A model that memorises known placements and predicts their mean for others."""

    def fit(self, setups, step_s):
        self._known = {}
        for setup, seconds in zip(setups, step_s, strict=True):
            self._known.setdefault(setup.placement, []).append(np.log(seconds))

    def predict(self, setups):
        mean = np.mean([np.mean(each) for each in self._known.values()])
        return np.exp([np.mean(self._known.get(setup.placement, mean)) for setup in setups])


def machines(setup):
    return tuple(sorted(setup.placement))


def spied(setups, **options):
    log = []
    Intervals(lambda: Spy(log), **options).fit(setups, [1.0] * len(setups))
    *groups, beyond = log
    return groups, beyond


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_placements_are_held_out_with_all_their_batches(folds):
    setups = grid([(1,), (2,), (4,), (1, 1), (2, 2), (4, 4), (4, 2), (2, 4), (3, 1)])
    groups, _ = spied(setups, folds=folds)
    assert len(groups) == folds
    for shown, asked in groups:
        assert not {machines(s) for s in shown} & {machines(s) for s in asked}
        assert sorted(map(str, shown + asked)) == sorted(map(str, setups))
    every = [str(setup) for _, asked in groups for setup in asked]
    assert sorted(every) == sorted(str(s) for s in setups if s.num_devices > 1)


def test_groups_are_of_like_size_and_drawn_by_the_seed():
    setups = grid([(n,) for n in range(1, 14)], (8,))
    drawn_groups = {}
    for seed in (0, 0, 1):
        groups, _ = spied(setups, folds=5, seed=seed)
        assert sorted(len(asked) for _, asked in groups) == [2, 2, 2, 3, 3]
        drawn_groups.setdefault(seed, []).append(str([asked for _, asked in groups]))
    assert drawn_groups[0][0] == drawn_groups[0][1] != drawn_groups[1][0]


def test_groups_do_not_depend_on_the_order_of_measurements():
    setups = grid()
    groups, others = spied(setups)[0], spied(setups[::-1])[0]
    for (_, asked), (_, same) in zip(groups, others, strict=True):
        assert asked == same[::-1]


def test_large_scales_are_foretold_from_small_ones():
    setups = grid([(1,), (2,), (4,), (7,), (4, 4), (5, 5)], (8, 16))
    _, (shown, asked) = spied(setups)
    assert {s.placement for s in asked} == {(4, 4), (5, 5)}
    assert {s.placement for s in shown} == {(1,), (2,), (4,), (7,)}


def test_a_model_that_knows_placements_by_heart_is_not_believed():
    rng = np.random.default_rng(0)
    placements = [(n,) for n in range(1, 21)]
    level = dict(zip(placements, np.exp(0.3 * rng.standard_normal(20)), strict=True))
    setups = grid(placements, range(8, 80, 8))
    model = Intervals(Memory)
    model.fit(setups, noisy(setups, law=lambda s: level[s.placement], size=0.001))
    low, high = model.interval(setups)
    assert np.mean(np.log(high / low)) / 2 > 0.3


def drawn_table(rng, batches):
    """Return measurements of placements with random deviations, ten of which are held out."""
    drawn_ones = {tuple(rng.integers(1, 9, rng.integers(1, 5)).tolist()) for _ in range(60)}
    kept = [
        (1,),
        (8,) * 5,
        *sorted({machines(Setup(placement=p, batch=1)) for p in drawn_ones} - {(1,)}),
    ]
    luck = {placement: np.exp(0.1 * rng.standard_normal()) for placement in kept}
    out = {kept[at] for at in rng.permutation(np.arange(2, len(kept)))[:10]}
    setups = grid(kept, batches)
    times = np.array([
        (1 + 0.1 * s.batch + 0.2 * s.num_devices) * luck[s.placement] for s in setups
    ])
    times *= np.exp(0.03 * rng.standard_normal(len(setups)))
    return setups, times, np.array([s.placement in out for s in setups])


# With three batches there are enough errors to tell where they are large.
@pytest.mark.parametrize(
    ("coverage", "batches"), [(0.5, (8, 32)), (0.9, (8, 32)), (0.9, (8, 16, 32))]
)
def test_unseen_placements_lie_inside_as_often_as_asked(coverage, batches):
    rng = np.random.default_rng(5)
    inside, num = [], 40
    for _ in range(num):
        setups, times, held = drawn_table(rng, batches)
        model = Intervals(Ernest)
        model.fit([s for s, each in zip(setups, held, strict=True) if not each], times[~held])
        unseen = [s for s, each in zip(setups, held, strict=True) if each]
        low, high = model.interval(unseen, coverage=coverage)
        inside.append(np.mean((low <= times[held]) & (times[held] <= high)))
    # Batches of one placement have correlated errors, so placements count, not measurements.
    deviation = math.sqrt(coverage * (1 - coverage) / (10 * num))
    assert np.mean(inside) == pytest.approx(coverage, abs=3 * deviation)


def test_intervals_are_wide_where_errors_are_large():
    rng = np.random.default_rng(1)
    setups = grid([(n,) for n in range(1, 31)], range(8, 56, 8))
    size = np.array([0.3 if s.num_devices > 15 else 0.02 for s in setups])
    times = np.exp(size * rng.standard_normal(len(setups)))
    model = Intervals(lambda: Spy([]))
    model.fit(setups, times)
    low, high = model.interval(setups)
    wide = np.log(high / low)
    assert wide[size > 0.1].min() > 3 * wide[size < 0.1].max()
    inside = (low <= times) & (times <= high)
    assert inside[size > 0.1].mean() > 0.82
    assert inside[size < 0.1].mean() > 0.82


def test_held_out_forecasts_are_of_models_that_have_not_seen_the_placement():
    setups = grid([(n,) for n in range(1, 6)])
    times = noisy(setups, size=0.3)
    model = Intervals(Ernest, folds=5)
    model.fit(setups, times)
    seen, guessed = model.held_out()
    assert sorted(seen.tolist()) == [at for at, s in enumerate(setups) if s.num_devices > 1]
    for at, found in zip(seen, guessed, strict=True):
        other = Ernest()
        shown = [k for k, s in enumerate(setups) if s.placement != setups[at].placement]
        other.fit([setups[k] for k in shown], times[shown])
        assert found == pytest.approx(other.predict([setups[at]])[0])


@pytest.mark.parametrize("batches", [(8, 32), range(8, 80, 8)])
def test_upper_ends_of_held_out_forecasts_are_those_of_intervals(batches):
    setups = grid([(n,) for n in range(1, 21)], batches)
    times = noisy(setups, size=0.3)
    model = Intervals(Ernest)
    model.fit(setups, times)
    seen, guessed = model.held_out()
    upper = model.upper_held_out(coverage=0.8)
    factor = np.log(upper / guessed)
    outside = np.abs(np.log(times[seen] / guessed)) > factor * (1 + 1e-12)
    assert 0.13 < outside.mean() <= 0.2
    if len(seen) < 100:  # too few errors: one width for all
        low, high = model.interval(setups[:1], coverage=0.8)
        assert factor == pytest.approx(np.full(len(seen), np.log(high / low)[0] / 2))


def test_larger_scales_than_measured_have_wider_intervals():
    def growing(setup):
        return 1 + 0.2 * len(setup.placement) ** 1.5

    setups = grid([(1,) * n for n in range(1, 13)], (8, 16))
    model = Intervals(Ernest)
    model.fit(setups, noisy(setups, law=growing, size=0.005))
    low, high = model.interval(grid([(1,) * n for n in (4, 12, 13, 40)], (8,)))
    widths = np.log(high / low)
    assert widths[:2] == pytest.approx([widths[0]] * 2)
    assert widths[2:] == pytest.approx([widths[2]] * 2)
    assert widths[2] > 1.2 * widths[0]


def test_larger_scales_never_have_narrower_intervals():
    """Intervals do not narrow at larger scales, even if only small placements are erratic."""
    setups = grid([(1,) * n for n in range(1, 13)], (8, 16))
    rng = np.random.default_rng(0)
    times = [1.0 if s.num_devices > 8 else float(rng.uniform(0.5, 2.0)) for s in setups]
    model = Intervals(lambda: Spy([]))
    model.fit(setups, times)
    low, high = model.interval(grid([(1,) * 4, (1,) * 40], (8,)))
    assert (high / low)[1] == pytest.approx((high / low)[0])


@drawn
@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_a_quantile_leaves_room_for_one_more_error(errors, coverage):
    found = _quantile(np.array(errors), coverage)
    rank = math.ceil((len(errors) + 1) * coverage - 1e-9)
    ordered = sorted(errors)
    assert found in ordered[min(rank, len(errors)) - 1 : rank + 1]


def test_intervals_are_around_the_forecast_and_grow_with_coverage():
    setups = grid()
    times = noisy(setups, size=0.1)
    model, plain = Intervals(Ernest), Ernest()
    model.fit(setups, times)
    plain.fit(setups, times)
    middle = model.predict(setups)
    assert middle.tolist() == plain.predict(setups).tolist()
    factors = []
    for coverage in (0.2, 0.5, 0.9, 0.99):
        low, high = model.interval(setups, coverage=coverage)
        assert low * high == pytest.approx(middle**2)
        factors.append(high[0] / middle[0])
    assert factors == sorted(factors)
    assert factors[0] < factors[-1]
    assert model.interval(setups)[0].tolist() == model.interval(setups, coverage=0.9)[0].tolist()


def test_a_second_fit_forgets_the_first():
    setups = grid()
    model, fresh = Intervals(Ernest), Intervals(Ernest)
    model.fit(grid([(1,), (8, 8, 8), (8, 8)]), noisy(setups, size=2.0)[:9])
    for each in (model, fresh):
        each.fit(setups, noisy(setups))
    queries = grid([(1,), (6, 6, 6), (4,) * 8])
    for one, other in zip(model.interval(queries), fresh.interval(queries), strict=True):
        assert one.tolist() == other.tolist()


def test_two_placements_suffice():
    setups = [Setup(placement=(n,), batch=8) for n in (1, 2)]
    model = Intervals(PerfectScaling)
    model.fit(setups, [1.0, 1.5])
    low, high = model.interval([*setups, Setup(placement=(4,), batch=8)])
    assert high == pytest.approx([1.5] * 3)
    assert low == pytest.approx([1 / 1.5] * 3)


@pytest.mark.parametrize("placement", [(1,), (2,), (4, 4)])
def test_one_placement_has_no_interval(placement):
    model = Intervals(PerfectScaling)
    setups = grid([placement])
    model.fit(setups, noisy(setups))
    assert (model.predict(setups) > 0).all()
    with pytest.raises(UsageError, match="intervals need measurements of two placements"):
        model.interval(setups)


def test_nothing_measured():
    with pytest.raises(UsageError, match="one time for each of at least one setup"):
        Intervals(PerfectScaling).fit([], [])
    with pytest.raises(UsageError, match="intervals need measurements of two placements"):
        Intervals(PerfectScaling).interval(grid())


@pytest.mark.parametrize("coverage", [0, 1, -0.5, 1.5, math.nan])
def test_a_coverage_that_is_none(coverage):
    model = Intervals(PerfectScaling)
    model.fit(grid(), noisy(grid()))
    with pytest.raises(UsageError, match="`coverage` must be between 0 and 1"):
        model.interval(grid(), coverage=coverage)


@pytest.mark.parametrize("folds", [-1, 0, 1])
def test_too_few_folds(folds):
    with pytest.raises(UsageError, match=f"`folds` must be at least 2, got {folds}"):
        Intervals(PerfectScaling, folds=folds)


def test_a_group_does_not_tell_how_large_its_own_errors_are():
    setups = grid([(n,) for n in range(1, 31)], range(8, 56, 8))
    folds = np.array([s.num_devices % 3 for s in setups])
    errors = np.random.default_rng(0).uniform(0.01, 0.2, len(setups))
    worse = np.where(folds == 1, 20 * errors[::-1], errors)
    one, other = (_crossed(setups, each, folds) for each in (errors, worse))
    assert one[folds == 1].tolist() == other[folds == 1].tolist()
    assert one[folds != 1].tolist() != other[folds != 1].tolist()
    assert not (one == 1.0).all()


def test_what_a_group_tells_of_itself_is_not_used():
    setups = grid([(n,) for n in range(1, 31)], range(8, 56, 8))
    times = noisy(setups, size=0.2)
    model = Intervals(lambda: Spy([]))
    model.fit(setups, times)
    seen, guessed = model.held_out()
    told = LocalErrors([setups[at] for at in seen], np.abs(np.log(guessed / times[seen])))
    upper = model.upper_held_out(coverage=0.9)
    factor = np.log(upper / guessed) / told([setups[at] for at in seen])
    assert np.ptp(np.log(factor)) > 0.1
    assert np.mean(np.log(upper / guessed)) > 0
