"""Information that workers send about themselves arrives unchanged."""

from __future__ import annotations

from hypothesis import given, strategies as st

from thrifty.hetero import Power, StepCurve
from thrifty.hetero._job import WorkerInfo


seconds = st.floats(1e-9, 1e6)


@given(seconds, seconds, st.one_of(st.none(), st.integers(1, 2**30)), st.booleans())
def test_rows_give_the_worker_back(sample_s, fixed_s, max_samples, new):
    info = WorkerInfo(
        curve=StepCurve(sample_s=sample_s, fixed_s=fixed_s, max_samples=max_samples, min_samples=1),
        num_private=2**40,
        power=Power(idle_w=2.0, busy_w=3.0),
        new=new,
    )
    row = info.to_row()
    assert len(row) == WorkerInfo.NUM
    assert WorkerInfo.from_row(row) == info
