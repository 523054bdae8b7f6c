"""Small catalogues and workloads, fixed and drawn."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import settings, strategies as st

from thrifty.cloud import (
    HardwareEstimates,
    Interval,
    NetworkPriors,
    Offer,
    UncertaintyFactor,
    Workload,
)
from thrifty.perf import PackCurve, StepProfile


# Run the same examples each time.
drawn = settings(deadline=None, derandomize=True, database=None)

GIB = 2**30


def a_profile(**changes):
    """Return a profile of 0.25 s plus 1/16 s a sample, split into thirds, with exact numbers."""
    return StepProfile(**{
        "device": "here",
        "batches": (4, 8),
        "forward_s": (0.25, 0.5),
        "backward_s": (0.5, 1.0),
        "optimizer_s": 0.125,
        "peak_bytes": (2.0 * GIB, 3.0 * GIB),
        "bucket_bytes": (1e6, 5e6),
        "bucket_ready": (0.5, 1.0),
        "peak_error": 0.0,
        **changes,
    })


def a_workload(*, profile=None, **changes):
    return Workload(**{
        "profile": profile or a_profile(),
        "steps": 1000,
        "global_batch": 32,
        **changes,
    })


def an_offer(name="v1", **changes):
    return Offer(**{
        "cloud": "aws",
        "region": "east",
        "instance_type": name,
        "accelerator": "V100",
        "accelerator_memory_gib": 16.0,
        "price_usd_h": 3.0,
        "baseline_gbps": 10.0,
        **changes,
    })


def exactly(value):
    return Interval(median=value, low=value, high=value)


AS_NAMED = NetworkPriors(
    tcp_share=1.0,
    tcp_gbps=math.inf,
    fabric_share=1.0,
    linked_share=1.0,
    pcie_gb_s=10.0,
    pcie_contention=0.0,
    **dict.fromkeys(
        ("tcp", "fabric", "linked", "pcie"), UncertaintyFactor(faster=1.25, slower=1.25)
    ),
    step=UncertaintyFactor(faster=1.0, slower=1.0),
    straggling=exactly(0.0),
    widths={},
)
"""Networks as fast as their names say, and steps that are what the replay says."""

ESTIMATES = HardwareEstimates(
    profiled="V100",
    networks=AS_NAMED,
    measured_compute={
        "V100": exactly(1.0),
        "T4": Interval(median=3.0, low=2.0, high=3.5),
        "A10": Interval(median=0.75, low=0.5, high=1.0),
    },
    measured_network={"t4": Interval(median=1.0, low=0.5, high=4.0)},
    measured_inner={"t4": Interval(median=1.5, low=0.75, high=2.0)},
    usable_memory=0.9375,
)

offers = st.builds(
    an_offer,
    st.sampled_from(["v1", "t4", "big"]),
    accelerator=st.sampled_from(["V100", "T4", "A10"]),
    accelerator_count=st.sampled_from([1, 2, 4]),
    accelerator_memory_gib=st.sampled_from([None, 1.0, 2.5, 16.0]),
    region=st.sampled_from(["east", "west"]),
    price_usd_h=st.sampled_from([None, 0.5, 1.0, 3.0, 7.0]),
    spot_usd_h=st.sampled_from([0.25, 0.5, 2.0]),
    baseline_gbps=st.sampled_from([None, 1.0, 10.0]),
    peak_gbps=st.sampled_from([None, 25.0]),
)

profiles = st.builds(
    a_profile,
    bucket_bytes=st.sampled_from([(0.0, 0.0), (1e6, 5e6), (1e9, 2e9)]),
    peak_error=st.sampled_from([0.0, 0.25]),
    sample_input_s=st.sampled_from([0.0, 0.01, 1.0]),
    overhead_s=st.sampled_from([0.0, 0.5]),
)

PACKS = PackCurve(backend="fused", step_s={1: 0.5, 2: 0.625, 3: 1.0}, memory_bytes={1: 2e9, 2: 3e9})

workloads = st.builds(
    a_workload,
    profile=profiles,
    global_batch=st.sampled_from([3, 16, 37]),
    state_bytes=st.sampled_from([0.0, 1e9]),
    setup_s=st.sampled_from([0.0, 180.0]),
    accumulation=st.sampled_from(["allowed", "never"]),
    precisions=st.sampled_from([None, ("float32", "bfloat16")]),
    parallelism_phases=st.sampled_from([None, None, ((1, 100), (5, 50), (2, 30))]),
).flatmap(
    lambda some: st.sampled_from(
        [some] if some.parallelism_phases is None else [some, replace(some, packs=PACKS)]
    )
)


class History:
    """Price and evictions of spot machines by instance type."""

    def __init__(self, **known):
        self.known = known

    def spot_usd_h(self, offer):
        return self.known[offer.instance_type][0]

    def evictions_per_h(self, offer):
        return self.known[offer.instance_type][1]
