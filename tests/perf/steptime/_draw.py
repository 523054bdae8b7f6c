"""Drawn tables of measurements, and models by name."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from bench.cloud.step_time_models import Boosting, Ernest, Paleo, Pollux
from thrifty.perf.steptime import Hybrid, Overlapping, PerfectScaling, Setup
from thrifty.perf.steptime._transfer import Transfer


PLACEMENTS = [(1,), (2,), (4,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (4, 4), (4, 4, 2), (4,) * 4]

batches = st.sampled_from([1, 3, 8, 16, 60, 128, 1000])
placements = st.lists(st.integers(1, 8), min_size=1, max_size=5).map(tuple)
setups = st.builds(
    lambda placement, batch: Setup(placement=placement, batch=batch), placements, batches
)
tables = st.lists(st.tuples(setups, st.floats(1e-6, 1e6)), min_size=1, max_size=10)


def grid(placements=PLACEMENTS, batches=(8, 16, 32)):
    return [Setup(placement=p, batch=b) for p in placements for b in batches]


def plain(setup):
    """Return the seconds of a step without overlap."""
    num, nodes = setup.num_devices, len(setup.placement)
    return 0.02 + 0.003 * setup.batch + 0.004 * (num - 1) + 0.05 * (nodes > 1)


def noisy(setups, *, seed=0, size=0.02, law=plain):
    rng = np.random.default_rng(seed)
    return np.array([law(s) for s in setups]) * np.exp(size * rng.standard_normal(len(setups)))


def reference():
    setups = grid(((1,), (2,), (4,), (1, 1), (2, 2), (4, 4)), (8, 32))
    return setups, noisy(setups, size=0.0)


CLOSED = {"perfect": PerfectScaling, "ernest": Ernest, "paleo": Paleo}
SEARCHED = {"pollux": Pollux, "overlapping": Overlapping}
GROWN = {"boosting": Boosting, "hybrid": Hybrid}
ALL = {**CLOSED, **SEARCHED, **GROWN, "transfer": lambda: Transfer([reference()])}


def forecast(make, setups, times, queries):
    model = make()
    model.fit(setups, times)
    return model.predict(queries)
