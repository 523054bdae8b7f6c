"""Drawn curves with arbitrary times and with memory that grows with the pack."""

from __future__ import annotations

from hypothesis import settings, strategies as st

from thrifty.perf import PackCurve


# Run the same examples each time.
drawn = settings(deadline=None, derandomize=True, database=None)

sizes = st.lists(st.integers(1, 70), min_size=1, max_size=5, unique=True).map(sorted)
seconds = st.floats(1e-5, 10.0)
amounts = st.floats(1.0, 1e11)


@st.composite
def curves(draw):
    timed, weighed = draw(sizes), draw(st.one_of(st.just([]), sizes))
    return PackCurve(
        backend=draw(st.sampled_from(["fused", "concatenated", "solo"])),
        step_s={k: draw(seconds) for k in timed},
        memory_bytes=dict(zip(weighed, sorted(draw(amounts) for _ in weighed), strict=True)),
    )
