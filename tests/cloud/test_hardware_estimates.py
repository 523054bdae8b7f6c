"""Prior estimates for devices and networks that have not been measured."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from thrifty.cloud import ACCELERATORS, HardwareEstimates, Interval, Offer
from thrifty.core import CloudError


names = st.sampled_from(sorted(ACCELERATORS))


def machine(accelerator="V100", **options):
    place = {"cloud": "aws", "region": "us-east-1", "instance_type": "some.type"}
    return Offer(**place, accelerator=accelerator, price_usd_h=1.0, **options)


@given(names)
def test_the_profiled_device_takes_the_profiles_time(name):
    same = Interval(median=1.0, low=1.0, high=1.0)
    assert HardwareEstimates(profiled=name).compute(machine(name)) == same


@given(names, names)
def test_there_and_back_is_the_same_time(here, there):
    out = HardwareEstimates(profiled=here).compute(machine(there)).median
    back = HardwareEstimates(profiled=there).compute(machine(here)).median
    assert out * back == pytest.approx(1.0)


def test_a_faster_device_takes_less_time_and_nobody_knows_how_much():
    factor = HardwareEstimates(profiled="T4").compute(machine("V100"))
    # Speeds are the geometric means of arithmetic and memory speed.
    assert factor.median == pytest.approx(((8.1 * 320) / (15.7 * 900)) ** 0.5)
    assert factor.low == pytest.approx(factor.median / 1.5)
    assert factor.high == pytest.approx(factor.median * 1.5)


def test_twice_the_processors_take_half_the_time():
    estimates = HardwareEstimates(profiled_vcpus=4)
    assert estimates.compute(machine("", vcpus=8)).median == pytest.approx(0.5)
    assert estimates.compute(machine("T4", vcpus=8)).median < 0.1


def test_a_probe_replaces_the_guess():
    measured = Interval(median=0.5, low=0.4, high=0.6)
    estimates = HardwareEstimates(profiled="T4").probed(compute={"V100": measured})
    assert estimates.compute(machine("V100")) == measured
    assert estimates.compute(machine("A100")) == HardwareEstimates(profiled="T4").compute(
        machine("A100")
    )
    network = estimates.probed(network={"some.type": measured})
    assert network.network(machine()) == measured
    assert network.compute(machine("V100")) == measured
    later = network.probed(network={"other.type": measured}, compute={"T4": measured})
    assert later.network(machine()) == later.compute(machine("V100")) == measured


def test_processors_are_measured_by_the_type_of_machine():
    measured = Interval(median=0.5, low=0.4, high=0.6)
    estimates = HardwareEstimates().probed(compute={"some.type": measured})
    assert estimates.compute(machine("")) == measured
    assert estimates.compute(machine("T4")).median != 0.5


def test_a_network_is_as_fast_as_it_always_is():
    link = HardwareEstimates().link(machine(baseline_gbps=10.0, peak_gbps=25.0))
    assert link.bytes_per_s == pytest.approx(1.25e9)
    assert link.inner_bytes_per_s == pytest.approx(60e9)
    assert HardwareEstimates().link(machine(peak_gbps=25.0)).bytes_per_s == pytest.approx(
        3.125e9
    )
    assert HardwareEstimates().link(machine("")).bytes_per_s == pytest.approx(0.625e9)


@pytest.mark.parametrize(
    ("gbps", "low", "high"),
    [
        ({"baseline_gbps": 10.0, "peak_gbps": 10.0}, 0.8, 1.25),
        ({"baseline_gbps": 10.0}, 0.8, 1.25),
        ({"baseline_gbps": 5.0, "peak_gbps": 10.0}, 0.4, 1.25),
        # only "up to" is known: perhaps much slower, never faster
        ({"peak_gbps": 10.0}, 0.8, 6.25),
        ({}, 0.16, 6.25),
    ],
)
def test_a_network_is_the_less_known_the_less_its_name_says(gbps, low, high):
    factor = HardwareEstimates().network(machine(**gbps))
    assert (factor.median, factor.low, factor.high) == pytest.approx((1.0, low, high))


@pytest.mark.parametrize(
    ("estimates", "accelerator"),
    [(HardwareEstimates(), "V1000"), (HardwareEstimates(profiled="V1000"), "V100")],
)
def test_devices_that_nobody_knows(estimates, accelerator):
    with pytest.raises(
        CloudError, match=r"how fast 'V1000' is, is not known: measure it.*A100"
    ):
        estimates.compute(machine(accelerator))


def test_processors_that_nobody_has_counted():
    with pytest.raises(CloudError, match="how many it has is not known: add vCPUs"):
        HardwareEstimates().compute(machine(""))
