"""Mixed precision as a choice of the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cloud._drawn_fleets import AS_NAMED, GIB, a_profile, a_workload, an_offer, exactly
from thrifty.cloud import FleetOptions, HardwareEstimates, Interval, estimate, plan_fleet
from thrifty.cloud._hardware import precision_of
from thrifty.cloud._offer import ACCELERATORS
from thrifty.cloud._probe import Contenders
from thrifty.cloud.planning._table import table_of
from thrifty.core import CloudError


KNOWN = HardwareEstimates(profiled="V100", networks=AS_NAMED, usable_memory=1.0)
ALL = ("float32", "bfloat16", "float16")


def chosen(accelerator, *, allowed=ALL, precision="float32", estimates=KNOWN):
    offer = an_offer(accelerator=accelerator)
    profile = a_profile(precision=precision)
    return precision_of(offer, allowed=allowed, profile=profile, estimates=estimates)


@pytest.mark.parametrize("gpu", ["K80", "M60", "P4", "P100", "B9000"])
def test_a_device_without_units_of_16_bits_trains_in_float32(gpu):
    assert chosen(gpu, estimates=replace(KNOWN, measured_compute={gpu: exactly(1.0)})) == (
        "float32",
        exactly(1.0),
    )


@pytest.mark.parametrize("gpu", ["V100", "T4"])
def test_volta_and_turing_have_no_bfloat16(gpu):
    assert chosen(gpu, allowed=("float32", "bfloat16"))[0] == "float32"
    assert chosen(gpu)[0] == "float16"


def test_every_accelerator_since_volta_trains_in_16_bits():
    before = {"K80", "M60", "P4", "P100"}
    without = {gpu for gpu in ACCELERATORS if chosen(gpu)[0] == "float32"}
    assert without == before
    assert chosen("MI300X", allowed=("float32", "bfloat16"))[0] == "bfloat16"


@pytest.mark.parametrize("gpu", ["V100", "T4", "A100", "L4", "H100"])
def test_a_gain_is_a_wide_interval_that_ends_at_none(gpu):
    _, gain = chosen(gpu)
    assert gain.low < gain.median < gain.high == 1.0
    assert gain.high / gain.low > 3


def test_only_what_is_allowed_is_chosen():
    assert chosen("A100", allowed=None) == ("float32", exactly(1.0))
    assert chosen("A100", allowed=("float32",)) == ("float32", exactly(1.0))
    assert chosen("A100", allowed=("float32", "bfloat16"))[0] == "bfloat16"


def test_a_profile_in_bfloat16_counts_as_measured_on_its_own_device():
    own = HardwareEstimates(profiled="A100")
    assert chosen("A100", allowed=None, precision="bfloat16", estimates=own) == (
        "bfloat16",
        exactly(1.0),
    )
    # A T4 has to train in float32, by how much slower is the inverse of the A100's gain.
    precision, factor = chosen("T4", allowed=None, precision="bfloat16", estimates=own)
    _, gain = chosen("A100", allowed=("float32", "bfloat16"), estimates=own)
    assert precision == "float32"
    assert (factor.median, factor.low, factor.high) == pytest.approx((
        1 / gain.median,
        1 / gain.high,
        1 / gain.low,
    ))


def test_a_probe_measures_in_the_precision_of_the_profile():
    probed = HardwareEstimates(profiled="", measured_compute={"A100": exactly(0.1)})
    assert chosen("A100", allowed=None, precision="bfloat16", estimates=probed) == (
        "bfloat16",
        exactly(1.0),
    )


def test_a_step_by_hand():
    # 16 samples on one V100: 1 + 2 + 0.125 s in float32.
    workload = a_workload(global_batch=16, precisions=ALL)
    fleet = estimate(workload, [(an_offer(), 1, False)], estimates=KNOWN)
    assert fleet.machines[0].precision == "float16"
    assert fleet.step_s.median == pytest.approx(3.125 / 2.5)
    assert fleet.step_s.low == pytest.approx(3.125 / 1.1 / 4.0)
    assert fleet.step_s.high == pytest.approx(3.125 * 1.1)


def test_the_table_chooses_as_the_estimate_does():
    workload = a_workload(precisions=("float32", "bfloat16"))
    catalogue = [an_offer(price_usd_h=1.5), an_offer("a100", accelerator="A100", price_usd_h=4.0)]
    plan = plan_fleet(workload, catalogue, FleetOptions(estimates=KNOWN, max_nodes=4))
    assert {each.machines[0].precision for each in plan.front} == {"float32", "bfloat16"}
    for fleet in plan.front:
        (rented,) = fleet.machines
        machines = [(rented.offer, rented.num, rented.spot)]
        assert estimate(workload, machines, estimates=KNOWN) == fleet


def test_a_plan_says_that_results_differ():
    options = FleetOptions(estimates=KNOWN, deadline_s=1e7)
    mixed, plain = (
        plan_fleet(a_workload(precisions=precisions), [an_offer()], options).notes
        for precisions in (ALL, None)
    )
    assert any("V100 trains in float16, and the step was measured in float32" in n for n in mixed)
    assert not any("float" in note for note in plain)


def test_devices_of_several_types_train_in_one_precision():
    workload = a_workload(precisions=ALL)
    machines = [(an_offer(), 1, False), (an_offer("a100", accelerator="A100"), 1, False)]
    fleet = estimate(workload, machines, estimates=KNOWN)
    assert {each.precision for each in fleet.machines} == {"float32"}


def test_without_the_profile_s_precision_a_step_may_need_twice_the_memory():
    # 16 samples need 5 GiB in float16, and 6 MB of gradients.
    profile = a_profile(precision="float16")
    workload = a_workload(profile=profile, global_batch=16, accumulation="never")
    machines = [
        (an_offer(gpu, accelerator=gpu, accelerator_memory_gib=5.5), 1, False)
        for gpu in ("V100", "P100")
    ]
    assert estimate(workload, machines[:1], estimates=KNOWN).machines[0].precision == "float16"
    with pytest.raises(CloudError, match=r"at least 2\.8 GiB usable"):
        estimate(workload, machines[1:], estimates=KNOWN)
    roomy = replace(machines[1][0], accelerator_memory_gib=10.5)
    assert roomy.device_memory_bytes == 10.5 * GIB
    assert estimate(workload, [(roomy, 1, False)], estimates=KNOWN).machines[0].batch == 16


def test_what_a_probe_would_tell_keeps_the_gain():
    unsure = replace(KNOWN, measured_compute={"V100": Interval(median=1.0, low=0.5, high=2.0)})
    options = FleetOptions(estimates=unsure, deadline_s=1e6, max_nodes=1)
    contenders = Contenders.of(
        table_of(a_workload(precisions=ALL), [an_offer()], options), options.goal
    )
    _, work_s = contenders._works({"compute": ("V100", np.array([1.0]))})
    assert work_s[0, 0, 0, 0] == pytest.approx(contenders.table.work_s[0, 0, 0])


@pytest.mark.parametrize("precisions", [(), ("bfloat16",), ("float32", "float8")])
def test_precisions_that_cannot_be(precisions):
    with pytest.raises(CloudError, match="some of float32, bfloat16, float16, float32 among"):
        a_workload(precisions=precisions)
