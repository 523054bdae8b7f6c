from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from tests.depth import draws
from tests.perf._draw import curves, drawn
from thrifty.core import UsageError
from thrifty.perf import PackChoice, PackCurve, choose_pack


pytestmark = pytest.mark.slow


FUSED = PackCurve(
    backend="fused", step_s={1: 2.0, 16: 5.0}, memory_bytes={1: 10.0, 2: 12.0, 16: 40.0}
)
SOLO = PackCurve(backend="solo", step_s={1: 1.0}, memory_bytes={1: 5.0})


@given(
    some=st.lists(curves(), min_size=1, max_size=3),
    longest=st.floats(0.0, 100.0),
    rest=st.floats(0.0, 1e5),
    ready=st.integers(0, 300),
    workers=st.integers(1, 4),
    cap=st.one_of(st.just(math.inf), st.floats(1.0, 1e12)),
    max_size=st.integers(1, 90),
)
@settings(drawn, max_examples=draws(75, 300))
def test_no_size_is_better(some, longest, rest, ready, workers, cap, max_size):
    total = longest + rest
    choice = choose_pack(
        some,
        longest=longest,
        total=total,
        ready=ready,
        workers=workers,
        cap_bytes=cap,
        max_size=max_size,
    )
    limit = max(1, min(max_size, math.ceil(ready / workers)))
    forecasts = {
        (i, k): _played(curve, k, longest=longest, total=total, workers=workers)
        for i, curve in enumerate(some)
        for k in range(1, min(limit, max(curve.step_s)) + 1)
        if curve.fits(k, cap_bytes=cap)
    }
    if not forecasts:
        assert choice.size == 1
        return
    assert choice.forecast_s <= 1.01 * min(forecasts.values()) * (1 + 1e-9)
    assert any(
        some[i].backend == choice.backend
        and k == choice.size
        and forecast == pytest.approx(choice.forecast_s)
        for (i, k), forecast in forecasts.items()
    )


def _played(curve, k, *, longest, total, workers):
    """Forecast in another way: play rounds until either the chain or the rest has run out."""
    lanes = k * workers
    if lanes * longest >= total and lanes > 1:
        beside = (total - longest) / (lanes - 1)
        return beside * curve.time(k) + (longest - beside) * curve.time(1)
    return total / lanes * curve.time(k)


def test_much_work_is_packed():
    choice = choose_pack([FUSED, SOLO], longest=10, total=1000, ready=100)
    assert choice == PackChoice(backend="fused", size=16, forecast_s=312.5)


def test_one_long_chain_goes_to_what_is_quickest_alone():
    choice = choose_pack([FUSED, SOLO], longest=90, total=95, ready=100)
    assert choice == PackChoice(backend="solo", size=1, forecast_s=95.0)


def test_the_rest_is_packed_beside_a_long_chain():
    # 110 steps beside the chain at T(16) = 5 take 7.3 rounds, less than 110 steps at T(1) = 2.
    assert choose_pack([FUSED], longest=90, total=200, ready=100).size == 16


def test_workers_share_what_is_ready():
    choice = choose_pack([FUSED], longest=1, total=1000, ready=10, workers=3)
    assert choice.size == 4


def test_a_pack_stays_within_the_memory():
    assert choose_pack([FUSED], longest=1, total=1000, ready=100, cap_bytes=20.0).size == 5


def test_what_does_not_fit_gives_way():
    choice = choose_pack([FUSED, SOLO], longest=1, total=1000, ready=100, cap_bytes=10.0)
    assert choice.backend == "solo"


def test_where_nothing_fits_trials_are_not_packed():
    choice = choose_pack([FUSED, SOLO], longest=1, total=1000, ready=100, cap_bytes=1.0)
    assert (choice.backend, choice.size) == ("solo", 1)


def test_a_tie_goes_to_the_larger_pack_then_to_the_earlier_curve():
    flat = PackCurve(backend="concatenated", step_s={1: 1.0, 64: 64.0})
    assert choose_pack([flat, SOLO], longest=1, total=64, ready=64).size == 64
    assert choose_pack([SOLO, flat], longest=1, total=1, ready=1).backend == "solo"


def test_no_curves_no_choice():
    with pytest.raises(UsageError, match="without curves"):
        choose_pack([], longest=1, total=1, ready=1)
