"""Drawn workers with round and arbitrary step times, with and without bounds."""

from __future__ import annotations

from hypothesis import strategies as st

from thrifty.perf import Power, StepCurve


LARGEST = 12
"""Number of samples in the largest batch for which every split is tried."""

# Round times often tie, and their sums and quotients are exact.
round_seconds = st.sampled_from([0.25, 0.5, 1.0, 3.0])
seconds = st.one_of(round_seconds, st.floats(1e-4, 10.0))
fixed_seconds = st.one_of(st.just(0.0), seconds)


@st.composite
def bounded_curves(draw, sample_s=seconds, fixed_s=fixed_seconds):
    max_samples = draw(st.one_of(st.none(), st.integers(1, LARGEST)))
    return StepCurve(
        sample_s=draw(sample_s),
        fixed_s=draw(fixed_s),
        max_samples=max_samples,
        min_samples=draw(st.integers(0, 3 if max_samples is None else min(3, max_samples))),
    )


any_curves = bounded_curves()


@st.composite
def jobs(draw, curves=any_curves):
    """Draw two or three workers, and a batch that they can hold."""
    some = draw(st.lists(curves, min_size=2, max_size=3))
    min_samples = sum(curve.min_samples for curve in some)
    max_samples = sum(curve.max_samples or LARGEST for curve in some)
    return some, draw(st.integers(max(1, min_samples), min(LARGEST, max_samples)))


powers = st.builds(
    lambda idle, more: Power(idle_w=idle, busy_w=idle + more),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([0.0, 1.0, 10.0, 50.0]),
)
